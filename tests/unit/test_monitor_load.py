# SPDX-License-Identifier: Apache-2.0
"""Timers, CPU load and memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from twinflow.monitor import metrics, timers
from twinflow.monitor.metrics import LoadMeter, available_bytes
from twinflow.monitor.timers import Timers

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def measure(timers: Timers, clock: Clock, name: str, seconds: float) -> None:
    with timers.measure(name):
        clock.now_s += seconds


def test_times_are_means_over_the_steps_of_a_window(clock: Clock) -> None:
    watch = Timers(CPU)
    for _ in range(4):
        for _ in range(2):  # two micro-batches a step
            measure(watch, clock, "forward", 0.010)
            measure(watch, clock, "backward", 0.020)
        measure(watch, clock, "step", 0.003)
    watch.add("wait", 0.004)
    assert watch.means_ms() == pytest.approx({"forward": 20.0, "backward": 40.0, "step": 3.0, "wait": 1.0})
    assert watch.means_ms() == {"forward": 0.0, "backward": 0.0, "step": 0.0, "wait": 0.0}


def test_the_line_of_a_log(clock: Clock) -> None:
    watch = Timers(CPU)
    measure(watch, clock, "forward", 0.0125)
    measure(watch, clock, "step", 0.001)
    text = "time (ms), mean of 1 step | forward: 12.50 | backward: 0.00 | step: 1.00 | wait: 0.00"
    assert watch.line() == text
    assert watch.line().startswith("time (ms), mean of 0 steps | forward: 0.00")


def test_a_stretch_that_raised_is_counted(clock: Clock) -> None:
    watch = Timers(CPU)

    def fail() -> None:
        with watch.measure("forward"):
            clock.now_s += 1.0
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert watch.means_ms()["forward"] == 1000.0


def test_a_stretch_that_was_never_ended_is_forgotten(clock: Clock) -> None:
    watch = Timers(CPU)
    watch.start("backward")
    clock.now_s += 5.0
    measure(watch, clock, "backward", 0.5)
    assert watch.means_ms()["backward"] == 500.0


class FakeEvent:
    """An event that the GPU passes when it is told to; counts how often somebody waited."""

    passed_until_s = float("inf")
    clock = Clock()
    num_waits = 0
    num_made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.num_made += 1

    def record(self, stream: object) -> None:
        self.at_s = FakeEvent.clock.now_s

    def query(self) -> bool:
        return self.at_s <= FakeEvent.passed_until_s

    def synchronize(self) -> None:
        FakeEvent.num_waits += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1000.0 * (other.at_s - self.at_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    FakeEvent.clock, FakeEvent.num_waits, FakeEvent.num_made = clock, 0, 0
    FakeEvent.passed_until_s = float("inf")
    return clock


def test_on_a_gpu_nobody_waits_before_the_times_are_asked_for(gpu: Clock) -> None:
    watch = Timers(torch.device("cuda", 0))
    for _ in range(10):
        measure(watch, gpu, "forward", 0.010)
        measure(watch, gpu, "step", 0.002)
    assert FakeEvent.num_waits == 0
    assert watch.means_ms() == pytest.approx({"forward": 10.0, "backward": 0.0, "step": 2.0, "wait": 0.0})
    assert FakeEvent.num_waits == 1


def test_events_are_used_again(gpu: Clock) -> None:
    watch = Timers(torch.device("cuda", 0))
    for _ in range(5 * timers.MANY_EVENTS):
        measure(watch, gpu, "step", 0.001)
    assert FakeEvent.num_made <= 2 * timers.MANY_EVENTS + 4
    assert FakeEvent.num_waits == 0
    assert watch.means_ms()["step"] == pytest.approx(1.0)


def test_events_that_the_gpu_has_not_passed_are_kept(gpu: Clock) -> None:
    FakeEvent.passed_until_s = -1.0
    watch = Timers(torch.device("cuda", 0))
    for _ in range(2 * timers.MANY_EVENTS):
        measure(watch, gpu, "step", 0.001)
    assert FakeEvent.num_made == 4 * timers.MANY_EVENTS
    assert watch.means_ms()["step"] == pytest.approx(1.0)


def test_cores_busy_counts_all_threads() -> None:
    meter = LoadMeter(CPU)
    time.sleep(0.2)
    assert meter.look().cores_busy < 0.5
    start_s = time.perf_counter()
    threads = [threading.Thread(target=spin, args=(0.2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy, passed_s = meter.look().cores_busy, time.perf_counter() - start_s
    assert busy > 0.8 * 0.4 / passed_s  # however long the machine took to give two threads 0.2 s each
    assert meter.look().cores_busy >= 0.0


def spin(seconds: float) -> None:
    """Use that much CPU time of the calling thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(200_000).sum()


def test_load_is_the_change_of_both_clocks(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    cpu = Clock()
    monkeypatch.setattr(time, "process_time", cpu)
    meter = LoadMeter(CPU)
    clock.now_s, cpu.now_s = 2.0, 7.0
    assert meter.look().cores_busy == 3.5
    clock.now_s, cpu.now_s = 2.0 + 1e-5, 7.0  # too short to tell: the last value stands
    assert meter.look().cores_busy == 3.5
    clock.now_s, cpu.now_s = 3.0, 7.5
    assert meter.look().cores_busy == 0.5


def test_memory_of_host_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = LoadMeter(CPU).look()
    assert now.host_bytes > 2**20
    assert now.host_available_bytes > 2**20
    assert (now.gpu_bytes, now.gpu_peak_bytes) == (0, 0)

    stats = {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 9}
    resets: list[Any] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    meter = LoadMeter(torch.device("cuda", 0))
    first = meter.look()
    assert (first.gpu_bytes, first.gpu_peak_bytes) == (5, 9)
    stats["allocated_bytes.all.peak"] = 6
    assert meter.look().gpu_peak_bytes == 6
    assert meter.gpu_peak_bytes == 9
    assert resets == [torch.device("cuda", 0)] * 2


def test_available_memory_is_read_from_the_system(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  100 kB\nMemAvailable:   40 kB\nBuffers: 1 kB\n")
    assert available_bytes(path) == 40 * 1024
    path.write_text("MemTotal:  100 kB\n")
    assert available_bytes(path) == 0
    assert available_bytes(tmp_path / "none") == 0


def test_a_look_is_cheap_enough_for_every_step() -> None:
    meter = LoadMeter(CPU)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        meter.look()
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
    assert metrics.host_memory_bytes() > 0
