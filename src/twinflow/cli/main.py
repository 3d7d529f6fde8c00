"""The `twinflow` command and its subcommands, each of which is loaded when it is called: torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from twinflow.version import __version__


class Command(NamedTuple):
    """Where a subcommand is, and its line in the help."""

    module: str
    name: str  # of a function, or of a typer app
    help: str


COMMANDS = {
    "train": Command("train", "train", "Pretrain a GPT with the optimizer on the host, and write a report page."),
    "plan": Command("plan", "plan", "Say what a model needs on GPU and host, and how long a step takes."),
    "doctor": Command("doctor", "doctor", "Look at this machine: what works, what is missing, and how to get it."),
    "launch": Command("launch", "launch", "Start a script as many processes, here or over ssh on other hosts."),
    "export": Command("export", "export", "Write a checkpoint's weights as safetensors."),
    "import": Command("importing", "import_", "Convert a DeepSpeed checkpoint."),
    "bench": Command("bench", "bench_app", "Measure this machine."),
    "attention": Command("attention", "attention_app", "Sparse attention: look at patterns."),
}


class Subcommands(TyperGroup):
    """Finds them by the table."""

    _completes = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of them; while a shell completes their names, one that only has a name and a line of help."""
        if cmd_name not in COMMANDS:
            return None
        return _named(cmd_name, lambda: None, help=COMMANDS[cmd_name].help) if self._completes else load(cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Names that go on so."""
        self._completes = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._completes = False

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Their lines of the help, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load(name: str) -> Any:
    """A subcommand as click has it."""
    command = COMMANDS[name]
    module = import_module(f"twinflow.cli.{command.module}")
    found: typer.Typer | Callable[..., Any] = getattr(module, command.name)
    if not isinstance(found, typer.Typer):
        return _named(name, found, context_settings=getattr(module, "CONTEXT", None))
    around = _new_app(add_completion=False)
    around.add_typer(found, name=name)
    group: Any = get_command(around)
    return group.commands[name]


def _named(name: str, function: Callable[..., Any], **more: Any) -> Any:
    alone = _new_app(add_completion=False)
    alone.command(name=name, **more)(function)
    return get_command(alone)


def _new_app(**more: Any) -> typer.Typer:
    return typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help wraps: the panels cut off long option names on a narrow terminal
        # A traceback that prints every local variable of a training loop hides the one line that matters.
        pretty_exceptions_enable=False,
        **more,
    )


app = _new_app(name="twinflow", cls=Subcommands)


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


def main() -> None:
    """Entry point of the installed script."""
    app()


if __name__ == "__main__":
    main()
