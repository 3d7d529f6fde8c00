"""Numbers of a run as JSON lines: one record a line, readable while the run goes on and after it was killed."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from twinflow.monitor.files import keep_lines


@dataclass(frozen=True)
class StepRecord:
    """One training step."""

    step: int  # from 1
    loss: float
    lr: float
    grad_norm: float  # before clipping
    num_tokens: int
    # The three parts of a step, which do not overlap.
    forward_s: float
    backward_s: float
    update_s: float  # what the loop waited for the optimizer; the rest of the update runs beside the model
    host_bytes: int  # resident memory of the process after the step
    num_ahead: int = 0  # buckets that were updated before the gradient norm was known
    num_dropped: int = 0  # those of them that clipping, or a step that was skipped, made void
    num_held: int = 0  # buckets that waited for the norm
    # Zero below: not measured.
    tflops: float = 0.0  # of the model, a second, in 10^12
    gpu_bytes: int = 0  # most that was allocated on the GPU within the step
    host_available_bytes: int = 0  # what the machine could still give after the step
    cores_busy: float = 0.0  # CPU seconds of the process a second of the clock
    host_update_s: float = 0.0  # host busy with the update; runs beside the other parts, so it is not in `step_s`
    wait_s: float = 0.0  # the part of `update_s` in which a forward waited for new weights
    loss_scale: float = 1.0
    skipped: bool = False  # the step was not applied: its gradients were not finite
    tokens_total: int = 0  # seen since the run began, this step's included
    host_share: float = math.nan  # of the optimizer state after the step, the ratio in use; NaN: not known

    @property
    def step_s(self) -> float:
        """Seconds of work in this step; validation and reporting are not in it."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def is_finite(self) -> bool:
        """False when the step went wrong: its update was not applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class ValidRecord:
    """One measurement on text the training does not see."""

    step: int  # training steps done before it; 0 is the untrained model
    loss: float


Record = StepRecord | ValidRecord
_KINDS: Mapping[str, Callable[..., Record]] = {"step": StepRecord, "valid": ValidRecord}


class MetricsWriter:
    """Appends records to a file, each flushed, so that nothing is lost when the run dies.

    A run that is resumed after step `resume_after` will do the later steps again: their records are dropped, and so is
    a last line that was cut short. Until the new file is complete the old one stays.
    """

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        keep_lines(path, None if resume_after is None else lambda line: from_json(line).step <= resume_after)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def to_json(record: Record) -> str:
    """One line of strict JSON; a number that is not finite becomes null, which every reader accepts."""
    kind = "step" if isinstance(record, StepRecord) else "valid"
    fields = {name: None if not math.isfinite(value) else value for name, value in asdict(record).items()}
    return json.dumps({"kind": kind, **fields}, allow_nan=False)


def from_json(line: str) -> Record:
    """The record that `to_json` wrote; null comes back as NaN."""
    fields: dict[str, Any] = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    return kind(**{name: math.nan if value is None else value for name, value in fields.items()})


def read_metrics(path: Path) -> list[Record]:
    """All records of a run. A last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [from_json(line) for line in lines[:-1]]


def tokens_per_second(records: list[StepRecord]) -> float:
    """Training speed without the first step, which pays for allocations and first-touched memory."""
    steady = records[1:] or records
    seconds = sum(record.step_s for record in steady)
    return sum(record.num_tokens for record in steady) / seconds if seconds > 0 else 0.0


def share_ahead(records: list[StepRecord]) -> float:
    """Share of the updates that were done ahead of the gradient norm and kept; NaN where none was counted."""
    num_updates = sum(record.num_ahead + record.num_held for record in records)
    num_kept = sum(record.num_ahead - record.num_dropped for record in records)
    return num_kept / num_updates if num_updates else math.nan


def host_memory_bytes() -> int:
    """Resident memory of this process: now on Linux, the peak so far elsewhere."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
