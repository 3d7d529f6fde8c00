// SPDX-License-Identifier: Apache-2.0
// The loop over elements, for every rule and every format of weights and states.
//
// A rule computes with fp32 numbers in registers. Accessors read and write these numbers. Conversions and rule are in
// one loop on purpose: the conversions of the next vectors overlap with the division of the current vector.
#pragma once
#include "codecs.h"
#include "rules.h"

namespace tf {
namespace TF_ISA {

TF_INLINE float widen(float x) { return x; }
TF_INLINE float widen(uint16_t x) { return from_bf16(x); }

// A factor of 1 changes nothing, so this common case omits the multiplication (kScaled is false).
template <bool kScaled, class T>
TF_INLINE float scaled(T grad, float factor) {
  return kScaled ? widen(grad) * factor : widen(grad);
}

TF_INLINE uint32_t magnitude_bits(float x) { return bits(x) << 1; }  // ordered as the magnitudes; NaN is the largest
TF_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// ---- accessors: get(i) reads element i as fp32, put(i, x) writes it

template <class T, bool kScaled>
struct Gradient {
  const T* in;
  float factor;
  TF_INLINE_MEMBER float get(int i) const { return scaled<kScaled>(in[i], factor); }
};

struct Fp32 {
  const float* in;
  float* out;
  TF_INLINE_MEMBER float get(int i) const { return in[i]; }
  TF_INLINE_MEMBER void put(int i, float x) const { out[i] = x; }
  TF_INLINE_MEMBER uint32_t seen(float) const { return 0; }
  void mend(uint32_t, int) const {}
};

struct Split {
  const uint16_t* upper_in;
  const int16_t* lower_in;
  uint16_t* upper;
  int16_t* lower;
  TF_INLINE_MEMBER float get(int i) const { return join_one(upper_in[i], lower_in[i]); }
  TF_INLINE_MEMBER void put(int i, float x) const { split_number(x, upper[i], lower[i]); }
  TF_INLINE_MEMBER uint32_t seen(float x) const { return magnitude_bits(x); }
  // The loop splits a NaN like a number, which is wrong. If the largest magnitude is a NaN, NaNs are split again here.
  void mend(uint32_t largest, int n) const {
    if (largest > 0xff000000u) mend_nans(upper, lower, n);
  }
};

struct Bf16 {
  const uint16_t* in;
  uint16_t* out;
  TF_INLINE_MEMBER float get(int i) const { return from_bf16(in[i]); }
  TF_INLINE_MEMBER void put(int i, float x) const { out[i] = to_bf16(x); }
};

struct Bf16Stochastic {
  const uint16_t* in;
  uint16_t* out;
  const uint16_t* random;
  TF_INLINE_MEMBER float get(int i) const { return from_bf16(in[i]); }
  TF_INLINE_MEMBER void put(int i, float x) const { out[i] = to_bf16_stochastic(x, random[i]); }
};

struct Bf16Weight {  // a weight without master
  const uint16_t* in;
  uint16_t* out;
  const uint16_t* random;
  TF_INLINE_MEMBER float get(int i) const { return from_bf16(in[i]); }
  TF_INLINE_MEMBER void put(int i, float x) const { out[i] = to_bf16_weight(x, random[i]); }
  TF_INLINE_MEMBER uint32_t seen(float) const { return 0; }
  void mend(uint32_t, int) const {}
};

struct Nothing {  // a state that the rule does not have
  TF_INLINE_MEMBER float get(int) const { return 0.0f; }
  TF_INLINE_MEMBER void put(int, float) const {}
};

// `ivdep` tells the compiler that iterations are independent. An element is read before it is written, so updates in
// place are correct. Returns the argument for `mend` of the master.
template <class Rule, class Grad, class Master, class First, class Second>
__attribute__((noinline)) static uint32_t loop(Rule rule, Grad grad, Master master, First first, Second second, int n) {
  uint32_t largest = 0;
#pragma GCC ivdep
#pragma GCC unroll 2
  for (int i = 0; i < n; ++i) {
    float p = master.get(i), m = first.get(i), v = second.get(i);
    rule(grad.get(i), p, m, v);
    master.put(i, p);
    first.put(i, m);
    second.put(i, v);
    largest = larger(largest, master.seen(p));
  }
  return largest;
}

// The loop for fp32 in place, the common case. With __restrict, which is valid only for parameters of a function, the
// compiler may interleave two vectors. This hides the latency of the square root and the division.
template <bool kScaled, class Rule, class Grad>
__attribute__((noinline)) static void loop_in_place(Rule rule, const Grad* __restrict grad, float factor,
                                                    float* __restrict p, float* __restrict m, float* __restrict v,
                                                    int n) {
#pragma GCC unroll 2
  for (int i = 0; i < n; ++i) {
    float weight = p[i], first = Rule::kFirst ? m[i] : 0.0f, second = Rule::kSecond ? v[i] : 0.0f;
    rule(scaled<kScaled>(grad[i], factor), weight, first, second);
    p[i] = weight;
    if (Rule::kFirst) m[i] = first;
    if (Rule::kSecond) v[i] = second;
  }
}

// The loop for fp32 states with a split master, in place or out of place. Returns the argument of Split::mend.
struct SplitIn {  // the old halves, in an update out of place
  const uint16_t* upper;
  const int16_t* lower;
  const float *m, *v;
};

template <bool kScaled, bool kInPlace, class Rule, class Grad>
__attribute__((noinline)) static uint32_t loop_split(Rule rule, const Grad* __restrict grad, float factor, SplitIn in,
                                                     uint16_t* __restrict upper, int16_t* __restrict lower,
                                                     float* __restrict m, float* __restrict v, int n) {
  uint32_t largest = 0;
#pragma GCC unroll 2
  for (int i = 0; i < n; ++i) {
    float weight = kInPlace ? join_one(upper[i], lower[i]) : join_one(in.upper[i], in.lower[i]);
    float first = !Rule::kFirst ? 0.0f : kInPlace ? m[i] : in.m[i];
    float second = !Rule::kSecond ? 0.0f : kInPlace ? v[i] : in.v[i];
    rule(scaled<kScaled>(grad[i], factor), weight, first, second);
    split_number(weight, upper[i], lower[i]);
    if (Rule::kFirst) m[i] = first;
    if (Rule::kSecond) v[i] = second;
    largest = larger(largest, magnitude_bits(weight));
  }
  return largest;
}

}  // namespace TF_ISA
}  // namespace tf
