// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW on int8 states with a split master, written with intrinsics for AVX-512.
//
// Why intrinsics: with 512-bit vectors only two ports of the core do arithmetic, and on the measured cores updates of
// int8 states are limited by the number of instructions and not by memory. The plain loops use more than half of their
// instructions to move 8- and 16-bit numbers into and out of 32-bit lanes in order. Here 32 elements are two vectors,
// one with the elements at even places and one with those at odd places. A pair of 16-bit arrays becomes a pair of
// 32-bit vectors, and back, with one instruction each (lows, highs). Steps of the encoding that need at most 16 bits
// process 32 elements at once.
//
// Why the bits are the same: the rule has the same operations in the same order. The codes are computed differently:
// - v: below 2^-14 codecs.h adds 2^-14 to s = v * inverse and subtracts 1 from the exponent. This is s/2 + 2^-15,
// rounded
//   once. Both curves meet at 2^-14, so the larger of s and s/2 + 2^-15 is right on both sides. m: the same with 2^-6.
// - Both inverses include a power of two that removes the bias of the exponent from the byte of the code.
// - There is no clamp: top / largest * x exceeds top by at most two units in the last place, too few for the next code.
// - Rare blocks use the plain loops. These are blocks with a NaN among the weights (if m or v has a NaN, a weight is
//   NaN too), and blocks with a state of 2^100 or more (its inverse, times the power of two, could underflow).
#pragma once
#include "loop.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

namespace tf {
namespace TF_ISA {

TF_INLINE __m512i words(int x) { return _mm512_set1_epi16((short)x); }
TF_INLINE __m512i dwords(uint32_t x) { return _mm512_set1_epi32((int)x); }
TF_INLINE __m512i integers(__m512 x) { return _mm512_castps_si512(x); }
TF_INLINE __m512 floats(__m512i x) { return _mm512_castsi512_ps(x); }

// The lower (upper) halves of two vectors of 32-bit lanes, interleaved.
TF_INLINE __m512i lows(__m512i even, __m512i odd) {
  const __m512i swap = _mm512_set4_epi32(0x0d0c0f0e, 0x09080b0a, 0x05040706, 0x01000302);
  return _mm512_mask_shuffle_epi8(even, 0xccccccccccccccccull, odd, swap);
}
TF_INLINE __m512i highs(__m512i even, __m512i odd) {
  const __m512i swap = _mm512_set4_epi32(0x0d0c0f0e, 0x09080b0a, 0x05040706, 0x01000302);
  return _mm512_mask_shuffle_epi8(odd, 0x3333333333333333ull, even, swap);
}

// The lower bytes of two vectors of words: those of 64 elements.
TF_INLINE __m512i bytes(__m512i first, __m512i second) {
  const __m512i from = _mm512_set4_epi32(0x0e0c0a08, 0x06040200, 0x0e0c0a08, 0x06040200);
  const __m512i both = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(first, from), 0xff00ff00ff00ff00ull, second, from);
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both);
}

// 32 elements: the elements at even and at odd places.
struct Pair {
  __m512 even, odd;
};

TF_INLINE Pair load_pair(const uint16_t* from) {  // bf16
  const __m512i both = _mm512_loadu_si512(from);
  return {floats(_mm512_slli_epi32(both, 16)), floats(_mm512_and_si512(both, dwords(0xffff0000u)))};
}

TF_INLINE Pair load_pair(const float* from) {
  const __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + 16);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(first, even, second),
          _mm512_permutex2var_ps(first, _mm512_add_epi32(even, dwords(1)), second)};
}

TF_INLINE Pair load_pair(const Split& master, int i) {
  const __m512i lower = _mm512_loadu_si512(master.lower_in + i);
  const __m512i upper = _mm512_add_epi16(_mm512_loadu_si512(master.upper_in + i), _mm512_srai_epi16(lower, 15));
  return {floats(lows(lower, upper)), floats(highs(lower, upper))};
}

TF_INLINE void store_pair(const Pair& p, const Split& master, int i) {  // wrong for a NaN: see mend_nans
  const __m512i lower = lows(integers(p.even), integers(p.odd));
  const __m512i upper = highs(integers(p.even), integers(p.odd));
  _mm512_storeu_si512(master.lower + i, lower);
  _mm512_storeu_si512(master.upper + i, _mm512_sub_epi16(upper, _mm512_srai_epi16(lower, 15)));
}

TF_INLINE __m512 magnitude(__m512 x) { return floats(_mm512_and_si512(integers(x), dwords(0x7fffffffu))); }

TF_INLINE __m512 flush(__m512 x) {
  const __mmask16 keep = _mm512_cmpge_epi32_mask(integers(magnitude(x)), dwords(kTinyBits));
  return _mm512_maskz_mov_ps(keep, x);
}

// Codes of one block as fp16 numbers (codecs.h: decode_codes). In each group of 64, the elements at even places come
// first. The numbers are stored in memory, because a conversion from memory needs one instruction less than a
// conversion from a register.
TF_INLINE void to_halves(__m512i m_codes, __m512i v_codes, uint16_t* m, uint16_t* v) {
  const __m512i m_bits = words(0xbf80), v_bits = words(0x7f80);
  // times 128 with the sign extended: the sign is in bits 15 and 14, and the mask leaves one of them
  _mm512_store_si512(m, _mm512_and_si512(_mm512_maddubs_epi16(words(0x0080), m_codes), m_bits));
  _mm512_store_si512(m + 32, _mm512_and_si512(_mm512_srai_epi16(m_codes, 1), m_bits));
  _mm512_store_si512(v, _mm512_and_si512(_mm512_slli_epi16(v_codes, 7), v_bits));
  _mm512_store_si512(v + 32, _mm512_and_si512(_mm512_srli_epi16(v_codes, 1), v_bits));
}

TF_INLINE __m512 from_half(const uint16_t* half) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)half)); }

// One update of a tile of whole blocks.
template <bool kCoupled, class T>
struct Int8Tile {
  const Adam<kCoupled>& rule;
  const Gradient<T, true>& grad;
  const Split& master;
  const uint8_t* const codes_in[2];
  const float* const scales_in[2];
  uint8_t* const codes[2];
  float* const scales[2];
  float *const m, *const v;  // scratch of a tile's size, in the order of Pair: 16 even, 16 odd
  uint16_t* const halves;    // scratch for two blocks

  struct Largest {
    __m512 m, v, sum;  // the sum is NaN if a weight is NaN
  };

  TF_INLINE_MEMBER __m512 move(__m512 g, __m512 p, const uint16_t* m_half, __m512 m_scale, const uint16_t* v_half,
                               __m512 v_scale, float* m_out, float* v_out, Largest& largest) const {
    const __m512 m_old = _mm512_mul_ps(from_half(m_half), m_scale), v_old = _mm512_mul_ps(from_half(v_half), v_scale);
    if (kCoupled) g = flush(_mm512_add_ps(g, _mm512_mul_ps(_mm512_set1_ps(rule.l2), p)));
    const __m512 change = _mm512_mul_ps(_mm512_sub_ps(g, m_old), _mm512_set1_ps(rule.one_minus_b1));
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(rule.one_minus_b2), g), g);
    __m512 m_new = _mm512_add_ps(m_old, change);
    __m512 v_new = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(rule.b2), v_old), square);
    const __m512 size = magnitude(m_new);
    const __mmask16 keep = _mm512_cmpge_epi32_mask(integers(size), dwords(kTinyBits));
    m_new = _mm512_maskz_mov_ps(keep, m_new);
    v_new = _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(integers(v_new), dwords(kTinyBits)), v_new);
    largest.m = _mm512_mask_max_ps(largest.m, keep, largest.m, size);
    largest.v = _mm512_max_ps(largest.v, v_new);
    _mm512_store_ps(m_out, m_new);
    _mm512_store_ps(v_out, v_new);
    const __m512 divisor = _mm512_add_ps(_mm512_sqrt_ps(v_new), _mm512_set1_ps(rule.eps));
    const __m512 step = _mm512_mul_ps(_mm512_set1_ps(rule.step), _mm512_div_ps(m_new, divisor));
    if (!kCoupled) p = _mm512_mul_ps(p, _mm512_set1_ps(rule.decay));
    return flush(_mm512_sub_ps(p, step));
  }

  template <bool kScaled>
  TF_INLINE_MEMBER Largest run_rule(int at) const {
    const __m512 m_scale = _mm512_set1_ps(scales_in[0][at / kBlock] * 256.0f);
    const __m512 v_scale = _mm512_set1_ps(scales_in[1][at / kBlock]);
    Largest largest = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    uint16_t *m_half = halves, *v_half = halves + kBlock;
    for (int i = 0; i < kBlock; i += 64)
      to_halves(_mm512_loadu_si512(codes_in[0] + at + i), _mm512_loadu_si512(codes_in[1] + at + i), m_half + i,
                v_half + i);
    for (int i = 0; i < kBlock; i += 64) {
#pragma GCC unroll 2
      for (int j = 0; j < 32; j += 16) {
        const int first = at + i + 2 * j;
        Pair g = load_pair(grad.in + first), p = load_pair(master, first);
        if (kScaled) {
          g.even = _mm512_mul_ps(g.even, _mm512_set1_ps(grad.factor));
          g.odd = _mm512_mul_ps(g.odd, _mm512_set1_ps(grad.factor));
        }
        p.even = move(g.even, p.even, m_half + i + j, m_scale, v_half + i + j, v_scale, m + first, v + first, largest);
        p.odd = move(g.odd, p.odd, m_half + i + j + 32, m_scale, v_half + i + j + 32, v_scale, m + first + 16,
                     v + first + 16, largest);
        largest.sum = _mm512_fmadd_ps(p.even, p.odd, largest.sum);
        store_pair(p, master, first);
      }
    }
    return largest;
  }

  // Computes the scales and inverses of a block (codecs.h). Inverses of m are multiplied by 2^-8 and those of v by
  // 2^-16. Returns false for a block that must use the plain loops.
  TF_INLINE_MEMBER bool scan(const Largest& largest, int at, float* inverse) const {
    const __m512 a = _mm512_shuffle_f32x4(largest.m, largest.v, 0x44);
    const __m512 b = _mm512_shuffle_f32x4(largest.m, largest.v, 0xee);
    __m512 both = _mm512_max_ps(a, b);  // m in the lower half, v in the upper half
    both = _mm512_max_ps(both, _mm512_shuffle_f32x4(both, both, 0xb1));
    both = _mm512_max_ps(both, _mm512_permute_ps(both, 0x4e));
    both = _mm512_max_ps(both, _mm512_permute_ps(both, 0xb1));
    const __m128 top = _mm_unpacklo_ps(_mm512_castps512_ps128(both), _mm512_extractf32x4_ps(both, 2));
    const float m_max = kMomentMax, v_max = kVarianceMax;
    const __mmask8 some = _mm_cmp_ps_mask(top, _mm_setzero_ps(), _CMP_NEQ_OQ);
    const __m128 shifted = _mm_setr_ps(m_max * 0x1p-8f, v_max * 0x1p-16f, 1.0f, 1.0f);
    _mm_storel_pi((__m64*)inverse, _mm_maskz_div_ps(some, shifted, top));
    const __m128 scale = _mm_mul_ps(top, _mm_setr_ps(1.0f / m_max, 1.0f / v_max, 0.0f, 0.0f));
    _mm_store_ss(scales[0] + at / kBlock, scale);
    _mm_store_ss(scales[1] + at / kBlock, _mm_movehdup_ps(scale));
    const __mmask8 large = _mm_cmp_ps_mask(top, _mm_set1_ps(0x1p100f), _CMP_NLT_UQ);
    const __mmask16 nan = _mm512_cmp_ps_mask(largest.sum, largest.sum, _CMP_UNORD_Q);
    return ((unsigned)large | (unsigned)nan) == 0;
  }

  // Codes without sign in the lower bytes of words, for numbers >= 0. `not_random` has the inverted random bits.
  TF_INLINE_MEMBER static __m512i encode(__m512 even, __m512 odd, float least, __m512i not_random) {
    const __m512 numbers[2] = {even, odd};
    __m512i code[2];
    for (int k = 0; k < 2; ++k) {
      const __m512 half = _mm512_fmadd_ps(numbers[k], _mm512_set1_ps(0.5f), _mm512_set1_ps(least));
      // code in the upper half, rest in the lower
      code[k] = _mm512_srli_epi32(integers(_mm512_max_ps(numbers[k], half)), 4);
    }
    const __m512i whole = highs(code[0], code[1]), rest = lows(code[0], code[1]);
    const __mmask32 up = _mm512_cmpgt_epu16_mask(rest, not_random);  // where rest + random carries
    return _mm512_mask_sub_epi16(whole, up, whole, words(-1));
  }

  TF_INLINE_MEMBER static __m512i encode_m(const float* from, __m512 inverse, __m512i not_random) {
    const __m512 even = _mm512_mul_ps(_mm512_load_ps(from), inverse);
    const __m512 odd = _mm512_mul_ps(_mm512_load_ps(from + 16), inverse);
    const __m512i code = encode(magnitude(even), magnitude(odd), 0x1p-15f, not_random);
    const __m512i sign = _mm512_srli_epi16(highs(integers(even), integers(odd)), 8);
    return _mm512_ternarylogic_epi32(words(0x80), sign, code, 0xca);
  }

  TF_INLINE_MEMBER static __m512i encode_v(const float* from, __m512 inverse, __m512i not_random) {
    return encode(_mm512_mul_ps(_mm512_load_ps(from), inverse), _mm512_mul_ps(_mm512_load_ps(from + 16), inverse),
                  0x1p-31f, not_random);
  }

  // codecs.h: random_block, for 32 elements.
  TF_INLINE_MEMBER static __m512i inverted_random(__m512i x, __m512i high) {
    x = _mm512_xor_si512(x, _mm512_srli_epi16(x, 8));
    x = _mm512_mullo_epi16(x, words(0x88b5));
    x = _mm512_xor_si512(x, _mm512_srli_epi16(x, 7));
    x = _mm512_mullo_epi16(_mm512_add_epi16(x, high), words(0xdb2d));
    const __m512i shifted = _mm512_srli_epi16(x, 9);
    return _mm512_ternarylogic_epi32(x, shifted, shifted, 0xc3);  // not (x ^ shifted)
  }

  TF_INLINE_MEMBER void encode(int at, const float* inverse, uint32_t seed) const {
    const __m512 m_inverse = _mm512_set1_ps(inverse[0]), v_inverse = _mm512_set1_ps(inverse[1]);
    const __m512i high = words((int)(seed >> 16));
    __m512i places = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12,
                                      11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    places = _mm512_add_epi16(places, words((int)(seed & 0xffffu)));
    for (int i = at; i < at + kBlock; i += 64) {
      __m512i m_code[2], v_code[2];
      for (int k = 0; k < 2; ++k) {
        const __m512i not_random = inverted_random(places, high);
        m_code[k] = encode_m(m + i + 32 * k, m_inverse, not_random);
        v_code[k] = encode_v(v + i + 32 * k, v_inverse, not_random);
        places = _mm512_add_epi16(places, words(32));
      }
      _mm512_storeu_si512(codes[0] + i, bytes(m_code[0], m_code[1]));
      __m512i v_codes = bytes(v_code[0], v_code[1]);
      const __mmask64 zero = _mm512_testn_epi8_mask(v_codes, v_codes);
      if (__builtin_expect(zero != 0, 0)) {  // only 0 has the code 0
        __mmask64 positive = 0;
        for (int k = 0; k < 2; ++k) {
          const __m512i upper = highs(_mm512_load_si512(v + i + 32 * k), _mm512_load_si512(v + i + 32 * k + 16));
          positive |= (__mmask64)_mm512_test_epi16_mask(upper, upper) << (32 * k);
        }
        v_codes = _mm512_mask_mov_epi8(v_codes, zero & positive, _mm512_set1_epi8(1));
      }
      _mm512_storeu_si512(codes[1] + i, v_codes);
    }
  }

  // Restores the order of m and v from the order of Pair.
  static void put_in_order(float* values, int n) {
    for (float* x = values; x < values + n; x += 32) {
      float ordered[32];
      for (int j = 0; j < 32; ++j) ordered[j] = x[j / 2 + 16 * (j % 2)];
      memcpy(x, ordered, sizeof(ordered));
    }
  }

  // Returns false if the plain loops must still compute codes and scales, from m and v in scratch memory. The rule runs
  // for all blocks first: computing the largest number of a block and its inverse is a long chain of dependent
  // operations, and the chains of several blocks then overlap.
  template <bool kScaled>
  bool run(uint32_t block, Key key, int n) const {
    float inverse[2 * kTile / kBlock];
    bool plain = false;
    for (int i = 0; i < n; i += kBlock) plain |= !scan(run_rule<kScaled>(i), i, inverse + 2 * (i / kBlock));
    if (__builtin_expect(plain, 0)) {
      put_in_order(m, n);
      put_in_order(v, n);
      return false;
    }
    for (int i = 0; i < n; i += kBlock)
      encode(i, inverse + 2 * (i / kBlock), hash(block + (uint32_t)(i / kBlock), key));
    return true;
  }
};

}  // namespace TF_ISA
}  // namespace tf
#endif
