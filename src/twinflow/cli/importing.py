"""`twinflow import`: converts a DeepSpeed checkpoint without executing the pickled code in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinflow.checkpoint.importing import describe, import_deepspeed
from twinflow.cli.export import progress, told_errors
from twinflow.rules import RULES


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="DeepSpeed's checkpoint folder, or the folder of one tag.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write, for engine.load_checkpoint.")],
    tag: Annotated[str | None, typer.Option(help="Tag of the checkpoint. Default: the latest.")] = None,
    rule: Annotated[
        str | None, typer.Option(help=f"{', '.join(RULES)}. Default: determined from the config and the states.")
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Do not convert the optimizer state.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint with this tag.")] = False,
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
