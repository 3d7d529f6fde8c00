# SPDX-License-Identifier: Apache-2.0
"""Sums of several backwards on the host, models without memory, and what is refused."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from twin_support import gpt, loss_of

from twinflow.models.gpt import GPT
from twinflow.optim.twin import Tuning, TwinOptimizer

PARTS = 3


def trained(
    sums: str, delays: dict[str, float], steps: int = 4, reads_norm: bool = True, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    model = gpt()
    tuning = Tuning(bucket_numel=4096, sums=sums)
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, accumulation_steps=PARTS, tuning=tuning, **options)
    for name, seconds in delays.items():
        optimizer.runtime.device.delay(name, seconds)
    norms = []
    for step in range(steps):
        for part in range(PARTS):
            (loss_of(model, step * PARTS + part) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads_norm:
            norms.append(optimizer.grad_norm)
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], norms


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "delayed": {"max_grad_norm": 1.0, "delayed_update": True},
}


@cache
def trained_on_the_device(name: str) -> tuple[list[torch.Tensor], Any]:
    return trained("device", {}, **OPTIONS[name])


@pytest.mark.parametrize("when", [0, 1])
def test_sums_stay_if_the_parameters_get_other_memory(when: int) -> None:
    """As `model.to("cpu:0")` does it, which Accelerate calls."""
    model = gpt()
    options = {"lr": 0.0, "max_grad_norm": 1.0, "early": True, "accumulation_steps": 2}
    optimizer = TwinOptimizer(model, tuning=Tuning(bucket_numel=4096, sums="host"), **options)
    norms = []
    for step in range(2):
        for part in range(2):
            if (step, part) == (1, when):
                for p in model.parameters():
                    p.data = p.data.clone()
            (loss_of(model, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    optimizer.close()
    assert norms[1] == norms[0]


@pytest.mark.parametrize("stream", ["", "compute", "out", "in"])
@pytest.mark.parametrize("name", OPTIONS)
def test_sums_on_the_host_are_those_on_the_device(name: str, stream: str) -> None:
    options = OPTIONS[name]
    on_device, device_norms = trained_on_the_device(name)
    on_host, host_norms = trained("host", {stream: 0.001} if stream else {}, **options)
    for a, b in zip(on_device, on_host, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    if options:
        assert host_norms == pytest.approx(device_norms, rel=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_norm_counts_sums_of_both_sides(name: str) -> None:
    """Buckets whose state is on the device are summed and measured there, however late."""
    wanted, norms = trained_on_the_device(name)
    found, found_norms = trained("host", {"update": 0.002}, ratio=0.5, **OPTIONS[name])
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert found_norms == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_sums_of_the_next_step_wait_for_a_late_update(name: str) -> None:
    """The loop does not read the norm, so that a delayed step begins before the clipping decision of the last one."""
    wanted, _ = trained_on_the_device(name)
    found, _ = trained("host", {"update": 0.01}, ratio=0.5, reads_norm=False, **OPTIONS[name])
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_short_step_and_dropped_parts() -> None:
    """step() after two of three backwards uses what came; zero_grad() in the middle forgets it."""
    model, plain = gpt(), gpt()
    ours = TwinOptimizer(
        model, lr=1e-2, early=True, accumulation_steps=3, tuning=Tuning(bucket_numel=4096, sums="host")
    )
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loss_of(model, 9).backward()
    ours.zero_grad()
    for part in range(2):
        loss_of(model, part).backward()
        loss_of(plain, part).backward()
    ours.step()
    theirs.step()
    ours.close()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_gradients_can_be_read_after_the_last_backward() -> None:
    """`.grad` is the sum of all backwards, which the executor keeps for the update."""
    model, plain = gpt(), gpt()
    tuning = Tuning(bucket_numel=4096, sums="host")
    ours = TwinOptimizer(model, lr=1e-2, early=True, max_grad_norm=1.0, accumulation_steps=2, tuning=tuning)
    for part in range(2):
        loss_of(model, part).backward()
        loss_of(plain, part).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad * 1, b.grad, atol=1e-6, rtol=0)
    ours.close()


class Twice(nn.Module):
    """A model whose block runs twice, so that its parameters get two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.blocks[0](x))
        return self.head(x)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_one_backward_too_many_loses_no_gradient_of_a_block_that_runs_twice(ratio: float) -> None:
    torch.manual_seed(0)
    model = Twice()
    same = copy.deepcopy(model)
    tuning = Tuning(bucket_numel=128, sums="host")
    options = {"max_grad_norm": 1e9, "early": True, "accumulation_steps": PARTS, "ratio": ratio}
    optimizer = TwinOptimizer(model, "sgd", lr=0.1, tuning=tuning, **options)
    plain = torch.optim.SGD(same.parameters(), lr=0.1)
    for step in range(2):
        for part in range(PARTS + 1):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + part))
            model(x).square().sum().backward()
            same(x).square().sum().backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    optimizer.close()
    for a, b in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_step_without_a_forward_before_it_waits_for_a_streamed_update_that_reads_the_sums() -> None:
    weights = []
    for streamed in (0.0, 1.0):
        model = gpt()
        tuning = Tuning(bucket_numel=4096, sums="host", streamed=streamed)
        options = {"momentum": 0.9, "max_grad_norm": 1e9, "early": True, "accumulation_steps": 2}
        optimizer = TwinOptimizer(model, "sgd", lr=0.1, tuning=tuning, **options)
        for name in ("streamed0", "streamed1") if streamed else ():
            optimizer.runtime.device.delay(name, 0.01)
        for part in range(2):
            loss_of(model, part).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.close()
        weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_function_makes_the_model_and_it_trains() -> None:
    optimizer = TwinOptimizer(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), lr=1e-2)
    model = optimizer.model
    assert model is not None
    assert not any(param.is_meta for param in model.parameters())
    losses = []
    x = torch.ones(4, 8, device=next(model.parameters()).device)
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    assert losses[-1] < losses[0]


def test_a_model_on_the_meta_device_gets_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = TwinOptimizer(model, lr=1e-2)
    assert optimizer.model is model
    assert not any(param.is_meta for param in model.parameters())
    optimizer.close()


@pytest.mark.parametrize(
    ("tuning", "name"),
    [
        ({"hold": "disk"}, "hold"),
        ({"sums": "disk"}, "sums"),
        ({"bucket_numel": 100}, "bucket_numel"),
        ({"num_slots": 0}, "num_slots"),
    ],
    ids=str,
)
def test_tuning_is_checked(tuning: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TwinOptimizer(gpt(), tuning=Tuning(**tuning))


def test_a_model_in_ddp_is_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = GPT(gpt().config)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        TwinOptimizer(wrapped)


def test_a_rollback_in_the_middle_of_delayed_updates() -> None:
    model = gpt().to(torch.float32)
    optimizer = TwinOptimizer(model, lr=1e-2, delayed_update=True, tuning=Tuning(bucket_numel=4096))
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        for step in range(2, 5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        ends.append([p.detach().clone() for p in model.parameters()])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_loading_in_the_middle_of_a_step_is_refused() -> None:
    model = gpt()
    optimizer = TwinOptimizer(model, early=True, max_grad_norm=1.0)
    saved = optimizer.state_dict()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="step"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.close()


def test_a_parameter_with_new_memory_is_taken_over() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = TwinOptimizer(model, lr=1e-3, weight_decay=0.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.wait()
    model.weight.data = torch.full((4, 4), 5.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.wait()
    torch.testing.assert_close(model.weight.detach(), torch.full((4, 4), 5.0), atol=2e-3, rtol=0)
    optimizer.close()
