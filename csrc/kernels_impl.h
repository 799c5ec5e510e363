// The kernels, written once over vectors of sixteen lanes and compiled for each instruction set.
//
// Each file isa_*.cpp defines KVILT_ISA (a namespace) and includes this one. Only vectors.h and the integer dot
// products are written with intrinsics. Law: the value of an output depends on its own row alone, whatever else is
// computed beside it. So every loop that a row goes through has the same order for one row and for many, and fused
// products are spelled out.
#pragma once
#include "attention_impl.h"
#include "elementwise_impl.h"
#include "kernel_table.h"
#include "linear_impl.h"
#include "lora_impl.h"
#include "pages_impl.h"
#include "per_head_impl.h"
#include "recurrent_impl.h"
#include "reduce_impl.h"
#include "streams_impl.h"

namespace kvilt::KVILT_ISA {

// Groups of rows that one thread takes through a tile before another tile: their activations stay in its cache.
constexpr int64_t kGroupsAtOnce = 8, kTilesAtOnce = 8;

// Tables with the same `numerics` give the same bits.
constexpr KernelTable kernel_table(const char* isa, const char* numerics) {
  return {
      isa,
      numerics,
      {quantize_items, quantize, linear_tiles, gate_up_tiles, embed<Layout::kLanes>, rms_norm, layer_norm, add,
       add_scaled, expert_sum, argmax, Layout::kLanes, kTilesAtOnce, kGroupsAtOnce},
      {rotate, write_token, interpolate, attention_tiles, attention_scratch, merge_partials, write_means},
      {peak, scale_logits, exp_sum, exp_weights, kth_largest, collect_at_least, weight_below, keep_from, count_ahead,
       draw},
      {shrink, expand, act_mul},
      {conv, fold_memory, sigmoid_mul},
      {per_head_linear},
      {mix_streams, add_to_streams, match_rms, gaussian_relu},
  };
}

}  // namespace kvilt::KVILT_ISA
