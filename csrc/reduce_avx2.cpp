#define KVILT_ISA avx2
#include "reduce_impl.h"

namespace kvilt {
const ReduceKernels* avx2_reduce() { return &avx2::kReduce; }
}  // namespace kvilt
