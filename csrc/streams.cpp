// SPDX-License-Identifier: Apache-2.0
// Streams and events (streams.h), for machines with a GPU and for machines without one.
//
// Without a GPU each stream is a thread, which owns its queue and processes it in order. An event is a flag that the
// thread sets. With a GPU the CUDA driver has the queues. The functions here only enqueue work. Any thread that has
// called `enter_thread` may call them. One thread at a time uses a stream (under the mutex of the executor). Any thread
// may use an event.
#include "streams.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

#include "api.h"

namespace tf {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void name_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

void SpanLog::set_enabled(bool enabled) { enabled_ = enabled; }

void SpanLog::add(const Span& span) {
  if (!enabled_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  spans_.push_back(span);
}

std::vector<Span> SpanLog::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Span> found;
  found.swap(spans_);
  return found;
}

namespace {

void* map_hidden(size_t num_bytes) {
  void* buffer = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) return nullptr;
  madvise(buffer, num_bytes, MADV_HUGEPAGE);  // page-locking then allocates 2 MiB at a time
  madvise(buffer, num_bytes, MADV_DONTFORK);  // a forked child, as of a DataLoader, does not inherit page-locked pages
  return buffer;
}

// Streams as threads.

class ThreadEvent final : public Event {
 public:
  void signal(bool failed) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_ = failed ? kFailed : kDone;
    }
    changed_.notify_all();
  }
  State state() override { return state_; }
  State wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return state_ != kPending; });
    return state_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{kPending};
};

class ThreadStream final : public Stream {
 public:
  explicit ThreadStream(SpanLog* log) : log_(log), thread_([this] { loop(); }) {}
  ~ThreadStream() override {
    push({Item::kStop, nullptr, nullptr, nullptr, 0, {}});
    thread_.join();
  }
  void wait(const EventRef& event) override { push({Item::kWait, event, nullptr, nullptr, 0, {}}); }
  void copy(void* into, const void* from, size_t num_bytes) override {
    push({Item::kCopy, nullptr, into, from, num_bytes, {}});
  }
  EventRef record() override {
    auto event = std::make_shared<ThreadEvent>();
    push({Item::kRecord, event, nullptr, nullptr, 0, {}});
    return event;
  }
  void set_delay(double seconds) override { delay_s_ = seconds; }
  void begin_span() override { push({Item::kBegin, nullptr, nullptr, nullptr, 0, {}}); }
  void end_span(int32_t kind, int32_t bucket) override {
    push({Item::kEnd, nullptr, nullptr, nullptr, 0, {kind, bucket, 0, 0}});
  }
  void flush_spans(void*, double) override {}

 private:
  struct Item {
    enum Kind { kWait, kCopy, kRecord, kBegin, kEnd, kStop } kind;
    EventRef event;
    void* into;
    const void* from;
    size_t num_bytes;
    Span span;
  };

  void push(Item item) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
  }

  Item pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !items_.empty(); });
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

  void loop() {
    name_thread("twinflow-stream");
    bool failed = false;  // after a failure later work is not done, but its events report the failure
    double start_s = 0;
    for (;;) {
      Item item = pop();
      if (item.kind == Item::kStop) return;
      if (item.kind == Item::kRecord) static_cast<ThreadEvent&>(*item.event).signal(failed);
      if (failed) continue;
      if (item.kind == Item::kWait) failed = item.event->wait() == Event::kFailed;
      if (item.kind == Item::kCopy) memcpy(item.into, item.from, item.num_bytes);
      if (item.kind == Item::kBegin) {
        if (delay_s_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay_s_.load()));
        start_s = now_s();
      }
      if (item.kind == Item::kEnd) log_->add({item.span.kind, item.span.bucket, start_s, now_s()});
    }
  }

  SpanLog* log_;
  std::atomic<double> delay_s_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::thread thread_;
};

class ThreadDriver final : public Driver {
 public:
  std::unique_ptr<Stream> new_stream(SpanLog* log) override { return std::make_unique<ThreadStream>(log); }
  void* new_pinned(size_t num_bytes, bool* is_locked) override {
    void* buffer = map_hidden(num_bytes);
    if (buffer) memset(buffer, 0xFF, num_bytes);  // NaN, so that reads of memory that was never written are noticed
    *is_locked = true;
    return buffer;
  }
  void free_pinned(void* buffer, size_t num_bytes, bool) override { munmap(buffer, num_bytes); }
  void enter_thread() override {}
  bool share_allocation(const void*, const void*) override { return true; }
  void hold(void*, const EventRef& event) override { event->wait(); }
};

// CUDA. Types and numbers of the driver (cuda.h) are repeated here, so that the build does not need the toolkit.

typedef int CUresult;
typedef void* CUcontext;
typedef void* CUstream;
typedef void* CUevent;
constexpr CUresult kCudaSuccess = 0, kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventBlockingSync = 1, kEventDisableTiming = 2;
constexpr int kCaptureRelaxed = 2;

struct Cuda {
  CUresult (*cuInit)(unsigned);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, int);
  CUresult (*cuCtxSetCurrent)(CUcontext);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext*);
  CUresult (*cuCtxGetStreamPriorityRange)(int*, int*);
  CUresult (*cuStreamCreateWithPriority)(CUstream*, unsigned, int);
  CUresult (*cuStreamDestroy_v2)(CUstream);
  CUresult (*cuStreamSynchronize)(CUstream);
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned);
  CUresult (*cuMemcpyAsync)(uintptr_t, uintptr_t, size_t, CUstream);
  CUresult (*cuLaunchHostFunc)(CUstream, void (*)(void*), void*);
  CUresult (*cuEventCreate)(CUevent*, unsigned);
  CUresult (*cuEventDestroy_v2)(CUevent);
  CUresult (*cuEventRecord)(CUevent, CUstream);
  CUresult (*cuEventQuery)(CUevent);
  CUresult (*cuEventSynchronize)(CUevent);
  CUresult (*cuEventElapsedTime)(float*, CUevent, CUevent);
  CUresult (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  CUresult (*cuMemHostUnregister)(void*);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int*);
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuMemGetAddressRange_v2)(uintptr_t*, size_t*, uintptr_t);
};

template <class Function>
bool load(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

const Cuda* cuda() {
  static const Cuda* found = []() -> const Cuda* {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    static Cuda c;
#define TF_LOAD(name) load(library, #name, &c.name)
    bool has_all =
        TF_LOAD(cuInit) && TF_LOAD(cuDevicePrimaryCtxRetain) && TF_LOAD(cuCtxSetCurrent) &&
        TF_LOAD(cuCtxPushCurrent_v2) && TF_LOAD(cuCtxPopCurrent_v2) && TF_LOAD(cuCtxGetStreamPriorityRange) &&
        TF_LOAD(cuStreamCreateWithPriority) && TF_LOAD(cuStreamDestroy_v2) && TF_LOAD(cuStreamSynchronize) &&
        TF_LOAD(cuStreamWaitEvent) && TF_LOAD(cuMemcpyAsync) && TF_LOAD(cuLaunchHostFunc) && TF_LOAD(cuEventCreate) &&
        TF_LOAD(cuEventDestroy_v2) && TF_LOAD(cuEventRecord) && TF_LOAD(cuEventQuery) && TF_LOAD(cuEventSynchronize) &&
        TF_LOAD(cuEventElapsedTime) && TF_LOAD(cuMemHostRegister_v2) && TF_LOAD(cuMemHostUnregister) &&
        TF_LOAD(cuThreadExchangeStreamCaptureMode) && TF_LOAD(cuGetErrorName) && TF_LOAD(cuMemGetAddressRange_v2);
#undef TF_LOAD
    return has_all && c.cuInit(0) == kCudaSuccess ? &c : nullptr;
  }();
  return found;
}

// The first failure of a call on a stream or an event, for the message of the error that Python raises.
std::atomic<const char*> failed_call{nullptr};
std::atomic<CUresult> failed_with{kCudaSuccess};

bool works(CUresult result, const char* call) {
  if (result == kCudaSuccess) return true;
  const char* none = nullptr;
  if (failed_call.compare_exchange_strong(none, call)) failed_with = result;
  return false;
}

// Events are reused, because creating one takes longer than recording it.
class CudaEvents {
 public:
  CUevent take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        CUevent event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    CUevent event = nullptr;
    auto result = cuda()->cuEventCreate(&event, kEventBlockingSync | kEventDisableTiming);
    return works(result, "cuEventCreate") ? event : nullptr;
  }
  void give(CUevent event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<CUevent> free_;
};

// Data that all streams of one device share. The calling thread may have the context of another device, or none.
struct CudaDevice {
  CUcontext context = nullptr;
  CudaEvents events;
};

struct Entered {
  explicit Entered(const CudaDevice& device) { cuda()->cuCtxPushCurrent_v2(device.context); }
  ~Entered() {
    CUcontext before;
    cuda()->cuCtxPopCurrent_v2(&before);
  }
};

// Returns nullptr if there is no such device.
CudaDevice* cuda_device(int32_t index) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<CudaDevice>> all;
  std::lock_guard<std::mutex> lock(mutex);
  while (all.size() <= static_cast<size_t>(index)) all.push_back(std::make_unique<CudaDevice>());
  CudaDevice* device = all[index].get();
  if (!device->context && cuda() && cuda()->cuDevicePrimaryCtxRetain(&device->context, index) != kCudaSuccess)
    device->context = nullptr;
  return device->context ? device : nullptr;
}

class CudaEvent final : public Event {
 public:
  CudaEvent(CudaEvents& events, CUstream stream, bool has_failed = false) : events_(events), handle_(events.take()) {
    has_failed_ = has_failed || !handle_ || !works(cuda()->cuEventRecord(handle_, stream), "cuEventRecord");
  }
  ~CudaEvent() override {
    if (handle_) events_.give(handle_);
  }
  State state() override {
    if (has_failed_) return kFailed;
    if (is_done_) return kDone;
    return seen(cuda()->cuEventQuery(handle_), "cuEventQuery");
  }
  State wait() override {
    if (has_failed_) return kFailed;
    return is_done_ ? kDone : seen(cuda()->cuEventSynchronize(handle_), "cuEventSynchronize");
  }
  CUevent handle() const { return handle_; }
  bool is_done() const { return is_done_; }

 private:
  State seen(CUresult result, const char* call) {
    if (result == kCudaNotReady) return kPending;
    bool is_done = works(result, call);
    (is_done ? is_done_ : has_failed_) = true;
    return is_done ? kDone : kFailed;
  }
  CudaEvents& events_;
  CUevent handle_;
  std::atomic<bool> is_done_{false}, has_failed_{false};
};

void hold_cuda(CUstream stream, const EventRef& event) {
  auto& known = static_cast<CudaEvent&>(event->real());
  if (!known.is_done()) cuda()->cuStreamWaitEvent(stream, known.handle(), 0);
}

class CudaStream final : public Stream {
 public:
  CudaStream(CudaEvents& events, SpanLog* log) : events_(events), log_(log) {
    int least = 0, greatest = 0;
    cuda()->cuCtxGetStreamPriorityRange(&least, &greatest);
    cuda()->cuStreamCreateWithPriority(&stream_, kStreamNonBlocking, greatest);
  }
  ~CudaStream() override {
    cuda()->cuStreamSynchronize(stream_);
    cuda()->cuStreamDestroy_v2(stream_);
  }
  void wait(const EventRef& event) override { hold_cuda(stream_, event); }
  void copy(void* into, const void* from, size_t num_bytes) override {
    auto result =
        cuda()->cuMemcpyAsync(reinterpret_cast<uintptr_t>(into), reinterpret_cast<uintptr_t>(from), num_bytes, stream_);
    has_failed_ = !works(result, "cuMemcpyAsync") || has_failed_;
  }
  EventRef record() override { return std::make_shared<CudaEvent>(events_, stream_, has_failed_); }
  void set_delay(double seconds) override { delay_us_ = static_cast<int64_t>(seconds * 1e6); }
  void begin_span() override {
    if (delay_us_) cuda()->cuLaunchHostFunc(stream_, sleep, reinterpret_cast<void*>(delay_us_.load()));
    if (log_->enabled()) start_ = timed();
  }
  void end_span(int32_t kind, int32_t bucket) override {
    if (!start_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back({kind, bucket, start_, timed()});
    start_ = nullptr;
  }
  void flush_spans(void* anchor, double anchor_s) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& open : open_) {
      float before_ms = 0, length_ms = 0;
      cuda()->cuEventSynchronize(open.end);
      cuda()->cuEventElapsedTime(&before_ms, anchor, open.start);
      cuda()->cuEventElapsedTime(&length_ms, open.start, open.end);
      double start_s = anchor_s + before_ms / 1e3;
      log_->add({open.kind, open.bucket, start_s, start_s + length_ms / 1e3});
      cuda()->cuEventDestroy_v2(open.start);
      cuda()->cuEventDestroy_v2(open.end);
    }
    open_.clear();
  }

 private:
  struct Open {
    int32_t kind, bucket;
    CUevent start, end;
  };
  static void sleep(void* microseconds) { usleep(static_cast<useconds_t>(reinterpret_cast<int64_t>(microseconds))); }
  CUevent timed() {
    CUevent event = nullptr;
    cuda()->cuEventCreate(&event, kEventBlockingSync);
    cuda()->cuEventRecord(event, stream_);
    return event;
  }

  CudaEvents& events_;
  SpanLog* log_;
  CUstream stream_ = nullptr;
  bool has_failed_ = false;
  std::atomic<int64_t> delay_us_{0};
  CUevent start_ = nullptr;
  std::mutex mutex_;
  std::vector<Open> open_;
};

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(CudaDevice& device) : device_(device) {}
  std::unique_ptr<Stream> new_stream(SpanLog* log) override {
    Entered entered(device_);
    return std::make_unique<CudaStream>(device_.events, log);
  }
  void* new_pinned(size_t num_bytes, bool* is_locked) override {
    Entered entered(device_);
    void* buffer = map_hidden(num_bytes);
    *is_locked = buffer && cuda()->cuMemHostRegister_v2(buffer, num_bytes, 0) == kCudaSuccess;
    return buffer;
  }
  void free_pinned(void* buffer, size_t num_bytes, bool is_locked) override {
    Entered entered(device_);
    if (is_locked) cuda()->cuMemHostUnregister(buffer);
    munmap(buffer, num_bytes);
  }
  void enter_thread() override {
    cuda()->cuCtxSetCurrent(device_.context);
    int mode = kCaptureRelaxed;  // otherwise a query here would break a CUDA graph that the user captures
    cuda()->cuThreadExchangeStreamCaptureMode(&mode);
  }
  bool share_allocation(const void* one, const void* other) override {
    Entered entered(device_);
    uintptr_t start = 0, address = reinterpret_cast<uintptr_t>(other);
    size_t num_bytes = 0;
    auto result = cuda()->cuMemGetAddressRange_v2(&start, &num_bytes, reinterpret_cast<uintptr_t>(one));
    return result == kCudaSuccess && start <= address && address - start < num_bytes;
  }
  void hold(void* stream, const EventRef& event) override { hold_cuda(stream, event); }

 private:
  CudaDevice& device_;
};

}  // namespace

std::shared_ptr<Driver> new_thread_driver() { return std::make_shared<ThreadDriver>(); }

std::shared_ptr<Driver> new_cuda_driver(int32_t device) {
  CudaDevice* found = cuda() ? cuda_device(device) : nullptr;
  return found ? std::make_shared<CudaDriver>(*found) : nullptr;
}

}  // namespace tf

// Events in the C ABI.

tf_event* tf_event_new(void) { return new tf_event{std::make_shared<tf::ThreadEvent>()}; }
void tf_event_signal(tf_event* event, int32_t failed) {
  static_cast<tf::ThreadEvent&>(*event->ref).signal(failed != 0);
}
tf_event* tf_event_record(int32_t device, void* stream) {
  tf::CudaDevice& found = *tf::cuda_device(device);
  tf::Entered entered(found);
  return new tf_event{std::make_shared<tf::CudaEvent>(found.events, stream)};
}
void tf_event_hold(const tf_event* event, void* stream) { tf::hold_cuda(stream, event->ref); }
int32_t tf_event_state(const tf_event* event) { return event->ref->state(); }
int32_t tf_event_wait(const tf_event* event) { return event->ref->wait(); }
void tf_event_free(tf_event* event) { delete event; }
int32_t tf_has_cuda(void) { return tf::cuda() != nullptr; }
int64_t tf_cuda_failure(char* into, int64_t num_bytes) {
  const char *call = tf::failed_call, *name = nullptr;
  if (!call) return 0;
  tf::cuda()->cuGetErrorName(tf::failed_with, &name);
  return snprintf(into, num_bytes, "%s returned %s", call, name ? name : "an unknown error");
}
