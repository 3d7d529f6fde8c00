# SPDX-License-Identifier: Apache-2.0
"""Converts the state of a TwinOptimizer to a dict and back: fp32 tensors by parameter name, for every format in memory.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

The dict contains only parameters that have been updated. States with scales are saved with their scales, so that
loading into the same format gives the same codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.offload import reconfigure, slices
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.updater import RuleUpdater
from twinflow.offload.weight_buffers import host_of
from twinflow.optim import loss_scale
from twinflow.optim.muon_groups import check_unchanged
from twinflow.optim.outcomes import Outcomes
from twinflow.optim.switch import KEYS, Switch, read_state
from twinflow.optim.twin_checks import check_groups, is_flag, number_of
from twinflow.parallel.shard import shard_of
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK
from twinflow.rules.segment import Store
from twinflow.state_dict import (
    Entry,
    Halves,
    PartOf,
    Parts,
    StateDict,
    int_of,
    mapping_of,
    params_of,
    saved_groups,
    tensor_of,
)
from twinflow.zero.compression import VarianceWatch

KIND = "twinflow.TwinOptimizer"
VERSION = 1
_COUNTS = ("num_steps", "num_skipped", "num_jobs")
_MAX_STEP = 2**53  # larger numbers of updates are not exact as floats
_UNCHANGED = "Pass a state that state_dict() has returned, without changes."


class Source(Protocol):
    """Saved state by parameter, read for one parameter at a time. A tensor-parallel rank gets only its own parts."""

    def names(self) -> Iterable[str]:
        """The parameters that have an entry."""
        ...

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors in one entry, without reading them."""
        ...

    def dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """The dtypes of the tensors in one entry, without reading them."""
        ...

    def step(self, name: str) -> int:
        """The number of updates of one parameter."""
        ...

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        """The state of `numel` elements of one parameter as flat tensors. Other values are returned whole."""
        ...


class _DictSource:
    """A `Source` over the `state` of a state dict."""

    def __init__(self, state: Mapping[str, Mapping[str, object]]) -> None:
        self._state = state

    def names(self) -> Iterable[str]:
        return self._state

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self._state[name].items() if isinstance(value, Tensor)}

    def dtypes(self, name: str) -> dict[str, torch.dtype]:
        return {key: value.dtype for key, value in self._state[name].items() if isinstance(value, Tensor)}

    def step(self, name: str) -> int:
        entry = self._state[name]
        if not _is_whole(entry["step"]):
            raise ValueError(entry["step"])
        return int_of(entry, "step")

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        return _cut(self._state[name], start, numel)


def collect(optimizer: Outcomes, switch: Switch | None) -> StateDict:
    """The state dict of an optimizer whose updates have ended. Tensors may be views, which the next step changes."""
    state = {param.name: _read_param(optimizer, param) for param in optimizer.runtime.params}
    return {**head(optimizer, switch), "state": {name: entry for name, entry in state.items() if entry}}


def head(optimizer: Outcomes, switch: Switch | None) -> StateDict:
    """The state dict without the entries of parameters."""
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
        "master": optimizer.master,
        "num_steps": optimizer.num_steps,
        "num_skipped": optimizer.num_skipped,
        "num_jobs": runtime.steps.num_jobs,
        "has_unsent": runtime.steps.has_unsent,
        "loss_scale": loss_scale.to_dict(optimizer.scale_rule),
        "param_groups": groups,
        **({"switch": switch.state()} if switch is not None else {}),
    }


def stream(optimizer: Outcomes) -> Iterator[tuple[str, StateDict]]:
    """The entries of updated parameters as in `collect`. Each tensor is an `Entry`, which reads the values later.

    If ranks share a parameter, there is an entry for each part that this rank has.
    """
    for param in optimizer.runtime.params:
        pieces = param.own_slices()
        if not pieces or not pieces[0][0].steps[pieces[0][1]]:
            continue
        if optimizer.rule is None:  # the entry of a user's optimizer has its own tensors and needs no conversion
            entry = _read_param(optimizer, param)
            yield param.name, {key: _as_streams(f"{param.name}/{key}", value) for key, value in entry.items()}
            continue
        rule = optimizer.rule.of(optimizer.param_groups[param.group])
        if param.is_sharded or any(bucket.is_shared for bucket, _ in pieces):
            for piece in pieces:
                yield param.name, _streamed(rule, param, [piece], is_part=True)
        else:
            yield param.name, _streamed(rule, param, pieces, is_part=False)


def _specs(rule: Rule, param: Param, bucket: Bucket) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor in a parameter's entry."""
    store, shape = bucket.store, tuple(param.tensor.shape)
    master = torch.float32 if store.has_master else torch.bfloat16
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"master": (master, shape)}
    for which, (name, state, scale) in enumerate(zip(rule.states, store.states, store.scales, strict=True)):
        if name is not None and store.has_state(which):
            specs[name] = (torch.float32 if scale is not None or state is None else state.dtype, shape)
            # Quantization blocks of rows, or of a tensor rank's part, differ from those of the whole parameter.
            if scale is not None and not param.is_sharded and shard_of(param.tensor) is None:
                specs[f"{name}_scale"] = (torch.float32, (-(-param.tensor.numel() // BLOCK),))
    return specs


def _streamed(rule: Rule, param: Param, pieces: Sequence[tuple[Bucket, int]], is_part: bool) -> StateDict:
    """The entry of a parameter, or of one slice of it (`is_part`)."""
    (bucket, index), streams = pieces[0], {}
    piece = bucket.slices[index]
    readers = [_reader(rule, *one) for one in pieces]
    for key, (dtype, dims) in _specs(rule, param, bucket).items():
        part, shape = None, dims
        if is_part:
            unit = _unit(key)
            part, shape = PartOf(dims, (param.first + piece.start) // unit), (-(-piece.numel // unit),)
        streams[key] = Entry(f"{param.name}/{key}", dtype, shape, partial(_read, readers, key, shape), part)
    return {"step": bucket.steps[index], **streams}


def _unit(key: str) -> int:
    """Number of the parameter's elements for each element of the tensor `key` of an entry."""
    return BLOCK if key.endswith("_scale") else 1


_Reader = Callable[[str], Tensor | Halves]  # returns the master, a state or its scales of one slice


def _reader(rule: Rule, bucket: Bucket, index: int) -> _Reader:
    """Reads the present state of a slice, also after an update has given the bucket another store."""
    if isinstance(bucket.updater, RuleUpdater):
        return partial(_read_kept, rule, bucket.updater.store_of(bucket, index))
    return partial(read_state, bucket, index)


def _read_kept(rule: Rule, store: Store, key: str) -> Tensor | Halves:
    if key == "master" and store.is_split and store.weight is not None and store.weight.device.type == "cpu":
        return Halves(store.weight, store.master)  # joined when they are written, in the same pass over memory
    found = slices.read_one(rule, store, key)
    assert found is not None
    return found


def _read(readers: Sequence[_Reader], key: str, shape: tuple[int, ...]) -> Tensor | Parts:
    """One tensor of an entry, of which each reader returns a slice."""
    found = [read(key) for read in readers]
    if len(found) == 1 and isinstance(found[0], Tensor):
        return found[0].view(shape)
    return Parts(tuple(found))


def weight_reader(param: Param) -> Callable[[], Tensor | Parts] | None:
    """Returns a function that reads the present weights of a parameter from its state, also after an update.

    None if the state of the whole parameter is not on this host, or does not contain exactly these weights.
    """
    stores = []
    pieces = param.own_slices()
    for bucket, index in pieces:
        if not isinstance(bucket.updater, RuleUpdater) or bucket.is_shared or bucket.offloads_params:
            return None
        store = bucket.updater.store_of(bucket, index)
        stores.append(store.master if store.master.dtype == bucket.plan.dtype else store.weight)
    if not stores or param.is_sharded or param.is_written:
        return None
    values = [store for store in stores if store is not None]
    if len(values) < len(stores):  # the fp32 master of an fp16 parameter
        return None
    shape = param.tensor.shape
    return lambda: values[0].view(shape) if len(values) == 1 else Parts(tuple(values))


def _as_streams(name: str, value: object) -> object:
    if isinstance(value, Tensor):
        return Entry(name, value.dtype, tuple(value.shape), lambda: value)
    if isinstance(value, dict):
        return {key: _as_streams(f"{name}/{key}", item) for key, item in value.items()}
    return value


def _read_param(optimizer: Outcomes, param: Param) -> StateDict:
    """Step, master and states of one parameter in its shape; empty if it was never updated."""
    pieces = param.own_slices()
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


def restore(
    optimizer: Outcomes, switch: Switch | None, saved: Mapping[str, object], source: Source | None = None
) -> None:
    """Checks `saved` completely and then loads it. Entries are read from `source`; if it is None, from `saved`."""
    runtime = optimizer.runtime
    _check_kind(saved)
    if source is None:
        source = source_of(optimizer, saved)
    check(optimizer, switch, saved, source)
    known = set(source.names())
    # With an unsent update or compressed communication, masters differ from the weights by more than rounding.
    is_exchanged = optimizer.can_compress and saved_groups(saved)[0].get("is_exchanged")
    # Each format has scales of its own. Without them, states are encoded again.
    drops_scales = saved.get("states", optimizer.states) != optimizer.states
    weights_win = not saved["has_unsent"] and not is_exchanged
    for param in runtime.params:
        for bucket, i in param.own_slices():
            is_known = param.name in known
            piece, before = bucket.slices[i], None
            if bucket.offloads_params and weights_win:  # offloaded weights are part of the state
                before = host_of(bucket).read(piece.offset, piece.numel).clone()
            bucket.steps[i] = source.step(param.name) if is_known else 0
            if is_known:
                values = source.cut(param.name, param.first + piece.start, piece.numel)
                if param.is_sharded or drops_scales:
                    values = {key: value for key, value in values.items() if not key.endswith("_scale")}
                bucket.updater.write(bucket, i, values)
            else:
                bucket.updater.clear(bucket, i, optimizer.param_groups)
            if before is not None:
                bucket.updater.write_master(bucket, i, before, keep=True)
    for group, new in zip(optimizer.param_groups, saved_groups(saved), strict=True):
        dropped = ("params",) if optimizer.can_compress else ("params", *KEYS)
        for key in KEYS:
            group.pop(key, None)
        group.update({key: value for key, value in new.items() if key not in dropped})
    scale = loss_scale.from_dict(mapping_of(saved, "loss_scale"))
    optimizer.restore_outcomes(int_of(saved, "num_steps"), int_of(saved, "num_skipped"), scale)
    reconfigure.forget_jobs(runtime, int_of(saved, "num_jobs"))
    if saved["has_unsent"] or optimizer.param_groups[0].get("is_exchanged"):
        # Masters do not round to the weights: they are one update ahead, or ranks have communicated only a part of the
        # difference. Parameters without an update get their master from the weights.
        runtime.adopt([param for param in runtime.params if param.name not in known], keep=False)
        for param in runtime.params:
            param.note_write()
    else:
        runtime.adopt(runtime.params, keep=True)  # masters that do not round to the model's weights are replaced
    if saved["has_unsent"]:
        reconfigure.hold_back(runtime, runtime.steps.num_jobs)
    if switch is not None:
        switch.restore(None if saved.get("switch") is None else mapping_of(saved, "switch"))


def source_of(optimizer: Outcomes, saved: Mapping[str, object]) -> Source:
    """The entries of parameters in a state dict, after a check of their types."""
    return _DictSource(_plain_entries(saved.get("state"), optimizer.rule))


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


def check(optimizer: Outcomes, switch: Switch | None, saved: Mapping[str, object], source: Source) -> None:
    """Raises ValueError if `saved` does not fit the optimizer."""
    _check_kind(saved)
    _check_head(saved, optimizer.rule_name)
    params, own = optimizer.runtime.params, optimizer.param_groups
    names = iter(param.name for param in params)
    _check_members([[next(names) for _ in params_of(group)] for group in own], saved["param_groups"])
    groups = [{**group, **new} for group, new in zip(own, saved_groups(saved), strict=True)]  # as they will be
    check_groups(optimizer.rule, groups, "state_dict: ")
    check_unchanged(optimizer.rule, groups, optimizer.matrix_groups)
    _check_entries(params, source, optimizer.rule, groups)
    rule = optimizer.rule
    if rule is not None and optimizer.is_stateless and any(rule.keeps_states(group) for group in groups):
        raise ValueError(
            f"state_dict: {rule.state_option} is above 0, but must be 0, because this optimizer was built without "
            f"{rule.state_option} and has no buffer for it. Build the optimizer with {rule.state_option} > 0."
        )
    if saved["has_unsent"] and not optimizer.runtime.settings.delayed_update:
        remedy = "This state was saved in the middle of a delayed update. Build the optimizer with delayed_update=True."
        raise invalid_value("delayed_update", False, [True], remedy)
    if switch is not None and saved.get("switch") is not None:
        _check_watch(saved["switch"])


def _check_kind(saved: object) -> None:
    """Raises ValueError if `saved` is not a state of this version of TwinOptimizer."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict is of type {type(saved).__name__}, but must be a dict. {_UNCHANGED}")
    if saved.get("kind") == KIND and saved.get("version") == VERSION:
        return
    remedy = "Pass a dict that state_dict() of a TwinOptimizer has returned, in this version of twinflow."
    if "kind" not in saved and {"state", "param_groups"} <= set(saved):
        remedy = (
            "The dict looks like the state of a torch.optim.Optimizer. Build that optimizer over this model and load "
            "the state into it. Then TwinOptimizer(model, rule=optimizer) continues from this state."
        )
    raise ValueError(
        f"state_dict has the kind {saved.get('kind')!r} and the version {saved.get('version')!r}, but must have the "
        f"kind {KIND!r} and the version {VERSION}. {remedy}"
    )


def _check_head(saved: Mapping[str, object], rule_name: str) -> None:
    """Checks a state dict except for the values of `state` and `param_groups`."""
    for key in ("rule", *_COUNTS, "has_unsent", "loss_scale", "param_groups"):
        if key not in saved:
            raise ValueError(f"state_dict: {key} is missing. Pass a state that state_dict() has returned.")
    if saved["rule"] != rule_name:
        remedy = "Build the optimizer with the rule of the saved state."
        raise invalid_value("state_dict: rule", saved["rule"], [rule_name], remedy)
    for key in _COUNTS:
        if not (_is_whole(saved[key]) and 0 <= number_of(saved[key]) <= _MAX_STEP):
            raise invalid_value(f"state_dict: {key}", saved[key], "a whole number >= 0", _UNCHANGED)
    if not is_flag(saved["has_unsent"]):
        raise invalid_value("state_dict: has_unsent", saved["has_unsent"], [True, False], _UNCHANGED)
    if not isinstance(saved["loss_scale"], Mapping):
        raise invalid_value("state_dict: loss_scale", saved["loss_scale"], "a dict of numbers", _UNCHANGED)
    loss_scale.from_dict(saved["loss_scale"])


def _is_whole(value: object) -> bool:
    """Whether `value` is a whole number. 3.0 is one, because torch counts steps in floats."""
    try:
        return number_of(value).is_integer()
    except OverflowError:  # an integer that is too large for a float
        return False


def _check_watch(saved: object) -> None:
    """Checks the state of 1-bit Adam's watch over the second moment."""
    if not isinstance(saved, Mapping):
        raise _wrong_type("switch", saved, "a dict")
    try:
        VarianceWatch(1, 1.0).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        text = f"state_dict: switch cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{text}. {_UNCHANGED}") from None


def _check_members(own: Sequence[Sequence[str]], groups: object) -> None:
    """Raises ValueError, with the differences, unless the saved groups have the same parameters in the same order."""
    allowed = "a list of dicts, each with the names of its 'params'"
    if not isinstance(groups, (list, tuple)):
        raise invalid_value("state_dict: param_groups", groups, allowed, _UNCHANGED)
    for i, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            name = f"state_dict: param_groups[{i}]['params']"
            raise invalid_value(name, names, "a list of parameter names", _UNCHANGED)
    then = [list(group["params"]) for group in groups]
    if then == [list(names) for names in own]:
        return
    before, now = _group_of(then), _group_of(own)
    differences = {
        "only in the model": [name for name in now if name not in before],
        "only in the state": [name for name in before if name not in now],
        "in different groups": [name for name in now if before.get(name, now[name]) != now[name]],
    }
    said = "; ".join(f"{what}: {_some(names)}" for what, names in differences.items() if names)
    sizes = f"the state has {len(then)} groups and the optimizer has {len(own)}"
    said = said or (sizes if len(then) != len(own) else "the names are in another order")
    raise ValueError(
        f"state_dict: the parameters of param_groups differ ({said}), but must be the same in each group. "
        "Train the same parameters in the same groups as when the state was saved. To train other parameters, do "
        "not load the optimizer state: use engine.load_checkpoint(..., load_optimizer_states=False), or do not call "
        "load_state_dict()."
    )


def _group_of(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: i for i, names in enumerate(groups) for name in names}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plain_entries(state: object, rule: Rule | None) -> dict[str, Mapping[str, object]]:
    """The entries of a state dict by parameter name, after a check of the types of entries and values."""
    if not isinstance(state, Mapping):
        raise _wrong_type("state", state, "a dict with an entry for each parameter name")
    rules = [one for one in (rule, rule.elementwise if rule is not None else None) if one is not None]
    tensors = {"master", *(state for one in rules for state in one.states)}
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise _wrong_type(f"state of {name}", entry, "a dict")
        for key, value in entry.items():
            is_tensor = isinstance(value, Tensor) and value.is_floating_point()
            if (key in tensors or str(key).endswith("_scale")) and not is_tensor:
                raise _wrong_type(f"{key} of {name}", value, "a tensor of floating-point numbers")
            if rule is None and key in ("state", "group") and not isinstance(value, dict):
                raise _wrong_type(f"{key} of {name}", value, "a dict")
    return dict(state)


def _wrong_type(name: str, value: object, expected: str) -> ValueError:
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    return ValueError(f"state_dict: {name} is {kind}, but must be {expected}. {_UNCHANGED}")


def _check_entries(
    params: Sequence[Param], source: Source, rule: Rule | None, groups: Sequence[Mapping[str, object]]
) -> None:
    """Checks that each entry belongs to a parameter, is complete, and has tensors of the right shapes."""
    own = {param.name: param for param in params}
    for name in source.names():
        if name not in own:
            expected = "the name of a trainable parameter of this model"
            remedy = "Load the state into the model for which it was saved, with the same parameters frozen."
            raise invalid_value("state_dict: a key of state", name, expected, remedy)
        try:
            step = source.step(name)
        except (KeyError, TypeError, ValueError, OverflowError):
            step = -1
        if not 0 <= step <= _MAX_STEP:
            raise ValueError(
                f"state_dict: step of {name} is missing or invalid, but must be a whole number >= 0. Pass a state that "
                "state_dict() has returned."
            )
        shapes, param = source.shapes(name), own[name]
        needed = ["master"]
        group = groups[param.group]
        if rule is not None and rule.keeps_states(group):
            needed += [state for state in rule.of(group).states if state]
        for key in needed:
            if key not in shapes:
                raise ValueError(
                    f"state_dict: {key} of {name} is missing, but must be a tensor of the parameter's shape. Pass a "
                    "state that state_dict() has returned."
                )
        for key, dtype in source.dtypes(name).items():
            if rule is not None and key != "step" and not dtype.is_floating_point:
                raise invalid_value(
                    f"state_dict: the dtype of {key} of {name}", dtype, "a floating-point dtype", _UNCHANGED
                )
        is_part = param.is_sharded or shard_of(param.tensor) is not None  # its scales may be those of the whole
        for key, shape in shapes.items():
            is_scale = key.endswith("_scale")
            wanted: tuple[int, ...] = (-(-param.tensor.numel() // BLOCK),) if is_scale else tuple(param.tensor.shape)
            if key != "step" and shape != wanted and not (is_scale and is_part):
                remedy = "Load the state into the model for which it was saved."
                raise invalid_value(f"state_dict: the shape of {key} of {name}", shape, [wanted], remedy)
