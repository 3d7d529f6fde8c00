// The update rules, element by element, in fp32. src/twinflow/rules/*.py is the truth: every line
// here is the same operations in the same order, so results agree bit for bit.
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
// A gradient can be perturbed only below 2^-100, where its square is zero in both modes; where it is
// divided by a small number (Adagrad) it is flushed first. flush_safe() checks the multipliers, and the
// rare call that fails the check runs in IEEE mode.
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

static inline float as_float(float x) { return x; }
static inline float as_float(uint16_t bf16) { return value((uint32_t)bf16 << 16); }

// The gradient times the factor; a factor of 1 changes nothing, so the common case leaves the product out.
template <bool kScaled, class Grad>
static inline float scaled(Grad grad, float factor) {
  return kScaled ? as_float(grad) * factor : as_float(grad);
}

// hyper[] by rule (scalars come from rules/*.py, computed in double, rounded once)
enum { kOneMinusB1 = 0, kB2 = 1, kOneMinusB2 = 2, kEps = 3, kStep = 4, kDecay = 5, kL2 = 6 };  // Adam, AdamW
enum { kAdagradEps = 0, kAdagradStep = 1, kAdagradL2 = 2 };
enum { kLionOneMinusB1 = 0, kLionOneMinusB2 = 1, kLionLr = 2, kLionDecay = 3 };
enum { kSgdMomentum = 0, kSgdKeep = 1, kSgdLr = 2, kSgdL2 = 3, kSgdNesterov = 4 };

// p, m, v hold n values and are updated in place; the gradient is read as fp32 or bf16. None of them overlap. Not
// inlined: the compiler trusts __restrict only on a function's own parameters.
#define TF_TILE                                                                                    \
  float *__restrict p, [[maybe_unused]] float *__restrict m, [[maybe_unused]] float *__restrict v, \
      const Grad *__restrict grad, const int n, [[maybe_unused]] const float factor, const float *hyper
#define TF_LOOP _Pragma("GCC unroll 2") for (int i = 0; i < n; ++i)  // two vectors hide the latency of sqrt and div

template <class Grad, bool kScaled,
          bool kCoupled>  // coupled: weight decay enters the gradient (Adam); else it shrinks the weight (AdamW)
__attribute__((noinline)) static void adam(TF_TILE) {
  const float one_minus_b1 = hyper[kOneMinusB1], b2 = hyper[kB2], one_minus_b2 = hyper[kOneMinusB2];
  const float eps = hyper[kEps], step = hyper[kStep], decay = hyper[kDecay], l2 = hyper[kL2];
  TF_LOOP {
    float g = scaled<kScaled>(grad[i], factor);
    float w = p[i];
    if (kCoupled) g = g + l2 * w;
    const float first = flush(m[i] + (g - m[i]) * one_minus_b1);
    const float second = flush_positive(b2 * v[i] + (one_minus_b2 * g) * g);
    if (!kCoupled) w = w * decay;
    p[i] = flush(w - step * (first / (sqrtf(second) + eps)));
    m[i] = first;
    v[i] = second;
  }
}

template <class Grad, bool kScaled>
__attribute__((noinline)) static void adagrad(TF_TILE) {
  const float eps = hyper[kAdagradEps], step = hyper[kAdagradStep], l2 = hyper[kAdagradL2];
  TF_LOOP {
    const float g = flush(scaled<kScaled>(grad[i], factor) + l2 * p[i]);
    const float sum = flush_positive(v[i] + g * g);
    p[i] = flush(p[i] - step * (g / (sqrtf(sum) + eps)));
    v[i] = sum;
  }
}

template <class Grad, bool kScaled>
__attribute__((noinline)) static void lion(TF_TILE) {
  const float one_minus_b1 = hyper[kLionOneMinusB1], one_minus_b2 = hyper[kLionOneMinusB2];
  const float lr = hyper[kLionLr], decay = hyper[kLionDecay];
  TF_LOOP {
    const float g = scaled<kScaled>(grad[i], factor);
    const float difference = g - m[i];
    const float direction = flush(m[i] + difference * one_minus_b1);
    const float move = direction > 0.0f ? lr : (direction < 0.0f ? -lr : direction);  // NaN stays NaN
    m[i] = flush(m[i] + difference * one_minus_b2);
    p[i] = flush(p[i] * decay - move);
  }
}

template <class Grad, bool kScaled, bool kNesterov>
__attribute__((noinline)) static void sgd(TF_TILE) {
  const float momentum = hyper[kSgdMomentum], keep = hyper[kSgdKeep], lr = hyper[kSgdLr], l2 = hyper[kSgdL2];
  TF_LOOP {
    const float g = scaled<kScaled>(grad[i], factor) + l2 * p[i];
    const float buffer = flush(momentum * m[i] + keep * g);
    const float direction = kNesterov ? flush(g + momentum * buffer) : buffer;
    p[i] = flush(p[i] - lr * direction);
    m[i] = buffer;
  }
}

template <class Grad, bool kScaled>
static void choose_rule(int rule, float* p, float* m, float* v, const Grad* g, int n, float factor,
                        const float* hyper) {
  switch (rule) {
    case TF_ADAMW: return adam<Grad, kScaled, false>(p, m, v, g, n, factor, hyper);
    case TF_ADAM: return adam<Grad, kScaled, true>(p, m, v, g, n, factor, hyper);
    case TF_ADAGRAD: return adagrad<Grad, kScaled>(p, m, v, g, n, factor, hyper);
    case TF_LION: return lion<Grad, kScaled>(p, m, v, g, n, factor, hyper);
    case TF_SGD:
      if (hyper[kSgdNesterov] != 0.0f) return sgd<Grad, kScaled, true>(p, m, v, g, n, factor, hyper);
      return sgd<Grad, kScaled, false>(p, m, v, g, n, factor, hyper);
  }
}

template <class Grad>
static void apply_rule(int rule, float* p, float* m, float* v, const Grad* g, int n, float factor, const float* hyper) {
  if (factor == 1.0f) return choose_rule<Grad, false>(rule, p, m, v, g, n, factor, hyper);
  choose_rule<Grad, true>(rule, p, m, v, g, n, factor, hyper);
}

static inline bool at_most_one(float x) { return fabsf(x) <= 1.0f; }

// Whether flush mode cannot change a bit of this segment's update (the note at the top).
static bool flush_safe(const tf_segment& s) {
  const float* h = s.hyper;
  if (!at_most_one(s.factor)) return false;
  switch (s.rule) {
    case TF_ADAMW:
    case TF_ADAM:  // (1 - b2) g is multiplied by g, which may be large: it must not be perturbed at all
      return at_most_one(h[kStep]) && at_most_one(h[kDecay]) && at_most_one(h[kL2]) && h[kOneMinusB2] >= 0x1p-25f;
    case TF_ADAGRAD: return at_most_one(h[kAdagradStep]) && at_most_one(h[kAdagradL2]);
    case TF_LION: return at_most_one(h[kLionDecay]);
    case TF_SGD:
      return at_most_one(h[kSgdMomentum]) && at_most_one(h[kSgdKeep]) && at_most_one(h[kSgdLr]) &&
             at_most_one(h[kSgdL2]);
  }
  return false;
}

}  // namespace TF_ISA
}  // namespace tf
