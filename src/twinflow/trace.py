"""Spans of the offload runtime: the times of work on the host and on the GPU, on one clock.

GPU times on the host's clock: two CUDA events give a difference, not a time. An anchor is an event whose time is also
known on `time.perf_counter()`. A GPU span is placed by its distance to the anchor of its device. This distance is a
float32 in milliseconds, and the two clocks drift. The error is about 10 us after 100 s and 0.3 ms after an hour. Call
`anchor_gpu()` again when a long run is idle. A span belongs to the last anchor before it.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from twinflow.errors import invalid_value

Value = int | float | str

Source = weakref.WeakMethod[Callable[[int, float], "list[Span]"]]

# All spans of a disabled trace share this context, so that they allocate nothing.
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
            expected = f"at least start_s, which is {self.start_s}"
            raise invalid_value(f"The end_s of span {self.name!r}", self.end_s, expected)


class Trace:
    """Records spans from any thread. Before `start()` it is disabled and has almost no cost."""

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise invalid_value("capacity", capacity, "a whole number >= 1")
        self.enabled = False
        self._lock = threading.Lock()
        self._entries: deque[Span | _GpuSpan] = deque(maxlen=capacity)
        self._num_recorded = 0
        self._anchors: dict[int, _Anchor] = {}  # the latest anchor of each device
        self._sources: list[tuple[Source, int | None]] = []  # recorders of other spans, which `spans` collects

    def start(self) -> None:
        """Starts recording and keeps earlier spans. With CUDA, synchronizes once to anchor the current device."""
        if torch.cuda.is_available():
            self.anchor_gpu()
        self.enabled = True

    def stop(self) -> None:
        """Stops recording and keeps the spans. A span that is open now is recorded when it ends."""
        self.enabled = False

    def clear(self) -> None:
        """Deletes all spans."""
        self._pull()
        with self._lock:
            self._entries.clear()
            self._num_recorded = 0

    @property
    def num_dropped(self) -> int:
        """The number of spans that were dropped, oldest first, because more than `capacity` were recorded."""
        with self._lock:
            return self._num_recorded - len(self._entries)

    def span(self, name: str, track: str, **args: Value) -> AbstractContextManager[None]:
        """A context that records the time of its block, also if the block raises an exception."""
        return _Open(self, name, track, args) if self.enabled else _OFF

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Value) -> None:
        """Records a span with known times."""
        if self.enabled:
            self._record(Span(name, track, start_s, end_s, args))

    def gpu(self, name: str, track: str, before: torch.cuda.Event, after: torch.cuda.Event, **args: Value) -> None:
        """Records the GPU's work between two events, which were made with `enable_timing=True` and are recorded
        already.

        This method never waits: `spans()` reads the times. The events must not be recorded again before that.
        """
        if self.enabled:
            device = before.device
            assert device is not None, f"gpu span {name!r}: record both events on their stream first"
            self._record(_GpuSpan(name, track, before, after, args, device.index, self._anchors.get(device.index)))

    def add_source(self, source: Source, device: int | None) -> None:
        """Adds a source of spans, such as the native executor. `source` is a weak method that takes an anchor of its
        GPU and returns the spans since its last call. `device` is the index of that GPU, or None for the CPU, whose
        spans use the host's clock.
        """
        self._sources.append((source, device))

    def _pull(self) -> None:
        for source, device in self._sources:
            take = source()
            if take is None:
                continue
            handle, at_s = 0, 0.0
            if device is not None and self._anchors:  # Without an anchor, nothing has been recorded.
                if device not in self._anchors:  # Another device was current when recording started.
                    self.anchor_gpu(device)
                anchor = self._anchors[device]
                handle, at_s = anchor.event.cuda_event, anchor.at_s
            for span in take(handle, at_s):
                self._record(span)

    def anchor_gpu(self, device: int | None = None) -> None:
        """Ties the GPU's clock to the host's clock for GPU spans from now on. Synchronizes the device."""
        index = torch.cuda.current_device() if device is None else device
        self._anchors[index] = _new_anchor(index)

    def spans(self) -> list[Span]:
        """All spans sorted by their start. Waits for GPU spans that have not ended yet."""
        self._pull()
        with self._lock:
            entries = list(self._entries)
        # The lock is not held here: waiting for the GPU must not block threads that record.
        pending = [entry for entry in entries if isinstance(entry, _GpuSpan)]
        late = {index: _new_anchor(index) for index in {span.device for span in pending if span.anchor is None}}
        resolved = {id(span): _resolve(span, late) for span in pending}
        with self._lock:
            kept = (resolved.get(id(entry), entry) for entry in self._entries)
            self._entries = deque(kept, maxlen=self._entries.maxlen)  # Releases the events.
        spans = [entry if isinstance(entry, Span) else resolved[id(entry)] for entry in entries]
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def _record(self, entry: Span | _GpuSpan) -> None:
        with self._lock:
            self._entries.append(entry)
            self._num_recorded += 1


@dataclass(frozen=True)
class _Anchor:
    """A point in time on both clocks."""

    event: torch.cuda.Event
    at_s: float


@dataclass(frozen=True, eq=False)
class _GpuSpan:
    """A span whose times are not read from the GPU yet. It keeps its two events alive."""

    name: str
    track: str
    before: torch.cuda.Event
    after: torch.cuda.Event
    args: Mapping[str, Value]
    device: int
    anchor: _Anchor | None


class _Open:
    """The context of a span, which records it at its end."""

    __slots__ = ("_args", "_name", "_start_s", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: Mapping[str, Value]) -> None:
        self._trace = trace
        self._name = name
        self._track = track
        self._args = args

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.perf_counter()
        self._trace._record(Span(self._name, self._track, self._start_s, end_s, self._args))


def _new_anchor(device: int) -> _Anchor:
    """The most precise of a few measurements. The event is between two readings of the host's clock."""
    tries = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # Otherwise the event would wait for queued work.
        for _ in range(5):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before_s = time.perf_counter()
            event.record()
            event.synchronize()
            after_s = time.perf_counter()
            tries.append((after_s - before_s, _Anchor(event, (before_s + after_s) / 2)))
    return min(tries, key=lambda attempt: attempt[0])[1]


def _resolve(span: _GpuSpan, late: Mapping[int, _Anchor]) -> Span:
    """The span with its times. `late`: new anchors for devices that had none."""
    span.before.synchronize()
    span.after.synchronize()
    if span.anchor is not None:
        start_s = span.anchor.at_s + span.anchor.event.elapsed_time(span.before) / 1e3
    else:
        start_s = late[span.device].at_s - span.before.elapsed_time(late[span.device].event) / 1e3
    # The length comes from the span's own events. They are close together, so the float32 is precise enough.
    return Span(span.name, span.track, start_s, start_s + span.before.elapsed_time(span.after) / 1e3, span.args)


def busy_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans ran."""
    return math.fsum(end - start for start, end in _union(spans))


def overlap_s(spans_a: Iterable[Span], spans_b: Iterable[Span]) -> float:
    """Seconds in which one of `spans_a` and one of `spans_b` ran at the same time."""
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
    """The spans as disjoint intervals in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

    Each track is a thread. Threads are numbered by name, so that two runs with the same tracks look alike. Times keep
    the zero of `time.perf_counter()`, so that traces of several processes of one machine can be combined.
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
    """Writes `chrome_trace` to a file atomically."""
    path = Path(path)
    if not path.parent.is_dir():
        raise invalid_value("The directory of the trace", str(path.parent), "an existing directory", "Create it first.")
    text = json.dumps(chrome_trace(spans), allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Value) -> Value:
    """A number that is not finite as text, because JSON has no such numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
