// Attention with values and weights in bfloat16, beside the AVX-512 kernels.
#define KVILT_ISA avx512bf16
#include "attention_impl.h"
#include "kernel_table.h"

namespace kvilt {
constexpr AttentionKernels kBfloat16Attention = {avx512bf16::attention_tiles, avx512bf16::attention_scratch};
}  // namespace kvilt
