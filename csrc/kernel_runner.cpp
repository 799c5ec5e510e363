#include "kernel_runner.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "packed.h"

namespace kvilt {
namespace {

constexpr int64_t kCachedBytes = 1 << 20;   // activations that one thread takes through a tile before another tile
constexpr int64_t kPiecesOfThread = 8;      // of products of few rows, if there are enough tiles
constexpr int64_t kFewGroups = 2;           // of rows, which a tile of AMX takes together
constexpr int64_t kLeastGroups = 16;        // of rows that are worth unpacking weights for; a multiple of four
constexpr int64_t kLargePiece = 64 * 8192;  // groups of rows times inputs
constexpr int64_t kLastTiles = 4;           // of a thread, in small pieces
constexpr int64_t kWorthSharing = 64;       // blocks of activations: fewer take less time than waking a thread

int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// About how long one core takes for a tile: it reads weights at 10 bytes a nanosecond (8 if they become bfloat16) and
// multiplies 150 numbers.
int64_t tile_nanoseconds(const PackedWeight& weight, int64_t rows, Layout layout) {
  const int64_t bytes = tile_bytes(weight.kind, weight.inputs);
  return std::max(bytes / (layout == Layout::kRows ? 8 : 10), kTile * weight.inputs * rows / 150);
}

}  // namespace

KernelRunner::KernelRunner(int threads, const std::string& isa, const std::vector<std::vector<int>>& cpus)
    : pool_(std::max(1, threads), cpus), kernels_(find_kernels(isa)), attention_(pool_, kernels_.pages),
      reducer_(pool_, kernels_.reduce), lora_(pool_, kernels_.lora), recurrent_(pool_, kernels_.recurrent),
      experts_(pool_, kernels_.linear, kernels_.lora), scratch_(kernels_.linear.layout) {}

QuantizedRows KernelRunner::quantize(const float* x, int64_t rows, int64_t inputs, bool plain) {
  const int64_t groups = (rows + kRowGroup - 1) / kRowGroup;
  scratch_.reserve(rows, inputs, groups);
  const QuantizedRows quantized = scratch_.rows(x, inputs, 0, 0, rows);
  if (plain) return quantized;
  const auto one = [&](int64_t item, int) { kernels_.linear.quantize(quantized, item); };
  const int64_t items = kernels_.linear.quantize_items(quantized);
  if (rows * quantized.blocks < kWorthSharing)
    for (int64_t item = 0; item < items; ++item) one(item, 0);
  else pool_.run(items, one);
  return quantized;
}

// Pieces of so many tiles and groups of rows.
void KernelRunner::cut(int64_t tile, int64_t last_tile, int64_t together, int64_t groups, int64_t at_once) {
  for (int64_t first = 0; first < groups; first += at_once)
    for (int64_t at = tile; at < last_tile; at += together)
      pieces_.push_back({at, std::min(last_tile, at + together), first, std::min(groups, first + at_once)});
}

// Each thread has a run of tiles in pieces that get smaller: handing one out costs as much as a short tile takes, and the
// threads should end together.
void KernelRunner::cut_smaller(int64_t tiles, int64_t groups, int threads) {
  for (int64_t thread = 0; thread < threads; ++thread) {
    const int64_t end = tiles * (thread + 1) / threads;
    for (int64_t at = tiles * thread / threads, next; at < end; at = next) {
      next = at + std::clamp<int64_t>((end - at) / 2, 1, kernels_.linear.tiles_at_once);
      pieces_.push_back({at, next, 0, groups});
    }
  }
}

// In the layout of rows a thread reads activations once for all tiles of a piece, and unpacks weights once for all of its
// rows. But a thread that shares its core takes up to three times as long. So each thread has a run of tiles that begins
// with large pieces and ends with small ones, with which the others help it.
void KernelRunner::cut_for_rows(int64_t tiles, int64_t groups, int64_t inputs, int threads) {
  const int64_t most = kernels_.linear.tiles_at_once, pairs = ceil_div(tiles, 2);
  if (groups <= kLeastGroups) {
    const int64_t together = std::clamp<int64_t>(tiles / (threads * kPiecesOfThread), 1, most);
    return cut(0, tiles, groups <= kFewGroups ? together : ceil_div(together, 2) * 2, groups, groups);
  }
  const int64_t large = std::clamp<int64_t>(kLargePiece / inputs / kLeastGroups * kLeastGroups, kLeastGroups,
                                            kernels_.linear.groups_at_once);
  for (int64_t thread = 0; thread < threads; ++thread) {
    const int64_t begin = pairs * thread / threads * 2, end = std::min(tiles, pairs * (thread + 1) / threads * 2);
    const int64_t last = std::max(begin, end - kLastTiles);
    cut(begin, last, most, groups, large);
    cut(last, end, 2, groups, kLeastGroups);
  }
}

void KernelRunner::tiles(int64_t tiles, int64_t groups, int64_t inputs, int64_t nanoseconds, const TileWork& work) {
  const int threads = pool_.worth(nanoseconds);
  pieces_.clear();
  if (kernels_.linear.layout == Layout::kRows) {
    cut_for_rows(tiles, groups, inputs, threads);
  } else {
    // Eight groups of rows or more, if the cache of a core holds them; an even number, as kernels ask for.
    const int64_t cached = kCachedBytes / (2 * kRowGroup * inputs) * 2;
    const int64_t at_once = std::clamp<int64_t>(cached, 8, kernels_.linear.groups_at_once);
    if (groups <= at_once) cut_smaller(tiles, groups, threads);
    else cut(0, tiles, std::clamp<int64_t>(tiles / (threads * 16), 1, kernels_.linear.tiles_at_once), groups, at_once);
  }
  const auto one = [&](int64_t at, int) {
    const Piece& piece = pieces_[size_t(at)];
    work(piece.tile, piece.last_tile, piece.first, piece.last);
  };
  pool_.run(int64_t(pieces_.size()), one, threads);
}

void KernelRunner::linears(const std::vector<LinearMap>& maps, const float* x, int64_t rows) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t inputs = maps.front().weight.inputs;
  bool plain = true;
  int64_t count = 0, nanoseconds = 0;
  for (const LinearMap& map : maps) {
    if (map.weight.inputs != inputs) throw std::invalid_argument("maps of one input differ in its size");
    plain &= kernels_.linear.takes_plain(map.weight.kind);
    count += map.weight.tiles();
    nanoseconds += map.weight.tiles() * tile_nanoseconds(map.weight, rows, kernels_.linear.layout);
  }
  const QuantizedRows quantized = quantize(x, rows, inputs, plain);
  const auto work = [&](int64_t tile, int64_t last_tile, int64_t first, int64_t last) {
    for (const LinearMap& map : maps) {  // the tiles of all maps, one after the other
      const int64_t own = map.weight.tiles();
      if (tile < own && last_tile > 0)
        kernels_.linear.linear_tiles(map.weight, std::max<int64_t>(tile, 0), std::min(own, last_tile), quantized, first,
                                     last, map.to);
      tile -= own;
      last_tile -= own;
    }
  };
  tiles(count, quantized.groups(), inputs, nanoseconds, work);
}

void KernelRunner::gate_up(const LinearMap& gate, const LinearMap& up, const float* x, int64_t rows,
                           Activation activation, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  if (gate.weight.inputs != up.weight.inputs || gate.weight.outputs != up.weight.outputs)
    throw std::invalid_argument("a gate and what it opens differ in size");
  const bool plain = kernels_.linear.takes_plain(gate.weight.kind) && kernels_.linear.takes_plain(up.weight.kind);
  const QuantizedRows quantized = quantize(x, rows, gate.weight.inputs, plain);
  const Layout layout = kernels_.linear.layout;
  const int64_t nanoseconds =
      gate.weight.tiles() * (tile_nanoseconds(gate.weight, rows, layout) + tile_nanoseconds(up.weight, rows, layout));
  const auto work = [&](int64_t tile, int64_t last_tile, int64_t first, int64_t last) {
    kernels_.linear.gate_up_tiles(gate.weight, up.weight, tile, last_tile, quantized, first, last, gate.to.bias,
                                  up.to.bias, activation, out);
  };
  tiles(gate.weight.tiles(), quantized.groups(), gate.weight.inputs, nanoseconds, work);
}

void KernelRunner::embed(const PackedWeight& w, const int64_t* ids, int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= w.outputs) throw std::out_of_range("a token id is outside the embedding");
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t i, int) { kernels_.linear.embed(w, ids[i], scale, out + i * w.inputs); };
  if (count < 4)
    for (int64_t i = 0; i < count; ++i) one(i, 0);
  else pool_.run(count, one);
}

void KernelRunner::rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t row, int) { kernels_.linear.rms_norm(x + row * n, weight, eps, n, out + row * n); };
  if (rows * n < kWorthSharing * kBlock)
    for (int64_t row = 0; row < rows; ++row) one(row, 0);
  else pool_.run(rows, one);
}

void KernelRunner::layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t rows,
                              int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t row, int) {
    kernels_.linear.layer_norm(x + row * n, weight, bias, eps, n, out + row * n);
  };
  if (rows * n < kWorthSharing * kBlock)
    for (int64_t row = 0; row < rows; ++row) one(row, 0);
  else pool_.run(rows, one);
}

void KernelRunner::per_head_linear(const PerHeadArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  constexpr int64_t kTokens = 32;  // of an item
  pool_.run((args.tokens + kTokens - 1) / kTokens * args.heads, [&](int64_t item, int) {
    const int64_t first = item / args.heads * kTokens;
    kernels_.per_head.linear(args, item % args.heads, first, std::min(args.tokens, first + kTokens));
  });
}

void KernelRunner::pieces(int64_t n, const std::function<void(int64_t at, int64_t count)>& work) {
  std::lock_guard<std::mutex> guard(lock_);
  constexpr int64_t kPiece = 4096;
  pool_.run((n + kPiece - 1) / kPiece,
            [&](int64_t item, int) { work(item * kPiece, std::min(kPiece, n - item * kPiece)); });
}

void KernelRunner::add(const float* a, const float* b, int64_t n, float* out) {
  pieces(n, [&](int64_t at, int64_t count) { kernels_.linear.add(a + at, b + at, count, out + at); });
}

void KernelRunner::add_scaled(const float* a, const float* b, float scale, int64_t n, float* out) {
  pieces(n, [&](int64_t at, int64_t count) { kernels_.linear.add_scaled(a + at, b + at, scale, count, out + at); });
}

void KernelRunner::scale_queries(const float* x, const int64_t* positions, int64_t tokens, int64_t n, float beta,
                                 int64_t length, int64_t offset, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  for (int64_t t = 0; t < tokens; ++t) {
    const double steps = double((positions[t] + offset) / length);  // positions are not negative: this is the floor
    const float factor = float(1.0 + double(beta) * std::log1p(steps));
    for (int64_t i = t * n; i < (t + 1) * n; ++i) out[i] = x[i] * factor;
  }
}

void KernelRunner::soft_cap(float* x, int64_t n, float cap) {
  pieces(n, [&](int64_t at, int64_t count) {
    for (int64_t i = at; i < at + count; ++i) x[i] = std::tanh(x[i] / cap) * cap;
  });
}

void KernelRunner::argmax(const float* x, int64_t rows, int64_t n, int64_t* out) {
  std::lock_guard<std::mutex> guard(lock_);
  pool_.run(rows, [&](int64_t row, int) { out[row] = kernels_.linear.argmax(x + row * n, n); });
}

void KernelRunner::rope_cos_sin(const int64_t* positions, int64_t tokens, const float* inv_freq, int64_t pairs,
                                float mscale, float* cos, float* sin) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto one = [&](int64_t t, int) {
    for (int64_t p = 0; p < pairs; ++p) {
      // The angle is float32, as models were trained with it; its cosine is exact but for the last rounding.
      const double angle = float(positions[t]) * inv_freq[p];
      cos[t * pairs + p] = float(std::cos(angle)) * mscale;
      sin[t * pairs + p] = float(std::sin(angle)) * mscale;
    }
  };
  if (tokens < 4)
    for (int64_t t = 0; t < tokens; ++t) one(t, 0);
  else pool_.run(tokens, one);
}

void KernelRunner::advance(const DecodeState& state) {
  for (int64_t row = 0; row < state.rows; ++row) {
    const int64_t position = ++state.positions[row], page = position / state.page_tokens;
    for (size_t group = 0; group < state.slots.size(); ++group)
      if (page < state.width)  // past the last step there may be no page, and then no step writes there
        state.slots[group][row] =
            state.tables[group][row * state.width + page] * state.page_tokens + position % state.page_tokens;
  }
}

void KernelRunner::pack(const Packing& packing, const uint8_t* source, int64_t row_bytes, int64_t outputs,
                        int64_t inputs, uint8_t* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t bytes = tile_bytes(packing.kind, inputs);
  const PackTile pack_tile = packing.tile(kernels_.linear.layout);
  pool_.run((outputs + kTile - 1) / kTile,
            [&](int64_t tile, int) { pack_tile(source, row_bytes, outputs, inputs, tile, out + tile * bytes); });
}

void KernelRunner::rotate(const RotateArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.rotate(args);
}

void KernelRunner::write(const WriteArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.write(args);
}

void KernelRunner::interpolate(const InterpolateArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.interpolate(args);
}

void KernelRunner::attention(const AttentionArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.attention(args);
}

void KernelRunner::read_slots(const std::vector<SlotsArgs>& layers) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.read_slots(layers);
}

void KernelRunner::write_slots(const std::vector<SlotsArgs>& layers) {
  std::lock_guard<std::mutex> guard(lock_);
  attention_.write_slots(layers);
}

void KernelRunner::causal_conv(const ConvArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  recurrent_.causal_conv(args);
}

void KernelRunner::fold(const FoldArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  recurrent_.fold(args);
}

void KernelRunner::sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  recurrent_.sigmoid_mul(x, gate, n, out);
}

void KernelRunner::streams(const StreamArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto kernel = args.y ? kernels_.streams.add : kernels_.streams.mix;
  pool_.run(args.tokens, [&](int64_t token, int) { kernel(args, token); });
}

void KernelRunner::match_rms(const float* x, const float* like, int64_t rows, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  pool_.run(rows, [&](int64_t row, int) { kernels_.streams.match_rms(x + row * n, like + row * n, n, out + row * n); });
}

void KernelRunner::gaussian_relu(const float* x, float cut, int64_t rows, int64_t n, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  pool_.run(rows, [&](int64_t row, int) { kernels_.streams.gaussian_relu(x + row * n, cut, n, out + row * n); });
}

void KernelRunner::argmax_with_values(const float* x, int64_t rows, int64_t n, int64_t* ids, float* values) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.argmax(x, rows, n, ids, values);
}

void KernelRunner::draw(const float* x, int64_t n, const std::vector<DrawParams>& draws, int64_t* out, uint8_t* kept) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.draw(x, n, draws, out, kept);
}

void KernelRunner::logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows,
                            const std::vector<int64_t>& tokens, int64_t top, const LogprobsOut& out) {
  std::lock_guard<std::mutex> guard(lock_);
  reducer_.logprobs(x, n, rows, tokens, top, out);
}

void KernelRunner::add_lora(const LoraArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  lora_.add_lora(args);
}

void KernelRunner::route(const RouteArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  experts_.route(args);
}

void KernelRunner::experts(const ExpertsArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  experts_.experts(args);
}

void KernelRunner::sum_experts(const ExpertSumArgs& args) {
  std::lock_guard<std::mutex> guard(lock_);
  experts_.sum_experts(args);
}

void KernelRunner::act_mul(const float* gate, const float* up, int64_t n, Activation activation, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  lora_.act_mul(gate, up, n, activation, out);
}

}  // namespace kvilt
