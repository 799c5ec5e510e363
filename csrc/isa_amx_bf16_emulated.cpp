// The kernels of isa_amx_bf16.cpp with tiles in plain C++, so that machines without AMX can test them.
#define KVILT_ISA amx_bf16_emulated
#define KVILT_AMX_EMULATED 1
#include "amx_attention_impl.h"
#include "amx_bf16_impl.h"

namespace kvilt {
constexpr TileKernels kEmulatedAmxBf16Kernels = amx_bf16_emulated::tile_kernels();
constexpr AttentionKernels kEmulatedAmxAttention = amx_bf16_emulated::attention_kernels();
}  // namespace kvilt
