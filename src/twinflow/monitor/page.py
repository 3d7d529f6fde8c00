# SPDX-License-Identifier: Apache-2.0
"""HTML pages: one file without scripts and without references to other files.

The stylesheet has a palette for light and one for dark mode. Plots and bars use the classes c1 to c4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

Rows = Sequence[tuple[str, str]]

_COLORS: Final = "".join(
    f".key.c{i} {{ background: var(--c{i}); }} svg polyline.c{i} {{ stroke: var(--c{i}); }}\n"
    f"svg polygon.c{i}, svg .dot.c{i} {{ fill: var(--c{i}); }}\n"
    for i in (1, 2, 3, 4)
)

STYLE: Final = (
    """
:root {
  --page: #f6f7f9; --card: #ffffff; --line: #e1e5ea; --ink: #1b2430; --soft: #5b6775;
  --c1: #2463d1; --c2: #d4570c; --c3: #0d8a7c; --c4: #8b2fb8; --good: #0a7d55; --warn: #a86200; --bad: #c02b37;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151b; --card: #1a2028; --line: #2d3641; --ink: #e8edf3; --soft: #9aa7b5;
    --c1: #7eabff; --c2: #ff9a5a; --c3: #4fd0be; --c4: #dc8cff; --good: #4ccf98; --warn: #f0b04a; --bad: #ff7d86;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 28px 20px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
header { margin-bottom: 20px; }
header p { margin: 4px 0 0; color: var(--soft); overflow-wrap: anywhere; }
header .brand { font-weight: 700; letter-spacing: .04em; color: var(--c1); margin: 0; }
h1 { font-size: 26px; line-height: 1.25; margin: 2px 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 8px; }
h3 { font-size: 15px; margin: 0; }
.badge {
  font-size: 13px; font-weight: 600; vertical-align: 4px; padding: 2px 10px; border-radius: 99px; white-space: nowrap;
  border: 1px solid currentColor;
}
.finished { color: var(--good); } .interrupted { color: var(--warn); } .stopped { color: var(--bad); }
.tiles {
  display: grid; gap: 12px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(max(150px, calc((100% + 12px) / var(--columns) - 12px)), 1fr));
}
.tiles div, figure, .tables > div, .notes, details {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; margin: 0;
}
dt { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0 0; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.plots, .tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
.plots figure:first-child { grid-column: 1 / -1; }
.tables { margin: 16px 0; align-items: start; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 16px; margin-bottom: 6px; }
.legend { margin: 0; font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 14px; }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px; vertical-align: 3px; }
.key.area, .key.dots { height: 10px; width: 10px; vertical-align: -1px; } .key.dots { border-radius: 50%; }
svg { display: block; width: 100%; height: auto; } svg.slim { display: none; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
svg .tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg polyline.halo { stroke: var(--card); stroke-width: 4.5; }
svg polyline.faint { stroke-width: 1; opacity: .3; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 8px 5px 0; border-top: 1px solid var(--line); vertical-align: top; }
tr:first-child > * { border-top: 0; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; padding-right: 20px; width: 1%; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.numbers th, .numbers td { width: auto; text-align: right; white-space: nowrap; padding: 4px 0 4px 16px; }
.numbers tbody tr:first-child > * { border-top: 1px solid var(--line); }
.wide { overflow-x: auto; margin: 12px 0 20px; }
details + details { margin-top: 16px; } .notes { margin: 16px 0 0; }
summary { cursor: pointer; font-weight: 600; }
pre {
  overflow-x: auto; margin: 12px 0 0;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.notes ul { margin: 0; padding-left: 20px; } .notes li { overflow-wrap: anywhere; }
@media (max-width: 560px) {
  body { padding: 18px 12px 36px; } h1 { font-size: 22px; } dd { font-size: 19px; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .tiles div:last-child:nth-child(odd) { grid-column: 1 / -1; } .plots, .tables { gap: 10px; }
  .tiles div, figure, .tables > div, .notes, details { padding: 10px 12px; } figure { padding: 10px 8px; }
  svg.roomy { display: none; } svg.slim { display: block; }
  .tables th { white-space: normal; width: 32%; padding-right: 12px; }
}
@media print { body { max-width: none; background: none; } figure, .tiles div, .tables > div { break-inside: avoid; } }
"""
    + _COLORS
)


def render_page(
    title: str,
    heading: str,
    badge: tuple[str, str],
    lines: Iterable[str],
    parts: Iterable[str],
    brand: str = "twinflow",
    style: str = "",
) -> str:
    """A page: a heading with a badge (its class and its text), lines of text under it, and parts in HTML.

    `brand`: the name over the heading. `style`: further rules for the stylesheet.
    """
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} · twinflow</title>
<style>{STYLE}{style}</style>
</head>
<body>
<header><p class="brand">{brand}</p>
<h1>{escape(heading)} <span class="badge {badge[0]}">{badge[1]}</span></h1>
{text}</header>
<main>
{body}
</main>
</body>
</html>
"""


def tiles(rows: Rows) -> str:
    """Numbers in large letters, at most seven in a row, and about the same number in each row."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    columns = max(1, math.ceil(len(rows) / max(1, math.ceil(len(rows) / 7))))
    return f'<dl class="tiles" style="--columns: {columns}">{cells}</dl>'


def notes(title: str, body: str) -> str:
    return f'<section class="notes"><h2>{escape(title)}</h2>{body}</section>'


def framed(title: str, keys: str, drawing: str) -> str:
    """A `<figure>` with heading and legend. `keys`: the entries of the legend."""
    legend = f'<p class="legend">{keys}</p>' if keys else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{drawing}</figure>"


def config_text(config: str) -> str:
    return f"<details><summary>Config</summary><pre>{escape(config)}</pre></details>" if config else ""


def table(title: str, rows: Rows) -> str:
    """A table of two columns, names and values, under a heading."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<div><h2>{escape(title)}</h2><table>{body}</table></div>"


def number_table(names: Iterable[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """A table of numbers with a row of names. `kinds`: classes of the rows."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = ""
    for i, row in enumerate(rows):
        kind = f' class="{kinds[i]}"' if kinds else ""
        body += f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    return f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
