"""The clipping decision: what a step multiplies its gradients with, and whether it happens at all.

Exact clipping needs the global norm, which exists only when backward has ended. Until then an update may run ahead into
a speculative store (speculative_stores.py) with the factor it would have without clipping. When the norm is there, one
decision is made for the whole step: updates made with the right factor are kept, all others are made anew from the
untouched state.

The decision is made on the device, where updates of resident state read it, and copied to the host for the others
(`decide_there`); or from norms of several ranks (`decide`); or, where the host sums gradients, by the executor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds this to the norm


@dataclass(frozen=True)
class Limits:
    """What the norm of all gradients is compared with."""

    max_norm: float | None = None  # clip gradients to this global norm
    skip_nonfinite: bool = False  # leave weights and state alone when a gradient is not finite

    @property
    def any(self) -> bool:
        """Whether an update has to wait for the norm at all."""
        return self.max_norm is not None or self.skip_nonfinite


@dataclass(frozen=True)
class Decision:
    """What came out: the factor for every gradient of this step, or that the step is skipped."""

    norm: float
    factor: float
    skip: bool
    clipped: bool


def decide(sums: Sequence[float], scale: float, limits: Limits) -> Decision:
    """The decision for a step whose gradients (times the loss scale) have these sums of squares."""
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    norm = math.sqrt(total) / scale if total >= 0 else math.nan
    if limits.skip_nonfinite and not math.isfinite(norm):
        return Decision(norm, 0.0, skip=True, clipped=False)
    clip = 1.0
    if limits.max_norm is not None:
        clip = limits.max_norm / (norm + _CLIP_EPS)
        clip = 1.0 if clip > 1.0 else clip  # NaN stays NaN, as with torch
    return Decision(norm, clip / scale, skip=False, clipped=clip != 1.0)


def decide_there(into: Tensor, norms: Tensor, scale: float, limits: Limits) -> None:
    """`decide` on the device, from the norms of the step's buckets: norm, factor and whether to skip into `into`, fp64.

    Updates there read it where it is, so that nothing waits for the host."""
    norm = norms.square().sum().sqrt() / scale
    clip = torch.ones_like(norm)
    if limits.max_norm is not None:
        clip = limits.max_norm / (norm + _CLIP_EPS)
        clip = torch.where(clip > 1.0, 1.0, clip)  # NaN stays NaN, as with torch
    skip = ~norm.isfinite() if limits.skip_nonfinite else torch.zeros_like(norm)
    torch.stack([norm, clip / scale, skip.to(norm.dtype)], out=into)
