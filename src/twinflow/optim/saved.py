"""Reads a saved state of a host optimizer, in any of twinflow's formats or torch.optim's.

A state that does not fit raises ValueError before the optimizer changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.rules import Rule
from twinflow.rules.checks import FLOATS
from twinflow.rules.segment import Store, decode_state, encode_state, new_states, state_numels
from twinflow.state_dict import StateDict, int_of, list_of, params_of, saved_groups


def check_groups(
    rule: Rule, defaults: Mapping[str, object], own: Sequence[Mapping[str, object]], state_dict: Mapping[str, object]
) -> list[StateDict]:
    """The saved groups with defaults filled in. Raises ValueError if they do not fit the optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise invalid_value("state_dict", sorted(map(str, state_dict)), "a dict with 'state' and 'param_groups'")
    groups = [{**defaults, **group} for group in saved_groups(state_dict)]
    sizes, own_sizes = [len(list_of(group, "params")) for group in groups], [len(params_of(group)) for group in own]
    if sizes != own_sizes:
        remedy = "Build the optimizer with the same groups as when the state was saved."
        raise invalid_value("state_dict: number of parameters in each group", sizes, [own_sizes], remedy)
    for i, group in enumerate(groups):
        rule.check(group)
        for name, value in rule.torch_modes.items():
            if bool(group.pop(name, value)) is not value:
                remedy = f"The state was saved by an optimizer that is not {rule.name}."
                raise invalid_value(f"state_dict: param_groups[{i}][{name!r}]", not value, [value], remedy)
    return groups


def read_state(label: str, rule: Rule, states: str, param: Tensor, entry: Mapping[str, object]) -> StateDict:
    """The state of one parameter in the format `states`, converted from a saved entry."""
    wanted = [name for name in rule.states if name]
    names = [name for name in wanted if entry.get(name) is not None]
    if names != wanted and (names or rule.state_option is None):
        remedy = "The state was saved by another kind of optimizer."
        raise invalid_value(f"{label}: states", sorted(names), [wanted], remedy)
    counted = int_of(entry, "step") if "step" in entry else 1 if names else 0  # torch's SGD does not count steps
    state: StateDict = {"step": counted}
    if names:
        buffers, scales = new_states(rule, states, param.numel())
        store = Store(states, param.detach().view(-1), None, buffers, scales)
        for which, name in enumerate(rule.states):
            values, scale = buffers[which], scales[which]
            if name is None or values is None:
                continue
            _read_one(f"{label}[{name!r}]", rule, store, which, entry, param.shape)
            state[name] = values.view(param.shape)
            if scale is not None:
                state[f"{name}_scale"] = scale
    for name, dtype in (("master", torch.float32), ("master_lower", torch.int16)):
        master = entry.get(name)
        if master is not None and param.dtype != torch.float32:
            state[name] = (
                _check(f"{label}[{name!r}]", master, (dtype,), param.shape).detach().cpu().clone().contiguous()
            )
    return state


def _read_one(label: str, rule: Rule, store: Store, which: int, entry: Mapping[str, object], shape: torch.Size) -> None:
    """Reads one state into `store`: copied if the format is the same, otherwise converted."""
    name, into, own_scale = rule.states[which], store.states[which], store.scales[which]
    assert name is not None and into is not None
    values = _check(label, entry[name], (*FLOATS, torch.float64, torch.uint8), shape).detach().cpu().reshape(-1)
    if values.dtype != torch.uint8:
        if values.dtype == into.dtype:
            into.copy_(values)
        else:
            encode_state(store, which, values.float())
        return
    blocks = state_numels(rule, "int8", values.numel())[1][which]
    saved_scale = entry.get(f"{name}_scale")
    scale = _check(f"{label} scales", saved_scale, (torch.float32,), torch.Size([blocks])).detach().cpu()
    if own_scale is not None:
        into.copy_(values)
        own_scale.copy_(scale)
        return
    decoded = decode_state(Store("int8", values, None, (values, values), (scale, scale)), which)
    assert decoded is not None
    encode_state(store, which, decoded)


def _check(label: str, value: object, dtypes: tuple[torch.dtype, ...], shape: torch.Size) -> Tensor:
    if not isinstance(value, Tensor):
        raise invalid_value(label, value, "a tensor")
    if value.dtype not in dtypes:
        raise invalid_value(f"{label} dtype", value.dtype, dtypes)
    if value.shape != shape:
        raise invalid_value(f"{label} shape", tuple(value.shape), [tuple(shape)])
    return value
