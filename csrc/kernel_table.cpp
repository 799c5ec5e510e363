#include "kernel_table.h"

#include <stdexcept>

#include "cpu_features.h"

namespace kvilt {
namespace {

#if defined(KVILT_X86)

// Attention in bfloat16, which gives other bits.
KernelTable with_attention(const char* isa, const char* numerics, const KernelTable& beside,
                           const AttentionKernels& attention) {
  KernelTable table = beside;
  table.isa = isa;
  table.numerics = numerics;
  table.pages.attention_tiles = attention.attention_tiles;
  table.pages.scratch_floats = attention.scratch_floats;
  return table;
}

const KernelTable& avx512bf16_table() {
  static const KernelTable table = with_attention("avx512bf16", "avx512bf16", kAvx512Kernels, kBfloat16Attention);
  return table;
}

// Products by tiles: of bytes with the bits of AVX-512, of bfloat16 with their own.
KernelTable with_tiles(const char* isa, const char* numerics, const KernelTable& beside, const TileKernels& tiles) {
  KernelTable table = beside;
  table.isa = isa;
  table.numerics = numerics;
  LinearKernels& linear = table.linear;
  linear.quantize_items = tiles.quantize_items;
  linear.quantize = tiles.quantize;
  linear.linear_tiles = tiles.linear_tiles;
  linear.gate_up_tiles = tiles.gate_up_tiles;
  linear.embed = tiles.embed;
  linear.layout = tiles.layout;
  linear.tiles_at_once = tiles.tiles_at_once;
  linear.groups_at_once = tiles.groups_at_once;
  return table;
}

const KernelTable& amx_table() {
  static const KernelTable table = with_tiles("amx", "avx512bf16", avx512bf16_table(), kAmxKernels);
  return table;
}

const KernelTable& amx_bf16_table() {
  static const KernelTable table = with_tiles("amx-bf16", "amx-bf16", avx512bf16_table(), kAmxBf16Kernels);
  return table;
}

const KernelTable& amx_attention_table() {
  static const KernelTable table = with_attention("amx-attention", "amx-attention", amx_bf16_table(), kAmxAttention);
  return table;
}

// Those that only tests ask for by name.
const KernelTable* emulated_table(const std::string& isa, const CpuFeatures& cpu) {
  static const KernelTable bytes = with_tiles("amx-emulated", "avx512", kAvx512Kernels, kEmulatedAmxKernels);
  if (cpu.avx512 && isa == bytes.isa) return &bytes;
  if (!cpu.avx512vbmi) return nullptr;
  static const KernelTable bfloats =
      with_tiles("amx-bf16-emulated", "amx-bf16", avx512bf16_table(), kEmulatedAmxBf16Kernels);
  if (isa == bfloats.isa) return &bfloats;
  static const KernelTable attention =
      with_attention("amx-attention-emulated", "amx-attention", bfloats, kEmulatedAmxAttention);
  return isa == attention.isa ? &attention : nullptr;
}

#endif

// The tables that this machine can run, best first.
std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> found;
  [[maybe_unused]] const CpuFeatures cpu = cpu_features();
#if defined(KVILT_X86)
  if (cpu.amx) found.push_back(&amx_table());
  if (cpu.amx_bf16) found.push_back(&amx_bf16_table());
  if (cpu.amx_bf16) found.push_back(&amx_attention_table());
  if (cpu.avx512bf16) found.push_back(&avx512bf16_table());
  if (cpu.avx512) found.push_back(&kAvx512Kernels);
  if (cpu.avx_vnni) found.push_back(&kAvxVnniKernels);
  if (cpu.avx2) found.push_back(&kAvx2Kernels);
#elif defined(KVILT_ARM)
  if (cpu.i8mm) found.push_back(&kI8mmKernels);
  if (cpu.dotprod) found.push_back(&kNeonKernels);
#endif
  found.push_back(&kGenericKernels);
  return found;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.push_back(table->isa);
  return names;
}

const KernelTable& find_kernels(const std::string& isa) {
  for (const KernelTable* table : available_tables())
    if (isa == "auto" || isa == table->isa) return *table;
#if defined(KVILT_X86)
  if (const KernelTable* table = emulated_table(isa, cpu_features())) return *table;
#endif
  throw std::invalid_argument("this machine cannot run the instruction set " + isa);
}

}  // namespace kvilt
