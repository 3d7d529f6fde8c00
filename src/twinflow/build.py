# SPDX-License-Identifier: Apache-2.0
"""initialize(): builds an engine from a config and a model. This module connects all parts of twinflow."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.activations import Handle, checkpoint_layers
from twinflow.activations.partitioned import Partition
from twinflow.attention.patch import apply_section
from twinflow.build_optimizer import TIMEOUT_S, make_optimizer, make_zero, naming, offloads_params, weights_tuning
from twinflow.build_parallel import (
    Spread,
    axes_of,
    check_trained,
    classes_here,
    divide_experts,
    make_deferral,
    make_ties,
    make_wire,
    own_parameters,
    settle,
    spread,
)
from twinflow.config import Batch, Config, load_config, notes, resolve_batch
from twinflow.config.fields import Shown
from twinflow.conflicts import refuse
from twinflow.dist.group import new_group
from twinflow.dist.meeting import Meeting
from twinflow.engine import Engine, EngineSettings, ResumableLoader
from twinflow.engine.pipeline import Links, PipelineEngine, schedule_for
from twinflow.engine.reports import LOGGER, Profiler, Reports
from twinflow.errors import invalid_value
from twinflow.launch.environment import RankEnvironment, init_distributed, joined
from twinflow.monitor.timers import Timers
from twinflow.monitor.writers import CsvWriter, Fanout, TensorBoardWriter, WandbWriter
from twinflow.offload.blocks import find_blocks
from twinflow.offload.materialize import build as build_model
from twinflow.offload.quantised import move_quantised, without_quantised
from twinflow.offload.settings import Tuning
from twinflow.offload.weight_source import home_of_weights
from twinflow.optim.inference import HostWeights
from twinflow.optim.schedules import build_scheduler
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_build import own_device
from twinflow.parallel.grid import Grid
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.sequence_model import SplitSequence, split_sequence
from twinflow.parallel.topology import DATA
from twinflow.speedups import compile_blocks, use_float8
from twinflow.zero.building import make_whole, move
from twinflow.zero.gathered import add_homes
from twinflow.zero.partitioned import partition, regroup
from twinflow.zero.start import meet, start_watch

Model = nn.Module | Callable[[], nn.Module]
# The engine of each model that initialize() has built and whose engine may still train.
_ENGINES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
_PART_BYTES = 1024  # Tensor ranks partition a saved input of a checkpointed layer if it has this many bytes or more.


def initialize(
    args: Any = None,
    model: Model | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, TwinOptimizer | None, ResumableLoader | None, Any]:
    """Builds an engine for `model`. Returns engine, optimizer, data loader and scheduler.

    `model` may also be a function that creates a model or, without pipeline and tensor ranks, a model on the meta
    device. Without these ranks, both are created layer by layer on the training device. Optimizer and scheduler come
    from the config, or from `optimizer` and `lr_scheduler`: an instance, or a function that creates one. The other
    arguments are those of deepspeed.initialize(). `mpu` and `mesh_param` may only describe data-parallel ranks.
    """
    _log_to_stdout()
    if model is None or isinstance(model, Engine):
        remedy = "Pass model=..." if model is None else "Pass engine.module."
        raise invalid_value(
            "model", None if model is None else Shown(model), "an nn.Module, or a function that creates one", remedy
        )
    check_groups(mpu, mesh_param)
    source = _config_source(args, config, config_params)
    parsed = load_config(source)
    is_sparse = parsed.sparse_attention is not None and parsed.sparse_attention.mode != "dense"
    refuse("Other keys of the config", {"sparse compiled": is_sparse and parsed.compile.blocks})
    for note in [*notes(parsed), *_overruled(parsed, optimizer, lr_scheduler), *_default_clipping(parsed, optimizer)]:
        LOGGER.info(f"config: {note}")
    ranks = init_distributed(timeout_s=TIMEOUT_S) if dist_init_required is not False else joined(timeout_s=TIMEOUT_S)
    found = axes_of(parsed, model, ranks, optimizer)
    num_sequence = parsed.sequence_parallel_size or 1
    batch = resolve_batch(parsed, found.num_data // num_sequence)
    watch = start_watch(ranks, parsed.hang_timeout_s)
    # `model_parameters` may be an iterator over the model, whose parameters are replaced below.
    given = None if model_parameters is None else list(model_parameters)
    with ExitStack() as undo:  # The callbacks run if a line below raises an exception.
        if watch is not None:
            undo.callback(watch.close)
        is_trained = parsed.optimizer is not None or optimizer is not None
        if isinstance(model, nn.Module) and (is_trained or offloads_params(parsed)):
            _retire_engine(model, optimizer, is_trained)
        if isinstance(model, nn.Module) and not any(param.is_meta for param in model.parameters()):
            divide_experts(model, parsed)  # before all weights are gathered or moved, for which there may be no room
        takes_parts = ranks.world_size == 1 or _takes_parts(parsed, found, model, optimizer)
        if isinstance(model, nn.Module) and not takes_parts and make_whole(model.parameters()):
            LOGGER.info(
                "zero.Init or from_pretrained has divided the model over ranks. Its parts are gathered, because this "
                "config needs all weights"
            )
        model, found = spread(model, parsed, found, optimizer, own_device())
        module, grid, given = place(model, parsed), found.grid, own_parameters(given, found)
        divide_experts(module, parsed)
        if parsed.sparse_attention is not None and grid is None:
            apply_section(module, parsed.sparse_attention.given())
        if parsed.float8.enabled:  # before weights are divided and before the optimizer puts hooks on modules
            use_float8(module, own_device(), parsed.float8.recipe, parsed.float8.emulate)
        meet(ranks, module, parsed.model_dump_json(indent=1), grid)
        check_trained(module, grid)
        settle(module, grid)
        is_sharded = found.num_data > 1 and parsed.zero_optimization.stage == 3 and not offloads_params(parsed)
        if is_sharded and not isinstance(optimizer, TwinOptimizer):  # a TwinOptimizer's model is partitioned
            zero = make_zero(parsed, found.num_data, optimizer is None, grid)
            replaced = partition(module, zero)
            if optimizer is None and parsed.optimizer is None:  # otherwise the optimizer has the groups
                calls = new_group("gloo", None if grid is None else grid.ranks_along(DATA), zero.timeout)
                add_homes(module, calls, Meeting(calls))
            given = None if given is None else regroup(given, replaced)
        ties = make_ties(module, grid, parsed)
        for tie in ties:
            undo.callback(tie.close)
        twin = make_optimizer(parsed, batch, module, optimizer, given, ranks, grid)
        if twin is not None and twin is not optimizer:
            undo.callback(twin.close)  # The model can have only one open optimizer.
        host_weights = (
            HostWeights(module, Tuning(**weights_tuning(parsed))) if twin is None and offloads_params(parsed) else None
        )
        if host_weights is not None:
            undo.callback(host_weights.close)
        scheduler = _make_scheduler(parsed, twin, optimizer, lr_scheduler)
        sequence = None
        if num_sequence > 1:
            timeout = timedelta(seconds=TIMEOUT_S)
            sequence = split_sequence(module, num_sequence, parsed.sequence_mode, device=own_device(), timeout=timeout)
            undo.callback(sequence.remove)
        settings = _engine_settings(parsed, batch, source, ranks, grid, optimizer, sequence)
        reports = _make_reports(parsed, ranks.rank)
        activations = checkpoint_activations(parsed, module, twin, grid)
        if activations is not None:
            undo.callback(activations.remove)
        if parsed.compile.blocks:
            compile_blocks(module, own_device(), parsed.compile.backend)
        if isinstance(module, PipelineModule):
            schedule_for(module, batch.accumulation_steps)  # an invalid number of micro-batches raises here
            links = Links(make_wire(module, grid, own_device()), ties, make_deferral(module, settings.stage))
            undo.callback(links.wire.close)
            engine: Engine = PipelineEngine(module, twin, scheduler, settings, reports, links, activations, watch)
        else:
            engine = Engine(module, twin, scheduler, settings, reports, activations, watch, host_weights)
        loader = engine.set_training_data(training_data, collate_fn) if training_data is not None else None
        undo.pop_all()
    if twin is not None or host_weights is not None:
        _ENGINES[engine.module] = weakref.ref(engine)
    return engine, twin, loader, scheduler


def _retire_engine(model: nn.Module, optimizer: Any, is_trained: bool) -> None:
    """Destroys the engine that an earlier initialize() built for this model: a model can have one optimizer at a time,
    and one engine that keeps its weights on the host.

    An engine whose own optimizer is passed again stays, because the new engine uses that optimizer. An engine that
    trains stays if the new one does not train.
    """
    reference = _ENGINES.get(model)
    before = reference() if reference is not None else None
    if before is None or (before.optimizer is None and before.host_weights is None):
        return
    if before.optimizer is not None and (before.optimizer is optimizer or not is_trained):
        return
    what = "with its optimizer state" if before.optimizer is not None else "and its weights return to the model"
    LOGGER.info(f"initialize() was called again with the same model. The earlier engine is destroyed {what}")
    before.destroy("initialize() was called again with the same model")


def _takes_parts(config: Config, found: Spread, model: Model, optimizer: Any) -> bool:
    """Whether weights that zero.Init has divided over all ranks can stay so: data ranks share them with stage 3."""
    has_axes = found.axes.pipe * found.axes.model > 1 or isinstance(model, PipelineModule)
    return config.zero_optimization.stage == 3 and not has_axes and not isinstance(optimizer, TwinOptimizer)


def _engine_settings(
    config: Config,
    batch: Batch,
    source: Any,
    ranks: RankEnvironment,
    grid: Grid | None,
    optimizer: Any,
    sequence: SplitSequence | None,
) -> EngineSettings:
    return EngineSettings(
        ranks=ranks,
        grid=grid,
        sequence=sequence,
        stage=config.zero_optimization.stage,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        autocast=getattr(torch, str(config.torch_autocast.dtype)) if config.torch_autocast.enabled else None,
        input_dtype=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        keep_last=config.checkpoint.keep_last,
        is_background=config.checkpoint.background,
        background_bytes=config.checkpoint.background_bytes,
        drop_last=config.dataloader_drop_last,
        config=dict(source) if isinstance(source, Mapping) else {"file": str(source)},
        parsed=config,
        client_optimizer=optimizer,
    )


def _overruled(config: Config, optimizer: Any, lr_scheduler: Any) -> Iterator[str]:
    """Notes on sections of the config that an argument overrides, as in DeepSpeed."""
    for name, given in {"optimizer": optimizer, "scheduler": lr_scheduler}.items():
        if given is not None and getattr(config, name) is not None:
            yield f"{name}: no effect here, because initialize() was called with an argument that overrides it"


def _default_clipping(config: Config, optimizer: Any) -> Iterator[str]:
    """A note if gradients are clipped although the config does not say so. A TwinOptimizer has its own setting."""
    has_optimizer = optimizer is not None or config.optimizer is not None
    if "gradient_clipping" in config.model_fields_set or isinstance(optimizer, TwinOptimizer) or not has_optimizer:
        return
    yield (
        f"gradient_clipping: not given, so gradients are clipped to the norm {config.gradient_clipping}, as in current "
        "versions of DeepSpeed. Older versions do not clip. Set 0 to turn clipping off"
    )


def add_config_arguments(parser: Any) -> Any:
    """Adds the options `--deepspeed` and `--deepspeed_config` for `initialize(args=...)` to an argparse parser."""
    group = parser.add_argument_group("twinflow", "Configuration")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="A flag for the script; initialize() does not read it."
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="The JSON config file.")
    return parser


# Methods of an `mpu` object (Megatron's name for its groups of ranks) that return the size of an axis.
_AXES = {
    "tensor ranks": ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"),
    "pipeline ranks": ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"),
    "sequence ranks": ("get_sequence_parallel_world_size",),
}


def check_groups(mpu: Any = None, mesh_param: Any = None, **groups: Any) -> None:
    """Checks arguments for process groups. They are accepted if all ranks are data-parallel, because initialize() makes
    its own groups. Raises ValueError for any other layout. `groups`: torch process groups or device meshes, by name.
    """
    for axis, names in _AXES.items():
        sizes = [int(getattr(mpu, name)()) for name in names if hasattr(mpu, name)]
        if sizes and sizes[0] > 1:
            raise _other_layout("mpu", f"an object with {sizes[0]} {axis}")
    if mpu is not None and not any(hasattr(mpu, name) for names in _AXES.values() for name in names):
        raise _other_layout("mpu", f"of type {type(mpu).__name__}, without a method {_AXES['tensor ranks'][1]}()")
    if mesh_param is not None:
        sizes = list(mesh_param) if isinstance(mesh_param, (tuple, list)) else []
        if len(sizes) != 2 or sizes[1] != 1:
            raise _other_layout("mesh_param", repr(mesh_param))
    for name, group in groups.items():
        if group is not None and group.size() != (dist.get_world_size() if dist.is_initialized() else 1):
            raise _other_layout(name, f"a group of {group.size()} ranks")


def _other_layout(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name} is {what}, but must be None or describe all ranks as data-parallel. Leave it out: initialize() "
        "creates the process groups, as tensor_parallel.autotp_size, pipeline.stages and sequence_parallel_size in the "
        "config say."
    )


def _config_source(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | Path:
    """The config, from one of the three arguments. Raises ValueError unless exactly one of them has a config."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        state = f"given by {' and '.join(found)}" if found else "not given"
        raise ValueError(f"The config is {state}, but must be given by exactly one of {', '.join(given)}.")
    value: Mapping[str, Any] | str | Path = next(iter(found.values()))
    return value


def place(model: Model, config: Config) -> nn.Module:
    """Converts the model to the config's precision and moves it to the training device, or keeps it on the host."""
    device = own_device()
    dtype = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    is_for_host = offloads_params(config)
    if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
        home = home_of_weights(Tuning(**weights_tuning(config))) if is_for_host else None
        return build_model(model, device, dtype, home=home)
    move(model, None if is_for_host else device, dtype)
    with without_quantised(model):
        model.to(dtype=dtype) if is_for_host else model.to(device=device, dtype=dtype)
    if not is_for_host:
        move_quantised(model, device)
    return model


def checkpoint_activations(
    config: Config, module: nn.Module, twin: TwinOptimizer | None, grid: Grid | None = None
) -> Handle | None:
    """Applies the section `activation_checkpointing` of the config. None if no layer of this rank is checkpointed."""
    options = config.activation_checkpointing
    if not options.is_asked_for:
        return None
    shares = options.partition_activations and grid is not None and grid.num_model > 1
    if options.partition_activations and not shares:
        LOGGER.info("config: activation_checkpointing.partition_activations: no effect with one tensor rank")
    layers: Any = options.layers
    if layers is None:
        layers = [block.module for block in find_blocks(module)]
    elif grid is not None:
        layers = classes_here(layers, module, grid)
    if not layers:
        if isinstance(module, PipelineModule):
            return None  # The layers are on other stages.
        remedy = "Name the classes of the layers, because this model has no ModuleList, whose members are the default."
        raise invalid_value("activation_checkpointing.layers", None, "a list of class names", remedy)
    trace = twin.trace if twin is not None else None  # Copies of activations appear in the trace of the optimizer.
    partition = Partition(grid.model, _PART_BYTES) if shares and grid is not None else None
    are_divided = config.zero_optimization.stage == 3 and twin is not None and twin.team is not None
    option = "weights on the host" if offloads_params(config) else "ZeRO stage 3 on several ranks"
    is_away = options.every > 1 and (offloads_params(config) or are_divided)
    refuse("Other keys of the config", {"grouped weights": is_away}, every=options.every, option=option)
    return checkpoint_layers(
        module,
        layers,
        offload=options.offloads,
        partition=partition,
        trace=trace,
        selective=options.selective,
        every=options.every,
        on_device=options.layers_on_device,
        float8=options.float8,
        disk=options.nvme_path,
    )


def _make_scheduler(config: Config, twin: TwinOptimizer | None, optimizer: Any, given: Any) -> Any:
    if given is not None and not callable(given):
        if not hasattr(given, "step"):
            remedy = 'To use a scheduler of the config, add a section "scheduler", and leave lr_scheduler out.'
            raise invalid_value("lr_scheduler", given, "a scheduler, or a function that builds one", remedy)
        return given
    if twin is None:
        return None
    if given is not None:
        return given(optimizer if isinstance(optimizer, Optimizer) else twin)
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.params, twin)


def _make_reports(config: Config, rank: int) -> Reports:
    """Log lines, monitors, timers and the profiler of the config. Only rank 0 reports."""
    if rank > 0:
        return Reports()
    writers: list[Any] = []
    for name, kind in {"csv_monitor": CsvWriter, "tensorboard": TensorBoardWriter}.items():
        section = getattr(config, name)
        if section.enabled:
            with naming(f"{name}.output_path"):
                writers.append(kind(section.output_path, section.job_name))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb.project, config.wandb.group, config.wandb.team))
    with naming("flops_profiler.output_file"):
        profiler = Profiler(config.flops_profiler) if config.flops_profiler.enabled else None
    timers = Timers() if config.wall_clock_breakdown else None
    return Reports(config.steps_per_print, Fanout(writers) if writers else None, timers, profiler)


def _log_to_stdout() -> None:
    """Sends log lines to stdout, unless the program has configured logging."""
    if LOGGER.handlers or logging.getLogger().handlers:
        return
    handler = _Stdout()
    handler.setFormatter(logging.Formatter("%(asctime)s twinflow %(message)s", "%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class _Stdout(logging.StreamHandler):  # type: ignore[type-arg]  # not generic in Python 3.10
    """Writes to the current sys.stdout, which a test or a notebook may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout
