"""Speculative stores: an update that runs ahead of the clip decision writes there, so that the state stays untouched.

Keeping the result is a swap of stores: the bucket takes the speculative one, and its old one is the next to be used.
Buckets of equal layout share them. The executor hands them out. They are made here as far as the budget goes, by a
thread of their own when one was missing: making one takes longer than an update, and the bucket that asked can as well
wait for the decision this time. After some steps there are as many as the host can use in one backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.plan import BucketPlan
from twinflow.rules.segment import Store

_MAX_QUEUED = 4


class SpeculativeStores:
    """Speculative stores within `max_bytes` of host memory, made by `make`."""

    def __init__(
        self,
        executor: Executor,
        make: Callable[[BucketPlan], Store],
        free: Callable[[Store], None],
        max_bytes: int = 0,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._executor = executor
        self._make = make
        self._free = free
        self._made: dict[object, int] = {}  # how many there are of each layout
        self._sizes: dict[object, int] = {}  # bytes of one
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="twinflow-speculative")
        self._lock = threading.Lock()
        self._num_queued = 0

    def set_limit(self, max_bytes: int) -> None:
        """Another limit, between steps."""
        self.max_bytes = max_bytes

    def nbytes(self, bucket: Bucket) -> int:
        """Host memory that an update of this bucket ahead of the decision takes: a store, and a slot that waits."""
        needs_slot = bucket.updater.needs_weight_slot(bucket.plan)
        return bucket.nbytes + (self._executor.slot_bytes if needs_slot else 0)

    def make_missing(self) -> None:
        """Make those that were asked for and not there, beside training."""
        if not self.max_bytes:
            return
        for bucket in self._executor.missing_speculative_stores():
            nbytes = self.nbytes(bucket)
            with self._lock:
                if self.num_bytes + nbytes > self.max_bytes or self._num_queued >= _MAX_QUEUED:
                    continue
                self._count(bucket.plan, nbytes)
            self._maker.submit(self._add, bucket.plan, nbytes)

    def prepare(self, buckets: Iterable[Bucket]) -> int:
        """Make stores for these buckets now, as far as the budget goes, rather than in the first steps; how many.

        Between steps, when all that there are lie here.
        """
        buckets = list(buckets)
        self._trim([bucket.plan.layout for bucket in buckets])
        num_made = 0
        there = dict(self._made)
        for bucket in buckets:
            plan = bucket.plan
            nbytes = self.nbytes(bucket)
            if there.get(plan.layout, 0) > 0:
                there[plan.layout] -= 1
            elif self.num_bytes + nbytes <= self.max_bytes:
                self._count(plan, nbytes)
                self._add(plan, nbytes)
                num_made += 1
        return num_made

    def _trim(self, wanted: list[tuple[object, ...]]) -> None:
        """Give back what no bucket on the host would use any more."""
        for layout in self._made:
            while self._made[layout] > wanted.count(layout):  # type: ignore[arg-type]
                store = self._executor.take_speculative_store(layout)
                if store is None:
                    break
                self._free(store)
                self._made[layout] -= 1
                self.num_bytes -= self._sizes[layout]

    def _count(self, plan: BucketPlan, nbytes: int) -> None:
        self.num_bytes += nbytes
        self._num_queued += 1

    def _add(self, plan: BucketPlan, nbytes: int) -> None:
        try:
            store = self._make(plan)
        except (MemoryError, RuntimeError):  # there was less than it seemed: do with what there is
            with self._lock:
                self.num_bytes -= nbytes
                self.max_bytes = self.num_bytes
                self._num_queued -= 1
            return
        with self._lock:
            self._sizes[plan.layout] = nbytes
            self._made[plan.layout] = self._made.get(plan.layout, 0) + 1
            self._executor.add_speculative_store(plan, store)
            self._num_queued -= 1

    def close(self) -> None:
        """End the thread that makes stores."""
        self._maker.shutdown(wait=True, cancel_futures=True)
