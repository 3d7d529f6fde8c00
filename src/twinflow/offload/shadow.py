"""Spare stores: where an update that runs ahead of the gate writes, so that the state itself stays untouched.

Keeping the result is a swap of pointers: the bucket takes the spare store, and its old one is the next spare. Buckets
of equal layout share spares. They are made when first needed, as far as the budget goes: after one backward there are
as many as the host can use in one, and never more.
"""

from __future__ import annotations

from collections.abc import Callable

from twinflow.rules.segment import Store

Layout = tuple[object, ...]


class ShadowPool:
    """Spare stores within `max_bytes` of host memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._spare: dict[Layout, list[Store]] = {}

    def take(self, layout: Layout, nbytes: int, make: Callable[[], Store]) -> Store | None:
        """A spare store of this layout; None where none is left and the budget is used up."""
        spare = self._spare.setdefault(layout, [])
        if spare:
            return spare.pop()
        if self.num_bytes + nbytes > self.max_bytes:
            return None
        self.num_bytes += nbytes
        return make()

    def give(self, layout: Layout, store: Store) -> None:
        """Hand a store back: one whose update was dropped, or the one a kept update replaced."""
        self._spare[layout].append(store)
