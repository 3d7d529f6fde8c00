"""Numerics that all rules share: scalars are rounded to fp32 once, and tiny values become zero.

Why flushing is part of the rules: on x86, arithmetic on subnormal numbers is many times slower, and the momentum of
unused embedding rows decays into that range. With a hardware flush mode alone, results would depend on the machine.
Therefore each rule defines the flushing: states and weights below 2**-100 (8e-31) in magnitude become +0, on every
machine and in these references. The note in csrc/rules.h shows why the native kernels may then use the hardware's mode.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor

TINY = 2.0**-100


def flush(x: Tensor) -> Tensor:
    """`x` with all values below `TINY` in magnitude replaced by +0. NaN stays."""
    return x.masked_fill(x.abs() < TINY, 0.0)


def flush_positive(x: Tensor) -> Tensor:
    """`flush` for numbers that are never negative."""
    return x.masked_fill(x < TINY, 0.0)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root, as in hardware. torch's square root is not correctly rounded with MKL."""
    return x.double().sqrt().float()


def fp32(x: float) -> float:
    """`x` rounded to fp32. Kernels and references compute with these scalars."""
    return ctypes.c_float(x).value
