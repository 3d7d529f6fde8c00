# SPDX-License-Identifier: Apache-2.0
"""`ratio="auto"` on simulated machines: how fast the chosen placement is, how soon it is chosen, what changes do."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from auto_support import GB, Clock, PlayedRuntime, played, rates, run, until_settled
from twin_support import matrix_but

from twinflow.offload.plan import HOST, RESIDENT
from twinflow.offload.step_timer import StepMarks
from twinflow.optim.auto import ChangeWatch
from twinflow.planner.simulate import Timing

PROBED = rates(5.4e9)  # AdamW with fp32 state on 16 cores
SHORT, MEDIUM, LONG = Timing(0.063, 0.127), Timing(0.18, 0.37), Timing(0.72, 1.45)  # 1, 4 and 16 x 2048 tokens
TIMINGS = {"short": SHORT, "medium": MEDIUM, "long": LONG}
GPU_BYTES = {"large": 140 * GB, "small": 30 * GB}  # for state: all of it, or a part
CLIPPED: dict[str, Callable[[int], bool] | None] = {
    "no clipping": None,
    "never clipped": lambda step: False,
    "every step clipped": lambda step: True,
    "every third step clipped": lambda step: step % 3 == 0,
}
SHARES = {"no clipping": 0.0, "never clipped": 0.0, "every step clipped": 1.0, "every third step clipped": 1 / 3}
# Rates in training, relative to those that were measured without training.
MACHINES = {"as measured": 1.0, "slower": 0.6, "much slower": 0.3, "faster": 2.0, "much faster": 20.0}


def better_s(clock: Clock, runtime: PlayedRuntime, share: float) -> float:
    """The better of ratio 0, if that fits, and ratio 1."""
    places = [bucket.plan.place for bucket in runtime.buckets]
    found = []
    for place in (HOST, RESIDENT):
        for bucket in runtime.buckets:
            bucket.plan = replace(bucket.plan, place=place)
        if place == HOST or runtime.used(RESIDENT) + runtime.activation_bytes < 0.95 * runtime.gpu_bytes:
            runtime.make_stores()
            found.append(clock.step_s(share=share))
    for bucket, place in zip(runtime.buckets, places, strict=True):
        bucket.plan = replace(bucket.plan, place=place)
    runtime.make_stores()
    return min(found)


CASES = list(itertools.product(TIMINGS, MACHINES, CLIPPED, GPU_BYTES))
QUICK = [
    ("short", "slower", "never clipped", "large"),
    ("medium", "slower", "every step clipped", "large"),
    ("medium", "as measured", "no clipping", "small"),
    ("long", "much slower", "every third step clipped", "large"),
    ("medium", "much faster", "never clipped", "small"),
]


@pytest.mark.parametrize(("timing", "machine", "clipping", "gpu"), matrix_but(QUICK, CASES))
def test_never_slower_than_the_better_of_0_and_1(
    monkeypatch: pytest.MonkeyPatch, timing: str, machine: str, clipping: str, gpu: str
) -> None:
    real, share, is_clipped = rates(5.4e9 * MACHINES[machine]), SHARES[clipping], CLIPPED[clipping]
    options: dict[str, Any] = {"clips": is_clipped is not None, "clipped": is_clipped, "gpu_bytes": GPU_BYTES[gpu]}
    placement, runtime, clock = played(monkeypatch, PROBED, real, TIMINGS[timing], **options)
    num_steps = until_settled(placement, clock)
    if share in (0.0, 1.0):  # otherwise the times of steps differ
        assert num_steps <= 12
    assert clock.step_s(share=share) <= 1.02 * better_s(clock, runtime, share)


def test_a_host_that_hides_everything_keeps_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing moves, and the machine is not measured."""
    caplog.set_level(logging.INFO, logger="twinflow")
    placement, runtime, clock = played(monkeypatch, PROBED, PROBED, Timing(3.0, 6.0))
    monkeypatch.setattr(placement, "_measure", None)
    assert until_settled(placement, clock) == 5
    assert runtime.num_moves == 0
    assert caplog.messages == [
        "ratio auto: 1.00 of the state on the host, 9.039 s a step; forward and backward alone 9.000 s"
    ]


def test_one_line_says_what_was_chosen_and_gained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twinflow")
    options: dict[str, Any] = {"clips": True, "clipped": lambda step: True}
    placement, _, clock = played(monkeypatch, PROBED, rates(4e9), MEDIUM, **options)
    until_settled(placement, clock)
    (line,) = caplog.messages
    number = r"\d+\.\d{3} s"
    assert re.fullmatch(
        rf"ratio auto: 0\.\d\d of the state on the host, {number} a step; all on the host {number} \(\+\d+%\), "
        rf"(0\.\d\d|none) on the host {number} \(\+\d+%\); forward and backward alone {number}",
        line,
    ), line


def test_a_disturbed_step_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first steps takes three times as long in one of the runs."""
    for disturbed in range(1, 12):
        placement, runtime, clock = played(monkeypatch, PROBED, rates(4e9), SHORT, num_buckets=8)
        clock.disturbed = lambda step, disturbed=disturbed: 3.0 if step == disturbed else 1.0
        until_settled(placement, clock)
        assert clock.step_s() <= 1.02 * better_s(clock, runtime, 0.0), disturbed


@pytest.mark.parametrize("clipping", ["never clipped", "every step clipped"])
@pytest.mark.parametrize("factor", [0.9, 1.12, 1.3])
def test_times_alone_that_are_wrong_hide_no_placement(
    monkeypatch: pytest.MonkeyPatch, factor: float, clipping: str
) -> None:
    """Forward and backward alone are timed in the first steps, in which other things may take time too."""
    options: dict[str, Any] = {"clips": True, "clipped": CLIPPED[clipping]}
    placement, runtime, clock = played(monkeypatch, PROBED, PROBED, MEDIUM, **options)
    clock.disturbed = lambda step: factor if clock.is_quiet else 1.0
    assert until_settled(placement, clock) <= 12
    assert clock.step_s(share=SHARES[clipping]) <= 1.02 * better_s(clock, runtime, SHARES[clipping])


@pytest.mark.parametrize(("num_micro", "first", "later"), [(2, 0.75, 0.25), (4, 0.5, 0.1), (8, 0.375, 0.25)])
def test_micro_batches_of_different_lengths(
    monkeypatch: pytest.MonkeyPatch, num_micro: int, first: float, later: float
) -> None:
    """All steps are equally long. The last micro-batch, which is timed, is longer in the steps that are timed alone."""
    timing = Timing(0.33 / num_micro, 0.67 / num_micro, num_micro)
    placement, runtime, clock = played(monkeypatch, rates(3e9), rates(3e9), timing)
    monkeypatch.setattr(runtime, "settings", replace(runtime.settings, accumulation_steps=num_micro))

    def take() -> StepMarks:
        start, last_s = clock.now, first if clock.is_quiet else later
        clock.now = end = start + clock.step_s(is_quiet=clock.is_quiet)
        clock.num_steps += 1
        clock.is_quiet = False
        return StepMarks(start, (end - last_s, end - last_s / 2), end, end)

    monkeypatch.setattr(runtime.timer, "take", take)
    until_settled(placement, clock)
    assert "alone -" not in placement.report
    assert "alone 0.000" not in placement.report


def test_a_shorter_step_after_a_move_does_not_prolong_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no backlog then. Watched first: steps 3, 6 and 9."""
    placement, runtime, clock = played(monkeypatch, PROBED, rates(4e9), SHORT, num_buckets=8)
    clock.disturbed = lambda step: 0.96 if step in (3, 6, 9) else 1.0
    assert until_settled(placement, clock) <= 12
    assert clock.step_s() <= 1.02 * better_s(clock, runtime, 0.0)


@pytest.mark.parametrize("is_varied", [False, True])
def test_memory_stays_free_for_larger_inputs(monkeypatch: pytest.MonkeyPatch, is_varied: bool) -> None:
    """If the first steps have inputs of different sizes."""
    slow = rates(1e9, link_bytes=5e9)
    placement, runtime, clock = played(monkeypatch, slow, slow, SHORT, gpu_bytes=40 * GB, num_buckets=12)
    runtime.activation_bytes = 16 * GB
    clock.disturbed = lambda step: 1.0 + 0.5 * (step % 3) * is_varied
    until_settled(placement, clock)
    free = runtime.gpu_bytes - runtime.activation_bytes - runtime.used(RESIDENT)
    assert free >= 2 * GB + 4 * GB * is_varied
    assert free < 6 * GB + 4 * GB * is_varied  # a bucket has 2.9 GB


@pytest.mark.parametrize(
    ("before", "after"), [(LONG, SHORT), (MEDIUM, LONG), (SHORT, replace(SHORT, micro_batches=8))], ids=str
)
def test_another_batch_size_is_another_choice(
    monkeypatch: pytest.MonkeyPatch, before: Timing, after: Timing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twinflow")
    placement, runtime, clock = played(monkeypatch, PROBED, rates(4e9), before, num_buckets=12)
    run(placement, clock, 100)
    num_moves = runtime.num_moves
    clock.timing = after
    runtime.settings = replace(runtime.settings, accumulation_steps=after.micro_batches)
    run(placement, clock, 60)
    assert any("steps have changed" in line for line in caplog.messages)
    assert clock.step_s() <= 1.02 * better_s(clock, runtime, 0.0)
    num_moves_after = runtime.num_moves
    run(placement, clock, 500)
    assert runtime.num_moves == num_moves_after  # the new batch size is the usual one now
    assert num_moves_after - num_moves <= 4 * len(runtime.buckets)


def test_a_change_of_clipping_is_another_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"clips": True, "clipped": lambda step: step >= 100, "num_buckets": 12}
    placement, runtime, clock = played(monkeypatch, PROBED, rates(4e9), LONG, **options)
    run(placement, clock, 100)
    num_moves = runtime.num_moves
    run(placement, clock, 60)
    assert runtime.num_moves > num_moves
    assert clock.step_s(share=1.0) <= 1.02 * better_s(clock, runtime, 1.0)


def test_state_does_not_move_back_and_forth(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Batches of two sizes, for 60 steps each, again and again."""
    caplog.set_level(logging.INFO, logger="twinflow")
    placement, _, clock = played(monkeypatch, PROBED, rates(4e9), LONG, num_buckets=4)
    for part in range(50):
        clock.timing = (LONG, SHORT)[part % 2]
        run(placement, clock, 60)
    assert sum("steps have changed" in line for line in caplog.messages) <= 5  # after 64, 128, ... 1024 steps


def test_changes_must_last() -> None:
    watch = ChangeWatch()
    assert not watch.has_changed(1.0, 0.6, 0.0)
    for step_s, backward_s, share in [(1.3, 0.6, 0.0), (1.1, 0.65, 0.2), (1.0, 0.6, 0.5), (1.0, 0.6, 0.0)]:
        assert not watch.has_changed(step_s, backward_s, share)
    assert not watch.has_changed(0.8, 0.6, 0.0)
    assert watch.has_changed(1.0, 0.5, 0.0)  # another sign of the same change
    watch.forget()
    assert not watch.has_changed(1.0, 0.5, 0.0)
