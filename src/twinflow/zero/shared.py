# SPDX-License-Identifier: Apache-2.0
"""ZeRO for a TwinOptimizer: groups of ranks, the partition of buckets, and the threads for communication.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The stages are:

- Stage 0: every rank gets all summed gradients and updates everything.
- Stage 1: the optimizer state is partitioned. A rank gets its part of the summed gradients when they are complete.
- Stage 2: the sums of several backwards are partitioned too. Gradients are reduced in every backward.
- Stage 3: weights, gradients and state are partitioned by `fully_shard` (partitioned.py).
- Stage 3 with weights on the host (`parks`): buckets are shared as in stage 2, and blocks gather their weights when
  they run (offload/param_offload.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from twinflow.conflicts import refuse
from twinflow.device import Device
from twinflow.dist.group import TIMEOUT, Group, alone, backend_for, new_group
from twinflow.dist.meeting import Meeting
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Bucket
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.flats import FlatPool
from twinflow.offload.plan import BucketPlan, ParamSpec
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import OwnBuckets, Shards, SharedBuckets
from twinflow.parallel.grid import Grid
from twinflow.parallel.shard import TensorShard, expert_shard
from twinflow.parallel.topology import DATA
from twinflow.zero.compression import Compression, Exchanges
from twinflow.zero.matrices import RowExchange
from twinflow.zero.parts import part_of, widen
from twinflow.zero.publisher import Publisher
from twinflow.zero.reducer import NormReducer, Reducer, Wire

STAGES = (0, 1, 2, 3)
_LONG = timedelta(hours=2)


@dataclass(frozen=True)
class Zero:
    """Options of ZeRO for the ranks of torch.distributed's world, or of the data axis of `grid`.

    Raises ValueError for options that conflict, and RuntimeError without a process group.
    """

    stage: int = 2
    dtype: torch.dtype | None = None  # dtype of gradients in communication; None: their own
    op: str = "mean"  # how gradients of ranks are combined: "mean" or "sum"
    predivide: float = 1.0  # gradients are divided by it before the sum, and by (number of ranks / predivide) after it
    timeout: timedelta = TIMEOUT
    parks: bool = False  # with stage 3: weights are on the hosts, in parts, and blocks gather them (offload_param)
    compression: Compression | None = None  # 1-bit Adam
    grid: Grid | None = None  # layout with pipeline or tensor ranks; ranks of the data axis share the state

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise invalid_value("stage", self.stage, STAGES)
        if self.op not in ("mean", "sum"):
            raise invalid_value("op", self.op, ("mean", "sum"))
        if not 0.0 < self.predivide < float("inf"):
            raise invalid_value("predivide", self.predivide, "a finite number above 0")
        divides = self.predivide != 1.0
        if self.stage == 3 and not self.parks:
            refuse("ZeRO stages 2 and 3", {"predivide": divides}, predivide=self.predivide)
        refuse("Weights on the host", {"stage of Zero": self.parks and self.stage != 3}, stage=self.stage)
        if self.compression is not None:
            found = {"stage of Zero": self.stage != 1, "predivide": divides}
            refuse("1-bit Adam", found, stage_except_1=self.stage, predivide=self.predivide)
        if not (dist.is_available() and dist.is_initialized()):
            raise wrong_state(
                "A Zero object cannot be built", "there is no process group", "Call twinflow.init_distributed() first."
            )

    @property
    def shares_buckets(self) -> bool:
        """Whether ranks share the runtime's buckets. Otherwise `fully_shard` partitions the parameters."""
        return self.stage < 3 or self.parks


class Team:
    """The ranks of one optimizer. Each thread has process groups of its own, so that collectives never mix."""

    def __init__(self, zero: Zero, device: torch.device, expert_shard: TensorShard | None = None) -> None:
        """`expert_shard`: which experts this rank has; None: all of them."""
        self.zero = zero
        self.expert_shard = expert_shard
        self.grid = zero.grid
        ranks = None if zero.grid is None else zero.grid.ranks_along(DATA)
        backend = backend_for(device) if zero.shares_buckets else "gloo"  # with `fully_shard` only norms are sent here
        self._reduce = new_group(backend, ranks, zero.timeout)
        self._publish = new_group(backend, ranks, zero.timeout)
        self._agree = new_group("gloo", ranks, zero.timeout)
        self._replica = None if zero.grid is None else new_group("gloo", zero.grid.replica_ranks, zero.timeout)
        self.fetch = new_group(backend, ranks, zero.timeout) if zero.parks else None  # for weights on the hosts
        # For calls by the user's thread. The timeout is long, because ranks that save wait for the slowest one.
        long = max(zero.timeout, _LONG)
        self.calls: Group = new_group("gloo", ranks, long)
        self.meeting = Meeting(self.calls)  # before the collectives of calls by the user
        self.everyone: Group = self.calls if zero.grid is None else zero.grid.everyone  # ranks of all axes
        self.saves: Group = new_group("gloo", timeout=long)  # ranks of all axes, for checkpoints in the background
        # The same for the ranks that have the same experts as this one.
        self._expert_reduce = self._expert_publish = self.expert_calls = alone()
        if expert_shard is not None:
            same = range(expert_shard.rank, self.calls.world, expert_shard.world)
            self._expert_reduce = new_group(backend, same, zero.timeout)
            self._expert_publish = new_group(backend, same, zero.timeout)
            self.expert_calls = new_group("gloo", same, long)
        self.world = self.calls.world
        self.rank = self.calls.rank
        self.exchanges: Exchanges | None = None  # compressed exchanges; None before the switch to them
        self._matrices: Group | None = None  # for Muon with `fully_shard`
        self._row_exchange: RowExchange | None = None
        self._backend = backend_for(device)
        self._ranks = ranks

    @property
    def groups(self) -> dict[str, Group]:
        """The process groups by purpose."""
        between_threads = {"reduce": self._reduce, "publish": self._publish, "agree": self._agree}
        if self.fetch is not None:
            between_threads["fetch"] = self.fetch
        if self._replica is not None:
            between_threads |= {"replica": self._replica, "everyone": self.everyone}
        if self._matrices is not None:
            between_threads["matrices"] = self._matrices
        if self.expert_shard is not None:
            between_threads |= {"expert reduce": self._expert_reduce, "expert publish": self._expert_publish}
            between_threads["expert calls"] = self.expert_calls
        return {**between_threads, "calls": self.calls, "saves": self.saves}

    @property
    def num_parts(self) -> int:
        """Number of parts of each bucket: 1 with stage 0 or `fully_shard`, which partitions parameters instead."""
        return self.world if self.zero.stage and self.zero.shares_buckets else 1

    @property
    def is_partitioned(self) -> bool:
        """Whether this rank has only a part of the state."""
        return self.zero.stage >= 1 and self.world > 1

    @property
    def has_whole_state(self) -> bool:
        """Whether this rank has the state of all parameters of its layers."""
        return not self.is_partitioned and self.expert_shard is None

    def calls_of(self, param: Tensor) -> Group:
        """The ranks that have this parameter, for calls by the user's thread."""
        return self.calls if expert_shard([param]) is None else self.expert_calls

    def row_exchange(self) -> RowExchange | None:
        """Starts the exchange of rows of matrices, for Muon. None if each rank has whole matrices."""
        if self.zero.shares_buckets or self.world == 1:
            return None
        if self._row_exchange is None:
            self._matrices = new_group(self._backend, self._ranks, self.zero.timeout)
            self._row_exchange = RowExchange(self._matrices)
        return self._row_exchange

    def set_exchanges(self, exchanges: Exchanges | None) -> None:
        """Starts compressed communication, or ends it (None)."""
        self.exchanges = exchanges

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copies the values of the team's first rank to all ranks of the team. Experts are copied from the first rank
        that has them.
        """
        with torch.no_grad():
            for tensor in tensors:
                group = self._reduce if expert_shard([tensor]) is None else self._expert_reduce
                group.broadcast(tensor)

    def least(self, values: Sequence[float]) -> list[float]:
        """The minimum of each value over all ranks of the team."""
        rows = self.calls.gather_rows(torch.tensor(values, dtype=torch.float64))
        found: list[float] = rows.min(dim=0).values.tolist()
        return found

    def shards(self, plans: Sequence[BucketPlan], params: Sequence[ParamSpec]) -> tuple[list[BucketPlan], Shards]:
        """The plans of this rank's parts of the buckets, and a record of the function by which the runtime starts the
        threads that communicate with other ranks.
        """
        if not self.zero.shares_buckets:
            return list(plans), OwnBuckets(self._start_norm_reducer)
        wholes, own = [], []
        for plan in plans:
            group = self._expert_reduce if plan.is_divided else self._reduce
            parts, rank = (group.world, group.rank) if self.num_parts > 1 else (1, 0)
            wholes.append(widen(plan, params, parts))
            own.append(part_of(wholes[-1], rank, parts))
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
        """Lets threads stop waiting for other ranks when the executor of this rank is closing or has failed."""

        def gives_up() -> bool:
            return executor.is_closing or executor.error is not None

        for group in self.groups.values():
            group.give_up_when(gives_up)
        if self._row_exchange is not None:
            self._row_exchange.give_up_when(gives_up)

    def _start(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        settings: Settings,
        where: torch.device,
    ) -> Reducer:
        zero = self.zero
        wire = Wire(
            self._reduce,
            self._agree,
            zero.dtype,
            is_partitioned=self.num_parts > 1 or self.world == 1,
            predivide=zero.predivide,
            exchanges=lambda: self.exchanges,
            replica=self._replica,
            divisor=(self.world if zero.op == "mean" else 1) / zero.predivide,
            experts=self._expert_reduce,
            num_counted=self.expert_shard.world if self.expert_shard is not None else 1,
        )
        self._give_up_with(executor)
        group = self._publish if self.num_parts > 1 else None
        experts = self._expert_publish if self.num_parts > 1 and self._expert_publish.world > 1 else None
        publisher = Publisher(device, executor, buckets, group, where, wire.exchanges, experts)
        flats = FlatPool(where, settings.flat_bytes)
        return Reducer(device, executor, device_work, buckets, wire, flats, where, publisher)
