// SPDX-License-Identifier: Apache-2.0
// Streams for copies, and events that order them. On a GPU they use the CUDA driver, which is loaded at first use.
// Without a GPU they are threads. Both have the same semantics, so that the executor has one code path, and a test on a
// CPU can delay any stream.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <mutex>
#include <vector>

namespace tf {

// A point in the work of a stream.
class Event {
 public:
  enum State { kFailed = -1, kPending = 0, kDone = 1 };
  virtual ~Event() = default;
  virtual State state() = 0;
  virtual State wait() = 0;                // blocks the calling thread until the state is not kPending
  virtual Event& real() { return *this; }  // the event of the real stream, see late_streams.h
};
using EventRef = std::shared_ptr<Event>;

// Work of a stream or a thread, with its start and end in seconds of the monotonic clock (Python's time.perf_counter).
struct Span {
  int32_t kind;
  int32_t bucket;
  double start_s;
  double end_s;
};

// Collects spans from several threads. Spans are kept only if recording is on.
class SpanLog {
 public:
  void set_enabled(bool enabled);
  bool enabled() const { return enabled_; }
  void add(const Span& span);
  std::vector<Span> take();

 private:
  std::mutex mutex_;
  std::vector<Span> spans_;
  volatile bool enabled_ = false;
};

// Makes copies in order, concurrently with other streams.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void wait(const EventRef& event) = 0;
  virtual void copy(void* into, const void* from, size_t num_bytes) = 0;
  virtual EventRef record() = 0;
  virtual void set_delay(double seconds) = 0;  // a delay before the copies of each span, for tests
  // The copies between these two calls are one span of the log.
  virtual void begin_span() = 0;
  virtual void end_span(int32_t kind, int32_t bucket) = 0;
  // Moves spans that the device has finished to the log. `anchor` is an event that was recorded at `anchor_s`.
  virtual void flush_spans(void* anchor, double anchor_s) = 0;
};

// Creates streams and page-locked memory.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual std::unique_ptr<Stream> new_stream(SpanLog* log) = 0;
  virtual void* new_pinned(size_t num_bytes, bool* is_locked) = 0;  // nullptr if there is no memory
  virtual void free_pinned(void* buffer, size_t num_bytes, bool is_locked) = 0;
  virtual void enter_thread() = 0;  // called once by every thread of the library that uses streams
  // Whether one copy may write to memory that contains both addresses. The CUDA driver refuses a copy over two
  // allocations, even if they are adjacent.
  virtual bool share_allocation(const void* one, const void* other) = 0;
  // Makes a stream of the caller wait for the event. If `stream` is null, the calling thread waits.
  virtual void hold(void* stream, const EventRef& event) = 0;
};

std::shared_ptr<Driver> new_thread_driver();
// Returns nullptr if the CUDA driver cannot be loaded or has no such device.
std::shared_ptr<Driver> new_cuda_driver(int32_t device);

double now_s();

// Names the calling thread, for debuggers and for tests that count threads. At most 15 characters.
void name_thread(const char* name);

}  // namespace tf

// The event that Python holds.
struct tf_event {
  tf::EventRef ref;
};
