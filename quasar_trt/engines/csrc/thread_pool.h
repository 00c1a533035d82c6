// A persistent pool whose threads spin between the phases of a step and sleep between steps.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace quasar {

// The part of [0, total) that belongs to thread `index` of `count`.
inline std::pair<int, int> share(int total, int index, int count) {
  return {static_cast<int>(static_cast<int64_t>(total) * index / count),
          static_cast<int>(static_cast<int64_t>(total) * (index + 1) / count)};
}

class ThreadPool {
 public:
  // Throws std::system_error when the system does not give so many threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  // Calls task(index) on every thread, the caller being index 0, and returns when all are done; tasks must not throw.
  // Throws std::runtime_error in a forked child, which has inherited the pool but not its threads.
  void run(const std::function<void(int)>& task);
  // Inside a task: waits until all threads have come here.
  void barrier();

 private:
  void work(int index);
  void stop();

  const int size_;
  const int process_;  // that started the threads
  std::vector<std::thread> workers_;
  const std::function<void(int)>* task_ = nullptr;
  std::atomic<int> generation_{0};
  std::atomic<bool> stopping_{false};
  struct Sleep {
    std::mutex mutex;
    std::condition_variable wake;
  };
  std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace quasar
