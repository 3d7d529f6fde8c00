"""The gate: what a step multiplies its gradients with, and whether it happens at all.

Exact clipping needs the global norm, which exists only when backward has ended. Until then an update may run ahead into
a shadow (shadow.py) with the factor it would have without clipping. When the norm is there, the gate decides once for
the whole step: shadows made with the right factor are kept, all others are dropped and made anew from untouched state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinflow.device import Event

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds this to the norm
_MEMORY = 8  # past steps that decide whether running ahead pays


@dataclass(frozen=True)
class Limits:
    """What the gate watches."""

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


class Gate:
    """One step's gate. The worker alone decides; other threads arm it and read the decision."""

    def __init__(self, limits: Limits, scale: float) -> None:
        self.limits = limits
        self.scale = scale
        self.norms: tuple[Tensor, Event] | None = None  # the norms' host copy, and when it is there
        self.are_squares = False  # ... or the squares of them
        self.is_decided_there = False  # ... or what the device has decided (decide_there)
        self.decision: Decision | None = None
        self.is_dropped = False  # the step is skipped, whatever the norms
        self.counts = {"speculated": 0, "dropped": 0, "held": 0}  # buckets

    @property
    def is_open(self) -> bool:
        """Whether an update may write to the state itself."""
        return self.decision is not None or not self.limits.any

    @property
    def factor(self) -> float:
        """The factor to update with: the decided one, before that the one of an unclipped step."""
        return self.decision.factor if self.decision is not None else 1.0 / self.scale

    def arm(self, norms: Tensor, event: Event, are_squares: bool = False) -> None:
        """All norms are on their way: `norms` holds them, or their squares, once `event` is done."""
        self.norms, self.are_squares = (norms, event), are_squares

    def resolve(self) -> Decision:
        """Decide from the norms, which have arrived."""
        assert self.norms is not None and self.decision is None
        norms, self.norms = self.norms[0], None
        if self.is_decided_there:
            norm, factor, skip = norms.tolist()
            decision = Decision(norm, 0.0 if skip else factor, bool(skip), not skip and factor * self.scale != 1.0)
            self.decision = replace(decision, factor=0.0, skip=True, clipped=False) if self.is_dropped else decision
            return self.decision
        squares = norms.tolist() if self.are_squares else [n * n for n in norms.tolist()]
        decision = decide(squares, self.scale, self.limits)
        self.decision = replace(decision, factor=0.0, skip=True, clipped=False) if self.is_dropped else decision
        return self.decision


class History:
    """Whether it pays to run ahead, from what became of the last steps."""

    def __init__(self) -> None:
        self._wasted: deque[bool] = deque(maxlen=_MEMORY)

    def note(self, decision: Decision) -> None:
        """Remember what a step came to."""
        self._wasted.append(decision.clipped or decision.skip)

    @property
    def speculates(self) -> bool:
        """Run ahead unless half of the recent steps threw that work away."""
        return 2 * sum(self._wasted) < max(2, len(self._wasted))
