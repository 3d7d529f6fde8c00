// The one loop over elements, for every rule and every way that weights and states lie in memory.
//
// A rule works on fp32 numbers in registers; how each of them is read and written is a small accessor. The loop is
// fused on purpose: while the divider is busy with one vector, the conversions of the next ones run beside it.
#pragma once
#include "codecs.h"
#include "rules.h"

namespace tf {
namespace TF_ISA {

TF_INLINE float widen(float x) { return x; }
TF_INLINE float widen(uint16_t x) { return from_bf16(x); }

// A factor of 1 changes nothing, so the common case leaves the product out.
template <bool kScaled, class T>
TF_INLINE float scaled(T grad, float factor) {
  return kScaled ? widen(grad) * factor : widen(grad);
}

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
};

struct Split {
  const uint16_t* upper_in;
  const int16_t* lower_in;
  uint16_t* upper;
  int16_t* lower;
  TF_INLINE_MEMBER float get(int i) const { return join_one(upper_in[i], lower_in[i]); }
  TF_INLINE_MEMBER void put(int i, float x) const { split_one(x, upper[i], lower[i]); }
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

struct Nothing {  // a state that the rule does not have
  TF_INLINE_MEMBER float get(int) const { return 0.0f; }
  TF_INLINE_MEMBER void put(int, float) const {}
};

// ivdep: iterations are independent; an element is read before it is written, so in place is fine.
template <class Rule, class Grad, class Master, class First, class Second>
__attribute__((noinline)) static void loop(Rule rule, Grad grad, Master master, First first, Second second, int n) {
#pragma GCC ivdep
#pragma GCC unroll 2
  for (int i = 0; i < n; ++i) {
    float p = master.get(i), m = first.get(i), v = second.get(i);
    rule(grad.get(i), p, m, v);
    master.put(i, p);
    first.put(i, m);
    second.put(i, v);
  }
}

// The same for fp32 in place, the common case: with __restrict (which holds only for a function's own parameters) the
// compiler may interleave two vectors, and that hides the latency of the square root and the division.
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

}  // namespace TF_ISA
}  // namespace tf
