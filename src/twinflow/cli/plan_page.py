"""A plan as an HTML page in the style of the training report. The page is a single file without external resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from twinflow.cli.plan_input import Place
from twinflow.cli.plan_text import BOUND, advice, count, gb, how, lacks, seconds, title
from twinflow.monitor.report import config_text, num_columns, table
from twinflow.monitor.style import STYLE
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


def render_page(
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
    tiles = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _tiles(run, shown, largest))
    status = ("finished", "fits") if best is not None else ("stopped", "does not fit")
    config_json = json.dumps(config, indent=2) if config else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Plan: {escape(run.model.name)} · twinflow</title>
<style>{STYLE}{_STYLE}</style>
</head>
<body>
<header><p class="brand">twinflow plan</p>
<h1>{escape(title(run))} <span class="badge {status[0]}">{status[1]}</span></h1>
<p>{escape(place.text)}</p><p>{escape(how(run))}</p></header>
<main>
<dl class="tiles" style="--columns: {num_columns(len(_tiles(run, shown, largest)))}">{tiles}</dl>
<section class="notes"><h2>Recommendation</h2><p style="margin:0">{escape(advice(best, shown, cases))}</p></section>
{_stacks("GPU memory", cases, best, "gpu", memory.gpu_bytes)}
{_stacks("Host memory", cases, best, "host", memory.host_bytes)}
{_steps(cases, best)}
<section class="notes"><h2>Cases</h2>{_table(cases, best)}</section>
<section class="tables">{table("Largest model of this shape that fits", _largest(run, largest))}
{table("Rates", _rates(place))}</section>
{config_text(config_json)}
</main>
</body>
</html>
"""


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
    totals = [sum((case.used.gpu if side == "gpu" else case.used.host).values()) for case in cases]
    scale = max([*totals, limit]) or 1
    rows = "".join(
        _stack(case, case.used.gpu if side == "gpu" else case.used.host, kinds, limit, scale, case is best)
        for case in cases
    )
    used = [kind for kind in kinds if any((c.used.gpu if side == "gpu" else c.used.host).get(kind) for c in cases)]
    keys = "".join(f'<span><i class="key area fill-{_COLORS[kind]}"></i>{kind}</span>' for kind in used)
    keys += f"<span>mark: {gb(limit)} GB available</span>"
    head = f'<figcaption><h3>{name}</h3><p class="legend">{keys}</p></figcaption>'
    return f'<figure>{head}<div class="stacks">{rows}</div></figure>'


def _stack(case: Case, used: Mapping[str, int], kinds: Sequence[str], limit: int, scale: int, is_best: bool) -> str:
    total = sum(used.values())
    parts = "".join(
        f'<i class="fill-{_COLORS[kind]}" style="width:{100 * used[kind] / scale:.2f}%"'
        f' title="{kind} {gb(used[kind])} GB"></i>'
        for kind in kinds
        if used.get(kind)
    )
    full = " full" if total > limit else ""
    mark = f'<u style="left:calc({100 * limit / scale:.2f}% - 2px)"></u>'
    best = " best" if is_best else ""
    return (
        f'<div class="stack{best}"><b>{escape(case.kind)}, {case.run.states}</b>'
        f'<div class="track{full}">{parts}{mark}</div><span>{gb(total)} GB</span></div>'
    )


def _steps(cases: Sequence[Case], best: Case | None) -> str:
    """Figure with the predicted time of a step: computing time and waiting time of the GPU."""
    fitting = [case for case in cases if case.fits]
    longest = max((case.prediction.step_s for case in fitting), default=1.0)
    rows = ""
    for case in fitting:
        waited = case.prediction.waited_s
        own = case.prediction.step_s - waited
        widths = [(f"fill-{c}", 100 * s / longest, t) for c, s, t in (("c1", own, "GPU"), ("c2", waited, "waiting"))]
        parts = "".join(f'<i class="{c}" style="width:{w:.2f}%" title="{t}"></i>' for c, w, t in widths)
        rows += (
            f'<div class="stack{" best" if case is best else ""}"><b>{escape(case.kind)}, {case.run.states}</b>'
            f'<div class="track">{parts}</div><span>{seconds(case.prediction.step_s)} s</span></div>'
        )
    keys = "".join(
        f'<span><i class="key area fill-{c}"></i>{t}</span>'
        for c, t in (("c1", "GPU computes"), ("c2", "GPU waits for weights"))
    )
    head = f'<figcaption><h3>Predicted step</h3><p class="legend">{keys}</p></figcaption>'
    return f'<figure>{head}<div class="stacks">{rows or "Nothing fits."}</div></figure>'


def _table(cases: Sequence[Case], best: Case | None) -> str:
    names = ("offload", "states", "ratio", "GPU GB", "host GB", "s/step", "tokens/s", "bound by, or missing")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = ""
    for case in cases:
        cells = [case.kind, case.run.states, f"{case.ratio:.2f}", gb(case.used.gpu_total), gb(case.used.host_total)]
        if case.fits:
            cells += [seconds(case.prediction.step_s), f"{case.tokens_s:,.0f}", BOUND[case.prediction.bound_by]]
        else:
            cells += ["", "", lacks(case)]
        kind = "best" if case is best else "" if case.fits else "out"
        body += f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
        (
            "PCIe",
            f"{out:.0f} GB/s to the host, {back:.0f} GB/s to the GPU, {both:.0f} GB/s each way at once",
        ),
        ("host updates", f"{hosts} G parameters/s"),
        ("host updates during copies", f"{busy} G parameters/s"),
    ]
