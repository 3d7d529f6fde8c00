// SPDX-License-Identifier: Apache-2.0
// CRC-32 as in zlib and in checkpoints, several times as fast as zlib's on x86-64, and copies with checksums.
//
// A CRC is the remainder of a polynomial over GF(2), divided by `kPolynomial`. 64 bytes at a time are folded: a block
// of 128 bits at distance n before another one may be replaced by its product with x^n mod P, added to the other one.
// Four such accumulators are independent of each other, so the processor multiplies without waiting. With AVX-512 each
// of them has four blocks. The rest, and all data on other processors, goes through tables of eight bytes at a time.
#include <string.h>

#include <algorithm>

#include "api.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // bit 31 is the coefficient of x^0

struct Tables {
  uint32_t of[8][256];
};

constexpr Tables make_tables() {
  Tables made{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    made.of[0][i] = crc;
  }
  for (int k = 1; k < 8; ++k)
    for (int i = 0; i < 256; ++i) made.of[k][i] = made.of[k - 1][i] >> 8 ^ made.of[0][made.of[k - 1][i] & 255];
  return made;
}

constexpr Tables kTables = make_tables();

// All functions below take and return the inverted CRC, which is the remainder itself.
uint32_t by_tables(uint32_t crc, const uint8_t* data, int64_t num_bytes) {
  const auto& of = kTables.of;
  for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(data[i]) << 8 * i;
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= of[7 - i][word >> 8 * i & 255];
  }
  for (; num_bytes > 0; --num_bytes, ++data) crc = crc >> 8 ^ of[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
// x^n mod P, in the bit order of the data, shifted by one as the product of two reflected numbers needs it.
constexpr uint64_t power(int n) {
  uint32_t found = 0x80000000u;  // x^0
  for (int i = 0; i < n; ++i) found = found & 1 ? found >> 1 ^ kPolynomial : found >> 1;
  return static_cast<uint64_t>(found) << 1;
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i before, __m128i powers, const uint8_t* data) {
  __m128i low = _mm_clmulepi64_si128(before, powers, 0x00);
  __m128i high = _mm_clmulepi64_si128(before, powers, 0x11);
  __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The CRC of blocks one after the other.
__attribute__((target("pclmul,sse4.1"))) uint32_t of_blocks(__m128i* blocks, int count) {
  constexpr uint64_t kNear[2] = {power(128 + 32), power(128 - 32)};
  const __m128i powers = _mm_set_epi64x(kNear[1], kNear[0]);
  uint8_t last[16];
  for (int i = 1; i < count; ++i) {
    memcpy(last, &blocks[i], sizeof(last));
    blocks[i] = fold(blocks[i - 1], powers, last);
  }
  memcpy(last, &blocks[count - 1], sizeof(last));
  return by_tables(0, last, sizeof(last));
}

// `num_bytes` is a multiple of 64 and at least 128.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t crc, const uint8_t* data, int64_t num_bytes) {
  constexpr uint64_t kFar[2] = {power(4 * 128 + 32), power(4 * 128 - 32)};
  __m128i sums[4];
  memcpy(sums, data, sizeof(sums));
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  const __m128i powers = _mm_set_epi64x(kFar[1], kFar[0]);
  for (data += 64, num_bytes -= 64; num_bytes; data += 64, num_bytes -= 64)
    for (int i = 0; i < 4; ++i) sums[i] = fold(sums[i], powers, data + 16 * i);
  return of_blocks(sums, 4);
}

// `num_bytes` is a multiple of 256 and at least 512.
__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) uint32_t by_wide_folding(uint32_t crc, const uint8_t* data,
                                                                                     int64_t num_bytes) {
  constexpr uint64_t kFar[2] = {power(16 * 128 + 32), power(16 * 128 - 32)};
  __m512i sums[4];
  memcpy(sums, data, sizeof(sums));
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  const __m512i powers = _mm512_broadcast_i32x4(_mm_set_epi64x(kFar[1], kFar[0]));
  for (data += 256, num_bytes -= 256; num_bytes; data += 256, num_bytes -= 256) {
    for (int i = 0; i < 4; ++i) {
      __m512i low = _mm512_clmulepi64_epi128(sums[i], powers, 0x00);
      __m512i high = _mm512_clmulepi64_epi128(sums[i], powers, 0x11);
      sums[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(data + 64 * i), 0x96);  // a ^ b ^ c
    }
  }
  __m128i blocks[16];
  memcpy(blocks, sums, sizeof(blocks));
  return of_blocks(blocks, 16);
}
#endif

// Bytes that stay in the L1 cache between the checksum and the copy, so that memory is read once.
constexpr int64_t kPartBytes = 16 << 10;

// A copy that bypasses the caches: `into` is larger than they are, and its lines need not be read before they are
// written. Ordinary stores would move half as many bytes again, in the time of updates that need the memory too.
void copy_past_cache(uint8_t* into, const uint8_t* from, int64_t num_bytes) {
#if defined(__x86_64__)
  int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(into) & 15, num_bytes);
  memcpy(into, from, head);
  into += head, from += head, num_bytes -= head;
  for (; num_bytes >= 64; num_bytes -= 64, into += 64, from += 64)
    for (int i = 0; i < 64; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(into + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
  memcpy(into, from, num_bytes);
}

}  // namespace

uint32_t tf_crc32(uint32_t crc, const void* data, int64_t num_bytes) {
  auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  static const bool kFolds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  static const bool kFoldsWide = kFolds && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  if (int64_t folded = num_bytes / 256 * 256; kFoldsWide && folded >= 512) {
    crc = by_wide_folding(crc, at, folded);
    at += folded;
    num_bytes -= folded;
  }
  if (int64_t folded = num_bytes / 64 * 64; kFolds && folded >= 128) {
    crc = by_folding(crc, at, folded);
    at += folded;
    num_bytes -= folded;
  }
#endif
  return ~by_tables(crc, at, num_bytes);
}

void tf_gather(void* into, tf_part* parts, int64_t num_parts) {
  auto* to = static_cast<uint8_t*>(into);
  alignas(64) uint32_t joined[kPartBytes / 4];
  for (tf_part* part = parts; part != parts + num_parts; ++part) {
    part->crc32 = 0;
    for (int64_t at = 0; at < part->num_bytes; at += kPartBytes) {
      int64_t num_bytes = std::min(kPartBytes, part->num_bytes - at);
      const uint8_t* from = static_cast<const uint8_t*>(part->data) + at;
      if (part->lower) {
        const uint16_t* upper = static_cast<const uint16_t*>(part->data) + at / 4;
        const int16_t* lower = static_cast<const int16_t*>(part->lower) + at / 4;
        for (int64_t i = 0; i < num_bytes / 4; ++i)  // as `join_one` in codecs.h
          joined[i] = (static_cast<uint32_t>(upper[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lower[i]));
        from = reinterpret_cast<const uint8_t*>(joined);
      }
      part->crc32 = tf_crc32(part->crc32, from, num_bytes);
      if (!to) continue;
      copy_past_cache(to, from, num_bytes);
      to += num_bytes;
    }
  }
#if defined(__x86_64__)
  _mm_sfence();  // the caller gives `into` to another processor or to the disk
#endif
}
