#include "pack.h"

#include <algorithm>
#include <cstring>

#include "packed.h"

namespace kvilt {
namespace {

// Four codes at a time, as the bytes of a word: what is done to one byte is done to all.
using Word = uint32_t;
constexpr int kSteps = kBlock / 4;
constexpr Word kBit = 0x01010101, kCrumb = 0x03030303, kNibble = 0x0f0f0f0f;

// 32 codes of one output and the bits of its scales, as they stand in the file.
struct Block {
  Word codes[kSteps];
  uint16_t scale = 0, minimum = 0;  // float16; of a k-format the factors of eight blocks
  uint8_t small[2] = {0, 0};        // a k-format's own scales: scale and minimum, or one for each half
};

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

Word word_at(const uint8_t* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

void nibbles(const uint8_t* p, Block& out) {
  for (int i = 0; i < 4; ++i) {
    const Word both = word_at(p + 4 * i);
    out.codes[i] = both & kNibble;
    out.codes[4 + i] = (both >> 4) & kNibble;
  }
}
// The bits of four codes follow each other in the file.
void fifth_bits(const uint8_t* p, Block& out) {
  constexpr Word kApart = 0x00204081;  // brings bit i of four to byte i
  for (int i = 0; i < kSteps; ++i) out.codes[i] |= ((((p[i / 2] >> (i % 2 * 4)) & 15) * kApart) & kBit) << 4;
}

// One reader per format: block `b` (of 32) of a row.
struct Q4_0 {
  static constexpr WeightKind kind = WeightKind::kQ4;
  static constexpr int elements = 32, bytes = 18;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    nibbles(p + 2, out);
  }
};
struct Q4_1 {
  static constexpr WeightKind kind = WeightKind::kQ4Min;
  static constexpr int elements = 32, bytes = 20;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    out.minimum = half_at(p + 2);
    nibbles(p + 4, out);
  }
};
struct Q5_0 {
  static constexpr WeightKind kind = WeightKind::kQ5;
  static constexpr int elements = 32, bytes = 22;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    nibbles(p + 6, out);
    fifth_bits(p + 2, out);
  }
};
struct Q5_1 {
  static constexpr WeightKind kind = WeightKind::kQ5Min;
  static constexpr int elements = 32, bytes = 24;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    out.minimum = half_at(p + 2);
    nibbles(p + 8, out);
    fifth_bits(p + 4, out);
  }
};
struct Q8_0 {
  static constexpr WeightKind kind = WeightKind::kQ8;
  static constexpr int elements = 32, bytes = 34;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    std::memcpy(out.codes, p + 2, kBlock);
  }
};
struct MXFP4 {  // four bits that stand for sixteen numbers, and the exponent of a power of two
  static constexpr WeightKind kind = WeightKind::kFp4;
  static constexpr int elements = 32, bytes = 17;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    // The numbers are halves, so the scale is half of 2^(p[0] - 127): exact in bfloat16, whose exponent has eight bits.
    out.scale = p[0] > 1 ? uint16_t((p[0] - 1) << 7) : uint16_t(p[0] == 1 ? 0x40 : 0x20);
    nibbles(p + 1, out);
  }
};
struct IQ4_NL {  // four bits that stand for sixteen fixed bytes
  static constexpr WeightKind kind = WeightKind::kQ8;
  static constexpr int elements = 32, bytes = 18;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b * bytes;
    out.scale = half_at(p);
    nibbles(p + 2, out);
    uint8_t numbers[kBlock];
    std::memcpy(numbers, out.codes, kBlock);
    for (uint8_t& code : numbers) code = uint8_t(kIq4Numbers[code]);
    std::memcpy(out.codes, numbers, kBlock);
  }
};

// Twelve bytes hold eight scales and eight minimums of six bits.
void small_scales(const uint8_t* p, int64_t s, Block& out) {
  out.small[0] = s < 4 ? p[s] & 63 : (p[s + 4] & 15) | ((p[s - 4] >> 6) << 4);
  out.small[1] = s < 4 ? p[s + 4] & 63 : (p[s + 4] >> 4) | ((p[s] >> 6) << 4);
}
void k_nibbles(const uint8_t* p, int64_t s, Block& out) {
  for (int i = 0; i < kSteps; ++i) out.codes[i] = (word_at(p + s / 2 * 32 + 4 * i) >> (s % 2 * 4)) & kNibble;
}
// Two bits of 256 numbers: each half of the block reads 32 bytes four times, lowest bits first.
void k_crumbs(const uint8_t* p, int64_t s, Block& out) {
  for (int i = 0; i < kSteps; ++i) out.codes[i] = (word_at(p + s / 4 * 32 + 4 * i) >> (s % 4 * 2)) & kCrumb;
}
struct Q2_K {
  static constexpr WeightKind kind = WeightKind::kQ2K;
  static constexpr int elements = 256, bytes = 84;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    out.scale = half_at(p + 80);
    out.minimum = half_at(p + 82) ^ 0x8000;  // the file takes minimums away, the kernels add them
    std::memcpy(out.small, p + 2 * (b % kSuperBlock), 2);
    k_crumbs(p + 16, b % kSuperBlock, out);
  }
};
struct Q3_K {
  static constexpr WeightKind kind = WeightKind::kQ3K;
  static constexpr int elements = 256, bytes = 110;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    const int64_t s = b % kSuperBlock;
    out.scale = half_at(p + 108);
    for (int64_t half = 0; half < 2; ++half) out.small[half] = uint8_t(six_bits(p + 96, 2 * s + half) - 32);
    k_crumbs(p + 32, s, out);
    for (int i = 0; i < kSteps; ++i) out.codes[i] |= ((word_at(p + 4 * i) >> s) & kBit) << 2;
  }
  // One of sixteen scales in twelve bytes: nibbles in the first eight, the top two bits in the last four.
  static int six_bits(const uint8_t* p, int64_t i) {
    return ((p[i % 8] >> (i / 8 * 4)) & 15) | (((p[8 + i % 4] >> (i / 4 * 2)) & 3) << 4);
  }
};
struct IQ4_XS {
  static constexpr WeightKind kind = WeightKind::kIq4K;
  static constexpr int elements = 256, bytes = 136;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    const int64_t s = b % kSuperBlock;
    out.scale = half_at(p);
    const int low = (p[4 + s / 2] >> (s % 2 * 4)) & 15, high = (half_at(p + 2) >> (2 * s)) & 3;
    out.small[0] = uint8_t((low | high << 4) - 32);
    nibbles(p + 8 + 16 * s, out);
  }
};
struct Q4_K {
  static constexpr WeightKind kind = WeightKind::kQ4K;
  static constexpr int elements = 256, bytes = 144;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    out.scale = half_at(p);
    out.minimum = half_at(p + 2) ^ 0x8000;  // the file takes minimums away, the kernels add them
    small_scales(p + 4, b % kSuperBlock, out);
    k_nibbles(p + 16, b % kSuperBlock, out);
  }
};
struct Q5_K {
  static constexpr WeightKind kind = WeightKind::kQ5K;
  static constexpr int elements = 256, bytes = 176;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    out.scale = half_at(p);
    out.minimum = half_at(p + 2) ^ 0x8000;
    small_scales(p + 4, b % kSuperBlock, out);
    k_nibbles(p + 48, b % kSuperBlock, out);
    for (int i = 0; i < kSteps; ++i) out.codes[i] |= ((word_at(p + 16 + 4 * i) >> (b % kSuperBlock)) & kBit) << 4;
  }
};
struct Q6_K {
  static constexpr WeightKind kind = WeightKind::kQ6K;
  static constexpr int elements = 256, bytes = 210;
  static void read(const uint8_t* row, int64_t b, Block& out) {
    const uint8_t* p = row + b / kSuperBlock * bytes;
    const int64_t half = b % kSuperBlock / 4, quarter = b % 4;
    out.scale = half_at(p + 208);
    std::memcpy(out.small, p + 192 + 8 * half + 2 * quarter, 2);
    const uint8_t *low = p + 64 * half + 32 * (quarter % 2), *high = p + 128 + 32 * half;
    for (int i = 0; i < kSteps; ++i)
      out.codes[i] = ((word_at(low + 4 * i) >> (quarter / 2 * 4)) & kNibble) |
                     (((word_at(high + 4 * i) >> (2 * quarter)) & kCrumb) << 4);
  }
};

template <int Bits>
void put_codes(uint8_t* block, int64_t lane, const Word* codes) {
  const auto put = [&](int at, Word word) { std::memcpy(block + at + 4 * lane, &word, sizeof word); };
  // Two bits of each of four steps from `first` on, side by side.
  const auto side_by_side = [&](int first, int shift) {
    Word made = 0;
    for (int j = 0; j < 4; ++j) made |= ((codes[first + j] >> shift) & kCrumb) << (2 * j);
    return made;
  };
  // One bit of all steps.
  const auto plane = [&](int shift) {
    Word made = 0;
    for (int j = 0; j < kSteps; ++j) made |= ((codes[j] >> shift) & kBit) << j;
    return made;
  };
  if constexpr (Bits == 8) {
    for (int j = 0; j < kSteps; ++j) put(64 * j, codes[j]);
  } else if constexpr (Bits == 2 || Bits == 3) {
    for (int half = 0; half < 2; ++half) put(64 * half, side_by_side(4 * half, 0));
    if constexpr (Bits == 3) put(128, plane(2));
  } else {
    for (int j = 0; j < 4; ++j) put(64 * j, (codes[j] & kNibble) | (codes[4 + j] & kNibble) << 4);
    if constexpr (Bits == 5) put(256, plane(4));
    if constexpr (Bits == 6)
      for (int half = 0; half < 2; ++half) put(256 + 64 * half, side_by_side(4 * half, 4));
  }
}

// The same in the layout of rows.
template <int Bits>
void put_row(uint8_t* block, int64_t lane, const Word* codes) {
  const auto put = [&](int64_t at, Word word) { std::memcpy(block + at, &word, sizeof word); };
  const auto put_two_bits = [&](int64_t at, int shift) {
    for (int half = 0; half < 2; ++half) {
      Word made = 0;
      for (int j = 0; j < 4; ++j) made |= ((codes[2 * j + half] >> shift) & kCrumb) << (2 * j);
      put(at + 8 * lane + 4 * half, made);
    }
  };
  const auto put_plane = [&](int64_t at, int shift) {
    constexpr Word kTogether = 0x01020408;  // brings the lowest bits of four bytes side by side
    Word made = 0;
    for (int j = 0; j < kSteps; ++j) made |= ((((codes[j] >> shift) & kBit) * kTogether >> 24) & 15) << (4 * j);
    put(at + 4 * lane, made);
  };
  if constexpr (Bits == 8) {
    std::memcpy(block + kBlock * lane, codes, kBlock);
  } else if constexpr (Bits == 2 || Bits == 3) {
    put_two_bits(0, 0);
    if constexpr (Bits == 3) put_plane(128, 2);
  } else if constexpr (Bits == 6) {
    for (int j = 0; j < 4; ++j) put(16 * lane + 4 * j, (codes[j] & kNibble) | (codes[4 + j] & kNibble) << 4);
    put_two_bits(256, 4);
  } else {
    for (int step = 0; step < kSteps; ++step) {  // four inputs are two bytes
      const Word nibbles = codes[step] & kNibble, two = nibbles | nibbles >> 4;
      const uint16_t bytes = uint16_t((two & 0xff) | (two >> 8 & 0xff00));
      std::memcpy(block + lane / 2 * 32 + step % 4 * 8 + step / 4 * 4 + lane % 2 * 2, &bytes, 2);
    }
    if constexpr (Bits == 5) put_plane(256, 4);
  }
}

template <typename Reader, Layout kLayout>
void pack_blocks(const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs, int64_t tile,
                 uint8_t* out) {
  using F = PackedFormat<Reader::kind>;
  const int64_t blocks = (inputs + kBlock - 1) / kBlock, lanes = std::min<int64_t>(kTile, outputs - tile * kTile);
  if (lanes < kTile) std::memset(out, 0, F::tile_bytes(blocks));
  const auto put_half = [](uint8_t* at, int64_t lane, uint16_t bits) { std::memcpy(at + 2 * lane, &bits, 2); };
  for (int64_t b = 0; b < blocks; ++b, out += F::block) {
    uint8_t* header = out;
    if constexpr (F::k)
      if (b % kSuperBlock == 0) out += F::header;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      Block block;
      Reader::read(source + (tile * kTile + lane) * row_bytes, b, block);
      if constexpr (kLayout == Layout::kRows) put_row<F::bits>(out, lane, block.codes);
      else put_codes<F::bits>(out, lane, block.codes);
      uint8_t* scales = out + F::codes;
      if constexpr (F::k) {
        scales[lane] = block.small[0];
        if constexpr (F::halves || F::minimum) scales[F::scales + lane] = block.small[1];
        if (b % kSuperBlock == 0) {
          put_half(header, lane, block.scale);
          if constexpr (F::minimum) put_half(header + 2 * kTile, lane, block.minimum);
        }
      } else {
        put_half(scales, lane, block.scale);
        if constexpr (F::minimum) put_half(scales + F::scales, lane, block.minimum);
      }
    }
  }
}

template <int Bytes>
void pack_plain(const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs, int64_t tile, uint8_t* out) {
  const int64_t lanes = std::min<int64_t>(kTile, outputs - tile * kTile);
  if (lanes < kTile) std::memset(out, 0, inputs * kTile * Bytes);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const uint8_t* row = source + (tile * kTile + lane) * row_bytes;
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(out + (k * kTile + lane) * Bytes, row + k * Bytes, Bytes);
  }
}

// Numbers of 16 bits in the layout of rows; the last block is filled up with zeros.
void pack_plain_rows(const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs, int64_t tile,
                     uint8_t* out) {
  const int64_t lanes = std::min<int64_t>(kTile, outputs - tile * kTile), blocks = (inputs + kBlock - 1) / kBlock;
  if (lanes < kTile || inputs % kBlock) std::memset(out, 0, size_t(blocks * kBlock * kTile * 2));
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const uint8_t* from = source + (tile * kTile + lane) * row_bytes + b * kBlock * 2;
      std::memcpy(out + (b * kTile + lane) * kBlock * 2, from,
                  size_t(std::min<int64_t>(kBlock, inputs - b * kBlock)) * 2);
    }
}

template <typename Reader>
constexpr Packing packing() {
  return {Reader::kind, Reader::elements, Reader::bytes, pack_blocks<Reader, Layout::kLanes>,
          pack_blocks<Reader, Layout::kRows>};
}

const struct {
  const char* name;
  Packing packing;
} kPackings[] = {
    {"F32", {WeightKind::kFloat32, 1, 4, pack_plain<4>, pack_plain<4>}},
    {"F16", {WeightKind::kFloat16, 1, 2, pack_plain<2>, pack_plain_rows}},
    {"BF16", {WeightKind::kBfloat16, 1, 2, pack_plain<2>, pack_plain_rows}},
    {"Q4_0", packing<Q4_0>()},
    {"Q4_1", packing<Q4_1>()},
    {"Q5_0", packing<Q5_0>()},
    {"Q5_1", packing<Q5_1>()},
    {"Q8_0", packing<Q8_0>()},
    {"IQ4_NL", packing<IQ4_NL>()},
    {"MXFP4", packing<MXFP4>()},
    {"Q2_K", packing<Q2_K>()},
    {"Q3_K", packing<Q3_K>()},
    {"IQ4_XS", packing<IQ4_XS>()},
    {"Q4_K", packing<Q4_K>()},
    {"Q5_K", packing<Q5_K>()},
    {"Q6_K", packing<Q6_K>()},
};

}  // namespace

const Packing* find_packing(const std::string& format) {
  for (const auto& entry : kPackings)
    if (format == entry.name) return &entry.packing;
  return nullptr;
}

}  // namespace kvilt
