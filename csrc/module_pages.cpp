// The part of the Python module that knows pages. Attention and writing take checked addresses, the rest takes arrays.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "module.h"

namespace kvilt {
namespace {

// One layer of the pages as Python holds it: their bytes, kept alive, and where the layer lies in them.
struct PageLayer {
  Array<uint8_t, 2> data;
  Pages pages;
};

Pages check_sizes(KVDtype dtype, int64_t page_tokens, int64_t kv_heads, int64_t dim, int64_t value_dim) {
  const bool possible = page_tokens >= 1 && page_tokens <= kTileLanes && kv_heads >= 1 && dim >= 1 && value_dim >= 0 &&
                        !(has_nibbles(dtype) && value_dim % 2);
  check(possible, "these are not the sizes of pages");
  return Pages(dtype, 1, page_tokens, kv_heads, dim, value_dim, nullptr, 0);
}

int64_t head_bytes(KVDtype dtype, int64_t page_tokens, int64_t dim, int64_t value_dim) {
  return check_sizes(dtype, page_tokens, 1, dim, value_dim).head_bytes;
}

// `data` is [pages][bytes of all layers].
PageLayer layer_of(KVDtype dtype, const Array<uint8_t, 2>& data, int64_t page_tokens, int64_t kv_heads, int64_t dim,
                   int64_t value_dim, int64_t layers, int64_t layer) {
  const int64_t bytes = kv_heads * check_sizes(dtype, page_tokens, kv_heads, dim, value_dim).head_bytes;
  const bool fits = layer >= 0 && layer < layers && extent(data, 1) == layers * bytes;
  check(fits, "these are not the sizes of pages");
  char* first = reinterpret_cast<char*>(data.data()) + layer * bytes;
  return {data, Pages(dtype, extent(data, 0), page_tokens, kv_heads, dim, value_dim, first, layers * bytes)};
}

Rotation rotation_of(Address cos, Address sin, int64_t pairs, bool interleaved) {
  return {at<const float>(cos), at<const float>(sin), pairs, interleaved};
}

void rotate(KernelRunner& r, Address x, Address cos, Address sin, int64_t tokens, int64_t heads, int64_t dim,
            int64_t pairs, bool interleaved, Address out) {
  const RotateArgs args{at<const float>(x), rotation_of(cos, sin, pairs, interleaved), tokens, heads, dim,
                        at<float>(out)};
  r.run_and_record([=, &r] { r.rotate(args); });
}

void write(KernelRunner& r, const PageLayer& layer, Address slots, int64_t tokens, Address keys, Address values,
           Address cos, Address sin, int64_t pairs, bool interleaved) {
  const WriteArgs args{layer.pages,           at<const int64_t>(slots), tokens,
                       at<const float>(keys), at<const float>(values),  rotation_of(cos, sin, pairs, interleaved)};
  r.run_and_record([=, &r] { r.write(args); });
}

void interpolate(KernelRunner& r, const PageLayer& layer, Address slots, int64_t tokens, KVDtype dtype,
                 int64_t document, Address keys, Address values, Address interpolated, Address anchors, int64_t count,
                 Address weights, Address new_keys, Address new_values, Address cos, Address sin, int64_t pairs,
                 bool interleaved) {
  check(!is_scaled(dtype), "a document is kept in floats of some width");
  const InterpolateArgs args{layer.pages,
                             at<const int64_t>(slots),
                             tokens,
                             dtype,
                             document,
                             at<const void>(keys),
                             at<const void>(values),
                             at<const int64_t>(interpolated),
                             at<const int64_t>(anchors),
                             count,
                             at<const float>(weights),
                             at<const float>(new_keys),
                             at<const float>(new_values),
                             rotation_of(cos, sin, pairs, interleaved)};
  r.run_and_record([=, &r] { r.interpolate(args); });
}

void attention(KernelRunner& r, Address query, int64_t heads, const PageLayer& layer, Address tables, int64_t width,
               std::vector<int64_t> starts, Address positions, float scale, int64_t window, float soft_cap,
               bool chunked, Address sinks, Address out) {
  check(window >= 0 && (window > 0 || !chunked), "a window has a length");
  const AttentionArgs args{at<const float>(query),
                           heads,
                           layer.pages,
                           at<const int64_t>(tables),
                           width,
                           std::move(starts),
                           at<const int64_t>(positions),
                           Mask{scale, window, soft_cap, chunked},
                           at<const float>(sinks),
                           at<float>(out)};
  r.run_and_record([=, &r] { r.attention(args); });
}

// Over pages whose keys go on in their values: queries have numbers for both.
void latent_attention(KernelRunner& r, Address query, int64_t heads, const PageLayer& layer, Address tables,
                      int64_t width, std::vector<int64_t> starts, Address positions, float scale, Address out) {
  check(!has_nibbles(layer.pages.dtype), "values that are keys as well have more than 4 bits");
  AttentionArgs args{at<const float>(query),
                     heads,
                     layer.pages,
                     at<const int64_t>(tables),
                     width,
                     std::move(starts),
                     at<const int64_t>(positions),
                     Mask{scale, 0, 0, false},
                     nullptr,
                     at<float>(out)};
  args.pages.latent = true;
  r.run_and_record([=, &r] { r.attention(args); });
}

// ---- KV in canonical order ----

nb::dlpack::dtype number_of(KVDtype dtype) {
  switch (dtype) {
    case KVDtype::kFloat32: return nb::dtype<float>();
    case KVDtype::kFloat16: return {uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    case KVDtype::kBfloat16: return {uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
    default: return nb::dtype<int8_t>();
  }
}

nb::dlpack::dtype value_of(KVDtype dtype) { return has_nibbles(dtype) ? nb::dtype<uint8_t>() : number_of(dtype); }

// All layers of some slots: keys and values [layers][tokens][kv_heads][dim] in the pages' own dtype (values of 4 bits
// two to a byte), and for bytes the scales [layers][tokens][kv_heads]; scales of other dtypes are not looked at.
std::vector<SlotsArgs> slots_of(const std::vector<const PageLayer*>& layers, const Array<const int64_t, 1>& slots,
                                const AnyArray<4>& keys, const AnyArray<4>& values,
                                const nb::ndarray<float, nb::c_contig, nb::device::cpu>& key_scales,
                                const nb::ndarray<float, nb::c_contig, nb::device::cpu>& value_scales) {
  std::vector<SlotsArgs> all;
  const int64_t tokens = extent(slots, 0), count = int64_t(layers.size());
  for (const PageLayer* layer : layers) {
    const Pages& pages = layer->pages;
    const auto fits = [&](const AnyArray<4>& array, nb::dlpack::dtype number, int64_t dim) {
      return array.dtype() == number && extent(array, 0) == count && extent(array, 1) == tokens &&
             extent(array, 2) == pages.kv_heads && extent(array, 3) == dim;
    };
    const int64_t scales = is_scaled(pages.dtype) ? count * tokens * pages.kv_heads : 0;
    const int64_t size = number_bytes(pages.dtype), width = has_nibbles(pages.dtype) ? 2 : 1;
    const bool right = fits(keys, number_of(pages.dtype), pages.dim) &&
                       fits(values, value_of(pages.dtype), pages.value_dim / width) &&
                       int64_t(key_scales.size()) == scales && int64_t(value_scales.size()) == scales;
    check(right, "these are not the keys and values of the pages' slots");
    const int64_t rows = int64_t(all.size()) * tokens * pages.kv_heads;
    all.push_back({pages, slots.data(), tokens, static_cast<char*>(keys.data()) + rows * pages.dim * size,
                   static_cast<char*>(values.data()) + rows * pages.canonical_bytes(), key_scales.data() + rows,
                   value_scales.data() + rows});
  }
  return all;
}

template <void (KernelRunner::*kMove)(const std::vector<SlotsArgs>&)>
void move_slots(KernelRunner& r, const std::vector<const PageLayer*>& layers, const Array<const int64_t, 1>& slots,
                const AnyArray<4>& keys, const AnyArray<4>& values,
                const nb::ndarray<float, nb::c_contig, nb::device::cpu>& key_scales,
                const nb::ndarray<float, nb::c_contig, nb::device::cpu>& value_scales) {
  (r.*kMove)(slots_of(layers, slots, keys, values, key_scales, value_scales));
}

}  // namespace

void bind_pages(nb::module_& m, nb::class_<KernelRunner>& runner) {
  m.def(
      "use_huge_pages", [](const Array<uint8_t, 2>& data) { use_huge_pages(data.data(), int64_t(data.nbytes())); },
      array());
  m.def("head_bytes", &head_bytes);
  nb::class_<PageLayer>(m, "PageLayer")
      .def(nb::new_(&layer_of), plain(), array(), plain(), plain(), plain(), plain(), plain(), plain());
  runner.def("rotate", &rotate, Release())
      .def("write", &write, Release())
      .def("interpolate", &interpolate, Release())
      .def("attention", &attention, Release())
      .def("latent_attention", &latent_attention, Release())
      .def("read_slots", &move_slots<&KernelRunner::read_slots>, Release(), plain(), array(), array(), array(), array(),
           array())
      .def("write_slots", &move_slots<&KernelRunner::write_slots>, Release(), plain(), array(), array(), array(),
           array(), array());
}

}  // namespace kvilt
