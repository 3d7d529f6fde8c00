"""Spans of the offload runtime: what ran when, on the host and on the GPU, on one clock.

How GPU times get onto the host's clock. Two CUDA events give a difference, not a time. An anchor is an event whose
moment is also known on `time.perf_counter()`; a GPU span is placed by its distance to the anchor of its device. That
distance is a float32 of milliseconds, and the two clocks drift: after 100 s it is good to about 10 us, after an hour to
0.3 ms. Call `anchor_gpu()` again where a long run is idle anyway; a span belongs to the last anchor before it.
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

# Shared by every `span` of a trace that is off: nothing is made and nothing is kept.
_OFF: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(frozen=True)
class Span:
    """One piece of work on one track (a thread or a stream); times are of `time.perf_counter()`."""

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Value]

    def __post_init__(self) -> None:
        if not self.start_s <= self.end_s:
            raise invalid_value(f"span {self.name!r}: end_s", self.end_s, f"a time from start_s, {self.start_s}, on")


class Trace:
    """Records spans from any thread. It is off until `start()`, and then costs next to nothing."""

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise invalid_value("capacity", capacity, "a whole number >= 1")
        self.enabled = False
        self._lock = threading.Lock()
        self._entries: deque[Span | _GpuSpan] = deque(maxlen=capacity)
        self._num_recorded = 0
        self._anchors: dict[int, _Anchor] = {}  # the latest of each device
        self._sources: list[tuple[Source, int | None]] = []  # spans that are recorded elsewhere, taken over in `spans`

    def start(self) -> None:
        """Record from now on, beside what is kept already; with CUDA, synchronise once to anchor the current device."""
        if torch.cuda.is_available():
            self.anchor_gpu()
        self.enabled = True

    def stop(self) -> None:
        """Record no more; what was recorded stays. A span that is open now is still kept when it ends."""
        self.enabled = False

    def clear(self) -> None:
        """Forget every span."""
        self._pull()
        with self._lock:
            self._entries.clear()
            self._num_recorded = 0

    @property
    def num_dropped(self) -> int:
        """How many spans, the oldest, are gone because more than `capacity` were recorded."""
        with self._lock:
            return self._num_recorded - len(self._entries)

    def span(self, name: str, track: str, **args: Value) -> AbstractContextManager[None]:
        """Time the block it wraps, also when that raises."""
        return _Open(self, name, track, args) if self.enabled else _OFF

    def add(self, name: str, track: str, start_s: float, end_s: float, **args: Value) -> None:
        """Record a span that was timed elsewhere."""
        if self.enabled:
            self._record(Span(name, track, start_s, end_s, args))

    def gpu(self, name: str, track: str, before: torch.cuda.Event, after: torch.cuda.Event, **args: Value) -> None:
        """Record the GPU's work between two events, made with `enable_timing=True` and recorded already.

        Never waits: the times are read in `spans()`. Until then the events must not be recorded again.
        """
        if self.enabled:
            device = before.device
            assert device is not None, f"gpu span {name!r}: record both events on their stream first"
            self._record(_GpuSpan(name, track, before, after, args, device.index, self._anchors.get(device.index)))

    def add_source(self, source: Source, device: int | None) -> None:
        """Spans of the native executor: a weak method that gives, for an anchor of its GPU, what it has recorded since
        the last call. `device`: the index of that GPU; None on the CPU, whose spans have the host's clock."""
        self._sources.append((source, device))

    def _pull(self) -> None:
        for source, device in self._sources:
            take = source()
            if take is None:
                continue
            handle, at_s = 0, 0.0
            if device is not None and self._anchors:  # without any, nothing has been recorded
                if device not in self._anchors:  # another device was the current one when recording began
                    self.anchor_gpu(device)
                anchor = self._anchors[device]
                handle, at_s = anchor.event.cuda_event, anchor.at_s
            for span in take(handle, at_s):
                self._record(span)

    def anchor_gpu(self, device: int | None = None) -> None:
        """Tie the GPU's clock to the host's, for the GPU spans recorded from now on. Synchronises the device."""
        index = torch.cuda.current_device() if device is None else device
        self._anchors[index] = _new_anchor(index)

    def spans(self) -> list[Span]:
        """All spans, by their start. Waits for the GPU spans that have not ended yet."""
        self._pull()
        with self._lock:
            entries = list(self._entries)
        # Outside the lock: waiting for the GPU must not stop the threads that record.
        pending = [entry for entry in entries if isinstance(entry, _GpuSpan)]
        late = {index: _new_anchor(index) for index in {span.device for span in pending if span.anchor is None}}
        resolved = {id(span): _resolve(span, late) for span in pending}
        with self._lock:
            kept = (resolved.get(id(entry), entry) for entry in self._entries)
            self._entries = deque(kept, maxlen=self._entries.maxlen)  # lets go of the events
        spans = [entry if isinstance(entry, Span) else resolved[id(entry)] for entry in entries]
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def _record(self, entry: Span | _GpuSpan) -> None:
        with self._lock:
            self._entries.append(entry)
            self._num_recorded += 1


@dataclass(frozen=True)
class _Anchor:
    """A moment on both clocks."""

    event: torch.cuda.Event
    at_s: float


@dataclass(frozen=True, eq=False)
class _GpuSpan:
    """A span whose times are still with the GPU; it keeps its two events alive."""

    name: str
    track: str
    before: torch.cuda.Event
    after: torch.cuda.Event
    args: Mapping[str, Value]
    device: int
    anchor: _Anchor | None


class _Open:
    """A span that has begun."""

    __slots__ = ("_args", "_name", "_start_s", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: Mapping[str, Value]) -> None:
        self._trace, self._name, self._track, self._args = trace, name, track, args

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.perf_counter()
        self._trace._record(Span(self._name, self._track, self._start_s, end_s, self._args))


def _new_anchor(device: int) -> _Anchor:
    """The tightest of a few tries: the event lies between the two readings of the host's clock."""
    tries = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # else the event would wait for work already queued
        for _ in range(5):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before_s = time.perf_counter()
            event.record()
            event.synchronize()
            after_s = time.perf_counter()
            tries.append((after_s - before_s, _Anchor(event, (before_s + after_s) / 2)))
    return min(tries, key=lambda attempt: attempt[0])[1]


def _resolve(span: _GpuSpan, late: Mapping[int, _Anchor]) -> Span:
    """The span with its times; `late` anchors, made just now, are for devices that had none."""
    span.before.synchronize()
    span.after.synchronize()
    if span.anchor is not None:
        start_s = span.anchor.at_s + span.anchor.event.elapsed_time(span.before) / 1e3
    else:
        start_s = late[span.device].at_s - span.before.elapsed_time(late[span.device].event) / 1e3
    # Its length from its own two events, which are close together: the float32 is exact enough there.
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
    """The spans as disjoint stretches of time, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans as Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

    Each track is a thread, numbered by name, so that two runs with the same tracks look the same. Times keep
    `time.perf_counter()`'s zero: traces of several processes on one machine can be laid side by side.
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
    """Write `chrome_trace` to a file, which is there whole or not at all."""
    path = Path(path)
    if not path.parent.is_dir():
        raise invalid_value("directory of the trace", str(path.parent), "a directory that exists", "Create it first")
    text = json.dumps(chrome_trace(spans), allow_nan=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Value) -> Value:
    """A number that is not finite as text: strict JSON has none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
