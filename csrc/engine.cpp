#include "engine.h"

#include <algorithm>
#include <cstring>
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

uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // too large: infinity
  if (magnitude < 0x38800000u) {                                  // subnormal: round at 2^-24
    float absolute;
    std::memcpy(&absolute, &magnitude, 4);
    absolute += 0.5f;  // the unit in the last place of 0.5 is 2^-24
    uint32_t rounded;
    std::memcpy(&rounded, &absolute, 4);
    return uint16_t(sign | (rounded - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void put(const Pages& pages, const void* base, int64_t at, float value) {
  switch (pages.dtype) {
    case 0: static_cast<float*>(const_cast<void*>(base))[at] = value; return;
    case 1: static_cast<uint16_t*>(const_cast<void*>(base))[at] = to_half(value); return;
    default: static_cast<uint16_t*>(const_cast<void*>(base))[at] = to_bfloat(value); return;
  }
}

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

void Engine::rotate(const float* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
                    int64_t pairs, bool interleaved, float* out) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float *c = cos + t * pairs, *s = sin + t * pairs;
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x + (t * heads + h) * dim;
      float* to = out + (t * heads + h) * dim;
      for (int64_t p = 0; p < pairs; ++p) {
        const int64_t i = interleaved ? 2 * p : p, j = interleaved ? 2 * p + 1 : p + pairs;
        const float a = from[i], b = from[j];
        to[i] = a * c[p] - b * s[p];
        to[j] = b * c[p] + a * s[p];
      }
      for (int64_t d = 2 * pairs; d < dim; ++d) to[d] = from[d];
    }
  }
}

void Engine::write(const Pages& pages, const int64_t* slots, int64_t tokens, const float* keys, const float* values) {
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t page = slots[t] / pages.page_tokens, at = slots[t] % pages.page_tokens;
    for (int64_t h = 0; h < pages.kv_heads; ++h) {
      const int64_t base = page * pages.kv_heads + h, from = t * pages.kv_heads + h;
      for (int64_t d = 0; d < pages.dim; ++d)
        put(pages, pages.keys, (base * pages.dim + d) * pages.lanes + at, keys[from * pages.dim + d]);
      for (int64_t d = 0; d < pages.value_dim; ++d)
        put(pages, pages.values, (base * pages.page_tokens + at) * pages.value_dim + d, values[from * pages.value_dim + d]);
    }
  }
}

void Engine::attend(const float* query, int64_t heads, const Pages& pages, const int64_t* tables, int64_t width,
                    const int64_t* starts, int64_t rows, const int64_t* positions, const Mask& mask, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t group = heads / pages.kv_heads, tokens = starts[rows];
  std::vector<int64_t> row_of(tokens);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t t = starts[row]; t < starts[row + 1]; ++t) {
      if (positions[t] < 0 || positions[t] / pages.page_tokens >= width)
        throw std::out_of_range("a position is outside its page table");
      row_of[t] = row;
    }
  for (auto& scratch : scratch_) scratch.resize(4 * pages.lanes);
  workers_.run(tokens * pages.kv_heads, [&](int64_t item, int worker) {
    // Long prompts: the last tokens cost most, so they go first.
    const int64_t t = tokens - 1 - item / pages.kv_heads, head = item % pages.kv_heads;
    kernels_->attend(query + (t * heads + head * group) * pages.dim, group, pages, head, tables + row_of[t] * width,
                     positions[t], mask, scratch_[worker].data(), out + (t * heads + head * group) * pages.value_dim);
  });
}

}  // namespace kvilt
