"""Which part of a whole parameter a tensor rank has: rows or columns of it, marked on the parameter itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MARK, _COPY = "_twinflow_shard", "_twinflow_copy"


@dataclass(frozen=True)
class TensorShard:
    """Indices along one dim of the whole: `ranges` of it, one after the other, make up the local tensor.

    A fused projection has several ranges: this rank's heads of q, then of k, then of v.
    """

    dim: int
    full: int  # the whole's size along that dim
    ranges: tuple[tuple[int, int], ...]  # [start, stop) each
    rank: int  # which of the tensor ranks this is
    world: int

    @property
    def size(self) -> int:
        """The local tensor's size along the dim."""
        return sum(stop - start for start, stop in self.ranges)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole's shape, from the local one."""
        return (*shape[: self.dim], self.full, *shape[self.dim + 1 :])

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole, in memory of its own."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


def even_shard(dim: int, full: int, rank: int, world: int, num_fused: int = 1) -> TensorShard:
    """Equal parts of each of `num_fused` equal pieces of the dim; they must divide it."""
    piece = full // num_fused
    part = piece // world
    assert part * world * num_fused == full
    ranges = tuple((i * piece + rank * part, i * piece + (rank + 1) * part) for i in range(num_fused))
    return TensorShard(dim, full, ranges, rank, world)


def mark(param: Tensor, shard: TensorShard) -> None:
    """Say that a parameter is a part of a whole."""
    setattr(param, _MARK, shard)


def mark_copy(param: Tensor) -> None:
    """Say that another rank has this parameter too, and counts it: in norms, and in checkpoints."""
    setattr(param, _COPY, True)


def is_copy(param: Tensor) -> bool:
    """Whether another rank counts this parameter."""
    return getattr(param, _COPY, False)


def keep_marks(old: Tensor, new: Tensor) -> None:
    """A parameter takes another's place."""
    for name in (_MARK, _COPY):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def shard_of(param: Tensor) -> TensorShard | None:
    """The mark; None for a parameter that every tensor rank has whole."""
    found: TensorShard | None = getattr(param, _MARK, None)
    return found
