// From a file's blocks to packed weights.
#pragma once
#include <cstdint>
#include <string>

#include "kernels.h"

namespace kvilt {

// How a format of a file is packed, and how to do it for one tile.
struct Packing {
  WeightKind kind;
  int64_t elements, bytes;  // of a block in the file
  void (*tile)(const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs, int64_t tile, uint8_t* out);
};

// Null for a format without kernels of its own. Names are those of ggml.
const Packing* find_packing(const std::string& format);

}  // namespace kvilt
