// What an instruction set provides: one constant table each, which its file isa_*.cpp fills in.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"
#include "lora.h"
#include "pages.h"
#include "per_head.h"
#include "recurrent.h"
#include "reduce.h"
#include "streams.h"

namespace kvilt {

struct KernelTable {
  const char* isa;
  const char* numerics;  // what KV identity names: instruction sets that give the same bits share it
  LinearKernels linear;
  PageKernels pages;
  ReduceKernels reduce;
  LoraKernels lora;
  RecurrentKernels recurrent;
  PerHeadKernels per_head;
  StreamKernels streams;
};

extern const KernelTable kGenericKernels;
#if defined(KVILT_X86)
extern const KernelTable kAvx2Kernels, kAvxVnniKernels, kAvx512Kernels;
extern const TileKernels kAmxKernels, kEmulatedAmxKernels;          // they take the place of some of AVX-512's
extern const TileKernels kAmxBf16Kernels, kEmulatedAmxBf16Kernels;  // likewise
extern const AttentionKernels kBfloat16Attention, kAmxAttention, kEmulatedAmxAttention;
#elif defined(KVILT_ARM)
extern const KernelTable kNeonKernels, kI8mmKernels;
#endif

// The instruction sets this machine can run, best first.
std::vector<std::string> available_isas();

// The table of that instruction set, of the best one for "auto"; throws for one that this machine cannot run.
const KernelTable& find_kernels(const std::string& isa);

}  // namespace kvilt
