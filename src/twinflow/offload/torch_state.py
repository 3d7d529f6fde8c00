"""What a torch.optim.Optimizer keeps, and its options, taken apart and carried between devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import bad_value
from twinflow.rules.rule import Options

# Not the user's wishes: the lists themselves, and whether a CUDA graph may hold the step, which the host has none of.
_NOT_OPTIONS: Final = ("params", "param_names", "capturable")

# Options.


def host_options(group: Options) -> dict[str, Any]:
    """A param group's options as they are now, whatever happens to the group later (schedulers write into tensors)."""
    return {name: on_host(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def changes(now: Options, seen: Options) -> dict[str, Any]:
    """The options that are not what they were when seen."""
    return {k: v for k, v in now.items() if k not in _NOT_OPTIONS and not (k in seen and _is_same(seen[k], v))}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def one_group(params: Iterable[nn.Parameter], outer_of: Mapping[nn.Parameter, int]) -> int | None:
    """The user's group that all of them belong to; None where there are none."""
    groups = {outer_of[param] for param in params}
    if len(groups) > 1:
        raise bad_value(
            "rule(params)",
            "an optimizer that groups parameters differently when it gets only some of them",
            "one whose groups depend on each parameter alone",
            "Give the groups as param_groups instead.",
        )
    return groups.pop() if groups else None


# State.


def on_host(value: Any) -> Any:
    """A copy in host memory that shares nothing with the original; tensors may be nested in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {on_host(key): on_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return copy.deepcopy(value)


def wide(value: Any) -> Any:
    """State of a half-precision parameter, as that of its fp32 copy."""
    is_half = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
    return value.float() if is_half else value


def beside(param: Tensor, state: dict[str, Any], group: Mapping[str, Any], copies: bool = False) -> dict[str, Any]:
    """State where its parameter is. Counters stay on the host, unless a fused step reads them on the device."""
    is_fused = bool(group.get("fused"))

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_there = value.ndim or is_fused
            return value.to(param.device, non_blocking=copies, copy=copies) if is_there else value
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return type(value)(map(moved, value)) if type(value) in (list, tuple) else value

    return {key: moved(value) for key, value in state.items()}


def read_back(value: Any) -> Any:
    """State on the host; what is there already is not copied."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: read_back(item) for key, item in value.items()}
    return type(value)(map(read_back, value)) if type(value) in (list, tuple) else value


def group_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, Any]:
    """The group of an optimizer that a parameter is in."""
    return next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))


def own_gradients(state: dict[str, Any], grads: Tensor) -> None:
    """Where an optimizer has kept a gradient instead of a copy, make the copy: the buffer is used again."""
    memory = grads.untyped_storage().data_ptr()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
            state[name] = value.clone()


def num_steps(state: Mapping[str, Any]) -> int:
    """How many updates a state has seen: at least one unless it says none, as Adagrad's does when it is new."""
    return int(state["step"]) if "step" in state else int(bool(state))
