# SPDX-License-Identifier: Apache-2.0
"""`optimizer.params` and `scheduler.params`: the options of each optimizer and schedule, with DeepSpeed's defaults.

The section of an update rule is made from its record in `twinflow.rules`. DeepSpeed's schedules are ordinary sections.
The options of classes of torch.optim and torch.optim.lr_scheduler come from their signatures. torch is imported only
for these classes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final, Literal

from pydantic import create_model

from twinflow.config.fields import (
    Above,
    Amount,
    Betas,
    Coefficients,
    Decay,
    Iteration,
    Number,
    Positive,
    Rates,
    Section,
    Settled,
    Single,
    Whole,
    honoured,
    nearest,
    refused,
    unused,
)
from twinflow.errors import invalid_value
from twinflow.rules import ADAM, ADAMW, ALL_RULES, MUON
from twinflow.rules.rule import Rule, Values

CLIPPING = "use gradient_clipping, at the top of the config"
_WIRE = "all communication uses torch.distributed with NCCL or gloo"
_FLAVOUR = "it selects an implementation of torch's optimizer, and twinflow has only one"


class Common(Section):
    """Keys that every update rule accepts besides its options."""

    foreach: bool | None = unused(None, _FLAVOUR)
    fused: bool | None = unused(None, _FLAVOUR)
    max_grad_norm: Any = refused(None, CLIPPING)


class AdamParams(Common):
    """Keys that adam and adamw accept besides their options. The first two choose the rule and its defaults."""

    adam_w_mode: bool = honoured(True, "true: type adam means AdamW; false: type adam means Adam with L2 weight decay")
    torch_adam: bool = honoured(
        False, "true: weight_decay of AdamW defaults to 0.01, as in torch; the arithmetic is unchanged"
    )
    amsgrad: bool = refused(False, "build torch.optim.AdamW(..., amsgrad=True) and pass it as the optimizer")
    set_grad_none: bool = unused(True, "gradients are always set to None")
    fp32_optimizer_states: bool = refused(True, 'use offload_optimizer.states "bf16" or "int8"')
    capturable: bool = unused(False, _FLAVOUR)
    differentiable: bool = refused(False, "leave it false: an update cannot be differentiated")


MUON_RATES: Final[Mapping[str, float]] = {"muon_lr": 0.02, "adam_lr": 3e-4}  # DeepSpeed's defaults, without `lr`


class MuonParams(Common):
    """Keys that muon accepts besides its options."""

    muon_lr: Amount | None = honoured(None, "learning rate of matrices; null: lr, or 0.02 if lr is not given")
    adam_lr: Amount | None = honoured(
        None, "learning rate of all other parameters, which AdamW updates; null: lr, or 0.0003 if lr is not given"
    )
    ns_method: Literal["standard"] = honoured(
        "standard",
        "how Newton-Schulz iterations are computed",
        hints={"gram": 'Use "standard", which computes the same polynomial'},
    )


_TYPES: Final[Mapping[Values, object]] = {
    Values.AMOUNT: Amount,
    Values.NUMBER: Number,
    Values.START: Single,
    Values.BETAS: Betas,
    Values.FLAG: bool,
    Values.COUNT: Positive,
    Values.POLYNOMIAL: Coefficients,
}


def params_of(rule: Rule, base: type[Common] = Common) -> type[Common]:
    """The section `optimizer.params` of an update rule."""
    fields: dict[str, Any] = {}
    for option in rule.all_options:
        default = option.default if option.in_config is None else option.in_config
        kind: Any = Literal[option.choices] if option.values is Values.CHOICE else _TYPES[option.values]
        fields[option.name] = (kind, honoured(default, option.text))
    for key in rule.other_keys:
        fields[key.name] = (bool, (refused if key.is_refused else unused)(key.default, key.text))
    return create_model(f"{rule.title}Params", __base__=base, __doc__=f"`optimizer.params` of {rule.name}.", **fields)


class CompressedParams(Common):
    """Keys of all optimizers with compressed communication."""

    lr: Amount = honoured(1e-3, "learning rate")
    betas: Betas = honoured((0.9, 0.999), "decay of the two moments")
    eps: Amount = honoured(1e-8, "added to the divisor")
    weight_decay: Amount = honoured(0.0, "weight decay")
    bias_correction: bool = honoured(True, "divide the moments by 1 - beta**step, because they start at zero")
    code: Literal["1bit", "int4", "int8"] = honoured("1bit", "code in which momenta and weights are sent")
    maximize: bool = refused(False, "leave it false: optimizers with compressed communication only minimize")
    eps_inside_sqrt: bool = refused(False, "leave it false: eps is added after the square root")
    amsgrad: bool = refused(False, "leave it false: the second moment is frozen")
    cuda_aware: bool = unused(False, _WIRE)
    comm_backend_name: str = unused("nccl", _WIRE)
    set_grad_none: bool = unused(True, "gradients are always set to None")


class FreezingParams(CompressedParams):
    """Keys of the optimizers that freeze the second moment once."""

    freeze_step: Positive | None = honoured(
        None, "last step of uncompressed AdamW; null: the step at which the second moment is stable"
    )
    freeze_threshold: Settled = honoured(
        0.96, "the second moment is stable if smaller / larger of its sums now and one window earlier is at least this"
    )
    freeze_window: Positive | None = honoured(
        None, "length of the window in steps; null: 1 / (1 - betas[1]), at most 1000"
    )


class OneBitAdamParams(FreezingParams):
    pass


class OneBitLambParams(FreezingParams):
    max_coeff: Above = honoured(10.0, "largest ratio of the norms of weights and update")
    min_coeff: Above = honoured(0.01, "smallest ratio of the norms of weights and update")
    coeff_beta: Decay = honoured(0.9, "decay of the mean of the ratios, which is used after the switch")
    factor_max: Above = honoured(4.0, "largest factor of the ratio after the switch")
    factor_min: Above = honoured(0.5, "smallest factor of the ratio after the switch")
    factor_threshold: Settled = honoured(0.1, "largest share by which a step changes the factor")


class ZeroOneAdamParams(CompressedParams):
    var_freeze_step: Positive = honoured(100000, "last step that may update the second moment; later steps are local")
    var_update_scaler: Positive = honoured(
        16, "number of updates of the second moment after which the interval between them doubles"
    )
    local_step_scaler: Positive = honoured(
        32678, "number of local steps after which the interval between exchanges doubles"
    )
    local_step_clipper: Positive = honoured(16, "longest interval between exchanges, in steps")


class LambParams(Common):
    lr: Amount = honoured(1e-3, "learning rate")
    betas: Betas = honoured((0.9, 0.999), "decay of the two moments")
    eps: Amount = honoured(1e-8, "added to the divisor")
    weight_decay: Amount = honoured(0.0, "weight decay, added to the update")
    bias_correction: bool = honoured(True, "scale the step by the bias correction of the moments")
    max_coeff: Above = honoured(10.0, "largest ratio of the norms of weights and update")
    min_coeff: Above = honoured(0.01, "smallest ratio of the norms of weights and update")
    eps_inside_sqrt: bool = honoured(False, "add eps before the square root of the second moment")
    amsgrad: bool = refused(False, "leave it false: DeepSpeed's LAMB has no such mode either")


class LRRangeTestParams(Section):
    lr_range_test_min_lr: Rates = honoured(1e-3, "first learning rate")
    lr_range_test_step_size: Positive = honoured(2000, "number of steps in an interval")
    lr_range_test_step_rate: Amount = honoured(
        1.0, "increase of the learning rate in each interval, as a multiple of lr_range_test_min_lr"
    )
    lr_range_test_staircase: bool = honoured(
        False, "increase the learning rate after each interval instead of continuously"
    )
    last_batch_iteration: Iteration = honoured(-1, "index of the last step that was done before; -1: none")


class OneCycleParams(Section):
    cycle_min_lr: Rates | None = honoured(None, "lowest learning rate; must be given")
    cycle_max_lr: Rates | None = honoured(None, "highest learning rate; must be given")
    decay_lr_rate: Amount = honoured(0.0, "decay of the learning rate in each interval after the cycle")
    cycle_first_step_size: Above = honoured(2000, "number of steps with a rising learning rate")
    cycle_second_step_size: Above | None = honoured(
        None, "number of steps with a falling learning rate; null: cycle_first_step_size"
    )
    cycle_first_stair_count: Whole = honoured(0, "number of stairs of the rise; 0: continuous")
    cycle_second_stair_count: Whole | None = honoured(
        None, "number of stairs of the fall; null: cycle_first_stair_count"
    )
    decay_step_size: Amount = honoured(0, "number of steps in an interval after the cycle; 0: no decay")
    cycle_momentum: bool = honoured(True, "momentum falls while the learning rate rises, and rises while it falls")
    cycle_min_mom: Rates = honoured(0.8, "lowest momentum")
    cycle_max_mom: Rates = honoured(0.9, "highest momentum")
    decay_mom_rate: Amount = honoured(0.0, "growth of the momentum in each interval after the cycle")
    last_batch_iteration: Iteration = honoured(-1, "index of the last step that was done before; -1: none")


class WarmupLRParams(Section):
    warmup_min_lr: Rates = honoured(0.0, "learning rate at the start of the warm-up")
    warmup_max_lr: Rates | None = honoured(None, "learning rate after the warm-up; null: the optimizer's")
    warmup_num_steps: Positive = honoured(1000, "number of warm-up steps")
    warmup_type: Literal["log", "linear"] = honoured("log", "shape of the warm-up")
    last_batch_iteration: Iteration = honoured(-1, "index of the last step that was done before; -1: none")


class WarmupDecayLRParams(WarmupLRParams):
    warmup_max_lr: Rates | None = honoured(0.001, "learning rate after the warm-up; null: the optimizer's")
    total_num_steps: Positive | None = honoured(None, "number of steps of the whole training; must be given")


class WarmupCosineLRParams(Section):
    total_num_steps: Positive | None = honoured(None, "number of steps of the whole training; must be given")
    warmup_min_ratio: Amount = honoured(0.0, "first learning rate, as a fraction of the optimizer's")
    warmup_num_steps: Positive = honoured(1000, "number of warm-up steps")
    cos_min_ratio: Amount = honoured(0.0001, "last learning rate, as a fraction of the optimizer's")
    warmup_type: Literal["log", "linear"] = honoured("log", "shape of the warm-up")
    last_batch_iteration: Iteration = honoured(-1, "index of the last step that was done before; -1: none")


_BASES: Final[Mapping[Rule, type[Common]]] = {ADAM: AdamParams, ADAMW: AdamParams, MUON: MuonParams}
OPTIMIZERS: Final[Mapping[str, type[Common]]] = {
    **{name: params_of(rule, _BASES.get(rule, Common)) for name, rule in ALL_RULES.items()},
    "onebitadam": OneBitAdamParams,
    "onebitlamb": OneBitLambParams,
    "zerooneadam": ZeroOneAdamParams,
    "lamb": LambParams,
}
# Formats of the optimizer state that each optimizer supports. The state of torch's classes is always fp32.
FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: rule.formats for name, rule in ALL_RULES.items()},
    "onebitadam": ("fp32", "bf16"),
}
SCHEDULES: Final[Mapping[str, type[Section]]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
REFUSED_OPTIMIZERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "Build the optimizer with the mup library and pass it to initialize()"
    ),
}
# Classes of deepspeed.ops, such as FusedAdam and DeepSpeedCPULion, and what to use in a config instead.
_OPS: Final = re.compile("(?:fused|deepspeedcpu|cpu)(adamw?|adagrad|lion|lamb)")
_OPS_REMEDIES: Final[Mapping[str, str]] = {
    "adam": 'Use "AdamW", or "Adam"',
    "adamw": 'Use "AdamW"',
    "adagrad": 'Use "Adagrad"',
    "lion": 'Use "Lion"',
    "lamb": 'Use "Lamb"',
}
_NEVER_SUGGESTED: Final = ("SparseAdam", "LBFGS")  # TwinOptimizer refuses them.


def torch_optimizers() -> dict[str, type[Any]]:
    """The optimizers of torch.optim by name."""
    import torch.optim

    return _classes(torch.optim, torch.optim.Optimizer)


def torch_schedules() -> dict[str, type[Any]]:
    """The schedules of torch.optim.lr_scheduler by name."""
    import torch.optim.lr_scheduler as module

    return {name: kind for name, kind in _classes(module, module.LRScheduler).items() if not name.startswith("_")}


def _classes(module: ModuleType, base: type[Any]) -> dict[str, type[Any]]:
    return {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}


def arguments(kind: type[Any]) -> dict[str, bool]:
    """The arguments of a torch class after the first one. The value is true if the argument has no default."""
    names = list(inspect.signature(kind).parameters.values())[1:]
    return {p.name: p.default is p.empty for p in names if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def optimizer_kind(name: str) -> type[Any]:
    """The section or the torch class for a value of `optimizer.type`. ValueError for an unknown one."""
    lower = name.lower()
    if lower in OPTIMIZERS:
        return OPTIMIZERS[lower]
    allowed = [*OPTIMIZERS, "a class of torch.optim by its exact name"]
    if lower in REFUSED_OPTIMIZERS:
        raise invalid_value("optimizer.type", name, f"one of {', '.join(allowed)}", REFUSED_OPTIMIZERS[lower])
    ops = _OPS.fullmatch(lower)
    if ops:
        remedy = f"{name} is a class of DeepSpeed, and not a type in configs. {_OPS_REMEDIES[ops[1]]}"
        raise invalid_value("optimizer.type", name, f"one of {', '.join(allowed)}", remedy)
    return _torch_kind("optimizer.type", name, torch_optimizers(), allowed)


def schedule_kind(name: str) -> type[Any]:
    """The section or the torch class for a value of `scheduler.type`. ValueError for an unknown one."""
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
    remedy = nearest(name, (other for other in (*found, *more) if other not in _NEVER_SUGGESTED))
    raise invalid_value(key, name, f"one of {', '.join(allowed)}", remedy)
