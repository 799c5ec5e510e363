// A recorded run of operations: the same calls on the same addresses, without Python between them.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvilt {

struct Program {
  const std::atomic<bool>* stopped;
  std::vector<std::function<void()>> calls;

  // Whether it ran to the end; another thread may stop it between two calls.
  bool run() const {
    for (const auto& call : calls) {
      if (stopped->load(std::memory_order_relaxed)) return false;
      call();
    }
    return true;
  }

  // Runs a step that leaves its tokens in `ids` up to `steps` times; ends after a row drew one of its ends or -1.
  // Returns the steps whose tokens stand in `out` [steps][rows].
  int64_t loop(int64_t steps, const int64_t* ids, int64_t rows, const std::vector<std::vector<int64_t>>& ends,
               int64_t* out) const {
    for (int64_t step = 0; step < steps; ++step) {
      if (!run()) return step;
      std::copy(ids, ids + rows, out + step * rows);
      for (int64_t row = 0; row < rows; ++row)
        if (ids[row] < 0 || std::find(ends[row].begin(), ends[row].end(), ids[row]) != ends[row].end()) return step + 1;
    }
    return steps;
  }
};

}  // namespace kvilt
