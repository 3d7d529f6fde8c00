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
from twinflow.errors import bad_value
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Rule
from twinflow.rules.checks import FLOATS, check_tensor
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import (
    Segment,
    Store,
    check_format,
    check_segment,
    decode_state,
    encode_state,
    new_states,
    state_numels,
)


def _zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    return native.advise_huge(torch.empty(numel, dtype=dtype)).zero_()


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
        merged = {**self.defaults, **param_group}
        self.rule.check(merged)
        params = merged["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for i, entry in enumerate(params):
            name, param = entry if isinstance(entry, tuple) else (f"params[{len(self.param_groups)}][{i}]", entry)
            if isinstance(param, Tensor):
                check_tensor(name, param, FLOATS)
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
        work = [
            (param, self._segment(name, index, param, group, factor)) for name, index, param, group in self._ready()
        ]
        native.update([segment for _, segment in work])  # checks every segment before it touches one
        for param, _ in work:
            self.state[param]["step"] += 1
            torch.autograd.graph.increment_version(param)  # autograd must see that the kernel wrote to it
            self._versions[param] = param._version
        return loss

    def _ready(self) -> Iterable[tuple[str, int, Tensor, dict[str, Any]]]:
        """Name, running number, parameter and group of each parameter with a gradient."""
        index = 0
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"params[{g}][{i}]" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                index += 1
                if param.grad is not None:
                    yield name, index - 1, param, group

    def _segment(self, name: str, index: int, param: Tensor, group: dict[str, Any], factor: float) -> Segment:
        if param.grad is None:
            raise AssertionError(name)
        check_tensor(f"{name}: gradient", param.grad, FLOATS, param.numel())
        state = self.state[param]
        fresh = self._prepare(param, group, state)
        step = state["step"] + 1
        hyper = self.rule.hyper(group, 1 if fresh else step)
        signed = -factor if group["maximize"] else factor
        store = self._store(param)
        key = rounding_key(step, index)
        segment = Segment(self.rule, hyper, param.grad.view(-1), store, signed, key, name=name)
        check_segment(segment)
        return segment

    def _prepare(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        """Create or complete the parameter's state; whether its states are new."""
        fresh = False
        if "step" not in state:
            state["step"] = 0
            if param.dtype != torch.float32:
                self._new_master(param, state)
        if not any(name in state for name in self.rule.states if name) and self._keeps_states(group):
            fresh = True
            states, scales = new_states(self.rule, self.states, param.numel(), _zeros)
            for name, values, scale in zip(self.rule.states, states, scales, strict=True):
                if name is not None and values is not None:
                    state[name] = values.view(param.shape)
                    if scale is not None:
                        state[f"{name}_scale"] = scale
            self._first_values(param, group)
        if "master" in state and self._versions.get(param, param._version) != param._version:
            self._refresh_master(param, state)
        return fresh

    def _keeps_states(self, group: dict[str, Any]) -> bool:
        return True

    def _first_values(self, param: Tensor, group: dict[str, Any]) -> None:
        """Give fresh states values other than zero, where the rule wants that."""

    def _is_split(self, param: Tensor) -> bool:
        return self.states != "fp32" and param.dtype == torch.bfloat16

    def _new_master(self, param: Tensor, state: dict[str, Any]) -> None:
        if self._is_split(param):
            state["master_lower"] = _zeros(param.numel(), dtype=torch.int16).view(param.shape)
        else:
            state["master"] = native.advise_huge(torch.empty(param.shape, dtype=torch.float32))
            native.cast(state["master"], param.detach())

    def _refresh_master(self, param: Tensor, state: dict[str, Any]) -> None:
        """Somebody wrote to the parameter: take over what differs from the rounded master, keep the rest in full."""
        master, value = state["master"], param.detach()
        torch.where(master.to(param.dtype) == value, master, value.float(), out=master)

    def _store(self, param: Tensor) -> Store:
        """The parameter's buffers, flat, as the kernels take them."""
        state, flat = self.state[param], param.detach().view(-1)
        first, second = (state[name].view(-1) if name and name in state else None for name in self.rule.states)
        low, high = (state.get(f"{name}_scale") if name else None for name in self.rule.states)
        master = flat if param.dtype == torch.float32 else state.get("master", state.get("master_lower")).view(-1)
        weight = None if param.dtype == torch.float32 else flat
        return Store(self.states, master, weight, (first, second), (low, high))

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the states in their own format; `load_state_dict` takes any format, and torch's."""
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave: bit-exact for the same format, converted from any other or from torch.optim.

        Everything is checked before anything changes.
        """
        groups = state_dict["param_groups"]
        for group in groups:
            self.rule.check({**self.defaults, **group})
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            sizes = [len(g["params"]) for g in groups]
            raise bad_value("state_dict: sizes of param_groups", sizes, [[len(g["params"]) for g in self.param_groups]])
        ids = [i for group in groups for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        loaded = {
            param: self._load_state(f"state_dict: state[{i}]", param, state_dict["state"][i])
            for i, param in zip(ids, params, strict=True)
            if i in state_dict["state"]
        }
        defaulted = [{**self.defaults, **group} for group in groups]
        super().load_state_dict({"state": {}, "param_groups": defaulted})
        self.state.update(loaded)
        self._versions = {param: param._version for param in loaded}

    def _load_state(self, label: str, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        names = [name for name in self.rule.states if name and name in saved and saved[name] is not None]
        state["step"] = int(saved.get("step", 1 if names else 0))  # torch's SGD counts no steps
        if names:
            states, scales = new_states(self.rule, self.states, param.numel(), _zeros)
            store = Store(self.states, param.detach().view(-1), None, states, scales)
            for which, name in enumerate(self.rule.states):
                if name in names:
                    self._load_one(f"{label}[{name!r}]", store, which, saved, name)
                    values, scale = states[which], scales[which]
                    assert values is not None
                    state[name] = values.view(param.shape)
                    if scale is not None:
                        state[f"{name}_scale"] = scale
        if param.dtype != torch.float32:
            self._load_master(label, param, saved, state)
        return state

    def _load_one(self, label: str, store: Store, which: int, saved: Mapping[str, Any], name: str) -> None:
        """One state from what was saved, in whatever format it was saved."""
        values, scale, into = saved[name].detach().cpu().reshape(-1), saved.get(f"{name}_scale"), store.states[which]
        assert into is not None
        if values.numel() != into.numel():
            raise bad_value(f"{label} length", values.numel(), [into.numel()])
        if values.dtype not in (*FLOATS, torch.float64, torch.uint8):
            raise bad_value(f"{label} dtype", values.dtype, (*FLOATS, torch.uint8))
        scale = scale.detach().cpu() if scale is not None else None
        blocks = state_numels(self.rule, "int8", values.numel())[1][which]
        if values.dtype == torch.uint8 and (scale is None or scale.numel() != blocks):
            raise bad_value(f"{label} scales", None if scale is None else scale.numel(), [blocks])
        own_scale = store.scales[which]
        if values.dtype == into.dtype and own_scale is None:
            into.copy_(values)
        elif values.dtype == torch.uint8 and own_scale is not None and scale is not None:
            into.copy_(values)
            own_scale.copy_(scale)
        else:
            saved_as = "int8" if values.dtype == torch.uint8 else "fp32"
            pair = (values, values) if saved_as == "int8" else (values.float(), values.float())
            decoded = decode_state(Store(saved_as, values, None, pair, (scale, scale)), which)
            assert decoded is not None
            encode_state(store, which, decoded)

    def _load_master(self, label: str, param: Tensor, saved: Mapping[str, Any], state: dict[str, Any]) -> None:
        """The master of a half-precision parameter, from either way of keeping it."""
        master, lower = saved.get("master"), saved.get("master_lower")
        if lower is not None:
            check_tensor(f"{label}['master_lower']", lower, (torch.int16,), param.numel())
        if master is not None:
            check_tensor(f"{label}['master']", master, (torch.float32,), param.numel())
        if self._is_split(param):
            if lower is None and master is not None:
                lower = native.split(master)[1]
            state["master_lower"] = _zeros(param.numel(), dtype=torch.int16).view(param.shape)
            if lower is not None:
                state["master_lower"].copy_(lower.view(param.shape))
            return
        if master is None and lower is not None and param.dtype == torch.bfloat16:
            master = native.join(param.detach(), lower.view(param.shape))
        state["master"] = (master if master is not None else param.detach()).float().clone().view(param.shape)


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
