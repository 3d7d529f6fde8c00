"""Inputs of checkpointed layers, kept in parts by ranks that all have the same.

Under tensor parallelism every rank is given the same input of a layer. Of a large one each rank keeps its part alone,
and when the layer runs again in backward the ranks gather the whole: one all-gather a layer instead of `world` copies.
Every rank has to run the same layers again in the same order, as tensor ranks do anyway.

Not for inputs that differ between the ranks: where ranks share the sequence they are parts already. `is_checked`
compares them in every call, for tests and for doubts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twinflow.activations.offload import MIN_BYTES


class Ranks(Protocol):
    """What is asked of a group of ranks: `twinflow.dist.group.Group` has it."""

    rank: int
    world: int

    def all_gather(self, whole: Tensor) -> None:
        """Every rank's part of a flat tensor, in place."""


@dataclass(eq=False)
class Part:
    """This rank's part of one input, between forward and backward."""

    source: weakref.ref[Tensor]  # what the layer was given, to know it when it is given to another layer
    version: int
    size: torch.Size
    kept: Tensor  # flat; those of all ranks one after the other are the whole, with zeros behind it


class Partition:
    """Keeps inputs of at least `min_bytes` in parts. Used like an `Offload`, and in its place."""

    def __init__(self, group: Ranks, min_bytes: int = MIN_BYTES, is_checked: bool = False) -> None:
        self.whole_bytes = 0  # of all inputs that were kept in parts
        self.kept_bytes = 0  # of those, on this rank
        self._group, self._min_bytes, self._is_checked = group, min_bytes, is_checked
        self._known: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()  # by id of the source

    def saving(self, tensors: Sequence[Tensor], layer: str) -> saved_tensors_hooks:
        """Around a checkpointed call with these inputs: what is saved of them is this rank's part.

        Whatever runs inside the call is under the checkpoint's own hooks: only inputs come by here.
        """
        found = {_memory(tensor): self._save(tensor, layer) for tensor in tensors if self._is_worth_it(tensor)}

        def pack(tensor: Tensor) -> Tensor | Part:
            return found.get(_memory(tensor), tensor) if self._is_worth_it(tensor) else tensor

        def unpack(saved: Tensor | Part) -> Tensor:
            return self._whole(saved) if isinstance(saved, Part) else saved

        return saved_tensors_hooks(pack, unpack)

    def close(self) -> None:
        """There is nothing to give back: parts go with the graph that wants them."""

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            self._group.world > 1
            and type(tensor) is Tensor  # a Parameter stays, and of other kinds only their makers know the bytes
            and tensor.is_floating_point()
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= self._min_bytes
        )

    def _save(self, tensor: Tensor, layer: str) -> Part:
        known = self._known.get(id(tensor))
        if known is not None and known.source() is tensor and known.version == tensor._version:
            return known  # a mask, or the output of an encoder: one part for all layers that are given it
        flat = tensor.detach().reshape(-1)
        if self._is_checked:
            self._check_same(flat, layer)
        start, size = _range(flat.numel(), self._group)
        kept = flat.new_zeros(size)
        own = flat[start : start + size]
        kept[: len(own)] = own
        part = Part(weakref.ref(tensor), tensor._version, tensor.size(), kept)
        self._known[id(tensor)] = part
        self.whole_bytes += flat.numel() * flat.element_size()
        self.kept_bytes += size * flat.element_size()
        return part

    def _whole(self, part: Part) -> Tensor:
        start, size = self._group.rank * len(part.kept), len(part.kept)
        whole = part.kept.new_empty(size * self._group.world)
        whole[start : start + size] = part.kept
        self._group.all_gather(whole)
        return whole[: part.size.numel()].view(part.size)

    def _check_same(self, flat: Tensor, layer: str) -> None:
        mine = flat.view(torch.uint8)  # bits: what is not a number is not equal to itself
        rows = mine.new_empty((self._group.world, len(mine)))
        rows[self._group.rank] = mine
        self._group.all_gather(rows.view(-1))
        if bool((rows != mine).any()):
            raise RuntimeError(
                f"an input of the checkpointed layer {layer} is not the same on all tensor ranks, so it cannot be kept "
                "in parts. Switch partitioned activations off where ranks share the sequence."
            )


def _range(numel: int, group: Ranks) -> tuple[int, int]:
    """Where this rank's part starts, and the size of every rank's."""
    size = -(-numel // group.world)
    return group.rank * size, size


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Tensors for which this is the same have the same bytes in the same layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
