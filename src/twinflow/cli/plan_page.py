# SPDX-License-Identifier: Apache-2.0
"""A plan as an HTML page in the style of the training report. The page is a single file without external resources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from twinflow.cli.plan_text import (
    BOUND,
    CASE_COLUMNS,
    advice,
    case_cells,
    count,
    gb,
    how,
    ignored_text,
    kind_name,
    largest_rows,
    seconds,
    title,
)
from twinflow.monitor.page import config_text, framed, notes, number_table, render_page, table, tiles
from twinflow.planner.cases import Case, Plan
from twinflow.planner.fit import Fit
from twinflow.planner.machines import Rates

_COLORS: Final = {
    "weights": "c1",
    "state": "c2",
    "gradients": "c3",
    "activations": "c4",
    "shadows": "c4",
    "staging": "soft",
    "rings": "c1",
    "process": "soft",
}
_STYLE: Final = """
.stacks { display: grid; gap: 10px; margin: 6px 0 0; }
.stack { display: grid; grid-template-columns: 11.5em 1fr 6.5em; gap: 10px; align-items: center; font-size: 14px; }
.stack b { font-weight: 500; } .stack span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.track {
  position: relative; display: flex; height: 18px; border-radius: 4px; background: var(--page); overflow: hidden;
}
.track i { display: block; height: 100%; } .track.full { outline: 1.5px solid var(--bad); }
.track u { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--ink); opacity: .55; }
.fill-c1 { background: var(--c1); } .fill-c2 { background: var(--c2); } .fill-c3 { background: var(--c3); }
.fill-c4 { background: var(--c4); } .fill-soft { background: var(--soft); }
.best b, .numbers tr.best td { font-weight: 700; } .numbers tr.out td { color: var(--soft); }
.numbers :is(td, th):is(:first-child, :nth-child(2), :last-child) { text-align: left; }
.numbers :is(td, th):first-child { padding-left: 0; }
main > .notes, main > figure { margin: 0 0 16px; }
@media (max-width: 560px) {
  .stack { grid-template-columns: 1fr auto; gap: 2px 8px; } .stack .track { grid-column: 1 / -1; grid-row: 2; }
}
"""


def plan_page(plan: Plan, fit: Fit, machine: str, config: Mapping[str, Any], ignored: Sequence[str]) -> str:
    """The HTML text of the page. `machine`: the description of the machine. `config`: the recommended config, empty if
    nothing fits. `ignored`: keys of the given config that are not used.
    """
    run, memory = plan.run, plan.setting.memory
    largest = table("Largest model of this shape that fits", largest_rows(plan))
    parts = [
        tiles(_numbers(plan, fit)),
        notes("Recommendation", f'<p style="margin:0">{escape(advice(plan, fit))}</p>'),
        _stacks("GPU memory", plan, "gpu", memory.gpu_bytes),
        _stacks("Host memory", plan, "host", memory.host_bytes),
        _steps(plan),
        notes("Cases", _table(plan)),
        f'<section class="tables">{largest}{table("Rates", _rates(plan.setting.rates))}</section>',
        config_text(json.dumps(config, indent=2) if config else ""),
    ]
    badge = ("finished", "fits") if fit.fits else ("stopped", "does not fit")
    name, facts = f"Plan: {run.model.name}", [machine, how(run), *([ignored_text(ignored)] if ignored else [])]
    return render_page(name, title(run), badge, facts, parts, brand="twinflow plan", style=_STYLE)


def _numbers(plan: Plan, fit: Fit) -> list[tuple[str, str]]:
    shown, deepest = fit.case, max(map(plan.largest_numel, plan.largest))
    return [
        ("step", f"{seconds(shown.prediction.step_s)} s"),
        ("tokens/s", f"{shown.tokens_s:,.0f}"),
        ("bound by", BOUND[shown.prediction.bound_by]),
        ("ratio on the host", f"{shown.ratio:.2f}"),
        ("state format", shown.run.states),
        ("GPU memory", f"{gb(shown.used.gpu_total)} GB"),
        ("host memory", f"{gb(shown.used.host_total)} GB"),
        ("largest model that fits", count(deepest)),
    ]


def _stacks(name: str, plan: Plan, side: str, limit: int) -> str:
    """Figure with the memory of every case by kind. A mark shows the available memory."""
    used: list[Mapping[str, int]] = [getattr(case.used, side) for case in plan.cases]
    totals = [sum(each.values()) for each in used]
    scale = max([*totals, limit]) or 1
    mark = f'<u style="left:calc({100 * limit / scale:.2f}% - 2px)"></u>'
    rows = ""
    for case, each, total in zip(plan.cases, used, totals, strict=True):
        parts = [(_COLORS[k], 100 * each[k] / scale, f"{kind_name(k)} {gb(each[k])} GB") for k in each if each[k]]
        rows += _row(plan, case, " full" if total > limit else "", parts, mark, f"{gb(total)} GB")
    keys = [(_COLORS[kind], kind_name(kind)) for kind in used[0] if any(each[kind] for each in used)]
    return _figure(name, keys, f"<span>mark: {gb(limit)} GB available</span>", rows)


def _steps(plan: Plan) -> str:
    """Figure with the predicted time of a step: computing time and waiting time of the GPU."""
    fitting = [case for case in plan.cases if case.fits]
    longest = max((case.prediction.step_s for case in fitting), default=1.0)
    rows = ""
    for case in fitting:
        step_s, waited_s = case.prediction.step_s, case.prediction.waited_s
        times = (("c1", step_s - waited_s, "GPU"), ("c2", waited_s, "waiting"))
        parts = [(color, 100 * time / longest, text) for color, time, text in times]
        rows += _row(plan, case, "", parts, "", f"{seconds(step_s)} s")
    keys = (("c1", "GPU computes"), ("c2", "GPU waits for weights"))
    return _figure("Predicted step", keys, "", rows or "Nothing fits.")


def _row(plan: Plan, case: Case, full: str, parts: Iterable[tuple[str, float, str]], mark: str, total: str) -> str:
    """A line with a case, its bar and a total. `parts` of the bar: color, width in percent, and title."""
    bar = "".join(f'<i class="fill-{c}" style="width:{width:.2f}%" title="{text}"></i>' for c, width, text in parts)
    return (
        f'<div class="stack{" best" if case is plan.best else ""}"><b>{escape(case.kind)}, {case.run.states}</b>'
        f'<div class="track{full}">{bar}{mark}</div><span>{total}</span></div>'
    )


def _figure(name: str, keys: Iterable[tuple[str, str]], note: str, rows: str) -> str:
    legend = "".join(f'<span><i class="key area fill-{color}"></i>{text}</span>' for color, text in keys)
    return framed(name, legend + note, f'<div class="stacks">{rows}</div>')


def _table(plan: Plan) -> str:
    kinds = ["best" if case is plan.best else "" if case.fits else "out" for case in plan.cases]
    names = (*CASE_COLUMNS[:-1], "bound by, or missing")
    return number_table(names, [case_cells(case, "") for case in plan.cases], kinds)


def _rates(rates: Rates) -> list[tuple[str, str]]:
    out, back, both = (rate / 1e9 for rate in (rates.out_bytes, rates.in_bytes, rates.duplex_bytes))
    hosts = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.host_params.items())
    busy = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.host_params_copying.items())
    return [
        ("matrix products", f"{rates.flops / 1e12:,.0f} TFLOPS"),
        ("GPU memory", f"{rates.device_bytes / 1e12:.2f} TB/s"),
        ("PCIe", f"{out:.0f} GB/s to the host, {back:.0f} GB/s to the GPU, {both:.0f} GB/s each way at once"),
        ("host updates", f"{hosts} G parameters/s"),
        ("host updates during copies", f"{busy} G parameters/s"),
    ]
