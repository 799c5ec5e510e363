// Room for rows of activations as the kernels take them. Kept from call to call and never made smaller.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "large_bytes.h"

namespace kvilt {

template <typename T>
void grow(std::vector<T>& room, int64_t size) {
  if (int64_t(room.size()) < size) room.resize(size_t(size));
}

class RowScratch {
 public:
  explicit RowScratch(Layout layout) : value_bytes_(layout == Layout::kRows ? 2 : 1) {}

  // For rows in so many groups: each part of them that has weights of its own begins a group.
  void reserve(int64_t rows, int64_t inputs, int64_t groups) {
    const int64_t blocks = (inputs + kBlock - 1) / kBlock;
    values_.grow(rows * blocks * kBlock * value_bytes_);
    if (value_bytes_ == 2) return;
    grow(floats_, rows * blocks * 4);
    grow(remainders_, rows * blocks);
    grow(blocks_with_, groups * QuantizedRows::words_of(blocks));
    grow(rows_with_, groups * blocks);
  }

  // A part of the rows: from the row `first` on, which begins the group `group`. `plain` are its activations.
  QuantizedRows rows(const float* plain, int64_t inputs, int64_t first, int64_t group, int64_t count) {
    const int64_t blocks = (inputs + kBlock - 1) / kBlock, at = first * blocks;
    int8_t* values = static_cast<int8_t*>(values_.memory.get()) + at * kBlock * value_bytes_;
    if (value_bytes_ == 2) return {plain, values, nullptr, nullptr, nullptr, nullptr, count, inputs, blocks};
    return {plain,
            values,
            floats_.data() + at * 4,
            remainders_.data() + at,
            blocks_with_.data() + group * QuantizedRows::words_of(blocks),
            rows_with_.data() + group * blocks,
            count,
            inputs,
            blocks};
  }

 private:
  int64_t value_bytes_;
  LargeBytes values_;
  std::vector<float> floats_;
  std::vector<Remainder> remainders_;
  std::vector<uint64_t> blocks_with_;
  std::vector<uint8_t> rows_with_;
};

}  // namespace kvilt
