// Tiles of AMX in bfloat16, in the place of all products of the AVX-512 kernels.
#define KVILT_ISA amx_bf16
#include "amx_attention_impl.h"
#include "amx_bf16_impl.h"

namespace kvilt {
constexpr TileKernels kAmxBf16Kernels = amx_bf16::tile_kernels();
constexpr AttentionKernels kAmxAttention = amx_bf16::attention_kernels();
}  // namespace kvilt
