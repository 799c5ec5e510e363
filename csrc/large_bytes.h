// Memory on large pages.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvilt {

// Bytes on large pages where the system has them: a step reads thousands of small ones.
struct LargeBytes {
  static constexpr size_t kPage = 1 << 21;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory;
  int64_t size = 0;

  void grow(int64_t bytes) {
    if (bytes <= size) return;
    const size_t page = size_t(bytes) < kPage ? 64 : kPage, whole = (size_t(bytes) + page - 1) / page * page;
    memory.reset();
    memory.reset(std::aligned_alloc(page, whole));
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    if (page == kPage) madvise(memory.get(), whole, MADV_HUGEPAGE);
#endif
    size = bytes;
  }
};

}  // namespace kvilt
