// Attention of every instruction set that this machine has, against double precision, on operands
// that end where their memory ends.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "attention/attend.h"
#include "common/dispatch.h"
#include "common/macros.h"

namespace mx {
namespace {

std::unique_ptr<float[]> Draw(std::mt19937& random, int64_t count, float scale) {
  std::unique_ptr<float[]> values(new float[count]);
  std::normal_distribution<float> normal(0, scale);
  for (int64_t i = 0; i < count; ++i) values[i] = normal(random);
  return values;
}

bool Check(const AttendKernels& kernels, int seed) {
  std::mt19937 random(seed);
  const int64_t widths[] = {1, 3, 16, 32, 40, 64, 80, 129}, lengths[] = {1, 2, 15, 16, 17, 100};
  const int64_t width = widths[random() % 8], value_width = widths[random() % 8];
  const int64_t seen = lengths[random() % 6], num_queries = 1 + random() % 4;
  // Some scores so far apart that most weights vanish.
  const float spread = random() % 4 == 0 ? 30.0f : 1.0f;
  const auto queries = Draw(random, num_queries * width, spread);
  const auto keys = Draw(random, seen * width, 1), values = Draw(random, seen * value_width, 1);
  std::unique_ptr<float[]> out(new float[num_queries * value_width]), weights(new float[num_queries * seen]);
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  std::vector<float> sums(num_queries);
  const AttendProblem problem = {queries.get(), out.get(), weights.get(), sums.data(), num_queries,
                                 seen,          width,     value_width,   scale};
  // In runs of rows, as codes are decoded.
  const int64_t runs[] = {seen, 1, 8, 24}, run = runs[random() % 4];
  for (int64_t first = 0; first < seen; first += run) {
    kernels.score(problem, keys.get() + first * width, first, std::min(run, seen - first));
  }
  kernels.weigh(problem);
  for (int64_t first = 0; first < seen; first += run) {
    kernels.add(problem, values.get() + first * value_width, first, std::min(run, seen - first));
  }
  for (int64_t query = 0; query < num_queries; ++query) {
    std::vector<double> scores(seen);
    double largest = -1e300, sum = 0, magnitude = 0;
    for (int64_t row = 0; row < seen; ++row) {
      double size = 0;
      for (int64_t i = 0; i < width; ++i) {
        const double term = static_cast<double>(queries[query * width + i]) * keys[row * width + i];
        scores[row] += term * scale, size += std::fabs(term * scale);
      }
      largest = std::max(largest, scores[row]), magnitude = std::max(magnitude, size);
    }
    for (double& score : scores) sum += score = std::exp(score - largest);
    for (int64_t i = 0; i < value_width; ++i) {
      double exact = 0, total = 0;
      for (int64_t row = 0; row < seen; ++row) {
        const double term = scores[row] * values[row * value_width + i] / sum;
        exact += term, total += std::fabs(term);
      }
      // A score's own error is one of the weight, relative to it.
      const double relative = std::ldexp(16 + 4 * magnitude + static_cast<double>(seen), -24);
      const double allowed = relative * total + 1e-37;
      if (!(std::fabs(out[query * value_width + i] - exact) <= allowed)) return false;
    }
  }
  return true;
}

int Run(int count) {
  // Later sets have no kernels of their own.
  const AttendKernels* const all[kNumIsas] = MX_KERNELS(kAttend);
  int isa = 0;
  for (; isa <= DetectedIsa() && all[isa] != nullptr; ++isa) {
    for (int seed = 0; seed < count; ++seed) {
      if (Check(*all[isa], seed)) continue;
      std::printf("%s: attention of seed %d is wrong\n", IsaName(static_cast<Isa>(isa)), seed);
      return 1;
    }
  }
  std::printf("%d calls on each of %d instruction sets\n", count, isa);
  return 0;
}

}  // namespace
}  // namespace mx

int main() { return mx::Run(400); }
