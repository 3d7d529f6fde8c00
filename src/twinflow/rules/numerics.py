"""Two facts every rule shares: scalars are rounded to fp32 once, and tiny values become zero.

Why flushing is part of the rules. On x86, arithmetic on subnormal numbers is many times slower, and the momentum of
unused embedding rows decays into that range. A hardware flush mode alone would make results depend on the machine,
so each rule states it: states and weights below 2**-100 in magnitude (8e-31) become +0, on every machine and in these
references. The note in csrc/rules.h shows why the native kernels may then use the hardware's mode.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor

TINY = 2.0**-100


def flush(x: Tensor) -> Tensor:
    """`x` with everything below `TINY` in magnitude replaced by +0; NaN stays."""
    return x.masked_fill(x.abs() < TINY, 0.0)


def flush_positive(x: Tensor) -> Tensor:
    """The same for numbers that are never negative."""
    return x.masked_fill(x < TINY, 0.0)


def sqrt(x: Tensor) -> Tensor:
    """The square root rounded correctly, as the hardware does; torch's own is not on every machine (MKL)."""
    return x.double().sqrt().float()


def fp32(x: float) -> float:
    """The fp32 number nearest to `x`: what both the kernels and the references compute with."""
    return ctypes.c_float(x).value
