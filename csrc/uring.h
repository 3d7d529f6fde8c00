// SPDX-License-Identifier: Apache-2.0
// One io_uring of Linux: a queue of reads and writes that the kernel makes while the thread that owns the queue goes
// on.
//
// There are no threads here, and one thread at a time may use a ring. Only what state_file.cpp needs is there. Requests
// are submitted one by one, because each is large. Files and buffers are not registered with the kernel: all system
// time of a ring was 13 us for a block of 1 MiB, of which registering could save only a part, and registered buffers
// count as locked memory, of which users and containers may have little.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tf {

class Ring {
 public:
  struct Done {
    uint64_t tag;
    int32_t result;  // bytes that were read or written, or a negative errno
  };

  Ring() = default;
  Ring(const Ring&) = delete;
  ~Ring() { close(); }
  // Room for `depth` requests at the same time. Returns 0, or the errno with which the kernel refuses. ENOSYS: it is
  // older than Linux 5.6, or no Linux.
  int32_t open(int32_t depth);
  void close();
  // Adds a request and submits it. Its memory and file must stay until `next` has returned its tag. Returns 0 or errno:
  // then the kernel has not taken the request, and the ring must be used for nothing but `next`.
  int32_t submit(bool is_write, int fd, void* at, int64_t num_bytes, int64_t offset, uint64_t tag);
  // Waits until a submitted request has ended. At least one must not have ended. Returns 0 or errno, as `submit`.
  int32_t next(Done* found);

 private:
  int32_t enter(uint32_t num_submitted, uint32_t num_wanted);

  int fd_ = -1;
  void* rings_ = nullptr;  // both rings, shared with the kernel
  void* requests_ = nullptr;
  size_t rings_bytes_ = 0, requests_bytes_ = 0;
  uint32_t* submit_tail_ = nullptr;
  uint32_t* submit_array_ = nullptr;
  uint32_t* done_head_ = nullptr;
  uint32_t* done_tail_ = nullptr;
  void* done_ = nullptr;
  uint32_t submit_mask_ = 0, done_mask_ = 0;
};

}  // namespace tf
