#define KVILT_ISA avxvnni
#include "kernels_impl.h"

namespace kvilt {
constexpr KernelTable kAvxVnniKernels = avxvnni::kernel_table("avxvnni", "avx2");
}  // namespace kvilt
