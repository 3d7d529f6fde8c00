# SPDX-License-Identifier: Apache-2.0
"""Weights on the host, with a ratio below 1 or "auto": a block with state on the device has its weights there too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from auto_support import Clock
from param_offload_support import (
    AWAY,
    HERE,
    SHAPE,
    SLOW_HOST,
    SMALL,
    gpt,
    loss_of,
    movable,
    move,
    places,
    steps_of,
    train,
)
from torch import Tensor, nn

import twinflow
from twinflow.device import Device
from twinflow.models.gpt import GPT
from twinflow.offload import reconfigure
from twinflow.offload.placement import place_by_ratio, whole_blocks
from twinflow.offload.plan import HOST, RESIDENT, ROOT, ParamSpec
from twinflow.offload.settings import Settings
from twinflow.offload.weight_guard import plain
from twinflow.optim import auto as auto_module
from twinflow.optim import twin as twin_module
from twinflow.optim.auto import units_of
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_checks import check_param_offload
from twinflow.planner.simulate import Timing
from twinflow.rules import RULES
from twinflow.zero import Zero


def step_of(model: Any, optimizer: TwinOptimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# A given ratio.


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.5},
        {"ratio": 0.6, "placement": "tail", "states": "int8", "accumulation_steps": 2},
        {"ratio": 0.6, "placement": "spread", "states": "int8", "max_grad_norm": None},
        pytest.param({"ratio": 0.3, "accumulation_steps": 3}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.7, "early": False, "placement": "front"}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.5, "max_grad_norm": None, "states": "bf16"}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.0}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    """Compared with all weights on the device, and with those of all blocks on the host."""
    seen: list[dict[int, set[tuple[str, bool]]]] = []
    found = train(gpt(), True, watch=lambda optimizer: seen.append(places(optimizer)), **options)
    blocks = seen[0].values()
    assert all(block in (AWAY, HERE) for block in blocks)
    assert HERE in blocks
    assert AWAY in blocks or not options["ratio"]
    for offloads_params, ratio in ((False, options["ratio"]), (True, 1.0)):
        losses, weights = train(gpt(), offloads_params, **{**options, "ratio": ratio})
        assert found[0] == losses
        assert_equal(found[1], weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)])
def test_no_bit_changes_in_half_precision(dtype: torch.dtype) -> None:
    losses, weights = train(gpt(dtype), False, steps=3)
    found, others = train(gpt(dtype), True, steps=3, ratio=0.5)
    assert found == losses
    assert_equal(others, weights)


def adapters() -> nn.Module:
    """As with LoRA: few parameters of the blocks are trained, and all others are frozen."""
    model: Any = gpt()()
    model.requires_grad_(False)
    for param in model.blocks.parameters():
        param.requires_grad_(param.dim() == 1)
    return model  # type: ignore[no-any-return]


def test_frozen_weights_stay_with_their_block() -> None:
    losses, weights = train(adapters, False, steps=3)
    found, others = train(adapters, True, steps=3, ratio=0.5)
    assert found == losses
    assert_equal(others, weights)
    model: Any = adapters()
    with closing(TwinOptimizer(model, lr=1e-2, ratio=0.5, offload_params=True)) as optimizer:
        now, offload = places(optimizer), optimizer.runtime.param_offload
        assert offload is not None
        assert {*map(str, now.values())} == {str(AWAY), str(HERE)}
        for index, block in enumerate(model.blocks):
            assert {offload.params.holds(param) for param in block.parameters()} == {now[index] == AWAY}


def test_a_block_has_one_place() -> None:
    """Of three blocks of 300 elements, that of the larger part; parameters outside of blocks may be cut."""
    names = [("root", ROOT, 512), *((f"{block}.{i}", block, 100) for block in range(3) for i in range(3))]
    specs = [ParamSpec(name, numel, block, torch.float32) for name, block, numel in names]
    for ratio, num_here in ((1.0, 0), (0.6, 0), (0.5, 1), (0.4, 1), (0.0, 3)):
        parts = whole_blocks(specs, place_by_ratio(specs, range(len(specs)), ratio))
        found = [{part.place for cuts in parts[1 + 3 * block : 4 + 3 * block] for part in cuts} for block in range(3)]
        assert found == [{RESIDENT}] * num_here + [{HOST}] * (3 - num_here), ratio
        assert [sum(part.numel for part in cuts) for cuts in parts] == [spec.numel for spec in specs]
    assert len(whole_blocks(specs, place_by_ratio(specs, range(len(specs)), 0.8))[0]) == 2


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.45, 0.5, 0.7, 0.98, 1.0])
@pytest.mark.parametrize("num_root", [0, 2560, 20480])
def test_blocks_are_evenly_spread(ratio: float, num_root: int) -> None:
    """As many blocks on the host as with "auto", with at most one block more between two of them than elsewhere."""
    names = [("root", ROOT, num_root)] * bool(num_root) + [(f"{k}.{i}", k, 1280) for k in range(20) for i in range(2)]
    specs = [ParamSpec(name, numel, block, torch.float32) for name, block, numel in names]

    def hosted(placement: str) -> list[int]:
        parts = whole_blocks(specs, place_by_ratio(specs, range(len(specs)), ratio, placement))
        return sorted({spec.block for spec, cuts in zip(specs, parts, strict=True) if cuts[0].place == HOST} - {ROOT})

    found = hosted("spread")
    assert len(found) == len(hosted("auto"))
    if found:
        assert found[-1] == 19
        gaps = [after - before for before, after in pairwise([-1, *found])]
        assert max(gaps) - min(gaps) <= 1


def test_blocks_on_the_device_are_not_fetched() -> None:
    model: Any = gpt()()
    with closing(TwinOptimizer(model, lr=1e-2, early=True, ratio=0.5, offload_params=True)) as optimizer:
        step_of(model, optimizer, 0)
        before = optimizer.runtime.fetched_bytes
        step_of(model, optimizer, 1)
        away = [block for block, place in places(optimizer).items() if place == AWAY]
        buckets = [bucket for bucket in optimizer.runtime.buckets if bucket.plan.block in away]
        nbytes = {block: 4 * sum(b.plan.numel for b in buckets if b.plan.block == block) for block in away}
        # The last block stays on the device between forward and backward.
        assert optimizer.runtime.fetched_bytes - before == 2 * sum(nbytes.values()) - nbytes[max(away)]
        with plain():
            for index, block in enumerate(model.blocks):
                has_memory = all(param.untyped_storage().nbytes() > 4 for param in block.parameters())
                assert has_memory == (index not in away)
        assert f"weights: those of {len(away)} of 4 blocks are on the host" in repr(optimizer)


def test_weights_of_both_kinds_are_read_written_and_loaded() -> None:
    model, other = gpt()(), gpt()()
    with closing(TwinOptimizer(model, lr=1e-2, offload_params=True, ratio=0.5)) as optimizer:
        assert_equal(weights_of(model), other.state_dict())
        step_of(model, optimizer, 0)
        assert not any(torch.equal(model.state_dict()[name], value) for name, value in other.named_parameters())
        model.load_state_dict(other.state_dict())
        assert_equal(weights_of(model), other.state_dict())
        for block in (0, 3):  # on the device, on the host
            weight: Any = model.blocks[block].mlp.up.weight  # type: ignore[index,union-attr]
            with torch.no_grad():
                weight.fill_(0.25)
            weight.data[0] = 0.5
            assert (weight.sum().item(), weight[0, 0].item()) == (0.25 * weight.numel() + 0.25 * weight.shape[1], 0.5)
            step_of(model, optimizer, 1)
            assert 0 < float((weight.detach()[1:] - 0.25).abs().max()) < 2e-2
    assert not any(param.isnan().any() for param in model.parameters())


def test_the_memory_of_weights_on_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = sum(p.numel() for p in gpt()().blocks.parameters())  # type: ignore[union-attr,operator]
    root = sum(p.numel() for p in gpt()().parameters()) - blocks
    needed = 8 * root + 12 * blocks  # two fp32 moments, and the weights of blocks
    for free, fits in ((int(0.95 * needed), False), (int(1.1 * needed), True)):
        monkeypatch.setattr(Device, "free_bytes", lambda self, free=free: free)
        if fits:
            TwinOptimizer(gpt()(), lr=1e-2, ratio=0.0, offload_params=True).close()
        else:
            with pytest.raises(MemoryError, match=r"state and its weights on the device with ratio=0\.0"):
                TwinOptimizer(gpt()(), lr=1e-2, ratio=0.0, offload_params=True)


def config(ratio: float | str | None) -> dict[str, Any]:
    """A config with weights on the host, or without if `ratio` is None."""
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0 if ratio is None else ratio},
    }
    return {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero if ratio is None else {**zero, "offload_param": {"device": "cpu"}},
    }


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (0.5, 1.0),
        (1.0, 0.3),
        pytest.param(0.3, 0.6, marks=pytest.mark.matrix),
        pytest.param(None, 0.5, marks=pytest.mark.matrix),
        pytest.param(0.5, None, marks=pytest.mark.matrix),
        pytest.param(0.5, "auto", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_goes_on_exactly_with_another_ratio(tmp_path: Path, saved: Any, loaded: Any) -> None:
    engine, *_ = twinflow.initialize(model=gpt()(), config=config(saved))
    steps_of(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path), tag="two")
    truth = steps_of(engine, 2, 2)
    engine.destroy()
    torch.manual_seed(5)
    engine, *_ = twinflow.initialize(model=lambda: GPT(SHAPE), config=config(loaded))
    engine.load_checkpoint(str(tmp_path))
    assert steps_of(engine, 2, 2) == truth
    engine.destroy()


def test_auto_is_refused_on_several_ranks() -> None:
    settings, zero = Settings(offload_params=True), cast(Zero, SimpleNamespace(parks=True))
    with pytest.raises(ValueError, match=r'ratio="auto" cannot be used with offload_params=True on several ranks'):
        check_param_offload(settings, gpt()(), "auto", zero, RULES["adamw"])
    check_param_offload(settings, gpt()(), 0.5, zero, RULES["adamw"])


# Blocks that move.


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gpt(torch.bfloat16), {"max_grad_norm": 0.5, "early": True}),
        (adapters, {"states": "int8"}),
        *(
            pytest.param(gpt(dtype), {"states": states, "max_grad_norm": 0.5, "early": early}, marks=pytest.mark.matrix)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for states, early in (("fp32", True), ("bf16", False), ("int8", True))
        ),
    ],
)
def test_moves_change_no_bit(
    make: Callable[[], nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(moves: dict[int, list[int]]) -> tuple[list[float], dict[str, Tensor]]:
        model, losses = make(), []
        with closing(movable(model, monkeypatch, **options)) as optimizer:
            for step in range(5):
                losses.append(step_of(model, optimizer, step))
                move(optimizer, *moves.get(step, []))
            return losses, weights_of(model)

    losses, weights = run({})
    found, others = run({0: [1], 1: [0, 3], 2: [1, 2], 3: [3]})
    assert found == losses
    assert_equal(others, weights)


def test_a_write_to_a_tensor_from_before_a_move_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = gpt()()
    with closing(movable(model, monkeypatch)) as optimizer:
        step_of(model, optimizer, 0)
        weight = model.blocks[1].mlp.up.weight
        for value in (0.5, 0.25, 0.125):  # the block goes to the device, to the host, and to the device again
            data = weight.data
            move(optimizer, 1)
            data.fill_(value)
            assert torch.equal(model.state_dict()["blocks.1.mlp.up.weight"], torch.full(weight.shape, value))
            step_of(model, optimizer, 1)
            assert 0 < float((weight.detach() - value).abs().max()) < 5e-2


@pytest.mark.parametrize("goes_to_host", [False, True])
def test_a_graph_from_before_a_move_is_refused(goes_to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a step torch would allow this backward. Only ratio auto moves blocks, and it does so after steps."""
    model: Any = gpt()()
    with closing(movable(model, monkeypatch, max_grad_norm=0.5)) as optimizer:
        if goes_to_host:
            move(optimizer, 1)
        loss = loss_of(model, 0)
        move(optimizer, 1)
        with pytest.raises(RuntimeError, match=r"modified by (a step|an inplace operation)"):
            loss.backward()
        optimizer.zero_grad()
        step_of(model, optimizer, 1)


@pytest.mark.parametrize("goes_to_host", [False, True])
def test_a_move_without_memory_changes_nothing(goes_to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, still = gpt()(), gpt()()
    with closing(movable(model, monkeypatch)) as optimizer, closing(movable(still, monkeypatch)) as other:
        step_of(model, optimizer, 0)
        step_of(still, other, 0)
        if goes_to_host:
            move(optimizer, 2)
        before, runtime = places(optimizer), optimizer.runtime
        updater = runtime.updaters[HOST if goes_to_host else RESIDENT]
        make, count = updater.new_store, iter(range(100))

        def full(plan: Any) -> Any:
            if next(count) == 1:  # the second bucket of the block
                raise torch.OutOfMemoryError("no memory")
            return make(plan)

        runtime.wait()
        runtime.wait_for_copies()
        with monkeypatch.context() as patch:
            patch.setattr(updater, "new_store", full)
            with pytest.raises(MemoryError):
                reconfigure.move_block(runtime, 2, HOST if goes_to_host else RESIDENT)
        assert places(optimizer) == before
        assert step_of(model, optimizer, 1) == step_of(still, other, 1)
        assert_equal(weights_of(model), weights_of(still))


# Ratio "auto".


def test_auto_moves_blocks_and_takes_them_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First to free memory of the device, of which there is enough for two blocks, and back when it is short."""
    caplog.set_level(logging.INFO, logger="twinflow")
    model, still = gpt()(), gpt()()
    block = 12 * sum(p.numel() for p in model.blocks[0].parameters())  # type: ignore[index,union-attr,operator]
    root = 8 * sum(p.numel() for p in model.parameters()) - 4 * block * 8 // 12
    capacity = 10**11
    beside = capacity - 5 * 10**9 - root - 5 * block // 2  # memory of a step without state, and the reserve
    monkeypatch.setattr(Device, "free_bytes", lambda self: capacity)
    monkeypatch.setattr(Device, "capacity_bytes", lambda self: capacity)
    monkeypatch.setattr(Device, "peak_bytes", lambda self: beside + used())
    monkeypatch.setattr(twin_module, "load_or_measure", lambda device: SLOW_HOST)
    options: dict[str, Any] = {"lr": 1e-2, "early": True, "tuning": SMALL}
    optimizer = TwinOptimizer(model, ratio="auto", offload_params=True, **options)
    auto = optimizer._auto
    assert auto is not None
    Clock(optimizer.runtime, SLOW_HOST, Timing(0.01, 0.02)).attach(monkeypatch)

    def used() -> int:
        return auto._used()[0]

    with closing(optimizer), closing(TwinOptimizer(still, **options)) as other:
        assert [*places(optimizer).values()] == [AWAY] * 4
        steps = iter(range(40))

        def go_on() -> None:
            step = next(steps)
            assert step_of(model, optimizer, step) == step_of(still, other, step)

        while not optimizer.is_placed:
            go_on()
        assert "of the state on the host" in caplog.messages[-1]
        assert [*places(optimizer).values()] == [HERE, HERE, AWAY, AWAY]
        beside += 5 * 10**9 // 2 + block  # half of the reserve and one block more
        auto._since = auto_module._CHECK_EVERY - 1
        go_on()
        assert [*places(optimizer).values()] == [HERE, AWAY, AWAY, AWAY]
        assert "1 blocks were moved to the host" in caplog.messages[-1]
        go_on()
        assert_equal(weights_of(model), weights_of(still))


def test_units() -> None:
    with closing(TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, tuning=SMALL)) as optimizer:
        buckets = optimizer.runtime.buckets
        assert [[bucket] for bucket in buckets] == units_of(buckets, has_weights=False)
        units = units_of(buckets, has_weights=True)
        assert {bucket for unit in units for bucket in unit} == {*buckets}
        for unit in units:
            assert len({bucket.plan.block for bucket in unit}) == 1
            assert (len(unit) == 1) == (unit[0].plan.block == ROOT)
