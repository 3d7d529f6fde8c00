"""`deepspeed.utils.safe_*`: a parameter's fp32 master, its optimizer state and its gradient, whole, read and written.

Where ranks share the state, all of them have to call these functions, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinflow.compat.owners import OWNERS
from twinflow.errors import invalid_value
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.changes import check_changed, written
from twinflow.optim.twin import TwinOptimizer
from twinflow.state_dict import dict_of

MASTER = "master"


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The fp32 master of a parameter, every update in it that is due; None for a frozen one, which has none."""
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
    return _read(optimizer, known, MASTER)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """One of the optimizer's tensors for a parameter (exp_avg, exp_avg_sq, ...) in fp32.

    None before its first step, and for a frozen one.
    """
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
    _check_key(optimizer, optim_state_key)
    return _read(optimizer, known, optim_state_key)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient between the last backward of a step and `step()`, in fp32, without the loss scale.

    None at any other moment, and for a frozen one.
    """
    if _is_frozen(param):
        return None
    optimizer, known = OWNERS.need(param)
    runtime = optimizer.runtime
    if runtime.sharing is not None or known.is_sharded or runtime.settings.sums_on_host:
        remedy = "Gradients are summed over ranks, or on the host, and then used: log engine.get_global_grad_norm()."
        raise invalid_value("safe_get_full_grad()", "where ranks or the host sum gradients", "one rank", remedy)
    job = runtime.job
    if job is None:
        return None
    if not runtime.settings.limits.any:
        remedy = "Updates have begun with it: set gradient_clipping, or bf16.check_grad_overflow."
        raise invalid_value("safe_get_full_grad()", "without clipping", "a step that waits for the norm", remedy)
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
    """Another master, and the weight that follows from it."""
    optimizer, known = OWNERS.need(param)
    _check_shape(known, value)
    if optimizer.offloads_params:
        remedy = "Change weights before initialize(), or load a checkpoint."
        raise invalid_value("safe_set_full_fp32_param() with zero_optimization.offload_param", "cpu", ["none"], remedy)
    _settle(optimizer, known)
    flat = value.detach().reshape(-1)
    local = known.local
    local.copy_(flat[known.first : known.first + local.numel()].view(local.shape))
    _write(known, MASTER, flat)
    known.note_write()


@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Another tensor in the place of one of the optimizer's."""
    optimizer, known = OWNERS.need(param)
    _check_shape(known, value)
    _check_key(optimizer, optim_state_key)
    _settle(optimizer, known)
    _write(known, optim_state_key, value.detach().reshape(-1))
    known.note_write()


def _is_frozen(param: Tensor) -> bool:
    return not param.requires_grad and OWNERS.find(param) is None


def _settle(optimizer: TwinOptimizer, param: Param) -> None:
    """Nobody works on the state, and what somebody wrote into the weight is in its master."""
    if optimizer.runtime.job is not None:
        raise RuntimeError("a parameter's state is read or written between backward() and step(). Call step() first")
    optimizer.runtime.wait()
    optimizer.runtime.wait_for_copies()
    optimizer.runtime.wait_for_readers()
    if written([param]):
        check_changed([param], optimizer.runtime.has_unsent)
        optimizer.runtime.adopt([param], keep=True)


def _read(optimizer: TwinOptimizer, param: Param, key: str) -> Tensor | None:
    """One tensor of a parameter, put together from this rank's slices and those of the others; None where no rank has
    anything of it: states before the first step."""
    _settle(optimizer, param)
    gathered = torch.zeros(param.tensor.numel() + 1, dtype=torch.float32)
    whole, num_found = gathered[:-1], gathered[-1:]  # of slices: a rank may have none
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
    if optimizer.rule is None and key != MASTER:  # what an optimizer of the user's keeps
        values = dict_of(values, "state")
    found = values.get(key)
    return found if isinstance(found, Tensor) else None


def _write(param: Param, key: str, whole: Tensor) -> None:
    """This rank's slices of a tensor, beside what else they hold."""
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
            values.pop(f"{key}_scale", None)  # codes of 8 bits get a scale of their own
        bucket.updater.write(bucket, i, values)


def _pieces(param: Param) -> list[tuple[Bucket, int]]:
    return [(b, i) for b in param.buckets for i, piece in enumerate(b.slices) if piece.param == param.index]


def _check_shape(param: Param, value: Tensor) -> None:
    if value.shape != param.tensor.shape:
        raise invalid_value(f"shape of the value for {param.name}", tuple(value.shape), [tuple(param.tensor.shape)])


def _check_key(optimizer: TwinOptimizer, key: str) -> None:
    if optimizer.rule is not None and key not in (allowed := [name for name in optimizer.rule.states if name]):
        raise invalid_value("optim_state_key", key, allowed)
