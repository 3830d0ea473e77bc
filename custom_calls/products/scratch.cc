#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "products/scratch.h"

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

namespace mx {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kKeptBytes = size_t{64} << 20;

struct Buffer {
  char* data;
  size_t size;
};

struct Kept {
  std::mutex mutex;
  std::vector<Buffer> buffers;
  size_t bytes = 0;
};

// Never destroyed: a thread of the pool may still give memory back while the process ends.
Kept& TheKept() {
  static Kept* kept = new Kept;
  return *kept;
}

}  // namespace

Scratch::Scratch(size_t size) : data_(nullptr), size_((size + kPage - 1) / kPage * kPage) {
  if (size_ == 0) size_ = kPage;
  {
    Kept& kept = TheKept();
    std::lock_guard<std::mutex> lock(kept.mutex);
    size_t best = kept.buffers.size();
    for (size_t i = 0; i < kept.buffers.size(); ++i) {
      const size_t candidate = kept.buffers[i].size;
      if (candidate < size_) continue;
      if (best == kept.buffers.size() || candidate < kept.buffers[best].size) best = i;
    }
    if (best < kept.buffers.size()) {
      data_ = kept.buffers[best].data;
      size_ = kept.buffers[best].size;
      kept.bytes -= size_;
      kept.buffers.erase(kept.buffers.begin() + static_cast<std::ptrdiff_t>(best));
      return;
    }
  }
#if defined(_WIN32)
  void* memory = _aligned_malloc(size_, kPage);
#else
  void* memory = std::aligned_alloc(kPage, size_);
#endif
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  madvise(memory, size_, MADV_HUGEPAGE);
#endif
  data_ = static_cast<char*>(memory);
}

Scratch::~Scratch() {
  Kept& kept = TheKept();
  {
    std::lock_guard<std::mutex> lock(kept.mutex);
    if (kept.bytes + size_ <= kKeptBytes) {
      kept.buffers.push_back({data_, size_});
      kept.bytes += size_;
      return;
    }
  }
#if defined(_WIN32)
  _aligned_free(data_);
#else
  std::free(data_);
#endif
}

}  // namespace mx
