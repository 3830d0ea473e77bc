// Threads that wait for work with their eyes open for a while, as XLA's do.
#ifndef MX_JAX_CUSTOM_CALLS_BENCHMARKS_THREADS_H_
#define MX_JAX_CUSTOM_CALLS_BENCHMARKS_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace mx {

// A pool of the caller and `count - 1` others, for ParallelFor.
class Threads {
 public:
  explicit Threads(int64_t count) : count_(count) {
    for (int64_t i = 1; i < count; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return count_; }
  template <class Task>
  void Schedule(Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::move(task));
      waiting_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      for (int i = 0; i < 2000 && waiting_.load(std::memory_order_acquire) == 0; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
        waiting_.fetch_sub(1, std::memory_order_release);
      }
      task();
    }
  }

  int64_t count_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<int64_t> waiting_{0};
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_BENCHMARKS_THREADS_H_
