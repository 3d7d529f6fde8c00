# SPDX-License-Identifier: Apache-2.0
"""Options and state of a torch.optim.Optimizer: comparison, and copies between devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.rules.rule import Options
from twinflow.state_dict import StateDict, int_of, map_tensors, params_of

# Entries of a param group that are not options: the parameter lists, and `capturable`, which matters to CUDA graphs
# only.
_NOT_OPTIONS: Final = ("params", "param_names", "capturable")

# Options.


def host_options(group: Options) -> StateDict:
    """A copy of a param group's options on the host.

    Later changes of the group, and of tensors in it, do not change the copy.
    """
    return {name: on_host(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def changes(now: Options, seen: Options) -> StateDict:
    """The options of `now` that differ from `seen` or are missing there."""
    return {k: v for k, v in now.items() if k not in _NOT_OPTIONS and not (k in seen and _is_same(seen[k], v))}


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def one_group(params: Iterable[nn.Parameter], outer_of: Mapping[nn.Parameter, int]) -> int | None:
    """The index of the user's param group with all `params`; None without `params`. ValueError for several groups."""
    groups = {outer_of[param] for param in params}
    if len(groups) > 1:
        raise ValueError(
            "rule(params) builds an optimizer that makes other param groups if it gets only some of the parameters. "
            "twinflow builds one optimizer for each bucket, so the group of a parameter must depend on that parameter "
            "alone. Pass the param groups to TwinOptimizer as param_groups=[...]."
        )
    return groups.pop() if groups else None


# State.


def on_host(value: object) -> object:
    """A deep copy in host memory. Tensors may be nested in dicts, lists and tuples."""
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
    """Converts a floating-point state tensor, if not scalar, to fp32, because the update uses fp32 parameters."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
        return value.float()
    return value


def beside(param: Tensor, state: StateDict, group: Mapping[str, object], copies: bool = False) -> StateDict:
    """The state on its parameter's device. Scalar tensors stay on the host, unless `group` has fused=True."""
    is_fused = bool(group.get("fused"))

    def moved(value: Tensor) -> Tensor:
        is_there = value.ndim or is_fused
        return value.to(param.device, non_blocking=copies, copy=copies) if is_there else value

    return {key: map_tensors(value, moved) for key, value in state.items()}


def read_back(value: object) -> object:
    """The state on the host. Tensors that are on the host are not copied."""
    return map_tensors(value, Tensor.cpu)


def group_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, object]:
    """The param group of `optimizer` that contains `param`."""
    return next(group for group in optimizer.param_groups if any(p is param for p in params_of(group)))


def own_gradients(state: StateDict, grads: Tensor) -> None:
    """Clones state tensors that share memory with the gradients, because the gradient buffer is reused."""
    memory = grads.untyped_storage().data_ptr()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
            state[name] = value.clone()


def num_steps(state: Mapping[str, object]) -> int:
    """The number of updates of a state, from its "step". Without "step" it is 0 for an empty state, otherwise 1."""
    return int_of(state, "step") if "step" in state else int(bool(state))
