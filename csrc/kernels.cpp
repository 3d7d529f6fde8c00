// SPDX-License-Identifier: Apache-2.0
// The kernels of one ISA variant. CMake compiles this file once for each variant with -DTF_ISA=name. All functions have
// internal linkage or are in namespace TF_ISA, so that the linker never mixes code of different variants. For the same
// reason the C++ standard library is not used.
//
// An update processes tiles that stay in L1. The loop over elements is in loop.h, the rules are in rules.h, and
// conversions are in codecs.h.
#include "kernels.h"

#include "int8_avx512.h"
#include "loop.h"
#include "packing.h"
#include "unpacking.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define TF_STRING_(x) #x
#define TF_STRING(x) TF_STRING_(x)
#define TF_JOIN_(a, b) a##b
#define TF_JOIN(a, b) TF_JOIN_(a, b)

namespace tf {
namespace TF_ISA {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Switches flush-to-zero and denormals-are-zero on or off for a scope, whatever mode the calling thread is in. On
// aarch64 both are always off, because subnormal numbers are not slow there.
struct FlushMode {
#if defined(__x86_64__)
  static constexpr unsigned kBits = 0x8040u;
  const unsigned saved = _mm_getcsr();
  explicit FlushMode(bool on) { _mm_setcsr(on ? saved | kBits : saved & ~kBits); }
  ~FlushMode() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  static constexpr uint64_t kBit = 1u << 24;
  uint64_t saved;
  explicit FlushMode(bool) {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    if (saved & kBit) asm volatile("msr fpcr, %0" : : "r"(saved & ~kBit) : "memory");
  }
  ~FlushMode() {
    if (saved & kBit) asm volatile("msr fpcr, %0" : : "r"(saved) : "memory");
  }
#else
  explicit FlushMode(bool) {}
#endif
};

// Copies that bypass the cache, for data that is written once and not read again here ("streamed").
#if defined(__x86_64__)
constexpr bool kCanStream = true;

void stream(void* into, const void* from, int64_t num_bytes) {
  char* to = (char*)into;
  const char* source = (const char*)from;
  const int64_t head = smaller(num_bytes, (64 - ((intptr_t)to & 63)) & 63);
  memcpy(to, source, (size_t)head);
  int64_t i = head;
  for (; i + 64 <= num_bytes; i += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)(to + i), _mm512_loadu_si512(source + i));
#elif defined(__AVX__)
    _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(source + i)));
    _mm256_stream_si256((__m256i*)(to + i + 32), _mm256_loadu_si256((const __m256i*)(source + i + 32)));
#else
    for (int k = 0; k < 64; k += 16)
      _mm_stream_si128((__m128i*)(to + i + k), _mm_loadu_si128((const __m128i*)(source + i + k)));
#endif
  }
  memcpy(to + i, source + i, (size_t)(num_bytes - i));
}

void stream_fence() { _mm_sfence(); }
#else
constexpr bool kCanStream = false;  // aarch64 cores detect stores of whole lines and do not cache them

void stream(void* into, const void* from, int64_t num_bytes) { memcpy(into, from, (size_t)num_bytes); }

void stream_fence() {}
#endif

struct alignas(64) Scratch {
  float g[kTile], p[kTile], m[kTile], v[kTile];
  uint16_t weight[kTile], lower[kTile], first[kTile], second[kTile], random[kTile];
  uint16_t first_random[kTile], weight_random[kTile];
  uint8_t code[2 * kTile];
};

// One update of a segment, tile by tile. It decodes states that the loop cannot read, runs the rule, encodes the
// states, and copies results from scratch memory to their final address without caching.
struct Update {
  const tf_segment& s;
  Scratch& t;
  const bool out_of_place = s.master_in != s.master;
  const bool through_scratch = kCanStream && out_of_place;

  // The address to which the loop writes. This is scratch memory if the update is out of place and the result can be
  // streamed from there. Otherwise it is the final address.
  template <class T>
  T* out(void* base, T* scratch, int64_t at) const {
    return through_scratch ? scratch : (T*)base + at;
  }

  // Copies results of the loop from scratch memory to their final address, if the loop has not written them there.
  template <class T>
  void flush_out(void* base, const T* scratch, int64_t at, int n) const {
    if (through_scratch && base) stream((T*)base + at, scratch, (int64_t)n * (int64_t)sizeof(T));
  }

  void decode(int which, float* into, int64_t at, int n) const {
    const uint8_t* codes = (const uint8_t*)s.state_in[which] + at;
    const float* scales = s.scale_in[which] + at / kBlock;
    for_blocks(n, [=] [[gnu::always_inline]] (int i, int count) {
      which == 0 ? decode_e4m3(codes + i, scales[i / kBlock], into + i, count)
                 : decode_e5m3(codes + i, scales[i / kBlock], into + i, count);
    });
  }

  void decode_both(float* m, float* v, int64_t at, int n) const {
    const uint8_t* codes = (const uint8_t*)s.state_in[0] + at;
    const float *first = s.scale_in[0] + at / kBlock, *second = s.scale_in[1] + at / kBlock;
    for_blocks(n, [=] [[gnu::always_inline]] (int i, int count) {
      decode_4bit(codes + i, first[i / kBlock], second[i / kBlock], m + i, v + i, count);
    });
  }

  void encode_both(const float* m, const float* v, int64_t at, int n) const {
    float first[kTile / kBlock], second[kTile / kBlock];
    scan(0, kMoment4Max, m, first, at, n);
    scan(1, kVariance4Max, v, second, at, n);
    uint8_t* codes = out(s.state[0], t.code, at);
    for_blocks(n, [&] [[gnu::always_inline]] (int i, int count) {
      const float a = first[i / kBlock], b = second[i / kBlock];
      const float inverse[2] = {a == a ? a : 0.0f, b == b ? b : 0.0f};
      const int32_t keep[2] = {a == a ? -1 : 0, b == b ? -1 : 0};
      encode_4bit({m + i, v + i}, inverse, keep, {t.first_random + i, t.random + i}, codes + i, count);
    });
    flush_out(s.state[0], t.code, at, n);
  }

  // Computes for each block the scale of its codes, and in `inverse` the factor that scales its values into the range
  // of the codes. Both are NaN for a block with an infinity or a NaN. This loop is separate from the encoding, because
  // the computation for a block is a long chain of dependent operations, and the chains of many blocks overlap here.
  void scan(int which, float top, const float* values, float* inverse, int64_t at, int n) const {
    float* scales = s.scale[which] + at / kBlock;
    const float nan = value(0x7fc00000u);
    for_blocks(n, [=] [[gnu::always_inline]] (int i, int count) {
      const float largest = largest_magnitude(values + i, count);
      const bool finite = bits(largest) < 0x7f800000u;
      scales[i / kBlock] = finite ? largest * (1.0f / top) : nan;
      inverse[i / kBlock] = !finite ? nan : largest == 0.0f ? 0.0f : top / largest;
    });
  }

  void encode(const float* m, const float* v, int64_t at, int n) const {
    float first[kTile / kBlock], second[kTile / kBlock];
    scan(0, kMomentMax, m, first, at, n);
    scan(1, kVarianceMax, v, second, at, n);
    uint8_t *m_codes = out(s.state[0], t.code, at), *v_codes = out(s.state[1], t.code + kTile, at);
    for_blocks(n, [&] [[gnu::always_inline]] (int i, int count) {
      const float a = first[i / kBlock], b = second[i / kBlock];
      a == a ? encode_e4m3(m + i, a, t.random + i, m_codes + i, count) : (void)memset(m_codes + i, 0, (size_t)count);
      b == b ? encode_e5m3(v + i, b, t.random + i, v_codes + i, count) : (void)memset(v_codes + i, 0, (size_t)count);
    });
    flush_out(s.state[0], t.code, at, n);
    flush_out(s.state[1], t.code + kTile, at, n);
  }

#if defined(__AVX512F__)
  // Runs the int8 format with int8_avx512.h. Returns false without any effect if it does not support the call.
  template <class Rule, class Grad, class Master>
  bool int8_by_hand(const Rule&, const Grad&, const Master&, int64_t, int) const {
    return false;
  }

  template <bool kCoupled, class T>
  bool int8_by_hand(const Adam<kCoupled>& rule, const Gradient<T, true>& grad, const Split& master, int64_t at,
                    int n) const {
    if (n % kBlock != 0) return false;
    const uint8_t *m_in = (const uint8_t*)s.state_in[0] + at, *v_in = (const uint8_t*)s.state_in[1] + at;
    uint8_t *m_codes = out(s.state[0], t.code, at), *v_codes = out(s.state[1], t.code + kTile, at);
    const int64_t block = at / kBlock;
    const Int8Tile<kCoupled, T> tile = {rule,
                                        grad,
                                        master,
                                        {m_in, v_in},
                                        {s.scale_in[0] + block, s.scale_in[1] + block},
                                        {m_codes, v_codes},
                                        {s.scale[0] + block, s.scale[1] + block},
                                        t.m,
                                        t.v,
                                        t.first};
    const uint32_t first_block = (uint32_t)((s.first_index + at) / kBlock);
    const Key key = {s.key[0], s.key[1]};
    if (s.factor == 1.0f ? tile.template run<false>(first_block, key, n)
                         : tile.template run<true>(first_block, key, n)) {
      flush_out(s.state[0], t.code, at, n);
      flush_out(s.state[1], t.code + kTile, at, n);
      return true;
    }
    mend_nans(master.upper, master.lower, n);
    draw(at, n);
    encode(t.m, t.v, at, n);
    return true;
  }
#endif

  Key key() const { return {s.key[0], s.key[1]}; }

  // Random bits for the rounding of states. A tile starts at a block.
  void draw(int64_t at, int n) const { draw(key(), t.random, at, n); }

  void draw(Key key, uint16_t* into, int64_t at, int n) const {
    const uint32_t block = (uint32_t)((s.first_index + at) / kBlock);
    for_blocks(n, [=] [[gnu::always_inline]] (int i, int count) {
      random_block(block + (uint32_t)(i / kBlock), key, into + i, count);
    });
  }

  template <class Rule, class Grad, class Master>
  void with_master(const Rule& rule, const Grad& grad, const Master& master, int64_t at, int n) const {
    constexpr bool kFirst = Rule::kFirst, kSecond = Rule::kSecond;
    const bool keep_first = kFirst && s.state[0];  // SGD without momentum has no state
    if (s.format == TF_STATE_BF16) {
      if (kSecond) draw(at, n);
      const Bf16 first = {(const uint16_t*)s.state_in[0] + at, out(s.state[0], t.first, at)};
      const Bf16Stochastic second = {(const uint16_t*)s.state_in[1] + at, out(s.state[1], t.second, at), t.random};
      run(rule, grad, master, first, second, keep_first, n);
      if (keep_first) flush_out(s.state[0], t.first, at, n);
      if (kSecond) flush_out(s.state[1], t.second, at, n);
    } else if (s.format == TF_STATE_INT8) {
#if defined(__AVX512F__)
      if (int8_by_hand(rule, grad, master, at, n)) return;
#endif
      draw(at, n);
      decode(0, t.m, at, n);
      decode(1, t.v, at, n);
      run(rule, grad, master, Fp32{t.m, t.m}, Fp32{t.v, t.v}, keep_first, n);
      encode(t.m, t.v, at, n);
    } else if (s.format == TF_STATE_4BIT) {
      draw(at, n);
      draw(key_of_moment(key()), t.first_random, at, n);
      decode_both(t.m, t.v, at, n);
      run(rule, grad, master, Fp32{t.m, t.m}, Fp32{t.v, t.v}, keep_first, n);
      encode_both(t.m, t.v, at, n);
    } else {
      const Fp32 first = {(const float*)s.state_in[0] + at, out(s.state[0], t.m, at)};
      const Fp32 second = {(const float*)s.state_in[1] + at, out(s.state[1], t.v, at)};
      run(rule, grad, master, first, second, keep_first, n);
      if (keep_first) flush_out(s.state[0], t.m, at, n);
      if (kSecond) flush_out(s.state[1], t.v, at, n);
    }
  }

  // Runs the loop with the states of the rule.
  template <class Rule, class Grad, class Master, class First, class Second>
  static void run(const Rule& rule, const Grad& grad, const Master& master, const First& first, const Second& second,
                  bool keep_first, int n) {
    if constexpr (Rule::kFirst && Rule::kSecond) {
      master.mend(loop(rule, grad, master, first, second, n), n);
    } else if constexpr (Rule::kSecond) {
      master.mend(loop(rule, grad, master, Nothing{}, second, n), n);
    } else if (keep_first) {
      master.mend(loop(rule, grad, master, first, Nothing{}, n), n);
    } else {
      master.mend(loop(rule, grad, master, Nothing{}, Nothing{}, n), n);
    }
  }

  template <class Rule, class Grad>
  void with_grad(const Rule& rule, const Grad& grad, int64_t at, int n) const {
    if (s.master_kind == TF_MASTER_NONE) {
      draw(key_of_weight(key()), t.weight_random, at, n);
      with_master(rule, grad,
                  Bf16Weight{(const uint16_t*)s.master_in + at, out(s.master, t.weight, at), t.weight_random}, at, n);
      flush_out(s.master, t.weight, at, n);
      return;
    }
    if (s.master_kind == TF_MASTER_SPLIT) {
      const Split master = {(const uint16_t*)s.weight_in + at, (const int16_t*)s.master_in + at,
                            out(s.weight, t.weight, at), out(s.master, (int16_t*)t.lower, at)};
      with_master(rule, grad, master, at, n);
      flush_out(s.weight, t.weight, at, n);
      flush_out(s.master, t.lower, at, n);
      return;
    }
    float* p = out(s.master, t.p, at);
    with_master(rule, grad, Fp32{(const float*)s.master_in + at, p}, at, n);
    put_weight(p, at, n);
    flush_out(s.master, t.p, at, n);
  }

  // Writes the weight, rounded from the master. The weight is never read here, so it bypasses the cache if possible.
  void put_weight(const float* p, int64_t at, int n) const {
    if (s.weight_type == TF_NONE) return;
    if (s.weight_type == TF_F32) return stream((float*)s.weight + at, p, (int64_t)n * 4);
    if (!kCanStream) return store(p, s.weight, s.weight_type, at, n);
    store(p, t.weight, s.weight_type, 0, n);
    stream((uint16_t*)s.weight + at, t.weight, (int64_t)n * 2);
  }

  template <class Rule, class T>
  void in_place(const Rule& rule, const T* grad, int64_t at, int n) const {
    float *p = (float*)s.master + at, *m = (float*)s.state[0] + at, *v = (float*)s.state[1] + at;
    s.factor == 1.0f ? loop_in_place<false>(rule, grad, s.factor, p, m, v, n)
                     : loop_in_place<true>(rule, grad, s.factor, p, m, v, n);
    put_weight(p, at, n);
  }

  template <bool kInPlace, class Rule, class T>
  void split_fp32(const Rule& rule, const T* grad, int64_t at, int n) const {
    const SplitIn in = {(const uint16_t*)s.weight_in + at, (const int16_t*)s.master_in + at,
                        (const float*)s.state_in[0] + at, (const float*)s.state_in[1] + at};
    uint16_t* upper = out(s.weight, t.weight, at);
    int16_t* lower = out(s.master, (int16_t*)t.lower, at);
    float *m = out(s.state[0], t.m, at), *v = out(s.state[1], t.v, at);
    const uint32_t largest = s.factor == 1.0f
                                 ? loop_split<false, kInPlace>(rule, grad, s.factor, in, upper, lower, m, v, n)
                                 : loop_split<true, kInPlace>(rule, grad, s.factor, in, upper, lower, m, v, n);
    Split{in.upper, in.lower, upper, lower}.mend(largest, n);
    flush_out(s.weight, t.weight, at, n);
    flush_out(s.master, t.lower, at, n);
    if (Rule::kFirst) flush_out(s.state[0], t.m, at, n);
    if (Rule::kSecond) flush_out(s.state[1], t.v, at, n);
  }

  template <class Rule, class T>
  void choose_loop(const Rule& rule, const T* grad, int64_t at, int n) const {
    const bool has_states = (!Rule::kFirst || s.state[0]) && (!Rule::kSecond || s.state[1]);
    if (s.format == TF_STATE_F32 && has_states && s.master_kind != TF_MASTER_NONE) {
      if (s.master_kind == TF_MASTER_SPLIT)
        return out_of_place ? split_fp32<false>(rule, grad, at, n) : split_fp32<true>(rule, grad, at, n);
      if (!out_of_place) return in_place(rule, grad, at, n);
    }
    with_grad(rule, Gradient<T, true>{grad, s.factor}, at, n);
  }

  template <class Rule>
  void tile(const Rule& rule, int64_t at, int n) const {
    if (s.grad_type == TF_BF16) return choose_loop(rule, (const uint16_t*)s.grad + at, at, n);
    if (s.grad_type == TF_F32) return choose_loop(rule, (const float*)s.grad + at, at, n);
    load_f16((const uint16_t*)s.grad + at, 1.0f, t.g, n);
    choose_loop(rule, t.g, at, n);
  }

  template <class Rule>
  void tiles(const Rule& rule, int64_t begin, int64_t end) const {
    for (int64_t at = begin; at < end; at += kTile) tile(rule, at, (int)smaller(kTile, end - at));
    stream_fence();
  }
};

void update(const tf_segment& s, int64_t begin, int64_t end) {
  with_rule(s, [&](const auto& rule) {
    FlushMode mode(harmless(s.factor) && rule.flush_safe());
    Scratch scratch;
    Update{s, scratch}.tiles(rule, begin, end);
  });
}

// The order of additions is fixed: sixteen lanes are summed, each in order, and the lanes are then added in halves.
double sum_squares(const void* tensor, int dtype, int64_t begin, int64_t end) {
  FlushMode mode(true);  // values below 2^-100 count as zero, as in the rules
  alignas(64) float x[kTile];
  alignas(64) double lanes[16] = {0};
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    load(tensor, dtype, at, x, n);
    for (int i = n; i & 15; ++i) x[i] = 0.0f;
    for (int i = 0; i < n; i += 16) {
      for (int k = 0; k < 16; ++k) {
        const double d = flush(x[i + k]);
        lanes[k] += d * d;
      }
    }
  }
  for (int width = 8; width; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}

void accumulate(float* into, const void* from, int from_type, int64_t begin, int64_t end) {
  FlushMode mode(false);
  alignas(64) float x[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    load(from, from_type, at, x, n);
    float* __restrict target = into + at;
    for (int i = 0; i < n; ++i) target[i] += x[i];
  }
}

void cast(void* into, int into_type, const void* from, int from_type, int64_t begin, int64_t end) {
  FlushMode mode(false);
  alignas(64) float x[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    load(from, from_type, at, x, n);
    store(x, into, into_type, at, n);
  }
}

// Ties may go either way: torch rounds them to even, and a split master rounds them away from zero.
void adopt(float* master, const void* values, int values_type, int64_t begin, int64_t end) {
  FlushMode mode(false);
  alignas(64) float given[kTile], rounded[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    float* __restrict own = master + at;
    load(values, values_type, at, given, n);
    cast(rounded, TF_F32, own, TF_F32, 0, n);
    if (values_type != TF_F32) {
      alignas(64) uint16_t half[kTile];
      cast(half, values_type, own, TF_F32, 0, n);
      cast(rounded, TF_F32, half, values_type, 0, n);
    }
    const uint32_t reach = values_type == TF_BF16 ? 0x8000u : 0u;  // half the distance of two bf16 values
    for (int i = 0; i < n; ++i) {
      const uint32_t u = bits(own[i]), v = bits(given[i]);
      const bool both_finite = (u & 0x7F800000u) != 0x7F800000u && (v & 0x7F800000u) != 0x7F800000u;
      const bool is_near = both_finite && reach && u - v + reach <= 2 * reach;
      own[i] = is_near || rounded[i] == given[i] ? own[i] : given[i];
    }
  }
}

void split_all(const float* values, uint16_t* upper, int16_t* lower, int64_t numel) {
  for (int64_t at = 0; at < numel; at += kTile)
    split(values + at, upper + at, lower + at, (int)smaller(kTile, numel - at));
}

void join_all(const uint16_t* upper, const int16_t* lower, float* values, int64_t numel) {
  for (int64_t at = 0; at < numel; at += kTile)
    join(upper + at, lower + at, values + at, (int)smaller(kTile, numel - at));
}

void scale(float* __restrict values, float factor, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) values[i] *= factor;
}

void encode(const tf_packing& packing, int64_t row, int64_t begin, int64_t end) {
  FlushMode mode(false);
  encode_range(packing, row, begin, end);
}

void mean(const tf_packing& packing, int64_t, int64_t begin, int64_t end) {
  FlushMode mode(false);
  decode_range(packing, 0, packing.num_rows, begin, end);
}

void decode(const tf_packing& packing, int64_t row, int64_t begin, int64_t end) {
  FlushMode mode(false);
  decode_range(packing, row, 1, begin, end);
}

}  // namespace
}  // namespace TF_ISA

const Kernels& TF_JOIN(kernels_, TF_ISA)() {
  using namespace TF_ISA;
  static const Kernels table = {TF_STRING(TF_ISA), kRuleNames, update, sum_squares, accumulate, cast,  adopt,
                                split_all,         join_all,   scale,  encode,      mean,       decode};
  return table;
}

}  // namespace tf
