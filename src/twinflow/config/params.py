"""`optimizer.params` and `scheduler.params`: the options of each optimizer and schedule, with DeepSpeed's defaults.

The section of an update rule follows from its record in `twinflow.rules`; DeepSpeed's schedules are sections like any
other. Classes of torch.optim and torch.optim.lr_scheduler are asked for their signatures; torch is imported only then.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import create_model

from twinflow.config.fields import (
    Above,
    Amount,
    Betas,
    Iteration,
    Number,
    Positive,
    Rates,
    Section,
    Settled,
    Single,
    Whole,
    honoured,
    refused,
    unused,
)
from twinflow.errors import invalid_value
from twinflow.rules import ADAM, ADAMW, RULES
from twinflow.rules.rule import Rule, Values

CLIPPING = "use gradient_clipping, at the top of the config"
_WIRE = "torch.distributed carries everything, over NCCL or gloo"
_FLAVOUR = "how torch loops over parameters; the host kernel has one way"


class Common(Section):
    """Keys of every update rule that are no options of it."""

    foreach: bool | None = unused(None, _FLAVOUR)
    fused: bool | None = unused(None, _FLAVOUR)
    max_grad_norm: Any = refused(None, CLIPPING)


class AdamParams(Common):
    """Keys of adam and adamw that are no options of the rule: the first two choose between rules and defaults."""

    adam_w_mode: bool = honoured(True, "type adam means AdamW; false: L2 weight decay")
    torch_adam: bool = honoured(False, "no other arithmetic; weight_decay of AdamW defaults to 0.01, as torch has it")
    bias_correction: bool = refused(True, "bias correction is always on: leave it true")
    amsgrad: bool = refused(False, "build torch.optim.AdamW(..., amsgrad=True) yourself and pass it as the optimizer")
    set_grad_none: bool = unused(True, "gradients are always dropped")
    fp32_optimizer_states: bool = refused(True, 'use offload_optimizer.states "bf16" or "int8"')
    capturable: bool = unused(False, _FLAVOUR)
    differentiable: bool = refused(False, "an update cannot be differentiated")


_TYPES: Final[Mapping[Values, object]] = {
    Values.AMOUNT: Amount,
    Values.NUMBER: Number,
    Values.START: Single,
    Values.BETAS: Betas,
    Values.FLAG: bool,
}


def params_of(rule: Rule, base: type[Common] = Common) -> type[Common]:
    """The section `optimizer.params` of an update rule."""
    fields: dict[str, Any] = {}
    for option in rule.all_options:
        default = option.default if option.in_config is None else option.in_config
        fields[option.name] = (_TYPES[option.values], honoured(default, option.text))
    for key in rule.other_keys:
        fields[key.name] = (bool, (refused if key.is_refused else unused)(key.default, key.text))
    return create_model(f"{rule.title}Params", __base__=base, __doc__=f"`optimizer.params` of {rule.name}.", **fields)


class OneBitAdamParams(Common):
    """`optimizer.params` of onebitadam."""

    lr: Amount = honoured(1e-3, "learning rate")
    betas: Betas = honoured((0.9, 0.999), "decay of the two moments")
    eps: Amount = honoured(1e-8, "added to the divisor")
    weight_decay: Amount = honoured(0.0, "weight decay")
    freeze_step: Positive | None = honoured(None, "last step of plain AdamW; null: when the second moment has settled")
    freeze_threshold: Settled = honoured(0.96, "it has, when its sum changes by no more than this over a window")
    freeze_window: Positive | None = honoured(None, "steps; null: as many as the second moment remembers")
    code: Literal["1bit", "int4", "int8"] = honoured("1bit", "bits that momenta and weights travel in")
    maximize: bool = refused(False, "1-bit Adam descends")
    bias_correction: bool = refused(True, "bias correction is always on: leave it true")
    eps_inside_sqrt: bool = refused(False, "eps is added to the root: leave it false")
    amsgrad: bool = refused(False, "the second moment is frozen: leave it false")
    cuda_aware: bool = unused(False, _WIRE)
    comm_backend_name: str = unused("nccl", _WIRE)
    set_grad_none: bool = unused(True, "gradients are always dropped")


class LRRangeTestParams(Section):
    """`scheduler.params` of LRRangeTest."""

    lr_range_test_min_lr: Rates = honoured(1e-3, "first learning rate")
    lr_range_test_step_size: Positive = honoured(2000, "steps between two learning rates")
    lr_range_test_step_rate: Amount = honoured(1.0, "growth of the learning rate")
    lr_range_test_staircase: bool = honoured(False, "grow in stairs")
    last_batch_iteration: Iteration = honoured(-1, "steps done before")


class OneCycleParams(Section):
    """`scheduler.params` of OneCycle."""

    cycle_min_lr: Rates | None = honoured(None, "lowest learning rate; must be given")
    cycle_max_lr: Rates | None = honoured(None, "highest learning rate; must be given")
    decay_lr_rate: Amount = honoured(0.0, "decay after the cycle")
    cycle_first_step_size: Above = honoured(2000, "steps up")
    cycle_second_step_size: Above | None = honoured(None, "steps down; null: as many as up")
    cycle_first_stair_count: Whole = honoured(0, "stairs up")
    cycle_second_stair_count: Whole | None = honoured(None, "stairs down; null: as many as up")
    decay_step_size: Amount = honoured(0, "steps of the decay; 0: none")
    cycle_momentum: bool = honoured(True, "momentum runs against the learning rate")
    cycle_min_mom: Rates = honoured(0.8, "lowest momentum")
    cycle_max_mom: Rates = honoured(0.9, "highest momentum")
    decay_mom_rate: Amount = honoured(0.0, "growth of the momentum after the cycle")
    last_batch_iteration: Iteration = honoured(-1, "steps done before")


class WarmupLRParams(Section):
    """`scheduler.params` of WarmupLR."""

    warmup_min_lr: Rates = honoured(0.0, "first learning rate")
    warmup_max_lr: Rates | None = honoured(None, "last learning rate; null: the optimizer's")
    warmup_num_steps: Positive = honoured(1000, "steps up")
    warmup_type: Literal["log", "linear"] = honoured("log", "how it grows")
    last_batch_iteration: Iteration = honoured(-1, "steps done before")


class WarmupDecayLRParams(WarmupLRParams):
    """`scheduler.params` of WarmupDecayLR."""

    warmup_max_lr: Rates | None = honoured(0.001, "highest learning rate; null: the optimizer's")
    total_num_steps: Positive | None = honoured(None, "steps of the whole training; must be given")


class WarmupCosineLRParams(Section):
    """`scheduler.params` of WarmupCosineLR."""

    total_num_steps: Positive | None = honoured(None, "steps of the whole training; must be given")
    warmup_min_ratio: Amount = honoured(0.0, "first learning rate, as a share of the optimizer's")
    warmup_num_steps: Positive = honoured(1000, "steps up")
    cos_min_ratio: Amount = honoured(0.0001, "last learning rate, as a share of the optimizer's")
    warmup_type: Literal["log", "linear"] = honoured("log", "how it grows")
    last_batch_iteration: Iteration = honoured(-1, "steps done before")


OPTIMIZERS: Final[Mapping[str, type[Common]]] = {
    **{name: params_of(rule, AdamParams if rule in (ADAM, ADAMW) else Common) for name, rule in RULES.items()},
    "onebitadam": OneBitAdamParams,
}
FORMATS: Final[Mapping[str, tuple[str, ...]]] = {  # of the state of each; torch's classes keep fp32
    **{name: rule.formats for name, rule in RULES.items()},
    "onebitadam": ("fp32", "bf16"),
}
SCHEDULES: Final[Mapping[str, type[Section]]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
_ONEBIT = '{}. Use "OneBitAdam", or twinflow.optim.onebit.{} in a loop of your own'
REFUSED_OPTIMIZERS: Final[Mapping[str, str]] = {
    "lamb": 'LAMB is not supported: use "AdamW"',
    "muon": 'Muon of the config splits the parameters: use "AdamW", or pass an optimizer of your own',
    "onebitlamb": _ONEBIT.format("Steps go by norms of whole parameters, of which ranks here own parts", "OneBitLamb"),
    "zerooneadam": _ONEBIT.format("Local steps give ranks different weights; here all have the same", "ZeroOneAdam"),
    "muadam": "Build it with the mup library and pass it as the optimizer",
    "muadamw": "Build it with the mup library and pass it as the optimizer",
    "musgd": "Build it with the mup library and pass it as the optimizer",
}


def torch_optimizers() -> dict[str, type[Any]]:
    """The optimizers of torch.optim by name."""
    import torch.optim

    base = torch.optim.Optimizer
    return {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}


def torch_schedules() -> dict[str, type[Any]]:
    """The schedules of torch.optim.lr_scheduler by name."""
    import torch.optim.lr_scheduler as module

    base = module.LRScheduler
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}
    return {n: c for n, c in found.items() if not n.startswith("_")}


def arguments(kind: type[Any]) -> dict[str, bool]:
    """The arguments of a torch class beside the first, what it works on; True: it has no default."""
    names = list(inspect.signature(kind).parameters.values())[1:]
    return {p.name: p.default is p.empty for p in names if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def optimizer_kind(name: str) -> type[Any]:
    """The section of ours, or the torch class, that `optimizer.type` names."""
    lower = name.lower()
    if lower in OPTIMIZERS:
        return OPTIMIZERS[lower]
    allowed = [*OPTIMIZERS, "a class of torch.optim by its exact name"]
    if lower in REFUSED_OPTIMIZERS:
        raise invalid_value("optimizer.type", name, ", ".join(allowed), REFUSED_OPTIMIZERS[lower])
    return _torch_kind("optimizer.type", name, torch_optimizers(), allowed)


def schedule_kind(name: str) -> type[Any]:
    """The section of ours, or the torch class, that `scheduler.type` names; upper and lower case are the same."""
    for own, section in SCHEDULES.items():
        if own.lower() == name.lower():
            return section
    found = torch_schedules()
    by_lower = {other.lower(): other for other in found}
    allowed = [*SCHEDULES, "a class of torch.optim.lr_scheduler"]
    return _torch_kind("scheduler.type", by_lower.get(name.lower(), name), found, allowed, tuple(SCHEDULES))


def _torch_kind(
    key: str, name: str, found: Mapping[str, type[Any]], allowed: list[str], more: tuple[str, ...] = ()
) -> type[Any]:
    if name in found:
        return found[name]
    from difflib import get_close_matches

    names = {other.lower(): other for other in (*found, *more)}
    near = get_close_matches(name.lower(), names, 1)
    remedy = f"Did you mean {names[near[0]]!r}?" if near else ""
    raise invalid_value(key, name, ", ".join(allowed), remedy)
