"""`deepspeed.utils.safe_*`: reads and writes a parameter's fp32 master, optimizer state and gradient as whole tensors.

If ranks partition the state, all ranks must call these functions in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinflow.compat.owners import OWNERS
from twinflow.conflicts import conflict
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.changes import check_changed, written
from twinflow.optim.twin import TwinOptimizer
from twinflow.state_dict import dict_of

MASTER = "master"


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 master of a parameter after all pending updates. None for a frozen parameter."""
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
    return _read(optimizer, known, MASTER)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """One tensor of a parameter's optimizer state (exp_avg, exp_avg_sq, ...) in fp32.

    None before the parameter's first step, and for a frozen parameter.
    """
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
    _check_key(optimizer, optim_state_key)
    return _read(optimizer, known, optim_state_key)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient in fp32 and without the loss scale, between the last backward of a step and `step()`.

    None at other times, and for a frozen parameter. ValueError if ranks or the host sum gradients, or if updates start
    during backward.
    """
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
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
    optimizer, known = OWNERS.need(param)
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
    optimizer, known = OWNERS.need(param)
    _check_shape(known, value)
    _check_key(optimizer, optim_state_key)
    _settle(optimizer, known)
    _write(known, optim_state_key, value.detach().reshape(-1))
    known.note_write()


def _is_frozen(param: Tensor) -> bool:
    return not param.requires_grad and OWNERS.find(param) is None


def _settle(optimizer: TwinOptimizer, param: Param) -> None:
    """Waits until no thread works on the state. A weight that the user changed is copied to its master."""
    if optimizer.runtime.steps.job is not None:
        raise wrong_state(
            "The state of a parameter cannot be read or written", "backward() ran without step()", "Call step() first."
        )
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
    """Writes this rank's slices of a tensor and keeps their other values."""
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
        name = f"The shape of the value for {param.name}"
        raise invalid_value(name, tuple(value.shape), [tuple(param.tensor.shape)])


def _check_key(optimizer: TwinOptimizer, key: str) -> None:
    if optimizer.rule is not None and key not in (allowed := [name for name in optimizer.rule.states if name]):
        raise invalid_value("optim_state_key", key, allowed)
