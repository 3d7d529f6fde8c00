"""Errors of compressed exchanges in a checkpoint: each replica's, of parameters that any layout can put together.

A replica's errors of a parameter belong to the replica, whichever of its pipeline and tensor ranks have the parameter.
As many replicas as there were take their own. Otherwise each takes the mean of all: what the ranks have not said yet
keeps its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.offload.bucket import Param
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.state_dict import StateDict, int_of, value_of

SavedErrors = StateDict  # one rank's, as a tree of plain values and tensors; empty where there are none
NameOf = Callable[[str], str]  # from a name here to the one that all layouts know
Read = Callable[[object], Tensor]  # a tensor, from what stands for it in a tree that was saved


class Replica(NamedTuple):
    """Which of how many."""

    which: int
    number: int


def tree_of(params: Sequence[Param], flats: Mapping[int, Tensor], name_of: NameOf, replica: Replica) -> SavedErrors:
    """What one rank saves; `flats` by the parameter's index."""
    entries = {}
    for param in params:
        shard = shard_of(param.tensor)
        part = None if shard is None else [shard.dim, shard.full, [list(one) for one in shard.ranges]]
        entries[name_of(param.name)] = {"error": flats[param.index].view(param.local.shape), "part": part}
    return {"replica": replica.which, "num_replicas": replica.number, "params": entries}


def own_errors(
    saved: Sequence[SavedErrors], params: Sequence[Param], name_of: NameOf, replica: Replica, read: Read
) -> dict[int, Tensor]:
    """From what all ranks have saved, this rank's: flat, by the parameter's index. All ranks' errors are many times the
    model, so only what is needed is read, one parameter of one replica at a time."""
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
    """One replica's errors of a parameter, put together from those of its tensor ranks."""
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
