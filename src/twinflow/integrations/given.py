"""A torch optimizer that somebody else's loop has built, taken over by a TwinOptimizer.

Those of torch's optimizers for which there is an update rule here become that rule, as far as it can do what was asked
for; any other optimizer runs as it is, on host copies. Schedulers that were built over it go on: its param groups are
the TwinOptimizer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES

_RULES: Final[Mapping[type[Optimizer], str]] = {
    getattr(torch.optim, rule.torch_class): rule.name for rule in RULES.values() if rule.torch_class is not None
}
_HOW: Final = ("foreach", "fused", "capturable")  # how torch computes, not what
# They update on the GPU, by kernels of their own: (package, what to use instead).
_ON_GPU: Final[Mapping[str, str]] = {
    "bitsandbytes": 'Use optim="adamw_torch" and states="int8": Adam with 8-bit states, updated on the host.',
    "torchao": 'Use optim="adamw_torch" and states="int8": Adam with 8-bit states, updated on the host.',
}


def rule_for(optimizer: Optimizer) -> str | None:
    """The rule of ours that does what this optimizer would; None where there is none."""
    name = _RULES.get(type(optimizer))
    if name is None or any(entry.get("step", 1) for entry in optimizer.state.values()):  # Adagrad's begins with a sum
        return None
    modes = {**RULES[name].torch_modes, "differentiable": False}
    for group in optimizer.param_groups:
        if any(group.get(key, value) != value for key, value in modes.items()):
            return None
        if any(isinstance(group.get(key), torch.Tensor) for key in RULES[name].defaults):  # a learning rate on the GPU
            return None
    return name


def own_options() -> list[str]:
    """What TwinOptimizer can be told beside an optimizer that has groups and options of its own."""
    given = inspect.signature(TwinOptimizer.__init__).parameters.values()
    return [one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name != "param_groups"]


def take_over(optimizer: Optimizer, model: nn.Module, **options: Any) -> TwinOptimizer:
    """A TwinOptimizer over `model` with the groups, options and state of `optimizer`, which must not be used again."""
    if isinstance(optimizer, TwinOptimizer):
        raise invalid_value("optimizer", "a TwinOptimizer", "a torch.optim.Optimizer to build one of")
    kind = type(optimizer).__name__
    for name in options:
        if name not in own_options():
            remedy = f"Options of the update are those of the {kind} that is given."
            raise invalid_value("option", name, own_options(), remedy)
    package = type(optimizer).__module__.split(".")[0]
    if package in _ON_GPU:
        raise invalid_value("optimizer", kind, "one that runs on the host", _ON_GPU[package])
    wrapped = vars(optimizer).pop("step", None)  # a scheduler's wrapper, which is not the optimizer's
    try:
        twin = _build(optimizer, model, options)
    finally:
        if wrapped is not None:
            optimizer.step = wrapped  # type: ignore[method-assign]
    follow(optimizer, twin)
    return twin


def follow(optimizer: Optimizer, twin: TwinOptimizer) -> None:
    """Let schedulers that were built over `optimizer` move `twin`: they write to its param groups."""
    optimizer.param_groups = twin.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # else they warn that it is never stepped


def groups_for(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its groups with the options that our rules know; what others have put there is kept."""
    dropped = {*_HOW, "differentiable", *(key for rule in RULES.values() for key in rule.torch_modes)}
    return [{key: value for key, value in group.items() if key not in dropped} for group in optimizer.param_groups]


def section_for(optimizer: Optimizer, rule: str) -> dict[str, Any]:
    """The `optimizer` section of a config that names its rule and defaults."""
    names = {option.name for option in RULES[rule].options}
    params = {key: value for key, value in optimizer.defaults.items() if key in names}
    if rule == "adam":  # what a config calls Adam is AdamW without this
        params["adam_w_mode"] = False
    return {"type": RULES[rule].title, "params": params}


def _build(optimizer: Optimizer, model: nn.Module, options: dict[str, Any]) -> TwinOptimizer:
    name = rule_for(optimizer)
    if name is None:
        return TwinOptimizer(model, optimizer, **options)
    defaults = {key: value for key, value in optimizer.defaults.items() if key in RULES[name].defaults}
    return TwinOptimizer(model, name, param_groups=groups_for(optimizer), **options, **defaults)
