// SPDX-License-Identifier: Apache-2.0
// The C ABI of the native library, which Python calls through ctypes.
//
// The library does not use torch. Pointers refer to host memory, and sizes are counted in elements.
// src/twinflow/native/library.py repeats the fields of tf_segment and tf_packing. The loader compares their sizes with
// tf_segment_size() and tf_packing_size(), and rejects a library with other sizes.
#pragma once
#include <stdint.h>

#define TF_API_VERSION 9
#ifdef TF_BUILDING
#define TF_PUBLIC __attribute__((visibility("default")))
#else
#define TF_PUBLIC
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum tf_dtype { TF_NONE = 0, TF_F32 = 1, TF_BF16 = 2, TF_F16 = 3 };
enum tf_format { TF_STATE_F32 = 0, TF_STATE_BF16 = 1, TF_STATE_INT8 = 2, TF_STATE_4BIT = 3 };
// An fp32 master; a master whose upper halves are the bf16 weight; or no master, so that bf16 weights are the only
// copy.
enum tf_master { TF_MASTER_WHOLE = 0, TF_MASTER_SPLIT = 1, TF_MASTER_NONE = 2 };

// Consecutive elements of one parameter, with their hyper-parameters. In an update in place every *_in pointer equals
// the pointer of the same name without _in. In an update out of place all of these pointers differ.
typedef struct tf_segment {
  const void* grad;          // grad_type
  const void* weight_in;     // read only when the master is split: its upper halves (bf16)
  void* weight;              // weight_type; NULL when weight_type is TF_NONE
  const void* master_in;     // float; int16 lower halves when the master is split; the bf16 weights without a master
  void* master;              //
  const void* state_in[2];   // first and second state; NULL where the rule has none. 4bit: both are in the first
  void* state[2];            //
  const float* scale_in[2];  // one float per 128 elements, int8 and 4bit formats only
  float* scale[2];           //
  int64_t numel;
  int64_t first_index;  // position of element 0 in its parameter: a multiple of 128
  int32_t rule, format, grad_type, weight_type;
  int32_t master_kind;  // tf_master. Without a master, weight_type is TF_NONE
  float factor;         // the gradient is multiplied by it, for unscaling and clipping
  float hyper[7];       // see rules.h
  uint32_t key[2];      // hash of (step, parameter) for stochastic rounding
} tf_segment;

// Arguments of tf_encode, tf_mean and tf_decode. src/twinflow/codes/code.py describes the format of a row. `exponents`
// is NULL, or has k + 127 for each element of `values`, and 0 for excluded elements, which are decoded as 0.
typedef struct tf_packing {
  void* packed;              // num_rows adjacent rows: tf_encode writes them, tf_mean and tf_decode read them
  void* values;              // values_type: tf_encode reads them, tf_mean and tf_decode write them
  const void* base;          // base_type; NULL when base_type is TF_NONE
  float* error;              // NULL: the rounding error is dropped
  const uint8_t* exponents;  //
  int64_t num_rows;
  int64_t numel;  // of one row
  int32_t bits;   // 1, 4 or 8
  int32_t values_type, base_type;
  int32_t is_scaled;  // not 0: multiply by 2^k; 0: exponents only tell which elements are excluded
  int32_t is_added;   // not 0: tf_decode adds to `values`; 0: it overwrites them
  float factor;       // factor of `values` in tf_encode, and of the result in tf_mean and tf_decode
  float base_factor;
} tf_packing;

// These functions are thread safe, run on the thread pool of the library and return when the work is done.
TF_PUBLIC void tf_update(const tf_segment* segments, int64_t num_segments);
// sums[i] = sum of squares of tensor i in fp64. The bits depend neither on the number of threads nor on the ISA. A sum
// is not finite if and only if the tensor has a NaN or an infinity.
TF_PUBLIC void tf_sum_squares(const void* const* tensors, const int64_t* numels, const int32_t* dtypes,
                              int64_t num_tensors, double* sums);
TF_PUBLIC void tf_accumulate(float* into, const void* from, int32_t from_type, int64_t numel);
TF_PUBLIC void tf_cast(void* into, int32_t into_type, const void* from, int32_t from_type, int64_t numel);
// master[i] = values[i], except where values[i] is a nearest neighbour of master[i] in its own type.
TF_PUBLIC void tf_adopt(float* master, const void* values, int32_t values_type, int64_t numel);
// Conversion of fp32 values to a split master, which has upper (bf16) and lower (int16) halves, and back.
TF_PUBLIC void tf_split(const float* values, uint16_t* upper, int16_t* lower, int64_t numel);
TF_PUBLIC void tf_join(const uint16_t* upper, const int16_t* lower, float* values, int64_t numel);
// Packs (base * base_factor + values * factor) * 2^k + error, and stores the rounding error in `error`.
TF_PUBLIC void tf_encode(const tf_packing* packing);
// values = (the sum of all rows, in their order) * factor * 2^-k.
TF_PUBLIC void tf_mean(const tf_packing* packing);
// values = (the decoded rows, one after the other) * factor * 2^-k. If is_added, this result is added to `values`.
TF_PUBLIC void tf_decode(const tf_packing* packing);
// For benchmarks: values[i] = values[i] * factor in place. Its memory rate is the upper limit for kernels.
TF_PUBLIC void tf_scale_in_place(float* values, float factor, int64_t numel);

TF_PUBLIC void tf_set_threads(int32_t num_threads);
TF_PUBLIC int32_t tf_get_threads(void);
// The first function returns the ISA variants that this CPU can run, the fastest first, separated by spaces. The others
// return the variant in use, and select a variant (0 on success).
TF_PUBLIC const char* tf_isa_available(void);
TF_PUBLIC const char* tf_isa(void);
TF_PUBLIC int32_t tf_set_isa(const char* name);
// Names of the update rules, separated by spaces, in the order of their codes (tf_segment.rule).
TF_PUBLIC const char* tf_rules(void);
TF_PUBLIC int32_t tf_api_version(void);
TF_PUBLIC int64_t tf_segment_size(void);
TF_PUBLIC int64_t tf_packing_size(void);
// The executor (executor.h) copies gradients to the host, updates buckets there and copies the new weights to the
// device. It has its own threads. "To send" weights means to copy them from the host into the parameters. All functions
// are thread safe. Functions that block return -1 if the executor has failed or is closing.
typedef struct tf_executor tf_executor;
typedef struct tf_event tf_event;  // a point in a stream's work

// Events of the streams that Python uses. Without a GPU, Python creates an event here and the stream signals it. On a
// GPU an event is recorded in a CUDA stream.
TF_PUBLIC tf_event* tf_event_new(void);
TF_PUBLIC void tf_event_signal(tf_event* event, int32_t failed);
TF_PUBLIC tf_event* tf_event_record(int32_t device, void* stream);
TF_PUBLIC void tf_event_hold(const tf_event* event, void* stream);  // makes a CUDA stream wait for the event
TF_PUBLIC int32_t tf_event_state(const tf_event* event);            // 1: done, 0: not yet, -1: the work has failed
TF_PUBLIC int32_t tf_event_wait(const tf_event* event);             // blocks; returns 1 or -1, as tf_event_state
TF_PUBLIC void tf_event_free(tf_event* event);
TF_PUBLIC int32_t tf_has_cuda(void);
// Writes which call of the CUDA driver failed first in this process, and how. Returns 0 if none has failed.
TF_PUBLIC int64_t tf_cuda_failure(char* into, int64_t num_bytes);

// Waits of the executor that a test can switch off, to show that each of them is needed.
enum tf_sync_point {
  TF_GRAD_READY = 1,      // the copy to the host starts after the gradients are complete
  TF_ARRIVED = 2,         // the update starts after the gradients are on the host
  TF_NORMS = 4,           // the clipping decision is read after it is on the host
  TF_WEIGHT_SLOT = 8,     // a weight slot is reused after its weights are sent
  TF_WEIGHT_SENT = 16,    // state from which weights are sent is changed after they are sent
  TF_OLD_WEIGHTS = 32,    // delayed weights are sent after the last use of the old weights
  TF_SENT = 64,           // a block runs after the copies of its weights are queued
  TF_FORWARD = 128,       // a block runs after the copies of its weights are complete
  TF_READERS = 256,       // readers of weights get them after the copies are complete
  TF_FETCH_ROOM = 512,    // fetched weights are copied after the last use of their target memory
  TF_STATE_READ = 1024,   // state changes after a background checkpoint has read it
  TF_PARAMS_READ = 2048,  // parameters change after a background checkpoint has read them
  TF_FETCH_STORED = 4096  // weights that the device has updated are fetched after they are on the host
};

// State or weights in a file (state_file.h). A record is the part of the file with those of one bucket.
typedef struct tf_state_file tf_state_file;
typedef struct tf_file_settings {
  int32_t fd;  // stays open until tf_file_close
  int32_t num_buffers, num_threads;
  int64_t buffer_bytes;  // the size of the largest record
  int64_t
      block_bytes;    // the size of one read or write; as all sizes and offsets, a multiple of the sectors of the disk
  int32_t num_rings;  // number of threads with an io_uring, which share num_threads requests; 0: threads without one
  void* memory;       // of all buffers, which stays there until tf_file_close returns 1; NULL: the file allocates them
} tf_file_settings;
typedef struct tf_file_failure {
  int32_t kind;   // 0: the file works; otherwise the first failure, a tf_file_failure_kind
  int32_t error;  // errno; 0: the end of the file was reached, or no byte could be written
  int64_t offset;
} tf_file_failure;
enum tf_file_failure_kind { TF_FILE_READ = 1, TF_FILE_WRITE = 2, TF_FILE_CHECKSUM = 3 };
typedef struct tf_file_counters {
  int64_t bytes_read, bytes_written;
  int64_t num_updates, num_late;  // uses of records; those whose record was not even being read when they asked
} tf_file_counters;
TF_PUBLIC tf_state_file* tf_file_new(const tf_file_settings* settings);  // NULL: there is too little memory
TF_PUBLIC int32_t tf_file_num_rings(tf_state_file* file);  // 0: threads without an io_uring, also if it is refused
TF_PUBLIC int32_t tf_ring_error(void);                     // 0, or the errno with which the kernel refuses an io_uring
// Ends the threads and frees the buffers. 0: the kernel may still use them, so they stay, as the caller's memory must.
TF_PUBLIC int32_t tf_file_close(tf_state_file* file);
TF_PUBLIC void tf_file_free(tf_state_file* file);
TF_PUBLIC int64_t tf_file_add(tf_state_file* file, int64_t offset, int64_t num_bytes);  // a new record, with zeros
// Waits for the memory with a record, which belongs to the caller until tf_file_release. NULL: the file has failed or
// is closed.
TF_PUBLIC void* tf_file_hold(tf_state_file* file, int64_t record);
TF_PUBLIC void tf_file_release(tf_state_file* file, int64_t record, int32_t is_changed);
// The records that will be used next, in this order. They are read ahead, instead of those that followed before.
TF_PUBLIC void tf_file_expect(tf_state_file* file, const int64_t* records, int64_t num_records);
TF_PUBLIC int32_t tf_file_flush(tf_state_file* file);  // waits until all records are written; 0: it failed or is closed
TF_PUBLIC void tf_file_failed(tf_state_file* file, tf_file_failure* failure);
TF_PUBLIC void tf_file_count(tf_state_file* file, tf_file_counters* counters);

typedef struct tf_settings {
  int32_t device;         // CUDA device; -1: no GPU, streams are threads
  int32_t holds_on_host;  // gradients wait for the clipping decision in host slots and not on the device
  int32_t sums_on_host;   // gradients of several backwards are summed on the host
  int32_t is_external;    // the caller makes the updates with an optimizer in Python (tf_next_update)
  int64_t slot_bytes;
  int32_t num_slots, num_weight_slots;
  tf_state_file* file;     // NULL: all state is in memory
  tf_state_file* weights;  // NULL: no weights that blocks fetch are on the disk
} tf_settings;

typedef struct tf_slice {
  int64_t offset, numel, first_index;  // offset in the bucket; first_index in the parameter
  void* target;                        // address of the weights on the device; NULL: they are not sent
  int32_t group;                       // param group, as in tf_hyper
  uint32_t param;
} tf_slice;

typedef struct tf_bucket {
  int64_t numel;
  int64_t layout;  // buckets with equal layouts can exchange stores
  const tf_slice* slices;
  int64_t* steps;  // number of updates of each slice: Python owns the memory, and the executor writes the counts
  int32_t num_slices;
  int32_t type;  // dtype of gradients and weights
  int32_t rule, format, master_kind;
  int32_t is_shared;         // ranks share the bucket: its weights are complete when those of all ranks are gathered
  int32_t has_weight_slots;  // new weights are written to a slot; otherwise they are sent from the state
  int64_t weight_record;     // new weights are written to this record of tf_settings.weights; -1: they are not
} tf_bucket;

typedef struct tf_pointers {  // buffers of one slice in a store; NULL if it has no such buffer
  void *weight, *master, *state[2];
  float* scale[2];
} tf_pointers;

typedef struct tf_job {
  int64_t number;
  double scale;        // scale of the gradients
  double max_norm;     // NaN: gradients are not clipped
  int32_t skips;       // a step is skipped if its gradients are not finite
  int32_t has_limits;  // updates wait for the decision
  int32_t is_delayed;  // weights are sent with the next step
  int32_t is_part;     // gradients are only summed, without an update
  int32_t runs_ahead;  // updates may be written to speculative stores before the decision
} tf_job;

typedef struct tf_hyper {  // scalars of the rule for update number `step` of the slices in a param group
  int64_t step;
  int32_t group;
  float sign;  // -1: maximise
  float hyper[7];
} tf_hyper;

typedef struct tf_source {  // gradients on the device, and their position in the bucket
  const void* from;
  int64_t offset, numel;
} tf_source;

typedef struct tf_decision {
  double norm, factor;
  int32_t skip, clipped;
  int32_t num_ahead;    // updates before the decision
  int32_t num_dropped;  // number of these that were discarded
  int32_t num_waiting;  // updates that have waited for the decision
} tf_decision;

typedef struct tf_update_task {  // an update that the caller makes
  int64_t task;
  int64_t bucket;
  double factor;
  void* grads;
  void* weight_slot;  // NULL: tf_finish_update gives the address of the weights
} tf_update_task;

typedef struct tf_fetch_item {
  int64_t bucket;  // the copy waits for the updates of this bucket; -1: the weights are never updated
  int64_t record;  // of tf_settings.weights; -1: the weights are in memory, at `from` or in the state of the bucket
  const void* from;
  void* into;
  int64_t num_bytes;
} tf_fetch_item;

typedef struct tf_counters {
  double busy_s;
  int64_t bytes_out, bytes_back, bytes_fetched;
  int64_t num_slots, num_weight_slots, num_unlocked;
  int64_t num_aside;  // updates that have left the old store to a background checkpoint
} tf_counters;

typedef struct tf_span {
  int32_t kind, bucket;
  double start_s, end_s;
} tf_span;
enum tf_span_kind {
  TF_SPAN_OUT = 0,
  TF_SPAN_IN = 1,
  TF_SPAN_UPDATE = 2,
  TF_SPAN_AHEAD = 3,
  TF_SPAN_SUM = 4,
  TF_SPAN_DECISION = 5,
  TF_SPAN_FETCH = 6,
  TF_SPAN_MOVER = 7,  // the mover has held the lock for long: the driver or the scheduler has stopped it
  TF_SPAN_LOCK = 8    // the worker has waited for the lock for long
};
// TF_STREAM_ORDERS is not a stream: the thread that calls the driver sleeps before each call.
enum tf_stream_kind { TF_STREAM_OUT = 0, TF_STREAM_IN = 1, TF_STREAM_FETCH = 2, TF_STREAM_ORDERS = 3 };

TF_PUBLIC tf_executor* tf_executor_new(const tf_settings* settings);  // NULL if there is no such device
TF_PUBLIC void tf_executor_close(tf_executor* executor);              // ends threads and streams; state is not lost
// Call it after tf_executor_close, when no caller makes an update.
TF_PUBLIC void tf_executor_free_slots(tf_executor* executor);
TF_PUBLIC void tf_executor_free(tf_executor* executor);
TF_PUBLIC void tf_executor_fail(tf_executor* executor);      // all waiting calls return -1
TF_PUBLIC int32_t tf_executor_state(tf_executor* executor);  // 0: works, 1: a stream has failed, 2: tf_executor_fail
TF_PUBLIC void tf_executor_disable(tf_executor* executor, int32_t sync_points);
TF_PUBLIC void tf_executor_delay(tf_executor* executor, int32_t stream, double seconds);
TF_PUBLIC void tf_executor_counters(tf_executor* executor, tf_counters* counters);
TF_PUBLIC void tf_executor_record_spans(tf_executor* executor, int32_t enabled);
// Returns the number of spans that were written to `spans`, at most max_spans. `anchor`: a CUDA event that was recorded
// at the time anchor_s.
TF_PUBLIC int64_t tf_executor_spans(tf_executor* executor, void* anchor, double anchor_s, tf_span* spans,
                                    int64_t max_spans);
// Changes the numbers of slots, and whether the host sums gradients. Frees surplus weight slots unless
// keeps_weight_slots. Call it between steps.
TF_PUBLIC void tf_executor_resize(tf_executor* executor, int32_t num_slots, int32_t num_weight_slots,
                                  int32_t sums_on_host, int32_t keeps_weight_slots);
TF_PUBLIC void tf_executor_add_weight_slots(tf_executor* executor, int32_t num_more);

// `record`: the part of the file with the store, as if it were in memory at the address `base`; -1: it is in memory.
// `keeps_weights`: only the weights are in memory, or the master if there are no separate weights.
TF_PUBLIC int64_t tf_store_new(tf_executor* executor, const tf_pointers* pointers, int64_t num_slices, int64_t record,
                               int64_t base, int32_t keeps_weights);
TF_PUBLIC void tf_store_free(tf_executor* executor, int64_t store);
TF_PUBLIC void tf_store_add_speculative(tf_executor* executor, int64_t layout, int64_t store);
TF_PUBLIC int64_t tf_store_take_speculative(tf_executor* executor, int64_t layout);  // -1: there is none
// Writes the buckets for which a speculative store was missing since the last call. Returns their number, at most
// max_buckets.
TF_PUBLIC int64_t tf_store_missing_speculative(tf_executor* executor, int64_t* buckets, int64_t max_buckets);

TF_PUBLIC void tf_bucket_set(tf_executor* executor, int64_t bucket, const tf_bucket* spec, int64_t store);
TF_PUBLIC int64_t tf_bucket_store(tf_executor* executor, int64_t bucket);
TF_PUBLIC void tf_bucket_set_deadline(tf_executor* executor, int64_t bucket, int64_t deadline);
TF_PUBLIC void tf_bucket_set_total(tf_executor* executor, int64_t bucket, float* total);
TF_PUBLIC int64_t tf_bucket_added(tf_executor* executor, int64_t bucket, uint8_t* slices);  // slices in the total
// Writes the slices whose weights were sent since the last call. Returns their number.
TF_PUBLIC int64_t tf_bucket_take_sent(tf_executor* executor, int64_t bucket, uint8_t* slices);
TF_PUBLIC void tf_buckets_set_due(tf_executor* executor, const int64_t* buckets, int64_t num_buckets,
                                  int64_t job_number);
TF_PUBLIC int64_t tf_bucket_due(tf_executor* executor, int64_t bucket);
TF_PUBLIC int64_t tf_bucket_shown(tf_executor* executor, int64_t bucket);
// The caller has queued work on the device that applies a job to the state.
TF_PUBLIC void tf_bucket_note_updated(tf_executor* executor, int64_t bucket, int64_t job_number);
// The state of a bucket on the device includes a job whose weights have not been sent yet.
TF_PUBLIC void tf_bucket_set_unsent(tf_executor* executor, int64_t bucket, int64_t job_number);
TF_PUBLIC void tf_bucket_note_sent(tf_executor* executor, int64_t bucket, int64_t job_number, const tf_event* event);
TF_PUBLIC void tf_bucket_note_published(tf_executor* executor, int64_t bucket, int64_t job_number,
                                        const tf_event* event);
// The end of the last copy of a bucket's weights, and the end of the last copy of the weights from all ranks. NULL: no
// copy is in progress.
TF_PUBLIC tf_event* tf_bucket_weights_copied_event(tf_executor* executor, int64_t bucket);
TF_PUBLIC tf_event* tf_bucket_published_event(tf_executor* executor, int64_t bucket);
// What a background checkpoint still reads of a bucket (`parts`, a sum of tf_saved). The first call that includes
// TF_SAVED_STATE keeps the present store for the checkpoint until a call without it: updates write to another store.
TF_PUBLIC void tf_bucket_freeze(tf_executor* executor, int64_t bucket, int32_t parts);
enum tf_saved { TF_SAVED_STATE = 1, TF_SAVED_PARAMS = 2 };
// Waits for buckets that cannot change before the checkpoint has read or copied them. Writes them, and returns their
// number, at most max_buckets.
TF_PUBLIC int64_t tf_wanted(tf_executor* executor, double timeout_s, int64_t* buckets, int64_t max_buckets);

TF_PUBLIC int64_t tf_job_new(tf_executor* executor, const tf_job* spec);
TF_PUBLIC void tf_job_free(tf_executor* executor, int64_t job);
TF_PUBLIC void tf_job_add_hypers(tf_executor* executor, int64_t job, const tf_hyper* rows, int64_t num_rows);
// Submits the task of a bucket whose gradients are complete after `ready`. `present`: one byte per slice, or NULL for
// all slices.
TF_PUBLIC int64_t tf_submit(tf_executor* executor, int64_t job, int64_t bucket, const tf_source* sources,
                            int64_t num_sources, const uint8_t* present, const tf_event* ready, int32_t has_flat,
                            int32_t is_held);
// Submits a task that has only gradients of earlier backwards.
TF_PUBLIC int64_t tf_submit_sum(tf_executor* executor, int64_t job, int64_t bucket);
// Sets which parameters have a gradient on any rank.
TF_PUBLIC void tf_agree(tf_executor* executor, int64_t job, const uint8_t* params);
// Closes a job whose tasks are all submitted. After `event`, `decision` contains the clipping decision (norm, factor,
// skip).
TF_PUBLIC void tf_job_close(tf_executor* executor, int64_t job, const double* decision, const tf_event* event);
// As tf_job_close, but the executor computes the decision from the norms of all buckets, after all sums and `event`.
TF_PUBLIC void tf_job_close_sums(tf_executor* executor, int64_t job, double* norms, int64_t num_norms,
                                 const tf_event* event);
TF_PUBLIC void tf_job_set_norms(tf_executor* executor, int64_t job, double* norms);
// As tf_job_close, but the caller gives the decision.
TF_PUBLIC void tf_job_decide(tf_executor* executor, int64_t job, double norm, double factor, int32_t skip,
                             int32_t clipped);
TF_PUBLIC void tf_job_drop(tf_executor* executor, int64_t job);  // discards a job that is not closed yet
TF_PUBLIC void tf_job_release(tf_executor* executor, int64_t job, const tf_event* after);
TF_PUBLIC int32_t tf_job_decision(tf_executor* executor, int64_t job, tf_decision* decision);  // 1 if it is known
TF_PUBLIC int32_t tf_job_is_done(tf_executor* executor, int64_t job);
TF_PUBLIC int32_t tf_job_wait_decision(tf_executor* executor, int64_t job);
TF_PUBLIC int32_t tf_job_wait_done(tf_executor* executor, int64_t job);
TF_PUBLIC int32_t tf_job_wait_summed(tf_executor* executor, int64_t job);
TF_PUBLIC int32_t tf_wait_sums(tf_executor* executor);  // blocks until the gradients of all tasks are in the totals
TF_PUBLIC void tf_forget_sums(tf_executor* executor);
// Makes a task for new weights that are in the state already. They are sent when their job is released.
TF_PUBLIC int64_t tf_hold_back(tf_executor* executor, int64_t job, int64_t bucket);
TF_PUBLIC int64_t tf_take_unsent(tf_executor* executor, int64_t bucket);  // discards such a task; -1: there is none
TF_PUBLIC void tf_reset(tf_executor* executor, int64_t job_number);  // sets the job number when no task is in progress

// Writes the tasks whose gradients the executor does not need any more. Each event marks the end of the last copy of
// the gradients; NULL: it has ended. Returns the number of tasks, at most max_tasks.
TF_PUBLIC int64_t tf_released(tf_executor* executor, int64_t* tasks, tf_event** events, int64_t max_tasks);
// Whether the executor will release more tasks without an action of the caller.
TF_PUBLIC int32_t tf_will_release(tf_executor* executor);
TF_PUBLIC int32_t tf_wait_released(tf_executor* executor, double timeout_s);
// Waits for the gradients of a task on the host, and returns their address; NULL: they are not on the host.
TF_PUBLIC const void* tf_task_grads(tf_executor* executor, int64_t task);

// Blocks until the copies of all due weights of these buckets are queued. Then it makes `streams` wait for the copies.
// If there are no streams, the caller waits for the copies. Returns the seconds until the copies were queued, or -1 if
// the executor has failed or is closing.
TF_PUBLIC double tf_hold(tf_executor* executor, const int64_t* buckets, int64_t num_buckets, void* const* streams,
                         int64_t num_streams);
TF_PUBLIC int32_t tf_wait_shown(tf_executor* executor, const int64_t* buckets, int64_t num_buckets);
TF_PUBLIC int32_t tf_wait_weights(tf_executor* executor, const int64_t* buckets, int64_t num_buckets);
// Returns 0 after the timeout.
TF_PUBLIC int32_t tf_wait_sent(tf_executor* executor, int64_t bucket, int64_t job_number, double timeout_s);

TF_PUBLIC int64_t tf_fetch(tf_executor* executor, const tf_fetch_item* items, int64_t num_items, const tf_event* after);
// Blocks until the fetch is queued. Returns the event at its end.
TF_PUBLIC tf_event* tf_fetch_wait(tf_executor* executor, int64_t fetch);

// For an optimizer in Python: returns 1 and the next update, or 0 after the timeout.
TF_PUBLIC int32_t tf_next_update(tf_executor* executor, double timeout_s, tf_update_task* task, uint8_t* present);
TF_PUBLIC void tf_finish_update(tf_executor* executor, int64_t task, void* const* weights);

// The CRC-32 of zlib. `crc`: that of the bytes before, or 0.
TF_PUBLIC uint32_t tf_crc32(uint32_t crc, const void* data, int64_t num_bytes);

typedef struct {
  const void* data;   // values, or upper halves (16 bits) of fp32 values
  const void* lower;  // lower halves (16 bits), or null
  int64_t num_bytes;  // of the values; of halves: of the joined values
  uint32_t crc32;     // result: the checksum of the values
} tf_part;

// Copies the values of all parts one after the other to `into`, by the calling thread alone. If `into` is null, only
// their checksums are computed.
TF_PUBLIC void tf_gather(void* into, tf_part* parts, int64_t num_parts);

// Asks the system for huge pages for a buffer that has not been written yet. Never fails.
TF_PUBLIC void tf_advise_huge(void* buffer, int64_t num_bytes);

#ifdef __cplusplus
}
#endif
