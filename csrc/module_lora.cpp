// The part of the Python module for adapters. Inside of steps: it takes checked addresses.
#include <nanobind/stl/vector.h>

#include "module.h"

namespace kvilt {
namespace {

void add_lora(KernelRunner& r, const std::vector<Address>& tables, const std::vector<int64_t>& outputs,
              const std::vector<Address>& outs, Address x, int64_t rows, int64_t inputs, Address slots, Address scales,
              int64_t slot_count) {
  const bool paired = tables.size() == outputs.size() && outs.size() == tables.size() && inputs >= 1;
  check(paired, "one table and one output belong to each linear map");
  LoraArgs args{{}, at<const float>(x), rows, inputs, at<const int64_t>(slots), at<const float>(scales), slot_count};
  for (size_t i = 0; i < tables.size(); ++i)
    args.maps.push_back({at<const LowRank>(tables[i]), outputs[i], at<float>(outs[i])});
  r.run_and_record([=, &r] { r.add_lora(args); });
}

void act_mul(KernelRunner& r, Address gate, Address up, int64_t n, Activation activation, Address out) {
  r.run_and_record([=, &r] { r.act_mul(at<const float>(gate), at<const float>(up), n, activation, at<float>(out)); });
}

}  // namespace

void bind_lora(nb::class_<KernelRunner>& runner) {
  runner.def("add_lora", &add_lora, Release()).def("act_mul", &act_mul, Release());
}

}  // namespace kvilt
