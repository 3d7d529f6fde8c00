# SPDX-License-Identifier: Apache-2.0
"""The report page of a run: one HTML file without scripts and without references to other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Literal, TypeVar

from twinflow.files import write_whole
from twinflow.monitor.metrics import StepRecord, ValidRecord, tokens_per_second
from twinflow.monitor.page import Rows, config_text, notes, number_table, render_page, table, tiles
from twinflow.monitor.plot import Point, Series, figure, smooth

NUM_TABLE_ROWS: Final = 20
AnyRecord = TypeVar("AnyRecord", StepRecord, ValidRecord)


@dataclass(frozen=True)
class Report:
    title: str
    status: Literal["finished", "interrupted", "stopped"]
    message: str  # one sentence under the title
    numbers: Rows  # final numbers, shown large
    settings: Rows
    machine: Rows
    steps: Sequence[StepRecord]
    valids: Sequence[ValidRecord]
    config: str = ""  # the JSON config of the run
    notes: Sequence[str] = ()  # remarks, for example that the run was resumed or that steps were skipped


def write_report(path: Path, report: Report) -> None:
    """Write the page. The file is replaced atomically."""
    write_whole(path, render(report))


def render(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    parts = [
        tiles(report.numbers),
        f'<section class="plots">{"".join(plots(report))}</section>',
        notes("Notes", f"<ul>{items}</ul>") if items else "",
        f'<section class="tables">{table("Settings", report.settings)}{table("Machine", report.machine)}</section>',
        config_text(report.config),
        f"<details><summary>Numbers behind the plots</summary>{steps_table(report.steps, report.valids)}</details>",
    ]
    return render_page(report.title, report.title, (report.status, report.status), [report.message], parts)


def plots(report: Report) -> Iterator[str]:
    """The plots of a run. A value that was not measured gets no plot."""
    steps = report.steps
    valid = [(float(r.step), r.loss) for r in report.valids]
    last = number(valid[-1][1]) if valid else ""
    loss = [*_smoothed("train", _points(steps, "loss"), 1), Series("validation", valid, 2, "dots", last)]
    yield figure("Loss", loss, size=(1130, 320))
    yield time_plot(steps)
    yield memory_plot(steps)
    if any(r.cores_busy for r in steps):
        mean = f"mean {sum(r.cores_busy for r in steps) / len(steps):.1f}"
        busy = _smoothed("cores busy", _points(steps, "cores_busy"), 3, mean)
        yield figure("Host load (cores)", busy, from_zero=True)
    if any(r.tflops for r in steps):
        speed = f"{tokens_per_second(list(steps)):,.0f} tokens/s"
        yield figure("Speed (TFLOPS)", _smoothed("model", _points(steps, "tflops"), 1, speed), from_zero=True)
    norms = _smoothed("before clipping", _points(steps, "grad_norm"), 1)
    yield figure("Gradient norm", norms, from_zero=True, cut_spikes=True)
    yield figure("Learning rate", [Series("", _points(steps, "lr"), 2)], from_zero=True)
    if len({r.loss_scale for r in steps}) > 1:
        scales = [(step, math.log2(scale)) for step, scale in _points(steps, "loss_scale") if scale > 0]
        skipped = f"{sum(r.skipped for r in steps):,} steps skipped"
        yield figure("Loss scale (power of two)", [Series("scale", scales, 2, "line", skipped)])


def time_plot(steps: Sequence[StepRecord]) -> str:
    """Times of the parts of a step, stacked, and the time of the host update, which overlaps with them."""
    names = {"forward_s": "forward", "backward_s": "backward", "update_s": "waiting for the update"}
    # A time that is not finite becomes 0, so that all stacked areas have the same x values.
    parts = [[(x, y if math.isfinite(y) else 0.0) for x, y in _points(steps, name, 1000.0)] for name in names]
    sums = [sum(y for _, y in points) for points in parts]
    total = sum(sums) or 1.0
    curves = [
        Series(label, points, color, "area", f"{100.0 * one / total:.0f}%")
        for color, (label, points, one) in enumerate(zip(names.values(), parts, sums, strict=True), start=1)
    ]
    if any(r.host_update_s for r in steps):
        mean = f"{1000.0 * sum(r.host_update_s for r in steps) / len(steps):,.1f} ms"
        curves.append(Series("host update, overlapped", _points(steps, "host_update_s", 1000.0), 4, "line", mean))
    return figure("Step time (ms)", curves, from_zero=True, cut_spikes=True)


def memory_plot(steps: Sequence[StepRecord]) -> str:
    peaks = {name: max((getattr(r, name) for r in steps), default=0) for name in ("host_bytes", "gpu_bytes")}
    unit, unit_name, digits = (2**30, "GiB", 1) if max(peaks.values()) >= 4 * 2**30 else (2**20, "MiB", 0)
    curves = []
    for label, name, color in (("host", "host_bytes", 3), ("GPU", "gpu_bytes", 4)):
        note = f"peak {peaks[name] / unit:,.{digits}f}" if steps else ""
        if label == "host" or peaks[name]:
            curves.append(Series(label, _points(steps, name, 1 / unit), color, "line", note))
    title = "Host and GPU" if peaks["gpu_bytes"] else "Host"
    return figure(f"{title} memory ({unit_name})", curves, from_zero=True)


def _smoothed(label: str, points: Sequence[Point], color: int, note: str = "") -> list[Series]:
    """The raw curve in the background, and its moving average."""
    return [Series("", points, color, "faint"), Series(label, smooth(points), color, "line", note)]


def _points(steps: Sequence[StepRecord], name: str, factor: float = 1.0) -> list[Point]:
    return [(float(r.step), getattr(r, name) * factor) for r in steps]


@dataclass(frozen=True)
class Column:
    name: str
    text: Callable[[StepRecord], str]
    is_used: Callable[[StepRecord], bool] = lambda record: True  # the column is shown if this is true for a shown step


COLUMNS: Final = (
    Column("step", lambda r: str(r.step)),
    Column("loss", lambda r: number(r.loss)),
    Column("balance", lambda r: f"{r.balance:.2f}", lambda r: r.balance > 0),
    Column("learning rate", lambda r: f"{r.lr:.3g}"),
    Column("gradient norm", lambda r: number(r.grad_norm)),
    Column("forward ms", lambda r: f"{1000.0 * r.forward_s:.1f}"),
    Column("backward ms", lambda r: f"{1000.0 * r.backward_s:.1f}"),
    Column("wait ms", lambda r: f"{1000.0 * r.update_s:.1f}"),
    Column("host update ms", lambda r: f"{1000.0 * r.host_update_s:.1f}", lambda r: r.host_update_s > 0),
    Column("TFLOPS", lambda r: f"{r.tflops:.3g}", lambda r: r.tflops > 0),
    Column("host MiB", lambda r: f"{r.host_bytes / 2**20:,.0f}"),
    Column("GPU MiB", lambda r: f"{r.gpu_bytes / 2**20:,.0f}", lambda r: r.gpu_bytes > 0),
    Column("cores", lambda r: f"{r.cores_busy:.1f}", lambda r: r.cores_busy > 0),
    Column("ratio", lambda r: f"{r.host_share:.2f}", lambda r: r.host_share < 1.0),
    Column("loss scale", lambda r: f"{r.loss_scale:g}", lambda r: r.loss_scale != 1.0),
    Column("skipped", lambda r: "yes" if r.skipped else "", lambda r: r.skipped),
    Column("updates before the norm", lambda r: str(r.num_ahead)),
    Column("dropped updates", lambda r: str(r.num_dropped)),
    Column("updates after the norm", lambda r: str(r.num_held)),
)


def steps_table(steps: Sequence[StepRecord], valids: Sequence[ValidRecord]) -> str:
    """A table of at most 20 steps and one of at most 20 validations, evenly spread, including first and last."""
    chosen = spread(steps, NUM_TABLE_ROWS)
    columns = [column for column in COLUMNS if not chosen or any(map(column.is_used, chosen))]
    valid_rows = [
        (f"after step {r.step}" if r.step else "untrained", number(r.loss)) for r in spread(valids, NUM_TABLE_ROWS)
    ]
    rows = ([column.text(record) for column in columns] for record in chosen)
    return number_table((column.name for column in columns), rows) + table("Validation loss", valid_rows)


def spread(records: Sequence[AnyRecord], count: int) -> list[AnyRecord]:
    """At most `count` records, evenly spread, including the first and the last."""
    if len(records) <= count:
        return list(records)
    return [records[round(i * (len(records) - 1) / (count - 1))] for i in range(count)]


def number(value: float) -> str:
    """A loss with four decimals, or "not finite"."""
    return f"{value:.4f}" if math.isfinite(value) else "not finite"
