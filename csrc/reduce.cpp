#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();  // a token at -inf is out already
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float below(double value) { return std::nextafter(float(value), kLowest); }

}  // namespace

// What one thread works with; grows to the largest vocabulary it has seen.
struct Reducer::Scratch {
  std::vector<float> scores, found, weights, room;
  std::vector<int32_t> ids, order;

  void fit(int64_t n, int64_t k) {
    const size_t size = size_t(padded(n) + kLanes);
    if (scores.size() < size) scores.resize(size), found.resize(size), weights.resize(size), ids.resize(size);
    if (room.size() < size_t(kth_room(k))) room.resize(size_t(kth_room(k)));
  }
};

Reducer::Reducer(ThreadPool& pool, const ReduceKernels& kernels)
    : pool_(pool), kernels_(kernels), scratch_(new Scratch[size_t(pool.threads())]) {}

Reducer::~Reducer() = default;

void Reducer::argmax(const float* x, int64_t rows, int64_t n, int64_t* ids, float* peaks) {
  pool_.run(rows, [&](int64_t row, int) {
    const Peak peak = kernels_.peak(x + row * n, n);
    ids[row] = peak.id, peaks[row] = peak.value;
  });
}

void Reducer::draw(const float* x, int64_t n, const std::vector<DrawParams>& draws, int64_t* out, uint8_t* kept) {
  pool_.run(int64_t(draws.size()), [&](int64_t item, int worker) {
    const DrawParams& params = draws[size_t(item)];
    out[item] = draw_row(x + params.row * n, n, params, scratch_[worker], kept ? kept + item * n : nullptr);
  });
}

int64_t Reducer::draw_row(const float* x, int64_t n, const DrawParams& params, Scratch& scratch, uint8_t* kept) {
  scratch.fit(n, std::min(params.top_k, n));
  const float* scores = scratch.scores.data();
  const float peak = kernels_.scale_logits(x, n, params.temperature, scratch.scores.data());
  if (kept) std::fill_n(kept, n, uint8_t(0));
  if (!std::isfinite(peak)) return -1;
  if (!params.filtered(n)) {
    for (int64_t i = 0; kept && i < n; ++i) kept[i] = scores[i] >= kLowest;
    return kernels_.draw(scores, padded(n), peak, params.key);
  }
  const Candidates candidates = filter(n, peak, params, scratch);
  for (int64_t i = 0; kept && i < candidates.count; ++i) kept[candidates.ids[i]] = 1;
  return draw_candidate(candidates, peak, params.key);
}

// First a floor that no survivor is below, so that the exact filters see few tokens. Exact for top-k. For top-p: tokens
// below (1 - p) / n cannot together reach the mass that is cut. For min-p: its own threshold. The last two with a
// margin.
Candidates Reducer::filter(int64_t n, float peak, const DrawParams& params, Scratch& scratch) {
  const float* scores = scratch.scores.data();
  const int64_t size = padded(n);
  float floor = kLowest;
  double total = 0;
  if (params.top_k > 0 && params.top_k < n) {
    floor = std::max(floor, kernels_.kth_largest(scores, size, params.top_k, scratch.room.data()));
  } else {
    if (params.top_p < 1) {
      total = kernels_.exp_sum(scores, size, peak);
      floor = std::max(floor, below(double(peak) + std::log((1 - params.top_p) * total / double(n) * 0.99)));
    }
    if (params.min_p > 0) floor = std::max(floor, below(double(peak) + std::log(params.min_p) - 0.01));
  }
  Candidates candidates{0, scratch.ids.data(), scratch.found.data(), scratch.weights.data()};
  candidates.count = kernels_.collect_at_least(scores, size, floor, candidates.ids, candidates.scores);
  kernels_.exp_weights(candidates.scores, candidates.count, peak, candidates.weights);
  if (params.top_p < 1) keep_top_p(candidates, total, params.top_p, peak, kernels_, scratch.order);
  if (params.min_p > 0) keep_min_p(candidates, float(params.min_p));
  if (params.typical_p < 1) keep_typical(candidates, params.typical_p);
  return candidates;
}

void Reducer::logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
                       int64_t top, const LogprobsOut& out) {
  pool_.run(int64_t(rows.size()), [&](int64_t item, int worker) {
    logprobs_row(x + rows[size_t(item)] * n, n, tokens[size_t(item)], top, out, item, scratch_[worker]);
  });
}

void Reducer::logprobs_row(const float* x, int64_t n, int64_t token, int64_t top, const LogprobsOut& out, int64_t row,
                           Scratch& scratch) {
  scratch.fit(n, top);
  const float* scores = scratch.scores.data();
  const float peak = kernels_.scale_logits(x, n, 1.0f, scratch.scores.data());
  int64_t* top_ids = out.top_ids + row * top;
  float* top_logprobs = out.top_logprobs + row * top;
  if (!std::isfinite(peak)) {
    out.logprobs[row] = kNaN, out.ranks[row] = 0;
    for (int64_t i = 0; i < top; ++i) top_ids[i] = i, top_logprobs[i] = kNaN;
    return;
  }
  const double log_mass = std::log(kernels_.exp_sum(scores, padded(n), peak));
  // The peak first: it is exact, and the rest is small.
  const auto logprob = [&](int64_t id) { return float(double(scores[id]) - double(peak) - log_mass); };
  out.logprobs[row] = logprob(token);
  out.ranks[row] = kernels_.count_ahead(scores, padded(n), token) + 1;
  if (top == 0) return;
  int32_t* ids = scratch.ids.data();
  const float floor = kernels_.kth_largest(scores, padded(n), top, scratch.room.data());
  const int64_t count = kernels_.collect_at_least(scores, padded(n), floor, ids, scratch.found.data());
  std::partial_sort(ids, ids + top, ids + count, [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;  // the padding comes last of all
  });
  for (int64_t i = 0; i < top; ++i) top_ids[i] = ids[i], top_logprobs[i] = logprob(ids[i]);
}

}  // namespace kvilt
