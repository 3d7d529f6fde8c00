// SPDX-License-Identifier: Apache-2.0
// The executor makes updates on the host that overlap with the work of the model.
//
// Python submits tasks, and two threads process them. The mover starts copies, reads the clipping decision and marks
// gradients that have arrived on the host. It never waits for a copy. The worker updates one bucket at a time with all
// threads of the pool. If the optimizer is in Python, there is no worker: a Python thread asks for the next update.
//
// A task is the work for one bucket in one step. It is in exactly one phase. Only the owner of the phase moves the task
// to the next phase:
//
//   phase        owner      what it waits for                                        next
//   kOnDevice    mover      a free slot and permission (below)                       kOnHost
//   kOnHost      worker     arrival of its gradients, its turn by deadline           kUpdating
//   kUpdating    worker     the kernel                                               kOnHost (summed), kAhead, kToSend
//   kAhead       `apply`    the clipping decision, in the thread that has it         kToSend, kOnHost, kOnDevice
//   kToSend      mover      the release of the job, few queued copies                kDone
//   kDone        none
//
// A task has permission to leave the device in three cases: the clipping decision is made, a speculative store is free
// for an update before the decision, or gradients may wait on the host (`holds_on_host_`). The stream of the copy waits
// for the gradients. If a job is skipped or dropped, its tasks go from any phase to kToSend or kDone (`give_up`).
// `enter` asserts that each transition is valid.
//
// Every field is read and written under `mutex_`. The worker releases the mutex while a kernel runs. Meanwhile it
// writes only to buffers: the store, the slot of the weights, the total and its norm. It may read the slices and
// `present` of its task, because no thread changes them in kUpdating. The mover releases the mutex while it calls the
// driver (late_streams.h). Only `resize` and `spans` wait for a device under the mutex.
//
// To add a phase, change the table, `Phase`, `enter`, the functions that enter and leave it, `looks_at_events` if the
// phase waits for an event, and the functions that read phases (`apply`, `will_release`, `take_unsent`, `reset`,
// `wait_summed`).
//
// Files: executor.cpp has the functions that Python calls, executor_mover.cpp and executor_worker.cpp have the two
// threads, and executor_phases.cpp has the transitions. executor_api.cpp has the C functions of api.h, which forward to
// this class.
//
// - Deadlines: among the gradients that have arrived, the worker takes those whose weights the next forward
//   needs first.
// - Slots: page-locked buffers for gradients, and for weights if the state does not contain them.
// - Speculative stores: an update before the clipping decision writes to a speculative store. To keep the update, the
//   executor swaps the stores.
// - Background checkpoints: an update of a bucket whose store the checkpoint still reads (`saved_store`) writes to a
//   speculative store too, also after the decision. When the stores are swapped, the old one belongs to the checkpoint
//   until `freeze` ends. If no speculative store is free, the update waits until the state is read or copied.
// - State in a file (state_file.h): an update starts when the file has read the state of its bucket, which belongs to
//   the task until the update is done. The lock of the file is taken after `mutex_`. Such a bucket has no speculative
//   store. Its weights are sent from slots, or stay in memory if blocks fetch them (`keeps_weights`).
// - Weights in a file (`weights_file_`): an update writes new weights to a buffer of this file too. A fetch copies each
//   weight from a buffer, which it holds until the copy has ended (`fetched_`).
#pragma once
#include <assert.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "api.h"
#include "late_streams.h"
#include "slots.h"
#include "state_file.h"
#include "streams.h"

namespace tf {

constexpr int32_t kAlways = 0;                        // instead of a tf_sync_point: a wait that tests cannot switch off
constexpr auto kLook = std::chrono::milliseconds(5);  // longest sleep of a thread while there is work
constexpr double kLong = 5e-4;                        // seconds; longer waits for the lock are recorded in a trace

enum class Phase { kOnDevice, kOnHost, kUpdating, kAhead, kToSend, kDone };

inline int64_t bytes_of(int32_t type) { return type == TF_F32 ? 4 : 2; }

struct Store {
  std::vector<tf_pointers> slices;  // the buffers of each slice
  int64_t record = -1;              // the part of the file with this store; -1: it is in memory
  int64_t base = 0;                 // the address of the record for which `slices` hold
  bool keeps_weights = false;       // the weights are in memory although the rest of the store is in the file

  // The buffers of a slice. `state`: the memory with the record, if the store is in a file. The weights are the master
  // if there are no separate ones.
  tf_pointers at(size_t slice, char* state) const {
    tf_pointers found = slices[slice];
    if (record < 0) return found;
    auto move = [&](auto*& buffer) {
      auto* raw = buffer ? state + (reinterpret_cast<int64_t>(buffer) - base) : nullptr;
      buffer = reinterpret_cast<std::remove_reference_t<decltype(buffer)>>(raw);
    };
    if (!keeps_weights || found.weight) move(found.master);
    if (!keeps_weights) move(found.weight);
    for (int k = 0; k < 2; ++k) {
      move(found.state[k]);
      move(found.scale[k]);
    }
    return found;
  }
};

struct Task;

struct Bucket {
  tf_bucket spec{};
  std::vector<tf_slice> slices;
  std::vector<uint8_t> follows;  // slices whose weights directly follow those of the previous slice on the device
  int64_t store = -1;
  int64_t deadline = 0;
  int64_t due = 0;        // the last job whose weights the next forward must use
  int64_t updated = 0;    // the last job whose update is in the state
  int64_t sent = 0;       // the last job whose weights are copied to the parameters; the copy is queued or done
  int64_t published = 0;  // the last job whose weights are copied from all ranks; the copy is queued or done
  // End of the last copy of its weights, to the parameters or by a fetch. The copy may read the state, so updates wait
  // for this event.
  EventRef weights_copied_event;
  EventRef published_event;          // the weights of other ranks are in the parameters
  std::vector<uint8_t> sent_slices;  // slices whose weights were sent since the last call of take_sent
  int64_t saved_store = -1;          // the store that a background checkpoint still reads
  bool has_saved_params = false;     // a background checkpoint still reads the parameters
  bool is_wanted = false;            // an update or a copy of weights waits for the checkpoint
  float* total = nullptr;            // fp32 sum of the gradients of several backwards
  std::vector<uint8_t> added;        // the slices in the total
  bool is_full = false;              // the total is complete and waits for its update
  std::deque<Task*> parts;           // tasks that are not yet added to the total, in order
  std::deque<Task*> open;            // tasks whose update is not yet final (kept or dropped), in order

  int64_t shown() const { return spec.is_shared ? published : sent; }
  bool is_saved() const { return saved_store >= 0 && saved_store == store; }
  EventRef& shown_event() { return spec.is_shared ? published_event : weights_copied_event; }
  bool has_added() const {
    return std::any_of(added.begin(), added.end(), [](uint8_t one) { return one; });
  }
};

struct Job {
  tf_job spec{};
  bool is_released = true;
  bool is_dropped = false;
  EventRef after;  // end of the forward and backward that use the old weights
  bool is_closed = false;
  const double* decision_at = nullptr;  // norm, factor, skip
  EventRef decision_event;
  double* norms = nullptr;  // norm of each bucket, if they are computed here
  int64_t num_norms = 0;    // the decision is computed from them unless `decision_at` has it
  bool has_decision = false;
  tf_decision decision{};
  int64_t num_left = 0;  // number of tasks whose update is not yet final (kept or dropped)
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
  std::vector<uint8_t> present, agreed;  // slices with a gradient; slices with a gradient on any rank
  EventRef ready, arrived;
  bool is_complete = false;  // `ready` is known to be done
  bool has_arrived = false;
  bool has_flat = false;     // its gradients are in a flat buffer of the pool, which other buckets may wait for
  bool is_released = false;  // the caller was told that its gradients are not needed any more
  bool is_held = false;      // waits until the ranks have agreed which slices have a gradient
  bool has_agreed = false;
  bool is_summed = false;
  bool has_weights = false;
  Slot* slot = nullptr;
  const void* grads = nullptr;
  char* state = nullptr;           // the memory with the state, if the state is in a file
  char* new_weights = nullptr;     // the memory for the new weights, if they are in a file
  int64_t speculative_store = -1;  // the store to which the update writes, if not to the state itself
  Slot* weight_slot = nullptr;
  std::vector<void*> weights;  // weights of an external update

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
  size_t next = 0;  // the first item that is not copied yet
};

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

  int64_t new_store(const tf_pointers* pointers, int64_t num_slices, int64_t record, int64_t base, bool keeps_weights);
  void free_store(int64_t store);
  void add_speculative_store(int64_t layout, int64_t store);
  int64_t take_speculative_store(int64_t layout);
  int64_t missing_speculative_stores(int64_t* buckets, int64_t max_buckets);

  void set_bucket(int64_t index, const tf_bucket& spec, int64_t store);
  int64_t store_of(int64_t index);
  void set_deadline(int64_t index, int64_t deadline);
  void set_total(int64_t index, float* total);
  int64_t added(int64_t index, uint8_t* slices);
  int64_t take_sent(int64_t index, uint8_t* slices);
  void set_due(const int64_t* indices, int64_t num_buckets, int64_t number);
  int64_t due(int64_t index);
  int64_t shown(int64_t index);
  void note_updated(int64_t index, int64_t number);
  void set_unsent(int64_t index, int64_t number);
  void note_sent(int64_t index, int64_t number, const tf_event* event);
  void note_published(int64_t index, int64_t number, const tf_event* event);
  tf_event* event_of(int64_t index, bool published);
  void freeze(int64_t index, int32_t parts);
  int64_t wanted(double timeout_s, int64_t* buckets, int64_t max_buckets);

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
  void follow_files();

  // Waits with the lock held. False if the executor has failed or is closing.
  template <class Condition>
  bool wait_until(Lock& lock, const Condition& condition) {
    ++num_waiting_;
    changed_.wait(lock, [&] { return condition() || is_over(); });
    --num_waiting_;
    return condition() && failure_ == kWorks;
  }
  // Waits for at most a number of seconds. Returns whether the condition holds.
  template <class Condition>
  bool wait_for(Lock& lock, double timeout_s, const Condition& condition) {
    ++num_waiting_;
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return condition() || is_over(); });
    --num_waiting_;
    return condition();
  }
  // Called when work outside of the executor sends the weights of a bucket. The threads of the executor are woken only
  // if they may wait for it, because waking them takes longer than the rest of the caller's work for a bucket.
  void tell_of_weights() {
    if (num_waiting_ || !tasks_.empty() || !fetch_queue_.empty()) changed_.notify_all();
  }
  // Waits until `changed_` is notified. While there is work, a thread also wakes up after a short time. A missed
  // notification then costs milliseconds and does not stop training.
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

  // Records a span that has taken longer than such a span should.
  void log_if_long(int32_t kind, double start_s) {
    if (double end_s = now_s(); end_s - start_s > kLong) log_.add({kind, -1, start_s, end_s});
  }

  // Functions of the mover. Each returns whether it did anything.
  bool note_arrivals();
  bool decide_ready();
  bool send_weights();
  bool fill_slots();
  bool start_fetches();
  bool release_fetched();
  bool looks_at_events();
  bool run_orders(Lock& lock);

  // Conditions of a task.
  bool is_to_sum(const Task& task) const { return sums_on_host_ && !task.is_summed; }
  bool is_allowed(const Task& task) const {
    return is_to_sum(task) || (!task.is_held && (task.job->is_open() || task.speculative_store >= 0));
  }
  // An update starts from the result of the previous update of the bucket, so the previous update must be final.
  bool is_next(const Task& task) const { return task.bucket->open.front() == &task; }
  bool may_update(Task& task);
  bool may_change(Bucket& bucket);
  bool reserve(Task& task);
  bool take_store(Task& task);
  bool want(Bucket& bucket);
  bool speculates() const;

  // Transitions of a task.
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
  void swap_stores(Task& task);
  void keep(Task& task);
  void give_up(Task& task);
  void finish(Task& task);
  void free_speculative_store(Task& task);
  void free_slot(Task& task);
  void free_state(Task& task, bool is_changed);
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
  Orders orders_;  // of the three streams, which the mover runs without the lock
  std::unique_ptr<Stream> out_, in_, fetch_;
  std::atomic<double> orders_delay_s_{0};  // for tests
  SlotPool slots_, weight_slots_;
  const std::shared_ptr<StateFile> file_;             // of stores that are not in memory; nullptr: there are none
  const std::shared_ptr<StateFile> weights_file_;     // of weights that blocks fetch; nullptr: they are in memory
  std::deque<std::pair<int64_t, EventRef>> fetched_;  // records whose copy to the device may not have ended
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::map<int64_t, Store> stores_;
  std::map<int64_t, std::vector<int64_t>> speculative_stores_;  // by layout
  std::set<int64_t> missing_;                                   // buckets that found no speculative store
  std::map<int64_t, std::unique_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<Task>> tasks_;  // tasks that are not done, in the order of submission
  std::map<int64_t, Fetch> fetches_;
  std::deque<int64_t> fetch_queue_;
  std::deque<std::pair<int64_t, EventRef>> released_;
  std::deque<EventRef> sends_;
  std::deque<bool> wasted_;  // for each of the last steps: whether it discarded updates made before the decision
  int64_t next_id_ = 1;
  int32_t disabled_ = 0;
  int32_t failure_ = kWorks;
  int num_waiting_ = 0;  // callers in wait_until and wait_for
  bool is_closing_ = false;
  tf_counters counters_{};
  std::thread mover_, worker_;
};

}  // namespace tf
