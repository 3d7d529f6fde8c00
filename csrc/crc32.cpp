// SPDX-License-Identifier: Apache-2.0
// CRC-32 as in zlib and safetensors' checksums of checkpoints, several times as fast as zlib's on x86-64.
//
// A CRC is the remainder of a polynomial over GF(2), divided by `kPolynomial`. 64 bytes at a time are folded: a block
// of 128 bits at distance n before another one may be replaced by its product with x^n mod P, added to the other one.
// Four such accumulators are independent of each other, so the processor multiplies without waiting. The rest, and all
// data on other processors, goes through tables of eight bytes at a time.
#include <string.h>

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

// `num_bytes` is a multiple of 64 and at least 128.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t crc, const uint8_t* data, int64_t num_bytes) {
  constexpr uint64_t kFar[2] = {power(4 * 128 + 32), power(4 * 128 - 32)},
                     kNear[2] = {power(128 + 32), power(128 - 32)};
  __m128i sums[4];
  memcpy(sums, data, sizeof(sums));
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i powers = _mm_set_epi64x(kFar[1], kFar[0]);
  for (data += 64, num_bytes -= 64; num_bytes; data += 64, num_bytes -= 64)
    for (int i = 0; i < 4; ++i) sums[i] = fold(sums[i], powers, data + 16 * i);
  powers = _mm_set_epi64x(kNear[1], kNear[0]);
  uint8_t last[16];
  for (int i = 1; i < 4; ++i) {
    memcpy(last, &sums[i], sizeof(last));
    sums[i] = fold(sums[i - 1], powers, last);
  }
  memcpy(last, &sums[3], sizeof(last));
  return by_tables(0, last, sizeof(last));
}
#endif

}  // namespace

uint32_t tf_crc32(uint32_t crc, const void* data, int64_t num_bytes) {
  auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  static const bool kFolds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (int64_t folded = num_bytes / 64 * 64; kFolds && folded >= 128) {
    crc = by_folding(crc, at, folded);
    at += folded;
    num_bytes -= folded;
  }
#endif
  return ~by_tables(crc, at, num_bytes);
}
