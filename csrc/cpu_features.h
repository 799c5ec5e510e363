// What this machine's processor can run, and whether the system lets it.
#pragma once

namespace kvilt {

struct CpuFeatures {
  // x86: AVX2 with FMA and F16C; AVX-512 F, BW, VL, DQ and VNNI; with BF16 too; with VBMI too; AMX tiles of int8 and of
  // bfloat16
  bool avx2, avx_vnni, avx512, avx512bf16, avx512vbmi, amx, amx_bf16;
  bool dotprod, i8mm;  // ARM
};

CpuFeatures cpu_features();

}  // namespace kvilt
