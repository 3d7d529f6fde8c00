"""How an optimizer of the user's is made again over some of its parameters, wherever those are."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value
from twinflow.offload.torch_state import beside, dict_on_host, group_of, on_host, wide
from twinflow.state_dict import ParamEntry, StateDict, params_of

Hosts = Mapping[Tensor, nn.Parameter]  # what stands for each of the model's parameters


class Recipe:
    """How the user's optimizer is made over any of its parameters, and what it is like over all of them.

    `rule` is called with parameters, or groups where `given` has groups, and the options: a class, a partial, any
    function. Or it is an optimizer, whose options, attributes and state are copied. `given` is what torch.optim takes.
    """

    def __init__(
        self, rule: Optimizer | Callable[..., Optimizer], given: Iterable[ParamEntry], options: Mapping[str, object]
    ) -> None:
        self._rule, self._options = rule, dict(options)
        self._given, names = _normal(given)
        known = [param for entry in self._given for param in _params_in(entry)]
        if isinstance(rule, Optimizer):
            _check_instance(rule, known, options)
            whole = rule
            back: dict[Tensor, Tensor] = {param: param for param in known}
        else:
            # Pages nobody writes to: stand-ins cost address space only, where the real ones may not fit twice.
            stands = {p: nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="cpu")) for p in known}
            whole = self._call(stands)
            back = {stand: param for param, stand in stands.items()}
        _check_step(whole)
        kind = type(whole)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self.defaults: StateDict = dict(whole.defaults)
        self.groups: list[StateDict] = [_over(group, back, names) for group in whole.param_groups]

    def build(self, hosts: Hosts) -> Optimizer:
        """A fresh optimizer over some of the parameters, as they are on the host."""
        return self._clone(self._rule, hosts) if isinstance(self._rule, Optimizer) else self._call(hosts)

    def _call(self, hosts: Hosts) -> Optimizer:
        assert not isinstance(self._rule, Optimizer)
        made = self._rule(_replaced(self._given, hosts), **self._options)
        if not isinstance(made, Optimizer):
            raise invalid_value("rule(params)", made, "a torch.optim.Optimizer")
        if _members(made) != set(hosts.values()):
            raise invalid_value(
                "rule(params)",
                f"{type(made).__name__} over other parameters",
                "an optimizer over the parameters it is given, all of them",
                "It is called several times, each time with some of the parameters in host memory.",
            )
        return made

    def _clone(self, source: Optimizer, hosts: Hosts) -> Optimizer:
        """The same optimizer over host parameters, by way of its attributes: few constructors can be called again."""
        memo: dict[int, object] = {id(p): hosts.get(p, p) for p in _members(source)}  # found in the place of a copy
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
    """Parameters or groups of them, trainable ones only, that can be gone through again; and their names if given."""
    names: dict[Tensor, str] = {}

    def tensors(params: Iterable[object]) -> list[Tensor]:
        found = []
        for param in params:
            if isinstance(param, tuple):
                names[param[1]] = param[0]
            tensor = param[1] if isinstance(param, tuple) else param
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"optimizer can only optimize Tensors, but one of the params is {type(tensor).__name__}"
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
    """What the user gave, with host parameters in the place of the model's, and nothing where there is none."""
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
    """A group of the whole optimizer, over the model's parameters."""
    params = [back[param] for param in params_of(group) if param in back]
    own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if names and all(param in names for param in params):
        own["param_names"] = [names[param] for param in params]
    return {**own, "params": params}


def _check_instance(source: Optimizer, known: Sequence[Tensor], options: Mapping[str, object]) -> None:
    kind = type(source).__name__
    if options:
        raise invalid_value("options", dict(options), f"none: the {kind} given as rule has its own")
    unknown = [tuple(p.shape) for p in _members(source) - set(known) if p.requires_grad]
    if unknown:
        remedy = "Build the optimizer over the parameters of the model that is given with it."
        raise invalid_value(f"parameters of the {kind} given as rule", unknown[:3], "parameters of the model", remedy)
    if any(isinstance(value, Optimizer) for value in vars(source).values()):
        remedy = f"Give a function instead: rule=lambda params: {kind}(...)"
        raise invalid_value("rule", kind, "an optimizer that does not wrap another", remedy)
    if hasattr(source.step, "_wrapped_by_lr_sched"):
        remedy = "Make the scheduler after this, over the optimizer that is made here."
        raise invalid_value("rule", f"{kind} with an LR scheduler", "an optimizer without one", remedy)
    if source._optimizer_step_pre_hooks or source._optimizer_step_post_hooks:
        remedy = "Register them on the optimizer that is made here."
        raise invalid_value("rule", f"{kind} with step hooks", "an optimizer without hooks", remedy)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse here what would fail in the background later."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise invalid_value("rule", kind.__name__, "optimizers for dense gradients", "Take torch.optim.Adam.")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [
        p.name for p in list(inspect.signature(kind.step).parameters.values())[1:]
        if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]  # fmt: skip
    if wanted:
        remedy = "It evaluates the model inside its step, which cannot run beside the model."
        raise invalid_value("rule", kind.__name__, f"optimizers whose step needs no {wanted[0]}", remedy)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise invalid_value("differentiable", True, [False], f"The update of {kind.__name__} runs without autograd.")
