# SPDX-License-Identifier: Apache-2.0
"""Step time and memory against the ratio, from a result of twin_flow.py: an SVG beside the Markdown file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from twinflow.monitor.plot import tick_text, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 640, 250, 52, 470, 40
COLORS = ("#2563eb", "#64748b", "#ea580c", "#16a34a", "#9333ea")
STYLE = "text{font:13px sans-serif;fill:#334155}.title{font-weight:600}.tick{font-size:11px;fill:#64748b}"
STYLE += ".grid{stroke:#e2e8f0;stroke-width:1}"
Line = tuple[str, Sequence[tuple[float, float]]]


def panel(title: str, lines: Sequence[Line], y0: int) -> str:
    """One plot: ratio from 0 to 1 across, from zero upwards, each line named where it ends."""
    top = 1.1 * max(y for _, points in lines for _, y in points) or 1.0
    marks = ticks(0.0, top)
    bottom = y0 + HEIGHT - 50

    def at(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + x * (RIGHT - LEFT), 1), round(bottom - y / top * (bottom - y0 - TOP), 1)

    parts = [text(LEFT, y0 + 20, title, "title"), text((LEFT + RIGHT) / 2, bottom + 34, "ratio", "tick", "middle")]
    for y in marks:
        parts.append(f'<polyline class="grid" points="{LEFT},{at(0, y)[1]} {RIGHT},{at(0, y)[1]}"/>')
        parts.append(text(LEFT - 8, at(0, y)[1] + 4, tick_text(y), "tick", "end"))
    parts += [text(at(x, 0)[0], bottom + 18, f"{x:g}", "tick", "middle") for x in (0, 0.25, 0.5, 0.75, 1)]
    for (_, points), color in zip(lines, COLORS, strict=False):
        places = [at(*point) for point in sorted(points)]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        if len(places) > 2:
            parts += [f'<circle r="3.5" fill="{color}" cx="{x}" cy="{y}"/>' for x, y in places]
    ends = sorted((at(*max(points))[1], label, color) for (label, points), color in zip(lines, COLORS, strict=False))
    lowest = -100.0
    for y, label, color in ends:  # names must not lie on each other
        lowest = max(y, lowest + 16)
        parts.append(f'<text x="{RIGHT + 12}" y="{lowest + 4}" style="fill:{color}">{label}</text>')
    return "\n".join(parts)


def text(x: float, y: float, what: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x}" y="{y}">{what}</text>'


def picture(page: str) -> str:
    """From the JSON line of a result."""
    found = re.search(r"```json\n(.*?)\n```", page, re.S)
    assert found is not None, "no JSON line in the file"
    facts, rows = json.loads(found[1])["results"]["sweep"]
    swept = [r for r in rows if isinstance(r.get("ratio"), float) and "streamed" not in r["name"]]
    alone = sum(facts["gpu_batch4"].values())
    master = next(r["step_s"] for r in rows if r["name"].startswith("no offload") and r["batch"] == 4)
    times: list[Line] = [
        ("step", [(r["host_share"], r["step_s"]) for r in swept]),
        ("forward + backward", [(0, alone), (1, alone)]),
        ("no offload (torch)", [(0, master), (1, master)]),
    ]
    memory: list[Line] = [
        ("GPU", [(r["host_share"], r["gpu_gb"]) for r in swept]),
        ("host", [(r["host_share"], r["host_gb"] - r["shadow_gb"]) for r in swept]),
        ("host, with spare", [(r["host_share"], r["host_gb"]) for r in swept]),
    ]
    return drawing([("Seconds a step: 3.43 B parameters, 4 x 2048 tokens, clipping on", times), ("Memory, GB", memory)])


def drawing(panels: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """An SVG with one plot below the other."""
    body = "".join(panel(title, lines, i * HEIGHT) for i, (title, lines) in enumerate(panels))
    height = len(panels) * HEIGHT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{back}{body}</svg>\n'


def main() -> None:
    path = Path(sys.argv[1])
    path.with_suffix(".svg").write_text(picture(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
