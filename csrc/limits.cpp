#include "limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu_features.h"
#include "limits_impl.h"

namespace kvilt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostBytes = int64_t(1) << 30;
constexpr int64_t kHugePage = int64_t(1) << 21;
constexpr int64_t kStep = 512;  // what the widest loop reads in one round
constexpr int kTries = 6;
constexpr double kTry_s = 0.1;  // long enough that a host moves two virtual cores apart within a few tries

limits::Loops best_loops() {
#if defined(KVILT_X86)
  const CpuFeatures cpu = cpu_features();
  if (cpu.avx512) return {limits::read_avx512, limits::multiply_avx512};
  if (cpu.avx2) return {limits::read_avx2, limits::multiply_avx2};
#endif
  return {limits::read_generic, limits::multiply_generic};
}

// Seconds from the first start to the last end of work(thread) on all threads, which begin together.
double together(int threads, const std::function<void(int)>& work) {
  std::barrier ready(threads);
  std::vector<Clock::time_point> starts(threads), ends(threads);
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread)
    running.emplace_back([&, thread] {
      ready.arrive_and_wait();
      starts[thread] = Clock::now();
      work(thread);
      ends[thread] = Clock::now();
    });
  for (auto& one : running) one.join();
  const auto span = *std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end());
  return std::chrono::duration<double>(span).count();
}

// The best rate of work(thread, rounds), which returns what it did; rounds are grown until a try takes long enough.
double best_rate(int threads, const std::function<double(int, int64_t)>& work) {
  double best = 0;
  int64_t rounds = 1;
  for (int tries = 0; tries < kTries;) {
    std::vector<double> done(threads);
    const double seconds = together(threads, [&](int thread) { done[thread] = work(thread, rounds); });
    double sum = 0;
    for (double one : done) sum += one;
    if (seconds < kTry_s / 2) {
      rounds *= seconds < kTry_s / 16 ? 8 : 2;
      continue;
    }
    best = std::max(best, sum / seconds);
    ++tries;
  }
  return best;
}

struct Free {
  void operator()(char* data) const { std::free(data); }
};

}  // namespace

Limits measure_limits(int threads, int64_t bytes) {
  if (threads < 1 || threads > 4096) throw std::invalid_argument("the limits are measured with 1 to 4096 threads");
  if (bytes < 1) throw std::invalid_argument("the limits need a working set of at least one byte");
  const limits::Loops loops = best_loops();
  const int64_t share = (std::min(bytes, kMostBytes) / threads + kStep) / kStep * kStep;
  const int64_t size = (share * threads + kHugePage - 1) / kHugePage * kHugePage;
  const std::unique_ptr<char, Free> data(static_cast<char*>(std::aligned_alloc(kHugePage, size)));
  if (!data) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(data.get(), size, MADV_HUGEPAGE);
#endif
  for (int64_t at = 0; at < size; at += 8) *reinterpret_cast<int64_t*>(data.get() + at) = at;
  std::atomic<uint64_t> sink{0};
  const double read = best_rate(threads, [&](int thread, int64_t rounds) {
    uint64_t seen = 0;
    for (int64_t round = 0; round < rounds; ++round) seen ^= loops.read(data.get() + thread * share, share);
    sink ^= seen;
    return double(share) * rounds;
  });
  const double multiplied = best_rate(threads, [&](int, int64_t rounds) { return double(loops.multiply(rounds)); });
  return {read, multiplied};
}

}  // namespace kvilt
