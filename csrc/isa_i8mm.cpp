#define KVILT_ISA i8mm
#define KVILT_NEON 1
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kI8mmKernels = i8mm::kernel_table("i8mm", "neon");
}  // namespace kvilt
