#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>

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

ThreadPool::ThreadPool(int threads) : size_(threads), process_(getpid()) {
  try {
    for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == process_) {
    stop();
    return;
  }
  // A forked child has no threads to join, and destroying what they sleep on would wait for them forever.
  for (auto& worker : workers_) worker.detach();
  sleep_.release();
}

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_->mutex);
    stopping_ = true;
  }
  sleep_->wake.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (size_ > 1) {
    if (getpid() != process_) throw std::runtime_error("the engine was opened in another process; open it again in this one");
    {
      std::lock_guard<std::mutex> lock(sleep_->mutex);
      task_ = &task;
      generation_.fetch_add(1, std::memory_order_release);
    }
    sleep_->wake.notify_all();
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
  int spins = 0;
  while (phase_.load(std::memory_order_acquire) == phase) {
    pause();
    if (spins < kSpins) ++spins;
    else sched_yield();
  }
}

void ThreadPool::work(int index) {
  int seen = 0;
  while (true) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    while (generation_.load(std::memory_order_acquire) == seen && !stopping_) {
      for (int i = 0; i < 64; ++i) pause();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleep_->mutex);
      sleep_->wake.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen || stopping_; });
    }
    if (stopping_) return;
    ++seen;
    (*task_)(index);
    barrier();
  }
}

}  // namespace quasar
