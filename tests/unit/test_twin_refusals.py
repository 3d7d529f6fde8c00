# SPDX-License-Identifier: Apache-2.0
"""What a loop does wrong is found out, and nothing is lost: gradients and options changed too late, old weights, steps
that are dropped, parameters of two optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twinflow
from twinflow import TwinOptimizer

RATE = 1e-2


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def loss_of(model: Callable[[Tensor], Tensor], seed: int = 1) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_step(steps: int = 1) -> list[Tensor]:
    """What torch makes of it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train(model, optimizer, steps)
    return weights(model)


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_a_step(**options: Any) -> tuple[nn.Sequential, TwinOptimizer]:
    """After the backward of the second step: where updates cannot be undone, the first step is only watched."""
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True, **options)
    train(model, optimizer)
    loss_of(model).backward()
    return model, optimizer


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


# Gradients


def drop_one(model: nn.Sequential) -> None:
    model[2].weight.grad = None


def set_one(model: nn.Sequential) -> None:
    model[2].weight.grad = torch.ones(16, 16)


def train_with(change: Callable[[Any], None], optimizer_of: Callable[[nn.Module], Any]) -> list[Tensor]:
    """Three steps; before the second, somebody changes gradients after backward."""
    model = mlp()
    optimizer = optimizer_of(model)
    for step in range(3):
        loss_of(model, step).backward()
        if step == 1:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("change", [nn.Module.zero_grad, drop_one, set_one])
def test_gradients_that_change_after_an_early_backward_change_as_with_torch(change: Callable[[Any], None]) -> None:
    found = train_with(change, lambda model: TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1e9))
    assert_close(found, train_with(change, lambda model: torch.optim.AdamW(model.parameters(), lr=RATE)))


@pytest.mark.parametrize("change", [drop_one, set_one])
def test_where_an_update_was_written_they_are_refused_and_nothing_is_lost(change: Callable[[Any], None]) -> None:
    model, optimizer = in_a_step()
    change(model)
    with pytest.raises(
        RuntimeError,
        match=r"2\.weight\.grad was changed between backward\(\) and step\(\), which is too late, because updates",
    ):
        optimizer.step()
    assert_close(weights(model), one_step(2))  # the step was completed, and can be saved
    assert set(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    train(model, optimizer)
    assert_close(weights(model), one_step(3))
    optimizer.close()


def test_gradients_that_no_backward_made() -> None:
    found = []
    for optimizer_of in (
        lambda m: TwinOptimizer(m, lr=RATE, early=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=RATE),
    ):
        model = mlp()
        optimizer = optimizer_of(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        found.append(weights(model))
    assert_close(*found)


@pytest.mark.parametrize("limits", [{}, {"max_grad_norm": 1.0}])
def test_gradients_that_step_has_used_are_not_used_again_without_a_word(limits: dict[str, Any]) -> None:
    model, optimizer = in_a_step(**limits)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"Read \.grad between backward\(\) and step"):
        model[0].weight.grad.norm()
    with pytest.raises(RuntimeError, match=r"Call zero_grad\(\) after step"):
        optimizer.step()
    loss_of(model).backward()  # zero_grad() may still drop what it adds
    with pytest.raises(RuntimeError, match=r"Call zero_grad\(\) after step"):
        optimizer.step()
    optimizer.close()


# Options


def test_a_bad_rate_is_refused_before_anything_changes() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    before = weights(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    loss_of(model).backward()
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = RATE
    optimizer.zero_grad()
    assert same(weights(model), before)
    loss_of(model).backward()
    optimizer.step()
    optimizer.wait()
    assert_close(weights(model), one_step())
    optimizer.close()


def test_a_rate_that_comes_too_late_is_refused() -> None:
    model, optimizer = in_a_step()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"lr of param_groups\[0\] was changed between backward"):
        optimizer.step()
    assert_close(weights(model), one_step(2))
    optimizer.close()


def test_what_is_no_option_may_change() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    group = optimizer.param_groups[0]
    group["note"], group["numbers"] = object(), np.zeros(3)
    for step in range(2):
        loss_of(model).backward()
        group["seen"] = step
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_steps == 2
    optimizer.close()


# A step that is dropped


class Fails(nn.Module):
    """The identity, until its backward is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()

        def fail(_: Tensor) -> None:
            if self.is_on:
                raise MemoryError("no room")

        if x.requires_grad:
            x.register_hook(fail)
        return x


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("limits", [{"max_grad_norm": 0.1}, {"skip_nonfinite": True}])
def test_after_an_exception_in_backward_the_step_can_be_dropped(
    limits: dict[str, Any], accumulation_steps: int
) -> None:
    def train(is_disturbed: bool) -> list[Tensor]:
        model = mlp()
        model.insert(2, Fails())
        optimizer = TwinOptimizer(model, lr=RATE, early=True, accumulation_steps=accumulation_steps, **limits)
        for step in range(4):
            if is_disturbed and step == 2:
                for part in range(accumulation_steps):
                    model[2].is_on = part == accumulation_steps - 1
                    try:
                        loss_of(model, 99).backward()
                    except MemoryError:
                        model[2].is_on = False
                        optimizer.zero_grad()
            for part in range(accumulation_steps):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        assert optimizer.num_steps == 4
        optimizer.close()
        return weights(model)

    assert same(train(True), train(False))


def test_a_graph_outlasts_a_dropped_step() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1.0)
    for _ in range(2):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_steps == 2
    optimizer.close()


def test_a_dropped_step_moves_no_schedule() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = engine_of(mlp(), scheduler=schedule)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    rate = engine.get_lr()
    engine.backward(loss_of(engine))
    engine.zero_grad()
    engine.step()
    assert engine.get_lr() == rate
    assert engine.optimizer.num_steps == 2
    engine.destroy()


def test_without_a_limit_a_step_cannot_be_dropped() -> None:
    for disturb in (TwinOptimizer.zero_grad, lambda optimizer: optimizer.model(torch.zeros(1, 8))):
        model, optimizer = in_a_step()
        with pytest.raises(RuntimeError, match="set max_grad_norm or skip_nonfinite=True, with which updates wait"):
            disturb(optimizer)
        assert_close(weights(model), one_step(2))
        optimizer.close()


def test_a_delayed_step_can_be_dropped() -> None:
    found = []
    for drops in (False, True):
        model = mlp()
        optimizer = TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1.0, delayed_update=True)
        for step in range(4):
            if drops and step == 2:
                loss_of(model, 99).backward()
                optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found.append(weights(model))
        optimizer.close()
    assert same(*found)


# Old weights


class Encoder(nn.Module):
    """Has a parameter of its own, and a method that uses it past `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(400, 400) * 0.01)
        self.head = nn.Linear(400, 1)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(x @ self.weight)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


@pytest.mark.parametrize("early", [False, True])
def test_a_method_past_forward_sees_new_weights_from_the_first_step_on(early: bool) -> None:
    model = Encoder()
    optimizer = TwinOptimizer(model, lr=RATE, max_grad_norm=0.1, early=early)
    x = torch.randn(2, 400)
    for _ in range(5):
        model.encode(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = model.encode(x).detach()
        optimizer.wait()
        assert torch.equal(seen, model.encode(x))
    optimizer.close()


@pytest.mark.parametrize("early", [False, True])
def test_a_method_that_comes_instead_of_forward_waits_too(early: bool) -> None:
    found = []
    for delay in (0.0, 0.01):
        model = Encoder()
        optimizer = TwinOptimizer(model, lr=RATE, max_grad_norm=0.1, early=early)
        optimizer.runtime.device.delay("in", delay)
        x = torch.ones(2, 400)
        for way in (model, model, model.encode, model):
            way(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
        optimizer.close()
    assert same(*found)


class Attends(nn.Module):
    """Its attention reads the weight of a part of it that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def encode(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_a_module_that_reads_its_parts_has_waited_for_them() -> None:
    model = Attends()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    x = torch.randn(2, 3, 8)
    for way in (model, model.encode, model.encode):
        way(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_steps == 3
    optimizer.close()


# An engine


def engine_of(model: nn.Module, **more: Any) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "gradient_clipping": 1.0, **more}
    return twinflow.initialize(model=model, config=config)[0]


def test_a_method_of_the_engine_s_module_sees_new_weights() -> None:
    engine = engine_of(Encoder())
    x = torch.randn(2, 400)
    for _ in range(5):
        engine.backward(engine(x).square().mean())
        engine.step()
        seen = engine.encode(x).detach()
        engine.optimizer.wait()
        assert torch.equal(seen, engine.encode(x))
    engine.destroy()


def test_an_engine_takes_a_plain_backward_as_it_is() -> None:
    """`loss.backward()` is not divided by the number of micro-batches; `engine.scale` and `engine.backward` divide."""
    ways: dict[str, Callable[[Any, Tensor], Any]] = {
        "engine": lambda engine, loss: engine.backward(loss),
        "scale": lambda engine, loss: engine.scale(loss).backward(),
        "by hand": lambda engine, loss: (loss / 2).backward(),
        "mixed": lambda engine, loss: engine.backward(loss) if engine.part else (loss / 2).backward(),
    }
    found = {}
    for name, backward in ways.items():
        engine = engine_of(mlp(), gradient_accumulation_steps=2)
        for step in range(4):
            backward(engine, loss_of(engine, step))
            engine.step()
        assert engine.global_steps == 2
        found[name] = weights(engine.module)
        engine.destroy()
    for name in ways:
        assert_close(found[name], found["engine"])


def test_a_plain_backward_moves_the_schedule() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    rates = []
    for is_plain in (False, True):
        engine = engine_of(mlp(), scheduler=schedule)
        for step in range(4):
            loss = loss_of(engine, step)
            loss.backward() if is_plain else engine.backward(loss)
            engine.step()
        rates.append((engine.get_lr(), weights(engine.module)))
        engine.destroy()
    assert rates[0][0] == rates[1][0] != [0.0]
    assert same(rates[0][1], rates[1][1])


def test_zero_grad_starts_the_count_of_micro_batches_anew() -> None:
    engine = engine_of(mlp(), gradient_accumulation_steps=2)
    engine.backward(loss_of(engine, 7))
    engine.step()
    engine.zero_grad()
    for step in range(2):
        assert engine.global_steps == 0
        engine.backward(loss_of(engine, step))
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()


# Two optimizers


def test_a_parameter_has_one_optimizer() -> None:
    both = nn.ModuleDict({"a": mlp(), "b": mlp()})
    optimizer = TwinOptimizer(both, lr=RATE)
    with pytest.raises(ValueError, match=r"0\.weight already has a TwinOptimizer"):
        TwinOptimizer(both["a"], lr=RATE)
    with pytest.raises(ValueError, match="already has a TwinOptimizer"):
        TwinOptimizer(list(both.parameters()), lr=RATE)
    with pytest.raises(ValueError, match="already has a TwinOptimizer"):
        TwinOptimizer(both, lr=RATE, offload_params=True)
    loss_of(both["a"]).backward()  # nothing was taken away
    optimizer.step()
    optimizer.close()
    TwinOptimizer(both["a"], lr=RATE).close()


def test_a_copy_is_another_model_and_a_parameter_can_be_saved(tmp_path: Path) -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE)
    TwinOptimizer(copy.deepcopy(model), lr=RATE).close()
    torch.save(model[0].weight, tmp_path / "weight.pt")
    assert torch.equal(torch.load(tmp_path / "weight.pt", weights_only=True), model[0].weight)
    optimizer.close()


def test_an_optimizer_that_nobody_holds_gives_its_model_up() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE)
    loss_of(model).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    again = TwinOptimizer(model, lr=RATE)  # after the step has come to its end
    assert_close(weights(model), one_step())
    loss_of(model).backward()
    again.step()
    again.close()


def test_it_is_not_copied_without_a_word() -> None:
    optimizer = TwinOptimizer(mlp(), lr=RATE)
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="neither be copied nor pickled"):
            make(optimizer)
    optimizer.close()
