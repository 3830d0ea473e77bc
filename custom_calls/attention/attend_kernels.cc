// The kernels of attention, compiled for each instruction set: see common/target.h.
#include "attention/attend.h"

#include <string.h>

#include "common/macros.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// Sixteen floats, which the compiler keeps in as many registers as the instruction set needs.
constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

MX_INLINE Floats Load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}
MX_INLINE void Store(float* to, Floats values) { memcpy(to, &values, sizeof values); }
MX_INLINE Floats All(float value) { return value - Floats{}; }

MX_INLINE float Sum(Floats values) {
  float lane[kLanes];
  memcpy(lane, &values, sizeof lane);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
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
  const Floats found = power * two_to_n;
  return x != x ? x : tiny ? Floats{} : found;
}

MX_INLINE float Dot(const float* a, const float* b, int64_t count) {
  Floats sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    sums[0] += Load(a + i) * Load(b + i);
    sums[1] += Load(a + i + kLanes) * Load(b + i + kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) sums[0] += Load(a + i) * Load(b + i);
  float sum = Sum(sums[0] + sums[1]);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Scores to e^(score - largest); their sum.
MX_INLINE float Exponentials(float* scores, int64_t count) {
  float largest = scores[0];
  for (int64_t i = 1; i < count; ++i) {
    // NaN, once there, stays.
    if (!(scores[i] <= largest) && largest == largest) largest = scores[i];
  }
  Floats sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats some = All(-1e30f);
    const int64_t left = count - i;
    const size_t bytes = (left < kLanes ? (size_t)left : kLanes) * sizeof(float);
    if (left < kLanes) {
      // Lanes beyond the end give 0 whatever the largest is.
      for (int64_t j = 0; j < left; ++j) some[j] = scores[i + j] - largest;
    } else {
      some = Load(scores + i) - All(largest);
    }
    const Floats found = Exp(some);
    memcpy(scores + i, &found, bytes);
    sums += found;
  }
  return Sum(sums);
}

// kVectors of a row of the output, from `at` on.
template <int kVectors>
MX_INLINE void WeighedSum(const AttendProblem& p, int64_t at, float sum, float* out) {
  Floats total[kVectors] = {};
  for (int64_t row = 0; row < p.seen; ++row) {
    const Floats weight = All(p.weights[row]);
    const float* value = p.values + row * p.value_width + at;
    for (int v = 0; v < kVectors; ++v) total[v] += weight * Load(value + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) Store(out + at + v * kLanes, total[v] / All(sum));
}

void Attend(const AttendProblem& p) {
  for (int64_t query = 0; query < p.num_queries; ++query) {
    const float* mine = p.queries + query * p.width;
    for (int64_t row = 0; row < p.seen; ++row) {
      p.weights[row] = Dot(mine, p.keys + row * p.width, p.width) * p.scale;
    }
    const float sum = Exponentials(p.weights, p.seen);
    float* out = p.out + query * p.value_width;
    int64_t at = 0;
    for (; at + 4 * kLanes <= p.value_width; at += 4 * kLanes) WeighedSum<4>(p, at, sum, out);
    for (; at + kLanes <= p.value_width; at += kLanes) WeighedSum<1>(p, at, sum, out);
    for (; at < p.value_width; ++at) {
      float total = 0;
      for (int64_t row = 0; row < p.seen; ++row) {
        total += p.weights[row] * p.values[row * p.value_width + at];
      }
      out[at] = total / sum;
    }
  }
}

}  // namespace

const AttendKernels kAttend = {Attend};

}  // namespace mx::MX_TARGET
