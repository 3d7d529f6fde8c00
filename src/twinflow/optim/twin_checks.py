"""What a TwinOptimizer refuses to be built with, before anything has happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import bad_value
from twinflow.offload.bucket import Param
from twinflow.offload.places import PLACEMENTS
from twinflow.offload.settings import Settings, Tuning
from twinflow.parallel.pipeline import PipelineModule
from twinflow.rules import RULES, Rule
from twinflow.rules.checks import FLOATS
from twinflow.rules.formats import BLOCK
from twinflow.zero import Zero


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
        raise bad_value("world size", dist.get_world_size(), "1: each process would train a model of its own", remedy)


def groups_of(model: Any, param_groups: Iterable[Any] | None) -> list[Any]:
    """Parameters or groups as torch.optim.Optimizer takes them; frozen ones left out."""
    if not isinstance(model, nn.Module):
        if param_groups is not None:
            raise bad_value("param_groups", "given", "None where the first argument is not a module")
        return list(model)
    groups = list(model.parameters() if param_groups is None else param_groups)
    return _trainable(groups, isinstance(model, PipelineModule))


def _trainable(groups: list[Any], keeps_empty: bool = False) -> list[Any]:
    """Without frozen parameters, and without groups that have no others: LoRA scripts pass all they have. A stage of a
    pipeline keeps those too: other stages have parameters in them, and groups are known by number."""
    if not any(isinstance(group, dict) for group in groups):
        named = [item for item in groups if isinstance(item, tuple)]
        return [item for item in groups if (item[1] if named else item).requires_grad]
    kept = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        found = _trainable(members)
        if found or keeps_empty:
            kept.append({**group, "params": found})
    return kept


def _has_rows(tensor: Any) -> bool:
    return len(tensor.placements) == 1 and tensor.placements[0].is_shard(0)


def check_foreign(rule: object, states: str, param_groups: Iterable[Any] | None, zero: Zero | None) -> None:
    """What is allowed beside an optimizer of the user's."""
    if not isinstance(rule, Optimizer) and not callable(rule):
        raise bad_value("rule", rule, [*RULES, "a torch.optim.Optimizer class or instance, or a function making one"])
    if zero is not None and zero.stage == 3 and not zero.parks:
        name = getattr(rule, "__name__", type(rule).__name__)
        remedy = "Ranks have rows of parameters only: use stage 1 or 2, which give each rank whole ones."
        raise bad_value("optimizer with zero_optimization.stage 3", name, RULES, remedy)
    if states != "fp32":
        raise bad_value("states", states, ["fp32"], "A torch.optim.Optimizer given as rule keeps its own states.")
    if isinstance(rule, Optimizer) and param_groups is not None:
        raise bad_value("param_groups", "given", "None where rule is an optimizer: it has its own groups")


def check_tuning(tuning: Tuning, delayed_update: bool) -> None:
    """Choices and sizes."""
    for name, allowed in (("hold", ("auto", "device", "host")), ("sums", ("auto", "device", "host"))):
        if getattr(tuning, name) not in allowed:
            raise bad_value(f"tuning.{name}", getattr(tuning, name), allowed)
    if tuning.bucket_numel < BLOCK or tuning.bucket_numel % BLOCK:
        raise bad_value("tuning.bucket_numel", tuning.bucket_numel, f"a multiple of {BLOCK}")
    if not 0.0 <= tuning.streamed <= 1.0:
        raise bad_value("tuning.streamed", tuning.streamed, "a number from 0 to 1")
    if tuning.streamed and delayed_update:
        remedy = "Weights of streamed state are written at once; a delayed update would have to keep them apart."
        raise bad_value("tuning.streamed", tuning.streamed, "0 with delayed_update", remedy)
    if tuning.update_programs is not None and tuning.update_programs < 1:
        raise bad_value("tuning.update_programs", tuning.update_programs, "None or a whole number >= 1")
    if tuning.num_slots < 1:
        raise bad_value("tuning.num_slots", tuning.num_slots, "a whole number >= 1")


def check_ratio(ratio: float | str, placement: str, model: nn.Module | None) -> None:
    """A share, and an end of the model."""
    is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if ratio != "auto" and not (is_number and 0.0 <= float(ratio) <= 1.0):
        allowed = 'a number from 0 (all state on the device) to 1 (all of it on the host), or "auto"'
        raise bad_value("ratio", ratio, allowed)
    if placement not in PLACEMENTS:
        raise bad_value("placement", placement, PLACEMENTS)
    if ratio == "auto" and placement != "auto":
        raise bad_value("placement", placement, ["auto"], 'With ratio "auto" the placement is chosen as well.')
    if ratio == "auto" and model is None:
        raise bad_value(
            "ratio", ratio, "a number", "Give the model as the first argument, so that its steps are timed."
        )


def check_parking(
    settings: Settings,
    model: nn.Module | None,
    ratio: float | str,
    tuning: Tuning,
    zero: Zero | None,
    rule: Rule | None,
) -> None:
    """What weights on the host go with: state on the host, updated there by one of our rules, at once."""
    if not settings.parks:
        if zero is not None and zero.parks:
            raise bad_value("offload_params", False, [True], "The Zero that is given says that weights are so.")
        return
    name = "offload_params"
    if model is None:
        raise bad_value(name, True, [False], "Give the model as the first argument: its blocks fetch their weights.")
    if zero is not None and not zero.parks:
        raise bad_value(name, True, [False], "Give zero=Zero(stage=3, parks=True).")
    if rule is None:
        raise bad_value(f"rule with {name}", "an optimizer of your own", RULES, "Weights live in our rules' state.")
    if ratio != 1.0:
        raise bad_value(f"ratio with {name}", ratio, [1.0], "Weights are fetched from the state on the host.")
    if tuning.streamed:
        raise bad_value(f"tuning.streamed with {name}", tuning.streamed, [0.0])
    if settings.delayed_update:
        remedy = "The state holds the new weights at once, and no others."
        raise bad_value(f"delayed_update with {name}", True, [False], remedy)


def check_settings(settings: Settings, model: nn.Module | None) -> None:
    """Numbers, and what needs the model."""
    max_norm = settings.limits.max_norm
    if max_norm is not None and not 0.0 < max_norm < float("inf"):
        raise bad_value("max_grad_norm", max_norm, "a number > 0, or None")
    if settings.accumulation_steps < 1:
        raise bad_value("accumulation_steps", settings.accumulation_steps, "a whole number >= 1")
    if settings.early and model is None:
        raise bad_value("early", True, [False], "Give the model as the first argument to start updates early.")
    if settings.delayed_update and model is None:
        raise bad_value("delayed_update", True, [False], "Give the model as the first argument.")


def check_params(params: Sequence[Param], zero: Zero | None) -> None:
    """Parameters as the runtime can take them: whole, or with stage 3 their rows; of our dtypes, all on one device."""
    if not params:
        raise ValueError("there is no parameter to train: none requires a gradient")
    is_partitioned = zero is not None and not zero.shares_buckets
    for param in params:
        if param.is_sharded != is_partitioned:
            has = "rows of it (DTensor)" if param.is_sharded else "all of it"
            remedy = "With stage 3, and with it alone, call twinflow.zero.partition(model, zero) before."
            raise bad_value(f"{param.name}: this rank has", has, "what the stage says", remedy)
        if param.is_sharded and not _has_rows(param.tensor):
            placements = getattr(param.tensor, "placements", ())
            raise bad_value(f"{param.name} placements", placements, "Shard(0) on a mesh of one dimension")
        if param.tensor.dtype not in FLOATS:
            raise bad_value(f"{param.name} dtype", param.tensor.dtype, FLOATS)
        if param.tensor.device != params[0].tensor.device:
            allowed = f"{params[0].tensor.device}, where {params[0].name} is"
            raise bad_value(f"{param.name} device", str(param.tensor.device), allowed)
