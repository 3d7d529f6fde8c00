# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's optimizers by name. They also work without `initialize`, which uses only their update rule and options,
unless they have state already or their state is not fp32.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow.build_optimizer import follow
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Param
from twinflow.offload.torch_streamed import StreamedTorchUpdater
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.optim.closure import loss_of
from twinflow.optim.host import HostOptimizer
from twinflow.optim.lamb import Lamb
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, RULES
from twinflow.rules.rule import Rule

LOGGER = logging.getLogger("twinflow")
_OPTIONS = {name for rule in RULES.values() for name in rule.defaults}


class Named(Optimizer):
    """Base class: an optimizer of DeepSpeed that applies the update rule `rule` of twinflow."""

    rule: Rule
    adam_w_mode: bool | None = None  # None: the rule has no such mode

    @property
    def rule_name(self) -> str | None:
        """The name of the rule in a config. None if the optimizer already has state, or if its state is not fp32."""
        return None if self.state or getattr(self, "states", "fp32") != "fp32" else self.rule.name

    def options(self) -> dict[str, Any]:
        """The defaults as `optimizer.params` of a config, in which `adam_w_mode` selects AdamW or Adam."""
        mode = {} if self.adam_w_mode is None else {"adam_w_mode": self.adam_w_mode}
        return {name: value for name, value in self.defaults.items() if name in _OPTIONS} | mode

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with only the options that at least one update rule has."""
        kept = ("params", "param_names", "initial_lr", *_OPTIONS)
        return [{name: value for name, value in group.items() if name in kept} for group in self.param_groups]


class DeepSpeedCPUAdam(Named, HostOptimizer):
    """AdamW, or Adam with `adamw_mode=False`, on CPU tensors.

    Unlike DeepSpeed's optimizer, it keeps an fp32 master for half-precision parameters. With
    `fp32_optimizer_states=False` the moments are bf16, and the second moment is rounded stochastically.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        self.rule = ADAMW if adamw_mode else ADAM
        self.adam_w_mode = adamw_mode
        states = "fp32" if fp32_optimizer_states else "bf16"
        options: dict[str, Any] = {"bias_correction": bias_correction, "states": states}
        HostOptimizer.__init__(self, model_params, lr, betas, eps, weight_decay, **options)


class DeepSpeedCPUAdagrad(Named, HostOptimizer):
    """DeepSpeed's Adagrad for parameters in host memory, with twinflow's kernel. `amsgrad` is refused."""

    rule = ADAGRAD

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        states = "fp32" if fp32_optimizer_states else "bf16"
        HostOptimizer.__init__(self, model_params, lr, weight_decay=weight_decay, eps=eps, states=states)


class DeepSpeedCPULion(Named, HostOptimizer):
    """DeepSpeed's Lion for parameters in host memory, with twinflow's kernel."""

    rule = LION

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        states = "fp32" if fp32_optimizer_states else "bf16"
        HostOptimizer.__init__(self, model_params, lr, betas, weight_decay, states=states)


class Fused(Named):
    """An optimizer with the argument `set_grad_none`, the default of `zero_grad(set_to_none)`."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets gradients to None, or to zeros if `set_to_none` is false."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(Fused, torch.optim.Adam):
    """torch's fused Adam. Weight decay is decoupled unless `adam_w_mode` is false."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        self.rule = ADAMW if adam_w_mode else ADAM
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        mode = {"fused": True, "decoupled_weight_decay": adam_w_mode}
        torch.optim.Adam.__init__(self, params, lr, betas, eps, weight_decay, **mode)
        self.defaults["bias_correction"] = bias_correction  # torch's Adam has no such option
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Raises ValueError without bias correction: torch's Adam has
        none of that kind, but `initialize` has.
        """
        if not all(group.get("bias_correction", True) for group in self.param_groups):
            remedy = "Pass the optimizer to initialize() before its first step, or use DeepSpeedCPUAdam."
            raise invalid_value("bias_correction of FusedAdam.step()", False, [True], remedy)
        return super().step(closure)


class FusedLion(Fused):
    """Lion in torch operations, on the device of the parameters."""

    rule = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        Optimizer.__init__(self, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (first, second) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1.0 - lr * group["weight_decay"])
                param.add_(momentum.lerp(param.grad, 1.0 - first).sign_(), alpha=-lr)
                momentum.lerp_(param.grad, 1.0 - second)
        return loss


class FusedLamb(Lamb):
    """twinflow's Lamb with the positional arguments of DeepSpeed's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if max_grad_norm:
            raise invalid_value("max_grad_norm", max_grad_norm, [0.0], "Set gradient_clipping in the config.")
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff, eps_inside_sqrt)

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of norms of the last step, of each parameter that had a gradient."""
        return lamb_coeffs(_TWINS[self]) if self in _TWINS else list(self.coeffs.values())


def lamb_coeffs(owner: weakref.ref[TwinOptimizer]) -> list[float]:
    """The ratios of norms of the last update of each parameter, if an engine has an optimizer with LAMB's rule. Waits
    for running updates. Raises RuntimeError if each rank updates only some of the parameters.
    """
    twin = owner()
    problem, remedy = "the engine was destroyed or deleted", "Call it earlier."
    if twin is not None and twin.team is not None and twin.team.is_partitioned:
        problem, remedy = "each rank updates only some of the parameters", "Use ZeRO stage 0, or leave the call out."
    elif twin is not None and not twin.runtime.is_closed:
        twin.wait()
        return [ratio for param in twin.runtime.params for ratio in _ratios_of(param)]
    raise wrong_state("get_lamb_coeffs() cannot return coefficients", problem, remedy)


def _ratios_of(param: Param) -> list[float]:
    """The ratio of a parameter; empty if it was never updated."""
    found = []
    for bucket in param.buckets:
        updater = bucket.updater.host if isinstance(bucket.updater, StreamedTorchUpdater) else bucket.updater
        assert isinstance(updater, TorchUpdater)
        inner = updater.inner(bucket)
        assert isinstance(inner.optimizer, Lamb)
        own = [inner.params[i] for i, piece in enumerate(bucket.slices) if piece.param == param.index]
        found += [inner.optimizer.coeffs[host] for host in own if host in inner.optimizer.coeffs]
    return found


_PASSED_ON = (
    *("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"),
    *("register_step_pre_hook", "register_step_post_hook"),
    *("train", "eval"),  # of schedule-free optimizers
)
# The optimizers of engines, by the script's optimizers that `hand_over` has connected to them.
_TWINS: weakref.WeakKeyDictionary[Optimizer, weakref.ref[TwinOptimizer]] = weakref.WeakKeyDictionary()


def hand_over(optimizer: Optimizer, twin: TwinOptimizer) -> None:
    """Makes an optimizer that `initialize` has taken over a handle of the engine's optimizer: a script may keep and
    call it. Otherwise its `step` would find no gradients and do nothing.
    """
    follow(optimizer, twin)
    _TWINS[optimizer] = owner = weakref.ref(twin)
    for name in _PASSED_ON:
        if hasattr(optimizer, name):
            setattr(optimizer, name, _passed_on(owner, name))


def state_of(optimizer: Optimizer) -> dict[str, Any] | None:
    """The state of a script's optimizer that an engine uses, for another engine. None if no engine uses it, and, with a
    warning, if each rank has only a part of the state.
    """
    reference = _TWINS.get(optimizer)
    twin = reference() if reference is not None else None
    if twin is None or twin.runtime.is_closed:
        return None
    if twin.team is not None and twin.team.is_partitioned:
        LOGGER.warning(
            "initialize() was called again with an optimizer of another engine. The new engine starts without its "
            "state, because each rank has only a part of it. Save a checkpoint before and load it into the new engine"
        )
        return None
    return twin.state_dict()


def load_state(twin: TwinOptimizer, state: dict[str, Any]) -> None:
    """Loads what `state_of` has returned. Options, such as the learning rate of a new scheduler, and the loss scale
    keep their values, which belong to the new config.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in twin.param_groups]
    twin.load_state_dict(state | {"loss_scale": twin.stream_state()[0]["loss_scale"]})
    for group, values in zip(twin.param_groups, options, strict=True):
        group.update(values)
    LOGGER.info("The new engine continues with a copy of this state, because initialize() got the same optimizer again")


def _passed_on(owner: weakref.ref[TwinOptimizer], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        twin = owner()
        if twin is None:
            remedy = "Keep the engine, or build a new optimizer."
            reason = "the engine that uses this optimizer was destroyed or deleted"
            raise wrong_state(f"{name}() cannot run", reason, remedy)
        return getattr(twin, name)(*args, **kwargs)

    vars(call)["_wrapped_by_lr_sched"] = True  # schedulers of torch warn about a `step` without this mark
    return call


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        remedy = "DeepSpeed ignores amsgrad. To use it, build torch.optim.AdamW(..., amsgrad=True)."
        raise invalid_value("amsgrad", amsgrad, [False], remedy)
