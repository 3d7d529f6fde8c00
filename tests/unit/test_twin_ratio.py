# SPDX-License-Identifier: Apache-2.0
"""Twin-Flow's ratio: state on both sides, updated at the same time, with the results of either side alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import in_pairs, pairwise_of
from torch import Tensor, nn, optim
from twin_support import (
    MAX_NORM,
    Branchy,
    assert_same,
    branchy_loss,
    gpt,
    matrix_but,
    quick_torch,
    restart,
    snapshot,
    train,
    trained_with_schedule,
    twin,
    weights,
)

from twinflow.offload import changes, reconfigure
from twinflow.offload.placement import PLACEMENTS, cut, place_by_ratio
from twinflow.offload.plan import HOST, RESIDENT, ROOT, ParamSpec, plan_buckets
from twinflow.optim.loss_scale import dynamic
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES

RATIOS = (0.0, 0.1, 0.3, 0.5, 0.9)
FORMATS = [(rule, states) for rule in RULES for states in RULES[rule].formats]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": MAX_NORM},
    "on_host": {"max_grad_norm": MAX_NORM, "sums": "host", "hold": "host"},
    "delayed": {"max_grad_norm": MAX_NORM, "delayed_update": True},
    "late": {"max_grad_norm": MAX_NORM, "early": False},
    "streamed": {"max_grad_norm": MAX_NORM, "streamed": 0.6},
    "streamed_sums": {"max_grad_norm": MAX_NORM, "streamed": 1.0, "sums": "host", "hold": "host"},
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


CELLS = [
    (rule, states, ratio, accumulation, mode)
    for (rule, states), ratio, accumulation, mode in product(FORMATS, RATIOS, (1, 3), MODES)
    if not (mode == "late" and accumulation > 1)
]
QUICK = pairwise_of(CELLS)


@pytest.mark.parametrize(("rule", "states", "ratio", "accumulation", "mode"), matrix_but(QUICK, CELLS))
def test_any_ratio_gives_the_same_bits(rule: str, states: str, ratio: float, accumulation: int, mode: str) -> None:
    run = partial(trained_with_schedule, rule, states, accumulation)
    whole = {name: value for name, value in MODES[mode].items() if name != "streamed"}
    assert_same(run(ratio=ratio, **MODES[mode]), run(ratio=1.0, **whole))


@pytest.mark.parametrize("placement", ["front", "tail", "spread"])
def test_any_placement_gives_the_same_bits(placement: str) -> None:
    run = partial(trained_with_schedule, "adamw", "int8", 1, max_grad_norm=MAX_NORM)
    assert_same(run(ratio=0.4, placement=placement), run(ratio=1.0))


class Halves(nn.Module):
    """Half-precision weights of odd sizes, without a matrix product, which some CPUs are slow at."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(3))
        for block in self.blocks:
            block.a = nn.Parameter(torch.randn(7, 61).to(dtype))
            block.b = nn.Parameter(torch.randn(300).to(dtype))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for block in self.blocks:
            for weight in (block.a, block.b):
                total = total + (weight.float() * torch.randn(weight.shape, generator=generator)).tanh().sum()
        return total


@pytest.mark.parametrize(
    ("dtype", "states", "mode"),
    in_pairs([torch.bfloat16, torch.float16], ["fp32", "bf16", "int8"], ["plain", "clipped", "delayed", "streamed"]),
)
def test_half_precision_weights(dtype: torch.dtype, states: str, mode: str) -> None:
    def run(ratio: float, **options: Any) -> dict[str, Tensor]:
        model = Halves(dtype)
        with closing(
            twin(model, lr=1e-3, states=states, ratio=ratio, early=True, bucket_numel=128, **options)
        ) as optimizer:
            for step in range(5):
                model(step).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
            return snapshot(model, optimizer)

    whole = run(1.0, **{name: value for name, value in MODES[mode].items() if name != "streamed"})
    for ratio in (0.0, 0.37, 1.0):
        assert_same(run(ratio, **MODES[mode]), whole, f"ratio {ratio}:")


# Where state lives.


def test_tail_puts_the_first_share_on_the_host() -> None:
    """The seed's meaning: with ratio 0.4, the first 40% of the parameters are the CPU's."""
    model = gpt()
    with closing(twin(model, ratio=0.4, placement="tail")) as optimizer:
        total = sum(p.numel() for p in model.parameters())
        on_host = {HOST: 0, RESIDENT: 0}
        starts = {}
        passed = 0
        for p in model.parameters():
            starts[p], passed = passed, passed + p.numel()
        for bucket in optimizer.runtime.buckets:
            for piece, param in zip(bucket.slices, bucket.params, strict=True):
                first = starts[param.tensor] + piece.start
                on_host[bucket.plan.place] += piece.numel
                is_first = first + piece.numel <= 0.4 * total + 64
                assert is_first == (bucket.plan.place == HOST)
        assert abs(on_host[HOST] - 0.4 * total) <= 64
        assert optimizer.host_share == pytest.approx(0.4, abs=0.02)  # buckets are padded


def test_auto_keeps_what_a_forward_needs_first() -> None:
    model = gpt()
    with closing(twin(model, ratio=0.5)) as optimizer:
        train(model, optimizer, range(1))
        resident = [b.deadline for b in optimizer.runtime.buckets if b.plan.place == RESIDENT]
        hosted = [b.deadline for b in optimizer.runtime.buckets if b.plan.place == HOST]
        assert max(resident) <= min(hosted)
        assert 0 in resident  # the embedding, tied to the head


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    ratio=st.floats(0, 1),
    placement=st.sampled_from(PLACEMENTS),
)
@settings(max_examples=150, deadline=None)
def test_shares_are_exact_to_128_elements(numels: list[int], ratio: float, placement: str) -> None:
    params = [ParamSpec(f"p{i}", n, i % 3 - 1, torch.float32) for i, n in enumerate(numels)]
    parts = place_by_ratio(params, range(len(params)), ratio, placement)
    for param, own in zip(params, parts, strict=True):
        assert sum(part.numel for part in own) == param.numel
        assert all(part.start % 128 == 0 for part in own)
        assert [part.start for part in own] == [sum(p.numel for p in own[:i]) for i in range(len(own))]
    num_host = sum(part.numel for own in parts for part in own if part.place == HOST)
    assert abs(num_host - ratio * sum(numels)) <= 128
    plans = plan_buckets(params, 1024, parts)
    assert sum(s.numel for plan in plans for s in plan.slices) == sum(numels)


def test_whole_parameters_where_they_cannot_be_split() -> None:
    params = [ParamSpec(f"p{i}", n, ROOT, torch.float32, can_split=False) for i, n in enumerate((100, 300, 50))]
    parts = cut(params, [0, 1, 2], [(HOST, 200), (RESIDENT, 250)])
    assert [[part.place for part in own] for own in parts] == [[HOST], [RESIDENT], [RESIDENT]]


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan"), "half", True])
def test_bad_ratios_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="ratio"):
        twin(gpt(), ratio=bad)


def test_a_bad_placement_is_refused() -> None:
    with pytest.raises(ValueError, match=r"placement.*'front', 'tail'"):
        twin(gpt(), ratio=0.5, placement="middle")


# A user's own optimizer.


class Sign(optim.Optimizer):
    """One that nobody else has."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    kept.mul_(0.9).add_(p.grad)
                    p.add_(kept.sign(), alpha=-group["lr"])


RULES_OF_OTHERS = [optim.Adagrad, optim.Adafactor, Sign, partial(optim.AdamW, fused=True)]


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        pytest.param(rule, mode, marks=[pytest.mark.matrix] * bool((i + j) % 4))  # each of both in the quick suite
        for i, rule in enumerate(RULES_OF_OTHERS)
        for j, mode in enumerate(MODES)
    ],
)
def test_any_optimizer_on_both_halves(rule: Any, mode: str) -> None:
    def run(ratio: float, given: dict[str, Any]) -> dict[str, Tensor]:
        model = gpt()
        options = {"early": True, **given}
        with closing(twin(model, rule=rule, lr=1e-2, ratio=ratio, **options)) as optimizer:
            places = {b.plan.place for b in optimizer.runtime.buckets}
            assert places >= ({HOST, RESIDENT} if ratio == 0.4 and mode != "streamed_sums" else set())
            schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(4):
                train(model, optimizer, [step])
                schedule.step()
            optimizer.flush()
            saved = optimizer.state_dict()["state"]
            flat = {f"{n}.{k}": torch.as_tensor(v) for n, e in saved.items() for k, v in e["state"].items()}
            return weights(model) | flat

    whole = run(1.0, {name: value for name, value in MODES[mode].items() if name != "streamed"})
    for ratio in (0.0, 0.4, 1.0):
        assert_same(run(ratio, MODES[mode]), whole, f"ratio {ratio}:")


def test_a_used_optimizer_goes_on_on_both_halves() -> None:
    def run(ratio: float) -> dict[str, Tensor]:
        model = gpt()
        used = optim.AdamW(model.parameters(), lr=1e-2)
        train(model, used, range(2))
        with closing(twin(model, rule=used, ratio=ratio, early=True)) as optimizer:
            train(model, optimizer, range(2, 5))
            optimizer.wait()
            return weights(model)

    assert_same(run(0.3), run(1.0))


# Everything reaches both halves.


def test_steps_that_are_not_finite_are_skipped_on_both_halves() -> None:
    model = gpt()
    with closing(twin(model, lr=1e-2, ratio=0.5, early=True, max_grad_norm=MAX_NORM)) as optimizer:
        train(model, optimizer, range(2))
        before = snapshot(model, optimizer)
        train(model, optimizer, range(2, 3), nan_step=2)
        assert not optimizer.was_applied
        assert_same(snapshot(model, optimizer), before)
        train(model, optimizer, range(3, 4))
        assert optimizer.was_applied


def test_the_loss_scale_reaches_both_halves() -> None:
    def run(ratio: float) -> dict[str, Tensor]:
        model = Halves(torch.float16)
        scale = dynamic(initial_power=18, window=2)
        with closing(twin(model, lr=1e-3, ratio=ratio, early=True, loss_scale=scale)) as optimizer:
            for step in range(6):
                optimizer.backward(model(step))
                optimizer.step()
                optimizer.zero_grad()
            found = snapshot(model, optimizer)
            assert optimizer.num_skipped > 0
            return found | {"scale": torch.tensor(optimizer.loss_scale)}

    assert_same(run(0.4), run(1.0))


CHECKPOINTED: dict[str, Any] = {"lr": 1e-2, "early": True, "max_grad_norm": MAX_NORM}


@cache
def six_steps(states: str) -> dict[str, Tensor]:
    """What training without an interruption gives."""
    model = gpt()
    with closing(twin(model, ratio=1.0, states=states, **CHECKPOINTED)) as optimizer:
        train(model, optimizer, range(6))
        return snapshot(model, optimizer)


@pytest.mark.parametrize(
    ("states", "streamed", "ratios"),
    in_pairs(["fp32", "bf16", "int8"], [0.0, 0.5], [(0.3, 0.8), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]),
)
def test_a_checkpoint_loads_at_any_ratio(states: str, ratios: tuple[float, float], streamed: float) -> None:
    before, after = ratios
    options = {**CHECKPOINTED, "states": states}
    model = gpt()
    optimizer = twin(model, ratio=before, streamed=streamed, **options)
    train(model, optimizer, range(3))
    model, optimizer = restart(model, optimizer, lambda m: twin(m, ratio=after, streamed=streamed, **options))
    with closing(optimizer):
        train(model, optimizer, range(3, 6))
        assert_same(snapshot(model, optimizer), six_steps(states))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_half_precision_weights_keeps_their_masters(dtype: torch.dtype) -> None:
    def steps(model: Any, optimizer: TwinOptimizer, numbers: range) -> None:
        for step in numbers:
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    make = partial(twin, lr=1e-4, early=True, bucket_numel=128)
    straight = Halves(dtype)
    with closing(make(straight, ratio=0.6)) as optimizer:
        steps(straight, optimizer, range(6))
        wanted = snapshot(straight, optimizer)
    model = Halves(dtype)
    optimizer = make(model, ratio=0.5, streamed=0.5)
    steps(model, optimizer, range(3))
    model, optimizer = restart(model, optimizer, lambda m: make(m, ratio=0.7, streamed=0.5), lambda: Halves(dtype))
    with closing(optimizer):
        steps(model, optimizer, range(3, 6))
        assert_same(snapshot(model, optimizer), wanted)


def test_a_delayed_update_in_flight_loads_at_any_ratio() -> None:
    options = {"lr": 1e-2, "early": True, "delayed_update": True}
    straight = gpt()
    with closing(twin(straight, **options)) as optimizer:
        train(straight, optimizer, range(6))
        wanted = snapshot(straight, optimizer)
    model = gpt()
    optimizer = twin(model, ratio=0.3, **options)
    train(model, optimizer, range(3))
    model, optimizer = restart(model, optimizer, lambda m: twin(m, ratio=0.6, **options))
    with closing(optimizer):
        train(model, optimizer, range(3, 6))
        assert_same(snapshot(model, optimizer), wanted)


@pytest.mark.parametrize(("ratio", "place"), [(0.0, HOST), (1.0, RESIDENT)])
def test_a_move_without_enough_memory_keeps_a_delayed_update(
    ratio: float, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(fails: bool) -> dict[str, Tensor]:
        model = gpt()
        with closing(twin(model, lr=1e-2, early=True, delayed_update=True, ratio=ratio)) as optimizer:
            train(model, optimizer, range(3))
            optimizer.wait()
            optimizer.runtime.wait_for_copies()
            for bucket in optimizer.runtime.buckets if fails else ():
                with pytest.raises(MemoryError):
                    reconfigure.move(optimizer.runtime, bucket, place)
            train(model, optimizer, range(3, 6))
            return snapshot(model, optimizer)

    wanted = run(False)
    monkeypatch.setattr(changes, "move", Mock(side_effect=MemoryError))
    assert_same(run(True), wanted)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_delayed_update_of_fp16_weights_loads(ratio: float) -> None:
    def steps(model: Any, optimizer: TwinOptimizer, numbers: range) -> None:
        for step in numbers:
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    make = partial(twin, lr=1e-3, early=True, delayed_update=True, bucket_numel=128)
    straight = Halves(torch.float16)
    with closing(make(straight)) as optimizer:
        steps(straight, optimizer, range(5))
        optimizer.flush()
        wanted = snapshot(straight, optimizer)
    model = Halves(torch.float16)
    optimizer = make(model, ratio=ratio)
    steps(model, optimizer, range(3))
    new = lambda: Halves(torch.float16)  # noqa: E731
    model, optimizer = restart(model, optimizer, lambda m: make(m, ratio=ratio), new)
    with closing(optimizer):
        steps(model, optimizer, range(3, 5))
        optimizer.flush()
        assert_same(snapshot(model, optimizer), wanted)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_delayed_update_needs_no_more_buffers_than_there_are(ratio: float) -> None:
    """Gradients of the second backward wait for a step that releases the first one's weights."""
    model = gpt()
    options: dict[str, Any] = {"early": True, "delayed_update": True, "flat_bytes": 4096}
    with closing(twin(model, lr=1e-2, ratio=ratio, **options)) as optimizer:
        train(model, optimizer, range(4))


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("delay", ["update", "compute", "in"])
def test_delayed_updates_of_two_steps_begin_one_after_the_other(delay: str, ratio: float) -> None:
    """The second must not begin before the first one's weights are out, even where both have waited."""

    def run(**options: Any) -> dict[str, Tensor]:
        model = gpt()
        with closing(twin(model, lr=1e-2, early=True, delayed_update=True, **options)) as optimizer:
            train(model, optimizer, range(6))
            return snapshot(model, optimizer)

    assert_same(run(ratio=1.0), run(ratio=ratio, delay=delay, delay_s=0.001))


def test_sizes_are_those_of_real_stores() -> None:
    for dtype, states, ratio in product((torch.bfloat16, torch.float16), ("fp32", "bf16", "int8"), (0.0, 1.0)):
        for delayed, streamed in ((False, 0.0), (True, 0.0), (False, 1.0)):
            model = Halves(dtype)
            options = {"delayed_update": delayed, "streamed": streamed}
            with closing(twin(model, states=states, ratio=ratio, **options)) as optimizer:
                for bucket in optimizer.runtime.buckets:
                    assert optimizer.kind.nbytes(bucket.plan) == pytest.approx(bucket.nbytes, abs=16)


def test_parameters_without_gradients_are_left_alone() -> None:
    def run(ratio: float, early: bool) -> dict[str, Tensor]:
        model = Branchy()
        with closing(twin(model, lr=1e-2, ratio=ratio, early=early, max_grad_norm=MAX_NORM)) as optimizer:
            for step in range(6):
                branchy_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return snapshot(model, optimizer)

    assert_same(run(0.0, early=True), run(1.0, early=True))
    assert_same(run(0.4, early=False), run(1.0, early=False))


def test_parameters_that_are_not_contiguous() -> None:
    def run(ratio: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
        assert not model[1].weight.is_contiguous()
        with closing(twin(model, lr=1e-2, ratio=ratio, early=True)) as optimizer:
            for step in range(3):
                x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: t.contiguous() for name, t in snapshot(model, optimizer).items()}

    assert_same(run(0.0), run(1.0))


def test_weights_that_somebody_else_writes_are_taken_over() -> None:
    model = gpt()
    with closing(twin(model, lr=1e-2, ratio=0.0, early=True)) as optimizer:
        train(model, optimizer, range(2))
        optimizer.wait()
        with torch.no_grad():
            model.blocks[0].mlp.up.weight.fill_(0.5)
        train(model, optimizer, range(2, 3))
        entry = optimizer.state_dict()["state"]["blocks.0.mlp.up.weight"]
        assert (entry["master"] - 0.5).abs().max() < 0.05
        assert torch.equal(entry["master"], model.blocks[0].mlp.up.weight)


def test_upper_halves_that_somebody_else_writes_never_make_a_nan() -> None:
    model = Halves(torch.bfloat16)
    with closing(twin(model, lr=1e-3, ratio=0.0, early=True)) as optimizer:
        for step in range(4):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.wait()
            with torch.no_grad():
                model.blocks[0].a.zero_()  # a lower half below zero would borrow from it
        assert all(bool(v["master"].isfinite().all()) for v in optimizer.state_dict()["state"].values())


def test_autograd_sees_that_weights_have_changed() -> None:
    """A graph kept over a step must not be used with other weights than it was made with."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with closing(twin(model, lr=1e-2, ratio=0.0)) as optimizer:
        loss = model(torch.randn(4, 8)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_state_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinflow.optim import twin_build as module
    from twinflow.optim.twin_build import Free

    numel = sum(p.numel() for p in gpt().parameters())
    monkeypatch.setattr(module, "find_room", lambda params, team: Free(4 * numel, 10**12))
    with pytest.raises(
        MemoryError,
        match=r"Not enough device memory: the optimizer state on the device with ratio=0.2 needs .* are available. "
        "Use a ratio of at least 0.5",
    ):
        twin(gpt(), ratio=0.2)
    twin(gpt(), ratio=0.6).close()
    monkeypatch.setattr(module, "find_room", lambda params, team: Free(None, 4 * numel))
    with pytest.raises(
        MemoryError,
        match=r"Not enough host memory: the optimizer state needs .* and gradients need .* are available. "
        "Use a smaller format",
    ):
        twin(gpt())


def test_repr_shows_ratio_states_placement_and_memory() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    with closing(twin(model, lr=1e-3, ratio=0.5, states="bf16", placement="front")) as optimizer:
        shown = repr(optimizer)
        lines = [line.strip() for line in shown.splitlines()]
        assert lines[0] == "TwinOptimizer("
        assert "rule: adamw" in lines
        assert "states: bf16" in lines
        assert "ratio: 0.5 (0.50 of the state is on the host)" in lines
        assert "placement: front (buckets: 2 resident, 2 host)" in lines
        on_host = sum(bucket.nbytes for bucket in optimizer.runtime.buckets if bucket.plan.place == HOST)
        on_device = sum(bucket.nbytes for bucket in optimizer.runtime.buckets if bucket.plan.place == RESIDENT)
        assert on_host == 2 * 64 * 64 * 8
        assert (
            f"memory of the state: {on_host / 1e3:.1f} kB on the host, {on_device / 1e3:.1f} kB on the device" in lines
        )
        assert any(line.startswith("memory of gradient slots on the host: ") for line in lines)
        assert any(line.startswith("memory of speculative stores: ") for line in lines)
        assert "Parameter Group 0" in lines
        assert "lr: 0.001" in lines
    assert repr(optimizer).startswith("TwinOptimizer(\n    rule: adamw\n")  # of a closed one too


def test_help_explains_every_argument() -> None:
    signature = inspect.signature(TwinOptimizer.__init__)
    for name in [name for name in signature.parameters if name != "self"]:
        assert f"`{name}`" in TwinOptimizer.__doc__ or f"`**{name}`" in TwinOptimizer.__doc__, name
