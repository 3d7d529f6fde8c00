# SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer from a config or from a given optimizer, and the options of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.config import Batch, Config, compression_choice, optimizer_choice
from twinflow.config.schema import OffloadParam
from twinflow.conflicts import DIVISIONS, conflict, refuse
from twinflow.errors import invalid_value
from twinflow.launch.environment import RankEnvironment
from twinflow.offload.recipe import check_step
from twinflow.offload.settings import Tuning
from twinflow.optim.lamb import Lamb
from twinflow.optim.loss_scale import LossScale, dynamic, static
from twinflow.optim.onebit import OneBitLamb, ZeroOneAdam
from twinflow.optim.replicated import ReplicatedOptimizer
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.grid import Grid
from twinflow.parallel.pipeline import PipelineModule
from twinflow.rules import ALL_RULES
from twinflow.zero import Zero
from twinflow.zero.compression import Compression

TIMEOUT_S = 1800.0  # limit for a rank to wait for another; the watch for hangs (`hang_timeout_s`) reacts much earlier


MAX_REQUESTS: Final = 64  # reads and writes of the disk at the same time: each takes a thread
REPLICATED: Final = {"onebitlamb": OneBitLamb, "zerooneadam": ZeroOneAdam}


def offloads_params(config: Config) -> bool:
    """Whether weights are on the host. With weights, the optimizer state is there too. ValueError for options that
    conflict with this.
    """
    zero = config.zero_optimization
    group, optimizer = "Weights on the host", zero.offload_optimizer
    if zero.offload_param is None or zero.offload_param.device == "none":
        refuse(group, {"embeddings": zero.offload_param is not None and zero.offload_param.embeddings})
        return False
    refuse(group, {"stage": zero.stage != 3}, stage=zero.stage)
    delayed = optimizer is not None and optimizer.delayed_update
    refuse(group, {"delayed_update key": delayed}, delayed_update=delayed)
    return True


def offloads_embeddings(config: Config) -> bool:
    """Whether the embedding and output layers are on the host, with the blocks."""
    weights = config.zero_optimization.offload_param
    return offloads_params(config) and weights is not None and weights.embeddings


def weights_tuning(config: Config) -> dict[str, Any]:
    """Fields of `Tuning` for weights on the host or on a disk."""
    param = config.zero_optimization.offload_param
    found: dict[str, Any] = {"offload_embeddings": offloads_embeddings(config)}
    if param is None or param.device != "nvme":
        return found
    there = {"param_nvme_path": param.nvme_path, "param_buffer_count": param.buffer_count}
    offload = config.zero_optimization.offload_optimizer
    if offload is not None:
        found["disk_io"] = offload.disk_io
    return {**found, **there, "max_in_cpu": param.max_in_cpu, **_requests(config)}


def _requests(config: Config) -> dict[str, int]:
    aio = config.aio
    num_requests = min(MAX_REQUESTS, aio.queue_depth * aio.intra_op_parallelism)
    return {"disk_requests": num_requests, "disk_block_bytes": aio.block_size}


def make_optimizer(
    config: Config,
    batch: Batch,
    module: nn.Module,
    given: Optimizer | Callable[..., Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    ranks: RankEnvironment | None = None,
    grid: Grid | None = None,
) -> TwinOptimizer | None:
    """A TwinOptimizer: `given` itself, or built from `given` or from the config. None if neither has an optimizer."""
    if isinstance(given, TwinOptimizer):
        return _as_given(given, config, batch, module, ranks)
    rule: Any = given
    options: dict[str, Any] = {}
    if given is None:
        if config.optimizer is None:
            return None
        name, options = optimizer_choice(config)
        if name in REPLICATED:
            return _replicated(config, batch, module, name, options, model_parameters, ranks, grid)
        rule = name if name in ALL_RULES else Lamb if name == "lamb" else getattr(torch.optim, name)
    is_torch = given is None and not isinstance(rule, str)
    groups = None if isinstance(given, Optimizer) or model_parameters is None else list(model_parameters)
    own = offload_options(config)
    # The engine runs the loop of a pipeline, so updates can start early. Several micro-batches are in progress at once,
    # so gradients are summed on the device.
    if isinstance(module, PipelineModule):
        own["early"] = True if own["early"] == "auto" else own["early"]
        own["tuning"] = replace(own.get("tuning") or Tuning(), sums="device")
    if config.gradient_clipping_value and own["early"] == "auto":
        own["early"] = False
    zero = None
    if ranks is not None and ranks.world_size > 1:
        zero = make_zero(config, ranks.world_size if grid is None else grid.num_data, given is None, grid)
    with ExitStack() as contexts:
        if isinstance(given, Optimizer):
            contexts.enter_context(original_step(given))
        if is_torch:
            contexts.enter_context(naming(f"optimizer.type {rule.__name__} with optimizer.params {options}"))
            _try_out(rule, options)
        twin = TwinOptimizer(
            module,
            rule,
            param_groups=groups,
            max_grad_norm=config.gradient_clipping or None,
            max_grad_value=config.gradient_clipping_value or None,
            skip_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
            loss_scale=_loss_scale(config),
            accumulation_steps=batch.accumulation_steps,
            zero=zero,
            **own,
            **options,
        )
    if isinstance(given, Optimizer):
        follow(given, twin)
    return twin


def _replicated(
    config: Config,
    batch: Batch,
    module: nn.Module,
    name: str,
    options: dict[str, Any],
    model_parameters: Iterable[Any] | None,
    ranks: RankEnvironment | None,
    grid: Grid | None,
) -> ReplicatedOptimizer:
    """0/1 Adam or 1-bit LAMB. Raises ValueError for keys that conflict with an optimizer that itself communicates."""
    group, zero, stage = "0/1 Adam and 1-bit LAMB", None, config.zero_optimization.stage
    refuse(group, {"axes": grid is not None or isinstance(module, PipelineModule), "stage": stage > 0}, stage=stage)
    for section in ("offload_param", "offload_optimizer"):
        chosen = getattr(config.zero_optimization, section)
        refuse(group, {"offload": chosen is not None and chosen.device != "none"}, section=section)
    others = {
        "max_grad_value": config.gradient_clipping_value > 0,
        "sum": config.gradient_allreduce_op == "sum",
        "background": config.checkpoint.background,
    }
    refuse(group, others, limit=config.gradient_clipping_value)
    _refuse_divisions(config, group)
    if ranks is not None and ranks.world_size > 1:
        zero = make_zero(config, ranks.world_size)
    with naming(f"optimizer.type {name} with optimizer.params {options}"):
        return ReplicatedOptimizer(
            module,
            REPLICATED[name],
            options,
            param_groups=None if model_parameters is None else list(model_parameters),
            max_grad_norm=config.gradient_clipping or None,
            loss_scale=_loss_scale(config),
            accumulation_steps=batch.accumulation_steps,
            zero=zero,
        )


@contextmanager
def original_step(optimizer: Optimizer) -> Iterator[None]:
    """A context without the `step` that a scheduler has set on the instance: TwinOptimizer needs that of the class."""
    wrapped = vars(optimizer).pop("step", None)
    try:
        yield
    finally:
        if wrapped is not None:
            optimizer.step = wrapped  # type: ignore[method-assign]


def follow(optimizer: Optimizer, twin: TwinOptimizer) -> None:
    """Connects schedulers that were built with `optimizer` to `twin`: they change the param groups of `twin`."""
    optimizer.param_groups = twin.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise schedulers warn that step() was never called


def make_zero(config: Config, world_size: int, is_named: bool = True, grid: Grid | None = None) -> Zero:
    """The options of ZeRO. `is_named`: whether the optimizer comes from the config. Only then is the config's
    compression used.
    """
    stage, compression = config.zero_optimization.stage, compression_choice(config) if is_named else None
    if stage == 3 and not offloads_params(config):
        _refuse_divisions(config, "ZeRO stages 2 and 3")
    if compression is not None:
        refuse("1-bit Adam", {"stage": stage == 3})
        _refuse_divisions(config, "1-bit Adam")
        stage = 1  # With compression, each stage below 3 partitions buckets over ranks, as stage 1 does.
    if stage == 3 and world_size == 1 and grid is not None and not offloads_params(config):
        stage = 1  # The replica has one data rank, so nothing is partitioned.
    return Zero(
        stage,
        wire_dtype(config),
        config.gradient_allreduce_op,
        float(world_size) if config.prescale_gradients else config.gradient_predivide_factor,
        timedelta(seconds=TIMEOUT_S),
        offloads_params(config),
        Compression(**compression) if compression is not None else None,
        grid,
    )


def wire_dtype(config: Config) -> torch.dtype | None:
    """The dtype in which gradients are reduced over ranks. None: the dtype of the gradients."""
    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[config.communication_data_type]


def _refuse_divisions(config: Config, group: str) -> None:
    values = {key: getattr(config, key) for key in DIVISIONS}
    refuse(group, {key: value != DIVISIONS[key] for key, value in values.items()}, **values)


def offload_options(config: Config) -> dict[str, Any]:
    """The section `offload_optimizer` as arguments of TwinOptimizer, with the fields of `Tuning` in one argument."""
    offload = config.zero_optimization.offload_optimizer
    if offload is None:
        is_on_host = offloads_params(config)
        ratio = 1.0 if is_on_host else 0.0
        chosen = {"offload_params": is_on_host, "states": config.states, "tuning": Tuning(**weights_tuning(config))}
        return {"ratio": ratio, "early": "auto", **chosen}
    options = {name: getattr(offload, name) for name in offload.own_keys()} | {"states": config.states}
    given = {field.name: options.pop(field.name) for field in fields(Tuning) if field.name in options}
    if offload.device == "nvme":
        given |= _requests(config)
    else:
        given["nvme_path"] = None
    given |= weights_tuning(config)
    options["tuning"] = Tuning(**{name: value for name, value in given.items() if value is not None})
    options["offload_params"] = offloads_params(config)
    if offload.device == "none":
        options["ratio"] = 1.0 if options["offload_params"] else 0.0
    return options


def _loss_scale(config: Config) -> LossScale | None:
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return static(fp16.loss_scale)
    return dynamic(
        fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.hysteresis,
        fp16.min_loss_scale,
        fp16.consecutive_hysteresis,
    )


def _as_given(
    given: TwinOptimizer, config: Config, batch: Batch, module: nn.Module, ranks: RankEnvironment | None
) -> TwinOptimizer:
    """Returns a given TwinOptimizer. ValueError if the config contradicts the arguments with which it was built."""
    if given.model is not module:
        raise ValueError("optimizer belongs to another model. Build it with the model that you pass to initialize().")
    max_norm = given.max_grad_norm or 0.0
    if "gradient_clipping" in config.model_fields_set and config.gradient_clipping != max_norm:
        remedy = f"The TwinOptimizer was built with max_grad_norm={given.max_grad_norm}. Use the same value."
        raise invalid_value("gradient_clipping", config.gradient_clipping, [max_norm], remedy)
    if offloads_params(config) != given.offloads_params:
        remedy = f"The TwinOptimizer was built with offload_params={given.offloads_params}. Use the same setting."
        param = config.zero_optimization.offload_param
        value, expected = (param.device, ["none"]) if param and offloads_params(config) else ("none", ["cpu", "nvme"])
        raise invalid_value("zero_optimization.offload_param.device", value, expected, remedy)
    weights, has_embeddings = config.zero_optimization.offload_param, given.tuning.offload_embeddings
    is_said = weights is not None and "embeddings" in weights.model_fields_set
    if is_said and offloads_embeddings(config) != has_embeddings:
        remedy = f"The TwinOptimizer was built with tuning.offload_embeddings={has_embeddings}. Use the same setting."
        key = "zero_optimization.offload_param.embeddings"
        raise invalid_value(key, offloads_embeddings(config), [has_embeddings], remedy)
    if weights is not None and offloads_params(config):
        _check_disk_of_weights(weights, given.tuning)
    stage, own = config.zero_optimization.stage, given.zero.stage if given.zero is not None else 0
    if ranks is not None and ranks.world_size > 1 and stage != own:
        remedy = f"The TwinOptimizer was built with stage {own}. Use the same stage."
        raise invalid_value("zero_optimization.stage", stage, [own], remedy)
    offload = config.zero_optimization.offload_optimizer
    said = sorted(offload.model_fields_set.intersection(offload.own_keys())) if offload is not None else []
    keys = [f"zero_optimization.offload_optimizer.{name}" for name in said] + ["fp16.enabled"] * config.fp16.enabled
    if keys:
        raise conflict("Other keys of the config", "given optimizer", own_key=keys[0])
    given.set_accumulation_steps(batch.accumulation_steps)
    return given


def _check_disk_of_weights(weights: OffloadParam, tuning: Tuning) -> None:
    """Raises ValueError if a config with weights on the host or on a disk contradicts `tuning` of an optimizer."""
    remedy = "The TwinOptimizer was built with tuning.{}={!r}. Use the same value."
    has_disk = tuning.param_nvme_path is not None
    if (weights.device == "nvme") != has_disk:
        expected, said = ["nvme" if has_disk else "cpu"], remedy.format("param_nvme_path", tuning.param_nvme_path)
        raise invalid_value("zero_optimization.offload_param.device", weights.device, expected, said)
    own = {"nvme_path": "param_nvme_path", "buffer_count": "param_buffer_count", "max_in_cpu": "max_in_cpu"}
    for key, name in own.items() if has_disk else ():
        value, there = getattr(weights, key), getattr(tuning, name)
        if key in weights.model_fields_set and value != there:
            raise invalid_value(f"zero_optimization.offload_param.{key}", value, [there], remedy.format(name, there))


def _try_out(kind: Any, options: Mapping[str, Any]) -> None:
    """Runs one step of a separate optimizer with these options, because torch checks some options only in the first
    step. The error is then raised here, and not in the thread that runs the steps.
    """
    param = nn.Parameter(torch.zeros(2, 2, device="cpu"))
    param.grad = torch.zeros_like(param)
    with suppress(AssertionError, RuntimeError):  # errors about devices matter only for the real optimizer
        optimizer = kind([param], **options)
        check_step(optimizer, "optimizer.type", '"Adam"', '"AdamW"')
        optimizer.step()


@contextmanager
def naming(key: str) -> Iterator[None]:
    """A context that adds the config key `key` to errors that are raised inside it."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        if isinstance(error, ValueError) and f"{key.split('.')[0]}." in str(error):
            raise
        raise ValueError(f"{key}: {error}") from error
