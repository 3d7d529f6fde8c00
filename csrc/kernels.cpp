// The kernels of one ISA variant. CMake compiles this file once for each variant with -DTF_ISA=name;
// everything here has internal linkage or lives in namespace TF_ISA, so that no code built for one
// CPU can be linked into another's path. For the same reason nothing from the C++ library is used.
//
// An update goes through tiles of 1024 elements: decode what is not fp32 into L1, apply the rule in
// place, encode. With fp32 state in place the rule works directly on memory.
#include "kernels.h"

#include "codecs.h"
#include "rules.h"
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

// Flush-to-zero and denormals-are-zero for a scope, on x86; aarch64 has no subnormal penalty worth it.
struct FlushMode {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  explicit FlushMode(bool on) {
    if (on) _mm_setcsr(saved | 0x8040u);
  }
  ~FlushMode() { _mm_setcsr(saved); }
#else
  explicit FlushMode(bool) {}
#endif
};

// Copy past the caches: for data that is written once and not read again here.
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
constexpr bool kCanStream = false;  // aarch64 cores see a run of full-line stores and stop allocating by themselves

void stream(void* into, const void* from, int64_t num_bytes) { memcpy(into, from, (size_t)num_bytes); }

void stream_fence() {}
#endif

struct alignas(64) Scratch {
  float g[kTile], p[kTile], m[kTile], v[kTile];
  uint16_t half[kTile], lower[kTile];
  uint8_t code[kTile];
};

// One update of [begin, end) of a segment, tile by tile.
struct Update {
  const tf_segment& s;
  const bool split_master;  // bf16 weight holds the upper half of the master
  const bool out_of_place;
  Scratch& t;

  // Writes `num` elements of `size` bytes at element `first`: past the caches when out of place.
  void put(const void* from, void* base, int64_t first, int n, int size) const {
    char* into = (char*)base + first * size;
    if (out_of_place) {
      stream(into, from, (int64_t)n * size);
    } else {
      memcpy(into, from, (size_t)n * (size_t)size);
    }
  }

  float* load_master(int64_t at, int n) const {
    if (split_master) {
      join((const uint16_t*)s.weight_in + at, (const int16_t*)s.master_in + at, t.p, n);
    } else if (out_of_place) {
      memcpy(t.p, (const float*)s.master_in + at, (size_t)n * 4);
    } else {
      return (float*)s.master + at;
    }
    return t.p;
  }

  void store_master(const float* p, int64_t at, int n) const {
    if (split_master) {
      if (!out_of_place) return split(p, (uint16_t*)s.weight + at, (int16_t*)s.master + at, n);
      split(p, t.half, (int16_t*)t.lower, n);
      put(t.half, s.weight, at, n, 2);
      put(t.lower, s.master, at, n, 2);
      return;
    }
    if (out_of_place) put(p, s.master, at, n, 4);
    if (s.weight_type == TF_F32) {
      put(p, s.weight, at, n, 4);
    } else if (s.weight_type != TF_NONE && !kCanStream) {
      store(p, s.weight, s.weight_type, at, n);
    } else if (s.weight_type != TF_NONE) {
      store(p, t.half, s.weight_type, 0, n);
      stream((uint16_t*)s.weight + at, t.half, (int64_t)n * 2);  // write-only, in place or not
    }
  }

  float* load_state(int which, float* scratch, int64_t at, int n) const {
    const void* from = s.state_in[which];
    if (!from) {
      memset(scratch, 0, (size_t)n * 4);
    } else if (s.format == TF_STATE_BF16) {
      load_bf16((const uint16_t*)from + at, scratch, n);
    } else if (s.format == TF_STATE_INT8) {
      for (int i = 0; i < n; i += kBlock) {
        const int count = (int)smaller(kBlock, n - i);
        const float scale = s.scale_in[which][(at + i) / kBlock];
        const uint8_t* codes = (const uint8_t*)from + at + i;
        which == 0 ? decode_e4m3(codes, scale, scratch + i, count) : decode_e5m3(codes, scale, scratch + i, count);
      }
    } else if (out_of_place) {
      memcpy(scratch, (const float*)from + at, (size_t)n * 4);
    } else {
      return (float*)s.state[which] + at;
    }
    return scratch;
  }

  void store_state(int which, const float* values, int64_t at, int n) const {
    void* into = s.state[which];
    if (!into) return;
    const uint32_t index = (uint32_t)(s.first_index + at);
    const Key key = {s.key[0], s.key[1]};
    if (s.format == TF_STATE_BF16) {
      uint16_t* target = out_of_place ? t.half : (uint16_t*)into + at;
      which == 0 ? store_bf16(values, target, n) : store_bf16_stochastic(values, target, index, key, n);
      if (out_of_place) put(t.half, into, at, n, 2);
    } else if (s.format == TF_STATE_INT8) {
      uint8_t* target = out_of_place ? t.code : (uint8_t*)into + at;
      for (int i = 0; i < n; i += kBlock) {
        const int count = (int)smaller(kBlock, n - i);
        const float largest = largest_magnitude(values + i, count);
        const float top = which == 0 ? kMomentMax : kVarianceMax;
        const float inverse = largest == 0.0f ? 0.0f : top / largest;
        s.scale[which][(at + i) / kBlock] = largest * (1.0f / top);
        which == 0 ? encode_e4m3(values + i, inverse, target + i, count)
                   : encode_e5m3(values + i, inverse, index + (uint32_t)i, key, target + i, count);
      }
      if (out_of_place) put(t.code, into, at, n, 1);
    } else if (out_of_place) {
      put(values, into, at, n, 4);
    }
  }

  void tile(int64_t at, int n) const {
    float* p = load_master(at, n);
    float* m = load_state(0, t.m, at, n);
    float* v = load_state(1, t.v, at, n);
    if (s.grad_type == TF_BF16) {
      apply_rule(s.rule, p, m, v, (const uint16_t*)s.grad + at, n, s.factor, s.hyper);
    } else if (s.grad_type == TF_F32) {
      apply_rule(s.rule, p, m, v, (const float*)s.grad + at, n, s.factor, s.hyper);
    } else {
      load_f16((const uint16_t*)s.grad + at, t.g, n);
      apply_rule(s.rule, p, m, v, t.g, n, s.factor, s.hyper);
    }
    store_state(0, m, at, n);
    store_state(1, v, at, n);
    store_master(p, at, n);
  }
};

void update(const tf_segment& s, int64_t begin, int64_t end) {
  FlushMode mode(flush_safe(s));
  Scratch scratch;
  const bool split_master = s.format != TF_STATE_F32 && s.weight_type == TF_BF16;
  const Update u{s, split_master, s.master_in != s.master, scratch};
  for (int64_t at = begin; at < end; at += kTile) u.tile(at, (int)smaller(kTile, end - at));
  stream_fence();
}

// Sixteen lanes, each summed in order, then folded in halves: the definition of the result.
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
  alignas(64) float x[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    load(from, from_type, at, x, n);
    float* __restrict target = into + at;
    for (int i = 0; i < n; ++i) target[i] += x[i];
  }
}

void cast(void* into, int into_type, const void* from, int from_type, int64_t begin, int64_t end) {
  alignas(64) float x[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int n = (int)smaller(kTile, end - at);
    load(from, from_type, at, x, n);
    store(x, into, into_type, at, n);
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

void stream_all(void* into, const void* from, int64_t num_bytes) {
  stream(into, from, num_bytes);
  stream_fence();
}

}  // namespace
}  // namespace TF_ISA

const Kernels& TF_JOIN(kernels_, TF_ISA)() {
  using namespace TF_ISA;
  static const Kernels table = {TF_STRING(TF_ISA), update,   sum_squares, accumulate, cast,
                                split_all,         join_all, scale,       stream_all};
  return table;
}

}  // namespace tf
