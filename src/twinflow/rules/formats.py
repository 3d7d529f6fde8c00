# SPDX-License-Identifier: Apache-2.0
"""State formats: the representation of master weights and optimizer states in memory. These functions are pure torch
and run on any device. csrc/codecs.h and gpu/kernel.py give the same bits.

| format | first state (momentum) | second state (variance) | master of a bf16 weight | master of any other weight |
|---|---|---|---|---|
| fp32 | fp32 | fp32 | fp32 or split | fp32 |
| bf16 | bf16, nearest | bf16, stochastic | split | fp32 |
| int8 | e4m3, stochastic | e5m3, stochastic | split | fp32 |
| 4bit | e3m0, stochastic | 4 bits without 0, stochastic | split | fp32 |

Without a master (`master="none"`), a bf16 weight is the only copy. The update computes in fp32, and the new weight is
rounded stochastically.

A split master stores the fp32 bits u as upper = bf16 of u (ties away from zero), which is the weight itself, and lower
= int16(u), with u = (upper << 16) + lower. Each block of 128 elements, counted from the start of the parameter, has one
fp32 scale for its codes of 8 or 4 bits. The two 4-bit codes of an element share a byte: the code of the momentum is the
lower half.

The variance is rounded stochastically: at b2 = 0.999 its decay in a step is less than half a unit in the last place of
bf16 or of a code, so that rounding to nearest would undo the decay. For the same reason the momentum in codes of 8 and
4 bits and a weight without master are rounded stochastically. The random bits are a hash of (step, parameter, index),
with another hash for a 4-bit momentum and for a weight. They depend neither on the machine nor on the number of threads
nor on the division into segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.rules.rules import fp32

FORMATS = ("fp32", "bf16", "int8", "4bit")
AUTOMATIC = ("fp32", "bf16", "int8")  # the formats that an automatic choice may use
SCALED = ("int8", "4bit")  # the formats with scales
MASTERS = ("fp32", "none")  # whether bf16 weights have an fp32 master
BLOCK = 128
MOMENT_MAX = 448.0  # largest e4m3 value
VARIANCE_MAX = 61440.0  # largest e5m3 value in use, 1.875 * 2**15
MOMENT4_MAX = 64.0  # largest value of a 4-bit momentum; the smallest above 0 is 1
VARIANCE4_MAX = 3072.0  # largest value of a 4-bit variance, 1.5 * 2**11; the smallest is 1
_MASK = 0xFFFFFFFF

Key = tuple[int, int]


def bits(x: Tensor) -> Tensor:
    """The fp32 bit patterns of `x` as int64 in [0, 2**32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & _MASK


def _value(patterns: Tensor) -> Tensor:
    """The fp32 numbers with these bit patterns (int64 in [0, 2**32))."""
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


def _as_bf16(upper: Tensor) -> Tensor:
    upper = upper & 0xFFFF
    return torch.where(upper >= 2**15, upper - 2**16, upper).to(torch.int16).view(torch.bfloat16)


def to_bf16(x: Tensor) -> Tensor:
    """Round to nearest, ties to even. NaN becomes 0x7FC0, because torch's NaN differs between machines."""
    u = bits(x)
    return _as_bf16(torch.where(x.isnan(), 0x7FC0, (u + 0x7FFF + ((u >> 16) & 1)) >> 16))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Upper (bf16) and lower (int16) halves of fp32 numbers. The split is exact, except for the payload of a NaN."""
    u = bits(x)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    upper = torch.where(nan, (u >> 16) | 0x40, (u + 0x8000) >> 16)
    lower = torch.where(nan, 0, u & 0xFFFF)
    return _as_bf16(upper), torch.where(lower >= 2**15, lower - 2**16, lower).to(torch.int16)


def rounds_to(master: Tensor, rounded: Tensor) -> Tensor:
    """A mask of the elements where `rounded` is a nearest neighbour of fp32 `master` in the dtype of `rounded`. Ties
    may go either way.
    """
    same = master.to(rounded.dtype) == rounded
    if rounded.dtype != torch.bfloat16:
        return same
    return same | is_near(master, rounded)


def is_near(master: Tensor, rounded: Tensor) -> Tensor:
    """A mask of the elements where bf16 `rounded` is a nearest neighbour of fp32 `master`, and both are finite."""
    near = (bits(master) - bits(rounded.float())).abs() <= 2**15
    return near & master.isfinite() & rounded.isfinite()


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 numbers from the halves that `split` returns."""
    high = (upper.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF) << 16
    return _value((high + lower.to(torch.int64)) & _MASK)


def rounding_key(step: int, parameter: int) -> Key:
    """64 well-mixed bits of (step, parameter), as two 32-bit words (splitmix64's finaliser)."""
    z = (step * 0x9E3779B97F4A7C15 + parameter * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z & _MASK, z >> 32


# Differences between the keys for values of one element that are rounded independently. The variance, and an int8
# momentum with it, use the key itself.
MOMENT_SALT: Key = (0x9E3779B9, 0x7F4A7C15)
WEIGHT_SALT: Key = (0xC2B2AE3D, 0x27D4EB4F)


def salted(key: Key, salt: Key) -> Key:
    """The key of another value of the same elements."""
    return key[0] ^ salt[0], key[1] ^ salt[1]


def random_bits(first_index: int, numel: int, key: Key, device: torch.device | None = None) -> Tensor:
    """16 random bits for each of `numel` elements from `first_index` (a multiple of 128) on, as int32.

    A 32-bit hash of key and block is the seed of a 16-bit mix of the position in the block. For a random seed each
    result is uniformly distributed.
    """
    block = torch.arange(first_index // BLOCK, -(-(first_index + numel) // BLOCK), dtype=torch.int64, device=device)
    h = (block[:, None] + key[0]) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = (((h ^ (h >> 15)) + key[1]) & _MASK) * 0x846CA68B & _MASK
    h = h ^ (h >> 16)
    low, high = (h & 0xFFFF).int(), (h >> 16).int()
    x = (torch.arange(BLOCK, dtype=torch.int32, device=device) + low) & 0xFFFF
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = (((x ^ (x >> 7)) + high) & 0xFFFF) * 0xDB2D & 0xFFFF
    return (x ^ (x >> 9)).view(-1)[:numel]


def to_bf16_stochastic(x: Tensor, first_index: int, key: Key) -> Tensor:
    """Round numbers >= 0 up or down at random, with the number as mean. Finite numbers never become infinite."""
    u = bits(x)
    rounded = u + random_bits(first_index, x.numel(), key, x.device)
    return _as_bf16(torch.where(u >= 0x7F7F0000, u, rounded) >> 16)


def to_bf16_weight(x: Tensor, first_index: int, key: Key) -> Tensor:
    """Round weights without master up or down at random, with the weight as mean. The key is salted here. Finite
    numbers never become infinite. NaN becomes 0x7FC0.
    """
    u = bits(x)
    rounded = u + random_bits(first_index, x.numel(), salted(key, WEIGHT_SALT), x.device)
    upper = torch.where((u & 0x7FFFFFFF) >= 0x7F7F0000, u, rounded) >> 16
    return _as_bf16(torch.where(x.isnan(), 0x7FC0, upper))


def _blocks(x: Tensor) -> Tensor:
    """`x` padded with zeros to whole blocks, as [blocks, 128]."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scales(x: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Returns for each element the factor that scales its block into the range up to `top`, and for each block the
    inverse of this factor, by which decoding multiplies.

    Both are NaN for a block with an infinity or a NaN. Its codes are 0, and are decoded to NaN.
    """
    largest = _value(
        bits(_blocks(x)).bitwise_and(0x7FFFFFFF).amax(1)
    )  # The bit patterns are compared. That of a NaN is the largest.
    largest = torch.where(largest.isfinite(), largest, float("nan"))
    # division of two tensors, because torch computes scalar / tensor by a reciprocal, which rounds twice
    inverse = torch.where(largest == 0, 0.0, torch.full_like(largest, top) / largest)
    return inverse.repeat_interleave(BLOCK)[: x.numel()], largest * fp32(1.0 / top)


def encode_e4m3(x: Tensor, first_index: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes (uint8: sign, 4 bits of exponent, 3 bits of mantissa; rounded stochastically) and scales.

    The variance of an element is rounded with the same random bits: both are then rounded up or down together, so that
    their quotient changes less.
    """
    inverse, scales = _scales(x, MOMENT_MAX)
    scaled = torch.where(inverse.isnan(), 0.0, x * inverse)
    magnitude = scaled.abs()
    small = magnitude < 2.0**-6
    u = torch.where(small, magnitude + 2.0**-6, magnitude).view(torch.int32)
    rounded = (u + (random_bits(first_index, x.numel(), key, x.device) << 4)) >> 20
    code = (rounded - torch.where(small, 121 << 3, 120 << 3)).clamp(max=126)
    return (code | ((scaled.view(torch.int32) >> 24) & 0x80)).to(torch.uint8), scales


def decode_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that these codes and scales stand for."""
    return codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(BLOCK)[: codes.numel()]


def encode_e5m3(x: Tensor, first_index: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes (uint8: 5 bits of exponent, 3 bits of mantissa, no sign; rounded stochastically) and scales, for x >= 0.

    In a finite block, only 0 has the code 0. `code << 7` is the scaled number in fp16, without the largest exponent.
    """
    inverse, scales = _scales(x, VARIANCE_MAX)
    scaled = x * inverse
    small = scaled < 2.0**-14
    u = bits(torch.where(small, scaled + 2.0**-14, scaled))
    rounded = (u + (random_bits(first_index, x.numel(), key, x.device) << 4)) >> 20
    code = rounded - torch.where(small, 113 << 3, 112 << 3)
    code = torch.maximum(code, (x > 0).to(torch.int64)).clamp(max=247)
    return torch.where(inverse.isnan(), 0, code).to(torch.uint8), scales


def decode_e5m3(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that these codes and scales stand for."""
    values = (codes.to(torch.int16) << 7).view(torch.float16).float()
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]


# 4-bit codes. Between two neighbouring values, the bit pattern of an fp32 number is a linear function of the number.
# The upper bits of the sum of this pattern and random bits are therefore the code, rounded stochastically. Of the lower
# bits, the upper 16 are random, and the others are the mean of what they could be.


def encode_moment4(x: Tensor, first_index: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes (uint8 below 16: sign, and 3 bits of exponent; rounded stochastically) and scales.

    The values are 0, 1, 2, 4, 8, 16, 32 and 64. 0 stays 0. The key is salted here.
    """
    inverse, scales = _scales(x, MOMENT4_MAX)
    scaled = x * inverse
    magnitude = scaled.abs()
    small = magnitude < 1.0
    u = bits(torch.where(small, magnitude + 1.0, magnitude)) - torch.where(small, 1 << 23, 0)
    random = random_bits(first_index, x.numel(), salted(key, MOMENT_SALT), x.device)
    code = (((u + (random << 7) + 64) >> 23) - 126).clamp(max=7) | ((bits(scaled) >> 28) & 8)
    return torch.where(inverse.isnan(), 0, code).to(torch.uint8), scales


def decode_moment4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that the lower halves of these bytes and the scales stand for."""
    code = codes.to(torch.int64)
    magnitude = code & 7
    patterns = torch.where(magnitude == 0, 0, (magnitude + 126) << 23) | ((code & 8) << 28)
    return _value(patterns) * scales.repeat_interleave(BLOCK)[: codes.numel()]


def encode_variance4(x: Tensor, first_index: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes (uint8 below 16; rounded stochastically) and scales, for x >= 0.

    The values are the powers of two from 1 to 128, and 256, 384, 512, 768, 1024, 1536, 2048 and 3072. There is no 0:
    values below 1/3072 of the largest one in the block become 1/3072 of it.
    """
    inverse, scales = _scales(x, VARIANCE4_MAX)
    u = bits((x * inverse).clamp(min=1.0))
    random = random_bits(first_index, x.numel(), key, x.device)
    coarse = ((u + (random << 7) + 64) >> 23) - 127
    fine = ((u + (random << 6) + 32) >> 22) - 2 * 135 + 8
    code = torch.where(u < 135 << 23, coarse, fine).clamp(max=15)
    return torch.where(inverse.isnan(), 0, code).to(torch.uint8), scales


def decode_variance4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that the upper halves of these bytes and the scales stand for. With the scale 0 they are 0."""
    code = codes.to(torch.int64) >> 4
    patterns = torch.where(code < 8, (code + 127) << 23, (code - 8 + 2 * 135) << 22)
    return _value(patterns) * scales.repeat_interleave(BLOCK)[: codes.numel()]


def nearest4(values: Tensor, which: int) -> Tensor:
    """The codes nearest to scaled values of the momentum (0) or variance (1): the same again for decoded values."""
    u = bits(values.abs().clamp(min=1.0))
    coarse = (u + (1 << 22)) >> 23
    if which == 0:
        return torch.where(values.abs() < 0.5, 0, coarse - 126) | ((bits(values) >> 28) & 8)
    return torch.where(u < 135 << 23, coarse - 127, ((u + (1 << 21)) >> 22) - 2 * 135 + 8)
