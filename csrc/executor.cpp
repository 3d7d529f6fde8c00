// The executor: host updates beside the model's work.
//
// Two threads work here, and Python submits. The mover starts copies, reads the clipping decision and marks gradients
// that have arrived; it never waits for a copy. The worker updates one bucket at a time with all cores of the pool.
// Where the update is an optimizer in Python there is no worker: a Python thread asks for the next update.
//
// A task is one bucket's part in one step. It is in exactly one phase, and only the owner of the phase moves it on:
//
//   phase        owner      what it waits for                                        next
//   kOnDevice    mover      a free slot and permission (below)                       kOnHost
//   kOnHost      worker     arrival of its gradients, its turn by deadline           kUpdating
//   kUpdating    worker     the kernel                                               kOnHost (summed), kAhead, kToSend
//   kAhead       `apply`    the clipping decision, by whoever brings it              kToSend, kOnHost, kOnDevice
//   kToSend      mover      the job's release, few copies being queued               kDone
//   kDone        nobody
//
// Permission to leave the device: the decision is made, or a spare store is free for an update ahead of it, or
// gradients may wait on the host (`holds_on_host_`). The copy itself waits for the gradients on its stream. A skipped
// or dropped job takes its tasks from any phase to kToSend or kDone (`give_up`). `enter` asserts all transitions.
//
// Every field is read and written under `mutex_`. The worker gives it up while a kernel runs. Meanwhile it writes only
// to buffers: the store, the slot of the weights, the total and its norm. It may read the slices and `present` of its
// task, because nobody changes them in kUpdating. Only `resize` and `spans` wait for a device under the lock.
//
// To add a phase: the table, `Phase`, `enter`, who enters and leaves it, `looks_at_events` if it waits for an event,
// and the functions that look at phases (`apply`, `will_release`, `take_unsent`, `reset`, `wait_summed`).
//
// Deadlines: the worker takes, of the gradients that have arrived, those whose weights the next forward needs first.
// Slots: page-locked buffers that gradients (and weights, where the state does not hold them) pass through.
// Spare stores: an update may run ahead of the clipping decision into a spare store. Keeping it is a swap of stores.
#include <assert.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <thread>

#include "api.h"
#include "streams.h"

namespace tf {
namespace {

constexpr double kClipEps = 1e-6;   // torch.nn.utils.clip_grad_norm_ adds this to the norm
constexpr size_t kHistory = 8;      // past steps that decide whether running ahead pays
constexpr size_t kSendsAtOnce = 3;  // copies back that are queued: one runs, two are next
constexpr int32_t kAlways = 0;      // in the place of a tf_sync_point: a look that no test switches off
constexpr auto kLook = std::chrono::milliseconds(5);
constexpr auto kPoll = std::chrono::microseconds(50);  // how often the mover looks at events, which tell nobody

enum class Phase { kOnDevice, kOnHost, kUpdating, kAhead, kToSend, kDone };

int64_t bytes_of(int32_t type) { return type == TF_F32 ? 4 : 2; }

bool is_done(const EventRef& event) { return !event || event->state() == Event::kDone; }

// A page-locked buffer. A stream may still read it until `read_until`.
struct Slot {
  char* raw = nullptr;
  bool is_locked = false;
  EventRef read_until;
};

// Up to `limit` slots of equal size, made when first needed.
class SlotPool {
 public:
  SlotPool(Driver& driver, int64_t slot_bytes, int32_t limit) : limit(limit), driver_(driver), bytes_(slot_bytes) {}
  ~SlotPool() { clear(); }
  void clear() {
    for (auto& slot : all_) driver_.free_pinned(slot->raw, bytes_, slot->is_locked);
    all_.clear();
    free_.clear();
  }
  Slot* take(bool may_grow, bool ignores_readers) {
    for (size_t i = 0; i < free_.size(); ++i) {
      if (ignores_readers || is_done(free_[i]->read_until)) {
        Slot* slot = free_[i];
        free_.erase(free_.begin() + i);
        slot->read_until.reset();
        return slot;
      }
    }
    return num_made() < limit || may_grow ? make() : nullptr;
  }
  void give(Slot* slot, EventRef read_until) {
    slot->read_until = std::move(read_until);
    free_.push_back(slot);
  }
  void add(int32_t num_more) {
    for (; num_more > 0; --num_more)
      if (Slot* slot = make()) free_.push_back(slot);
  }
  // Whether a stream still uses a slot that was given back: the copy of a task that was dropped on its way, say.
  bool has_readers() const {
    return std::any_of(free_.begin(), free_.end(), [](Slot* slot) { return !is_done(slot->read_until); });
  }
  void trim() {  // between steps
    while (!free_.empty() && num_made() > limit) {
      Slot* slot = free_.back();
      if (slot->read_until) slot->read_until->wait();
      free_.pop_back();
      driver_.free_pinned(slot->raw, bytes_, slot->is_locked);
      all_.erase(std::find_if(all_.begin(), all_.end(), [&](auto& one) { return one.get() == slot; }));
    }
  }
  int64_t num_made() const { return static_cast<int64_t>(all_.size()); }
  int64_t num_unlocked() const {
    return std::count_if(all_.begin(), all_.end(), [](auto& slot) { return !slot->is_locked; });
  }

  int32_t limit;

 private:
  Slot* make() {
    auto slot = std::make_unique<Slot>();
    slot->raw = static_cast<char*>(driver_.new_pinned(bytes_, &slot->is_locked));
    if (!slot->raw) return nullptr;
    all_.push_back(std::move(slot));
    return all_.back().get();
  }
  Driver& driver_;
  int64_t bytes_;
  std::vector<std::unique_ptr<Slot>> all_;
  std::vector<Slot*> free_;
};

using Pointers = std::vector<tf_pointers>;  // a store: of each slice

struct Task;

struct Bucket {
  tf_bucket spec{};
  std::vector<tf_slice> slices;
  int64_t store = -1;
  int64_t deadline = 0;
  int64_t due = 0;           // the last job whose weights the next forward has to see
  int64_t updated = 0;       // the last job that is in the state
  int64_t sent = 0;          // ... whose weights are on their way into the parameters
  int64_t published = 0;     // ... from all ranks
  EventRef sent_event;       // the last copy that reads the state, to the parameters or by a fetch: updates wait for it
  EventRef published_event;  // the other ranks' weights are in the parameters
  std::vector<uint8_t> sent_slices;  // whose weights were sent since the caller last asked
  bool is_frozen = false, is_wanted = false;
  float* total = nullptr;      // fp32 sum of the gradients of several backwards
  std::vector<uint8_t> added;  // the slices that are in it
  bool is_full = false;        // it is complete, and waits for its update
  std::deque<Task*> parts;     // tasks still to be added to it, in order
  std::deque<Task*> open;      // tasks that are neither kept nor dropped for good, in order

  int64_t shown() const { return spec.is_shared ? published : sent; }
  EventRef& shown_event() { return spec.is_shared ? published_event : sent_event; }
  bool has_added() const {
    return std::any_of(added.begin(), added.end(), [](uint8_t one) { return one; });
  }
};

struct Job {
  tf_job spec{};
  bool is_released = true;
  bool is_dropped = false;
  EventRef after;  // the forward and backward that still need the old weights have ended
  bool is_closed = false;
  const double* decision_at = nullptr;  // norm, factor, skip
  EventRef decision_event;
  double* norms = nullptr;  // of each bucket, where they are measured here
  int64_t num_norms = 0;    // the decision follows from them unless it lies in `decision_at`
  bool has_decision = false;
  tf_decision decision{};
  int64_t num_left = 0;  // tasks whose update is neither kept nor dropped for good
  bool is_forgotten = false;
  std::vector<tf_hyper> hypers;

  bool is_open() const { return has_decision || !spec.has_limits; }
  double factor() const { return has_decision ? decision.factor : 1.0 / spec.scale; }
};

struct Task {
  int64_t id = 0;
  int64_t bucket_index = 0;
  Bucket* bucket = nullptr;
  Job* job = nullptr;
  Phase phase = Phase::kOnDevice;
  std::vector<tf_source> sources;
  std::vector<uint8_t> present, agreed;  // slices that have a gradient; that have one on any rank
  EventRef ready, arrived;
  bool is_complete = false;  // `ready` was seen to be done
  bool has_arrived = false;
  bool has_flat = false;     // its gradients lie in a buffer that others wait for
  bool is_released = false;  // the caller was told that its gradients are not needed any more
  bool is_held = false;      // which slices have a gradient is known when all ranks have said so
  bool has_agreed = false;
  bool is_summed = false;
  bool has_weights = false;
  Slot* slot = nullptr;
  const void* grads = nullptr;
  int64_t spare = -1;  // the store that the update writes to, ahead of the decision
  Slot* weight_slot = nullptr;
  std::vector<void*> weights;  // of an external update

  bool has_present() const {
    return std::any_of(present.begin(), present.end(), [](uint8_t one) { return one; });
  }
  bool is_whole() const {
    return !present.empty() && std::all_of(present.begin(), present.end(), [](uint8_t one) { return one; });
  }
  std::pair<int64_t, int64_t> deadline() const { return {job->spec.number, bucket->deadline}; }
};

struct Fetch {
  std::vector<tf_fetch_item> items;
  EventRef after, event;
};

// The exactly rounded sum, as Python's math.fsum has it (Shewchuk's partial sums, half-even at the end).
double exact_sum(const std::vector<double>& values) {
  std::vector<double> partials;
  for (double x : values) {
    size_t kept = 0;
    for (double y : partials) {
      if (fabs(x) < fabs(y)) std::swap(x, y);
      double high = x + y, low = y - (high - x);
      if (low != 0.0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double high = 0.0;
  size_t n = partials.size();
  if (!n) return 0.0;
  high = partials[--n];
  double low = 0.0;
  while (n > 0) {
    double x = high, y = partials[--n];
    high = x + y;
    low = y - (high - x);
    if (low != 0.0) break;
  }
  if (n > 0 && ((low < 0.0 && partials[n - 1] < 0.0) || (low > 0.0 && partials[n - 1] > 0.0))) {
    double y = low * 2.0, x = high + y;
    if (y == x - high) high = x;
  }
  return high;
}

tf_decision decide(const double* norms, int64_t num_norms, const tf_job& job) {
  std::vector<double> squares;
  double plain = 0.0;
  bool is_finite = true;
  for (int64_t i = 0; i < num_norms; ++i) {
    squares.push_back(norms[i] * norms[i]);
    plain += squares.back();
    is_finite = is_finite && isfinite(squares.back());
  }
  double total = is_finite ? exact_sum(squares) : plain;
  double norm = total >= 0 ? sqrt(total) / job.scale : NAN;
  tf_decision found{};
  found.norm = norm;
  if (job.skips && !isfinite(norm)) {
    found.skip = 1;
    return found;
  }
  double clip = 1.0;
  if (!isnan(job.max_norm)) {
    clip = job.max_norm / (norm + kClipEps);
    clip = clip > 1.0 ? 1.0 : clip;  // NaN stays NaN, as with torch
  }
  found.factor = clip / job.scale;
  found.clipped = clip != 1.0;
  return found;
}

// 64 well-mixed bits of (step, parameter), as rules/formats.py has them.
void rounding_key(int64_t step, uint32_t param, uint32_t* key) {
  uint64_t z = static_cast<uint64_t>(step) * 0x9E3779B97F4A7C15u + param * 0xD1B54A32D192ED03u + 0x8CB92BA72F3D8DD7u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  key[0] = static_cast<uint32_t>(z);
  key[1] = static_cast<uint32_t>(z >> 32);
}

}  // namespace

class Executor {
 public:
  Executor(std::shared_ptr<Driver> driver, const tf_settings& settings);
  ~Executor() { close(); }
  void close();
  void free_slots();
  void fail();
  int32_t state();
  void disable(int32_t points);
  void delay(int32_t stream, double seconds);
  void counters(tf_counters* found);
  void record_spans(bool enabled) { log_.set_enabled(enabled); }
  int64_t spans(void* anchor, double anchor_s, tf_span* into, int64_t max_spans);
  void resize(int32_t num_slots, int32_t num_weight_slots, bool sums_on_host, bool keeps_weight_slots);
  void add_weight_slots(int32_t num_more);

  int64_t new_store(const tf_pointers* pointers, int64_t num_slices);
  void free_store(int64_t store);
  void add_spare(int64_t layout, int64_t store);
  int64_t take_spare(int64_t layout);
  int64_t missing_spares(int64_t* buckets, int64_t max_buckets);

  void set_bucket(int64_t index, const tf_bucket& spec, int64_t store);
  int64_t store_of(int64_t index);
  void set_deadline(int64_t index, int64_t deadline);
  void set_total(int64_t index, float* total);
  int64_t added(int64_t index, uint8_t* slices);
  int64_t take_sent(int64_t index, uint8_t* slices);
  void set_due(int64_t index, int64_t number);
  int64_t due(int64_t index);
  int64_t shown(int64_t index);
  void note_updated(int64_t index, int64_t number);
  void set_unsent(int64_t index, int64_t number);
  void note_sent(int64_t index, int64_t number, const tf_event* event);
  void note_published(int64_t index, int64_t number, const tf_event* event);
  tf_event* event_of(int64_t index, bool published);
  void freeze(int64_t index, bool is_frozen);
  int64_t next_wanted(double timeout_s);

  int64_t new_job(const tf_job& spec);
  void free_job(int64_t id);
  void add_hypers(int64_t id, const tf_hyper* rows, int64_t num_rows);
  int64_t submit(int64_t job, int64_t bucket, const tf_source* sources, int64_t num_sources, const uint8_t* present,
                 const tf_event* ready, bool has_flat, bool is_held);
  int64_t submit_sum(int64_t job, int64_t bucket);
  void agree(int64_t job, const uint8_t* params);
  void close_job(int64_t job, const double* decision, double* norms, int64_t num_norms, const tf_event* event);
  void set_norms(int64_t job, double* norms);
  void decide_job(int64_t job, const tf_decision& decision);
  void drop(int64_t job);
  void release(int64_t job, const tf_event* after);
  bool decision(int64_t job, tf_decision* found);
  bool job_is_done(int64_t job);
  int32_t wait_decision(int64_t job);
  int32_t wait_done(int64_t job);
  int32_t wait_summed(int64_t job);
  int32_t wait_sums();
  void forget_sums();
  int64_t hold_back(int64_t job, int64_t bucket);
  int64_t take_unsent(int64_t bucket);
  void reset(int64_t number);

  int64_t released(int64_t* tasks, tf_event** events, int64_t max_tasks);
  bool will_release();
  int32_t wait_released(double timeout_s);
  const void* grads(int64_t task);

  double hold(const int64_t* buckets, int64_t num_buckets, void* const* streams, int64_t num_streams);
  int32_t wait_shown(const int64_t* buckets, int64_t num_buckets);
  int32_t wait_weights(const int64_t* buckets, int64_t num_buckets);
  int32_t wait_sent(int64_t bucket, int64_t number, double timeout_s);

  int64_t fetch(const tf_fetch_item* items, int64_t num_items, const tf_event* after);
  tf_event* wait_fetch(int64_t id);

  int32_t next_update(double timeout_s, tf_update_task* found, uint8_t* present);
  void finish_update(int64_t task, void* const* weights);

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum Failure { kWorks = 0, kStreamFailed = 1, kFailedOutside = 2 };

  // Threads.
  void move_loop();
  void work_loop();

  // Waiting, with the lock held. False when the executor has failed or is closing.
  template <class Condition>
  bool wait_until(Lock& lock, const Condition& condition) {
    changed_.wait(lock, [&] { return condition() || is_over(); });
    return condition() && failure_ == kWorks;
  }
  // Until something changes. While there is work, a thread looks again after a while: an event that nobody looks at
  // then costs milliseconds, and does not stop training.
  void rest(Lock& lock) {
    if (tasks_.empty() && fetch_queue_.empty())
      changed_.wait(lock);
    else
      changed_.wait_for(lock, kLook);
  }
  bool is_over() const { return is_closing_ || failure_ != kWorks; }
  bool is_off(int32_t point) const { return disabled_ & point; }
  bool has_come(const EventRef& event, int32_t point) {
    if (!event || is_off(point)) return true;
    auto found = event->state();
    if (found == Event::kFailed && failure_ == kWorks) {
      failure_ = kStreamFailed;
      changed_.notify_all();
    }
    return found == Event::kDone;
  }

  // What the mover does; each says whether it did anything.
  bool note_arrivals();
  bool decide_ready();
  bool send_weights();
  bool fill_slots();
  bool start_fetches();
  bool looks_at_events();

  // What a task may do.
  bool is_to_sum(const Task& task) const { return sums_on_host_ && !task.is_summed; }
  bool is_allowed(const Task& task) const {
    return is_to_sum(task) || (!task.is_held && (task.job->is_open() || task.spare >= 0));
  }
  // An update starts from what the bucket's last one leaves: that one must not be waiting for its decision.
  bool is_next(const Task& task) const { return task.bucket->open.front() == &task; }
  bool may_update(Task& task);
  bool may_change(Bucket& bucket);
  bool reserve(Task& task);
  bool speculates() const;

  // How it moves on.
  void enter(Task& task, Phase phase);
  Task* new_task(Job& job, int64_t bucket);
  Task* pick();
  bool prepare(Task& task);
  void sum(Lock& lock, Task& task);
  void summed(Task& task);
  void update(Lock& lock, Task& task);
  void updated(Task& task, bool was_ahead);
  void apply(Job& job, const tf_decision& decision);
  void settle(Task& task);
  void keep(Task& task);
  void give_up(Task& task);
  void finish(Task& task);
  void free_spare(Task& task);
  void free_slot(Task& task);
  void free_gradients(Task& task);
  void tell_released(Task& task);
  void copy_out(Task& task, Slot* slot);
  void copy_back(Task& task);
  const void* weight_of(const Task& task, size_t slice);
  const tf_hyper& hyper_of(const Task& task, int32_t group, int64_t step);
  void sweep();

  Bucket& bucket(int64_t index) { return *buckets_[index]; }
  Job& job(int64_t id) { return *jobs_.at(id); }
  Task* find(int64_t id) {
    for (auto& task : tasks_)
      if (task->id == id) return task.get();
    return nullptr;
  }

  std::shared_ptr<Driver> driver_;
  SpanLog log_;
  const bool holds_on_host_, is_external_;
  bool sums_on_host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Stream> out_, in_, fetch_;
  SlotPool slots_, weight_slots_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::map<int64_t, Pointers> stores_;
  std::map<int64_t, std::vector<int64_t>> spares_;  // by layout
  std::vector<int64_t> missing_;                    // buckets that found no spare store
  std::map<int64_t, std::unique_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<Task>> tasks_;  // that are not done, in the order in which they came
  std::map<int64_t, Fetch> fetches_;
  std::deque<int64_t> fetch_queue_;
  std::deque<std::pair<int64_t, EventRef>> released_;
  std::deque<EventRef> sends_;
  std::deque<bool> wasted_;  // whether the last steps threw away what ran ahead
  int64_t next_id_ = 1;
  int32_t disabled_ = 0;
  int32_t failure_ = kWorks;
  bool is_closing_ = false;
  tf_counters counters_{};
  std::thread mover_, worker_;
};

Executor::Executor(std::shared_ptr<Driver> driver, const tf_settings& settings)
    : driver_(std::move(driver)),
      holds_on_host_(settings.holds_on_host),
      is_external_(settings.is_external),
      sums_on_host_(settings.sums_on_host),
      out_(driver_->new_stream(&log_)),
      in_(driver_->new_stream(&log_)),
      fetch_(driver_->new_stream(&log_)),
      slots_(*driver_, settings.slot_bytes, settings.num_slots),
      weight_slots_(*driver_, settings.slot_bytes, settings.num_weight_slots) {
  mover_ = std::thread([this] { move_loop(); });
  if (!is_external_) worker_ = std::thread([this] { work_loop(); });
}

void Executor::close() {
  {
    Lock lock(mutex_);
    if (is_closing_) return;
    is_closing_ = true;
  }
  changed_.notify_all();
  mover_.join();
  if (worker_.joinable()) worker_.join();
  out_.reset();  // waits for its copies
  in_.reset();
  fetch_.reset();
}

void Executor::free_slots() {
  Lock lock(mutex_);
  assert(is_closing_);
  slots_.clear();
  weight_slots_.clear();
}

void Executor::fail() {
  Lock lock(mutex_);
  if (failure_ == kWorks) failure_ = kFailedOutside;
  changed_.notify_all();
}

int32_t Executor::state() {
  Lock lock(mutex_);
  return failure_;
}

void Executor::disable(int32_t points) {
  Lock lock(mutex_);
  disabled_ = points;
  changed_.notify_all();
}

void Executor::delay(int32_t stream, double seconds) {
  Lock lock(mutex_);
  if (is_closing_) return;
  (stream == TF_STREAM_OUT ? out_ : stream == TF_STREAM_IN ? in_ : fetch_)->set_delay(seconds);
}

void Executor::counters(tf_counters* found) {
  Lock lock(mutex_);
  *found = counters_;
  found->num_slots = slots_.num_made();
  found->num_weight_slots = weight_slots_.num_made();
  found->num_unlocked = slots_.num_unlocked() + weight_slots_.num_unlocked();
}

int64_t Executor::spans(void* anchor, double anchor_s, tf_span* into, int64_t max_spans) {
  if (anchor) {
    Lock lock(mutex_);
    if (!is_closing_)
      for (auto* stream : {out_.get(), in_.get(), fetch_.get()}) stream->flush_spans(anchor, anchor_s);
  }
  auto found = log_.take();
  int64_t count = std::min<int64_t>(max_spans, found.size());
  for (int64_t i = 0; i < count; ++i) into[i] = {found[i].kind, found[i].bucket, found[i].start_s, found[i].end_s};
  return count;
}

void Executor::resize(int32_t num_slots, int32_t num_weight_slots, bool sums_on_host, bool keeps_weight_slots) {
  Lock lock(mutex_);
  slots_.limit = num_slots;
  weight_slots_.limit = num_weight_slots;
  sums_on_host_ = sums_on_host;
  slots_.trim();
  if (!keeps_weight_slots) weight_slots_.trim();
}

void Executor::add_weight_slots(int32_t num_more) {
  Lock lock(mutex_);
  weight_slots_.add(num_more);
}

// Stores.

int64_t Executor::new_store(const tf_pointers* pointers, int64_t num_slices) {
  Lock lock(mutex_);
  stores_[next_id_] = Pointers(pointers, pointers + num_slices);
  return next_id_++;
}

void Executor::free_store(int64_t store) {
  Lock lock(mutex_);
  stores_.erase(store);
}

void Executor::add_spare(int64_t layout, int64_t store) {
  Lock lock(mutex_);
  spares_[layout].push_back(store);
}

int64_t Executor::take_spare(int64_t layout) {
  Lock lock(mutex_);
  auto& spares = spares_[layout];
  if (spares.empty()) return -1;
  int64_t store = spares.back();
  spares.pop_back();
  return store;
}

int64_t Executor::missing_spares(int64_t* buckets, int64_t max_buckets) {
  Lock lock(mutex_);
  int64_t count = std::min<int64_t>(max_buckets, missing_.size());
  std::copy_n(missing_.begin(), count, buckets);
  missing_.clear();
  return count;
}

// Buckets.

void Executor::set_bucket(int64_t index, const tf_bucket& spec, int64_t store) {
  Lock lock(mutex_);
  while (buckets_.size() <= static_cast<size_t>(index)) buckets_.push_back(std::make_unique<Bucket>());
  Bucket& found = bucket(index);
  found.spec = spec;
  found.slices.assign(spec.slices, spec.slices + spec.num_slices);
  found.spec.slices = nullptr;
  found.store = store;
  found.added.assign(spec.num_slices, 0);
  found.sent_slices.resize(spec.num_slices, 0);
}

int64_t Executor::store_of(int64_t index) {
  Lock lock(mutex_);
  return bucket(index).store;
}

void Executor::set_deadline(int64_t index, int64_t deadline) {
  Lock lock(mutex_);
  bucket(index).deadline = deadline;
}

void Executor::set_total(int64_t index, float* total) {
  Lock lock(mutex_);
  bucket(index).total = total;
}

int64_t Executor::added(int64_t index, uint8_t* slices) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  if (found.is_full) return 0;  // an earlier step's
  std::copy(found.added.begin(), found.added.end(), slices);
  return std::count(found.added.begin(), found.added.end(), 1);
}

int64_t Executor::take_sent(int64_t index, uint8_t* slices) {
  Lock lock(mutex_);
  auto& sent = bucket(index).sent_slices;
  std::copy(sent.begin(), sent.end(), slices);
  int64_t count = std::count(sent.begin(), sent.end(), 1);
  std::fill(sent.begin(), sent.end(), 0);
  return count;
}

void Executor::set_due(int64_t index, int64_t number) {
  Lock lock(mutex_);
  bucket(index).due = number;
  changed_.notify_all();
}

int64_t Executor::due(int64_t index) {
  Lock lock(mutex_);
  return bucket(index).due;
}

int64_t Executor::shown(int64_t index) {
  Lock lock(mutex_);
  return bucket(index).shown();
}

void Executor::note_updated(int64_t index, int64_t number) {
  Lock lock(mutex_);
  bucket(index).updated = number;
}

void Executor::set_unsent(int64_t index, int64_t number) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  found.updated = number;
  found.sent = found.published = found.due = number - 1;
}

void Executor::note_sent(int64_t index, int64_t number, const tf_event* event) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  found.sent = std::max(found.sent, number);
  found.updated = std::max(found.updated, found.sent);
  if (event) found.sent_event = event->ref;
  changed_.notify_all();
}

void Executor::note_published(int64_t index, int64_t number, const tf_event* event) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  found.published = number;
  if (event) found.published_event = event->ref;
  changed_.notify_all();
}

tf_event* Executor::event_of(int64_t index, bool published) {
  Lock lock(mutex_);
  EventRef& event = published ? bucket(index).published_event : bucket(index).sent_event;
  return event ? new tf_event{event} : nullptr;
}

void Executor::freeze(int64_t index, bool is_frozen) {
  Lock lock(mutex_);
  bucket(index).is_frozen = is_frozen;
  if (!is_frozen) bucket(index).is_wanted = false;
  changed_.notify_all();
}

int64_t Executor::next_wanted(double timeout_s) {
  Lock lock(mutex_);
  int64_t found = -1;
  auto look = [&] {
    for (size_t i = 0; i < buckets_.size() && found < 0; ++i)
      if (buckets_[i]->is_frozen && buckets_[i]->is_wanted) found = static_cast<int64_t>(i);
    return found >= 0 || is_over();
  };
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), look);
  return found;
}

// Jobs.

int64_t Executor::new_job(const tf_job& spec) {
  Lock lock(mutex_);
  auto made = std::make_unique<Job>();
  made->spec = spec;
  made->is_released = !spec.is_delayed;
  jobs_[next_id_] = std::move(made);
  return next_id_++;
}

void Executor::free_job(int64_t id) {
  Lock lock(mutex_);
  auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  found->second->is_forgotten = true;
  sweep();
}

// Forgets what is done: tasks, and jobs that Python does not ask for any more.
void Executor::sweep() {
  tasks_.erase(std::remove_if(tasks_.begin(), tasks_.end(), [](auto& task) { return task->phase == Phase::kDone; }),
               tasks_.end());
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    Job* one = it->second.get();
    bool is_used =
        !one->is_forgotten || std::any_of(tasks_.begin(), tasks_.end(), [&](auto& t) { return t->job == one; });
    it = is_used ? std::next(it) : jobs_.erase(it);
  }
}

void Executor::add_hypers(int64_t id, const tf_hyper* rows, int64_t num_rows) {
  Lock lock(mutex_);
  auto& hypers = job(id).hypers;
  hypers.insert(hypers.end(), rows, rows + num_rows);
}

Task* Executor::new_task(Job& owner, int64_t index) {
  sweep();
  tasks_.push_back(std::make_unique<Task>());
  Task* task = tasks_.back().get();
  task->id = next_id_++;
  task->bucket_index = index;
  task->bucket = &bucket(index);
  task->job = &owner;
  owner.num_left += 1;
  task->bucket->open.push_back(task);
  return task;
}

int64_t Executor::submit(int64_t job_id, int64_t index, const tf_source* sources, int64_t num_sources,
                         const uint8_t* present, const tf_event* ready, bool has_flat, bool is_held) {
  Lock lock(mutex_);
  Task* task = new_task(job(job_id), index);
  task->sources.assign(sources, sources + num_sources);
  task->present.assign(task->bucket->slices.size(), 1);
  if (present) std::copy_n(present, task->present.size(), task->present.begin());
  task->ready = ready->ref;
  task->has_flat = has_flat;
  task->is_held = is_held;
  if (sums_on_host_) task->bucket->parts.push_back(task);
  changed_.notify_all();
  return task->id;
}

int64_t Executor::submit_sum(int64_t job_id, int64_t index) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  bool is_new = found.has_added() && !found.is_full;  // a full total is an earlier step's
  if (found.parts.empty() && !is_new) return -1;
  Task* task = new_task(job(job_id), index);
  task->present.assign(found.slices.size(), 0);
  task->is_released = true;  // it has no gradients of its own
  task->has_arrived = true;
  found.parts.push_back(task);
  enter(*task, Phase::kOnHost);
  changed_.notify_all();
  return task->id;
}

void Executor::agree(int64_t id, const uint8_t* params) {
  Lock lock(mutex_);
  Job* owner = &job(id);
  for (auto& task : tasks_) {
    if (task->job != owner || !task->is_held) continue;
    task->agreed.assign(task->bucket->slices.size(), 0);
    for (size_t i = 0; i < task->agreed.size(); ++i) task->agreed[i] = params[task->bucket->slices[i].param];
    task->has_agreed = true;
    task->is_held = false;
    if (!sums_on_host_ || task->is_summed) task->present = task->agreed;
  }
  changed_.notify_all();
}

void Executor::close_job(int64_t id, const double* decision, double* norms, int64_t num_norms, const tf_event* event) {
  Lock lock(mutex_);
  Job& owner = job(id);
  owner.is_closed = true;
  owner.decision_at = decision;
  owner.num_norms = num_norms;
  if (norms) owner.norms = norms;
  if (event) owner.decision_event = event->ref;
  changed_.notify_all();
}

void Executor::set_norms(int64_t id, double* norms) {
  Lock lock(mutex_);
  job(id).norms = norms;
}

void Executor::decide_job(int64_t id, const tf_decision& decision) {
  Lock lock(mutex_);
  apply(job(id), decision);
  changed_.notify_all();
}

void Executor::drop(int64_t id) {
  Lock lock(mutex_);
  job(id).is_dropped = true;
}

void Executor::release(int64_t id, const tf_event* after) {
  Lock lock(mutex_);
  Job& owner = job(id);
  if (after) owner.after = after->ref;
  owner.is_released = true;
  changed_.notify_all();
}

bool Executor::decision(int64_t id, tf_decision* found) {
  Lock lock(mutex_);
  *found = job(id).decision;
  return job(id).has_decision;
}

bool Executor::job_is_done(int64_t id) {
  Lock lock(mutex_);
  auto found = jobs_.find(id);
  return found == jobs_.end() || found->second->num_left == 0;
}

int32_t Executor::wait_decision(int64_t id) {
  Lock lock(mutex_);
  return wait_until(lock, [&] { return job(id).has_decision; }) ? 0 : -1;
}

int32_t Executor::wait_done(int64_t id) {
  Lock lock(mutex_);
  return wait_until(lock, [&] { return job(id).has_decision && job(id).num_left == 0; }) ? 0 : -1;
}

int32_t Executor::wait_summed(int64_t id) {
  Lock lock(mutex_);
  Job* owner = &job(id);
  auto is_summed = [&] {
    return std::all_of(tasks_.begin(), tasks_.end(),
                       [&](auto& t) { return t->job != owner || !is_to_sum(*t) || t->phase == Phase::kDone; });
  };
  return wait_until(lock, is_summed) ? 0 : -1;
}

int32_t Executor::wait_sums() {
  Lock lock(mutex_);
  auto none = [&] {
    return std::all_of(buckets_.begin(), buckets_.end(), [](auto& one) { return one->parts.empty(); });
  };
  return wait_until(lock, none) ? 0 : -1;
}

void Executor::forget_sums() {
  Lock lock(mutex_);
  for (auto& one : buckets_)
    if (!one->is_full) std::fill(one->added.begin(), one->added.end(), 0);
}

int64_t Executor::hold_back(int64_t id, int64_t index) {
  Lock lock(mutex_);
  Job& owner = job(id);
  Task* task = new_task(owner, index);
  Bucket& found = *task->bucket;
  task->present.assign(found.slices.size(), 1);
  task->is_released = true;
  task->has_weights = !found.slices.empty();
  if (task->has_weights && found.spec.has_weight_slots) {
    task->weight_slot = weight_slots_.take(true, is_off(TF_WEIGHT_SLOT));
    const Pointers& store = stores_.at(found.store);
    for (size_t i = 0; i < store.size(); ++i)
      tf_cast(task->weight_slot->raw + found.slices[i].offset * bytes_of(found.spec.type), found.spec.type,
              store[i].master, TF_F32, found.slices[i].numel);
  }
  found.updated = owner.spec.number;
  found.sent = found.published = found.due = owner.spec.number - 1;
  finish(*task);
  enter(*task, Phase::kToSend);
  changed_.notify_all();
  return task->id;
}

int64_t Executor::take_unsent(int64_t index) {
  Lock lock(mutex_);
  for (auto& task : tasks_) {
    if (task->bucket_index != index || task->phase != Phase::kToSend) continue;
    free_spare(*task);
    enter(*task, Phase::kDone);
    return task->id;
  }
  return -1;
}

void Executor::reset(int64_t number) {
  Lock lock(mutex_);
  for (auto& task : tasks_) {
    if (task->phase != Phase::kToSend) continue;
    free_spare(*task);
    enter(*task, Phase::kDone);
  }
  sweep();
  for (auto& one : buckets_) one->due = one->sent = one->updated = one->published = number;
  changed_.notify_all();
}

// Gradients that are not needed any more.

int64_t Executor::released(int64_t* tasks, tf_event** events, int64_t max_tasks) {
  Lock lock(mutex_);
  int64_t count = 0;
  for (; count < max_tasks && !released_.empty(); ++count) {
    tasks[count] = released_.front().first;
    EventRef& event = released_.front().second;
    events[count] = is_done(event) ? nullptr : new tf_event{event};
    released_.pop_front();
  }
  return count;
}

bool Executor::will_release() {
  Lock lock(mutex_);
  if (!released_.empty()) return true;
  return std::any_of(tasks_.begin(), tasks_.end(), [&](auto& task) {
    bool is_under_way = task->phase != Phase::kToSend && task->phase != Phase::kDone;
    bool is_stuck = task->is_held && !sums_on_host_;  // ranks agree when all buckets of the step have come
    return is_under_way && task->has_flat && !task->is_released && !is_stuck;
  });
}

int32_t Executor::wait_released(double timeout_s) {
  Lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return !released_.empty() || is_over(); });
  return is_over() ? -1 : !released_.empty();
}

const void* Executor::grads(int64_t id) {
  Lock lock(mutex_);
  Task* task = find(id);
  if (!task || !task->slot) return nullptr;
  EventRef arrived = task->arrived;
  const void* found = task->grads;
  lock.unlock();
  if (arrived) arrived->wait();
  return found;
}

// Waiting for weights.

double Executor::hold(const int64_t* indices, int64_t num_buckets, void* const* streams, int64_t num_streams) {
  Lock lock(mutex_);
  double waited_s = 0.0;
  for (int64_t i = 0; i < num_buckets; ++i) {
    Bucket& one = bucket(indices[i]);
    if (one.shown() < one.due && !is_off(TF_SENT)) {
      double start_s = now_s();
      if (!wait_until(lock, [&] { return one.shown() >= one.due; })) return -1.0;
      waited_s += now_s() - start_s;
    }
    EventRef event = one.shown_event();
    if (!event || is_off(TF_FORWARD)) continue;
    if (event->state() == Event::kDone) {
      if (one.spec.is_shared) one.shown_event().reset();
      continue;
    }
    if (num_streams == 0) {
      lock.unlock();
      auto found = event->wait();
      lock.lock();
      if (found == Event::kFailed) has_come(event, kAlways);
    }
    for (int64_t s = 0; s < num_streams; ++s) driver_->hold(streams[s], event);
  }
  return failure_ == kWorks ? waited_s : -1.0;
}

int32_t Executor::wait_shown(const int64_t* indices, int64_t num_buckets) {
  Lock lock(mutex_);
  auto are_shown = [&] {
    for (int64_t i = 0; i < num_buckets; ++i)
      if (bucket(indices[i]).shown() < bucket(indices[i]).due) return false;
    return true;
  };
  return wait_until(lock, are_shown) ? 0 : -1;
}

int32_t Executor::wait_weights(const int64_t* indices, int64_t num_buckets) {
  bool waits_for_sending;
  {
    Lock lock(mutex_);
    waits_for_sending = !is_off(TF_SENT);
  }
  if (waits_for_sending && wait_shown(indices, num_buckets) < 0) return -1;
  for (int64_t i = 0; i < num_buckets; ++i) {
    Lock lock(mutex_);
    EventRef event = bucket(indices[i]).shown_event();
    if (!event || is_off(TF_READERS)) continue;
    lock.unlock();
    if (event->wait() != Event::kFailed) continue;
    lock.lock();
    has_come(event, kAlways);
    return -1;
  }
  return 0;
}

int32_t Executor::wait_sent(int64_t index, int64_t number, double timeout_s) {
  Lock lock(mutex_);
  Bucket& one = bucket(index);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return one.sent >= number || is_over(); });
  return is_over() ? -1 : one.sent >= number;
}

// The mover.

void Executor::move_loop() {
  name_thread("twinflow-mover");
  driver_->enter_thread();
  Lock lock(mutex_);
  while (!is_over()) {
    bool did = note_arrivals();
    did = decide_ready() || did;
    did = send_weights() || did;
    did = start_fetches() || did;
    did = fill_slots() || did;
    if (did) {
      changed_.notify_all();
    } else if (looks_at_events()) {
      changed_.wait_for(lock, kPoll);
    } else {
      rest(lock);
    }
  }
}

// Events tell nobody: the mover looks at those that the worker waits for.
bool Executor::note_arrivals() {
  bool did = false;
  for (auto& task : tasks_) {
    if (task->phase != Phase::kOnHost) continue;
    EventRef& sent = task->bucket->sent_event;
    if (sent && sent->state() == Event::kDone) {
      sent.reset();
      did = true;
    }
    if (!task->has_arrived && has_come(task->arrived, TF_ARRIVED)) {
      task->has_arrived = true;
      did = true;
    }
    bool is_final = task->job->is_open() || holds_on_host_;
    if (task->has_arrived && is_final && !task->has_flat) tell_released(*task);
  }
  return did;
}

bool Executor::looks_at_events() {
  for (auto& task : tasks_) {
    if (task->phase == Phase::kOnHost && (!task->has_arrived || task->bucket->sent_event)) return true;
    if (task->phase == Phase::kOnDevice && (!task->is_complete || slots_.has_readers())) return true;
    if (task->phase == Phase::kToSend && task->job->is_released) return true;
  }
  for (auto& one : jobs_)
    if (one.second->is_closed && !one.second->has_decision) return true;
  return !sends_.empty();
}

bool Executor::decide_ready() {
  bool did = false;
  for (auto& one : jobs_) {
    Job& owner = *one.second;
    if (!owner.is_closed || owner.has_decision || !has_come(owner.decision_event, TF_NORMS)) continue;
    tf_decision found{};
    double start_s = now_s();
    if (!owner.decision_at) {
      bool is_summed = std::all_of(tasks_.begin(), tasks_.end(), [&](auto& t) {
        return t->job != &owner || !is_to_sum(*t) || t->phase == Phase::kDone;
      });
      if (!is_summed) continue;
      found = decide(owner.norms, owner.num_norms, owner.spec);
    } else {
      found.norm = owner.decision_at[0];
      found.skip = owner.decision_at[2] != 0;
      found.factor = found.skip ? 0.0 : owner.decision_at[1];
      found.clipped = !found.skip && found.factor * owner.spec.scale != 1.0;
    }
    apply(owner, found);
    log_.add({TF_SPAN_DECISION, static_cast<int32_t>(owner.spec.number), start_s, now_s()});
    did = true;
  }
  return did;
}

// The decision is there: what ran ahead is kept or made anew; of a skipped step nothing happens.
void Executor::apply(Job& owner, const tf_decision& decision) {
  assert(!owner.has_decision);
  owner.decision = decision;
  if (owner.is_dropped) {
    owner.decision.factor = 0.0;
    owner.decision.skip = 1;
    owner.decision.clipped = 0;
  }
  owner.has_decision = true;
  std::vector<Task*> ahead, others;
  int32_t num_updating = 0;
  for (auto& task : tasks_) {
    if (task->job != &owner) continue;
    if (task->phase == Phase::kAhead) ahead.push_back(task.get());
    if (task->phase == Phase::kUpdating && task->spare >= 0) num_updating += 1;
    if (task->phase == Phase::kOnDevice || task->phase == Phase::kOnHost) others.push_back(task.get());
  }
  if (owner.spec.has_limits) {
    wasted_.push_back(owner.decision.clipped || owner.decision.skip);
    if (wasted_.size() > kHistory) wasted_.pop_front();
    bool is_kept = !owner.decision.skip && owner.decision.factor == 1.0 / owner.spec.scale;
    owner.decision.num_ahead = static_cast<int32_t>(ahead.size()) + num_updating;
    owner.decision.num_dropped = is_kept ? 0 : owner.decision.num_ahead;
    owner.decision.num_waiting = static_cast<int32_t>(owner.num_left) - owner.decision.num_ahead;
  }
  std::sort(ahead.begin(), ahead.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
  for (Task* task : ahead) settle(*task);
  if (owner.decision.skip)
    for (Task* task : others) give_up(*task);
}

bool Executor::send_weights() {
  bool did = false;
  while (!sends_.empty() && has_come(sends_.front(), kAlways)) {
    sends_.pop_front();
    did = true;  // the worker may wait for a weight slot
  }
  std::vector<Task*> ready;
  for (auto& task : tasks_)
    if (task->phase == Phase::kToSend && task->job->is_released) ready.push_back(task.get());
  std::sort(ready.begin(), ready.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
  for (Task* task : ready) {
    Bucket& one = *task->bucket;
    bool writes = task->has_weights && one.slices[0].target;
    if (writes && sends_.size() >= kSendsAtOnce) break;
    if ((writes || (one.spec.is_shared && task->job->spec.is_delayed)) && one.is_frozen) {
      one.is_wanted = true;  // a delayed update's: its parameters are still to be read as they are
      continue;
    }
    if (writes) copy_back(*task);
    if (task->weight_slot) weight_slots_.give(task->weight_slot, writes ? one.sent_event : nullptr);
    task->weight_slot = nullptr;
    one.sent = std::max(one.sent, task->job->spec.number);
    enter(*task, Phase::kDone);
    did = true;
  }
  return did;
}

void Executor::copy_back(Task& task) {
  Bucket& one = *task.bucket;
  int64_t size = bytes_of(one.spec.type);
  if (task.job->after && !is_off(TF_OLD_WEIGHTS)) in_->wait(task.job->after);
  in_->begin_span();
  // Slices that lie side by side on both sides are one copy.
  char* into = nullptr;
  const char* from = nullptr;
  int64_t num_bytes = 0;
  for (size_t i = 0; i < one.slices.size(); ++i) {
    if (!task.present[i]) continue;
    char* target = static_cast<char*>(one.slices[i].target);
    auto* source = static_cast<const char*>(weight_of(task, i));
    int64_t length = one.slices[i].numel * size;
    one.sent_slices[i] = 1;
    counters_.bytes_back += length;
    if (into && target == into + num_bytes && source == from + num_bytes) {
      num_bytes += length;
      continue;
    }
    if (into) in_->copy(into, from, num_bytes);
    into = target;
    from = source;
    num_bytes = length;
  }
  if (into) in_->copy(into, from, num_bytes);
  in_->end_span(TF_SPAN_IN, static_cast<int32_t>(task.bucket_index));
  one.sent_event = in_->record();
  sends_.push_back(one.sent_event);
}

const void* Executor::weight_of(const Task& task, size_t i) {
  const Bucket& one = *task.bucket;
  if (!task.weights.empty()) return task.weights[i];
  if (task.weight_slot) return task.weight_slot->raw + one.slices[i].offset * bytes_of(one.spec.type);
  const tf_pointers& found = stores_.at(one.store)[i];
  return found.weight ? found.weight : found.master;
}

bool Executor::start_fetches() {
  bool did = false;
  while (!fetch_queue_.empty()) {
    Fetch& fetch = fetches_.at(fetch_queue_.front());
    for (auto& item : fetch.items)
      if (item.bucket >= 0 && bucket(item.bucket).shown() < bucket(item.bucket).due) return did;
    if (fetch.after && !is_off(TF_FETCH_ROOM)) fetch_->wait(fetch.after);
    for (auto& item : fetch.items) {
      const void* from = item.from;
      if (item.bucket >= 0) {
        const tf_pointers& first = stores_.at(bucket(item.bucket).store)[0];
        from = first.weight ? first.weight : first.master;
      }
      fetch_->begin_span();
      fetch_->copy(item.into, from, item.num_bytes);
      fetch_->end_span(TF_SPAN_FETCH, static_cast<int32_t>(item.bucket));
      counters_.bytes_fetched += item.num_bytes;
    }
    fetch.event = fetch_->record();
    for (auto& item : fetch.items)  // the state must not change before it has been read
      if (item.bucket >= 0) bucket(item.bucket).sent_event = fetch.event;
    fetch_queue_.pop_front();
    did = true;
  }
  return did;
}

int64_t Executor::fetch(const tf_fetch_item* items, int64_t num_items, const tf_event* after) {
  Lock lock(mutex_);
  Fetch& made = fetches_[next_id_];
  made.items.assign(items, items + num_items);
  made.after = after->ref;
  fetch_queue_.push_back(next_id_);
  changed_.notify_all();
  return next_id_++;
}

tf_event* Executor::wait_fetch(int64_t id) {
  Lock lock(mutex_);
  if (!wait_until(lock, [&] { return fetches_.at(id).event != nullptr; })) return nullptr;
  auto* found = new tf_event{fetches_.at(id).event};
  fetches_.erase(id);
  return found;
}

bool Executor::fill_slots() {
  bool did = false;
  for (;;) {
    std::vector<Task*> complete, rest;
    bool is_prefix = true;  // gradients are made in the order of submission: none behind an incomplete one is complete
    for (auto& task : tasks_) {
      if (task->phase != Phase::kOnDevice) continue;
      if (is_prefix && !task->is_complete) is_prefix = task->is_complete = has_come(task->ready, kAlways);
      (is_prefix ? complete : rest).push_back(task.get());
    }
    if (complete.empty() && rest.empty()) return did;
    std::stable_sort(complete.begin(), complete.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
    complete.insert(complete.end(), rest.begin(), rest.end());
    Slot* slot = slots_.take(false, is_off(TF_ARRIVED));
    if (!slot) return did;
    Task* found = nullptr;
    for (Task* task : complete) {
      if (is_allowed(*task) || reserve(*task) || holds_on_host_) {
        found = task;
        break;
      }
    }
    if (!found) {
      slots_.give(slot, nullptr);
      return did;
    }
    copy_out(*found, slot);
    did = true;
  }
}

// A spare store for an update ahead of the decision.
bool Executor::reserve(Task& task) {
  bool may = task.job->spec.runs_ahead && !task.is_held && !is_external_ && !task.job->has_decision && is_next(task);
  if (!may || !task.is_whole() || !speculates()) return false;  // a swap would lose slices that are left alone
  auto& spares = spares_[task.bucket->spec.layout];
  if (spares.empty()) {
    if (std::find(missing_.begin(), missing_.end(), task.bucket_index) == missing_.end())
      missing_.push_back(task.bucket_index);
    return false;
  }
  task.spare = spares.back();
  spares.pop_back();
  return true;
}

// Run ahead unless half of the recent steps threw that work away.
bool Executor::speculates() const {
  size_t num_wasted = std::count(wasted_.begin(), wasted_.end(), true);
  return 2 * num_wasted < std::max<size_t>(2, wasted_.size());
}

void Executor::copy_out(Task& task, Slot* slot) {
  int64_t size = bytes_of(task.bucket->spec.type);
  task.slot = slot;
  task.grads = slot->raw;
  if (task.ready && !is_off(TF_GRAD_READY)) out_->wait(task.ready);
  out_->begin_span();
  for (auto& source : task.sources) {
    out_->copy(slot->raw + source.offset * size, source.from, source.numel * size);
    counters_.bytes_out += source.numel * size;
  }
  out_->end_span(TF_SPAN_OUT, static_cast<int32_t>(task.bucket_index));
  task.arrived = out_->record();
  task.has_arrived = false;
  enter(task, Phase::kOnHost);
  if (task.has_flat && (task.job->is_open() || holds_on_host_)) tell_released(task);  // nobody will need it again
}

// The worker.

void Executor::work_loop() {
  name_thread("twinflow-worker");
  driver_->enter_thread();
  Lock lock(mutex_);
  while (!is_over()) {
    Task* task = pick();
    if (!task) {
      rest(lock);
    } else if (is_to_sum(*task)) {
      sum(lock, *task);
    } else {
      update(lock, *task);
    }
  }
}

// The earliest deadline of what can be updated now; it has what the update needs.
Task* Executor::pick() {
  std::vector<Task*> ready;
  for (auto& task : tasks_)
    if (task->phase == Phase::kOnHost && may_update(*task)) ready.push_back(task.get());
  std::sort(ready.begin(), ready.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
  for (Task* task : ready) {
    if (is_to_sum(*task) || prepare(*task)) {
      enter(*task, Phase::kUpdating);
      return task;
    }
  }
  return nullptr;
}

bool Executor::may_update(Task& task) {
  if (!is_allowed(task) || !task.has_arrived) return false;
  Bucket& one = *task.bucket;
  if (is_to_sum(task)) return one.parts.front() == &task && !one.is_full;  // in order, so that sums are always the same
  return is_next(task) && may_change(one);
}

// Weights may be sent from the state itself: it must not change before they are, nor before somebody has read it who
// was promised that it would not.
bool Executor::may_change(Bucket& one) {
  if (one.sent < one.updated || !has_come(one.sent_event, TF_WEIGHT_SENT)) return false;
  if (!one.is_frozen) return true;
  if (!one.is_wanted) {
    one.is_wanted = true;
    changed_.notify_all();
  }
  return false;
}

bool Executor::prepare(Task& task) {
  bool is_ahead = !task.job->is_open();
  if (!is_ahead && task.spare >= 0) free_spare(task);
  if (!task.has_present() || task.weight_slot || !task.bucket->spec.has_weight_slots) return true;
  task.weight_slot = weight_slots_.take(is_ahead, is_off(TF_WEIGHT_SLOT));  // ahead of the decision one stays in use
  return task.weight_slot != nullptr;
}

void Executor::sum(Lock& lock, Task& task) {
  Bucket& one = *task.bucket;
  const char* grads = static_cast<const char*>(task.grads);
  std::vector<uint8_t> before = one.added;
  double* norms = task.job->norms;
  lock.unlock();
  double start_s = now_s();
  std::vector<const void*> totals;
  std::vector<int64_t> numels;
  for (size_t i = 0; i < one.slices.size(); ++i) {
    const tf_slice& slice = one.slices[i];
    float* into = one.total + slice.offset;
    if (task.present[i]) {
      const void* from = grads + slice.offset * bytes_of(one.spec.type);
      if (before[i])
        tf_accumulate(into, from, one.spec.type, slice.numel);
      else
        tf_cast(into, TF_F32, from, one.spec.type, slice.numel);
    }
    if (!task.present[i] && !before[i]) continue;
    totals.push_back(into);
    numels.push_back(slice.numel);
  }
  if (norms) {
    std::vector<int32_t> types(totals.size(), TF_F32);
    std::vector<double> sums(totals.size());
    tf_sum_squares(totals.data(), numels.data(), types.data(), totals.size(), sums.data());
    double total = 0.0;
    for (double one_sum : sums) total += one_sum;
    norms[task.bucket_index] = sqrt(total);
  }
  double end_s = now_s();
  lock.lock();
  counters_.busy_s += end_s - start_s;
  log_.add({TF_SPAN_SUM, static_cast<int32_t>(task.bucket_index), start_s, end_s});
  summed(task);
  changed_.notify_all();
}

// The bucket's total has taken a task's gradients in; the last of a step goes on to the update.
void Executor::summed(Task& task) {
  Bucket& one = *task.bucket;
  assert(one.parts.front() == &task);
  one.parts.pop_front();
  for (size_t i = 0; i < one.added.size(); ++i) one.added[i] |= task.present[i];
  free_slot(task);
  tell_released(task);
  if (task.job->spec.is_part) {
    finish(task);
    enter(task, Phase::kDone);
    return;
  }
  task.is_summed = one.is_full = true;
  task.present = task.has_agreed ? task.agreed : one.added;
  task.grads = one.total;
  enter(task, Phase::kOnHost);
  if (task.job->has_decision && task.job->decision.skip) give_up(task);  // decided while this was added
}

const tf_hyper& Executor::hyper_of(const Task& task, int32_t group, int64_t step) {
  for (auto& row : task.job->hypers)
    if (row.group == group && row.step == step) return row;
  assert(!"no numbers for this step");
  return task.job->hypers.front();
}

void Executor::update(Lock& lock, Task& task) {
  Bucket& one = *task.bucket;
  bool is_ahead = !task.job->is_open();
  assert(is_ahead == (task.spare >= 0));
  std::vector<tf_segment> segments;
  const Pointers& read = stores_.at(one.store);
  const Pointers& write = is_ahead ? stores_.at(task.spare) : read;
  int64_t size = task.is_summed ? 4 : bytes_of(one.spec.type);
  for (size_t i = 0; i < one.slices.size(); ++i) {
    if (!task.present[i]) continue;
    const tf_slice& slice = one.slices[i];
    int64_t step = one.spec.steps[i] + 1;
    const tf_hyper& row = hyper_of(task, slice.group, step);
    tf_segment segment{};
    segment.grad = static_cast<const char*>(task.grads) + slice.offset * size;
    segment.weight_in = read[i].weight;
    segment.weight = write[i].weight;
    if (task.weight_slot) segment.weight = task.weight_slot->raw + slice.offset * bytes_of(one.spec.type);
    segment.master_in = read[i].master;
    segment.master = write[i].master;
    for (int k = 0; k < 2; ++k) {
      segment.state_in[k] = read[i].state[k];
      segment.state[k] = write[i].state[k];
      segment.scale_in[k] = read[i].scale[k];
      segment.scale[k] = write[i].scale[k];
    }
    segment.numel = slice.numel;
    segment.first_index = slice.first_index;
    segment.rule = one.spec.rule;
    segment.format = one.spec.format;
    segment.grad_type = task.is_summed ? static_cast<int32_t>(TF_F32) : one.spec.type;
    segment.weight_type = one.spec.type == TF_F32 ? static_cast<int32_t>(TF_NONE) : one.spec.type;
    segment.split_master = one.spec.is_split;
    segment.factor = static_cast<float>(row.sign * task.job->factor());
    memcpy(segment.hyper, row.hyper, sizeof(row.hyper));
    rounding_key(step, slice.param, segment.key);
    segments.push_back(segment);
  }
  task.has_weights = !segments.empty();
  lock.unlock();
  double start_s = now_s();
  if (!segments.empty()) tf_update(segments.data(), segments.size());
  double end_s = now_s();
  lock.lock();
  counters_.busy_s += end_s - start_s;
  if (!segments.empty())
    log_.add({is_ahead ? TF_SPAN_AHEAD : TF_SPAN_UPDATE, static_cast<int32_t>(task.bucket_index), start_s, end_s});
  updated(task, is_ahead);
  changed_.notify_all();
}

int32_t Executor::next_update(double timeout_s, tf_update_task* found, uint8_t* present) {
  Lock lock(mutex_);
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (!is_over()) {
    Task* task = pick();
    if (task && is_to_sum(*task)) {
      sum(lock, *task);
    } else if (task && !task->has_present()) {
      updated(*task, false);
      changed_.notify_all();
    } else if (task) {
      *found = {task->id, task->bucket_index, task->job->factor(), const_cast<void*>(task->grads),
                task->weight_slot ? task->weight_slot->raw : nullptr};
      std::copy(task->present.begin(), task->present.end(), present);
      return 1;
    } else if (changed_.wait_until(lock, end) == std::cv_status::timeout) {
      return 0;
    }
  }
  return -1;
}

void Executor::finish_update(int64_t id, void* const* weights) {
  Lock lock(mutex_);
  Task* task = find(id);
  task->has_weights = true;
  if (weights) task->weights.assign(weights, weights + task->bucket->slices.size());
  updated(*task, false);
  changed_.notify_all();
}

// How a task moves on.

void Executor::enter(Task& task, Phase phase) {
  auto is_legal = [](Phase from, Phase to) {
    switch (from) {
      case Phase::kOnDevice: return to == Phase::kOnHost || to == Phase::kToSend || to == Phase::kDone;
      case Phase::kOnHost: return to == Phase::kUpdating || to == Phase::kToSend || to == Phase::kDone;
      case Phase::kUpdating: return to != Phase::kUpdating;
      case Phase::kAhead:
        return to == Phase::kOnDevice || to == Phase::kOnHost || to == Phase::kToSend || to == Phase::kDone;
      case Phase::kToSend: return to == Phase::kDone;
      case Phase::kDone: return false;
    }
    return false;
  };
  assert(is_legal(task.phase, phase));
  (void)is_legal;
  task.phase = phase;
}

void Executor::updated(Task& task, bool was_ahead) {
  if (!was_ahead) {
    keep(task);
    return;
  }
  if (!holds_on_host_) free_slot(task);
  enter(task, Phase::kAhead);
  if (task.job->has_decision) settle(task);  // it was made meanwhile
}

// After the decision, what ran ahead is kept, or given up, or made anew from gradients that are still there.
void Executor::settle(Task& task) {
  const tf_decision& decision = task.job->decision;
  if (decision.skip) {
    give_up(task);
  } else if (decision.factor == 1.0 / task.job->spec.scale) {
    spares_[task.bucket->spec.layout].push_back(task.bucket->store);
    task.bucket->store = task.spare;
    task.spare = -1;
    keep(task);
  } else {
    free_spare(task);
    enter(task, task.slot ? Phase::kOnHost : Phase::kOnDevice);
  }
}

// The update is final: count it, free what it used, send the weights.
void Executor::keep(Task& task) {
  Bucket& one = *task.bucket;
  free_gradients(task);
  for (size_t i = 0; i < one.slices.size(); ++i) one.spec.steps[i] += task.present[i];
  one.updated = task.job->spec.number;
  finish(task);
  enter(task, Phase::kToSend);
}

// Nothing of this task happens: state and weights stay as they are, bit for bit.
void Executor::give_up(Task& task) {
  if (task.phase == Phase::kUpdating) return;  // being added to a total: `summed` comes here again
  auto& parts = task.bucket->parts;
  parts.erase(std::remove(parts.begin(), parts.end(), &task), parts.end());
  free_spare(task);
  free_gradients(task);
  task.has_weights = false;
  finish(task);
  if (task.job->is_dropped) {  // it was no step, and nobody waits for it
    enter(task, Phase::kDone);
    return;
  }
  task.bucket->updated = task.job->spec.number;
  enter(task, Phase::kToSend);  // without weights: whoever waits for this job goes on
}

void Executor::finish(Task& task) {
  auto& open = task.bucket->open;
  open.erase(std::remove(open.begin(), open.end(), &task), open.end());
  task.job->num_left -= 1;
}

void Executor::free_spare(Task& task) {
  if (task.spare >= 0) spares_[task.bucket->spec.layout].push_back(task.spare);
  task.spare = -1;
  if (task.weight_slot) weight_slots_.give(task.weight_slot, nullptr);
  task.weight_slot = nullptr;
  task.has_weights = false;
}

void Executor::free_slot(Task& task) {
  if (!task.slot) return;
  slots_.give(task.slot, task.arrived);
  task.slot = nullptr;
  task.grads = nullptr;
}

void Executor::free_gradients(Task& task) {
  free_slot(task);
  tell_released(task);
  task.grads = nullptr;
  if (task.is_summed) {
    task.bucket->is_full = false;
    std::fill(task.bucket->added.begin(), task.bucket->added.end(), 0);
  }
}

void Executor::tell_released(Task& task) {
  if (task.is_released) return;
  task.is_released = true;
  released_.emplace_back(task.id, task.arrived);
}

}  // namespace tf

struct tf_executor {
  tf::Executor executor;
  tf_executor(std::shared_ptr<tf::Driver> driver, const tf_settings& settings)
      : executor(std::move(driver), settings) {}
};

tf_executor* tf_executor_new(const tf_settings* settings) {
  auto driver = settings->device < 0 ? tf::new_thread_driver() : tf::new_cuda_driver(settings->device);
  return driver ? new tf_executor(std::move(driver), *settings) : nullptr;
}
void tf_executor_close(tf_executor* e) { e->executor.close(); }
void tf_executor_free_slots(tf_executor* e) { e->executor.free_slots(); }
void tf_executor_free(tf_executor* e) { delete e; }
void tf_executor_fail(tf_executor* e) { e->executor.fail(); }
int32_t tf_executor_state(tf_executor* e) { return e->executor.state(); }
void tf_executor_disable(tf_executor* e, int32_t points) { e->executor.disable(points); }
void tf_executor_delay(tf_executor* e, int32_t stream, double seconds) { e->executor.delay(stream, seconds); }
void tf_executor_counters(tf_executor* e, tf_counters* counters) { e->executor.counters(counters); }
void tf_executor_record_spans(tf_executor* e, int32_t enabled) { e->executor.record_spans(enabled != 0); }
int64_t tf_executor_spans(tf_executor* e, void* anchor, double anchor_s, tf_span* spans, int64_t max_spans) {
  return e->executor.spans(anchor, anchor_s, spans, max_spans);
}
void tf_executor_resize(tf_executor* e, int32_t num_slots, int32_t num_weight_slots, int32_t sums_on_host,
                        int32_t keeps_weight_slots) {
  e->executor.resize(num_slots, num_weight_slots, sums_on_host != 0, keeps_weight_slots != 0);
}
void tf_executor_add_weight_slots(tf_executor* e, int32_t num_more) { e->executor.add_weight_slots(num_more); }

int64_t tf_store_new(tf_executor* e, const tf_pointers* pointers, int64_t num_slices) {
  return e->executor.new_store(pointers, num_slices);
}
void tf_store_free(tf_executor* e, int64_t store) { e->executor.free_store(store); }
void tf_store_add_spare(tf_executor* e, int64_t layout, int64_t store) { e->executor.add_spare(layout, store); }
int64_t tf_store_take_spare(tf_executor* e, int64_t layout) { return e->executor.take_spare(layout); }
int64_t tf_store_missing(tf_executor* e, int64_t* buckets, int64_t max) {
  return e->executor.missing_spares(buckets, max);
}

void tf_bucket_set(tf_executor* e, int64_t bucket, const tf_bucket* spec, int64_t store) {
  e->executor.set_bucket(bucket, *spec, store);
}
int64_t tf_bucket_store(tf_executor* e, int64_t bucket) { return e->executor.store_of(bucket); }
void tf_bucket_set_deadline(tf_executor* e, int64_t bucket, int64_t at) { e->executor.set_deadline(bucket, at); }
void tf_bucket_set_total(tf_executor* e, int64_t bucket, float* total) { e->executor.set_total(bucket, total); }
int64_t tf_bucket_added(tf_executor* e, int64_t bucket, uint8_t* slices) { return e->executor.added(bucket, slices); }
int64_t tf_bucket_take_sent(tf_executor* e, int64_t bucket, uint8_t* slices) {
  return e->executor.take_sent(bucket, slices);
}
void tf_bucket_set_due(tf_executor* e, int64_t bucket, int64_t number) { e->executor.set_due(bucket, number); }
int64_t tf_bucket_due(tf_executor* e, int64_t bucket) { return e->executor.due(bucket); }
int64_t tf_bucket_shown(tf_executor* e, int64_t bucket) { return e->executor.shown(bucket); }
void tf_bucket_note_updated(tf_executor* e, int64_t bucket, int64_t number) {
  e->executor.note_updated(bucket, number);
}
void tf_bucket_set_unsent(tf_executor* e, int64_t bucket, int64_t number) { e->executor.set_unsent(bucket, number); }
void tf_bucket_note_sent(tf_executor* e, int64_t bucket, int64_t number, const tf_event* event) {
  e->executor.note_sent(bucket, number, event);
}
void tf_bucket_note_published(tf_executor* e, int64_t bucket, int64_t number, const tf_event* event) {
  e->executor.note_published(bucket, number, event);
}
tf_event* tf_bucket_sent_event(tf_executor* e, int64_t bucket) { return e->executor.event_of(bucket, false); }
tf_event* tf_bucket_published_event(tf_executor* e, int64_t bucket) { return e->executor.event_of(bucket, true); }
void tf_bucket_freeze(tf_executor* e, int64_t bucket, int32_t is_frozen) { e->executor.freeze(bucket, is_frozen != 0); }
int64_t tf_next_wanted(tf_executor* e, double timeout_s) { return e->executor.next_wanted(timeout_s); }

int64_t tf_job_new(tf_executor* e, const tf_job* spec) { return e->executor.new_job(*spec); }
void tf_job_free(tf_executor* e, int64_t job) { e->executor.free_job(job); }
void tf_job_add_hypers(tf_executor* e, int64_t job, const tf_hyper* rows, int64_t num_rows) {
  e->executor.add_hypers(job, rows, num_rows);
}
int64_t tf_submit(tf_executor* e, int64_t job, int64_t bucket, const tf_source* sources, int64_t num_sources,
                  const uint8_t* present, const tf_event* ready, int32_t has_flat, int32_t is_held) {
  return e->executor.submit(job, bucket, sources, num_sources, present, ready, has_flat != 0, is_held != 0);
}
int64_t tf_submit_sum(tf_executor* e, int64_t job, int64_t bucket) { return e->executor.submit_sum(job, bucket); }
void tf_agree(tf_executor* e, int64_t job, const uint8_t* params) { e->executor.agree(job, params); }
void tf_job_close(tf_executor* e, int64_t job, const double* decision, const tf_event* event) {
  e->executor.close_job(job, decision, nullptr, 0, event);
}
void tf_job_close_sums(tf_executor* e, int64_t job, double* norms, int64_t num_norms, const tf_event* event) {
  e->executor.close_job(job, nullptr, norms, num_norms, event);
}
void tf_job_set_norms(tf_executor* e, int64_t job, double* norms) { e->executor.set_norms(job, norms); }
void tf_job_decide(tf_executor* e, int64_t job, double norm, double factor, int32_t skip, int32_t clipped) {
  e->executor.decide_job(job, tf_decision{norm, factor, skip, clipped, 0, 0, 0});
}
void tf_job_drop(tf_executor* e, int64_t job) { e->executor.drop(job); }
void tf_job_release(tf_executor* e, int64_t job, const tf_event* after) { e->executor.release(job, after); }
int32_t tf_job_decision(tf_executor* e, int64_t job, tf_decision* found) { return e->executor.decision(job, found); }
int32_t tf_job_is_done(tf_executor* e, int64_t job) { return e->executor.job_is_done(job); }
int32_t tf_job_wait_decision(tf_executor* e, int64_t job) { return e->executor.wait_decision(job); }
int32_t tf_job_wait_done(tf_executor* e, int64_t job) { return e->executor.wait_done(job); }
int32_t tf_job_wait_summed(tf_executor* e, int64_t job) { return e->executor.wait_summed(job); }
int32_t tf_wait_sums(tf_executor* e) { return e->executor.wait_sums(); }
void tf_forget_sums(tf_executor* e) { e->executor.forget_sums(); }
int64_t tf_hold_back(tf_executor* e, int64_t job, int64_t bucket) { return e->executor.hold_back(job, bucket); }
int64_t tf_take_unsent(tf_executor* e, int64_t bucket) { return e->executor.take_unsent(bucket); }
void tf_reset(tf_executor* e, int64_t number) { e->executor.reset(number); }

int64_t tf_released(tf_executor* e, int64_t* tasks, tf_event** events, int64_t max_tasks) {
  return e->executor.released(tasks, events, max_tasks);
}
int32_t tf_will_release(tf_executor* e) { return e->executor.will_release(); }
int32_t tf_wait_released(tf_executor* e, double timeout_s) { return e->executor.wait_released(timeout_s); }
const void* tf_task_grads(tf_executor* e, int64_t task) { return e->executor.grads(task); }

double tf_hold(tf_executor* e, const int64_t* buckets, int64_t num_buckets, void* const* streams, int64_t num_streams) {
  return e->executor.hold(buckets, num_buckets, streams, num_streams);
}
int32_t tf_wait_shown(tf_executor* e, const int64_t* buckets, int64_t num) {
  return e->executor.wait_shown(buckets, num);
}
int32_t tf_wait_weights(tf_executor* e, const int64_t* buckets, int64_t num) {
  return e->executor.wait_weights(buckets, num);
}
int32_t tf_wait_sent(tf_executor* e, int64_t bucket, int64_t number, double timeout_s) {
  return e->executor.wait_sent(bucket, number, timeout_s);
}
int64_t tf_fetch(tf_executor* e, const tf_fetch_item* items, int64_t num_items, const tf_event* after) {
  return e->executor.fetch(items, num_items, after);
}
tf_event* tf_fetch_wait(tf_executor* e, int64_t fetch) { return e->executor.wait_fetch(fetch); }
int32_t tf_next_update(tf_executor* e, double timeout_s, tf_update_task* task, uint8_t* present) {
  return e->executor.next_update(timeout_s, task, present);
}
void tf_finish_update(tf_executor* e, int64_t task, void* const* weights) { e->executor.finish_update(task, weights); }
