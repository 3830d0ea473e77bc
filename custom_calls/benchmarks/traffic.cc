// A bound for benchmarks: moves the bytes of a kernel without computing anything.
#include <cstdint>
#include <cstring>

#include "common/checks.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskBytes = 1 << 17;

// Fetched ahead, as kernels do: on Zen 5 this reads a quarter faster than without.
constexpr int64_t kReadAhead = 16 << 10;

// Sums words, sixteen chains at once, as fast as they arrive.
uint64_t Read(const char* from, int64_t bytes) {
  uint64_t sums[16] = {};
  uint64_t words[16];
  int64_t at = 0;
  for (; at + static_cast<int64_t>(sizeof words) <= bytes; at += sizeof words) {
    std::memcpy(words, from + at, sizeof words);
#if defined(__GNUC__) || defined(__clang__)
    for (int line = 0; line < 2; ++line) {
      __builtin_prefetch(from + at + kReadAhead + 64 * line, 0, 3);
    }
#endif
    for (int i = 0; i < 16; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (uint64_t part : sums) sum += part;
  for (; at < bytes; ++at) sum += static_cast<unsigned char>(from[at]);
  return sum;
}

// Reads every byte of x and writes every byte of y, in step: what x has more is read only, what y
// has more is filled.
ffi::Error Traffic(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t in = static_cast<int64_t>(x.size_bytes());
  const int64_t out = static_cast<int64_t>(y->size_bytes());
  const char* from = static_cast<const char*>(x.untyped_data());
  char* to = static_cast<char*>(y->untyped_data());
  const int64_t tasks = (in + out + kTaskBytes - 1) / kTaskBytes;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t begin = in * task / tasks, end = in * (task + 1) / tasks;
    const int64_t first = out * task / tasks, last = out * (task + 1) / tasks;
    const int64_t shared = end - begin < last - first ? end - begin : last - first;
    std::memcpy(to + first, from + begin, static_cast<size_t>(shared));
    const uint64_t sum = Read(from + begin + shared, end - begin - shared);
    std::memset(to + first + shared, static_cast<int>(sum & 1),
                static_cast<size_t>(last - first - shared));
    // The sum must be seen to be used.
    if (shared > 0 && sum == 1) to[first] = 1;
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxTraffic, mx::Traffic,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
