// A pool of threads that is started once: spins briefly for the next piece of work, then sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kvilt {

class ThreadPool {
 public:
  using Work = std::function<void(int64_t item, int worker)>;

  // `cpus` are the CPUs that each thread may use, one list for each thread; none: the system chooses. The calling thread
  // is worker 0 and stays where it is.
  explicit ThreadPool(int threads, const std::vector<std::vector<int>>& cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(threads_.size()) + 1; }

  // How many threads work of so many nanoseconds on one core is worth: waking one costs about as long as it helps.
  int worth(int64_t nanoseconds) const;

  // Calls work(item, worker) for every item below `items` and returns when all are done. Each of up to `most` threads
  // begins with a range of neighbouring items, so that it reads along memory. Then it helps the others, so that all are
  // busy to the end. No result may depend on which thread did what. A thread that loses its core does not hold up the
  // run: the others take the items that it has not begun.
  void run(int64_t items, const Work& work, int most = kAll);

 private:
  static constexpr int kAll = 1 << 20;
  static constexpr size_t kLine = 128;  // two cache lines: processors fetch them in pairs

  // What a run is, as its caller wrote it. Threads copy it and check `begun` afterwards, so that a thread that wakes up
  // long after its run never mixes two of them.
  struct alignas(kLine) Shared {
    std::atomic<uint32_t> begun{0}, epoch{0};
    std::atomic<int> active{0};
    std::atomic<int64_t> items{0};
    std::atomic<const Work*> work{nullptr};
  };
  struct Run {
    uint32_t epoch;
    int active;  // threads that take part; each has a range of items
    int64_t items;
    const Work* work;
    int64_t begin(int range) const { return items * range / active; }
  };
  // The epoch of a run in the upper half. `next` below: the next item of a range. `done` below: items that this thread
  // has done. Only the threads that need them write these lines, and in a balanced run each writes its own.
  struct alignas(kLine) Next {
    std::atomic<uint64_t> word{0};
  };
  struct alignas(kLine) Done {
    std::atomic<uint64_t> word{0};
  };

  void loop(int worker);
  bool read(uint32_t epoch, Run& run) const;
  int64_t claim(const Run& run, int range);
  int64_t work_on(const Run& run, int range, int worker, int64_t done);
  void help(const Run& run, int worker, int64_t done);
  bool finished(const Run& run) const;
  void begin(const Run& run);

  std::vector<std::thread> threads_;
  Shared shared_;
  std::unique_ptr<Next[]> next_;  // one per thread
  std::unique_ptr<Done[]> done_;  // one per thread
  std::atomic<bool> stop_{false};
};

}  // namespace kvilt
