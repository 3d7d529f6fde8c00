// Conversions between what lies in memory and fp32 tiles. Plain loops over short arrays that stay
// in L1: the compiler vectorises them for each ISA. src/twinflow/rules/formats.py is the truth.
//
// Only fp16 needs intrinsics (gcc does not vectorise it). None of these loops depends on flush
// mode: bit patterns are moved by integer operations, and where floats are scaled, a perturbation
// below 2^-126 is added to a number at least 2^-15.
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

namespace tf {
namespace TF_ISA {

constexpr int kBlock = 128;               // elements that share a scale in the int8 format
constexpr float kMomentMax = 448.0f;      // largest e4m3 value
constexpr float kVarianceMax = 61440.0f;  // largest e5m3 value: 1.875 * 2^15

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

static void load_f16(const uint16_t* __restrict from, float* __restrict into, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(into + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#elif defined(__aarch64__)
  for (; i + 4 <= n; i += 4) vst1q_f32(into + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
  for (; i < n; ++i) into[i] = from_f16_scalar(from[i]);
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

static void load_bf16(const uint16_t* __restrict from, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = value((uint32_t)from[i] << 16);
}

static void store_bf16(const float* __restrict from, uint16_t* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = to_bf16(from[i]);
}

// Any dtype at element `first` of `base` into a tile, and back.
static void load(const void* base, int dtype, int64_t first, float* into, int n) {
  switch (dtype) {
    case TF_F32: memcpy(into, (const float*)base + first, (size_t)n * 4); return;
    case TF_BF16: return load_bf16((const uint16_t*)base + first, into, n);
    case TF_F16: return load_f16((const uint16_t*)base + first, into, n);
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

static void split(const float* __restrict from, uint16_t* __restrict upper, int16_t* __restrict lower, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(from[i]);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    upper[i] = (uint16_t)(nan ? (u >> 16) | 0x40u : (u + 0x8000u) >> 16);
    lower[i] = (int16_t)(nan ? 0u : u);
  }
}

static void join(const uint16_t* __restrict upper, const int16_t* __restrict lower, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) into[i] = value(((uint32_t)upper[i] << 16) + (uint32_t)(int32_t)lower[i]);
}

// ---- stochastic rounding: 32 random bits from (step, parameter) = key and the element's index

struct Key {
  uint32_t first, second;
};

static inline uint32_t hash(uint32_t index, Key key) {
  uint32_t h = index * 0x9e3779b1u + key.first;
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = ((h ^ (h >> 15)) + key.second) * 0x846ca68bu;
  return h ^ (h >> 16);
}

// The carry out of the lower half is the rounding. Inputs are never negative; infinity and NaN stay
// as they are (their lower half is dropped, and an infinity has none).
static void store_bf16_stochastic(const float* __restrict from, uint16_t* __restrict into, uint32_t index, Key key,
                                  int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t u = bits(from[i]);
    const uint32_t rounded = (u + (hash(index + (uint32_t)i, key) >> 16)) >> 16;
    const uint32_t special = (u >> 16) | (u > 0x7f800000u ? 0x40u : 0u);
    into[i] = (uint16_t)(u >= 0x7f7f0000u ? special : rounded);  // the largest bf16 never rounds up to infinity
  }
}

// ---- 8-bit codes with one fp32 scale for each block of 128

static inline float largest_magnitude(const float* __restrict from, int n) {  // a NaN is larger than all
  int32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t magnitude = (int32_t)(bits(from[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return value((uint32_t)largest);
}

// e4m3: sign, 4 exponent bits (bias 7), 3 of mantissa; 448 is the largest value.
static void encode_e4m3(const float* __restrict from, float inverse, uint8_t* __restrict into, int n) {
  for (int i = 0; i < n; ++i) {
    const float scaled = from[i] * inverse;
    const uint32_t u = bits(scaled), magnitude = u & 0x7fffffffu;
    const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t small = bits(value(magnitude) + 16384.0f) & 0xffu;  // 16384 has a spacing of 2^-9: rounds to nearest
    const uint32_t code = magnitude < 0x3c800000u ? small : normal;    // below 2^-6
    into[i] = (uint8_t)((code > 126u ? 126u : code) | ((u >> 24) & 0x80u));
  }
}

static void decode_e4m3(const uint8_t* __restrict from, float scale, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t code = from[i], magnitude = code & 0x7fu;
    const float normal = value((magnitude << 20) + (120u << 23));
    const float small = (float)(int32_t)magnitude * 0x1p-9f;
    const float x = (magnitude < 8u ? small : normal) * scale;
    into[i] = value(bits(x) | ((code & 0x80u) << 24));
  }
}

// Unsigned e5m3: 5 exponent bits (bias 16), 3 of mantissa; stochastic; positive values never become code 0.
static void encode_e5m3(const float* __restrict from, float inverse, uint32_t index, Key key, uint8_t* __restrict into,
                        int n) {
  for (int i = 0; i < n; ++i) {
    const float scaled = from[i] * inverse;
    const uint32_t small = bits(scaled) < 0x38000000u ? ~0u : 0u;  // below 2^-15:
    const uint32_t u = bits(scaled + value(small & 0x38000000u));  // a fixed spacing of 2^-18
    const uint32_t rounded = (u + (hash(index + (uint32_t)i, key) >> 12)) >> 20;
    const uint32_t code = rounded - (111u << 3) - (small & 8u);
    const uint32_t least = bits(from[i]) != 0u ? 1u : 0u;
    const uint32_t at_least = code > least ? code : least;
    into[i] = (uint8_t)(at_least > 255u ? 255u : at_least);
  }
}

static void decode_e5m3(const uint8_t* __restrict from, float scale, float* __restrict into, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t code = from[i];
    const float normal = value((code << 20) + (111u << 23));
    const float small = (float)(int32_t)code * 0x1p-18f;
    into[i] = (code < 8u ? small : normal) * scale;
  }
}

}  // namespace TF_ISA
}  // namespace tf
