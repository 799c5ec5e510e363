// The part of the Python module that knows pages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "module.h"

namespace kvilt {
namespace {

Pages layer_of(int dtype, int64_t pages, int64_t page_tokens, int64_t kv_heads, int64_t dim, int64_t value_dim,
               Address data, int64_t layers, int64_t layer) {
  if (dtype < 0 || dtype > 3 || pages < 0 || page_tokens < 1 || page_tokens > kTileLanes || kv_heads < 1 || dim < 1 ||
      value_dim < 0 || layer < 0 || layer >= layers)
    throw std::invalid_argument("these are not the sizes of pages");
  const Pages one(static_cast<Stored>(dtype), pages, page_tokens, kv_heads, dim, value_dim, nullptr, 0);
  const int64_t bytes = kv_heads * one.head_bytes;
  return Pages(one.dtype, pages, page_tokens, kv_heads, dim, value_dim, at<char>(data) + layer * bytes, layers * bytes);
}

Turn turn_of(Address cos, Address sin, int64_t pairs, bool interleaved) {
  return {at<const float>(cos), at<const float>(sin), pairs, interleaved};
}

std::vector<SlotsArgs> slots_of(const std::vector<const Pages*>& layers, Address slots, int64_t tokens, Address keys,
                                Address values, Address key_scales, Address value_scales) {
  std::vector<SlotsArgs> all;
  for (const Pages* layer : layers) {
    const Pages& pages = *layer;
    const int64_t rows = int64_t(all.size()) * tokens * pages.kv_heads, size = number_bytes(pages.dtype);
    all.push_back({pages, at<const int64_t>(slots), tokens, at<char>(keys) + rows * pages.dim * size,
                   at<char>(values) + rows * pages.value_dim * size, at<float>(key_scales) + rows,
                   at<float>(value_scales) + rows});
  }
  return all;
}

}  // namespace

void bind_pages(nb::module_& m, nb::class_<Engine>& engine) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("advise", [](Address data, int64_t bytes) { advise(at<void>(data), bytes); });
  m.def("head_bytes", [](int dtype, int64_t page_tokens, int64_t dim, int64_t value_dim) {
    return layer_of(dtype, 1, page_tokens, 1, dim, value_dim, 0, 1, 0).head_bytes;
  });
  nb::class_<Pages>(m, "PageLayer").def(nb::new_(&layer_of));
  engine
      .def("rotate", [](Engine& e, Address x, Address cos, Address sin, int64_t tokens, int64_t heads, int64_t dim,
                        int64_t pairs, bool interleaved, Address out) {
        const RotateArgs args{at<const float>(x), turn_of(cos, sin, pairs, interleaved), tokens, heads, dim, at<float>(out)};
        e.perform([=, &e] { e.rotate(args); });
      }, Release())
      .def("write", [](Engine& e, const Pages& p, Address slots, int64_t tokens, Address keys, Address values,
                       Address cos, Address sin, int64_t pairs, bool interleaved) {
        const WriteArgs args{p, at<const int64_t>(slots), tokens, at<const float>(keys), at<const float>(values),
                             turn_of(cos, sin, pairs, interleaved)};
        e.perform([=, &e] { e.write(args); });
      }, Release())
      .def("follow", [](Engine& e, const Pages& p, Address slots, int64_t tokens, int dtype, int64_t text, Address keys,
                        Address values, Address which, Address leaders, int64_t count, Address weights,
                        Address new_keys, Address new_values, Address cos, Address sin, int64_t pairs,
                        bool interleaved) {
        if (dtype < 0 || dtype > 2) throw std::invalid_argument("a text is kept in floats of some width");
        const FollowArgs args{p, at<const int64_t>(slots), tokens, static_cast<Stored>(dtype), text,
                              at<const void>(keys), at<const void>(values), at<const int64_t>(which),
                              at<const int64_t>(leaders), count, at<const float>(weights), at<const float>(new_keys),
                              at<const float>(new_values), turn_of(cos, sin, pairs, interleaved)};
        e.perform([=, &e] { e.follow(args); });
      }, Release())
      .def("attend", [](Engine& e, Address query, int64_t heads, const Pages& p, Address tables, int64_t width,
                        std::vector<int64_t> starts, Address positions, float scale, int64_t window, float soft_cap,
                        Address out) {
        const AttendArgs args{at<const float>(query), heads, p, at<const int64_t>(tables), width, std::move(starts),
                              at<const int64_t>(positions), Mask{scale, window, soft_cap}, at<float>(out)};
        e.perform([=, &e] { e.attend(args); });
      }, Release())
      .def("read_slots", [](Engine& e, const std::vector<const Pages*>& layers, Address slots, int64_t tokens,
                            Address keys, Address values, Address key_scales, Address value_scales) {
        e.read_slots(slots_of(layers, slots, tokens, keys, values, key_scales, value_scales));
      }, Release())
      .def("write_slots", [](Engine& e, const std::vector<const Pages*>& layers, Address slots, int64_t tokens,
                             Address keys, Address values, Address key_scales, Address value_scales) {
        e.write_slots(slots_of(layers, slots, tokens, keys, values, key_scales, value_scales));
      }, Release());
}

}  // namespace kvilt
