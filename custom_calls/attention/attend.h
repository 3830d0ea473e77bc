// Attention of a few queries over the same rows of keys and values, as in decoding.
#ifndef MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_
#define MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_

#include <cstdint>

namespace mx {

// One matrix of keys and one of values, with the queries that they serve; all float32, rows of
// `width` or `value_width` without gaps.
struct AttendProblem {
  const float* queries;  // [num_queries, width]
  const float* keys;     // [seen, width]
  const float* values;   // [seen, value_width]
  float* out;            // [num_queries, value_width]
  float* weights;        // [seen], working memory
  int64_t num_queries, seen, width, value_width;
  float scale;  // of the scores
};

struct AttendKernels {
  // out = softmax(queries keys^T scale) values.
  void (*attend)(const AttendProblem& problem);
};

// Of attend_kernels.cc, compiled for each set.
namespace portable { extern const AttendKernels kAttend; }
namespace avx2 { extern const AttendKernels kAttend; }
namespace avx512 { extern const AttendKernels kAttend; }

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_
