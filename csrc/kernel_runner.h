// The operations over whole tensors: checks, scratch memory and threads. Kernels see one row or one tile at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "kernel_table.h"
#include "lora.h"
#include "pack.h"
#include "program.h"
#include "recurrent.h"
#include "reduce.h"
#include "row_scratch.h"
#include "thread_pool.h"

namespace kvilt {

// The revision of the arithmetic: it goes up with every change of a result's bits. KV of another revision is not used.
constexpr int kRevision = 3;

struct LinearMap {
  PackedWeight weight;
  LinearOutput to;
};

// The positions, slots and tables of decoding rows: a step reads them and writes those of the next. One token per row.
struct DecodeState {
  int64_t rows;
  int64_t* positions;                  // [rows]
  std::vector<int64_t*> slots;         // one per layer group, [rows]
  std::vector<const int64_t*> tables;  // one per layer group, [rows][width]
  int64_t width, page_tokens;
};

class KernelRunner {
 public:
  KernelRunner(int threads, const std::string& isa, const std::vector<std::vector<int>>& cpus);

  const char* isa() const { return kernels_.isa; }
  const char* numerics() const { return kernels_.numerics; }
  int threads() const { return pool_.threads(); }

  // Several products of the same input, which is quantized once; all tiles are one piece of work for the threads.
  void linears(const std::vector<LinearMap>& maps, const float* x, int64_t rows);
  // activation(gate) * up, without either of them in memory.
  void gate_up(const LinearMap& gate, const LinearMap& up, const float* x, int64_t rows, Activation activation,
               float* out);
  void embed(const PackedWeight& w, const int64_t* ids, int64_t count, float scale, float* out);
  void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out);
  void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int64_t n,
                  float* out);
  void per_head_linear(const PerHeadArgs& args);
  void add(const float* a, const float* b, int64_t n, float* out);
  void add_scaled(const float* a, const float* b, float scale, int64_t n, float* out);
  // Rows of `n` numbers times 1 + beta * log(1 + floor((position + offset) / length)).
  void scale_queries(const float* x, const int64_t* positions, int64_t tokens, int64_t n, float beta, int64_t length,
                     int64_t offset, float* out);
  void soft_cap(float* x, int64_t n, float cap);
  // The likeliest token of each row, -1 where a logit is not a number.
  void argmax(const float* x, int64_t rows, int64_t n, int64_t* out);
  // Cosines and sines of the angles position * inv_freq, times `mscale`.
  void rope_cos_sin(const int64_t* positions, int64_t tokens, const float* inv_freq, int64_t pairs, float mscale,
                    float* cos, float* sin);

  // Rotation, pages and attention (attention.h).
  void rotate(const RotateArgs& args);
  void write(const WriteArgs& args);
  void interpolate(const InterpolateArgs& args);
  void attention(const AttentionArgs& args);
  void read_slots(const std::vector<SlotsArgs>& layers);
  void write_slots(const std::vector<SlotsArgs>& layers);

  // Sampling (reduce.h).
  void argmax_with_values(const float* x, int64_t rows, int64_t n, int64_t* ids, float* values);
  void draw(const float* x, int64_t n, const std::vector<DrawParams>& draws, int64_t* out, uint8_t* kept);
  void logprobs(const float* x, int64_t n, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
                int64_t top, const LogprobsOut& out);

  // Adapters (lora.h).
  void add_lora(const LoraArgs& args);
  void act_mul(const float* gate, const float* up, int64_t n, Activation activation, float* out);

  // Recurrent state (recurrent.h).
  void causal_conv(const ConvArgs& args);
  void fold(const FoldArgs& args);
  void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out);

  // Residual streams (streams.h).
  void streams(const StreamArgs& args);
  void match_rms(const float* x, const float* like, int64_t rows, int64_t n, float* out);
  void gaussian_relu(const float* x, float cut, int64_t rows, int64_t n, float* out);

  // Experts (experts.h).
  void route(const RouteArgs& args);
  void experts(const ExpertsArgs& args);
  void sum_experts(const ExpertSumArgs& args);

  // Moves each row one position on; its next slot is in the page that its table names.
  void advance(const DecodeState& state);
  // A file's rows as packed weights; `out` has tiles * tile_bytes bytes.
  void pack(const Packing& packing, const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs,
            uint8_t* out);

  // Does a call and, between `begin_recording` and `end_recording`, remembers it.
  template <typename Call>
  void run_and_record(Call call) {
    call();
    if (recording_) recording_->calls.push_back(call);
  }
  void begin_recording() { recording_ = std::make_unique<Program>(Program{&stopped_, {}}); }
  std::unique_ptr<Program> end_recording() { return std::move(recording_); }
  // Stops recorded programs between two calls until `stop(false)`. Any thread may call it.
  void stop(bool stopped) { stopped_.store(stopped); }

 private:
  ThreadPool pool_;
  const KernelTable& kernels_;
  Attention attention_;
  Reducer reducer_;
  Lora lora_;
  Recurrent recurrent_;
  ExpertRunner experts_;
  QuantizedRows quantize(const float* x, int64_t rows, int64_t inputs, bool plain);
  void pieces(int64_t n, const std::function<void(int64_t at, int64_t count)>& work);
  using TileWork = std::function<void(int64_t tile, int64_t last_tile, int64_t first, int64_t last)>;
  void tiles(int64_t tiles, int64_t groups, int64_t inputs, int64_t nanoseconds, const TileWork& work);
  void cut(int64_t tile, int64_t last_tile, int64_t together, int64_t groups, int64_t at_once);
  void cut_smaller(int64_t tiles, int64_t groups, int threads);
  void cut_for_rows(int64_t tiles, int64_t groups, int64_t inputs, int threads);

  // Some tiles for some groups of rows: what a thread does at a time.
  struct Piece {
    int64_t tile, last_tile, first, last;
  };
  std::vector<Piece> pieces_;

  std::unique_ptr<Program> recording_;
  std::atomic<bool> stopped_{false};
  std::mutex lock_;
  RowScratch scratch_;
};

}  // namespace kvilt
