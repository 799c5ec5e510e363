#include "engine.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "packed.h"

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

// Groups of rows that one thread takes through a tile before another tile: their activations stay in its cache.
constexpr int64_t kGroupsAtOnce = 8;
constexpr int64_t kWorthSharing = 64;  // blocks of activations: fewer take less time than waking a thread

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

Engine::Engine(int threads, const std::string& isa)
    : workers_(std::max(1, threads)), kernels_(find_kernels(isa)), attention_(workers_, kernels_->name),
      reducer_(workers_, kernels_->name), lora_(workers_, kernels_->name) {}

Rows Engine::quantize(const float* x, int64_t rows, int64_t inputs, bool packed) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  const int64_t needed = rows * blocks, groups = (rows + kGroup - 1) / kGroup;
  if (int64_t(floats_.size()) < needed * 4) {
    values_.resize(needed * kBlock);
    floats_.resize(needed * 4);
    rest_values_.resize(needed * kBlock);
    rest_floats_.resize(needed * 4);
  }
  const int64_t rests = groups * (1 + kGroup * blocks);
  if (int64_t(rests_.size()) < rests) rests_.resize(rests);
  const Rows quantized{x, values_.data(), rest_values_.data(), floats_.data(), rest_floats_.data(), rests_.data(),
                       rows, inputs, blocks};
  if (!packed) return quantized;
  const auto one = [&](int64_t group, int) { kernels_->quantize(quantized, group); };
  if (needed < kWorthSharing) for (int64_t group = 0; group < groups; ++group) one(group, 0);
  else workers_.run(groups, one);
  return quantized;
}

void Engine::tiles(int64_t tiles, int64_t groups, const std::function<void(int64_t, int64_t, int64_t)>& work) {
  // A few tiles an item: handing one out costs as much as a short tile takes.
  const int64_t together = std::clamp<int64_t>(tiles / (workers_.threads() * 16), 1, 8);
  const int64_t runs = (tiles + together - 1) / together, chunks = (groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
  workers_.run(runs * chunks, [&](int64_t item, int) {
    const int64_t first = item / runs * kGroupsAtOnce, last = std::min(groups, first + kGroupsAtOnce);
    for (int64_t tile = item % runs * together; tile < std::min(tiles, (item % runs + 1) * together); ++tile)
      work(tile, first, last);
  });
}

void Engine::linears(const std::vector<Product>& products, const float* x, int64_t rows) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t inputs = products.front().weight.inputs;
  bool packed = false;
  int64_t count = 0;
  for (const Product& product : products) {
    if (product.weight.inputs != inputs) throw std::invalid_argument("products of one input differ in its size");
    packed |= product.weight.kind > Kind::kBfloat;
    count += product.weight.tiles();
  }
  const Rows quantized = quantize(x, rows, inputs, packed);
  tiles(count, quantized.groups(), [&](int64_t tile, int64_t first, int64_t last) {
    size_t which = 0;
    while (tile >= products[which].weight.tiles()) tile -= products[which++].weight.tiles();
    kernels_->linear(products[which].weight, tile, quantized, first, last, products[which].to);
  });
}

void Engine::gated(const Product& gate, const Product& up, const float* x, int64_t rows, int activation, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  if (gate.weight.inputs != up.weight.inputs || gate.weight.outputs != up.weight.outputs)
    throw std::invalid_argument("a gate and what it opens differ in size");
  const bool packed = gate.weight.kind > Kind::kBfloat || up.weight.kind > Kind::kBfloat;
  const Rows quantized = quantize(x, rows, gate.weight.inputs, packed);
  tiles(gate.weight.tiles(), quantized.groups(), [&](int64_t tile, int64_t first, int64_t last) {
    kernels_->gated(gate.weight, up.weight, tile, quantized, first, last, gate.to.bias, up.to.bias, activation, out);
  });
}

void Engine::embed(const Packed& w, const int64_t* ids, int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w.outputs) throw std::out_of_range("a token id is outside the embedding");
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t i, int) { kernels_->embed(w, ids[i], scale, out + i * w.inputs); };
  if (count < 4) for (int64_t i = 0; i < count; ++i) one(i, 0);
  else workers_.run(count, one);
}

void Engine::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t row, int) { kernels_->rms_norm(x + row * n, weight, eps, n, out + row * n); };
  if (rows * n < kWorthSharing * kBlock) for (int64_t row = 0; row < rows; ++row) one(row, 0);
  else workers_.run(rows, one);
}

void Engine::pieces(int64_t n, const std::function<void(int64_t at, int64_t count)>& work) {
  std::lock_guard<std::mutex> guard(lock_);
  constexpr int64_t kPiece = 4096;
  workers_.run((n + kPiece - 1) / kPiece, [&](int64_t item, int) {
    work(item * kPiece, std::min(kPiece, n - item * kPiece));
  });
}

void Engine::add(const float* a, const float* b, int64_t n, float* out) {
  pieces(n, [&](int64_t at, int64_t count) { kernels_->add(a + at, b + at, count, out + at); });
}

void Engine::soft_cap(float* x, int64_t n, float cap) {
  pieces(n, [&](int64_t at, int64_t count) {
    for (int64_t i = at; i < at + count; ++i) x[i] = std::tanh(x[i] / cap) * cap;
  });
}

void Engine::argmax(const float* x, int64_t rows, int64_t n, int64_t* out) {
  std::lock_guard<std::mutex> guard(lock_);
  workers_.run(rows, [&](int64_t row, int) { out[row] = kernels_->argmax(x + row * n, n); });
}

void Engine::rotation(const int64_t* positions, int64_t tokens, const float* radians, int64_t pairs, float growth,
                      float* cos, float* sin) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t t, int) {
    for (int64_t p = 0; p < pairs; ++p) {
      // The angle is float32, as models were trained with it; its cosine is exact but for the last rounding.
      const double angle = float(positions[t]) * radians[p];
      cos[t * pairs + p] = float(std::cos(angle)) * growth;
      sin[t * pairs + p] = float(std::sin(angle)) * growth;
    }
  };
  if (tokens < 4) for (int64_t t = 0; t < tokens; ++t) one(t, 0);
  else workers_.run(tokens, one);
}

void Engine::advance(const Cursor& cursor) {
  for (int64_t row = 0; row < cursor.rows; ++row) {
    const int64_t position = ++cursor.positions[row], page = position / cursor.page_tokens;
    for (size_t group = 0; group < cursor.slots.size(); ++group)
      if (page < cursor.width)  // past the last step there may be no page; nobody writes there
        cursor.slots[group][row] = cursor.tables[group][row * cursor.width + page] * cursor.page_tokens +
                                   position % cursor.page_tokens;
  }
}

void Engine::pack(const Packing& packing, const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs,
                  uint8_t* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t bytes = tile_bytes(packing.kind, inputs);
  workers_.run((outputs + kTile - 1) / kTile, [&](int64_t tile, int) {
    packing.tile(source, row_bytes, outputs, inputs, tile, out + tile * bytes);
  });
}

void Engine::rotate(const RotateArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.rotate(args);
}

void Engine::write(const WriteArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.write(args);
}

void Engine::follow(const FollowArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.follow(args);
}

void Engine::attend(const AttendArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.attend(args);
}

void Engine::read_slots(const std::vector<SlotsArgs>& layers) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.read_slots(layers);
}

void Engine::write_slots(const std::vector<SlotsArgs>& layers) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.write_slots(layers);
}

void Engine::peaks(const float* x, int64_t rows, int64_t n, int64_t* ids, float* values) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.argmax(x, rows, n, ids, values);
}

void Engine::draw(const float* x, int64_t n, const std::vector<Choice>& choices, int64_t* out, uint8_t* kept) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.draw(x, n, choices, out, kept);
}

void Engine::logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
                      int64_t top, const LogprobsOut& out) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.logprobs(x, n, rows, tokens, top, out);
}

void Engine::adapt(const AdaptArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  lora_.adapt(args);
}

void Engine::open(const float* gate, const float* up, int64_t n, int activation, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  lora_.open(gate, up, n, activation, out);
}

}  // namespace kvilt
