// The part of the Python module for residual streams and sparse activations. Inside of steps: it takes checked
// addresses.
#include "module.h"

namespace kvilt {
namespace {

// Without `y` the streams are mixed; with it, each takes its share of `y`.
void streams(KernelRunner& r, Address x, Address y, Address weights, int64_t tokens, int64_t streams, int64_t n,
             Address out) {
  const StreamArgs args{at<const float>(x), at<const float>(y), at<const float>(weights), tokens, streams, n,
                        at<float>(out)};
  r.run_and_record([=, &r] { r.streams(args); });
}

void match_rms(KernelRunner& r, Address x, Address like, int64_t rows, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.match_rms(at<const float>(x), at<const float>(like), rows, n, at<float>(out)); });
}

void gaussian_relu(KernelRunner& r, Address x, float cut, int64_t rows, int64_t n, Address out) {
  r.run_and_record([=, &r] { r.gaussian_relu(at<const float>(x), cut, rows, n, at<float>(out)); });
}

}  // namespace

void bind_streams(nb::class_<KernelRunner>& runner) {
  runner.def("streams", &streams, Release())
      .def("match_rms", &match_rms, Release())
      .def("gaussian_relu", &gaussian_relu, Release());
}

}  // namespace kvilt
