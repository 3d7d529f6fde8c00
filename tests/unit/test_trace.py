# SPDX-License-Identifier: Apache-2.0
"""Spans: recording from many threads, GPU times on the host's clock, busy time and overlap, Chrome's format."""

from __future__ import annotations

import json
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinflow.trace import Span, Trace, busy_s, chrome_trace, overlap_s, write_chrome_trace


def spans(*times: tuple[float, float], track: str = "host") -> list[Span]:
    return [Span("work", track, start, end, {}) for start, end in times]


def test_a_trace_is_off_until_it_is_started() -> None:
    trace = Trace()
    with trace.span("update", track="host", bucket=3):
        pass
    trace.add("copy", "link", 0.0, 1.0)
    trace.gpu("copy", "link", None, None)  # type: ignore[arg-type]  # not even looked at
    assert not trace.enabled
    assert trace.spans() == []
    assert trace.span("a", track="host") is trace.span("b", track="host"), "off, a span makes nothing"


def test_spans_are_timed_and_sorted() -> None:
    trace = Trace()
    trace.start()
    before_s = time.perf_counter()
    with trace.span("outer", track="host", bucket=3, rule="adamw"), trace.span("inner", track="host"):
        time.sleep(0.002)
    after_s = time.perf_counter()
    trace.add("earlier", "link", before_s - 2.0, before_s - 1.0, num_bytes=7)
    earlier, outer, inner = trace.spans()
    assert (earlier.name, earlier.track, earlier.args) == ("earlier", "link", {"num_bytes": 7})
    assert (outer.name, outer.args) == ("outer", {"bucket": 3, "rule": "adamw"})
    assert before_s <= outer.start_s <= inner.start_s < inner.end_s <= outer.end_s <= after_s
    assert inner.end_s - inner.start_s >= 0.002


def test_a_span_is_kept_when_its_block_raises() -> None:
    trace = Trace()
    trace.start()
    with pytest.raises(RuntimeError, match="worker"), trace.span("update", track="host"):
        raise RuntimeError("worker")
    assert [span.name for span in trace.spans()] == ["update"]


def test_stop_and_clear() -> None:
    trace = Trace()
    trace.start()
    trace.add("a", "host", 0.0, 1.0)
    with trace.span("open", track="host"):
        trace.stop()
    trace.add("late", "host", 0.0, 1.0)
    assert [span.name for span in trace.spans()] == ["a", "open"]
    trace.clear()
    assert trace.spans() == []
    assert not trace.enabled
    trace.start()
    trace.add("b", "host", 0.0, 1.0)
    assert [span.name for span in trace.spans()] == ["b"]


def test_many_threads_record_at_once() -> None:
    trace, start = Trace(), threading.Barrier(8)
    trace.start()

    def record(worker: int) -> None:
        start.wait()
        for i in range(500):
            with trace.span("work", track=f"worker {worker}", index=i):
                pass

    threads = [threading.Thread(target=record, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        trace.spans()  # reading disturbs nobody
    for thread in threads:
        thread.join()
    found = trace.spans()
    assert len(found) == 4000
    assert {(span.track, span.args["index"]) for span in found} == {
        (f"worker {worker}", i) for worker in range(8) for i in range(500)
    }


def test_the_oldest_are_dropped_and_counted() -> None:
    trace = Trace(capacity=10)
    trace.start()
    for i in range(25):
        trace.add("work", "host", i, i + 1)
    assert [span.start_s for span in trace.spans()] == list(range(15, 25))
    assert trace.num_dropped == 15
    trace.clear()
    assert trace.num_dropped == 0


def test_bad_values() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        Trace(capacity=0)
    trace = Trace()
    trace.start()
    with pytest.raises(ValueError, match=r"end_s of span 'copy' is 1\.0, but must be at least start_s \(2\.0\)"):
        trace.add("copy", "link", 2.0, 1.0)
    with pytest.raises(ValueError, match="end_s of span 'copy' is nan"):
        Span("copy", "link", 0.0, float("nan"), {})


class FakeGpu:
    """A GPU whose clock is not the host's, and whose events cost `latency_s` to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, zero_s: float, latency_s: float = 0.0) -> None:
        self.zero_s, self.latency_s, self.num_syncs = zero_s, latency_s, 0
        gpu = self

        class FakeEvent:
            device: Any = None

            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at(time.perf_counter())

            def at(self, host_s: float, device: int = 0) -> FakeEvent:
                self.clock_s, self.device = host_s - gpu.zero_s, torch.device("cuda", device)
                return self

            def synchronize(self) -> None:
                gpu.num_syncs += 1
                time.sleep(gpu.latency_s)

            def elapsed_time(self, other: FakeEvent) -> float:
                assert self.device == other.device
                return (other.clock_s - self.clock_s) * 1e3

        self.Event = FakeEvent
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())

    def pair(self, start_s: float, end_s: float, device: int = 0) -> tuple[Any, Any]:
        events = [self.Event(enable_timing=True).at(at_s, device) for at_s in (start_s, end_s)]
        return events[0], events[1]


def test_gpu_spans_land_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, trace = FakeGpu(monkeypatch, zero_s=12345.678), Trace()
    trace.start()
    num_syncs, now_s = gpu.num_syncs, time.perf_counter()
    trace.gpu("out", "copy-out", *gpu.pair(now_s + 0.25, now_s + 0.5), bucket=1)
    trace.add("update", "host", now_s + 0.4, now_s + 0.6)
    assert gpu.num_syncs == num_syncs, "recording never waits"
    out, update = trace.spans()
    assert (out.name, out.track, out.args) == ("out", "copy-out", {"bucket": 1})
    assert out.start_s == pytest.approx(now_s + 0.25, abs=2e-3)
    assert out.end_s - out.start_s == pytest.approx(0.25, abs=1e-9)
    assert overlap_s([out], [update]) == pytest.approx(0.1, abs=2e-3)


def test_events_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, trace = FakeGpu(monkeypatch, zero_s=-5.0), Trace()
    trace.start()
    trace.gpu("out", "copy-out", *gpu.pair(1.0, 2.0))
    first, num_syncs = trace.spans(), gpu.num_syncs
    assert trace.spans() == first
    assert gpu.num_syncs == num_syncs
    trace.clear()
    assert trace.spans() == []


def test_an_anchor_lies_between_the_readings_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time an event takes to come back is the error, not all of it."""
    gpu, trace = FakeGpu(monkeypatch, zero_s=99.0, latency_s=0.01), Trace()
    trace.start()
    trace.gpu("out", "copy-out", *gpu.pair(7.0, 8.0))
    assert trace.spans()[0].start_s == pytest.approx(7.005, abs=4e-3)


def test_a_new_anchor_corrects_a_clock_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, trace = FakeGpu(monkeypatch, zero_s=0.0), Trace()
    trace.start()
    trace.gpu("before", "copy-out", *gpu.pair(1.0, 2.0))
    gpu.zero_s = 0.5
    trace.anchor_gpu()
    trace.gpu("after", "copy-out", *gpu.pair(3.0, 4.0))
    before, after = trace.spans()
    assert before.start_s == pytest.approx(1.0, abs=2e-3)
    assert after.start_s == pytest.approx(3.0, abs=2e-3)


class Elsewhere:
    """Records spans of its own, as the native executor does."""

    def __init__(self) -> None:
        self.anchors: list[tuple[int, float]] = []

    def take(self, anchor: int, anchor_s: float) -> list[Span]:
        self.anchors.append((anchor, anchor_s))
        return [Span("copy", "out", anchor_s, anchor_s + 1.0, {})]


def test_spans_of_others_get_the_anchor_of_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, trace = FakeGpu(monkeypatch, zero_s=3.0), Trace()
    monkeypatch.setattr(gpu.Event, "cuda_event", property(id), raising=False)
    sources = {device: Elsewhere() for device in (None, 0, 1)}
    for device, source in sources.items():
        trace.add_source(weakref.WeakMethod(source.take), device)
    forgotten = Elsewhere()
    trace.add_source(weakref.WeakMethod(forgotten.take), 0)
    del forgotten
    assert len(trace.spans()) == 3  # recording has not begun: nobody has to wait for a GPU
    assert {source.anchors[0] for source in sources.values()} == {(0, 0.0)}
    assert gpu.num_syncs == 0
    trace.start()
    trace.spans()
    assert sources[None].anchors[1] == (0, 0.0)
    assert sources[0].anchors[1] != sources[1].anchors[1]
    assert all(anchor for anchor, _ in (sources[0].anchors[1], sources[1].anchors[1]))


def test_a_device_without_an_anchor_is_placed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, trace = FakeGpu(monkeypatch, zero_s=50.0), Trace()
    trace.start()
    monkeypatch.setattr(gpu.Event, "record", lambda event: event.at(time.perf_counter(), device=1))
    trace.gpu("other", "copy-out", *gpu.pair(3.0, 4.0, device=1))
    assert trace.spans()[0].start_s == pytest.approx(3.0, abs=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_gpu_and_the_host_on_one_clock() -> None:
    trace = Trace()
    trace.start()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with trace.span("host", track="host"):
        before.record()
        torch.cuda._sleep(100_000_000)
        after.record()
        start_s = time.perf_counter()
        trace.gpu("sleep", "compute", before, after)
        recorded_s = time.perf_counter() - start_s
        assert not after.query(), "recording must not wait"
        after.synchronize()
    assert recorded_s < 0.01
    host = next(span for span in trace.spans() if span.name == "host")
    gpu = next(span for span in trace.spans() if span.name == "sleep")
    assert gpu.end_s - gpu.start_s > 0.02
    assert host.start_s - 5e-4 < gpu.start_s < gpu.end_s < host.end_s + 5e-4
    assert overlap_s([gpu], [host]) == pytest.approx(busy_s([gpu]), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_span_without_an_anchor() -> None:
    trace = Trace()
    trace.enabled = True  # as start() would, without its anchor
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with trace.span("host", track="host"):
        before.record()
        torch.cuda._sleep(10_000_000)
        after.record()
        after.synchronize()
    trace.gpu("sleep", "compute", before, after)
    host, gpu = trace.spans()
    assert host.start_s - 5e-4 < gpu.start_s < gpu.end_s < host.end_s + 5e-4


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0.0),
        ([(1, 3)], 2.0),
        ([(1, 3), (2, 4)], 3.0),
        ([(1, 3), (3, 4)], 3.0),
        ([(5, 6), (1, 2)], 2.0),
        ([(1, 10), (2, 3), (4, 5)], 9.0),
        ([(1, 1)], 0.0),
    ],
)
def test_busy(times: list[tuple[float, float]], expected: float) -> None:
    assert busy_s(spans(*times)) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [(0, 1)], 0.0),
        ([(0, 2)], [(1, 3)], 1.0),
        ([(0, 1)], [(1, 2)], 0.0),
        ([(0, 10)], [(1, 2), (3, 5)], 3.0),
        ([(0, 4), (2, 6)], [(1, 3), (2, 5)], 4.0),
        ([(0, 2), (4, 6)], [(1, 5)], 2.0),
    ],
)
def test_overlap(a: list[tuple[float, float]], b: list[tuple[float, float]], expected: float) -> None:
    assert overlap_s(spans(*a), spans(*b)) == overlap_s(spans(*b), spans(*a)) == expected


whole_times = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


@given(whole_times, whole_times)
def test_against_counting_every_second(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    seconds_a = {second for start, end in a for second in range(start, end)}
    seconds_b = {second for start, end in b for second in range(start, end)}
    assert busy_s(spans(*a)) == len(seconds_a)
    assert overlap_s(spans(*a), spans(*b)) == len(seconds_a & seconds_b)


def some_spans() -> list[Span]:
    return [
        Span("back", "copy-in", 3.0, 3.5, {"bucket": 1}),
        Span("forward", "compute", 1.0, 3.0, {}),
        Span("update", "host", 1.5, 2.25, {"bucket": 1, "norm": float("inf"), "rule": "adamw"}),
    ]


def test_chrome_trace() -> None:
    trace = chrome_trace(some_spans())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "compute", 2: "copy-in", 3: "host"}
    timed = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in timed] == [
        ("forward", "compute", 1e6, 2e6),
        ("update", "host", 1.5e6, 0.75e6),
        ("back", "copy-in", 3e6, 0.5e6),
    ]
    assert timed[1]["args"] == {"bucket": 1, "norm": "inf", "rule": "adamw"}
    assert {e["pid"] for e in events} == {0}


def test_the_order_of_recording_does_not_show() -> None:
    shuffled = some_spans()
    random.Random(1).shuffle(shuffled)
    assert chrome_trace(shuffled) == chrome_trace(some_spans())


def test_the_file_is_strict_json_and_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_chrome_trace(some_spans(), path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse) == chrome_trace(some_spans())
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_chrome_trace(some_spans(), path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_the_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"directory of the trace is .*missing.*Create it first"):
        write_chrome_trace([], tmp_path / "missing" / "trace.json")
