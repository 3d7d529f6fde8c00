# SPDX-License-Identifier: Apache-2.0
"""Master, optimizer state and gradient of one parameter, whole or this rank's part, at any time between steps.

Functions for whole tensors are collective if ranks share the state: all ranks call them, in the same order, and they
meet first (dist/meeting.py). The gradient is the one that the update uses before clipping: the mean over the ranks, in
fp32, without the loss scale. Where it is between backward and `step` is described in offload/read_gradient.py.

Between backward and `step` the update of this step may have begun. State can be read then if updates wait for the
clipping decision. It can be written if the update can be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twinflow.conflicts import conflict
from twinflow.dist.agree import gather_json
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Param, local_of
from twinflow.offload.changes import check_changed, written
from twinflow.offload.read_gradient import COMPLETE, LEFT, gradient_state, read_gradient
from twinflow.offload.runtime import Runtime
from twinflow.offload.weight_guard import owner_of, plain
from twinflow.optim.twin import TwinOptimizer
from twinflow.state_dict import dict_of, tensor_of
from twinflow.zero.gathered import param_of

MASTER = "master"
_PART = "each rank has a part of the state"


def find_owner(tensor: Tensor) -> tuple[TwinOptimizer, Param] | None:
    """The optimizer and its record of a parameter. None for a parameter that is not trained."""
    tensor = param_of(tensor)
    runtime = owner_of(tensor)
    if not isinstance(runtime, Runtime):
        return None
    param, optimizer = runtime.find(tensor), runtime.optimizer
    if param is None or not isinstance(optimizer, TwinOptimizer):
        return None
    return optimizer, param


def need_owner(tensor: Tensor) -> tuple[TwinOptimizer, Param]:
    found = find_owner(tensor)
    if found is None:
        raise ValueError(
            f"param is a tensor of shape {tuple(tensor.shape)}, but must be a parameter that initialize() trains. Take "
            "the parameter from engine.module.named_parameters()."
        )
    return found


# Whole tensors.


def read_whole(tensor: Tensor, key: str, call: str) -> Tensor | None:
    """The master or a state of a parameter, gathered from all ranks. None if no rank has a slice, as for states before
    the first step.
    """
    optimizer, param = need_owner(tensor)
    _check_key(optimizer, param, key)
    _meet(optimizer, param, call)
    _settle(optimizer, param)
    whole, has_some = _gather(optimizer, param, _own_slices(optimizer, param, key), _is_partitioned(optimizer))
    return whole if has_some else None


@torch.no_grad()
def write_whole(tensor: Tensor, key: str, value: Tensor, call: str) -> None:
    """Writes the master of a parameter, and its weight rounded from the master, or a state. All ranks pass the same
    value.
    """
    optimizer, param = need_owner(tensor)
    _check_shape(param, value, tuple(param.tensor.shape))
    _check_key(optimizer, param, key)
    _meet(optimizer, param, call)
    _prepare_write(optimizer, param)
    flat = value.detach().reshape(-1)
    _write(optimizer, param, key, lambda start, numel: flat[start : start + numel])


def read_whole_gradient(tensor: Tensor, call: str) -> Tensor | None:
    """The gradient of the present step. None if there is none, as after `step()`."""
    optimizer, param = need_owner(tensor)
    _meet(optimizer, param, f"{call} with {gradient_state(optimizer.runtime)}")
    found = read_gradient(optimizer.runtime, param)
    team = optimizer.team
    slices = [(start, values / found.scale) for start, values in found.slices] if found is not None else []
    has_parts, is_hit, divisor = team is not None and team.world > 1, found is not None and found.is_hit, 1.0
    if team is not None and has_parts:
        said = gather_json(team.calls, [found is not None and found.is_summed, is_hit])
        is_summed, is_hit = (any(one[i] for one in said) for i in range(2))
        has_parts = not is_summed or team.is_partitioned
        divisor = 1.0 if is_summed or team.zero.op == "sum" else float(team.world)
    whole, has_some = _gather(optimizer, param, slices, has_parts)
    return whole.div_(divisor) if has_some and is_hit else None


@torch.no_grad()
def write_whole_gradient(tensor: Tensor, value: Tensor, call: str) -> None:
    """Replaces the gradient of the present step. All ranks pass the same value, which is the mean over the ranks."""
    optimizer, param = need_owner(tensor)
    _check_shape(param, value, tuple(param.tensor.shape))
    _meet(optimizer, param, call)
    _put_gradient(optimizer, param, value.detach().reshape(-1), call)


# This rank's part, as a flat tensor: its elements in the order of the flattened parameter. No rank waits for others.


def read_local(tensor: Tensor, key: str) -> Tensor | None:
    optimizer, param = need_owner(tensor)
    _check_key(optimizer, param, key)
    _settle(optimizer, param)
    return _joined(_own_slices(optimizer, param, key), param)


@torch.no_grad()
def write_local(tensor: Tensor, key: str, value: Tensor, call: str) -> None:
    optimizer, param = need_owner(tensor)
    _check_key(optimizer, param, key)
    if key == MASTER and _is_partitioned(optimizer) and not (param.is_sharded or _is_on_host(optimizer, param)):
        remedy = "Use safe_set_full_fp32_param() on all ranks, or stage 3."
        stage = optimizer.zero.stage if optimizer.zero is not None else 0
        raise wrong_state(f"{call} cannot run", f"with stage {stage} other ranks have the weight too", remedy)
    spans = _spans(param)
    _check_shape(param, value, (sum(numel for _, numel in spans),))
    _prepare_write(optimizer, param)
    flat, at = value.detach().reshape(-1), {}
    used = 0
    for start, numel in spans:
        at[start] = used
        used += numel
    _write(optimizer, param, key, lambda start, numel: flat[at[start] : at[start] + numel])


def read_local_gradient(tensor: Tensor, call: str) -> Tensor | None:
    """This rank's part of the gradient. Raises RuntimeError while this rank has only its own gradients, without those
    of other ranks.
    """
    optimizer, param = need_owner(tensor)
    runtime, team = optimizer.runtime, optimizer.team
    has_ranks = team is not None and team.world > 1
    is_pending = gradient_state(runtime) == COMPLETE and has_ranks and not runtime.is_rest_submitted
    found = read_gradient(runtime, param) if not is_pending else None
    if is_pending or (found is not None and not found.is_summed and has_ranks):
        remedy = "Call safe_get_full_grad() on all ranks."
        raise wrong_state(f"{call} cannot run", "the gradients are not summed over the ranks yet", remedy)
    if found is None or not found.is_hit:
        return None
    return _joined([(start, values / found.scale) for start, values in found.slices], param)


@torch.no_grad()
def write_local_gradient(tensor: Tensor, value: Tensor, call: str) -> None:
    optimizer, param = need_owner(tensor)
    if not (param.is_sharded or optimizer.team is None or optimizer.team.world == 1):
        remedy = "Use safe_set_full_grad() on all ranks."
        raise wrong_state(f"{call} cannot run", "each rank has gradients of the whole parameter", remedy)
    _check_shape(param, value, (param.local.numel(),))
    whole = torch.zeros(param.tensor.numel(), dtype=value.dtype, device=value.device)
    whole[param.first : param.first + value.numel()] = value.detach().reshape(-1)
    _put_gradient(optimizer, param, whole, call)


# Ranks.


def _is_partitioned(optimizer: TwinOptimizer) -> bool:
    return optimizer.team is not None and optimizer.team.is_partitioned


def _is_on_host(optimizer: TwinOptimizer, param: Param) -> bool:
    offload = optimizer.runtime.param_offload
    return offload is not None and offload.params.holds(param.tensor)


def _meet(optimizer: TwinOptimizer, param: Param, call: str) -> None:
    if optimizer.team is not None and optimizer.team.world > 1:
        optimizer.team.meeting.meet(f"{call} of {param.name}", _PART)


def _gather(
    optimizer: TwinOptimizer, param: Param, slices: list[tuple[int, Tensor]], has_parts: bool
) -> tuple[Tensor, bool]:
    """The sum over the ranks of the given slices, as a whole tensor on the device of the parameter, and whether a rank
    has one.
    """
    gathered = torch.zeros(param.tensor.numel() + 1, dtype=torch.float32)
    whole, num_found = gathered[:-1], gathered[-1:]  # The last element counts slices: a rank may have none.
    for start, values in slices:
        whole[start : start + values.numel()] = values.reshape(-1).float().cpu()
        num_found += 1
    team = optimizer.team
    if team is not None and has_parts:
        team.calls_of(param.tensor).all_reduce(gathered, gathered.clone(), torch.float32)
    return whole.view(param.tensor.shape).to(param.tensor.device), bool(num_found)


# Slices of this rank.


def _spans(param: Param) -> list[tuple[int, int]]:
    return [(param.first + b.slices[i].start, b.slices[i].numel) for b, i in param.own_slices()]


def _own_slices(optimizer: TwinOptimizer, param: Param, key: str) -> list[tuple[int, Tensor]]:
    """This rank's slices of a tensor, each with its start in the flattened parameter."""
    found = []
    for bucket, i in param.own_slices():
        values: Mapping[str, object] = bucket.updater.read(bucket, i) if key == MASTER or bucket.steps[i] else {}
        if optimizer.rule is None and key != MASTER:  # The state of a torch optimizer is in a dict of its own.
            values = dict_of(values, "state")
        value = values.get(key)
        if isinstance(value, Tensor):
            found.append((param.first + bucket.slices[i].start, value))
    return found


def _joined(slices: list[tuple[int, Tensor]], param: Param) -> Tensor | None:
    parts = [values.reshape(-1).float().to(param.tensor.device) for _, values in sorted(slices, key=lambda it: it[0])]
    return torch.cat(parts).clone() if parts else None


def _write(optimizer: TwinOptimizer, param: Param, key: str, cut: Callable[[int, int], Tensor]) -> None:
    """Writes this rank's slices of the tensor `key`, and keeps the other tensors of the state."""
    for bucket, i in param.own_slices():
        piece = bucket.slices[i]
        values: dict[str, object] = dict(bucket.updater.read(bucket, i))
        given = cut(param.first + piece.start, piece.numel).float().cpu()
        state = values.get("state")
        if key != MASTER and isinstance(state, dict):
            values["state"] = {**state, key: given.view_as(tensor_of(state, key))}
        else:
            values[key] = given
            values.pop(f"{key}_scale", None)  # Writing int8 codes computes a new scale.
        bucket.updater.write(bucket, i, values)
    if key == MASTER and not _is_on_host(optimizer, param):
        with plain():
            flat = local_of(param.tensor).detach().view(-1) if param.local.is_contiguous() else None
            whole = param.local.detach().clone().reshape(-1) if flat is None else flat
            if param.is_sharded or not _is_partitioned(optimizer):
                for start, numel in _spans(param):
                    whole[start - param.first : start - param.first + numel] = cut(start, numel)
            else:  # the weight is whole on every rank
                whole.copy_(cut(0, whole.numel()))
            if flat is None:
                param.local.detach().copy_(whole.view(param.local.shape))
    param.note_write()


# The time of the call.


def _settle(optimizer: TwinOptimizer, param: Param) -> None:
    """Waits until no thread writes to the state. A weight that the user changed is copied to its master."""
    runtime = optimizer.runtime
    if runtime.steps.job is not None and not runtime.settings.limits.any:
        raise conflict("DeepSpeed's functions", "in backward")
    runtime.wait()
    runtime.wait_for_copies()
    runtime.wait_for_readers()
    if runtime.steps.job is None and written([param]):
        check_changed([param], runtime.steps.has_unsent)
        runtime.adopt([param], keep=True)


def _prepare_write(optimizer: TwinOptimizer, param: Param) -> None:
    """Takes back the updates of this step that have begun with the old state."""
    runtime = optimizer.runtime
    if runtime.steps.job is not None and not runtime.can_undo:
        what = "The state of a parameter cannot be written"
        raise wrong_state(what, "updates of this step have begun in backward()", "Call step() first.")
    if runtime.steps.job is not None:
        runtime.return_gradients("the state of a parameter was written")
    _settle(optimizer, param)
    offload = runtime.param_offload
    if offload is not None and _is_on_host(optimizer, param):
        offload.forget_fetched(param.tensor)


def _put_gradient(optimizer: TwinOptimizer, param: Param, flat: Tensor, call: str) -> None:
    runtime, team = optimizer.runtime, optimizer.team
    if gradient_state(runtime) != LEFT:
        if not runtime.can_undo:
            raise conflict("DeepSpeed's functions", "taken", call=call)
        runtime.return_gradients("a gradient was written")
    found = read_gradient(runtime, param)
    if found is None:
        raise wrong_state(f"{call} cannot run", f"{param.name} has no gradient now", "Call it after backward().")
    runtime.give_back(param.tensor)
    scale = found.scale
    if not param.is_sharded and team is not None:
        group = team.calls_of(param.tensor)
        if team.zero.op == "mean":
            scale *= team.world / group.world  # the sum over the group is divided by the number of all ranks
        elif group.rank > 0:
            scale = 0.0  # the values of the first rank are the sum
    with plain():
        grad = param.tensor.grad
        local = flat[param.first : param.first + param.local.numel()] * scale
        if grad is None:
            assert not param.is_sharded
            param.tensor.grad = local.view(param.shape).to(param.tensor)
        else:
            local_of(grad).copy_(local.view(param.shape))
    param.is_filled = False


def _check_shape(param: Param, value: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(value.shape) != wanted:
        raise invalid_value(f"The shape of the value for {param.name}", tuple(value.shape), [wanted])


def _check_key(optimizer: TwinOptimizer, param: Param, key: str) -> None:
    if key == MASTER or optimizer.rule is None:
        return
    states = optimizer.rule.of(optimizer.param_groups[param.group]).states
    if key not in (allowed := [name for name in states if name]):
        raise invalid_value("optim_state_key", key, allowed)
