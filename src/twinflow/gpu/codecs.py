# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Conversions between state formats and fp32, for Triton. They give the same bits as rules/formats.py and
csrc/codecs.h.

NaNs are detected by integer comparisons of bit patterns. Triton may tell LLVM that floats are never NaN, and LLVM could
then remove a comparison of floats. Integers are int32, except in hashes. The bit patterns of numbers >= 0, compared as
integers, have the order of the numbers, and a NaN is the largest.

A tile has the shape [blocks, 128]. Values per block, such as scale and hash, have the shape [blocks, 1] and are
computed once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.rules import formats

BLOCK = tl.constexpr(formats.BLOCK)
MOMENT_MAX = tl.constexpr(formats.MOMENT_MAX)
VARIANCE_MAX = tl.constexpr(formats.VARIANCE_MAX)


@triton.jit
def bits(x):
    """The bit patterns of fp32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def value(u):
    """The fp32 numbers with these bit patterns."""
    return u.to(tl.float32, bitcast=True)


@triton.jit
def is_nan(u):
    """Whether these are the bits of a NaN."""
    return (u & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def from_bf16(upper):
    """Convert bf16 numbers, given as int16, to fp32."""
    return value(upper.to(tl.int32) << 16)


@triton.jit
def to_bf16(x):
    """Round to nearest, ties to even. The result is bf16 as int16. NaN becomes 0x7FC0."""
    u = bits(x)
    return tl.where(is_nan(u), 0x7FC0, (u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def to_bf16_stochastic(x, random):
    """Round numbers >= 0 to bf16, up or down at random.

    The random bits are added to the lower half, and a carry into the upper half rounds up. A finite number never
    becomes infinite.
    """
    u = x.to(tl.uint32, bitcast=True)  # unsigned, because a NaN may have a sign
    return (tl.where(u >= 0x7F7F0000, u, u + random.to(tl.uint32)) >> 16).to(tl.int16)


@triton.jit
def join(upper, lower):
    """The fp32 numbers from the halves (both int16) that `split` returns."""
    return value((upper.to(tl.int32) << 16) + lower.to(tl.int32))


@triton.jit
def split(x):
    """Upper and lower halves of fp32 numbers, both int16."""
    u = bits(x)
    upper = tl.where(is_nan(u), (u >> 16) | 0x40, (u + 0x8000) >> 16)
    return upper.to(tl.int16), tl.where(is_nan(u), 0, u).to(tl.int16)


@triton.jit
def random_bits(first_block, key_pointer, BLOCKS: tl.constexpr):
    """16 random bits, as int32, for each element of a tile. The tile starts at block `first_block` of its parameter."""
    first_key = tl.load(key_pointer).to(tl.uint32, bitcast=True)
    second_key = tl.load(key_pointer + 1).to(tl.uint32, bitcast=True)
    h = first_block.to(tl.uint32) + tl.arange(0, BLOCKS).to(tl.uint32)[:, None] + first_key  # [blocks, 1]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = ((h ^ (h >> 15)) + second_key) * 0x846CA68B
    h = h ^ (h >> 16)
    x = (tl.arange(0, BLOCK).to(tl.uint32)[None, :] + h) & 0xFFFF  # [blocks, 128]
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = ((((x ^ (x >> 7)) + (h >> 16)) & 0xFFFF) * 0xDB2D) & 0xFFFF
    return (x ^ (x >> 9)).to(tl.int32)


@triton.jit
def block_scales(x, TOP: tl.constexpr):
    """Return for each block: the inverse scale, which brings its elements into the range of the codes, the scale, and
    whether all elements are finite.

    A block with an infinity or a NaN has the scale NaN, and its codes are 0.
    """
    largest = tl.max(bits(x) & 0x7FFFFFFF, axis=1, keep_dims=True)  # [blocks, 1]
    is_finite = largest < 0x7F800000
    divisor = value(tl.where(largest == 0, 0x3F800000, largest))
    inverse = tl.where(largest == 0, 0.0, tl.math.div_rn(tl.full(largest.shape, TOP, tl.float32), divisor))
    return inverse, tl.where(is_finite, value(largest) * (1.0 / TOP), float("nan")), is_finite


@triton.jit
def encode_e4m3(x):
    """Codes (rounded to nearest) and scales.

    Let P be the power of two of a number, at least 2**-6. The sum of the number and 2**20 * P has the rounded mantissa
    in its lowest bits.
    """
    inverse, scales, is_finite = block_scales(x, MOMENT_MAX)
    u = bits(x * inverse)
    exponent = tl.maximum(u & 0x7F800000, 121 << 23)
    spacing = exponent + (20 << 23)
    mantissa = bits(value(u & 0x7FFFFFFF) + value(spacing)) - spacing
    code = tl.minimum((exponent >> 20) + mantissa - (121 << 3), 126) | ((u >> 24) & 0x80)
    return tl.where(is_finite, code, 0).to(tl.uint8), scales


@triton.jit
def encode_e5m3(x, random):
    """Codes (rounded stochastically; only 0 has the code 0) and scales, for x >= 0."""
    inverse, scales, is_finite = block_scales(x, VARIANCE_MAX)
    scaled = x * inverse
    is_small = bits(scaled) < (113 << 23)  # below 2**-14 the values of adjacent codes differ by 2**-17
    u = bits(tl.where(is_small, scaled + 2.0**-14, scaled))
    code = ((u + (random << 4)) >> 20) - tl.where(is_small, 113 << 3, 112 << 3)
    code = tl.minimum(tl.maximum(code, tl.minimum(bits(x), 1)), 247)
    return tl.where(is_finite, code, 0).to(tl.uint8), scales


@triton.jit
def decode_e4m3(codes, scales):
    """Decode e4m3. A code is the upper part of an fp16 number times 2**-8, except that its sign is one bit lower."""
    half = codes.to(tl.int32) << 7
    half = half + (half & 0x4000)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (scales * 256.0)


@triton.jit
def decode_e5m3(codes, scales):
    """Decode e5m3. A code is the upper part of an fp16 number."""
    half = (codes.to(tl.int32) << 7).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * scales
