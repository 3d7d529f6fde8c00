"""`twinflow bench`: measure this machine. Machine, versions, tables, and one JSON object as the last line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from twinflow import native
from twinflow.bench import check
from twinflow.bench.host import Figure, Report, Result, choose_settings, measure, speedup, to_dict
from twinflow.bench.machine import Machine, describe, read_machine, read_versions
from twinflow.errors import invalid_value

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")

KERNEL_HEADERS = ("kernel", "B/param", "G param/s", "GB/s", "ceiling before - after", "of ceiling", "ours is")
FIGURE_HEADERS = ("figure", "wanted", "measured")
STATE_BYTES = 12  # a parameter, fp32
Row = tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """What a finished run has to say, for a terminal or for a file."""

    lines: Sequence[str]  # machine, versions, what was run, and what to beware of
    kernels: Sequence[Row]
    figures: Sequence[Row]
    isa: str
    json_line: str


@bench_app.callback()
def bench() -> None:
    """Measure this machine."""


@bench_app.command()
def host(
    numel: Annotated[
        int | None, typer.Option(help="Parameters. Default: 2**27, less where half the memory is not enough.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for everybody. Default: the kernels' own.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed calls of each contender. Default: 7.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller run: 2**24 parameters, 3 repeats.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the JSON object to this file.")] = None,
) -> None:
    """Measure the host kernels against the memory's ceiling, torch and, where installed, DeepSpeed."""
    page = run_host(Console(), numel, threads, repeats, quick)
    if json_file is not None:
        json_file.write_text(page.json_line + "\n", encoding="utf-8")


def run_host(console: Console, numel: int | None, threads: int | None, repeats: int | None, quick: bool) -> Page:
    """Check, measure and print. Exits with 1, before any number is shown, when the kernels are absent or wrong."""
    machine = read_machine()
    try:
        settings = choose_settings(numel, threads, repeats, quick, machine.available_bytes)
        if not native.available():
            problem = native.library.load().problem
            raise invalid_value("native library", problem, "one that loads", "`twinflow doctor` says what is missing")
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    # Notes on progress go to stderr: stdout is the report.
    with Console(stderr=True).status("checking the kernels against their references") as status:
        refuse_if_wrong(check.disagreements())
        report = measure(settings, lambda job: status.update(f"measuring: {job}"))
    page = make_page(machine, report)
    print_page(console, page)
    return page


def refuse_if_wrong(disagreements: Sequence[str]) -> None:
    """No speed of a kernel that computes something else."""
    if not disagreements:
        return
    typer.echo("error: the kernels disagree with their references, so no speed is reported:", err=True)
    for line in disagreements:
        typer.echo(f"  {line}", err=True)
    typer.echo(json.dumps({"benchmark": "host", "correct": False, "disagreements": list(disagreements)}))
    raise typer.Exit(1)


def make_page(machine: Machine, report: Report) -> Page:
    """Everything as text."""
    versions, settings = read_versions(), report.settings
    extra: dict[str, Any] = {"machine": asdict(machine), "versions": versions}
    named = {**versions, "deepspeed": report.deepspeed}
    lines = [
        describe(machine),
        ", ".join(f"{name} {version or 'not installed'}" for name, version in named.items()),
        f"{settings.numel:,} parameters, {settings.threads} threads for everybody, kernels {report.isa}, median of "
        f"{settings.repeats} calls, contenders in turn; the kernels agree bit for bit with their references",
    ]
    if STATE_BYTES * settings.numel < 4 * machine.cache_bytes:
        lines.append("note: so few parameters partly stay in the caches: these are not the memory's rates")
    return Page(
        lines=lines,
        kernels=[kernel_row(result, report.results) for result in report.results],
        figures=[figure_row(figure) for figure in report.figures],
        isa=report.isa,
        json_line=json.dumps(to_dict(report, extra), allow_nan=False),
    )


def kernel_row(result: Result, results: Sequence[Result]) -> Row:
    """A kernel of ours with its bytes, or below it a rival and how much faster ours is."""

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
    """A figure, met or not."""
    wanted = f">= {figure.wanted:.2f}{figure.unit}"
    if figure.measured is None:
        return (figure.name, wanted, "not measured")
    return (figure.name, wanted, f"{figure.measured:.2f}{figure.unit} {'met' if figure.met else 'MISSED'}")


def print_page(console: Console, page: Page) -> None:
    """The report on a terminal or in a pipe; the JSON object is the last line, unbroken."""
    if not console.is_terminal:
        console = Console(file=console.file, width=140)  # a pipe has no width: do not fold the table
    for line in page.lines:
        console.out(line, highlight=False)
    for headers, rows in ((KERNEL_HEADERS, page.kernels), (FIGURE_HEADERS, page.figures)):
        table = Table()
        for i, header in enumerate(headers):
            table.add_column(header, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.out(page.json_line, highlight=False)
