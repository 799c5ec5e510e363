#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr int64_t kGroupsAtOnce = 8;        // of rows, that one thread takes through a tile before another tile
constexpr int64_t kWorthSharing = 1 << 15;  // products of a sum: fewer take less time than waking a thread

bool is_packed(const PackedWeight& weight) { return weight.kind > WeightKind::kBfloat16; }

template <typename T>
void grow(std::vector<T>& room, int64_t size) {
  if (int64_t(room.size()) < size) room.resize(size_t(size));
}

}  // namespace

// Rows in the order of their experts, and then of their tokens.
void ExpertRunner::sort(const ExpertsArgs& a) {
  const int64_t count = int64_t(a.experts->size());
  starts_.assign(size_t(count) + 1, 0);
  for (int64_t i = 0; i < a.rows(); ++i) {
    if (a.chosen[i] < 0 || a.chosen[i] >= count) throw std::out_of_range("there is no such expert");
    ++starts_[size_t(a.chosen[i]) + 1];
  }
  segments_.clear();
  int64_t group = 0;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t rows = starts_[size_t(e) + 1];
    starts_[size_t(e) + 1] += starts_[size_t(e)];
    if (rows == 0) continue;
    segments_.push_back({&(*a.experts)[size_t(e)], starts_[size_t(e)], rows, group});
    group += segments_.back().groups();
  }
  grow(token_, a.rows());
  grow(place_, a.rows());
  grow(row_weights_, a.rows());
  for (int64_t i = 0; i < a.rows(); ++i) {
    const int64_t row = starts_[size_t(a.chosen[i])]++;
    token_[size_t(row)] = int32_t(i / a.top_k);
    row_weights_[size_t(row)] = a.weights[i];
    place_[size_t(i)] = int32_t(row);
  }
  groups_.clear();
  for (const Segment& segment : segments_)
    for (int64_t g = 0; g < segment.groups(); ++g) groups_.push_back({&segment, 0, 0, g, g + 1});
}

void ExpertRunner::reserve(RowScratch& room, int64_t rows, int64_t inputs, int64_t groups, bool plain) const {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  if (plain) grow(room.plain, rows * inputs);
  grow(room.values, rows * blocks * kBlock);
  grow(room.floats, rows * blocks * 4);
  grow(room.remainder_values, rows * blocks * kBlock);
  grow(room.remainder_floats, rows * blocks * 4);
  grow(room.remainders, groups * (1 + kRowGroup * blocks));
}

QuantizedRows ExpertRunner::rows_of(RowScratch& room, const float* plain, const Segment& segment,
                                    int64_t inputs) const {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock, at = segment.first * blocks;
  return {plain + segment.first * inputs,
          room.values.data() + at * kBlock,
          room.remainder_values.data() + at * kBlock,
          room.floats.data() + at * 4,
          room.remainder_floats.data() + at * 4,
          room.remainders.data() + segment.group * (1 + kRowGroup * blocks),
          segment.rows,
          inputs,
          blocks};
}

void ExpertRunner::gather(const ExpertsArgs& a, int64_t inputs) {
  pool_.run(int64_t(groups_.size()), [&](int64_t item, int) {
    const Item& one = groups_[size_t(item)];
    const int64_t first = one.segment->first + one.group * kRowGroup;
    const int64_t last = std::min(one.segment->first + one.segment->rows, first + kRowGroup);
    for (int64_t row = first; row < last; ++row) {
      const float* x = a.x + token_[size_t(row)] * inputs;
      float* out = in_.plain.data() + row * inputs;
      if (!a.weigh_inputs) {
        std::memcpy(out, x, size_t(inputs) * sizeof(float));
        continue;
      }
      const float weight = row_weights_[size_t(row)];
      for (int64_t i = 0; i < inputs; ++i) out[i] = x[i] * weight;
    }
  });
}

void ExpertRunner::quantize(RowScratch& room, int64_t inputs, bool packed) {
  if (!packed) return;
  pool_.run(int64_t(groups_.size()), [&](int64_t item, int) {
    const Item& one = groups_[size_t(item)];
    kernels_.quantize(rows_of(room, room.plain.data(), *one.segment, inputs), one.group);
  });
}

// A few tiles an item, as in other products: handing one out costs as much as a short tile takes.
void ExpertRunner::share_out(int64_t outputs) {
  const int64_t tiles = (outputs + kTile - 1) / kTile;
  const int64_t together = std::clamp<int64_t>(tiles * int64_t(segments_.size()) / (pool_.threads() * 16), 1, 8);
  items_.clear();
  for (const Segment& segment : segments_)
    for (int64_t group = 0; group < segment.groups(); group += kGroupsAtOnce)
      for (int64_t tile = 0; tile < tiles; tile += together)
        items_.push_back({&segment, tile, std::min(tiles, tile + together), group,
                          std::min(segment.groups(), group + kGroupsAtOnce)});
}

// The gate's tiles and then those of `up`, each run of which lies in one piece of memory; then their product.
void ExpertRunner::open_gates(const Item& one, const QuantizedRows& x, Activation activation) {
  const ExpertMaps& maps = *one.segment->maps;
  const int64_t inner = maps.gate.outputs, first = one.segment->first * inner;
  float *gate = inner_.plain.data() + first, *up = up_.data() + first;
  for (int64_t tile = one.tile; tile < one.last_tile; ++tile)
    kernels_.linear_tile(maps.gate, tile, x, one.group, one.last_group, {maps.gate_bias, nullptr, gate});
  for (int64_t tile = one.tile; tile < one.last_tile; ++tile)
    kernels_.linear_tile(maps.up, tile, x, one.group, one.last_group, {maps.up_bias, nullptr, up});
  const int64_t from = one.tile * kTile, count = std::min(inner, one.last_tile * kTile) - from;
  for (int64_t row = one.group * kRowGroup; row < std::min(one.segment->rows, one.last_group * kRowGroup); ++row)
    gates_.act_mul(gate + row * inner + from, up + row * inner + from, count, activation, gate + row * inner + from);
}

void ExpertRunner::sum(const ExpertSumArgs& a) {
  const auto one = [&](int64_t token, int) {
    const auto row = [&](const float* rows) { return rows ? rows + token * a.hidden : nullptr; };
    const int64_t at = token * a.top_k;
    const float weight = a.shared_gate ? 1.0f / (1.0f + std::exp(-a.shared_gate[token])) : 1.0f;
    const ExpertSum sum{row(a.residual), a.made, a.place + at, a.weights + at, a.top_k, row(a.shared), weight};
    kernels_.expert_sum(sum, a.hidden, a.out + token * a.hidden);
  };
  if (a.tokens * a.top_k * a.hidden < kWorthSharing)
    for (int64_t token = 0; token < a.tokens; ++token) one(token, 0);
  else pool_.run(a.tokens, one);
}

void ExpertRunner::sum_experts(ExpertSumArgs a) {
  grow(place_, a.tokens * a.top_k);
  std::iota(place_.begin(), place_.end(), 0);
  a.place = place_.data();
  sum(a);
}

void ExpertRunner::experts(const ExpertsArgs& a) {
  const ExpertMaps& first = a.experts->front();
  const int64_t hidden = first.gate.inputs, inner = first.gate.outputs, rows = a.rows();
  bool packed_in = false, packed_inner = false;
  for (const ExpertMaps& one : *a.experts) {
    packed_in |= is_packed(one.gate) || is_packed(one.up);
    packed_inner |= is_packed(one.down);
  }
  sort(a);
  const int64_t groups = int64_t(groups_.size());
  const bool alone = a.tokens == 1 && !a.weigh_inputs;  // all experts read the same row, which is quantized once
  reserve(in_, alone ? 1 : rows, hidden, alone ? 1 : groups, !alone);
  reserve(inner_, rows, inner, groups, true);
  grow(up_, rows * inner);
  grow(made_, rows * hidden);
  const Segment whole{&first, 0, 1, 0};
  const QuantizedRows only = rows_of(in_, a.x, whole, hidden);
  if (alone && packed_in) kernels_.quantize(only, 0);
  if (!alone) {
    gather(a, hidden);
    quantize(in_, hidden, packed_in);
  }
  share_out(inner);
  pool_.run(int64_t(items_.size()), [&](int64_t item, int) {
    const Item& one = items_[size_t(item)];
    open_gates(one, alone ? only : rows_of(in_, in_.plain.data(), *one.segment, hidden), a.activation);
  });
  quantize(inner_, inner, packed_inner);
  share_out(hidden);
  pool_.run(int64_t(items_.size()), [&](int64_t item, int) {
    const Item& one = items_[size_t(item)];
    const ExpertMaps& maps = *one.segment->maps;
    const QuantizedRows x = rows_of(inner_, inner_.plain.data(), *one.segment, inner);
    const LinearOutput to{maps.down_bias, nullptr, made_.data() + one.segment->first * hidden};
    for (int64_t tile = one.tile; tile < one.last_tile; ++tile)
      kernels_.linear_tile(maps.down, tile, x, one.group, one.last_group, to);
  });
  if (a.weigh_inputs) ones_.assign(size_t(rows), 1.0f);
  const float* weights = a.weigh_inputs ? ones_.data() : a.weights;
  sum({made_.data(), place_.data(), weights, a.tokens, a.top_k, hidden, a.residual, a.shared, a.shared_gate, a.out});
}

}  // namespace kvilt
