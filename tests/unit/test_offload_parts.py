# SPDX-License-Identifier: Apache-2.0
"""The parts of the offload runtime that need no model: plans, blocks, the clipping decision, flat buffers, streams.

The executor is in test_executor.py."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from twinflow.device import Device, Event, device_for, hide_from_children
from twinflow.offload.blocks import find_blocks, num_owners, owners
from twinflow.offload.clipping import Decision, Limits, decide, decide_there
from twinflow.offload.flats import FlatPool
from twinflow.offload.plan import ROOT, BucketPlan, ParamSpec, Slice, padded, plan_buckets

BLOCK = 128
pytestmark = pytest.mark.timeout(60)

# Plans.

SPECS = st.lists(
    st.builds(
        ParamSpec,
        name=st.just("p"),
        numel=st.integers(0, 2000),
        block=st.integers(ROOT, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        can_split=st.booleans(),
    ),
    max_size=12,
)


@given(SPECS, st.integers(1, 8).map(lambda n: n * BLOCK))
def test_plans(specs: list[ParamSpec], max_numel: int) -> None:
    plans = plan_buckets(specs, max_numel)
    assert [plan.index for plan in plans] == list(range(len(plans)))
    seen: list[list[Slice]] = [[] for _ in specs]
    for plan in plans:
        end = 0
        for piece in plan.slices:
            spec = specs[piece.param]
            assert (spec.block, spec.dtype) == (plan.block, plan.dtype)
            assert piece.offset % BLOCK == piece.start % BLOCK == 0
            assert piece.offset == end, "slices are packed one after the other"
            assert piece.numel > 0
            end = piece.offset + padded(piece.numel)
            seen[piece.param].append(piece)
        assert plan.numel == end
        if plan.numel > max_numel:  # a parameter that cannot be split, alone
            assert len(plan.slices) == 1
            assert not specs[plan.slices[0].param].can_split
    for spec, pieces in zip(specs, seen, strict=True):
        assert [piece.start for piece in pieces] == [sum(p.numel for p in pieces[:i]) for i in range(len(pieces))]
        assert sum(piece.numel for piece in pieces) == spec.numel
        assert spec.can_split or len(pieces) <= 1
    # Blocks stay together, in the order of their first parameter.
    kinds = [(plan.block, plan.dtype) for plan in plans]
    assert list(dict.fromkeys(kinds)) == [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]


@given(SPECS, st.integers(1, 8).map(lambda n: n * BLOCK))
def test_plans_that_cut_no_parameter_of_a_block(specs: list[ParamSpec], max_numel: int) -> None:
    seen: list[int] = []
    for plan in plan_buckets(specs, max_numel, keeps_whole=True):
        end = 0
        for piece in plan.slices:
            assert piece.offset == end
            end = piece.offset + padded(piece.numel)
            if plan.block != ROOT:
                assert (piece.start, piece.numel) == (0, specs[piece.param].numel)
                seen.append(piece.param)
        assert plan.numel == end
        assert plan.numel <= max_numel or len(plan.slices) == 1
    assert sorted(seen) == [i for i, spec in enumerate(specs) if spec.block != ROOT and spec.numel]


def test_a_large_parameter_of_no_block_does_not_make_all_slots_large() -> None:
    specs = [ParamSpec("embedding", 1 << 16, ROOT, torch.float32)]
    specs += [ParamSpec(str(i), 512, i // 4, torch.float32) for i in range(16)]
    assert max(plan.numel for plan in plan_buckets(specs, 1024, keeps_whole=True)) <= 1024


@given(SPECS)
def test_a_split_parameter_is_cut_in_the_same_blocks_of_128_by_any_plan(specs: list[ParamSpec]) -> None:
    """8-bit states have a scale for 128 elements: those are the same elements whatever the bucket size."""

    def blocks(max_numel: int) -> set[tuple[int, int]]:
        pieces = [piece for plan in plan_buckets(specs, max_numel) for piece in plan.slices]
        return {(p.param, p.start + at) for p in pieces for at in range(0, p.numel, BLOCK)}

    assert blocks(BLOCK) == blocks(5 * BLOCK) == blocks(1 << 20)


def test_buckets_of_equal_layout() -> None:
    def spec(numel: int, block: int, dtype: torch.dtype = torch.float32) -> ParamSpec:
        return ParamSpec("p", numel, block, dtype)

    specs = [spec(200, 0), spec(10, 0), spec(200, 1), spec(10, 1), spec(200, 2), spec(11, 2)]
    a, b, c = plan_buckets(specs)
    assert a.layout == b.layout != c.layout
    assert plan_buckets([spec(8, 0)])[0].layout != plan_buckets([spec(8, 0, torch.bfloat16)])[0].layout


@pytest.mark.parametrize(("numel", "expected"), [(0, 0), (1, 128), (128, 128), (129, 256)])
def test_padded(numel: int, expected: int) -> None:
    assert padded(numel) == expected


# Blocks.


def lin() -> nn.Linear:
    return nn.Linear(2, 2)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.stages = nn.ModuleList(nn.ModuleList(lin() for _ in range(2)) for _ in range(2))
        self.tail = nn.Sequential(lin(), nn.GELU(), nn.Sequential(lin(), nn.Dropout(), lin()))
        self.head = lin()
        self.scale = nn.Parameter(torch.ones(1))


def names_of(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def test_blocks_are_the_members_of_lists() -> None:
    model = Nested()
    expected = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "tail.0", "tail.2.0", "tail.2.2"]
    assert names_of(model) == expected
    blocks = find_blocks(model)
    assert [block.index for block in blocks] == list(range(7))
    owner = owners(model, blocks)
    assert set(owner) == set(model.parameters())
    outside = {"embedding.weight", "head.weight", "head.bias", "scale"}
    for name, param in model.named_parameters():
        assert owner[param] == (ROOT if name in outside else expected.index(name.rpartition(".")[0]))


def test_a_model_that_is_itself_a_list() -> None:
    model = nn.Sequential(lin(), nn.ReLU(), lin())
    assert names_of(model) == ["0", "2"]
    assert set(owners(model, find_blocks(model)).values()) == {0, 1}
    assert names_of(nn.Sequential(nn.Sequential(lin()), nn.Sequential(nn.Sequential(lin())))) == ["0.0", "1.0.0"]


def test_a_model_without_lists_is_all_root() -> None:
    model = nn.MultiheadAttention(4, 2)  # never calls its out_proj
    assert find_blocks(model) == []
    assert set(owners(model, []).values()) == {ROOT}


def test_a_block_is_whole_though_there_are_lists_in_it() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    layer.more = nn.ModuleList([lin()])
    assert names_of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) == ["layers.0", "layers.1"]


def test_frozen_and_empty_members_are_no_blocks() -> None:
    model = nn.Sequential(lin(), nn.ReLU(), lin(), lin())
    model[0].requires_grad_(False)
    assert names_of(model) == ["2", "3"]
    assert model[0].weight not in owners(model, find_blocks(model))


def test_tied_weights_belong_to_the_root() -> None:
    model = nn.Sequential(lin(), lin(), lin())
    model[2].weight = model[0].weight
    owner = owners(model, find_blocks(model))
    assert owner[model[0].weight] == ROOT
    assert owner[model[0].bias] == 0
    assert owner[model[2].bias] == 2
    counts = num_owners(model)
    assert counts[model[0].weight] == 2
    assert counts[model[1].weight] == 1


def test_a_weight_tied_to_one_outside_any_block_belongs_to_the_root() -> None:
    model = Nested()
    model.tail[0].weight = model.head.weight
    assert owners(model, find_blocks(model))[model.head.weight] == ROOT


def test_one_module_in_two_places_is_one_block() -> None:
    layer = lin()
    model = nn.Sequential(layer, nn.ReLU(), layer, lin())
    assert names_of(model) == ["0", "3"]
    assert owners(model, find_blocks(model))[layer.weight] == 0


# The clipping decision.

BOTH = Limits(1.0, True)


@pytest.mark.parametrize(
    ("sums", "scale", "limits", "expected"),
    [
        ([9.0, 16.0], 1.0, Limits(), Decision(5.0, 1.0, False, False)),
        ([9.0, 16.0], 1.0, Limits(6.0), Decision(5.0, 1.0, False, False)),
        ([9.0, 16.0], 1.0, Limits(1.0), Decision(5.0, 1.0 / (5.0 + 1e-6), False, True)),
        ([9.0, 16.0], 8.0, Limits(1.0), Decision(0.625, 0.125, False, False)),
        ([9.0, 16.0], 2.0, Limits(1.0), Decision(2.5, 1.0 / (2.5 + 1e-6) / 2.0, False, True)),
        ([], 1.0, BOTH, Decision(0.0, 1.0, False, False)),
        ([0.0], 4.0, BOTH, Decision(0.0, 0.25, False, False)),
    ],
)
def test_decisions(sums: list[float], scale: float, limits: Limits, expected: Decision) -> None:
    assert decide(sums, scale, limits) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_skipped_where_that_is_asked_for(bad: float) -> None:
    for limits in (BOTH, Limits(None, True)):
        decision = decide([1.0, bad], 1.0, limits)
        assert decision.skip
        assert not decision.clipped
        assert not math.isfinite(decision.norm)
    assert not decide([1.0, bad], 1.0, Limits()).skip


@given(
    st.lists(st.floats(0, 1e60), max_size=8),
    st.integers(0, 30).map(lambda power: 2.0**power),
    st.none() | st.floats(1e-3, 1e3),
)
def test_clipping_is_torchs(sums: list[float], scale: float, max_norm: float | None) -> None:
    decision = decide(sums, scale, Limits(max_norm, True))
    norm = math.sqrt(math.fsum(sums)) / scale
    assert decision.norm == norm
    assert not decision.skip
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    assert decision.factor == clip / scale
    assert decision.clipped == (clip < 1)
    assert decide(list(reversed(sums)), scale, Limits(max_norm, True)) == decision


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e3])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("norms", [[], [0.0, 0.0], [3.0, 4.0], [3.0, math.nan], [math.inf, 1.0]])
def test_the_decision_of_the_device_is_that_of_the_host(
    norms: list[float], skips: bool, max_norm: float | None
) -> None:
    limits = Limits(max_norm, skips)
    for scale in (1.0, 8.0):
        wanted = decide([norm * norm for norm in norms], scale, limits)
        found = torch.full((3,), 7.0, dtype=torch.float64)
        decide_there(found, torch.tensor(norms, dtype=torch.float64), scale, limits)
        assert found[2].item() == wanted.skip
        compared = found[:1] if wanted.skip else found[:2]  # a step that is skipped uses no factor
        torch.testing.assert_close(
            compared.tolist(), [wanted.norm, wanted.factor][: len(compared)], rtol=1e-15, atol=0, equal_nan=True
        )


def test_limits() -> None:
    assert not Limits().any
    assert Limits(1.0).any
    assert Limits(None, True).any


# Flat buffers.


class Switch(Event):
    """An event that is done when somebody waits for it."""

    __slots__ = ("num_waits",)

    def __init__(self) -> None:
        super().__init__(None)
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def plan_of(*numels: int, dtype: torch.dtype = torch.float32) -> BucketPlan:
    return plan_buckets([ParamSpec("p", numel, 0, dtype) for numel in numels])[0]


def test_flats_stay_within_their_bytes() -> None:
    pool, plan = FlatPool(torch.device("cpu"), max_bytes=1100), plan_of(100)
    first, second = pool.take(plan), pool.take(plan)
    assert first is not None
    assert second is not None
    assert (first[0].shape, first[0].dtype, first[1]) == ((128,), torch.float32, None)
    assert first[0].count_nonzero() == 0  # what is between slices is in the norm
    assert pool.take(plan) is None
    assert pool.num_bytes == 2 * 512
    event = Switch()
    pool.give(plan, first[0], event)
    again = pool.take(plan_of(100))
    assert again is not None
    assert again[0] is first[0]
    assert again[1] is event  # the taker waits on its stream, not here
    assert event.num_waits == 0


def test_a_flat_serves_one_layout() -> None:
    """Where the one has a gap the other may have a gradient."""
    pool = FlatPool(torch.device("cpu"), max_bytes=1 << 20)
    plan, other = plan_of(256), plan_of(100, 100)
    assert plan.numel == other.numel
    first = pool.take(plan)
    assert first is not None
    pool.give(plan, first[0], None)
    second = pool.take(other)
    assert second is not None
    assert second[0] is not first[0]
    again = pool.take(plan)
    assert again is not None
    assert again[0] is first[0]


def test_flats_of_other_layouts_make_room() -> None:
    pool, plan = FlatPool(torch.device("cpu"), max_bytes=1100), plan_of(200)
    taken = pool.take(plan)
    assert taken is not None
    assert pool.take(plan_of(100)) is None
    event = Switch()
    pool.give(plan, taken[0], event)
    assert pool.take(plan_of(200, dtype=torch.bfloat16)) is not None
    assert event.num_waits == 1  # it is forgotten only when nobody reads it any more
    assert pool.num_bytes == 512


def test_a_flat_larger_than_everything_gets_its_own() -> None:
    pool, plan = FlatPool(torch.device("cpu"), max_bytes=1000), plan_of(1000)
    huge = pool.take(plan)
    assert huge is not None
    assert pool.take(plan_of(1)) is None
    pool.give(plan, huge[0], None)
    assert pool.take(plan_of(1)) is not None
    assert pool.num_bytes == 512


def test_where_no_flat_will_come_back_one_more_is_made() -> None:
    pool, plan = FlatPool(torch.device("cpu"), max_bytes=600), plan_of(100)
    assert pool.take(plan) is not None
    assert pool.take(plan) is None
    more = pool.take(plan, may_grow=True)
    assert more is not None
    assert pool.num_bytes == 2 * 512
    pool.give(plan, more[0], None)
    again = pool.take(plan, may_grow=True)  # only where none is free
    assert again is not None
    assert again[0] is more[0]
    assert pool.num_bytes == 2 * 512


# Streams.


@pytest.fixture
def device() -> Iterator[Device]:
    made = device_for(torch.device("cpu"))
    yield made
    made.close()


def test_a_stream_works_in_order_beside_the_caller(device: Device) -> None:
    stream, seen, go = device.stream("a"), [], threading.Event()
    assert device.stream("a") is stream
    stream.run(go.wait)
    for i in range(100):
        stream.run(lambda i=i: seen.append(i))
    event = stream.record()
    assert not event.done()
    assert seen == []
    go.set()
    event.synchronize()
    assert event.done()
    assert seen == list(range(100))


def test_streams_wait_for_each_other_and_not_for_more(device: Device) -> None:
    a, b, seen, go = device.stream("a"), device.stream("b"), [], threading.Event()
    a.run(lambda: seen.append("before"))
    event = a.record()
    a.run(go.wait)  # later work of the stream does not hold up who waits for the event
    b.wait(event, "x")
    b.run(lambda: seen.append("after"))
    b.synchronize()
    assert seen == ["before", "after"]
    assert not a.record().done()
    go.set()
    a.synchronize()


@pytest.mark.parametrize("point", ["x", "y"])
def test_a_sync_point_can_be_switched_off(device: Device, point: str) -> None:
    a, b, go = device.stream("a"), device.stream("b"), threading.Event()
    device.disabled = frozenset({"x"})
    a.run(go.wait)
    event = a.record()
    b.wait(event, point)
    ran = b.record()
    if point == "x":
        ran.synchronize()
        device.hold_compute(event, point)
    else:
        time.sleep(0.02)
        assert not ran.done()
    go.set()


def test_a_delay_slows_one_stream(device: Device) -> None:
    device.delay("a", 0.02)
    for name, least in (("a", 0.06), ("b", 0.0)):
        start = time.perf_counter()
        for _ in range(3):
            device.stream(name).run(lambda: None)
        device.stream(name).synchronize()
        assert time.perf_counter() - start >= least


def test_an_exception_reaches_whoever_waits_for_a_later_event(device: Device) -> None:
    a, b, seen = device.stream("a"), device.stream("b"), []
    before = a.record()
    a.run(lambda: seen.append(1 / 0))
    failed = a.record()
    before.synchronize()
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    with pytest.raises(ZeroDivisionError):
        device.hold_compute(failed, "x")
    b.wait(failed, "x")  # and from there on, whoever waits for what waited for it
    with pytest.raises(ZeroDivisionError):
        b.synchronize()
    with pytest.raises(ZeroDivisionError):
        a.synchronize()
    device.stream("c").synchronize()


def test_work_needs_no_gradients(device: Device) -> None:
    found = []
    device.stream("a").run(lambda: found.append(torch.is_grad_enabled()))
    device.stream("a").synchronize()
    assert found == [False]


def test_spans_of_a_stream(device: Device) -> None:
    stream = device.stream("a")
    stream.run(lambda: None, span="off")
    stream.synchronize()
    device.trace.start()
    stream.run(lambda: None, span="copy", bucket=3)
    stream.run(lambda: None)
    device.add_span("forward", device.mark(), device.mark())
    stream.synchronize()
    assert {(span.name, span.track) for span in device.trace.spans()} == {("copy", "a"), ("forward", "compute")}
    assert [dict(span.args) for span in device.trace.spans() if span.name == "copy"] == [{"bucket": 3}]


def test_closing_ends_the_threads_after_their_work() -> None:
    device, seen = Device(), []
    device.stream("closing-test").run(lambda: (time.sleep(0.02), seen.append(1)))
    device.close()
    assert seen == [1]
    assert "twinflow-closing-test" not in {thread.name for thread in threading.enumerate()}
    device.close()


def test_many_threads_may_use_a_stream(device: Device) -> None:
    total = torch.zeros(1)
    stream = device.stream("a")

    def work(_: int) -> None:
        for _ in range(100):
            stream.run(lambda: total.add_(1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stream.synchronize()
    assert total.item() == 400


def test_memory_of_the_host_is_plain_without_a_gpu(device: Device) -> None:
    tensor = device.pinned(10, torch.bfloat16)
    assert (tensor.shape, tensor.dtype, device.kind) == ((10,), torch.bfloat16, "cpu")
    assert device.free_bytes() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_buffers_are_not_copied_into_forked_processes() -> None:
    """A DataLoader's workers would otherwise get all page-locked memory, and old copies of the state."""
    hidden, seen, memory = hide_from_children(torch.zeros(1 << 25)), torch.zeros(1 << 25), torch.zeros(1 << 25)
    hide_from_children(memory[:])  # gone at once: an allocator may keep its pages, and give them to somebody else
    for tensor, is_hidden in ((hidden, True), (seen, False), (memory, False)):
        middle = tensor.data_ptr() + (1 << 26)
        mapping, flags = "", ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if found:
                start, end = (int(part, 16) for part in found.groups())
                mapping = line if start <= middle < end else ""
            elif mapping and line.startswith("VmFlags:"):
                flags = line
        assert ("dc" in flags.split()) == is_hidden
