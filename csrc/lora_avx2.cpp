#define KVILT_ISA avx2
#include "lora_impl.h"

namespace kvilt {
const LoraKernels* avx2_lora() { return &avx2::kLora; }
}  // namespace kvilt
