// What differs between compilers.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_MACROS_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_MACROS_H_

#if defined(__GNUC__) || defined(__clang__)
#define MX_INLINE static inline __attribute__((always_inline, unused))
#define MX_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define MX_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define MX_RESTRICT __restrict__
#define MX_PREFETCH(address) __builtin_prefetch(address)
#define MX_EXPORT __attribute__((visibility("default")))
#else
#define MX_INLINE static inline
#define MX_LIKELY(condition) (condition)
#define MX_UNLIKELY(condition) (condition)
#define MX_RESTRICT
#define MX_PREFETCH(address)
#define MX_EXPORT
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MX_X86 1
#else
#define MX_X86 0
#endif

#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define MX_ARM64 1
#else
#define MX_ARM64 0
#endif

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_MACROS_H_
