// SPDX-License-Identifier: Apache-2.0
// The C functions of the executor (api.h), which Python calls by ctypes. Each forwards to the method of the same name.
//
// Python owns a tf_executor from tf_executor_new to tf_executor_free, and each tf_event that a function returns until
// tf_event_free. The executor has its own locks and threads (executor.h).
#include "executor.h"

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

int64_t tf_store_new(tf_executor* e, const tf_pointers* pointers, int64_t num_slices, int64_t record, int64_t base,
                     int32_t keeps_weights) {
  return e->executor.new_store(pointers, num_slices, record, base, keeps_weights != 0);
}
void tf_store_free(tf_executor* e, int64_t store) { e->executor.free_store(store); }
void tf_store_add_speculative(tf_executor* e, int64_t layout, int64_t store) {
  e->executor.add_speculative_store(layout, store);
}
int64_t tf_store_take_speculative(tf_executor* e, int64_t layout) { return e->executor.take_speculative_store(layout); }
int64_t tf_store_missing_speculative(tf_executor* e, int64_t* buckets, int64_t max) {
  return e->executor.missing_speculative_stores(buckets, max);
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
void tf_buckets_set_due(tf_executor* e, const int64_t* buckets, int64_t num_buckets, int64_t number) {
  e->executor.set_due(buckets, num_buckets, number);
}
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
tf_event* tf_bucket_weights_copied_event(tf_executor* e, int64_t bucket) { return e->executor.event_of(bucket, false); }
tf_event* tf_bucket_published_event(tf_executor* e, int64_t bucket) { return e->executor.event_of(bucket, true); }
void tf_bucket_freeze(tf_executor* e, int64_t bucket, int32_t parts) { e->executor.freeze(bucket, parts); }
int64_t tf_wanted(tf_executor* e, double timeout_s, int64_t* buckets, int64_t max_buckets) {
  return e->executor.wanted(timeout_s, buckets, max_buckets);
}

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
