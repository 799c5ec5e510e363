#define KVILT_ISA avx2
#include "kernels_impl.h"

namespace kvilt {
const Kernels* avx2_kernels() { return avx2::kernels("avx2"); }
}  // namespace kvilt
