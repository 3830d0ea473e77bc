// No kernel of products has a subnormal operand: subnormal.h.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "products/run.h"
#include "products/weights.h"
#include "tests/check.h"

#if MX_X86
#include "tests/subnormal.h"

namespace {

using mx_test::Threads;
using mx_test::kSubnormalOperand;
using mx_test::kUnderflow;
using mx_test::Random;
using mx_test::StaysNormal;

// Any code but NaN and Inf, without which kernels multiply codes on their way.
uint8_t DrawCode(Random& random, mx::Element element) {
  for (;;) {
    const uint8_t code = static_cast<uint8_t>(random.Below(1 << mx::ElementBits(element)));
    const float value = mx::TablesOf(element).float32[code];
    if (value - value == 0.0f) return code;
  }
}

struct Matrix {
  std::vector<uint8_t> elements, scales;
  mx::Source source{};
};

// Some blocks are zeros under the smallest scale, as quantizing makes them.
Matrix DrawCodes(Random& random, mx::Element element, mx::ScaleKind kind, int32_t block,
                 int64_t rows, int64_t k) {
  Matrix matrix;
  const int64_t blocks = (k + block - 1) / block;
  for (int64_t i = 0; i < rows * k; ++i) matrix.elements.push_back(DrawCode(random, element));
  for (int64_t i = 0; i < rows * blocks; ++i) {
    // E4M3 scales: from the smallest, which is subnormal, to 256.
    const bool e8m0 = kind == mx::kScaleE8M0;
    matrix.scales.push_back(static_cast<uint8_t>(e8m0 ? 97 + random.Below(60)
                                                      : 1 + random.Below(0x78)));
    if (random.Below(8) != 0) continue;
    matrix.scales.back() = 0;
    const int64_t row = i / blocks, first = i % blocks * block;
    for (int64_t j = first; j < std::min(first + block, k); ++j) matrix.elements[row * k + j] = 0;
  }
  matrix.source = {matrix.elements.data(), matrix.scales.data(), element, kind, block, rows, k,
                   k, 1, blocks, 1};
  return matrix;
}

// float32, bfloat16 or float16 values of ordinary size, or of any that is normal in float16; those
// of float16 are subnormal in it too.
Matrix DrawValues(Random& random, mx::Element element, int32_t block, int64_t rows, int64_t k,
                  bool wide) {
  Matrix matrix;
  const int64_t bytes = mx::ElementBytes(element);
  matrix.elements.resize(rows * k * bytes);
  for (int64_t i = 0; i < rows * k; ++i) {
    uint32_t bits = random.Bits();
    if (element == mx::kElementF16) {
      bits &= (wide ? 0xbfff : 0x83ff);
    } else {
      const uint32_t exponent = static_cast<uint32_t>(wide ? 70 + random.Below(110)
                                                           : 120 + random.Below(10));
      bits = ((bits & 0x807fffff) | exponent << 23) >> (32 - 8 * bytes);
    }
    std::memcpy(&matrix.elements[i * bytes], &bits, bytes);
  }
  matrix.source = {matrix.elements.data(), nullptr, element, mx::kNoScale, block, rows, k,
                   k, 1, 0, 0};
  return matrix;
}

void Multiply(Threads& threads, const mx::MatmulKernels& kernels, const mx::Source& lhs,
              const mx::Source& rhs, mx::FloatType type, float* out) {
  mx::MatmulProblem problem{};
  problem.lhs = lhs, problem.rhs = rhs, problem.products = {{0, 0}};
  problem.factors = {{1, 1}}, problem.out_type = type, problem.out = out;
  mx::RunMatmul(threads, kernels, problem);
}

// Codes as they came, and packed ahead of time, by one row up to more than a slice takes.
void CheckProducts(const mx::MatmulKernels& kernels, const std::string& isa, mx::Element left,
                   mx::Element right, int32_t block, mx::ScaleKind kind, bool wide) {
  Random random(static_cast<uint64_t>(left * 100 + right * 10 + block + kind));
  const int64_t k = 650, n = 200;
  const Matrix rhs = DrawCodes(random, right, kind, block, n, k);
  const mx::WeightSizes sizes = mx::SizesOfWeights(right, block, n, k);
  mx::Scratch panels(sizes.panels * sizes.panel_bytes);
  uint8_t* packed = reinterpret_cast<uint8_t*>(panels.data());
  for (int64_t m : {1, 2, 4, 6, 9, 31, 70}) {
    const Matrix lhs = left > mx::kElementInt8 ? DrawValues(random, left, block, m, k, wide)
                                               : DrawCodes(random, left, kind, block, m, k);
    std::vector<float> out(m * n);
    const std::string name = isa + ": " + std::to_string(m) + " rows of element " +
                             std::to_string(left) + " by element " + std::to_string(right) +
                             ", block " + std::to_string(block) + ", scale kind " +
                             std::to_string(kind) + (wide ? ", any size" : "");
    StaysNormal(name, kSubnormalOperand | kUnderflow, [&](Threads& threads) {
      Multiply(threads, kernels, lhs.source, rhs.source, mx::FloatType::kF32, out.data());
    });
    StaysNormal(name + ", packed", kSubnormalOperand | kUnderflow, [&](Threads& threads) {
      mx::ParallelFor(threads, sizes.panels, [&](int64_t panel) {
        kernels.pack_codes(rhs.source, panel * mx::kTileColumns, packed + panel * sizes.panel_bytes);
      });
      threads.Join();
      Multiply(threads, kernels, lhs.source, mx::PackedSource(rhs.source, packed), mx::FloatType::kBf16,
               out.data());
    });
  }
}

void CheckAllProducts(const mx::MatmulKernels& kernels, const std::string& isa) {
  for (int left = 0; left < mx::kNumElements; ++left) {
    for (int right = mx::kE4M3; right <= mx::kElementInt8; ++right) {
      for (int scales = 0; scales < 3; ++scales) {
        const bool values = left > mx::kElementInt8;
        CheckProducts(kernels, isa, static_cast<mx::Element>(left),
                      static_cast<mx::Element>(right), scales == 0 ? 32 : 16,
                      scales == 2 ? mx::kScaleE4M3 : mx::kScaleE8M0, false);
        if (!values || scales == 1) continue;
        CheckProducts(kernels, isa, static_cast<mx::Element>(left),
                      static_cast<mx::Element>(right), scales == 0 ? 32 : 16,
                      scales == 2 ? mx::kScaleE4M3 : mx::kScaleE8M0, true);
      }
    }
  }
}

}  // namespace

int main() {
  // Tables are filled once, and hold subnormals.
  mx::TablesOf(mx::kE4M3);
  using namespace mx;  // isas.h names the sets' namespaces
  const MatmulKernels* const kernels[] = MX_PRODUCT_KERNELS(kMatmul);
  for (int isa = 0; isa < mx::kNumIsas; ++isa) {
    if (!mx::HasIsa(static_cast<mx::Isa>(isa))) continue;
    CheckAllProducts(*kernels[isa], mx::IsaName(static_cast<mx::Isa>(isa)));
  }
  return mx_test::Report();
}
#else
int main() { return 0; }
#endif
