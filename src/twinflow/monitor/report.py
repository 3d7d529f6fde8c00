"""The page a run leaves behind: one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from twinflow.monitor.metrics import StepRecord, ValidRecord
from twinflow.monitor.plot import Series, figure, smooth
from twinflow.monitor.style import STYLE

Rows = Sequence[tuple[str, str]]
NUM_TABLE_ROWS = 20


@dataclass(frozen=True)
class Report:
    """Everything the page shows."""

    title: str
    status: Literal["finished", "interrupted", "stopped"]
    message: str  # one sentence under the title
    numbers: Rows  # final numbers, shown large
    settings: Rows
    machine: Rows
    steps: Sequence[StepRecord]
    valids: Sequence[ValidRecord]


def write_report(path: Path, report: Report) -> None:
    """Write the page; a reader sees the old file or the new one, never half of one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(render(report), encoding="utf-8")
    partial.replace(path)


def render(report: Report) -> str:
    """The page as text."""
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.numbers)
    plots = "".join(plot(report) for plot in (loss_plot, time_plot, memory_plot, norm_plot, rate_plot))
    title = escape(report.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title} · twinflow</title>
<style>{STYLE}</style>
</head>
<body>
<header><p class="brand">twinflow</p><h1>{title} <span class="badge {report.status}">{report.status}</span></h1>
<p>{escape(report.message)}</p></header>
<main>
<dl class="tiles">{tiles}</dl>
<section class="plots">{plots}</section>
<section class="tables">{table("Settings", report.settings)}{table("Machine", report.machine)}</section>
<details><summary>Numbers behind the plots</summary>{steps_table(report.steps, report.valids)}</details>
</main>
</body>
</html>
"""


def loss_plot(report: Report) -> str:
    """Training loss, raw and smoothed, and validation loss."""
    raw = [(float(r.step), r.loss) for r in report.steps]
    valid = [(float(r.step), r.loss) for r in report.valids]
    curves = [
        Series("", raw, 1, "faint"),
        Series("train", smooth(raw), 1),
        Series("validation", valid, 2, "dots", f"{valid[-1][1]:.3f}" if valid else ""),
    ]
    return figure("Loss (nats per byte)", curves, width=1130, height=320)


def time_plot(report: Report) -> str:
    """Where the milliseconds of a step go, stacked."""
    total_s = sum(r.step_s for r in report.steps) or 1.0
    curves = []
    labels = {"forward": "forward", "backward": "backward", "update": "waiting for the update"}
    for color, (name, label) in enumerate(labels.items(), start=1):
        seconds = [getattr(r, f"{name}_s") for r in report.steps]
        points = [(float(r.step), s * 1000.0) for r, s in zip(report.steps, seconds, strict=True)]
        curves.append(Series(label, points, color, "area", f"{100.0 * sum(seconds) / total_s:.0f}%"))
    return figure("Step time (ms)", curves, from_zero=True, cut_spikes=True)


def memory_plot(report: Report) -> str:
    """Resident host memory."""
    points = [(float(r.step), r.host_bytes / 2**20) for r in report.steps]
    peak = f"peak {max(y for _, y in points):,.0f}" if points else ""
    return figure("Host memory (MiB)", [Series("resident", points, 3, "line", peak)], from_zero=True)


def norm_plot(report: Report) -> str:
    """Gradient norm before clipping."""
    points = [(float(r.step), r.grad_norm) for r in report.steps]
    curves = [Series("", points, 1, "faint"), Series("before clipping", smooth(points), 1)]
    return figure("Gradient norm", curves, from_zero=True)


def rate_plot(report: Report) -> str:
    """The learning-rate schedule as it was run."""
    points = [(float(r.step), r.lr) for r in report.steps]
    return figure("Learning rate", [Series("", points, 2)], from_zero=True)


def table(title: str, rows: Rows) -> str:
    """Names and values."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<div><h2>{escape(title)}</h2><table>{body}</table></div>"


def steps_table(steps: Sequence[StepRecord], valids: Sequence[ValidRecord]) -> str:
    """About twenty steps spread over the run, first and last among them, and the validation losses."""
    names = ("step", "loss", "learning rate", "gradient norm", "forward ms", "backward ms", "wait ms", "MiB")
    gate = ("updates ahead", "dropped", "held")
    head = "".join(f'<th scope="col">{name}</th>' for name in (*names, *gate))
    body = "".join(_step_row(record) for record in spread(steps, NUM_TABLE_ROWS))
    valid_rows = [(f"after step {r.step}" if r.step else "untrained", _number(r.loss)) for r in valids]
    return (
        f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        + table("Validation loss", valid_rows)
    )


def spread(records: Sequence[StepRecord], count: int) -> list[StepRecord]:
    """At most `count` records, evenly spread, first and last included."""
    if len(records) <= count:
        return list(records)
    return [records[round(i * (len(records) - 1) / (count - 1))] for i in range(count)]


def _step_row(r: StepRecord) -> str:
    times = (f"{1000.0 * s:.1f}" for s in (r.forward_s, r.backward_s, r.update_s))
    numbers = (str(r.step), _number(r.loss), f"{r.lr:.3g}", _number(r.grad_norm))
    gate = (str(count) for count in (r.num_ahead, r.num_dropped, r.num_held))
    cells = (*numbers, *times, f"{r.host_bytes / 2**20:,.0f}", *gate)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"
