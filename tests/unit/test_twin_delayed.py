# SPDX-License-Identifier: Apache-2.0
"""The one-step delayed update: bit for bit a plain loop that keeps two copies of the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from support import pairwise
from torch import Tensor, nn
from twin_support import (
    MAX_NORM,
    RULE_OPTIONS,
    Branchy,
    Synchronous,
    assert_same,
    branchy_loss,
    gpt,
    loss_of,
    matrix_but,
    quick_torch,
    restart,
    train,
    twin,
    weights,
)

STEPS, NAN_STEP = 10, 6


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


class Delayed:
    """The algorithm. Forward and backward use `params`; `newest` runs one update ahead of them.

    Step t (from 1) updates `newest` with gradient t. After an ordinary step the next forward sees that update; after a
    delayed one, all after the first `start`, only the update of the step before.
    """

    def __init__(self, params: Any, start: int, max_norm: float | None = MAX_NORM, **options: Any) -> None:
        self.params = list(params)
        self.newest = [p.detach().clone().requires_grad_() for p in self.params]
        self.optimizer = Synchronous(self.newest, max_norm=max_norm, **options)
        self.start, self.t = start, 0

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        before = [p.clone() for p in self.newest]
        for p, new in zip(self.params, self.newest, strict=True):
            new.grad = p.grad
        self.optimizer.step()
        seen = before if self.t > self.start else self.newest
        for p, value in zip(self.params, seen, strict=True):
            p.copy_(value)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def flush(self) -> None:
        for p, new in zip(self.params, self.newest, strict=True):
            p.copy_(new)


def reference(rule: str, states: str, start: int, max_norm: float | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, weights as the next forward sees them, and the newest ones as masters."""
    model = gpt()
    options = {"rule": rule, "states": states, **RULE_OPTIONS[rule]}
    optimizer = Delayed(model.parameters(), start, max_norm, **options)
    losses = train(model, optimizer, range(STEPS), NAN_STEP if max_norm else -1)
    names = [name for name, _ in model.named_parameters()]
    masters = {f"master of {name}": new.detach() for name, new in zip(names, optimizer.newest, strict=True)}
    return losses, weights(model) | masters


def check(rule: str, states: str, start: int, max_norm: float | None, resume_at: int = 0, **options: Any) -> None:
    options |= {"rule": rule, "states": states, "max_grad_norm": max_norm, **RULE_OPTIONS[rule]}
    options |= {"delayed_update": True, "delayed_update_start": start}
    model, nan_step = gpt(), NAN_STEP if max_norm else -1
    optimizer = twin(model, **options)
    losses = train(model, optimizer, range(resume_at or STEPS), nan_step)
    if resume_at:
        model, optimizer = restart(model, optimizer, lambda model: twin(model, **options))
        losses += train(model, optimizer, range(resume_at, STEPS), nan_step)
    with closing(optimizer):
        expected_losses, expected = reference(rule, states, start, max_norm)
        assert losses == expected_losses
        state = optimizer.state_dict()["state"]
        assert_same(weights(model) | {f"master of {name}": entry["master"] for name, entry in state.items()}, expected)


AXES: tuple[Any, ...] = (
    (("adamw", "fp32"), ("adam", "int8"), ("sgd", "bf16")),
    (0, 4, STEPS),  # ordinary steps first
    (MAX_NORM, None),
    (0, 4, 5, 7),  # resumed at: 7 comes right after the step with a NaN
    ({}, {"early": True}, {"early": True, "hold": "host"}),
    ("", "compute", "out", "in"),
)


QUICK = pairwise(*AXES[:3], (0, 5, 7), (0, 1, 2), ("compute", "out", "in"))
CELLS = [cell for cell in pairwise(*AXES[:4], (0, 1, 2), AXES[5]) if cell not in QUICK]


@pytest.mark.parametrize(
    ("rule", "start", "max_norm", "resume_at", "overlap", "delay"), matrix_but(QUICK, QUICK + CELLS)
)
def test_is_the_plain_loop_bit_for_bit(
    rule: tuple[str, str], start: int, max_norm: float | None, resume_at: int, overlap: int, delay: str
) -> None:
    check(*rule, start, max_norm, resume_at, delay=delay, delay_s=0.0005, **AXES[4][overlap])


def test_the_first_delayed_steps_see_old_weights() -> None:
    """In words: with a delay from the start, steps 1 and 2 both use the first weights, step 3 the first update."""
    model, seen = gpt(), []
    first = weights(model)
    plain = gpt()
    optimizer = Synchronous(plain.parameters(), max_norm=None)
    train(plain, optimizer, [0])
    with closing(twin(model, early=True, delayed_update=True)) as delayed:
        for step in range(3):
            seen.append(weights(model))
            train(model, delayed, [step])
            delayed.wait()
    assert_same(seen[0], first)
    assert_same(seen[1], first)
    assert_same(seen[2], weights(plain))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("delay", ["out", "in"])
def test_flush_and_close_put_the_last_update_into_the_weights(early: bool, delay: str) -> None:
    """After a flush the next forward sees every update; the delay goes on from there."""
    a, b = gpt(), gpt()
    ours = twin(a, early=early, delayed_update=True, delay=delay, **RULE_OPTIONS["adamw"])
    theirs = Delayed(b.parameters(), 0, None, **RULE_OPTIONS["adamw"])
    for steps in (range(3), range(3, 6)):
        assert train(a, ours, steps) == train(b, theirs, steps)
        ours.wait()
        assert_same(weights(a), weights(b), "one update behind:")
        theirs.flush()
        if steps.stop == 3:
            ours.flush()
            assert not ours.state_dict()["has_unsent"]
        else:
            ours.close()
        assert_same(weights(a), weights(b), "all updates:")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("resume_at", [0, 3, 6])
def test_branches_that_are_not_always_used(early: bool, resume_at: int) -> None:
    def some_steps(model: Branchy, optimizer: Any, steps: range) -> None:
        for step in steps:
            branchy_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {"lr": 1e-2, "early": early, "delayed_update": True, "delayed_update_start": 2, "bucket_numel": 512}
    a, b = Branchy(), Branchy()
    optimizer = twin(a, **options)
    some_steps(a, optimizer, range(resume_at))
    if resume_at:
        a, optimizer = restart(a, optimizer, lambda model: twin(model, **options), lambda: Branchy(seed=9))
    some_steps(a, optimizer, range(resume_at, 9))
    optimizer.wait()
    some_steps(b, Delayed(b.parameters(), 2, None, lr=1e-2), range(9))
    assert_same(weights(a), weights(b))
    optimizer.close()


@pytest.mark.parametrize("early", [False, True])
def test_our_own_writes_are_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """A branch that a step does not use is not waited for: its weights may be written at any moment of that step."""
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a, **k: (copy(*a, **k), time.sleep(0.01)))
    model = Branchy()
    with closing(twin(model, early=early, delayed_update=True, bucket_numel=512)) as optimizer:
        for step in range(9):
            branchy_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


class HalfSum(nn.Module):
    """bf16 or fp16 weights, no products of matrices; `unused` never gets a gradient."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(30, 40, generator=generator).to(dtype))
        self.unused = nn.Parameter(torch.randn(50, generator=generator).to(dtype))

    def forward(self, step: int) -> Tensor:
        goal = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(step)).to(self.weight.dtype)
        return (self.weight - goal).float().square().mean()


@pytest.mark.parametrize(("dtype", "states"), pairwise((torch.bfloat16, torch.float16), ("fp32", "bf16", "int8")))
@pytest.mark.parametrize("model_first", [True, False])
def test_half_precision_resumes_in_the_middle(dtype: torch.dtype, states: str, model_first: bool) -> None:
    options = {"lr": 1e-2, "states": states, "delayed_update": True, "early": True, "bucket_numel": 256}
    results = []
    for resume_at in (0, 3):
        model = HalfSum(dtype)
        optimizer = twin(model, **options)
        for step in range(7):
            if resume_at and step == resume_at:
                assert optimizer.state_dict()["has_unsent"]
                model, optimizer = restart(
                    model, optimizer, lambda model: twin(model, **options), lambda: HalfSum(dtype, seed=9), model_first
                )
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        results.append(weights(model) | {key: value.clone() for key, value in state["weight"].items() if key != "step"})
        optimizer.close()
    assert_same(*results)


def test_a_delayed_state_needs_a_delayed_optimizer() -> None:
    model = gpt()
    with closing(twin(model, delayed_update=True)) as optimizer:
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
    with closing(twin(gpt())) as other, pytest.raises(ValueError, match="saved in the middle of a delayed update"):
        other.load_state_dict(saved)


def test_writing_to_a_weight_that_is_about_to_change_is_an_error() -> None:
    model = gpt()
    with closing(twin(model, delayed_update=True, early=True)) as optimizer:
        train(model, optimizer, range(2))
        optimizer.wait()
        with torch.no_grad():
            model.blocks[0].mlp.up.weight.zero_()
        with pytest.raises(RuntimeError, match=r"blocks.0.mlp.up.weight was written to, and a delayed update"):
            loss_of(model, 2).backward()
