"""A plan as an HTML page in the style of the training report. The page is a single file without external resources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from twinflow.cli.plan_input import Place
from twinflow.cli.plan_text import BOUND, advice, count, gb, how, lacks, seconds, title
from twinflow.monitor.page import config_text, framed, notes, number_table, render_page, table, tiles
from twinflow.planner.cases import Case
from twinflow.planner.costs import GPU_KINDS, HOST_KINDS, Run

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


def plan_page(
    run: Run,
    place: Place,
    cases: Sequence[Case],
    best: Case | None,
    largest: Mapping[str, int],
    config: Mapping[str, Any],
) -> str:
    """The HTML text of the page."""
    shown = best or min(cases, key=lambda case: case.missing.gpu_bytes + case.missing.host_bytes)
    memory = place.setting.memory
    tables = table("Largest model of this shape that fits", _largest(run, largest)) + table("Rates", _rates(place))
    parts = [
        tiles(_tiles(run, shown, largest)),
        notes("Recommendation", f'<p style="margin:0">{escape(advice(best, shown, cases))}</p>'),
        _stacks("GPU memory", cases, best, "gpu", memory.gpu_bytes),
        _stacks("Host memory", cases, best, "host", memory.host_bytes),
        _steps(cases, best),
        notes("Cases", _table(cases, best)),
        f'<section class="tables">{tables}</section>',
        config_text(json.dumps(config, indent=2) if config else ""),
    ]
    badge = ("finished", "fits") if best is not None else ("stopped", "does not fit")
    lines = [place.text, how(run)]
    name = f"Plan: {run.model.name}"
    return render_page(name, title(run), badge, lines, parts, brand="twinflow plan", style=_STYLE)


def _tiles(run: Run, shown: Case, largest: Mapping[str, int]) -> list[tuple[str, str]]:
    deepest = max((run.model.with_layers(n).numel for n in largest.values() if n), default=0)
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


def _stacks(name: str, cases: Sequence[Case], best: Case | None, side: str, limit: int) -> str:
    """Figure with the memory of every case by kind. A mark shows the available memory."""
    kinds = GPU_KINDS if side == "gpu" else HOST_KINDS
    used = [case.used.gpu if side == "gpu" else case.used.host for case in cases]
    scale = max(*(sum(parts.values()) for parts in used), limit) or 1
    rows = ""
    for case, parts in zip(cases, used, strict=True):
        shares = [(_COLORS[k], parts[k] / scale, f"{k} {gb(parts[k])} GB") for k in kinds if parts.get(k)]
        total = sum(parts.values())
        mark = f'<u style="left:calc({100 * limit / scale:.2f}% - 2px)"></u>'
        rows += _stack(case, case is best, shares, f"{gb(total)} GB", mark, total > limit)
    keys = _keys((_COLORS[kind], kind) for kind in kinds if any(parts.get(kind) for parts in used))
    return framed(name, f"{keys}<span>mark: {gb(limit)} GB available</span>", f'<div class="stacks">{rows}</div>')


def _steps(cases: Sequence[Case], best: Case | None) -> str:
    """Figure with the predicted time of a step: computing time and waiting time of the GPU."""
    fitting = [case for case in cases if case.fits]
    longest = max((case.prediction.step_s for case in fitting), default=1.0)
    rows = ""
    for case in fitting:
        step_s, waited_s = case.prediction.step_s, case.prediction.waited_s
        shares = [("c1", (step_s - waited_s) / longest, "GPU"), ("c2", waited_s / longest, "waiting")]
        rows += _stack(case, case is best, shares, f"{seconds(step_s)} s")
    keys = _keys((("c1", "GPU computes"), ("c2", "GPU waits for weights")))
    return framed("Predicted step", keys, f'<div class="stacks">{rows or "Nothing fits."}</div>')


def _stack(
    case: Case,
    is_best: bool,
    shares: Sequence[tuple[str, float, str]],
    text: str,
    mark: str = "",
    is_full: bool = False,
) -> str:
    """The bar of a case. `shares`: colour, width and title of its parts."""
    parts = "".join(f'<i class="fill-{c}" style="width:{100 * w:.2f}%" title="{name}"></i>' for c, w, name in shares)
    return (
        f'<div class="stack{" best" if is_best else ""}"><b>{escape(case.kind)}, {case.run.states}</b>'
        f'<div class="track{" full" if is_full else ""}">{parts}{mark}</div><span>{text}</span></div>'
    )


def _keys(keys: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<span><i class="key area fill-{color}"></i>{text}</span>' for color, text in keys)


def _table(cases: Sequence[Case], best: Case | None) -> str:
    names = ("offload", "states", "ratio", "GPU GB", "host GB", "s/step", "tokens/s", "bound by, or missing")
    rows, kinds = [], []
    for case in cases:
        cells = [case.kind, case.run.states, f"{case.ratio:.2f}", gb(case.used.gpu_total), gb(case.used.host_total)]
        if case.fits:
            cells += [seconds(case.prediction.step_s), f"{case.tokens_s:,.0f}", BOUND[case.prediction.bound_by]]
        else:
            cells += ["", "", lacks(case)]
        rows.append(cells)
        kinds.append("best" if case is best else "" if case.fits else "out")
    return number_table(names, rows, kinds)


def _largest(run: Run, largest: Mapping[str, int]) -> list[tuple[str, str]]:
    return [
        (states, f"{count(run.model.with_layers(n).numel)}, {n} blocks" if n else "none")
        for states, n in largest.items()
    ]


def _rates(place: Place) -> list[tuple[str, str]]:
    rates = place.setting.rates
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
