// The part of the Python module that folds tokens into recurrent state. Inside of steps: it takes checked addresses.
#include <nanobind/stl/vector.h>

#include "module.h"

namespace kvilt {
namespace {

StateRows state_rows(const std::vector<int64_t>& starts, Address reads, Address writes, int64_t slots) {
  check(starts.size() > 1, "a step has at least one row");
  return {starts, at<const int64_t>(reads), at<const int64_t>(writes), slots};
}

void causal_conv(KernelRunner& r, Address x, Address weight, Address bias, int64_t channels, int64_t width, bool silu,
                 Address tails, const std::vector<int64_t>& starts, Address reads, Address writes, int64_t slots,
                 Address out) {
  check(width >= 1 && width <= 64, "a convolution is 1 to 64 tokens wide");
  const ConvArgs args{state_rows(starts, reads, writes, slots),
                      at<const float>(x),
                      at<const float>(weight),
                      at<const float>(bias),
                      at<float>(tails),
                      at<float>(out),
                      channels,
                      width,
                      silu};
  r.run_and_record([=, &r] { r.causal_conv(args); });
}

void fold(KernelRunner& r, Address mixed, Address step, Address beta, Address log_rate, Address bias, Address skip,
          const std::vector<int64_t>& heads, float least, float most, Address memories,
          const std::vector<int64_t>& starts, Address reads, Address writes, int64_t slots, Address out) {
  check(heads.size() == 4 || heads.size() == 5,
        "heads are key and value heads, their sizes, and whether they are tiled");
  check(heads[0] > 0 && heads[1] % heads[0] == 0, "value heads divide evenly over key heads");
  const FoldArgs args{state_rows(starts, reads, writes, slots),
                      at<const float>(mixed),
                      at<const float>(step),
                      at<const float>(beta),
                      at<const float>(log_rate),
                      at<const float>(bias),
                      at<const float>(skip),
                      at<float>(memories),
                      at<float>(out),
                      heads[0],
                      heads[1],
                      heads[2],
                      heads[3],
                      heads.size() == 5 && heads[4] != 0,
                      least,
                      most};
  r.run_and_record([=, &r] { r.fold(args); });
}

void sigmoid_mul(KernelRunner& r, Address x, Address gate, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.sigmoid_mul(at<const float>(x), at<const float>(gate), n, at<float>(out)); });
}

}  // namespace

void bind_recurrent(nb::class_<KernelRunner>& runner) {
  runner.def("causal_conv", &causal_conv, Release())
      .def("fold", &fold, Release())
      .def("sigmoid_mul", &sigmoid_mul, Release());
}

}  // namespace kvilt
