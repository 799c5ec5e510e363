#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvilt {
namespace {

constexpr int kSpins = 4000;  // some tens of microseconds: the gap between two operations of a step

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr uint64_t kHalf = uint64_t(1) << 32;  // above: the end of a range, below: its next item

}  // namespace

ThreadPool::ThreadPool(int threads) : ranges_(new WorkRange[threads]) {
  for (int worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { loop(worker); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : threads_) worker.join();
}

void ThreadPool::run(int64_t items, const std::function<void(int64_t, int)>& work) {
  if (items <= 0) return;
  if (items == 1 || threads_.empty()) {
    for (int64_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  work_ = &work;
  left_.store(items, std::memory_order_relaxed);
  for (int i = 0; i < threads(); ++i) {
    const uint64_t first = items * i / threads(), stop = items * (i + 1) / threads();
    ranges_[i].word.store(stop * kHalf + first, std::memory_order_release);
  }
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  drain(0);
  // The other threads are within one item of the end, unless the system took their core away: then this one yields.
  for (int spin = 0; left_.load(std::memory_order_acquire) > 0; ++spin)
    if (spin < kSpins) relax();
    else std::this_thread::yield();
}

void ThreadPool::drain(int worker) {
  int64_t done = 0;
  for (int i = 0; i < threads(); ++i) {
    WorkRange& range = ranges_[(worker + i) % threads()];
    while (true) {
      const uint64_t word = range.word.fetch_add(1, std::memory_order_acq_rel);
      if (word % kHalf >= word / kHalf) break;
      // There is an item, so its run cannot end before it is done, and `work_` stays what it is.
      (*work_)(int64_t(word % kHalf), worker);
      ++done;
    }
    // Reported at once: if this thread loses its core now, the run does not wait for it.
    if (done) left_.fetch_sub(done, std::memory_order_release);
    done = 0;
  }
}

void ThreadPool::loop(int worker) {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) relax();
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    drain(worker);
  }
}

}  // namespace kvilt
