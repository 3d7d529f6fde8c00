# SPDX-License-Identifier: Apache-2.0
"""Records spans of the offload runtime: the start and end of each piece of work on the host and on the GPU, on one
clock.

Conversion of GPU times to the host's clock: two CUDA events give a time difference, not a point in time. An anchor is a
CUDA event whose time on `time.perf_counter()` is known. The start of a GPU span is the time of its device's anchor plus
the time difference between the anchor and the first event of the span. CUDA gives the difference as a float32 of
milliseconds, and the two clocks drift: the error is about 10 us after 100 s and 0.3 ms after an hour. Call
`anchor_gpu()` again when a long run is idle. A span uses the last anchor before it.

Threads: any thread may record spans; `_lock` guards the recorded entries. Recording never waits for the GPU. `spans()`
reads the times of GPU spans outside of the lock, so that threads can record meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from twinflow.errors import invalid_value
from twinflow.files import write_whole

Value = int | float | str

Source = weakref.WeakMethod[Callable[[int, float], "list[Span]"]]

# Every `span` of a trace that is off returns this object, so that nothing is allocated.
_OFF: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(frozen=True)
class Span:
    """One piece of work on one track (a thread or a stream). Times are those of `time.perf_counter()`."""

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Value]

    def __post_init__(self) -> None:
        if not self.start_s <= self.end_s:
            raise invalid_value(f"end_s of span {self.name!r}", self.end_s, f"at least start_s ({self.start_s})")


class Trace:
    """Records spans from any thread. A trace is off until `start()`. While it is off, recording costs almost nothing.

    `capacity`: the number of spans that are kept. The oldest are dropped.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise invalid_value("capacity", capacity, "a whole number >= 1")
        self.enabled = False
        self._lock = threading.Lock()
        self._entries: deque[Span | _GpuSpan] = deque(maxlen=capacity)
        self._num_recorded = 0
        self._anchors: dict[int, _Anchor] = {}  # the latest anchor of each device
        self._sources: list[tuple[Source, int | None]] = []  # native executors, whose spans `spans` copies

    def start(self) -> None:
        """Start recording. Earlier spans are kept. With CUDA, this synchronises the current device for an anchor."""
        if torch.cuda.is_available():
            self.anchor_gpu()
        self.enabled = True

    def stop(self) -> None:
        """Stop recording. Recorded spans are kept. A span that has begun is still recorded when it ends."""
        self.enabled = False

    def clear(self) -> None:
        """Delete all recorded spans."""
        self._pull()
        with self._lock:
            self._entries.clear()
            self._num_recorded = 0

    @property
    def num_dropped(self) -> int:
        """Number of the oldest spans that were dropped because more than `capacity` were recorded."""
        with self._lock:
            return self._num_recorded - len(self._entries)

    def span(self, name: str, track: str, **args: Value) -> AbstractContextManager[None]:
        """Return a context manager that records the time of its body, also if the body raises."""
        return self._timed(name, track, args) if self.enabled else _OFF

    @contextmanager
    def _timed(self, name: str, track: str, args: Mapping[str, Value]) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._record(Span(name, track, start_s, time.perf_counter(), args))

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Value) -> None:
        """Records a span with known times."""
        if self.enabled:
            self._record(Span(name, track, start_s, end_s, args))

    def gpu(self, name: str, track: str, before: torch.cuda.Event, after: torch.cuda.Event, **args: Value) -> None:
        """Record the GPU's work between two events. They need `enable_timing=True` and must have been recorded.

        This never waits: `spans()` reads the times. Until then the events must not be recorded again.
        """
        if self.enabled:
            device = before.device
            assert device is not None, f"both events of GPU span {name!r} must be recorded on their stream first"
            self._record(_GpuSpan(name, track, before, after, args, device.index, self._anchors.get(device.index)))

    def add_source(self, source: Source, device: int | None) -> None:
        """Add a native executor that records spans itself.

        `source`: a weak reference to a method that takes an anchor (event handle and time) and returns the spans since
        the last call. `device`: the index of the GPU; None on the CPU, whose spans have the host's clock.
        """
        self._sources.append((source, device))

    def _pull(self) -> None:
        for source, device in self._sources:
            take = source()
            if take is None:
                continue
            handle, at_s = 0, 0.0
            if device is not None and self._anchors:  # without an anchor nothing has been recorded
                if device not in self._anchors:  # another device was the current device when recording began
                    self.anchor_gpu(device)
                anchor = self._anchors[device]
                handle, at_s = anchor.event.cuda_event, anchor.at_s
            for span in take(handle, at_s):
                self._record(span)

    def anchor_gpu(self, device: int | None = None) -> None:
        """Make an anchor for GPU spans that are recorded from now on. Synchronises the device."""
        index = torch.cuda.current_device() if device is None else device
        self._anchors[index] = _new_anchor(index)

    def spans(self) -> list[Span]:
        """Return all spans, sorted by start. Waits for GPU spans that have not ended yet."""
        self._pull()
        with self._lock:
            entries = list(self._entries)
        # This is outside of the lock, because waiting for the GPU must not block threads that record.
        pending = [entry for entry in entries if isinstance(entry, _GpuSpan)]
        late = {index: _new_anchor(index) for index in {span.device for span in pending if span.anchor is None}}
        resolved = {id(span): _resolve(span, late) for span in pending}
        with self._lock:
            kept = (resolved.get(id(entry), entry) for entry in self._entries)
            self._entries = deque(kept, maxlen=self._entries.maxlen)  # the CUDA events are freed
        spans = [entry if isinstance(entry, Span) else resolved[id(entry)] for entry in entries]
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def _record(self, entry: Span | _GpuSpan) -> None:
        with self._lock:
            self._entries.append(entry)
            self._num_recorded += 1


@dataclass(frozen=True)
class _Anchor:
    """A CUDA event and its time on the host's clock."""

    event: torch.cuda.Event
    at_s: float


@dataclass(frozen=True, eq=False)
class _GpuSpan:
    """A GPU span whose times have not been read. It keeps its two events alive."""

    name: str
    track: str
    before: torch.cuda.Event
    after: torch.cuda.Event
    args: Mapping[str, Value]
    device: int
    anchor: _Anchor | None


def _new_anchor(device: int) -> _Anchor:
    """Return the most exact of five anchors. The event lies between two readings of the host's clock."""
    tries = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # otherwise the event would wait for work that is already queued
        for _ in range(5):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before_s = time.perf_counter()
            event.record()
            event.synchronize()
            after_s = time.perf_counter()
            tries.append((after_s - before_s, _Anchor(event, (before_s + after_s) / 2)))
    return min(tries, key=lambda attempt: attempt[0])[1]


def _resolve(span: _GpuSpan, late: Mapping[int, _Anchor]) -> Span:
    """Read the times of a GPU span. `late`: anchors that were made just now, for devices that had none."""
    span.before.synchronize()
    span.after.synchronize()
    if span.anchor is not None:
        start_s = span.anchor.at_s + span.anchor.event.elapsed_time(span.before) / 1e3
    else:
        start_s = late[span.device].at_s - span.before.elapsed_time(late[span.device].event) / 1e3
    # The length comes from the span's own two events: they are close together, so the float32 is exact enough.
    return Span(span.name, span.track, start_s, start_s + span.before.elapsed_time(span.after) / 1e3, span.args)


def busy_s(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans ran."""
    return math.fsum(end - start for start, end in _union(spans))


def overlap_s(spans_a: Iterable[Span], spans_b: Iterable[Span]) -> float:
    """Return the seconds in which a span of `spans_a` and a span of `spans_b` ran at the same time."""
    a, b = _union(spans_a), _union(spans_b)
    shared, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        shared.append(max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0])))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return math.fsum(shared)


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the disjoint intervals that the spans cover, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the spans in Chrome's trace format, for ui.perfetto.dev and chrome://tracing.

    Each track becomes a thread. Threads are numbered by name, so that two runs with the same tracks look the same.
    Times are those of `time.perf_counter()`, so traces of several processes on one machine can be compared.
    """
    spans = list(spans)
    tids = {track: tid for tid, track in enumerate(sorted({span.track for span in spans}), start=1)}
    events: list[dict[str, Any]] = []
    for track, tid in tids.items():
        thread = {"ph": "M", "pid": 0, "tid": tid}
        events.append({**thread, "name": "thread_name", "args": {"name": track}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for span in sorted(spans, key=lambda span: (span.start_s, tids[span.track], -span.end_s)):
        place = {"name": span.name, "ph": "X", "pid": 0, "tid": tids[span.track]}
        times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        events.append({**place, **times, "args": {key: _plain(value) for key, value in span.args.items()}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> None:
    """Write `chrome_trace` to a file. The file appears only when it is complete."""
    path = Path(path)
    if not path.parent.is_dir():
        raise invalid_value("The directory of the trace", str(path.parent), "an existing directory", "Create it first.")
    write_whole(path, json.dumps(chrome_trace(spans), allow_nan=False))


def _plain(value: Value) -> Value:
    """Return a number that is not finite as text, because strict JSON does not have such numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
