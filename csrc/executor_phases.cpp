// SPDX-License-Identifier: Apache-2.0
// Transitions of tasks between phases, effects of the clipping decision, and release of slots and stores.
//
// All of these functions run with `mutex_` held. They run in the thread that owns the phase of the task (see the table
// in executor.h), or in the thread that has the decision, which is the mover or a caller of `decide_job`. A task owns
// its slots and its speculative store until `free_slot`, `free_speculative_store` or `keep`.
#include "executor.h"

namespace tf {

constexpr size_t kHistory = 8;  // past steps that decide whether updates before the decision are worthwhile

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

// Takes a speculative store, so that the task can be updated before the decision.
bool Executor::reserve(Task& task) {
  bool may = task.job->spec.runs_ahead && !task.is_held && !task.job->has_decision && is_next(task);
  return may && speculates() && take_store(task);
}

bool Executor::take_store(Task& task) {
  if (stores_.at(task.bucket->store).record >= 0) return false;
  if (is_external_ || !task.is_whole()) return false;  // a swap would lose slices that are not updated
  auto& stores = speculative_stores_[task.bucket->spec.layout];
  if (stores.empty()) {
    missing_.insert(task.bucket_index);
    return false;
  }
  task.speculative_store = stores.back();
  stores.pop_back();
  return true;
}

// Whether updates run before the decision: not if half of the recent steps have discarded such updates.
bool Executor::speculates() const {
  size_t num_wasted = std::count(wasted_.begin(), wasted_.end(), true);
  return 2 * num_wasted < std::max<size_t>(2, wasted_.size());
}

void Executor::updated(Task& task, bool was_ahead) {
  if (!was_ahead) {
    if (task.speculative_store >= 0) swap_stores(task);
    keep(task);
    return;
  }
  if (!holds_on_host_) free_slot(task);
  enter(task, Phase::kAhead);
  if (task.job->has_decision) settle(task);  // the decision was made meanwhile
}

// Applies the decision to all tasks of a job: updates before the decision are kept or repeated. A skipped step has no
// effect.
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
    if (task->phase == Phase::kUpdating && task->speculative_store >= 0) num_updating += 1;
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

// After the decision, an update that was made before it is kept, dropped, or repeated from gradients that still exist.
void Executor::settle(Task& task) {
  const tf_decision& decision = task.job->decision;
  if (decision.skip) {
    give_up(task);
  } else if (decision.factor == 1.0 / task.job->spec.scale) {
    swap_stores(task);
    keep(task);
  } else {
    free_speculative_store(task);
    enter(task, task.slot ? Phase::kOnHost : Phase::kOnDevice);
  }
}

void Executor::swap_stores(Task& task) {
  Bucket& one = *task.bucket;
  if (one.is_saved())
    counters_.num_aside += 1;  // `freeze` frees this store when the checkpoint has read it
  else
    speculative_stores_[one.spec.layout].push_back(one.store);
  one.store = task.speculative_store;
  task.speculative_store = -1;
}

// Makes an update final: counts it, frees its buffers, and sends the weights.
void Executor::keep(Task& task) {
  Bucket& one = *task.bucket;
  free_gradients(task);
  for (size_t i = 0; i < one.slices.size(); ++i) one.spec.steps[i] += task.present[i];
  one.updated = task.job->spec.number;
  finish(task);
  enter(task, Phase::kToSend);
}

// Drops a task: state and weights are not changed.
void Executor::give_up(Task& task) {
  // The gradients of the task are being added to a total. `summed` calls this function again.
  if (task.phase == Phase::kUpdating) return;
  auto& parts = task.bucket->parts;
  parts.erase(std::remove(parts.begin(), parts.end(), &task), parts.end());
  free_speculative_store(task);
  free_state(task, false);
  free_gradients(task);
  task.has_weights = false;
  finish(task);
  if (task.job->is_dropped) {  // the job was not a step, and no thread waits for it
    enter(task, Phase::kDone);
    return;
  }
  task.bucket->updated = task.job->spec.number;
  enter(task, Phase::kToSend);  // without weights, so that threads that wait for this job continue
}

void Executor::finish(Task& task) {
  auto& open = task.bucket->open;
  open.erase(std::remove(open.begin(), open.end(), &task), open.end());
  task.job->num_left -= 1;
}

void Executor::free_speculative_store(Task& task) {
  if (task.speculative_store >= 0) speculative_stores_[task.bucket->spec.layout].push_back(task.speculative_store);
  task.speculative_store = -1;
  if (task.weight_slot) weight_slots_.give(task.weight_slot, nullptr);
  task.weight_slot = nullptr;
  task.has_weights = false;
}

// Gives the state of a task back to its file.
void Executor::free_state(Task& task, bool is_changed) {
  if (task.state) file_->release_update(stores_.at(task.bucket->store).record, is_changed);
  task.state = nullptr;
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

// Removes finished tasks, and jobs that Python does not need any more.
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

}  // namespace tf
