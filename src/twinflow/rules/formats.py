"""State formats: how master weights and optimizer states lie in memory. Pure torch on any device, the truth for
csrc/codecs.h and gpu/codecs.py.

| format | first state (momentum) | second state (variance) | master of a bf16 weight | master of any other weight |
|---|---|---|---|---|
| fp32 | fp32 | fp32 | fp32 or split | fp32 |
| bf16 | bf16, nearest | bf16, stochastic | split | fp32 |
| int8 | e4m3, nearest | e5m3, stochastic | split | fp32 |

Split: fp32 bits u are kept as upper = bf16 of u (ties away from zero, the weight itself) and lower = int16(u), with
u = (upper << 16) + lower. 8-bit codes share one fp32 scale for each 128 elements from the parameter's start.

Why the variance is rounded stochastically: at b2 = 0.999 its decay is less than half a unit in the last place of bf16
or of 8 bits, so rounding to nearest would freeze it. The random bits are a hash of (step, parameter, index): the same
on every machine, for every thread count and however a parameter is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.rules.numerics import fp32

FORMATS = ("fp32", "bf16", "int8")
BLOCK = 128
MOMENT_MAX = 448.0  # largest e4m3 value
VARIANCE_MAX = 61440.0  # largest e5m3 value in use, 1.875 * 2**15
_MASK = 0xFFFFFFFF

Key = tuple[int, int]


def _bits(x: Tensor) -> Tensor:
    """The fp32 bit patterns of `x` as int64 in [0, 2**32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & _MASK


def _value(bits: Tensor) -> Tensor:
    """The fp32 numbers with these bit patterns (int64 in [0, 2**32))."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def _as_bf16(upper: Tensor) -> Tensor:
    upper = upper & 0xFFFF
    return torch.where(upper >= 2**15, upper - 2**16, upper).to(torch.int16).view(torch.bfloat16)


def to_bf16(x: Tensor) -> Tensor:
    """To nearest, ties to even; NaN becomes 0x7FC0 (torch's own choice differs between machines)."""
    u = _bits(x)
    return _as_bf16(torch.where(x.isnan(), 0x7FC0, (u + 0x7FFF + ((u >> 16) & 1)) >> 16))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Upper (bf16) and lower (int16) halves of fp32 numbers; exact for every bit pattern but the payload of a NaN."""
    u = _bits(x)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    upper = torch.where(nan, (u >> 16) | 0x40, (u + 0x8000) >> 16)
    lower = torch.where(nan, 0, u & 0xFFFF)
    return _as_bf16(upper), torch.where(lower >= 2**15, lower - 2**16, lower).to(torch.int16)


def rounds_to(master: Tensor, rounded: Tensor) -> Tensor:
    """Where `rounded` is a nearest neighbour of fp32 `master` in its own dtype, whichever way a tie went."""
    same = master.to(rounded.dtype) == rounded
    if rounded.dtype != torch.bfloat16:
        return same
    near = (_bits(master) - _bits(rounded.float())).abs() <= 2**15
    return same | (near & master.isfinite() & rounded.isfinite())


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 numbers whose halves these are."""
    high = (upper.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF) << 16
    return _value((high + lower.to(torch.int64)) & _MASK)


def rounding_key(step: int, parameter: int) -> Key:
    """64 well-mixed bits of (step, parameter), as two 32-bit words (splitmix64's finaliser)."""
    z = (step * 0x9E3779B97F4A7C15 + parameter * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z & _MASK, z >> 32


def random_bits(first_index: int, numel: int, key: Key, device: torch.device | None = None) -> Tensor:
    """16 random bits for each of `numel` elements from `first_index` (a multiple of 128) on, as int64.

    A 32-bit hash of the block seeds a 16-bit mix of the position in it; for a random seed each result is uniform.
    """
    index = torch.arange(first_index, first_index + numel, dtype=torch.int64, device=device)
    h = (index // BLOCK + key[0]) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = (((h ^ (h >> 15)) + key[1]) & _MASK) * 0x846CA68B & _MASK
    h = h ^ (h >> 16)
    x = (index % BLOCK + h) & 0xFFFF
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = (((x ^ (x >> 7)) + (h >> 16)) & 0xFFFF) * 0xDB2D & 0xFFFF
    return x ^ (x >> 9)


def to_bf16_stochastic(x: Tensor, first_index: int, key: Key) -> Tensor:
    """Up or down with the probability that keeps the mean. For numbers >= 0; the largest never becomes infinite."""
    u = _bits(x)
    rounded = u + random_bits(first_index, x.numel(), key, x.device)
    return _as_bf16(torch.where(u >= 0x7F7F0000, u, rounded) >> 16)


def _blocks(x: Tensor) -> Tensor:
    """`x` padded with zeros to whole blocks, one block a row."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scales(x: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """For each element the factor that brings its block into range; for each block the scale that undoes it.

    Both are NaN for a block that holds an infinity or a NaN: its codes are 0 and stand for NaN.
    """
    largest = _value(_bits(_blocks(x)).bitwise_and(0x7FFFFFFF).amax(1))  # by bits: a NaN is larger than all
    largest = torch.where(largest.isfinite(), largest, float("nan"))
    inverse = torch.where(largest == 0, 0.0, torch.full_like(largest, top) / largest)  # a true division
    return inverse.repeat_interleave(BLOCK)[: x.numel()], largest * fp32(1.0 / top)


def encode_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8: sign, 4 bits of exponent, 3 of mantissa; to nearest) and scales."""
    inverse, scales = _scales(x, MOMENT_MAX)
    scaled = torch.where(inverse.isnan(), 0.0, x * inverse)
    return scaled.clamp(-MOMENT_MAX, MOMENT_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that these codes and scales stand for."""
    return codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(BLOCK)[: codes.numel()]


def encode_e5m3(x: Tensor, first_index: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes (uint8: 5 bits of exponent, 3 of mantissa, no sign; stochastic; 0 only for 0) and scales, for x >= 0.

    A code is the upper part of an fp16 number: the top exponent is not used.
    """
    inverse, scales = _scales(x, VARIANCE_MAX)
    scaled = x * inverse
    small = scaled < 2.0**-14
    u = _bits(torch.where(small, scaled + 2.0**-14, scaled))
    rounded = (u + (random_bits(first_index, x.numel(), key, x.device) << 4)) >> 20
    code = rounded - torch.where(small, 113 << 3, 112 << 3)
    code = torch.maximum(code, (x > 0).to(torch.int64)).clamp(max=247)
    return torch.where(inverse.isnan(), 0, code).to(torch.uint8), scales


def decode_e5m3(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers that these codes and scales stand for."""
    values = (codes.to(torch.int16) << 7).view(torch.float16).float()
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]
