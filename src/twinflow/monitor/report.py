"""The report page of a run: one HTML file without scripts and without references to other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """Contents of the report page."""

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
    """The report page as HTML."""
    makers = (loss_plot, time_plot, memory_plot, load_plot, speed_plot, norm_plot, rate_plot, scale_plot)
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    parts = [
        tiles(report.numbers),
        f'<section class="plots">{"".join(plot(report) for plot in makers)}</section>',
        notes("Notes", f"<ul>{items}</ul>") if items else "",
        f'<section class="tables">{table("Settings", report.settings)}{table("Machine", report.machine)}</section>',
        config_text(report.config),
        f"<details><summary>Numbers behind the plots</summary>{steps_table(report.steps, report.valids)}</details>",
    ]
    return render_page(report.title, report.title, (report.status, report.status), [report.message], parts)


def loss_plot(report: Report) -> str:
    """Training loss, raw and smoothed, and validation loss."""
    raw = [(float(r.step), r.loss) for r in report.steps]
    valid = [(float(r.step), r.loss) for r in report.valids]
    curves = [
        *_smoothed("train", raw, 1),
        Series("validation", valid, 2, "dots", number(valid[-1][1]) if valid else ""),
    ]
    return figure("Loss", curves, size=(1130, 320))


def time_plot(report: Report) -> str:
    """Times of the parts of a step, stacked, and the time of the host update, which overlaps with them."""
    parts = {
        "forward": [r.forward_s for r in report.steps],
        "backward": [r.backward_s for r in report.steps],
        "waiting for the update": [r.update_s for r in report.steps],
    }
    host = [r.host_update_s for r in report.steps]
    total_s = sum(map(sum, parts.values())) or 1.0
    curves = [
        Series(label, _per_step(report, seconds, 1000.0), color, "area", f"{100.0 * sum(seconds) / total_s:.0f}%")
        for color, (label, seconds) in enumerate(parts.items(), start=1)
    ]
    if any(host):
        mean = f"{1000.0 * sum(host) / len(host):,.1f} ms"
        curves.append(Series("host update, beside", _per_step(report, host, 1000.0), 4, "line", mean))
    return figure("Step time (ms)", curves, from_zero=True, cut_spikes=True)


def memory_plot(report: Report) -> str:
    """Resident memory of the process and memory allocated on the GPU."""
    host, gpu = [r.host_bytes for r in report.steps], [r.gpu_bytes for r in report.steps]
    most = max((*host, *gpu), default=0)
    unit, name = (2**30, "GiB") if most >= 4 * 2**30 else (2**20, "MiB")
    digits = 1 if unit == 2**30 else 0
    curves = [Series("host", _per_step(report, host, 1 / unit), 3, "line", _peak(host, unit, digits))]
    if any(gpu):
        curves.append(Series("GPU", _per_step(report, gpu, 1 / unit), 4, "line", _peak(gpu, unit, digits)))
    return figure(f"{'Host and GPU' if any(gpu) else 'Host'} memory ({name})", curves, from_zero=True)


def load_plot(report: Report) -> str:
    """Number of cores that the process used. Empty if it was not measured."""
    busy = [r.cores_busy for r in report.steps]
    if not any(busy):
        return ""
    mean = f"mean {sum(busy) / len(busy):.1f}"
    return figure("Host load (cores)", _smoothed("cores busy", _per_step(report, busy), 3, mean), from_zero=True)


def speed_plot(report: Report) -> str:
    """FLOPs of the model per second. Empty if they were not counted."""
    tflops = [r.tflops for r in report.steps]
    if not any(tflops):
        return ""
    mean = f"{tokens_per_second(list(report.steps)):,.0f} tokens/s"
    return figure("Speed (TFLOPS)", _smoothed("model", _per_step(report, tflops), 1, mean), from_zero=True)


def norm_plot(report: Report) -> str:
    """Gradient norm before clipping."""
    points = [(float(r.step), r.grad_norm) for r in report.steps]
    return figure("Gradient norm", _smoothed("before clipping", points, 1), from_zero=True, cut_spikes=True)


def rate_plot(report: Report) -> str:
    """Learning rate of each step."""
    points = [(float(r.step), r.lr) for r in report.steps]
    return figure("Learning rate", [Series("", points, 2)], from_zero=True)


def scale_plot(report: Report) -> str:
    """The loss scale as a power of two. Empty if it never changed."""
    scales = [r.loss_scale for r in report.steps]
    if len(set(scales)) < 2:
        return ""
    points = [(float(r.step), math.log2(r.loss_scale)) for r in report.steps if r.loss_scale > 0]
    skipped = f"{sum(r.skipped for r in report.steps):,} steps skipped"
    return figure("Loss scale (power of two)", [Series("scale", points, 2, "line", skipped)])


def _smoothed(label: str, points: Sequence[Point], color: int, note: str = "") -> list[Series]:
    """The raw curve in the background, and its moving average."""
    return [Series("", points, color, "faint"), Series(label, smooth(points), color, "line", note)]


def _per_step(report: Report, values: Sequence[float], factor: float = 1.0) -> list[Point]:
    """One point per step. A value that is not finite becomes 0, so that all stacked areas have the same x values."""
    return [
        (float(r.step), value * factor if math.isfinite(value) else 0.0)
        for r, value in zip(report.steps, values, strict=True)
    ]


def _peak(num_bytes: Sequence[int], unit: int, digits: int) -> str:
    return f"peak {max(num_bytes) / unit:,.{digits}f}" if num_bytes else ""


@dataclass(frozen=True)
class Column:
    """A column of the table of steps."""

    name: str
    text: Callable[[StepRecord], str]
    is_used: Callable[[StepRecord], bool] = lambda record: True  # the column is shown if this is true for any step


COLUMNS: Final = (
    Column("step", lambda r: str(r.step)),
    Column("loss", lambda r: number(r.loss)),
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
    Column("updates ahead", lambda r: str(r.num_ahead)),
    Column("dropped", lambda r: str(r.num_dropped)),
    Column("held", lambda r: str(r.num_held)),
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
