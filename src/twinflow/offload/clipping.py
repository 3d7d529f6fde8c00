# SPDX-License-Identifier: Apache-2.0
"""The clipping decision: the factor by which a step multiplies its gradients, or the decision to skip the step.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

Exact clipping needs the global norm, which is known only when backward has ended. Until then an update may write its
results to a speculative store (speculative_stores.py), with the factor of a step that is not clipped. When the norm is
known, one decision is made for the whole step. If the step is neither clipped nor skipped, these results are kept. If
it is clipped, the updates are repeated with the right factor, from the state, which has not changed.

There are three places where the decision is made:

- On the device (`decide_there`), queued on the stream that made the gradients. Updates of state on the device read the
  decision there. It is copied to the host for the other updates.
- In the thread that sums gradients over ranks, from the norms of all ranks (`decide`).
- In the executor, where the host sums the gradients of several backwards (csrc/clip_decision.cpp).

The functions here hold no state.
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
    """The limits that the user has set for the gradients."""

    max_norm: float | None = None  # clip gradients to this global norm
    skip_nonfinite: bool = False  # do not change weights and state if a gradient is not finite
    max_value: float | None = None  # clip each element of the gradients to this absolute value

    @property
    def any(self) -> bool:
        """Whether an update depends on the norm."""
        return self.max_norm is not None or self.skip_nonfinite


@dataclass(frozen=True)
class Decision:
    """The norm of a step's gradients, the factor for each of them, and whether the step is skipped or clipped."""

    norm: float
    factor: float
    skip: bool
    clipped: bool


def decide(sums: Sequence[float], scale: float, limits: Limits) -> Decision:
    """Decide on a step. `sums`: sums of squares of its gradients, which are `scale` times the true gradients."""
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    norm = math.sqrt(total) / scale if total >= 0 else math.nan
    if limits.skip_nonfinite and not math.isfinite(norm):
        return Decision(norm, 0.0, skip=True, clipped=False)
    clip = 1.0
    if limits.max_norm is not None:
        clip = limits.max_norm / (norm + _CLIP_EPS)
        clip = 1.0 if clip > 1.0 else clip  # NaN stays NaN, as with torch
    return Decision(norm, clip / scale, skip=False, clipped=clip != 1.0)


def clip_values(gradient: Tensor, limit: float) -> None:
    """Clips the elements of a gradient to absolute values up to `limit`, in place. Elements that are not finite stay as
    they are, so that the step is skipped.
    """
    gradient.copy_(torch.where(gradient.isfinite(), gradient.clamp(-limit, limit), gradient))


def decide_there(into: Tensor, norms: Tensor, scale: float, limits: Limits) -> None:
    """Decide on the device, from the norms of the step's buckets. Writes norm, factor and skip to `into` (fp64).

    Updates on the device read the decision from `into`, so nothing waits for the host.
    """
    norm = norms.square().sum().sqrt() / scale
    clip = torch.ones_like(norm)
    if limits.max_norm is not None:
        clip = limits.max_norm / (norm + _CLIP_EPS)
        clip = torch.where(clip > 1.0, 1.0, clip)  # NaN stays NaN, as with torch
    skip = ~norm.isfinite() if limits.skip_nonfinite else torch.zeros_like(norm)
    torch.stack([norm, clip / scale, skip.to(norm.dtype)], out=into)
