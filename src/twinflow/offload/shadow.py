"""Spare stores: where an update that runs ahead of the gate writes, so that the state itself stays untouched.

Keeping the result is a swap of pointers: the bucket takes the spare store, and its old one is the next spare. Buckets
of equal layout share spares. They are made as far as the budget goes, by a thread of their own when one was missing:
making one takes longer than an update, and the bucket that asked can as well wait for the gate this time. After some
steps there are as many as the host can use in one backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from twinflow.offload.plan import BucketPlan
from twinflow.rules.segment import Store

Layout = tuple[object, ...]
_MAX_QUEUED = 4


class ShadowPool:
    """Spare stores within `max_bytes` of host memory, made by `make`."""

    def __init__(self, make: Callable[[BucketPlan], Store], free: Callable[[Store], None], max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._make, self._free = make, free
        self._sizes: dict[Layout, int] = {}  # bytes of one
        self._spare: dict[Layout, list[Store]] = {}
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="twinflow-shadow")
        self._lock = threading.Lock()
        self._num_queued = 0

    def take(self, plan: BucketPlan, nbytes: int) -> Store | None:
        """A spare store of this layout; None where none is there now."""
        with self._lock:
            spare = self._spare.setdefault(plan.layout, [])
            if spare:
                return spare.pop()
            if self.num_bytes + nbytes <= self.max_bytes and self._num_queued < _MAX_QUEUED:
                self.num_bytes += nbytes
                self._num_queued += 1
                self._maker.submit(self._add, plan, nbytes)
        return None

    def prepare(self, plans: Iterable[tuple[BucketPlan, int]]) -> int:
        """Make stores for these buckets now, as far as the budget goes, rather than in the first steps; how many.

        Between steps, when all that there are lie here.
        """
        plans = list(plans)
        self._trim([plan.layout for plan, _ in plans])
        num_made, there = 0, {layout: len(spare) for layout, spare in self._spare.items()}
        for plan, nbytes in plans:
            if there.get(plan.layout, 0) > 0:
                there[plan.layout] -= 1
            elif self.num_bytes + nbytes <= self.max_bytes:
                self.num_bytes += nbytes
                self._num_queued += 1
                self._spare.setdefault(plan.layout, [])
                self._add(plan, nbytes)
                num_made += 1
        return num_made

    def _trim(self, wanted: list[Layout]) -> None:
        """Give back what no bucket on the host would use any more."""
        for layout, spare in self._spare.items():
            while len(spare) > wanted.count(layout):
                self._free(spare.pop())
                self.num_bytes -= self._sizes.get(layout, 0)

    def _add(self, plan: BucketPlan, nbytes: int) -> None:
        try:
            self._sizes[plan.layout] = nbytes
            store = self._make(plan)
        except (MemoryError, RuntimeError):  # there was less than it seemed: do with what there is
            with self._lock:
                self.num_bytes -= nbytes
                self.max_bytes = self.num_bytes
                self._num_queued -= 1
            return
        with self._lock:
            self._spare[plan.layout].append(store)
            self._num_queued -= 1

    def give(self, plan: BucketPlan, store: Store) -> None:
        """Hand a store back: one whose update was dropped, or the one a kept update replaced."""
        with self._lock:
            self._spare.setdefault(plan.layout, []).append(store)

    def close(self) -> None:
        """End the thread that makes stores."""
        self._maker.shutdown(wait=True, cancel_futures=True)
