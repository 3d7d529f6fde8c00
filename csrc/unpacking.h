// SPDX-License-Identifier: Apache-2.0
// Unpacks one row, or computes the mean of several rows. The bits are those of src/twinflow/codes/reference.py.
#pragma once
#include "packed.h"

namespace tf {
namespace TF_ISA {

constexpr int kMostRows = 4;  // rows that are added at once

alignas(64) static const uint32_t kBits[kWord] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// The codes and scales of several rows, for the same range of elements.
struct Said {
  const uint8_t* codes[kMostRows];
  float scales[kMostRows];
};

// Adds the decoded numbers of kRows rows, in their order, to `into`. kFirst: `into` is overwritten. Whole words are
// read, because rows are padded.
template <int kRows, bool kFirst>
__attribute__((noinline)) static void add_signs(const Said& said, float* __restrict into, int n) {
  float plus[kRows], minus[kRows];
  for (int r = 0; r < kRows; ++r) plus[r] = said.scales[r], minus[r] = -said.scales[r];
  for (int i = 0; i < n; i += kWord) {
    uint32_t words[kRows];
    for (int r = 0; r < kRows; ++r) memcpy(&words[r], said.codes[r] + i / 8, 4);
#if defined(__aarch64__)
    for (int k = 0; k < kWord; k += 4) {
      const uint32x4_t bit = vld1q_u32(kBits + k);
      float32x4_t sum = vbslq_f32(vtstq_u32(vdupq_n_u32(words[0]), bit), vdupq_n_f32(minus[0]), vdupq_n_f32(plus[0]));
      if (!kFirst) sum = vaddq_f32(vld1q_f32(into + i + k), sum);
      for (int r = 1; r < kRows; ++r)
        sum = vaddq_f32(sum,
                        vbslq_f32(vtstq_u32(vdupq_n_u32(words[r]), bit), vdupq_n_f32(minus[r]), vdupq_n_f32(plus[r])));
      vst1q_f32(into + i + k, sum);
    }
#else
    for (int k = 0; k < kWord; ++k) {
      const float first = words[0] & kBits[k] ? minus[0] : plus[0];
      float sum = kFirst ? first : into[i + k] + first;
      for (int r = 1; r < kRows; ++r) sum += words[r] & kBits[k] ? minus[r] : plus[r];
      into[i + k] = sum;
    }
#endif
  }
}

template <bool kFirst>
static void add_signs(const Said& said, int num_rows, float* into, int n) {
  switch (num_rows) {
    case 1: return add_signs<1, kFirst>(said, into, n);
    case 2: return add_signs<2, kFirst>(said, into, n);
    case 3: return add_signs<3, kFirst>(said, into, n);
    case 4: return add_signs<4, kFirst>(said, into, n);
  }
}

template <bool kFirst>
static void add_bytes(const uint8_t* __restrict codes, float scale, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) {
    const float x = (float)(int8_t)codes[i] * scale;
    into[i] = kFirst ? x : into[i] + x;
  }
}

template <bool kFirst>
static void add_nibbles(const uint8_t* __restrict codes, float scale, float* __restrict into, int n) {
  for (int i = 0; 2 * i < n; ++i) {  // for an odd n one more element is written, which is not used
    const float low = (float)((codes[i] & 15) - 8) * scale, high = (float)((codes[i] >> 4) - 8) * scale;
    into[2 * i] = kFirst ? low : into[2 * i] + low;
    into[2 * i + 1] = kFirst ? high : into[2 * i + 1] + high;
  }
}

// The sum of the decoded rows [row, row + num_rows) at elements [first, first + n), which are in one block.
template <bool kFirst>
static void add_rows(const tf_packing& p, int64_t row, int num_rows, int64_t first, float* into, int n) {
  Said said;
  for (int r = 0; r < num_rows; ++r) {
    const Row from(p, row + r);
    said.codes[r] = from.codes + first / 8 * p.bits;
    said.scales[r] = from.scale(first / kPacked);
  }
  if (p.bits == 1) return add_signs<kFirst>(said, num_rows, into, n);
  p.bits == 8 ? add_bytes<kFirst>(said.codes[0], said.scales[0], into, n)
              : add_nibbles<kFirst>(said.codes[0], said.scales[0], into, n);
  for (int r = 1; r < num_rows; ++r)
    p.bits == 8 ? add_bytes<false>(said.codes[r], said.scales[r], into, n)
                : add_nibbles<false>(said.codes[r], said.scales[r], into, n);
}

TF_INLINE void put(float* into, float x) { *into = x; }
TF_INLINE void put(uint16_t* into, float x) { *into = to_bf16(x); }

// out = found * factor * 2^-k, or out + found * factor * 2^-k.
template <bool kAdded, class T, class Chosen>
__attribute__((noinline)) static void finish(const float* __restrict found, float factor, Chosen chosen,
                                             T* __restrict out, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float x = chosen.divided(i, found[i] * factor), old = kAdded ? widen(out[i]) : 0.0f;
    put(out + i, chosen.choose(i, kAdded ? old + x : x, old));
  }
}

struct Decode {
  const tf_packing& p;
  PackingScratch& t;

  // Decodes rows [row, row + num_rows) at elements [first, first + n), and writes them to the elements from `at`.
  void run(int64_t row, int64_t num_rows, int64_t first, int64_t at, int n) const {
    for (int64_t r = 0; r < num_rows; r += kMostRows) {
      const int some = (int)(num_rows - r < kMostRows ? num_rows - r : kMostRows);
      r == 0 ? add_rows<true>(p, row + r, some, first, t.c, n) : add_rows<false>(p, row + r, some, first, t.c, n);
    }
    if (!p.exponents) return with_chosen(AllIn{}, at, n);
    if (p.is_scaled) return with_chosen(Exponents<true>{p.exponents + at}, at, n);
    with_chosen(Exponents<false>{p.exponents + at}, at, n);
  }

  template <class Chosen>
  void with_chosen(const Chosen& chosen, int64_t at, int n) const {
    p.is_added ? store_all<true>(chosen, at, n) : store_all<false>(chosen, at, n);
  }

  template <bool kAdded, class Chosen>
  void store_all(const Chosen& chosen, int64_t at, int n) const {
    if (p.values_type == TF_F32) return finish<kAdded>(t.c, p.factor, chosen, (float*)p.values + at, n);
    if (p.values_type == TF_BF16) return finish<kAdded>(t.c, p.factor, chosen, (uint16_t*)p.values + at, n);
    if (kAdded) load_f16((const uint16_t*)p.values + at, 1.0f, t.values, n);
    finish<kAdded>(t.c, p.factor, chosen, t.values, n);
    store_f16(t.values, (uint16_t*)p.values + at, n);
  }
};

// Decodes elements [begin, end) of rows [row, row + num_rows), or their mean if there are several. begin is the start
// of a block.
static void decode_range(const tf_packing& p, int64_t row, int64_t num_rows, int64_t begin, int64_t end) {
  PackingScratch scratch;
  for (int64_t first = begin; first < end; first += kUnpacked) {
    const int n = (int)(end - first < kUnpacked ? end - first : kUnpacked);
    Decode{p, scratch}.run(row, num_rows, first, row * p.numel + first, n);
  }
}

}  // namespace TF_ISA
}  // namespace tf
