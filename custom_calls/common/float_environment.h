// XLA runs its threads with flush-to-zero and denormals-are-zero set. Codes must not depend on it.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_ENVIRONMENT_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_ENVIRONMENT_H_

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace mx {

// While it lives, this thread keeps subnormals and rounds to nearest even; then all is as it was,
// but for flags, which stay raised as after any arithmetic.
class KeepSubnormals {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushDenormalsRounding); }
  ~KeepSubnormals() { _mm_setcsr(saved_ | (_mm_getcsr() & kFlags)); }

 private:
  static constexpr unsigned kFlags = 0x003fu;
  // FZ, DAZ, and the two bits of the rounding mode.
  static constexpr unsigned kFlushDenormalsRounding = 0x8000u | 0x0040u | 0x6000u;
  unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const unsigned long long kept = saved_ & ~kFlushRounding;
    asm volatile("msr fpcr, %0" : : "r"(kept));
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  // FZ, and the two bits of the rounding mode.
  static constexpr unsigned long long kFlushRounding = (1ull << 24) | (3ull << 22);
  unsigned long long saved_;
#else
  KeepSubnormals() {}
  ~KeepSubnormals() {}
#endif

 public:
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;
};

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_ENVIRONMENT_H_
