// Sharing work: every task once, on any number of threads, with subnormals kept on each.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <thread>
#include <vector>

#include "common/thread_pool.h"
#include "tests/check.h"

namespace {

// Starts a thread for each task, some of them late.
class Threads {
 public:
  explicit Threads(int64_t count) : count_(count) {}
  ~Threads() {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return count_; }
  template <class Task>
  void Schedule(Task task) {
    const bool late = threads_.size() % 2 == 1;
    threads_.emplace_back([task, late]() mutable {
      if (late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      task();
    });
  }

 private:
  int64_t count_;
  std::vector<std::thread> threads_;
};

}  // namespace

int main() {
  for (int64_t threads = 1; threads <= 5; ++threads) {
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<int> ran(tasks, 0);
      std::atomic<int64_t> subnormals{0};
      Threads pool(threads);
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
