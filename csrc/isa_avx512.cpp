#define KVILT_ISA avx512
#include "kernels_impl.h"

namespace kvilt {
const Kernels* avx512_kernels() { return avx512::kernels("avx512"); }
}  // namespace kvilt
