# SPDX-License-Identifier: Apache-2.0
"""Reports of an engine during training: log lines, scalars for monitors, times, and a profile of one step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import Tensor

from twinflow.config.schema import FlopsProfiler
from twinflow.engine.base import EngineBase
from twinflow.monitor.flops import FlopsProfile, profile
from twinflow.monitor.timers import Timers
from twinflow.monitor.writers import Fanout

LOGGER = logging.getLogger("twinflow")
_MOST_LATE = 64  # number of scalars whose copies may be running; with more, the oldest is waited for


class LateScalar:
    """A scalar tensor that is copied to the host on the current stream. Reading it waits until the copy is done."""

    def __init__(self, value: Tensor) -> None:
        self._host = value.detach().to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(value.device))

    def done(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def get(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)


@dataclass(frozen=True)
class _Late:
    samples: int
    loss: LateScalar
    lr: float
    loss_scale: float


class Reports:
    """Writes the reports. In a step, only log lines and scalars over _MOST_LATE steps old wait for the device."""

    def __init__(
        self,
        steps_per_print: int | None = None,
        writer: Fanout | None = None,
        timers: Timers | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.every = steps_per_print
        self._writer = writer
        self._timers = timers
        self._profiler = profiler
        self._loss: Tensor | None = None  # sum over the micro-batches of this step
        self._late: deque[_Late] = deque()
        self._waited_s = 0.0  # total time that forwards have waited for weights

    def forward(self, engine: EngineBase) -> AbstractContextManager[object]:
        if self._profiler is not None:
            self._profiler.before_forward(engine)
        return self.measure("forward")

    def measure(self, name: str) -> AbstractContextManager[object]:
        """A context that measures the time of "forward", "backward" or the optimizer's "step"."""
        return self._timers.measure(name) if self._timers is not None else nullcontext()

    def add_loss(self, loss: Tensor) -> None:
        """Adds a micro-batch's share to the loss of the step."""
        if self._writer is not None or self.every:
            loss = loss.detach().float()
            self._loss = loss if self._loss is None else self._loss + loss

    def after_step(self, engine: EngineBase, lr: float) -> None:
        """Writes the scalars of a step with learning rate `lr`, and a log line if one is due."""
        if self._timers is not None and engine.optimizer is not None:
            waited_s = engine.optimizer.runtime.waited_s
            self._timers.add("wait", waited_s - self._waited_s)
            self._waited_s = waited_s
        if self._profiler is not None:
            self._profiler.after_step()
        loss, self._loss = self._loss, None
        if loss is None:
            return
        late = LateScalar(loss)
        if self._writer is not None:
            # This is the loss scale of this step. Reading the next one would wait for the device.
            scale = engine.optimizer.current_loss_scale if engine.optimizer is not None else 1.0
            self._late.append(_Late(engine.global_samples, late, lr, scale))
            self._write(all_of_them=False)
        if self.every and engine.global_steps % self.every == 0:
            self._print(engine, late)

    def _print(self, engine: EngineBase, loss: LateScalar) -> None:
        rates = ", ".join(f"{lr:.4g}" for lr in engine.get_lr())
        norm = engine.get_global_grad_norm()
        text = f"step {engine.global_steps}, skipped {engine.skipped_steps}, loss {loss.get():.5g}, lr {rates}"
        LOGGER.info(text + (f", gradient norm {norm:.4g}" if norm is not None else ""))
        if self._timers is not None:
            LOGGER.info(self._timers.line())

    def _write(self, all_of_them: bool) -> None:
        assert self._writer is not None
        while self._late and (all_of_them or self._late[0].loss.done() or len(self._late) > _MOST_LATE):
            late = self._late.popleft()
            tags = {"train_loss": late.loss.get(), "lr": late.lr, "loss_scale": late.loss_scale}
            self._writer.write([(f"Train/Samples/{tag}", value, late.samples) for tag, value in tags.items()])

    @property
    def enabled(self) -> bool:
        """Whether this rank writes to a monitor."""
        return self._writer is not None

    def write_events(self, events: Sequence[tuple[str, SupportsFloat, int]]) -> None:
        """Writes the user's events (tag, value, number of samples so far) after the scalars of all earlier steps."""
        if self._writer is not None:
            self._write(all_of_them=True)
            self._writer.write([(tag, float(value), samples) for tag, value, samples in events])

    def close(self) -> None:
        """Writes the remaining scalars and closes the monitor."""
        if self._writer is not None:
            self._write(all_of_them=True)
            self._writer.close()


class Profiler:
    """Counts the operations of one step, and writes the result to a file or to the log."""

    def __init__(self, options: FlopsProfiler) -> None:
        self._options = options
        self._open: FlopsProfile | None = None
        if options.output_file:
            Path(options.output_file).open("a").close()  # a wrong path raises here, before the profiled step

    def before_forward(self, engine: EngineBase) -> None:
        """Starts the profile before the first forward of the step."""
        if self._open is None and engine.part == 0 and engine.global_steps + 1 == self._options.profile_step:
            self._open = profile(engine.module).__enter__()

    def after_step(self) -> None:
        """Ends and shows the profile after the step."""
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__()
            options = self._options
            shape = (options.module_depth, options.top_modules, options.detailed)
            if options.output_file:
                try:
                    opened.report.write(Path(options.output_file), *shape)
                except OSError as error:  # for example a full disk, which must not end the run
                    LOGGER.warning(f"The profile could not be written: {error}. The run continues.")
            else:
                LOGGER.info(opened.report.text(*shape))
