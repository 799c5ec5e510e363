#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr int64_t kWorthSharing = 1 << 15;  // products of a sum: fewer take less time than waking a thread

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

void ExpertRunner::gather(const ExpertsArgs& a, int64_t inputs) {
  pool_.run(int64_t(groups_.size()), [&](int64_t item, int) {
    const Item& one = groups_[size_t(item)];
    const int64_t first = one.segment->first + one.group * kRowGroup;
    const int64_t last = std::min(one.segment->first + one.segment->rows, first + kRowGroup);
    for (int64_t row = first; row < last; ++row) {
      const float* x = a.x + token_[size_t(row)] * inputs;
      float* out = gathered_.data() + row * inputs;
      if (!a.weigh_inputs) {
        std::memcpy(out, x, size_t(inputs) * sizeof(float));
        continue;
      }
      const float weight = row_weights_[size_t(row)];
      for (int64_t i = 0; i < inputs; ++i) out[i] = x[i] * weight;
    }
  });
}

void ExpertRunner::quantize(RowScratch& room, const std::vector<float>& plain, int64_t inputs) {
  quantized_.clear();
  for (const Segment& segment : segments_) {
    const int64_t items = kernels_.quantize_items(rows_of(room, plain, segment, inputs));
    for (int64_t item = 0; item < items; ++item) quantized_.push_back({&segment, item});
  }
  pool_.run(int64_t(quantized_.size()), [&](int64_t at, int) {
    const auto& [segment, item] = quantized_[size_t(at)];
    kernels_.quantize(rows_of(room, plain, *segment, inputs), item);
  });
}

// A few tiles an item, as in other products: handing one out costs as much as a short tile takes.
void ExpertRunner::share_out(int64_t outputs) {
  const int64_t tiles = (outputs + kTile - 1) / kTile;
  const int64_t together =
      std::clamp<int64_t>(tiles * int64_t(segments_.size()) / (pool_.threads() * 16), 1, kernels_.tiles_at_once);
  items_.clear();
  for (const Segment& segment : segments_)
    for (int64_t group = 0; group < segment.groups(); group += kernels_.groups_at_once)
      for (int64_t tile = 0; tile < tiles; tile += together)
        items_.push_back({&segment, tile, std::min(tiles, tile + together), group,
                          std::min(segment.groups(), group + kernels_.groups_at_once)});
}

// The gate's tiles and then those of `up`, each run of which lies in one piece of memory; then their product.
void ExpertRunner::open_gates(const Item& one, const QuantizedRows& x, Activation activation) {
  const ExpertMaps& maps = *one.segment->maps;
  const int64_t inner = maps.gate.outputs, first = one.segment->first * inner;
  float *gate = gate_.data() + first, *up = up_.data() + first;
  const auto run = [&](const PackedWeight& weight, const float* bias, float* out) {
    kernels_.linear_tiles(weight, one.tile, one.last_tile, x, one.group, one.last_group, {bias, nullptr, out});
  };
  run(maps.gate, maps.gate_bias, gate);
  run(maps.up, maps.up_bias, up);
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
  bool plain_in = true, plain_inner = true;
  for (const ExpertMaps& one : *a.experts) {
    plain_in &= kernels_.takes_plain(one.gate.kind) && kernels_.takes_plain(one.up.kind);
    plain_inner &= kernels_.takes_plain(one.down.kind);
  }
  sort(a);
  const int64_t groups = int64_t(groups_.size());
  const bool alone = a.tokens == 1 && !a.weigh_inputs;  // all experts read the same row, which is quantized once
  in_.reserve(alone ? 1 : rows, hidden, alone ? 1 : groups);
  inner_.reserve(rows, inner, groups);
  if (!alone) grow(gathered_, rows * hidden);
  grow(gate_, rows * inner);
  grow(up_, rows * inner);
  grow(made_, rows * hidden);
  const QuantizedRows only = in_.rows(a.x, hidden, 0, 0, 1);
  if (alone && !plain_in)
    for (int64_t item = 0; item < kernels_.quantize_items(only); ++item) kernels_.quantize(only, item);
  if (!alone) gather(a, hidden);
  if (!alone && !plain_in) quantize(in_, gathered_, hidden);
  share_out(inner);
  pool_.run(int64_t(items_.size()), [&](int64_t item, int) {
    const Item& one = items_[size_t(item)];
    open_gates(one, alone ? only : rows_of(in_, gathered_, *one.segment, hidden), a.activation);
  });
  if (!plain_inner) quantize(inner_, gate_, inner);
  share_out(hidden);
  pool_.run(int64_t(items_.size()), [&](int64_t item, int) {
    const Item& one = items_[size_t(item)];
    const ExpertMaps& maps = *one.segment->maps;
    const QuantizedRows x = rows_of(inner_, gate_, *one.segment, inner);
    const LinearOutput to{maps.down_bias, nullptr, made_.data() + one.segment->first * hidden};
    kernels_.linear_tiles(maps.down, one.tile, one.last_tile, x, one.group, one.last_group, to);
  });
  if (a.weigh_inputs) ones_.assign(size_t(rows), 1.0f);
  const float* weights = a.weigh_inputs ? ones_.data() : a.weights;
  sum({made_.data(), place_.data(), weights, a.tokens, a.top_k, hidden, a.residual, a.shared, a.shared_gate, a.out});
}

}  // namespace kvilt
