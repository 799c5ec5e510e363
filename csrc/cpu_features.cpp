#include "cpu_features.h"

#if defined(KVILT_X86)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(KVILT_X86)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(KVILT_ARM)
#include <sys/auxv.h>
#endif
#if defined(__APPLE__) && defined(KVILT_ARM)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace kvilt {
namespace {

#if defined(KVILT_X86)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers leaf_7(unsigned subleaf) {
  Registers found;
  if (!__get_cpuid_count(7, subleaf, &found.eax, &found.ebx, &found.ecx, &found.edx)) return {};
  return found;
}

// Linux gives the registers of tiles to a process that asks for them, once, before it uses any.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

#endif

#if defined(KVILT_ARM) && defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

}  // namespace

CpuFeatures cpu_features() {
  CpuFeatures found{};
#if defined(KVILT_X86)
  __builtin_cpu_init();
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  found.avx_vnni = found.avx2 && (leaf_7(0).eax >= 1) && (leaf_7(1).eax >> 4 & 1);
  found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vnni");
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kBfloat16 = 1u << 5;
  const unsigned amx = leaf_7(0).edx;
  const bool tiles = (amx & kAmxTile) && may_use_tiles();
  found.avx512bf16 = found.avx512 && (leaf_7(0).eax >= 1) && (leaf_7(1).eax & kBfloat16);
  found.avx512vbmi = found.avx512bf16 && __builtin_cpu_supports("avx512vbmi");
  found.amx = found.avx512bf16 && tiles && (amx & kAmxInt8);
  found.amx_bf16 = found.avx512vbmi && tiles && (amx & kAmxBf16);
#elif defined(KVILT_ARM) && defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20, kInt8Matrix = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  found.dotprod = getauxval(AT_HWCAP) & kDotProduct;
  found.i8mm = found.dotprod && (getauxval(AT_HWCAP2) & kInt8Matrix);
#elif defined(KVILT_ARM) && defined(__APPLE__)
  found.dotprod = has("hw.optional.arm.FEAT_DotProd");
  found.i8mm = found.dotprod && has("hw.optional.arm.FEAT_I8MM");
#endif
  return found;
}

}  // namespace kvilt
