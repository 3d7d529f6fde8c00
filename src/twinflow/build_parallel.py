"""A model spread over pipeline and tensor ranks, as the config asks: before it is placed, and before its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from twinflow.attention.patch import apply_section
from twinflow.build_optimizer import parks
from twinflow.config import Axes, Config, compression_choice, resolve_axes
from twinflow.dist.agree import gather_json
from twinflow.dist.group import backend_for, new_group
from twinflow.errors import bad_value
from twinflow.launch.environment import RankEnvironment
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.deferral import Deferral, defer
from twinflow.parallel.grid import Grid, make_grid
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.plans import plan_for
from twinflow.parallel.shard import mark_copy, shard_of
from twinflow.parallel.split import split_model
from twinflow.parallel.support import Combination, check
from twinflow.parallel.tensor import parallelize, same_randoms
from twinflow.parallel.ties import TiedGradients
from twinflow.parallel.topology import PIPE
from twinflow.parallel.wire import Wire

Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Spread:
    """How a model is spread: `grid` is None where one process has all of it."""

    axes: Axes
    num_data: int  # replicas
    grid: Grid | None = None


def axes_of(config: Config, model: Model, ranks: RankEnvironment, optimizer: Any) -> Spread:
    """Sizes of all axes; what does not go together is refused."""
    own = model.num_ranks if isinstance(model, PipelineModule) else None
    axes = resolve_axes(config, own)
    num_data, left = divmod(ranks.world_size, axes.pipe * axes.model)
    if left or not num_data:
        given = f"{axes.pipe} x {axes.model}"
        remedy = f"Start a multiple of {axes.pipe * axes.model} processes, or ask for fewer."
        raise bad_value(
            "pipeline.stages x tensor_parallel.autotp_size", given, f"a divisor of {ranks.world_size}", remedy
        )
    check(_combination(config, axes, model, optimizer))
    return Spread(axes, num_data)


def _combination(config: Config, axes: Axes, model: Model, optimizer: Any) -> Combination:
    offload, sparse = config.zero_optimization.offload_optimizer, config.sparse_attention
    return Combination(
        axes.pipe,
        axes.model,
        config.zero_optimization.stage,
        parks(config),
        offload is not None and offload.delayed_update,
        offload.ratio if offload is not None else 0.0,
        offload.sums if offload is not None else "auto",
        optimizer is None and compression_choice(config) is not None,
        config.activation_checkpointing.cpu_checkpointing,
        isinstance(optimizer, TwinOptimizer),
        sparse is not None and bool(sparse.different_layout_per_head),
        config.tensor_parallel.sequence,
        not hasattr(model, "pipeline_parts") and not isinstance(model, PipelineModule),
    )


def spread(model: Model, config: Config, found: Spread, device: torch.device) -> tuple[Model, Spread]:
    """This rank's part of the model, and the grid; the model as it is where no axis asks for parts."""
    axes = found.axes
    if axes.pipe * axes.model == 1 and not isinstance(model, PipelineModule):
        return model, found
    grid = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        grid = make_grid(axes.pipe, axes.model, found.num_data, device)
    module = model if isinstance(model, nn.Module) else model()
    if any(param.is_meta for param in module.parameters()):
        remedy = (
            "Give a model with weights, or a PipelineModule of LayerSpecs, of which each rank builds its own alone."
        )
        raise bad_value("model", "on the meta device", "one with weights, for pipeline or tensor ranks", remedy)
    if config.sparse_attention is not None:
        apply_section(module, config.sparse_attention.given())
    if grid is not None and axes.model > 1:
        with torch.no_grad():
            for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
                grid.model.broadcast(tensor)  # parts of one model, also where ranks have made different ones
        plan: Mapping[str, str] = config.tensor_parallel.plan or plan_for(module)
        parallelize(module, plan, grid.model, sequence=config.tensor_parallel.sequence)
    if axes.pipe > 1 and not isinstance(module, PipelineModule):
        assert grid is not None
        module = _split(module, config, axes, grid)
    if isinstance(module, PipelineModule):
        _check_schedule(module, config)
    return module, Spread(axes, found.num_data, grid)


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


def _check_schedule(module: PipelineModule, config: Config) -> None:
    """A PipelineModule has its layers where its own schedule wants them."""
    for key, own in (("schedule", module.schedule), ("chunks", module.num_chunks)):
        asked = getattr(config.pipeline, key)
        if asked is not None and asked != own:
            name = "num_chunks" if key == "chunks" else key
            raise bad_value(f"pipeline.{key}", asked, [own], f"Give PipelineModule({name}={asked!r}).")


def settle(module: nn.Module, grid: Grid | None) -> None:
    """Of ranks that have the same parameter, one counts it; tensor ranks draw the same random numbers."""
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


def make_ties(module: nn.Module, grid: Grid | None) -> list[TiedGradients]:
    """Of a pipeline whose parameters are what they will stay; before the optimizer, which gets their sums.

    torch names a group after its ranks and the number of groups that there are: so every rank makes as many.
    """
    if grid is None or not isinstance(module, PipelineModule):
        return []
    along, own, ties = grid.ranks_along(PIPE), {tie.name: tie for tie in module.ties}, []
    group = new_group("gloo", along)
    said = gather_json(group, [[tie.name, list(tie.ranks)] for tie in module.ties])
    for name, holders in {name: holders for one in said for name, holders in one}.items():
        if name not in own:
            dist.new_group([grid.rank], backend="gloo", use_local_synchronization=True)
            continue
        param = module.get_parameter(own[name].local)
        ties.append(TiedGradients(param, new_group(backend_for(param.device), [along[index] for index in holders])))
        ties[-1].start()
    return ties


def make_wire(module: PipelineModule, grid: Grid | None, device: torch.device) -> Wire:
    """Between the stages."""
    return Wire([0] if grid is None else grid.ranks_along(PIPE), module.index, device)


def make_deferral(module: PipelineModule, stage: int) -> Deferral | None:
    """Where the schedule puts gradients of weights off; not where ranks have rows of weights, which are gathered for
    one whole backward."""
    if module.schedule != "zbv" or stage == 3:
        return None
    deferral = Deferral()
    defer(module, deferral)
    return deferral
