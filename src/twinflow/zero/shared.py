"""ZeRO for a TwinOptimizer: groups of ranks, the partition of buckets, and the threads between ranks.

Stage 0 sums gradients on every rank, and every rank updates everything. Stage 1 partitions the optimizer's state: a
rank gets its part of the summed gradients when they are complete. Stage 2 partitions the sums of several backwards too:
every backward's gradients are reduced at once, and no rank keeps more than its part of them. Stage 3 partitions the
weights, and all else with them (partitioned.py); where weights live on the hosts, as stage 2 does, and blocks gather
theirs when they run (offload/param_offload.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from twinflow.device import Device
from twinflow.dist.group import TIMEOUT, Group, backend_for, new_group
from twinflow.errors import invalid_value
from twinflow.offload.bucket import Bucket
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.flats import FlatPool
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import BucketPlan, ParamSpec
from twinflow.offload.settings import Settings
from twinflow.offload.shards import part_of, widen
from twinflow.offload.sharing import OwnBuckets, Shards, SharedBuckets
from twinflow.parallel.grid import Grid
from twinflow.parallel.topology import DATA
from twinflow.zero.compression import Compression, Exchanges
from twinflow.zero.norm_reducer import NormReducer
from twinflow.zero.publisher import Publisher
from twinflow.zero.reducer import Reducer, Wire

STAGES = (0, 1, 2, 3)
_LONG = timedelta(hours=2)


@dataclass(frozen=True)
class Zero:
    """How the ranks of torch.distributed's world, or of a grid's data axis, share one model's training."""

    stage: int = 2
    dtype: torch.dtype | None = None  # that sums travel in; None: the gradients' own
    op: str = "mean"  # of the ranks' gradients, or "sum"
    predivide: float = 1.0  # gradients are divided by it before they are summed, and by the rest of the world after
    timeout: timedelta = TIMEOUT
    parks: bool = False  # with stage 3: weights live on the hosts, in parts, and blocks gather them (offload_param)
    compression: Compression | None = None  # 1-bit Adam
    grid: Grid | None = None  # with pipeline or tensor ranks: those on the data axis share, and norms are of all

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise invalid_value("stage", self.stage, STAGES)
        if self.op not in ("mean", "sum"):
            raise invalid_value("op", self.op, ("mean", "sum"))
        if not 0.0 < self.predivide < float("inf"):
            raise invalid_value("predivide", self.predivide, "a number above 0")
        if self.stage == 3 and self.predivide != 1.0 and not self.parks:
            raise invalid_value(
                "predivide with stage 3", self.predivide, [1.0], "fully_shard divides gradients itself."
            )
        if self.parks and self.stage != 3:
            raise invalid_value("stage where weights live on the host", self.stage, [3])
        if self.compression is not None:
            if self.stage != 1:
                remedy = (
                    "Ranks keep an error for every element, so stage 2 would save nothing; stage 3 has no replicas."
                )
                raise invalid_value("stage with compressed communication", self.stage, [1], remedy)
            if self.predivide != 1.0:
                raise invalid_value("predivide with compressed communication", self.predivide, [1.0])
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("there is no process group: call twinflow.init_distributed() first")

    @property
    def shares_buckets(self) -> bool:
        """Whether ranks share our buckets; else `fully_shard` gives each its rows of every parameter."""
        return self.stage < 3 or self.parks


class Team:
    """The ranks of one optimizer: groups of their own, so that reducing, publishing and the rest never mix."""

    def __init__(self, zero: Zero, device: torch.device) -> None:
        self.zero = zero
        self.grid = zero.grid
        ranks = None if zero.grid is None else zero.grid.ranks_along(DATA)
        backend = backend_for(device) if zero.shares_buckets else "gloo"  # else nothing large travels here
        self._reduce = new_group(backend, ranks, zero.timeout)
        self._publish = new_group(backend, ranks, zero.timeout)
        self._agree = new_group("gloo", ranks, zero.timeout)
        self._replica = None if zero.grid is None else new_group("gloo", zero.grid.replica_ranks, zero.timeout)
        self.fetch = new_group(backend, ranks, zero.timeout) if zero.parks else None  # of weights on the hosts
        # For whoever calls the optimizer: ranks that save wait here for the slowest.
        long = max(zero.timeout, _LONG)
        self.calls: Group = new_group("gloo", ranks, long)
        self.everyone: Group = self.calls if zero.grid is None else zero.grid.everyone  # on all axes
        self.saves: Group = new_group("gloo", timeout=long)  # the same, for checkpoints in the background
        self.world = self.calls.world
        self.rank = self.calls.rank
        self._exchanges: Exchanges | None = None

    @property
    def groups(self) -> dict[str, Group]:
        """By what they are for."""
        between_threads = {"reduce": self._reduce, "publish": self._publish, "agree": self._agree}
        if self.fetch is not None:
            between_threads["fetch"] = self.fetch
        if self._replica is not None:
            between_threads |= {"replica": self._replica, "everyone": self.everyone}
        return {**between_threads, "calls": self.calls, "saves": self.saves}

    @property
    def num_parts(self) -> int:
        """In which each bucket is partitioned. With `fully_shard` it is the parameters that are."""
        return self.world if self.zero.stage and self.zero.shares_buckets else 1

    @property
    def is_partitioned(self) -> bool:
        """Whether this rank has only a part of the state."""
        return self.zero.stage >= 1 and self.world > 1

    @property
    def exchanges(self) -> Exchanges | None:
        """Momenta and weights in few bits, from the switch to compressed communication on."""
        return self._exchanges

    def set_exchanges(self, exchanges: Exchanges | None) -> None:
        """Compress from now on, or no more."""
        self._exchanges = exchanges

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """All start from the first rank's values."""
        with torch.no_grad():
            for tensor in tensors:
                self._reduce.broadcast(tensor)

    def least(self, values: Sequence[float]) -> list[float]:
        """The least of each over all ranks."""
        rows = self.calls.gather_rows(torch.tensor(values, dtype=torch.float64))
        found: list[float] = rows.min(dim=0).values.tolist()
        return found

    def shards(self, plans: Sequence[BucketPlan], params: Sequence[ParamSpec]) -> tuple[list[BucketPlan], Shards]:
        """This rank's part of each bucket, and all that the runtime needs to share them."""
        if not self.zero.shares_buckets:
            return list(plans), OwnBuckets(self._start_norm_reducer)
        parts = self.num_parts
        wholes = [widen(plan, params, parts) for plan in plans]
        own = [part_of(whole, self.rank if parts > 1 else 0, parts) for whole in wholes]
        return own, SharedBuckets(wholes, self._start)

    def _start_norm_reducer(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        settings: Settings,
        where: torch.device,
    ) -> NormReducer:
        self._give_up_with(executor)
        divisor = 1.0 if self.zero.op == "mean" else 1 / self.world
        return NormReducer(executor, device_work, buckets, self._agree, self._replica, divisor)

    def _give_up_with(self, executor: Executor) -> None:
        """No thread waits for other ranks when this one has failed, or is done."""
        for group in self.groups.values():
            group.give_up_when(lambda: executor.is_closing or executor.error is not None)

    def _start(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        settings: Settings,
        where: torch.device,
    ) -> _SharedWork:
        is_partitioned = self.num_parts > 1 or self.world == 1
        zero = self.zero
        wire = Wire(
            self._reduce, self._agree, zero.dtype, is_partitioned, zero.predivide, lambda: self.exchanges, self._replica
        )
        self._give_up_with(executor)
        divisor = (self.world if zero.op == "mean" else 1) / zero.predivide
        flats = FlatPool(where, settings.flat_bytes)
        group = self._publish if self.num_parts > 1 else None
        publisher = Publisher(device, executor, buckets, group, where, lambda: self.exchanges)
        reducer = Reducer(device, executor, device_work, buckets, wire, flats, where, publisher.expect)
        return _SharedWork(reducer, publisher, [bucket.plan.index for bucket in buckets], divisor)


class _SharedWork:
    """What the runtime calls: gradients go to the reducer, and weights come from the publisher."""

    def __init__(self, reducer: Reducer, publisher: Publisher, indices: list[int], divisor: float) -> None:
        self.divisor = divisor
        self.threads = (reducer, publisher)
        self._reducer = reducer
        self._publisher = publisher
        self._indices = indices  # of all buckets

    def take_flat(self, bucket: Bucket) -> Tensor:
        return self._reducer.take_flat(bucket)

    def submit(self, task: Task) -> None:
        self._reducer.submit(task)

    def close(self, job: Job, hits: Sequence[bool]) -> None:
        self._reducer.close(job, hits)

    def wait_for_sums(self) -> None:
        self._reducer.wait_for_sums()

    def forget(self) -> None:
        self._publisher.forget()

    def hold_back(self, job: Job) -> None:
        self._publisher.expect(job, self._indices)
