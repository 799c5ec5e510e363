// Experts of a feed-forward: a router chooses a few for each token, and each of them goes once through its weights, for
// all tokens that chose it.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "lora.h"
#include "row_scratch.h"
#include "thread_pool.h"

namespace kvilt {

// What the weights of the chosen experts are made of. kChosenSoftmax is a softmax over the logits of the chosen ones;
// with kChosenSigmoid logits choose, and their sigmoids are the weights.
enum class RouterScores : int { kSoftmax, kSigmoid, kChosenSoftmax, kChosenSigmoid };

struct Routing {
  RouterScores scores;
  int64_t top_k;
  bool normalized;       // the weights are divided by their sum
  float epsilon, floor;  // added to that sum; the least that the sum counts as
  float scale;           // of the weights, at last
  int64_t groups;        // experts stand in groups, of which only the best `top_groups` are chosen from
  int64_t top_groups;
  bool top_two;  // a group counts by its two best experts together; else by its best
};

struct RouteArgs {
  const float* logits;   // [tokens][experts]
  const float* bias;     // [experts]: added to the scores that choose, not to the weights; or null
  const float* factors;  // [experts]: of the weights, at last; or null
  int64_t tokens, experts;
  Routing how;
  int32_t* chosen;  // [tokens][top_k], ascending
  float* weights;   // [tokens][top_k]
};

struct ExpertMaps {
  PackedWeight gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;  // or null
};

// What a token's experts made, and what is added to their sum.
struct ExpertSumArgs {
  const float* made;     // [rows][hidden]
  const int32_t* place;  // [tokens][top_k]: rows of `made`
  const float* weights;  // [tokens][top_k]
  int64_t tokens, top_k, hidden;
  const float* residual;     // [tokens][hidden], or null
  const float* shared;       // [tokens][hidden]: what an expert that all tokens use made; or null
  const float* shared_gate;  // [tokens]: the logit of its weight; null: it counts whole
  float* out;                // [tokens][hidden]
};

struct ExpertsArgs {
  std::shared_ptr<const std::vector<ExpertMaps>> experts;
  const float* x;  // [tokens][hidden]
  int64_t tokens;
  const int32_t* chosen;  // [tokens][top_k], ascending
  const float* weights;   // [tokens][top_k]
  int64_t top_k;
  Activation activation;
  bool weigh_inputs;                             // weights multiply what an expert reads, not what it makes
  const float *residual, *shared, *shared_gate;  // as in ExpertSumArgs
  float* out;

  int64_t rows() const { return tokens * top_k; }
};

class ExpertRunner {
 public:
  ExpertRunner(ThreadPool& pool, const LinearKernels& kernels, const LoraKernels& gates)
      : pool_(pool), kernels_(kernels), gates_(gates), in_(kernels.layout), inner_(kernels.layout) {}

  void route(const RouteArgs& args);
  void experts(const ExpertsArgs& args);
  // The sum alone; experts stand in `made` as the tokens chose them: `place` is not read.
  void sum_experts(ExpertSumArgs args);

 private:
  // The rows of one expert: tokens that chose it, one after the other.
  struct Segment {
    const ExpertMaps* maps;
    int64_t first, rows;
    int64_t group;  // the first of its groups among those of all segments
    int64_t groups() const { return (rows + kRowGroup - 1) / kRowGroup; }
  };
  // Some tiles of one segment for some of its groups: what a thread does at a time.
  struct Item {
    const Segment* segment;
    int64_t tile, last_tile, group, last_group;
  };

  void sort(const ExpertsArgs& args);
  // The rows of a segment; `plain` are those of all segments.
  static QuantizedRows rows_of(RowScratch& room, const std::vector<float>& plain, const Segment& segment,
                               int64_t inputs) {
    return room.rows(plain.data() + segment.first * inputs, inputs, segment.first, segment.group, segment.rows);
  }
  void gather(const ExpertsArgs& args, int64_t inputs);
  void quantize(RowScratch& room, const std::vector<float>& plain, int64_t inputs);
  void share_out(int64_t outputs);
  void open_gates(const Item& item, const QuantizedRows& x, Activation activation);
  void sum(const ExpertSumArgs& args);

  ThreadPool& pool_;
  const LinearKernels& kernels_;
  const LoraKernels& gates_;
  std::vector<Segment> segments_;
  std::vector<int64_t> starts_;         // [experts + 1]
  std::vector<int32_t> token_, place_;  // of each row; and of each token's experts, the row
  std::vector<Item> items_, groups_;
  std::vector<std::pair<const Segment*, int64_t>> quantized_;  // what a thread quantizes at a time
  RowScratch in_, inner_;
  std::vector<float> gathered_, gate_, up_, made_, row_weights_, ones_;
};

}  // namespace kvilt
