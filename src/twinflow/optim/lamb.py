# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam whose step is scaled, for each parameter, by the norm of its weights over the norm of its update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow.errors import invalid_value
from twinflow.optim.closure import loss_of
from twinflow.rules.rule import Options, check_betas, number, numbers

Loss = TypeVar("Loss")


class Lamb(Optimizer):
    """LAMB in torch operations, with DeepSpeed's arithmetic: the bias correction scales the step, after weight decay
    was added to the update.

    The ratio of norms is limited to the range from `min_coeff` to `max_coeff`. It is 1 if one of the norms is 0.
    `eps_inside_sqrt`: add eps before the square root of the second moment. A parameter must be whole, because its norm
    is needed: TwinOptimizer gives it whole parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
    ) -> None:
        check_betas(betas)
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not 0.0 <= value < math.inf:
                raise invalid_value(name, value, "a finite number >= 0")
        if not 0.0 < min_coeff <= max_coeff < math.inf:
            raise invalid_value(
                "(min_coeff, max_coeff)", (min_coeff, max_coeff), "two numbers > 0, the smaller one first"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        super().__init__(params, defaults)
        self.coeffs: dict[Tensor, float] = {}  # the ratios of norms of the last step, of each parameter with a gradient

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Updates every parameter that has a gradient."""
        loss = loss_of(closure)
        self.coeffs = {
            param: self._update(param, param.grad, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        }
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: Options) -> float:
        """Updates a parameter and returns its ratio of norms."""
        state, (b1, b2), eps = self.state[param], numbers(group, "betas"), number(group, "eps")
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(grad, 1.0 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1.0 - b2)
        divisor = (v + eps).sqrt_() if group["eps_inside_sqrt"] else v.sqrt().add_(eps)
        move = (m / divisor).add_(param, alpha=number(group, "weight_decay"))
        step_size = number(group, "lr")
        if group["bias_correction"]:
            step_size *= math.sqrt(1.0 - b2 ** state["step"]) / (1.0 - b1 ** state["step"])
        of_weights, of_move = float(param.norm()), float(move.norm())
        ratio = 1.0
        if of_weights > 0.0 and of_move > 0.0:
            ratio = min(max(of_weights / of_move, number(group, "min_coeff")), number(group, "max_coeff"))
        param.add_(move, alpha=-step_size * ratio)
        return ratio
