// The part of the Python module that multiplies, adds and norms. Inside of steps: it takes checked addresses.
#include <nanobind/stl/vector.h>

#include "weight.h"

namespace kvilt {
namespace {

void linears(KernelRunner& r, const std::vector<const Weight*>& weights, const std::vector<Address>& biases,
             const std::vector<Address>& residuals, const std::vector<Address>& outs, Address x, int64_t rows) {
  const size_t count = weights.size();
  const bool paired = count > 0 && biases.size() == count && residuals.size() == count && outs.size() == count;
  check(paired, "one bias and one output belong to each weight");
  std::vector<LinearMap> maps;
  for (size_t i = 0; i < count; ++i)
    maps.push_back(
        {weights[i]->packed, {at<const float>(biases[i]), at<const float>(residuals[i]), at<float>(outs[i])}});
  r.run_and_record([=, &r] { r.linears(maps, at<const float>(x), rows); });
}

void gate_up(KernelRunner& r, const Weight& gate, Address gate_bias, const Weight& up, Address up_bias, Address x,
             int64_t rows, Activation activation, Address out) {
  const LinearMap a{gate.packed, {at<const float>(gate_bias), nullptr, nullptr}};
  const LinearMap b{up.packed, {at<const float>(up_bias), nullptr, nullptr}};
  r.run_and_record([=, &r] { r.gate_up(a, b, at<const float>(x), rows, activation, at<float>(out)); });
}

void embed(KernelRunner& r, const Weight& weight, Address ids, int64_t count, float scale, Address out) {
  const PackedWeight packed = weight.packed;
  r.run_and_record([=, &r] { r.embed(packed, at<const int64_t>(ids), count, scale, at<float>(out)); });
}

void rms_norm(KernelRunner& r, Address x, Address weight, float eps, int64_t rows, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.rms_norm(at<const float>(x), at<const float>(weight), eps, rows, n, at<float>(out)); });
}

void layer_norm(KernelRunner& r, Address x, Address weight, Address bias, float eps, int64_t rows, int64_t n,
                Address out) {
  r.run_and_record([=, &r] {
    r.layer_norm(at<const float>(x), at<const float>(weight), at<const float>(bias), eps, rows, n, at<float>(out));
  });
}

void add_scaled(KernelRunner& r, Address a, Address b, float scale, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.add_scaled(at<const float>(a), at<const float>(b), scale, n, at<float>(out)); });
}

void scale_queries(KernelRunner& r, Address x, Address positions, int64_t tokens, int64_t n, float beta, int64_t length,
                   int64_t offset, Address out) {
  check(length > 0, "a temperature grows every so many positions");
  r.run_and_record([=, &r] {
    r.scale_queries(at<const float>(x), at<const int64_t>(positions), tokens, n, beta, length, offset, at<float>(out));
  });
}

void per_head_linear(KernelRunner& r, Address x, int64_t tokens, int64_t heads, int64_t inputs, int64_t moved,
                     Address weight, WeightKind kind, int64_t outputs, Address out) {
  check(kind <= WeightKind::kBfloat16, "projections of single heads are floats of some width");
  const PerHeadArgs args{at<const float>(x),     tokens, heads,   inputs,        moved,
                         at<const void>(weight), kind,   outputs, at<float>(out)};
  r.run_and_record([=, &r] { r.per_head_linear(args); });
}

void add(KernelRunner& r, Address a, Address b, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.add(at<const float>(a), at<const float>(b), n, at<float>(out)); });
}

void soft_cap(KernelRunner& r, Address x, int64_t n, float cap) {
  r.run_and_record([=, &r] { r.soft_cap(at<float>(x), n, cap); });
}

void argmax(KernelRunner& r, Address x, int64_t rows, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.argmax(at<const float>(x), rows, n, at<int64_t>(out)); });
}

void rope_cos_sin(KernelRunner& r, Address positions, int64_t tokens, Address inv_freq, int64_t pairs, float mscale,
                  Address cos, Address sin) {
  r.run_and_record([=, &r] {
    r.rope_cos_sin(at<const int64_t>(positions), tokens, at<const float>(inv_freq), pairs, mscale, at<float>(cos),
                   at<float>(sin));
  });
}

void advance(KernelRunner& r, Address positions, int64_t rows, const std::vector<Address>& slots,
             const std::vector<Address>& tables, int64_t width, int64_t page_tokens) {
  check(slots.size() == tables.size(), "one table belongs to each group's slots");
  DecodeState state{rows, at<int64_t>(positions), {}, {}, width, page_tokens};
  for (size_t i = 0; i < slots.size(); ++i) {
    state.slots.push_back(at<int64_t>(slots[i]));
    state.tables.push_back(at<const int64_t>(tables[i]));
  }
  r.run_and_record([=, &r] { r.advance(state); });
}

}  // namespace

void bind_steps(nb::class_<KernelRunner>& runner) {
  runner.def("linears", &linears, Release())
      .def("gate_up", &gate_up, Release())
      .def("embed", &embed, Release())
      .def("rms_norm", &rms_norm, Release())
      .def("layer_norm", &layer_norm, Release())
      .def("per_head_linear", &per_head_linear, Release())
      .def("add", &add, Release())
      .def("add_scaled", &add_scaled, Release())
      .def("scale_queries", &scale_queries, Release())
      .def("soft_cap", &soft_cap, Release())
      .def("argmax", &argmax, Release())
      .def("rope_cos_sin", &rope_cos_sin, Release())
      .def("advance", &advance, Release());
}

}  // namespace kvilt
