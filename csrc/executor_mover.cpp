// SPDX-License-Identifier: Apache-2.0
// The mover: the thread that starts copies, reads decisions and marks gradients that have arrived.
//
// The mover holds `mutex_` except while it sleeps (`rest`) and while it calls the driver (`run_orders`). It never waits
// for a copy. It queues copies on three streams (`out_`, `in_`, `fetch_`), which no other thread uses
// (late_streams.h). On its stream, a copy of gradients waits for the event `ready` of the task. A copy of weights of a
// delayed job waits for the job's event `after`. A fetch waits for its own event `after`, the end of the last use of
// its memory. The worker starts an update after the event `arrived` of the task. The event `weights_copied_event` of a
// bucket prevents the worker from changing state that a copy still reads.
#include "clip_decision.h"
#include "executor.h"

namespace tf {

constexpr size_t kSendsAtOnce = 3;                     // maximum of queued copies back: one runs, two are next
constexpr auto kPoll = std::chrono::microseconds(50);  // interval at which the mover polls events

void Executor::move_loop() {
  name_thread("twinflow-mover");
  driver_->enter_thread();
  Lock lock(mutex_);
  while (!is_over()) {
    double start_s = now_s();
    bool did = note_arrivals();
    did = decide_ready() || did;
    did = send_weights() || did;
    did = start_fetches() || did;
    did = fill_slots() || did;
    log_if_long(TF_SPAN_MOVER, start_s);
    did = run_orders(lock) || did;
    if (did) {
      changed_.notify_all();
    } else if (looks_at_events()) {
      changed_.wait_for(lock, kPoll);
    } else {
      rest(lock);
    }
  }
}

// Calls the streams without the lock. Returns whether there was anything to do.
bool Executor::run_orders(Lock& lock) {
  if (orders_.empty()) return false;
  Orders orders;
  orders.swap(orders_);
  lock.unlock();
  for (auto& order : orders) {
    if (orders_delay_s_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(orders_delay_s_.load()));
    order();
  }
  lock.lock();
  return true;
}

// Events do not wake a thread, so the mover polls the events that the worker waits for.
bool Executor::note_arrivals() {
  bool did = false;
  for (auto& task : tasks_) {
    if (task->phase != Phase::kOnHost) continue;
    EventRef& copied = task->bucket->weights_copied_event;
    if (copied && copied->state() == Event::kDone) {
      copied.reset();
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
    if (task->phase == Phase::kOnHost && (!task->has_arrived || task->bucket->weights_copied_event)) return true;
    if (task->phase == Phase::kOnDevice && (!task->is_complete || slots_.has_readers())) return true;
    if (task->phase == Phase::kToSend && task->job->is_released) return true;
  }
  for (auto& one : jobs_)
    if (one.second->is_closed && !one.second->has_decision) return true;
  return !sends_.empty() || !fetched_.empty();
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

bool Executor::send_weights() {
  bool did = false;
  while (!sends_.empty() && has_come(sends_.front(), kAlways)) {
    sends_.pop_front();
    did = true;  // the worker may be waiting for a weight slot
  }
  std::vector<Task*> ready;
  for (auto& task : tasks_)
    if (task->phase == Phase::kToSend && task->job->is_released) ready.push_back(task.get());
  std::sort(ready.begin(), ready.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
  for (Task* task : ready) {
    Bucket& one = *task->bucket;
    bool writes = task->has_weights && one.slices[0].target;
    if (writes && sends_.size() >= kSendsAtOnce) break;
    if ((writes || one.spec.is_shared) && one.has_saved_params) {
      want(one);
      continue;
    }
    if (writes) copy_back(*task);
    if (task->weight_slot) weight_slots_.give(task->weight_slot, writes ? one.weights_copied_event : nullptr);
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
  // Slices that are adjacent in source and target are copied together.
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
    if (into && one.follows[i] && task.present[i - 1] && source == from + num_bytes) {
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
  one.weights_copied_event = in_->record();
  sends_.push_back(one.weights_copied_event);
}

const void* Executor::weight_of(const Task& task, size_t i) {
  const Bucket& one = *task.bucket;
  if (!task.weights.empty()) return task.weights[i];
  if (task.weight_slot) return task.weight_slot->raw + one.slices[i].offset * bytes_of(one.spec.type);
  assert(stores_.at(one.store).record < 0);
  const tf_pointers& found = stores_.at(one.store).slices[i];
  return found.weight ? found.weight : found.master;
}

// Gives buffers of the file back whose weights are on the device.
bool Executor::release_fetched() {
  bool did = false;
  while (!fetched_.empty() && has_come(fetched_.front().second, kAlways)) {
    weights_file_->release_update(fetched_.front().first, false);
    fetched_.pop_front();
    did = true;
  }
  return did;
}

bool Executor::start_fetches() {
  bool did = release_fetched();
  while (!fetch_queue_.empty()) {
    Fetch& fetch = fetches_.at(fetch_queue_.front());
    if (fetch.next == 0) {
      for (auto& item : fetch.items)
        if (item.bucket >= 0 && bucket(item.bucket).shown() < bucket(item.bucket).due) return did;
    }
    for (; fetch.next < fetch.items.size(); ++fetch.next) {
      const tf_fetch_item& item = fetch.items[fetch.next];
      const void* from = item.from;
      if (item.record >= 0) {
        from = weights_file_->try_read(item.record);
        if (!from) return did;
      } else if (item.bucket >= 0 && bucket(item.bucket).store >= 0) {
        const Store& store = stores_.at(bucket(item.bucket).store);
        assert(store.record < 0 || store.keeps_weights);
        const tf_pointers& first = store.slices[0];
        from = first.weight ? first.weight : first.master;
      }
      if (fetch.next == 0 && fetch.after && !is_off(TF_FETCH_ROOM)) fetch_->wait(fetch.after);
      if (item.bucket >= 0 && bucket(item.bucket).store < 0 && !is_off(TF_FETCH_STORED)) {
        const EventRef& stored = bucket(item.bucket).weights_copied_event;  // of an update on the device
        if (stored) fetch_->wait(stored);
      }
      fetch_->begin_span();
      fetch_->copy(item.into, from, item.num_bytes);
      fetch_->end_span(TF_SPAN_FETCH, static_cast<int32_t>(item.bucket));
      counters_.bytes_fetched += item.num_bytes;
      if (item.record >= 0) fetched_.emplace_back(item.record, fetch_->record());
      did = true;
    }
    fetch.event = fetch_->record();
    for (auto& item : fetch.items)  // the state must not change before the fetch has read it
      if (item.bucket >= 0 && item.record < 0) bucket(item.bucket).weights_copied_event = fetch.event;
    fetch_queue_.pop_front();
    did = true;
  }
  return did;
}

bool Executor::fill_slots() {
  bool did = false;
  for (;;) {
    std::vector<Task*> complete, rest;
    // Gradients become complete in the order of submission, so after an incomplete task all later ones are incomplete.
    bool is_prefix = true;
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
      if (is_allowed(*task) || holds_on_host_ || reserve(*task)) {
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
  // the flat buffer is not needed again
  if (task.has_flat && (task.job->is_open() || holds_on_host_)) tell_released(task);
}

}  // namespace tf
