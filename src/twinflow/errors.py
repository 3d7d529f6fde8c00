# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can act on. There is one function for each kind of mistake, so that all messages of a kind read
alike: what happened, what was expected, what to do.

    kind                         function               exception
    a wrong value                invalid_value          ValueError
    too little memory            not_enough             MemoryError
    options that conflict        incompatible           ValueError
    a call at a wrong time       wrong_state            RuntimeError
    a path that cannot be used   unusable_path          that of the system: PermissionError, FileNotFoundError, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def invalid_value(name: str, value: object, expected: str | Iterable[object], remedy: str = "") -> ValueError:
    """The error for an invalid value of `name`. `expected`: a phrase such as "a number from 0 to 1", or all values that
    are allowed. Without a remedy, a misspelt value gets the nearest of these as a suggestion.

    >>> invalid_value("ratio", 1.5, "a number from 0 to 1")
    ValueError('ratio is 1.5, but must be a number from 0 to 1.')
    """
    if not isinstance(expected, str):
        allowed = list(expected)
        values = [repr(item) for item in allowed]
        expected = values[0] if len(values) == 1 else "one of " + ", ".join(values)
        names = {item.lower(): item for item in allowed if isinstance(item, str)}
        near = get_close_matches(value.lower(), names, n=1) if isinstance(value, str) and len(values) > 1 else []
        remedy = remedy or (f"Did you mean {names[near[0]]!r}?" if near else "")
    return ValueError(_sentences(f"{name} is {value!r}, but must be {expected}", remedy))


def not_enough(resource: str, user: str, needed: str, available: str, remedy: str) -> MemoryError:
    """A resource is too small for what `user` needs of it.

    >>> not_enough("host memory", "the optimizer state", "80.1 GB", "63.2 GB", 'Use states="int8" or a lower ratio.')
    MemoryError('Not enough host memory: the optimizer state needs 80.1 GB, and 63.2 GB are available. Use ...')
    """
    text = f"Not enough {resource}: {user} needs {needed}, and {available} are available"
    return MemoryError(_sentences(text, remedy))


def incompatible(option: str, other: str, reason: str, remedy: str = "") -> ValueError:
    """Two options exclude each other.

    >>> incompatible("delayed_update=True", "offload_params=True", "a block has one copy of its weights")
    ValueError('delayed_update=True cannot be used with offload_params=True, because a block has one copy of ...')
    """
    return ValueError(_sentences(f"{option} cannot be used with {other}, because {reason}", remedy))


def unusable_path(name: str, path: object, expected: str, error: OSError) -> OSError:
    """A file or folder cannot be created or written. The result has the type of `error`.

    >>> unusable_path("save_dir", "/root/run", "a folder in which files can be created", PermissionError(13, "denied"))
    PermissionError("save_dir is '/root/run', but must be a folder in which files can be created. The system ...")
    """
    remedy = f"The system reports: {error.strerror}. Choose another path, or change its permissions."
    return type(error)(_sentences(f"{name} is {str(path)!r}, but must be {expected}", remedy))


def wrong_state(what: str, reason: str, remedy: str) -> RuntimeError:
    """An operation is not possible in the current state.

    >>> wrong_state("step() cannot run", "the optimizer is closed", "Build a new one to go on training.")
    RuntimeError('step() cannot run, because the optimizer is closed. Build a new one to go on training.')
    """
    return RuntimeError(_sentences(f"{what}, because {reason}", remedy))


def _sentences(first: str, remedy: str) -> str:
    """Joins the two texts and adds missing full stops."""
    return " ".join(text if text.endswith((".", "?", "!")) else f"{text}." for text in (first, remedy) if text)
