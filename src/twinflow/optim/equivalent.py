# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch whose update is one of twinflow's rules: the rule, its groups, and its section of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.optim.optimizer import Optimizer

from twinflow.rules import RULES

_RULES: Final[Mapping[type[Optimizer], str]] = {
    getattr(torch.optim, rule.torch_class): rule.name for rule in RULES.values() if rule.torch_class is not None
}
_HOW: Final = ("foreach", "fused", "capturable")  # select torch's implementation and do not change the result
# Keys of torch's param groups that our rules do not have.
TORCH_ONLY: Final = frozenset([*_HOW, "differentiable", *(key for rule in RULES.values() for key in rule.torch_modes)])


def rule_for(optimizer: Optimizer) -> str | None:
    """The update rule that is equivalent to this optimizer, or None."""
    name = _RULES.get(type(optimizer))
    # No rule if the optimizer has already made steps. Adagrad has state at step 0, which is allowed.
    if name is None or any(entry.get("step", 1) for entry in optimizer.state.values()):
        return None
    modes = {**RULES[name].torch_modes, "differentiable": False}
    for group in optimizer.param_groups:
        if any(group.get(key, value) != value for key, value in modes.items()):
            return None
        # No rule if an option is a tensor, for example a learning rate on the GPU.
        if any(isinstance(group.get(key), torch.Tensor) for key in RULES[name].defaults):
            return None
    return name


def groups_for(optimizer: Optimizer) -> list[dict[str, object]]:
    """The param groups without options of torch that our rules do not have. Other entries are kept."""
    return [{key: value for key, value in group.items() if key not in TORCH_ONLY} for group in optimizer.param_groups]


def section_for(optimizer: Optimizer, rule: str) -> dict[str, object]:
    """The `optimizer` section of a config, with the rule and the defaults of the optimizer."""
    names = {option.name for option in RULES[rule].options}
    params = {key: value for key, value in optimizer.defaults.items() if key in names}
    if rule == "adam":  # without this key, Adam in a config means AdamW
        params["adam_w_mode"] = False
    return {"type": RULES[rule].title, "params": params}
