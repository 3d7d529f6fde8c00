# SPDX-License-Identifier: Apache-2.0
"""The host kernels' benchmark (`twinflow bench host`), with `--save` for a dated result file in benchmarks/results."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from twinflow.cli.bench import FIGURE_HEADERS, KERNEL_HEADERS, Page, run_host

RESULTS = Path(__file__).parent / "results"


def main(
    numel: Annotated[int | None, typer.Option(help="Parameters.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for everybody.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed calls of each contender.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write the result to a dated file.")] = False,
) -> None:
    """Measure the host kernels; the options are those of `twinflow bench host`."""
    page = run_host(Console(), numel, threads, repeats, quick)
    if save:
        today = datetime.date.today().isoformat()
        path = RESULTS / f"{today}-host-{page.isa}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(markdown(page, today), encoding="utf-8")
        typer.echo(f"written to {path}", err=True)


def markdown(page: Page, date: str) -> str:
    """The page as a Markdown file."""
    lines = [f"# Host kernels, {page.isa}, {date}", "", *(f"- {line}" for line in page.lines), ""]
    lines += [*table(KERNEL_HEADERS, page.kernels), "", *table(FIGURE_HEADERS, page.figures)]
    return "\n".join([*lines, "", "```json", page.json_line, "```", ""])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a rival's indent becomes an arrow, since Markdown drops it."""
    cells = [[cell.replace("  ", "↳ ", 1) if cell.startswith("  ") else cell for cell in row] for row in rows]
    align = ["---", *("---:" for _ in headers[1:])]
    return [f"| {' | '.join(row)} |" for row in (headers, align, *cells)]


if __name__ == "__main__":
    typer.run(main)
