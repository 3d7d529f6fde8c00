// SPDX-License-Identifier: Apache-2.0
// Prints a hash of what every rule, format and dtype gives on fixed data, for each ISA variant this CPU can run. Built
// for several CPUs (some under emulation), all the lines after the variant's name must agree.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "../../csrc/api.h"

static uint64_t state = 88172645463325252ull;
static uint32_t next_bits() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 16);
}
// Ordinary numbers of many sizes, with zeros, tiny ones and subnormals among them, built from bits alone.
static float number(bool positive) {
  static const int exponents[] = {127, 126, 120, 117, 107, 60, 27, 26, 25, 10, 1, 0, 0};
  const uint32_t r = next_bits();
  uint32_t u = ((uint32_t)exponents[r % 13] << 23) | (next_bits() & 0x7fffffu) | (positive ? 0u : r & 0x80000000u);
  if (r % 13 == 12) u &= 0x80000000u;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
static uint64_t hash(const std::vector<uint8_t>& bytes, uint64_t h) {
  for (uint8_t b : bytes) h = (h ^ b) * 1099511628211ull;
  return h;
}
template <class T>
static std::vector<uint8_t> raw(size_t n, T (*make)()) {
  std::vector<uint8_t> out(n * sizeof(T));
  for (size_t i = 0; i < n; ++i) {
    const T x = make();
    memcpy(out.data() + i * sizeof(T), &x, sizeof(T));
  }
  return out;
}
static uint16_t half_bits() {  // bf16 and fp16 alike: no infinities or NaN
  return (uint16_t)(next_bits() & 0xbbffu);
}
static uint8_t code() { return (uint8_t)(next_bits() % 126); }

#if defined(__x86_64__)
#include <immintrin.h>
// The manual says that conversions from and to fp16 ignore flush mode; some emulators do not follow it.
__attribute__((target("f16c"))) static bool f16c_ignores_flush_mode() {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  volatile float x = _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16(1)));
  _mm_setcsr(saved);
  return x != 0.0f;
}
static bool trust_f16() { return !__builtin_cpu_supports("f16c") || f16c_ignores_flush_mode(); }
#else
static bool trust_f16() { return true; }
#endif

int main() {
  printf("fp16 %s\n", trust_f16() ? "right" : "wrong");
  const size_t n = 5000, blocks = (n + 127) / 128;
  char names[100];
  strcpy(names, tf_isa_available());
  tf_set_threads(2);
  std::vector<std::string> rules(1);
  for (const char* c = tf_rules(); *c; ++c) {
    if (*c == ' ')
      rules.emplace_back();
    else
      rules.back().push_back(*c);
  }
  for (char* isa = strtok(names, " "); isa; isa = strtok(nullptr, " ")) {
    tf_set_isa(isa);
    state = 88172645463325252ull;
    for (int rule = 0; rule < (int)rules.size(); ++rule)
      for (int format = 0; format < 4; ++format)
        for (int grad_type = 1; grad_type <= 3; ++grad_type)
          for (int weight_type = 0; weight_type <= 3; ++weight_type)
            for (int form = 0; form < (weight_type == TF_BF16 ? 9 : 3); ++form) {
              const int variant = form % 3;
              const int kind = form / 3;  // tf_master
              const bool split = kind == TF_MASTER_SPLIT, is_own_master = kind == TF_MASTER_NONE;
              auto grad =
                  grad_type == TF_F32 ? raw<float>(n, [] { return number(false); }) : raw<uint16_t>(n, half_bits);
              auto weight =
                  weight_type == TF_F32 ? raw<float>(n, [] { return number(false); }) : raw<uint16_t>(n, half_bits);
              auto master = raw<float>(n, [] { return number(false); });
              if (split) {  // halves of numbers: halves at random may be a NaN, whose payload differs between CPUs
                std::vector<uint8_t> lower(n * sizeof(int16_t));
                tf_split((const float*)master.data(), (uint16_t*)weight.data(), (int16_t*)lower.data(), (int64_t)n);
                master = lower;
              }
              if (is_own_master) master = weight;
              std::vector<uint8_t> states[2], scales[2];
              for (int k = 0; k < 2; ++k) {
                states[k] = format == TF_STATE_F32
                                ? raw<float>(
                                      n, k ? +[] { return number(true); } : +[] { return number(false); })
                            : format == TF_STATE_BF16 ? raw<uint16_t>(
                                                            n, +[] { return (uint16_t)(next_bits() & 0x3bffu); })
                                                      : raw<uint8_t>(n, code);
                scales[k] = raw<float>(blocks, +[] { return 1e-4f; });
              }
              tf_segment s;
              memset(&s, 0, sizeof s);
              s.grad = grad.data(), s.numel = (int64_t)n, s.first_index = 128 * variant;
              s.rule = rule, s.format = format, s.grad_type = grad_type;
              s.weight_type = is_own_master ? (int32_t)TF_NONE : weight_type;
              s.master_kind = kind;
              s.weight_in = s.weight = s.weight_type ? weight.data() : nullptr;
              s.master_in = s.master = master.data();
              for (int k = 0; k < 2; ++k) {  // a rule leaves a state alone that it does not have
                s.state_in[k] = s.state[k] = states[k].data();
                s.scale_in[k] = s.scale[k] = (float*)scales[k].data();
              }
              s.factor = variant == 0 ? 1.0f : variant == 1 ? 0.37f : 3.0f;
              // Any scalars will do for a rule that make no NaN, whose payload differs between CPUs.
              float hyper[] = {0.1f, 0.99f, 0.01f, 1e-9f, variant == 2 ? 5.0f : 0.01f, 0.999f, 0.01f};
              if (rules[(size_t)rule] == "sgd") {  // its forms: Nesterov with weight decay, weight decay, neither
                const float sgd[] = {0.9f, 1.0f, 0.01f, variant == 2 ? 0.0f : 0.1f, variant == 1 ? 1.0f : 0.0f, 0, 0};
                memcpy(hyper, sgd, sizeof hyper);
              }
              memcpy(s.hyper, hyper, sizeof s.hyper);
              s.key[0] = 12345u + (uint32_t)variant, s.key[1] = 67890u;
              tf_update(&s, 1);
              tf_update(&s, 1);
              uint64_t h = 14695981039346656037ull;
              h = hash(states[1], hash(states[0], hash(weight, hash(master, h))));
              if (format == TF_STATE_INT8 || format == TF_STATE_4BIT) h = hash(scales[1], hash(scales[0], h));
              printf("%s %d %d %d %d %d %016llx\n", isa, rule, format, grad_type, weight_type, form,
                     (unsigned long long)h);
            }
  }
}
