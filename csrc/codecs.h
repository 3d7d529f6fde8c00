// SPDX-License-Identifier: Apache-2.0
// Conversions between state formats in memory and fp32 tiles. They are plain loops over short arrays in L1, which the
// compiler vectorises for each ISA. They give the same bits as src/twinflow/rules/formats.py.
//
// Only fp16 needs intrinsics, because gcc does not vectorise its conversion. The result of these loops does not depend
// on flush mode (rules.h). Most of them use integer operations on bit patterns. Where floats are scaled, a difference
// below 2^-126 is added to a number of at least 2^-15 and is lost.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "api.h"

// Always inlined, so that a loop over a whole block has a constant length.
#define TF_INLINE static inline __attribute__((always_inline))
#define TF_INLINE_MEMBER inline __attribute__((always_inline))

namespace tf {
namespace TF_ISA {

constexpr int kBlock = 128;               // elements that share a scale in the int8 and 4bit formats
constexpr float kMomentMax = 448.0f;      // largest e4m3 value
constexpr float kVarianceMax = 61440.0f;  // largest e5m3 value in use: 1.875 * 2^15
constexpr float kMoment4Max = 64.0f;      // largest value of a 4-bit first state
constexpr float kVariance4Max = 3072.0f;  // largest value of a 4-bit second state: 1.5 * 2^11

// Calls function(i, count) for each block of n elements. count is a compile-time constant, except for a partial last
// block.
template <class Function>
TF_INLINE void for_blocks(int n, const Function& function) {
  int i = 0;
  for (; i + kBlock <= n; i += kBlock) function(i, kBlock);
  if (i < n) function(i, n - i);
}

static inline uint32_t bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

static inline float value(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// ---- 16-bit floats

static inline uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN becomes 0x7fc0
  const uint32_t u = bits(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return (uint16_t)((x == x ? rounded : 0x7fc00000u) >> 16);
}

static inline float from_f16_scalar(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t payload = (magnitude & 0x3ffu) << 13;
    return value(sign | 0x7f800000u | payload | (payload ? 0x400000u : 0u));
  }
  if (magnitude >= 0x400u) return value(sign | ((magnitude << 13) + 0x38000000u));
  if (magnitude == 0) return value(sign);
  const int shift = __builtin_clz(magnitude) - 21;  // brings the leading one to bit 10
  return value(sign | ((uint32_t)(113 - shift) << 23) | (((magnitude << shift) & 0x3ffu) << 13));
}

static inline uint16_t to_f16_scalar(float x) {
  const uint32_t u = bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude >= 0x38800000u)
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
  if (magnitude <= 0x33000000u) return (uint16_t)sign;  // 2^-25 and below round to zero
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const int shift = 126 - (int)(magnitude >> 23);  // 14..24 bits fall off
  const uint32_t kept = significand >> shift, rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
  return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1u)))));
}

static void load_f16(const uint16_t* __restrict from, float scale, float* __restrict into, int n) {
  int i = 0;
#if defined(__AVX512F__)
  const __m512 scales = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i)));
    _mm512_storeu_ps(into + i, _mm512_mul_ps(x, scales));
  }
#elif defined(__F16C__)
  const __m256 scales = _mm256_set1_ps(scale);
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i)));
    _mm256_storeu_ps(into + i, _mm256_mul_ps(x, scales));
  }
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4)
    vst1q_f32(into + i, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))), scale));
#endif
  for (; i < n; ++i) into[i] = from_f16_scalar(from[i]) * scale;
}

static void store_f16(const float* __restrict from, uint16_t* __restrict into, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(into + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(into + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1_u16(into + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
  for (; i < n; ++i) into[i] = to_f16_scalar(from[i]);
}

static inline float from_bf16(uint16_t x) { return value((uint32_t)x << 16); }

static void load_bf16(const uint16_t* __restrict from, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = from_bf16(from[i]);
}

static void store_bf16(const float* __restrict from, uint16_t* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = to_bf16(from[i]);
}

// Copies elements of any dtype, from element `first` of `base`, into a tile, and back.
static void load(const void* base, int dtype, int64_t first, float* into, int n) {
  switch (dtype) {
    case TF_F32: memcpy(into, (const float*)base + first, (size_t)n * 4); return;
    case TF_BF16: return load_bf16((const uint16_t*)base + first, into, n);
    case TF_F16: return load_f16((const uint16_t*)base + first, 1.0f, into, n);
  }
}

static void store(const float* from, void* base, int dtype, int64_t first, int n) {
  switch (dtype) {
    case TF_F32: memcpy((float*)base + first, from, (size_t)n * 4); return;
    case TF_BF16: return store_bf16(from, (uint16_t*)base + first, n);
    case TF_F16: return store_f16(from, (uint16_t*)base + first, n);
  }
}

// ---- the split master: fp32 bits u = (upper << 16) + lower (signed), upper = bf16(u) with ties away

TF_INLINE void split_one(float x, uint16_t& upper, int16_t& lower) {
  const uint32_t u = bits(x);
  const bool number = x == x;
  upper = (uint16_t)((number ? u + 0x8000u : u | 0x400000u) >> 16);
  lower = (int16_t)(number ? u : 0u);
}

// `split` without the special case for NaN, in half the instructions. No bit is lost: joining the halves gives x again,
// so mend_nans can repeat the split.
TF_INLINE void split_number(float x, uint16_t& upper, int16_t& lower) {
  const uint32_t u = bits(x);
  upper = (uint16_t)((uint16_t)(u >> 16) + ((uint16_t)u >> 15));
  lower = (int16_t)u;
}

TF_INLINE float join_one(uint16_t upper, int16_t lower) {
  return value(((uint32_t)upper << 16) + (uint32_t)(int32_t)lower);
}

static void split(const float* __restrict from, uint16_t* __restrict upper, int16_t* __restrict lower, int n) {
  for (int i = 0; i < n; ++i) split_one(from[i], upper[i], lower[i]);
}

static void join(const uint16_t* __restrict upper, const int16_t* __restrict lower, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = join_one(upper[i], lower[i]);
}

static void mend_nans(uint16_t* __restrict upper, int16_t* __restrict lower, int n) {
  for (int i = 0; i < n; ++i) split_one(join_one(upper[i], lower[i]), upper[i], lower[i]);
}

// ---- stochastic rounding: 16 random bits for each element, from (step, parameter) = key and the element's index.
// A 32-bit hash of the index of the block of 128 is the seed of a 16-bit hash of the position in the block. A vector
// has twice as many 16-bit lanes as 32-bit lanes.

struct Key {
  uint32_t first, second;
};

// The keys of a 4-bit momentum and of a weight. The second state, and an int8 momentum with it, use the key itself.
static inline Key key_of_moment(Key key) { return {key.first ^ 0x9e3779b9u, key.second ^ 0x7f4a7c15u}; }
static inline Key key_of_weight(Key key) { return {key.first ^ 0xc2b2ae3du, key.second ^ 0x27d4eb4fu}; }

static inline uint32_t hash(uint32_t index, Key key) {
  uint32_t h = index + key.first;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = ((h ^ (h >> 15)) + key.second) * 0x846ca68bu;
  return h ^ (h >> 16);
}

TF_INLINE void random_block(uint32_t block, Key key, uint16_t* __restrict into, int n) {
  const uint32_t h = hash(block, key);
  const uint16_t low = (uint16_t)h, high = (uint16_t)(h >> 16);
  for (int i = 0; i < n; ++i) {
    uint16_t x = (uint16_t)(i + low);
    x = (uint16_t)(x ^ (x >> 8));
    x = (uint16_t)(x * 0x88b5u);
    x = (uint16_t)(x ^ (x >> 7));
    x = (uint16_t)((uint16_t)(x + high) * 0xdb2du);
    into[i] = (uint16_t)(x ^ (x >> 9));
  }
}

// Rounds numbers >= 0. The random bits are added to the lower half, and a carry rounds up. The largest bf16 number
// never becomes infinite. Infinity and NaN do not change.
TF_INLINE uint16_t to_bf16_stochastic(float x, uint16_t random) {
  const uint32_t u = bits(x), rounded = u + random;
  return (uint16_t)((u >= 0x7f7f0000u ? u : rounded) >> 16);
}

// The same for weights without master, which have a sign. NaN becomes 0x7fc0.
TF_INLINE uint16_t to_bf16_weight(float x, uint16_t random) {
  const uint32_t u = bits(x), magnitude = u & 0x7fffffffu, rounded = u + random;
  const uint32_t number = magnitude >= 0x7f7f0000u ? u : rounded;
  return (uint16_t)((magnitude > 0x7f800000u ? 0x7fc00000u : number) >> 16);
}

// ---- 8-bit codes with one fp32 scale for each block of 128

TF_INLINE float largest_magnitude(const float* __restrict from, int n) {  // a NaN is the largest
  int32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t magnitude = (int32_t)(bits(from[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return value((uint32_t)largest);
}

// Converts codes to bytes. It uses an intrinsic, because gcc generates two steps of three instructions each.
TF_INLINE void narrow(const int32_t* __restrict from, uint8_t* __restrict into, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm_storeu_si128((__m128i*)(into + i), _mm512_cvtepi32_epi8(_mm512_loadu_si512(from + i)));
#endif
  for (; i < n; ++i) into[i] = (uint8_t)from[i];
}

// e4m3: sign, 4 exponent bits (bias 7), 3 bits of mantissa. 448 is the largest value. Rounding is stochastic.
TF_INLINE void encode_e4m3(const float* __restrict from, float inverse, const uint16_t* __restrict random,
                           uint8_t* __restrict into, int n) {
  alignas(64) int32_t codes[kBlock];
  for (int i = 0; i < n; ++i) {
    const uint32_t scaled = bits(from[i] * inverse), magnitude = scaled & 0x7fffffffu;
    const uint32_t small = (uint32_t)((int32_t)(magnitude - (121u << 23)) >> 31);  // all ones below 2^-6, where
    const uint32_t u = bits(value(magnitude) + value(small & (121u << 23)));       // the spacing is fixed: 2^-9
    const uint32_t rounded = u - (small & (1u << 23)) + ((uint32_t)random[i] << 4);
    const int32_t code = (int32_t)(rounded >> 20) - (120 << 3);
    codes[i] = (code < 126 ? code : 126) | (int32_t)((scaled >> 24) & 0x80u);
  }
  narrow(codes, into, n);
}

// Unsigned e5m3: 5 exponent bits (bias 15), 3 bits of mantissa. The largest exponent is not used, so that a code is the
// upper part of an fp16 number. Rounding is stochastic. Positive values never get the code 0.
TF_INLINE void encode_e5m3(const float* __restrict from, float inverse, const uint16_t* __restrict random,
                           uint8_t* __restrict into, int n) {
  alignas(64) int32_t codes[kBlock];
  for (int i = 0; i < n; ++i) {
    const float scaled = from[i] * inverse;
    const uint32_t small = (uint32_t)((int32_t)(bits(scaled) - (113u << 23)) >> 31);  // all ones below 2^-14, where
    const uint32_t u = bits(scaled + value(small & (113u << 23)));                    // the spacing is fixed: 2^-17
    const uint32_t rounded = u - (small & (1u << 23)) + ((uint32_t)random[i] << 4);
    const int32_t code = (int32_t)(rounded >> 20) - (112 << 3);
    const int32_t least = (int32_t)(bits(from[i]) < 1u ? bits(from[i]) : 1u);
    const int32_t at_least = code > least ? code : least;
    codes[i] = at_least < 247 ? at_least : 247;
  }
  narrow(codes, into, n);
}

// Both kinds of codes are fp16 numbers without the lower bits: e5m3 directly, e4m3 times 2^-8.
template <bool kSigned>
TF_INLINE void decode_codes(const uint8_t* __restrict from, float scale, float* __restrict into, int n) {
  int i = 0;
#if defined(__AVX512F__)
  const __m512 scales = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from + i))), 7);
    if (kSigned)  // bit 14 is the sign: adding it to itself carries it to bit 15
      half = _mm256_add_epi16(half, _mm256_and_si256(half, _mm256_set1_epi16(0x4000)));
    _mm512_storeu_ps(into + i, _mm512_mul_ps(_mm512_cvtph_ps(half), scales));
  }
#endif
  alignas(64) uint16_t half[kBlock];
  for (int j = i; j < n; ++j) {
    const uint16_t h = (uint16_t)(from[j] << 7);
    half[j - i] = kSigned ? (uint16_t)(h + (h & 0x4000u)) : h;
  }
  load_f16(half, scale, into + i, n - i);
}

TF_INLINE void decode_e4m3(const uint8_t* from, float scale, float* into, int n) {
  decode_codes<true>(from, scale * 256.0f, into, n);
}

TF_INLINE void decode_e5m3(const uint8_t* from, float scale, float* into, int n) {
  decode_codes<false>(from, scale, into, n);
}

// ---- 4-bit codes, two in a byte: the first state in the lower half, the second in the upper half. Scales as above.

// Between two neighbouring values, the bit pattern of a number is a linear function of the number. Rounding is
// therefore stochastic if random bits are added to the pattern, and its upper bits are the code. Of the lower bits, the
// upper 16 are random, and the others are the mean of what they could be.

// First state: sign, and 3 exponent bits: 0, 1, 2, 4 and so on up to 64. 0 stays 0.
TF_INLINE int32_t encode_moment4(float x, float inverse, uint16_t random) {
  const uint32_t u = bits(x * inverse), magnitude = u & 0x7fffffffu;
  const uint32_t small = (uint32_t)((int32_t)(magnitude - (127u << 23)) >> 31);  // all ones below 1, where the
  const uint32_t moved = bits(value(magnitude) + value(small & (127u << 23)));   // spacing is fixed: 1
  const int32_t code = (int32_t)((moved - (small & (1u << 23)) + ((uint32_t)random << 7) + 64u) >> 23) - 126;
  return (code < 7 ? code : 7) | (int32_t)((u >> 28) & 8u);
}

// Second state, without sign: the powers of two from 1 to 128, then 256, 384, 512, 768 and so on up to 3072. There is
// no 0.
TF_INLINE int32_t encode_variance4(float x, float inverse, uint16_t random) {
  const int32_t scaled = (int32_t)bits(x * inverse), least = 127 << 23;
  const int32_t u = scaled > least ? scaled : least, bits_of_random = random;
  const int32_t coarse = ((u + (bits_of_random << 7) + 64) >> 23) - 127;
  const int32_t fine = ((u + (bits_of_random << 6) + 32) >> 22) - 2 * 135 + 8;
  const int32_t code = u < (135 << 23) ? coarse : fine;
  return code < 15 ? code : 15;
}

struct Pair4 {  // both states of a block, or what belongs to them
  const float *first, *second;
};

struct Random4 {
  const uint16_t *first, *second;
};

// `keep` is 0 for a state of a block that is not finite, whose codes are 0, and otherwise ~0.
TF_INLINE void encode_4bit(Pair4 from, const float* inverse, const int32_t* keep, Random4 random,
                           uint8_t* __restrict into, int n) {
  alignas(64) int32_t codes[kBlock];
  const float first = inverse[0], second = inverse[1];
  const int32_t low = keep[0] & 0x0f, high = keep[1] & 0xf0;
  for (int i = 0; i < n; ++i)
    codes[i] = (encode_moment4(from.first[i], first, random.first[i]) & low) |
               ((encode_variance4(from.second[i], second, random.second[i]) << 4) & high);
  narrow(codes, into, n);
}

TF_INLINE void decode_4bit(const uint8_t* __restrict from, float first_scale, float second_scale,
                           float* __restrict first, float* __restrict second, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t code = from[i], magnitude = code & 7u, upper = code >> 4;
    const uint32_t moment = magnitude ? (magnitude + 126u) << 23 : 0u;
    const uint32_t variance = upper < 8u ? (upper + 127u) << 23 : (upper - 8u + 2u * 135u) << 22;
    first[i] = value(moment | ((code & 8u) << 28)) * first_scale;
    second[i] = value(variance) * second_scale;
  }
}

}  // namespace TF_ISA
}  // namespace tf
