"""The optimizer that a config names, or that goes around the one that was given, and how ranks share its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.config import Batch, Config, compression_choice, optimizer_choice
from twinflow.errors import invalid_value
from twinflow.launch.environment import RankEnvironment
from twinflow.offload.settings import Tuning
from twinflow.optim.loss_scale import LossScale, dynamic, static
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.grid import Grid
from twinflow.parallel.pipeline import PipelineModule
from twinflow.rules import RULES
from twinflow.zero import Zero
from twinflow.zero.compression import Compression

TIMEOUT_S = 1800.0  # for one rank to wait for another: long after the watch has seen that it hangs


def offloads_params(config: Config) -> bool:
    """Whether weights live on the host; what that does not go with is refused."""
    zero, name = config.zero_optimization, "zero_optimization.offload_param.device"
    if zero.offload_param is None or zero.offload_param.device != "cpu":
        return False
    if zero.stage != 3:
        raise invalid_value(f"zero_optimization.stage with {name}", zero.stage, [3], "Or leave offload_param out.")
    optimizer = zero.offload_optimizer
    if optimizer is None or optimizer.device != "cpu":
        given = optimizer.device if optimizer is not None else None
        remedy = "Weights are fetched from the optimizer's state, which must be on the host as well."
        raise invalid_value(f"zero_optimization.offload_optimizer.device with {name}", given, ["cpu"], remedy)
    for key, allowed in (("ratio", 1.0), ("delayed_update", False)):
        if getattr(optimizer, key) != allowed:
            remedy = "Weights are fetched from the optimizer's state on the host, as it is."
            raise invalid_value(
                f"zero_optimization.offload_optimizer.{key} with {name}", getattr(optimizer, key), [allowed], remedy
            )
    return True


def make_optimizer(
    config: Config,
    batch: Batch,
    module: nn.Module,
    given: Optimizer | Callable[..., Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    ranks: RankEnvironment | None = None,
    grid: Grid | None = None,
) -> TwinOptimizer | None:
    """The optimizer of the config, or around the one that was given; None where neither names one."""
    if isinstance(given, TwinOptimizer):
        return _as_given(given, config, batch, module, ranks)
    rule: Any = given
    options: dict[str, Any] = {}
    if given is None:
        if config.optimizer is None:
            if offloads_params(config):
                remedy = "Weights live in its state: name one, or leave offload_param out."
                raise invalid_value(
                    "optimizer with zero_optimization.offload_param.device", None, "an optimizer", remedy
                )
            return None
        name, options = optimizer_choice(config)
        rule = name if name in RULES else getattr(torch.optim, name)
    is_torch = given is None and not isinstance(rule, str)
    groups = None if isinstance(given, Optimizer) or model_parameters is None else list(model_parameters)
    own = offload_options(config)
    if isinstance(module, PipelineModule):  # several micro-batches are under way at once, and the engine runs the loop
        own["early"] = True if own["early"] == "auto" else own["early"]
        own["tuning"] = replace(own.get("tuning") or Tuning(), sums="device")
    # A scheduler built over the user's optimizer has put a wrapper around its step, which is not the optimizer's.
    wrapped = vars(given).pop("step", None) if isinstance(given, Optimizer) else None
    build = partial(
        TwinOptimizer,
        module,
        rule,
        param_groups=groups,
        max_grad_norm=config.gradient_clipping or None,
        skip_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        loss_scale=_loss_scale(config),
        accumulation_steps=batch.accumulation_steps,
        zero=_zero_of(config, ranks, given is None, grid),
        **own,
        **options,
    )
    with naming(f"optimizer.type {rule.__name__} with optimizer.params {options}") if is_torch else nullcontext():
        if is_torch:
            _try_out(rule, options)
        try:
            twin = build()
        finally:
            if wrapped is not None:
                given.step = wrapped  # type: ignore[union-attr,method-assign]
    if isinstance(given, Optimizer):
        # A scheduler that was built over it writes its options: let them be ours.
        given.param_groups = twin.param_groups
        given._opt_called = True  # type: ignore[attr-defined]
    return twin


def _zero_of(config: Config, ranks: RankEnvironment | None, is_named: bool, grid: Grid | None) -> Zero | None:
    if ranks is None or ranks.world_size == 1:
        return None
    return make_zero(config, ranks.world_size if grid is None else grid.num_data, is_named, grid)


def make_zero(config: Config, world_size: int, is_named: bool = True, grid: Grid | None = None) -> Zero:
    """How ranks share the work; `is_named`: of the optimizer that the config names, not of another one."""
    divides = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    for key, allowed in divides.items():
        if config.zero_optimization.stage == 3 and not offloads_params(config) and getattr(config, key) != allowed:
            remedy = "fully_shard divides gradients itself, in part before and in part after their sum."
            raise invalid_value(f"{key} with zero_optimization.stage 3", getattr(config, key), [allowed], remedy)
    stage, compression = config.zero_optimization.stage, compression_choice(config) if is_named else None
    if compression is not None:
        stage = _stage_with_compression(config, divides)
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
    """What sums of gradients travel in; None: what gradients are."""
    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[config.communication_data_type]


def _stage_with_compression(config: Config, divides: Mapping[str, Any]) -> int:
    """Parts of buckets have owners, whatever stage below 3 was named."""
    name = "optimizer.type OneBitAdam"
    if config.zero_optimization.stage == 3:
        remedy = "Compressed differences of weights are for ranks that all have them."
        raise invalid_value(f"zero_optimization.stage with {name}", 3, (0, 1, 2), remedy)
    for key, allowed in divides.items():
        if getattr(config, key) != allowed:
            raise invalid_value(
                f"{key} with {name}", getattr(config, key), [allowed], "Momenta are exchanged as a mean."
            )
    return 1


def offload_options(config: Config) -> dict[str, Any]:
    """`offload_optimizer` as arguments of a TwinOptimizer: its keys by name, those of `Tuning` in one."""
    offload = config.zero_optimization.offload_optimizer
    if offload is None:
        return {"ratio": 0.0, "early": "auto"}
    options = {name: getattr(offload, name) for name in offload.own_keys()}
    tuning = {field.name: options.pop(field.name) for field in fields(Tuning) if field.name in options}
    options["tuning"] = Tuning(**{name: value for name, value in tuning.items() if value is not None})
    options["offload_params"] = offloads_params(config)
    if offload.device == "none":
        options["ratio"] = 0.0
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
    """A TwinOptimizer keeps what it was built with; a config that says otherwise is refused."""
    if given.model is not module:
        raise invalid_value("optimizer", "a TwinOptimizer over another model", "one built over the model given here")
    max_norm = given.max_grad_norm or 0.0
    if "gradient_clipping" in config.model_fields_set and config.gradient_clipping != max_norm:
        remedy = "The TwinOptimizer that is given was built with this max_grad_norm."
        raise invalid_value("gradient_clipping", config.gradient_clipping, [max_norm], remedy)
    if offloads_params(config) != given.offloads_params:
        remedy = f"The TwinOptimizer that is given was built with offload_params={given.offloads_params}."
        raise invalid_value(
            "zero_optimization.offload_param.device", "cpu" if offloads_params(config) else "none", "the same", remedy
        )
    stage, own = config.zero_optimization.stage, given.zero.stage if given.zero is not None else 0
    if ranks is not None and ranks.world_size > 1 and stage != own:
        remedy = "The TwinOptimizer that is given was built with this stage."
        raise invalid_value("zero_optimization.stage", stage, [own], remedy)
    offload = config.zero_optimization.offload_optimizer
    said = sorted(offload.model_fields_set.intersection(offload.own_keys())) if offload is not None else []
    keys = [f"zero_optimization.offload_optimizer.{name}" for name in said] + ["fp16.enabled"] * config.fp16.enabled
    if keys:
        remedy = "A TwinOptimizer that is given has its own states, tuning and loss scale."
        raise invalid_value(keys[0], "given", "nothing", remedy)
    given.set_accumulation_steps(batch.accumulation_steps)
    return given


def _try_out(kind: Any, options: Mapping[str, Any]) -> None:
    """torch checks little of what an optimizer is given; a step of one that nobody uses, before a thread takes one."""
    param = nn.Parameter(torch.zeros(2, 2, device="cpu"))
    param.grad = torch.zeros_like(param)
    with suppress(AssertionError, RuntimeError):  # what it says of devices and gradients is for the real one to say
        kind([param], **options).step()


@contextmanager
def naming(key: str) -> Iterator[None]:
    """What only shows when a part is built is as much the config's mistake as what its types tell: name the key."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        if isinstance(error, ValueError) and f"{key.split('.')[0]}." in str(error):
            raise
        raise ValueError(f"{key}: {error}") from error
