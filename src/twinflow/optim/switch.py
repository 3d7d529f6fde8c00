# SPDX-License-Identifier: Apache-2.0
"""The switch of a TwinOptimizer to compressed communication (zero/compression.py), and its part of a checkpoint.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A replica is one
copy of the model, which may be divided between pipeline and tensor ranks. An exchange is the compressed communication
of one bucket. Before it, elements are multiplied by powers of two, whose exponents depend on the second moment.

Before the switch, training is ordinary. The switch is made at `freeze_step`, or if it is None, when the sum of the
second moment has become stable (`VarianceWatch`). The sum is read about `LOOKS` times in a window of steps, and not in
every step, because a read must wait for the last update.

Compression errors are saved by parameter and replica, so that any number of ranks can load them. The errors of a
parameter belong to a replica, no matter which of its pipeline and tensor ranks have the parameter. With the same
number of replicas, each replica loads its own errors. Otherwise each loads the mean of all, which keeps the mean of
what was not yet communicated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.codes import code_named
from twinflow.codes.reference import exponents_of, two_to
from twinflow.conflicts import refuse
from twinflow.offload.bucket import Bucket, Param, target
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.disk_updater import DiskUpdater
from twinflow.offload.plan import Slice
from twinflow.offload.streamed import StreamedUpdater
from twinflow.offload.updater import RuleUpdater
from twinflow.optim.outcomes import Outcomes
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.rules.formats import SCALED
from twinflow.rules.rule import number, numbers
from twinflow.state_dict import StateDict, int_of, tensor_of, value_of
from twinflow.zero import Team
from twinflow.zero.compression import (
    Compression,
    Exchange,
    Exchanges,
    VarianceWatch,
    default_window,
    floor_of,
    raised,
    rounded_variance,
    second_correction,
)

LOGGER = logging.getLogger("twinflow")
LOOKS = 10  # reads of the second moment in a window
KEYS = ("is_exchanged", "second_step")  # entries of the param groups after the switch
SavedErrors = StateDict  # the errors of one rank, as a tree of plain values and tensors; may be empty
NameOf = Callable[[str], str]  # from a name on this rank to the name that is the same for all numbers of ranks
Read = Callable[[object], Tensor]  # returns the tensor for a placeholder in a saved tree


class Switch:
    """Decides when communication becomes compressed, and makes the switch.

    The memory of the exchanges is allocated at the start, so that the switch cannot run out of memory.
    """

    def __init__(self, optimizer: Outcomes, compression: Compression) -> None:
        self._optimizer = optimizer
        self._compression = compression
        betas = {numbers(group, "betas")[0] for group in optimizer.param_groups}
        refuse("1-bit Adam", {"betas": len(betas) > 1}, betas=", ".join(map(str, sorted(betas))))
        self._b1 = betas.pop()  # decay of the first moment
        window = compression.freeze_window or default_window(numbers(optimizer.param_groups[0], "betas")[1])
        self._every = max(1, window // LOOKS)
        self._watch = VarianceWatch(max(1, window // self._every), compression.freeze_threshold)
        self._reserved: dict[int, Exchange] = {}  # by the bucket's index

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """Allocates the memory of the exchanges."""
        for bucket in buckets if self._optimizer.can_compress else ():
            where, whole = bucket.members[0].local.device, bucket.gathered.numel
            exponents = torch.zeros(whole, dtype=torch.uint8, device=where)
            published = torch.zeros(bucket.plan.numel, dtype=bucket.plan.dtype, device=where)
            row_bytes = code_named(self._compression.code).row_bytes(bucket.plan.numel)
            sent_codes = torch.zeros(whole // bucket.plan.numel, row_bytes, dtype=torch.uint8, device=where)
            error = torch.zeros(whole, device=where)
            self._reserved[bucket.plan.index] = Exchange(exponents, error, published, sent_codes)

    @property
    def _team(self) -> Team:
        team = self._optimizer.team
        assert team is not None
        return team

    @property
    def is_made(self) -> bool:
        """Whether the switch was made: ranks exchange compressed momenta since then."""
        team = self._optimizer.team
        return team is not None and team.exchanges is not None

    def after_step(self) -> None:
        """Makes the switch if it is due. With one rank there is no communication and no switch."""
        optimizer, team = self._optimizer, self._team
        if self.is_made or not optimizer.can_compress:
            return
        step = self._compression.freeze_step
        if step is not None:
            if optimizer.num_steps >= step:
                self.make()
        elif optimizer.num_steps % self._every == 0:
            optimizer.runtime.wait()
            rows = team.everyone.gather_rows(torch.tensor([self._own_total()], dtype=torch.float64))
            lr = max(number(group, "lr") for group in optimizer.param_groups)
            if self._watch.see(float(rows.sum()), lr):
                self.make()

    def _own_total(self) -> float:
        """The bias-corrected sum of this rank's part of the second moment.

        A parameter with copies on several ranks is counted on one of them.
        """
        total = 0.0
        for bucket in (one for one in self._optimizer.runtime.buckets if one.plan.is_counted):
            for i, param in enumerate(bucket.params):
                if bucket.steps[i]:
                    b2 = numbers(self._optimizer.param_groups[param.group], "betas")[1]
                    found = read_state(bucket, i, "exp_avg_sq").sum(dtype=torch.float64)
                    total += float(found) / (1.0 - b2 ** bucket.steps[i])
        return total

    def make(self) -> None:
        """Makes the switch: communication is compressed from the next step on. All ranks must call it."""
        optimizer = self._optimizer
        optimizer.runtime.wait()
        optimizer.runtime.wait_for_copies()
        own = max((step for bucket in optimizer.runtime.buckets for step in bucket.steps), default=1)
        everyone = self._team.everyone
        steps = max(1, int(everyone.gather_rows(torch.tensor([own])).max()))
        self._exchange_from_now_on(steps)
        for group in optimizer.param_groups:
            group["is_exchanged"], group["second_step"] = True, steps
        if everyone.rank == 0:
            LOGGER.info(
                f"1-bit Adam: the second moment is frozen after step {optimizer.num_steps}, and communication is "
                "compressed from now on."
            )

    def _exchange_from_now_on(self, steps: int | None) -> None:
        """Starts the exchanges. With `steps`, the number of updates, second moments are rounded to powers of two."""
        optimizer, team = self._optimizer, self._team
        floors = self._floors() if steps is not None else []
        for bucket in optimizer.runtime.buckets:
            own, part = self._reserved[bucket.plan.index], torch.zeros(bucket.plan.numel, dtype=torch.uint8)
            for i, piece in enumerate(bucket.slices):
                part[piece.offset : piece.offset + piece.numel] = self._exponents(bucket, i, steps, floors)
            whole = torch.zeros(team.world * part.numel(), dtype=torch.uint8)
            whole[team.rank * part.numel() : (team.rank + 1) * part.numel()] = part
            team.calls.all_gather(whole)
            own.exponents.copy_(whole)
            own.error.copy_(self._shared_momentum(bucket, whole) if steps is not None else torch.zeros(()))
            for param, piece in zip(bucket.params, bucket.slices, strict=True):
                own.published[piece.offset : piece.offset + piece.numel] = target(param.tensor, piece).reshape(-1)
        team.set_exchanges(Exchanges(code_named(self._compression.code), self._b1, self._reserved))

    def _shared_momentum(self, bucket: Bucket, exponents: Tensor) -> Tensor:
        """The initial error of a bucket: the momenta of all ranks' parts times b1, in units of update / lr."""
        team = self._team
        whole, size = torch.zeros(exponents.numel(), dtype=torch.bfloat16), bucket.plan.numel
        for i, piece in enumerate(bucket.slices):
            start = team.rank * size + piece.offset
            whole[start : start + piece.numel] = read_state(bucket, i, "exp_avg")
        team.calls.all_gather(whole)
        return torch.where(exponents != 0, whole.float() * two_to(exponents), 0.0) * self._b1

    def _floors(self) -> list[float]:
        """The lower limit for the frozen second moment of each parameter (`floor_of`), over all ranks with a part."""
        optimizer, team = self._optimizer, self._team
        own = torch.zeros(2, len(optimizer.runtime.params), dtype=torch.float64)  # rows: sums, numbers of elements
        for bucket in optimizer.runtime.buckets:
            for i, piece in enumerate(bucket.slices):
                variance = read_state(bucket, i, "exp_avg_sq")
                own[0, piece.param] += float(variance.sum(dtype=torch.float64))
                own[1, piece.param] += int(variance.count_nonzero())
        totals, counts = team.calls.gather_rows(own.view(-1)).sum(0).view(2, -1).tolist()
        return [floor_of(total, count) for total, count in zip(totals, counts, strict=True)]

    def _exponents(self, bucket: Bucket, i: int, steps: int | None, floors: Sequence[float]) -> Tensor:
        group = self._optimizer.param_groups[bucket.params[i].group]
        if steps is None:
            return exponents_of(read_state(bucket, i, "exp_avg_sq"), 0.0)
        values = bucket.updater.read(bucket, i)
        variance = raised(tensor_of(values, "exp_avg_sq"), floors[bucket.slices[i].param])
        correction = second_correction(group, steps)
        found = exponents_of(variance, number(group, "eps") * correction)
        bucket.updater.write(bucket, i, {**values, "exp_avg_sq": rounded_variance(found)})
        return found

    # Saving.

    def state(self) -> StateDict:
        """The state of the watch over the second moment."""
        return self._watch.state_dict()

    def errors(self) -> SavedErrors:
        """This rank's compression errors by parameter; empty before the switch."""
        optimizer, team = self._optimizer, self._team
        if team.exchanges is None:
            return {}
        wholes = {param.index: torch.zeros(param.local.numel()) for param in optimizer.runtime.params}
        for piece, error in self._errors_by_slice(team.exchanges):
            wholes[piece.param][piece.start : piece.start + piece.numel] = error
        return tree_of(optimizer.runtime.params, wholes, self._canonical, Replica(team.rank, team.world))

    def restore(self, watch: Mapping[str, object] | None) -> None:
        """Continues from a loaded state. `watch` is what `state` has returned."""
        team = self._team
        team.set_exchanges(None)
        if watch is not None:
            self._watch.load_state_dict(watch)
        if self._optimizer.param_groups[0].get("is_exchanged"):
            self._exchange_from_now_on(None)

    def restore_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Loads the errors of all ranks. With the same number of replicas each gets its own, otherwise the mean."""
        optimizer, team = self._optimizer, self._team
        if team.exchanges is None or not saved or not saved[0]:
            return
        params = optimizer.runtime.params
        wholes = own_errors(saved, params, self._canonical, Replica(team.rank, team.world), read)
        for piece, error in self._errors_by_slice(team.exchanges):
            error.copy_(wholes[piece.param][piece.start : piece.start + piece.numel])

    def check_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Raises ValueError if `restore_errors` could not load these errors."""
        if self._team.exchanges is None or not saved or not saved[0]:
            return
        params = self._optimizer.runtime.params
        wholes = own_errors(saved, params, self._canonical, Replica(self._team.rank, self._team.world), read)
        for param in params:
            if wholes[param.index].numel() != param.tensor.numel():
                raise ValueError(f"The compression errors of {param.name} do not have the shape of the parameter.")

    def _errors_by_slice(self, exchanges: Exchanges) -> Iterator[tuple[Slice, Tensor]]:
        """Views of this rank's errors, one for each slice of a parameter."""
        for bucket in self._optimizer.runtime.buckets:
            error = exchanges.of[bucket.plan.index].error
            for piece in bucket.gathered.slices:
                yield piece, error[piece.offset : piece.offset + piece.numel]

    def _canonical(self, name: str) -> str:
        """The name of a parameter in the first module that uses it."""
        aliases: Mapping[str, str] = getattr(self._optimizer.model, "aliases", {})
        return aliases.get(name, name)


def read_state(bucket: Bucket, index: int, key: str) -> Tensor:
    """The master, a state or its scales (`key`) of a slice, for twinflow's rules. A bf16 state stays bf16."""
    assert isinstance(bucket.updater, (RuleUpdater, DiskUpdater, DeviceUpdater, StreamedUpdater))
    found = bucket.updater.read_one(bucket, index, key)
    assert found is not None
    return found


def check(optimizer: Outcomes, delayed_update: bool) -> None:
    """Raises ValueError for options that conflict with compressed communication."""
    found = {
        "rule": optimizer.rule is None or optimizer.rule.name != "adamw",
        "states": optimizer.states in SCALED,
        "master": optimizer.master == "none",
        "ratio": optimizer.ratio == "auto",
        "delayed_update": delayed_update,
        "streamed": optimizer.tuning.streamed,
        "max_grad_value": optimizer.max_grad_value is not None,
    }
    streamed = optimizer.tuning.streamed
    refuse("1-bit Adam", found, rule=optimizer.rule_name, states=optimizer.states, streamed=streamed)
    refuse("A list of parameters", {"compression": optimizer.model is None})


# Errors in a checkpoint.


class Replica(NamedTuple):
    """Index of a replica and the number of replicas."""

    which: int
    number: int


def tree_of(params: Sequence[Param], flats: Mapping[int, Tensor], name_of: NameOf, replica: Replica) -> SavedErrors:
    """The nested dict of compression errors that one rank saves. `flats` has the errors by index of the parameter."""
    entries = {}
    for param in params:
        shard = shard_of(param.tensor)
        part = None if shard is None else [shard.dim, shard.full, [list(one) for one in shard.ranges]]
        entries[name_of(param.name)] = {"error": flats[param.index].view(param.local.shape), "part": part}
    return {"replica": replica.which, "num_replicas": replica.number, "params": entries}


def own_errors(
    saved: Sequence[SavedErrors], params: Sequence[Param], name_of: NameOf, replica: Replica, read: Read
) -> dict[int, Tensor]:
    """This rank's errors from those of all ranks: flat tensors by index of the parameter.

    The errors of all ranks are many times as large as the model, so one parameter of one replica is read at a time.
    """
    is_same = saved[0]["num_replicas"] == replica.number
    chosen = [replica.which] if is_same else sorted({int_of(one, "replica") for one in saved})
    found = {}
    for param in params:
        total: Tensor | None = None
        for which in chosen:
            whole = _whole([one for one in saved if one["replica"] == which], name_of(param.name), read)
            total = whole if total is None else total + whole
        assert total is not None
        mean, shard = total / len(chosen), shard_of(param.tensor)
        found[param.index] = (mean if shard is None else shard.cut(mean)).reshape(-1)
    return found


def _whole(saved: Sequence[SavedErrors], name: str, read: Read) -> Tensor:
    """One replica's errors of a parameter, joined from the parts of its tensor ranks."""
    all_params = [value_of(one, "params", dict) for one in saved]
    entries = [params[name] for params in all_params if name in params]  # other stages do not have it
    if entries[0]["part"] is None:
        return read(entries[0]["error"])
    whole: Tensor | None = None
    for entry in entries:
        dim, full, ranges = entry["part"]
        error, start = read(entry["error"]), 0
        if whole is None:
            whole = torch.zeros(TensorShard(dim, full, (), 0, 1).whole_shape(error.shape))
        for low, high in ranges:
            whole.narrow(dim, low, high - low).copy_(error.narrow(dim, start, high - low))
            start += high - low
    assert whole is not None
    return whole
