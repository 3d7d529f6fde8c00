# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpointed layers, sharded over tensor-parallel ranks between forward and backward.

Under tensor parallelism the input of a layer is the same on every rank. Each rank saves only its part of a large input.
When the layer runs again in backward, the ranks gather the whole input, with one all-gather per large input. Until then
a rank needs memory for its part only. All ranks must run the same layers again in the same order, as tensor ranks do.

Do not use `Partition` if tensor ranks split the sequence (tensor_parallel.sequence): their inputs differ, and are
sharded already.
`is_checked` compares large inputs of all ranks in every call. It is meant for tests and for debugging.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twinflow.activations.offload import MIN_BYTES, hooks_for, is_large, memory_key
from twinflow.dist.group import Group
from twinflow.errors import wrong_state


@dataclass(eq=False)
class Part:
    """This rank's part of one input between forward and backward."""

    source: weakref.ref[Tensor]  # the tensor given to the layer, to recognise it if another layer gets it too
    version: int
    size: torch.Size
    kept: Tensor  # flat; the parts of all ranks concatenated are the input, padded with zeros


class Partition:
    """Shards inputs of at least `min_bytes` over the ranks of `group`. It has the interface of `Offload`."""

    def __init__(self, group: Group, min_bytes: int = MIN_BYTES, is_checked: bool = False) -> None:
        self.whole_bytes = 0  # whole size of all inputs that were sharded
        self.kept_bytes = 0  # bytes of their parts on this rank
        self._group, self._min_bytes, self._is_checked = group, min_bytes, is_checked
        self._known: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()  # by id of the source

    def saving(self, tensors: Sequence[Tensor], layer: str) -> saved_tensors_hooks:
        """Context manager for a checkpointed call. Of large inputs in `tensors`, autograd saves this rank's part only.

        The checkpoint installs its own hooks for tensors that are saved inside the call, so only inputs arrive here.
        """
        found = {memory_key(tensor): self._save(tensor, layer) for tensor in tensors if self._is_worth_it(tensor)}
        return hooks_for(found, self._is_worth_it, self._whole)

    def close(self) -> None:
        """Does nothing: the parts are freed with the autograd graph."""

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return self._group.world > 1 and is_large(tensor, self._min_bytes)

    def _save(self, tensor: Tensor, layer: str) -> Part:
        known = self._known.get(id(tensor))
        if known is not None and known.source() is tensor and known.version == tensor._version:
            return known  # an input of several layers, such as a mask, is saved once
        flat = tensor.detach().reshape(-1)
        if self._is_checked:
            self._check_same(flat, layer)
        size = -(-flat.numel() // self._group.world)
        start = self._group.rank * size
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
        mine = flat.view(torch.uint8)  # compared as bytes, because NaN is not equal to itself
        rows = mine.new_empty((self._group.world, len(mine)))
        rows[self._group.rank] = mine
        self._group.all_gather(rows.view(-1))
        if bool((rows != mine).any()):
            raise wrong_state(
                f"The activations of the checkpointed layer {layer} cannot be partitioned",
                "one of its inputs is not the same on all tensor ranks",
                "Set activation_checkpointing.partition_activations to false.",
            )
