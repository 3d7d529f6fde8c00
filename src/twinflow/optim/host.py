"""Optimizers for CPU tensors over the host kernels: real torch.optim.Optimizers with half-precision parameters and
compact states.

What is kept for each parameter, in `optimizer.state[param]`: `step`; the rule's states in the chosen format under
torch's own names (`exp_avg`, `exp_avg_sq`, `sum`, `momentum_buffer`); for int8 also `exp_avg_scale` and
`exp_avg_sq_scale`; and for half-precision parameters the rest of the fp32 master: `master` (fp32), or `master_lower`
(int16) where the parameter itself holds the upper half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow import native
from twinflow.optim import saved
from twinflow.optim.master import fit_master, fits, is_split
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Rule
from twinflow.rules.checks import FLOATS, check_tensor
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store, check_format, new_states


class HostOptimizer(Optimizer):
    """What the optimizers below share; they differ in their rule and defaults."""

    rule: Rule

    def __init__(self, params: ParamsT, defaults: dict[str, Any], states: str) -> None:
        check_format(self.rule, states)
        self.rule.check(defaults)
        self.states = states
        self._versions: dict[Tensor, int] = {}  # each parameter's version when its master was last in step with it
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "states": self.states, "_versions": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options and parameters are checked before anything changes."""
        self.rule.check({**self.defaults, **param_group})
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # torch itself refuses a set, whose order is not fixed
            params = list(params)
            for i, entry in enumerate(params):
                name, param = entry if isinstance(entry, tuple) else (f"params[{len(self.param_groups)}][{i}]", entry)
                if isinstance(param, Tensor):
                    check_tensor(name, param, FLOATS)
            tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
            if len({id(tensor) for tensor in tensors}) != len(tensors):
                raise ValueError(f"params[{len(self.param_groups)}] holds a parameter twice. Give each one once")
        super().add_param_group({**param_group, "params": params})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, factor: float = 1.0) -> Any:
        """One update of every parameter that has a gradient.

        `factor` multiplies the gradients inside the kernel: unscaling and clipping in one number, without a pass.
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
            check_tensor(f"{name}: gradient", param.grad, FLOATS, param.numel())
        segments = [self._segment(*entry, factor) for entry in ready]
        native.update(segments)  # checks every segment before it touches one
        for _, _, param, _ in ready:
            self.state[param]["step"] += 1
            torch.autograd.graph.increment_version(param)  # autograd must see that the kernel wrote to it
            self._versions[param] = param._version
        return loss

    def _ready(self) -> Iterable[tuple[str, int, Any, dict[str, Any]]]:
        """Name, running number, parameter and group of each parameter with a gradient."""
        index = 0
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"params[{g}][{i}]" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                index += 1
                if param.grad is not None:
                    yield name, index - 1, param, group

    def _segment(self, name: str, index: int, param: Any, group: dict[str, Any], factor: float) -> Segment:
        fresh = self._prepare(param, group)
        step = self.state[param]["step"] + 1
        hyper = self.rule.hyper(group, 1 if fresh else step)
        signed = -factor if group["maximize"] else factor
        store = self._store(param, group)
        return Segment(self.rule, hyper, param.grad.view(-1), store, signed, rounding_key(step, index), name=name)

    def _prepare(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Create or complete the parameter's state; whether its states are new."""
        state = self.state[param]
        state.setdefault("step", 0)
        changed = self._versions.get(param) != param._version  # new, loaded, or written to by somebody else
        if changed or not fits(param, state, self.states):
            fit_master(param, state, self.states)
        if not self._keeps_states(group) or any(name in state for name in self.rule.states if name):
            return False
        states, scales = new_states(self.rule, self.states, param.numel(), native.huge_zeros)
        for name, values, scale in zip(self.rule.states, states, scales, strict=True):
            if name is not None and values is not None:
                state[name] = values.view(param.shape)
                if scale is not None:
                    state[f"{name}_scale"] = scale
        self._first_values(param, group)
        return True

    def _keeps_states(self, group: dict[str, Any]) -> bool:
        return True

    def _first_values(self, param: Tensor, group: dict[str, Any]) -> None:
        """Give fresh states values other than zero, where the rule wants that."""

    def _store(self, param: Tensor, group: dict[str, Any]) -> Store:
        """The parameter's buffers, flat, as the kernels take them."""
        state, flat = self.state[param], param.detach().view(-1)
        names = self.rule.states if self._keeps_states(group) else (None, None)
        first, second = (state[name].view(-1) if name else None for name in names)
        first_scale, second_scale = (state.get(f"{name}_scale") if name else None for name in names)
        if param.dtype == torch.float32:
            return Store(self.states, flat, None, (first, second), (first_scale, second_scale))
        master = state["master_lower" if is_split(param, self.states) else "master"].view(-1)
        return Store(self.states, master, flat, (first, second), (first_scale, second_scale))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave: bit-exact for the same format, converted from any other or from torch.optim.

        Everything is checked before anything changes.
        """
        groups = saved.check_groups(self.rule, self.defaults, self.param_groups, state_dict)
        loaded = {}
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip([i for group in groups for i in group["params"]], params, strict=True):
            if i in state_dict["state"]:
                label = f"state_dict: state[{i}]"
                loaded[param] = saved.read_state(label, self.rule, self.states, param, state_dict["state"][i])
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.state.update(loaded)
        self._versions = {}  # the next step looks whether parameters and masters agree


class HostAdamW(HostOptimizer):
    """AdamW (decoupled weight decay) on the host; `states` is "fp32", "bf16" or "int8"."""

    rule = ADAMW

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        states: str = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, states)


class HostAdam(HostAdamW):
    """Adam with L2 weight decay on the host; `states` is "fp32", "bf16" or "int8"."""

    rule = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: str = "fp32",
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, states=states)


class HostAdagrad(HostOptimizer):
    """Adagrad on the host; `states` is "fp32" or "bf16"."""

    rule = ADAGRAD

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        states: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults, states)

    def _first_values(self, param: Tensor, group: dict[str, Any]) -> None:
        self.state[param]["sum"].fill_(group["initial_accumulator_value"])


class HostLion(HostOptimizer):
    """Lion on the host; `states` is "fp32" or "bf16"."""

    rule = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: str = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, states)


class HostSGD(HostOptimizer):
    """SGD with momentum on the host; `states` is "fp32" or "bf16". Without momentum nothing is kept."""

    rule = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        states: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, states)

    def _keeps_states(self, group: dict[str, Any]) -> bool:
        return float(group["momentum"]) != 0.0
