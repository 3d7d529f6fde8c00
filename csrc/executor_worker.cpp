// SPDX-License-Identifier: Apache-2.0
// The worker: the thread that sums gradients and updates buckets, one at a time, with all threads of the pool.
//
// `pick` chooses a task and moves it to kUpdating, with `mutex_` held. From then on the worker owns the task. It
// releases the lock while the kernel runs, and takes it again to move the task to its next phase. An optimizer in
// Python replaces this thread by `next_update` and `finish_update`, with the same phases. The gradients of a chosen
// task are on the host, because the mover has checked its event `arrived`. The update may change the state, because
// `may_change` has checked that no copy reads the state.
#include <math.h>
#include <string.h>

#include "executor.h"

namespace tf {
namespace {

// 64 well-mixed bits of (step, parameter), as in rules/formats.py.
void rounding_key(int64_t step, uint32_t param, uint32_t* key) {
  uint64_t z = static_cast<uint64_t>(step) * 0x9E3779B97F4A7C15u + param * 0xD1B54A32D192ED03u + 0x8CB92BA72F3D8DD7u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  key[0] = static_cast<uint32_t>(z);
  key[1] = static_cast<uint32_t>(z >> 32);
}

}  // namespace

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

// The task with the earliest deadline that can be updated now, with its slots and stores reserved. Gradients that wait
// on the host get their speculative store here and not when they leave the device: the first gradients of a backward
// are those with the latest deadlines, and would take the stores from those that the next forward needs first.
Task* Executor::pick() {
  std::vector<Task*> ready;
  for (auto& task : tasks_)
    if (task->phase == Phase::kOnHost && may_update(*task)) ready.push_back(task.get());
  std::sort(ready.begin(), ready.end(), [](Task* a, Task* b) { return a->deadline() < b->deadline(); });
  for (Task* task : ready) {
    bool may = is_allowed(*task) || (holds_on_host_ && reserve(*task));
    if (is_to_sum(*task) || (may && prepare(*task))) {
      enter(*task, Phase::kUpdating);
      return task;
    }
  }
  return nullptr;
}

bool Executor::may_update(Task& task) {
  if (!task.has_arrived) return false;
  Bucket& one = *task.bucket;
  if (is_to_sum(task)) return one.parts.front() == &task && !one.is_full;  // in order, so that sums are reproducible
  return is_next(task) && may_change(one);
}

// Whether an update may change the state of a bucket. It must not change before weights that are copied from it are
// sent.
bool Executor::may_change(Bucket& one) {
  return one.sent >= one.updated && has_come(one.weights_copied_event, TF_WEIGHT_SENT);
}

// Reserves the buffers to which the update writes. A background checkpoint that still reads the state keeps the store.
bool Executor::prepare(Task& task) {
  bool is_ahead = !task.job->is_open();
  bool is_saved = task.bucket->is_saved() && task.has_present();
  if (is_saved && task.speculative_store < 0 && !take_store(task)) return want(*task.bucket);
  if (is_saved) task.bucket->is_wanted = false;
  if (!is_saved && !is_ahead && task.speculative_store >= 0) free_speculative_store(task);
  if (!task.has_present()) return true;
  if (!task.weight_slot && task.bucket->spec.has_weight_slots) {
    // An update before the decision keeps its slot until the decision is made, so the pool may grow.
    task.weight_slot = weight_slots_.take(is_ahead, is_off(TF_WEIGHT_SLOT));
    if (!task.weight_slot) return false;
  }
  // The state is held last. A task that held it while it waits for a slot could wait forever, because the slots may
  // wait for a background checkpoint, which needs a buffer of the file.
  int64_t record = stores_.at(task.bucket->store).record;
  if (record >= 0 && !task.state) task.state = file_->try_hold(record);
  if (record >= 0 && !task.state) return false;
  // A buffer for weights comes after the state: fetches and writes give these buffers back without waiting for updates.
  record = task.bucket->spec.weight_record;
  if (record >= 0) task.new_weights = weights_file_->try_overwrite(record);
  return record < 0 || task.new_weights;
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

// The gradients of a task were added to the total of its bucket. The last task of a step continues with the update.
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
  if (task.job->has_decision && task.job->decision.skip) give_up(task);  // the decision was made during the addition
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
  bool is_aside = task.speculative_store >= 0;
  assert(is_aside || !is_ahead);
  bool is_own_master = one.spec.type == TF_F32 || one.spec.master_kind == TF_MASTER_NONE;
  std::vector<tf_segment> segments;
  struct Copy {
    void* into;
    const void* from;
    int64_t numel;
  };
  std::vector<Copy> copies, rounded;
  const Store& read = stores_.at(one.store);
  const Store& write = is_aside ? stores_.at(task.speculative_store) : read;
  int64_t size = task.is_summed ? 4 : bytes_of(one.spec.type);
  char* sent_to = task.new_weights ? task.new_weights : task.weight_slot ? task.weight_slot->raw : nullptr;
  for (size_t i = 0; i < one.slices.size(); ++i) {
    const tf_slice& slice = one.slices[i];
    tf_pointers from = read.at(i, task.state), into = write.at(i, task.state);
    void* sent = sent_to ? sent_to + slice.offset * bytes_of(one.spec.type) : nullptr;
    bool is_in_state = is_own_master || into.weight;
    if (sent && is_in_state && (task.present[i] || task.new_weights))
      copies.push_back({sent, is_own_master ? into.master : into.weight, slice.numel});
    if (!task.present[i]) {  // the file has the weights of all slices
      if (task.new_weights && !is_in_state) rounded.push_back({sent, into.master, slice.numel});
      continue;
    }
    int64_t step = one.spec.steps[i] + 1;
    const tf_hyper& row = hyper_of(task, slice.group, step);
    tf_segment segment{};
    segment.grad = static_cast<const char*>(task.grads) + slice.offset * size;
    segment.weight_in = from.weight;
    segment.weight = into.weight;
    if (sent && !is_in_state) segment.weight = sent;
    segment.master_in = from.master;
    segment.master = into.master;
    for (int k = 0; k < 2; ++k) {
      segment.state_in[k] = from.state[k];
      segment.state[k] = into.state[k];
      segment.scale_in[k] = from.scale[k];
      segment.scale[k] = into.scale[k];
    }
    segment.numel = slice.numel;
    segment.first_index = slice.first_index;
    segment.rule = one.spec.rule;
    segment.format = one.spec.format;
    segment.grad_type = task.is_summed ? static_cast<int32_t>(TF_F32) : one.spec.type;
    segment.weight_type = is_own_master ? static_cast<int32_t>(TF_NONE) : one.spec.type;
    segment.master_kind = one.spec.master_kind;
    segment.factor = static_cast<float>(row.sign * task.job->factor());
    memcpy(segment.hyper, row.hyper, sizeof(row.hyper));
    rounding_key(step, slice.param, segment.key);
    segments.push_back(segment);
  }
  task.has_weights = !segments.empty();
  lock.unlock();
  double start_s = now_s();
  if (!segments.empty()) tf_update(segments.data(), segments.size());
  // Weights in a state that leaves the memory before they are sent.
  for (auto& copy : copies) memcpy(copy.into, copy.from, copy.numel * bytes_of(one.spec.type));
  for (auto& copy : rounded) tf_cast(copy.into, one.spec.type, copy.from, TF_F32, copy.numel);
  double end_s = now_s();
  lock.lock();
  log_if_long(TF_SPAN_LOCK, end_s);
  counters_.busy_s += end_s - start_s;
  if (!segments.empty())
    log_.add({is_ahead ? TF_SPAN_AHEAD : TF_SPAN_UPDATE, static_cast<int32_t>(task.bucket_index), start_s, end_s});
  free_state(task, !segments.empty());
  if (task.new_weights) weights_file_->release_update(one.spec.weight_record, true);
  task.new_weights = nullptr;
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

}  // namespace tf
