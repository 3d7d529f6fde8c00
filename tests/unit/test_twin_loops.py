# SPDX-License-Identifier: Apache-2.0
"""Training loops that once gave another result than torch, hung, or got an error that the documents exclude."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fork_support import answer_of
from torch import Tensor, nn

from twinflow.offload.executor import WorkerError
from twinflow.offload.runtime import Runtime
from twinflow.optim.twin import Tuning, TwinOptimizer

STEPS = 8
Loop = Callable[[nn.Sequential, torch.optim.Optimizer], None]
pytestmark = pytest.mark.timeout(60)
in_all_modes = pytest.mark.parametrize(
    ("early", "max_grad_norm"), [(False, None), ("auto", None), ("auto", 0.3), (True, 0.3)]
)


class ClippedAdamW(torch.optim.AdamW):
    """The optimizer of torch that a TwinOptimizer with `max_grad_norm` replaces."""

    max_grad_norm: float | None = None

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_grad_norm)
        super().step()


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=made), torch.randn(4, 2, generator=made)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    return F.mse_loss(model(x), y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def check(
    loop: Loop,
    early: bool | str,
    max_grad_norm: float | None,
    make: Callable[[], nn.Sequential] = new_model,
    ratio: float = 1.0,
    bucket_numel: int = 128,
) -> None:
    """Asserts that the loop ends with torch's weights."""
    model = make()
    optimizer = ClippedAdamW(model.parameters(), lr=1e-2)
    optimizer.max_grad_norm = max_grad_norm
    loop(model, optimizer)
    trained = make()
    twin = TwinOptimizer(
        trained,
        lr=1e-2,
        early=early,
        max_grad_norm=max_grad_norm,
        ratio=ratio,
        tuning=Tuning(bucket_numel=bucket_numel),
    )
    for stream in ("in", "out"):
        twin.runtime.device.delay(stream, 0.0003)
    try:
        loop(trained, twin)
        for (name, wanted), found in zip(model.named_parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    finally:
        twin.close()


# What a loop does between backward and step, seen in the steps before updates start early.


def changes_options(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
    for number in range(STEPS):
        loss_of(model, number).backward()
        schedule.step()
        optimizer.step()
        optimizer.zero_grad()


def reads_the_state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for number in range(STEPS):
        loss_of(model, number).backward()
        optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()


def drops_gradients_of_each_task(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    params = list(model.parameters())
    for number in range(STEPS):
        found = []
        for task in range(2):
            optimizer.zero_grad()
            loss_of(model, 2 * number + task).backward()
            found.append([p.grad.clone() for p in params if p.grad is not None])
        optimizer.zero_grad()
        for param, one, other in zip(params, *found, strict=True):
            param.grad = one + 0.5 * other
        optimizer.step()
    optimizer.zero_grad()


def sums_by_hand(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    params = list(model.parameters())
    for number in range(STEPS):
        sums = [torch.zeros_like(param) for param in params]
        for micro in range(2):
            model.zero_grad()
            loss_of(model, 2 * number + micro).backward()
            for total, param in zip(sums, params, strict=True):
                assert param.grad is not None
                total += param.grad
        for total, param in zip(sums, params, strict=True):
            param.grad = total
        optimizer.step()
        optimizer.zero_grad()


def drops_a_gradient_in_a_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    def drop(param: Tensor) -> None:
        param.grad = None

    handle = model.get_parameter("2.weight").register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    for number in range(STEPS):
        step(model, optimizer, number)
    handle.remove()


def keeps_zero_gradients(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for number in range(STEPS):
        x, y = batch(number)
        hidden = model[2:](model[:2](x)) if number % 2 else model[4](model[0](x))
        F.mse_loss(hidden, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "loop",
    [
        changes_options,
        reads_the_state,
        drops_gradients_of_each_task,
        sums_by_hand,
        drops_a_gradient_in_a_hook,
        keeps_zero_gradients,
    ],
)
@in_all_modes
def test_what_a_loop_does_in_every_step_is_seen_before_updates_start_early(
    loop: Loop, early: bool | str, max_grad_norm: float | None
) -> None:
    check(loop, early, max_grad_norm)


# Backwards between the forwards of a step.


def runs_backward_before_a_later_forward(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """The two last layers are heads with losses of their own. Each backward ends at the input of the heads."""
    for number in range(STEPS):
        x, y = batch(number)
        hidden = model[1](model[0](x))
        shared = hidden.detach().requires_grad_()
        F.mse_loss(model[4](shared), y).backward()
        model[2](shared).square().mean().backward()
        hidden.backward(shared.grad)
        optimizer.step()
        optimizer.zero_grad()


class Heads(nn.Module):
    """The same layers outside of all blocks, and no forward of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(new_model()):
            self.add_module(f"layer{index}", layer)

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(f"layer{index}")


@pytest.mark.parametrize("make", [new_model, Heads])
@in_all_modes
def test_a_backward_may_come_before_a_later_forward_of_the_step(
    make: Callable[[], nn.Sequential], early: bool | str, max_grad_norm: float | None
) -> None:
    check(runs_backward_before_a_later_forward, early, max_grad_norm, make=make)


def runs_backwards_in_threads(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for number in range(5 * STEPS):
        x, y = batch(number)
        losses = [F.mse_loss(model[0](x)[:, :2], y), model[2](y.repeat(1, 4)).square().mean(), model[4].weight.sum()]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        optimizer.zero_grad()


@in_all_modes
def test_several_backwards_may_run_at_the_same_time(early: bool | str, max_grad_norm: float | None) -> None:
    check(runs_backwards_in_threads, early, max_grad_norm)


# Gradients that a step has used.


def is_passed_by_another_backward(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Trains a discriminator. The generator's backward runs through it and leaves gradients in it."""
    torch.manual_seed(1)
    generator = nn.Linear(6, 6)
    other = torch.optim.AdamW(generator.parameters(), lr=1e-2)
    for number in range(STEPS):
        x, y = batch(number)
        made = generator(x)
        loss = F.mse_loss(model(made.detach()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = -F.mse_loss(model(made), y)
        other.zero_grad()
        loss.backward()
        other.step()


@in_all_modes
def test_gradients_that_zero_grad_drops_may_be_added_to_used_ones(
    early: bool | str, max_grad_norm: float | None
) -> None:
    check(is_passed_by_another_backward, early, max_grad_norm)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_with_gradients_that_were_added_to_used_ones_is_refused(max_grad_norm: float | None) -> None:
    model = new_model()
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, max_grad_norm=max_grad_norm)
    for number in range(2):
        step(model, optimizer, number)
    loss_of(model, 2).backward()
    optimizer.step()
    loss_of(model, 3).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight, because its gradient was not reset after the last step"):
        optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 4)
    optimizer.close()


# A weight that a backward reads after its gradient is complete.


def trains_what_a_forward_has_frozen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for number in range(STEPS):
        model[2].requires_grad_(False)
        first = loss_of(model, number)
        model[2].requires_grad_(True)
        (first + loss_of(model, number + STEPS)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("early", [True, "auto"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_weight_that_one_of_two_forwards_has_used_without_a_gradient(early: bool | str, ratio: float) -> None:
    check(trains_what_a_forward_has_frozen, early, None, ratio=ratio)


# Memory.


def changes_the_memory_format(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for number in range(STEPS):
        if number in (3, 6):
            model.to(memory_format=torch.channels_last if number == 3 else torch.contiguous_format)  # type: ignore[call-overload]
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def new_convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 2))


@in_all_modes
def test_the_memory_format_may_change_between_steps(early: bool | str, max_grad_norm: float | None) -> None:
    check(changes_the_memory_format, early, max_grad_norm, make=new_convolutions, bucket_numel=1024)


@pytest.mark.parametrize(("ratio", "bucket_numel"), [(0.0, 1024), (1.0, 128)])
def test_a_memory_format_that_does_not_fit_the_state_is_refused(ratio: float, bucket_numel: int) -> None:
    with pytest.raises(RuntimeError, match=r"0\.weight cannot be updated, because it is no longer contiguous"):
        check(changes_the_memory_format, False, None, new_convolutions, ratio, bucket_numel)


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.ones(1, 4).expand(3, 4))})
    with pytest.raises(
        ValueError, match=r"scale has the strides \(0, 1\), but all strides must be greater than 0.*clone"
    ):
        TwinOptimizer(model)


def test_a_scripted_model_is_refused_and_its_parameters_can_be_trained() -> None:
    model = torch.jit.script(new_model())
    with pytest.raises(
        ValueError, match=r"model \(RecursiveScriptModule\) contains a torch\.jit.*pass model\.parameters\(\)"
    ):
        TwinOptimizer(model, lr=1e-2)
    optimizer = TwinOptimizer(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    again = new_model()
    step(again, torch.optim.AdamW(again.parameters(), lr=1e-2), 0)
    for found, wanted in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    optimizer.close()


# Weights on the host: writes through `.data` and `set_`.


def new_offloaded() -> tuple[nn.Sequential, TwinOptimizer]:
    model = new_model()
    return model, TwinOptimizer(model, lr=1e-2, offload_params=True)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_state_dict_has_what_was_written_through_data(is_held: bool) -> None:
    model, optimizer = new_offloaded()
    step(model, optimizer, 0)
    weight = model.get_parameter("4.bias")
    alias = weight.data if is_held else None
    (weight.data if alias is None else alias).fill_(3.0)
    assert model.state_dict()["4.bias"].tolist() == [3.0, 3.0]
    optimizer.close()


def test_a_write_through_data_persists_if_a_weight_is_read_before_it() -> None:
    model, optimizer = new_offloaded()
    step(model, optimizer, 0)
    weight = model.get_parameter("4.bias")
    weight.data.copy_(torch.ones_like(weight))  # `.data` is read first
    assert weight.tolist() == [1.0, 1.0]
    optimizer.close()


@in_all_modes
def test_a_write_through_data_persists_for_a_weight_without_a_gradient_in_this_backward(
    early: bool | str, max_grad_norm: float | None
) -> None:
    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        for number in range(STEPS):
            if number % 2:  # updates all weights, from the masters
                loss_of(model, number).backward()
            else:
                loss_of(model, number).backward(inputs=[*model[2].parameters()])
                model[0].weight.data.add_(0.1)
                model[4].weight.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, early, max_grad_norm)


def test_a_state_dict_has_the_values_of_set() -> None:
    model, optimizer = new_offloaded()
    step(model, optimizer, 0)
    with torch.no_grad():
        model.get_parameter("4.bias").set_(torch.full((2,), 3.0))
    assert model.state_dict()["4.bias"].tolist() == [3.0, 3.0]
    assert model[4].state_dict()["bias"].tolist() == [3.0, 3.0]
    step(model, optimizer, 1)
    optimizer.close()


# Forked processes.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_process_that_is_forked_after_a_step_can_use_the_model(early: bool, ratio: float) -> None:
    model = new_model()
    optimizer = TwinOptimizer(model, lr=1e-2, early=early, max_grad_norm=1.0, ratio=ratio)
    optimizer.runtime.device.delay("in", 0.005)

    def train() -> str:
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        before = loss_of(model, 9)
        before.backward()
        other.step()
        return repr((before.item(), loss_of(model, 9).item()))

    step(model, optimizer, 0)
    found = answer_of(train)
    step(model, optimizer, 1)
    optimizer.close()
    again = new_model()
    plain = ClippedAdamW(again.parameters(), lr=1e-2)
    plain.max_grad_norm = 1.0
    step(again, plain, 0)
    assert found.startswith("(")
    first, second = map(float, found.strip("()").split(","))
    assert first == pytest.approx(loss_of(again, 9).item(), abs=1e-6)
    assert second < first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_optimizer_that_has_failed_does_not_keep_others_from_waiting_before_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizers = [TwinOptimizer(new_model(), lr=1e-2) for _ in range(3)]
    waited = []

    def wait(runtime: Runtime) -> None:
        waited.append(runtime)
        raise WorkerError("An update in the background failed.")

    monkeypatch.setattr(Runtime, "before_fork", wait)
    answer_of(lambda: "nothing")
    assert {id(optimizer.runtime) for optimizer in optimizers} <= set(map(id, waited))
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_optimizer_is_refused_in_a_forked_process() -> None:
    model = new_model()
    optimizer = TwinOptimizer(model, lr=1e-2)
    step(model, optimizer, 0)
    assert "this process was forked after the optimizer was built" in answer_of(lambda: str(step(model, optimizer, 1)))
    optimizer.close()
