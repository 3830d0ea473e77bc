// The products of one step of decoding and nothing around them: a row by every packed matrix of
// SmolLM2-135M, one after the other, as examples/generate calls them; and a plain read of the same
// bytes in the same rounds.
//
//     decode [rounds] [threads] [rows]
//
// prints median, quartiles and least of each case in milliseconds: CPU time of one thread, the
// clock on the wall of several.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/read.h"
#include "benchmarks/threads.h"
#include "common/dispatch.h"
#include "products/run.h"
#include "products/weights.h"

namespace mx {
namespace {

struct Shape {
  int64_t n, k;
};

// Queries, keys and values are one product, as gate and up are: they read the same input.
constexpr int kLayers = 30;
constexpr Shape kLayer[] = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}};
constexpr Shape kHead = {49152, 576};
constexpr int64_t kMostK = 1536;
constexpr int64_t kReadTask = 1 << 17;

struct Weights {
  const char* name;
  Element element;
  ScaleKind scale;
  int32_t block;
};
constexpr Weights kWeights[] = {{"mxfp4", kE2M1, kScaleE8M0, 32},
                                {"nvfp4", kE2M1, kScaleE4M3, 16},
                                {"mxfp8_e4m3", kE4M3, kScaleE8M0, 32}};

const MatmulKernels& Kernels() {
  static const MatmulKernels* const kernels[kNumIsas] = MX_PRODUCT_KERNELS(kMatmul);
  return Pick(kernels);
}

double Milliseconds(bool alone) {
  timespec at;
  clock_gettime(alone ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &at);
  return 1e3 * static_cast<double>(at.tv_sec) + 1e-6 * static_cast<double>(at.tv_nsec);
}

// A matrix of random codes, none of them NaN or subnormal floats of 8 bits, packed.
Source PackRandom(std::mt19937& random, const Weights& weights, Shape shape, uint8_t* to) {
  const int64_t blocks = shape.k / weights.block;
  std::vector<uint8_t> codes(static_cast<size_t>(shape.n * shape.k));
  std::vector<uint8_t> scales(static_cast<size_t>(shape.n * blocks));
  for (uint8_t& code : codes) {
    const uint32_t drawn = static_cast<uint32_t>(random());
    const uint32_t eight_bits = (drawn & 0x80) | (0x40 + drawn / 256 % 31);
    code = static_cast<uint8_t>(weights.element == kE2M1 ? drawn % 16 : eight_bits);
  }
  for (uint8_t& scale : scales) {
    scale = static_cast<uint8_t>((weights.scale == kScaleE8M0 ? 115 : 40) + random() % 16);
  }
  Source source{};
  source.elements = codes.data(), source.scales = scales.data();
  source.element = weights.element, source.scale_kind = weights.scale;
  source.block = weights.block, source.rows = shape.n, source.k = shape.k;
  source.row_stride = shape.k, source.k_stride = 1;
  source.scale_row_stride = blocks, source.scale_block_stride = 1;
  const WeightSizes sizes = SizesOfWeights(weights.element, weights.block, shape.n, shape.k);
  for (int64_t panel = 0; panel < sizes.panels; ++panel) {
    Kernels().pack_codes(source, panel * kTileColumns, to + panel * sizes.panel_bytes);
  }
  return PackedSource(source, to);
}

// The matrices of a step, and rows to multiply: as float32, and as int8 with a scale each block.
class Step {
 public:
  Step(const Weights& weights, int64_t rows) : weights_(weights), rows_(rows) {
    std::vector<Shape> shapes;
    for (int i = 0; i < kLayers; ++i) {
      shapes.insert(shapes.end(), std::begin(kLayer), std::end(kLayer));
    }
    shapes.push_back(kHead);
    for (Shape shape : shapes) bytes_ += BytesOf(shape);
    // Ordinary pages, as JAX has them, of a large array.
    memory_.resize(static_cast<size_t>(bytes_ + 64));
    std::mt19937 random(0);
    uint8_t* to = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    first_ = reinterpret_cast<const char*>(to);
    for (Shape shape : shapes) {
      matrices_.push_back(PackRandom(random, weights, shape, to));
      to += BytesOf(shape);
    }
    for (int64_t i = 0; i < rows * kMostK; ++i) {
      values_.push_back(static_cast<float>(random() % 2001) / 1000.0f - 1);
      codes_.push_back(static_cast<uint8_t>(random() % 255 - 127));
    }
    scales_.assign(static_cast<size_t>(rows * kMostK / weights.block), 120);
    out_.resize(static_cast<size_t>(rows * kHead.n));
  }

  int64_t bytes() const { return bytes_; }

  void Read(Threads& pool) {
    const int64_t tasks = (bytes_ + kReadTask - 1) / kReadTask;
    ParallelFor(pool, tasks, [&](int64_t task) {
      const int64_t begin = bytes_ * task / tasks, end = bytes_ * (task + 1) / tasks;
      // The sum must be seen to be used.
      if (mx::Read(first_ + begin, end - begin) == 1) std::puts("1");
    });
  }

  void Multiply(Threads& pool, Element element) {
    for (const Source& matrix : matrices_) {
      MatmulProblem problem{};
      Source& lhs = problem.lhs;
      lhs.rows = rows_, lhs.k = lhs.row_stride = matrix.k, lhs.k_stride = 1;
      lhs.block = weights_.block, lhs.element = element;
      lhs.elements = element == kElementInt8 ? static_cast<const void*>(codes_.data())
                                             : static_cast<const void*>(values_.data());
      if (element == kElementInt8) {
        lhs.scales = scales_.data(), lhs.scale_kind = kScaleE8M0;
        lhs.scale_row_stride = matrix.k / weights_.block, lhs.scale_block_stride = 1;
      }
      problem.rhs = matrix;
      problem.products = {{0, 0}};
      problem.factors = {{1, 1}};
      problem.out_type = kOutFloat32;
      problem.out = out_.data();
      RunMatmul(pool, Kernels(), problem);
    }
  }

 private:
  int64_t BytesOf(Shape shape) const {
    const WeightSizes sizes = SizesOfWeights(weights_.element, weights_.block, shape.n, shape.k);
    return sizes.panels * sizes.panel_bytes;
  }

  const Weights& weights_;
  int64_t rows_, bytes_ = 0;
  std::vector<uint8_t> memory_, codes_, scales_;
  const char* first_;
  std::vector<Source> matrices_;
  std::vector<float> values_, out_;
};

struct Case {
  std::string name;
  std::function<void()> run;
  std::vector<double> times;
};

void Print(std::vector<Case>* cases) {
  for (Case& one : *cases) {
    std::sort(one.times.begin(), one.times.end());
    const size_t n = one.times.size();
    std::printf("  %-24s %8.3f %8.3f %8.3f %8.3f\n", one.name.c_str(), one.times[n / 2],
                one.times[n / 4], one.times[3 * n / 4], one.times[0]);
  }
}

void Run(int rounds, int threads, int64_t rows) {
  Threads pool(threads);
  for (const Weights& weights : kWeights) {
    Step step(weights, rows);
    const std::string name = weights.name;
    std::vector<Case> cases;
    cases.push_back({"read", [&] { step.Read(pool); }, {}});
    cases.push_back({"float32 x " + name, [&] { step.Multiply(pool, kElementFloat32); }, {}});
    if (weights.scale == kScaleE8M0) {
      cases.push_back({"mxint8 x " + name, [&] { step.Multiply(pool, kElementInt8); }, {}});
    }
    std::mt19937 random(0);
    std::vector<size_t> order;
    for (size_t i = 0; i < cases.size(); ++i) order.push_back(i);
    for (int round = -1; round < rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      for (size_t i : order) {
        const double begin = Milliseconds(threads == 1);
        cases[i].run();
        const double took = Milliseconds(threads == 1) - begin;
        if (round >= 0) cases[i].times.push_back(took);
      }
    }
    std::printf("%s, %.1f MB, %lld rows, %d threads: ms (median, quartiles, least)\n", weights.name,
                1e-6 * static_cast<double>(step.bytes()), static_cast<long long>(rows), threads);
    Print(&cases);
  }
}

}  // namespace
}  // namespace mx

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  const int rows = argc > 3 ? std::atoi(argv[3]) : 1;
  if (rounds < 1 || threads < 1 || rows < 1) {
    std::fprintf(stderr, "decode: needs rounds, threads and rows of at least 1, got rounds=%d, "
                 "threads=%d, rows=%d\n", rounds, threads, rows);
    return 1;
  }
  mx::Run(rounds, threads, rows);
  return 0;
}
