"""Conversion of a torch optimizer, built by a training loop, to a TwinOptimizer.

If twinflow has an update rule for the optimizer and supports its options, this rule is used. Any other optimizer runs
its own `step` on copies of the parameters in host memory. Schedulers that were built with the optimizer continue to
work, because the optimizer gets the param groups of the TwinOptimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.build_optimizer import follow, original_step
from twinflow.errors import invalid_value
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES

_RULES: Final[Mapping[type[Optimizer], str]] = {
    getattr(torch.optim, rule.torch_class): rule.name for rule in RULES.values() if rule.torch_class is not None
}
_HOW: Final = ("foreach", "fused", "capturable")  # select torch's implementation and do not change the result
# Keys of torch's param groups that our rules do not have.
TORCH_ONLY: Final = frozenset([*_HOW, "differentiable", *(key for rule in RULES.values() for key in rule.torch_modes)])
# Packages whose optimizers update on the GPU with their own kernels.
_ON_GPU: Final = ("bitsandbytes", "torchao")


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


def groups_for(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The param groups without options of torch that our rules do not have. Other entries are kept."""
    return [{key: value for key, value in group.items() if key not in TORCH_ONLY} for group in optimizer.param_groups]


def section_for(optimizer: Optimizer, rule: str) -> dict[str, Any]:
    """The `optimizer` section of a config, with the rule and the defaults of the optimizer."""
    names = {option.name for option in RULES[rule].options}
    params = {key: value for key, value in optimizer.defaults.items() if key in names}
    if rule == "adam":  # without this key, Adam in a config means AdamW
        params["adam_w_mode"] = False
    return {"type": RULES[rule].title, "params": params}
