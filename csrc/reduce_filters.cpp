// The exact filters over a row's candidates, as kvilt/sampling/transforms.py defines them, without sorting them all.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "noise.h"
#include "reduce.h"

namespace kvilt {
namespace {

constexpr int kBins = 256;
constexpr size_t kFew = 64;  // are sorted
constexpr int kHalvings = 9;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Keeps the candidates that `stays` accepts, in order.
template <typename Stays>
void keep(Candidates& candidates, Stays stays) {
  int64_t count = 0;
  for (int64_t i = 0; i < candidates.count; ++i) {
    if (!stays(i)) continue;
    candidates.ids[count] = candidates.ids[i], candidates.scores[count] = candidates.scores[i],
    candidates.weights[count] = candidates.weights[i];
    ++count;
  }
  candidates.count = count;
}

// Rising by key, among equals by place.
template <typename Key>
struct Rising {
  const Key* keys;
  bool operator()(int32_t a, int32_t b) const { return keys[a] != keys[b] ? keys[a] < keys[b] : a < b; }
};

// The first place, in rising order, whose weight brings the sum beyond what is `out`; -1 if none does. Looks at
// `active` places alone, in ascending order, and sorts few of them: bins that are out as a whole are only added up.
template <typename Key, typename Weight, typename Out>
int32_t first_beyond(const Key* keys, const Weight* weights, std::vector<int32_t>& active, double sum, Out out) {
  while (!active.empty()) {
    const auto [low, high] =
        std::minmax_element(active.begin(), active.end(), [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
    const double least = double(keys[*low]), range = double(keys[*high]) - least;
    if (range == 0 || active.size() <= kFew) break;
    const double scale = kBins / range;
    const auto bin = [&](int32_t i) { return std::min(kBins - 1, int((double(keys[i]) - least) * scale)); };
    double masses[kBins] = {};
    for (int32_t i : active) masses[bin(i)] += double(weights[i]);
    int cut = 0;
    while (cut < kBins - 1 && out(sum + masses[cut])) sum += masses[cut++];
    std::erase_if(active, [&](int32_t i) { return bin(i) != cut; });
  }
  std::sort(active.begin(), active.end(), Rising<Key>{keys});
  for (int32_t i : active)
    if (!out(sum += double(weights[i]))) return i;
  return -1;
}

// The place from which on, in rising order, candidates belong to the nucleus.
int32_t nucleus_start(const Candidates& candidates, double total, double top_p, float peak,
                      const ReduceKernels& kernels, std::vector<int32_t>& active) {
  const double own = kernels.weight_below(candidates.scores, candidates.weights, candidates.count, kInfinity);
  total = std::max(total, own);  // candidates of top-k are all there is; those of a floor left a rest
  const double rest = total - own;
  const float limit = float(1 - top_p);
  const auto out = [&](double sum) { return float(sum / total) <= limit; };
  // Halved a few times by whole vectors: below `low` all is out, and up to `high` not all is.
  float low = *std::min_element(candidates.scores, candidates.scores + candidates.count), high = peak;
  double sum = rest;
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = low / 2 + high / 2;
    const double below = rest + kernels.weight_below(candidates.scores, candidates.weights, candidates.count, middle);
    if (out(below)) low = middle, sum = below;
    else high = middle;
  }
  active.clear();
  for (int32_t i = 0; i < candidates.count; ++i)
    if (candidates.scores[i] >= low && candidates.scores[i] <= high) active.push_back(i);
  if (const int32_t first = first_beyond(candidates.scores, candidates.weights, active, sum, out); first >= 0)
    return first;
  // All of these fell by a rounding: the next one above them stays, or the last of all.
  const Rising<float> rising{candidates.scores};
  int32_t next = int32_t(candidates.count) - 1;
  for (int32_t i = 0; i < candidates.count; ++i)
    if (rising(next, i)) next = i;
  const int32_t last = active.empty() ? -1 : active.back();
  for (int32_t i = 0; i < candidates.count; ++i)
    if (last >= 0 && rising(last, i) && rising(i, next)) next = i;
  return next;
}

// Distances from the entropy, and probabilities, of candidates.
struct Typical {
  std::vector<double> distance, probs;

  explicit Typical(const Candidates& candidates) : distance(size_t(candidates.count)), probs(size_t(candidates.count)) {
    const float peak = *std::max_element(candidates.scores, candidates.scores + candidates.count);
    double total = 0, entropy = 0;
    for (size_t i = 0; i < probs.size(); ++i) total += probs[i] = std::exp(double(candidates.scores[i] - peak));
    const double log_total = std::log(total);
    for (size_t i = 0; i < probs.size(); ++i) {
      probs[i] /= total;
      distance[i] = log_total - double(candidates.scores[i] - peak);
      if (probs[i] > 0) entropy += probs[i] * distance[i];
    }
    for (double& one : distance) one = std::abs(one - entropy);
  }

  // The smallest distance within which they make up `mass`; rounding may leave the whole row just short of it.
  double reach(double mass) const {
    std::vector<int32_t> all(probs.size());
    std::iota(all.begin(), all.end(), 0);
    const int32_t at = first_beyond(distance.data(), probs.data(), all, 0.0, [&](double sum) { return sum < mass; });
    return at < 0 ? *std::max_element(distance.begin(), distance.end()) : distance[size_t(at)];
  }
};

}  // namespace

void keep_top_p(Candidates& candidates, double total, double top_p, float peak, const ReduceKernels& kernels,
                std::vector<int32_t>& order) {
  const int32_t first = nucleus_start(candidates, total, top_p, peak, kernels, order);
  candidates.count = kernels.keep_from(candidates.ids, candidates.scores, candidates.weights, candidates.count,
                                       candidates.scores[first], first);
}

void keep_min_p(Candidates& candidates, float min_p) {
  keep(candidates, [&](int64_t i) { return candidates.weights[i] >= min_p; });
}

void keep_typical(Candidates& candidates, double typical_p) {
  const Typical typical(candidates);
  const double reach = typical.reach(typical_p);
  keep(candidates, [&](int64_t i) { return typical.distance[size_t(i)] <= reach; });
}

int64_t draw_candidate(const Candidates& candidates, float peak, uint64_t key) {
  int64_t best = 0;
  double value = double(candidates.scores[0]) + gumbel(noise_bits(key, candidates.ids[0]));
  // As in the draw from a whole row: exp(score - value) is a candidate's weight times exp(peak - value).
  double reach = std::exp(double(peak) - value) * kSlack / kComplement;
  for (int64_t i = 1; i < candidates.count; ++i) {
    const uint64_t bits = noise_bits(key, candidates.ids[i]);
    if (double(complement(bits)) > double(candidates.weights[i]) * reach) continue;
    const double own = double(candidates.scores[i]) + gumbel(bits);
    if (own <= value) continue;
    value = own, best = i;
    reach = std::exp(double(peak) - value) * kSlack / kComplement;
  }
  return candidates.ids[best];
}

}  // namespace kvilt
