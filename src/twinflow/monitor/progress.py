"""What a run says while it goes on: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from twinflow.monitor.metrics import StepRecord


class TrainProgress:
    """Shows loss, speed and the time left.

    On a terminal one line is redrawn; in a log file or a pipe a line is printed every `plain_every` steps.
    """

    def __init__(self, console: Console, total_steps: int, plain_every: int) -> None:
        self.console = console
        self.total_steps = total_steps
        self.plain_every = plain_every
        self._elapsed_s = 0.0
        self._steps_done = 0
        self._bar = _live_bar(console) if console.is_terminal else None
        self._task = (
            self._bar.add_task("train", total=total_steps, loss="-", speed="-") if self._bar is not None else None
        )

    def step(self, record: StepRecord) -> None:
        """Report one finished step."""
        self._elapsed_s += record.step_s
        self._steps_done += 1
        speed = f"{record.num_tokens / record.step_s:,.0f} tokens/s" if record.step_s > 0 else "-"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, loss=f"{record.loss:.4f}", speed=speed)
        elif is_plain_step(record.step, self.total_steps, self.plain_every):
            left_s = (self.total_steps - record.step) * self._elapsed_s / self._steps_done
            self.console.print(plain_line(record, self.total_steps, speed, left_s), highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar when there is one."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> TrainProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def is_plain_step(step: int, total_steps: int, every: int) -> bool:
    """The first step, the last one, and every `every`-th between them."""
    return step == 1 or step == total_steps or step % every == 0


def plain_line(record: StepRecord, total_steps: int, speed: str, left_s: float) -> str:
    """One aligned line of a log."""
    width = len(str(total_steps))
    return (
        f"step {record.step:>{width}}/{total_steps}  loss {record.loss:7.4f}  lr {record.lr:.2e}  "
        f"{record.step_s * 1000:6.1f} ms  {speed}  left {duration(left_s)}"
    )


def duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _live_bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
