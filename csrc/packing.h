// Numbers that travel packed, block by block: encode, mean and decode. src/twinflow/codes/reference.py is the truth,
// src/twinflow/codes/code.py says how a packed row lies in memory.
//
// A block is worked on in scratch that stays in L1 and L2, so that memory is read and written once. Each loop does one
// thing for a whole tile and is made for its dtypes, and for whether there are exponents, a base and errors: no element
// asks for them. Everything runs in IEEE mode: a subnormal number counts as what it is.
#pragma once
#include <math.h>

#include "kernels.h"
#include "loop.h"

namespace tf {
namespace TF_ISA {

constexpr int kPacked = (int)kPackedBlock;
constexpr int kUnpacked = 1024;         // elements that are decoded at a time: no part of any result
constexpr int kLanes = 64;              // of the sum of magnitudes: part of the definition of one bit's scale
constexpr int kWord = 32;               // elements of one word of signs
constexpr uint32_t kNan = 0x7fc00000u;  // the scale of a block that holds what is not finite

struct alignas(64) PackingScratch {
  float c[kPacked], values[kPacked], base[kPacked];  // the last two: what gather cannot read as it is
  uint8_t codes[kPacked];
};

// ---- where a row's scales and codes are

struct Row {
  uint8_t* scales;
  uint8_t* codes;
  uint8_t* end;

  Row(const tf_packing& p, int64_t row) {
    const int64_t num_scales = (p.numel + kPacked - 1) / kPacked, code_bytes = (p.numel * p.bits + 7) / 8;
    const int64_t row_bytes = (4 * num_scales + code_bytes + 15) / 16 * 16;
    scales = (uint8_t*)p.packed + row * row_bytes;
    codes = scales + 4 * num_scales;
    end = scales + row_bytes;
  }
  float scale(int64_t block) const {
    float x;
    memcpy(&x, scales + 4 * block, 4);
    return x;
  }
};

// ---- accessors of what a call may or may not have

struct NoBase {
  TF_INLINE_MEMBER float add(int, float given) const { return given; }
};

struct SomeBase {
  const float* in;
  float factor;
  TF_INLINE_MEMBER float add(int i, float given) const { return in[i] * factor + given; }
};

struct AllIn {  // no exponents: nothing is scaled, nothing is left out
  TF_INLINE_MEMBER float times(int, float x) const { return x; }
  TF_INLINE_MEMBER float divided(int, float x) const { return x; }
  TF_INLINE_MEMBER float choose(int, float x, float) const { return x; }
};

template <bool kScaled>
struct Exponents {
  const uint8_t* in;
  // A power of two by way of bf16: half of the shifts are of 16 bits.
  TF_INLINE_MEMBER float times(int i, float x) const { return kScaled ? x * from_bf16((uint16_t)(in[i] << 7)) : x; }
  TF_INLINE_MEMBER float divided(int i, float x) const {
    return kScaled ? x * from_bf16((uint16_t)((254 - in[i]) << 7)) : x;
  }
  // As a mask, or gcc moves what follows before the selection and does it twice; a mask of bytes is cheap to widen.
  TF_INLINE_MEMBER float choose(int i, float x, float otherwise) const {
    const int8_t is_in = in[i] != 0 ? -1 : 0;
    const uint32_t keep = (uint32_t)(int32_t)is_in;
    return value((bits(x) & keep) | (bits(otherwise) & ~keep));
  }
};

struct NoError {
  TF_INLINE_MEMBER float add(int, float c) const { return c; }
  TF_INLINE_MEMBER void put(int, float) const {}
};

struct SomeError {
  float* at;
  TF_INLINE_MEMBER float add(int i, float c) const { return c + at[i]; }
  TF_INLINE_MEMBER void put(int i, float left) const { at[i] = left; }
};

// ---- encode

// How many elements have a part in the scale, 1 at least.
static float count(const AllIn&, int n) { return (float)n; }

template <bool kScaled>
static float count(const Exponents<kScaled>& chosen, int n) {
  uint8_t lanes[kLanes] = {0};  // a block has 64 elements for each: no overflow
  int i = 0, total = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int k = 0; k < kLanes; ++k) lanes[k] = (uint8_t)(lanes[k] + (chosen.in[i + k] != 0));
  for (; i < n; ++i) total += chosen.in[i] != 0;
  for (int k = 0; k < kLanes; ++k) total += lanes[k];
  return total > 1 ? (float)total : 1.0f;
}

// One bit for each number below zero, in groups of 64. By hand: compilers do not see it.
#if defined(__aarch64__)
TF_INLINE uint8x16_t weigh_signs(const float* c, uint8x16_t weights) {  // 16 elements, each its bit's weight or zero
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

// What is seen of c while it is gathered, 64 elements at a time. For one bit: the signs, and the sum of magnitudes in
// lanes, each in order, which are then folded in halves.
struct Signs {
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

// For more bits: the largest magnitude, in lanes too. A NaN is larger than all.
struct Largest {
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

// c = (base + values * factor) * 2^k + error; in the last 64 elements what is missing is zero.
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

// Whether a number that is finite is below zero. By bits on NEON, where a float compare that minds NaN takes six.
TF_INLINE bool below_zero(float x) {
#if defined(__aarch64__)
  return bits(x) > 0x80000000u;
#else
  return x < 0.0f;
#endif
}

// A scale that is tiny is zero, one that is not finite is NaN.
static float usable(float scale) {
  const uint32_t magnitude = bits(scale) & 0x7fffffffu;
  return magnitude >= 0x7f800000u ? value(kNan) : scale < 0x1p-100f ? 0.0f : scale;
}

// What the signs leave.
template <class Chosen>
static void leave_signs(const float*, float, const Chosen&, const NoError&, int) {}

template <class Chosen>
__attribute__((noinline)) static void leave_signs(const float* __restrict c, float scale, Chosen chosen,
                                                  SomeError error, int n) {
  const float minus = -scale;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) error.put(i, chosen.choose(i, c[i] - (below_zero(c[i]) ? minus : scale), 0.0f));
}

// A block that cannot be packed keeps its error, but for elements that are left out.
template <class Chosen>
static void keep_error(const Chosen&, const NoError&, int) {}

template <class Chosen>
static void keep_error(const Chosen& chosen, const SomeError& error, int n) {
  for (int i = 0; i < n; ++i) error.put(i, chosen.choose(i, error.at[i], 0.0f));
}

// Half to even, with the sign of a zero kept. For magnitudes below 2^22.
TF_INLINE float rounded(float x) {
#if defined(__aarch64__) || defined(__SSE4_1__)
  return rintf(x);
#else
  const float magnitude = value(bits(x) & 0x7fffffffu);
  return value(bits((magnitude + 0x1p23f) - 0x1p23f) | (bits(x) & 0x80000000u));
#endif
}

// Codes from -top to top, stored plus `shift`; and what they leave. No clamp: the largest magnitude, divided by top and
// times one over that, exceeds top by some units in the last place at most, too few for one more code.
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

// Two codes a byte, the first in the lower half.
static void pack_pairs(const uint8_t* __restrict codes, uint8_t* __restrict into, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) into[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

// One block of one row: c into scratch, its scale, its codes, and what they leave.
struct Encode {
  const tf_packing& p;
  PackingScratch& t;
  const Row row;
  const int64_t block, at;  // of the row; of the block's first element, among all
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
    if (p.values_type == TF_BF16) return gather_base((const uint16_t*)p.values + at, chosen, error, seen);
    load_f16((const uint16_t*)p.values + at, 1.0f, t.values, n);
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

  // The codes from scratch to the row; its last block is followed by zeros.
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

// Elements [begin, end) of a row; begin is a block's.
static void encode_range(const tf_packing& p, int64_t row, int64_t begin, int64_t end) {
  PackingScratch scratch;
  for (int64_t first = begin; first < end; first += kPacked) {
    const int n = (int)(end - first < kPacked ? end - first : kPacked);
    Encode{p, scratch, Row(p, row), first / kPacked, row * p.numel + first, n}.run();
  }
}

// ---- mean and decode

constexpr int kMostRows = 4;  // added in one go

alignas(64) static const uint32_t kBits[kWord] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// What rows say at the same elements: where their codes start, and their scales.
struct Said {
  const uint8_t* codes[kMostRows];
  float scales[kMostRows];
};

// Adds what kRows rows say, in their order, to `into`; kFirst: to nothing. Whole words are read: a row is padded.
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
  for (int i = 0; 2 * i < n; ++i) {  // of an odd number one more, which nobody reads
    const float low = (float)((codes[i] & 15) - 8) * scale, high = (float)((codes[i] >> 4) - 8) * scale;
    into[2 * i] = kFirst ? low : into[2 * i] + low;
    into[2 * i + 1] = kFirst ? high : into[2 * i + 1] + high;
  }
}

// The sum of what rows [row, row + num_rows) say at elements [first, first + n), which lie in one block.
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

// Out = found * factor * 2^-k, or out + that.
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

  // Rows [row, row + num_rows) at elements [first, first + n), which become the elements from `at`.
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

// Elements [begin, end) of rows [row, row + num_rows), added where there are several (the mean); begin is a block's.
static void decode_range(const tf_packing& p, int64_t row, int64_t num_rows, int64_t begin, int64_t end) {
  PackingScratch scratch;
  for (int64_t first = begin; first < end; first += kUnpacked) {
    const int n = (int)(end - first < kUnpacked ? end - first : kUnpacked);
    Decode{p, scratch}.run(row, num_rows, first, row * p.numel + first, n);
  }
}

}  // namespace TF_ISA
}  // namespace tf
