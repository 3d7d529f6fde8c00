# SPDX-License-Identifier: Apache-2.0
"""The native executor (csrc/executor*.cpp) without a model: small buckets on the host, streams as threads.

Gradients are plain tensors, and every moment that matters is an event that the test fires. The truth is the torch
reference of the rules, one step after the other.
"""

from __future__ import annotations

import gc
import math
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from twin_support import our_threads

from twinflow import native
from twinflow.device import Device, Event, make_room
from twinflow.offload import speculative_stores, sync
from twinflow.offload.bucket import Bucket, Param, new_bucket
from twinflow.offload.clipping import Decision, Limits, decide
from twinflow.offload.executor import Executor, Held, WorkerError
from twinflow.offload.flats import FlatPool
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import BucketPlan, ParamSpec, plan_buckets
from twinflow.offload.speculative_stores import SpeculativeStores
from twinflow.offload.updater import RuleUpdater
from twinflow.offload.weight_source import InMemory
from twinflow.rules import ADAMW, reference
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store

pytestmark = pytest.mark.timeout(60)

SIZES = (200, 100)  # of the parameters of each bucket; neither fills its blocks of 128
NUMEL = 384  # of each bucket, with the padding
GROUPS: list[dict[str, Any]] = [
    {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False},
    {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
]
FREE = Limits()
BOTH = Limits(1.0, True)


def soon(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it is true: threads work beside the test."""
    end = time.perf_counter() + 20
    while time.perf_counter() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.001)
    raise AssertionError("it did not happen")


def stays(condition: Callable[[], bool]) -> None:
    """The condition holds, and goes on doing so while threads have time to break it."""
    end = time.perf_counter() + 0.03
    while time.perf_counter() < end:
        assert condition()
        time.sleep(0.002)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def tensors_of(store: Store) -> list[Tensor]:
    return [t for t in (store.master, store.weight, *store.states, *store.scales) if t is not None]


def same_store(a: Store, b: Store) -> bool:
    return all(same(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def copied(store: Store) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(store)]


def grads_of(seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[Tensor]:
    """Of each parameter of a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(numel, generator=generator) * size).to(dtype) for numel in SIZES]


def norm_of(*grads: Sequence[Tensor]) -> Tensor:
    """Of each bucket, as the device measures it."""
    return torch.tensor([math.sqrt(math.fsum(native.sum_squares(one))) for one in grads], dtype=torch.float64)


class Rig:
    """An executor and buckets of equal layout, each with two parameters of different groups."""

    def __init__(
        self,
        num_buckets: int = 1,
        dtype: torch.dtype = torch.float32,
        format: str = "fp32",
        num_slots: int = 4,
        num_weight_slots: int = 4,
        num_spares: int = 0,
        holds_on_host: bool = False,
        sums_on_host: bool = False,
        is_external: bool = False,
        flat_bytes: int = 1 << 20,
    ) -> None:
        torch.manual_seed(0)
        self.device = Device()
        self.dtype = dtype
        self.tensors = [nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(num_buckets) for numel in SIZES]
        self.params = [Param(i, f"p{i}", tensor, group=i % 2) for i, tensor in enumerate(self.tensors)]
        specs = [ParamSpec(p.name, p.tensor.numel(), i // 2, dtype) for i, p in enumerate(self.params)]
        self.plans = plan_buckets(specs)
        self.updater = RuleUpdater(ADAMW, format, self.device)
        self.executor = Executor(
            self.device,
            None if is_external else ADAMW,
            FlatPool(torch.device("cpu"), flat_bytes),
            NUMEL * dtype.itemsize,
            num_slots,
            num_weight_slots,
            holds_on_host,
            sums_on_host,
        )
        self.buckets = [new_bucket(self.params, plan, None, self.updater, False, self.executor) for plan in self.plans]
        for bucket in self.buckets:
            bucket.deadline = bucket.plan.index
            for i, param in enumerate(bucket.params):
                self.updater.write_master(bucket, i, param.tensor.detach().float(), keep=False)
        self.truth = [Truth(self, bucket) for bucket in self.buckets]
        self.add_spares(num_spares)
        self.num_jobs = 0
        self.fetched: Tensor | None = None

    def add_spares(self, number: int) -> None:
        for _ in range(number):
            self.executor.add_speculative_store(self.plans[0], self.updater.new_store(self.plans[0]))

    def close(self) -> None:
        self.executor.close()
        self.device.close()

    def job(self, limits: Limits = FREE, scale: float = 1.0, **options: Any) -> Job:
        self.num_jobs += not options.get("is_part")
        number = self.num_jobs + bool(options.get("is_part"))
        return Job(number, () if options.get("is_part") else GROUPS, limits, scale, self.executor, **options)

    def submit(
        self, job: Job, index: int, grads: Sequence[Tensor], ready: Event | None = None, present: Sequence[int] = (0, 1)
    ) -> Task:
        """Gradients where they are, as those of `.grad`."""
        bucket = self.buckets[index]
        sources = [(bucket.slices[i].offset, grads[i]) for i in present]
        task = Task(bucket, job, list(present), sources, ready=ready or fired(self.device))
        job.tasks.append(task)
        self.executor.submit(task)
        return task

    def submit_flat(self, job: Job, index: int, grads: Sequence[Tensor]) -> Task:
        """Gradients in a flat buffer, as those that are taken during backward."""
        bucket = self.buckets[index]
        compute = self.device.compute()
        flat = self.executor.take_flat(bucket.plan, compute)

        def gather() -> None:
            for piece, grad in zip(bucket.slices, grads, strict=True):
                flat[piece.offset : piece.offset + piece.numel] = grad

        compute.run(gather)
        task = Task(bucket, job, [0, 1], [(0, flat)], flat=flat, ready=compute.record())
        job.tasks.append(task)
        self.executor.submit(task)
        return task

    def close_job(self, job: Job, norms: Tensor, event: Event | None = None) -> None:
        """The decision follows from the norms, once the event is done."""
        self.executor.measure(job, norms)
        self.executor.close_sums(job, event)
        if job.is_released:
            self.executor.make_due(job)

    def finish(self, job: Job) -> Decision:
        """Until its weights are in the parameters."""
        decision = self.executor.wait_for_decision(job)
        self.executor.wait_until_done(job)
        self.executor.wait_for_weights(self.buckets)
        return decision

    def step(self, seed: int, limits: Limits = FREE, indices: Sequence[int] | None = None, **options: Any) -> Job:
        """A job of all buckets, to its end, here and in the truth."""
        job = self.job(limits, **options)
        indices = range(len(self.buckets)) if indices is None else indices
        grads = {i: grads_of(seed + i, self.dtype) for i in indices}
        for i in indices:
            self.submit(job, i, grads[i])
        self.close_job(job, norm_of(*grads.values()))
        decision = self.finish(job)
        for i in indices:
            self.truth[i].step(grads[i], decision)
        return job

    @property
    def is_as_the_truth(self) -> bool:
        return all(truth.is_shown() and truth.is_in_state() for truth in self.truth)


class Truth:
    """What a bucket's state and weights have to be: the torch reference, one step after the other."""

    def __init__(self, rig: Rig, bucket: Bucket) -> None:
        self.bucket = bucket
        self.store = rig.updater.new_store(bucket.plan)
        for own, first in zip(tensors_of(self.store), tensors_of(bucket.store), strict=True):
            own.copy_(first)
        self.steps = [0, 0]

    def step(self, grads: Sequence[Tensor], decision: Decision, present: Sequence[int] = (0, 1)) -> None:
        if decision.skip:
            return
        for i in present:
            piece, param = self.bucket.slices[i], self.bucket.params[i]
            self.steps[i] += 1
            options = GROUPS[param.group]
            segment = Segment(
                ADAMW,
                ADAMW.hyper(options, self.steps[i]),
                grads[i],
                self.store.narrow(piece.offset, piece.numel),
                decision.factor * (-1 if options["maximize"] else 1),
                rounding_key(self.steps[i], param.index),
                piece.start,
            )
            reference.update([segment])

    def is_in_state(self) -> bool:
        return same_store(self.store, self.bucket.store) and list(self.bucket.steps) == self.steps

    def is_shown(self) -> bool:
        """Whether its parameters have the weights."""
        held = self.store.master if self.store.weight is None else self.store.weight
        for piece, param in zip(self.bucket.slices, self.bucket.params, strict=True):
            wanted = torch.empty_like(param.tensor)
            native.cast(wanted, held[piece.offset : piece.offset + piece.numel].clone())
            if not same(wanted, param.tensor):
                return False
        return True


def fired(device: Device) -> Event:
    """An event that has come."""
    event = Event(None, device)
    event.fire(None)
    return event


@contextmanager
def rig(*arguments: Any, **options: Any) -> Iterator[Rig]:
    with closing(Rig(*arguments, **options)) as made:
        yield made


# Updates.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_updates_are_those_of_the_reference(dtype: torch.dtype, format: str) -> None:
    with rig(3, dtype, format) as one:
        for step in range(4):
            one.step(10 * step)
            assert one.is_as_the_truth, step


def test_bytes_and_seconds_are_counted() -> None:
    with rig(2, torch.bfloat16) as one:
        one.step(0)
        found = one.executor.counters
        assert found.bytes_out == found.bytes_back == 2 * sum(SIZES) * 2
        assert found.busy_s > 0
        assert (found.num_weight_slots, found.num_unlocked) == (0, 0)  # bf16 weights are half of their masters


# Which numbers an update gets.

OUTCOMES = ("kept", "skipped", "clipped", "partial", "kept", "skipped", "skipped", "partial", "clipped", "kept")


@pytest.mark.parametrize("holds_on_host", [False, True])
@pytest.mark.parametrize("num_spares", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "format"), [(torch.float32, "fp32"), (torch.bfloat16, "int8"), (torch.float16, "bf16")]
)
def test_step_numbers_and_rounding_after_steps_that_were_skipped(
    dtype: torch.dtype, format: str, num_spares: int, holds_on_host: bool
) -> None:
    """Each slice counts its own updates, and a job is made before it is known whether the last one happens."""
    with rig(2, dtype, format, num_spares=num_spares, holds_on_host=holds_on_host) as one:
        job = one.job(BOTH, runs_ahead=True)
        for step, outcome in enumerate(OUTCOMES):
            size = {"kept": 1e-3, "partial": 1e-3, "clipped": 1.0, "skipped": math.inf}[outcome]
            present = (1,) if outcome == "partial" else (0, 1)
            grads = [grads_of(100 * step + i, dtype, size) for i in range(2)]
            for i in range(2):
                one.submit(job, i, grads[i], present=present)
            event = Event(None, one.device)
            one.close_job(job, norm_of(*([g[i] for i in present] for g in grads)), event)
            last, job = job, one.job(BOTH, runs_ahead=True)
            event.fire(None)
            decision = one.finish(last)
            assert (decision.skip, decision.clipped) == (outcome == "skipped", outcome == "clipped")
            for i in range(2):
                one.truth[i].step(grads[i], decision, present)
            assert one.is_as_the_truth, (step, outcome)
        assert [list(bucket.steps) for bucket in one.buckets] == [[5, 7], [5, 7]]


def test_a_job_that_is_dropped_leaves_no_trace() -> None:
    with rig(2, num_spares=1) as one:
        one.step(0, BOTH)
        job = one.job(BOTH, runs_ahead=True)
        for i in range(2):
            one.submit(job, i, grads_of(5, size=1e-3))
        job.drop()
        one.close_job(job, norm_of(grads_of(5, size=1e-3)))
        assert one.executor.wait_for_decision(job).skip
        one.executor.wait_until_done(job)
        assert one.is_as_the_truth
        assert [one.executor.shown(bucket) for bucket in one.buckets] == [1, 1]
        one.num_jobs -= 1  # it was no step
        one.step(20, BOTH)
        assert one.is_as_the_truth


def test_slots_of_copies_that_were_dropped_on_their_way_are_used_again() -> None:
    """All slots are given back while copies still write to them: the mover has to look when these have ended."""
    with rig(2, num_slots=2, num_spares=2) as one:
        one.device.delay("out", 0.05)
        dropped = one.job(BOTH, runs_ahead=True)
        for i in range(2):
            one.submit(dropped, i, grads_of(5, size=1e-3))
        dropped.drop()
        one.close_job(dropped, norm_of(grads_of(5, size=1e-3)))
        assert one.executor.wait_for_decision(dropped).skip
        one.num_jobs -= 1  # it was no step
        one.step(20, BOTH)
        assert one.is_as_the_truth


def test_the_next_step_of_a_bucket_waits_for_the_last_ones_decision() -> None:
    """Both updates could run ahead, but the second has to start from what the first leaves."""
    with rig(1, num_spares=2, num_slots=4) as one:
        grads, jobs, events = [grads_of(seed, size=1e-3) for seed in (1, 2)], [], []
        for i in range(2):
            jobs.append(one.job(BOTH, runs_ahead=True))
            events.append(Event(None, one.device))
            one.submit(jobs[i], 0, grads[i])
            one.close_job(jobs[i], norm_of(grads[i]), events[i])
        stays(lambda: jobs[1].decision is None)
        for i in range(2):
            events[i].fire(None)
            one.truth[0].step(grads[i], one.executor.wait_for_decision(jobs[i]))
        one.finish(jobs[1])
        assert one.is_as_the_truth


# The decision.


def as_bytes(decision: Decision) -> bytes:
    norm = math.nan if math.isnan(decision.norm) else decision.norm  # the sign of a NaN means nothing
    factor = math.nan if math.isnan(decision.factor) else decision.factor
    return struct.pack("dd??", norm, factor, decision.skip, decision.clipped)


@pytest.fixture(scope="module")
def decider() -> Iterator[Rig]:
    with rig() as one:
        yield one


NORMS = st.floats(0, 1e150) | st.floats(0, 1e-150) | st.floats(1e-3, 1e3)
BAD_NORMS = NORMS | st.sampled_from([math.nan, math.inf, -0.0])


@given(
    st.lists(NORMS, max_size=8) | st.lists(BAD_NORMS, max_size=8),
    st.integers(-4, 30).map(lambda power: 2.0**power) | st.floats(1e-3, 1e3),
    st.none() | st.floats(1e-3, 1e3) | st.sampled_from([0.0, math.inf]),
    st.booleans(),
)
def test_the_decision_from_norms_is_that_of_python(
    decider: Rig, norms: list[float], scale: float, max_norm: float | None, skips: bool
) -> None:
    limits = Limits(max_norm, skips)
    job = decider.job(limits, scale)
    decider.close_job(job, torch.tensor(norms, dtype=torch.float64))
    found = decider.executor.wait_for_decision(job)
    wanted = decide([norm * norm for norm in norms], scale, limits)
    assert as_bytes(found) == as_bytes(wanted), (found, wanted)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((5.0, 0.25, 0.0), Decision(5.0, 0.25, False, False)),
        ((5.0, 0.05, 0.0), Decision(5.0, 0.05, False, True)),
        ((math.inf, 0.25, 1.0), Decision(math.inf, 0.0, True, False)),
        ((math.inf, math.nan, 1.0), Decision(math.inf, 0.0, True, False)),
    ],
)
def test_a_decision_that_was_made_on_the_device(
    decider: Rig, told: tuple[float, float, float], expected: Decision
) -> None:
    job = decider.job(BOTH, 4.0)
    here = torch.full((3,), math.nan, dtype=torch.float64)
    event = Event(None, decider.device)
    decider.executor.close_job(job, here, event)
    stays(lambda: job.decision is None)
    here.copy_(torch.tensor(told, dtype=torch.float64))
    event.fire(None)
    assert decider.executor.wait_for_decision(job) == job.decision == expected


def test_a_decision_is_made_when_the_norms_are_there() -> None:
    with rig() as one:
        norms, event = torch.full((2,), math.nan, dtype=torch.float64), Event(None, one.device)
        job = one.job(BOTH)
        assert not job.is_open
        assert one.job(FREE).is_open
        one.close_job(job, norms, event)
        stays(lambda: job.decision is None and not job.is_open)
        norms.copy_(torch.tensor([3.0, 4.0]))
        event.fire(None)
        assert one.executor.wait_for_decision(job) == decide([9.0, 16.0], 1.0, BOTH)
        assert job.is_open


def test_a_decision_that_python_has_made() -> None:
    with rig() as one:
        job = one.job(BOTH)
        grads = grads_of(0)
        one.submit(job, 0, grads)
        stays(lambda: job.decision is None)
        decision = Decision(7.0, 0.5, False, True)
        one.executor.decide(job, decision)
        one.executor.make_due(job)
        assert one.finish(job) == decision
        one.truth[0].step(grads, decision)
        assert one.is_as_the_truth


@pytest.mark.parametrize("limits", [Limits(1.0), FREE])
def test_what_is_not_finite_spreads_where_nothing_is_skipped(limits: Limits) -> None:
    """As with torch: a clipping factor of NaN makes all weights NaN."""
    with rig(2) as one:
        job = one.job(limits)
        grads = [grads_of(1), grads_of(2)]
        grads[0][0][3] = math.nan
        for i in range(2):
            one.submit(job, i, grads[i])
        one.close_job(job, norm_of(*grads))
        decision = one.finish(job)
        assert not decision.skip
        assert math.isnan(decision.norm)
        nans = [int(tensor.isnan().sum()) for tensor in one.tensors]
        assert nans == ([200, 100, 200, 100] if limits.any else [1, 0, 0, 0])


# A slow driver.


def test_the_lock_is_free_while_the_driver_is_called() -> None:
    """If the launch queue of the model is full, calls of the driver take milliseconds."""
    with rig(3) as one:
        one.device.delay("orders", 0.1)
        job, longest_s = one.job(), 0.0
        grads = [grads_of(i) for i in range(3)]
        for i in range(3):
            start_s = time.perf_counter()
            one.submit(job, i, grads[i])
            longest_s = max(longest_s, time.perf_counter() - start_s)
            time.sleep(0.02)  # the mover is in the calls for this copy
        assert one.executor.counters.busy_s == 0.0
        one.device.delay("orders", 0.0)
        one.close_job(job, norm_of(*grads))
        decision = one.finish(job)
        for i in range(3):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert longest_s < 0.05


@pytest.mark.parametrize("limits", [FREE, BOTH], ids=["no limits", "limits"])
def test_a_slow_driver_changes_no_bit(limits: Limits) -> None:
    with rig(3, torch.bfloat16, num_spares=3) as one:
        one.device.delay("orders", 0.002)
        for step in range(3):
            one.step(10 * step, limits, **({"runs_ahead": True} if limits is BOTH else {}))
            assert one.is_as_the_truth, step


# Updates ahead of the decision.

SMALL = 1e-3  # gradients of this size have a norm far below 1
AHEAD = {"limits": BOTH, "runs_ahead": True}


def ahead(one: Rig, number: int, **options: Any) -> tuple[Job, list[list[Tensor]], Event]:
    """A job whose updates have all run ahead, and the event that its norms come with."""
    job, event = one.job(**{**AHEAD, **options}), Event(None, one.device)
    grads = [grads_of(50 + i, one.dtype, SMALL) for i in range(len(one.buckets))]
    one.executor._library.tf_executor_record_spans(one.executor._handle, 1)
    one.executor._spans(0, 0.0)
    for i in range(len(one.buckets)):
        one.submit(job, i, grads[i])
    found: list[str] = []
    if number:
        soon(lambda: found.extend(span.name for span in one.executor._spans(0, 0.0)) or found.count("ahead") >= number)
    else:
        time.sleep(0.03)
    return job, grads, event


def decided(one: Rig, job: Job, norms: Tensor, event: Event) -> Decision:
    one.close_job(job, norms, event)
    event.fire(None)
    return one.finish(job)


FORMATS = [(torch.float32, "fp32"), (torch.bfloat16, "int8"), (torch.float16, "bf16")]


@pytest.mark.parametrize("holds_on_host", [False, True])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_what_ran_ahead_is_kept_by_a_swap(dtype: torch.dtype, format: str, holds_on_host: bool) -> None:
    with rig(2, dtype, format, num_spares=2, holds_on_host=holds_on_host) as one:
        one.step(0)
        before = [bucket.store for bucket in one.buckets]
        kept = [copied(store) for store in before]
        job, grads, event = ahead(one, 2)
        for bucket, store, values in zip(one.buckets, before, kept, strict=True):  # nothing shows before the decision
            assert bucket.store is store
            assert all(same(a, b) for a, b in zip(tensors_of(store), values, strict=True))
        assert all(truth.is_shown() for truth in one.truth)
        decision = decided(one, job, norm_of(*grads), event)
        assert (decision.clipped, decision.skip) == (False, False)
        for i in range(2):
            one.truth[i].step(grads[i], decision)
            assert one.buckets[i].store is not before[i]
        assert one.is_as_the_truth
        assert one.executor.counts_of(job) == {"speculated": 2, "dropped": 0, "held": 0}
        spares = [one.executor.take_speculative_store(one.plans[0].layout) for _ in range(3)]
        assert {id(store) for store in spares} == {*map(id, before), id(None)}  # the old stores are the next spares


@pytest.mark.parametrize("holds_on_host", [False, True])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_what_ran_ahead_of_a_skipped_step_is_dropped(dtype: torch.dtype, format: str, holds_on_host: bool) -> None:
    with rig(2, dtype, format, num_spares=2, holds_on_host=holds_on_host) as one:
        one.step(0)
        before = [bucket.store for bucket in one.buckets]
        job, _, event = ahead(one, 2)
        assert decided(one, job, torch.tensor([1.0, math.nan], dtype=torch.float64), event).skip
        assert one.is_as_the_truth  # which has not been told of this step
        assert [bucket.store for bucket in one.buckets] == before
        assert one.executor.counts_of(job) == {"speculated": 2, "dropped": 2, "held": 0}
        assert [one.executor.shown(bucket) for bucket in one.buckets] == [2, 2]  # whoever waits for this step goes on
        spares = [one.executor.take_speculative_store(one.plans[0].layout) for _ in range(3)]
        assert [spare is None for spare in spares] == [False, False, True]
        one.step(7)
        assert one.is_as_the_truth


@pytest.mark.parametrize("holds_on_host", [False, True])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_what_ran_ahead_of_a_clipped_step_is_made_anew(dtype: torch.dtype, format: str, holds_on_host: bool) -> None:
    with rig(2, dtype, format, num_spares=2, holds_on_host=holds_on_host) as one:
        one.step(0)
        before = [bucket.store for bucket in one.buckets]
        job, grads, event = ahead(one, 2)
        decision = decided(one, job, torch.tensor([30.0, 40.0], dtype=torch.float64), event)
        assert decision.factor == 1.0 / (50.0 + 1e-6)
        for i in range(2):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert [bucket.store for bucket in one.buckets] == before
        assert one.executor.counts_of(job) == {"speculated": 2, "dropped": 2, "held": 0}
        bytes_out = one.executor.counters.bytes_out
        num_copies = 2 if holds_on_host else 3  # gradients that wait in their slots are not copied again
        assert bytes_out == num_copies * 2 * sum(SIZES) * dtype.itemsize


def test_a_loss_scale_is_part_of_the_factor() -> None:
    """An update with 1 / scale is the unclipped one, and is kept."""
    with rig(1, num_spares=1) as one:
        store = one.buckets[0].store
        job, grads, event = ahead(one, 1, scale=8.0)
        decision = decided(one, job, norm_of(*grads), event)
        assert decision.factor == 0.125
        one.truth[0].step(grads[0], decision)
        assert one.is_as_the_truth
        assert one.buckets[0].store is not store


def test_buckets_share_spares_as_far_as_there_are_some() -> None:
    with rig(3, num_spares=2) as one:
        job, grads, event = ahead(one, 2)
        assert one.executor.missing_speculative_stores() == [one.buckets[2]]
        assert one.executor.missing_speculative_stores() == []
        decision = decided(one, job, norm_of(*grads), event)
        for i in range(3):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert one.executor.counts_of(job) == {"speculated": 2, "dropped": 0, "held": 1}


def test_gradients_that_wait_on_the_host_take_no_spare_before_their_update() -> None:
    """The first gradients of a backward have the latest deadlines. The spares are for those that can be updated now."""
    with rig(2, num_spares=1, holds_on_host=True) as one:
        one.executor._library.tf_executor_record_spans(one.executor._handle, 1)
        copied_event = Event(None, one.device)
        one.executor.note_sent(one.buckets[1], 0, copied_event)  # its weights are still read
        job, event = one.job(**AHEAD), Event(None, one.device)
        grads = [grads_of(i, size=SMALL) for i in range(2)]
        first = one.submit(job, 1, grads[1])
        soon(lambda: one.executor.read_grads(first) is not None)
        one.submit(job, 0, grads[0])
        spans = soon(lambda: [span for span in one.executor._spans(0, 0.0) if span.name == "ahead"])
        assert [span.args["bucket"] for span in spans] == [0]
        copied_event.fire(None)
        decision = decided(one, job, norm_of(*grads), event)
        for i in range(2):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert one.executor.counts_of(job) == {"speculated": 1, "dropped": 0, "held": 1}


def test_a_bucket_that_lacks_gradients_does_not_run_ahead() -> None:
    """A swap of stores would lose the slices that are left alone."""
    with rig(1, num_spares=1) as one:
        job, event, grads = one.job(**AHEAD), Event(None, one.device), grads_of(1, size=SMALL)
        one.submit(job, 0, grads, present=(1,))
        stays(lambda: one.executor.counters.busy_s == 0)
        decision = decided(one, job, norm_of(grads[1:]), event)
        one.truth[0].step(grads, decision, (1,))
        assert one.is_as_the_truth
        assert one.executor.counts_of(job)["speculated"] == 0
        assert one.executor.missing_speculative_stores() == []


def test_only_a_job_that_may_runs_ahead() -> None:
    with rig(2, num_spares=2) as one:
        job, grads, event = ahead(one, 0, runs_ahead=False)
        assert one.executor.counters.busy_s == 0
        decision = decided(one, job, norm_of(*grads), event)
        for i in range(2):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert one.executor.counts_of(job) == {"speculated": 0, "dropped": 0, "held": 2}


GOOD, CLIPPED, SKIPPED = (
    Decision(0.1, 1.0, False, False),
    Decision(9, 0.1, False, True),
    Decision(math.nan, 0, True, False),
)


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], True),
        ([GOOD], True),
        ([CLIPPED], False),
        ([SKIPPED], False),
        ([CLIPPED, GOOD], False),
        ([CLIPPED, GOOD, GOOD], True),
        ([CLIPPED, GOOD] * 4, False),
        ([CLIPPED] * 100 + [GOOD] * 4, False),
        ([CLIPPED] * 100 + [GOOD] * 5, True),
        ([GOOD] * 100 + [CLIPPED] * 3, True),
        ([GOOD] * 100 + [CLIPPED] * 4, False),
    ],
)
def test_nothing_runs_ahead_when_half_of_the_last_eight_steps_were_in_vain(
    past: list[Decision], expected: bool
) -> None:
    with rig(1, num_spares=1) as one:
        for decision in past:
            one.executor.decide(one.job(BOTH), decision)
        for limitless in range(8):
            one.executor.decide(one.job(FREE), CLIPPED)  # of steps that nothing could run ahead of
            assert limitless < 8
        job, grads, event = ahead(one, int(expected))
        decided(one, job, norm_of(*grads), event)
        assert one.executor.counts_of(job)["speculated"] == expected


# Slots.


def test_slots_are_made_up_to_the_limit_and_used_again() -> None:
    """Gradients that wait for the decision on the host take one each; the others stay where they are."""
    with rig(4, num_slots=2, holds_on_host=True) as one:
        assert one.executor.counters.num_slots == 0
        assert one.executor.unmade_bytes == (2 + 4) * NUMEL * 4
        job, grads, event = ahead(one, 0, runs_ahead=False)
        soon(lambda: one.executor.counters.num_slots == 2)
        assert one.executor.counters.bytes_out == 2 * sum(SIZES) * 4
        assert one.executor.unmade_bytes == 4 * NUMEL * 4
        decision = decided(one, job, norm_of(*grads), event)
        for i in range(4):
            one.truth[i].step(grads[i], decision)
        assert one.is_as_the_truth
        assert one.executor.counters.num_slots == 2


def test_slots_beyond_a_lower_limit_are_given_back() -> None:
    with rig(4, num_slots=4, holds_on_host=True) as one:
        job, grads, event = ahead(one, 0, runs_ahead=False)
        soon(lambda: one.executor.counters.num_slots == 4)
        one.executor.resize(2, 4, keeps_weight_slots=False)
        assert one.executor.counters.num_slots == 4  # all are in use
        decided(one, job, norm_of(*grads), event)
        one.executor.resize(2, 4, keeps_weight_slots=False)
        assert one.executor.counters.num_slots == 2
        for i in range(4):
            one.truth[i].step(grads[i], job.decision or GOOD)
        one.step(3)
        assert one.is_as_the_truth
        assert one.executor.counters.num_slots == 2


def test_a_weight_slot_is_given_back_when_its_weights_are_sent() -> None:
    with rig(3, torch.float16, num_weight_slots=3) as one:
        one.device.delay("in", 0.02)
        job = one.job()
        grads = [grads_of(i, torch.float16) for i in range(3)]
        for i in range(3):
            one.submit(job, i, grads[i])
        one.close_job(job, torch.ones(3, dtype=torch.float64))
        one.executor.wait_until_shown(one.buckets)
        assert one.executor.counters.num_weight_slots == 3
        one.executor.resize(4, 1, keeps_weight_slots=True)
        assert one.executor.counters.num_weight_slots == 3
        one.executor.resize(4, 1, keeps_weight_slots=False)  # copies still read them
        assert one.executor.counters.num_weight_slots == 1
        for i in range(3):
            one.truth[i].step(grads[i], GOOD)
        one.finish(job)
        assert one.is_as_the_truth


@pytest.mark.parametrize("num_weight_slots", [1, 3])
def test_a_weight_slot_is_written_again_when_its_weights_are_sent(num_weight_slots: int) -> None:
    with rig(3, torch.float16, num_weight_slots=num_weight_slots) as one:
        one.device.delay("in", 0.01)
        for step in range(2):
            one.step(10 * step)
            assert one.is_as_the_truth
        assert one.executor.counters.num_weight_slots == num_weight_slots


def test_weight_slots_ahead_of_the_decision_are_made_beyond_the_limit() -> None:
    """They stay in use until the decision: updates that have it must not wait for them."""
    with rig(3, torch.float16, num_weight_slots=1, num_spares=3) as one:
        job, grads, event = ahead(one, 3)
        assert one.executor.counters.num_weight_slots == 3
        decided(one, job, norm_of(*grads), event)
        one.executor.resize(4, 1, keeps_weight_slots=True)
        assert one.executor.counters.num_weight_slots == 3
        one.executor.add_weight_slots(2)
        assert one.executor.counters.num_weight_slots == 5


def test_memory_of_slots_is_not_a_number_before_it_is_written() -> None:
    """A wait that is missing then shows: the padding between slices is all that nobody writes."""
    with rig(1, holds_on_host=True) as one:
        job = one.job(BOTH)
        task = one.submit(job, 0, grads_of(0))
        grads = soon(lambda: None if (found := one.executor.read_grads(task)) is None else [found])[0]
        (first, second) = one.buckets[0].slices
        assert grads[first.numel : second.offset].isnan().all()
        assert not grads[: first.numel].isnan().any()


# The order of updates.


def updates(one: Rig) -> list[int]:
    """Buckets in the order in which they were updated."""
    spans = [span for span in one.executor._spans(0, 0.0) if span.name == "update"]
    return [span.args["bucket"] for span in sorted(spans, key=lambda span: span.start_s)]


@pytest.mark.parametrize("deadlines", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_of_the_gradients_that_have_arrived_the_earliest_deadline_is_first(deadlines: tuple[int, ...]) -> None:
    with rig(5, num_slots=5, holds_on_host=True) as one:
        one.executor._library.tf_executor_record_spans(one.executor._handle, 1)
        for bucket, deadline in zip(one.buckets, deadlines, strict=True):
            bucket.deadline = deadline
        job, event = one.job(BOTH), Event(None, one.device)
        tasks = [one.submit(job, i, grads_of(i, size=SMALL)) for i in range(5)]
        for task in tasks:
            soon(lambda task=task: one.executor.read_grads(task) is not None)
        assert (
            one.executor.counters.num_slots == 5
        )  # the lock is free: the mover looks at all arrivals before it goes on
        one.close_job(job, torch.full((5,), 0.1, dtype=torch.float64), event)
        event.fire(None)
        one.finish(job)
        assert updates(one) == sorted(range(5), key=lambda i: deadlines[i])


def test_gradients_that_have_not_arrived_do_not_hold_up_others() -> None:
    with rig(2) as one:
        one.executor._library.tf_executor_record_spans(one.executor._handle, 1)
        one.buckets[0].deadline, one.buckets[1].deadline = 1, 0
        job, late = one.job(), Event(None, one.device)
        one.submit(job, 0, grads_of(0))
        one.submit(job, 1, grads_of(1), late)
        one.close_job(job, torch.ones(2, dtype=torch.float64))
        one.executor.wait_for_weights(one.buckets[:1])
        assert updates(one) == [0]
        late.fire(None)
        one.finish(job)
        assert updates(one) == [1]


def test_gradients_of_an_earlier_deadline_get_the_free_slot() -> None:
    """Those that are complete on the device; one slot serves all."""
    with rig(4, num_slots=1, holds_on_host=True) as one:
        one.executor._library.tf_executor_record_spans(one.executor._handle, 1)
        blocked, event = one.job(BOTH), Event(None, one.device)
        one.submit(blocked, 0, grads_of(0, size=SMALL))
        soon(lambda: one.executor.counters.bytes_out)
        job = one.job()
        for i, deadline in ((1, 9), (2, 5), (3, 7)):
            one.buckets[i].deadline = deadline
            one.submit(job, i, grads_of(i))
        one.close_job(job, torch.ones(4, dtype=torch.float64))
        stays(lambda: one.executor.counters.bytes_out == sum(SIZES) * 4)
        one.close_job(blocked, torch.full((4,), 0.1, dtype=torch.float64), event)
        event.fire(None)
        one.finish(job)
        assert updates(one) == [0, 2, 3, 1]


def test_an_update_starts_when_its_gradients_are_complete() -> None:
    with rig(1) as one:
        job, ready, grads = one.job(), Event(None, one.device), grads_of(0)
        wanted = [grad.clone() for grad in grads]
        for grad in grads:
            grad.fill_(math.nan)
        one.submit(job, 0, grads, ready)
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        stays(lambda: one.executor.counters.busy_s == 0)
        for grad, values in zip(grads, wanted, strict=True):
            grad.copy_(values)
        ready.fire(None)
        one.truth[0].step(wanted, one.finish(job))
        assert one.is_as_the_truth


# Delayed jobs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_delayed_job_are_sent_after_its_release(dtype: torch.dtype) -> None:
    with rig(2, dtype) as one:
        one.device.delay("in", 0.01)
        before = [param.detach().clone() for param in one.tensors]
        first = one.job(is_delayed=True)
        grads = [[grads_of(10 * k + i, dtype) for i in range(2)] for k in range(2)]
        for i in range(2):
            one.submit(first, i, grads[0][i])
        one.close_job(first, torch.ones(2, dtype=torch.float64))
        one.executor.wait_until_done(first)
        for i in range(2):
            one.truth[i].step(grads[0][i], GOOD)
            assert one.truth[i].is_in_state()
        second = one.job(is_delayed=True)  # its gradients come before the first one's weights are out
        for i in range(2):
            one.submit(second, i, grads[1][i])
        one.close_job(second, torch.ones(2, dtype=torch.float64))
        stays(lambda: all(truth.is_in_state() for truth in one.truth))  # its update would change what is to be sent
        after = Event(None, one.device)
        one.executor.release(first, after)
        one.executor.make_due(first)
        stays(lambda: all(same(a, b) for a, b in zip(one.tensors, before, strict=True)))  # somebody reads the old ones
        after.fire(None)
        one.executor.wait_for_weights(one.buckets)
        assert all(truth.is_shown() for truth in one.truth)
        one.executor.wait_until_done(second)
        for i in range(2):
            one.truth[i].step(grads[1][i], GOOD)
        assert all(truth.is_in_state() and not truth.is_shown() for truth in one.truth)
        one.executor.release(second, fired(one.device))
        one.executor.make_due(second)
        one.executor.wait_for_weights(one.buckets)
        assert one.is_as_the_truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_in_the_state_already_wait_for_a_release(dtype: torch.dtype) -> None:
    """After a checkpoint of a delayed update."""
    with rig(2, dtype) as one:
        job = one.job(is_delayed=True)
        one.executor.decide(job, GOOD)
        for bucket in one.buckets:
            for param in bucket.params:
                param.tensor.data.zero_()
            one.executor.hold_back(job, bucket)
        assert one.executor.take_unsent(one.buckets[1])
        assert not one.executor.take_unsent(one.buckets[1])
        stays(lambda: not any(param.count_nonzero() for param in one.tensors))
        one.executor.release(job, fired(one.device))
        soon(lambda: one.executor.shown(one.buckets[0]) == 1)
        one.executor.wait_for_weights(one.buckets)
        assert one.truth[0].is_shown()
        assert not one.truth[1].is_shown()  # its weights were taken back


# State that somebody reads.


def submitted(one: Rig, size: float = 1.0, **options: Any) -> tuple[Job, list[list[Tensor]]]:
    """A job of all buckets, with gradients of this size."""
    job = one.job(**options)
    grads = [grads_of(60 + i, one.dtype, size) for i in range(len(one.buckets))]
    for i in range(len(one.buckets)):
        one.submit(job, i, grads[i])
    return job, grads


def test_saved_state_is_not_changed_before_it_is_read() -> None:
    """Without another store, as before a copy of the state."""
    with rig(2) as one:
        one.executor.freeze(0, True, False)
        assert one.executor.wanted(0.0) == []  # nobody waits for it yet
        job, grads = submitted(one)
        one.close_job(job, torch.ones(2, dtype=torch.float64))
        assert one.executor.wanted(10.0) == [0]
        one.truth[1].step(grads[1], GOOD)
        one.executor.wait_for_weights(one.buckets[1:])
        stays(lambda: one.is_as_the_truth)  # the other one has been updated
        one.executor.freeze(0, False, False)
        one.finish(job)
        one.truth[0].step(grads[0], GOOD)
        assert one.is_as_the_truth
        assert one.executor.wanted(0.0) == []
        assert one.executor.counters.num_aside == 0


@pytest.mark.parametrize("limits", [FREE, BOTH], ids=["in order", "ahead"])
@pytest.mark.parametrize(("dtype", "format"), FORMATS)
def test_saved_state_stays_where_it_is(dtype: torch.dtype, format: str, limits: Limits) -> None:
    """Updates go to other stores, which were poisoned, and no update uses the old ones before their release."""
    with rig(2, dtype, format) as one:
        one.step(0)
        for _ in range(3):
            store = one.updater.new_store(one.plans[0])
            for piece in one.plans[0].slices:  # and not the padding, which no update writes
                for tensor in tensors_of(store.narrow(piece.offset, piece.numel)):
                    tensor.view(torch.uint8).fill_(255)
            one.executor.add_speculative_store(one.plans[0], store)
        before = [bucket.store for bucket in one.buckets]
        kept = [copied(store) for store in before]
        for i in range(2):
            one.executor.freeze(i, True, False)
        for step in range(3):  # the third store serves one of the buckets in each step
            grads = [grads_of(80 + 2 * step + i, dtype, SMALL) for i in range(2)]
            job = one.job(limits, runs_ahead=limits.any)
            for i in range(2):
                one.submit(job, i, grads[i])
            one.close_job(job, norm_of(*grads))
            decision = one.finish(job)
            for i in range(2):
                one.truth[i].step(grads[i], decision)
            assert one.is_as_the_truth, step
            assert one.executor.counters.num_aside == 2
        for store, values in zip(before, kept, strict=True):
            assert all(same(a, b) for a, b in zip(tensors_of(store), values, strict=True))
        assert one.executor.wanted(0.0) == []
        spares = {id(store) for store in free_stores(one)}
        assert not spares & {*map(id, before)}
        for i in range(2):
            one.executor.freeze(i, False, False)
        assert {id(store) for store in free_stores(one)} == {*map(id, before)}


def free_stores(one: Rig) -> list[Store]:
    """Takes all free speculative stores."""
    found: list[Store] = []
    while (store := one.executor.take_speculative_store(one.plans[0].layout)) is not None:
        found.append(store)
    return found


@pytest.mark.parametrize("holds_on_host", [False, True])
def test_a_clipped_update_of_saved_state_is_repeated_elsewhere(holds_on_host: bool) -> None:
    with rig(1, num_spares=1, holds_on_host=holds_on_host) as one:
        store, values = one.buckets[0].store, copied(one.buckets[0].store)
        one.executor.freeze(0, True, False)
        job, _, event = ahead(one, 1)
        decision = decided(one, job, torch.tensor([2.0], dtype=torch.float64), event)
        assert decision.clipped
        one.truth[0].step(grads_of(50, size=SMALL), decision)
        assert one.is_as_the_truth
        assert one.executor.counts_of(job)["dropped"] == 1
        assert all(same(a, b) for a, b in zip(tensors_of(store), values, strict=True))


def test_a_skipped_update_of_saved_state_gives_its_store_back() -> None:
    with rig(1, num_spares=1) as one:
        store = one.buckets[0].store
        one.executor.freeze(0, True, False)
        job, _, event = ahead(one, 1)
        assert decided(one, job, torch.tensor([math.inf], dtype=torch.float64), event).skip
        assert one.buckets[0].store is store
        assert one.is_as_the_truth
        assert len(free_stores(one)) == 1


def test_an_update_of_some_slices_waits_for_the_saved_state() -> None:
    """The other slices would be missing in another store."""
    with rig(1, num_spares=1) as one:
        one.executor.freeze(0, True, False)
        job, grads = one.job(), grads_of(0)
        one.submit(job, 0, grads, present=(1,))
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        assert one.executor.wanted(10.0) == [0]
        stays(lambda: one.is_as_the_truth)
        one.executor.freeze(0, False, False)
        one.finish(job)
        one.truth[0].step(grads, GOOD, (1,))
        assert one.is_as_the_truth


def test_an_update_takes_a_store_that_becomes_free() -> None:
    with rig(2) as one:
        for i in range(2):
            one.executor.freeze(i, True, False)
        job, grads = submitted(one)
        one.close_job(job, torch.ones(2, dtype=torch.float64))
        soon(lambda: one.executor.wanted(10.0) == [0, 1])
        store = one.buckets[1].store
        one.add_spares(1)
        one.executor.freeze(0, False, False)  # updated in place, or beside the store if this comes first
        one.finish(job)
        for i in range(2):
            one.truth[i].step(grads[i], GOOD)
        assert one.is_as_the_truth
        assert one.buckets[1].store is not store
        assert one.executor.wanted(0.0) == []


@pytest.mark.parametrize("is_delayed", [False, True])
def test_saved_parameters_keep_their_weights(is_delayed: bool) -> None:
    """The update is in the state, and the weights are still to be read as they are."""
    with rig(1, num_spares=1) as one:
        if not is_delayed:
            one.executor.freeze(0, True, True)
        before = one.tensors[0].detach().clone()
        job, grads = submitted(one, is_delayed=is_delayed)
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        one.executor.wait_until_done(job)
        if is_delayed:
            one.executor.freeze(0, True, True)
            one.executor.release(job, fired(one.device))
            one.executor.make_due(job)
        assert one.executor.wanted(10.0) == [0]
        stays(lambda: same(one.tensors[0], before))
        one.executor.freeze(0, True, False)
        one.finish(job)
        one.truth[0].step(grads[0], GOOD)
        assert one.is_as_the_truth


@pytest.mark.parametrize("point", [sync.STATE_READ, sync.PARAMS_READ])
def test_saved_values_change_without_their_sync_point(point: str) -> None:
    with rig(1, num_spares=1) as one:
        one.device.disabled = frozenset({point})
        store, values, weights = one.buckets[0].store, copied(one.buckets[0].store), one.tensors[0].detach().clone()
        one.executor.freeze(0, True, True)
        job, _ = submitted(one)
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        one.executor.wait_until_done(job)
        if point == sync.STATE_READ:
            assert not all(same(a, b) for a, b in zip(tensors_of(store), values, strict=True))
        else:
            soon(lambda: not same(one.tensors[0], weights))


# Gradients that are not needed any more.


def test_gradients_are_released_when_they_are_on_the_host_for_good() -> None:
    with rig(2) as one:
        one.device.delay("out", 0.01)
        job, grads = one.job(), [grads_of(0), grads_of(1)]
        known = [weakref.ref(grad) for one_grads in grads for grad in one_grads]
        tasks = [one.submit(job, i, grads[i]) for i in range(2)]
        del grads
        assert all(ref() is not None for ref in known)  # a copy still reads them
        one.close_job(job, torch.ones(2, dtype=torch.float64))
        one.finish(job)
        one.executor.collect()
        gc.collect()
        assert all(ref() is None for ref in known)
        assert [task.sources for task in tasks] == [[], []]
        for i in range(2):
            one.truth[i].step(grads_of(i), GOOD)
        assert one.is_as_the_truth


@pytest.mark.parametrize("holds_on_host", [False, True])
@pytest.mark.parametrize("has_flat", [False, True])
def test_gradients_that_may_be_needed_again_stay(holds_on_host: bool, has_flat: bool) -> None:
    """An update that ran ahead may have to be made anew."""
    with rig(1, num_spares=1, holds_on_host=holds_on_host) as one:
        job, event, grads = one.job(**AHEAD), Event(None, one.device), grads_of(0, size=SMALL)
        task = one.submit_flat(job, 0, grads) if has_flat else one.submit(job, 0, [grad.clone() for grad in grads])
        soon(lambda: one.executor.counters.busy_s)

        def is_released() -> bool:
            one.executor.collect()
            return not task.sources

        if holds_on_host:
            soon(is_released)
        else:
            stays(lambda: not is_released())
        decision = decided(one, job, torch.tensor([4.0], dtype=torch.float64), event)
        soon(is_released)
        one.truth[0].step(grads, decision)
        assert one.is_as_the_truth


def test_a_flat_buffer_is_used_again_after_its_copy() -> None:
    with rig(4, num_slots=1, flat_bytes=NUMEL * 4) as one:
        one.device.delay("out", 0.005)
        job, grads = one.job(), [grads_of(i) for i in range(4)]
        tasks = [one.submit_flat(job, i, grads[i]) for i in range(3)]  # each waits for the one before
        assert one.executor.flats.num_bytes == NUMEL * 4
        tasks.append(one.submit_flat(job, 3, grads[3]))
        one.close_job(job, torch.ones(4, dtype=torch.float64))
        one.finish(job)
        for i in range(4):
            one.truth[i].step(grads[i], GOOD)
        assert one.is_as_the_truth
        one.executor.collect()
        assert all(task.flat is None for task in tasks)


def test_where_no_flat_buffer_will_come_back_one_more_is_made() -> None:
    with rig(3, flat_bytes=NUMEL * 4) as one:
        plan = one.plans[0]
        taken = [one.executor.take_flat(plan, one.device.compute()) for _ in range(3)]  # nothing is under way
        assert len({flat.data_ptr() for flat in taken}) == 3


# Sums of several backwards.


def test_sums_on_the_host() -> None:
    with rig(2, torch.bfloat16, sums_on_host=True) as one:
        for step in range(3):
            parts = [grads_of(100 * step + k, torch.bfloat16) for k in range(3)]
            for part in parts[:2]:
                job = one.job(is_part=True)
                for i in range(2):
                    one.submit(job, i, part, present=(0, 1) if i == 0 else (0,))
            job = one.job(BOTH)
            norms = torch.zeros(2, dtype=torch.float64)
            one.executor.measure(job, norms)
            one.submit(job, 0, parts[2])
            task = one.executor.submit_sum(job, one.buckets[1])  # it has no gradients of the last backward
            assert task is not None
            job.tasks.append(task)
            one.executor.close_sums(job, None)
            one.executor.make_due(job)
            decision = one.finish(job)
            whole = [sum((part[k].float() for part in parts[1:]), parts[0][k].float()) for k in range(2)]
            first = parts[0][0].float() + parts[1][0].float()
            squares = [sum(native.sum_squares(whole)), native.sum_squares([first])[0]]
            assert norms.tolist() == [math.sqrt(square) for square in squares]
            assert decision == decide([norm * norm for norm in norms.tolist()], 1.0, BOTH)
            one.truth[0].step(whole, decision)
            one.truth[1].step([first, first], decision, (0,))
            assert one.is_as_the_truth, step


def test_sums_that_are_forgotten() -> None:
    with rig(1, sums_on_host=True) as one:
        job = one.job(is_part=True)
        one.submit(job, 0, grads_of(1), present=(1,))
        one.executor.wait_for_sums()
        assert one.executor.added(one.buckets[0]) == {1}
        one.executor.forget_sums()
        assert one.executor.added(one.buckets[0]) == set()
        job = one.job(BOTH)
        assert one.executor.submit_sum(job, one.buckets[0]) is None
        one.submit(job, 0, grads_of(2))
        one.close_job(job, torch.zeros(1, dtype=torch.float64))
        one.truth[0].step(grads_of(2), one.finish(job))
        assert one.is_as_the_truth


# Weights that live on the host.


def master_of(bucket: Bucket) -> InMemory:
    return InMemory(lambda: bucket.store.master)


def test_a_fetch_waits_for_the_weights_that_are_due() -> None:
    with rig(2) as one:
        job, ready, grads = one.job(), Event(None, one.device), grads_of(0)
        one.submit(job, 0, grads, ready)
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        into, other, constant = torch.zeros(NUMEL), torch.zeros(5), torch.arange(5.0)
        room = Event(None, one.device)
        items = [(one.buckets[0], master_of(one.buckets[0]), into), (None, InMemory(lambda: constant), other)]
        fetch = one.executor.fetch(items, room)
        stays(lambda: one.executor.counters.bytes_fetched == 0)
        ready.fire(None)
        event = one.executor.wait_for_fetch(fetch)
        stays(lambda: not event.done() and not into.count_nonzero())  # somebody uses the memory
        room.fire(None)
        event.synchronize()
        one.truth[0].step(grads, GOOD)
        assert same(into, one.truth[0].store.master)
        assert same(other, constant)
        assert one.executor.counters.bytes_fetched == NUMEL * 4 + 20


def test_the_state_does_not_change_while_it_is_fetched() -> None:
    with rig(1) as one:
        one.device.delay("fetch", 0.02)
        into = torch.zeros(NUMEL)
        before = one.buckets[0].store.master.clone()
        fetch = one.executor.fetch([(one.buckets[0], master_of(one.buckets[0]), into)], fired(one.device))
        one.executor.wait_for_fetch(fetch)
        one.step(0)
        assert one.is_as_the_truth
        assert same(into, before)


# An optimizer in Python.


def test_updates_that_the_caller_makes() -> None:
    with rig(3, torch.float16, is_external=True) as one:
        for i, deadline in enumerate((2, 0, 1)):
            one.buckets[i].deadline = deadline
        assert one.executor.next_update(0.01) is None
        job, event = one.job(BOTH, 2.0), Event(None, one.device)
        grads = [grads_of(i, torch.float16) for i in range(3)]
        for i in range(3):
            one.submit(job, i, grads[i], present=(0, 1) if i else (1,))
        assert one.executor.next_update(0.03) is None  # there is no decision
        one.close_job(job, torch.tensor([10.0, 0.0, 0.0], dtype=torch.float64), event)
        event.fire(None)
        order = []
        for _ in range(3):
            found = None
            while found is None:
                found = one.executor.next_update(1.0)
            task, factor, slot = found
            index = task.bucket.plan.index
            order.append(index)
            assert factor == 1.0 / (5.0 + 1e-6) / 2.0
            assert task.present == ([1] if index == 0 else [0, 1])
            assert task.grads is not None
            assert slot is not None
            for i in task.present:
                piece = task.bucket.slices[i]
                assert same(task.grads[piece.offset : piece.offset + piece.numel], grads[index][i])
                slot[piece.offset : piece.offset + piece.numel] = index + 10.0
            one.executor.finish_update(task, [slot[s.offset : s.offset + s.numel] for s in task.bucket.slices])
        assert sorted(order) == [0, 1, 2]
        one.finish(job)
        means = [float(tensor.float().mean()) for tensor in one.tensors]
        assert means[1:] == [10.0, 11.0, 11.0, 12.0, 12.0]
        assert [list(bucket.steps) for bucket in one.buckets] == [[0, 1], [1, 1], [1, 1]]


# Failures.


class Waiter(threading.Thread):
    """A thread that blocks in a call, and what the call has raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.error: BaseException | None = None
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.call()
        except BaseException as error:
            self.error = error


def waiters(one: Rig, job: Job) -> dict[str, Waiter]:
    """Everybody who can wait for a job that does not end."""
    executor = one.executor
    one.fetched = torch.zeros(NUMEL)  # kept: the copy may be made after the test has gone on
    fetch = executor.fetch([(one.buckets[0], master_of(one.buckets[0]), one.fetched)], fired(one.device))
    return {
        "decision": Waiter(lambda: executor.wait_for_decision(job)),
        "done": Waiter(lambda: executor.wait_until_done(job)),
        "weights": Waiter(lambda: executor.wait_for_weights(one.buckets)),
        "shown": Waiter(lambda: executor.wait_until_shown(one.buckets)),
        "hold": Waiter(lambda: executor.hold(Held.of(one.buckets))),
        "sent": Waiter(lambda: executor.wait_until_sent(one.buckets[0], job.number, 30.0)),
        "fetch": Waiter(lambda: executor.wait_for_fetch(fetch)),
    }


def ended(all_waiters: dict[str, Waiter]) -> dict[str, BaseException | None]:
    for waiter in all_waiters.values():
        waiter.join(10)
    assert [name for name, waiter in all_waiters.items() if waiter.is_alive()] == []
    return {name: waiter.error for name, waiter in all_waiters.items()}


def fails() -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("has_cause", [True, False])
@pytest.mark.parametrize("limits", [BOTH, FREE])
def test_an_event_that_fails_is_seen_by_all_who_wait(limits: Limits, has_cause: bool) -> None:
    """The gradients will never be complete. What made them has raised in Python, or, as on a GPU, nobody knows why."""
    with rig(2) as one:
        ready = Event(None, one.device)
        job = one.job(limits)
        one.submit(job, 0, grads_of(0), ready)
        one.close_job(job, torch.ones(1, dtype=torch.float64), ready)
        found = waiters(one, job)
        time.sleep(0.02)
        if has_cause:
            one.device.stream("broken").run(fails)
            one.device.stream("broken").record()
            soon(lambda: one.device.error)
        ready.fire(ZeroDivisionError())
        errors = ended(found)
        assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(errors, WorkerError)
        assert {type(error.__cause__) for error in errors.values() if error} == {
            ZeroDivisionError if has_cause else type(None)
        }
        with pytest.raises(WorkerError):
            one.executor.check()
        assert one.is_as_the_truth  # nothing has been written


def test_weights_that_cannot_be_sent() -> None:
    """What a delayed job's weights have to wait for fails: the copy back is not made, and whoever waits is told."""
    with rig(1) as one:
        job, after, before = one.job(is_delayed=True), Event(None, one.device), one.tensors[0].detach().clone()
        one.submit(job, 0, grads_of(0))
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        one.executor.wait_until_done(job)
        one.executor.release(job, after)
        one.executor.make_due(job)
        found = {
            "weights": Waiter(lambda: one.executor.wait_for_weights(one.buckets)),
            "hold": Waiter(lambda: one.executor.hold(Held.of(one.buckets))),
        }
        time.sleep(0.02)
        after.fire(ZeroDivisionError())
        errors = ended(found)
        assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(errors, WorkerError)
        assert same(one.tensors[0], before)
        with pytest.raises(WorkerError, match="a copy between host and device has failed"):
            one.executor.check()


def test_weights_that_cannot_be_sent_are_noticed_by_the_next_step() -> None:
    with rig(1) as one:
        job, after = one.job(is_delayed=True), Event(None, one.device)
        one.submit(job, 0, grads_of(0))
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        one.executor.wait_until_done(job)
        one.executor.release(job, after)
        after.fire(ZeroDivisionError())
        job = one.job()
        one.submit(job, 0, grads_of(0))
        one.close_job(job, torch.ones(1, dtype=torch.float64))
        with pytest.raises(WorkerError):
            one.executor.wait_until_done(job)


def test_who_waits_for_a_flat_buffer_is_told_too() -> None:
    with rig(2, flat_bytes=NUMEL * 4) as one:
        job, ready = one.job(), Event(None, one.device)
        flat = one.executor.take_flat(one.plans[0], one.device.compute())
        task = Task(one.buckets[0], job, [0, 1], [(0, flat)], flat=flat, ready=ready)
        one.executor.resize(0, 0, keeps_weight_slots=False)  # it cannot leave the device
        one.executor.submit(task)
        found = {"flat": Waiter(lambda: one.executor.take_flat(one.plans[1], one.device.compute()))}
        time.sleep(0.02)
        one.executor.fail(ZeroDivisionError())
        assert isinstance(ended(found)["flat"], WorkerError)


def test_a_thread_of_ours_that_fails_is_seen_by_all_who_wait() -> None:
    with rig(2) as one:
        job = one.job(BOTH)
        one.submit(job, 0, grads_of(0))
        one.executor.make_due(job)
        found = waiters(one, job)
        time.sleep(0.02)
        one.executor.fail(ZeroDivisionError("first"))
        one.executor.fail(ValueError("second"))
        errors = ended(found)
        assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(errors, WorkerError)
        assert {str(error.__cause__) for error in errors.values() if error} == {"first"}


@pytest.mark.parametrize("has_cause", [True, False])
def test_a_thread_that_is_told_of_a_failure_has_none_of_its_own(has_cause: bool) -> None:
    """What a thread of ours ends with is handed to `fail`: whoever comes next gets the first cause all the same."""
    with rig(1, is_external=True) as one:
        ready, job = Event(None, one.device), one.job()
        one.submit(job, 0, grads_of(0), ready)
        waiter = Waiter(lambda: one.executor.next_update(30.0))
        time.sleep(0.02)
        if has_cause:
            one.device.error = ZeroDivisionError()
        ready.fire(ZeroDivisionError())
        error = ended({"update": waiter})["update"]
        assert isinstance(error, WorkerError)
        one.executor.fail(error)
        with pytest.raises(WorkerError) as found:
            one.executor.check()
        assert type(found.value.__cause__) is (ZeroDivisionError if has_cause else type(None))


# The end.


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_ends_all_threads_in_the_middle_of_work() -> None:
    before = our_threads()
    for _ in range(3):
        with rig(8, num_slots=2) as one:
            one.device.delay("out", 0.005)
            one.device.delay("in", 0.005)
            job = one.job()
            for i in range(8):
                one.submit(job, i, grads_of(i))
            one.close_job(job, torch.ones(8, dtype=torch.float64))
            soon(lambda: one.executor.counters.bytes_out)
            found = waiters(one, job)
            found.pop("decision")
            time.sleep(0.002)
            one.close()
            errors = ended(found)
            for name, error in errors.items():
                assert not isinstance(error, WorkerError), name
                assert error is None or "closed" in str(error)
            with pytest.raises(RuntimeError, match="The optimizer cannot be used, because it is closed"):
                one.executor.check()
            with pytest.raises(RuntimeError, match="The optimizer cannot be used, because it is closed"):
                one.executor.wait_until_done(job)
            one.close()
        assert our_threads() <= before
        # Each bucket is as it was, or as it has to be.
        fresh = Rig(8)
        for i, (truth, start) in enumerate(zip(one.truth, fresh.truth, strict=True)):
            is_old = same_store(start.store, one.buckets[i].store)
            truth.step(grads_of(i), GOOD)
            assert is_old or truth.is_in_state()
        fresh.close()


def test_an_executor_that_is_forgotten_ends_its_threads() -> None:
    before = our_threads()
    one = Rig(2)
    one.step(0)
    names = sorted(name.partition(" ")[0] for name in our_threads() - before)
    assert names == ["twinflow-mover", *3 * ["twinflow-stream"], "twinflow-worker"]
    known = weakref.ref(one.executor)
    one.device.close()
    del one
    gc.collect()
    assert known() is None
    assert our_threads() <= before


def test_closing_while_the_caller_updates() -> None:
    """Its gradients and its weight slot stay where they are until it is through."""
    with rig(1, torch.float16, is_external=True) as one:
        job = one.job()
        grads = grads_of(0, torch.float16)
        one.submit(job, 0, grads)
        found = None
        while found is None:
            found = one.executor.next_update(1.0)
        task, _, slot = found
        one.executor.close()
        assert slot is not None
        slot.fill_(3.0)
        assert task.grads is not None
        assert same(task.grads[: SIZES[0]], grads[0])
        one.executor.finish_update(task, [slot[s.offset : s.offset + s.numel] for s in task.bucket.slices])
        with pytest.raises(RuntimeError, match="closed"):
            one.executor.next_update(1.0)


def test_jobs_that_are_forgotten_while_they_are_under_way() -> None:
    with rig(2) as one:
        one.device.delay("out", 0.01)
        for step in range(2):
            job = one.job()
            for i in range(2):
                one.submit(job, i, grads_of(10 * step + i))
                one.truth[i].step(grads_of(10 * step + i), GOOD)
            one.close_job(job, torch.ones(2, dtype=torch.float64))
            job.tasks.clear()
            del job
        one.executor.wait_for_weights(one.buckets)
        assert one.is_as_the_truth


def test_counting_anew() -> None:
    with rig(1) as one:
        one.step(0)
        one.executor.reset(7)
        one.num_jobs = 7
        assert (one.executor.due(one.buckets[0]), one.executor.shown(one.buckets[0])) == (7, 7)
        one.step(1)
        assert one.executor.shown(one.buckets[0]) == 8
        assert one.is_as_the_truth


# Several threads.


@pytest.mark.parametrize("num_spares", [0, 4])
def test_many_steps_with_many_waiters(num_spares: int) -> None:
    """Forwards wait for one bucket each while others are updated; streams are late now and then."""
    with rig(6, torch.bfloat16, "int8", num_slots=2, num_spares=num_spares) as one:
        is_over = threading.Event()

        def disturb() -> None:
            for k in iter(lambda: 0 if is_over.is_set() else 1, 0):
                for name, seconds in (("out", 0.0005), ("in", 0.0003), ("out", 0.0), ("in", 0.0)):
                    one.device.delay(name, seconds * k)
                    time.sleep(0.002)

        disturber = Waiter(disturb)
        for step in range(25):
            job, event = one.job(BOTH, runs_ahead=True), Event(None, one.device)
            grads = [grads_of(100 * step + i, torch.bfloat16, SMALL if step % 3 else 1.0) for i in range(6)]
            for i in reversed(range(6)):
                one.submit(job, i, grads[i])
            one.close_job(job, norm_of(*grads), event)
            event.fire(None)
            for i in range(6):
                one.executor.hold(Held.of(one.buckets[i : i + 1]))
                decision = one.executor.wait_for_decision(job)
                one.truth[i].step(grads[i], decision)
                assert one.truth[i].is_shown(), (step, i)
        one.finish(job)
        assert one.is_as_the_truth
        is_over.set()
        assert ended({"disturber": disturber}) == {"disturber": None}


# Sync points.


@pytest.mark.parametrize("point", [sync.ARRIVED, sync.GRAD_READY, sync.NORMS])
def test_a_sync_point_can_be_switched_off_while_it_is_waited_for(point: str) -> None:
    with rig(1) as one:
        one.device.delay("out", 0.3 if point == sync.ARRIVED else 0.0)
        job, event = one.job(BOTH), Event(None, one.device)
        one.submit(job, 0, grads_of(0), None if point != sync.GRAD_READY else event)
        one.close_job(job, torch.ones(1, dtype=torch.float64), event if point == sync.NORMS else None)
        stays(lambda: one.executor.counters.busy_s == 0)
        one.device.disabled = frozenset({point})
        if point != sync.GRAD_READY:  # whose stream waits already
            one.executor.wait_until_done(job)
        one.device.disabled = frozenset()
        event.fire(None)
        one.finish(job)


# Speculative stores.


def new_spares(one: Rig, max_bytes: int, freed: list[Store] | None = None) -> SpeculativeStores:
    return SpeculativeStores(
        one.executor, one.updater.new_store, (freed if freed is not None else []).append, max_bytes
    )


BUCKET_BYTES = NUMEL * 4 * 3  # an fp32 master and two states


def test_speculative_stores_that_were_missing_are_made_within_their_bytes() -> None:
    with rig(3) as one, closing(new_spares(one, 2 * BUCKET_BYTES + 100)) as spares:
        for step in range(3):
            job, grads, event = ahead(one, 0)
            decision = decided(one, job, norm_of(*grads), event)
            for i in range(3):
                one.truth[i].step(grads[i], decision)
            wanted = 0 if step == 0 else 2
            assert one.executor.counts_of(job)["speculated"] == wanted
            spares.after_step()
            soon(lambda: spares._num_queued == 0)
            assert spares.num_bytes == 2 * BUCKET_BYTES
        assert one.is_as_the_truth
        assert [one.executor.take_speculative_store(one.plans[0].layout) is None for _ in range(3)] == [
            False,
            False,
            True,
        ]


def test_no_bytes_no_speculative_stores() -> None:
    with rig(1) as one, closing(new_spares(one, 0)) as spares:
        job, grads, event = ahead(one, 0)
        decided(one, job, norm_of(*grads), event)
        spares.after_step()
        assert spares.prepare(one.buckets) == 0
        assert spares.num_bytes == 0
        assert one.executor.take_speculative_store(one.plans[0].layout) is None


def test_speculative_stores_are_released_if_the_machine_runs_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free, freed = [10 * BUCKET_BYTES], []  # type: ignore[var-annotated]
    monkeypatch.setattr(speculative_stores, "free_host_bytes", lambda: free[0])
    with rig(3) as one, closing(new_spares(one, 0, freed)) as spares:
        spares.set_limit(3 * BUCKET_BYTES, least_free=BUCKET_BYTES)
        assert spares.prepare(one.buckets) == 3
        make_room(9 * BUCKET_BYTES)
        assert not freed
        for step in range(3):
            job, grads, event = ahead(one, 0)
            decision = decided(one, job, norm_of(*grads), event)
            for i in range(3):
                one.truth[i].step(grads[i], decision)
            if step == 0:
                make_room(10 * BUCKET_BYTES - 100)  # one store is enough for the least, and is not made again
            spares.after_step()
            assert len(freed) == 1
            assert spares.num_bytes == spares.max_bytes == 2 * BUCKET_BYTES
            assert one.executor.counts_of(job)["speculated"] == (3 if step == 0 else 2)
        assert one.is_as_the_truth


def test_a_thread_looks_at_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may allocate memory within a step."""
    free, freed = [10 * BUCKET_BYTES], []  # type: ignore[var-annotated]
    monkeypatch.setattr(speculative_stores, "free_host_bytes", lambda: free[0])
    monkeypatch.setattr(speculative_stores, "_CHECK_S", 0.01)
    with rig(3) as one, closing(new_spares(one, 0, freed)) as spares:
        spares.set_limit(3 * BUCKET_BYTES, least_free=BUCKET_BYTES)
        assert spares.prepare(one.buckets) == 3
        assert not freed
        free[0] = 10
        soon(lambda: spares.num_bytes == 0)
        assert len(freed) == 3
    assert not any(thread.name == "twinflow-memory" for thread in threading.enumerate())


def test_page_locked_memory_takes_the_place_of_speculative_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Store] = []
    nbytes = 1 << 26
    monkeypatch.setattr(speculative_stores, "free_host_bytes", lambda: nbytes)
    monkeypatch.setattr(speculative_stores, "_CHECK_S", 3600.0)
    with rig(3) as one, closing(new_spares(one, 0, freed)) as spares:
        spares.set_limit(3 * BUCKET_BYTES, least_free=BUCKET_BYTES)
        spares.prepare(one.buckets)
        Device().pinned(nbytes // 2, torch.uint8)
        assert not freed
        Device().pinned(nbytes, torch.uint8)
        assert len(freed) == 1


def test_a_speculative_store_needs_a_weight_slot_where_weights_do() -> None:
    with rig(1, torch.float16) as one, closing(new_spares(one, 1 << 20)) as spares:
        assert spares.nbytes(one.buckets[0]) == one.buckets[0].nbytes + NUMEL * 2


def test_speculative_stores_that_no_bucket_would_use_are_given_back() -> None:
    freed: list[Store] = []
    with rig(3) as one, closing(new_spares(one, 2 * BUCKET_BYTES, freed)) as spares:
        assert spares.prepare(one.buckets) == 2  # as far as the bytes go
        assert spares.num_bytes == 2 * BUCKET_BYTES
        assert spares.prepare(one.buckets) == 0
        assert spares.prepare(one.buckets[:1]) == 0  # the others have moved to the device
        assert spares.num_bytes == BUCKET_BYTES
        assert len(freed) == 1
        assert spares.prepare([]) == 0
        assert spares.num_bytes == 0
        assert len({id(store) for store in freed}) == 2
        assert one.executor.take_speculative_store(one.plans[0].layout) is None


def test_where_memory_is_short_fewer_speculative_stores_do() -> None:
    made: list[Store] = []
    with rig(3) as one:

        def make(plan: BucketPlan) -> Store:
            if made:
                raise MemoryError
            made.append(one.updater.new_store(plan))
            return made[0]

        with closing(SpeculativeStores(one.executor, make, made.append, 1 << 20)) as spares:
            spares.prepare(one.buckets)
            assert (spares.num_bytes, spares.max_bytes) == (BUCKET_BYTES, BUCKET_BYTES)
            assert [one.executor.take_speculative_store(one.plans[0].layout) is None for _ in range(2)] == [False, True]


def test_moments_of_events_are_in_order() -> None:
    """Spans of one stream do not overlap, and an update follows its copy out and comes before its copy back."""
    with rig(3) as one:
        one.device.trace.start()
        one.device.delay("out", 0.001)
        one.step(0)
        spans = one.executor._spans(0, 0.0)
        for name in ("out", "in", "update"):
            own = sorted((span.start_s, span.end_s) for span in spans if span.name == name)
            assert len(own) == 3
            assert all(a[1] <= b[0] for a, b in pairwise(own))
        for bucket in range(3):
            out, update, back = (
                next(span for span in spans if span.name == name and span.args["bucket"] == bucket)
                for name in ("out", "update", "in")
            )
            assert out.end_s <= update.start_s <= update.end_s <= back.start_s
