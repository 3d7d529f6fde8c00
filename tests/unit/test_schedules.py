# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's schedules: the numbers at every step, before the first one too; resuming; groups; what is refused."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from twin_support import gpt, quick_torch, train, twin, weights

from twinflow.optim.schedules import (
    SCHEDULES,
    Cycle,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    cycle_height,
    warmup_factor,
)

LR = 0.4
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 2}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def optimizer_of(kind: Callable[..., Optimizer] = AdamW, num_groups: int = 1, **options: Any) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": LR / 2**i} for i in range(num_groups)]
    return kind(groups, **{"lr": LR, **options})


def lrs_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(name: str, params: dict[str, Any], num_steps: int, key: str = "lr", **options: Any) -> list[Any]:
    """An option of the first group before the first step and after each."""
    optimizer = optimizer_of(**options)
    scheduler = build_scheduler(name, params, optimizer)
    found = [optimizer.param_groups[0][key]]
    for _ in range(num_steps):
        scheduler.step()
        found.append(optimizer.param_groups[0][key])
    return found


def log_warmup(step: int, num_steps: int) -> float:
    return math.log(max(step, 0) + 1, num_steps)


# Of each schedule: parameters, and the learning rate as a function of DeepSpeed's step, which starts at -1.
TRUTHS: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("LRRangeTest", {}, lambda step: 1e-3 + 1e-3 * (step + 1) / 2000),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0},
        lambda step: 0.1 + 0.04 * (step + 1),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_staircase": True},
        lambda step: 0.1 * (1 + (step + 1) // 4),
    ),
    ("WarmupLR", {}, lambda step: LR * log_warmup(step, 1000)),
    (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 8, "warmup_type": "linear"},
        lambda step: min(0.1 + 0.1 * max(step, 0), 0.9),
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.9, "warmup_num_steps": 8},
        lambda step: 0.3 * math.log2(min(max(step, 0) + 1, 8)),
    ),
    (
        "WarmupLR",
        {"warmup_num_steps": 1, "warmup_type": "linear"},
        lambda step: [0.0, 0.0, LR / 2, LR][min(step, 2) + 1],
    ),
    ("WarmupDecayLR", {"total_num_steps": 2000}, lambda step: 1e-3 * log_warmup(step, 1000)),
    (
        "WarmupDecayLR",
        {"total_num_steps": 12, "warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 4},
        lambda step: 0.1 + 0.8 * (log_warmup(step, 4) if step < 4 else max(12 - step, 0) / 8),
    ),
    ("WarmupCosineLR", {"total_num_steps": 2000}, lambda step: LR * log_warmup(step, 1000)),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 12,
            "warmup_min_ratio": 0.2,
            "warmup_num_steps": 4,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        lambda step: (
            LR
            * (
                (0.0 if step < 0 else 0.2 + 0.2 * step)
                if step < 4
                else 0.1 + 0.9 * math.cos(math.pi * min(step - 3, 8) / 16) ** 2
            )
        ),
    ),
    ("OneCycle", CYCLE, lambda step: [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1][min(step + 1, 6)]),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": 2, "cycle_second_stair_count": 0},
        lambda step: [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.1][min(step + 1, 6)],
    ),
    (
        "OneCycle",
        {**CYCLE, "decay_lr_rate": 0.5, "decay_step_size": 2},
        lambda step: [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1][step + 1] if step < 6 else 0.1 / (1 + 0.25 * (step - 5)),
    ),
]


@pytest.mark.parametrize(("name", "params", "truth"), TRUTHS)
def test_the_learning_rate_before_the_first_step_and_after_each(
    name: str, params: dict[str, Any], truth: Callable[[int], float]
) -> None:
    assert run(name, params, 20) == pytest.approx([truth(step) for step in range(-1, 20)], rel=1e-12, abs=1e-15)


def test_defaults_reach_their_ends() -> None:
    """The default of 1000 steps of warm-up, of 2000 up, and of 2000 down."""
    assert run("WarmupLR", {}, 1002)[-1] == LR
    assert run("WarmupDecayLR", {"total_num_steps": 1100}, 1101)[1001::50] == pytest.approx([1e-3, 5e-4, 0])
    assert run("WarmupCosineLR", {"total_num_steps": 1100}, 1101)[-2:] == pytest.approx([LR * 1e-4] * 2)
    cycle = run("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3}, 4000)
    assert [cycle[i] for i in (0, 1000, 2000, 3000, 4000)] == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1])


def test_pure_functions() -> None:
    assert [warmup_factor(step, 4, "linear") for step in (-1, 0, 1, 4, 9)] == [0, 0, 0.25, 1, 1]
    assert warmup_factor(3, 16) == pytest.approx(0.5)
    assert [cycle_height(step, Cycle(2, 0)) for step in (-1, 0, 1, 2)] == [0, 0.5, 0, 0]
    # A peak that floating point just misses is still the highest stair.
    assert all(cycle_height(n - 1, Cycle(n, m, 3, 3)) == 1 for n in range(1, 60) for m in range(1, 60))


MOMENTUM = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9]


def test_one_cycle_moves_the_first_beta() -> None:
    """Against the rate, but for the very start; the second beta is DeepSpeed's 0.99."""
    betas = run("OneCycle", CYCLE, 7, "betas", betas=(0.7, 0.95))
    assert [beta for beta, _ in betas] == pytest.approx(MOMENTUM)
    assert {beta for _, beta in betas} == {0.99}
    decay = {"decay_mom_rate": -0.5, "decay_step_size": 2, "cycle_min_mom": 0.5, "cycle_max_mom": 0.6}
    betas = run("OneCycle", {**CYCLE, **decay}, 8, "betas")
    assert [beta for beta, _ in betas[-3:]] == pytest.approx([0.6, 0.6 * 0.75, 0.6 * 0.5])
    assert run("OneCycle", {**CYCLE, "cycle_momentum": False}, 3, "betas", betas=(0.7, 0.95)) == [(0.7, 0.95)] * 4


def test_one_cycle_moves_the_momentum_of_sgd() -> None:
    assert run("OneCycle", CYCLE, 7, "momentum", kind=SGD, momentum=0.9) == pytest.approx(MOMENTUM)


@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_one_cycle_gives_no_momentum_where_there_is_none(kind: Any) -> None:
    optimizer = optimizer_of(kind)
    with pytest.warns(UserWarning, match=f"because {kind.__name__} has no momentum"):
        scheduler = OneCycle(optimizer, 0.1, 0.5)
    scheduler.step()
    assert not optimizer.param_groups[0].get("momentum")
    assert "betas" not in optimizer.param_groups[0]


SEVERAL: dict[str, tuple[dict[str, Any], list[float]]] = {
    "LRRangeTest": ({"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 3}, [0.2, 0.4]),
    "OneCycle": (
        {**CYCLE, "cycle_min_lr": [0.1, 0.2], "cycle_max_lr": (0.5, 1.0), "cycle_min_mom": [0.5, 0.6]},
        [0.4, 0.8],
    ),
    "WarmupLR": ({"warmup_num_steps": 4, "warmup_type": "linear"}, [LR / 2, LR / 4]),
    "WarmupDecayLR": ({"total_num_steps": 4, "warmup_num_steps": 1, "warmup_max_lr": [0.1, 0.2]}, [0.1, 0.2]),
    "WarmupCosineLR": ({"total_num_steps": 9, "warmup_num_steps": 4, "warmup_type": "linear"}, [LR / 2, LR / 4]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_several_groups(name: str) -> None:
    params, expected = SEVERAL[name]
    optimizer = optimizer_of(num_groups=2)
    scheduler = build_scheduler(name, params, optimizer)
    for _ in range(3):
        scheduler.step()
    assert scheduler.get_last_lr() == scheduler.get_lr() == lrs_of(optimizer) == pytest.approx(expected)
    if name == "OneCycle":
        assert [g["betas"][0] for g in optimizer.param_groups] == pytest.approx([0.9 - 0.4 * 0.75, 0.9 - 0.3 * 0.75])


@pytest.mark.parametrize("is_optimizer_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_resuming_goes_on_identically(name: str, is_optimizer_first: bool) -> None:
    """Also where the schedule is made over an optimizer that has been loaded, at a learning rate half-way."""
    params = SEVERAL[name][0]
    optimizer = optimizer_of(num_groups=2)
    scheduler = build_scheduler(name, params, optimizer)
    for _ in range(3):
        scheduler.step()
    saved, state = optimizer.state_dict(), json.loads(json.dumps(scheduler.state_dict()))
    assert state == {"last_batch_iteration": 2}

    resumed = optimizer_of(num_groups=2)
    if is_optimizer_first:
        resumed.load_state_dict(saved)
    other = build_scheduler(name, params, resumed)
    other.load_state_dict(state)
    for _ in range(5):
        for a, b in zip(optimizer.param_groups, resumed.param_groups, strict=True):
            assert (a["lr"], a["betas"]) == (b["lr"], b["betas"])
        assert scheduler.get_last_lr() == other.get_last_lr()
        assert (scheduler.last_epoch, scheduler._step_count) == (other.last_epoch, other._step_count)
        assert scheduler._step_count == scheduler.last_epoch + 1
        scheduler.step()
        other.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_starting_at_a_step(name: str) -> None:
    """By the constructor, and by step(): the rates of that step."""
    params = SEVERAL[name][0]
    first, second, third = (optimizer_of(num_groups=2) for _ in range(3))
    scheduler = build_scheduler(name, params, first)
    for _ in range(4):
        scheduler.step()
    build_scheduler(name, {**params, "last_batch_iteration": 3}, second)
    build_scheduler(name, params, third).step(3)
    assert lrs_of(first) == lrs_of(second) == lrs_of(third)


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(LR)
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=rate)
    scheduler = WarmupCosineLR(optimizer, 9, warmup_num_steps=4, warmup_type="linear")
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(LR / 2)
    (last,) = scheduler.get_last_lr()
    assert last is not rate
    assert last == rate


def test_names() -> None:
    assert list(SCHEDULES) == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert all(issubclass(kind, LRScheduler) for kind in SCHEDULES.values())
    assert type(build_scheduler("warmuplr", {}, optimizer_of())) is WarmupLR
    assert type(build_scheduler("OneCycle", CYCLE, optimizer_of())) is OneCycle
    assert type(build_scheduler("OneCycleLR", {"max_lr": 1.0, "total_steps": 9}, optimizer_of())) is OneCycleLR
    scheduler = build_scheduler("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.1}, optimizer_of())
    assert isinstance(scheduler, CosineAnnealingLR)
    assert (scheduler.T_max, scheduler.eta_min) == (7, 0.1)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("WarmUpL", {}, "scheduler.type is 'WarmUpL', but must be one of *'OneCycle', *. Did you mean 'WarmupLR'?"),
    ("CosineAnealingLR", {}, "Did you mean 'CosineAnnealingLR'?"),
    ("LRScheduler", {}, "scheduler.type is 'LRScheduler', but must be "),
    ("?", {}, "scheduler.type is '?', but must be "),
    (
        "WarmupLR",
        {"warmup_num_step": 9},
        "scheduler.params.warmup_num_step is not a parameter of WarmupLR (its value is 9). "
        "Use parameters of WarmupLR: *warmup_num_steps, *. Did you mean 'warmup_num_steps'?",
    ),
    (
        "StepLR",
        {"step_sise": 9},
        "scheduler.params.step_sise is not a parameter of StepLR (its value is 9). "
        "Use parameters of StepLR: step_size, *. Did you mean 'step_size'?",
    ),
    ("WarmupLR", {"optimizer": 9}, "scheduler.params.optimizer is not a parameter of WarmupLR (its value is 9). "),
    (
        "WarmupDecayLR",
        {},
        "scheduler.params is {}, but WarmupDecayLR needs total_num_steps. "
        "Add the missing parameters. All parameters of WarmupDecayLR: total_num_steps, ",
    ),
    ("OneCycle", {}, "OneCycle needs cycle_min_lr, cycle_max_lr."),
    (
        "WarmupLR",
        {"warmup_type": "lin"},
        "warmup_type is 'lin', but must be one of 'log', 'linear'. Did you mean 'linear'?",
    ),
    ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0, but must be an integer >= 1"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps is 2.5, but must be an integer >= 1"),
    ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps is True, but must be an integer >= 1"),
    ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr is 'auto', but must be a finite number"),
    ("WarmupLR", {"warmup_max_lr": math.nan}, "warmup_max_lr is nan, but must be a finite number"),
    (
        "WarmupLR",
        {"warmup_max_lr": [1, 2]},
        "warmup_max_lr is [1, 2], but must be a number, or a list of one number for each param group (1 in all)",
    ),
    ("WarmupLR", {"last_batch_iteration": -2}, "last_batch_iteration is -2, but must be an integer >= -1"),
    ("WarmupCosineLR", {"total_num_steps": 0}, "total_num_steps is 0, but must be a finite number >= 1"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size is 0, but must be an integer >= 1"),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size is 0, but must be a finite number >= 1"),
    (
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": -1},
        "cycle_second_step_size is -1, but must be a finite number >= 0",
    ),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": -1},
        "cycle_first_stair_count is -1, but must be an integer >= 0",
    ),
]


@pytest.mark.parametrize(("name", "params", "text"), REFUSED)
def test_refused(name: str, params: dict[str, Any], text: str) -> None:
    """Before the optimizer is touched."""
    optimizer = optimizer_of()
    with pytest.raises(ValueError, match=re.escape(text).replace(r"\*", ".*")):
        build_scheduler(name, params, optimizer)
    assert lrs_of(optimizer) == [LR]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_saved_state_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="last_batch_iteration is None, but must be an integer >= -1"):
        LRRangeTest(optimizer_of()).load_state_dict({})


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_a_warmup_longer_than_the_training_is_told(kind: Any) -> None:
    with pytest.warns(UserWarning, match=r"total_num_steps \(9\) is less than warmup_num_steps \(10\)"):
        kind(optimizer_of(), 9, warmup_num_steps=10)


@pytest.mark.parametrize("name", SCHEDULES)
def test_twin_optimizer_follows_as_torch_does(name: str) -> None:
    """Weights, learning rates and betas."""
    params: dict[str, dict[str, Any]] = {
        "LRRangeTest": {"lr_range_test_step_size": 3},
        "OneCycle": {**CYCLE, "cycle_min_lr": 1e-3, "cycle_max_lr": 3e-3},
        "WarmupLR": {"warmup_num_steps": 4},
        "WarmupDecayLR": {"total_num_steps": 6, "warmup_num_steps": 3},
        "WarmupCosineLR": {"total_num_steps": 6, "warmup_num_steps": 3},
    }
    ours, theirs = gpt(), gpt()
    start = weights(ours)
    # Keys' biases have no gradient but rounding noise: a larger eps keeps Adam from making steps of it.
    options = {"lr": 2e-3, "eps": 1e-5, "weight_decay": 0.0}
    with closing(twin(ours, **options)) as optimizer:
        truth = AdamW(theirs.parameters(), **options)
        schedulers = [build_scheduler(name, params[name], o) for o in (optimizer, truth)]
        for step in range(7):
            for model, trained, scheduler in zip((ours, theirs), (optimizer, truth), schedulers, strict=True):
                train(model, trained, [step])
                scheduler.step()
            assert lrs_of(optimizer) == lrs_of(truth)
            assert optimizer.param_groups[0]["betas"] == truth.param_groups[0]["betas"]
            if name.startswith("Warmup") and step < 2:
                optimizer.wait()
                assert all(value.equal(start[key]) for key, value in weights(ours).items())
        optimizer.wait()
        torch.testing.assert_close(weights(ours), weights(theirs), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_twin_optimizer_keeps_the_initial_rate(name: str) -> None:
    """Saved with the optimizer, so that a schedule over a loaded one starts from it."""
    params = {key: value[0] if isinstance(value, (list, tuple)) else value for key, value in SEVERAL[name][0].items()}
    first, second = gpt(), gpt()
    with closing(twin(first, lr=0.3)) as optimizer, closing(twin(second, lr=0.3)) as resumed:
        scheduler = build_scheduler(name, params, optimizer)
        for step in range(3):
            train(first, optimizer, [step])
            scheduler.step()
        resumed.load_state_dict(optimizer.state_dict())
        other = build_scheduler(name, params, resumed)
        other.load_state_dict(scheduler.state_dict())
        assert lrs_of(optimizer) == lrs_of(resumed) != [0.3]
        assert optimizer.param_groups[0]["betas"] == resumed.param_groups[0]["betas"]
