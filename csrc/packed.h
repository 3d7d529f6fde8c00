// SPDX-License-Identifier: Apache-2.0
// Functions that packing.h and unpacking.h share: packed rows in memory, and accessors of optional arguments.
// src/twinflow/codes/code.py describes the format of a row.
#pragma once
#include "kernels.h"
#include "loop.h"

namespace tf {
namespace TF_ISA {

constexpr int kPacked = (int)kPackedBlock;
constexpr int kUnpacked = 1024;         // elements that are decoded at once; it does not change results
constexpr int kLanes = 64;              // lanes of the sum of magnitudes; they define the scale of the 1-bit code
constexpr int kWord = 32;               // elements of one word of signs
constexpr uint32_t kNan = 0x7fc00000u;  // the scale of a block with a number that is not finite

struct alignas(64) PackingScratch {
  float c[kPacked], values[kPacked], base[kPacked];  // values and base: inputs that must be converted to fp32 first
  uint8_t codes[kPacked];
};

// ---- addresses of the scales and codes of a row

struct Row {
  uint8_t* scales;
  uint8_t* codes;
  uint8_t* end;

  Row(const tf_packing& p, int64_t row) {
    const int64_t num_scales = (p.numel + kPacked - 1) / kPacked, code_bytes = (p.numel * p.bits + 7) / 8;
    const int64_t row_bytes = (4 * num_scales + code_bytes + 15) / 16 * 16;
    scales = (uint8_t*)p.packed + row * row_bytes;
    codes = scales + 4 * num_scales;
    end = scales + row_bytes;
  }
  float scale(int64_t block) const {
    float x;
    memcpy(&x, scales + 4 * block, 4);
    return x;
  }
};

// ---- accessors of optional arguments

struct NoBase {
  TF_INLINE_MEMBER float add(int, float given) const { return given; }
};

struct SomeBase {
  const float* in;
  float factor;
  TF_INLINE_MEMBER float add(int i, float given) const { return in[i] * factor + given; }
};

struct AllIn {  // without exponents: no scaling, and no element is excluded
  TF_INLINE_MEMBER float times(int, float x) const { return x; }
  TF_INLINE_MEMBER float divided(int, float x) const { return x; }
  TF_INLINE_MEMBER float choose(int, float x, float) const { return x; }
};

template <bool kScaled>
struct Exponents {
  const uint8_t* in;
  // The power of two is computed as bf16, so that half of the shifts work on 16 bits.
  TF_INLINE_MEMBER float times(int i, float x) const { return kScaled ? x * from_bf16((uint16_t)(in[i] << 7)) : x; }
  TF_INLINE_MEMBER float divided(int i, float x) const {
    return kScaled ? x * from_bf16((uint16_t)((254 - in[i]) << 7)) : x;
  }
  // A mask instead of `?:`, because gcc would move later operations before the selection and do them twice. The mask is
  // made of bytes, which are cheap to widen.
  TF_INLINE_MEMBER float choose(int i, float x, float otherwise) const {
    const int8_t is_in = in[i] != 0 ? -1 : 0;
    const uint32_t keep = (uint32_t)(int32_t)is_in;
    return value((bits(x) & keep) | (bits(otherwise) & ~keep));
  }
};

struct NoError {
  TF_INLINE_MEMBER float add(int, float c) const { return c; }
  TF_INLINE_MEMBER void put(int, float) const {}
};

struct SomeError {
  float* at;
  TF_INLINE_MEMBER float add(int i, float c) const { return c + at[i]; }
  TF_INLINE_MEMBER void put(int i, float left) const { at[i] = left; }
};

}  // namespace TF_ISA
}  // namespace tf
