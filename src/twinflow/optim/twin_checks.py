"""What a TwinOptimizer refuses to be built with, before anything has happened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import SupportsFloat, get_type_hints

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from twinflow.config.messages import in_words
from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.offload.changes import check_memory
from twinflow.offload.placement import PLACEMENTS
from twinflow.offload.settings import Settings, Tuning
from twinflow.optim.loss_scale import LossScale
from twinflow.parallel.pipeline import PipelineModule
from twinflow.rules import RULES, Rule
from twinflow.rules.checks import FLOATS
from twinflow.state_dict import ParamEntry, list_of
from twinflow.zero import Zero

_NONE_TO_TRAIN = "there is no parameter to train: none requires a gradient"


def is_number(value: object) -> bool:
    """Whether it is one of Python's, numpy's or torch's; True and False are none."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex() and not value.is_meta
    return isinstance(value, Real) and not isinstance(value, bool)


def number_of(value: object) -> float:
    """A number as a float; NaN, which fails every comparison, for all else."""
    return float(value) if is_number(value) and isinstance(value, SupportsFloat) else math.nan


def is_flag(value: object) -> bool:
    """Whether it is True or False, and not something that merely counts as one of them."""
    return isinstance(value, (bool, np.bool_))


def check_whole(name: str, value: object, least: int, allowed: str = "") -> None:
    """Whole as written: 2.0 is not."""
    is_tensor = isinstance(value, torch.Tensor) and not value.is_floating_point()
    is_whole = is_tensor or isinstance(value, Integral)
    if not (is_whole and number_of(value) >= least):
        raise invalid_value(name, value, allowed or f"a whole number >= {least}")


def check_kinds(loss_scale: object, tuning: object, zero: object) -> None:
    """Arguments that are objects of ours."""
    if not (loss_scale is None or isinstance(loss_scale, LossScale)):
        remedy = "Both are in twinflow.optim.loss_scale; a number that stays is static(number)."
        raise invalid_value("loss_scale", loss_scale, "None, static(...) or dynamic(...)", remedy)
    if not (tuning is None or isinstance(tuning, Tuning)):
        remedy = 'Write tuning=Tuning(hold="host"), say.'
        raise invalid_value("tuning", tuning, "None, or a twinflow.optim.twin.Tuning", remedy)
    if not (zero is None or isinstance(zero, Zero)):
        raise invalid_value("zero", zero, "None, or a twinflow.zero.Zero", "Write zero=Zero(stage=2), say.")


def check_groups(rule: Rule | None, groups: Iterable[Mapping[str, object]], where: str = "") -> None:
    """Options of all groups; an optimizer of the user's has checked its own."""
    for i, group in enumerate(groups):
        if rule is not None:
            check_group(rule, group, f"{where}param_groups[{i}]")


def check_group(rule: Rule, options: Mapping[str, object], label: str = "") -> None:
    """A rule's options: of the kind that their defaults are, and in range. `label` says whose they are."""
    try:
        for name, usual in rule.defaults.items():
            _check_option(name, options[name], usual)
        rule.check(options)
    except ValueError as error:
        raise ValueError(f"{label}: {error}" if label else str(error)) from None


def _check_option(name: str, value: object, usual: object) -> None:
    if isinstance(usual, bool):
        if not is_flag(value):
            raise invalid_value(name, value, [True, False])
    elif isinstance(usual, tuple):  # how many, the rule says
        for i, item in enumerate(value if isinstance(value, (tuple, list)) else ()):
            _check_option(f"{name}[{i}]", item, usual[0])
    elif not is_number(value):  # the range, too, is the rule's
        raise invalid_value(name, value, "a number")


def check_model(model: nn.Module | None, zero: Zero | None) -> None:
    """Refuse what would train wrongly."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model is wrapped in DistributedDataParallel, whose gradients are not reduced yet when they are taken. "
            "Give the module inside it, and zero=Zero(stage=0): gradients are summed over the ranks here"
        )
    dist = torch.distributed
    if zero is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        remedy = "Give zero=Zero(stage=...), or use twinflow.initialize()."
        raise invalid_value(
            "world size", dist.get_world_size(), "1: each process would train a model of its own", remedy
        )


def groups_of(model: nn.Module | Iterable[ParamEntry], param_groups: Iterable[ParamEntry] | None) -> list[ParamEntry]:
    """Parameters or groups as torch.optim.Optimizer takes them; frozen ones left out."""
    if not isinstance(model, nn.Module):
        if param_groups is not None:
            raise invalid_value("param_groups", "given", "None where the first argument is not a module")
        groups = _trainable(list(model))
    else:
        given = list(model.parameters() if param_groups is None else param_groups)
        groups = _trainable(given, isinstance(model, PipelineModule))
    if not groups:  # torch would speak of an empty list, which was not given
        raise ValueError(_NONE_TO_TRAIN)
    return groups


def _trainable(groups: list[ParamEntry], keeps_empty: bool = False) -> list[ParamEntry]:
    """Without frozen parameters, and without groups that have no others: LoRA scripts pass all they have. A stage of a
    pipeline keeps those too: other stages have parameters in them, and groups are known by number."""
    if not any(isinstance(group, dict) for group in groups):
        # What is no tensor stays, for torch to refuse.
        return [item for item in groups if getattr(item[1] if isinstance(item, tuple) else item, "requires_grad", True)]
    kept: list[ParamEntry] = []
    for group in groups:
        if not isinstance(group, Mapping):
            raise invalid_value(
                "param_groups", f"groups and a {type(group).__name__}", "only groups, or only parameters"
            )
        given = group["params"]
        if isinstance(given, set):  # torch says why that does not do
            return groups
        if not isinstance(given, Iterable):
            raise invalid_value("param_groups: params", given, "parameters")
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        found = _trainable(members)
        if "param_names" in group:
            pairs = zip(members, list_of(group, "param_names"), strict=True)
            group = {**group, "param_names": [name for member, name in pairs if member.requires_grad]}
        if found or keeps_empty:
            kept.append({**group, "params": found})
    return kept


def _has_rows(tensor: Tensor) -> bool:
    assert isinstance(tensor, DTensor)
    return len(tensor.placements) == 1 and tensor.placements[0].is_shard(0)


def check_foreign(rule: object, states: str, param_groups: Iterable[ParamEntry] | None, zero: Zero | None) -> None:
    """What is allowed beside an optimizer of the user's."""
    if not isinstance(rule, Optimizer) and not callable(rule):
        raise invalid_value(
            "rule", rule, [*RULES, "a torch.optim.Optimizer class or instance, or a function making one"]
        )
    if zero is not None and zero.stage == 3 and not zero.parks:
        name = getattr(rule, "__name__", type(rule).__name__)
        remedy = "Ranks have rows of parameters only: use stage 1 or 2, which give each rank whole ones."
        raise invalid_value("optimizer with zero_optimization.stage 3", name, RULES, remedy)
    if states != "fp32":
        raise invalid_value("states", states, ["fp32"], "A torch.optim.Optimizer given as rule keeps its own states.")
    if isinstance(rule, Optimizer) and param_groups is not None:
        raise invalid_value("param_groups", "given", "None where rule is an optimizer: it has its own groups")


def check_tuning(tuning: Tuning, delayed_update: bool) -> None:
    """Each field has to be what its type takes; a number of numpy or torch counts as one of Python's."""
    for name, kind in get_type_hints(Tuning, include_extras=True).items():
        given = getattr(tuning, name)
        value = given.item() if is_number(given) and isinstance(given, (np.generic, torch.Tensor)) else given
        try:
            taken = TypeAdapter(kind).validate_python(value, strict=True)
            is_taken = isinstance(taken, float) or not isinstance(value, float)  # whole as written: 2.0 is not
        except ValidationError:
            is_taken = False
        if not is_taken:
            raise invalid_value(f"tuning.{name}", given, in_words(kind).replace("null", "None"))
    if tuning.streamed and delayed_update:
        remedy = "Weights of streamed state are written at once; a delayed update would have to keep them apart."
        raise invalid_value("tuning.streamed", tuning.streamed, "0 with delayed_update", remedy)


def check_ratio(ratio: float | str, placement: str, model: nn.Module | None) -> None:
    """A share, and an end of the model."""
    is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if ratio != "auto" and not (is_number and 0.0 <= float(ratio) <= 1.0):
        allowed = 'a number from 0 (all state on the device) to 1 (all of it on the host), or "auto"'
        raise invalid_value("ratio", ratio, allowed)
    if placement not in PLACEMENTS:
        raise invalid_value("placement", placement, PLACEMENTS)
    if ratio == "auto" and placement != "auto":
        raise invalid_value("placement", placement, ["auto"], 'With ratio "auto" the placement is chosen as well.')
    if ratio == "auto" and model is None:
        raise invalid_value(
            "ratio", ratio, "a number", "Give the model as the first argument, so that its steps are timed."
        )


def check_param_offload(
    settings: Settings,
    model: nn.Module | None,
    ratio: float | str,
    tuning: Tuning,
    zero: Zero | None,
    rule: Rule | None,
) -> None:
    """What weights on the host go with: state on the host, updated there by one of our rules, at once."""
    if not settings.offload_params:
        if zero is not None and zero.parks:
            raise invalid_value("offload_params", False, [True], "The Zero that is given says that weights are so.")
        return
    name = "offload_params"
    if model is None:
        raise invalid_value(
            name, True, [False], "Give the model as the first argument: its blocks fetch their weights."
        )
    if zero is not None and not zero.parks:
        raise invalid_value(name, True, [False], "Give zero=Zero(stage=3, parks=True).")
    if rule is None:
        raise invalid_value(f"rule with {name}", "an optimizer of your own", RULES, "Weights live in our rules' state.")
    if ratio != 1.0:
        raise invalid_value(f"ratio with {name}", ratio, [1.0], "Weights are fetched from the state on the host.")
    if tuning.streamed:
        raise invalid_value(f"tuning.streamed with {name}", tuning.streamed, [0.0])
    if settings.delayed_update:
        remedy = "The state holds the new weights at once, and no others."
        raise invalid_value(f"delayed_update with {name}", True, [False], remedy)


def check_settings(settings: Settings, model: nn.Module | None) -> Settings:
    """Flags, numbers, and what needs the model; the same with plain numbers."""
    limits = settings.limits
    if not is_flag(settings.early):
        raise invalid_value("early", settings.early, [True, False, "auto"])
    flags = {"skip_nonfinite": limits.skip_nonfinite, "offload_params": settings.offload_params}
    for name, value in {**flags, "delayed_update": settings.delayed_update}.items():
        if not is_flag(value):
            raise invalid_value(name, value, [True, False])
    max_norm = number_of(limits.max_norm) if limits.max_norm is not None else None
    if max_norm is not None and not 0.0 < max_norm < math.inf:
        raise invalid_value("max_grad_norm", limits.max_norm, "a number > 0, or None")
    check_whole("accumulation_steps", settings.accumulation_steps, 1)
    check_whole("delayed_update_start", settings.delayed_update_start, 0)
    if settings.early and model is None:
        raise invalid_value("early", True, [False], "Give the model as the first argument to start updates early.")
    if settings.delayed_update and model is None:
        raise invalid_value("delayed_update", True, [False], "Give the model as the first argument.")
    return replace(
        settings,
        limits=replace(limits, max_norm=max_norm),
        accumulation_steps=int(settings.accumulation_steps),
        delayed_update_start=int(settings.delayed_update_start),
    )


def check_params(params: Sequence[Param], zero: Zero | None, offloads_params: bool = False) -> None:
    """Parameters as the runtime can take them: whole, or with stage 3 their rows; of our dtypes, all on one device."""
    if not params:
        raise ValueError(_NONE_TO_TRAIN)
    is_partitioned = zero is not None and not zero.shares_buckets
    for param in params:
        if param.is_sharded != is_partitioned:
            has = "rows of it (DTensor)" if param.is_sharded else "all of it"
            remedy = "With stage 3, and with it alone, call twinflow.zero.partition(model, zero) before."
            raise invalid_value(f"{param.name}: this rank has", has, "what the stage says", remedy)
        if param.is_sharded and not _has_rows(param.tensor):
            placements = getattr(param.tensor, "placements", ())
            raise invalid_value(f"{param.name} placements", placements, "Shard(0) on a mesh of one dimension")
        if param.tensor.is_meta:
            remedy = "Give the module as the first argument: its parameters then get memory and values."
            raise invalid_value(f"{param.name} device", "meta", "a device with memory", remedy)
        if param.tensor.dtype not in FLOATS:
            raise invalid_value(f"{param.name} dtype", param.tensor.dtype, FLOATS)
        if param.tensor.device != params[0].tensor.device:
            allowed = f"{params[0].tensor.device}, where {params[0].name} is"
            raise invalid_value(f"{param.name} device", str(param.tensor.device), allowed)
    if not offloads_params:
        check_memory((param.name, param.local) for param in params)
