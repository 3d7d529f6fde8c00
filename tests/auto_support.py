# SPDX-License-Identifier: Apache-2.0
"""A world in which steps take as long as the planner's simulation says, for tests of `ratio="auto"`.

`Clock` replaces the times of steps: of a real optimizer on a CPU, or of `PlayedRuntime`, which has buckets and memory
but no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinflow.offload import reconfigure
from twinflow.offload.clipping import Limits
from twinflow.offload.plan import HOST, RESIDENT, BucketPlan
from twinflow.offload.settings import Settings
from twinflow.offload.step_timer import StepMarks
from twinflow.optim import auto
from twinflow.optim.auto import AutoPlacement, items_of, units_of
from twinflow.planner.formats import reserved_bytes, state_bytes
from twinflow.planner.machines import Rates
from twinflow.planner.simulate import ClipDecision, Play, Timing, Ways, predict

GB = 10**9
FORMATS = ("fp32", "bf16", "int8")


def rates(host_params: float, link_bytes: float = 50e9) -> Rates:
    host = dict.fromkeys(FORMATS, host_params)
    return Rates(link_bytes, link_bytes, link_bytes, host, host, device_bytes=4e12, flops=0.0)


class Clock:
    """Gives the marks of steps. `rates` are what the machine really does, whatever a probe has found."""

    def __init__(
        self, runtime: Any, rates: Rates, timing: Timing, clipped: Callable[[int], bool] | None = None
    ) -> None:
        self.runtime = runtime
        self.rates = rates
        self.timing = timing
        self.clipped = clipped or (lambda step: False)
        self.ahead_numel: Callable[[], int] = lambda: 0  # elements that can be updated before the norm is known
        self.disturbed: Callable[[int], float] = lambda step: 1.0  # the factor by which other work lengthens a step
        self.is_quiet = False
        self.now = 0.0
        self.num_steps = 0

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Replaces the times of the runtime."""
        wait = self.runtime.wait

        def waited() -> None:
            self.is_quiet = True
            wait()

        monkeypatch.setattr(self.runtime, "wait", waited)
        monkeypatch.setattr(self.runtime.timer, "take", self.take, raising=False)
        return self

    def step_s(self, places: list[str] | None = None, share: float = 0.0, is_quiet: bool = False) -> float:
        """What a step takes with the present or other places, if the share `share` of steps is clipped."""
        settings = self.runtime.settings
        items = items_of(units_of(self.runtime.buckets, False), self.timing, settings.early)
        if places is not None:
            items = [replace(item, place=place) for item, place in zip(items, places, strict=True)]
        decision = ClipDecision(settings.limits.any, self.ahead_numel(), share)
        if is_quiet:
            return Play(items, self.timing, self.rates, "fp32", decision, Ways()).step().step_s
        return predict(items, self.timing, self.rates, "fp32", decision, Ways()).step_s

    def take(self) -> StepMarks:
        share = float(self.num_steps > 0 and self.clipped(self.num_steps - 1))  # updates of the step before
        factor = self.disturbed(self.num_steps)
        step_s = self.step_s(share=share, is_quiet=self.is_quiet) * factor
        start = self.now
        self.now = end = start + step_s
        self.num_steps += 1
        self.is_quiet = False
        backward = end - self.timing.backward_s * factor
        num_parts = self.timing.micro_batches
        return StepMarks(start, (start if num_parts == 1 else backward - self.timing.forward_s, backward), end, end)


class PlayedRuntime:
    """A runtime without tensors: what `AutoPlacement` uses of one."""

    worker = None
    watches_gradients = False

    def __init__(self, num_buckets: int, numel: int, gpu_bytes: int, host_bytes: int, settings: Settings) -> None:
        plans = [BucketPlan(i, i, torch.bfloat16, (), numel // num_buckets) for i in range(num_buckets)]
        self.buckets: Any = [SimpleNamespace(plan=plan, deadline=plan.index, targets=[]) for plan in plans]
        self.settings = settings
        self.gpu_bytes = gpu_bytes  # for state and activations
        self.activation_bytes = 0
        self.host_bytes = host_bytes
        self.num_moves = 0
        self.timer = SimpleNamespace(start=lambda: None, begin_step=lambda: None)
        self.speculative_stores = SimpleNamespace(num_bytes=0, prepare=lambda buckets: 0)
        self.device = SimpleNamespace(
            reset_peak=lambda: None,
            capacity_bytes=lambda: self.gpu_bytes,
            peak_bytes=lambda: self.activation_bytes + self.used(RESIDENT),
            seconds=lambda start, end: end - start,
        )

    def used(self, place: str) -> int:
        return sum(nbytes(bucket.plan) for bucket in self.buckets if bucket.plan.place == place)

    def free_host_bytes(self) -> int:
        return self.host_bytes - self.used(HOST) - self.speculative_stores.num_bytes

    def wait(self) -> None:
        pass

    def wait_for_copies(self) -> None:
        pass

    def make_stores(self, _: Any = None) -> None:
        """Memory for updates before the clipping decision, as much as `TwinOptimizer` takes."""
        self.speculative_stores.num_bytes = 0
        if self.settings.limits.any:
            left = self.free_host_bytes()
            self.speculative_stores.num_bytes = min(self.used(HOST), left - reserved_bytes(left))


def nbytes(plan: BucketPlan) -> int:
    return int(getattr(state_bytes("fp32"), plan.place) * plan.numel)


def played(
    monkeypatch: pytest.MonkeyPatch,
    probed: Rates,
    real: Rates,
    timing: Timing,
    *,
    clips: bool = False,
    clipped: Callable[[int], bool] | None = None,
    numel: int = 3_430_000_000,
    gpu_bytes: int = 140 * GB,
    host_bytes: int = 125 * GB,
    num_buckets: int = 24,
) -> tuple[AutoPlacement, PlayedRuntime, Clock]:
    """An AutoPlacement over a played runtime. A step is `clipped(step)` in a run that clips."""
    settings = Settings(limits=Limits(1.0 if clips else None), early=True)
    runtime: Any = PlayedRuntime(num_buckets, numel, gpu_bytes, host_bytes, settings)
    clock = Clock(runtime, real, timing, clipped).attach(monkeypatch)
    clock.ahead_numel = lambda: int(runtime.speculative_stores.num_bytes / state_bytes("fp32").host)
    runtime.make_stores()
    monkeypatch.setattr(auto, "own_host_bytes", runtime.free_host_bytes)

    def move(_: Any, bucket: Any, place: str) -> None:
        bucket.plan = replace(bucket.plan, place=place)
        runtime.num_moves += 1

    monkeypatch.setattr(reconfigure, "move", move)
    return AutoPlacement(runtime, "fp32", nbytes, lambda: probed, runtime.make_stores), runtime, clock


def run(placement: AutoPlacement, clock: Clock, num_steps: int) -> None:
    for _ in range(num_steps):
        step = clock.num_steps
        placement.after_step(step > 0 and clock.clipped(step - 1))


def until_settled(placement: AutoPlacement, clock: Clock) -> int:
    """Steps until the first choice is made."""
    while not placement.is_settled:
        run(placement, clock, 1)
        assert clock.num_steps < 40
    return clock.num_steps
