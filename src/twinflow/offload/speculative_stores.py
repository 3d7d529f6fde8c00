# SPDX-License-Identifier: Apache-2.0
"""Speculative stores: buffers for updates that run before the clipping decision, so that the state does not change.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state.

If the decision keeps the result, the executor swaps the stores: the bucket gets the speculative store, and its old
store becomes a free speculative store. Buckets with equal `plan.layout` share the free stores.

Updates beside a background checkpoint use speculative stores too, and leave their old stores to the checkpoint until it
has written them (frozen.py). `saved_bytes` limits the memory of further stores, so that both kinds of updates find one.

The thread "twinflow-speculative" allocates missing stores up to the memory limit. If no store is free for a bucket, its
update waits for the decision in that step, because allocating a store takes longer than an update. After some steps
there are as many stores as the host can use in one backward. `_lock` protects the counters, which the threads of this
module and the callers of its methods change.

Stores use memory that the machine can spare. The thread "twinflow-memory" looks at the free memory several times a
second, also during a step, because a user's loop may allocate gigabytes within one. If the machine runs short, it
releases stores, and they are not made again. `make_room` in device.py does the same before page-locked memory is
allocated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from twinflow.device import holds_spare_memory
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.plan import BucketPlan
from twinflow.rules.segment import Store

LOGGER = logging.getLogger("twinflow")

_MAX_QUEUED = 4
_CHECK_S = 0.25  # seconds between two looks at the free memory of the machine


class SpeculativeStores:
    """Makes speculative stores with `make`, within `max_bytes` of host memory, and releases them with `free`."""

    def __init__(
        self,
        executor: Executor,
        make: Callable[[BucketPlan], Store],
        free: Callable[[Store], None],
        max_bytes: int = 0,
    ) -> None:
        self.max_bytes = max_bytes
        self.saved_bytes = 0
        self.num_bytes = 0
        self._executor = executor
        self._make = make
        self._free = free
        self._made: dict[tuple[object, ...], int] = {}  # by layout: number of stores
        self._sizes: dict[tuple[object, ...], int] = {}  # by layout: bytes of one store
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="twinflow-speculative")
        self._lock = threading.Lock()
        self._num_queued = 0
        self._least_free = 0
        self._is_closed = threading.Event()
        self._watch: threading.Thread | None = None
        holds_spare_memory(self)

    def set_limit(self, max_bytes: int, saved_bytes: int = 0, least_free: int = 0) -> None:
        """Changes the limits of memory. Call it between steps. `saved_bytes`: memory for background checkpoints, in
        addition to `max_bytes`. `least_free`: stores are released if the machine has less free memory than this.
        """
        with self._lock:
            self.max_bytes = max_bytes
            self.saved_bytes = saved_bytes
            self._least_free = least_free

    @property
    def num_stores(self) -> int:
        """Number of stores that exist now. Read it between steps."""
        return sum(self._made.values())

    @property
    def bytes_for_saves(self) -> int:
        """Bytes of the stores beyond those for updates before the clipping decision. Read it between steps."""
        return max(0, self.num_bytes - self.max_bytes)

    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of host memory for a speculative update of this bucket: a store, and a weight slot if needed."""
        needs_slot = bucket.updater.needs_weight_slot(bucket.plan)
        return bucket.nbytes + (self._executor.slot_bytes if needs_slot else 0)

    def after_step(self) -> None:
        """Asks the thread to allocate, within the limits, the stores that buckets have needed and not found."""
        if not self.max_bytes + self.saved_bytes:
            return
        for bucket in self._executor.missing_speculative_stores():
            nbytes = self.nbytes(bucket)
            with self._lock:
                is_full = self.num_bytes + nbytes > self.max_bytes + self.saved_bytes
                if is_full or self._num_queued >= _MAX_QUEUED:
                    continue
                self._count(nbytes)
            self._maker.submit(self._add, bucket.plan, nbytes)

    def prepare(self, ahead: Sequence[Bucket], saved: Sequence[Bucket] = ()) -> int:
        """Allocates stores until there is one for each of these buckets or the limits are reached, and releases all
        others. Returns the number of new stores.

        `ahead`: buckets that are updated before the clipping decision. `saved`: buckets that background checkpoints
        save. Call it between steps. Without this call the stores are allocated during the first steps.
        """
        self._trim([bucket.plan.layout for bucket in (*ahead, *saved)])
        needed_bytes = sum(self.nbytes(bucket) for bucket in ahead)
        with self._lock:
            self.max_bytes = min(self.max_bytes, needed_bytes)
        num_made = 0
        there = dict(self._made)
        for buckets, max_bytes in ((ahead, self.max_bytes), (saved, self.max_bytes + self.saved_bytes)):
            for bucket in buckets:
                plan = bucket.plan
                nbytes = self.nbytes(bucket)
                if there.get(plan.layout, 0) > 0:
                    there[plan.layout] -= 1
                    continue
                with self._lock:
                    is_full = self.num_bytes + nbytes > max_bytes
                    if not is_full:
                        self._count(nbytes)
                if not is_full:
                    self._add(plan, nbytes)
                    num_made += 1
        return num_made

    def _trim(self, wanted: list[tuple[object, ...]]) -> None:
        """Releases stores that no bucket on the host would use any more."""
        with self._lock:
            for layout in self._made:
                while self._made[layout] > wanted.count(layout):
                    store = self._executor.take_speculative_store(layout)
                    if store is None:
                        break
                    self._free(store)
                    self._made[layout] -= 1
                    self.num_bytes -= self._sizes[layout]

    def make_room(self, num_bytes: int) -> None:
        """Releases free stores until the machine has enough free memory for a new buffer of `num_bytes`. Updates then
        wait for the decision instead.
        """
        if not self._least_free or not self.num_bytes or self._is_closed.is_set():
            return
        missing = self._least_free + num_bytes - free_host_bytes()
        if missing <= 0:
            return
        freed_bytes = 0
        with self._lock:
            for layout in self._made:
                while freed_bytes < missing and (store := self._executor.take_speculative_store(layout)) is not None:
                    self._free(store)
                    self._made[layout] -= 1
                    freed_bytes += self._sizes[layout]
            self.num_bytes -= freed_bytes
            self._keep_this()
        if freed_bytes:  # otherwise all stores are in use, and the next look may find free ones
            LOGGER.info(
                f"The machine has little free memory: {freed_bytes / 1e9:.1f} GB of speculative stores were released, "
                f"and {self.num_bytes / 1e9:.1f} GB remain."
            )

    def _look_at_memory(self) -> None:
        while not self._is_closed.wait(_CHECK_S):
            self.make_room(0)

    def _keep_this(self) -> None:
        """Sets the limits to the memory of the present stores."""
        self.max_bytes = min(self.max_bytes, self.num_bytes)
        self.saved_bytes = self.num_bytes - self.max_bytes

    def _count(self, nbytes: int) -> None:
        self.num_bytes += nbytes
        self._num_queued += 1

    def _add(self, plan: BucketPlan, nbytes: int) -> None:
        try:
            store = self._make(plan)
        except (MemoryError, RuntimeError):  # the estimate of free memory was too high, so no more stores are made
            with self._lock:
                self.num_bytes -= nbytes
                self._keep_this()
                self._num_queued -= 1
            return
        with self._lock:
            self._sizes[plan.layout] = nbytes
            self._made[plan.layout] = self._made.get(plan.layout, 0) + 1
            self._executor.add_speculative_store(plan, store)
            self._num_queued -= 1
            if self._watch is None and self._least_free and not self._is_closed.is_set():
                self._watch = threading.Thread(target=self._look_at_memory, name="twinflow-memory", daemon=True)
                self._watch.start()

    def close(self) -> None:
        """Ends the threads that allocate stores and watch the memory. The stores stay with the executor."""
        self._is_closed.set()
        self._maker.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.join()
