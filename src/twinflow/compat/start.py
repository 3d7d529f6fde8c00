"""`deepspeed.initialize`, the set-up of the process group and the command line options of a script."""

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
from twinflow.errors import incompatible, invalid_value
from twinflow.launch.environment import init_distributed as join_group

_TIMEOUT_S = 1800.0
_AUTO_PARALLEL = "tensor_parallel.autotp_size"


def initialize(*args: Any, **kwargs: Any) -> tuple[Engine, Any, Any, Any]:
    """Creates a process group and calls twinflow.initialize. An optimizer with one of DeepSpeed's names becomes the
    twinflow optimizer with the same update rule.

    The arguments are those of `deepspeed.initialize`, positional or by name.
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
            # A scheduler that was built with the DeepSpeed optimizer writes to its param_groups.
            optimizer.param_groups = engine.optimizer.param_groups
            vars(optimizer)["_opt_called"] = True
    return found


def _by_name(optimizer: Named, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `build.initialize` with the same update rule and options in a config and parameter groups."""
    sources = ("config", "config_params")
    name = next((name for name in sources if given.get(name) is not None), None)
    source = given[name] if name is not None else getattr(given.get("args"), "deepspeed_config", None)
    if source is None:
        remedy = "Give it as config, config_params or args.deepspeed_config."
        raise invalid_value("config", None, "a dict or the path of a JSON file", remedy)
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
    """Creates torch's process group from the launcher's variables. Without a launcher, the group has one process.

    MPI launchers are recognised by their variables, without mpi4py. `distributed_port` has no effect: the launcher sets
    the address of rank 0.
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
            raise incompatible(f"world_size={world_size}", "a process without a launcher", "it has one rank", remedy)
        dist.init_process_group(backend, store=HashStore(), timeout=timeout, rank=0, world_size=1)


def add_config_arguments(parser: Any) -> Any:
    """Adds DeepSpeed's options `--deepspeed` and `--deepspeed_config` to an argparse parser."""
    return build.add_config_arguments(parser)


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **kwargs: Any) -> Any:
    """Returns the model unchanged: `initialize` splits it, as `tensor_parallel.autotp_size` of the config says."""
    section = read_source(config)[1].get("tensor_parallel", {}) if config is not None else {}
    if kwargs:
        name = sorted(kwargs)[0]
        raise invalid_value(name, kwargs[name], "left out", "initialize() splits the model, as the config says.")
    if section.get("autotp_size") != tp_size:
        remedy = "Set the same size in the config: initialize() splits the model."
        raise invalid_value(_AUTO_PARALLEL, section.get("autotp_size"), [tp_size], remedy)
    return model
