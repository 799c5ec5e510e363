// The Python module: addresses and sizes in, work done, the interpreter lock released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "engine.h"
#include "limits.h"

namespace nb = nanobind;
using namespace kvilt;

namespace {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

struct Weight {
  int kind;
  int64_t outputs, inputs;
  Address data;
  int64_t bytes;

  Packed packed() const {
    const Packed w{static_cast<Kind>(kind), outputs, inputs, at<const uint8_t>(data)};
    const int64_t needed = w.kind == Kind::kFloat ? w.tiles() * inputs * kTile * 4 : w.tiles() * w.blocks() * w.block_bytes();
    if (kind < 0 || kind > 5 || outputs <= 0 || inputs <= 0 || bytes != needed)
      throw std::invalid_argument("these are not the bytes of a packed weight");
    return w;
  }
};

struct PageLayer {
  int dtype;
  int64_t page_tokens, lanes, kv_heads, dim, value_dim;
  Address keys, values;

  Pages pages() const {
    return {dtype, page_tokens, lanes, kv_heads, dim, value_dim, at<const void>(keys), at<const void>(values)};
  }
};

}  // namespace

NB_MODULE(_kvilt_native, m) {
  m.doc() = "kvilt's native CPU kernels";
  m.def("available_isas", &available_isas);
  m.def("limits", [](int threads, int64_t bytes) {
    Limits found{};
    {
      nb::gil_scoped_release release;
      found = measure_limits(threads, bytes);
    }
    return nb::make_tuple(found.bytes_per_s, found.ops_per_s);
  });
  nb::class_<Weight>(m, "Weight").def(nb::init<int, int64_t, int64_t, Address, int64_t>());
  nb::class_<PageLayer>(m, "PageLayer").def(nb::init<int, int64_t, int64_t, int64_t, int64_t, int64_t, Address, Address>());
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int, const std::string&>())
      .def_prop_ro("isa", [](const Engine& e) { return std::string(e.isa()); })
      .def_prop_ro("threads", &Engine::threads)
      .def("linears", [](Engine& e, const std::vector<const Weight*>& weights, const std::vector<Address>& biases,
                         const std::vector<Address>& outs, Address x, int64_t rows) {
        if (weights.empty() || biases.size() != weights.size() || outs.size() != weights.size())
          throw std::invalid_argument("one bias and one output belong to each weight");
        std::vector<Product> products;
        for (size_t i = 0; i < weights.size(); ++i)
          products.push_back({weights[i]->packed(), at<const float>(biases[i]), at<float>(outs[i])});
        e.linears(products, at<const float>(x), rows);
      }, Release())
      .def("embed", [](Engine& e, const Weight& w, Address ids, int64_t count, Address out) {
        e.embed(w.packed(), at<const int64_t>(ids), count, at<float>(out));
      }, Release())
      .def("rms_norm", [](Engine& e, Address x, Address weight, float eps, int64_t rows, int64_t n, Address out) {
        e.rms_norm(at<const float>(x), at<const float>(weight), eps, rows, n, at<float>(out));
      }, Release())
      .def("gate", [](Engine& e, Address gate, Address up, int64_t n, int activation, Address out) {
        e.gate(at<const float>(gate), at<const float>(up), n, activation, at<float>(out));
      }, Release())
      .def("rotate", [](Engine& e, Address x, Address cos, Address sin, int64_t tokens, int64_t heads, int64_t dim,
                        int64_t pairs, bool interleaved, Address out) {
        e.rotate(at<const float>(x), at<const float>(cos), at<const float>(sin), tokens, heads, dim, pairs, interleaved,
                 at<float>(out));
      }, Release())
      .def("write", [](Engine& e, const PageLayer& p, Address slots, int64_t tokens, Address keys, Address values) {
        e.write(p.pages(), at<const int64_t>(slots), tokens, at<const float>(keys), at<const float>(values));
      }, Release())
      .def("attend", [](Engine& e, Address query, int64_t heads, const PageLayer& p, Address tables, int64_t width,
                        const std::vector<int64_t>& starts, Address positions, float scale, int64_t window,
                        float soft_cap, Address out) {
        e.attend(at<const float>(query), heads, p.pages(), at<const int64_t>(tables), width, starts.data(),
                 int64_t(starts.size()) - 1, at<const int64_t>(positions), Mask{scale, window, soft_cap}, at<float>(out));
      }, Release());
}
