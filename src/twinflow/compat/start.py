# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.initialize` and the config as an object, `deepspeed.comm`, and the command line options of a script."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from twinflow import build
from twinflow.compat.groups import note_engine
from twinflow.compat.optimizers import Named, hand_over, lamb_coeffs, load_state, state_of
from twinflow.config import load_config, resolve_batch
from twinflow.config.load import read_source
from twinflow.config.schema import ZeroOptimization
from twinflow.engine import Engine
from twinflow.engine.loader import ResumableLoader
from twinflow.errors import incompatible, invalid_value
from twinflow.launch.environment import init_distributed as join_group
from twinflow.launch.environment import joined
from twinflow.optim.equivalent import groups_for, rule_for, section_for
from twinflow.optim.twin import TwinOptimizer

DeepSpeedConfigError = ValueError
_TIMEOUT_S = 1800.0
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(seconds=_TIMEOUT_S)
_AUTO_PARALLEL = "tensor_parallel.autotp_size"


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """The rank of this process in a group. 0 without a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of processes in a group. 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """The rank of this process on its machine."""
    return joined().local_rank


def get_world_group() -> Any:
    """The group of all processes."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of the process that has the rank `group_rank` in `group`."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def has_collective() -> bool:
    """True: the supported versions of torch have the collectives that DeepSpeed looks for."""
    return True


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO. Each stage has the name of what it partitions in addition to the previous stage."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Devices to which DeepSpeed can offload."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """States that `engine.offload_states()` can be asked to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedConfig:
    """A checked config with its batch sizes resolved. Other attributes are those of twinflow's `Config`."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        build.check_groups(mpu, mesh_device=mesh_device)
        self._param_dict: Mapping[str, Any] = read_source(config)[1]
        self._config = parsed = load_config(config)
        batch = resolve_batch(parsed, get_world_size())
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.accumulation_steps
        self.zero_config = parsed.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = parsed.fp16
        self.bfloat16_config = parsed.bf16
        self.optimizer_name = parsed.optimizer.type.lower() if parsed.optimizer is not None else None
        self.optimizer_params = dict(parsed.optimizer.params) if parsed.optimizer is not None else None
        self.scheduler_name = parsed.scheduler.type if parsed.scheduler is not None else None
        self.scheduler_params = dict(parsed.scheduler.params) if parsed.scheduler is not None else None
        self.activation_checkpointing_config = parsed.activation_checkpointing
        self.flops_profiler_config = parsed.flops_profiler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)

    def print_user_config(self) -> None:
        """Prints the config with all defaults filled in."""
        print(self._config.model_dump_json(indent=2))

    print = print_user_config


def get_zero_config(param_dict: Mapping[str, Any]) -> ZeroOptimization:
    """The section `zero_optimization` of a whole config, checked."""
    return load_config({"zero_optimization": param_dict.get("zero_optimization", {})}).zero_optimization


def initialize(*args: Any, **kwargs: Any) -> tuple[Engine, Any, Any, Any]:
    """Creates a process group if needed and calls twinflow.initialize. An optimizer with one of DeepSpeed's names is
    replaced by the twinflow optimizer with the same update rule.

    The arguments are those of `deepspeed.initialize`, positional or by name. An optimizer that the script passes is
    returned itself in fp32 without ZeRO, as DeepSpeed does, and calls of its methods go to the engine's optimizer.
    Otherwise the engine's optimizer is returned. An optimizer that an engine uses already keeps its state.
    """
    given = inspect.signature(build.initialize).bind(*args, **kwargs).arguments
    if given.get("dist_init_required") is not False:
        init_distributed(distributed_port=given.get("distributed_port", 29500))
    optimizer = given.get("optimizer")
    state = state_of(optimizer) if isinstance(optimizer, Optimizer) else None
    if isinstance(optimizer, Optimizer):
        given |= _as_rule(optimizer, given)
    engine, twin, loader, scheduler = build.initialize(**given)
    engine.save_weights_as("pytorch_model.bin")
    note_engine(engine)
    if isinstance(loader, ResumableLoader):
        loader.seed = 0  # as the DistributedSampler of DeepSpeed's loader has, whatever torch's seed is
    if isinstance(scheduler, LRScheduler):
        _settle_before_reads(scheduler, engine)
    if twin is not None and scheduler is not None:
        twin.param_groups = _SettledGroups(twin.param_groups, engine)
    if isinstance(twin, TwinOptimizer) and twin.rule_name.endswith((".Lamb", ".FusedLamb")):
        vars(twin)["get_lamb_coeffs"] = partial(lamb_coeffs, weakref.ref(twin))
    if twin is None or twin is optimizer or not isinstance(optimizer, Optimizer):
        return engine, twin, loader, scheduler
    engine.set_client_optimizer(optimizer)
    hand_over(optimizer, twin)
    if state is not None:
        load_state(twin, state)
    is_wrapped = engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()
    return engine, twin if is_wrapped else optimizer, loader, scheduler


def _settle_before_reads(scheduler: LRScheduler, engine: Engine) -> None:
    """Makes a scheduler show the learning rate of the next step, as after DeepSpeed's `step()`.

    The engine advances the scheduler when it knows whether the last step was applied. The scheduler gets a subclass of
    its class, because attributes of a scheduler are part of its state dict.
    """
    kind: Any = type(scheduler)
    found = weakref.ref(engine)

    def settle() -> None:
        there = found()
        if there is not None:
            there.settle()

    def get_last_lr(self: Any) -> Any:
        settle()
        return kind.get_last_lr(self)

    def state_dict(self: Any) -> Any:
        settle()
        return kind.state_dict(self)

    methods = {"get_last_lr": get_last_lr, "state_dict": state_dict, "__module__": kind.__module__}
    scheduler.__class__ = type(kind.__name__, (kind,), methods)


class _SettledGroups(list[dict[str, Any]]):
    """Param groups whose learning rates are those of the next step, as after DeepSpeed's `step()`: a read waits until
    the engine knows whether the last step was applied.
    """

    def __init__(self, groups: list[dict[str, Any]], engine: Engine) -> None:
        super().__init__(groups)
        self._engine = weakref.ref(engine)

    def _settle(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.settle()

    def __getitem__(self, index: Any) -> Any:
        self._settle()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._settle()
        return super().__iter__()


def _as_rule(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces an optimizer in the arguments of `build.initialize` by a config with its rule, and parameter groups.

    This concerns those with DeepSpeed's names, and, with stage 3 or expert ranks, those of torch that have a rule: a
    rank then has only a part of a parameter. Empty for other optimizers.
    """
    sources = ("config", "config_params")
    name = next((name for name in sources if given.get(name) is not None), None)
    source = given[name] if name is not None else getattr(given.get("args"), "deepspeed_config", None)
    section: dict[str, object]
    if isinstance(optimizer, Named) and optimizer.rule_name is not None:
        section, groups = {"type": optimizer.rule_name, "params": optimizer.options()}, optimizer.groups()
        if source is None:
            remedy = "Pass the config as config=, config_params= or args.deepspeed_config."
            raise invalid_value("config", None, "a dict or the path of a JSON file", remedy)
    else:
        rule = rule_for(optimizer)
        if rule is None or source is None or get_world_size() == 1 or not _divides_weights(source):
            return {}
        section, groups = section_for(optimizer, rule), groups_for(optimizer)
    changed: dict[str, Any] = dict.fromkeys(("args", *sources), None)
    changed["config"] = {**read_source(source)[1], "optimizer": section}
    return {**changed, "optimizer": None, "model_parameters": groups}


def _divides_weights(source: Any) -> bool:
    """Whether a rank has only a part of some weights: rows, or experts."""
    config = read_source(source)[1]
    section = config.get("zero_optimization", {})
    has_experts = config.get("expert_parallel_size", 1) not in (None, 1)
    return has_experts or (isinstance(section, Mapping) and section.get("stage") == 3)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = timedelta(seconds=_TIMEOUT_S),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates torch's process group from the launcher's variables. Without a launcher, the group has one process.

    An existing group is kept. MPI launchers are recognised by their variables, without mpi4py. `init_method` is that of
    torch and replaces these variables. `distributed_port` has no effect.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if init_method is not None:
        dist.init_process_group(backend, init_method, timeout, rank=rank, world_size=world_size)
        return
    join_group(dist_backend or "auto", timeout.total_seconds())
    if not dist.is_initialized():
        if world_size > 1:
            remedy = "Start the script with `twinflow launch` or torchrun, or pass init_method."
            alone = "a process without a launcher"
            raise incompatible(f"world_size={world_size}", alone, "such a process is the only rank", remedy)
        dist.init_process_group(backend, store=HashStore(), timeout=timeout, rank=0, world_size=1)


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> Any:
    """Returns the model unchanged: `initialize` splits it, as `tensor_parallel.autotp_size` of the config says."""
    section = read_source(config)[1].get("tensor_parallel", {}) if config is not None else {}
    if kwargs:
        name = sorted(kwargs)[0]
        raise ValueError(
            f"tp_model_init() does not support the argument {name}. Leave it out: initialize() splits the model, as "
            "the config says."
        )
    if section.get("autotp_size") != tp_size:
        remedy = "Set this size in the config, because initialize() splits the model."
        raise invalid_value(_AUTO_PARALLEL, section.get("autotp_size"), f"{tp_size}, the given tp_size", remedy)
    return model
