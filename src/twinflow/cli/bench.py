# SPDX-License-Identifier: Apache-2.0
"""`twinflow bench`: measures the host kernels of this machine and prints tables. `--json` writes all numbers to a
file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from twinflow import native
from twinflow.bench import check
from twinflow.bench.host import Figure, Report, Result, choose_settings, measure, speedup, to_dict
from twinflow.bench.machine import Machine, describe, read_machine, read_versions
from twinflow.cli import told_errors
from twinflow.errors import wrong_state

bench_app = typer.Typer(no_args_is_help=True, help="Measure the speed of the host kernels.")

KERNEL_HEADERS = ("kernel", "B/param", "G param/s", "GB/s", "ceiling before - after", "of ceiling", "ours is")
FIGURE_HEADERS = ("figure", "wanted", "measured")
STATE_BYTES = 12  # for each parameter, in fp32
Row = tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """Results of a finished run, for a terminal or a file."""

    lines: Sequence[str]  # machine, versions, settings, and notes on the results
    kernels: Sequence[Row]
    figures: Sequence[Row]
    isa: str
    json_line: str


@bench_app.callback()
def bench() -> None:
    """Measure the speed of the host kernels."""


@bench_app.command()
def host(
    numel: int | None = typer.Option(
        None, help="Number of parameters. Default: 2**27, or fewer if they would need more than half of the memory."
    ),
    threads: int | None = typer.Option(
        None, help="Threads of every implementation that is measured. Default: as many as the kernels use."
    ),
    repeats: int | None = typer.Option(None, help="Timed calls of each implementation that is measured. Default: 7."),
    quick: bool = typer.Option(False, "--quick", help="Measure less: 2**24 parameters, 3 repeats."),
    json_file: Path | None = typer.Option(None, "--json", help="Write all numbers to this file as a JSON object."),
) -> None:
    """Measure the host kernels against the memory bandwidth, torch and, if installed, DeepSpeed."""
    page = run_host(Console(), numel, threads, repeats, quick, json_file)
    if json_file is not None:
        json_file.write_text(page.json_line + "\n", encoding="utf-8")
        typer.echo(f"All numbers as JSON: {json_file}")


def run_host(
    console: Console,
    numel: int | None,
    threads: int | None,
    repeats: int | None,
    quick: bool,
    json_file: Path | None = None,
) -> Page:
    """Check the kernels, measure them and print the results.

    Exits with code 1 before any number is shown if the native library is missing or a kernel computes wrong results.
    For wrong results `json_file` gets an object with `"correct": false`.
    """
    machine = read_machine()
    with told_errors(kinds=(ValueError, RuntimeError)):
        settings = choose_settings(numel, threads, repeats, quick, machine.available_bytes)
        if not native.available():
            problem = native.library.load().problem
            reason = f"the native library cannot be loaded ({problem})"
            raise wrong_state("The host kernels cannot be measured", reason, "Run `twinflow doctor` for the remedy.")
    # Progress goes to stderr, because stdout is the report.
    with Console(stderr=True).status("checking the kernels against their references") as status:
        refuse_if_wrong(check.disagreements(), json_file)
        report = measure(settings, lambda job: status.update(f"measuring: {job}"))
    page = make_page(machine, report)
    print_page(console, page)
    return page


def refuse_if_wrong(disagreements: Sequence[str], json_file: Path | None = None) -> None:
    """Exit with code 1 if a kernel disagrees with its reference: the speed of a wrong kernel means nothing."""
    if not disagreements:
        return
    typer.echo("error: No speed is reported, because kernels compute wrong results (see `twinflow doctor`):", err=True)
    for line in disagreements:
        typer.echo(f"  {line}", err=True)
    if json_file is not None:
        result = {"benchmark": "host", "correct": False, "disagreements": list(disagreements)}
        json_file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    raise typer.Exit(1)


def make_page(machine: Machine, report: Report) -> Page:
    versions, settings = read_versions(), report.settings
    extra: dict[str, Any] = {"machine": asdict(machine), "versions": versions}
    named = {**versions, "deepspeed": report.deepspeed}
    lines = [
        describe(machine),
        ", ".join(f"{name} {version or 'not installed'}" for name, version in named.items()),
        f"{settings.numel:,} parameters, {settings.threads} threads for every implementation, kernels {report.isa}, "
        f"median of {settings.repeats} calls; the results of the kernels equal their references bit for bit",
    ]
    if STATE_BYTES * settings.numel < 4 * machine.cache_bytes:
        lines.append("note: so few parameters partly fit into the CPU caches, so the rates exceed those of the memory")
    return Page(
        lines=lines,
        kernels=[kernel_row(result, report.results) for result in report.results],
        figures=[figure_row(figure) for figure in report.figures],
        isa=report.isa,
        json_line=json.dumps(to_dict(report, extra), allow_nan=False),
    )


def kernel_row(result: Result, results: Sequence[Result]) -> Row:
    """Row of a twinflow kernel, or of another implementation of it. The latter row shows the speed of the twinflow
    kernel divided by that of the other implementation.
    """

    def cell(value: float | None, format: str, unit: float = 1.0) -> str:
        return f"{value / unit:{format}}" if value is not None else ""

    before, after = cell(result.ceiling_before, ".1f", 1e9), cell(result.ceiling_after, ".1f", 1e9)
    return (
        result.name if result.rival_of is None else f"  {result.name}",
        cell(result.bytes_per_param, "g"),
        cell(result.params_per_s, ".3f", 1e9),
        cell(result.bytes_per_s, ".1f", 1e9),
        f"{before} - {after}" if before and after else "",
        cell(result.of_ceiling, ".2f"),
        cell(speedup(result, results), ".2f") + ("x" if result.rival_of is not None else ""),
    )


def figure_row(figure: Figure) -> Row:
    """Row of a target figure and whether the measurement meets it."""
    wanted = f">= {figure.wanted:.2f}{figure.unit}"
    if figure.measured is None:
        return (figure.name, wanted, "not measured")
    return (figure.name, wanted, f"{figure.measured:.2f}{figure.unit} {'met' if figure.met else 'MISSED'}")


def print_page(console: Console, page: Page) -> None:
    if not console.is_terminal:
        console = Console(file=console.file, width=140)  # wide enough that no row of the table wraps in a pipe
    for line in page.lines:
        console.out(line, highlight=False)
    for headers, rows in ((KERNEL_HEADERS, page.kernels), (FIGURE_HEADERS, page.figures)):
        table = Table()
        for i, header in enumerate(headers):
            table.add_column(header, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
