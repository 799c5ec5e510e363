#include "kernel_table.h"

#include <stdexcept>

namespace kvilt {
namespace {

// The tables that this machine can run, best first.
std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> found;
#if defined(KVILT_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    found.push_back(&kAvx512Kernels);
  if (avx2) found.push_back(&kAvx2Kernels);
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
  throw std::invalid_argument("this machine cannot run the instruction set " + isa);
}

}  // namespace kvilt
