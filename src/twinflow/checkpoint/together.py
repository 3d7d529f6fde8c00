# SPDX-License-Identifier: Apache-2.0
"""Communication of ranks that write one checkpoint: they exchange values, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from twinflow.checkpoint.plain import JSON

Own = TypeVar("Own")
Told = TypeVar("Told")  # JSON


class Together(Protocol):
    """The ranks that save together. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, value: Told) -> list[Told]:
        """The values of all ranks in the order of ranks, on every rank. Raises an exception if a rank has ended."""
        ...


@dataclass(frozen=True)
class Alone:
    """The `Together` of a single process, which exchanges nothing."""

    rank: int = 0
    world: int = 1

    def gather(self, value: Told) -> list[Told]:
        return [value]


def agree(together: Together, act: Callable[[], tuple[Own, Told]]) -> tuple[Own, list[Any]]:
    """Runs `act` on every rank. Returns the first result of this rank, and the second results of all ranks.

    If `act` raises an exception on one rank, all ranks raise the same error with the number of that rank. No rank waits
    for a rank that failed.
    """
    own: Any = None
    said: Told | None = None
    error: Exception | None = None
    try:
        own, said = act()
    except Exception as raised:
        if together.world == 1:
            raise
        error = raised
    found: list[Any] = together.gather({"error": _describe(error), "said": said})
    failed = [rank for rank, one in enumerate(found) if one["error"] is not None]
    if failed:
        raise _as_error(failed, found[failed[0]]["error"]) from error
    return own, [one["said"] for one in found]


def _describe(error: Exception | None) -> JSON:
    if error is None:
        return None
    if isinstance(error, OSError):
        name = None if error.filename is None else str(error.filename)
        return {"kind": "OSError", "text": error.strerror or str(error), "errno": error.errno, "filename": name}
    return {"kind": "ValueError" if isinstance(error, ValueError) else type(error).__name__, "text": str(error)}


def _as_error(failed: list[int], said: dict[str, Any]) -> Exception:
    """The error of the first rank that failed. From its type a caller sees whether it is an error of the disk
    (OSError), a wrong value (ValueError) or another error (RuntimeError).
    """
    who = f"rank {failed[0]}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
    kind, text = said["kind"], said["text"]
    if kind == "OSError":
        return OSError(said["errno"], f"{who}: {text}", said["filename"])
    return ValueError(f"{who}: {text}") if kind == "ValueError" else RuntimeError(f"{who}: {kind}: {text}")
