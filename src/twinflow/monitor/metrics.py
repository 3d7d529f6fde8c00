# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as JSON lines, and measurements of load and memory. The file has one record per line and is readable
during the run and after a crash.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from twinflow.files import LineFile, keep_lines, parse_json, read_lines
from twinflow.native.cgroup import parse_meminfo, read_text


@dataclass(frozen=True)
class StepRecord:
    step: int  # from 1
    loss: float
    lr: float
    grad_norm: float  # before clipping
    num_tokens: int
    # The three parts of a step, which do not overlap.
    forward_s: float
    backward_s: float
    # time in which the loop waited for the optimizer; the rest of the update overlaps with forward and backward
    update_s: float
    host_bytes: int  # resident memory of the process after the step
    # A bucket is a group of parameters that are updated together.
    num_ahead: int = 0  # buckets that were updated before the gradient norm was known
    num_dropped: int = 0  # buckets of `num_ahead` whose update was discarded because the step was clipped or skipped
    num_held: int = 0  # buckets whose update waited for the gradient norm
    # In the fields below, zero means that the value was not measured.
    tflops: float = 0.0  # FLOPs of the model per second, in units of 10^12
    gpu_bytes: int = 0  # peak of the memory allocated on the GPU during the step
    host_available_bytes: int = 0  # memory that the machine could still allocate after the step
    cores_busy: float = 0.0  # CPU seconds of the process per second
    # time in which the host computed updates; it overlaps with the other parts and is not in `step_s`
    host_update_s: float = 0.0
    wait_s: float = 0.0  # the part of `update_s` in which a forward waited for new weights
    loss_scale: float = 1.0
    skipped: bool = False  # the update was not applied because gradients were not finite
    tokens_total: int = 0  # tokens since the start of the run, including this step
    balance: float = 0.0  # load-balancing loss of routers, on the first rank: 1 if all experts are used equally
    host_share: float = math.nan  # share of the optimizer state on the host (the ratio) after the step; NaN: not known

    @property
    def step_s(self) -> float:
        """Duration of the step in seconds, without validation and reporting."""
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True)
class ValidRecord:
    """One measurement of the validation loss."""

    step: int  # number of training steps before the measurement; 0: the untrained model
    loss: float


Record = StepRecord | ValidRecord
_KINDS: Mapping[str, type[StepRecord] | type[ValidRecord]] = {"step": StepRecord, "valid": ValidRecord}
_REMEDY = "Remove the line, restore the file from a copy, or start a new run in another folder."


class MetricsWriter:
    """Appends records to a file. Each record is flushed, so that no record is lost when the run crashes. If the disk is
    full, `warn` gets a message, and the records are written when there is space again.

    `resume_after`: the last step of the checkpoint from which the run resumes. Records of later steps are removed,
    because these steps will run again. An incomplete last line is removed too. The old file stays until the new one is
    complete.
    """

    def __init__(
        self, path: Path, resume_after: int | None = None, warn: Callable[[str], object] = warnings.warn
    ) -> None:
        keep_lines(path, None if resume_after is None else lambda line: from_json(line).step <= resume_after)
        self._file = LineFile(path, warn)

    def write(self, record: Record) -> None:
        self._file.add(to_json(record) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def to_json(record: Record) -> str:
    """The record as one line of strict JSON. Numbers that are not finite become null, because JSON has no NaN."""
    kind = "step" if isinstance(record, StepRecord) else "valid"
    fields = {name: None if not math.isfinite(value) else value for name, value in asdict(record).items()}
    return json.dumps({"kind": kind, **fields}, allow_nan=False)


def from_json(line: str) -> Record:
    """Parse a line that `to_json` wrote. null becomes NaN. ValueError if `to_json` cannot have written it."""
    try:
        values = parse_json(line)
        name = values.pop("kind", None) if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in _KINDS:
            raise ValueError(f"The key 'kind' must be one of {', '.join(_KINDS)}")
        kind: Callable[..., Record] = _KINDS[name]
        own = {field.name: field for field in fields(_KINDS[name])}
        missing = [name for name, field in own.items() if field.default is MISSING and name not in values]
        wrong = [name for name, value in values.items() if name not in own or not _is_number(name, value)]
        if missing or wrong:
            raise ValueError(f"{(missing + wrong)[0]!r} is missing, unknown, or not a number")
    except ValueError as error:
        raise ValueError(f"This is not a record of metrics ({error}). {_REMEDY}") from error
    return kind(**{name: math.nan if value is None else value for name, value in values.items()})


def _is_number(name: str, value: Any) -> bool:
    """Whether a field of a record can have this value."""
    if name == "step":
        return type(value) is int and 0 <= value < 2**63
    if name == "skipped":
        return isinstance(value, bool)
    is_whole = type(value) is int and abs(value) < 2**63
    return value is None or is_whole or (isinstance(value, float) and math.isfinite(value))


def read_metrics(path: Path) -> list[Record]:
    """All records of a run. An incomplete last line is skipped. ValueError with the number of a damaged line."""
    return [_record(path, number, line) for number, line in read_lines(path) if line.endswith(b"\n")]


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return from_json(line.decode("utf-8", "replace"))
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def tokens_per_second(records: list[StepRecord]) -> float:
    """Training speed without the first of several steps, which is slow because of allocations and page faults."""
    steady = records[1:] or records
    seconds = sum(record.step_s for record in steady)
    return sum(record.num_tokens for record in steady) / seconds if seconds > 0 else 0.0


def share_ahead(records: list[StepRecord]) -> float:
    """Share of the updates that were made before the gradient norm was known and were kept; NaN without updates."""
    num_updates = sum(record.num_ahead + record.num_held for record in records)
    num_kept = sum(record.num_ahead - record.num_dropped for record in records)
    return num_kept / num_updates if num_updates else math.nan


def host_memory_bytes() -> int:
    """Resident memory of this process: the current value on Linux, the peak so far on other systems."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Load:
    """One measurement. Fields that cannot be measured are zero."""

    cores_busy: float  # CPU seconds of all threads of this process per second, since the previous measurement
    host_bytes: int  # resident memory of this process
    host_available_bytes: int  # memory that the system could still allocate without swapping
    gpu_bytes: int  # allocated now
    gpu_peak_bytes: int  # peak of allocated memory since the previous measurement


class LoadMeter:
    """Measures load and memory use.

    Each measurement resets the peak that torch records for the GPU. `torch.cuda.max_memory_allocated` therefore no
    longer returns the peak of the whole run; `gpu_peak_bytes` does.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the device of the model."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._cores_busy = 0.0
        self.gpu_peak_bytes = 0

    def look(self) -> Load:
        """Measure the current memory use, and the load and peak since the previous measurement."""
        gpu_bytes = gpu_peak_bytes = 0
        if self._device is not None:
            stats = torch.cuda.memory_stats(self._device)
            gpu_bytes = int(stats.get("allocated_bytes.all.current", 0))
            gpu_peak_bytes = int(stats.get("allocated_bytes.all.peak", 0))
            torch.cuda.reset_peak_memory_stats(self._device)
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, gpu_peak_bytes)
        return Load(self._busy(), host_memory_bytes(), available_bytes(), gpu_bytes, gpu_peak_bytes)

    def _busy(self) -> float:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        elapsed_s = wall_s - self._wall_s
        if elapsed_s >= 1e-3:  # The CPU clock is too coarse for shorter intervals.
            self._cores_busy = (cpu_s - self._cpu_s) / elapsed_s
            self._wall_s, self._cpu_s = wall_s, cpu_s
        return self._cores_busy


class StepMeter:
    """Makes the record of a training step from the optimizer's counters and the load of the machine."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the device of the model."""
        self._load = LoadMeter(device)
        self._busy_s = self._waited_s = 0.0  # the counters after the previous step: busy host, waiting forwards

    def record(
        self,
        counts: Mapping[str, float],
        wall_s: float,
        phases: Callable[[float], tuple[float, float]],
        **others: Any,
    ) -> StepRecord:
        """The record of the step that has just ended.

        `counts`: `TwinOptimizer.metrics()`. `wall_s`: duration of the step. `phases`: returns the seconds of forward
        and backward, given the seconds for which forwards waited for new weights. `others`: the remaining fields.
        """
        wait_s, self._waited_s = counts["waited_s"] - self._waited_s, counts["waited_s"]
        host_s, self._busy_s = counts["host_busy_s"] - self._busy_s, counts["host_busy_s"]
        forward_s, backward_s = phases(wait_s)
        load = self._load.look()
        return StepRecord(
            grad_norm=counts["grad_norm"],
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=max(0.0, wall_s - forward_s - backward_s),
            host_bytes=load.host_bytes,
            num_ahead=int(counts["gate_speculated"]),
            num_dropped=int(counts["gate_dropped"]),
            num_held=int(counts["gate_held"]),
            gpu_bytes=load.gpu_peak_bytes,
            host_available_bytes=load.host_available_bytes,
            cores_busy=load.cores_busy,
            host_update_s=host_s,
            wait_s=wait_s,
            **others,
        )


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The system's `MemAvailable`, or 0 if the system does not report it. Limits of containers are not considered."""
    return parse_meminfo(read_text(meminfo)).get("MemAvailable", 0)
