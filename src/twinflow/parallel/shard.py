# SPDX-License-Identifier: Apache-2.0
"""The part of a parameter that a tensor rank has: rows or columns. The part is marked on the parameter itself.

With expert parallelism, a part is the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MARK, _COPY = "_twinflow_shard", "_twinflow_copy"


@dataclass(frozen=True)
class TensorShard:
    """The indices of a local tensor in the whole one, along one dim: the concatenated `ranges`.

    A fused projection has several ranges: this rank's heads of q, then of k, then of v.
    """

    dim: int
    full: int  # size of the whole tensor along the dim
    ranges: tuple[tuple[int, int], ...]  # [start, stop) of each range
    rank: int  # number of this rank among those that have all parts
    world: int
    is_expert: bool = False  # the whole tensor has all experts, and the other ranks have tokens of their own

    @property
    def size(self) -> int:
        """Size of the local tensor along the dim."""
        return sum(stop - start for start, stop in self.ranges)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the local shape."""
        return (*shape[: self.dim], self.full, *shape[self.dim + 1 :])

    def cut(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part of the whole tensor."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ranks in order."""
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            ranges = even_shard(self.dim, self.full, rank, self.world, len(self.ranges)).ranges
            assert rank != self.rank or ranges == self.ranges
            offset = 0
            for start, stop in ranges:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
                offset += stop - start
        return whole


def even_shard(dim: int, full: int, rank: int, world: int, num_fused: int = 1) -> TensorShard:
    """The shard of `rank`: its part of each of `num_fused` equal pieces. `num_fused` * `world` must divide `full`."""
    piece = full // num_fused
    part = piece // world
    assert part * world * num_fused == full
    ranges = tuple((i * piece + rank * part, i * piece + (rank + 1) * part) for i in range(num_fused))
    return TensorShard(dim, full, ranges, rank, world)


def mark(param: Tensor, shard: TensorShard) -> None:
    """Mark a parameter as a part of a whole one."""
    setattr(param, _MARK, shard)


def mark_copy(param: Tensor) -> None:
    """Mark a parameter as a copy. Another rank has it too, and counts it in norms and checkpoints."""
    setattr(param, _COPY, True)


def is_copy(param: Tensor) -> bool:
    """Whether another rank counts this parameter."""
    return getattr(param, _COPY, False)


def keep_marks(old: Tensor, new: Tensor) -> None:
    """Copy the marks of a parameter, and the user's attributes such as `use_muon`, to the one that replaces it."""
    for name, value in vars(old).items():
        if name in (_MARK, _COPY) or not name.startswith("_"):
            vars(new).setdefault(name, value)


def expert_shard(tensors: Iterable[Tensor]) -> TensorShard | None:
    """The first shard of experts among these tensors; None without expert parallelism."""
    shards = (shard_of(tensor) for tensor in tensors)
    return next((shard for shard in shards if shard is not None and shard.is_expert), None)


def shard_of(param: Tensor) -> TensorShard | None:
    """The shard of a parameter. None if every rank has the whole parameter."""
    found: TensorShard | None = getattr(param, _MARK, None)
    return found
