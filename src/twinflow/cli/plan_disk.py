"""The part of `twinflow plan` about state on a disk: its bytes, and the seconds that the disk takes for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinflow.bench.disk import DiskRates, measure_disk
from twinflow.cli.plan_text import gb
from twinflow.config import load_config, optimizer_choice
from twinflow.conflicts import refuse
from twinflow.offload.settings import Tuning
from twinflow.planner.costs import BUCKET_NUMEL, Run
from twinflow.planner.formats import state_bytes
from twinflow.rules import ALL_RULES, RULES


@dataclass(frozen=True)
class DiskRow:
    """State of one format on a disk."""

    states: str
    file_bytes: int  # of all ranks
    buffer_bytes: int  # host memory of all ranks
    step_s: float  # reads and writes of a step; the updates and the model overlap with them
    fits: bool


def measure(path: Path, config: Mapping[str, Any]) -> DiskRates:
    """Raises ValueError for an optimizer whose state cannot be on a disk, and OSError for an unusable folder."""
    name = optimizer_choice(load_config(config))[0] if config.get("optimizer") else "adamw"
    rule = ALL_RULES.get(name)
    is_muon = rule is not None and rule.elementwise is not None
    refuse("State on the disk", {"rule": rule is None, "muon": is_muon}, rules=", ".join(RULES))
    return measure_disk(path)


def disk_rows(run: Run, formats: Sequence[str], rates: DiskRates) -> list[DiskRow]:
    """A row for each format, with all state of all ranks on one disk."""
    rows = []
    for states in formats:
        each = state_bytes(states, run.weights, num_moments=run.num_moments, master=run.master).host
        file_bytes = int(each * run.own_numel) * run.world
        bucket_bytes = int(each * min(BUCKET_NUMEL, run.own_numel))
        step_s = 2 * file_bytes / rates.update
        buffers = Tuning().buffer_count * bucket_bytes * run.world
        rows.append(DiskRow(states, file_bytes, buffers, step_s, file_bytes <= rates.free_bytes))
    return rows


def disk_lines(rows: Sequence[DiskRow], rates: DiskRates) -> list[str]:
    """The rows as text."""
    lines = [
        f"all state on the disk of {rates.folder} (device nvme): {rates.update / 1e9:.2f} GB/s measured, "
        f"{gb(rates.free_bytes)} GB free"
    ]
    for row in rows:
        fits = "" if row.fits else "; does not fit"
        buffers = f"{gb(row.buffer_bytes)} GB of buffers on the host"
        lines += [f"  {row.states:5} {gb(row.file_bytes)} GB in the file, {buffers}, {row.step_s:.1f} s a step{fits}"]
    return lines
