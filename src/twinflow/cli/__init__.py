# SPDX-License-Identifier: Apache-2.0
"""Command line interface: the `twinflow` command and its subcommands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Final

import typer

from twinflow.errors import invalid_value

MAX_COUNT: Final = 2**53  # larger counts of steps or sequences are not exact as floats


@contextmanager
def told_errors(exit_code: int = 1, kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Print an error that the user can fix as one line, without a traceback, and exit."""
    try:
        yield
    except kinds as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(exit_code) from None


def option(default: Any, help: str, names: str = "") -> Any:
    """A field in a dataclass of command line options. `names`: the names of the option, separated by spaces, if they
    differ from the name of the field.
    """
    return field(default=default, metadata={"option": typer.Option(*names.split(), help=help)})


def check_whole(name: str, value: int | None, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raise a ValueError if the option `name` is given and its value is below `least` or above `most`."""
    if value is not None and not least <= value <= most:
        limit = f"a whole number >= {least}" if value < least else f"at most {most}"
        raise invalid_value(name, value, limit)
