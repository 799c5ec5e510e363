// A pool of threads that is started once: spins briefly for the next piece of work, then sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
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

  // Calls work(item, worker) for every item below `items`, on all threads, and returns when all are done. Items are
  // handed out as threads become free, so that both are busy to the end; no result may depend on who did what.
  void run(int64_t items, const std::function<void(int64_t item, int worker)>& work);

 private:
  void loop(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  const std::function<void(int64_t, int)>* work_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kvilt
