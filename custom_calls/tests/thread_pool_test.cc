// Sharing work: every task once, on any number of threads, with subnormals kept on each.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <thread>
#include <vector>

#include "common/macros.h"
#include "common/thread_pool.h"
#include "tests/check.h"

#if MX_X86
#include <xmmintrin.h>
#endif

namespace {

using mx_test::Threads;

// Every second thread is late.
Threads SomeLate(int64_t count) {
  return Threads(count, [](size_t number, const auto& task) {
    if (number % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    task();
  });
}

// Tasks that take their time: all are done when ParallelFor returns, whoever ran them.
void WaitsForEveryTask() {
  for (int64_t tasks : {2, 3, 4, 9}) {
    std::atomic<int64_t> done{0};
    Threads pool = SomeLate(4);
    const std::thread::id caller = std::this_thread::get_id();
    mx::ParallelFor(pool, tasks, [&](int64_t) {
      // The caller runs out of tasks first.
      const bool helps = std::this_thread::get_id() != caller;
      std::this_thread::sleep_for(std::chrono::milliseconds(helps ? 40 : 5));
      ++done;
    });
    CHECK_EQUAL(done.load(), tasks);
  }
}

// As many tasks run side by side as there are threads.
void UsesEveryThread() {
  for (int64_t threads = 2; threads <= 4; ++threads) {
    std::atomic<int64_t> begun{0};
    Threads pool = SomeLate(threads);
    mx::ParallelFor(pool, threads, [&](int64_t) {
      ++begun;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (begun < threads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      CHECK_EQUAL(begun.load(), threads);
    });
  }
}

#if MX_X86
// FZ, DAZ, and rounding toward zero, as nothing in a kernel may have them; XLA's threads have two.
constexpr unsigned kForeign = 0x8000u | 0x0040u | 0x6000u;

// How many of the tasks ran with subnormal operands and results, rounding to nearest.
template <class Pool>
int64_t ExactTasks(Pool& pool, int64_t tasks) {
  std::atomic<int64_t> exact{0}, begun{0};
  mx::ParallelFor(pool, tasks, [&](int64_t) {
    // On every thread once.
    ++begun;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (begun < tasks && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    volatile float tiny = 1e-40f, small = 1e-38f, one = 1.0f, half_ulp = 0x1.8p-24f;
    const bool operands = tiny * 0x1p100f > 0.0f, results = small * 0.01f > 0.0f;
    const bool nearest = one + half_ulp > 1.0f;
    if (operands && results && nearest) ++exact;
  });
  return exact;
}

void KeepsSubnormalsOnForeignThreads() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kForeign);
  mx::NoPool nobody;
  const int64_t alone = ExactTasks(nobody, 1);
  int64_t together;
  {
    Threads pool(3, [](size_t, const auto& task) {
      _mm_setcsr(_mm_getcsr() | kForeign);
      task();
      CHECK_EQUAL(_mm_getcsr() & kForeign, kForeign);
    });
    together = ExactTasks(pool, 3);
  }
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQUAL(alone, 1);
  CHECK_EQUAL(together, 3);
  CHECK_EQUAL(after & kForeign, kForeign);
}
#else
void KeepsSubnormalsOnForeignThreads() {}
#endif

}  // namespace

int main() {
  WaitsForEveryTask();
  UsesEveryThread();
  KeepsSubnormalsOnForeignThreads();
  for (int64_t threads = 1; threads <= 5; ++threads) {
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<int> ran(tasks, 0);
      std::atomic<int64_t> subnormals{0};
      Threads pool = SomeLate(threads);
      mx::ParallelFor(pool, tasks, [&](int64_t task) {
        ++ran[task];
        volatile float tiny = 1e-38f;
        if (tiny * 0.01f > 0.0f) ++subnormals;
      });
      for (int64_t task = 0; task < tasks; ++task) CHECK_EQUAL(ran[task], 1);
      CHECK_EQUAL(subnormals.load(), tasks);
    }
  }
  mx::NoPool nobody;
  int64_t sum = 0;
  mx::ParallelFor(nobody, 10, [&](int64_t task) { sum += task; });
  CHECK_EQUAL(sum, 45);
  return mx_test::Report();
}
