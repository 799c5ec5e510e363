// Tiles of AMX beside the AVX-512 kernels.
#define KVILT_ISA amx
#include "amx_int8_impl.h"

namespace kvilt {
constexpr TileKernels kAmxKernels = amx::tile_kernels();
}  // namespace kvilt
