// Just enough of a test framework: CHECK counts, EXIT tells.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_CHECK_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_CHECK_H_

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace mx_test {

inline std::atomic<int64_t> checks{0};
inline std::atomic<int64_t> failures{0};

template <class Left, class Right>
bool CheckEqual(const Left& left, const Right& right, const char* text, const char* file,
                int line) {
  ++checks;
  if (left == right) return true;
  if (++failures <= 20) {
    std::printf("%s:%d: %s: %lld is not %lld\n", file, line, text, static_cast<long long>(left),
                static_cast<long long>(right));
  }
  return false;
}

// What main returns.
inline int Report() {
  std::printf("%lld checks, %lld failures\n", static_cast<long long>(checks.load()),
              static_cast<long long>(failures.load()));
  return failures == 0 && checks > 0 ? 0 : 1;
}

// A pool that starts a thread for each task. `around` runs the task of each thread, by its number.
class Threads {
 public:
  using Around = std::function<void(size_t number, const std::function<void()>& task)>;
  explicit Threads(int64_t count = 3, Around around = [](size_t, const auto& task) { task(); })
      : count_(count), around_(std::move(around)) {}
  ~Threads() { Join(); }
  int64_t num_threads() const { return count_; }
  template <class Task>
  void Schedule(Task task) {
    threads_.emplace_back([this, number = threads_.size(), task] { around_(number, task); });
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  int64_t count_;
  Around around_;
  std::vector<std::thread> threads_;
};

// A small generator of random numbers: the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1dull;
  }
  uint32_t Bits() { return static_cast<uint32_t>(Next() >> 32); }
  int64_t Below(int64_t limit) { return static_cast<int64_t>(Next() % limit); }

 private:
  uint64_t state_;
};

}  // namespace mx_test

#define CHECK_EQUAL(left, right) \
  mx_test::CheckEqual((left), (right), #left " == " #right, __FILE__, __LINE__)

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_CHECK_H_
