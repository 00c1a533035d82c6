#include "thread_pool.h"

#include <chrono>

#include <sched.h>

namespace quasar {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr int kSpins = 4096;  // before a waiting thread offers its core to others
// Longer than what a caller does between two steps, so that decoding never waits for a thread to wake up.
constexpr auto kAwake = std::chrono::microseconds(1000);

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads) {
  for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (size_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  task(0);
  barrier();
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const int phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    pause();
    if (spins >= kSpins) sched_yield();
  }
}

void ThreadPool::work(int index) {
  int seen = 0;
  while (true) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    while (generation_.load(std::memory_order_acquire) == seen && !stopping_) {
      for (int i = 0; i < 64; ++i) pause();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen || stopping_; });
    }
    if (stopping_) return;
    ++seen;
    (*task_)(index);
    barrier();
  }
}

}  // namespace quasar
