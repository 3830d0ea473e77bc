// Attention of a few queries over the same rows of keys and values, as in decoding.
#ifndef MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_
#define MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_

#include <stdint.h>

#include "common/isas.h"

namespace mx {

// The queries that one matrix of keys serves. Rows of keys and values come in runs, so that codes
// are decoded a run at a time.
struct AttendProblem {
  const float* queries;  // [num_queries, width]
  float* out;            // [num_queries, value_width]
  float* weights;        // [num_queries, seen], working memory
  float* sums;           // [num_queries], likewise
  int64_t num_queries, seen, width, value_width;
  float scale;  // of the scores
};

struct AttendKernels {
  // weights[:, first:first + count] = queries keys^T scale, by that many rows of keys.
  void (*score)(const AttendProblem& problem, const float* keys, int64_t first, int64_t count);
  // weights = e^(weights - the largest of a query), and sums those of its weights.
  void (*weigh)(const AttendProblem& problem);
  // out += weights[:, first:first + count] values; the run that begins at 0 overwrites it, the one
  // that ends at `seen` divides it by the sums: divided weights might be subnormal, and slow.
  void (*add)(const AttendProblem& problem, const float* values, int64_t first, int64_t count);
  // Codes of four bits, two a byte, the first in the low half; rows of ceil(width / 2) bytes.
  void (*unpack)(const uint8_t* packed, int64_t rows, int64_t width, uint8_t* codes);
};

// Of attend_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(AttendKernels, kAttend)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_ATTENTION_ATTEND_H_
