# SPDX-License-Identifier: Apache-2.0
"""Progress display of a run: a line that is redrawn on a terminal, plain lines in a log file or a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from twinflow.monitor.metrics import StepRecord

MIN_BAR: Final = 8
GAP: Final = 2


class TrainProgress:
    """Shows loss, speed, memory, load and the remaining time.

    On a terminal one line is redrawn. In a log file or a pipe a line is printed every `plain_every` steps. `first_step`
    is greater than 1 in a resumed run.
    """

    def __init__(self, console: Console, total_steps: int, plain_every: int, first_step: int = 1) -> None:
        self.console = console
        self.total_steps = total_steps
        self.plain_every = plain_every
        self.first_step = first_step
        self._elapsed_s = 0.0
        self._steps_done = 0
        self._line = LiveLine(total_steps, first_step - 1)
        self._live = Live(self._line, console=console, refresh_per_second=5) if console.is_terminal else None

    def step(self, record: StepRecord) -> None:
        self._elapsed_s += record.step_s
        self._steps_done += 1
        left_s = (self.total_steps - record.step) * self._elapsed_s / self._steps_done
        if self._live is not None:
            self._line.completed = record.step
            self._line.fields = live_fields(record, self.total_steps, left_s)
        elif record.step in (1, self.first_step, self.total_steps) or record.step % self.plain_every == 0:
            line = plain_line(record, self.total_steps, left_s)
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a separate line. On a terminal it appears above the progress line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> TrainProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


@dataclass(frozen=True)
class Field:
    """One value on the progress line."""

    text: str
    rank: int  # if the line is too long, fields with the highest rank are omitted first


class LiveLine:
    """A progress bar and the fields that fit beside it."""

    def __init__(self, total_steps: int, completed: int) -> None:
        self.total_steps = total_steps
        self.completed = completed
        self.fields: Sequence[Field] = [Field(f"{completed}/{total_steps}", 0)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = fitting(self.fields, options.max_width - MIN_BAR - GAP)
        table = Table.grid(padding=(0, GAP, 0, 0), expand=True)
        table.add_column(ratio=1)
        for _ in shown:
            table.add_column(no_wrap=True)
        bar = ProgressBar(total=self.total_steps, completed=self.completed)
        table.add_row(bar, *(Text(field.text) for field in shown))
        yield table


def fitting(fields: Sequence[Field], width: int) -> list[Field]:
    """The fields with the lowest ranks that fit into `width` together, at least one, in the order of `fields`."""
    kept = list(fields)
    while len(kept) > 1 and sum(len(field.text) + GAP for field in kept) > width:
        kept.remove(max(kept, key=lambda field: field.rank))
    return kept


def live_fields(record: StepRecord, total_steps: int, left_s: float) -> list[Field]:
    """The fields of the progress line, from left to right."""
    return [
        Field(f"{record.step}/{total_steps}", 0),
        Field(f"loss {record.loss:.4f}", 1),
        *([Field(f"balance {record.balance:.2f}", 9)] if record.balance > 0 else []),
        Field(speed(record), 3),
        *(Field(text, rank) for text, rank in zip(machine_texts(record), (4, 5, 6, 7, 8), strict=True) if text),
        Field(f"left {duration(left_s)}", 2),
    ]


def machine_texts(record: StepRecord) -> tuple[str, str, str, str, str]:
    """Texts for FLOPS, GPU memory, host memory, CPU load and ratio. Empty if not measured, or for ratio 1."""
    return (
        f"{record.tflops:.{1 if record.tflops >= 1 else 3}f} TFLOPS" if record.tflops > 0 else "",
        f"GPU {gib(record.gpu_bytes)}" if record.gpu_bytes > 0 else "",
        f"host {gib(record.host_bytes)}" if record.host_bytes > 0 else "",
        f"{record.cores_busy:.1f} cores" if record.cores_busy > 0 else "",
        f"ratio {record.host_share:.2f}" if record.host_share < 1.0 else "",
    )


def plain_line(record: StepRecord, total_steps: int, left_s: float) -> str:
    """The line of a log file for one step, in aligned columns."""
    width = len(str(total_steps))
    parts = [
        f"step {record.step:>{width}}/{total_steps}",
        f"loss {record.loss:7.4f}",
        f"lr {record.lr:.2e}",
        f"{record.step_s * 1000:6.1f} ms",
        speed(record),
        *([f"balance {record.balance:.2f}"] if record.balance > 0 else []),
        *(text for text in machine_texts(record) if text),
        f"left {duration(left_s)}",
    ]
    if record.skipped:
        parts.append(f"skipped, loss scale {record.loss_scale:g}")
    return "  ".join(parts)


def speed(record: StepRecord) -> str:
    return f"{record.num_tokens / record.step_s:,.0f} tokens/s" if record.step_s > 0 else "- tokens/s"


def gib(num_bytes: int) -> str:
    """A number of bytes as text, in GiB, or in MiB if it is less than 1 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Seconds as m:ss, or as h:mm:ss from one hour on, or "-" if not finite."""
    if not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
