// The update rules, element by element, in fp32 (SGD also in double). src/twinflow/rules/*.py is the truth: every line
// here is the same operations in the same order, so results agree bit for bit. A rule is a struct, a code with a name,
// and a line in with_rule(); nothing else in csrc names one.
//
// Why flushing is part of each rule. On x86 an operation on subnormal numbers is some hundred
// times slower, and the momentum of unused embedding rows decays into that range. So every rule
// sets states and weights below 2^-100 in magnitude to +0, on every machine.
//
// Why that lets x86 run with flush-to-zero and denormals-are-zero without changing a bit. Flush
// mode replaces operands and results below 2^-126 by zero; call that a perturbation. Every number
// a rule stores is flush(a + x), and perturbations reach a and x multiplied by at most 1.
// - Only one of them is perturbed, say x, so |x| < 2^-125. If |a| >= 2^-100, its neighbours are at
//   least 2^-124 away, x is less than half of that, and the rounded sum is a either way. If
//   |a| < 2^-100, then |a| <= 2^-100 - 2^-124, and the sum is flushed either way.
// - Both are: then both are below 2^-124, and the sum is flushed either way.
// What a gradient becomes on its way into such a sum: g * factor is perturbed only below 2^-126, where
// its square is zero in both modes. Where weight decay is added to it, or it is divided (Adagrad), the
// sum is flushed at once, so what goes on is exact. Each rule's flush_safe() checks its multipliers: 0, or
// from 2^-126 to 1; the rare call that fails the check runs in IEEE mode.
//
// SGD always does. It adds in double, where a need not be an fp32 number but may lie halfway between two, and any x
// decides: a subnormal weight read as zero could change a bit. Nor would it gain much: in double nothing is subnormal
// (the least product of five fp32 numbers is 2^-745), and the states and weights that it reads it has flushed itself.
// Only subnormal gradients cost it time.
#pragma once
#include <math.h>

#include "codecs.h"

namespace tf {
namespace TF_ISA {

constexpr uint32_t kTinyBits = 27u << 23;  // 2^-100

// By bits: integer compares vectorise to two or three instructions everywhere, where on NEON a float compare that
// lets NaN through takes seven. The shift drops the sign.
static inline float flush(float x) { return (bits(x) << 1) < (kTinyBits << 1) ? 0.0f : x; }
static inline float flush_positive(float x) {  // as a mask, or gcc selects once more after a sqrt of the result
  const uint32_t keep = bits(x) < kTinyBits ? 0u : ~0u;
  return value(bits(x) & keep);
}
// flush, for where gcc would move what follows before the selection: a conversion, or the halves of a split master. On
// AVX-512 it would make branches of that, and the loop would not vectorise.
static inline float flush_mask(float x) {
  const uint32_t keep = (bits(x) << 1) < (kTinyBits << 1) ? 0u : ~0u;
  return value(bits(x) & keep);
}

// hyper[] by rule (scalars come from rules/*.py, computed in double, rounded once)
enum { kOneMinusB1 = 0, kB2 = 1, kOneMinusB2 = 2, kEps = 3, kStep = 4, kDecay = 5, kL2 = 6 };  // Adam, AdamW
enum { kAdagradEps = 0, kAdagradStep = 1, kAdagradL2 = 2 };
enum { kLionOneMinusB1 = 0, kLionOneMinusB2 = 1, kLionLr = 2, kLionDecay = 3 };
enum { kSgdMomentum = 0, kSgdKeep = 1, kSgdLr = 2, kSgdL2 = 3, kSgdNesterov = 4 };

// 0, or a normal number of at most 1. By bits: the calling thread may be in flush mode itself.
static inline bool harmless(float x) {
  const uint32_t magnitude = bits(x) & 0x7fffffffu;
  return magnitude == 0 || (magnitude >= 0x00800000u && magnitude <= 0x3f800000u);
}

// A rule takes the gradient g and updates weight p, first state m and second state v of one element. flush_safe:
// whether flush mode cannot change a bit with these scalars (the note at the top).

template <bool kCoupled>  // coupled: weight decay enters the gradient (Adam); else it shrinks the weight (AdamW)
struct Adam {
  static constexpr bool kFirst = true, kSecond = true;  // the states it has
  float one_minus_b1, b2, one_minus_b2, eps, step, decay, l2;
  explicit Adam(const float* h)
      : one_minus_b1(h[kOneMinusB1]),
        b2(h[kB2]),
        one_minus_b2(h[kOneMinusB2]),
        eps(h[kEps]),
        step(h[kStep]),
        decay(h[kDecay]),
        l2(h[kL2]) {}
  bool flush_safe() const {  // (1 - b2) g is multiplied by g, which may be large: it must not be perturbed at all
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

// SGD in the form that most calls have: no weight decay, no Nesterov, no dampening. The weight is rounded once, as by a
// fused multiply-add, which torch uses: the product is exact in double.
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

// Rules by tf_segment's code. Python reads the names, in the order of the codes, and has to have the same.
enum : int32_t { kAdamWCode, kAdamCode, kAdagradCode, kLionCode, kSgdCode };
constexpr const char* kRuleNames = "adamw adam adagrad lion sgd";

// Calls `run` with a segment's rule.
template <class Run>
static void with_rule(const tf_segment& s, const Run& run) {
  const float* h = s.hyper;
  switch (s.rule) {
    case kAdamWCode: return run(Adam<false>(h));
    case kAdamCode:  // without weight decay there is nothing to couple
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
