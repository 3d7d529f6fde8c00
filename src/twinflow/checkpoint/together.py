"""What ranks that write one checkpoint need of each other: to know what all of them say, and to fail together."""

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
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...

    def gather(self, value: Told) -> list[Told]:
        """Every rank's value, on every rank, by rank; raises where a rank is gone."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process that needs nobody."""

    rank: int = 0
    world: int = 1

    def gather(self, value: Told) -> list[Told]:
        """Its own value."""
        return [value]


def agree(together: Together, act: Callable[[], tuple[Own, Told]]) -> tuple[Own, list[Any]]:
    """Run `act` on every rank: its first result stays here, the second of every rank is told to all.

    Where it raises on one rank, all ranks raise the same, with the rank's number: nobody waits for one that gave up.
    """
    own: list[Own] = []
    error: Exception | None = None
    said: Told | None = None
    try:
        kept, said = act()
        own.append(kept)
    except Exception as raised:
        if together.world == 1:
            raise
        error = raised
    found: list[Any] = together.gather({"error": _describe(error), "said": said})
    failed = [rank for rank, one in enumerate(found) if one["error"] is not None]
    if failed:
        raise _as_error(failed, found[failed[0]]["error"]) from error
    return own[0], [one["said"] for one in found]


def _describe(error: Exception | None) -> JSON:
    if error is None:
        return None
    if isinstance(error, OSError):
        name = None if error.filename is None else str(error.filename)
        return {"kind": "OSError", "text": error.strerror or str(error), "errno": error.errno, "filename": name}
    return {"kind": "ValueError" if isinstance(error, ValueError) else type(error).__name__, "text": str(error)}


def _as_error(failed: list[int], said: dict[str, Any]) -> Exception:
    """The first failing rank's error, of a kind that callers tell apart: a full disk, a wrong value, all else."""
    who = f"rank {failed[0]}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
    kind, text = said["kind"], said["text"]
    if kind == "OSError":
        return OSError(said["errno"], f"{who}: {text}", said["filename"])
    return ValueError(f"{who}: {text}") if kind == "ValueError" else RuntimeError(f"{who}: {kind}: {text}")
