// What the files of the Python module share: how memory comes in, and the parts the module is bound in.
//
// Memory comes in two forms. Calls outside of steps take arrays, whose dtype, rank and contiguity nanobind checks.
// Calls inside of steps take addresses: an array costs a few microseconds, which a step of some hundred calls would
// notice. kvilt/ops/native/border.py makes these addresses, from tensors that it has checked, and the stub of this
// module takes no others.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

#include "kernel_runner.h"

namespace kvilt {

namespace nb = nanobind;
using Address = uintptr_t;
using Release = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// An array of a dtype that only the call knows, in row-major order.
template <int kDims>
using AnyArray = nb::ndarray<nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// Annotations of arguments. An array of another dtype or order is refused: a converted copy would take the results.
inline auto array() { return nb::arg().noconvert(); }
inline auto plain() { return nb::arg(); }

template <typename A>
int64_t extent(const A& array, size_t dim) {
  return int64_t(array.shape(dim));
}

inline void check(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void bind_weights(nb::module_& m, nb::class_<KernelRunner>& runner);
void bind_steps(nb::class_<KernelRunner>& runner);
void bind_pages(nb::module_& m, nb::class_<KernelRunner>& runner);
void bind_reduce(nb::class_<KernelRunner>& runner);
void bind_lora(nb::class_<KernelRunner>& runner);
void bind_recurrent(nb::class_<KernelRunner>& runner);
void bind_streams(nb::class_<KernelRunner>& runner);
void bind_experts(nb::module_& m, nb::class_<KernelRunner>& runner);

}  // namespace kvilt
