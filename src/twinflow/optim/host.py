# SPDX-License-Identifier: Apache-2.0
"""Optimizers for CPU tensors that use the host kernels. They are torch.optim.Optimizers, and support half-precision
parameters and compact states (bf16 or int8).

`optimizer.state[param]` has these entries:

- `step`: the number of updates
- the rule's states in the chosen format, under torch's names (`exp_avg`, `exp_avg_sq`, `sum`, `momentum_buffer`)
- for int8 also `exp_avg_scale` and `exp_avg_sq_scale`
- for half-precision parameters `master`, the fp32 master weights. A bf16 parameter with a compact format has
  `master_lower` (int16) instead, the lower halves of the master weights. The parameter itself has the upper halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Final, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow import native
from twinflow.errors import invalid_value
from twinflow.optim.closure import loss_of
from twinflow.rules import RULES, Rule
from twinflow.rules.formats import bits, is_near, rounding_key, rounds_to
from twinflow.rules.rule import OptionValue, Values
from twinflow.rules.segment import (
    FLOATS,
    Segment,
    Store,
    check_format,
    check_tensor,
    decode_state,
    encode_state,
    new_states,
    splits_master,
    state_numels,
)
from twinflow.state_dict import StateDict, check_group_sizes, int_of, list_of, tensor_of, value_of

Loss = TypeVar("Loss")

_PASS_SAVED = "Pass a dict that state_dict() has returned, without changes."


class HostOptimizer(Optimizer):
    """An optimizer for CPU tensors. Each update rule has a subclass: `HostAdamW`, `HostSGD` and so on.

    Options are those of the rule (docs/rules.md), in torch's order and with torch's names and defaults. Flags such as
    `maximize` are keyword-only. `states` is the format of the states: "fp32", or a compact format that the rule
    supports.
    """

    rule: Rule

    def __init__(self, params: ParamsT, *values: OptionValue, states: str = "fp32", **options: OptionValue) -> None:
        # Options are bound to names as Python binds arguments of a function.
        given = signature_of(self.rule).bind(None, *values, **options)
        given.apply_defaults()
        defaults = {name: value for name, value in given.arguments.items() if name not in ("params", "states")}
        check_format(self.rule, states)
        if states not in formats_of(self.rule):
            remedy = "Use TwinOptimizer, which supports 4-bit states."
            raise invalid_value("states", states, formats_of(self.rule), remedy)
        self.rule.check(defaults)
        self.states = states
        self._versions: dict[Tensor, int] = {}  # each parameter's version when its master was last fitted to it
        super().__init__(params, defaults)

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "states": self.states, "_versions": {}}

    def add_param_group(self, param_group: StateDict) -> None:
        """Adds a group. Its options and parameters are checked before the optimizer changes."""
        self.rule.check({**self.defaults, **param_group})
        params = param_group["params"]
        # torch raises an exception for a set, because its order is not fixed.
        if isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):
            params = list(params)
            for i, entry in enumerate(params):
                name, param = entry if isinstance(entry, tuple) else (f"params[{len(self.param_groups)}][{i}]", entry)
                if isinstance(param, Tensor):
                    check_tensor(name, param, FLOATS)
            tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
            if len({id(tensor) for tensor in tensors}) != len(tensors):
                group = f"param_groups[{len(self.param_groups)}]"
                raise ValueError(f"{group} contains a parameter twice. Pass each parameter once.")
        super().add_param_group({**param_group, "params": params})

    @overload
    def step(self, closure: None = None, factor: float = 1.0) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], factor: float = 1.0) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, factor: float = 1.0) -> object:
        """Updates every parameter that has a gradient.

        The kernel multiplies gradients by `factor`, for unscaling and clipping without a separate pass over them.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self.rule.check(group)
        ready = list(self._ready())
        for name, _, param, _ in ready:
            check_tensor(name, param, FLOATS)
            assert param.grad is not None
            check_tensor(f"{name}: gradient", param.grad, FLOATS, param.numel())
        segments = [self._segment(*entry, factor) for entry in ready]
        native.update(segments)  # checks all segments before it changes one
        for _, _, param, _ in ready:
            self.state[param]["step"] += 1
            torch.autograd.graph.increment_version(param)  # autograd must see that the kernel wrote to it
            self._versions[param] = param._version
        return loss

    def _ready(self) -> Iterable[tuple[str, int, Tensor, StateDict]]:
        """Name, index, parameter and group of each parameter with a gradient."""
        index = 0
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"params[{g}][{i}]" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                index += 1
                if param.grad is not None:
                    yield name, index - 1, param, group

    def _segment(self, name: str, index: int, param: Tensor, group: StateDict, factor: float) -> Segment:
        assert param.grad is not None
        fresh = self._prepare(param, group)
        step = self.state[param]["step"] + 1
        hyper = self.rule.hyper(group, 1 if fresh else step)
        signed = -factor if group["maximize"] else factor
        store = self._store(param, group)
        return Segment(self.rule, hyper, param.grad.view(-1), store, signed, rounding_key(step, index), name=name)

    def _prepare(self, param: Tensor, group: StateDict) -> bool:
        """Creates missing state of the parameter, and fits the master to the parameter if somebody has written to it.

        Returns whether the states are new."""
        state = self.state[param]
        state.setdefault("step", 0)
        changed = self._versions.get(param) != param._version  # the parameter is new or loaded, or the user wrote to it
        found = [name for name in ("master", "master_lower") if name in state]
        if changed or found != [key for key in (master_key(param, self.states),) if key]:
            fit_master(param, state, self.states)
        if not self.rule.keeps_states(group) or any(name in state for name in self.rule.states if name):
            return False
        states, scales = new_states(self.rule, self.states, param.numel(), native.huge_zeros)
        for name, values, scale in zip(self.rule.states, states, scales, strict=True):
            if name is not None and values is not None:
                if self.rule.start_option is not None:
                    values.fill_(self.rule.start_value(group))
                state[name] = values.view(param.shape)
                if scale is not None:
                    state[f"{name}_scale"] = scale
        return True

    def _store(self, param: Tensor, group: StateDict) -> Store:
        """The parameter's buffers as flat tensors for the kernels."""
        state, flat = self.state[param], param.detach().view(-1)
        names = self.rule.states if self.rule.keeps_states(group) else (None, None)
        first, second = (state[name].view(-1) if name else None for name in names)
        first_scale, second_scale = (state.get(f"{name}_scale") if name else None for name in names)
        key = master_key(param, self.states)
        master, weight = (state[key].view(-1), flat) if key else (flat, None)
        return Store(self.states, master, weight, (first, second), (first_scale, second_scale))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Loads a state dict. State of the same format is loaded exactly. State of another format, or of torch.optim,
        is converted.

        The state is checked before the optimizer changes.
        """
        groups = check_saved_groups(self.rule, self.defaults, self.param_groups, state_dict)
        entries = value_of(state_dict, "state", dict)
        loaded = {}
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip([i for group in groups for i in list_of(group, "params")], params, strict=True):
            if i in entries:
                label = f"state_dict['state'][{i}]"
                loaded[param] = read_state(label, self.rule, self.states, param, entries[i])
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.state.update(loaded)
        self._versions = {}  # the next step fits the masters to the parameters


# Master weights of half-precision parameters.


def master_key(param: Tensor, states: str) -> str:
    """The entry of the state that contains the master; "" for an fp32 parameter, which is its own master."""
    if param.dtype == torch.float32:
        return ""
    return "master_lower" if splits_master(states, param.dtype) else "master"


def fit_master(param: Tensor, state: StateDict, states: str) -> None:
    """Fits the master to a parameter that may have been written to, loaded or cast.

    Elements of the master that round to the parameter do not change. Other elements get the parameter's value.
    """
    master, value, key = full_master(param, state), param.detach(), master_key(param, states)
    state.pop("master", None)
    state.pop("master_lower", None)
    if key == "master_lower":
        state[key] = lower_half(value.float() if master is None else master, value)
    elif key and master is None:
        master = native.advise_huge(torch.empty(param.shape, dtype=torch.float32))
        native.cast(master, value)
        state[key] = master
    elif key and master is not None:
        state[key] = torch.where(rounds_to(master, value), master, value.float())


def full_master(param: Tensor, state: StateDict) -> Tensor | None:
    """The master in fp32, from `master` or `master_lower`; None if there is none."""
    if state.get("master") is not None:
        return tensor_of(state, "master")
    if state.get("master_lower") is None or param.dtype != torch.bfloat16:
        return None
    upper, lower = param.detach(), tensor_of(state, "master_lower")
    # A lower half that does not fit the upper one could turn a value such as 0 into NaN.
    joined = native.join(upper, lower)
    return torch.where(native.split(joined)[0] == upper, joined, upper.float())


def lower_half(master: Tensor, upper: Tensor) -> Tensor:
    """The lower halves of fp32 `master`: the difference between its bits and those of `upper` (bf16). An element is 0
    where `upper` is not a bf16 neighbour nearest to `master`.

    If `master` is exactly between two bf16 values, rounding to even may have chosen the one nearer to 0 as `upper`.
    The difference is then 2**15, which does not fit into int16. In this case the master is changed by one unit in its
    last place, so that the parameter does not change.
    """
    difference = (bits(master) - bits(upper.float())).clamp(max=2**15 - 1)
    return torch.where(is_near(master, upper), difference, 0).to(torch.int16)


# Saved states, in a format of twinflow or of torch.optim. A state that does not fit raises ValueError before the
# optimizer changes.


def check_saved_groups(
    rule: Rule, defaults: Mapping[str, object], own: Sequence[Mapping[str, object]], state_dict: Mapping[str, object]
) -> list[StateDict]:
    """The saved groups with defaults filled in. Raises ValueError if they do not fit the optimizer."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            keys = sorted(map(str, state_dict))
            raise ValueError(f"state_dict has the keys {keys}, but must also have {key!r}. {_PASS_SAVED}")
    groups = [{**defaults, **group} for group in check_group_sizes(state_dict, own)]
    for i, group in enumerate(groups):
        rule.check(group)
        for name, value in rule.torch_modes.items():
            if bool(group.pop(name, value)) is not value:
                remedy = f"Load a state that an optimizer with the rule {rule.name!r} and {name}={value} has saved."
                raise invalid_value(f"state_dict: param_groups[{i}][{name!r}]", not value, [value], remedy)
    return groups


def read_state(label: str, rule: Rule, states: str, param: Tensor, entry: Mapping[str, object]) -> StateDict:
    """The state of one parameter in the format `states`, converted from a saved entry."""
    wanted = [name for name in rule.states if name]
    names = [name for name in wanted if entry.get(name) is not None]
    if names != wanted and (names or rule.state_option is None):
        raise ValueError(
            f"{label} has the states {names}, but must have {wanted}. Load a state that an optimizer with the rule "
            f"{rule.name!r} has saved."
        )
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
            checked = _check(f"{label}[{name!r}]", master, (dtype,), param.shape)
            state[name] = checked.detach().cpu().clone().contiguous()
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
    scale_label = label.removesuffix("']") + "_scale']"
    scale = _check(scale_label, saved_scale, (torch.float32,), torch.Size([blocks])).detach().cpu()
    if own_scale is not None:
        into.copy_(values)
        own_scale.copy_(scale)
        return
    decoded = decode_state(Store("int8", values, None, (values, values), (scale, scale)), which)
    assert decoded is not None
    encode_state(store, which, decoded)


def _check(label: str, value: object, dtypes: tuple[torch.dtype, ...], shape: torch.Size) -> Tensor:
    if not isinstance(value, Tensor):
        raise invalid_value(label, value, "a tensor", _PASS_SAVED)
    if value.dtype not in dtypes:
        raise invalid_value(f"The dtype of {label}", value.dtype, dtypes, _PASS_SAVED)
    if value.shape != shape:
        remedy = "Load the state into an optimizer over the parameters with which it was saved."
        raise invalid_value(f"The shape of {label}", tuple(value.shape), [tuple(shape)], remedy)
    return value


# The class of each rule.


def signature_of(rule: Rule) -> Signature:
    """The signature of the host optimizer of a rule."""
    positional, by_name = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    options = [
        Parameter(option.name, by_name if option.values is Values.FLAG else positional, default=option.default)
        for option in rule.all_options
    ]
    options.sort(key=lambda option: option.kind)
    return Signature([Parameter("params", positional), *options, Parameter("states", by_name, default="fp32")])


def formats_of(rule: Rule) -> list[str]:
    """The state formats of the host optimizer of a rule. In torch's dict of states, each state has its own tensor, and
    4-bit states share one.
    """
    return [name for name in rule.formats if name != "4bit"]


def _host_class(rule: Rule) -> type[HostOptimizer]:
    formats = ", ".join(f'"{format}"' for format in formats_of(rule))
    about = {
        "rule": rule,
        "__doc__": f"{rule.title} for CPU tensors; `states` is one of {formats}.",
        "__module__": __name__,
        "__signature__": signature_of(rule),
    }
    return type(f"Host{rule.title}", (HostOptimizer,), about)


HOST_OPTIMIZERS: Final[Mapping[str, type[HostOptimizer]]] = {name: _host_class(rule) for name, rule in RULES.items()}
_BY_CLASS: Final = {kind.__name__: kind for kind in HOST_OPTIMIZERS.values()}


def __getattr__(name: str) -> type[HostOptimizer]:
    """`HostAdamW`, `HostAdam` and so on are attributes of this module."""
    if name not in _BY_CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _BY_CLASS[name]
