// SPDX-License-Identifier: Apache-2.0
// The functions of the executor that callers use: stores, buckets, jobs, submission, and waiting for weights.
//
// Python calls these functions from any of its threads, and without the GIL if they may block (native/executor.py).
// Each function locks `mutex_` and reads or changes records (executor.h). No function copies or updates data, with one
// exception: `hold_back` casts weights. It may do so, because no task of the bucket runs then. A function that changes
// a condition for which a thread may wait notifies `changed_`. A caller waits for events of streams without the mutex.
#include "executor.h"

namespace tf {

Executor::Executor(std::shared_ptr<Driver> driver, const tf_settings& settings)
    : driver_(std::move(driver)),
      holds_on_host_(settings.holds_on_host),
      is_external_(settings.is_external),
      sums_on_host_(settings.sums_on_host),
      out_(std::make_unique<LateStream>(driver_->new_stream(&log_), orders_)),
      in_(std::make_unique<LateStream>(driver_->new_stream(&log_), orders_)),
      fetch_(std::make_unique<LateStream>(driver_->new_stream(&log_), orders_)),
      slots_(*driver_, settings.slot_bytes, settings.num_slots),
      weight_slots_(*driver_, settings.slot_bytes, settings.num_weight_slots),
      file_(settings.file ? settings.file->file : nullptr),
      weights_file_(settings.weights ? settings.weights->file : nullptr) {
  for (auto& file : {file_, weights_file_})
    if (file) file->listen([this] { follow_files(); });
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
  for (auto& file : {file_, weights_file_})
    if (file) file->listen(nullptr);
  mover_.join();
  if (worker_.joinable()) worker_.join();
  out_.reset();  // waits for the copies of this stream
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

// Called by a thread of a file.
void Executor::follow_files() {
  bool works = true;
  for (auto& file : {file_, weights_file_}) works = works && !(file && file->failure().kind);
  Lock lock(mutex_);
  if (!works && failure_ == kWorks) failure_ = kFailedOutside;
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
  if (stream == TF_STREAM_ORDERS) {
    orders_delay_s_ = seconds;
    return;
  }
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

int64_t Executor::new_store(const tf_pointers* pointers, int64_t num_slices, int64_t record, int64_t base,
                            bool keeps_weights) {
  Lock lock(mutex_);
  stores_[next_id_] = {{pointers, pointers + num_slices}, record, base, keeps_weights};
  return next_id_++;
}

void Executor::free_store(int64_t store) {
  Lock lock(mutex_);
  stores_.erase(store);
}

void Executor::add_speculative_store(int64_t layout, int64_t store) {
  Lock lock(mutex_);
  speculative_stores_[layout].push_back(store);
}

int64_t Executor::take_speculative_store(int64_t layout) {
  Lock lock(mutex_);
  auto& stores = speculative_stores_[layout];
  if (stores.empty()) return -1;
  int64_t store = stores.back();
  stores.pop_back();
  return store;
}

int64_t Executor::missing_speculative_stores(int64_t* buckets, int64_t max_buckets) {
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
  found.follows.assign(spec.num_slices, 0);
  for (int32_t i = 1; i < spec.num_slices; ++i) {
    const tf_slice &before = found.slices[i - 1], &here = found.slices[i];
    if (!before.target || !here.target) continue;
    auto* end = static_cast<char*>(before.target) + before.numel * bytes_of(spec.type);
    found.follows[i] = end == here.target && driver_->share_allocation(before.target, here.target);
  }
  found.store = store;
  found.added.resize(spec.num_slices, 0);  // sums stay if only the memory of parameters is new
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
  if (found.is_full) return 0;  // the total belongs to an earlier step
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

void Executor::set_due(const int64_t* indices, int64_t num_buckets, int64_t number) {
  Lock lock(mutex_);
  for (int64_t i = 0; i < num_buckets; ++i) bucket(indices[i]).due = number;
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
  if (event) found.weights_copied_event = event->ref;
  tell_of_weights();
}

void Executor::note_published(int64_t index, int64_t number, const tf_event* event) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  found.published = number;
  if (event) found.published_event = event->ref;
  tell_of_weights();
}

tf_event* Executor::event_of(int64_t index, bool published) {
  Lock lock(mutex_);
  EventRef& event = published ? bucket(index).published_event : bucket(index).weights_copied_event;
  return event ? new tf_event{event} : nullptr;
}

void Executor::freeze(int64_t index, int32_t parts) {
  Lock lock(mutex_);
  Bucket& found = bucket(index);
  found.has_saved_params = (parts & TF_SAVED_PARAMS) && !is_off(TF_PARAMS_READ);
  if ((parts & TF_SAVED_STATE) && !is_off(TF_STATE_READ)) {
    if (found.saved_store < 0) found.saved_store = found.store;
  } else {
    bool is_spare = found.saved_store >= 0 && !found.is_saved();
    if (is_spare) speculative_stores_[found.spec.layout].push_back(found.saved_store);
    found.saved_store = -1;
  }
  found.is_wanted = false;  // what still waits will ask again
  changed_.notify_all();
}

// Asks the background checkpoint to read or copy what it has not read of a bucket. Always false, for callers that wait.
bool Executor::want(Bucket& one) {
  if (!one.is_wanted) changed_.notify_all();  // a thread may wait in `wanted`
  one.is_wanted = true;
  return false;
}

int64_t Executor::wanted(double timeout_s, int64_t* buckets, int64_t max_buckets) {
  Lock lock(mutex_);
  int64_t count = 0;
  auto look = [&] {
    count = 0;
    for (size_t i = 0; i < buckets_.size() && count < max_buckets; ++i)
      if (buckets_[i]->is_wanted) buckets[count++] = static_cast<int64_t>(i);
    return count > 0;
  };
  wait_for(lock, timeout_s, look);
  return count;
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

void Executor::add_hypers(int64_t id, const tf_hyper* rows, int64_t num_rows) {
  Lock lock(mutex_);
  auto& hypers = job(id).hypers;
  hypers.insert(hypers.end(), rows, rows + num_rows);
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
  bool is_new = found.has_added() && !found.is_full;  // a full total belongs to an earlier step
  if (found.parts.empty() && !is_new) return -1;
  Task* task = new_task(job(job_id), index);
  task->present.assign(found.slices.size(), 0);
  task->is_released = true;  // the task has no gradients of its own
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
    const Store& store = stores_.at(found.store);
    assert(store.record < 0);
    for (size_t i = 0; i < store.slices.size(); ++i)
      tf_cast(task->weight_slot->raw + found.slices[i].offset * bytes_of(found.spec.type), found.spec.type,
              store.slices[i].master, TF_F32, found.slices[i].numel);
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
    free_speculative_store(*task);
    enter(*task, Phase::kDone);
    return task->id;
  }
  return -1;
}

void Executor::reset(int64_t number) {
  Lock lock(mutex_);
  for (auto& task : tasks_) {
    if (task->phase != Phase::kToSend) continue;
    free_speculative_store(*task);
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
    // A held task waits for the other ranks, which answer only after all buckets of the step are submitted.
    bool is_stuck = task->is_held && !sums_on_host_;
    return is_under_way && task->has_flat && !task->is_released && !is_stuck;
  });
}

int32_t Executor::wait_released(double timeout_s) {
  Lock lock(mutex_);
  bool is_there = wait_for(lock, timeout_s, [&] { return !released_.empty(); });
  return is_over() ? -1 : is_there;
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
  std::vector<EventRef> events;
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
    events.push_back(event);
  }
  if (failure_ != kWorks) return -1.0;
  lock.unlock();  // if the queue of a stream is full, the driver waits, and the threads of the executor must not
  for (auto& event : events)
    for (int64_t s = 0; s < num_streams; ++s) driver_->hold(streams[s], event);
  return waited_s;
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
  bool is_sent = wait_for(lock, timeout_s, [&] { return one.sent >= number; });
  return is_over() ? -1 : is_sent;
}

// Weights that stay on the host.

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
  EventRef event = fetches_.at(id).event;
  fetches_.erase(id);
  lock.unlock();
  event->real();  // the caller makes its stream wait for the event with the GIL, and should not wait for the mover then
  return new tf_event{event};
}

}  // namespace tf
