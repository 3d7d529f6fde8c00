# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a TwinOptimizer. They raise ValueError before state is allocated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import SupportsFloat, get_type_hints

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.config.fields import in_words
from twinflow.conflicts import conflict, refuse
from twinflow.dist.sharded import is_dtensor
from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.offload.changes import check_memory
from twinflow.offload.placement import PLACEMENTS
from twinflow.offload.settings import Settings, Tuning
from twinflow.optim.loss_scale import LossScale
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shard import expert_shard
from twinflow.rules import RULES, Rule
from twinflow.rules.segment import FLOATS, no_master
from twinflow.state_dict import ParamEntry, list_of
from twinflow.zero import Zero
from twinflow.zero.experts import check_split
from twinflow.zero.matrices import rows_of

_PARTITION = "Call twinflow.zero.partition(model, zero) before building the optimizer, and not fully_shard()."
_NONE_TO_TRAIN = "There is no parameter to train: none requires a gradient. Call requires_grad_() on some parameters."


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python, NumPy or torch. True and False are not numbers."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex() and not value.is_meta
    return isinstance(value, Real) and not isinstance(value, bool)


def number_of(value: object) -> float:
    """A number as a float; NaN for other values, so that every comparison with it fails."""
    return float(value) if is_number(value) and isinstance(value, SupportsFloat) else math.nan


def is_flag(value: object) -> bool:
    """Whether `value` is True or False, and not another value with that truth value."""
    return isinstance(value, (bool, np.bool_))


def check_whole(name: str, value: object, least: int, allowed: str = "") -> None:
    """Raises ValueError unless `value` is an integer >= `least`. 2.0 is not an integer."""
    is_tensor = isinstance(value, torch.Tensor) and not value.is_floating_point()
    is_whole = is_tensor or isinstance(value, Integral)
    if not (is_whole and number_of(value) >= least):
        raise invalid_value(name, value, allowed or f"a whole number >= {least}")


def check_loss(loss: object) -> None:
    """Raises ValueError for a loss that backward() cannot use. The error names the most frequent cause."""
    if not isinstance(loss, Tensor):
        raise invalid_value("loss", loss, "a tensor that requires a gradient, as a loss function returns it")
    if loss.numel() != 1:
        raise ValueError(
            f"The loss has the shape {tuple(loss.shape)}, but must have one element. Reduce it to one number, for "
            "example with loss.mean()."
        )
    if not loss.requires_grad:
        remedy = "Compute it from the output of the model, outside torch.no_grad(), and without detach() or item()."
        raise invalid_value("loss.requires_grad", False, [True], remedy)


def check_kinds(loss_scale: object, tuning: object, zero: object) -> None:
    """Checks the types of arguments that are objects of twinflow."""
    if not (loss_scale is None or isinstance(loss_scale, LossScale)):
        remedy = "Import static and dynamic from twinflow.optim.loss_scale. static(1024) is a fixed loss scale of 1024."
        raise invalid_value("loss_scale", loss_scale, "None, static(...) or dynamic(...)", remedy)
    if not (tuning is None or isinstance(tuning, Tuning)):
        remedy = 'Pass, for example, tuning=Tuning(hold="host").'
        raise invalid_value("tuning", tuning, "None, or a twinflow.optim.twin.Tuning", remedy)
    if not (zero is None or isinstance(zero, Zero)):
        raise invalid_value("zero", zero, "None, or a twinflow.zero.Zero", "Pass, for example, zero=Zero(stage=2).")


def check_groups(rule: Rule | None, groups: Iterable[Mapping[str, object]], where: str = "") -> None:
    """Checks the options of all groups. A user's optimizer (`rule=None`) has checked its own options."""
    for i, group in enumerate(groups):
        if rule is not None:
            check_group(rule, group, f"{where}param_groups[{i}]")


def warn_of_misspelt(groups: Iterable[ParamEntry], names: Iterable[str]) -> None:
    """Warns of keys of param groups that resemble an option in `names`. As with torch, other keys are the user's."""
    known = [*names, "params", "param_names", "max_momentum"]  # the last one is a key of OneCycleLR
    for i, group in enumerate(groups):
        for key in group.keys() - known if isinstance(group, dict) else ():
            for near in get_close_matches(key, known, n=1, cutoff=0.8):
                text = f"param_groups[{i}] has the key {key!r}, which is no option and has no effect."
                warnings.warn(f"{text} Did you mean {near!r}?", stacklevel=3)


def check_complete(rule: Rule, group: Mapping[str, object]) -> None:
    """Raises ValueError if an option was removed from a param group."""
    for name, usual in rule.defaults.items():
        if name not in group:
            raise ValueError(
                f"A param group has no key {name!r}, but must have all options of {rule.name!r}: "
                f"{', '.join(rule.defaults)}. Set {name!r} again, for example to its default, {usual!r}."
            )


def check_group(rule: Rule, options: Mapping[str, object], label: str = "") -> None:
    """Checks types and ranges of a rule's options. `label` names the group in the message."""
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
    elif isinstance(usual, tuple):  # `rule.check` checks the length
        for i, item in enumerate(value if isinstance(value, (tuple, list)) else ()):
            _check_option(f"{name}[{i}]", item, usual[0])
    elif not isinstance(usual, str) and not is_number(value):  # `rule.check` checks the range
        raise invalid_value(name, value, "a number")


def check_model(model: nn.Module | None, zero: Zero | None) -> None:
    """Raises ValueError for a model that cannot be trained, or would be trained with wrong results."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise conflict("TwinOptimizer", "DistributedDataParallel")
    if model is not None and any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            f"model ({type(model).__name__}) contains a torch.jit.ScriptModule, but must contain none, because hooks "
            "cannot be registered on a ScriptModule. Script the model after training, or pass model.parameters() "
            "instead of the model. step() then waits until the update is complete."
        )
    dist = torch.distributed
    if zero is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"The world size is {dist.get_world_size()}, but must be 1 without `zero`, because each process would "
            "train a model of its own. Pass zero=Zero(stage=...), or use twinflow.initialize()."
        )


def groups_of(model: nn.Module | Iterable[ParamEntry], param_groups: Iterable[ParamEntry] | None) -> list[ParamEntry]:
    """Parameters or param groups in the form of torch.optim.Optimizer, without frozen parameters."""
    if not isinstance(model, nn.Module):
        if param_groups is not None:
            raise conflict("A list of parameters", "param_groups")
        if isinstance(model, str) or not isinstance(model, Iterable):
            expected = "a module, a function that builds one, or an iterable of parameters"
            raise invalid_value("The first argument of TwinOptimizer", model, expected, "Build the model, and pass it.")
        given = list(model)
        if not given:
            raise ValueError(
                "The iterable of parameters is empty. Pass the model, or list(model.parameters()), because an iterator "
                "can be read only once."
            )
        groups = _trainable(given)
    else:
        given = list(model.parameters() if param_groups is None else param_groups)
        if not given and param_groups is not None:
            raise ValueError(
                "The parameters to train (param_groups, or model_parameters of initialize()) are empty. Omit this "
                "argument to train the whole model, or pass a list: an iterator can be read only once."
            )
        groups = _trainable(given, isinstance(model, PipelineModule))
        if param_groups is not None:
            _check_items(groups)
            _check_members(groups, model)
    _check_items(groups)
    if not groups:  # torch's message would mention an empty list, which the user did not pass
        raise ValueError(_NONE_TO_TRAIN)
    return groups


def _check_items(groups: Sequence[ParamEntry]) -> None:
    """Raises ValueError for entries that are not parameters, and for a parameter in two groups."""
    seen: dict[Tensor, int] = {}
    for i, group in enumerate(groups):
        given = group["params"] if isinstance(group, dict) else [group]
        for item in [given] if isinstance(given, Tensor) else given:
            param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            if not isinstance(param, Tensor):
                remedy = 'Pass the model, model.parameters(), or groups {"params": [...]} of such parameters.'
                shown = repr(param) if isinstance(param, str) else f"of type {type(param).__name__}"
                raise ValueError(f"A parameter to train is {shown}, but must be an nn.Parameter of the model. {remedy}")
            if not param.is_leaf:
                raise ValueError(
                    f"A parameter to train is the result of an operation, {param.grad_fn}, but must be an nn.Parameter."
                    " Pass the nn.Parameter from which this tensor was computed."
                )
            if isinstance(group, dict) and seen.setdefault(param, i) != i:
                raise ValueError(
                    f"A parameter of shape {tuple(param.shape)} is in param_groups[{seen[param]}] and in "
                    f"param_groups[{i}], but must be in one group. Remove it from one of them."
                )


def _check_members(groups: Sequence[ParamEntry], model: nn.Module) -> None:
    """Raises ValueError if no parameter of the groups belongs to the model. Some may belong to another module, such as
    a loss.
    """
    entries = [entry for group in groups for entry in (group["params"] if isinstance(group, dict) else [group])]
    members = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]  # torch allows pairs with a name
    known = set(model.parameters())
    if members and not any(isinstance(param, Tensor) and param in known for param in members):
        raise ValueError(
            f"param_groups has {len(members)} parameters, and none of them is a parameter of the model. Build the "
            "groups from the parameters of the model that you pass."
        )


def _trainable(groups: list[ParamEntry], keeps_empty: bool = False) -> list[ParamEntry]:
    """Removes frozen parameters, and groups of only frozen ones. LoRA scripts pass all parameters of a model.

    `keeps_empty`: a pipeline stage keeps such groups, because other stages may have parameters in them, and stages
    identify groups by their index.
    """
    if not any(isinstance(group, dict) for group in groups):
        # Objects that are not tensors stay, and torch raises an exception for them.
        return [item for item in groups if getattr(item[1] if isinstance(item, tuple) else item, "requires_grad", True)]
    kept: list[ParamEntry] = []
    for group in groups:
        if not isinstance(group, Mapping):
            raise ValueError(
                f"param_groups contains groups and a {type(group).__name__}, but must contain only groups or only "
                'parameters. Put single parameters into a group: {"params": [param]}.'
            )
        if "params" not in group:
            remedy = 'Write {"params": list(model.parameters()), ...}.'
            raise ValueError(f"A param group has the keys {list(group)}, but must have the key 'params'. {remedy}")
        given = group["params"]
        if isinstance(given, set):  # torch raises an exception that explains why a set is not allowed
            return groups
        if not isinstance(given, Iterable):
            raise invalid_value('"params" of a param group', given, "a list of parameters")
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        found = _trainable(members)
        if "param_names" in group:
            pairs = zip(members, list_of(group, "param_names"), strict=True)
            group = {**group, "param_names": [name for member, name in pairs if member.requires_grad]}
        if found or keeps_empty:
            kept.append({**group, "params": found})
    return kept


def check_foreign(
    rule: object, states: str, master: str, param_groups: Iterable[ParamEntry] | None, zero: Zero | None
) -> None:
    """Checks a user's optimizer as `rule`, and the arguments that depend on this optimizer."""
    if not isinstance(rule, Optimizer) and not callable(rule):
        names = ", ".join(map(repr, RULES))
        kinds = "a torch.optim.Optimizer class or instance, or a function that returns an optimizer"
        raise invalid_value("rule", rule, f"one of {names}, or {kinds}")
    if zero is not None and zero.stage == 3 and not zero.parks:
        name = getattr(rule, "__name__", type(rule).__name__)
        raise conflict("ZeRO stages 2 and 3", "rule", rule=name, rules=", ".join(RULES))
    if states != "fp32":
        remedy = "Omit states, because the torch.optim.Optimizer that is passed as rule has its own state format."
        raise invalid_value("states", states, ["fp32"], remedy)
    if master != "fp32":
        remedy = (
            "Omit master, because the torch.optim.Optimizer that is passed as rule updates fp32 copies of the weights."
        )
        raise invalid_value("master", master, ["fp32"], remedy)
    if isinstance(rule, Optimizer) and param_groups is not None:
        raise conflict("TwinOptimizer", "groups of an instance")


def check_no_master(params: Iterable[Param], master: str) -> None:
    """Raises ValueError if parameters that need an fp32 master shall have none."""
    for param in params if master == "none" else ():
        if param.tensor.dtype != torch.bfloat16:
            raise no_master(f"The parameter {param.name}", param.tensor.dtype)


def check_tuning(tuning: Tuning, delayed_update: bool) -> None:
    """Checks each field by its type. Numbers of NumPy and torch count as Python's."""
    for name, kind in get_type_hints(Tuning, include_extras=True).items():
        given = getattr(tuning, name)
        value = given.item() if is_number(given) and isinstance(given, (np.generic, torch.Tensor)) else given
        try:
            taken = TypeAdapter(kind).validate_python(value, strict=True)
            is_taken = isinstance(taken, float) or not isinstance(value, float)  # 2.0 is not an integer
        except ValidationError:
            is_taken = False
        if not is_taken:
            allowed = in_words(kind).replace("null", "None")
            raise invalid_value(f"tuning.{name}", given, f"one of {allowed}" if allowed.startswith("'") else allowed)
    if tuning.streamed and delayed_update:
        raise conflict("TwinOptimizer", "streamed", streamed=tuning.streamed)


def default_ratio(
    placement: str,
    tuning: Tuning,
    model: nn.Module | None,
    rule: Rule | None,
    zero: Zero | None,
    offload_params: bool,
) -> float | str:
    """The ratio if the user gives none: "auto", or 1 where "auto" cannot be used.

    With a user's optimizer the last bits of a result depend on the placement. Results must not depend on the times of
    steps unless the user asks for it.
    """
    can_choose = (
        model is not None
        and not isinstance(model, PipelineModule)
        and rule is not None
        and placement == "auto"
        and not tuning.streamed
        and tuning.nvme_path is None
        and not offload_params
        and (zero is None or zero.compression is None)
    )
    return "auto" if can_choose else 1.0


def check_ratio(ratio: float | str, placement: str, model: nn.Module | None) -> None:
    """Raises ValueError for a `ratio` or `placement` that is invalid, or conflicts with another argument."""
    is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if ratio != "auto" and not (is_number and 0.0 <= float(ratio) <= 1.0):
        allowed = 'a number from 0 (all state on the device) to 1 (all state on the host), or "auto"'
        raise invalid_value("ratio", ratio, allowed)
    if placement not in PLACEMENTS:
        raise invalid_value("placement", placement, PLACEMENTS)
    if ratio == "auto" and placement != "auto":
        raise conflict("TwinOptimizer", "placement", placement=placement)
    if ratio == "auto" and model is None:
        raise conflict("A list of parameters", "ratio")


def check_param_offload(
    settings: Settings, model: nn.Module | None, ratio: float | str, zero: Zero | None, rule: Rule | None
) -> None:
    """Raises ValueError for options that conflict with `offload_params`."""
    if not settings.offload_params:
        without = {
            "parks": zero is not None and zero.parks,
            "offload_embeddings": settings.tuning.offload_embeddings,
        }
        refuse("Weights on the host", without)
        return
    refuse("A list of parameters", {"offload_params": model is None})
    found = {
        "zero": zero is not None and not zero.parks,
        "rule": rule is None,
        "ratio": ratio == "auto" and zero is not None,
        "streamed ratio": settings.tuning.streamed and ratio == "auto",
        "delayed_update": settings.delayed_update,
    }
    refuse("Weights on the host", found, streamed=settings.tuning.streamed, rules=", ".join(RULES))


def check_disk(settings: Settings, ratio: float | str, zero: Zero | None, rule: Rule | None) -> None:
    """Raises ValueError for options that conflict with state or weights on the disk."""
    tuning = settings.tuning
    if tuning.param_nvme_path is not None:
        if not tuning.param_nvme_path:
            raise invalid_value("tuning.param_nvme_path", "", "a folder on a local disk, or None")
        given = {
            "offload_params": not settings.offload_params,
            "ratio": ratio == "auto",
            "streamed": tuning.streamed,
        }
        refuse("Weights on the disk", given, streamed=tuning.streamed)
    if tuning.nvme_path is None:
        return
    if not tuning.nvme_path:
        raise invalid_value("tuning.nvme_path", "", "a folder on a local disk, or None")
    found = {
        "ratio": ratio == "auto",
        "rule": rule is None,
        "muon": rule is not None and rule.elementwise is not None,
        "delayed_update": settings.delayed_update,
        "streamed": tuning.streamed,
        "shadow_bytes": tuning.shadow_bytes,
        "compression": zero is not None and zero.compression is not None,
    }
    shadow_bytes, streamed = tuning.shadow_bytes, tuning.streamed
    refuse("State on the disk", found, shadow_bytes=shadow_bytes, streamed=streamed, rules=", ".join(RULES))


def check_muon(settings: Settings, master: str) -> None:
    """Raises ValueError for options that conflict with Muon."""
    chosen = {"offload_params": settings.offload_params, "delayed_update": settings.delayed_update}
    refuse("Muon", chosen | {"master": master == "none"})


def check_experts(
    model: nn.Module | None, params: Iterable[Tensor], zero: Zero | None, rule: Rule | None, name: str
) -> None:
    """Raises ValueError for options that conflict with expert parallelism, if the model was split by experts. `name`:
    that of the update rule, or of the user's optimizer.
    """
    if model is not None:
        check_split(model)
    if zero is None or expert_shard(params) is None:
        return
    found = {
        "stage": zero.stage == 3,
        "compression": zero.compression is not None,
        "Muon": rule is not None and rule.elementwise is not None,
        "other optimizer": rule is None,
    }
    refuse("Expert parallelism", found, optimizer=name)


def check_rows(params: Sequence[Param], world: int) -> None:
    """Raises ValueError for a matrix of which a rank would have no rows, with ZeRO stage 3."""
    for param in params:
        num_rows = param.tensor.shape[0] if param.tensor.dim() else 1
        few = param.unit is not None and param.tensor.numel() > 0 and not rows_of(num_rows, world - 1, world)
        refuse("Muon", {"few rows": few}, name=param.name, num_rows=num_rows, world=world)


def check_settings(settings: Settings, model: nn.Module | None) -> Settings:
    """Checks flags and numbers, and options that need the model. Returns the settings with Python numbers."""
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
    max_value = number_of(limits.max_value) if limits.max_value is not None else None
    if max_value is not None and not 0.0 < max_value < math.inf:
        raise invalid_value("max_grad_value", limits.max_value, "a number > 0, or None")
    refuse("TwinOptimizer", {"max_grad_value": max_value is not None and settings.early})
    check_whole("accumulation_steps", settings.accumulation_steps, 1)
    check_whole("delayed_update_start", settings.delayed_update_start, 0)
    is_unused = settings.delayed_update_start and not settings.delayed_update
    refuse("TwinOptimizer", {"delayed_update_start": is_unused}, start=settings.delayed_update_start)
    if model is None:
        refuse("A list of parameters", {"early": settings.early, "delayed_update": settings.delayed_update})
    return replace(
        settings,
        limits=replace(limits, max_norm=max_norm, max_value=max_value),
        accumulation_steps=int(settings.accumulation_steps),
        delayed_update_start=int(settings.delayed_update_start),
    )


def check_params(params: Sequence[Param], zero: Zero | None, offloads_params: bool = False) -> None:
    """Checks the parameters: sharded only with stage 3, of a supported dtype, and all on one device."""
    if not params:
        raise ValueError(_NONE_TO_TRAIN)
    is_partitioned = zero is not None and not zero.shares_buckets
    for param in params:
        if param.is_sharded != is_partitioned:
            if param.is_sharded:
                raise ValueError(
                    f"{param.name} is a DTensor, but must be a plain tensor without ZeRO stage 3. Use Zero(stage=3), "
                    "or do not partition the model."
                )
            raise ValueError(f"{param.name} is a plain tensor, but must be a DTensor with ZeRO stage 3. {_PARTITION}")
        placements = param.tensor.placements if is_dtensor(param.tensor) else ()
        if param.is_sharded and not (len(placements) == 1 and placements[0].is_shard(0)):
            raise invalid_value(f"The placements of the DTensor {param.name}", placements, "(Shard(0),)", _PARTITION)
        if param.tensor.is_meta:
            remedy = "Pass the module as the first argument. TwinOptimizer then allocates and initialises parameters."
            raise invalid_value(f"The device of {param.name}", "meta", "a device with memory", remedy)
        if param.tensor.dtype not in FLOATS:
            remedy = "Convert the parameter before building the optimizer, or freeze it with requires_grad_(False)."
            raise invalid_value(f"The dtype of {param.name}", param.tensor.dtype, FLOATS, remedy)
        if param.tensor.device != params[0].tensor.device:
            allowed = f"{str(params[0].tensor.device)!r}, the device of {params[0].name}"
            remedy = "Move all trainable parameters to one device."
            raise invalid_value(f"The device of {param.name}", str(param.tensor.device), allowed, remedy)
    if not offloads_params:
        check_memory((param.name, param.local) for param in params)
