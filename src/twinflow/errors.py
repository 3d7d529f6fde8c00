"""Errors a user can act on: each names what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


def bad_value(name: str, value: object, allowed: str | Iterable[object], remedy: str = "") -> ValueError:
    """A ValueError that reads: NAME is VALUE; allowed: ALLOWED. REMEDY."""
    if not isinstance(allowed, str):
        allowed = ", ".join(repr(item) for item in allowed)
    text = f"{name} is {value!r}; allowed: {allowed}"
    return ValueError(f"{text}. {remedy}" if remedy else text)
