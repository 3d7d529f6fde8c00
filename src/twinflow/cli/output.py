# SPDX-License-Identifier: Apache-2.0
"""Standard output of the commands. A full disk or a closed pipe behind it is reported in one line."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class Output:
    """A text stream that passes everything on to `stream` until a write fails. Then it prints one line to standard
    error and drops everything else, so that a training run continues without its output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_failed = False

    def write(self, text: str) -> int:
        if not self.has_failed:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        if not self.has_failed:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _fail(self, error: OSError) -> None:
        self.has_failed = True
        with suppress(OSError, ValueError):
            sys.stderr.write(f"warning: Standard output cannot be written: {error.strerror}.\n")
            sys.stderr.flush()
        # The stream still has the text that it could not write, and Python writes it again at exit.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def open_missing() -> None:
    """Opens standard streams that are closed. Otherwise the next file that is opened would get the number of such a
    stream, and everything that a library prints would be written to that file.
    """
    number = 0
    while number < 3:  # the system uses the lowest free number
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)


def guard_output() -> Output | None:
    """Puts an `Output` in place of `sys.stdout` and returns it. None if standard output is closed."""
    open_missing()
    if sys.stdout is None:
        return None
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # for paths that are not UTF-8
    guarded = Output(sys.stdout)
    sys.stdout = guarded
    return guarded
