#define KVILT_ISA avx512
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kAvx512Kernels = avx512::kernel_table("avx512", "avx512");
}  // namespace kvilt
