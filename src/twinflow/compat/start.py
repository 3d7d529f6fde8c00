"""`deepspeed.initialize` and what comes before it: the process group, and the options of a script."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from twinflow import build
from twinflow.compat.optimizers import Named
from twinflow.compat.owners import OWNERS
from twinflow.config.read import read_source
from twinflow.engine import Engine
from twinflow.errors import invalid_value
from twinflow.launch.environment import init_distributed as join_group

_TIMEOUT_S = 1800.0
_AUTO_PARALLEL = "tensor_parallel.autotp_size"


def initialize(*args: Any, **kwargs: Any) -> tuple[Engine, Any, Any, Any]:
    """twinflow.initialize, after making a process group; an optimizer with one of DeepSpeed's names becomes our own.

    Takes what `deepspeed.initialize` takes, by place or by name.
    """
    given = inspect.signature(build.initialize).bind(*args, **kwargs).arguments
    if given.get("dist_init_required") is not False:
        init_distributed(distributed_port=given.get("distributed_port", 29500))
    optimizer = given.get("optimizer")
    if isinstance(optimizer, Named) and optimizer.rule_name is not None:
        given |= _by_name(optimizer, given)
    found = build.initialize(**given)
    engine = found[0]
    if engine.optimizer is not None:
        OWNERS.add(engine.optimizer)
        if isinstance(optimizer, Named):
            optimizer.param_groups = engine.optimizer.param_groups  # a scheduler that was built over it writes there
            vars(optimizer)["_opt_called"] = True
    return found


def _by_name(optimizer: Named, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ask for the same update rule with the same options, as a config and parameter groups do."""
    sources = ("config", "config_params")
    name = next((name for name in sources if given.get(name) is not None), None)
    source = given[name] if name is not None else getattr(given.get("args"), "deepspeed_config", None)
    if source is None:
        raise invalid_value("the config", None, "config, config_params or args.deepspeed_config")
    section = {"type": optimizer.rule_name, "params": optimizer.options()}
    changed: dict[str, Any] = dict.fromkeys(("args", *sources), None)
    changed["config"] = {**read_source(source)[1], "optimizer": section}
    return {**changed, "optimizer": None, "model_parameters": optimizer.groups()}


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
    """torch's process group as the launcher says; a process without a launcher gets a group of one.

    MPI is found by its variables, without mpi4py; where rank 0 listens is the launcher's to say.
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
            remedy = "Start the script with `twinflow launch` or torchrun, or give init_method."
            raise invalid_value("world_size without a launcher", world_size, [-1, 1], remedy)
        dist.init_process_group(backend, store=HashStore(), timeout=timeout, rank=0, world_size=1)


def add_config_arguments(parser: Any) -> Any:
    """Give an argparse parser DeepSpeed's options: `--deepspeed` and `--deepspeed_config`."""
    return build.add_config_arguments(parser)


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> Any:
    """The model as it is: `initialize` splits it, where the config says so."""
    section = read_source(config)[1].get("tensor_parallel", {}) if config is not None else {}
    if section.get("autotp_size") != tp_size or kwargs:
        given = sorted(kwargs)[0] if kwargs else _AUTO_PARALLEL
        value = kwargs[given] if kwargs else section.get("autotp_size")
        raise invalid_value(given, value, f"{_AUTO_PARALLEL} {tp_size} in the config", "initialize() splits the model.")
    return model
