# SPDX-License-Identifier: Apache-2.0
"""Distributes a model over pipeline and tensor ranks, before it is placed and before its optimizer is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.activations.wrap import KEY as CLASSES
from twinflow.activations.wrap import class_of
from twinflow.attention.patch import apply_section
from twinflow.build_optimizer import TIMEOUT_S, offloads_params, wire_dtype
from twinflow.config import Axes, Config, compression_choice, optimizer_choice, resolve_axes
from twinflow.conflicts import refuse
from twinflow.dist.agree import gather_json
from twinflow.dist.group import alone, backend_for, new_group, skip_group
from twinflow.errors import incompatible, invalid_value
from twinflow.launch.environment import RankEnvironment
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_build import own_device
from twinflow.parallel.deferral import Deferral, defer
from twinflow.parallel.grid import Grid, make_grid
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.plans import match, needs_dropout, plan_for
from twinflow.parallel.shard import mark_copy, shard_of
from twinflow.parallel.split import split_model
from twinflow.parallel.support import Combination, check
from twinflow.parallel.tensor import parallelize, same_randoms
from twinflow.parallel.ties import TiedGradients
from twinflow.parallel.topology import DATA, PIPE
from twinflow.parallel.wire import Wire
from twinflow.rules import ALL_RULES
from twinflow.zero.experts import expert_ranks, find_experts, split_experts

LOGGER = logging.getLogger("twinflow")
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
TIMEOUT = timedelta(seconds=TIMEOUT_S)
Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Spread:
    """The distribution of a model over ranks. `grid` (process groups) is None if one process has the whole model."""

    axes: Axes  # numbers of pipeline ranks and of tensor ranks
    num_data: int  # number of replicas
    grid: Grid | None = None
    # Maps the parameters of the given model to those of this rank. None for a parameter that this rank does not have.
    replaced: Mapping[nn.Parameter, nn.Parameter | None] | None = None


def axes_of(config: Config, model: Model, ranks: RankEnvironment, optimizer: Any) -> Spread:
    """The numbers of pipeline, tensor and data ranks. Raises ValueError for options that cannot be combined."""
    own = model.num_ranks if isinstance(model, PipelineModule) else None
    axes = resolve_axes(config, own)
    num_data, left = divmod(ranks.world_size, axes.pipe * axes.model)
    if left or not num_data:
        name = f"The product of pipeline.stages={axes.pipe} and tensor_parallel.autotp_size={axes.model}"
        remedy = f"Start a multiple of {axes.pipe * axes.model} processes, or use fewer stages or tensor ranks."
        expected = f"a divisor of {ranks.world_size}, the number of processes"
        raise invalid_value(name, axes.pipe * axes.model, expected, remedy)
    check(_combination(config, axes, model, optimizer))
    _check_sequence(config, num_data, optimizer)
    check_experts(config, num_data, model, optimizer)
    return Spread(axes, num_data)


def _check_sequence(config: Config, num_data: int, optimizer: Any) -> None:
    """Raises ValueError for options that conflict with sequence ranks, and if they do not divide the ranks."""
    size = config.sequence_parallel_size or 1
    if num_data % size:
        remedy = "Start a multiple of it as processes, or use fewer sequence ranks."
        expected = f"a divisor of {num_data}, the number of processes"
        raise invalid_value("sequence_parallel_size", size, expected, remedy)
    if size == 1:
        return
    kind = config.optimizer.type if config.optimizer is not None and optimizer is None else ""
    found = {
        "sum": config.gradient_allreduce_op == "sum",
        "one bit": kind.lower() in _ONE_BIT,
        "compiled": config.compile.blocks,
        "given optimizer": isinstance(optimizer, TwinOptimizer) and optimizer.team is None,
    }
    refuse("Sequence parallelism", found, optimizer=kind)


def check_experts(config: Config, num_data: int, model: Model | None = None, optimizer: Any = None) -> None:
    """Raises ValueError for options that conflict with expert ranks, and if they do not divide the ranks. `model`: None
    if there is none yet.
    """
    before = expert_ranks(model) if isinstance(model, nn.Module) else None
    size = config.expert_parallel_size
    if num_data % size:
        remedy = "Start a multiple of it as processes, or use fewer expert ranks."
        raise invalid_value("expert_parallel_size", size, f"a divisor of {num_data}, the number of processes", remedy)
    if before is not None and size not in (1, before.size):
        remedy = "Use this size, leave the key out, or build the model again."
        raise invalid_value("expert_parallel_size", size, f"{before.size}, by which the model is split", remedy)
    if size == 1 and before is None:
        return
    kind = config.optimizer.type if config.optimizer is not None and optimizer is None else type(optimizer).__name__
    is_rule = optimizer is None and config.optimizer is not None and optimizer_choice(config)[0] in ALL_RULES
    is_twin = isinstance(optimizer, TwinOptimizer)
    found = {
        "PipelineModule": isinstance(model, PipelineModule),
        "stage": config.zero_optimization.stage == 3,
        "sequence": (config.sequence_parallel_size or 1) > 1,
        "compiled": config.compile.blocks,
        "float8": config.float8.enabled,
        "no optimizer": config.optimizer is None and optimizer is None,
        "compression": kind.lower() in _ONE_BIT,
        "Muon": kind.lower() == "muon",
        "given optimizer": is_twin and before is None,
        "other optimizer": not is_rule and not is_twin,
    }
    refuse("Expert parallelism", found, optimizer=kind)
    if isinstance(model, nn.Module) and before is None:
        find_experts(model, size)


def divide_experts(model: nn.Module, config: Config) -> None:
    """Keeps only this rank's experts in the model, if the config says so and the model is not divided yet."""
    if config.expert_parallel_size > 1 and expert_ranks(model) is None:
        split_experts(model, config.expert_parallel_size, device=own_device(), timeout=TIMEOUT)


def _combination(config: Config, axes: Axes, model: Model, optimizer: Any) -> Combination:
    offload, sparse = config.zero_optimization.offload_optimizer, config.sparse_attention
    before = expert_ranks(model) if isinstance(model, nn.Module) else None
    return Combination(
        axes.pipe,
        axes.model,
        config.zero_optimization.stage,
        offloads_params(config),
        offload is not None and offload.delayed_update,
        offload.ratio if offload is not None else 0.0,
        offload.sums if offload is not None else "auto",
        config.activation_checkpointing.offloads,
        isinstance(optimizer, TwinOptimizer),
        sparse is not None and bool(sparse.different_layout_per_head),
        config.tensor_parallel.sequence,
        isinstance(model, nn.Module) and not (hasattr(model, "pipeline_parts") or isinstance(model, PipelineModule)),
        config.activation_checkpointing.partition_activations,
        optimizer is not None or config.optimizer is not None,
        config.compile.blocks,
        config.float8.enabled,
        config.activation_checkpointing.selective,
        config.sequence_parallel_size or 1,
        config.expert_parallel_size if before is None else before.size,
    )


def spread(model: Model, config: Config, found: Spread, optimizer: Any, device: torch.device) -> tuple[Model, Spread]:
    """Returns this rank's part of the model, and `found` with the grid. All checks run before the model changes."""
    axes = found.axes
    if axes.pipe * axes.model == 1 and not isinstance(model, PipelineModule):
        _note_without_axes(config)
        return model, found
    module = model if isinstance(model, nn.Module) else model()
    check(_combination(config, axes, module, optimizer))
    if any(param.is_meta for param in module.parameters()):
        raise incompatible(
            "A model on the meta device",
            "pipeline or tensor ranks",
            "the weights must exist when they are divided among the ranks",
            "Pass a model with weights, or a PipelineModule of LayerSpecs: each rank then builds only its own layers.",
        )
    before = dict(module.named_parameters(remove_duplicate=False))
    grid = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        grid = make_grid(axes.pipe, axes.model, found.num_data, device, TIMEOUT)
    plan = _plan(module, config, grid) if grid is not None and axes.model > 1 else None
    drops = plan is not None and needs_dropout(module)
    if isinstance(module, PipelineModule):
        _check_pipeline(module, config, grid)
    if config.sparse_attention is not None:
        apply_section(module, config.sparse_attention.given())
    if axes.pipe > 1 and not isinstance(module, PipelineModule):
        assert grid is not None
        module = _split(module, config, axes, grid)
    if plan is not None and grid is not None:
        with torch.no_grad():
            for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
                grid.model.broadcast(tensor)  # Ranks may have created models with different weights.
        options = config.tensor_parallel
        is_part = axes.pipe > 1
        finds_dropout = options.plan is not None or drops
        parallelize(module, plan, grid.model, sequence=options.sequence, is_part=is_part, finds_dropout=finds_dropout)
    now = dict(module.named_parameters(remove_duplicate=False))
    replaced: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(before.values())
    replaced |= {before[name]: param for name, param in now.items() if name in before}
    return module, Spread(axes, found.num_data, grid, replaced)


def _note_without_axes(config: Config) -> None:
    """Logs the keys that have no effect because each rank has the whole model."""
    asked = {
        "pipeline.schedule": config.pipeline.schedule,
        "pipeline.chunks": config.pipeline.chunks,
        "pipeline.activation_checkpoint_interval": config.pipeline.activation_checkpoint_interval,
        "pipeline.partition": None if config.pipeline.partition == "best" else config.pipeline.partition,
        "tensor_parallel.sequence": config.tensor_parallel.sequence,
        "tensor_parallel.plan": config.tensor_parallel.plan,
    }
    for key, value in asked.items():
        if value:
            LOGGER.info(f"config: {key}: no effect here, because each rank has the whole model")


def _plan(module: nn.Module, config: Config, grid: Grid) -> Mapping[str, str]:
    """How tensor ranks divide modules, by patterns of module names (parallel/plans.py). Raises ValueError on all ranks
    for a pattern of the config that matches no module of any rank.
    """
    given = config.tensor_parallel.plan
    plan: Mapping[str, str] = plan_for(module) if given is None else given
    match(dict(module.named_modules()), plan, is_part=True)
    names = [name for name, _ in module.named_modules()]
    fits = [any(fnmatchcase(name, pattern) for name in names) for pattern in plan]
    anywhere = [any(column) for column in zip(*gather_json(grid.everyone, fits), strict=True)]
    for pattern, fits_any in zip(plan, anywhere, strict=True):
        if given is not None and not fits_any:
            remedy = "Use a pattern that matches a name in model.named_modules()."
            raise invalid_value("A pattern of tensor_parallel.plan", pattern, "one that matches a module", remedy)
    return plan


def _split(module: nn.Module, config: Config, axes: Axes, grid: Grid) -> PipelineModule:
    options = config.pipeline
    schedule = options.schedule or "1f1b"
    return split_model(
        module,
        axes.pipe,
        grid.pipe,
        schedule=schedule,
        num_chunks=(options.chunks or 2) if schedule == "interleaved" else 2 if schedule == "zbv" else 1,
        partition_method="parameters" if options.partition == "best" else options.partition,
        activation_checkpoint_interval=options.activation_checkpoint_interval,
    )


def _check_pipeline(module: PipelineModule, config: Config, grid: Grid | None) -> None:
    """Checks that the config does not contradict the arguments of a PipelineModule."""
    asked = config.pipeline
    for key, given, own in (
        ("schedule", asked.schedule, module.schedule),
        ("chunks", asked.chunks, module.num_chunks),
        ("activation_checkpoint_interval", asked.activation_checkpoint_interval or None, None),
        ("partition", None if asked.partition == "best" else asked.partition, None),
    ):
        if given is not None and given != own:
            name = {"chunks": "num_chunks", "partition": "partition_method"}.get(key, key)
            raise incompatible(
                f"pipeline.{key}={given!r}",
                "this PipelineModule" if own is None else f"PipelineModule({name}={own!r})",
                "a PipelineModule gets this setting as an argument",
                f"Remove pipeline.{key} from the config, and build PipelineModule({name}={given!r}).",
            )
    if grid is not None and module.index != grid.pipe:
        allowed = f"{grid.pipe}, because the ranks are ordered by pipe, data and model"
        remedy = "Build the PipelineModule without `topology`, or with the axes in the order pipe, data, model."
        raise invalid_value(f"The stage of rank {grid.rank} in the PipelineModule", module.index, allowed, remedy)


def own_parameters(given: Iterable[Any] | None, found: Spread) -> list[Any] | None:
    """Replaces given parameters, named parameters or groups by those of this rank. Parameters of other ranks are
    removed.
    """
    if given is None or found.replaced is None:
        return None if given is None else list(given)
    replaced = found.replaced

    def now(item: Any) -> Any:
        if isinstance(item, dict):
            params = item["params"]
            return {**item, "params": own_parameters([params] if isinstance(params, Tensor) else params, found)}
        if isinstance(item, tuple):
            param = now(item[1])
            return None if param is None else (item[0], param)
        return replaced.get(item, item)

    return [one for one in map(now, given) if one is not None]


def check_trained(module: nn.Module, grid: Grid | None) -> None:
    """Raises ValueError on all ranks if a rank has no parameter to train."""
    if grid is None:
        return
    own = sum(param.numel() for param in module.parameters() if param.requires_grad)
    for rank, numel in enumerate(gather_json(grid.everyone, own)):
        if not numel:
            stage = grid.topology.get_coord(rank).pipe
            remedy = "Set another pipeline.partition, or use fewer stages."
            name = f"The number of parameters to train on pipeline rank {stage}"
            raise invalid_value(name, 0, "at least 1", remedy)


def settle(module: nn.Module, grid: Grid | None) -> None:
    """Marks all copies of a parameter but one, so that norms and checkpoints contain it once. Gives tensor ranks the
    same random numbers.
    """
    if grid is None:
        return
    if grid.num_model > 1:
        same_randoms(grid.model, next(module.parameters()).device)
        for param in module.parameters() if grid.model.rank > 0 else ():
            if shard_of(param) is None:
                mark_copy(param)
    for tie in module.ties if isinstance(module, PipelineModule) else ():
        if module.index != tie.ranks[0]:
            mark_copy(module.get_parameter(tie.local))


def classes_here(names: Sequence[str], module: nn.Module, grid: Grid) -> list[str]:
    """The classes in `names` that this rank's part of the model has. Raises ValueError for a class that no rank has."""
    own = sorted({class_of(part) for part in module.modules()})
    everywhere = {name for one in gather_json(grid.everyone, own) for name in one}
    for name in names:
        if name not in everywhere:
            raise invalid_value(f"A class in {CLASSES}", name, sorted(everywhere))
    return [name for name in names if name in own]


def sums_replicas(config: Config) -> bool:
    """Whether the gradients of a tied parameter are summed over replicas before they are summed over pipeline stages.

    With ZeRO stage 3, fully_shard has already summed them over replicas. With compression, replicas must not be summed
    first: each replica would then compress its part of the sum with zeros elsewhere, which loses more precision than
    compressing whole gradients. If the config divides gradients before the sum, so that the sum stays in the range of
    fp16, nothing may be summed before the division.
    """
    divides = config.prescale_gradients or config.gradient_predivide_factor != 1.0
    return config.zero_optimization.stage < 3 and compression_choice(config) is None and not divides


def make_ties(module: nn.Module, grid: Grid | None, config: Config) -> list[TiedGradients]:
    """Prepares the sums of gradients of tied parameters, which several stages of a pipeline share. Call it after the
    last change of the modules, and before the optimizer is built, which gets the summed gradients. A frozen parameter
    is only copied, so that all stages have the same values.
    """
    if grid is None or not isinstance(module, PipelineModule):
        return []
    along, own, ties = grid.ranks_along(PIPE), {tie.name: tie for tie in module.ties}, []
    group = new_group("gloo", along)
    trained = {tie.name: module.get_parameter(tie.local).requires_grad for tie in module.ties}
    said = gather_json(group, [[tie.name, list(tie.ranks), trained[tie.name]] for tie in module.ties])
    _check_frozen(said)
    device = next(module.parameters()).device
    is_first = sums_replicas(config)
    replicas = new_group(backend_for(device), grid.ranks_along(DATA), TIMEOUT) if is_first else alone()
    for name, holders in {name: holders for one in said for name, holders, _ in one}.items():
        if name not in own:
            skip_group()
            continue
        param = module.get_parameter(own[name].local)
        members = [along[index] for index in holders]
        holders_group = new_group(backend_for(device), members, TIMEOUT)
        tie = TiedGradients(param, holders_group, replicas, wire_dtype(config))
        tie.start()
        if trained[name]:
            ties.append(tie)
    return ties


def _check_frozen(said: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises ValueError on all ranks if some of them have frozen their copy of a tied parameter and others have not.
    `said`: name, holders and requires_grad of each tied parameter of each pipeline rank.
    """
    trained: dict[str, dict[int, bool]] = {}
    for rank, ties in enumerate(said):
        for name, _, is_trained in ties:
            trained.setdefault(name, {})[rank] = is_trained
    for name, by_rank in trained.items():
        if len(set(by_rank.values())) > 1:
            frozen = [rank for rank, is_trained in by_rank.items() if not is_trained]
            raise ValueError(
                f"The tied parameter {name} is frozen on the pipeline ranks {frozen}, but must be frozen on all or on "
                f"none of the ranks {list(by_rank)}, which have a copy. Set requires_grad to the same value on all of "
                "them."
            )


def make_wire(module: PipelineModule, grid: Grid | None, device: torch.device) -> Wire:
    """The connection between the stages of a pipeline."""
    return Wire([0] if grid is None else grid.ranks_along(PIPE), module.index, device, TIMEOUT)


def make_deferral(module: PipelineModule, stage: int) -> Deferral | None:
    """The deferral of weight gradients for the schedule zbv. None for other schedules, and with ZeRO stage 3, which
    gathers weights for one whole backward.
    """
    if module.schedule != "zbv" or stage == 3:
        return None
    deferral = Deferral()
    defer(module, deferral)
    return deferral
