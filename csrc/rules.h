// SPDX-License-Identifier: Apache-2.0
// The update rules, element by element, in fp32 (SGD also in double). The operations and their order are those of
// src/twinflow/rules/*.py, so that results have the same bits. A rule is a struct, a code with a name, and a line in
// with_rule(). No other code in csrc depends on a rule.
//
// Why flushing is part of each rule: on x86 an operation on subnormal numbers is about a hundred times slower, and the
// momentum of unused embedding rows decays into that range. So every rule sets states and weights below 2^-100 in
// magnitude to +0 ("flushes" them), on every machine.
//
// Why x86 may then run with flush-to-zero and denormals-are-zero without changing a bit: flush mode replaces operands
// and results below 2^-126 by zero. This is called a perturbation here. Every number that a rule stores is
// flush(a + x), and perturbations of a and x are multiplied by at most 1.
// - If only one of them is perturbed, say x, then |x| < 2^-125. If |a| >= 2^-100, its neighbours are at least 2^-124
//   away, x is less than half of that, and the rounded sum is a in both modes. If |a| < 2^-100, then
//   |a| <= 2^-100 - 2^-124, and the sum is flushed in both modes.
// - If both are perturbed, both are below 2^-124, and the sum is flushed in both modes.
// The gradient: g * factor is perturbed only below 2^-126, where its square is zero in both modes. If weight decay is
// added to it, or it is divided (Adagrad), the sum is flushed at once, and the flushed sum is exact. The flush_safe()
// of each rule checks its multipliers: they must be 0, or from 2^-126 to 1. The rare call that fails the check runs in
// IEEE mode.
//
// SGD always runs in IEEE mode. It adds in double, where a may lie halfway between two fp32 numbers, and then any x
// decides the rounding: a subnormal weight that is read as zero could change a bit. Flush mode would also save little
// time: in double no number is subnormal (the least product of five fp32 numbers is 2^-745), and SGD has flushed the
// states and weights that it reads. Only subnormal gradients are slow.
#pragma once
#include <math.h>

#include "codecs.h"

namespace tf {
namespace TF_ISA {

constexpr uint32_t kTinyBits = 27u << 23;  // 2^-100

// Compares bits: integer comparisons vectorise to two or three instructions on all machines, while on NEON a float
// comparison that keeps NaN takes seven. The shift removes the sign.
static inline float flush(float x) { return (bits(x) << 1) < (kTinyBits << 1) ? 0.0f : x; }
// This uses a mask, because with `?:` gcc would repeat the selection after a square root of the result.
static inline float flush_positive(float x) {
  const uint32_t keep = bits(x) < kTinyBits ? 0u : ~0u;
  return value(bits(x) & keep);
}
// `flush` with a mask, for places where gcc would move later operations (a conversion, or the halves of a split master)
// before the selection. On AVX-512 gcc would turn them into branches, and the loop would not vectorise.
static inline float flush_mask(float x) {
  const uint32_t keep = (bits(x) << 1) < (kTinyBits << 1) ? 0u : ~0u;
  return value(bits(x) & keep);
}

// Indices in hyper[] by rule. The scalars come from rules/*.py, which computes them in double and rounds once.
enum { kOneMinusB1 = 0, kB2 = 1, kOneMinusB2 = 2, kEps = 3, kStep = 4, kDecay = 5, kL2 = 6 };  // Adam, AdamW
enum { kAdagradEps = 0, kAdagradStep = 1, kAdagradL2 = 2 };
enum { kLionOneMinusB1 = 0, kLionOneMinusB2 = 1, kLionLr = 2, kLionDecay = 3 };
enum { kSgdMomentum = 0, kSgdKeep = 1, kSgdLr = 2, kSgdL2 = 3, kSgdNesterov = 4 };

// Whether x is 0, or a normal number of at most 1. It compares bits, because the calling thread may be in flush mode.
static inline bool harmless(float x) {
  const uint32_t magnitude = bits(x) & 0x7fffffffu;
  return magnitude == 0 || (magnitude >= 0x00800000u && magnitude <= 0x3f800000u);
}

// A rule takes the gradient g and updates weight p, first state m and second state v of one element. flush_safe returns
// whether flush mode changes no bit with these scalars (see the note at the top).

// coupled: weight decay is added to the gradient (Adam); otherwise it multiplies the weight (AdamW)
template <bool kCoupled>
struct Adam {
  static constexpr bool kFirst = true, kSecond = true;  // the states of the rule
  float one_minus_b1, b2, one_minus_b2, eps, step, decay, l2;
  explicit Adam(const float* h)
      : one_minus_b1(h[kOneMinusB1]),
        b2(h[kB2]),
        one_minus_b2(h[kOneMinusB2]),
        eps(h[kEps]),
        step(h[kStep]),
        decay(h[kDecay]),
        l2(h[kL2]) {}
  bool flush_safe() const {  // (1 - b2) g is multiplied by g, which may be large, so it must not be perturbed at all
    return harmless(one_minus_b1) && harmless(b2) && one_minus_b2 >= 0x1p-25f && harmless(step) && harmless(decay) &&
           harmless(l2);
  }
  TF_INLINE_MEMBER void operator()(float g, float& p, float& m, float& v) const {
    if (kCoupled) g = flush(g + l2 * p);
    m = flush(m + (g - m) * one_minus_b1);
    v = flush_positive(b2 * v + (one_minus_b2 * g) * g);
    if (!kCoupled) p = p * decay;
    p = flush_mask(p - step * (m / (sqrtf(v) + eps)));
  }
};

struct Adagrad {
  static constexpr bool kFirst = false, kSecond = true;
  float eps, step, l2;
  explicit Adagrad(const float* h) : eps(h[kAdagradEps]), step(h[kAdagradStep]), l2(h[kAdagradL2]) {}
  bool flush_safe() const { return harmless(step) && harmless(l2); }
  TF_INLINE_MEMBER void operator()(float g, float& p, float&, float& v) const {
    g = flush(g + l2 * p);
    v = flush_positive(v + g * g);
    p = flush_mask(p - step * (g / (sqrtf(v) + eps)));
  }
};

struct Lion {
  static constexpr bool kFirst = true, kSecond = false;
  float one_minus_b1, one_minus_b2, lr, decay;
  explicit Lion(const float* h)
      : one_minus_b1(h[kLionOneMinusB1]), one_minus_b2(h[kLionOneMinusB2]), lr(h[kLionLr]), decay(h[kLionDecay]) {}
  bool flush_safe() const { return harmless(one_minus_b1) && harmless(one_minus_b2) && harmless(decay); }
  TF_INLINE_MEMBER void operator()(float g, float& p, float& m, float&) const {
    const float difference = g - m;
    const float direction = flush(m + difference * one_minus_b1);
    const float move = direction > 0.0f ? lr : (direction < 0.0f ? -lr : direction);  // NaN stays NaN
    m = flush(m + difference * one_minus_b2);
    p = flush_mask(p * decay - move);
  }
};

// SGD in the form of most calls: without weight decay, Nesterov and dampening. The weight is rounded once, as by the
// fused multiply-add of torch, because the product is exact in double.
struct SgdPlain {
  static constexpr bool kFirst = true, kSecond = false;
  float momentum;
  double lr;
  explicit SgdPlain(const float* h) : momentum(h[kSgdMomentum]), lr(h[kSgdLr]) {}
  bool flush_safe() const { return false; }
  TF_INLINE_MEMBER void operator()(float g, float& p, float& m, float&) const {
    m = flush_mask(momentum * m + g);
    p = flush_mask((float)(p - lr * m));
  }
};

static inline bool sgd_is_plain(const float* h) {
  return h[kSgdKeep] == 1.0f && h[kSgdL2] == 0.0f && h[kSgdNesterov] == 0.0f;
}

template <bool kNesterov>
struct Sgd {  // all in double: each state and weight is rounded once
  static constexpr bool kFirst = true, kSecond = false;
  double momentum, keep, lr, l2;
  explicit Sgd(const float* h) : momentum(h[kSgdMomentum]), keep(h[kSgdKeep]), lr(h[kSgdLr]), l2(h[kSgdL2]) {}
  bool flush_safe() const { return false; }
  TF_INLINE_MEMBER void operator()(float g, float& p, float& m, float&) const {
    const double weight = p, grad = g + l2 * weight;
    const double buffer = momentum * m + keep * grad;
    m = flush_mask((float)buffer);
    p = flush_mask((float)(weight - lr * (kNesterov ? grad + momentum * buffer : buffer)));
  }
};

// Codes of the rules in tf_segment. Python compares the names, in the order of the codes, with its own.
enum : int32_t { kAdamWCode, kAdamCode, kAdagradCode, kLionCode, kSgdCode };
constexpr const char* kRuleNames = "adamw adam adagrad lion sgd";

// Calls `run` with the rule of a segment.
template <class Run>
static void with_rule(const tf_segment& s, const Run& run) {
  const float* h = s.hyper;
  switch (s.rule) {
    case kAdamWCode: return run(Adam<false>(h));
    case kAdamCode:  // without weight decay Adam equals AdamW
      return h[kL2] == 0.0f ? run(Adam<false>(h)) : run(Adam<true>(h));
    case kAdagradCode: return run(Adagrad(h));
    case kLionCode: return run(Lion(h));
    case kSgdCode:
      if (sgd_is_plain(h)) return run(SgdPlain(h));
      return h[kSgdNesterov] != 0.0f ? run(Sgd<true>(h)) : run(Sgd<false>(h));
  }
}

}  // namespace TF_ISA
}  // namespace tf
