# SPDX-License-Identifier: Apache-2.0
"""Reads the gradient of a parameter between backward and `step`, wherever it is then.

    gradients are          place                                                        summed over ranks
    left in `.grad`        `.grad`, or `Param.watched` behind a stand-in                only the rows of stage 3
    taken, incomplete      fp32 sums of the collector, before the last backward         no
    taken, complete        the task of the bucket, on the device or in a slot           yes
    taken, summed on host  `Bucket.total`                                               yes

A gradient is taken during backward (gradient_taker.py). With other ranks, the reducer then sums it and gives this rank
its part (zero/reducer.py). To read such a gradient, all buckets of the step are submitted now instead of in `step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinflow.conflicts import conflict
from twinflow.offload.bucket import Param, local_of
from twinflow.offload.runtime import Runtime
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.weight_guard import plain

LEFT = "gradients in .grad"
TAKEN = "gradients that are not summed"
COMPLETE = "gradients of all backwards"


@dataclass(frozen=True)
class Gradient:
    """Slices of a gradient with their starts in the flattened parameter."""

    slices: list[tuple[int, Tensor]]
    scale: float  # the values are the gradient times this number
    is_summed: bool  # over the ranks
    is_hit: bool  # this rank has a gradient; otherwise its values are zero, or those of other ranks


@torch.no_grad()
def read_gradient(runtime: Runtime, param: Param) -> Gradient | None:
    """This rank's part of the gradient of this step, or None. Raises ValueError if an update has already used it.

    All ranks call this function if `gradient_state` is COMPLETE, because their gradients are then summed.
    """
    state = gradient_state(runtime)
    if state == LEFT:
        return _left(runtime, param)
    job, scale, sharing = runtime.steps.job, runtime.gradient_scale, runtime.sharing
    if job is not None and not runtime.settings.limits.any:
        raise conflict("DeepSpeed's functions", "in backward")
    if state == COMPLETE:
        runtime.submit_rest()
    is_summed = sharing is None or state == COMPLETE
    found = runtime.collector.read_slices(job, param, is_whole=not is_summed)
    if not is_summed and sharing is not None:
        scale /= sharing.divisor  # it belongs to sums, and this is the gradient of one rank
    slices = [(param.first + start, values.float()) for start, values in found]
    return Gradient(slices, scale, is_summed, param.was_hit and not param.is_filled) if slices else None


def gradient_state(runtime: Runtime) -> str:
    """Where the gradients of this step are now. It is the same on all ranks that have run the same backwards."""
    runtime.look_at_gradients()
    if not runtime.is_taking:
        return LEFT
    if runtime.sharing is not None and (runtime.settings.sums_on_host or runtime.is_complete):
        return COMPLETE
    return TAKEN


def _left(runtime: Runtime, param: Param) -> Gradient | None:
    with plain():
        grad = param.watched if param.watched is not None else param.tensor.grad
        if isinstance(grad, TakenGradient):
            grad = None if grad.is_used else grad.held
        if grad is None:
            return None
        local = local_of(grad).detach().reshape(-1).float()
    is_summed = runtime.sharing is None  # each rank has its rows of the mean (stage 3), or there is one rank
    scale = runtime.gradient_scale
    if runtime.sharing is not None:
        scale /= runtime.sharing.divisor
    return Gradient([(param.first, local)], scale, is_summed, is_hit=not param.is_filled)
