"""How much memory a bucket's state takes. Plain arithmetic; the tests hold it against real stores."""

from __future__ import annotations

from typing import Final

import torch

from twinflow.offload.plan import HOST, RESIDENT, BucketPlan
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK

_STATE_BYTES: Final = {"fp32": 4, "bf16": 2, "int8": 1}


def master_bytes(dtype: torch.dtype, place: str, keeps_weights: bool = False) -> int:
    """Of an element's master, beside the parameter itself. On the device the parameter is part of it, or all of it,
    unless weights are kept apart."""
    if dtype == torch.float32:
        return 4 if place == HOST or keeps_weights else 0
    apart = dtype.itemsize if keeps_weights else 0
    if dtype == torch.bfloat16:
        return 4 if place == HOST else 2 + apart
    return 4 if place == HOST else 4 + apart


def state_bytes(
    rule: Rule | None, format: str, plan: BucketPlan, keeps_states: bool = True, keeps_weights: bool = False
) -> int:
    """Of a bucket's master, states and scales, where it lives. Of an optimizer that is not ours: fp32, two states."""
    if rule is None:
        return 12 * plan.numel
    num_states = sum(name is not None for name in rule.states) if keeps_states else 0
    scales = 4 * num_states * (plan.numel // BLOCK) if format == "int8" else 0
    apart = plan.place == RESIDENT and (keeps_weights or not plan.can_alias)
    # Streamed state is like resident state, on the host: the parameter is part of it.
    each = master_bytes(plan.dtype, plan.place, apart) + num_states * _STATE_BYTES[format]
    return each * plan.numel + scales
