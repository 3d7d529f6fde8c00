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
from twinflow.errors import bad_value

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")

KERNEL_HEADERS = ("kernel", "B/param", "G param/s", "GB/s", "ceiling before - after", "of ceiling", "ours is")
FIGURE_HEADERS = ("figure", "wanted", "measured")
Row = tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """What a finished run has to say, for a terminal or for a file."""

    machine: str
    versions: str
    run: str
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
            raise bad_value("native library", problem, "one that loads", "`twinflow doctor` says what is missing")
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
    versions = read_versions()
    extra: dict[str, Any] = {"machine": asdict(machine), "versions": versions}
    settings = report.settings
    named = {**versions, "deepspeed": report.deepspeed}
    return Page(
        machine=describe(machine),
        versions=", ".join(f"{name} {version or 'not installed'}" for name, version in named.items()),
        run=f"{settings.numel:,} parameters, {settings.threads} threads for everybody, kernels {report.isa}, "
        f"median of {settings.repeats} calls, contenders in turn; kernels agree bit for bit with the references",
        kernels=[kernel_row(result, report.results) for result in report.results],
        figures=[figure_row(figure) for figure in report.figures],
        isa=report.isa,
        json_line=json.dumps(to_dict(report, extra), allow_nan=False),
    )


def kernel_row(result: Result, results: Sequence[Result]) -> Row:
    """A kernel of ours with its bytes, or below it a rival and how much faster ours is."""
    rate = f"{result.params_per_s / 1e9:.3f}"
    if result.rival_of is not None:
        return (f"  {result.name}", "", rate, "", "", "", f"{speedup(result, results) or 0.0:.2f}x")
    assert result.bytes_per_s and result.of_ceiling and result.ceiling_before and result.ceiling_after
    return (
        result.name,
        f"{result.bytes_per_param:g}",
        rate,
        f"{result.bytes_per_s / 1e9:.1f}",
        f"{result.ceiling_before / 1e9:.1f} - {result.ceiling_after / 1e9:.1f}",
        f"{result.of_ceiling:.2f}",
        "",
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
    for line in (page.machine, page.versions, page.run):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for headers, rows in ((KERNEL_HEADERS, page.kernels), (FIGURE_HEADERS, page.figures)):
        table = Table()
        for i, header in enumerate(headers):
            table.add_column(header, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(page.json_line, highlight=False, markup=False, soft_wrap=True)
