// The kernels, written once with the compiler's vectors and compiled for each instruction set.
//
// Each file isa_*.cpp defines KVILT_ISA (a namespace) and includes this one. Only the integer dot products are written
// with intrinsics. Law: the value of an output depends on its own row alone, whatever else is computed beside it, so
// every loop that a row goes through has the same order for one row and for many, and fused products are spelled out.
#pragma once
#include "elementwise_impl.h"
#include "linear_impl.h"

namespace kvilt::KVILT_ISA {

inline const Kernels* kernels(const char* name) {
  static Kernels table;
  table = {name, quantize, linear, gated, embed, rms_norm, add, argmax};
  return &table;
}

}  // namespace kvilt::KVILT_ISA
