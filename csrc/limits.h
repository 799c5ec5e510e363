// What this machine can do at most: memory it reads and int8 arithmetic it does in a second. For `kvilt bench`.
#pragma once
#include <cstdint>

namespace kvilt {

struct Limits {
  double bytes_per_s;
  double ops_per_s;  // a multiplication and an addition are two
};

// The best of several tries with so many threads. Reads a working set of `bytes`, at most one gibibyte: beyond
// the largest cache the size makes no difference.
Limits measure_limits(int threads, int64_t bytes);

}  // namespace kvilt
