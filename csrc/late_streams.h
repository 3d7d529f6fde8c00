// SPDX-License-Identifier: Apache-2.0
// Streams whose work is decided on with the executor's lock and queued without it.
//
// A call of the CUDA driver can take milliseconds: if the launch queue of the model's stream is full, the launching
// thread waits inside the driver, and the calls of other threads wait with it. The mover must not hold the executor's
// lock meanwhile, because the worker and the model's threads need it. It therefore calls the methods of `LateStream`
// with the lock. They only add orders to a list. Then it releases the lock and runs the orders, in which the real
// streams are called. All streams of an executor share one list, so that the order of calls does not change.
//
// `record` returns a `LateEvent`, which is pending until its order has run, and then is the event of the real stream.
// Only the mover runs orders. A thread that waits for a late event with the executor's lock does not stop the mover.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "streams.h"

namespace tf {

using Orders = std::vector<std::function<void()>>;

class LateEvent final : public Event {
 public:
  void bind(EventRef real) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      real_ = std::move(real);
      is_bound_ = true;
    }
    bound_.notify_all();
  }
  State state() override { return is_bound_ ? real_->state() : kPending; }
  State wait() override { return real().wait(); }
  Event& real() override {
    if (!is_bound_) {
      std::unique_lock<std::mutex> lock(mutex_);
      bound_.wait(lock, [this] { return is_bound_.load(); });
    }
    return *real_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable bound_;
  std::atomic<bool> is_bound_{false};
  EventRef real_;
};

class LateStream final : public Stream {
 public:
  LateStream(std::unique_ptr<Stream> real, Orders& orders) : real_(std::move(real)), orders_(orders) {}
  void wait(const EventRef& event) override {
    orders_.push_back([this, event] { real_->wait(event); });
  }
  void copy(void* into, const void* from, size_t num_bytes) override {
    orders_.push_back([this, into, from, num_bytes] { real_->copy(into, from, num_bytes); });
  }
  EventRef record() override {
    auto event = std::make_shared<LateEvent>();
    orders_.push_back([this, event] { event->bind(real_->record()); });
    return event;
  }
  void begin_span() override {
    orders_.push_back([this] { real_->begin_span(); });
  }
  void end_span(int32_t kind, int32_t bucket) override {
    orders_.push_back([this, kind, bucket] { real_->end_span(kind, bucket); });
  }
  // Any thread may call these two.
  void set_delay(double seconds) override { real_->set_delay(seconds); }
  void flush_spans(void* anchor, double anchor_s) override { real_->flush_spans(anchor, anchor_s); }

 private:
  std::unique_ptr<Stream> real_;
  Orders& orders_;
};

}  // namespace tf
