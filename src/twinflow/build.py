"""initialize(): a config and a model in, an engine out. The one file that knows all the parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.activations import Handle, checkpoint_layers
from twinflow.attention.patch import apply_section
from twinflow.config import (
    Batch,
    Config,
    compression_choice,
    load_config,
    notes,
    optimizer_choice,
    resolve_batch,
)
from twinflow.engine import Engine, EngineSettings, ResumableLoader
from twinflow.engine.reports import LOGGER, Profiler, Reports
from twinflow.errors import bad_value
from twinflow.launch.environment import RankEnvironment, init_distributed, joined
from twinflow.monitor.flops import FlopsProfile, profile
from twinflow.monitor.timers import Timers
from twinflow.monitor.writers import CsvWriter, Fanout, TensorBoardWriter, WandbWriter
from twinflow.offload.blocks import find_blocks
from twinflow.offload.materialize import build as build_model
from twinflow.offload.settings import Tuning
from twinflow.optim.loss_scale import LossScale, dynamic, static
from twinflow.optim.schedules import build_scheduler
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_build import to_host
from twinflow.rules import RULES
from twinflow.zero import Zero
from twinflow.zero.compression import Compression
from twinflow.zero.partitioned import partition, regroup
from twinflow.zero.start import meet, own_host_bytes, start_watch

Model = nn.Module | Callable[[], nn.Module]
_TIMEOUT_S = 1800.0  # for one rank to wait for another: long after the watch has seen that it hangs
_OWN_KEYS = {"states", "delayed_update", "delayed_update_start", "host_threads"}
_OWN_KEYS |= {"hold", "sums", "shadow_bytes", "bucket_numel", "ratio", "placement"}


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
    """An engine around `model`, with DeepSpeed's arguments: engine, optimizer, data loader, scheduler.

    `model` may also be a function that makes one, or lie on the meta device: it is then built block by block where it
    trains. Optimizer and scheduler come from the config, or are given: an instance, or a function that makes one.
    """
    _log_to_stdout()
    if model is None:
        raise bad_value("model", None, "an nn.Module, or a function that makes one")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise bad_value(name, type(value).__name__, "None", "Tensor and pipeline parallelism are not built yet.")
    source = _config_source(args, config, config_params)
    parsed = load_config(source)
    for note in [*notes(parsed), *_overruled(parsed, optimizer, lr_scheduler)]:
        LOGGER.info(f"config: {note}")
    ranks = init_distributed(timeout_s=_TIMEOUT_S) if dist_init_required is not False else joined()
    batch = resolve_batch(parsed, ranks.world_size)
    watch = start_watch(ranks, parsed.hang_timeout_s)
    twin = None
    try:
        module = place(model, parsed)
        if parsed.sparse_attention is not None:
            apply_section(module, parsed.sparse_attention.given())
        meet(ranks, module, parsed.model_dump_json(indent=1))
        if not parks(parsed) and _is_to_partition(parsed, ranks, optimizer):
            replaced = partition(module, make_zero(parsed, ranks.world_size))
            model_parameters = None if model_parameters is None else regroup(model_parameters, replaced)
        twin = make_optimizer(parsed, batch, module, optimizer, model_parameters, ranks)
        scheduler = _make_scheduler(parsed, twin, optimizer, lr_scheduler)
        settings = _engine_settings(parsed, batch, source, ranks)
        engine = Engine(module, twin, scheduler, None, settings, _make_reports(parsed, ranks.rank))
        engine.activations, engine.watch = checkpoint_activations(parsed, module, twin), watch
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    except BaseException:
        if twin is not None and twin is not optimizer:
            twin.close()  # else the model would still have an optimizer, and no other could be built over it
        if watch is not None:
            watch.close()
        raise
    return engine, twin, engine.training_dataloader, scheduler


def _is_to_partition(config: Config, ranks: RankEnvironment, optimizer: Any) -> bool:
    """Whether this is where ranks part with what is not theirs: a TwinOptimizer that is given has its model so."""
    is_asked_for = ranks.world_size > 1 and config.zero_optimization.stage == 3
    return is_asked_for and not isinstance(optimizer, TwinOptimizer)


def _engine_settings(config: Config, batch: Batch, source: Any, ranks: RankEnvironment) -> EngineSettings:
    return EngineSettings(
        ranks=ranks,
        stage=config.zero_optimization.stage,
        micro_batch_size=batch.micro_batch_size,
        autocast=getattr(torch, str(config.torch_autocast.dtype)) if config.torch_autocast.enabled else None,
        input_dtype=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        keep_last=config.checkpoint.keep_last,
        background_bytes=_background_bytes(config),
        drop_last=config.dataloader_drop_last,
        config=dict(source) if isinstance(source, Mapping) else {"file": str(source)},
    )


def _background_bytes(config: Config) -> int | None:
    """Host memory for checkpoints in the background; None where they are not."""
    if not config.checkpoint.background:
        return None
    given = config.checkpoint.background_bytes
    return own_host_bytes() // 4 if given is None else given


def _overruled(config: Config, optimizer: Any, lr_scheduler: Any) -> Iterator[str]:
    """Sections that lose to what was given beside the config, as with DeepSpeed."""
    for name, given in {"optimizer": optimizer, "scheduler": lr_scheduler}.items():
        if given is not None and getattr(config, name) is not None:
            yield f"{name}: no effect here, because one was given to initialize()"


def add_config_arguments(parser: Any) -> Any:
    """Give an argparse parser the options that scripts for `initialize(args=...)` have."""
    group = parser.add_argument_group("twinflow", "Configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Train with the engine.")
    group.add_argument("--deepspeed_config", default=None, type=str, help="The JSON config file.")
    return parser


def _config_source(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | Path:
    """The one place where the config is given."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise bad_value("the config", f"given as {', '.join(found)}" if found else None, "one of " + ", ".join(given))
    value: Mapping[str, Any] | str | Path = next(iter(found.values()))
    return value


def place(model: Model, config: Config) -> nn.Module:
    """The model in the precision of the config, on the GPU where there is one."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    is_for_host = parks(config)
    if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
        return build_model(model, device, dtype, each=to_host if is_for_host else None)
    return model.to(dtype=dtype) if is_for_host else model.to(device=device, dtype=dtype)


def parks(config: Config) -> bool:
    """Whether weights live on the host; what that does not go with is refused."""
    zero, name = config.zero_optimization, "zero_optimization.offload_param.device"
    if zero.offload_param is None or zero.offload_param.device != "cpu":
        return False
    if zero.stage != 3:
        raise bad_value(f"zero_optimization.stage with {name}", zero.stage, [3], "Or leave offload_param out.")
    optimizer = zero.offload_optimizer
    if optimizer is None or optimizer.device != "cpu":
        given = optimizer.device if optimizer is not None else None
        remedy = "Weights are fetched from the optimizer's state, which must be on the host as well."
        raise bad_value(f"zero_optimization.offload_optimizer.device with {name}", given, ["cpu"], remedy)
    for key, allowed in (("ratio", 1.0), ("delayed_update", False)):
        if getattr(optimizer, key) != allowed:
            remedy = "Weights are fetched from the optimizer's state on the host, as it is."
            raise bad_value(
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
) -> TwinOptimizer | None:
    """The optimizer of the config, or around the one that was given; None where neither names one."""
    if isinstance(given, TwinOptimizer):
        return _as_given(given, config, batch, module, ranks)
    rule: Any = given
    options: dict[str, Any] = {}
    if given is None:
        if config.optimizer is None:
            if parks(config):
                remedy = "Weights live in its state: name one, or leave offload_param out."
                raise bad_value("optimizer with zero_optimization.offload_param.device", None, "an optimizer", remedy)
            return None
        name, options = optimizer_choice(config)
        rule = name if name in RULES else getattr(torch.optim, name)
    is_torch = given is None and not isinstance(rule, str)
    groups = None if isinstance(given, Optimizer) or model_parameters is None else list(model_parameters)
    offload = config.zero_optimization.offload_optimizer
    own = _own_options(config)
    # A scheduler built over the user's optimizer has put a wrapper around its step, which is not the optimizer's.
    wrapped = vars(given).pop("step", None) if isinstance(given, Optimizer) else None
    build = partial(
        TwinOptimizer,
        module,
        rule,
        param_groups=groups,
        states=offload.states if offload is not None else "fp32",
        max_grad_norm=config.gradient_clipping or None,
        skip_nonfinite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        loss_scale=_loss_scale(config),
        accumulation_steps=batch.accumulation_steps,
        early=True,
        zero=make_zero(config, ranks.world_size) if ranks is not None and ranks.world_size > 1 else None,
        **own,
        **options,
    )
    with _naming(f"optimizer.type {rule.__name__} with optimizer.params {options}") if is_torch else nullcontext():
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


def make_zero(config: Config, world_size: int) -> Zero:
    """How ranks share the work."""
    divides = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    for key, allowed in divides.items():
        if config.zero_optimization.stage == 3 and not parks(config) and getattr(config, key) != allowed:
            remedy = "fully_shard divides gradients itself, in part before and in part after their sum."
            raise bad_value(f"{key} with zero_optimization.stage 3", getattr(config, key), [allowed], remedy)
    stage, compression = config.zero_optimization.stage, compression_choice(config)
    if compression is not None:
        stage = _stage_with_compression(config, divides)
    dtype = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Zero(
        stage,
        dtype[config.communication_data_type],
        config.gradient_allreduce_op,
        float(world_size) if config.prescale_gradients else config.gradient_predivide_factor,
        timedelta(seconds=_TIMEOUT_S),
        parks(config),
        Compression(**compression) if compression is not None else None,
    )


def _stage_with_compression(config: Config, divides: Mapping[str, Any]) -> int:
    """Parts of buckets have owners, whatever stage below 3 was named."""
    name = "optimizer.type OneBitAdam"
    if config.zero_optimization.stage == 3:
        remedy = "Compressed differences of weights are for ranks that all have them."
        raise bad_value(f"zero_optimization.stage with {name}", 3, (0, 1, 2), remedy)
    for key, allowed in divides.items():
        if getattr(config, key) != allowed:
            raise bad_value(f"{key} with {name}", getattr(config, key), [allowed], "Momenta are exchanged as a mean.")
    return 1


def _own_options(config: Config) -> dict[str, Any]:
    """What `offload_optimizer` says beyond DeepSpeed's keys."""
    offload = config.zero_optimization.offload_optimizer
    if offload is None:
        return {"ratio": 0.0}
    tuning: dict[str, Any] = {"hold": offload.hold, "sums": offload.sums, "shadow_bytes": offload.shadow_bytes}
    if offload.bucket_numel is not None:
        tuning["bucket_numel"] = offload.bucket_numel
    return {
        "ratio": 0.0 if offload.device == "none" else offload.ratio,
        "placement": offload.placement,
        "delayed_update": offload.delayed_update,
        "delayed_update_start": offload.delayed_update_start,
        "host_threads": offload.host_threads,
        "offload_params": parks(config),
        "tuning": Tuning(**tuning),
    }


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
        raise bad_value("optimizer", "a TwinOptimizer over another model", "one built over the model given here")
    max_norm = given.max_grad_norm or 0.0
    if "gradient_clipping" in config.model_fields_set and config.gradient_clipping != max_norm:
        remedy = "The TwinOptimizer that is given was built with this max_grad_norm."
        raise bad_value("gradient_clipping", config.gradient_clipping, [max_norm], remedy)
    if parks(config) != given.offloads_params:
        remedy = f"The TwinOptimizer that is given was built with offload_params={given.offloads_params}."
        raise bad_value(
            "zero_optimization.offload_param.device", "cpu" if parks(config) else "none", "the same", remedy
        )
    stage, own = config.zero_optimization.stage, given.zero.stage if given.zero is not None else 0
    if ranks is not None and ranks.world_size > 1 and stage != own:
        remedy = "The TwinOptimizer that is given was built with this stage."
        raise bad_value("zero_optimization.stage", stage, [own], remedy)
    offload = config.zero_optimization.offload_optimizer
    said = sorted(_OWN_KEYS & offload.model_fields_set) if offload is not None else []
    keys = [f"zero_optimization.offload_optimizer.{name}" for name in said] + ["fp16.enabled"] * config.fp16.enabled
    if keys:
        remedy = "A TwinOptimizer that is given has its own states, tuning and loss scale."
        raise bad_value(keys[0], "given", "nothing", remedy)
    given.set_accumulation_steps(batch.accumulation_steps)
    return given


def checkpoint_activations(config: Config, module: nn.Module, twin: TwinOptimizer | None) -> Handle | None:
    """The config's `activation_checkpointing` put on the model; None where it asks for none."""
    options = config.activation_checkpointing
    if not options.is_asked_for:
        return None
    if options.partition_activations:
        LOGGER.info("config: activation_checkpointing.partition_activations: there are no tensor ranks to share with")
    layers: Any = options.layers
    if layers is None:
        layers = [block.module for block in find_blocks(module)]
        if not layers:
            remedy = "Name the classes of its layers."
            raise bad_value("activation_checkpointing.layers", None, "null for a model with ModuleLists", remedy)
    trace = twin.trace if twin is not None else None  # copies are in the same timeline
    return checkpoint_layers(module, layers, offload=options.cpu_checkpointing, trace=trace)


def _make_scheduler(config: Config, twin: TwinOptimizer | None, optimizer: Any, given: Any) -> Any:
    if given is not None and not callable(given):
        return given
    if twin is None:
        return None
    if given is not None:
        return given(optimizer if isinstance(optimizer, Optimizer) else twin)
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.params, twin)


def _try_out(kind: Any, options: Mapping[str, Any]) -> None:
    """torch checks little of what an optimizer is given; a step of one that nobody uses, before a thread takes one."""
    param = nn.Parameter(torch.zeros(2, 2, device="cpu"))
    param.grad = torch.zeros_like(param)
    with suppress(AssertionError, RuntimeError):  # what it says of devices and gradients is for the real one to say
        kind([param], **options).step()


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """What only shows when a part is built is as much the config's mistake as what its types tell: name the key."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        if isinstance(error, ValueError) and f"{key.split('.')[0]}." in str(error):
            raise
        raise ValueError(f"{key}: {error}") from error


def _make_reports(config: Config, rank: int) -> Reports:
    """Log lines, monitors, timers and the profiler, as far as the config asks for them; the first rank's speak for
    all."""
    if rank > 0:
        return Reports()
    writers: list[Any] = []
    if config.csv_monitor.enabled:
        with _naming("csv_monitor.output_path"):
            writers.append(CsvWriter(config.csv_monitor.output_path, config.csv_monitor.job_name))
    if config.tensorboard.enabled:
        with _naming("tensorboard.output_path"):
            writers.append(TensorBoardWriter(config.tensorboard.output_path, config.tensorboard.job_name))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb.project, config.wandb.group, config.wandb.team))
    options = config.flops_profiler
    profiler = None
    if options.enabled:
        if options.output_file:
            with _naming("flops_profiler.output_file"):
                Path(options.output_file).open("a").close()  # now, not after the step that is profiled

        def show(done: FlopsProfile) -> None:
            shape = (options.module_depth, options.top_modules, options.detailed)
            if options.output_file:
                done.report.write(Path(options.output_file), *shape)
            else:
                LOGGER.info(done.text(*shape))

        profiler = Profiler(options.profile_step, profile, show)
    return Reports(
        config.steps_per_print,
        Fanout(writers) if writers else None,
        Timers() if config.wall_clock_breakdown else None,
        profiler,
    )


def _log_to_stdout() -> None:
    """Log lines are seen without any set-up, unless the program has set up logging itself."""
    if LOGGER.handlers or logging.getLogger().handlers:
        return
    handler = _Stdout()
    handler.setFormatter(logging.Formatter("%(asctime)s twinflow %(message)s", "%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class _Stdout(logging.StreamHandler[Any]):
    """Writes to sys.stdout as it is at that moment: a test or a notebook may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """Where lines go."""
        return sys.stdout
