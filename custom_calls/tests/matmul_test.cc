// Products of every instruction set that this machine has, against double precision, on operands
// that end where their memory ends.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "products/run.h"
#include "products/weights.h"
#include "tests/check.h"

namespace mx {
namespace {

// Codes or float32 values, their scales, and what they stand for; on the heap, to their last byte.
struct Matrix {
  std::unique_ptr<uint8_t[]> elements, scales;
  std::vector<double> values;  // [rows, k]
  Source source{};
};

int Pick(std::mt19937& random, int count) { return static_cast<int>(random() % count); }

Matrix Draw(std::mt19937& random, Element element, ScaleKind kind, int32_t block, int64_t rows,
            int64_t k) {
  Matrix matrix;
  Source& source = matrix.source;
  const bool k_first = Pick(random, 2) == 1;
  const int64_t blocks = (k + block - 1) / block, bytes = ElementBytes(element);
  matrix.elements.reset(new uint8_t[rows * k * bytes]);
  matrix.scales.reset(new uint8_t[rows * blocks]);
  source = {matrix.elements.get(),
            kind == kNoScale ? nullptr : matrix.scales.get(),
            element,
            kind,
            block,
            rows,
            k,
            k_first ? 1 : k,
            k_first ? rows : 1,
            k_first ? 1 : blocks,
            k_first ? rows : 1};
  for (int64_t i = 0; i < rows * blocks; ++i) {
    matrix.scales[i] =
        static_cast<uint8_t>(kind == kScaleE8M0 ? 120 + Pick(random, 15) : 40 + Pick(random, 30));
  }
  const float* scale_values = ScaleTable(kind, element, kFloat32);
  const int bits = ElementBits(element);
  matrix.values.resize(rows * k);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t at = row * source.row_stride + j * source.k_stride;
      double value;
      if (element == kElementFloat32) {
        const float drawn = static_cast<float>(Pick(random, 2001) - 1000) / 300.0f;
        reinterpret_cast<float*>(matrix.elements.get())[at] = drawn;
        value = drawn;
      } else {
        int code = Pick(random, 1 << bits);
        if (!std::isfinite(TablesOf(element).float32[code])) code = 1;
        matrix.elements[at] = static_cast<uint8_t>(code);
        value = TablesOf(element).float32[code];
      }
      const int64_t scale = row * source.scale_row_stride + j / block * source.scale_block_stride;
      matrix.values[row * k + j] =
          kind == kNoScale ? value : value * scale_values[matrix.scales[scale]];
    }
  }
  return matrix;
}

// Whether every entry lies within the backend's bound.
bool Close(const Matrix& lhs, const Matrix& rhs, const float* product) {
  const int64_t m = lhs.source.rows, n = rhs.source.rows, k = lhs.source.k;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double exact = 0, magnitude = 0;
      for (int64_t at = 0; at < k; ++at) {
        const double term = lhs.values[i * k + at] * rhs.values[j * k + at];
        exact += term;
        magnitude += std::fabs(term);
      }
      const double allowed = 2 * std::ldexp(std::sqrt(static_cast<double>(k)), -24) * magnitude;
      if (!(std::fabs(product[i * n + j] - exact) <= allowed)) return false;
    }
  }
  return true;
}

template <class Pool>
void Multiply(Pool& pool, const MatmulKernels& kernels, const Source& lhs, const Source& rhs,
              float* out) {
  MatmulProblem problem{};
  problem.lhs = lhs;
  problem.rhs = rhs;
  problem.products = {{0, 0}};
  problem.factors = {{1, 1}};
  problem.out_type = FloatType::kF32;
  problem.out = out;
  RunMatmul(pool, kernels, problem);
}

bool Check(const MatmulKernels& kernels, int seed) {
  std::mt19937 random(seed);
  const int32_t block = Pick(random, 2) ? 32 : 16;
  const int64_t sizes[] = {1, 2, 3, 5, 7, 12, 31, 33, 61, 95, 160},
                lengths[] = {0, 1, 16, 31, 33, 70, 600};
  const int64_t m = sizes[Pick(random, 11)], n = sizes[Pick(random, 11)];
  const int64_t k = lengths[Pick(random, 7)];
  const ScaleKind kind = block == 16 && Pick(random, 2) ? kScaleE4M3 : kScaleE8M0;
  const Element left = static_cast<Element>(Pick(random, kElementFloat32 + 1));
  const Element right = static_cast<Element>(Pick(random, kElementInt8 + 1));
  const Matrix lhs = Draw(random, left, left == kElementFloat32 ? kNoScale : kind, block, m, k);
  const Matrix rhs = Draw(random, right, kind, block, n, k);
  std::unique_ptr<float[]> out(new float[m * n]), again(new float[m * n]);
  NoPool nobody;
  Multiply(nobody, kernels, lhs.source, rhs.source, out.get());
  if (!Close(lhs, rhs, out.get())) return false;
  // Sums of integers are exact, times two E4M3 scales too if they have 16 bits: the portable set's bits.
  if (FitsInt8(left) && FitsInt8(right) &&
      (kind == kScaleE8M0 || LargestInteger(left) * LargestInteger(right) <= 1 << 12)) {
    Multiply(nobody, portable::kMatmul, lhs.source, rhs.source, again.get());
    if (!std::equal(out.get(), out.get() + m * n, again.get())) return false;
  }
  // Packed ahead of time: the same bits.
  const WeightSizes packed = SizesOfWeights(right, block, n, k);
  Scratch panels(packed.panels * packed.panel_bytes);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(panels.data());
  for (int64_t panel = 0; panel < packed.panels; ++panel) {
    kernels.pack_codes(rhs.source, panel * kTileColumns, bytes + panel * packed.panel_bytes);
  }
  mx_test::Threads threads;
  Multiply(threads, kernels, lhs.source, PackedSource(rhs.source, bytes), again.get());
  if (!std::equal(out.get(), out.get() + m * n, again.get())) return false;
  // On several threads, where there is work enough for them.
  Multiply(threads, kernels, lhs.source, rhs.source, again.get());
  return std::equal(out.get(), out.get() + m * n, again.get());
}

// Panels of any codes and scales at all: as the portable ones, to the byte.
bool CheckPanels(const MatmulKernels& kernels, int seed) {
  std::mt19937 random(seed);
  const int32_t block = Pick(random, 2) ? 32 : 16;
  const ScaleKind kind = Pick(random, 2) ? kScaleE4M3 : kScaleE8M0;
  const Element element = static_cast<Element>(Pick(random, kElementInt8 + 1));
  const int64_t rows = 1 + Pick(random, 70), k = 1 + Pick(random, 300);
  const Matrix matrix = Draw(random, element, kind, block, rows, k);
  const bool wild = Pick(random, 2) == 1;
  for (int64_t i = 0; wild && i < rows * k; ++i) {
    matrix.elements[i] = static_cast<uint8_t>(Pick(random, 256));
  }
  for (int64_t i = 0; wild && i < rows * ((k + block - 1) / block); ++i) {
    matrix.scales[i] = static_cast<uint8_t>(Pick(random, 256));
  }
  const WeightSizes sizes = SizesOfWeights(element, block, rows, k);
  Scratch result(sizes.panel_bytes), expected(sizes.panel_bytes);
  for (int64_t panel = 0; panel < sizes.panels; ++panel) {
    uint8_t* bytes[] = {reinterpret_cast<uint8_t*>(result.data()),
                        reinterpret_cast<uint8_t*>(expected.data())};
    std::fill(bytes[0], bytes[0] + sizes.panel_bytes, uint8_t{0xaa});
    kernels.pack_codes(matrix.source, panel * kTileColumns, bytes[0]);
    portable::kMatmul.pack_codes(matrix.source, panel * kTileColumns, bytes[1]);
    if (!std::equal(bytes[0], bytes[0] + sizes.panel_bytes, bytes[1])) return false;
  }
  return true;
}

int Run(int count) {
  const MatmulKernels* const all[] = MX_PRODUCT_KERNELS(kMatmul);
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!HasIsa(static_cast<Isa>(isa))) continue;
    for (int seed = 0; seed < count; ++seed) {
      if (!CheckPanels(*all[isa], seed)) {
        std::printf("%s: panels of seed %d are wrong\n", IsaName(static_cast<Isa>(isa)), seed);
        return 1;
      }
      if (Check(*all[isa], seed)) continue;
      std::printf("%s: product of seed %d is wrong\n", IsaName(static_cast<Isa>(isa)), seed);
      return 1;
    }
  }
  std::printf("%d products on each of %d instruction sets\n", count, DetectedIsa() + 1);
  return 0;
}

}  // namespace
}  // namespace mx

// The number of products may be given.
int main(int argc, char** argv) { return mx::Run(argc > 1 ? std::atoi(argv[1]) : 400); }
