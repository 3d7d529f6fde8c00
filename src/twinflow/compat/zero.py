"""Functions for models that are partitioned over ranks: `deepspeed.zero`, `deepspeed.utils.safe_*`,
`deepspeed.utils.zero_to_fp32` and the memory estimators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.build import refuse_groups
from twinflow.checkpoint import exporting
from twinflow.checkpoint.exporting import export_checkpoint, find_checkpoint
from twinflow.conflicts import conflict
from twinflow.dist.group import world_group
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.changes import check_changed, written
from twinflow.optim.twin import TwinOptimizer
from twinflow.planner.formats import WEIGHT_BYTES, state_bytes
from twinflow.state_dict import dict_of

_WHOLE = (
    "Read a weight with deepspeed.utils.safe_get_full_fp32_param(param), or change it before initialize(). "
    "engine.save_checkpoint() and `twinflow export` write whole weights."
)
MASTER = "master"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_WIDTH = WEIGHT_BYTES["bf16"]


# The optimizer that `initialize` has built for each parameter, because DeepSpeed's functions get only the parameter.
# Keys and values are weak references.
_OWNERS: Any = WeakTensorKeyDictionary()


def add_owner(optimizer: TwinOptimizer) -> None:
    for index, param in enumerate(optimizer.runtime.params):
        _OWNERS[param.tensor] = (weakref.ref(optimizer), index)


def find_owner(tensor: Tensor) -> tuple[TwinOptimizer, Param] | None:
    """The optimizer and its record of a parameter. None for a parameter that is not trained."""
    found = _OWNERS.get(tensor)
    optimizer = found[0]() if found is not None else None
    if optimizer is None or optimizer.runtime.is_closed:
        return None
    return optimizer, optimizer.runtime.params[found[1]]


def need_owner(tensor: Tensor) -> tuple[TwinOptimizer, Param]:
    found = find_owner(tensor)
    if found is None:
        raise ValueError(
            f"param is a tensor of shape {tuple(tensor.shape)}, but must be a parameter that initialize() trains. Take "
            "the parameter from engine.module.named_parameters()."
        )
    return found


class Init(nullcontext[None]):
    """A context without effect: models are created as usual, and `initialize` partitions them.

    DeepSpeed partitions a model during its creation. For a model that does not fit into one host, give `initialize` a
    function that creates it, or create it under `torch.device("meta")`.
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
        super().__init__()
        if remote_device not in (None, "none", "cpu"):
            remedy = 'Use "cpu", because twinflow does not offload to NVMe.'
            raise invalid_value("remote_device", remote_device, (None, "none", "cpu"), remedy)
        if dtype not in (None, torch.get_default_dtype()):
            remedy = "Set bf16 or fp16 in the config: initialize() casts the model."
            raise invalid_value("dtype", dtype, [None, torch.get_default_dtype()], remedy)
        refuse_groups(data_parallel_group=data_parallel_group, mpu=mpu)


@contextmanager
def GatheredParameters(
    params: Tensor | nn.Module | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which parameters are whole and all pending updates are in them.

    With `modifier_rank`, the values of that rank are sent to all ranks at the end. Raises ValueError for weights that
    are partitioned (stage 3) or are in host memory.
    """
    listed = params.parameters() if isinstance(params, nn.Module) else params
    listed = ([listed] if isinstance(listed, Tensor) else list(listed)) if enabled else []
    for param in listed:
        found = find_owner(param)
        if isinstance(param, DTensor) or (found is not None and found[0].offloads_params):
            kind = "partitioned (stage 3)" if isinstance(param, DTensor) else "on the host"
            raise ValueError(
                f"The weights in params are {kind}, but must be whole on the device of this rank. {_WHOLE}"
            )
        if found is not None and found[0].runtime.steps.job is None:
            found[0].wait()
    yield
    if modifier_rank is None:
        return
    for param in listed:
        if dist.is_initialized() and dist.get_world_size() > 1:
            world_group().broadcast(param.data, modifier_rank)
        # torch does not count writes to `.data`, so the version is increased here. The optimizer then compares the
        # weight with its master. If the weight is not the rounded master, it is copied to the master.
        torch.autograd.graph.increment_version(param)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing with one rank. Raises ValueError with several ranks, because with stage 3 a weight cannot be used
    outside its module.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise conflict("ZeRO stages 2 and 3", "external", ranks=dist.get_world_size())


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """A context with the engine's module, whose weights are whole."""
    module: nn.Module = model.module
    with GatheredParameters(module):
        yield module


# `deepspeed.utils.safe_*`: a parameter's fp32 master, optimizer state and gradient as whole tensors. If ranks partition
# the state, all ranks must call these functions in the same order.


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 master of a parameter after all pending updates. None for a frozen parameter."""
    return None if _is_frozen(param) else _read(*need_owner(param), MASTER)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """One tensor of a parameter's optimizer state (exp_avg, exp_avg_sq, ...) in fp32.

    None before the parameter's first step, and for a frozen parameter.
    """
    if _is_frozen(param):
        return None
    optimizer, known = need_owner(param)
    _check_key(optimizer, optim_state_key)
    return _read(optimizer, known, optim_state_key)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient in fp32 and without the loss scale, between the last backward of a step and `step()`.

    Returns None at other times, and for a frozen parameter. Raises ValueError if gradients are summed over ranks or on
    the host, or if updates start during backward.
    """
    if _is_frozen(param):
        return None
    optimizer, known = need_owner(param)
    runtime = optimizer.runtime
    if runtime.sharing is not None or known.is_sharded or runtime.settings.sums_on_host:
        raise conflict("DeepSpeed's functions", "summed")
    job = runtime.steps.job
    if job is None:
        return None
    if not runtime.settings.limits.any:
        raise conflict("DeepSpeed's functions", "in backward")
    whole = torch.zeros(known.tensor.numel(), dtype=torch.float32)
    for bucket, i in _pieces(known):
        task = next((task for task in job.tasks if task.bucket is bucket), runtime.collector.task_of(bucket))
        held = runtime.executor.read_grads(task) if task is not None else None
        if held is None:
            return None
        piece = bucket.slices[i]
        whole[piece.start : piece.start + piece.numel] = held[piece.offset : piece.offset + piece.numel].float()
    return (whole / job.scale).view(known.tensor.shape).to(known.tensor.device)


@torch.no_grad()
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Writes the master of a parameter, and its weight rounded from the master."""
    optimizer, known = need_owner(param)
    _check_shape(known, value)
    if optimizer.offloads_params:
        raise conflict("DeepSpeed's functions", "set")
    _settle(optimizer, known)
    flat = value.detach().reshape(-1)
    local = known.local
    local.copy_(flat[known.first : known.first + local.numel()].view(local.shape))
    _write(known, MASTER, flat)
    known.note_write()


@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Writes one tensor of a parameter's optimizer state."""
    optimizer, known = need_owner(param)
    _check_shape(known, value)
    _check_key(optimizer, optim_state_key)
    _settle(optimizer, known)
    _write(known, optim_state_key, value.detach().reshape(-1))
    known.note_write()


def _is_frozen(param: Tensor) -> bool:
    return not param.requires_grad and find_owner(param) is None


def _settle(optimizer: TwinOptimizer, param: Param) -> None:
    """Waits until no thread works on the state. A weight that the user changed is copied to its master."""
    if optimizer.runtime.steps.job is not None:
        what = "The state of a parameter cannot be read or written"
        raise wrong_state(what, "backward() ran without step()", "Call step() first.")
    optimizer.runtime.wait()
    optimizer.runtime.wait_for_copies()
    optimizer.runtime.wait_for_readers()
    if written([param]):
        check_changed([param], optimizer.runtime.steps.has_unsent)
        optimizer.runtime.adopt([param], keep=True)


def _read(optimizer: TwinOptimizer, param: Param, key: str) -> Tensor | None:
    """One tensor of a parameter, gathered from the slices of all ranks. None if no rank has a slice, as for states
    before the first step.
    """
    _settle(optimizer, param)
    gathered = torch.zeros(param.tensor.numel() + 1, dtype=torch.float32)
    whole, num_found = gathered[:-1], gathered[-1:]  # The last element counts slices: a rank may have none.
    for bucket, i in _pieces(param):
        value = _read_piece(optimizer, bucket, i, key) if key == MASTER or bucket.steps[i] else None
        if value is not None:
            start = param.first + bucket.slices[i].start
            whole[start : start + bucket.slices[i].numel] = value.reshape(-1).float().cpu()
            num_found += 1
    team = optimizer.team
    if team is not None and team.is_partitioned:
        team.calls.all_reduce(gathered, gathered.clone(), torch.float32)
    return whole.view(param.tensor.shape).to(param.tensor.device) if num_found else None


def _read_piece(optimizer: TwinOptimizer, bucket: Bucket, index: int, key: str) -> Tensor | None:
    values = bucket.updater.read(bucket, index)
    if optimizer.rule is None and key != MASTER:  # The state of a torch optimizer is in a dict of its own.
        values = dict_of(values, "state")
    found = values.get(key)
    return found if isinstance(found, Tensor) else None


def _write(param: Param, key: str, whole: Tensor) -> None:
    """Writes this rank's slices of the tensor `key` and keeps the other tensors of the state."""
    for bucket, i in _pieces(param):
        piece = bucket.slices[i]
        values: dict[str, Any] = dict(bucket.updater.read(bucket, i))
        start = param.first + piece.start
        cut = whole[start : start + piece.numel].float().cpu()
        state = values.get("state")
        if key != MASTER and isinstance(state, dict):
            values["state"] = {**state, key: cut.view_as(state[key])}
        else:
            values[key] = cut
            values.pop(f"{key}_scale", None)  # Writing int8 codes computes a new scale.
        bucket.updater.write(bucket, i, values)


def _pieces(param: Param) -> list[tuple[Bucket, int]]:
    return [(b, i) for b in param.buckets for i, piece in enumerate(b.slices) if piece.param == param.index]


def _check_shape(param: Param, value: Tensor) -> None:
    if value.shape != param.tensor.shape:
        wanted = [tuple(param.tensor.shape)]
        raise invalid_value(f"The shape of the value for {param.name}", tuple(value.shape), wanted)


def _check_key(optimizer: TwinOptimizer, key: str) -> None:
    if optimizer.rule is not None and key not in (allowed := [name for name in optimizer.rule.states if name]):
        raise invalid_value("optim_state_key", key, allowed)


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
    weights = {name: exporting.make_entry(found, name, masters.get(name), torch.float32).read() for name in names}
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

    `zero_init` has no effect: a model that was built whole is partitioned when training starts.
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
