// The part of the Python module for adapters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "module.h"

namespace kvilt {

void bind_lora(nb::class_<Engine>& engine) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  engine
      .def("adapt", [](Engine& e, const std::vector<Address>& tables, const std::vector<int64_t>& outputs,
                       const std::vector<Address>& outs, Address x, int64_t rows, int64_t inputs, Address slots,
                       Address scales, int64_t slot_count) {
        if (tables.size() != outputs.size() || outs.size() != tables.size() || inputs < 1)
          throw std::invalid_argument("one table and one output belong to each linear map");
        AdaptArgs args{{}, at<const float>(x), rows, inputs, at<const int64_t>(slots), at<const float>(scales), slot_count};
        for (size_t i = 0; i < tables.size(); ++i)
          args.maps.push_back({at<const LowRank>(tables[i]), outputs[i], at<float>(outs[i])});
        e.perform([=, &e] { e.adapt(args); });
      }, Release())
      .def("open", [](Engine& e, Address gate, Address up, int64_t n, int activation, Address out) {
        e.perform([=, &e] { e.open(at<const float>(gate), at<const float>(up), n, activation, at<float>(out)); });
      }, Release());
}

}  // namespace kvilt
