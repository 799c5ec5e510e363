#define KVILT_ISA generic
#include "lora_impl.h"

namespace kvilt {
const LoraKernels* generic_lora() { return &generic::kLora; }
}  // namespace kvilt
