"""Compression errors in a checkpoint. They are saved by parameter and replica, so that any layout of ranks can load
them.

The errors of a parameter belong to a replica, independent of which of its pipeline and tensor ranks have the parameter.
With the same number of replicas, each replica loads its own errors. Otherwise each loads the mean of all, which keeps
the mean of what was not yet communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.offload.bucket import Param
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.state_dict import StateDict, int_of, value_of

SavedErrors = StateDict  # the errors of one rank, as a tree of plain values and tensors; may be empty
NameOf = Callable[[str], str]  # from a name on this rank to the name that is the same in all layouts
Read = Callable[[object], Tensor]  # returns the tensor for a placeholder in a saved tree


class Replica(NamedTuple):
    """Index of a replica and the number of replicas."""

    which: int
    number: int


def tree_of(params: Sequence[Param], flats: Mapping[int, Tensor], name_of: NameOf, replica: Replica) -> SavedErrors:
    """The tree that one rank saves. `flats` has the errors by index of the parameter."""
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
