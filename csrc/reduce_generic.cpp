#define KVILT_ISA generic
#include "reduce_impl.h"

namespace kvilt {
const ReduceKernels* generic_reduce() { return &generic::kReduce; }
}  // namespace kvilt
