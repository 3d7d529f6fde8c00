"""The `twinflow` command and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from twinflow.cli.attention import attention_app
from twinflow.cli.bench import bench_app
from twinflow.cli.doctor import doctor
from twinflow.cli.export import export
from twinflow.cli.importing import import_
from twinflow.cli.launch import CONTEXT, launch
from twinflow.cli.plan import plan
from twinflow.cli.train import train
from twinflow.version import __version__

app = typer.Typer(
    name="twinflow",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help wraps: the panels cut off long option names on a narrow terminal
    # A traceback that prints every local variable of a training loop hides the one line that matters.
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """Answer --version and stop."""
    if wanted:
        typer.echo(f"twinflow {__version__}")
        raise typer.Exit


@app.callback()
def twinflow(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models larger than GPU memory, with the optimizer on the host."""


app.command()(train)
app.command()(plan)
app.command()(doctor)
app.command(context_settings=CONTEXT)(launch)
app.command()(export)
app.command(name="import")(import_)
app.add_typer(bench_app, name="bench")
app.add_typer(attention_app, name="attention")


def main() -> None:
    """Entry point of the installed script."""
    app()


if __name__ == "__main__":
    main()
