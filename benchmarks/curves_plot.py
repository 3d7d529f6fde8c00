# SPDX-License-Identifier: Apache-2.0
"""Curves over steps as an SVG picture, for benchmarks on machines without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from twinflow.monitor.plot import Scale, finite, tick_text, ticks, value_range

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 300, 56, 520, 40, 50
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#64748b")
STYLE = "text{font:13px sans-serif;fill:#334155}.title{font-weight:600}.tick{font-size:11px;fill:#64748b}"
STYLE += ".grid{stroke:#e2e8f0;stroke-width:1}"


class Curve(NamedTuple):
    """A line. Curves with an empty label are not named in the picture."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    is_faint: bool = False


class Panel(NamedTuple):
    """One plot of the picture."""

    title: str
    curves: Sequence[Curve]
    x_label: str = "step"


def picture(panels: Sequence[Panel]) -> str:
    """All panels, one below the other."""
    body = "".join(_panel(panel, i * HEIGHT) for i, panel in enumerate(panels))
    size = f'width="{WIDTH}" height="{HEIGHT * len(panels)}" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}"'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{back}{body}</svg>\n'


def _panel(panel: Panel, top: int) -> str:
    parts = [_text(LEFT, top + 20, panel.title, "title")]
    curves = [curve._replace(points=finite(curve.points)) for curve in panel.curves]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return parts[0] + _text(LEFT, top + HEIGHT / 2, "nothing was measured", "tick")
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    bottom = top + HEIGHT - BOTTOM
    x_scale = Scale(min(xs), max(*xs, min(xs) + 1.0), LEFT, RIGHT)
    y_scale = Scale(*value_range(ys, from_zero=False, cut_spikes=False), bottom, top + TOP)
    for value in ticks(y_scale.low, y_scale.high):
        y = round(y_scale(value), 1)
        parts.append(f'<polyline class="grid" points="{LEFT},{y} {RIGHT},{y}"/>')
        parts.append(_text(LEFT - 8, y + 4, tick_text(value), "tick", "end"))
    marks = ticks(x_scale.low, x_scale.high)
    parts += [_text(round(x_scale(value), 1), bottom + 18, tick_text(value), "tick", "middle") for value in marks]
    parts.append(_text((LEFT + RIGHT) / 2, bottom + 36, panel.x_label, "tick", "middle"))
    for curve in curves:
        path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in curve.points)
        width, opacity = (1.2, 0.5) if curve.is_faint else (2, 1)
        color = COLORS[curve.color % len(COLORS)]
        line = f'<polyline fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"'
        parts.append(f'{line} points="{path}"/>')
    last = -1000.0
    for y, curve in sorted(((y_scale(c.points[-1][1]), c) for c in curves if c.label), key=lambda one: one[0]):
        last = max(y, last + 16)  # labels do not overlap
        color = COLORS[curve.color % len(COLORS)]
        parts.append(f'<text x="{RIGHT + 10}" y="{last + 4:.1f}" style="fill:{color}">{escape(curve.label)}</text>')
    return "\n".join(parts)


def _text(x: float, y: float, what: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x}" y="{y}">{escape(what)}</text>'
