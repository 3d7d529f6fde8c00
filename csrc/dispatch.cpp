// SPDX-License-Identifier: Apache-2.0
// Selects the ISA variant for this CPU, and divides each call of the C ABI into tasks for the pool.
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#if defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_SVE
#define HWCAP_SVE (1 << 22)
#endif
#endif

namespace tf {
namespace {

// Elements of one task, about 0.1 ms of one core: small enough for a balanced load, large enough for a small overhead.
constexpr int64_t kTaskNumel = 16384;

std::vector<const Kernels*> find_variants() {  // the fastest first
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back(&kernels_avx512());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&kernels_avx2());
  found.push_back(&kernels_baseline());
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_SVE) found.push_back(&kernels_sve());
  found.push_back(&kernels_neon());
#else
  found.push_back(&kernels_baseline());
#endif
  return found;
}

const std::vector<const Kernels*>& variants() {
  static const std::vector<const Kernels*> found = find_variants();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  return k ? *k : *variants().front();
}

template <class Function>
void parallel(int64_t num_tasks, const Function& function) {
  run_tasks(
      num_tasks, [](void* context, int64_t task) { (*static_cast<const Function*>(context))(task); },
      const_cast<Function*>(&function));
}

// Runs one task for each of several equal ranges of `numel` elements or bytes. Boundaries are multiples of `step`.
template <class Function>
void parallel_ranges(int64_t numel, int64_t step, const Function& function) {
  parallel((numel + step - 1) / step, [&](int64_t task) {
    const int64_t begin = task * step, end = begin + step < numel ? begin + step : numel;
    function(begin, end);
  });
}

// Runs a kernel over all rows of a packing. A task is a range of blocks of a row.
using PackingKernel = void (*)(const tf_packing& packing, int64_t row, int64_t begin, int64_t end);
void parallel_rows(const tf_packing& p, int64_t num_rows, PackingKernel kernel) {
  const int64_t step = 2 * kTaskNumel / kPackedBlock * kPackedBlock, num_steps = (p.numel + step - 1) / step;
  parallel(num_rows * num_steps, [&](int64_t task) {
    const int64_t begin = task % num_steps * step, end = begin + step < p.numel ? begin + step : p.numel;
    kernel(p, task / num_steps, begin, end);
  });
}

struct Piece {
  int64_t segment, begin, end;
};

// Divides segments into pieces, in order, and finds the first piece of each task. A task is a part of a large segment,
// or many small segments.
void cut(const tf_segment* segments, int64_t num_segments, std::vector<Piece>* pieces, std::vector<int64_t>* starts) {
  int64_t room = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    for (int64_t begin = 0; begin < segments[s].numel;) {
      if (room < kTile) {
        starts->push_back((int64_t)pieces->size());
        room = kTaskNumel;
      }
      const int64_t left = segments[s].numel - begin, cut_at = room / kTile * kTile;
      const int64_t count = left < cut_at ? left : cut_at;
      pieces->push_back({s, begin, begin + count});
      begin += count;
      room -= count;
    }
  }
  starts->push_back((int64_t)pieces->size());
}

}  // namespace
}  // namespace tf

using namespace tf;

extern "C" {

void tf_update(const tf_segment* segments, int64_t num_segments) {
  std::vector<Piece> pieces;
  std::vector<int64_t> starts;
  cut(segments, num_segments, &pieces, &starts);
  const Kernels& k = kernels();
  parallel((int64_t)starts.size() - 1, [&](int64_t task) {
    for (int64_t i = starts[(size_t)task]; i < starts[(size_t)task + 1]; ++i) {
      const Piece& piece = pieces[(size_t)i];
      k.update(segments[piece.segment], piece.begin, piece.end);
    }
  });
}

void tf_sum_squares(const void* const* tensors, const int64_t* numels, const int32_t* dtypes, int64_t num_tensors,
                    double* sums) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < num_tensors; ++i)
    for (int64_t begin = 0; begin < numels[i]; begin += kSumChunk)
      pieces.push_back({i, begin, begin + kSumChunk < numels[i] ? begin + kSumChunk : numels[i]});
  std::vector<double> partial(pieces.size());
  const Kernels& k = kernels();
  const int64_t group = 8;  // chunks of one task; more than for updates, because reading alone is fast
  parallel_ranges((int64_t)pieces.size(), group, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[(size_t)i];
      partial[(size_t)i] = k.sum_squares(tensors[piece.segment], dtypes[piece.segment], piece.begin, piece.end);
    }
  });
  for (int64_t i = 0; i < num_tensors; ++i) sums[i] = 0.0;
  for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].segment] += partial[i];
}

void tf_accumulate(float* into, const void* from, int32_t from_type, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 2 * kTaskNumel, [&](int64_t b, int64_t e) { k.accumulate(into, from, from_type, b, e); });
}

void tf_cast(void* into, int32_t into_type, const void* from, int32_t from_type, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 2 * kTaskNumel, [&](int64_t b, int64_t e) { k.cast(into, into_type, from, from_type, b, e); });
}

void tf_adopt(float* master, const void* values, int32_t values_type, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 2 * kTaskNumel, [&](int64_t b, int64_t e) { k.adopt(master, values, values_type, b, e); });
}

void tf_split(const float* values, uint16_t* upper, int16_t* lower, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 2 * kTaskNumel,
                  [&](int64_t b, int64_t e) { k.split(values + b, upper + b, lower + b, e - b); });
}

void tf_join(const uint16_t* upper, const int16_t* lower, float* values, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 2 * kTaskNumel,
                  [&](int64_t b, int64_t e) { k.join(upper + b, lower + b, values + b, e - b); });
}

void tf_scale_in_place(float* values, float factor, int64_t numel) {
  const Kernels& k = kernels();
  parallel_ranges(numel, 4 * kTaskNumel, [&](int64_t b, int64_t e) { k.scale(values + b, factor, e - b); });
}

void tf_encode(const tf_packing* packing) { parallel_rows(*packing, packing->num_rows, kernels().encode); }

void tf_mean(const tf_packing* packing) { parallel_rows(*packing, 1, kernels().mean); }

void tf_decode(const tf_packing* packing) { parallel_rows(*packing, packing->num_rows, kernels().decode); }

void tf_set_threads(int32_t num_threads) { set_threads(num_threads); }

int32_t tf_get_threads(void) { return get_threads(); }

const char* tf_isa_available(void) {
  static const std::string names = [] {
    std::string joined;
    for (const Kernels* k : variants()) joined += (joined.empty() ? "" : " ") + std::string(k->isa);
    return joined;
  }();
  return names.c_str();
}

const char* tf_isa(void) { return kernels().isa; }

int32_t tf_set_isa(const char* name) {
  for (const Kernels* k : variants()) {
    if (strcmp(k->isa, name) == 0) {
      chosen.store(k);
      return 0;
    }
  }
  return -1;
}

const char* tf_rules(void) { return kernels().rules; }

int32_t tf_api_version(void) { return TF_API_VERSION; }

int64_t tf_segment_size(void) { return (int64_t)sizeof(tf_segment); }

int64_t tf_packing_size(void) { return (int64_t)sizeof(tf_packing); }

void tf_advise_huge(void* buffer, int64_t num_bytes) {
  const uintptr_t page = 2u << 20, begin = ((uintptr_t)buffer + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)buffer + (uintptr_t)num_bytes) / page * page;
  if (end > begin) (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

}  // extern "C"
