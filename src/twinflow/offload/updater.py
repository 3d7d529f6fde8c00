# SPDX-License-Identifier: Apache-2.0
"""Allocates, reads and writes state on the host that twinflow's kernels update (csrc/executor_worker.cpp).

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. A slot is a page-locked host buffer for the gradients or the new weights of one
bucket. The master is the fp32 copy of a parameter to which updates are applied. A split master is stored as two halves
of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device, hide_from_children
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket
from twinflow.offload.plan import BucketPlan
from twinflow.rules import Rule
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store, is_own_master, new_states

_PAGE = 4096
Pair = tuple[Tensor | None, Tensor | None]


class RuleUpdater:
    """The `Updater` (bucket.py) of buckets on the host: allocates, reads and writes their state."""

    is_on_device = False
    is_all_in_store = True

    def __init__(
        self,
        rule: Rule,
        format: str,
        device: Device,
        keeps_states: bool = True,
        offloads_params: bool = False,
        master: str = "fp32",
    ) -> None:
        self.rule = rule
        self.format = format
        self.master = master
        self.keeps_states = keeps_states  # False: SGD without momentum has no states
        self.offloads_params = offloads_params  # the state has the only copy of the weights
        self._device = device

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates zeros.

        The part from which weights are copied to the device is page-locked: the master of an fp32 parameter, the weight
        of a bf16 parameter without master, or the upper half of the split master of a bf16 parameter. The master of an
        fp16 parameter does not contain its weights. They are copied from a slot of the executor. If the state has the
        only copy of the weights, they are copied from a page-locked tensor in the store instead.
        """
        states: tuple[Pair, Pair] = ((None, None), (None, None))
        if self.keeps_states:
            states = new_states(self.rule, self.format, plan.numel, hidden_zeros)
        if is_own_master(plan.dtype, self.master):
            return Store(self.format, self._device.pinned(plan.numel, plan.dtype), None, *states)
        if plan.dtype == torch.bfloat16:
            weight = self._device.pinned(plan.numel, torch.bfloat16)
            return Store(self.format, hidden_zeros(plan.numel, dtype=torch.int16), weight, *states)
        kept = self._device.pinned(plan.numel, plan.dtype) if self.offloads_params else None
        return Store(self.format, hidden_zeros(plan.numel, dtype=torch.float32), kept, *states)

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Sets new states to zeros, or to the initial value that an option of the rule gives."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        slices.clear(self.store_of(bucket, index), self.rule.start_value(options[bucket.params[index].group]))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """True for fp16, whose master does not contain the weights, unless the store has a copy of the weights."""
        return plan.dtype not in (torch.float32, torch.bfloat16) and not self.offloads_params

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """Master and states of one slice as flat fp32 tensors. fp32 tensors are returned as views."""
        return slices.read(self.rule, self.store_of(bucket, index))

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """The value that `read` returns under `key`, except that a bf16 state is not converted to fp32."""
        return slices.read_one(self.rule, self.store_of(bucket, index), key)

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        slices.write(self.rule, self.store_of(bucket, index), values)
        self._round(bucket, index)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        slices.write_master(self.store_of(bucket, index), values, keep)
        self._round(bucket, index)

    def _round(self, bucket: Bucket, index: int) -> None:
        """Rounds the fp32 master into the separate weights of the state, if it has such a master and such weights."""
        store = self.store_of(bucket, index)
        if store.weight is not None and not store.is_split:
            native.cast(store.weight, store.master)

    def forget(self, bucket: Bucket) -> None:
        self.release(bucket.store)

    def release(self, store: Store) -> None:
        """Releases the page-locked memory of a store."""
        for tensor in (store.weight, store.master):
            if tensor is not None:
                self._device.release(tensor)

    def store_of(self, bucket: Bucket, index: int) -> Store:
        """Views of one slice's part of the present store."""
        piece = bucket.slices[index]
        return bucket.store.narrow(piece.offset, piece.numel)


def hidden_zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages. Forked processes do not inherit this memory.

    The memory begins at a page, so that checkpoints can write it to a disk without a copy.
    """
    raw = torch.empty(numel + _PAGE // dtype.itemsize, dtype=dtype)
    start = -raw.data_ptr() % _PAGE // dtype.itemsize
    return hide_from_children(native.advise_huge(raw[start : start + numel])).zero_()
