// From a router's logits to the experts of each token. One token at a time, and always in the same order.
#include <algorithm>
#include <cmath>

#include "experts.h"

namespace kvilt {
namespace {

// Ids of the `count` largest scores; among equals the lower id comes first. Always as many as asked for, also where
// scores are not numbers. `taken` marks what may not be chosen.
void choose(const float* scores, int64_t n, int64_t count, std::vector<uint8_t>& taken, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; ++e)
      if (!taken[size_t(e)] && (best < 0 || scores[e] > scores[best])) best = e;
    taken[size_t(best)] = 1;
    out[i] = int32_t(best);
  }
}

void softmax(const float* logits, int64_t n, float* out) {
  const float peak = *std::max_element(logits, logits + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += out[i] = std::exp(logits[i] - peak);
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

struct Room {
  std::vector<float> scores, choice, of_groups;
  std::vector<uint8_t> taken;
  std::vector<int32_t> groups;
};

// Marks the experts of all groups but the best ones.
void leave_groups_out(const Routing& how, int64_t experts, Room& room) {
  const int64_t size = experts / how.groups;
  room.of_groups.resize(size_t(how.groups));
  room.groups.resize(size_t(how.top_groups));
  for (int64_t g = 0; g < how.groups; ++g) {
    float best = -INFINITY, next = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const float score = room.choice[size_t(e)];
      if (score > best) next = best, best = score;
      else if (score > next) next = score;
    }
    room.of_groups[size_t(g)] = how.top_two ? best + next : best;
  }
  std::vector<uint8_t>& taken = room.taken;
  taken.assign(size_t(how.groups), 0);
  choose(room.of_groups.data(), how.groups, how.top_groups, taken, room.groups.data());
  taken.assign(size_t(experts), 1);
  for (int32_t g : room.groups) std::fill_n(taken.begin() + g * size, size, uint8_t(0));
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void weigh(const Routing& how, const Room& room, const int32_t* chosen, float* weights) {
  for (int64_t i = 0; i < how.top_k; ++i) weights[i] = room.scores[size_t(chosen[i])];
  if (how.scores == RouterScores::kChosenSoftmax) softmax(weights, how.top_k, weights);
  if (how.scores == RouterScores::kChosenSigmoid) std::transform(weights, weights + how.top_k, weights, sigmoid);
  float sum = 0;
  for (int64_t i = 0; i < how.top_k; ++i) sum += weights[i];
  const float by = how.normalized ? std::max(sum + how.epsilon, how.floor) : 1.0f;
  for (int64_t i = 0; i < how.top_k; ++i) weights[i] = weights[i] / by * how.scale;
}

void route_token(const RouteArgs& a, int64_t token, Room& room) {
  const float* logits = a.logits + token * a.experts;
  room.scores.resize(size_t(a.experts));
  room.choice.resize(size_t(a.experts));
  float *scores = room.scores.data(), *choice = room.choice.data();
  switch (a.how.scores) {
    case RouterScores::kSoftmax: softmax(logits, a.experts, scores); break;
    case RouterScores::kSigmoid: std::transform(logits, logits + a.experts, scores, sigmoid); break;
    case RouterScores::kChosenSoftmax:
    case RouterScores::kChosenSigmoid: std::copy_n(logits, a.experts, scores); break;
  }
  for (int64_t e = 0; e < a.experts; ++e) choice[e] = a.bias ? scores[e] + a.bias[e] : scores[e];
  if (a.how.groups > 1) leave_groups_out(a.how, a.experts, room);
  else room.taken.assign(size_t(a.experts), 0);
  int32_t* chosen = a.chosen + token * a.how.top_k;
  choose(choice, a.experts, a.how.top_k, room.taken, chosen);
  std::sort(chosen, chosen + a.how.top_k);
  float* weights = a.weights + token * a.how.top_k;
  weigh(a.how, room, chosen, weights);
  if (!a.factors) return;
  for (int64_t i = 0; i < a.how.top_k; ++i) weights[i] *= a.factors[chosen[i]];
}

constexpr int64_t kWorthSharing = 4096;  // scores: fewer take less time than waking a thread

}  // namespace

void ExpertRunner::route(const RouteArgs& a) {
  const auto some = [&](int64_t first, int64_t last) {
    Room room;
    for (int64_t token = first; token < last; ++token) route_token(a, token, room);
  };
  if (a.tokens * a.experts < kWorthSharing) return some(0, a.tokens);
  constexpr int64_t kTokens = 16;
  pool_.run((a.tokens + kTokens - 1) / kTokens,
            [&](int64_t piece, int) { some(piece * kTokens, std::min(a.tokens, (piece + 1) * kTokens)); });
}

}  // namespace kvilt
