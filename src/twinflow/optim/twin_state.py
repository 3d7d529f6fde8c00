"""A TwinOptimizer's state as a plain dict, and back: fp32 tensors by parameter name, whatever the format in memory.

Only parameters that have been updated appear: a fresh optimizer's state is small. 8-bit states come with their scales,
so that the same format gets the same codes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinflow.errors import bad_value
from twinflow.offload.bucket import Bucket, Param
from twinflow.optim import loss_scale
from twinflow.rules.formats import BLOCK

if TYPE_CHECKING:
    from twinflow.optim.twin import TwinOptimizer

KIND = "twinflow.TwinOptimizer"
VERSION = 1


def collect(optimizer: TwinOptimizer) -> dict[str, Any]:
    """The state of an optimizer that has nothing under way. Tensors may be views: clone what must not change."""
    runtime = optimizer.runtime
    state = {param.name: _read_param(optimizer, param) for param in runtime.params}
    names = iter(param.name for param in runtime.params)
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [next(names) for _ in group["params"]]})
    return {
        "kind": KIND,
        "version": VERSION,
        "rule": optimizer.rule_name,
        "states": optimizer.states,
        "num_steps": optimizer.num_steps,
        "num_skipped": optimizer.num_skipped,
        "num_jobs": runtime.num_jobs,
        "has_unsent": runtime.has_unsent,
        "loss_scale": loss_scale.to_dict(optimizer._loss_scale),
        "state": {name: entry for name, entry in state.items() if entry},
        "param_groups": groups,
    }


def _read_param(optimizer: TwinOptimizer, param: Param) -> dict[str, Any]:
    """One parameter's step, master and states in its own shape; nothing where it was never updated."""
    pieces = list(_pieces(param))
    if not pieces or pieces[0][0].steps[pieces[0][1]] == 0:
        return {}
    parts = [optimizer.runtime.updater.read(bucket, i) for bucket, i in pieces]
    entry: dict[str, Any] = {"step": pieces[0][0].steps[pieces[0][1]]}
    for name in parts[0]:
        if isinstance(parts[0][name], dict):  # what a torch optimizer keeps, for whole parameters: in its own shapes
            entry[name] = parts[0][name]
            continue
        values = parts[0][name] if len(parts) == 1 else torch.cat([part[name] for part in parts])
        entry[name] = values if name.endswith("_scale") else values.view(param.tensor.shape)
    return entry


def _pieces(param: Param) -> list[tuple[Bucket, int]]:
    """A parameter's slices in order: bucket and index."""
    found = [(b, i) for b in param.buckets for i, piece in enumerate(b.slices) if piece.param == param.index]
    return sorted(found, key=lambda at: at[0].slices[at[1]].start)


def restore(optimizer: TwinOptimizer, saved: Mapping[str, Any]) -> None:
    """Check all of `saved`, then take it over."""
    runtime = optimizer.runtime
    _check(optimizer, saved)
    for param in runtime.params:
        entry = saved["state"].get(param.name)
        for bucket, i in _pieces(param):
            bucket.steps[i] = int(entry["step"]) if entry else 0
            if entry:
                piece = bucket.slices[i]
                runtime.updater.write(bucket, i, _cut(entry, piece.start, piece.numel))
            else:
                runtime.updater.clear(bucket, i, optimizer.param_groups)
    for group, new in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in new.items() if key != "params"})
    optimizer.num_steps, optimizer.num_skipped = int(saved["num_steps"]), int(saved["num_skipped"])
    optimizer._loss_scale = loss_scale.from_dict(saved["loss_scale"])
    optimizer._unread = None
    runtime.forget_jobs(int(saved["num_jobs"]))
    if saved["has_unsent"]:
        # Masters are one update ahead of the weights; where there was no update, the weights are the truth.
        runtime.adopt([param for param in runtime.params if param.name not in saved["state"]], keep=False)
        for param in runtime.params:
            param.version = param.tensor._version
        runtime.hold_back(runtime.num_jobs)
    else:
        runtime.adopt(runtime.params, keep=True)  # the model's weights win where they are not what a master rounds to


def _cut(entry: Mapping[str, Any], start: int, numel: int) -> dict[str, Any]:
    """One slice of a saved parameter, flat."""
    cut: dict[str, Any] = {}
    for name, value in entry.items():
        if name.endswith("_scale"):
            cut[name] = value[start // BLOCK : -(-(start + numel) // BLOCK)].cpu()
        elif isinstance(value, Tensor):
            cut[name] = value.detach().reshape(-1)[start : start + numel].cpu().float()
        elif isinstance(value, dict):
            cut[name] = value
    return cut


def _check(optimizer: TwinOptimizer, saved: Mapping[str, Any]) -> None:
    if saved.get("kind") != KIND or saved.get("version") != VERSION:
        given = f"kind {saved.get('kind')!r}, version {saved.get('version')!r}"
        raise bad_value("state_dict", given, f"kind {KIND!r}, version {VERSION}")
    if saved["rule"] != optimizer.rule_name:
        raise bad_value("state_dict: rule", saved["rule"], [optimizer.rule_name])
    own = {param.name: param for param in optimizer.runtime.params}
    for name, entry in saved["state"].items():
        if name not in own:
            raise bad_value("state_dict: parameter", name, "the names of this model's trainable parameters")
        for key, value in entry.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) and not key.endswith("_scale") else None
            if shape is not None and shape != tuple(own[name].tensor.shape):
                raise bad_value(f"state_dict: shape of {name} {key}", shape, [tuple(own[name].tensor.shape)])
    names = iter(own)
    groups = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    if [list(group["params"]) for group in saved["param_groups"]] != groups:
        raise bad_value("state_dict: parameters of param_groups", "others", "the same names in the same groups")
    if saved["has_unsent"] and not optimizer._settings.delayed_update:
        raise bad_value("delayed_update", False, [True], "This state was saved in the middle of a delayed update.")
