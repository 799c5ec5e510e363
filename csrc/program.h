// A recorded run of operations: the same calls on the same addresses, without Python between them.
#pragma once
#include <functional>
#include <vector>

namespace kvilt {

struct Program {
  std::vector<std::function<void()>> calls;

  void run() const {
    for (const auto& call : calls) call();
  }
};

}  // namespace kvilt
