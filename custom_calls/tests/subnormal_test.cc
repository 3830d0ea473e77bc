// No kernel makes a subnormal operand of codes, which Intel's processors handle in microcode, a
// hundred times slower. The flag of such operands is sticky, so one look after a kernel tells, and
// on every processor: each thread's flag, for each instruction set that this machine has.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "casts/share.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "products/run.h"
#include "products/weights.h"
#include "tests/check.h"
#include "tests/formats.h"

#if MX_X86
#include <xmmintrin.h>

namespace {

using mx_test::Random;

constexpr unsigned kAllFlags = 0x3f, kSubnormalOperand = 0x02, kUnderflow = 0x10;

// Threads that add the flags which their work leaves.
class Threads {
 public:
  ~Threads() { Join(); }
  int64_t num_threads() const { return 3; }
  template <class Task>
  void Schedule(Task task) {
    threads_.emplace_back([this, task]() mutable {
      _mm_setcsr(_mm_getcsr() & ~kAllFlags);
      task();
      flags_ |= _mm_getcsr() & kAllFlags;
    });
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  unsigned flags() const { return flags_.load(); }

 private:
  std::vector<std::thread> threads_;
  std::atomic<unsigned> flags_{0};
};

// Runs `work` on threads and says whether any of them met or made a subnormal.
template <class Work>
bool StaysNormal(const std::string& name, unsigned flags, const Work& work) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~kAllFlags);
  Threads threads;
  work(threads);
  const unsigned mine = _mm_getcsr() & kAllFlags;
  threads.Join();
  _mm_setcsr(before);
  const bool clear = CHECK_EQUAL((mine | threads.flags()) & flags, 0u);
  if (!clear) std::printf("  %s\n", name.c_str());
  return clear;
}

// Any code but NaN and Inf, without which kernels multiply codes on their way.
uint8_t DrawCode(Random& random, mx::Element element) {
  const int bits = element == mx::kE2M1                                ? 4
                   : element == mx::kE2M3 || element == mx::kE3M2 ? 6
                                                                       : 8;
  for (;;) {
    const uint8_t code = static_cast<uint8_t>(random.Below(1 << bits));
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
              const mx::Source& rhs, mx::OutType type, float* out) {
  const float one = 1;
  mx::MatmulProblem problem{};
  problem.lhs = lhs, problem.rhs = rhs, problem.products = {{0, 0}};
  problem.alpha = &one, problem.out_type = type, problem.out = out;
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
      Multiply(threads, kernels, lhs.source, rhs.source, mx::kOutFloat32, out.data());
    });
    StaysNormal(name + ", packed", kSubnormalOperand | kUnderflow, [&](Threads& threads) {
      mx::ParallelFor(threads, sizes.panels, [&](int64_t panel) {
        kernels.pack_codes(rhs.source, panel * mx::kTileColumns, packed + panel * sizes.panel_bytes);
      });
      threads.Join();
      Multiply(threads, kernels, lhs.source, mx::PackedSource(rhs.source, packed), mx::kOutBf16,
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

// A cast's shape, and where its blocks lie.
struct Place {
  int64_t outer, rows, length, inner, block, block_rows;
};

constexpr Place kPlaces[] = {
    {7, 1, 320, 1, 32, 0},  {7, 1, 300, 1, 32, 0},   {3, 1, 96, 150, 32, 0}, {2, 1, 70, 64, 16, 0},
    {5, 1, 320, 1, 320, 0}, {2, 48, 200, 1, 32, 16}, {2, 1, 64, 1, 16, 0},
};

template <class Plan>
void Put(const Place& place, Plan* plan) {
  plan->outer = place.outer, plan->rows = place.rows, plan->length = place.length;
  plan->inner = place.inner, plan->block = place.block, plan->block_rows = place.block_rows;
  plan->blocks_per_row = mx::CeilDivide(place.length, place.block);
}

int64_t SizeOf(const Place& place) {
  return place.outer * place.rows * place.length * place.inner;
}

int64_t NumScales(const Place& place) {
  const int64_t squares =
      place.block_rows == 0 ? 1 : mx::CeilDivide(place.rows, place.block_rows);
  return place.outer * squares * mx::CeilDivide(place.length, place.block) * place.inner;
}

mx::ScaleRule RuleOf(mx::ScaleFormatKind kind, const mx::ElementFormat& element) {
  mx::ScaleRule rule{};
  rule.kind = kind, rule.threshold = 1 << 23, rule.emax = element.emax;
  rule.target = mx::MaxOf(element);
  rule.scale_element = mx::Derive(mx_test::kFormats[0].facts);
  rule.smallest = mx::SmallestSubnormal(rule.scale_element);
  rule.scale_of_tiny = static_cast<float>(double(rule.target) / 1e-12);
  return rule;
}

// Values of ordinary size, all that float16 has, or zeros: runs of them, and columns of `inner`.
std::vector<uint8_t> DrawInput(Random& random, mx::FloatType type, int64_t size, int64_t inner) {
  const int64_t width = type == mx::FloatType::kF32 ? 4 : 2;
  std::vector<uint8_t> x(size * width);
  bool zero = false;
  for (int64_t i = 0; i < size; ++i) {
    if (i % 64 == 0) zero = random.Below(4) == 0;
    uint32_t bits = random.Bits();
    if (type == mx::FloatType::kF16) {
      bits &= 0xbfff;
    } else {
      bits = (bits & 0x807fffff) | static_cast<uint32_t>(97 + random.Below(60)) << 23;
      if (type == mx::FloatType::kBf16) bits >>= 16;
    }
    if (zero || (inner > 1 && i % inner % 5 == 0)) bits = 0;
    std::memcpy(&x[i * width], &bits, width);
  }
  return x;
}

std::string NameOf(const char* what, const std::string& isa, const char* format,
                   mx::ScaleFormatKind kind, mx::FloatType type, const Place& place) {
  return isa + ": " + what + " " + format + ", scale kind " +
         std::to_string(static_cast<int>(kind)) + ", type " +
         std::to_string(static_cast<int>(type)) + ", length " + std::to_string(place.length) +
         ", inner " + std::to_string(place.inner);
}

void CheckCasts(const mx::QuantizeKernels& quantize, const mx::DequantizeKernels& dequantize,
                const std::string& isa, const mx_test::Named& format, mx::ScaleFormatKind kind,
                mx::FloatType type, const Place& place) {
  Random random(static_cast<uint64_t>(place.length + 10 * static_cast<int>(type)));
  const int64_t size = SizeOf(place), scales = NumScales(place);
  const std::vector<uint8_t> x = DrawInput(random, type, size, place.inner);
  std::vector<uint8_t> codes(size), stored(4 * scales), values(4 * size);
  std::vector<int32_t> amax(std::max(scales, place.outer));
  mx::QuantizePlan plan{};
  Put(place, &plan);
  plan.x = x.data(), plan.type = type, plan.codes = codes.data(), plan.scales = stored.data();
  plan.element = mx::Derive(format.facts), plan.rule = RuleOf(kind, plan.element);
  StaysNormal(NameOf("quantize", isa, format.name, kind, type, place), kSubnormalOperand,
              [&](Threads& threads) { mx::ShareBlocks(threads, plan, quantize); });
  if (place.block_rows == 0) {
    StaysNormal(NameOf("amax", isa, format.name, kind, type, place), kSubnormalOperand,
                [&](Threads& threads) {
                  const int64_t runs = place.inner == 1 ? place.outer
                                                        : place.outer * plan.blocks_per_row;
                  mx::ParallelFor(threads, runs, [&](int64_t run) {
                    quantize.amax(plan, run, run + 1, amax.data());
                  });
                });
  }
  // The codes that quantizing left, and any at all.
  for (const bool drawn : {false, true}) {
    for (int64_t i = 0; drawn && i < size; ++i) {
      codes[i] = static_cast<uint8_t>(random.Below(2 * plan.element.sign_code));
    }
    mx::DequantizePlan back{};
    Put(place, &back);
    back.codes = codes.data(), back.scales = stored.data(), back.out = values.data();
    back.type = type, back.element = plan.element, back.kind = kind;
    back.scale_element = plan.rule.scale_element;
    for (int32_t code = 0; code < 256; ++code) back.values[code] = mx::Decode(code, back.element);
    // Any codes under the scale of a block of zeros are subnormal values in truth: not so here.
    for (int64_t i = 0; drawn && kind == mx::ScaleFormatKind::kExponent && i < scales; ++i) {
      if (stored[i] == 0) stored[i] = 100;
    }
    StaysNormal(NameOf("dequantize", isa, format.name, kind, type, place), kSubnormalOperand,
                [&](Threads& threads) { mx::ShareBlocks(threads, back, dequantize); });
  }
}

void CheckBoth(const mx::QuantizeKernels& quantize, const std::string& isa,
               const mx_test::Named& format, mx::FloatType type) {
  Random random(5);
  const Place across{3, 1, 64, 200, 32, 0}, along{3 * 64, 1, 200, 1, 32, 0};
  const std::vector<uint8_t> x = DrawInput(random, type, SizeOf(across), across.inner);
  std::vector<uint8_t> codes[2], scales[2];
  mx::QuantizePlan plans[2] = {};
  for (int side = 0; side < 2; ++side) {
    const Place& place = side == 0 ? along : across;
    codes[side].resize(SizeOf(place)), scales[side].resize(NumScales(place));
    Put(place, &plans[side]);
    plans[side].x = x.data(), plans[side].type = type;
    plans[side].codes = codes[side].data(), plans[side].scales = scales[side].data();
    plans[side].element = mx::Derive(format.facts);
    plans[side].rule = RuleOf(mx::ScaleFormatKind::kExponent, plans[side].element);
  }
  StaysNormal(NameOf("both", isa, format.name, mx::ScaleFormatKind::kExponent, type, across),
              kSubnormalOperand, [&](Threads& threads) {
                mx::ShareStrips(threads, plans[0], plans[1], quantize);
              });
}

void CheckAllCasts(const mx::QuantizeKernels& quantize, const mx::DequantizeKernels& dequantize,
                   const std::string& isa) {
  for (const mx_test::Named& format : mx_test::kFormats) {
    for (int type = 0; type < 3; ++type) {
      CheckBoth(quantize, isa, format, static_cast<mx::FloatType>(type));
      for (int kind = 0; kind < 4; ++kind) {
        for (const Place& place : kPlaces) {
          CheckCasts(quantize, dequantize, isa, format, static_cast<mx::ScaleFormatKind>(kind),
                     static_cast<mx::FloatType>(type), place);
        }
      }
    }
  }
}

// The flag works at all, and comes through from every thread that ParallelFor uses.
void CheckFlag() {
  for (int64_t guilty = 0; guilty < 3; ++guilty) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~kAllFlags);
    Threads threads;
    std::atomic<int64_t> waiting{0};
    mx::ParallelFor(threads, 3, [&](int64_t task) {
      ++waiting;
      while (waiting < 3) std::this_thread::yield();
      volatile float tiny = 1e-40f;
      if (task == guilty) tiny = tiny * 2.0f;
    });
    threads.Join();
    const unsigned flags = threads.flags() | (_mm_getcsr() & kAllFlags);
    _mm_setcsr(before);
    CHECK_EQUAL(flags & kSubnormalOperand, kSubnormalOperand);
  }
}

}  // namespace

int main() {
  // Tables are filled once, and hold subnormals.
  mx::TablesOf(mx::kE4M3);
  CheckFlag();
  const mx::MatmulKernels* const products[] = {
      &mx::portable::kMatmul, &mx::avx2::kMatmul, &mx::avx512::kMatmul, &mx::avx512_vnni::kMatmul,
      &mx::avx512_bf16::kMatmul};
  for (int isa = 0; isa <= mx::DetectedIsa(); ++isa) {
    CheckAllProducts(*products[isa], mx::IsaName(static_cast<mx::Isa>(isa)));
  }
  CheckAllCasts(mx::portable::kQuantize, mx::portable::kDequantize, "portable");
  if (mx::DetectedIsa() >= mx::kAvx2) {
    CheckAllCasts(mx::avx2::kQuantize, mx::avx2::kDequantize, "avx2");
  }
  if (mx::DetectedIsa() >= mx::kAvx512) {
    CheckAllCasts(mx::avx512::kQuantize, mx::avx512::kDequantize, "avx512");
    if (mx::HasVbmi()) CheckAllCasts(mx::avx512_vbmi::kQuantize, mx::avx512::kDequantize, "vbmi");
  }
  return mx_test::Report();
}
#else
int main() { return 0; }
#endif
