// SPDX-License-Identifier: Apache-2.0
// Reads and writes the state of buckets in a file (state_file.h).
#include "state_file.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "streams.h"

namespace tf {

StateFile::StateFile(const tf_file_settings& settings) : settings_(settings) {
  for (int32_t i = 0; i < settings.num_buffers; ++i) {
    auto made = std::make_unique<Buffer>();
    if (settings.memory) {
      made->raw = static_cast<char*>(settings.memory) + i * settings.buffer_bytes;
      buffers_.push_back(std::move(made));
      continue;
    }
    void* raw = mmap(nullptr, settings.buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
      has_memory_ = false;
      return;
    }
    made->raw = static_cast<char*>(raw);
    tf_advise_huge(raw, settings.buffer_bytes);
    buffers_.push_back(std::move(made));
  }
  share_with_forks(false);
  for (int32_t i = 0; i < settings.num_rings; ++i) {
    rings_.push_back(std::make_unique<Ring>());
    if (rings_.back()->open(depth())) {
      rings_.clear();
      break;
    }
  }
  for (auto& ring : rings_) threads_.emplace_back([this, &ring] { ring_loop(*ring); });
  for (int32_t i = 0; rings_.empty() && i < settings.num_threads; ++i) threads_.emplace_back([this] { work_loop(); });
}

// A page that a fork copies while the disk writes to it would lose what the disk writes, in kernels before Linux 6.5.
void StateFile::share_with_forks(bool is_shared) {
#ifdef MADV_DONTFORK
  for (auto& buffer : buffers_) madvise(buffer->raw, settings_.buffer_bytes, is_shared ? MADV_DOFORK : MADV_DONTFORK);
#endif
}

bool StateFile::close() {
  {
    Lock lock(mutex_);
    is_closing_ = true;
  }
  work_.notify_all();
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return num_users_ == 0; });
  if (is_in_use_) return false;
  share_with_forks(true);  // the caller uses its memory for other things from now on
  for (auto& buffer : buffers_)
    if (!settings_.memory) munmap(buffer->raw, settings_.buffer_bytes);
  buffers_.clear();
  return true;
}

void StateFile::listen(std::function<void()> listener) {
  std::lock_guard<std::mutex> lock(listener_mutex_);
  listener_ = std::move(listener);
}

int64_t StateFile::add(int64_t offset, int64_t num_bytes) {
  Lock lock(mutex_);
  auto made = std::make_unique<Record>();
  made->offset = offset;
  made->num_bytes = num_bytes;
  made->checksum.resize(num_blocks(*made));
  records_.push_back(std::move(made));
  return static_cast<int64_t>(records_.size()) - 1;
}

char* StateFile::try_hold(int64_t index) {
  Lock lock(mutex_);
  char* found = try_take(index);
  if (!found) return nullptr;
  if (last_ >= 0) records_[last_]->next = index;
  last_ = index;
  start_reads();
  return found;
}

char* StateFile::try_read(int64_t index) {
  Lock lock(mutex_);
  return try_take(index);
}

char* StateFile::try_overwrite(int64_t index) {
  Lock lock(mutex_);
  if (is_over()) return nullptr;
  Record& record = *records_[index];
  if (!record.buffer) {
    Buffer* buffer = free_buffer(kAhead);
    if (!buffer) {
      start_write_of_any();
      return nullptr;
    }
    buffer->record = index;
    record.buffer = buffer;
  } else if (record.buffer->phase != Phase::kReady) {
    return nullptr;
  }
  take(*record.buffer);
  return record.buffer->raw;
}

void StateFile::expect(const int64_t* records, int64_t num_records) {
  Lock lock(mutex_);
  expected_.assign(records, records + num_records);
  if (!is_over()) start_reads();
}

// The buffer with the record, with `mutex_` held; otherwise it will be read.
char* StateFile::try_take(int64_t index) {
  if (is_over()) return nullptr;
  Buffer* buffer = records_[index]->buffer;
  if (!buffer) {
    if (ask(index, false)) counters_.num_late += 1;
    start_reads();
    return nullptr;
  }
  if (buffer->phase != Phase::kReady) {
    if (buffer->phase == Phase::kReading) buffer->use = kAsked;
    return nullptr;
  }
  take(*buffer);
  counters_.num_updates += 1;
  return buffer->raw;
}

char* StateFile::hold(int64_t index) {
  Lock lock(mutex_);
  ++num_users_;
  ++num_waiting_;
  ++records_[index]->num_waiting;
  Buffer* found = nullptr;
  while (!is_over()) {
    found = records_[index]->buffer;
    if (found && found->phase == Phase::kReady) break;
    if (!found) {
      ask(index, true);
      start_reads();
    }
    found = nullptr;
    changed_.wait(lock);
  }
  --num_waiting_;
  --records_[index]->num_waiting;
  if (is_over()) {
    --num_users_;
    changed_.notify_all();  // `close` may wait for this caller
    return nullptr;
  }
  take(*found);
  return found->raw;
}

void StateFile::take(Buffer& buffer) {
  buffer.phase = Phase::kHeld;
  buffer.use = kUsed;
  buffer.used_at = ++clock_;
}

void StateFile::release(int64_t index, bool is_changed) {
  give(index, is_changed, false);
  Lock lock(mutex_);
  --num_users_;
  changed_.notify_all();
}

void StateFile::release_update(int64_t index, bool is_changed) { give(index, is_changed, true); }

void StateFile::give(int64_t index, bool is_changed, bool is_written_now) {
  Lock lock(mutex_);
  Buffer& buffer = *records_[index]->buffer;
  buffer.phase = Phase::kReady;
  buffer.is_changed |= is_changed;
  if (is_over()) return;
  if (buffer.is_changed && is_written_now) start(buffer, Phase::kWriting);
  start_reads();
  changed_.notify_all();
}

bool StateFile::flush() {
  Lock lock(mutex_);
  ++num_users_;
  changed_.wait(lock, [&] {
    if (is_over()) return true;
    bool is_clean = true;
    for (auto& buffer : buffers_) {
      if (buffer->phase == Phase::kReady && buffer->is_changed) start(*buffer, Phase::kWriting);
      is_clean = is_clean && !buffer->is_changed;
    }
    return is_clean;
  });
  --num_users_;
  changed_.notify_all();
  return !is_over();
}

tf_file_failure StateFile::failure() {
  Lock lock(mutex_);
  return failure_;
}

void StateFile::counters(tf_file_counters* found) {
  Lock lock(mutex_);
  *found = counters_;
}

// Which record is read into which buffer, with `mutex_` held.

// Returns whether the record was not asked for yet.
bool StateFile::ask(int64_t index, bool is_first) {
  auto at = std::find(asked_.begin(), asked_.end(), index);
  bool is_new = at == asked_.end();
  if (!is_new && !is_first) return false;
  if (!is_new) asked_.erase(at);
  if (is_first)
    asked_.push_front(index);
  else
    asked_.push_back(index);
  return is_new;
}

void StateFile::start_reads() {
  while (!asked_.empty()) {
    Record& record = *records_[asked_.front()];
    // Only a caller that blocks may take a buffer from an update that is about to run: it could wait forever otherwise,
    // for example if the step of this update was given up.
    Buffer* buffer = record.buffer ? nullptr : free_buffer(num_waiting_ ? kAsked : kAhead);
    if (!record.buffer && !buffer) {
      start_write_of_any();
      return;
    }
    int64_t index = asked_.front();
    asked_.pop_front();
    if (!buffer) continue;
    buffer->record = index;
    buffer->use = kAsked;
    record.buffer = buffer;
    start(*buffer, Phase::kReading);
  }
  for (int64_t index : expected_)
    if (!read_ahead(index)) return;
  int64_t index = last_;
  for (size_t i = 0; i + 1 < buffers_.size() && index >= 0; ++i) {
    index = records_[index]->next;
    if (index < 0 || index == last_ || !read_ahead(index)) return;
  }
}

// Whether the record is in a buffer, or is read into one now.
bool StateFile::read_ahead(int64_t index) {
  Record& record = *records_[index];
  if (record.buffer) {
    record.buffer->use = std::max(record.buffer->use, kAhead);  // it must stay until it is used
    return true;
  }
  Buffer* buffer = free_buffer(kUsed);
  if (!buffer) return false;
  buffer->record = index;
  buffer->use = kAhead;
  record.buffer = buffer;
  start(*buffer, Phase::kReading);
  return true;
}

// A buffer for another record: one that is not used soon, and of these the one that was used first.
StateFile::Buffer* StateFile::free_buffer(Use highest) {
  Buffer* best = nullptr;
  for (auto& one : buffers_) {
    if (one->phase == Phase::kEmpty) return one.get();
    if (one->phase != Phase::kReady || one->is_changed || one->use > highest) continue;
    if (records_[one->record]->num_waiting) continue;  // otherwise callers would take what others have waited for
    if (!best || std::make_pair(one->use, one->used_at) < std::make_pair(best->use, best->used_at)) best = one.get();
  }
  if (best) {
    records_[best->record]->buffer = nullptr;
    best->phase = Phase::kEmpty;
  }
  return best;
}

// Writes a changed buffer, for a read that waits for a buffer.
void StateFile::start_write_of_any() {
  Buffer* first = nullptr;
  for (auto& one : buffers_) {
    if (one->phase == Phase::kWriting) return;
    bool is_idle = one->phase == Phase::kReady && one->is_changed;
    if (is_idle && (!first || one->used_at < first->used_at)) first = one.get();
  }
  if (first) start(*first, Phase::kWriting);
}

void StateFile::start(Buffer& buffer, Phase phase) {
  buffer.phase = phase;
  buffer.num_left = num_blocks(*records_[buffer.record]);
  for (int64_t i = 0; i < buffer.num_left; ++i) queue_.push_back({&buffer, i, phase == Phase::kWriting});
  work_.notify_all();
}

// The threads.

void StateFile::work_loop() {
  name_thread("twinflow-disk");
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return is_over() || !queue_.empty(); });
    if (is_over()) return wait_for_close(lock);
    Request request = take_work();
    lock.unlock();
    bool works = begin(request) || (move(request) && check(request));
    lock.lock();
    done(request, works, lock);
  }
}

// A thread with a ring. It computes the checksum of a block while the kernel reads and writes others.
void StateFile::ring_loop(Ring& ring) {
  name_thread("twinflow-disk");
  Requests running(depth());
  Lock lock(mutex_);
  for (;;) {
    if (running.is_empty()) work_.wait(lock, [&] { return is_over() || !queue_.empty(); });
    if (running.is_empty() && is_over()) break;
    if (!submit_all(ring, running, lock)) break;
    if (running.is_empty()) continue;
    lock.unlock();
    Ring::Done found{};
    if (int32_t error = ring.next(&found)) {
      fail(TF_FILE_READ, error, 0);
      lock.lock();
      tell(lock);
      break;
    }
    Request request = running.take(found.tag);
    // What the kernel begins now runs beside the checksum of this block.
    lock.lock();
    bool goes_on = submit_all(ring, running, lock);
    lock.unlock();
    bool works = end(request, found.result);
    lock.lock();
    done(request, works, lock);
    if (!goes_on) break;
  }
  lock.unlock();
  bool is_done = end_all(ring, running);
  lock.lock();
  is_in_use_ |= !is_done;
  wait_for_close(lock);
}

// Waits, after an error of the ring, until the kernel uses no buffer any more. False if that cannot be known.
bool StateFile::end_all(Ring& ring, Requests& running) {
  Ring::Done found{};
  while (!running.is_empty()) {
    if (ring.next(&found)) return false;
    running.take(found.tag);
  }
  return true;
}

// Submits as much work as there is and has room. False if the ring takes no more requests: this is an error of the
// file.
bool StateFile::submit_all(Ring& ring, Requests& running, Lock& lock) {
  while (!is_over() && !queue_.empty() && !running.is_full()) {
    Request request = take_work();
    lock.unlock();
    bool is_done = begin(request);
    int32_t error = 0;
    if (!is_done) {
      uint64_t tag = running.add(request);
      error = ring.submit(request.work.is_write, settings_.fd, request.start, request.num_bytes, request.offset, tag);
      if (error) fail(running.take(tag), error);
    }
    lock.lock();
    if (is_done || error) done(request, is_done, lock);
    if (error) return false;
  }
  return true;
}

StateFile::Request StateFile::take_work() {
  Work work = queue_.front();
  queue_.pop_front();
  Record& record = *records_[work.buffer->record];
  int64_t start = work.block * settings_.block_bytes;
  int64_t num_bytes = std::min(settings_.block_bytes, record.num_bytes - start);
  return {work, &record, work.buffer->raw + start, num_bytes, record.offset + start, 0};
}

// The owner of a request calls the next functions, without the lock. They return false after an error.

// Makes what comes before a read or a write. True if the block is ready without the disk.
bool StateFile::begin(const Request& request) {
  bool is_write = request.work.is_write;
  if (is_write) request.record->checksum[request.work.block] = tf_crc32(0, request.start, request.num_bytes);
  if (is_write || request.record->is_written) return false;
  memset(request.start, 0, request.num_bytes);
  return true;
}

// Reads or writes what is left of the block.
bool StateFile::move(Request& request) {
  while (request.num_done < request.num_bytes) {
    char* at = request.start + request.num_done;
    int64_t num_bytes = request.num_bytes - request.num_done, offset = request.offset + request.num_done;
    ssize_t moved = request.work.is_write ? pwrite(settings_.fd, at, num_bytes, offset)
                                          : pread(settings_.fd, at, num_bytes, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      fail(request, moved < 0 ? errno : 0);
      return false;
    }
    request.num_done += moved;
  }
  return true;
}

// The end of a request of a ring. If the kernel has moved a part, or could not begin, which is rare, this thread moves
// the rest.
bool StateFile::end(Request& request, int32_t result) {
  if (result < 0 && result != -EINTR && result != -EAGAIN) {
    fail(request, -result);
    return false;
  }
  request.num_done = std::max(result, 0);
  return move(request) && check(request);
}

bool StateFile::check(const Request& request) {
  if (request.work.is_write) return true;
  if (tf_crc32(0, request.start, request.num_bytes) == request.record->checksum[request.work.block]) return true;
  fail(TF_FILE_CHECKSUM, 0, request.offset);
  return false;
}

void StateFile::fail(const Request& request, int32_t error) {
  fail(request.work.is_write ? TF_FILE_WRITE : TF_FILE_READ, error, request.offset + request.num_done);
}

void StateFile::fail(int32_t kind, int32_t error, int64_t offset) {
  Lock lock(mutex_);
  if (!failure_.kind) failure_ = {kind, error, offset};
  work_.notify_all();
}

// Counts a block that was read or written, with the lock.
void StateFile::done(const Request& request, bool works, Lock& lock) {
  Buffer& buffer = *request.work.buffer;
  if (works && request.work.is_write)
    counters_.bytes_written += request.num_bytes;
  else if (works && request.record->is_written)
    counters_.bytes_read += request.num_bytes;
  if (works && --buffer.num_left > 0) return;
  if (works) {
    if (request.work.is_write) {
      request.record->is_written = true;
      buffer.is_changed = false;
    }
    buffer.phase = Phase::kReady;
    if (!is_over()) start_reads();
  }
  tell(lock);
}

// Releases the lock while others are told that a record was read or written, or of an error.
void StateFile::tell(Lock& lock) {
  lock.unlock();
  changed_.notify_all();
  {
    std::lock_guard<std::mutex> listening(listener_mutex_);
    if (listener_) listener_();
  }
  lock.lock();
}

void StateFile::wait_for_close(Lock& lock) {
  queue_.clear();
  work_.wait(lock, [&] { return is_closing_; });
}

}  // namespace tf

tf_state_file* tf_file_new(const tf_file_settings* settings) {
  auto made = std::make_unique<tf_state_file>(tf_state_file{std::make_shared<tf::StateFile>(*settings)});
  return made->file->has_memory() ? made.release() : nullptr;
}
int32_t tf_file_num_rings(tf_state_file* f) { return f->file->num_rings(); }
int32_t tf_ring_error(void) { return tf::Ring().open(1); }
int32_t tf_file_close(tf_state_file* f) { return f->file->close(); }
void tf_file_free(tf_state_file* f) { delete f; }
int64_t tf_file_add(tf_state_file* f, int64_t offset, int64_t num_bytes) { return f->file->add(offset, num_bytes); }
void* tf_file_hold(tf_state_file* f, int64_t record) { return f->file->hold(record); }
void tf_file_release(tf_state_file* f, int64_t record, int32_t is_changed) {
  f->file->release(record, is_changed != 0);
}
void tf_file_expect(tf_state_file* f, const int64_t* records, int64_t num_records) {
  f->file->expect(records, num_records);
}
int32_t tf_file_flush(tf_state_file* f) { return f->file->flush(); }
void tf_file_failed(tf_state_file* f, tf_file_failure* found) { *found = f->file->failure(); }
void tf_file_count(tf_state_file* f, tf_file_counters* found) { f->file->counters(found); }
