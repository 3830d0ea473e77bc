// No kernel makes a subnormal operand of codes, which Intel's processors handle in microcode, a
// hundred times slower. The flag of such operands is sticky, so one look after a kernel tells, and
// on every processor: each thread's flag, for each instruction set that this machine has.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_

#include <xmmintrin.h>

#include <atomic>
#include <cstdio>
#include <string>

#include "tests/check.h"

namespace mx_test {

constexpr unsigned kAllFlags = 0x3f, kSubnormalOperand = 0x02, kUnderflow = 0x10;

// The flags that `work` leaves on the threads of a pool.
template <class Work>
unsigned FlagsOf(const Work& work) {
  std::atomic<unsigned> flags{0};
  const auto watch = [&flags](size_t, const auto& task) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~kAllFlags);
    task();
    flags |= _mm_getcsr() & kAllFlags;
    _mm_setcsr(before);
  };
  Threads threads(3, watch);
  watch(0, [&] { work(threads); });
  threads.Join();
  return flags;
}

// Runs `work` on threads and says whether any of them met or made a subnormal.
template <class Work>
bool StaysNormal(const std::string& name, unsigned flags, const Work& work) {
  const bool clear = CHECK_EQUAL(FlagsOf(work) & flags, 0u);
  if (!clear) std::printf("  %s\n", name.c_str());
  return clear;
}

}  // namespace mx_test

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_SUBNORMAL_H_
