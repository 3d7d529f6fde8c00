// SPDX-License-Identifier: Apache-2.0
// The io_uring of a thread (uring.h), without liburing.
//
// The interface of the kernel is declared here and not taken from <linux/io_uring.h>, so that a library that was built
// with old headers, as those of manylinux images, uses the rings of a newer kernel. The interface is the same on all
// architectures and does not change.
#include "uring.h"

#include <errno.h>

#ifdef __linux__
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tf {
namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // system calls
constexpr uint32_t kRegisterProbe = 8;
constexpr uint8_t kRead = 22, kWrite = 23;           // operations
constexpr uint32_t kGetEvents = 1;                   // flag of kEnter
constexpr uint32_t kOneMap = 1, kNoDrop = 2;         // features: one mapping has both rings; no result is lost
constexpr uint16_t kSupported = 1;                   // flag of an operation in a probe
constexpr int64_t kMost = 1 << 30;                   // bytes of a request; of more the kernel moves a part
constexpr off_t kRings = 0, kRequests = 0x10000000;  // offsets of mappings

struct SubmitOffsets {
  uint32_t head, tail, mask, num_entries, flags, num_dropped, array, reserved;
  uint64_t address;
};
struct DoneOffsets {
  uint32_t head, tail, mask, num_entries, num_overflown, entries, flags, reserved;
  uint64_t address;
};
struct Params {
  uint32_t num_submit, num_done, flags, cpu, idle, features, other_fd, reserved[3];
  SubmitOffsets submit;
  DoneOffsets done;
};
struct Entry {
  uint8_t operation, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset, address;
  uint32_t num_bytes, more_flags;
  uint64_t tag, others[3];
};
struct DoneEntry {
  uint64_t tag;
  int32_t result;
  uint32_t flags;
};
struct Probe {
  uint8_t last, num_operations;
  uint16_t reserved;
  uint32_t more[3];
  struct {
    uint8_t operation, reserved;
    uint16_t flags;
    uint32_t more;
  } operations[kWrite + 1];
};
static_assert(sizeof(Params) == 120 && sizeof(Entry) == 64 && sizeof(DoneEntry) == 16 && sizeof(Probe) == 16 + 8 * 24,
              "as in the kernel");

template <typename T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

int32_t Ring::open(int32_t depth) {
  Params params;
  memset(&params, 0, sizeof params);
  fd_ = static_cast<int>(syscall(kSetup, depth, &params));
  if (fd_ < 0) return errno;
  Probe probe;
  memset(&probe, 0, sizeof probe);
  bool is_probed = syscall(kRegister, fd_, kRegisterProbe, &probe, kWrite + 1) == 0;
  bool works = is_probed && (params.features & kOneMap) && (params.features & kNoDrop);
  works = works && (probe.operations[kRead].flags & probe.operations[kWrite].flags & kSupported);
  if (!works) {
    close();
    return ENOSYS;
  }
  size_t submit_end = params.submit.array + params.num_submit * sizeof(uint32_t);
  size_t done_end = params.done.entries + params.num_done * sizeof(DoneEntry);
  rings_bytes_ = submit_end > done_end ? submit_end : done_end;
  requests_bytes_ = params.num_submit * sizeof(Entry);
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_POPULATE;
  rings_ = mmap(nullptr, rings_bytes_, kProtection, kFlags, fd_, kRings);
  requests_ = mmap(nullptr, requests_bytes_, kProtection, kFlags, fd_, kRequests);
  if (rings_ == MAP_FAILED || requests_ == MAP_FAILED) {
    int32_t error = errno;
    close();
    return error;
  }
  // A forked process must not touch the rings of its parent.
  madvise(rings_, rings_bytes_, MADV_DONTFORK);
  madvise(requests_, requests_bytes_, MADV_DONTFORK);
  submit_tail_ = at<uint32_t>(rings_, params.submit.tail);
  submit_array_ = at<uint32_t>(rings_, params.submit.array);
  submit_mask_ = *at<uint32_t>(rings_, params.submit.mask);
  done_head_ = at<uint32_t>(rings_, params.done.head);
  done_tail_ = at<uint32_t>(rings_, params.done.tail);
  done_mask_ = *at<uint32_t>(rings_, params.done.mask);
  done_ = at<DoneEntry>(rings_, params.done.entries);
  return 0;
}

void Ring::close() {
  if (rings_ && rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
  if (requests_ && requests_ != MAP_FAILED) munmap(requests_, requests_bytes_);
  if (fd_ >= 0) ::close(fd_);
  rings_ = requests_ = nullptr;
  fd_ = -1;
}

int32_t Ring::submit(bool is_write, int fd, void* memory, int64_t num_bytes, int64_t offset, uint64_t tag) {
  uint32_t tail = *submit_tail_, slot = tail & submit_mask_;  // only this thread writes the tail
  Entry* entry = static_cast<Entry*>(requests_) + slot;
  memset(entry, 0, sizeof *entry);
  entry->operation = is_write ? kWrite : kRead;
  entry->fd = fd;
  entry->offset = static_cast<uint64_t>(offset);
  entry->address = reinterpret_cast<uintptr_t>(memory);
  entry->num_bytes = static_cast<uint32_t>(num_bytes < kMost ? num_bytes : kMost);
  entry->tag = tag;
  submit_array_[slot] = slot;
  __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);  // the kernel sees the entry before the tail
  return enter(1, 0);
}

int32_t Ring::next(Done* found) {
  uint32_t head = *done_head_;  // only this thread writes the head
  while (__atomic_load_n(done_tail_, __ATOMIC_ACQUIRE) == head)
    if (int32_t error = enter(0, 1)) return error;
  const DoneEntry& entry = static_cast<DoneEntry*>(done_)[head & done_mask_];
  *found = {entry.tag, entry.result};
  __atomic_store_n(done_head_, head + 1, __ATOMIC_RELEASE);  // the kernel may reuse the entry
  return 0;
}

// EAGAIN: the kernel has no memory for a request at this moment. There are never more requests than results have room.
int32_t Ring::enter(uint32_t num_submitted, uint32_t num_wanted) {
  for (;;) {
    long found = syscall(kEnter, fd_, num_submitted, num_wanted, num_wanted ? kGetEvents : 0, nullptr, 0);
    if (found > 0 || (found == 0 && num_submitted == 0)) return 0;
    if (found < 0 && errno == EINTR) continue;
    if (found < 0 && errno != EAGAIN && errno != EBUSY) return errno;
    usleep(100);
  }
}

}  // namespace tf

#else

namespace tf {

int32_t Ring::open(int32_t) { return ENOSYS; }
void Ring::close() {}
int32_t Ring::submit(bool, int, void*, int64_t, int64_t, uint64_t) { return ENOSYS; }
int32_t Ring::next(Done*) { return ENOSYS; }

}  // namespace tf

#endif
