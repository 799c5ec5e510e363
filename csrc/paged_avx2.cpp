#define KVILT_ISA avx2
#include "paged_impl.h"

namespace kvilt {
const PagedKernels* avx2_paged() { return &avx2::kPaged; }
}  // namespace kvilt
