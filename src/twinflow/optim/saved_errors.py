"""Errors of compressed exchanges in a checkpoint: each replica's, of parameters that any layout can put together.

A replica's errors of a parameter belong to the replica, whichever of its pipeline and tensor ranks have the parameter.
As many replicas as there were take their own. Otherwise each takes the mean of all: what the ranks have not said yet
keeps its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinflow.offload.bucket import Param
from twinflow.parallel.shard import TensorShard, shard_of

SavedErrors = dict[str, Any]  # one rank's, as a tree of plain values and tensors; empty where there are none
NameOf = Callable[[str], str]  # from a name here to the one that all layouts know


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
    saved: Sequence[SavedErrors], params: Sequence[Param], name_of: NameOf, replica: Replica
) -> dict[int, Tensor]:
    """From what all ranks have saved, this rank's: flat, by the parameter's index."""
    is_same = saved[0]["num_replicas"] == replica.number
    chosen = [one for one in saved if not is_same or one["replica"] == replica.which]
    found = {}
    for param in params:
        wholes = _wholes(chosen, name_of(param.name))
        mean = torch.stack(wholes).mean(0) if len(wholes) > 1 else wholes[0]
        shard = shard_of(param.tensor)
        found[param.index] = (mean if shard is None else shard.cut(mean)).reshape(-1)
    return found


def _wholes(saved: Sequence[SavedErrors], name: str) -> list[Tensor]:
    """Each replica's errors of a parameter, put together from those of its tensor ranks."""
    wholes: dict[int, Tensor] = {}
    for one in saved:
        entry = one["params"].get(name)
        if entry is None:  # another stage has it
            continue
        if entry["part"] is None:
            wholes[one["replica"]] = entry["error"]
            continue
        dim, full, ranges = entry["part"]
        error, start = entry["error"], 0
        shape = TensorShard(dim, full, (), 0, 1).whole_shape(error.shape)
        whole = wholes.setdefault(one["replica"], torch.zeros(shape))
        for low, high in ranges:
            whole.narrow(dim, low, high - low).copy_(error.narrow(dim, start, high - low))
            start += high - low
    return [wholes[index] for index in sorted(wholes)]
