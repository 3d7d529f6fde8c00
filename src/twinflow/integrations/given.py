# SPDX-License-Identifier: Apache-2.0
"""Conversion of a torch optimizer, built by a training loop, to a TwinOptimizer.

If twinflow has an update rule for the optimizer and supports its options, this rule is used. Any other optimizer runs
its own `step` on copies of the parameters in host memory. Schedulers that were built with the optimizer continue to
work, because the optimizer gets the param groups of the TwinOptimizer.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.build_optimizer import follow, original_step
from twinflow.errors import invalid_value
from twinflow.optim.equivalent import groups_for, rule_for
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES

# Packages whose optimizers update on the GPU with their own kernels.
_ON_GPU: Final = ("bitsandbytes", "torchao")


def own_options() -> list[str]:
    """The arguments of TwinOptimizer that can be used with an optimizer that has its own groups and options."""
    given = inspect.signature(TwinOptimizer.__init__).parameters.values()
    return [one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name != "param_groups"]


def take_over(optimizer: Optimizer, model: nn.Module, **options: Any) -> TwinOptimizer:
    """Build a TwinOptimizer for `model` with the groups, options and state of `optimizer`. Do not use `optimizer`
    afterwards. Raises ValueError for an optimizer that cannot run on the host.
    """
    if isinstance(optimizer, TwinOptimizer):
        raise ValueError(
            "optimizer is a TwinOptimizer, but must be another torch.optim.Optimizer. Use the TwinOptimizer directly."
        )
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise invalid_value("optimizer", optimizer, "a torch.optim.Optimizer", "Build it over the model's parameters.")
    for name in options:
        if name not in own_options():
            remedy = f"Pass options of the update, such as lr, to {kind}(...)."
            raise invalid_value("The name of an option", name, own_options(), remedy)
    if type(optimizer).__module__.split(".")[0] in _ON_GPU:
        remedy = 'Use torch.optim.AdamW (optim="adamw_torch" in TrainingArguments) with states="int8".'
        raise ValueError(f"optimizer is a {kind}, but must be an optimizer that can run on the host. {remedy}")
    rule = rule_for(optimizer)
    with original_step(optimizer):
        if rule is None:
            twin = TwinOptimizer(model, optimizer, **options)
        else:
            defaults = {key: value for key, value in optimizer.defaults.items() if key in RULES[rule].defaults}
            twin = TwinOptimizer(model, rule, param_groups=groups_for(optimizer), **options, **defaults)
    follow(optimizer, twin)
    return twin
