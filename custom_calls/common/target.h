// The instruction set that a file of kernels is compiled for. Each *_kernels.cc is compiled once
// for each of them, with its flags and -DMX_TARGET=<its name>, and defines one table in the
// namespace of that name. What it includes, the *-inl.h files, lies in an anonymous namespace in
// there.
//
// An inline function with external linkage would be merged by the linker, perhaps into the AVX-512
// copy, and then run on a machine without it. So whatever such a file includes has internal
// linkage: MX_INLINE functions, and templates inside an anonymous namespace. No standard library
// templates.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_TARGET_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_TARGET_H_

#ifndef MX_TARGET
#error "compile files of kernels with -DMX_TARGET=<instruction set>"
#endif

// AArch64's sets differ in what the compiler says of them: __ARM_FEATURE_*.
#define MX_RANK_portable 0
#define MX_RANK_dotprod 0
#define MX_RANK_avx2 1
#define MX_RANK_avx2_vnni 2
#define MX_RANK_avx512 3
#define MX_RANK_avx512_vbmi 4
#define MX_RANK_avx512_vnni 5
#define MX_RANK_avx512_bf16 6

#define MX_JOIN_NOW(a, b) a##b
#define MX_JOIN(a, b) MX_JOIN_NOW(a, b)
// Of MX_TARGET, to compare with the ones above.
#define MX_RANK MX_JOIN(MX_RANK_, MX_TARGET)

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_TARGET_H_
