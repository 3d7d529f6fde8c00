// SPDX-License-Identifier: Apache-2.0
// State or weights of buckets in a file, which are read ahead of their use and written back after updates.
//
// A record is the part of the file with the state, or with the weights, of one bucket. A buffer is host memory for one
// record. The threads of this class read records into buffers and write changed buffers back, block by block, around
// the page cache. The checksum of each block is kept in memory when the block is written, and compared when it is read.
//
// There are two kinds of threads, and a file has only one. `num_threads` threads read or write one block at a time.
// Or, with `num_rings`, as many threads have an io_uring each (uring.h), and `num_threads` blocks of all rings together
// are read or written at the same time. Without the kernel's support for rings the file has threads of the first kind.
//
// A buffer is in exactly one phase. Only the owner of the phase moves it to the next phase:
//
//   phase      owner                                   next
//   kEmpty     `start_reads`, with `mutex_` held       kReading
//   kReading   the threads                             kReady
//   kReady     `take`, `start_reads`, `start`           kHeld, kReading (another record), kWriting
//   kHeld      the caller of `hold`, `try_...`         kReady, by `release`
//   kWriting   the threads                             kReady
//
// Every field is read and written under `mutex_`, except the memory of buffers: in kReading and kWriting it belongs to
// the threads, in kHeld to the holder. The checksums of a record belong to the owner of its buffer.
//
// Order of reads: first the records that callers wait for, in the order in which they asked. The other buffers read
// ahead. The updates of a step have the order of the step before, so the successor of each record is known. The order
// in which blocks need their weights is given by `expect`. A buffer that was read and not used yet is given to another
// record only if nothing else is free (`free_buffer`).
//
// The first error of the disk stops everything: no record is read or written any more, and all callers get nullptr.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"
#include "uring.h"

namespace tf {

class StateFile {
 public:
  // `settings.fd` stays open until `close`, and belongs to the caller.
  explicit StateFile(const tf_file_settings& settings);
  ~StateFile() { close(); }
  bool has_memory() const { return has_memory_; }
  int32_t num_rings() const { return static_cast<int32_t>(rings_.size()); }
  // False if the kernel may still use the buffers, because a ring has failed: then their memory must stay as it is.
  bool close();
  // `listener` is called, without a lock, when a record was read or written, and after an error. It must be set before
  // the first `try_hold`, and removed with nullptr before what it refers to is freed.
  void listen(std::function<void()> listener);

  // Records.
  int64_t add(int64_t offset, int64_t num_bytes);
  // The buffer with the record, if it is there; otherwise it will be read. Called for updates, in their order.
  char* try_hold(int64_t record);
  // As `try_hold`, for weights: without notes about the order, which `expect` gives.
  char* try_read(int64_t record);
  // A buffer for the record, if one is free, for a caller that writes all of the record.
  char* try_overwrite(int64_t record);
  void expect(const int64_t* records, int64_t num_records);
  // The buffer with the record. Blocks. nullptr after an error or `close`. A record that was never written has zeros.
  char* hold(int64_t record);
  // Ends a `hold`. `is_changed`: the record will be written back when its buffer is needed.
  void release(int64_t record, bool is_changed);
  // As `release`, after a `try_` function. The update has changed the record, and it is written back at once, or is
  // unchanged.
  void release_update(int64_t record, bool is_changed);
  bool flush();  // waits until all changed records are in the file; false after an error or `close`

  tf_file_failure failure();
  void counters(tf_file_counters* found);

 private:
  enum class Phase { kEmpty, kReading, kReady, kHeld, kWriting };
  enum Use { kUsed, kAhead, kAsked };  // of a buffer in kReady, from the first to the last to be given away
  using Lock = std::unique_lock<std::mutex>;

  struct Buffer {
    char* raw = nullptr;
    Phase phase = Phase::kEmpty;
    int64_t record = -1;
    Use use = kUsed;
    bool is_changed = false;
    int64_t num_left = 0;  // blocks that the threads have not read or written yet
    int64_t used_at = 0;   // for the choice of the buffer that was used first
  };
  struct Record {
    int64_t offset = 0, num_bytes = 0;
    Buffer* buffer = nullptr;
    bool is_written = false;         // it is in the file; otherwise it has zeros
    int32_t num_waiting = 0;         // callers of `hold` that wait for it
    int64_t next = -1;               // the record that was updated after this one
    std::vector<uint32_t> checksum;  // of each block
  };
  struct Work {
    Buffer* buffer;
    int64_t block;
    bool is_write;
  };

  // The read or the write of a block. It belongs to the thread that took the work.
  struct Request {
    Work work;
    Record* record;
    char* start;  // of the block, in the buffer
    int64_t num_bytes;
    int64_t offset;    // of the block, in the file
    int64_t num_done;  // bytes that were moved
  };

  // The requests of a ring. A request's tag is its index.
  class Requests {
   public:
    explicit Requests(int32_t depth) : requests_(depth) {
      for (int32_t i = 0; i < depth; ++i) free_.push_back(i);
    }
    bool is_empty() const { return free_.size() == requests_.size(); }
    bool is_full() const { return free_.empty(); }
    uint64_t add(const Request& request) {
      uint64_t tag = free_.back();
      free_.pop_back();
      requests_[tag] = request;
      return tag;
    }
    Request take(uint64_t tag) {
      free_.push_back(tag);
      return requests_[tag];
    }

   private:
    std::vector<Request> requests_;
    std::vector<uint64_t> free_;
  };

  void share_with_forks(bool is_shared);
  void work_loop();
  void ring_loop(Ring& ring);
  bool submit_all(Ring& ring, Requests& running, Lock& lock);
  bool end_all(Ring& ring, Requests& running);
  Request take_work();
  bool begin(const Request& request);
  bool move(Request& request);
  bool end(Request& request, int32_t result);
  bool check(const Request& request);
  void fail(const Request& request, int32_t error);
  void fail(int32_t kind, int32_t error, int64_t offset);
  void done(const Request& request, bool works, Lock& lock);
  void tell(Lock& lock);
  void wait_for_close(Lock& lock);
  void start_reads();
  Buffer* free_buffer(Use highest);
  void start_write_of_any();
  void give(int64_t record, bool is_changed, bool is_written_now);
  void start(Buffer& buffer, Phase phase);
  bool ask(int64_t record, bool is_first);
  void take(Buffer& buffer);
  char* try_take(int64_t record);
  bool read_ahead(int64_t record);
  int64_t num_blocks(const Record& record) const {
    return (record.num_bytes + settings_.block_bytes - 1) / settings_.block_bytes;
  }
  // Requests of one ring that run at the same time.
  int32_t depth() const {
    return std::max(1, (settings_.num_threads + settings_.num_rings - 1) / std::max(1, settings_.num_rings));
  }
  bool is_over() const { return is_closing_ || failure_.kind; }

  const tf_file_settings settings_;
  bool has_memory_ = true;
  std::mutex mutex_;
  std::condition_variable work_, changed_;  // for the threads; for callers
  std::mutex listener_mutex_;               // held while the listener runs, never together with `mutex_`
  std::function<void()> listener_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Record>> records_;
  std::deque<int64_t> asked_;
  std::vector<int64_t> expected_;
  std::deque<Work> queue_;
  std::vector<std::unique_ptr<Ring>> rings_;
  std::vector<std::thread> threads_;
  int64_t last_ = -1;  // the record of the last update
  int64_t clock_ = 0;
  int32_t num_waiting_ = 0;  // callers of `hold` that wait
  int32_t num_users_ = 0;    // callers in `hold` or `flush`, or between `hold` and `release`
  bool is_closing_ = false;
  bool is_in_use_ = false;  // a ring has failed, and the kernel may use buffers at any time later
  tf_file_failure failure_{};
  tf_file_counters counters_{};
};

}  // namespace tf

struct tf_state_file {
  std::shared_ptr<tf::StateFile> file;
};
