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
    grow(remainder_values_, rows * blocks * kBlock);
    grow(remainder_floats_, rows * blocks * 4);
    grow(remainders_, groups * (1 + kRowGroup * blocks));
  }

  // A part of the rows: from the row `first` on, which begins the group `group`. `plain` are its activations.
  QuantizedRows rows(const float* plain, int64_t inputs, int64_t first, int64_t group, int64_t count) {
    const int64_t blocks = (inputs + kBlock - 1) / kBlock, at = first * blocks;
    int8_t* values = static_cast<int8_t*>(values_.memory.get()) + at * kBlock * value_bytes_;
    if (value_bytes_ == 2) return {plain, values, nullptr, nullptr, nullptr, nullptr, count, inputs, blocks};
    return {plain,
            values,
            remainder_values_.data() + at * kBlock,
            floats_.data() + at * 4,
            remainder_floats_.data() + at * 4,
            remainders_.data() + group * (1 + kRowGroup * blocks),
            count,
            inputs,
            blocks};
  }

 private:
  int64_t value_bytes_;
  LargeBytes values_;
  std::vector<int8_t> remainder_values_;
  std::vector<float> floats_, remainder_floats_;
  std::vector<int32_t> remainders_;
};

}  // namespace kvilt
