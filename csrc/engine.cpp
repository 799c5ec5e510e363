#include "engine.h"

#include <algorithm>
#include <stdexcept>

namespace kvilt {
namespace {

const Kernels* find_kernels(const std::string& isa) {
  const auto available = available_isas();
  const std::string name = isa == "auto" ? available.front() : isa;
  if (std::find(available.begin(), available.end(), name) == available.end())
    throw std::invalid_argument("this machine cannot run the instruction set " + name);
#if defined(KVILT_X86)
  if (name == "avx512") return avx512_kernels();
  if (name == "avx2") return avx2_kernels();
#endif
  return generic_kernels();
}

// Rows that one thread takes through a tile before another tile: their activations stay in its cache.
constexpr int64_t kRowsAtOnce = 64;

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
#if defined(KVILT_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    found.push_back("avx512");
  if (avx2) found.push_back("avx2");
#endif
  found.push_back("generic");
  return found;
}

int64_t Packed::block_bytes() const {
  switch (kind) {
    case Kind::kFloat: return kBlock * kTile * 4;
    case Kind::kNibble16: return 256 + 2 * 32;
    case Kind::kNibble32: return 256 + 2 * 64;
    case Kind::kByte16: return 512 + 32;
    case Kind::kByte32: return 512 + 2 * 64;
    case Kind::kByteHalves: return 512 + 2 * 64;
  }
  return 0;
}

Engine::Engine(int threads, const std::string& isa)
    : workers_(std::max(1, threads)), kernels_(find_kernels(isa)), scratch_(std::max(1, threads)) {}

void Engine::quantize(const float* x, int64_t rows, int64_t inputs) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  values_.resize(rows * blocks * kBlock);
  scales_.resize(rows * blocks);
  sums_.resize(rows * blocks);
  totals_.resize(rows * blocks * 2);
  const auto one = [&](int64_t row, int) {
    kernels_->quantize(x + row * inputs, inputs, blocks, values_.data() + row * blocks * kBlock,
                       scales_.data() + row * blocks, sums_.data() + row * blocks, totals_.data() + row * blocks * 2);
  };
  if (rows < 8) for (int64_t row = 0; row < rows; ++row) one(row, 0);
  else workers_.run(rows, one);
}

void Engine::linears(const std::vector<Product>& products, const float* x, int64_t rows) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t inputs = products.front().weight.inputs;
  bool packed = false;
  int64_t tiles = 0;
  for (const Product& product : products) {
    if (product.weight.inputs != inputs) throw std::invalid_argument("products of one input differ in its size");
    packed |= product.weight.kind != Kind::kFloat;
    tiles += product.weight.tiles();
  }
  if (packed) quantize(x, rows, inputs);
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  const Quantized quantized{values_.data(), scales_.data(), sums_.data(), totals_.data(), blocks};
  const int64_t chunks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  // A few tiles an item: handing one out costs as much as a short tile takes.
  const int64_t together = std::max<int64_t>(1, std::min<int64_t>(8, tiles / (workers_.threads() * 4)));
  const int64_t groups = (tiles + together - 1) / together;
  workers_.run(groups * chunks, [&](int64_t item, int) {
    const int64_t first = item / groups * kRowsAtOnce, last = std::min(rows, first + kRowsAtOnce);
    for (int64_t at = item % groups * together; at < std::min(tiles, (item % groups + 1) * together); ++at) {
      int64_t tile = at;
      size_t which = 0;
      while (tile >= products[which].weight.tiles()) tile -= products[which++].weight.tiles();
      const Product& p = products[which];
      if (p.weight.kind == Kind::kFloat)
        kernels_->linear_float(p.weight, tile, x, first, last, p.bias, p.out, p.weight.outputs);
      else
        kernels_->linear(p.weight, tile, quantized, first, last, p.bias, p.out, p.weight.outputs);
    }
  });
}

void Engine::embed(const Packed& w, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w.outputs) throw std::out_of_range("a token id is outside the embedding");
  std::lock_guard<std::mutex> guard(lock_);
  workers_.run(count, [&](int64_t i, int) { kernels_->embed(w, ids[i], out + i * w.inputs); });
}

void Engine::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t row, int) { kernels_->rms_norm(x + row * n, weight, eps, n, out + row * n); };
  if (rows < 16) for (int64_t row = 0; row < rows; ++row) one(row, 0);
  else workers_.run(rows, one);
}

void Engine::gate(const float* gate, const float* up, int64_t n, int activation, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  constexpr int64_t kPiece = 4096;
  workers_.run((n + kPiece - 1) / kPiece, [&](int64_t item, int) {
    const int64_t at = item * kPiece;
    kernels_->gate(gate + at, up + at, std::min(kPiece, n - at), activation, out + at);
  });
}

}  // namespace kvilt
