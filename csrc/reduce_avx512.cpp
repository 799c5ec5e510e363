#define KVILT_ISA avx512
#include "reduce_impl.h"

namespace kvilt {
const ReduceKernels* avx512_reduce() { return &avx512::kReduce; }
}  // namespace kvilt
