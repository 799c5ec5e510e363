#define KVILT_ISA neon
#define KVILT_NEON 1
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kNeonKernels = neon::kernel_table("neon", "neon");
}  // namespace kvilt
