// The Python module: arrays, addresses and sizes in, work done, the interpreter lock released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "limits.h"
#include "module.h"

using namespace kvilt;

namespace {

void bind_enums(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::kSilu)
      .value("gelu_tanh", Activation::kGeluTanh)
      .value("gelu", Activation::kGelu)
      .value("swiglu_oai", Activation::kSwigluOai)
      .value("tanh", Activation::kTanh)
      .value("relu2", Activation::kRelu2)
      .value("relu", Activation::kRelu);
  nb::enum_<KVDtype>(m, "KVDtype")
      .value("float32", KVDtype::kFloat32)
      .value("float16", KVDtype::kFloat16)
      .value("bfloat16", KVDtype::kBfloat16)
      .value("int8", KVDtype::kInt8)
      .value("k8v4", KVDtype::kK8V4);
  nb::enum_<WeightKind>(m, "WeightKind")
      .value("float32", WeightKind::kFloat32)
      .value("float16", WeightKind::kFloat16)
      .value("bfloat16", WeightKind::kBfloat16)
      .value("q4", WeightKind::kQ4)
      .value("q4_min", WeightKind::kQ4Min)
      .value("q5", WeightKind::kQ5)
      .value("q5_min", WeightKind::kQ5Min)
      .value("q8", WeightKind::kQ8)
      .value("q4_k", WeightKind::kQ4K)
      .value("q5_k", WeightKind::kQ5K)
      .value("q6_k", WeightKind::kQ6K)
      .value("fp4", WeightKind::kFp4)
      .value("q2_k", WeightKind::kQ2K)
      .value("q3_k", WeightKind::kQ3K)
      .value("iq4_k", WeightKind::kIq4K);
}

int64_t loop(const Program& program, int64_t steps, const Array<const int64_t, 1>& ids,
             const std::vector<std::vector<int64_t>>& ends, const Array<int64_t, 2>& out) {
  const int64_t rows = extent(ids, 0);
  check(int64_t(ends.size()) == rows, "each row has its own ends");
  check(extent(out, 0) >= steps && extent(out, 1) == rows, "the tokens of all steps must fit");
  return program.loop(steps, ids.data(), rows, ends, out.data());
}

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
    return std::pair{found.bytes_per_s, found.ops_per_s};
  });
  bind_enums(m);
  nb::class_<Program>(m, "Program")
      .def("run", &Program::run, Release())
      .def("loop", &loop, Release(), plain(), array(), plain(), array());
  nb::class_<KernelRunner> runner(m, "KernelRunner");
  runner.def(nb::init<int, const std::string&, const std::vector<std::vector<int>>&>())
      .def_prop_ro("isa", [](const KernelRunner& r) { return std::string(r.isa()); })
      .def_prop_ro("numerics", [](const KernelRunner& r) { return std::string(r.numerics()); })
      .def_prop_ro("threads", &KernelRunner::threads)
      .def("begin_recording", &KernelRunner::begin_recording)
      .def("end_recording", &KernelRunner::end_recording)
      .def("stop", &KernelRunner::stop);
  bind_weights(m, runner);
  bind_steps(runner);
  bind_pages(m, runner);
  bind_reduce(runner);
  bind_lora(runner);
  bind_recurrent(runner);
  bind_streams(runner);
  bind_experts(m, runner);
}
