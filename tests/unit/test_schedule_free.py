# SPDX-License-Identifier: Apache-2.0
"""Schedule-free optimizers as rule: they exchange the weights for evaluation, as without twinflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow import TwinOptimizer
from twinflow.offload.settings import Tuning


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: weights are y while training and x, an average, in evaluation."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _swap(self, weight: float, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for param in (param for param in group["params"] if "z" in self.state[param]):
                    param.lerp_(self.state[param]["z"], weight if mode else 1 - 1 / group["beta"])
                group["train_mode"] = mode

    def train(self) -> None:
        self._swap(1 - self.param_groups[0]["beta"], True)

    def eval(self) -> None:
        self._swap(0.0, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            c = 1 / group["k"]
            for param in (param for param in group["params"] if param.grad is not None):
                z = self.state[param].setdefault("z", param.detach().clone())
                x = param.lerp(z, 1 - 1 / group["beta"])
                z.sub_(param.grad, alpha=group["lr"])
                x.lerp_(z, c)
                param.copy_(x.lerp(z, 1 - group["beta"]))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1)).to(dtype)


def run(net: nn.Module, optimizer: Any, first: int = 0, last: int = 9, saves: bool = False) -> list[float]:
    """Losses of training, and after every third step of an evaluation. With `saves`, a new optimizer continues."""
    batches = torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(1)).to(next(net.parameters()).dtype)
    losses: list[Tensor] = []
    for index in range(first, last):
        optimizer.train()
        loss = net(batches[index]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        if index % 3 == 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(net(batches[-1]).square().mean())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("options", [{}, {"early": True, "max_grad_norm": 100.0}, {"tuning": Tuning(streamed=1.0)}])
def test_training_and_evaluation_are_those_of_the_optimizer_itself(ratio: float, options: dict[str, Any]) -> None:
    one, other = model(), model()
    wanted = run(one, ScheduleFree(one.parameters()))
    twin = TwinOptimizer(other, ScheduleFree, ratio=ratio, **options)
    assert run(other, twin) == pytest.approx(wanted, abs=1e-6)
    for mine, theirs in zip(other.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
    twin.close()


@pytest.mark.parametrize("steps", [3, 5])  # saved in the mode for evaluation, and in that for training
def test_a_saved_state_continues_in_its_mode(steps: int) -> None:
    one, other = model(), model()
    wanted = run(one, ScheduleFree(one.parameters()))
    twin = TwinOptimizer(other, ScheduleFree(other.parameters()))
    first = run(other, twin, last=steps)
    weights, state = other.state_dict(), twin.state_dict()
    again = model()
    again.load_state_dict(weights)
    twin.close()
    resumed = TwinOptimizer(again, ScheduleFree(again.parameters()))
    resumed.load_state_dict(state)
    assert first + run(again, resumed, first=steps) == pytest.approx(wanted, abs=1e-6)
    resumed.close()


def test_bf16_weights_are_rounded_averages() -> None:
    one, other = model(), model(torch.bfloat16)
    wanted = run(one, ScheduleFree(one.parameters()))
    twin = TwinOptimizer(other, ScheduleFree)
    assert run(other, twin) == pytest.approx(wanted, abs=3e-2)
    twin.eval()
    averages = [param.clone() for param in other.parameters()]
    twin.train()
    twin.eval()
    assert all(torch.equal(a, b) for a, b in zip(averages, other.parameters(), strict=True))  # masters are kept
    twin.close()


def test_wrong_modes_raise() -> None:
    net = model()
    twin = TwinOptimizer(net, ScheduleFree, early=True)
    net(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) cannot run.*Call optimizer\.train\(\) first"):
        twin.step()
    with pytest.raises(RuntimeError, match=r"train\(\) cannot run between backward\(\) and step\(\)"):
        twin.train()
    twin.zero_grad()
    twin.train()
    net(torch.ones(1, 4)).sum().backward()
    twin.train()  # has no effect, so it is allowed here
    with pytest.raises(RuntimeError, match=r"eval\(\) cannot run between backward\(\) and step\(\)"):
        twin.eval()
    twin.close()
    plain = TwinOptimizer(model())
    plain.train()  # other optimizers have no modes
    plain.eval()
    plain.close()
