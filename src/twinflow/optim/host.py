"""Optimizers for CPU tensors that use the host kernels. They are torch.optim.Optimizers, and support half-precision
parameters and compact states.

`optimizer.state[param]` has these entries:

- `step`
- the rule's states in the chosen format, under torch's names (`exp_avg`, `exp_avg_sq`, `sum`, `momentum_buffer`)
- for int8 also `exp_avg_scale` and `exp_avg_sq_scale`
- for half-precision parameters `master` (fp32), or `master_lower` (int16) if the parameter is the upper half of its
  master
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Final, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow import native
from twinflow.optim import saved
from twinflow.optim.master import fit_master, fits, is_split
from twinflow.rules import RULES, Rule
from twinflow.rules.checks import FLOATS, check_tensor
from twinflow.rules.formats import rounding_key
from twinflow.rules.rule import OptionValue, Values
from twinflow.rules.segment import Segment, Store, check_format, new_states
from twinflow.state_dict import StateDict, list_of, value_of

Loss = TypeVar("Loss")


class HostOptimizer(Optimizer):
    """An optimizer for CPU tensors. Each update rule has a subclass: `HostAdamW`, `HostSGD` and so on.

    Options are those of the rule (docs/rules.md), in torch's order and with torch's names and defaults. Flags such as
    `maximize` are keyword-only. `states` is the format of the states: "fp32", or a compact format that the rule
    supports.
    """

    rule: Rule

    def __init__(self, params: ParamsT, *values: OptionValue, states: str = "fp32", **options: OptionValue) -> None:
        defaults = self._with_defaults(values, options)
        check_format(self.rule, states)
        self.rule.check(defaults)
        self.states = states
        self._versions: dict[Tensor, int] = {}  # each parameter's version when its master was last fitted to it
        super().__init__(params, defaults)

    def _with_defaults(self, values: tuple[OptionValue, ...], options: Mapping[str, OptionValue]) -> StateDict:
        """Binds options to names as Python binds arguments of a function."""
        given = signature_of(self.rule).bind(None, *values, **options)
        given.apply_defaults()
        return {name: value for name, value in given.arguments.items() if name not in ("params", "states")}

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
                raise ValueError(
                    f"params[{len(self.param_groups)}] contains a parameter twice. Pass each parameter once."
                )
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        """Makes or completes the parameter's state. Returns whether the states are new."""
        state = self.state[param]
        state.setdefault("step", 0)
        changed = self._versions.get(param) != param._version  # the parameter is new or loaded, or the user wrote to it
        if changed or not fits(param, state, self.states):
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
        if param.dtype == torch.float32:
            return Store(self.states, flat, None, (first, second), (first_scale, second_scale))
        master = state["master_lower" if is_split(param, self.states) else "master"].view(-1)
        return Store(self.states, master, flat, (first, second), (first_scale, second_scale))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Loads a state dict. State of the same format is loaded exactly. State of another format, or of torch.optim,
        is converted.

        The state is checked before the optimizer changes.
        """
        groups = saved.check_groups(self.rule, self.defaults, self.param_groups, state_dict)
        entries = value_of(state_dict, "state", dict)
        loaded = {}
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip([i for group in groups for i in list_of(group, "params")], params, strict=True):
            if i in entries:
                label = f"state_dict: state[{i}]"
                loaded[param] = saved.read_state(label, self.rule, self.states, param, entries[i])
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.state.update(loaded)
        self._versions = {}  # the next step fits the masters to the parameters


def signature_of(rule: Rule) -> Signature:
    """The signature of the host optimizer of a rule."""
    positional, by_name = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    options = [
        Parameter(option.name, by_name if option.values is Values.FLAG else positional, default=option.default)
        for option in rule.all_options
    ]
    options.sort(key=lambda option: option.kind)
    return Signature([Parameter("params", positional), *options, Parameter("states", by_name, default="fp32")])


def _host_class(rule: Rule) -> type[HostOptimizer]:
    formats = ", ".join(f'"{format}"' for format in rule.formats)
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
