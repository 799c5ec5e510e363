// Rows of embedding tables, from packed weights of either layout.
#pragma once
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

template <Layout kLayout, WeightKind K>
void embed_packed(const PackedWeight& w, int64_t row, float scale, float* out) {
  using F = PackedFormat<K>;
  const int64_t blocks = w.blocks();
  const int lane = int(row % kTile);
  const uint8_t* at = w.data + row / kTile * F::tile_bytes(blocks);
  const auto half = [&](const uint8_t* p) { return half_to_float(reinterpret_cast<const uint16_t*>(p)[lane]); };
  float factor = 1, low_factor = 1;
  for (int64_t b = 0; b < blocks; ++b, at += F::block) {
    if constexpr (F::k)
      if (b % kSuperBlock == 0) {
        factor = half(at);
        if constexpr (F::minimum) low_factor = half(at + 2 * kTile);
        at += F::header;
      }
    const uint8_t* scales = at + F::codes;
    for (int i = 0; i < kBlock && b * kBlock + i < w.inputs; ++i) {
      int code;
      if constexpr (kLayout == Layout::kRows) code = code_in_row<F::coding>(at, lane, i) - F::offset;
      else code = code_at<F::coding>(at, i / 4, 4 * lane + i % 4) - F::offset;
      float value;
      if constexpr (F::halves) {
        const uint8_t small = scales[i / 16 * F::scales + lane];
        if constexpr (F::minimum) value = float(small & 15) * factor * float(code) + float(small >> 4) * low_factor;
        else value = float(int8_t(small)) * factor * float(code);
      } else {
        const float scale = F::k && F::minimum      ? float(scales[lane]) * factor
                            : F::k                  ? float(int8_t(scales[lane])) * factor
                            : K == WeightKind::kFp4 ? bfloat_to_float(reinterpret_cast<const uint16_t*>(scales)[lane])
                                                    : half(scales);
        value = scale * float(code);
        if constexpr (F::k && F::minimum) value = value + float(scales[F::scales + lane]) * low_factor;
        else if constexpr (F::minimum) value = value + half(scales + F::scales);
      }
      out[b * kBlock + i] = value * scale;
    }
  }
}

template <Layout kLayout, WeightKind K>
void embed_float(const PackedWeight& w, int64_t row, float scale, float* out) {
  const uint8_t* tile = w.data + row / kTile * tile_bytes(K, w.inputs);
  for (int64_t k = 0; k < w.inputs; ++k) {
    constexpr bool kRows = kLayout == Layout::kRows && K != WeightKind::kFloat32;
    const int64_t lane = row % kTile, at = kRows ? (k / kBlock * kTile + lane) * kBlock + k % kBlock : k * kTile + lane;
    float value;
    if constexpr (K == WeightKind::kFloat32) value = reinterpret_cast<const float*>(tile)[at];
    else if constexpr (K == WeightKind::kFloat16) value = half_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    else value = bfloat_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    out[k] = value * scale;
  }
}

// A row of an embedding table, times `scale`.
template <Layout kLayout>
void embed(const PackedWeight& w, int64_t row, float scale, float* out) {
  switch (w.kind) {
    case WeightKind::kFloat32: return embed_float<kLayout, WeightKind::kFloat32>(w, row, scale, out);
    case WeightKind::kFloat16: return embed_float<kLayout, WeightKind::kFloat16>(w, row, scale, out);
    case WeightKind::kBfloat16: return embed_float<kLayout, WeightKind::kBfloat16>(w, row, scale, out);
    case WeightKind::kQ4: return embed_packed<kLayout, WeightKind::kQ4>(w, row, scale, out);
    case WeightKind::kQ4Min: return embed_packed<kLayout, WeightKind::kQ4Min>(w, row, scale, out);
    case WeightKind::kQ5: return embed_packed<kLayout, WeightKind::kQ5>(w, row, scale, out);
    case WeightKind::kQ5Min: return embed_packed<kLayout, WeightKind::kQ5Min>(w, row, scale, out);
    case WeightKind::kQ8: return embed_packed<kLayout, WeightKind::kQ8>(w, row, scale, out);
    case WeightKind::kQ4K: return embed_packed<kLayout, WeightKind::kQ4K>(w, row, scale, out);
    case WeightKind::kQ5K: return embed_packed<kLayout, WeightKind::kQ5K>(w, row, scale, out);
    case WeightKind::kQ6K: return embed_packed<kLayout, WeightKind::kQ6K>(w, row, scale, out);
    case WeightKind::kFp4: return embed_packed<kLayout, WeightKind::kFp4>(w, row, scale, out);
    case WeightKind::kQ2K: return embed_packed<kLayout, WeightKind::kQ2K>(w, row, scale, out);
    case WeightKind::kQ3K: return embed_packed<kLayout, WeightKind::kQ3K>(w, row, scale, out);
    case WeightKind::kIq4K: return embed_packed<kLayout, WeightKind::kIq4K>(w, row, scale, out);
  }
}

}  // namespace kvilt::KVILT_ISA
