#define KVILT_ISA avx512
#include "paged_impl.h"

namespace kvilt {
const PagedKernels* avx512_paged() { return &avx512::kPaged; }
}  // namespace kvilt
