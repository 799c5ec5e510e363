// The operations over whole tensors: checks, scratch memory and threads. Kernels see one row or one tile at a time.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "workers.h"

namespace kvilt {

struct Product {
  Packed weight;
  const float* bias;  // null: none
  float* out;         // [rows][outputs]
};

class Engine {
 public:
  Engine(int threads, const std::string& isa);

  const char* isa() const { return kernels_->name; }
  int threads() const { return workers_.threads(); }

  // Several products of the same input, which is quantized once; all tiles are one piece of work for the threads.
  void linears(const std::vector<Product>& products, const float* x, int64_t rows);
  void embed(const Packed& w, const int64_t* ids, int64_t count, float* out);
  void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out);
  void gate(const float* gate, const float* up, int64_t n, int activation, float* out);
  void rotate(const float* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
              int64_t pairs, bool interleaved, float* out);
  void write(const Pages& pages, const int64_t* slots, int64_t tokens, const float* keys, const float* values);
  // starts has rows + 1 entries; tables is [rows][width].
  void attend(const float* query, int64_t heads, const Pages& pages, const int64_t* tables, int64_t width,
              const int64_t* starts, int64_t rows, const int64_t* positions, const Mask& mask, float* out);

 private:
  Workers workers_;
  const Kernels* kernels_;
  void quantize(const float* x, int64_t rows, int64_t inputs);

  std::mutex lock_;
  std::vector<int8_t> values_;
  std::vector<float> scales_, sums_;
  std::vector<int32_t> totals_;
  std::vector<std::vector<float>> scratch_;  // one per thread
};

// The instruction sets this machine can run, best first.
std::vector<std::string> available_isas();

}  // namespace kvilt
