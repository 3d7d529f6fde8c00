# SPDX-License-Identifier: Apache-2.0
"""Timers for the parts of a step: DeepSpeed's `wall_clock_breakdown`.

On a GPU a timer is two events in the current stream. It measures the time that the GPU spends on the work between them,
including waits, and not the time for queueing that work. Only `means_ms` waits for events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

NAMES: Final = ("forward", "backward", "step", "wait")
MANY_EVENTS: Final = 256  # above this number, completed events are read and reused


class Clock:
    """Timestamps on the device. They are read later, because reading a CUDA event at once would stall the queue."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None

    def now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two timestamps. Waits until the device has reached the second one."""
        if self._device is None:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Timers:
    """Mean milliseconds per step of each part, over the steps since the last call of `means_ms`."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the device of the model, on which times are measured. Default: the current GPU, if there is one."""
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device if device is not None and device.type == "cuda" else None
        self._started: dict[str, Any] = {}  # a time on the host, or an event
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._total_s: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._num_steps = 0

    def start(self, name: str) -> None:
        """Start the timer `name`. An earlier start without a stop is discarded."""
        self._started[name] = time.perf_counter() if self._device is None else self._record(self._device)

    def stop(self, name: str) -> None:
        """Stop the timer `name`. A stop of "step" also counts a step."""
        before = self._started.pop(name)
        self._num_steps += name == "step"
        if isinstance(before, float):
            self.add(name, time.perf_counter() - before)
            return
        assert self._device is not None
        self._pending.append((name, before, self._record(self._device)))
        while len(self._pending) > MANY_EVENTS and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            self._read()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the block of the `with` statement, also if it raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere to the timer `name`."""
        self._total_s[name] = self._total_s.get(name, 0.0) + seconds

    def means_ms(self) -> dict[str, float]:
        """Mean milliseconds per step of every timer since the last call. Waits for the last event.

        The number of steps is the number of stops of "step". Several forwards and backwards may belong to one step.
        """
        if self._pending:
            self._pending[-1][2].synchronize()
        while self._pending:
            self._read()
        means = {name: 1000.0 * total / max(1, self._num_steps) for name, total in self._total_s.items()}
        self._total_s = dict.fromkeys(self._total_s, 0.0)
        self._num_steps = 0
        return means

    def line(self) -> str:
        """The result of `means_ms` as a line for a log. Like `means_ms`, this starts a new mean."""
        steps = f"{self._num_steps} step{'s' if self._num_steps != 1 else ''}"
        times = "".join(f" | {name}: {value:.2f}" for name, value in self.means_ms().items())
        return f"time (ms), mean of {steps}{times}"

    def _record(self, device: torch.device) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def _read(self) -> None:
        name, before, after = self._pending.popleft()
        self.add(name, before.elapsed_time(after) / 1000.0)
        self._free += [before, after]
