// SPDX-License-Identifier: Apache-2.0
// The table of kernels of an ISA variant. kernels.cpp is compiled once for each variant.
#pragma once
#include "api.h"

namespace tf {

// Elements that are held in L1 at once, a multiple of 128. The number was measured and does not change results.
#if defined(__x86_64__)
constexpr int64_t kTile = 256;
#else
constexpr int64_t kTile = 1024;
#endif
constexpr int64_t kSumChunk = 16384;  // elements of one fp64 partial sum; it defines the bits of the result

constexpr int64_t kPackedBlock = 4096;  // elements of a packed row that share a scale; part of the format

struct Kernels {
  const char* isa;
  const char* rules;  // names of the rules, in the order of their codes
  // Elements [begin, end) of the segment. Both are multiples of 128 or the end of the segment.
  void (*update)(const tf_segment& segment, int64_t begin, int64_t end);
  double (*sum_squares)(const void* tensor, int dtype, int64_t begin, int64_t end);  // at most kSumChunk elements
  void (*accumulate)(float* into, const void* from, int from_type, int64_t begin, int64_t end);
  void (*cast)(void* into, int into_type, const void* from, int from_type, int64_t begin, int64_t end);
  void (*adopt)(float* master, const void* values, int values_type, int64_t begin, int64_t end);
  void (*split)(const float* values, uint16_t* upper, int16_t* lower, int64_t numel);
  void (*join)(const uint16_t* upper, const int16_t* lower, float* values, int64_t numel);
  void (*scale)(float* values, float factor, int64_t numel);
  // Elements [begin, end) of a row. begin is a multiple of kPackedBlock. The mean is over all rows.
  void (*encode)(const tf_packing& packing, int64_t row, int64_t begin, int64_t end);
  void (*mean)(const tf_packing& packing, int64_t row, int64_t begin, int64_t end);
  void (*decode)(const tf_packing& packing, int64_t row, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
const Kernels& kernels_baseline();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#elif defined(__aarch64__)
const Kernels& kernels_neon();
const Kernels& kernels_sve();
#else
const Kernels& kernels_baseline();
#endif

}  // namespace tf
