# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: several backwards make one step, declared (early=True) or by `.grad` as usual."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import pairwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin_support import (
    Branchy,
    assert_same,
    batch,
    gpt,
    loss_of,
    matrix_but,
    one_nan,
    quick_torch,
    restart,
    snapshot,
    train,
    twin,
    weights,
)

# Keys' biases have no gradient but rounding noise: a larger eps keeps Adam from making steps of it.
ADAMW = {"lr": 1e-3, "eps": 1e-5}
SIZE = 16  # of the large batch


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


def accumulate(model: nn.Module, optimizer: Any, steps: range, parts: int) -> list[float]:
    """The mean losses of steps whose large batches are cut into parts."""
    losses = []
    for step in steps:
        tokens, targets = batch(step, SIZE)
        total = 0.0
        for part in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            loss = model(*part).loss / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_close(a: nn.Module, b: nn.Module, atol: float = 1e-5) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def large() -> tuple[list[float], nn.Module]:
    """Plain torch with the whole batch, clipped on some steps."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8) and None)
    with quick_torch():
        return accumulate(model, optimizer, range(4), 1), model


@pytest.mark.parametrize(
    ("parts", "early", "delay"),
    matrix_but(
        pairwise((1, 4, 16), (False, True), ("compute", "in")),
        product((1, 4, 16), (False, True), ("", "compute", "out", "in")),
    ),
)
def test_parts_are_one_large_batch(large: tuple[list[float], nn.Module], parts: int, early: bool, delay: str) -> None:
    model = gpt()
    steps = parts if early else 1  # without permission to start early there is nothing to declare
    options = {"early": early, "accumulation_steps": steps, "max_grad_norm": 0.8, "delay": delay, "delay_s": 0.0003}
    with closing(twin(model, **options, **ADAMW)) as optimizer:
        losses = accumulate(model, optimizer, range(4), parts)
        optimizer.wait()
        assert optimizer.num_steps == 4
        assert losses == pytest.approx(large[0], abs=1e-5)
        assert_close(model, large[1])


@pytest.mark.parametrize(
    ("delay", "resume_at"),
    matrix_but([("compute", 0), ("out", 2), ("in", 2)], product(("compute", "out", "in"), (0, 2))),
)
def test_delays_and_a_restart_change_no_bit(delay: str, resume_at: int) -> None:
    def make(model: nn.Module, delay: str = delay) -> Any:
        return twin(model, early=True, accumulation_steps=2, max_grad_norm=0.8, delay=delay, delay_s=0.0003, **ADAMW)

    results = []
    for which in ("", delay):
        model = gpt()
        optimizer = make(model, which)
        accumulate(model, optimizer, range(resume_at), 2)
        if which and resume_at:
            model, optimizer = restart(model, optimizer, make)
        accumulate(model, optimizer, range(resume_at, 4), 2)
        results.append(snapshot(model, optimizer))
        optimizer.close()
    assert_same(*results)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_parameters_with_gradients_in_some_parts_only(early: bool, max_grad_norm: float | None) -> None:
    """A branch may be used by every part, some or none: the sums and step counts are torch's."""
    a, b = Branchy(), Branchy()
    options = {"accumulation_steps": 4, "early": True} if early else {}
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    with closing(twin(a, max_grad_norm=max_grad_norm, bucket_numel=512, **options, **ADAMW)) as ours:
        for step in range(6):
            for model, optimizer in ((a, ours), (b, theirs)):
                for part in range(4):
                    used = [
                        i
                        for i, parts in enumerate(((0, 1, 2, 3), (step % 4,), (1, 2) if step % 3 == 0 else ()))
                        if part in parts
                    ]
                    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + part))
                    (model(x, used) / 4).backward()
                if optimizer is theirs and max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(b.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        saved = ours.state_dict()["state"]
        assert_close(a, b)
        steps = {name: int(theirs.state[p]["step"]) for name, p in b.named_parameters() if p in theirs.state}
        assert {name: entry["step"] for name, entry in saved.items()} == steps
        assert steps["branches.2.weight"] == 2
        assert "never" not in saved


def test_a_nan_in_any_part_skips_the_step() -> None:
    model = gpt()
    with closing(twin(model, early=True, accumulation_steps=2, skip_nonfinite=True)) as optimizer:
        accumulate(model, optimizer, range(2), 2)
        before = snapshot(model, optimizer)
        handle = model.blocks[0].mlp.up.weight.register_hook(one_nan)
        loss_of(model, 0).backward()
        handle.remove()
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(snapshot(model, optimizer), before)
        assert optimizer.num_skipped == 1
        accumulate(model, optimizer, range(3, 5), 2)
        assert all(value.isfinite().all() for value in snapshot(model, optimizer).values())


@pytest.mark.parametrize("wanted", [2, 4])
def test_fewer_backwards_than_declared_step_with_what_came(wanted: int) -> None:
    """The last, short step of an epoch."""
    a, b = gpt(), gpt()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    with closing(twin(a, early=True, accumulation_steps=wanted, **ADAMW)) as ours:
        for backwards in (wanted, wanted - 1, 1, wanted):
            for model, optimizer in ((a, ours), (b, theirs)):
                for part in range(backwards):
                    loss_of(model, part).backward()
                optimizer.step()
                optimizer.zero_grad()
        ours.wait()
        assert_close(a, b)


def test_zero_grad_forgets_the_parts_that_came() -> None:
    """Parts of a step that was given up are in no later one: not in its sums, nor in their number."""
    a, b = Branchy(), Branchy()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    with closing(twin(a, early=True, accumulation_steps=3, bucket_numel=512, **ADAMW)) as ours:
        for model, optimizer in ((a, ours), (b, theirs)):
            for step in range(3):
                for _ in range(step):  # none, one, or two of three
                    model(x + 1, [0, 2]).backward()
                optimizer.zero_grad()
                for part in range(3):
                    model(x * part, [0, 1]).backward()
                optimizer.step()
                optimizer.zero_grad()
        ours.wait()
        assert_close(a, b)
        assert "branches.2.weight" not in ours.state_dict()["state"]


def test_parts_are_summed_in_fp32() -> None:
    """Sixteen gradients of 1 + 2**-7 in bf16: their sum in bf16 would be off by more than one part in a hundred."""
    weight = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = weight
    model.forward = lambda x: (model.weight * x).float().sum()
    options = {"rule": "sgd", "lr": 1.0, "early": True, "accumulation_steps": 16, "bucket_numel": 128}
    with closing(twin(model, **options)) as optimizer:
        for _ in range(16):
            model(torch.tensor(1 + 2**-7, dtype=torch.bfloat16)).backward()
        optimizer.step()
        master = optimizer.state_dict()["state"]["weight"]["master"]
    assert torch.equal(master, torch.full((300,), -16 * (1 + 2**-7)))


@pytest.mark.parametrize(("wanted", "forwards"), [(1, 0), (4, 0), (1, 2)])
def test_updates_start_in_the_last_backward(wanted: int, forwards: int) -> None:
    """Also after forwards without a backward. Only the tied embedding has to wait for its end."""
    model = gpt()
    with closing(twin(model, early=True, accumulation_steps=wanted, skip_nonfinite=True)) as optimizer:
        with torch.no_grad():
            for _ in range(forwards):
                model(*batch(0))
        for _ in range(2):
            for _ in range(wanted):
                loss_of(model, 0).backward()
            started = len(optimizer.runtime.steps.job.tasks)
            optimizer.step()
            optimizer.zero_grad()
        assert started == sum(all(p is not model.head.weight for p in ps) for ps in bucket_params(optimizer))


def bucket_params(optimizer: Any) -> list[list[nn.Parameter]]:
    return [[param.tensor for param in bucket.params] for bucket in optimizer.runtime.buckets]


# Mistakes.


@pytest.mark.parametrize("wanted", [1, 3])
def test_an_undeclared_backward_counts_as_with_torch(wanted: int) -> None:
    a, b = gpt(), gpt()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    with closing(twin(a, early=True, accumulation_steps=wanted, max_grad_norm=1e9, **ADAMW)) as ours:
        for model, optimizer in ((a, ours), (b, theirs)):
            for step, more in enumerate((0, 1, 2, 0)):
                for part in range(wanted + more):
                    loss_of(model, 10 * step + part).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(a, b)


@pytest.mark.parametrize("wanted", [1, 3])
def test_where_updates_are_written_an_undeclared_backward_is_an_error_after_a_whole_step(wanted: int) -> None:
    results = []
    for has_more in (False, True):
        model = gpt()
        with closing(twin(model, early=True, accumulation_steps=wanted, **ADAMW)) as optimizer:
            accumulate(model, optimizer, range(1), wanted)
            losses = [loss_of(model, i) for i in range(wanted + 1)]
            for loss in losses[:wanted]:
                loss.backward()
            if has_more:
                with pytest.raises(RuntimeError, match=r"accumulation_steps=.*early=False"):
                    losses[wanted].backward()
            else:
                optimizer.step()
            optimizer.zero_grad()
            accumulate(model, optimizer, range(2, 3), wanted)
            results.append(snapshot(model, optimizer))
    assert_same(*results)


class Twice(nn.Module):
    """Its last layer runs twice: that gradient is complete only when the backward has ended."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, use: Any = lambda function, x: function(x)) -> Tensor:
        x = use(self.first, x)
        return use(self.last, use(self.last, x).tanh()).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_run_twice_under_checkpointing(reentrant: bool) -> None:
    """Reentrant: their gradients come in several pieces within one backward."""

    def use(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=reentrant)

    a, b = Twice(), Twice()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    with closing(twin(a, early=True, accumulation_steps=3, **ADAMW)) as ours:
        for step in range(3):
            for model, optimizer in ((a, ours), (b, theirs)):
                for part in range(3):
                    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + part)).requires_grad_()
                    model(x, use).backward()
                optimizer.step()
                optimizer.zero_grad()
        ours.wait()
        assert_close(a, b)


@pytest.mark.parametrize("wanted", [1, 2])
def test_where_updates_are_written_a_forward_before_step_is_an_error(wanted: int) -> None:
    model = gpt()
    with closing(twin(model, early=True, accumulation_steps=wanted)) as optimizer:
        accumulate(model, optimizer, range(1), wanted)
        for part in range(wanted):  # forwards between the parts are fine
            loss_of(model, part).backward()
        with pytest.raises(RuntimeError, match=r"A forward ran between backward\(\) and step\(\)"):
            loss_of(model, 5)
        optimizer.zero_grad()
        accumulate(model, optimizer, range(6, 8), wanted)


def test_weights_are_not_read_in_the_middle_of_an_early_update() -> None:
    """Without a clipping decision some are updated already. With one nothing is: the old weights and state are
    there."""
    for read in ("model.state_dict", "optimizer.state_dict", "optimizer.wait"):
        model = gpt()
        with closing(twin(model, early=True)) as optimizer:
            train(model, optimizer, range(1))
            loss_of(model, 0).backward()
            with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
                operator.attrgetter(read)(SimpleNamespace(model=model, optimizer=optimizer))()
            model.state_dict()
    model = gpt()
    before = weights(model)
    with closing(twin(model, early=True, max_grad_norm=1.0, delay="compute")) as optimizer:
        loss_of(model, 0).backward()
        assert_same({f"weight of {n}": p for n, p in model.state_dict().items() if n != "head.weight"}, before)
        optimizer.step()


@pytest.mark.parametrize("value", [0, -1])
def test_bad_numbers_of_parts(value: int) -> None:
    with pytest.raises(ValueError, match=rf"accumulation_steps is {value}, but must be a whole number >= 1"):
        twin(gpt(), accumulation_steps=value)
