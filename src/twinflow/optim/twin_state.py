"""A TwinOptimizer's state as a plain dict, and back: fp32 tensors by parameter name, whatever the format in memory.

Only parameters that have been updated appear: a fresh optimizer's state is small. 8-bit states come with their scales,
so that the same format gets the same codes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.offload import reconfigure
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.streamed import StreamedUpdater
from twinflow.offload.updater import RuleUpdater
from twinflow.optim import loss_scale, switch
from twinflow.optim.twin_checks import check_groups
from twinflow.optim.twin_state_checks import (
    Source,
    check_entries,
    check_head,
    check_members,
    check_plain,
    check_watch,
    is_whole,
)
from twinflow.parallel.shard import shard_of
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK
from twinflow.state_dict import StateDict, int_of, mapping_of, params_of, saved_groups, tensor_of

KIND = "twinflow.TwinOptimizer"
VERSION = 1


class StreamedTensor(NamedTuple):
    """A tensor of the state that is made only when it is read."""

    name: str  # parameter/key
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    part: tuple[tuple[int, ...], int] | None = None  # of a tensor of that shape, flattened: where it starts


class Saved(switch.Compressible, Protocol):
    """What is saved of an optimizer: what is read of a TwinOptimizer here, and set again."""

    @property
    def scale_rule(self) -> loss_scale.LossScale: ...

    @property
    def num_skipped(self) -> int: ...

    @property
    def switch(self) -> switch.Switch | None: ...

    @property
    def is_stateless(self) -> bool: ...

    @property
    def delays_updates(self) -> bool: ...

    def restore_outcomes(self, num_steps: int, num_skipped: int, loss_scale: loss_scale.LossScale) -> None: ...


class _DictSource:
    """The `state` of a state dict."""

    def __init__(self, state: Mapping[str, Mapping[str, object]]) -> None:
        self._state = state

    def names(self) -> Iterable[str]:
        return self._state

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self._state[name].items() if isinstance(value, Tensor)}

    def step(self, name: str) -> int:
        entry = self._state[name]
        if not is_whole(entry["step"]):
            raise ValueError(entry["step"])
        return int_of(entry, "step")

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        return _cut(self._state[name], start, numel)


def entries_of(saved: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """What a state dict holds for each parameter, by name; `check_plain` has checked it."""
    state = mapping_of(saved, "state")
    return {name: mapping_of(state, name) for name in state}


def collect(optimizer: Saved) -> StateDict:
    """The state of an optimizer that has nothing under way. Tensors may be views: clone what must not change."""
    state = {param.name: _read_param(optimizer, param) for param in optimizer.runtime.params}
    return {**head(optimizer), "state": {name: entry for name, entry in state.items() if entry}}


def head(optimizer: Saved) -> StateDict:
    """All of the state but what is kept for each parameter."""
    runtime = optimizer.runtime
    names = iter(param.name for param in runtime.params)
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [next(names) for _ in params_of(group)]})
    return {
        "kind": KIND,
        "version": VERSION,
        "rule": optimizer.rule_name,
        "states": optimizer.states,
        "num_steps": optimizer.num_steps,
        "num_skipped": optimizer.num_skipped,
        "num_jobs": runtime.num_jobs,
        "has_unsent": runtime.has_unsent,
        "loss_scale": loss_scale.to_dict(optimizer.scale_rule),
        "param_groups": groups,
        **({"switch": optimizer.switch.state()} if optimizer.switch is not None else {}),
    }


def stream(optimizer: Saved) -> Iterator[tuple[str, StateDict]]:
    """Each updated parameter's entry as in `collect`, with a StreamedTensor in the place of each tensor.

    Where ranks have parts of it, an entry for each part that this one has.
    """
    for param in optimizer.runtime.params:
        pieces = _pieces(param)
        if not pieces or not pieces[0][0].steps[pieces[0][1]]:
            continue
        if optimizer.rule is None:  # what an optimizer of the user's keeps are its own tensors, not copies
            entry = _read_param(optimizer, param)
            yield param.name, {key: _as_streams(f"{param.name}/{key}", value) for key, value in entry.items()}
        elif param.is_sharded or any(bucket.is_shared for bucket, _ in pieces):
            for bucket, index in pieces:
                yield param.name, _streamed_part(optimizer.rule, param, bucket, index)
        else:
            yield param.name, _streamed(optimizer.rule, param)


def _specs(rule: Rule, param: Param, bucket: Bucket) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What is kept for a parameter: dtype and shape of each tensor."""
    store, shape = bucket.store, tuple(param.tensor.shape)
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"master": (torch.float32, shape)}
    for name, state, scale in zip(rule.states, store.states, store.scales, strict=True):
        if name is not None and state is not None:
            specs[name] = (torch.float32 if scale is not None else state.dtype, shape)
            # Blocks of rows, or of a tensor rank's part, are not blocks of the whole.
            if scale is not None and not param.is_sharded and shard_of(param.tensor) is None:
                specs[f"{name}_scale"] = (torch.float32, (-(-param.tensor.numel() // BLOCK),))
    return specs


def _streamed(rule: Rule, param: Param) -> StateDict:
    bucket, index = _pieces(param)[0]
    streams = {
        key: StreamedTensor(f"{param.name}/{key}", dtype, dims, partial(_read_one, param, key, dtype, dims))
        for key, (dtype, dims) in _specs(rule, param, bucket).items()
    }
    return {"step": bucket.steps[index], **streams}


def _streamed_part(rule: Rule, param: Param, bucket: Bucket, index: int) -> StateDict:
    """The same of one slice."""
    piece, streams = bucket.slices[index], {}
    for key, (dtype, dims) in _specs(rule, param, bucket).items():
        unit = BLOCK if key.endswith("_scale") else 1
        numel, read = -(-piece.numel // unit), partial(_read_flat, bucket, index, key)
        start = (param.first + piece.start) // unit
        streams[key] = StreamedTensor(f"{param.name}/{key}", dtype, (numel,), read, (dims, start))
    return {"step": bucket.steps[index], **streams}


def _read_flat(bucket: Bucket, index: int, key: str) -> Tensor:
    return _read_piece(bucket, index, key).reshape(-1)


def _read_one(param: Param, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """One tensor of a parameter's entry, put together from its slices."""
    pieces = _pieces(param)
    if len(pieces) == 1:
        return _read_piece(*pieces[0], key).view(shape)
    whole = torch.empty(shape, dtype=dtype)
    unit = BLOCK if key.endswith("_scale") else 1
    for bucket, i in pieces:
        found = _read_piece(bucket, i, key)
        start = bucket.slices[i].start // unit
        whole.view(-1)[start : start + found.numel()] = found
    return whole


def _read_piece(bucket: Bucket, index: int, key: str) -> Tensor:
    assert isinstance(bucket.updater, (RuleUpdater, DeviceUpdater, StreamedUpdater))
    found = bucket.updater.read_one(bucket, index, key)
    assert found is not None
    return found


def _as_streams(name: str, value: object) -> object:
    if isinstance(value, Tensor):
        return StreamedTensor(name, value.dtype, tuple(value.shape), lambda: value)
    if isinstance(value, dict):
        return {key: _as_streams(f"{name}/{key}", item) for key, item in value.items()}
    return value


def _read_param(optimizer: Saved, param: Param) -> StateDict:
    """One parameter's step, master and states in its own shape; nothing where it was never updated."""
    pieces = list(_pieces(param))
    if not pieces or pieces[0][0].steps[pieces[0][1]] == 0:
        return {}
    parts = [bucket.updater.read(bucket, i) for bucket, i in pieces]
    entry: StateDict = {"step": pieces[0][0].steps[pieces[0][1]]}
    for name in parts[0]:
        if isinstance(parts[0][name], dict):  # what a torch optimizer keeps, for whole parameters: in its own shapes
            entry[name] = parts[0][name]
            continue
        tensors = [tensor_of(part, name) for part in parts]
        values = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        entry[name] = values if name.endswith("_scale") else values.view(param.tensor.shape)
    return entry


def _pieces(param: Param) -> list[tuple[Bucket, int]]:
    """A parameter's slices in order: bucket and index."""
    found = [(b, i) for b in param.buckets for i, piece in enumerate(b.slices) if piece.param == param.index]
    return sorted(found, key=lambda at: at[0].slices[at[1]].start)


def restore(optimizer: Saved, saved: Mapping[str, object], source: Source | None = None) -> None:
    """Check all of `saved`, then take it over; entries come from `source`, or from the dict itself."""
    runtime = optimizer.runtime
    _check_kind(saved)
    if source is None:
        check_plain(saved.get("state"), optimizer.rule)
        source = _DictSource(entries_of(saved))
    check(optimizer, saved, source)
    known = set(source.names())
    # Otherwise masters may differ from what the weights round to.
    is_exchanged = optimizer.can_compress and saved_groups(saved)[0].get("is_exchanged")
    weights_win = not saved["has_unsent"] and not is_exchanged
    for param in runtime.params:
        for bucket, i in _pieces(param):
            is_known = param.name in known
            before = _weights_on_host(bucket, i) if bucket.offloads_params and weights_win else None
            bucket.steps[i] = source.step(param.name) if is_known else 0
            if is_known:
                piece = bucket.slices[i]
                values = source.cut(param.name, param.first + piece.start, piece.numel)
                if param.is_sharded:
                    values = {key: value for key, value in values.items() if not key.endswith("_scale")}
                bucket.updater.write(bucket, i, values)
            else:
                bucket.updater.clear(bucket, i, optimizer.param_groups)
            if before is not None:
                bucket.updater.write_master(bucket, i, before, keep=True)
    for group, new in zip(optimizer.param_groups, saved_groups(saved), strict=True):
        dropped = ("params",) if optimizer.can_compress else ("params", *switch.KEYS)
        for key in switch.KEYS:
            group.pop(key, None)
        group.update({key: value for key, value in new.items() if key not in dropped})
    scale = loss_scale.from_dict(mapping_of(saved, "loss_scale"))
    optimizer.restore_outcomes(int_of(saved, "num_steps"), int_of(saved, "num_skipped"), scale)
    reconfigure.forget_jobs(runtime, int_of(saved, "num_jobs"))
    if optimizer.param_groups[0].get("is_exchanged"):
        # Masters are not what the weights round to: ranks have told each other only a part of the difference.
        runtime.adopt([param for param in runtime.params if param.name not in known], keep=False)
        for param in runtime.params:
            param.note_write()
    elif saved["has_unsent"]:
        # Masters are one update ahead of the weights; where there was no update, the weights are the truth.
        runtime.adopt([param for param in runtime.params if param.name not in known], keep=False)
        for param in runtime.params:
            param.note_write()
        reconfigure.hold_back(runtime, runtime.num_jobs)
    else:
        runtime.adopt(runtime.params, keep=True)  # the model's weights win where they are not what a master rounds to
    if optimizer.switch is not None:
        optimizer.switch.restore(None if saved.get("switch") is None else mapping_of(saved, "switch"))


def _weights_on_host(bucket: Bucket, index: int) -> Tensor:
    """A copy of a slice's weights, where these live on the host and are a part of the state."""
    piece = bucket.slices[index]
    host = bucket.store.weight if bucket.store.weight is not None else bucket.store.master
    return host[piece.offset : piece.offset + piece.numel].clone()


def _cut(entry: Mapping[str, object], start: int, numel: int) -> StateDict:
    """One slice of a saved parameter, flat."""
    cut: StateDict = {}
    for name, value in entry.items():
        if name.endswith("_scale"):
            cut[name] = tensor_of(entry, name)[start // BLOCK : -(-(start + numel) // BLOCK)].cpu()
        elif isinstance(value, Tensor):
            cut[name] = value.detach().reshape(-1)[start : start + numel].cpu()
        elif isinstance(value, dict):
            cut[name] = value
    return cut


def check(optimizer: Saved, saved: Mapping[str, object], source: Source) -> None:
    """Raise ValueError where `restore` would go wrong."""
    _check_kind(saved)
    check_head(saved, optimizer.rule_name)
    params, own = optimizer.runtime.params, optimizer.param_groups
    names = iter(param.name for param in params)
    check_members([[next(names) for _ in params_of(group)] for group in own], saved["param_groups"])
    groups = [{**group, **new} for group, new in zip(own, saved_groups(saved), strict=True)]  # as they will be
    check_groups(optimizer.rule, groups, "state_dict: ")
    check_entries(params, source, optimizer.rule, groups)
    rule = optimizer.rule
    if rule is not None and optimizer.is_stateless and any(rule.keeps_states(group) for group in groups):
        remedy = f"This optimizer was built without {rule.state_option} and keeps no buffer for it."
        raise invalid_value(f"state_dict: {rule.state_option}", "above 0", [0.0], remedy)
    if saved["has_unsent"] and not optimizer.delays_updates:
        raise invalid_value("delayed_update", False, [True], "This state was saved in the middle of a delayed update.")
    if optimizer.switch is not None and saved.get("switch") is not None:
        check_watch(saved["switch"])


def _check_kind(saved: object) -> None:
    """Ours, of this version."""
    if not isinstance(saved, Mapping):
        raise invalid_value("state_dict", f"of type {type(saved).__name__}", "a dict, as state_dict() gives it")
    if saved.get("kind") == KIND and saved.get("version") == VERSION:
        return
    remedy, given = "", f"kind {saved.get('kind')!r}, version {saved.get('version')!r}"
    if "kind" not in saved and {"state", "param_groups"} <= set(saved):
        remedy = (
            "It looks like that of a torch.optim.Optimizer: load it into that optimizer, built over this model, and "
            "give the optimizer as rule. TwinOptimizer(model, rule=optimizer) goes on from its state."
        )
    raise invalid_value("state_dict", given, f"kind {KIND!r}, version {VERSION}", remedy)
