#define KVILT_ISA avx512
#include "lora_impl.h"

namespace kvilt {
const LoraKernels* avx512_lora() { return &avx512::kLora; }
}  // namespace kvilt
