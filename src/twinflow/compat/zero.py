# SPDX-License-Identifier: Apache-2.0
"""Functions for models that are partitioned over ranks: `deepspeed.zero`, `deepspeed.utils.safe_*`,
`deepspeed.utils.zero_to_fp32` and the memory estimators.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.build import check_groups
from twinflow.build_optimizer import TIMEOUT_S
from twinflow.checkpoint import exporting
from twinflow.checkpoint.exporting import export_checkpoint, find_checkpoint
from twinflow.checkpoint.manifest import MANIFEST
from twinflow.config.load import read_source
from twinflow.conflicts import conflict
from twinflow.dist.group import world_group
from twinflow.dist.meeting import Meeting
from twinflow.errors import invalid_value
from twinflow.launch.environment import init_distributed, rank_environment
from twinflow.offload.blocks import mark_external
from twinflow.optim.param_state import (
    MASTER,
    find_owner,
    read_local,
    read_local_gradient,
    read_whole,
    read_whole_gradient,
    write_local,
    write_local_gradient,
    write_whole,
    write_whole_gradient,
)
from twinflow.planner.formats import WEIGHT_BYTES, state_bytes
from twinflow.zero.building import Site, kept_whole, site, take_over
from twinflow.zero.gathered import gathered, home_of, is_gathered_with_root

_SENT = "the values of one rank are sent to all ranks"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_WIDTH = WEIGHT_BYTES["bf16"]


class ZeroParamStatus(Enum):
    """DeepSpeed's marks for partitioned parameters. Parameters have no such marks here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """DeepSpeed's kinds of parameters. Parameters have no such marks here."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def is_zero_param(parameter: Any) -> bool:
    """Whether ranks have parts of a parameter, or its weights are on the host."""
    return isinstance(parameter, Tensor) and home_of(parameter) is not None


class Init(AbstractContextManager[None]):
    """A context in which models are built in parts on several ranks (zero/building.py): no rank has all weights.

    The values are those of the first rank's script without the context. `initialize` with ZeRO stage 3 takes the parts.
    In one process, and with a config that has another stage or pipeline or tensor ranks, only `dtype` has an effect:
    the dtype of the weights that are built. With `enabled=False` nothing has an effect. `module`: a model that exists,
    which is divided at once. Weights stay on the device where they are built, usually the host, until `initialize`, so
    `remote_device`, `pin_memory` and `mem_efficient_linear` have no effect.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            remedy = 'Use "cpu", because twinflow does not offload to NVMe.'
            raise invalid_value("remote_device", remote_device, (None, "none", "cpu"), remedy)
        if dtype is not None and not dtype.is_floating_point:
            raise invalid_value("dtype", dtype, "a dtype of floating-point numbers, or None")
        self._dtype = dtype if enabled else None
        self._dtypes: list[torch.dtype] = []  # default dtypes before the contexts that are open
        check_groups(mpu, data_parallel_group=data_parallel_group)
        self._is_on = enabled and _divides_weights(config_dict_or_path if config is None else config)
        self._open: list[AbstractContextManager[None]] = []  # the same object may be entered several times
        here = _site() if module is not None and self._is_on else None
        if module is not None and here is not None:
            take_over(module, here)

    def __enter__(self) -> None:
        here = _site() if self._is_on else None
        self._open.append(here.building() if here is not None else nullcontext())
        self._open[-1].__enter__()
        self._dtypes.append(torch.get_default_dtype())
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._dtypes.pop())
        self._open.pop().__exit__(*error)


def _divides_weights(config: Any) -> bool:
    """Whether a config, as far as it is known here, divides weights over all ranks. It may contain "auto"."""
    if config is None:
        return True
    found = read_source(getattr(config, "_param_dict", config))[1]
    axes = (found.get("tensor_parallel", {}).get("autotp_size"), found.get("pipeline", {}).get("stages"))
    return found.get("zero_optimization", {}).get("stage", 0) == 3 and all(one in (None, 0, 1) for one in axes)


def _site() -> Site | None:
    """The ranks that build a model. Creates torch's process group if a launcher has started several processes."""
    if not dist.is_initialized():
        started = rank_environment(os.environ)
        if started is not None and started.world_size > 1:
            init_distributed(timeout_s=TIMEOUT_S)
    return site()


@contextmanager
def GatheredParameters(
    params: Tensor | nn.Module | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which parameters are whole on all ranks, and all pending updates are in them.

    With `modifier_rank`, the values that this rank writes go to all ranks at the end, and into the fp32 masters. All
    ranks must enter and leave the context. Raises RuntimeError at the end if values of partitioned weights were written
    that are not kept: with `modifier_rank=None`, or on another rank only. If an exception ends the context, writes to
    partitioned weights are dropped. Training steps inside of the context raise RuntimeError.
    """
    listed = params.parameters() if isinstance(params, nn.Module) else params
    listed = ([listed] if isinstance(listed, Tensor) else list(listed)) if enabled else []
    with kept_whole(listed), _gathered(listed, modifier_rank):
        yield


@contextmanager
def _gathered(listed: Sequence[Tensor], modifier_rank: int | None) -> Iterator[None]:
    shared = [param for param in listed if home_of(param) is not None]
    whole = [param for param in listed if home_of(param) is None]  # every rank has these
    for param in whole:
        found = find_owner(param)
        if found is not None and found[0].runtime.steps.job is None:
            found[0].wait()
    with gathered(shared, modifier_rank):
        yield
    if modifier_rank is None or not whole:
        return
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    if has_ranks:
        _everyone().meet(f"GatheredParameters() of {len(whole)} parameters, modifier_rank={modifier_rank}", _SENT)
    for param in whole:
        if has_ranks:
            world_group().broadcast(param.data, modifier_rank)
        # torch does not count writes to `.data`, so the version is increased here. The optimizer then compares the
        # weight with its master. If the weight is not the rounded master, it is copied to the master.
        torch.autograd.graph.increment_version(param)


@cache
def _everyone() -> Meeting:
    return Meeting(world_group())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that `module` uses a parameter of another module. Call it before `initialize()`.

    With ZeRO stage 3 the parameter, and with `fully_shard` the layer that contains it, is then whole during the whole
    forward. Raises ValueError after `initialize()`, unless the parameter is whole then.
    """
    mark_external(parameter)
    if not is_gathered_with_root(parameter):
        raise conflict("ZeRO stages 2 and 3", "external")


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """A context with the engine's module, whose weights are whole."""
    module: nn.Module = model.module
    with GatheredParameters(module):
        yield module


# `deepspeed.utils.safe_*`: a parameter's fp32 master, optimizer state and gradient (optim/param_state.py). Functions
# with "full" in their names return and take whole tensors, and all ranks must call them in the same order. Functions
# with "local" are for this rank's part of the parameter, as a flat tensor.


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 master of a parameter after all pending updates. None for a frozen parameter."""
    return None if _is_frozen(param) else read_whole(param, MASTER, "safe_get_full_fp32_param()")


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """One tensor of a parameter's optimizer state (exp_avg, exp_avg_sq, ...) in fp32.

    None before the parameter's first step, and for a frozen parameter.
    """
    call = f"safe_get_full_optimizer_state({optim_state_key!r})"
    return None if _is_frozen(param) else read_whole(param, optim_state_key, call)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient in fp32 between backward and `step()`: the mean over the ranks, without the loss scale,
    before clipping. After some of a step's backwards: the sum so far.

    Returns None at other times, and for a frozen parameter. Raises ValueError if updates start during backward.
    """
    return None if _is_frozen(param) else read_whole_gradient(param, "safe_get_full_grad()")


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Writes the master of a parameter, and its weight rounded from the master."""
    write_whole(param, MASTER, value, "safe_set_full_fp32_param()")


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Writes one tensor of a parameter's optimizer state."""
    write_whole(param, optim_state_key, value, f"safe_set_full_optimizer_state({optim_state_key!r})")


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replaces a parameter's gradient between backward and `step()`. Raises ValueError if ranks sum gradients during
    backward.
    """
    write_whole_gradient(param, value, "safe_set_full_grad()")


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the fp32 master."""
    return None if _is_frozen(param) else read_local(param, MASTER)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of one tensor of the optimizer state."""
    return None if _is_frozen(param) else read_local(param, optim_state_key)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient. Raises RuntimeError while ranks have not summed their gradients."""
    return None if _is_frozen(param) else read_local_gradient(param, "safe_get_local_grad()")


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Writes this rank's part of master and weight. Raises RuntimeError if other ranks have the weight too."""
    write_local(param, MASTER, value, "safe_set_local_fp32_param()")


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Writes this rank's part of one tensor of the optimizer state."""
    write_local(param, optim_state_key, value, "safe_set_local_optimizer_state()")


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replaces this rank's rows of the gradient (stage 3). Raises RuntimeError if ranks have whole gradients."""
    write_local_gradient(param, value, "safe_set_local_grad()")


def _is_frozen(param: Tensor) -> bool:
    return not param.requires_grad and find_owner(param) is None


# `deepspeed.utils.zero_to_fp32`: fp32 weights of a checkpoint that the engine saved.


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint, on the host. Weights with an fp32 master are read as in `export_checkpoint`.
    The number of ranks that saved the checkpoint does not matter.
    """
    _refuse_exclusion(exclude_frozen_parameters)
    if lazy_mode:
        remedy = "Use convert_zero_checkpoint_to_fp32_state_dict(), which loads one tensor at a time."
        raise invalid_value("lazy_mode", True, [False], remedy)
    found = find_checkpoint(Path(checkpoint_dir), tag)
    masters = exporting.masters_of(found)
    names = found.names("model")
    weights = {name: exporting.make_entry(found, name, masters.get(name), torch.float32).tensor() for name in names}
    aliases = found.meta.get("aliases") or {}
    return weights | {name: weights[first] for name, first in aliases.items() if first in weights}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights as safetensors files to a folder, as `twinflow export` does. `safe_serialization` has no
    effect: no pickles are written.
    """
    _refuse_exclusion(exclude_frozen_parameters)
    export_checkpoint(Path(checkpoint_dir), Path(output_dir), tag, shard_bytes=_bytes(max_shard_size))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Moves a model to the host and loads a checkpoint's weights. Other parameters keep their values."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def copy_as_universal(args: Namespace) -> None:
    """`deepspeed.checkpoint.ds_to_universal.main`: copies the folder of a tag to another one.

    `args` has `input_folder` and `output_folder`; DeepSpeed's other options have no effect. A checkpoint of DeepSpeed
    is refused.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not (source / MANIFEST).is_file():
        remedy = "Convert a checkpoint of DeepSpeed with `twinflow import` instead."
        raise invalid_value("input_folder", str(source), "the folder of a checkpoint that twinflow saved", remedy)
    if target.exists():
        raise invalid_value("output_folder", str(target), "a folder that does not exist")
    copied = target.with_name(f".{target.name}.copying")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(source, copied)
    copied.rename(target)  # a checkpoint becomes visible only when it is complete


def _refuse_exclusion(is_asked_for: bool) -> None:
    """Raises ValueError: a checkpoint does not distinguish frozen parameters from buffers, and buffers must stay."""
    if is_asked_for:
        remedy = "Exclude frozen parameters when you save: engine.save_checkpoint(..., exclude_frozen_parameters=True)."
        raise invalid_value("exclude_frozen_parameters", True, [False], remedy)


def _bytes(size: str | int) -> int:
    if isinstance(size, int):
        return size
    number, unit = size[:-2], size[-2:].upper()
    if unit not in _UNITS or not number.isdigit():
        raise invalid_value("max_shard_size", size, "a number of bytes, or a number with KB, MB, GB or TB, such as 5GB")
    return int(number) * _UNITS[unit]


# Memory estimators: weights, gradients and optimizer state with twinflow. As in DeepSpeed, weights are bf16 and the
# optimizer is AdamW. Host figures are for one machine with all of its ranks. `additional_buffer_factor` covers the
# other buffers of the host.


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes on a host and on a GPU with stage 2: each rank has all weights and a part of gradients and state."""
    world, size = num_gpus_per_node * num_nodes, state_bytes("fp32")
    weights, gradients = _WIDTH * total_params, _WIDTH * total_params / world
    if cpu_offload:
        return int(size.host * total_params / num_nodes * additional_buffer_factor), int(weights + gradients)
    return 0, int(weights + gradients + size.resident * total_params / world)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes on a host and on a GPU with stage 3, and bytes of the layers that are gathered at a time.

    `zero_init` has no effect: these are the bytes of training, which are the same for a model that was built whole.
    """
    world, size = num_gpus_per_node * num_nodes, state_bytes("fp32")
    gathered = 2 * _WIDTH * largest_layer_params  # the current layer and the next one
    part = total_params / world
    if not cpu_offload:
        return 0, int(gathered + (2 * _WIDTH + size.resident) * part), gathered
    on_gpu = gathered if cpu_offload_params else gathered + 2 * _WIDTH * part
    return int(size.host * total_params / num_nodes * additional_buffer_factor), int(on_gpu), gathered


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 2 estimates for a model."""
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 2 estimates for a number of parameters."""
    given = (total_params, num_gpus_per_node, num_nodes)
    rows = {}
    for name in ("cpu", "none"):
        found = estimate_zero2_model_states_mem_needs(*given, name == "cpu", additional_buffer_factor)
        rows[f"offload_optimizer={name}"] = found
    _show(*given, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 3 estimates for a model."""
    counts = _count(model)
    estimate_zero3_model_states_mem_needs_all_cold(*counts, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the stage 3 estimates for a number of parameters."""
    given = (total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    rows = {}
    for params, states in (("cpu", "cpu"), ("none", "cpu"), ("none", "none")):
        found = estimate_zero3_model_states_mem_needs(
            *given, states == "cpu", params == "cpu", True, additional_buffer_factor
        )
        rows[f"offload_param={params}, offload_optimizer={states}"] = found[:2]
    _show(total_params, num_gpus_per_node, num_nodes, rows)


def _count(model: nn.Module) -> tuple[int, int]:
    """The numbers of parameters of a model and of its largest layer. A shared parameter counts once."""
    largest = max((sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules()), default=0)
    return sum(param.numel() for param in set(model.parameters())), largest


def _show(total: int, num_gpus: int, num_nodes: int, rows: Mapping[str, tuple[int, int]]) -> None:
    print(f"weights, gradients and AdamW's state of {total / 1e6:.0f}M parameters with twinflow,")
    print(f"bf16 weights, {num_nodes} machines with {num_gpus} GPUs each:")
    print(f"{'a host':>12}  {'a GPU':>12}  options")
    for options, (host, gpu) in rows.items():
        print(f"{host / 2**30:>9.2f} GB  {gpu / 2**30:>9.2f} GB  {options}")
