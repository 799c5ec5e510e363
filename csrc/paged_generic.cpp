#define KVILT_ISA generic
#include "paged_impl.h"

namespace kvilt {
const PagedKernels* generic_paged() { return &generic::kPaged; }
}  // namespace kvilt
