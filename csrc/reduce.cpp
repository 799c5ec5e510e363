#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();  // a token at -inf is out already
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const ReduceKernels* find_reduce(const std::string& isa) {
#if defined(KVILT_X86)
  if (isa == "avx512") return avx512_reduce();
  if (isa == "avx2") return avx2_reduce();
#endif
  (void)isa;
  return generic_reduce();
}

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

Reducer::Reducer(Workers& workers, const std::string& isa)
    : workers_(workers), kernels_(find_reduce(isa)), scratch_(new Scratch[size_t(workers.threads())]) {}

Reducer::~Reducer() = default;

void Reducer::argmax(const float* x, int64_t rows, int64_t n, int64_t* ids, float* peaks) {
  workers_.run(rows, [&](int64_t row, int) {
    const Peak peak = kernels_->peak(x + row * n, n);
    ids[row] = peak.id, peaks[row] = peak.value;
  });
}

void Reducer::draw(const float* x, int64_t n, const std::vector<Choice>& choices, int64_t* out, uint8_t* kept) {
  workers_.run(int64_t(choices.size()), [&](int64_t item, int worker) {
    const Choice& choice = choices[size_t(item)];
    out[item] = draw_row(x + choice.row * n, n, choice, scratch_[worker], kept ? kept + item * n : nullptr);
  });
}

int64_t Reducer::draw_row(const float* x, int64_t n, const Choice& choice, Scratch& scratch, uint8_t* kept) {
  scratch.fit(n, std::min(choice.top_k, n));
  const float* scores = scratch.scores.data();
  const float peak = kernels_->enter(x, n, choice.temperature, scratch.scores.data());
  if (kept) std::fill_n(kept, n, uint8_t(0));
  if (!std::isfinite(peak)) return -1;
  if (!choice.filtered(n)) {
    for (int64_t i = 0; kept && i < n; ++i) kept[i] = scores[i] >= kLowest;
    return kernels_->draw(scores, padded(n), peak, choice.key);
  }
  const Left left = filter(n, peak, choice, scratch);
  for (int64_t i = 0; kept && i < left.count; ++i) kept[left.ids[i]] = 1;
  return draw_left(left, peak, choice.key);
}

// First a floor that no survivor is below, so that the exact filters see few tokens. Exact for top-k. For top-p: tokens
// below (1 - p) / n cannot together reach the mass that is cut. For min-p: its own threshold. The last two with a margin.
Left Reducer::filter(int64_t n, float peak, const Choice& choice, Scratch& scratch) {
  const float* scores = scratch.scores.data();
  const int64_t size = padded(n);
  float floor = kLowest;
  double total = 0;
  if (choice.top_k > 0 && choice.top_k < n) {
    floor = std::max(floor, kernels_->kth(scores, size, choice.top_k, scratch.room.data()));
  } else {
    if (choice.top_p < 1) {
      total = kernels_->mass(scores, size, peak);
      floor = std::max(floor, below(double(peak) + std::log((1 - choice.top_p) * total / double(n) * 0.99)));
    }
    if (choice.min_p > 0) floor = std::max(floor, below(double(peak) + std::log(choice.min_p) - 0.01));
  }
  Left left{0, scratch.ids.data(), scratch.found.data(), scratch.weights.data()};
  left.count = kernels_->above(scores, size, floor, left.ids, left.scores);
  kernels_->weigh(left.scores, left.count, peak, left.weights);
  if (choice.top_p < 1) keep_nucleus(left, total, choice.top_p, peak, *kernels_, scratch.order);
  if (choice.min_p > 0) keep_likely(left, float(choice.min_p));
  if (choice.typical_p < 1) keep_typical(left, choice.typical_p);
  return left;
}

void Reducer::logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
                       int64_t top, const LogprobsOut& out) {
  workers_.run(int64_t(rows.size()), [&](int64_t item, int worker) {
    logprobs_row(x + rows[size_t(item)] * n, n, tokens[size_t(item)], top, out, item, scratch_[worker]);
  });
}

void Reducer::logprobs_row(const float* x, int64_t n, int64_t token, int64_t top, const LogprobsOut& out, int64_t row,
                           Scratch& scratch) {
  scratch.fit(n, top);
  const float* scores = scratch.scores.data();
  const float peak = kernels_->enter(x, n, 1.0f, scratch.scores.data());
  int64_t* top_ids = out.top_ids + row * top;
  float* top_logprobs = out.top_logprobs + row * top;
  if (!std::isfinite(peak)) {
    out.logprobs[row] = kNaN, out.ranks[row] = 0;
    for (int64_t i = 0; i < top; ++i) top_ids[i] = i, top_logprobs[i] = kNaN;
    return;
  }
  const double log_mass = std::log(kernels_->mass(scores, padded(n), peak));
  // The peak first: it is exact, and the rest is small.
  const auto logprob = [&](int64_t id) { return float(double(scores[id]) - double(peak) - log_mass); };
  out.logprobs[row] = logprob(token);
  out.ranks[row] = kernels_->ahead(scores, padded(n), token) + 1;
  if (top == 0) return;
  int32_t* ids = scratch.ids.data();
  const float floor = kernels_->kth(scores, padded(n), top, scratch.room.data());
  const int64_t count = kernels_->above(scores, padded(n), floor, ids, scratch.found.data());
  std::partial_sort(ids, ids + top, ids + count, [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;  // the padding comes last of all
  });
  for (int64_t i = 0; i < top; ++i) top_ids[i] = ids[i], top_logprobs[i] = logprob(ids[i]);
}

}  // namespace kvilt
