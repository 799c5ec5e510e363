#include "thread_pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace kvilt {
namespace {

constexpr int kSpins = 4000;        // some tens of microseconds: the gap between two operations of a step
constexpr int kBeforeHelping = 16;  // looks at the others' progress, under a microsecond: they are about to end as well
constexpr int64_t kWorthNanoseconds = 1500;  // of one core, for each thread that takes part
constexpr uint32_t kRefresh = 1u << 20;      // runs after which old epochs are renewed, long before epochs repeat

constexpr uint64_t word(uint32_t epoch, int64_t low) { return uint64_t(epoch) << 32 | uint64_t(low); }
constexpr uint32_t epoch_of(uint64_t word) { return uint32_t(word >> 32); }
constexpr int64_t low_of(uint64_t word) { return int64_t(word & 0xffffffffu); }

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void place(std::thread& thread, const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  // Best effort: a CPU that is not there for this process leaves the thread where it is.
  if (CPU_COUNT(&set)) pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
  (void)thread, (void)cpus;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<std::vector<int>>& cpus)
    : next_(new Next[threads]), done_(new Done[threads]) {
  for (int worker = 1; worker < threads; ++worker) {
    threads_.emplace_back([this, worker] { loop(worker); });
    if (size_t(worker) < cpus.size()) place(threads_.back(), cpus[size_t(worker)]);
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  shared_.epoch.fetch_add(1);
  shared_.epoch.notify_all();
  for (auto& worker : threads_) worker.join();
}

int ThreadPool::worth(int64_t nanoseconds) const {
  return int(std::clamp<int64_t>(nanoseconds / kWorthNanoseconds, 1, threads()));
}

void ThreadPool::run(int64_t items, const Work& work, int most) {
  const int active = int(std::min<int64_t>({int64_t(threads()), int64_t(most), items}));
  if (active <= 1) {
    for (int64_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  const Run run{shared_.epoch.load(std::memory_order_relaxed) + 1, active, items, &work};
  begin(run);
  const int64_t done = work_on(run, 0, 0, 0);
  for (int look = 0; look < kBeforeHelping; ++look, relax())
    if (finished(run)) return;
  help(run, 0, done);
  // Every item is taken, and its thread within one item of the end, unless the system took its core away: then yield.
  for (int spin = 0; !finished(run); ++spin)
    if (spin < kSpins) relax();
    else std::this_thread::yield();
}

void ThreadPool::begin(const Run& run) {
  // A range that small runs leave out keeps the epoch of its last run, which must not come to look like a later one.
  if (run.epoch % kRefresh == 0)
    for (int i = 0; i < threads(); ++i) {
      next_[i].word.store(word(run.epoch - 1, 0xffffffff), std::memory_order_relaxed);
      done_[i].word.store(word(run.epoch - 1, 0), std::memory_order_relaxed);
    }
  shared_.begun.store(run.epoch, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  shared_.items.store(run.items, std::memory_order_relaxed);
  shared_.active.store(run.active, std::memory_order_relaxed);
  shared_.work.store(run.work, std::memory_order_relaxed);
  shared_.epoch.store(run.epoch, std::memory_order_release);
  shared_.epoch.notify_all();
}

// Whether `run` is now all of the run with that epoch; not if a later one has begun meanwhile.
bool ThreadPool::read(uint32_t epoch, Run& run) const {
  run = {epoch, shared_.active.load(std::memory_order_relaxed), shared_.items.load(std::memory_order_relaxed),
         shared_.work.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  return shared_.begun.load(std::memory_order_relaxed) == epoch;
}

// The next item of a range, or -1. A run ends after all of its items are done, so a thread that gets one knows that its
// run goes on. In a run that is over every range has its epoch or a later one, and nothing is left to get.
int64_t ThreadPool::claim(const Run& run, int range) {
  std::atomic<uint64_t>& next = next_[range].word;
  uint64_t seen = next.load(std::memory_order_acquire);
  while (true) {
    const bool begun = epoch_of(seen) == run.epoch;
    if (!begun && int32_t(epoch_of(seen) - run.epoch) > 0) return -1;
    const int64_t item = begun ? low_of(seen) : run.begin(range);
    if (item >= run.begin(range + 1)) return -1;
    if (next.compare_exchange_weak(seen, word(run.epoch, item + 1), std::memory_order_acq_rel,
                                   std::memory_order_acquire))
      return item;
  }
}

// All items of a range that no thread has taken, reported at once: if this thread loses its core then, the run does not
// wait for it. Returns the items that this thread has done in the run.
int64_t ThreadPool::work_on(const Run& run, int range, int worker, int64_t done) {
  const int64_t before = done;
  for (int64_t item; (item = claim(run, range)) >= 0; ++done) (*run.work)(item, worker);
  if (done > before) done_[worker].word.store(word(run.epoch, done), std::memory_order_release);
  return done;
}

void ThreadPool::help(const Run& run, int worker, int64_t done) {
  for (int i = 1; i < run.active; ++i) done = work_on(run, (worker + i) % run.active, worker, done);
}

bool ThreadPool::finished(const Run& run) const {
  int64_t done = 0;
  for (int i = 0; i < run.active; ++i) {
    const uint64_t seen = done_[i].word.load(std::memory_order_acquire);
    if (epoch_of(seen) == run.epoch) done += low_of(seen);
  }
  return done == run.items;
}

void ThreadPool::loop(int worker) {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && shared_.epoch.load(std::memory_order_acquire) == seen; ++spin) relax();
    shared_.epoch.wait(seen, std::memory_order_acquire);
    seen = shared_.epoch.load(std::memory_order_acquire);
    if (stop_.load()) return;
    Run run;
    if (!read(seen, run) || worker >= run.active) continue;
    const int64_t done = work_on(run, worker, worker, 0);
    // In a balanced run the others end now too. Looking for their items would take their lines away from them.
    for (int look = 0; look < kBeforeHelping && shared_.epoch.load(std::memory_order_relaxed) == seen; ++look) relax();
    if (shared_.epoch.load(std::memory_order_relaxed) == seen) help(run, worker, done);
  }
}

}  // namespace kvilt
