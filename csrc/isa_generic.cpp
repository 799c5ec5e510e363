#define KVILT_ISA generic
#include "kernels_impl.h"

namespace kvilt {
const Kernels* generic_kernels() { return generic::kernels("generic"); }
}  // namespace kvilt
