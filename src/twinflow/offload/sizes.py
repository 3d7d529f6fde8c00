"""How much memory a bucket's state takes, by the planner's arithmetic; the tests hold it against real stores."""

from __future__ import annotations

from typing import Final

import torch

from twinflow.offload.plan import BucketPlan
from twinflow.planner import formats
from twinflow.rules import Rule

_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def state_bytes(
    rule: Rule | None, format: str, plan: BucketPlan, keeps_states: bool = True, keeps_weights: bool = False
) -> int:
    """Of a bucket's master, states and scales, where it lives. Of an optimizer that is not ours: fp32, two states."""
    if rule is None:
        return 12 * plan.numel
    num_states = sum(name is not None for name in rule.states) if keeps_states else 0
    keeps_weights = keeps_weights or not plan.can_alias
    each = formats.state_bytes(format, _NAMES[plan.dtype], keeps_weights, num_states)
    return int(getattr(each, plan.place) * plan.numel)
