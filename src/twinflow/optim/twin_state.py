"""Converts the state of a TwinOptimizer to a dict and back: fp32 tensors by parameter name, for every format in memory.

The dict contains only parameters that have been updated. 8-bit states are saved with their scales, so that loading into
the same format gives the same codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

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
from twinflow.state_dict import Entry, PartOf, StateDict, int_of, mapping_of, params_of, saved_groups, tensor_of

KIND = "twinflow.TwinOptimizer"
VERSION = 1


class Saved(switch.Compressible, Protocol):
    """The part of a TwinOptimizer that this module reads and sets."""

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
    """A `Source` over the `state` of a state dict."""

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
    """The entries of a state dict by parameter name. `check_plain` must have checked the dict."""
    state = mapping_of(saved, "state")
    return {name: mapping_of(state, name) for name in state}


def collect(optimizer: Saved) -> StateDict:
    """The state of an optimizer without running updates.

    Tensors may be views of the state, which the next step changes.
    """
    state = {param.name: _read_param(optimizer, param) for param in optimizer.runtime.params}
    return {**head(optimizer), "state": {name: entry for name, entry in state.items() if entry}}


def head(optimizer: Saved) -> StateDict:
    """The state without the entries of parameters."""
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
        "num_jobs": runtime.steps.num_jobs,
        "has_unsent": runtime.steps.has_unsent,
        "loss_scale": loss_scale.to_dict(optimizer.scale_rule),
        "param_groups": groups,
        **({"switch": optimizer.switch.state()} if optimizer.switch is not None else {}),
    }


def stream(optimizer: Saved) -> Iterator[tuple[str, StateDict]]:
    """The entries of updated parameters as in `collect`, with an `Entry` instead of each tensor.

    If ranks share a parameter, there is an entry for each part that this rank has.
    """
    for param in optimizer.runtime.params:
        pieces = _pieces(param)
        if not pieces or not pieces[0][0].steps[pieces[0][1]]:
            continue
        if optimizer.rule is None:  # the entry of a user's optimizer has its own tensors and needs no conversion
            entry = _read_param(optimizer, param)
            yield param.name, {key: _as_streams(f"{param.name}/{key}", value) for key, value in entry.items()}
        elif param.is_sharded or any(bucket.is_shared for bucket, _ in pieces):
            for bucket, index in pieces:
                yield param.name, _streamed_part(optimizer.rule, param, bucket, index)
        else:
            yield param.name, _streamed(optimizer.rule, param)


def _specs(rule: Rule, param: Param, bucket: Bucket) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor in a parameter's entry."""
    store, shape = bucket.store, tuple(param.tensor.shape)
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"master": (torch.float32, shape)}
    for name, state, scale in zip(rule.states, store.states, store.scales, strict=True):
        if name is not None and state is not None:
            specs[name] = (torch.float32 if scale is not None else state.dtype, shape)
            # Quantization blocks of rows, or of a tensor rank's part, differ from those of the whole parameter.
            if scale is not None and not param.is_sharded and shard_of(param.tensor) is None:
                specs[f"{name}_scale"] = (torch.float32, (-(-param.tensor.numel() // BLOCK),))
    return specs


def _streamed(rule: Rule, param: Param) -> StateDict:
    bucket, index = _pieces(param)[0]
    streams = {
        key: Entry(f"{param.name}/{key}", dtype, dims, partial(_read_one, param, key, dtype, dims))
        for key, (dtype, dims) in _specs(rule, param, bucket).items()
    }
    return {"step": bucket.steps[index], **streams}


def _streamed_part(rule: Rule, param: Param, bucket: Bucket, index: int) -> StateDict:
    """The entry of one slice of a parameter."""
    piece, streams = bucket.slices[index], {}
    for key, (dtype, dims) in _specs(rule, param, bucket).items():
        unit = BLOCK if key.endswith("_scale") else 1
        numel, read = -(-piece.numel // unit), partial(_read_flat, bucket, index, key)
        start = (param.first + piece.start) // unit
        streams[key] = Entry(f"{param.name}/{key}", dtype, (numel,), read, PartOf(dims, start))
    return {"step": bucket.steps[index], **streams}


def _read_flat(bucket: Bucket, index: int, key: str) -> Tensor:
    return _read_piece(bucket, index, key).reshape(-1)


def _read_one(param: Param, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """One tensor of a parameter's entry, joined from its slices."""
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
        return Entry(name, value.dtype, tuple(value.shape), lambda: value)
    if isinstance(value, dict):
        return {key: _as_streams(f"{name}/{key}", item) for key, item in value.items()}
    return value


def _read_param(optimizer: Saved, param: Param) -> StateDict:
    """Step, master and states of one parameter in its shape; empty if it was never updated."""
    pieces = list(_pieces(param))
    if not pieces or pieces[0][0].steps[pieces[0][1]] == 0:
        return {}
    parts = [bucket.updater.read(bucket, i) for bucket, i in pieces]
    entry: StateDict = {"step": pieces[0][0].steps[pieces[0][1]]}
    for name in parts[0]:
        if isinstance(parts[0][name], dict):  # the state of a user's optimizer, whose parameters are not split
            entry[name] = parts[0][name]
            continue
        tensors = [tensor_of(part, name) for part in parts]
        values = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        entry[name] = values if name.endswith("_scale") else values.view(param.tensor.shape)
    return entry


def _pieces(param: Param) -> list[tuple[Bucket, int]]:
    """A parameter's slices in order, as (bucket, index)."""
    found = [(b, i) for b in param.buckets for i, piece in enumerate(b.slices) if piece.param == param.index]
    return sorted(found, key=lambda at: at[0].slices[at[1]].start)


def restore(optimizer: Saved, saved: Mapping[str, object], source: Source | None = None) -> None:
    """Checks `saved` completely and then loads it. Entries are read from `source`, or from `saved` without it."""
    runtime = optimizer.runtime
    _check_kind(saved)
    if source is None:
        check_plain(saved.get("state"), optimizer.rule)
        source = _DictSource(entries_of(saved))
    check(optimizer, saved, source)
    known = set(source.names())
    # With an unsent update or compressed communication, masters differ from the weights by more than rounding.
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
        # Masters do not round to the weights, because ranks have communicated only a part of the difference.
        runtime.adopt([param for param in runtime.params if param.name not in known], keep=False)
        for param in runtime.params:
            param.note_write()
    elif saved["has_unsent"]:
        # Masters are one update ahead of the weights. Parameters without an update get their master from the weights.
        runtime.adopt([param for param in runtime.params if param.name not in known], keep=False)
        for param in runtime.params:
            param.note_write()
        reconfigure.hold_back(runtime, runtime.steps.num_jobs)
    else:
        runtime.adopt(runtime.params, keep=True)  # masters that do not round to the model's weights are replaced
    if optimizer.switch is not None:
        optimizer.switch.restore(None if saved.get("switch") is None else mapping_of(saved, "switch"))


def _weights_on_host(bucket: Bucket, index: int) -> Tensor:
    """A copy of a slice's offloaded weights, which are part of the state."""
    piece = bucket.slices[index]
    host = bucket.store.weight if bucket.store.weight is not None else bucket.store.master
    return host[piece.offset : piece.offset + piece.numel].clone()


def _cut(entry: Mapping[str, object], start: int, numel: int) -> StateDict:
    """One slice of a saved parameter as flat tensors."""
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
    """Raises ValueError if `saved` does not fit the optimizer."""
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
        raise ValueError(
            f"state_dict: {rule.state_option} is above 0, but must be 0, because this optimizer was built without "
            f"{rule.state_option} and has no buffer for it. Build the optimizer with {rule.state_option}."
        )
    if saved["has_unsent"] and not optimizer.delays_updates:
        remedy = "This state was saved in the middle of a delayed update. Build the optimizer with delayed_update=True."
        raise invalid_value("delayed_update", False, [True], remedy)
    if optimizer.switch is not None and saved.get("switch") is not None:
        check_watch(saved["switch"])


def _check_kind(saved: object) -> None:
    """Raises ValueError if `saved` is not a state of this version of TwinOptimizer."""
    if not isinstance(saved, Mapping):
        raise invalid_value("The type of state_dict", type(saved).__name__, "a dict, as state_dict() returns it")
    if saved.get("kind") == KIND and saved.get("version") == VERSION:
        return
    remedy, given = "", f"kind {saved.get('kind')!r}, version {saved.get('version')!r}"
    if "kind" not in saved and {"state", "param_groups"} <= set(saved):
        remedy = (
            "It looks like the state of a torch.optim.Optimizer. Load it into that optimizer, built over this model, "
            "and use TwinOptimizer(model, rule=optimizer), which continues from its state."
        )
    raise invalid_value("state_dict", given, f"kind {KIND!r}, version {VERSION}", remedy)
