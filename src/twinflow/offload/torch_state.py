"""What a torch.optim.Optimizer keeps, and its options, taken apart and carried between devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value
from twinflow.rules.rule import Options
from twinflow.state_dict import StateDict, int_of, map_tensors, params_of

# Not the user's wishes: the lists themselves, and whether a CUDA graph may hold the step, which the host has none of.
_NOT_OPTIONS: Final = ("params", "param_names", "capturable")

# Options.


def host_options(group: Options) -> StateDict:
    """A param group's options as they are now, whatever happens to the group later (schedulers write into tensors)."""
    return {name: on_host(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def changes(now: Options, seen: Options) -> StateDict:
    """The options that are not what they were when seen."""
    return {k: v for k, v in now.items() if k not in _NOT_OPTIONS and not (k in seen and _is_same(seen[k], v))}


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def one_group(params: Iterable[nn.Parameter], outer_of: Mapping[nn.Parameter, int]) -> int | None:
    """The user's group that all of them belong to; None where there are none."""
    groups = {outer_of[param] for param in params}
    if len(groups) > 1:
        raise invalid_value(
            "rule(params)",
            "an optimizer that groups parameters differently when it gets only some of them",
            "one whose groups depend on each parameter alone",
            "Give the groups as param_groups instead.",
        )
    return groups.pop() if groups else None


# State.


def on_host(value: object) -> object:
    """A copy in host memory that shares nothing with the original; tensors may be nested in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {on_host(key): on_host(item) for key, item in value.items()}
    if type(value) is list:
        return [on_host(item) for item in value]
    if type(value) is tuple:
        return tuple(on_host(item) for item in value)
    return copy.deepcopy(value)


def dict_on_host(values: Mapping[str, object]) -> StateDict:
    return {name: on_host(value) for name, value in values.items()}


def wide(value: object) -> object:
    """State of a half-precision parameter, as that of its fp32 copy."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
        return value.float()
    return value


def beside(param: Tensor, state: StateDict, group: Mapping[str, object], copies: bool = False) -> StateDict:
    """State where its parameter is. Counters stay on the host, unless a fused step reads them on the device."""
    is_fused = bool(group.get("fused"))

    def moved(value: Tensor) -> Tensor:
        is_there = value.ndim or is_fused
        return value.to(param.device, non_blocking=copies, copy=copies) if is_there else value

    return {key: map_tensors(value, moved) for key, value in state.items()}


def read_back(value: object) -> object:
    """State on the host; what is there already is not copied."""
    return map_tensors(value, Tensor.cpu)


def group_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, object]:
    """The group of an optimizer that a parameter is in."""
    return next(group for group in optimizer.param_groups if any(p is param for p in params_of(group)))


def own_gradients(state: StateDict, grads: Tensor) -> None:
    """Where an optimizer has kept a gradient instead of a copy, make the copy: the buffer is used again."""
    memory = grads.untyped_storage().data_ptr()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
            state[name] = value.clone()


def num_steps(state: Mapping[str, object]) -> int:
    """How many updates a state has seen: at least one unless it says none, as Adagrad's does when it is new."""
    return int_of(state, "step") if "step" in state else int(bool(state))
