// A pool of threads that is started once: spins briefly for the next piece of work, then sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kvilt {

class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(item, worker) for every item below `items` and returns when all are done. Each thread begins with a run
  // of neighbouring items, so that it reads along memory, and then helps the others, so that all are busy to the end; no
  // result may depend on who did what. A thread that the system keeps from its core holds nobody up: what it has not
  // begun, the others do.
  void run(int64_t items, const std::function<void(int64_t item, int worker)>& work);

 private:
  // The next item of a share and the end of it, in one word: whoever takes an item knows in the same moment that there
  // is one, whether it comes in time or long after the run it was woken for.
  struct alignas(64) Share {
    std::atomic<uint64_t> word{0};
  };

  void loop(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  std::unique_ptr<Share[]> shares_;  // one per thread
  const std::function<void(int64_t, int)>* work_ = nullptr;
  std::atomic<int64_t> left_{0};  // items that are not done
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kvilt
