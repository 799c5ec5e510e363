// From a file's blocks to packed weights.
#pragma once
#include <cstdint>
#include <string>

#include "kernels.h"

namespace kvilt {

// Packs one tile of a file's rows.
using PackTile = void (*)(const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs, int64_t tile,
                          uint8_t* out);

// How a format of a file is packed, and how to do it for one tile in each layout.
struct Packing {
  WeightKind kind;
  int64_t elements, bytes;  // of a block in the file
  PackTile lanes, rows;

  PackTile tile(Layout layout) const { return layout == Layout::kRows ? rows : lanes; }
};

// Null for a format without kernels of its own. Names are those of ggml.
const Packing* find_packing(const std::string& format);

}  // namespace kvilt
