"""What a loop does wrong is found out, and nothing is lost: gradients and options changed too late, old weights, steps
that are dropped, parameters of two optimizers."""

from __future__ import annotations

import copy
import gc
import logging
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


def one_step() -> list[Tensor]:
    """What torch makes of it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss_of(model).backward()
    optimizer.step()
    return weights(model)


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


# Gradients


def drop_one(model: nn.Sequential) -> None:
    model[2].weight.grad = None


def set_one(model: nn.Sequential) -> None:
    model[2].weight.grad = torch.ones(16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.zero_grad, r"0\.weight\.grad was dropped after backward"),
        (drop_one, r"2\.weight\.grad was dropped after backward"),
        (set_one, r"2\.weight\.grad was set by hand"),
    ],
)
def test_gradients_that_change_after_an_early_backward(change: Callable[[Any], None], message: str) -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1.0)
    before = weights(model)
    loss_of(model).backward()
    change(model)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.zero_grad()  # goes on
    optimizer.wait()
    assert same(weights(model), before)
    loss_of(model).backward()
    optimizer.step()
    optimizer.wait()
    assert not same(weights(model), before)
    optimizer.close()


def test_gradients_that_no_backward_made() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="set by hand"):
        optimizer.step()
    optimizer.close()


# Options


def test_a_bad_rate_is_refused_before_anything_changes() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    before = weights(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = RATE
    optimizer.zero_grad()
    assert same(weights(model), before)
    loss_of(model).backward()
    optimizer.step()
    optimizer.wait()
    assert_close(weights(model), one_step())
    optimizer.close()


def test_a_rate_that_comes_too_late_is_refused() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"lr of param_groups\[0\] was changed to 0.5 between backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = RATE
    optimizer.step()
    assert optimizer.num_steps == 1
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
    assert optimizer.num_steps == 2
    optimizer.close()


def test_weights_written_between_backward_and_step_are_not_lost_without_a_word() -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1.0)
    loss_of(model).backward()
    with torch.no_grad():
        model[2].weight.fill_(0.5)
    with pytest.raises(RuntimeError, match=r"2\.weight was written to between backward\(\) and step\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    optimizer.wait()
    assert float((model[2].weight - 0.5).abs().max()) < 2 * RATE
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


def test_without_a_limit_a_step_cannot_be_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = TwinOptimizer(model, lr=RATE, early=True)
    loss_of(model).backward()
    with pytest.raises(
        RuntimeError, match="with max_grad_norm or skip_nonfinite=True, and without delayed_update, a step can"
    ):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a forward runs before step"):
        model(torch.zeros(1, 8))
    with caplog.at_level(logging.WARNING, "twinflow"):
        optimizer.close()
    assert "some weights have this step's update, others not" in caplog.text
    optimizer = TwinOptimizer(model, lr=RATE, early=True, max_grad_norm=1.0, delayed_update=True)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="without delayed_update"):
        optimizer.zero_grad()
    optimizer.close()


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


def test_a_method_that_comes_instead_of_forward_is_refused() -> None:
    model = Encoder()
    optimizer = TwinOptimizer(model, lr=RATE, max_grad_norm=0.1, early=True)
    x = torch.randn(2, 400)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="used by a forward that had not waited for its last update"):
        model.encode(x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.wait()
    model.encode(x).square().mean().backward()
    optimizer.step()
    optimizer.close()


def test_the_same_where_gradients_are_left_alone() -> None:
    model = Encoder()
    optimizer = TwinOptimizer(model, lr=RATE)
    x = torch.randn(2, 400)
    model(x).square().mean().backward()
    optimizer.step()
    model.encode(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="had not waited"):
        optimizer.step()
    optimizer.close()


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


def test_a_loss_that_the_engine_has_not_scaled_is_refused() -> None:
    engine = engine_of(mlp(), gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"neither divides by gradient_accumulation_steps \(2\)"):
        loss_of(engine).backward()
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.step()
    with pytest.raises(RuntimeError, match=r"Call engine\.backward"):  # of a later micro-batch too
        loss_of(engine).backward()
    engine.zero_grad()
    engine.part = 0
    losses = loss_of(engine, 1), loss_of(engine, 2)
    first = engine.scale(losses[0])
    engine.backward(losses[1])
    engine.step()
    first.backward()
    engine.step()
    engine.scale(loss_of(engine)).backward()
    engine.step()
    with pytest.raises(RuntimeError, match=r"Call engine\.backward"):  # the one before was scaled
        loss_of(engine).backward()
    engine.destroy()
    norms = []
    for scales in (True, False):
        engine = engine_of(mlp(), gradient_accumulation_steps=2)
        for _ in range(2):
            if scales:
                engine.scale(loss_of(engine)).backward()
            else:
                engine.backward(loss_of(engine))
            engine.step()
        assert engine.global_steps == 1
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1]
    plain = engine_of(mlp())
    loss_of(plain).backward()  # one backward, no scale: nothing is missing
    plain.step()
    plain.destroy()


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
