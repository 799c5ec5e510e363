// The kernels on pages, compiled for each instruction set by a file paged_*.cpp that defines KVILT_ISA (a namespace).
#pragma once
#include "attention_impl.h"
#include "pages_impl.h"

namespace kvilt::KVILT_ISA {

inline constexpr PagedKernels kPaged = {rotate, write, follow, attend, attend_scratch, merge, finish};

}  // namespace kvilt::KVILT_ISA
