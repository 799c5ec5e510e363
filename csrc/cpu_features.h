// What this machine's processor can run, and whether the system lets it.
#pragma once

namespace kvilt {

struct CpuFeatures {
  bool avx2, avx_vnni, avx512, amx;  // x86: AVX2 with FMA and F16C; AVX-512 F, BW, VL, DQ and VNNI; AMX tiles of int8
  bool dotprod, i8mm;                // ARM
};

CpuFeatures cpu_features();

}  // namespace kvilt
