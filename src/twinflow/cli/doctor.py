# SPDX-License-Identifier: Apache-2.0
"""`twinflow doctor`: reports the hardware and software of this machine, what is missing, and how to get it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinflow.bench.disk import DiskRates, measure_disk
from twinflow.bench.machine import Machine
from twinflow.cli import told_errors
from twinflow.cli.facts import Cuda, Facts, Finding, Kernels, Pinned, findings, gather, is_usable
from twinflow.monitor.progress import gib

STYLES = {"broken": "bold red", "warning": "yellow", "note": "cyan"}
PIPE_WIDTH = 120  # width of the output into a pipe
Rows = list[tuple[str, str]]


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the report."),
    disk: Path | None = typer.Option(
        None, "--disk", help="Also measure the disk of this folder, with a file of 1 GiB, which is removed again."
    ),
) -> None:
    """Check this machine and say how to fix what is missing. The exit code is 1 if twinflow cannot work here."""
    facts = gather()
    if disk is not None:
        with told_errors():
            facts = replace(facts, disk=measure_disk(disk))
    found = findings(facts)
    if as_json:
        typer.echo(json.dumps(to_dict(facts, found)))
    else:
        console = Console()
        print_report(console if console.is_terminal else Console(width=PIPE_WIDTH), facts, found)
    raise typer.Exit(0 if is_usable(found) else 1)


def to_dict(facts: Facts, found: Sequence[Finding]) -> dict[str, Any]:
    return {"usable": is_usable(found), **asdict(facts), "findings": [asdict(finding) for finding in found]}


def print_report(console: Console, facts: Facts, found: Sequence[Finding]) -> None:
    """Print sections of facts, then the findings and their remedies."""
    missing = [extra for extra in facts.extras if extra.version is None]
    sections: list[tuple[str, Rows]] = [
        ("machine", machine_rows(facts.machine)),
        ("native kernels", kernel_rows(facts.kernels)),
        ("versions", [(name, version or "not installed") for name, version in facts.versions.items()]),
        ("CUDA", cuda_rows(facts.cuda, facts.pinned)),
        ("disk", disk_rows(facts.disk) if facts.disk is not None else []),
        ("optional, installed", [(e.name, f"{e.version}: {e.purpose}") for e in facts.extras if e.version is not None]),
        ("optional, missing", [(e.name, f"{e.purpose}: pip install {e.name}") for e in missing]),
    ]
    width = max(len(name) for _, rows in sections for name, _ in rows)
    for title, rows in sections:
        if rows:
            console.print(Text(title, style="bold"))
            console.print(grid([(Text(f"  {name}"), Text(value)) for name, value in rows], width + 2))
    if found:
        console.print(Text("findings", style="bold"))
        levels = [(Text(f"  {f.level}", style=STYLES[f.level]), Text(f"{f.what}\n-> {f.remedy}")) for f in found]
        console.print(grid(levels, width + 2))
    verdict = "twinflow can work here" if is_usable(found) else "twinflow cannot work here"
    console.print(Text(verdict, style="bold green" if is_usable(found) else "bold red"))


def grid(rows: Sequence[tuple[Text, Text]], name_width: int) -> Table:
    """A table of names and values. Long values are folded within their column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=name_width)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def machine_rows(machine: Machine) -> Rows:
    quota = f"{machine.cgroup_cores} by the cgroup's quota" if machine.cgroup_cores is not None else "no cgroup quota"
    limit = machine.cgroup_memory_bytes
    capped = f", cgroup limit {gib(limit)}" if limit is not None else ""
    available = gib(machine.available_bytes)
    return [
        ("system", f"{machine.system} {machine.architecture}"),
        ("CPU", machine.cpu),
        ("cores", f"{machine.physical_cores} physical, {machine.logical_cores} logical"),
        ("usable cores", f"{machine.usable_cores}: {machine.affinity_cores} by affinity, {quota}"),
        ("memory", f"{gib(machine.memory_bytes)}, {available} available{capped}"),
        ("huge pages", machine.huge_pages),
        ("NUMA nodes", str(machine.numa_nodes)),
    ]


def kernel_rows(kernels: Kernels) -> Rows:
    if kernels.setting_error is not None:
        return [("library", "not loaded; see the findings below")]
    if not kernels.abi_ok:
        return [("library", f"none: {kernels.problem}"), ("kernels", "torch implementations, only for host optimizers")]
    why = "forced by TWINFLOW_ISA" if kernels.isa_forced else "the best of " + ", ".join(kernels.isa_available)
    agree = "WRONG; see the findings below" if kernels.disagreements else "equal to the references bit for bit"
    return [
        ("library", f"{kernels.path}, compatible ABI"),
        ("variant", f"{kernels.isa}: {why}"),
        ("threads", f"{kernels.threads}: {kernels.threads_from}"),
        ("results", agree),
    ]


def cuda_rows(cuda: Cuda, pinned: Pinned) -> Rows:
    gpus = [
        (f"GPU {i}", f"{gpu.name}, {gib(gpu.memory_bytes)}, compute capability {gpu.capability}")
        for i, gpu in enumerate(cuda.gpus)
    ]
    limit = gib(pinned.limit_bytes) if pinned.limit_bytes is not None else "no limit"
    trial = {True: "works", False: f"fails: {pinned.problem}", None: "not tried without a GPU"}[pinned.works]
    return [
        *(gpus or [("GPU", f"none: {cuda.problem}")]),
        ("torch's CUDA", cuda.built_for or "none"),
        ("driver", f"{cuda.driver or 'none'}, up to CUDA {cuda.driver_cuda}" if cuda.driver_cuda else "none"),
        ("pinned memory", f"{trial}; RLIMIT_MEMLOCK: {limit}"),
    ]


def disk_rows(disk: DiskRates) -> Rows:
    return [
        ("folder", f"{disk.folder}, {gib(disk.free_bytes)} free"),
        ("access", "around the page cache" if disk.is_direct else "through the page cache: no direct I/O here"),
        *([("requests", f"by {disk.io}")] if disk.io else []),
        ("read", f"{disk.read / 1e9:.2f} GB/s"),
        ("write", f"{disk.write / 1e9:.2f} GB/s"),
        ("update", f"{disk.update / 1e9:.2f} GB/s of reads and writes together"),
    ]
