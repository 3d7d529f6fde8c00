# SPDX-License-Identifier: Apache-2.0
"""Streamed updates by twinflow's rules: the state is on the host and is copied to the device for each update and back.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. The master is the fp32 copy of a parameter to which updates are applied.

The CPU does no work for these buckets. If the host's kernels are limited by memory bandwidth and the copy engines are
not busy all the time, streamed and host updates together are faster than either alone. Parameters are part of the state
as in device_updater.py, so with Adam's two states in fp32, 10 bytes of each bf16 element are copied in each direction.

If blocks fetch the weights from the host (param_offload.py), the state has the only copy of the weights, as state that
the host updates. They are copied with the rest of the state, which are 12 bytes of each bf16 element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.job import Passage, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.staging import Stage
from twinflow.rules import Rule
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store, is_own_master, room_of, views_in


class StreamedUpdater:
    """The `Updater` (bucket.py) of streamed buckets: allocates, reads, writes and updates their state."""

    is_on_device = True
    is_all_in_store = True
    reads_decision = True

    def __init__(
        self,
        rule: Rule,
        format: str,
        device: Device,
        where: torch.device,
        keeps_states: bool = True,
        there: DeviceUpdater | None = None,
        master: str = "fp32",
        offloads_params: bool = False,
    ) -> None:
        """`there` updates the state that was copied to the device. Default: a `DeviceUpdater` of the rule.

        `offloads_params`: the state has the only copy of the weights.
        """
        self.rule = rule
        self._master = master
        self._offloads_params = offloads_params
        self._device = device
        self._where = where
        self._there = there or DeviceUpdater(rule, format, where, keeps_states, offloads_params, master=master)
        meta = torch.device("meta")
        self._shapes = DeviceUpdater(rule, format, meta, keeps_states, offloads_params, master=master)
        self._raw: dict[int, Tensor] = {}  # by bucket: all of its state in one tensor, so that one copy moves it
        self._views: dict[tuple[int, int], tuple[int, Store]] = {}  # by bucket and stage: buffer address, state in it

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates the state of a bucket in page-locked host memory, filled with zeros."""
        assert plan.can_alias
        num_bytes = room_of(self._parts(plan, self._shapes.new_store(plan)))
        raw = self._raw[plan.index] = self._device.pinned(num_bytes, torch.uint8)
        return self._view(plan, raw)

    def _view(self, plan: BucketPlan, raw: Tensor) -> Store:
        """A store whose tensors are consecutive in `raw`. A parameter that is its own master is not in `raw`."""
        shape = self._shapes.new_store(plan)
        master, weight, first, second, *scales = views_in(raw, self._parts(plan, shape))
        return Store(
            shape.format, shape.master if master is None else master, weight, (first, second), (scales[0], scales[1])
        )

    def _parts(self, plan: BucketPlan, shape: Store) -> list[Tensor | None]:
        is_there = is_own_master(plan.dtype, self._master) and not self._offloads_params
        return [None if is_there else shape.master, shape.weight, *shape.states, *shape.scales]

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Sets new states to zeros, or to the initial value that an option of the rule gives."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        slices.clear(self._slice(bucket, index), self.rule.start_value(options[bucket.params[index].group]))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """False, because the update on the device writes the weights."""
        return False

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """Returns the copy of the state to the stage's buffer, the update there, and the copy back."""
        assert stage is not None
        plan, raw = task.bucket.plan, self._raw[task.bucket.plan.index]
        there = stage.buffer(raw.numel(), self._where)
        key, address = (plan.index, id(stage)), there.data_ptr()
        if key not in self._views or self._views[key][0] != address:  # the buffer has grown
            self._views[key] = address, self._view(plan, there)
        update = self._there.update_of(self._views[key][1], task, factor, decision)
        return Passage(partial(_copy, there, raw), update, partial(_copy, raw, there))

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns no weights, because the parameters are part of the state, or fetched from it."""
        return ()

    def forget(self, bucket: Bucket) -> None:
        self._there.forget(bucket)
        self._device.release(self._raw.pop(bucket.plan.index))
        self._views = {key: view for key, view in self._views.items() if key[0] != bucket.plan.index}

    # State as numbers. The state is converted on the host, with copies of parameters that are on the device.

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """Master and states of one slice as flat fp32 tensors."""
        return slices.read(self.rule, self._mended(bucket, index))

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """The value that `read` returns under `key`, except that a bf16 state is not converted to fp32."""
        return slices.read_one(self.rule, self._mended(bucket, index), key)

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        """Replaces the state of one slice by values that `read` has returned.

        Elements of the master that do not round to the parameter are set to the parameter.
        """
        if self._offloads_params:
            return self._there.write(bucket, index, values)
        store, own = self._slice(bucket, index), bucket.targets[index].cpu()
        slices.write(self.rule, store, values)
        slices.write_master(store, own, keep=True)
        bucket.targets[index].copy_(store.master if store.weight is None else slices.rounded(store))

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """Sets the master as `DeviceUpdater.write_master` does. A parameter on the device does not change."""
        if self._offloads_params:
            return self._there.write_master(bucket, index, values, keep)
        store = self._slice(bucket, index)
        if bucket.plan.dtype == torch.float16:
            slices.write_master(store, values, keep)
        elif store.is_split:
            slices.mend_lower(store) if keep else store.master.zero_()

    def _mended(self, bucket: Bucket, index: int) -> Store:
        store = self._slice(bucket, index)
        if store.is_split and not self._offloads_params:
            slices.mend_lower(store)
        return store

    def _slice(self, bucket: Bucket, index: int) -> Store:
        """The state of one slice, with a copy of its parameter if that is on the device."""
        piece = bucket.slices[index]
        store = bucket.store.narrow(piece.offset, piece.numel)
        if self._offloads_params:
            return store
        own = bucket.targets[index].detach().cpu().clone()
        is_master = is_own_master(bucket.plan.dtype, self._master)
        return replace(store, master=own) if is_master else replace(store, weight=own)


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source, non_blocking=True)
