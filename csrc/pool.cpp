// SPDX-License-Identifier: Apache-2.0
// The pool of threads (pool.h). Its threads are detached and sleep between jobs. A job belongs to the caller of
// `run_tasks`, which works on it too and returns when the last task is done; calls from several threads take turns.
#include "pool.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tf {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls for a short time, so that a thread need not be woken for each of several calls in a row. Returns false if the
// thread should sleep.
template <class Condition>
bool spin(Condition condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(30);
  do {
    for (int i = 0; i < 64; ++i) {
      if (condition()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  return condition();
}

struct Job {
  TaskFunction function;
  void* context;
  int64_t num_tasks;
};

// Never destroyed. Its threads are detached, sleep between jobs, and end with the process or with `retire`.
class Pool {
 public:
  // If the system provides fewer threads than requested, the pool uses those.
  explicit Pool(int num_threads) : wanted(num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  const int wanted;

  void run(const Job& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      open_ = true;
      next_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    share(job);
    {  // a worker that is not awake yet is not waited for
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
    }
    const auto idle = [this] { return active_.load(std::memory_order_acquire) == 0; };
    if (spin(idle)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, idle);
  }

  void retire() {  // no job may be running
    {
      std::lock_guard<std::mutex> lock(mutex_);
      retired_ = true;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }

 private:
  void share(const Job& job) {
    for (;;) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.num_tasks) return;
      job.function(job.context, task);
    }
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      const auto changed = [&] { return round_.load(std::memory_order_acquire) != seen; };
      Job job;
      {
        spin(changed);
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, changed);
        if (retired_) return;
        seen = round_.load(std::memory_order_relaxed);
        if (!open_) continue;
        active_.fetch_add(1, std::memory_order_relaxed);
        job = job_;
      }
      share(job);
      std::lock_guard<std::mutex> lock(mutex_);  // the caller has not checked `active_` yet, or sleeps
      if (active_.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  Job job_{};
  bool open_ = false;  // workers may join the job
  bool retired_ = false;
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> active_{0};  // workers inside the job
};

// A forked child makes a new one, because the parent's threads do not exist there and a lock may be held.
struct Shared {
  std::mutex turn;
  Pool* pool = nullptr;
  int wanted = 1;
};

std::atomic<Shared*> shared{nullptr};

void after_fork_in_child() {
  Shared* fresh = new Shared;
  fresh->wanted = shared.load()->wanted;
  shared.store(fresh);
}

Shared& state() {
  static const bool once = [] {
    shared.store(new Shared);
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return true;
  }();
  (void)once;
  return *shared.load();
}

}  // namespace

void run_tasks(int64_t num_tasks, TaskFunction function, void* context) {
  if (num_tasks <= 1) {
    if (num_tasks == 1) function(context, 0);
    return;
  }
  Shared& s = state();
  std::lock_guard<std::mutex> lock(s.turn);
  if (!s.pool || s.pool->wanted != s.wanted) {
    if (s.pool) s.pool->retire();
    s.pool = new Pool(s.wanted);  // a retired pool is a few hundred bytes, kept because its threads may still read it
  }
  s.pool->run(Job{function, context, num_tasks});
}

void set_threads(int num_threads) {
  Shared& s = state();
  std::lock_guard<std::mutex> lock(s.turn);
  s.wanted = num_threads < 1 ? 1 : num_threads;
}

int get_threads() {
  Shared& s = state();
  std::lock_guard<std::mutex> lock(s.turn);
  return s.wanted;
}

}  // namespace tf
