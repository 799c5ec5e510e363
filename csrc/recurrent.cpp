#include "recurrent.h"

#include <algorithm>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr int64_t kPiece = 4096;  // numbers of one item

void check_slots(const StateRows& rows) {
  const auto in_store = [&](int64_t slot) { return slot >= -1 && slot < rows.slots; };
  if (!std::all_of(rows.reads, rows.reads + rows.rows(), in_store) ||
      !std::all_of(rows.writes, rows.writes + rows.starts.back(), in_store))
    throw std::out_of_range("there is no such slot for a state");
}

}  // namespace

Recurrent::Recurrent(ThreadPool& pool, const RecurrentKernels& kernels) : pool_(pool), kernels_(kernels) {}

void Recurrent::causal_conv(const ConvArgs& args) {
  check_slots(args.rows);
  const int64_t blocks = (args.channels + 15) / 16;
  pool_.run(args.rows.rows() * blocks,
            [&](int64_t item, int) { kernels_.conv(args, item / blocks, item % blocks * 16); });
}

void Recurrent::fold(const FoldArgs& args) {
  check_slots(args.rows);
  const int64_t size = args.key_dim * args.value_dim + 2 * args.key_dim + args.value_dim;
  if (int64_t(scratch_.size()) < size * pool_.threads()) scratch_.resize(size * pool_.threads());
  pool_.run(args.rows.rows() * args.value_heads, [&](int64_t item, int thread) {
    kernels_.fold(args, item / args.value_heads, item % args.value_heads, scratch_.data() + thread * size);
  });
}

void Recurrent::sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  pool_.run((n + kPiece - 1) / kPiece, [&](int64_t item, int) {
    const int64_t at = item * kPiece;
    kernels_.sigmoid_mul(x + at, gate + at, std::min(kPiece, n - at), out + at);
  });
}

}  // namespace kvilt
