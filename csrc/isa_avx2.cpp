#define KVILT_ISA avx2
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kAvx2Kernels = avx2::kernel_table("avx2", "avx2");
}  // namespace kvilt
