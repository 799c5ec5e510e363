// The Python module: addresses and sizes in, work done, the interpreter lock released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "limits.h"
#include "module.h"
#include "packed.h"

using namespace kvilt;

namespace {

struct Weight {
  int kind;
  int64_t outputs, inputs;
  Address data;
  int64_t bytes;

  Packed packed() const {
    const Packed w{static_cast<Kind>(kind), outputs, inputs, at<const uint8_t>(data)};
    if (kind < 0 || kind >= kKinds || outputs <= 0 || inputs <= 0 || bytes != w.tiles() * tile_bytes(w.kind, inputs))
      throw std::invalid_argument("these are not the bytes of a packed weight");
    return w;
  }
};

}  // namespace

NB_MODULE(_kvilt_native, m) {
  m.doc() = "kvilt's native CPU kernels";
  m.attr("REVISION") = kRevision;
  m.def("available_isas", &available_isas);
  m.def("limits", [](int threads, int64_t bytes) {
    Limits found{};
    {
      nb::gil_scoped_release release;
      found = measure_limits(threads, bytes);
    }
    return nb::make_tuple(found.bytes_per_s, found.ops_per_s);
  });
  m.def("packed", [](const std::string& format, int64_t outputs, int64_t inputs) -> std::optional<std::pair<int, int64_t>> {
    const Packing* packing = find_packing(format);
    if (!packing) return std::nullopt;
    return std::pair{int(packing->kind), (outputs + kTile - 1) / kTile * tile_bytes(packing->kind, inputs)};
  });
  nb::class_<Program>(m, "Program")
      .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
      .def("loop", [](const Program& p, int64_t steps, Address ids, int64_t rows,
                      const std::vector<std::vector<int64_t>>& ends, Address out) {
        if (int64_t(ends.size()) != rows) throw std::invalid_argument("each row has its own ends");
        return p.loop(steps, at<const int64_t>(ids), rows, ends, at<int64_t>(out));
      }, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Weight>(m, "Weight").def(nb::init<int, int64_t, int64_t, Address, int64_t>());
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Engine> engine(m, "Engine");
  engine.def(nb::init<int, const std::string&>())
      .def_prop_ro("isa", [](const Engine& e) { return std::string(e.isa()); })
      .def_prop_ro("threads", &Engine::threads)
      .def("record", &Engine::record)
      .def("recorded", &Engine::recorded)
      .def("stop", &Engine::stop)
      .def("pack", [](Engine& e, const std::string& format, Address source, int64_t source_bytes, int64_t outputs,
                      int64_t inputs, Address out, int64_t out_bytes) {
        const Packing* packing = find_packing(format);
        const int64_t row_bytes = packing ? inputs / packing->elements * packing->bytes : 0;
        const int64_t tiles = (outputs + kTile - 1) / kTile;
        if (!packing || inputs % packing->elements || source_bytes != outputs * row_bytes ||
            out_bytes != tiles * tile_bytes(packing->kind, inputs))
          throw std::invalid_argument("these are not the bytes of a weight in " + format);
        e.pack(*packing, at<const uint8_t>(source), row_bytes, outputs, inputs, at<uint8_t>(out));
      }, Release())
      .def("linears", [](Engine& e, const std::vector<const Weight*>& weights, const std::vector<Address>& biases,
                         const std::vector<Address>& ontos, const std::vector<Address>& outs, Address x, int64_t rows) {
        if (weights.empty() || biases.size() != weights.size() || outs.size() != weights.size() ||
            ontos.size() != weights.size())
          throw std::invalid_argument("one bias and one output belong to each weight");
        std::vector<Product> products;
        for (size_t i = 0; i < weights.size(); ++i)
          products.push_back({weights[i]->packed(), {at<const float>(biases[i]), at<const float>(ontos[i]), at<float>(outs[i])}});
        e.perform([=, &e] { e.linears(products, at<const float>(x), rows); });
      }, Release())
      .def("gated", [](Engine& e, const Weight& gate, Address gate_bias, const Weight& up, Address up_bias, Address x,
                       int64_t rows, int activation, Address out) {
        const Product a{gate.packed(), {at<const float>(gate_bias), nullptr, nullptr}};
        const Product b{up.packed(), {at<const float>(up_bias), nullptr, nullptr}};
        e.perform([=, &e] { e.gated(a, b, at<const float>(x), rows, activation, at<float>(out)); });
      }, Release())
      .def("embed", [](Engine& e, const Weight& w, Address ids, int64_t count, float scale, Address out) {
        const Packed packed = w.packed();
        e.perform([=, &e] { e.embed(packed, at<const int64_t>(ids), count, scale, at<float>(out)); });
      }, Release())
      .def("rms_norm", [](Engine& e, Address x, Address weight, float eps, int64_t rows, int64_t n, Address out) {
        e.perform([=, &e] { e.rms_norm(at<const float>(x), at<const float>(weight), eps, rows, n, at<float>(out)); });
      }, Release())
      .def("add", [](Engine& e, Address a, Address b, int64_t n, Address out) {
        e.perform([=, &e] { e.add(at<const float>(a), at<const float>(b), n, at<float>(out)); });
      }, Release())
      .def("soft_cap", [](Engine& e, Address x, int64_t n, float cap) {
        e.perform([=, &e] { e.soft_cap(at<float>(x), n, cap); });
      }, Release())
      .def("argmax", [](Engine& e, Address x, int64_t rows, int64_t n, Address out) {
        e.perform([=, &e] { e.argmax(at<const float>(x), rows, n, at<int64_t>(out)); });
      }, Release())
      .def("rotation", [](Engine& e, Address positions, int64_t tokens, Address radians, int64_t pairs, float growth,
                          Address cos, Address sin) {
        e.perform([=, &e] {
          e.rotation(at<const int64_t>(positions), tokens, at<const float>(radians), pairs, growth, at<float>(cos),
                     at<float>(sin));
        });
      }, Release())
      .def("advance", [](Engine& e, Address positions, int64_t rows, const std::vector<Address>& slots,
                         const std::vector<Address>& tables, int64_t width, int64_t page_tokens) {
        if (slots.size() != tables.size()) throw std::invalid_argument("one table belongs to each group's slots");
        Cursor cursor{rows, at<int64_t>(positions), {}, {}, width, page_tokens};
        for (size_t i = 0; i < slots.size(); ++i) {
          cursor.slots.push_back(at<int64_t>(slots[i]));
          cursor.tables.push_back(at<const int64_t>(tables[i]));
        }
        e.perform([=, &e] { e.advance(cursor); });
      }, Release());
  bind_pages(m, engine);
  bind_reduce(engine);
  bind_lora(engine);
}
