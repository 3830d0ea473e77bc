// Work shared between the calling thread and XLA's own pool.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_THREAD_POOL_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_THREAD_POOL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "common/float_environment.h"

namespace mx {

// Runs work(0), ..., work(num_tasks - 1), in any order, on the caller and on the pool's threads;
// returns when all are done. Each thread keeps subnormals meanwhile. The caller takes tasks too and
// waits only for those that others have begun, so a busy pool delays nothing and nesting is safe.
//
// Pool: num_threads() and Schedule(callable), as xla::ffi::ThreadPool.
template <class Pool, class Work>
void ParallelFor(Pool& pool, int64_t num_tasks, const Work& work) {
  const int64_t helpers =
      num_tasks <= 1 ? 0 : std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  if (helpers <= 0) {
    KeepSubnormals environment;
    for (int64_t task = 0; task < num_tasks; ++task) work(task);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  // A helper may start after all is done: it must find the counters, and then touch nothing else.
  auto progress = std::make_shared<Progress>();
  auto run = [progress, num_tasks, &work] {
    int64_t finished = 0;
    {
      KeepSubnormals environment;
      for (int64_t task; (task = progress->next.fetch_add(1)) < num_tasks; ++finished) work(task);
    }
    if (finished != 0) progress->done.fetch_add(finished, std::memory_order_release);
  };
  for (int64_t helper = 0; helper < helpers; ++helper) pool.Schedule(decltype(run)(run));
  run();
  while (progress->done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
}

// A pool of nobody: everything runs on the caller.
struct NoPool {
  int64_t num_threads() const { return 1; }
  template <class Task>
  void Schedule(Task&& task) {
    std::forward<Task>(task)();
  }
};

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_THREAD_POOL_H_
