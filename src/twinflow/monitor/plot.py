# SPDX-License-Identifier: Apache-2.0
"""Small plots as inline SVG: pure functions from numbers to text.

Colours are CSS classes (`c1`, `c2`, ...) that the page defines, so that one drawing works in light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from typing import Final, Literal

from twinflow.monitor.page import framed

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 42
ROOMY: Final = (640, 280)
SLIM: Final = (350, 230)
MAX_POINTS: Final = 320  # About two pixels per point. More points would not be visible and would make the page large.
MANY_DOTS: Final = 60  # above this number, dots are drawn smaller

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: a line, a faint line in the background, dots on a line, or an area on top of the areas before it."""

    label: str
    points: Sequence[Point]
    color: int  # 1, 2, 3, ...: the page's palette
    style: Literal["line", "faint", "dots", "area"] = "line"
    note: str = ""  # shown in the legend after the label


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        """Pixel position of a value. Values outside of the range are drawn at the edge."""
        inside = min(max(value, self.low), self.high)
        return self.start_px + (inside - self.low) / (self.high - self.low) * (self.end_px - self.start_px)


def figure(
    title: str,
    series: Sequence[Series],
    from_zero: bool = False,
    cut_spikes: bool = False,
    size: tuple[int, int] = ROOMY,
) -> str:
    """A `<figure>` with heading, legend and plot. Points that are not finite are not drawn.

    The plot is drawn twice, in `size` and in a small size for phones, because letters of a large drawing are too small
    when it is scaled down. The stylesheet of the page shows one of the two drawings.

    `cut_spikes`: rare high values, such as a slow first step, do not extend the y axis. They are drawn at its edge, and
    a note gives the highest value.
    """
    shown = [replace(s, points=finite(s.points)) for s in series]
    shown = [s for s in shown if s.points]
    # The note gives the highest value of all points. A thinned curve has only means.
    highest = max((y for s in stack(shown) for _, y in s.points), default=0.0) if cut_spikes else None
    shown = [replace(s, points=thin(s.points)) for s in shown]
    drawings = "".join(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{_drawing(shown, from_zero, highest, width, height)}</svg>"
        for kind, (width, height) in (("roomy", size), ("slim", SLIM))
    )
    keys = ""
    for s in series:
        note = f" <b>{escape(s.note)}</b>" if s.note else ""
        if s.label:
            keys += f'<span><i class="key {s.style} c{s.color}"></i>{escape(s.label)}{note}</span>'
    return framed(title, keys, drawings)


def _drawing(series: Sequence[Series], from_zero: bool, highest: float | None, width: int, height: int) -> str:
    if not series:
        return f'<text class="tick" x="{width / 2}" y="{height / 2}" text-anchor="middle">nothing was measured</text>'
    xs = [x for s in series for x, _ in s.points]
    curves = stack([replace(s, points=thin(s.points, width // 2)) for s in series])
    ys = [y for s in curves for _, y in s.points]
    x_scale = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1.0, LEFT, width - RIGHT)
    y_scale = Scale(*value_range(ys, from_zero, highest is not None), height - BOTTOM, TOP)
    return _axes(x_scale, y_scale) + _curves(curves, x_scale, y_scale) + _cut_note(highest, x_scale, y_scale)


def finite(points: Sequence[Point]) -> list[Point]:
    """The points without NaN and infinity."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """At most `max_points` points. Each is the mean of several successive points, so that no part is skipped."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(len(points) / max_points)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving average over a twentieth of the curve. The window is centred, so that the average has no lag."""
    kept = thin(finite(points), 10 * MAX_POINTS)
    reach = len(kept) // 40
    sums = [0.0, *accumulate(y for _, y in kept)]  # prefix sums: the sum over a window is one difference
    out: list[Point] = []
    for i, (x, _) in enumerate(kept):
        # At the start the window stays symmetric, because the curve is steep there. At the end it may be cut off.
        near = min(reach, i)
        first, last = i - near, min(i + near, len(kept) - 1)
        out.append((x, (sums[last + 1] - sums[first]) / (last + 1 - first)))
    return out


def stack(series: Sequence[Series]) -> list[Series]:
    """Add to each area the y values of the areas below it, at the same x values. Other curves do not change."""
    out: list[Series] = []
    below: list[float] = []
    for s in series:
        if s.style == "area":
            base = below or [0.0] * len(s.points)
            lifted = [(x, y + b) for (x, y), b in zip(s.points, base, strict=True)]
            below = [y for _, y in lifted]
            s = replace(s, points=lifted)
        out.append(s)
    return out


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Tick positions between low and high. Their distance is 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if raw <= m * power * 1.0000001)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def whole(values: Sequence[float]) -> list[float]:
    """The values that are whole numbers. Ticks of a step axis must be whole."""
    return [value for value in values if abs(value - round(value)) < 1e-9 * max(1.0, abs(value))]


def tick_text(value: float) -> str:
    """The label of a tick. Values from one thousand to one million have thousands separators."""
    return f"{value:,.0f}" if 1000.0 <= abs(value) < 1e6 else f"{value:g}"


def value_range(values: Sequence[float], from_zero: bool, cut_spikes: bool) -> tuple[float, float]:
    """Lowest and highest value of the y axis, with a margin."""
    low, high = min(values), max(values)
    common = sorted(values)[int(0.97 * (len(values) - 1))]
    if cut_spikes and 0.0 < 2.0 * common < high:
        high = 1.4 * common
    if from_zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)) or high == low:
        high, low = high + (abs(high) * 0.5 or 1.0), low - abs(low) * 0.5
    margin = 0.06 * (high - low)
    return (low if from_zero and low == 0.0 else low - margin), high + margin


def _axes(x_scale: Scale, y_scale: Scale) -> str:
    left, right, bottom = x_scale.start_px, x_scale.end_px, y_scale.start_px
    parts = []
    for value in ticks(y_scale.low, y_scale.high):
        y = f"{y_scale(value):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y}" dy="4" text-anchor="end">{tick_text(value)}</text>')
    for value in whole(ticks(x_scale.low, x_scale.high, about=max(3, round((right - left) / 85)))):
        x, text = x_scale(value), f"{value:,.0f}"
        beyond = x + 3.5 * len(text) > right + RIGHT  # half of the text would not fit
        x, anchor = (right + RIGHT - 2, "end") if beyond else (x, "middle")
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (left + right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{bottom + 36}" text-anchor="middle">step</text>')
    return "".join(parts)


def _curves(series: Sequence[Series], x_scale: Scale, y_scale: Scale) -> str:
    # A stack is drawn from top to bottom: each area reaches down to the axis and covers the lower part of the previous
    # one.
    areas = [s for s in series if s.style == "area"]
    others = [s for s in series if s.style != "area"]
    halo = bool(areas)  # a line across areas needs an outline to be visible
    below = "".join(_curve(s, x_scale, y_scale) for s in reversed(areas))
    return below + "".join(_curve(s, x_scale, y_scale, halo) for s in others)


def _curve(series: Series, x_scale: Scale, y_scale: Scale, halo: bool = False) -> str:
    at = [(f"{x_scale(x):.1f}", f"{y_scale(y):.1f}") for x, y in series.points]
    if series.style == "area" and len(at) == 1:
        at.append((f"{x_scale.end_px:.1f}", at[0][1]))  # an area of one point has no width
    path = " ".join(f"{x},{y}" for x, y in at)
    kind = f"{series.style} c{series.color}"
    if series.style == "area":
        base = f"{y_scale(0.0):.1f}"
        return f'<polygon class="{kind}" points="{at[0][0]},{base} {path} {at[-1][0]},{base}"/>'
    line = f'<polyline class="{kind}" points="{path}"/>'
    if halo:
        line = f'<polyline class="halo" points="{path}"/>' + line
    if series.style != "dots" and len(at) > 1:
        return line
    radius = 3.5 if len(at) <= MANY_DOTS else 2
    dots = (
        f'<circle class="dot c{series.color}" cx="{x}" cy="{y}" r="{radius}">'
        f"<title>{escape(series.label)}: {value:.4g} at {step:g}</title></circle>"
        for (x, y), (step, value) in zip(at, series.points, strict=True)
    )
    return line + "".join(dots)


def _cut_note(highest: float | None, x_scale: Scale, y_scale: Scale) -> str:
    if highest is None or highest <= 1.2 * y_scale.high:  # smaller differences are noise that `thin` removed
        return ""
    text = f"single values up to {highest:,.4g}"
    return f'<text class="tick" x="{x_scale.end_px}" y="{y_scale.end_px - 3}" text-anchor="end">{text}</text>'
