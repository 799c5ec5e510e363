// Rows of logits to one token each, or to the log-probabilities of one: what sampling does to a whole vocabulary.
//
// A row's result depends on its own numbers alone: one thread takes it through in one fixed order.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "thread_pool.h"

namespace kvilt {

struct Peak {
  int64_t id;   // of the first largest; if there is a NaN, of the first NaN
  float value;  // NaN if there is one
};

// What an instruction set provides. Scores are a row in scratch memory, padded to whole vectors with -inf.
struct ReduceKernels {
  Peak (*peak)(const float* x, int64_t n);
  // x / divisor into padded scores; returns the largest of them, or NaN if there is one.
  float (*scale_logits)(const float* x, int64_t n, float divisor, float* scores);
  // The sum of exp(score - peak) in float64.
  double (*exp_sum)(const float* scores, int64_t n, float peak);
  void (*exp_weights)(const float* scores, int64_t n, float peak, float* weights);  // exp(score - peak)
  // The k-th largest; -inf if fewer are above that. `room` holds kth_room(k) floats.
  float (*kth_largest)(const float* scores, int64_t n, int64_t k, float* room);
  // Ids and scores of what is at least `floor`, ids ascending; both have room for a vector more. Returns how many.
  int64_t (*collect_at_least)(const float* scores, int64_t n, float floor, int32_t* ids, float* found);
  // The weight of the candidates below a score, in float64.
  double (*weight_below)(const float* scores, const float* weights, int64_t n, float score);
  // Keeps candidates above a cut, and at it those from one place on, in order. Returns how many.
  int64_t (*keep_from)(int32_t* ids, float* scores, float* weights, int64_t n, float cut, int64_t place);
  int64_t (*count_ahead)(const float* scores, int64_t n, int64_t id);  // likelier ones, and equal ones with lower ids
  int64_t (*draw)(const float* scores, int64_t n, float peak, uint64_t key);  // the argmax of score + Gumbel noise
};

constexpr int64_t kLanes = 16;
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
inline int64_t kth_room(int64_t k) { return 2 * k + 256 + 2 * kLanes; }

// How one row draws. Filters in this order: top-k, top-p, min-p, typical-p.
struct DrawParams {
  int64_t row;
  uint64_t key;  // of its noise
  float temperature;
  int64_t top_k;     // 0 or the size of the vocabulary: off
  double top_p;      // 1: off
  double min_p;      // 0: off
  double typical_p;  // 1: off

  bool filtered(int64_t n) const { return (top_k > 0 && top_k < n) || top_p < 1 || min_p > 0 || typical_p < 1; }
};

// The tokens of a row that may still be drawn, ids ascending, and what the exact filters need beside them.
struct Candidates {
  int64_t count;
  int32_t* ids;
  float* scores;
  float* weights;  // exp(score - peak)
};

struct LogprobsOut {
  float* logprobs;      // [rows]
  int64_t* ranks;       // [rows], 1 for the likeliest, among equals the lower id first
  int64_t* top_ids;     // [rows][top], likeliest first
  float* top_logprobs;  // [rows][top]
};

class Reducer {
 public:
  Reducer(ThreadPool& pool, const ReduceKernels& kernels);
  ~Reducer();

  void argmax(const float* x, int64_t rows, int64_t n, int64_t* ids, float* peaks);
  // Tokens, -1 for rows whose largest score is not a number. `kept` [draws][n], unless null: 1 where a token may be
  // drawn.
  void draw(const float* x, int64_t n, const std::vector<DrawParams>& draws, int64_t* out, uint8_t* kept);
  // Of one token a row. A row without a finite largest logit gets no numbers, and rank 0.
  void logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
                int64_t top, const LogprobsOut& out);

 private:
  struct Scratch;
  int64_t draw_row(const float* x, int64_t n, const DrawParams& params, Scratch& scratch, uint8_t* kept);
  Candidates filter(int64_t n, float peak, const DrawParams& params, Scratch& scratch);
  void logprobs_row(const float* x, int64_t n, int64_t token, int64_t top, const LogprobsOut& out, int64_t row,
                    Scratch& scratch);

  ThreadPool& pool_;
  const ReduceKernels& kernels_;
  std::unique_ptr<Scratch[]> scratch_;  // one per thread
};

// The exact filters over the candidates above a floor (reduce_filters.cpp); each keeps at least one.
// Top-p: `total` is the weight of the whole row, or 0 if these are all there is.
void keep_top_p(Candidates& candidates, double total, double top_p, float peak, const ReduceKernels& kernels,
                std::vector<int32_t>& order);
void keep_min_p(Candidates& candidates, float min_p);
void keep_typical(Candidates& candidates, double typical_p);
// The argmax of score + Gumbel noise among these; weights are relative to `peak`.
int64_t draw_candidate(const Candidates& candidates, float peak, uint64_t key);

}  // namespace kvilt
