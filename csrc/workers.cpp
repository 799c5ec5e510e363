#include "workers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvilt {
namespace {

constexpr int kSpins = 4000;  // about twenty microseconds: the gap between two operations of a step

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

Workers::Workers(int threads) : shares_(new Share[threads]) {
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { loop(worker); });
}

Workers::~Workers() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Workers::run(int64_t items, const std::function<void(int64_t, int)>& work) {
  if (items <= 0) return;
  if (items == 1 || workers_.empty()) {
    for (int64_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  work_ = &work;
  for (int i = 0; i < threads(); ++i) {
    shares_[i].next.store(items * i / threads(), std::memory_order_relaxed);
    shares_[i].stop = items * (i + 1) / threads();
  }
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  drain(0);
  // The others are within one item of the end, unless the system gave their core to somebody else: then give ours away.
  for (int spin = 0; busy_.load(std::memory_order_acquire) > 0; ++spin)
    if (spin < kSpins) relax();
    else std::this_thread::yield();
}

void Workers::drain(int worker) {
  for (int i = 0; i < threads(); ++i) {
    Share& share = shares_[(worker + i) % threads()];
    for (int64_t item; (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.stop;) (*work_)(item, worker);
  }
}

void Workers::loop(int worker) {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin) relax();
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    drain(worker);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace kvilt
