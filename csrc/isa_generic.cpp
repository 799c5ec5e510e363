#define KVILT_ISA generic
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kGenericKernels = generic::kernel_table("generic", "generic");
}  // namespace kvilt
