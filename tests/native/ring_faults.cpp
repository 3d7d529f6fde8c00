// SPDX-License-Identifier: Apache-2.0
// The file of state (csrc/state_file.h) over a ring that does what kernels rarely do. This file has a `Ring` of its
// own: it ends requests in any order and as late as possible, moves a part of a block, or does not begin.
// tests/unit/test_ring.py compiles and runs it: `ring_faults FILE rare` compares what is read with what was written,
// and `ring_faults FILE FAULT` expects that the fault is the error of the file. What the ring has not ended when the
// file is closed is moved then, for which the buffers must still be there.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/state_file.h"

namespace {

struct Running {
  bool is_write;
  int fd;
  void* at;
  int64_t num_bytes, offset;
  tf::Ring::Done done;  // its result, if it is negative
};

std::mutex mutex;
std::map<tf::Ring*, std::vector<Running>> running;
std::mt19937 numbers(1);
std::string fault;
int num_requests = 0, num_rare = 0;
constexpr int kFirstFault = 40;

bool fails(const char* name) { return fault == name && num_requests >= kFirstFault; }

void run(Running& one) {
  if (one.done.result < 0) return;
  ssize_t moved = one.is_write ? pwrite(one.fd, one.at, one.num_bytes, one.offset)
                               : pread(one.fd, one.at, one.num_bytes, one.offset);
  one.done.result = static_cast<int32_t>(moved < 0 ? -errno : moved);
}

}  // namespace

namespace tf {

void name_thread(const char*) {}

int32_t Ring::open(int32_t) { return 0; }
void Ring::close() {}

int32_t Ring::submit(bool is_write, int fd, void* at, int64_t num_bytes, int64_t offset, uint64_t tag) {
  std::lock_guard<std::mutex> lock(mutex);
  ++num_requests;
  if (fails("submit") && !running[this].empty()) return EPERM;
  int choice = static_cast<int>(numbers() % 5);
  if (choice < 3) ++num_rare;
  int32_t result = fails("result") ? -EIO : choice == 0 ? -EAGAIN : choice == 1 ? -EINTR : 0;
  if (choice == 2) num_bytes = num_bytes / 3 + 1;
  running[this].push_back({is_write, fd, at, num_bytes, offset, {tag, result}});
  return 0;
}

int32_t Ring::next(Done* found) {
  std::lock_guard<std::mutex> lock(mutex);
  if (fails("next")) return EBADF;
  std::vector<Running>& all = running[this];
  std::swap(all[numbers() % all.size()], all.back());
  run(all.back());
  *found = all.back().done;
  all.pop_back();
  return 0;
}

}  // namespace tf

extern "C" void tf_advise_huge(void*, int64_t) {}

int main(int, char** arguments) {
  fault = arguments[2];
  constexpr int64_t kRecords = 6, kBytes = 5 * 4096, kBlock = 2 * 4096;
  tf_file_settings settings{};
  settings.fd = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  settings.num_buffers = 3;
  settings.num_threads = 8;
  settings.buffer_bytes = kBytes;
  settings.block_bytes = kBlock;
  settings.num_rings = 2;
  if (ftruncate(settings.fd, kRecords * kBytes)) return 2;
  tf::StateFile file(settings);
  unsigned char wanted[kRecords] = {};
  for (int64_t i = 0; i < kRecords; ++i) file.add(i * kBytes, kBytes);
  std::mt19937 choices(2);
  for (int step = 0; step < 2000; ++step) {
    int64_t record = choices() % kRecords;
    char* held = file.hold(record);
    if (!held) break;
    for (int64_t i = 0; i < kBytes; ++i) {
      if (static_cast<unsigned char>(held[i]) == wanted[record]) continue;
      printf("record %d has other bytes\n", static_cast<int>(record));
      return 1;
    }
    bool is_changed = choices() % 2;
    if (is_changed) memset(held, wanted[record] = static_cast<unsigned char>(choices()), kBytes);
    file.release(record, is_changed);
  }
  bool is_flushed = file.flush();
  tf_file_failure failure = file.failure();
  bool is_done = file.close();
  for (auto& ring : running) {
    for (Running& one : ring.second) {
      run(one);
      if (is_done || one.done.result == -EFAULT) {
        printf("a buffer was freed before its request had ended\n");
        return 1;
      }
    }
  }
  if (is_done != (fault != "next")) return 1;
  if (fault != "rare") {
    printf("%s\n", failure.kind == TF_FILE_CHECKSUM ? "checksum" : strerror(failure.error));
    return is_flushed ? 1 : 0;
  }
  printf("%s\n", num_rare > 500 && is_flushed && !failure.kind ? "works" : "fails");
  return 0;
}
