# SPDX-License-Identifier: Apache-2.0
"""`ratio="auto"`: what it measures, chooses, moves and says; on a CPU that plays a GPU with memory of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_support import GB, Clock, rates
from twin_support import MAX_NORM, assert_same, batch, gpt, matrix_but, quick_torch, snapshot, train, twin

from twinflow.device import Device
from twinflow.offload import reconfigure
from twinflow.offload.plan import HOST, RESIDENT, STREAMED
from twinflow.optim import auto as module
from twinflow.optim import twin as twin_module
from twinflow.optim.auto import AutoPlacement, first_ratio, items_of
from twinflow.optim.twin import TwinOptimizer
from twinflow.planner.machines import Rates
from twinflow.planner.simulate import Timing

SLOW_HOST = rates(1e3, link_bytes=1e4)  # hides nothing
FAST_HOST = rates(1e12)  # hides everything
QUICK = Timing(1e-3, 2e-3)  # forward and backward of the played device


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A device with so much memory, of which steps take some at most, beside a host of these rates.

    `real`: the rates in training. `timing`: forward and backward alone; None: steps take as long as they really do.
    """

    def make(capacity: int, peak: int, rates: Rates, real: Rates | None = None, timing: Timing | None = QUICK) -> None:
        def placement(runtime: Any, *args: Any) -> AutoPlacement:
            if timing is not None:
                Clock(runtime, real or rates, timing).attach(monkeypatch)
            return AutoPlacement(runtime, *args)

        monkeypatch.setattr(Device, "free_bytes", lambda self: capacity - peak)
        monkeypatch.setattr(Device, "capacity_bytes", lambda self: capacity)
        monkeypatch.setattr(Device, "peak_bytes", lambda self: peak)
        monkeypatch.setattr(twin_module, "load_or_measure", lambda device: rates)
        monkeypatch.setattr(twin_module, "AutoPlacement", placement)

    return make


def places(optimizer: TwinOptimizer) -> list[str]:
    return [bucket.plan.place for bucket in optimizer.runtime.buckets]


def until_placed(model: Any, optimizer: TwinOptimizer) -> int:
    """Steps it took."""
    for step in range(30):
        if optimizer.is_placed:
            return step
        train(model, optimizer, [step])
    raise AssertionError("never")


def test_a_slow_host_keeps_nothing(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="twinflow")
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    model = gpt()
    with closing(twin(model, early=True, max_grad_norm=1e6)) as optimizer:
        assert optimizer.ratio == "auto"  # the default
        assert set(places(optimizer)) == {HOST}
        assert until_placed(model, optimizer) <= 12
        assert optimizer.host_share == optimizer.metrics()["host_share"] == 0.0
        assert "ratio: auto (0.00 of the state is on the host)" in repr(optimizer)
        assert [line[:42] for line in caplog.messages] == ["ratio auto: 0.00 of the state on the host,"]


def test_a_fast_host_keeps_everything(gpu: Any) -> None:
    gpu(100 * GB, 10 * GB, FAST_HOST, timing=Timing(1.0, 2.0))
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        assert until_placed(model, optimizer) == 5
        assert optimizer.host_share == 1.0


def test_what_turns_out_slower_is_taken_back(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The probe found updates on the device fast. In training they are far slower than those of the host."""
    caplog.set_level(logging.INFO, logger="twinflow")
    gpu(100 * GB, 10 * GB, rates(1e7), real=replace(rates(1e7), device_bytes=1e7))
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        until_placed(model, optimizer)
        assert optimizer.host_share == 1.0
        assert ", none on the host " in caplog.messages[-1]


@pytest.mark.parametrize(
    ("options", "num_steps"),
    [({"early": True}, 11), ({"early": "auto"}, 12), ({"early": False}, 11), ({"delayed_update": True}, 14)],
    ids=str,
)
def test_a_host_that_is_slower_than_probed_keeps_nothing(gpu: Any, options: dict[str, Any], num_steps: int) -> None:
    gpu(100 * GB, 10 * GB, FAST_HOST, real=SLOW_HOST)
    model = gpt()
    with closing(twin(model, ratio="auto", **options)) as optimizer:
        assert until_placed(model, optimizer) <= num_steps
        assert optimizer.host_share == 0.0


def test_a_full_device_keeps_nothing(gpu: Any) -> None:
    gpu(100 * GB, 99 * GB, SLOW_HOST)
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        until_placed(model, optimizer)
        assert optimizer.host_share == 1.0


def test_streams_where_that_wins(gpu: Any) -> None:
    numel = sum(p.numel() for p in gpt().parameters())
    gpu(10 * GB, 10 * GB - (1 << 30) - 4 * numel, rates(1e5))  # a quick way to the device, a slow host
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        until_placed(model, optimizer)
        assert {STREAMED} <= set(places(optimizer)) <= {RESIDENT, STREAMED}


def test_gradients_wait_on_the_host_where_the_device_is_short(gpu: Any) -> None:
    numel = sum(p.numel() for p in gpt().parameters())
    for capacity, is_held in ((20 * numel, False), (10 * numel, True)):
        gpu(capacity, 0, SLOW_HOST)
        model = gpt()
        with closing(twin(model, ratio="auto", early=True, max_grad_norm=MAX_NORM)) as optimizer:
            assert optimizer.runtime.settings.hold_on_host is is_held
            until_placed(model, optimizer)


def test_no_more_than_fits(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = sum(p.numel() for p in gpt().parameters())
    needed = 10 * GB - (1 << 30) - 4 * numel  # beside the reserve; half of the state is 4 bytes a parameter
    gpu(10 * GB, needed, SLOW_HOST)
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:

        def kept() -> int:
            return sum(b.nbytes for b in optimizer.runtime.buckets if b.plan.place == RESIDENT)

        monkeypatch.setattr(Device, "peak_bytes", lambda self: needed + kept())
        until_placed(model, optimizer)
        assert 0 < kept() <= 4 * numel


@pytest.mark.parametrize("rule", ["adamw", torch.optim.RMSprop])
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": MAX_NORM}, {"delayed_update": True}, {"early": False}])
def test_moving_changes_no_bit(gpu: Any, rule: Any, states: str, options: dict[str, Any]) -> None:
    if not isinstance(rule, str) and states != "fp32":
        pytest.skip("it keeps its own")

    def run(ratio: float | str) -> dict[str, Any]:
        model = gpt()
        given = {"early": True, **options}
        with closing(twin(model, rule=rule, lr=1e-2, states=states, ratio=ratio, **given)) as optimizer:
            train(model, optimizer, range(14))
            found = snapshot(model, optimizer) if isinstance(rule, str) else {}
            if ratio == "auto":
                assert set(places(optimizer)) == {RESIDENT}
            optimizer.flush()
            return found | {f"after {name}": p.detach().clone() for name, p in model.named_parameters()}

    on_host = run(1.0)
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    assert_same(run("auto"), on_host)


def test_moving_to_the_host_finds_slots_there() -> None:
    """All state was on the device when slots were counted."""
    model, still = gpt(), gpt()
    with closing(twin(model, lr=1e-2, ratio=0.0, early=True)) as optimizer:
        train(model, optimizer, range(2))
        optimizer.wait()
        optimizer.runtime.wait_for_copies()
        for bucket in optimizer.runtime.buckets:
            reconfigure.move(optimizer.runtime, bucket, HOST)
        train(model, optimizer, range(2, 4))
        with closing(twin(still, lr=1e-2, early=True)) as other:
            train(still, other, range(4))
            assert_same(snapshot(model, optimizer), snapshot(still, other))


def test_slots_of_released_stores_are_used_again() -> None:
    """With fp16 each store for updates before the clipping decision has a slot for the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).half()
    with closing(twin(model, lr=1e-2, early=True, max_grad_norm=1e6, num_slots=2)) as optimizer:
        runtime, most = optimizer.runtime, len(optimizer.runtime.buckets) + 2
        for place in (HOST, RESIDENT, HOST, RESIDENT, HOST):
            for bucket in runtime.buckets:
                optimizer.wait()
                runtime.wait_for_copies()
                reconfigure.move(runtime, bucket, place)
            optimizer._make_speculative_stores(runtime)
            model(torch.randn(4, 64).half()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.wait()
            assert runtime.executor.counters.num_weight_slots <= most


def test_sums_follow_their_bucket() -> None:
    model, still = gpt(), gpt()
    options: dict[str, Any] = {"lr": 1e-2, "early": True, "accumulation_steps": 2, "sums": "host"}

    def steps(net: Any, optimizer: TwinOptimizer, numbers: range) -> None:
        for step in numbers:
            for part in range(2):
                net(*batch(2 * step + part)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with closing(twin(model, **options)) as optimizer, closing(twin(still, **options)) as other:
        for step, place in enumerate([RESIDENT, STREAMED, HOST]):
            steps(model, optimizer, range(step, step + 1))
            optimizer.wait()
            optimizer.runtime.wait_for_copies()
            for bucket in optimizer.runtime.buckets:
                reconfigure.move(optimizer.runtime, bucket, place)
                assert bucket.total is None
        steps(model, optimizer, range(3, 5))
        steps(still, other, range(5))
        assert_same(snapshot(model, optimizer), snapshot(still, other))


def test_a_full_host_stops_moves_and_changes_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says RuntimeError where host memory is full."""
    model = gpt()
    with closing(twin(model, lr=1e-2, ratio=0.0, early=True)) as optimizer:
        train(model, optimizer, range(2))
        before = snapshot(model, optimizer)
        optimizer.runtime.wait_for_copies()

        def full(plan: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")

        monkeypatch.setattr(optimizer.runtime.updater, "new_store", full)
        with pytest.raises(MemoryError):
            reconfigure.move(optimizer.runtime, optimizer.runtime.buckets[0], HOST)
        assert_same(snapshot(model, optimizer), before)
        train(model, optimizer, range(2, 3))


def test_parameters_that_are_not_contiguous_stay_where_they_can(gpu: Any) -> None:
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    with closing(twin(model, lr=1e-2, ratio="auto", early=True)) as optimizer:
        for _ in range(8):
            model(torch.randn(2, 3, 9, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert set(places(optimizer)) == {RESIDENT}


@pytest.mark.parametrize("way", matrix_but(["a part"], ["a part", "compiled", "as torch.compile returns it"]))
def test_a_model_whose_hooks_do_not_run_is_placed_by_whole_steps(gpu: Any, way: str) -> None:
    """Nothing shows where its forward ends."""
    gpu(100 * GB, 10 * GB, SLOW_HOST, timing=None)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = torch.nn.ModuleDict({"inner": inner}) if way == "a part" else inner
    with closing(twin(model, lr=1e-2, ratio="auto")) as optimizer:
        optimizer.runtime.device.delay("in", 0.01)  # of each bucket whose state is on the host
        call: Any = inner
        if way == "compiled":
            inner.compile(backend="eager")
        elif way != "a part":
            call = torch.compile(inner, backend="eager")
        for _ in range(30):
            call(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.is_placed
        assert optimizer.host_share == 0.0


def test_pauses_between_steps_are_not_the_hosts(gpu: Any) -> None:
    """Reading data, evaluating, saving: none of it says that the host is slow."""
    gpu(100 * GB, 10 * GB, FAST_HOST, timing=None)
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        auto = optimizer._auto
        assert auto is not None
        while not optimizer.is_placed:
            train(model, optimizer, [0])
            time.sleep(0.1)
        assert min(seen.step_s for seen in auto._seen) < 0.08  # not all: a busy machine is late now and then


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_buckets_move_anywhere_and_back(states: str) -> None:
    model, still = gpt(), gpt()
    options = {"lr": 1e-2, "states": states, "early": True}
    with closing(twin(model, **options)) as optimizer, closing(twin(still, **options)) as other:
        for step, way in enumerate([RESIDENT, STREAMED, HOST, STREAMED, RESIDENT, HOST]):
            train(model, optimizer, [step])
            train(still, other, [step])
            optimizer.wait()
            optimizer.runtime.wait_for_copies()
            for bucket in optimizer.runtime.buckets[step % 2 :: 2]:
                reconfigure.move(optimizer.runtime, bucket, way)
        train(model, optimizer, range(6, 9))
        train(still, other, range(6, 9))
        assert_same(snapshot(model, optimizer), snapshot(still, other))


def test_a_device_that_fills_up_while_buckets_move(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twinflow")
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        updater = optimizer.runtime.updaters[RESIDENT]
        make, count = updater.new_store, iter(range(100))

        def full(plan: Any) -> Any:
            if next(count) == 2:
                raise torch.OutOfMemoryError("no memory")
            return make(plan)

        monkeypatch.setattr(updater, "new_store", full)
        until_placed(model, optimizer)
        assert "the device's memory was full after 2 of" in caplog.messages[0]


def test_a_device_that_becomes_short_gives_state_back(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="twinflow")
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        until_placed(model, optimizer)
        assert set(places(optimizer)) == {RESIDENT}
        on_device = sum(optimizer.kind.nbytes(b.plan) for b in optimizer.runtime.buckets)
        gpu(100 * GB, 100 * GB - 2_500_000_000 + on_device // 2, SLOW_HOST)  # half of the reserve is 2.5 GB
        auto = optimizer._auto
        assert auto is not None
        auto._since = module._CHECK_EVERY - 1
        train(model, optimizer, [8])
        assert 0 < places(optimizer).count(HOST) < len(places(optimizer))
        assert "has too little free memory" in caplog.messages[-1]
        train(model, optimizer, [9])


def test_without_a_gpu_all_state_is_on_the_host() -> None:
    model = gpt()
    with closing(twin(model, ratio="auto", early=True)) as optimizer:
        train(model, optimizer, range(6))
        assert optimizer.host_share == 1.0


def test_the_default_is_1_where_auto_cannot_be_used(gpu: Any) -> None:
    """And what is used is said."""
    assert twin(gpt()).ratio == 1.0  # no GPU
    gpu(100 * GB, 10 * GB, SLOW_HOST)
    assert twin(gpt()).ratio == "auto"
    assert twin(gpt(), ratio=None).ratio == "auto"
    assert TwinOptimizer(list(gpt().parameters())).ratio == 1.0
    options: list[dict[str, Any]] = [
        {"placement": "tail"},
        {"offload_params": True},
        {"rule": torch.optim.RMSprop, "lr": 1e-2},
        {"streamed": 0.5},
    ]
    for given in options:
        with closing(twin(gpt(), **given)) as optimizer:
            assert optimizer.ratio == 1.0, given
            assert "ratio: 1.0 (1.00 of the state is on the host)" in repr(optimizer)


def test_it_chooses_the_placement_itself() -> None:
    with pytest.raises(ValueError, match="placement='tail' cannot be used with ratio=\"auto\""):
        twin(gpt(), ratio="auto", placement="tail")


def test_it_needs_the_model() -> None:
    with pytest.raises(
        ValueError, match=r"ratio=\"auto\" cannot be used with parameters as the first argument.*Pass the model"
    ):
        TwinOptimizer(list(gpt().parameters()), ratio="auto")


def test_the_first_ratio() -> None:
    assert first_ratio(10 * GB, 100 * GB) == 1.0
    assert first_ratio(10 * GB, 0) == 1.0  # not known
    assert 0.3 < first_ratio(200 * GB, 80 * GB) < 0.4
    assert first_ratio(200 * GB, 1 * GB) == 0.0


def test_items_are_needed_in_forward_order() -> None:
    model = gpt()
    with closing(twin(model, early=True)) as optimizer:
        train(model, optimizer, range(1))
        buckets = optimizer.runtime.buckets
        items = items_of([[bucket] for bucket in buckets], Timing(1.0, 2.0), is_early=True)
        for bucket, item in zip(buckets, items, strict=True):
            assert (item.need == 0.0) == (bucket.deadline <= 1 and item.ready == 2.0)
            assert item.ready == pytest.approx(2.0 * (1.0 - item.need))
        assert {item.ready for item in items_of([[b] for b in buckets], Timing(1.0, 2.0), is_early=False)} == {2.0}
