// The kernels of isa_amx.cpp with tiles in plain C++, so that machines without AMX can test them.
#define KVILT_ISA amx_emulated
#define KVILT_AMX_EMULATED 1
#include "amx_int8_impl.h"

namespace kvilt {
constexpr TileKernels kEmulatedAmxKernels = amx_emulated::tile_kernels();
}  // namespace kvilt
