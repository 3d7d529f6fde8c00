# SPDX-License-Identifier: Apache-2.0
"""Builds instances of a user's optimizer over some of its parameters, one for each bucket.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import incompatible, invalid_value
from twinflow.offload.torch_state import beside, dict_on_host, group_of, on_host, wide
from twinflow.state_dict import ParamEntry, StateDict, params_of

Hosts = Mapping[Tensor, nn.Parameter]  # the fp32 copy of each of the model's parameters


class Recipe:
    """Builds the user's optimizer over a given subset of its parameters.

    `groups` and `defaults` are the attributes of the optimizer over all parameters. `rule` is a class, a partial or a
    function. It is called with the options and with parameters, or with param groups if `given` has param groups. Or
    `rule` is an optimizer instance, whose options, attributes and state are copied. `given` has the form of the first
    argument of a torch.optim optimizer.

    Raises ValueError if the optimizer cannot run separately on each bucket, and TypeError if `given` contains objects
    that are not tensors.
    """

    def __init__(
        self, rule: Optimizer | Callable[..., Optimizer], given: Iterable[ParamEntry], options: Mapping[str, object]
    ) -> None:
        self._rule = rule
        self._options = dict(options)
        self._given, names = _normal(given)
        known = [param for entry in self._given for param in _params_in(entry)]
        if isinstance(rule, Optimizer):
            _check_instance(rule, known, options)
            whole = rule
            back: dict[Tensor, Tensor] = {param: param for param in known}
        else:
            # A second copy of all parameters may not fit. torch.empty uses no memory until values are written to it.
            stands = {p: nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="cpu")) for p in known}
            whole = self._call(stands)
            back = {stand: param for param, stand in stands.items()}
        check_step(whole)
        kind = type(whole)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self.defaults: StateDict = dict(whole.defaults)
        self.groups: list[StateDict] = [_over(group, back, names) for group in whole.param_groups]

    def build(self, hosts: Hosts) -> Optimizer:
        """A new optimizer over the copies in `hosts`."""
        return self._clone(self._rule, hosts) if isinstance(self._rule, Optimizer) else self._call(hosts)

    def _call(self, hosts: Hosts) -> Optimizer:
        assert not isinstance(self._rule, Optimizer)
        self._check_options()
        made = self._rule(_replaced(self._given, hosts), **self._options)
        if not isinstance(made, Optimizer):
            raise invalid_value(
                "rule(params)", made, "a torch.optim.Optimizer", "Return the optimizer from this function."
            )
        if _members(made) != set(hosts.values()):
            raise ValueError(
                f"rule(params) returned an optimizer ({type(made).__name__}) over other parameters than `params`. "
                "twinflow calls `rule` several times, each time with copies of some parameters. Build the optimizer "
                "over exactly the parameters in `params`."
            )
        return made

    def _check_options(self) -> None:
        """Raises ValueError for options that the optimizer's class or function does not have."""
        assert not isinstance(self._rule, Optimizer)
        try:
            found = inspect.signature(self._rule).parameters
        except (TypeError, ValueError):  # some functions in C have no signature
            return
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values()):
            return
        allowed = list(found)[1:]  # the first argument is the parameters
        for name in self._options:
            if name not in allowed:
                rule = getattr(self._rule, "__name__", type(self._rule).__name__)
                expected = allowed or f"left out, because {rule} has no options"
                raise invalid_value(f"The name of an option of {rule}", name, expected)

    def _clone(self, source: Optimizer, hosts: Hosts) -> Optimizer:
        """A copy of an optimizer over the parameters in `hosts`.

        The attributes are copied, because the arguments of the constructor are not known.
        """
        memo: dict[int, object] = {id(p): hosts.get(p, p) for p in _members(source)}  # deepcopy uses these as copies
        inner: Optimizer = object.__new__(type(source))
        others = {k: v for k, v in vars(source).items() if k not in ("state", "param_groups")}
        vars(inner).update(copy.deepcopy(others, memo))
        inner.param_groups = [
            {**{k: on_host(v) for k, v in group.items() if k not in ("params", "param_names")}, "params": params}
            for group in source.param_groups
            if (params := [hosts[p] for p in group["params"] if p in hosts])
        ]
        inner.state = defaultdict(dict)
        for param, host in hosts.items():
            if param in source.state:
                state = {k: wide(v) for k, v in dict_on_host(source.state[param]).items()}
                inner.state[host] = beside(host, state, group_of(inner, host))
        return inner


def _normal(given: Iterable[ParamEntry]) -> tuple[list[Tensor] | list[StateDict], dict[Tensor, str]]:
    """`given` as lists of trainable parameters or of param groups, and the names of parameters if `given` has names."""
    names: dict[Tensor, str] = {}

    def tensors(params: Iterable[object]) -> list[Tensor]:
        found = []
        for param in params:
            if isinstance(param, tuple):
                names[param[1]] = param[0]
            tensor = param[1] if isinstance(param, tuple) else param
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"An optimizer can only optimize Tensors, but one of the params is a {type(tensor).__name__}. "
                    "Pass model.parameters() or param groups."
                )
            if tensor.requires_grad:
                found.append(tensor)
        return found

    entries = list(given)
    if not (entries and isinstance(entries[0], dict)):
        return tensors(entries), names
    groups: list[StateDict] = []
    for entry in entries:
        assert isinstance(entry, dict)
        params = [entry["params"]] if isinstance(entry["params"], Tensor) else list(entry["params"])
        names.update(zip(params, entry.get("param_names", ()), strict=False))
        groups.append({**{k: v for k, v in entry.items() if k != "param_names"}, "params": tensors(params)})
    return groups, names


def _params_in(entry: Tensor | StateDict) -> list[Tensor]:
    return params_of(entry) if isinstance(entry, dict) else [entry]


def _replaced(given: list[Tensor] | list[StateDict], hosts: Hosts) -> list[nn.Parameter] | list[StateDict]:
    """`given` with the copies in `hosts` instead of the model's parameters. Parameters without a copy are removed."""
    groups = [entry for entry in given if isinstance(entry, dict)]
    if not groups:
        return [hosts[param] for param in given if isinstance(param, Tensor) and param in hosts]
    replaced: list[StateDict] = [
        {**group, "params": [hosts[p] for p in params_of(group) if p in hosts]} for group in groups
    ]
    return [group for group in replaced if group["params"]]


def _members(optimizer: Optimizer) -> set[Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _over(group: Mapping[str, object], back: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> StateDict:
    """A param group with the model's parameters instead of copies."""
    params = [back[param] for param in params_of(group) if param in back]
    own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if names and all(param in names for param in params):
        own["param_names"] = [names[param] for param in params]
    return {**own, "params": params}


def _check_instance(source: Optimizer, known: Sequence[Tensor], options: Mapping[str, object]) -> None:
    kind = type(source).__name__
    if options:
        raise incompatible(
            f"The arguments {', '.join(options)}",
            f"an optimizer instance as rule ({kind})",
            "the instance has its own options",
            f"Pass the options when you build the {kind}.",
        )
    unknown = [tuple(p.shape) for p in _members(source) - set(known) if p.requires_grad]
    if unknown:
        raise ValueError(
            f"The {kind} that is given as rule has {len(unknown)} trainable parameters that are not parameters of the "
            f"model (shapes {', '.join(map(str, unknown[:3]))}). Build the {kind} over model.parameters()."
        )
    if any(isinstance(value, Optimizer) for value in vars(source).values()):
        raise ValueError(
            f"The {kind} that is given as rule wraps another optimizer, but must not wrap one. Pass a function that "
            f"builds both optimizers: rule=lambda params: {kind}(...)."
        )
    if hasattr(source.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"The {kind} that is given as rule has an LR scheduler, but must have none. Build the scheduler over the "
            "TwinOptimizer."
        )
    if source._optimizer_step_pre_hooks or source._optimizer_step_post_hooks:
        raise ValueError(
            f"The {kind} that is given as rule has step hooks, but must have none. Register the hooks on the "
            "TwinOptimizer."
        )


def check_step(
    optimizer: Optimizer, name: str = "rule", dense: str = "torch.optim.Adam", other: str = "another optimizer"
) -> None:
    """Raises ValueError for optimizers whose step would fail later, in the background. `name`: the argument with this
    optimizer. Errors recommend `dense` instead of SparseAdam, and `other` instead of an optimizer that needs a closure.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise invalid_value(name, kind.__name__, "an optimizer for dense gradients", f"Use {dense}.")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [
        p.name for p in list(inspect.signature(kind.step).parameters.values())[1:]
        if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]  # fmt: skip
    if wanted:
        expected = f"an optimizer whose step() needs no argument `{wanted[0]}`"
        remedy = f"Updates run in the background, so step() cannot evaluate the model. Use {other}."
        raise invalid_value(name, kind.__name__, expected, remedy)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        remedy = f"Set differentiable=False, because the update of {kind.__name__} runs without autograd."
        raise invalid_value("differentiable", True, [False], remedy)
