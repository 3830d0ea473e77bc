// The kernels of attention, compiled for each instruction set: see common/target.h.
#include "attention/attend.h"

#include <string.h>

#include "common/macros.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// The floats of a register.
#if MX_RANK >= MX_RANK_avx512
constexpr int kLanes = 16;
#elif MX_RANK >= MX_RANK_avx2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

MX_INLINE Floats Load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}
MX_INLINE void Store(float* to, Floats values) { memcpy(to, &values, sizeof values); }
MX_INLINE Floats All(float value) { return value - Floats{}; }

// The lower, or upper, halves of a and b, lane by lane in turn.
MX_INLINE Floats ZipLower(Floats a, Floats b) {
#if MX_RANK >= MX_RANK_avx512
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif MX_RANK >= MX_RANK_avx2
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}
MX_INLINE Floats ZipUpper(Floats a, Floats b) {
#if MX_RANK >= MX_RANK_avx512
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
#elif MX_RANK >= MX_RANK_avx2
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Lane i is the sum of the lanes of vector i.
template <int kCount>
MX_INLINE Floats SumEach(const Floats (&vectors)[kCount]) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
    Floats halves[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) {
      const Floats a = vectors[i], b = vectors[i + kCount / 2];
      halves[i] = ZipLower(a, b) + ZipUpper(a, b);
    }
    return SumEach(halves);
  }
}
MX_INLINE float Sum(Floats values) {
  Floats alone[kLanes] = {values};
  return SumEach(alone)[0];
}

// e^x for x <= 0, within two units in the last place; below float32's normal numbers 0. NaN stays.
MX_INLINE Floats Exp(Floats x) {
  // x = n ln 2 + r, with |r| <= ln 2 / 2; ln 2 in two parts, the first times n exact.
  const Floats lowest = All(-87.0f);
  const Integers tiny = x < lowest;
  const Floats kept = tiny ? lowest : x;
  // Adding 1.5 * 2^23 rounds to an integer, which its last bits hold.
  const Floats magic = All(12582912.0f);
  const Floats shifted = kept * All(1.44269504f) + magic;
  const Floats n = shifted - magic;
  const Floats r = (kept - n * All(0.693359375f)) + n * All(2.12194440e-4f);
  Floats p = All(1.9875691500e-4f);
  p = p * r + All(1.3981999507e-3f);
  p = p * r + All(8.3334519073e-3f);
  p = p * r + All(4.1665795894e-2f);
  p = p * r + All(1.6666665459e-1f);
  p = p * r + All(5.0000001201e-1f);
  const Floats power = (p * r) * r + r + All(1.0f);
  Integers bits, exponent;
  memcpy(&bits, &shifted, sizeof bits);
  exponent = (bits - 0x4b400000 + 127) << 23;
  Floats two_to_n;
  memcpy(&two_to_n, &exponent, sizeof two_to_n);
  const Floats result = power * two_to_n;
  return x != x ? x : tiny ? Floats{} : result;
}

// Scores of `count` rows of keys, as many as a vector has lanes if kAll, else fewer.
template <bool kAll>
MX_INLINE void ScoreRows(const AttendProblem& p, const float* query, const float* keys,
                         int64_t count, float* scores) {
  Floats sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= p.width; i += kLanes) {
    const Floats part = Load(query + i);
    // Rows beyond the last are the last one again.
    for (int r = 0; r < kLanes; ++r) {
      sums[r] += part * Load(keys + (kAll || r < count ? r : count - 1) * p.width + i);
    }
  }
  Floats total = SumEach(sums);
  for (; i < p.width; ++i) {
    for (int r = 0; r < (kAll ? kLanes : count); ++r) total[r] += query[i] * keys[r * p.width + i];
  }
  total *= All(p.scale);
  memcpy(scores, &total, (kAll ? kLanes : static_cast<size_t>(count)) * sizeof *scores);
}

void Score(const AttendProblem& p, const float* keys, int64_t first, int64_t count) {
  for (int64_t at = 0; at < count; at += kLanes) {
    const float* rows = keys + at * p.width;
    for (int64_t query = 0; query < p.num_queries; ++query) {
      const float* values = p.queries + query * p.width;
      float* scores = p.weights + query * p.seen + first + at;
      count - at >= kLanes ? ScoreRows<true>(p, values, rows, kLanes, scores)
                           : ScoreRows<false>(p, values, rows, count - at, scores);
    }
  }
}

// The largest of some scores; NaN if one is.
MX_INLINE float Largest(const float* scores, int64_t count) {
  Floats most = All(scores[0]);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats some = Load(scores + i);
    // NaN, once there, stays.
    most = some <= most || most != most ? most : some;
  }
  float largest = scores[0];
  const auto take = [&](float score) {
    if (!(score <= largest) && largest == largest) largest = score;
  };
  for (int lane = 0; lane < kLanes; ++lane) take(most[lane]);
  for (; i < count; ++i) take(scores[i]);
  return largest;
}

// Scores to e^(score - largest); their sum.
MX_INLINE float Exponentials(float* scores, int64_t count) {
  const float largest = Largest(scores, count);
  Floats sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats powers = Exp(Load(scores + i) - All(largest));
    Store(scores + i, powers);
    sums += powers;
  }
  if (i < count) {
    // Lanes beyond the end give 0 whatever the largest is.
    Floats some = All(-1e30f);
    for (int64_t j = i; j < count; ++j) some[j - i] = scores[j] - largest;
    const Floats powers = Exp(some);
    memcpy(scores + i, &powers, static_cast<size_t>(count - i) * sizeof *scores);
    sums += powers;
  }
  return Sum(sums);
}

void Weigh(const AttendProblem& p) {
  for (int64_t query = 0; query < p.num_queries; ++query) {
    p.sums[query] = Exponentials(p.weights + query * p.seen, p.seen);
  }
}

// A run of rows of values, each times its weight.
struct Run {
  const float* values;
  const float* weights;
  int64_t count, width;
  bool adds;      // to what is there
  float divisor;  // of the sums, 1 but in the last run
};

// kVectors of a row of the output.
template <int kVectors>
MX_INLINE void AddRows(const Run& run, int64_t at, float* out) {
  Floats total[kVectors] = {};
  for (int v = 0; run.adds && v < kVectors; ++v) total[v] = Load(out + at + v * kLanes);
  for (int64_t row = 0; row < run.count; ++row) {
    const Floats weight = All(run.weights[row]);
    const float* value = run.values + row * run.width + at;
    for (int v = 0; v < kVectors; ++v) total[v] += weight * Load(value + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) Store(out + at + v * kLanes, total[v] / All(run.divisor));
}

void Add(const AttendProblem& p, const float* values, int64_t first, int64_t count) {
  for (int64_t query = 0; query < p.num_queries; ++query) {
    const float* weights = p.weights + query * p.seen + first;
    float* out = p.out + query * p.value_width;
    const float divisor = first + count == p.seen ? p.sums[query] : 1.0f;
    const Run run = {values, weights, count, p.value_width, first != 0, divisor};
    int64_t at = 0;
    for (; at + 4 * kLanes <= run.width; at += 4 * kLanes) AddRows<4>(run, at, out);
    for (; at + kLanes <= run.width; at += kLanes) AddRows<1>(run, at, out);
    for (; at < run.width; ++at) {
      float total = run.adds ? out[at] : 0;
      for (int64_t row = 0; row < count; ++row) total += weights[row] * values[row * run.width + at];
      out[at] = total / divisor;
    }
  }
}

void Unpack(const uint8_t* packed, int64_t rows, int64_t width, uint8_t* codes) {
  const int64_t bytes = (width + 1) / 2, whole = width / 2;
  for (int64_t row = 0; row < rows; ++row, packed += bytes, codes += width) {
    for (int64_t i = 0; i < bytes; i += 64) MX_PREFETCH(packed + rows * bytes + i);
    for (int64_t i = 0; i < whole; ++i) {
      const uint16_t both = packed[i];
      const uint16_t spread = static_cast<uint16_t>((both | both << 4) & 0x0f0f);
      memcpy(codes + 2 * i, &spread, sizeof spread);
    }
    if (width % 2 != 0) codes[width - 1] = packed[whole] & 15;
  }
}

}  // namespace

const AttendKernels kAttend = {Score, Weigh, Add, Unpack};

}  // namespace mx::MX_TARGET
