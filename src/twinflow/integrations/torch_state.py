# SPDX-License-Identifier: Apache-2.0
"""Conversion between the state dict of a torch optimizer and the state of a TwinOptimizer.

torch numbers the parameters in the order of the param groups and stores no master weights. TwinOptimizer stores its
state by parameter name, with fp32 masters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from twinflow.checkpoint.load import Checkpoint
from twinflow.checkpoint.plain import put_together
from twinflow.offload.torch_state import num_steps
from twinflow.optim.equivalent import TORCH_ONLY
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.shard import shard_of
from twinflow.rules import ALL_RULES


def load_torch_state(twin: TwinOptimizer, saved: Mapping[str, Any]) -> None:
    """Load the state dict of a torch optimizer, whose weights the model already has. All ranks pass the whole state.

    Raises ValueError before any change if the state does not fit.
    """
    head = twin.stream_state()[0]
    groups, state = saved.get("param_groups"), saved.get("state")
    own: Any = head["param_groups"]
    sizes = [len(group["params"]) for group in own]
    there = [len(group["params"]) for group in groups] if isinstance(groups, (list, tuple)) else None
    if groups is None or state is None or there != sizes:
        raise ValueError(
            f"The saved optimizer has param groups of {there} parameters, but must have groups of {sizes} parameters, "
            "as this optimizer. Build the optimizer that was saved, with the same parameters in the same order."
        )
    tensors = {param.name: param.tensor for param in twin.runtime.params}
    entries, made = {}, []
    for group, old in zip(own, groups, strict=True):
        made.append({**group, **_own_options(old), "params": group["params"]})
        for name, number in zip(group["params"], old["params"], strict=True):
            entry = _entry(twin, dict(state.get(number) or {}), tensors[name])
            if entry is not None:
                entries[name] = entry
    steps = max((int(entry["step"]) for entry in entries.values()), default=0)
    twin.load_state_dict(
        {**head, "num_steps": steps, "num_skipped": 0, "has_unsent": False, "param_groups": made, "state": entries}
    )


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (*TORCH_ONLY, "params", "param_names")}


def _entry(twin: TwinOptimizer, state: dict[str, Any], param: Tensor) -> dict[str, Any] | None:
    """The entry of one parameter; None if torch has not updated it. The master is filled in from the weights."""
    tensors = {key: value for key, value in state.items() if value is not None}
    if not tensors:
        return None
    if (shard := shard_of(param)) is not None:  # this rank has some of the experts
        whole = shard.whole_shape(param.shape)
        for key, value in tensors.items():
            if isinstance(value, Tensor) and tuple(value.shape) == whole:
                tensors[key] = shard.cut(value)
    master = torch.zeros(()).expand(param.shape)
    if twin.rule is None:
        return {"step": num_steps(tensors), "master": master, "state": tensors}
    step = int(tensors.pop("step", 1))  # SGD does not count: only whether there was a step matters to it
    return {"step": step, "master": master, **{key: value.float() for key, value in tensors.items()}}


def torch_state(found: Checkpoint) -> dict[str, Any]:
    """The state dict that the torch optimizer would have, from a checkpoint of an engine. Raises ValueError for update
    rules that torch does not have.
    """
    if "optimizer" not in found.meta:
        raise ValueError(f"{found.path} contains no state of an optimizer.")
    head = put_together(found.meta["optimizer"], lambda name: found.tensor("rest", name))
    rule = ALL_RULES.get(head["rule"])
    if rule is not None and rule.torch_class is None:
        raise ValueError(f"{found.path}: torch has no optimizer for the update rule {rule.name!r}.")
    defaults: dict[str, Any] = {}
    if rule is not None:
        assert rule.torch_class is not None
        made = getattr(torch.optim, rule.torch_class)([torch.zeros(1, requires_grad=True)])
        defaults = {**{k: v for k, v in made.param_groups[0].items() if k != "params"}, **rule.torch_modes}
    groups, numbers = [], itertools.count()
    state: dict[int, Any] = {}
    for group in head["param_groups"]:
        indices = []
        for name in group["params"]:
            index = next(numbers)
            indices.append(index)
            entry = found.meta["optimizer_state"].get(name)
            if entry is not None:
                state[index] = _torch_entry(put_together(entry, _reader(found)), is_rule=rule is not None)
        groups.append({**defaults, **group, "params": indices})
    return {"state": state, "param_groups": groups}


def _reader(found: Checkpoint) -> Callable[[str], Tensor]:
    return lambda name: found.tensor("optimizer", name)


def _torch_entry(entry: Mapping[str, Any], is_rule: bool) -> dict[str, Any]:
    if not is_rule:
        return dict(entry["state"])
    tensors = {key: value.float() for key, value in entry.items() if isinstance(value, Tensor)}
    kept = {key: value for key, value in tensors.items() if key != "master" and not key.endswith("_scale")}
    counts = "momentum_buffer" not in kept  # torch's SGD does not count
    return {"step": torch.tensor(float(entry["step"])), **kept} if counts else kept
