# SPDX-License-Identifier: Apache-2.0
"""The `twinflow` command. A subcommand's module is imported only when the subcommand is called, because importing torch
takes seconds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import MISSING
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_command

from twinflow.cli.output import guard_output
from twinflow.version import __version__


class Command(NamedTuple):
    """Location of a subcommand and its line in the help text."""

    module: str
    name: str  # name of a function or of a typer app in `module`
    help: str


COMMANDS = {
    "train": Command("train", "train", "Pretrain a GPT with the optimizer on the host, and write a report page."),
    "finetune": Command("finetune", "finetune", "Tune a pretrained model of Hugging Face on your data."),
    "plan": Command("plan", "plan", "Estimate the memory that a model needs and the time of a step."),
    "doctor": Command("doctor", "doctor", "Check this machine and say how to fix what is missing."),
    "launch": Command("launch", "launch", "Start a script on several processes, on this machine or over ssh."),
    "export": Command("export", "export", "Write the weights of a checkpoint as safetensors."),
    "import": Command("export", "import_", "Convert a DeepSpeed checkpoint to a twinflow checkpoint."),
    "bench": Command("bench", "bench_app", "Measure the speed of the host kernels."),
    "attention": Command("attention", "attention_app", "Show patterns of sparse attention."),
}


class Subcommands(TyperGroup):
    """Command group that loads subcommands from the table `COMMANDS` and suggests a name for a misspelt one."""

    _completes = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand, or None for an unknown name.

        During shell completion only the name and the help line are needed, so the module is not imported.
        """
        if cmd_name not in COMMANDS:
            return None
        return _named(cmd_name, lambda: None, help=COMMANDS[cmd_name].help) if self._completes else load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # typer suggests only commands that are registered, and these are loaded when they are called.
        if not ctx.resilient_parsing and args[0] not in COMMANDS and (close := get_close_matches(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._completes = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._completes = False

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load(name: str) -> Any:
    """Import a subcommand's module and return its click command."""
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
    options = get_type_hints(function).get("options")
    alone.command(name=name, **more)(function if options is None else _spread(function, options))
    return get_command(alone)


def _spread(function: Callable[..., Any], options: type[Any]) -> Callable[..., Any]:
    """A function with one parameter for each field of the dataclass `options`. It builds the dataclass and passes it to
    `function`. typer makes command line options from the parameters of a function.
    """

    def command(**values: Any) -> Any:
        return function(options(**values))

    parameters = []
    for name, kind in get_type_hints(options).items():
        field = options.__dataclass_fields__[name]
        annotation = Annotated[kind, field.metadata["option"]]  # type: ignore[valid-type]
        default = Parameter.empty if field.default is MISSING else field.default  # without a default: an argument
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    return command


def _new_app(**more: Any) -> typer.Typer:
    return typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,  # rich's panels cut off long option names on a narrow terminal; plain help text wraps
        # typer's traceback prints every local variable of the training loop and hides the error message.
        pretty_exceptions_enable=False,
        **more,
    )


app = _new_app(name="twinflow", cls=Subcommands)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinflow {__version__}")
        raise typer.Exit


@app.callback()
def twinflow(
    version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train models larger than GPU memory, with the optimizer on the host."""


def main() -> None:
    """Entry point of the installed `twinflow` script.

    If standard output cannot be written, training ends as usual, because its results are in files. Other commands end
    with exit code 1.
    """
    output = guard_output()
    # A user of a command needs the text of a warning, and not the line of our source that gives it.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app()
    except OSError as error:  # a file of a command that cannot be written, for example on a full disk
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except SystemExit as ending:
        if output is None:
            raise
        output.flush()
        if output.has_failed and not ending.code and sys.argv[1:2] != ["train"]:
            raise SystemExit(1) from None
        raise


if __name__ == "__main__":
    main()
