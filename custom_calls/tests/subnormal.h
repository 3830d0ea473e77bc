// No kernel makes a subnormal operand of codes, which Intel's processors handle in microcode, a
// hundred times slower. The flag of such operands is sticky, so one look after a kernel tells, and
// on every processor: each thread's flag, for each instruction set that this machine has.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_

#include <xmmintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace mx_test {

constexpr unsigned kAllFlags = 0x3f, kSubnormalOperand = 0x02, kUnderflow = 0x10;

// Threads that add the flags which their work leaves.
class FlagThreads {
 public:
  ~FlagThreads() { Join(); }
  int64_t num_threads() const { return 3; }
  template <class Task>
  void Schedule(Task task) {
    threads_.emplace_back([this, task]() mutable {
      _mm_setcsr(_mm_getcsr() & ~kAllFlags);
      task();
      flags_ |= _mm_getcsr() & kAllFlags;
    });
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  unsigned flags() const { return flags_.load(); }

 private:
  std::vector<std::thread> threads_;
  std::atomic<unsigned> flags_{0};
};

// Runs `work` on threads and says whether any of them met or made a subnormal.
template <class Work>
bool StaysNormal(const std::string& name, unsigned flags, const Work& work) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~kAllFlags);
  FlagThreads threads;
  work(threads);
  const unsigned mine = _mm_getcsr() & kAllFlags;
  threads.Join();
  _mm_setcsr(before);
  const bool clear = CHECK_EQUAL((mine | threads.flags()) & flags, 0u);
  if (!clear) std::printf("  %s\n", name.c_str());
  return clear;
}

}  // namespace mx_test

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_
