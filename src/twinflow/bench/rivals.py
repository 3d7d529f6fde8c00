"""The jobs with torch's optimizers, and with DeepSpeed's if it is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinflow import native
from twinflow.bench.buffers import huge_random
from twinflow.bench.machine import version_of
from twinflow.bench.timing import Work

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
LR = 1e-3


def torch_optimizer(name: str, **options: Any) -> MakeOptimizer:
    """A function that builds `torch.optim.NAME(params, lr, **options)`."""
    return lambda params: getattr(torch.optim, name)(params, lr=LR, **options)


class Fp32Job:
    """An fp32 parameter with an fp32 gradient, updated in place by a torch optimizer."""

    def __init__(self, numel: int, make: MakeOptimizer) -> None:
        self.param = huge_random(numel, scale=0.02)
        self.grad = self.param.grad = huge_random(numel, seed=1)
        self.optimizer = make([self.param])
        self.optimizer.step()  # creates the states

    def step(self) -> None:
        self.optimizer.step()

    def other(self, make: MakeOptimizer) -> Work:
        """The step of another optimizer that shares parameter and states with this one, to save memory."""
        optimizer = make([self.param])
        optimizer.state[self.param] = self.optimizer.state[self.param]
        return optimizer.step

    def states(self, *names: str) -> list[Tensor]:
        """The optimizer's state tensors of these names."""
        return [self.optimizer.state[self.param][name] for name in names]


class MixedJob(Fp32Job):
    """An fp32 optimizer with a bf16 gradient and a bf16 weight: cast, step, cast."""

    def __init__(self, grad: Tensor, make: MakeOptimizer) -> None:
        super().__init__(grad.numel(), make)
        self.grad_in = grad
        self.weight = native.huge_zeros(grad.numel(), dtype=torch.bfloat16)

    def step(self) -> None:
        self.grad.copy_(self.grad_in)
        self.optimizer.step()
        self.weight.copy_(self.param)


class DeepSpeedJob(Fp32Job):
    """The host update of DeepSpeed: the gradient is fp32 on the host. It is scaled in place, then step, then a cast to
    bf16.
    """

    def __init__(self, numel: int, make: MakeOptimizer) -> None:
        super().__init__(numel, make)
        self.weight = native.huge_zeros(numel, dtype=torch.bfloat16)

    def step(self) -> None:
        self.grad.mul_(0.999)
        self.optimizer.step()
        self.weight.copy_(self.param)


class Lion(Optimizer):
    """Lion in torch operations, because torch.optim has no Lion."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                direction = state["exp_avg"].lerp(p.grad, 1.0 - b1).sign_()
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1.0 - b2)


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeedCPUAdam, or None and the reason."""

    make: MakeOptimizer | None
    about: str


def load_deepspeed(threads: int) -> DeepSpeed:
    """Import DeepSpeed and build its operator if necessary. Never raises.

    DeepSpeed's OpenMP runtime may differ from torch's. It reads its number of threads from the environment once.
    """
    version = version_of("deepspeed")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        adam([torch.zeros(8)], lr=LR, adamw_mode=True)  # builds and loads the operator
    except ModuleNotFoundError as error:
        missing = "not installed" if version is None else f"{version}, needs {error.name}"
        return DeepSpeed(None, missing)
    except Exception as error:  # The benchmark continues after any error of the compiler or of DeepSpeed.
        return DeepSpeed(None, f"{version}, does not load: {error}")
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return DeepSpeed(lambda params: adam(params, lr=LR, adamw_mode=True), str(version))
