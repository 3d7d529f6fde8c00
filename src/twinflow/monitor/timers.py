"""Where the time of a step goes: DeepSpeed's `wall_clock_breakdown`.

On a GPU a timer is two events in the current stream, so it tells what the GPU was busy with, or waited for, and not
how long it took to queue that. Nobody waits for an event before `means_ms` is asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

NAMES: Final = ("forward", "backward", "step", "wait")
MANY_EVENTS: Final = 256  # from so many on, those that the GPU has passed are read and used again


class Timers:
    """Mean milliseconds a step, over the steps since they were last asked for."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the model's; on a GPU the times are the GPU's. Default: the current GPU where there is one."""
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device if device is not None and device.type == "cuda" else None
        self._started: dict[str, float | torch.cuda.Event] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._total_s: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._num_steps = 0

    def start(self, name: str) -> None:
        """Begin a stretch; one that was begun before and never ended is forgotten."""
        self._started[name] = time.perf_counter() if self._device is None else self._record(self._device)

    def stop(self, name: str) -> None:
        """End the stretch."""
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
        """Time the block it wraps, also when that raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._total_s[name] = self._total_s.get(name, 0.0) + seconds

    def means_ms(self) -> dict[str, float]:
        """Milliseconds a step of every name, after which a new window begins. Waits for the last event.

        There are as many steps as `step` was measured: several forwards and backwards may belong to one.
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
        """`means_ms` for a log."""
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
