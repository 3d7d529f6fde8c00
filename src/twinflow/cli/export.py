# SPDX-License-Identifier: Apache-2.0
"""`twinflow export` writes the weights of a checkpoint as a model folder that other libraries load. `twinflow import`
converts a DeepSpeed checkpoint without executing the pickled code in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from twinflow.checkpoint.exporting import export_checkpoint
from twinflow.checkpoint.importing import describe, import_deepspeed
from twinflow.cli import told_errors
from twinflow.cli.settings import parse_bytes
from twinflow.rules import RULES

LINE_S: Final = 10.0  # shortest time between two progress lines if the output is not a terminal


def export(
    checkpoint: Path = typer.Argument(help="Folder with checkpoints, or the folder of one checkpoint."),
    out: Path = typer.Argument(help="Folder to write."),
    dtype: str = typer.Option("fp32", help="Data type of the weights: fp32, bf16 or fp16."),
    tag: str | None = typer.Option(None, help="Tag of the checkpoint. Default: the latest."),
    max_shard_size: str = typer.Option("5GB", help="Largest size of each file, for example 5GB."),
    config: Path | None = typer.Option(None, help="A config.json to copy into the folder."),
    force: bool = typer.Option(False, "--force", help="Replace an earlier export in the folder."),
) -> None:
    """Write the weights of a checkpoint as safetensors, from the fp32 masters if the checkpoint has them."""
    with told_errors(), progress("exporting") as on_progress:
        shard_bytes = parse_bytes("--max-shard-size", max_shard_size)
        assert shard_bytes is not None
        done = export_checkpoint(
            checkpoint,
            out,
            tag,
            dtype=dtype,
            shard_bytes=shard_bytes,
            config=config,
            replace=force,
            on_progress=on_progress,
        )
    what = f"{done.num_tensors} tensors as {dtype}, {done.num_masters} of them from fp32 masters"
    typer.echo(f"{done.path}: {what}, {done.num_bytes:,} bytes, from {done.source}")
    for note in done.notes:
        typer.echo(f"note: {note}")


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in total). It updates a bar on a terminal and prints lines otherwise."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what)
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            typer.echo(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", err=True)

    return tell


def import_(
    source: Path = typer.Argument(metavar="DIR", help="DeepSpeed's checkpoint folder, or the folder of one tag."),
    out: Path = typer.Argument(help="Folder to write, for engine.load_checkpoint."),
    tag: str | None = typer.Option(None, help="Tag of the checkpoint. Default: the latest."),
    rule: str | None = typer.Option(
        None, help=f"Update rule: {', '.join(RULES)}. Default: determined from the config and the states."
    ),
    weights_only: bool = typer.Option(False, "--weights-only", help="Do not convert the optimizer state."),
    force: bool = typer.Option(False, "--force", help="Replace an existing checkpoint with this tag."),
) -> None:
    """Convert a DeepSpeed checkpoint (ZeRO 0 to 3, any number of ranks) for engine.load_checkpoint."""
    with told_errors(), progress("importing") as on_progress:
        done = import_deepspeed(
            source, out, tag, rule=rule, weights_only=weights_only, replace=force, on_progress=on_progress
        )
    first, *notes = describe(done)
    typer.echo(first)
    for note in notes:
        typer.echo(f"note: {note}")
