// SPDX-License-Identifier: Apache-2.0
// Packs numbers into rows, block by block. The results have the same bits as those of src/twinflow/codes/reference.py.
//
// A block is processed in scratch memory in L1 and L2, so that memory is read and written once. Each loop does one
// operation for a whole tile. Loops are compiled for each dtype, and with or without exponents, base and errors, so
// that there are no conditions per element. All code runs in IEEE mode, where subnormal numbers are not flushed.
#pragma once
#include <math.h>

#include "packed.h"

namespace tf {
namespace TF_ISA {

// Number of elements that count for the scale, at least 1.
static float count(const AllIn&, int n) { return (float)n; }

template <bool kScaled>
static float count(const Exponents<kScaled>& chosen, int n) {
  uint8_t lanes[kLanes] = {0};  // a block has 64 elements per lane, so there is no overflow
  int i = 0, total = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int k = 0; k < kLanes; ++k) lanes[k] = (uint8_t)(lanes[k] + (chosen.in[i + k] != 0));
  for (; i < n; ++i) total += chosen.in[i] != 0;
  for (int k = 0; k < kLanes; ++k) total += lanes[k];
  return total > 1 ? (float)total : 1.0f;
}

// One bit for each number below zero, in groups of 64. It uses intrinsics, because compilers do not vectorise it.
#if defined(__aarch64__)
// Returns 16 bytes: the weight of its bit for each element below zero, and zero for the others.
TF_INLINE uint8x16_t weigh_signs(const float* c, uint8x16_t weights) {
  const uint16x8_t low =
      vuzp1q_u16(vreinterpretq_u16_u32(vcltzq_f32(vld1q_f32(c))), vreinterpretq_u16_u32(vcltzq_f32(vld1q_f32(c + 4))));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(vcltzq_f32(vld1q_f32(c + 8))),
                                     vreinterpretq_u16_u32(vcltzq_f32(vld1q_f32(c + 12))));
  return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), weights);
}
#endif

TF_INLINE void pack_signs(const float* c, uint8_t* into) {
#if defined(__aarch64__)
  const uint8x16_t weights = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
  const uint8x16_t a = vpaddq_u8(weigh_signs(c, weights), weigh_signs(c + 16, weights));
  const uint8x16_t b = vpaddq_u8(weigh_signs(c + 32, weights), weigh_signs(c + 48, weights));
  const uint8x16_t halves = vpaddq_u8(a, b);
  vst1_u8(into, vget_low_u8(vpaddq_u8(halves, halves)));
#else
  uint64_t word = 0;
#if defined(__AVX512F__)
  for (int k = 0; k < kLanes; k += 16)
    word |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(c + k), _mm512_setzero_ps(), _CMP_LT_OQ) << k;
#elif defined(__AVX__)
  for (int k = 0; k < kLanes; k += 8) {
    const __m256 below = _mm256_cmp_ps(_mm256_loadu_ps(c + k), _mm256_setzero_ps(), _CMP_LT_OQ);
    word |= (uint64_t)(uint32_t)_mm256_movemask_ps(below) << k;
  }
#elif defined(__x86_64__)
  for (int k = 0; k < kLanes; k += 4)
    word |= (uint64_t)(uint32_t)_mm_movemask_ps(_mm_cmplt_ps(_mm_loadu_ps(c + k), _mm_setzero_ps())) << k;
#else
  for (int k = 0; k < kLanes; ++k) word |= (uint64_t)(c[k] < 0.0f) << k;
#endif
  for (int k = 0; k < 8; ++k) into[k] = (uint8_t)(word >> 8 * k);
#endif
}

// Statistics of c, which are computed while c is gathered, 64 elements at once. The 1-bit code needs the signs and the
// sum of magnitudes. The sum is computed in lanes, each in order, which are then added in halves.
struct Signs {
  static constexpr bool kReadsBf16 = true;  // with a separate loop, because the 1-bit code has to be fast
  alignas(64) float lanes[kLanes];
  uint8_t* codes;

  explicit Signs(uint8_t* into) : lanes{0}, codes(into) {}
  TF_INLINE_MEMBER void see(const float* c) {
    for (int k = 0; k < kLanes; ++k) lanes[k] += fabsf(c[k]);
    pack_signs(c, codes);
    codes += kLanes / 8;
  }
  float sum() {
    for (int width = kLanes / 2; width; width /= 2)
      for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
    return lanes[0];
  }
};

// The statistic of the 4-bit and 8-bit codes: the largest magnitude, also in lanes. A NaN is the largest.
struct Largest {
  static constexpr bool kReadsBf16 = false;
  alignas(64) int32_t lanes[kLanes] = {0};

  TF_INLINE_MEMBER void see(const float* c) {
    for (int k = 0; k < kLanes; ++k) {
      const int32_t magnitude = (int32_t)(bits(c[k]) & 0x7fffffffu);
      lanes[k] = magnitude > lanes[k] ? magnitude : lanes[k];
    }
  }
  float found() const {
    int32_t most = 0;
    for (int k = 0; k < kLanes; ++k) most = lanes[k] > most ? lanes[k] : most;
    return value((uint32_t)most);
  }
};

template <class T, class Base, class Chosen, class Error>
TF_INLINE void gather_some(const T* values, float factor, const Base& base, const Chosen& chosen, const Error& error,
                           float* __restrict c, int begin, int n) {
#pragma GCC ivdep
  for (int i = begin; i < begin + n; ++i) {
    const float given = chosen.times(i, base.add(i, widen(values[i]) * factor));
    c[i] = chosen.choose(i, error.add(i, given), 0.0f);
  }
}

// c = (base + values * factor) * 2^k + error. The last group of 64 elements is padded with zeros.
template <class T, class Base, class Chosen, class Error, class Seen>
__attribute__((noinline)) static void gather(const T* __restrict values, float factor, Base base, Chosen chosen,
                                             Error error, Seen& seen, float* __restrict c, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    gather_some(values, factor, base, chosen, error, c, i, kLanes);
    seen.see(c + i);
  }
  if (i == n) return;
  gather_some(values, factor, base, chosen, error, c, i, n - i);
  for (int k = n; k < i + kLanes; ++k) c[k] = 0.0f;
  seen.see(c + i);
}

// Whether a finite number is below zero. NEON compares bits, because a float comparison with NaN takes six
// instructions.
TF_INLINE bool below_zero(float x) {
#if defined(__aarch64__)
  return bits(x) > 0x80000000u;
#else
  return x < 0.0f;
#endif
}

// A tiny scale becomes zero, and a scale that is not finite becomes NaN.
static float usable(float scale) {
  const uint32_t magnitude = bits(scale) & 0x7fffffffu;
  return magnitude >= 0x7f800000u ? value(kNan) : scale < 0x1p-100f ? 0.0f : scale;
}

// The rounding errors of the signs.
template <class Chosen>
static void leave_signs(const float*, float, const Chosen&, const NoError&, int) {}

template <class Chosen>
__attribute__((noinline)) static void leave_signs(const float* __restrict c, float scale, Chosen chosen,
                                                  SomeError error, int n) {
  const float minus = -scale;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) error.put(i, chosen.choose(i, c[i] - (below_zero(c[i]) ? minus : scale), 0.0f));
}

// The error of a block that is not finite, and cannot be packed, does not change, except for excluded elements.
template <class Chosen>
static void keep_error(const Chosen&, const NoError&, int) {}

template <class Chosen>
static void keep_error(const Chosen& chosen, const SomeError& error, int n) {
  for (int i = 0; i < n; ++i) error.put(i, chosen.choose(i, error.at[i], 0.0f));
}

// Rounds half to even and keeps the sign of zero. For magnitudes below 2^22.
TF_INLINE float rounded(float x) {
#if defined(__aarch64__) || defined(__SSE4_1__)
  return rintf(x);
#else
  const float magnitude = value(bits(x) & 0x7fffffffu);
  return value(bits((magnitude + 0x1p23f) - 0x1p23f) | (bits(x) & 0x80000000u));
#endif
}

// Codes from -top to top, stored with `shift` added, and their rounding errors. There is no clamp: the largest
// magnitude times the inverse scale exceeds top by at most some units in the last place, too few for the next code.
template <class Chosen, class Error>
__attribute__((noinline)) static void pack_numbers(const float* __restrict c, float scale, int shift, Chosen chosen,
                                                   Error error, uint8_t* __restrict into, int n) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float code = rounded(c[i] * inverse);
    into[i] = (uint8_t)((int32_t)code + shift);
    error.put(i, chosen.choose(i, c[i] - code * scale, 0.0f));
  }
}

// Packs two codes into a byte, the first in the lower half.
static void pack_pairs(const uint8_t* __restrict codes, uint8_t* __restrict into, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) into[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

// Packs one block of one row: c in scratch, its scale, its codes, and their rounding errors.
struct Encode {
  const tf_packing& p;
  PackingScratch& t;
  const Row row;
  const int64_t block, at;  // number of the block in the row; index of its first element among all elements
  const int n;

  void run() const {
    if (!p.exponents) return with_chosen(AllIn{});
    if (p.is_scaled) return with_chosen(Exponents<true>{p.exponents + at});
    with_chosen(Exponents<false>{p.exponents + at});
  }

  template <class Chosen>
  void with_chosen(const Chosen& chosen) const {
    if (p.error)
      with_error(chosen, SomeError{p.error + at});
    else
      with_error(chosen, NoError{});
  }

  template <class Chosen, class Error>
  void with_error(const Chosen& chosen, const Error& error) const {
    const float top = p.bits == 8 ? 127.0f : 7.0f;
    float scale;
    if (p.bits == 1) {
      Signs seen(t.codes);
      gather_values(chosen, error, seen);
      scale = usable(seen.sum() / count(chosen, n));
      if (scale == scale) leave_signs(t.c, scale, chosen, error, n);
    } else {
      Largest seen;
      gather_values(chosen, error, seen);
      scale = usable(seen.found() / top);
      if (scale == scale) pack_numbers(t.c, scale, p.bits == 4 ? 8 : 0, chosen, error, t.codes, n);
    }
    if (scale != scale) {
      memset(t.codes, p.bits == 4 ? 8 : 0, (size_t)n);
      keep_error(chosen, error, n);
    }
    memcpy(row.scales + 4 * block, &scale, 4);
    write_codes();
  }

  template <class Chosen, class Error, class Seen>
  void gather_values(const Chosen& chosen, const Error& error, Seen& seen) const {
    if (p.values_type == TF_F32) return gather_base((const float*)p.values + at, chosen, error, seen);
    if constexpr (Seen::kReadsBf16) {
      if (p.values_type == TF_BF16) return gather_base((const uint16_t*)p.values + at, chosen, error, seen);
    }
    load(p.values, p.values_type, at, t.values, n);
    gather_base(t.values, chosen, error, seen);
  }

  template <class T, class Chosen, class Error, class Seen>
  void gather_base(const T* values, const Chosen& chosen, const Error& error, Seen& seen) const {
    if (p.base_type == TF_NONE) return gather(values, p.factor, NoBase{}, chosen, error, seen, t.c, n);
    const float* base = (const float*)p.base + at;
    if (p.base_type != TF_F32) {
      load(p.base, p.base_type, at, t.base, n);
      base = t.base;
    }
    gather(values, p.factor, SomeBase{base, p.base_factor}, chosen, error, seen, t.c, n);
  }

  // Writes the codes from scratch to the row. Zeros follow the last block.
  void write_codes() const {
    uint8_t* into = row.codes + block * kPacked / 8 * p.bits;
    const int num_bytes = (n * p.bits + 7) / 8;
    if (p.bits == 4) {
      if (n % 2) t.codes[n] = 0;
      pack_pairs(t.codes, into, num_bytes);
    } else {
      memcpy(into, t.codes, (size_t)num_bytes);
    }
    if (block * kPacked + n == p.numel) memset(into + num_bytes, 0, (size_t)(row.end - into - num_bytes));
  }
};

// Packs elements [begin, end) of a row. begin is the start of a block.
static void encode_range(const tf_packing& p, int64_t row, int64_t begin, int64_t end) {
  PackingScratch scratch;
  for (int64_t first = begin; first < end; first += kPacked) {
    const int n = (int)(end - first < kPacked ? end - first : kPacked);
    Encode{p, scratch, Row(p, row), first / kPacked, row * p.numel + first, n}.run();
  }
}

}  // namespace TF_ISA
}  // namespace tf
