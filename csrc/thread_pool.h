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
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls work(item, worker) for every item below `items` and returns when all are done. Each thread begins with a
  // range of neighbouring items, so that it reads along memory. Then it helps the others, so that all are busy to the
  // end. No result may depend on which thread did what. A thread that loses its core does not hold up the run: the
  // others take the items that it has not begun.
  void run(int64_t items, const std::function<void(int64_t item, int worker)>& work);

 private:
  // The next item of a range and its end, in one word. So a thread that takes an item knows in the same moment that the
  // item exists, also when the thread wakes up long after the run it was woken for.
  struct alignas(64) WorkRange {
    std::atomic<uint64_t> word{0};
  };

  void loop(int worker);
  void drain(int worker);

  std::vector<std::thread> threads_;
  std::unique_ptr<WorkRange[]> ranges_;  // one per thread
  const std::function<void(int64_t, int)>* work_ = nullptr;
  std::atomic<int64_t> left_{0};  // items that are not done
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kvilt
