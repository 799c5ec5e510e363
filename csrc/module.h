// What the files of the Python module share: addresses in, the parts they are bound in.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

#include "engine.h"

namespace kvilt {

namespace nb = nanobind;
using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_pages(nb::module_& m, nb::class_<Engine>& engine);
void bind_reduce(nb::class_<Engine>& engine);
void bind_lora(nb::class_<Engine>& engine);

}  // namespace kvilt
