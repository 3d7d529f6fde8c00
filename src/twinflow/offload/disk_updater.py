# SPDX-License-Identifier: Apache-2.0
"""Reads and writes state on the disk that the native executor updates in memory (state_file.py).

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. A record is the part of the file with one store. It has the same bits as the
store of `RuleUpdater`. The store in memory has no memory of its own: it only tells shapes and dtypes. There is one
exception: weights that blocks fetch from the host (param_offload.py) are in page-locked memory, and not in the record.
If these weights are on a disk too, they are in the record, and once more in a file of their own (weight_source.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket
from twinflow.offload.plan import ROOT, BucketPlan
from twinflow.offload.state_file import StateFile, in_pages
from twinflow.offload.weight_source import OnDisk
from twinflow.rules import Rule
from twinflow.rules.rule import Options
from twinflow.rules.segment import Pair, Store, is_own_master, new_states, room_of, views_in

BASE: Final = 4096  # a record is described to the native executor as if it were at this address
NewTensor = Callable[[int, torch.dtype], Tensor]


class DiskUpdater:
    """The `Updater` (bucket.py) of buckets on the disk."""

    is_on_device = False
    is_all_in_store = False

    def __init__(
        self,
        rule: Rule,
        format: str,
        device: Device,
        keeps_states: bool,
        offloads_params: bool,
        master: str,
        file: StateFile,
        weights: StateFile | None = None,
    ) -> None:
        """`weights`: the file with the weights that blocks fetch; None: they are in memory."""
        self.rule = rule
        self.format = format
        self.file = file
        self.weights = weights
        self._device = device
        self._keeps_states = keeps_states
        self._offloads_params = offloads_params
        self._master = master

    def new_store(self, plan: BucketPlan) -> Store:
        """Adds a record with zeros, and returns a store without memory, except for weights that blocks fetch."""
        is_fetched = self._offloads_params and plan.block != ROOT
        new_weights = self._device.pinned if is_fetched and self.weights is None else None
        if is_fetched and self.weights is not None:
            self.weights.add(plan.index, plan.numel * plan.dtype.itemsize)
        shape = shape_of(self.rule, self.format, self._keeps_states, self._master, plan, new_weights)
        self.file.add(plan.index, record_bytes(shape))
        return shape

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Sets new states to the initial value that an option of the rule gives. They are zeros already."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """True, because the state leaves the memory before its weights have been copied to the device. Weights that
        blocks fetch stay there."""
        return not self._offloads_params or plan.block == ROOT

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        with self._slice(bucket, index, is_changed=False) as store:
            return {key: value.clone() for key, value in slices.read(self.rule, store).items()}

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """The value that `read` returns under `key`, except that a bf16 state is not converted to fp32."""
        with self._slice(bucket, index, is_changed=False) as store:
            found = slices.read_one(self.rule, store, key)
            return found.clone() if found is not None else None

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        with self._slice(bucket, index, is_changed=True) as store:
            slices.write(self.rule, store, values)
            self._show(bucket, index, store)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        with self._slice(bucket, index, is_changed=True) as store:
            slices.clear(store, self.rule.start_value(options[bucket.params[index].group]))

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        if keep:  # usually nothing changes, and the record need not be written
            with self._slice(bucket, index, is_changed=False) as store:
                if slices.keeps_master(store, values):
                    return
        with self._slice(bucket, index, is_changed=True) as store:
            slices.write_master(store, values, keep)
            self._show(bucket, index, store)

    def weights_on_disk(self, bucket: Bucket) -> OnDisk | None:
        """The weights of a bucket, if blocks fetch them from a disk."""
        if self.weights is None or not bucket.offloads_params:
            return None
        return OnDisk(self.weights, bucket.plan.index, bucket.plan.numel, bucket.plan.dtype)

    def _show(self, bucket: Bucket, index: int, store: Store) -> None:
        """Copies the new master of a slice to the weights that blocks fetch, if they are not a part of it."""
        there = self.weights_on_disk(bucket)
        if there is None:
            if store.weight is not None:
                _round(store.weight, store)
            return
        piece = bucket.slices[index]
        with there.hold(is_changed=True) as weights:
            _round(weights[piece.offset : piece.offset + piece.numel], store)

    def forget(self, bucket: Bucket) -> None:
        """Does nothing: the record stays for the case that the state moves back."""

    @contextmanager
    def _slice(self, bucket: Bucket, index: int, is_changed: bool) -> Iterator[Store]:
        piece = bucket.slices[index]
        with self.file.hold(bucket.plan.index, is_changed) as raw:
            yield view(bucket.store, raw).narrow(piece.offset, piece.numel)


def shape_of(
    rule: Rule, format: str, keeps_states: bool, master: str, plan: BucketPlan, new_weights: NewTensor | None = None
) -> Store:
    """The store of a bucket as meta tensors, with the tensors and dtypes of `RuleUpdater.new_store`.

    `new_weights` allocates the weights if blocks fetch them.
    """
    zeros = partial(torch.empty, device="meta")
    states: tuple[Pair, Pair] = ((None, None), (None, None))
    if keeps_states:
        states = new_states(rule, format, plan.numel, zeros)
    if is_own_master(plan.dtype, master):
        own = new_weights(plan.numel, plan.dtype) if new_weights else zeros(plan.numel, dtype=plan.dtype)
        return Store(format, own, None, *states)
    weight = new_weights(plan.numel, plan.dtype) if new_weights else None
    if plan.dtype == torch.bfloat16:
        weight = zeros(plan.numel, dtype=torch.bfloat16) if weight is None else weight
        return Store(format, zeros(plan.numel, dtype=torch.int16), weight, *states)
    return Store(format, zeros(plan.numel, dtype=torch.float32), weight, *states)


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """For `shape_of`, if only the bytes of the record are needed."""
    return torch.empty((), dtype=dtype).expand(numel)


def weights_of(store: Store) -> Tensor:
    """The weights of a store: the master if there are no separate ones."""
    return store.weight if store.weight is not None else store.master


def view(shape: Store, raw: Tensor) -> Store:
    """The store, with its meta tensors replaced by consecutive parts of the bytes `raw`."""
    pairs = zip(_tensors(shape), views_in(raw, _parts(shape)), strict=True)
    master, weight, first, second, *scales = (there if there is not None else own for own, there in pairs)
    assert master is not None
    return Store(shape.format, master, weight, (first, second), (scales[0], scales[1]))


def addresses(shape: Store) -> Store:
    """The store as if its record were at the address `BASE`. Its tensors must not be read or written."""
    raw = (ctypes.c_uint8 * record_bytes(shape)).from_address(BASE)
    return view(shape, torch.frombuffer(raw, dtype=torch.uint8))


def record_bytes(shape: Store) -> int:
    """Bytes of the record of a store: at least a page, also if a rank has no part of the bucket."""
    return in_pages(max(1, room_of(_parts(shape))))


def _tensors(store: Store) -> list[Tensor | None]:
    return [store.master, store.weight, *store.states, *store.scales]


def _parts(shape: Store) -> list[Tensor | None]:
    """The tensors that are in the record."""
    return [tensor if tensor is not None and tensor.is_meta else None for tensor in _tensors(shape)]


def _round(weights: Tensor, store: Store) -> None:
    """Sets `weights` to the rounded master, unless they are a part of the store."""
    if store.is_split:
        if store.weight is not None and store.weight is not weights:
            weights.copy_(store.weight)
    elif store.master.dtype == weights.dtype:
        weights.copy_(store.master)
    else:
        native.cast(weights, store.master)
