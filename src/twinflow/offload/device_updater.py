# SPDX-License-Identifier: Apache-2.0
"""Updates on the device by twinflow's update rules, for buckets whose state is in device memory ("resident").

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. The master is the fp32 copy of a parameter to which updates are applied. A
split master is stored as two halves of 16 bits.

The parameters are part of the state ("aliased"): a bf16 parameter is the upper half of its split master, an fp32
parameter and a bf16 parameter without master are their own masters, and an fp16 parameter has a separate fp32 master.
With Adam's two states in fp32, a resident bucket therefore needs 10 bytes for each bf16 element beside the weight
itself, and its update copies no weights. With a delayed update the weights must not change for one more step, so the
state has separate buffers for the new weights. It also has these buffers if a parameter is not contiguous.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinflow import native
from twinflow.gpu import update as gpu
from twinflow.gpu.update import FusedUpdate, Numbers, Piece
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket
from twinflow.offload.job import Passage, Task
from twinflow.offload.numbers import Hypers
from twinflow.offload.plan import BucketPlan
from twinflow.offload.staging import Stage
from twinflow.rules import Rule, reference
from twinflow.rules.rule import Options
from twinflow.rules.segment import Segment, Store, is_own_master, new_states


class DeviceUpdater:
    """The `Updater` (bucket.py) of resident buckets: allocates, reads, writes and updates their state."""

    is_on_device = True
    is_all_in_store = True
    reads_decision = True

    def __init__(
        self,
        rule: Rule,
        format: str,
        device: torch.device,
        keeps_states: bool = True,
        keeps_weights: bool = False,
        max_programs: int | None = None,
        master: str = "fp32",
    ) -> None:
        self.rule = rule
        self.format = format
        self.master = master
        self.keeps_states = keeps_states  # False: SGD without momentum has no states
        self.keeps_weights = keeps_weights  # the state has its own buffers for weights
        self.max_programs = max_programs  # largest number of Triton programs of an update; None: no limit
        self._device = device
        self._hypers = Hypers(rule, has_keys=format != "fp32" or master == "none")
        self._is_fused = gpu.is_available()
        self._has_run = False
        self._fused: dict[int, tuple[list[int], FusedUpdate]] = {}  # by bucket: addresses of weights, kernel for them

    def is_aliased(self, plan: BucketPlan) -> bool:
        """Whether the parameters are part of the state."""
        return plan.can_alias and not self.keeps_weights

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates zeros on the device. The master is a meta tensor if the parameters are their own master."""
        zeros = partial(torch.zeros, device=self._device)
        states = new_states(self.rule, self.format, plan.numel, zeros) if self.keeps_states else ((None, None),) * 2
        is_aliased = self.is_aliased(plan)
        if is_own_master(plan.dtype, self.master):
            device = torch.device("meta") if is_aliased else self._device
            return Store(self.format, torch.zeros(plan.numel, dtype=plan.dtype, device=device), None, *states)
        weight = None if is_aliased else zeros(plan.numel, dtype=plan.dtype)
        master = zeros(plan.numel, dtype=torch.int16 if plan.dtype == torch.bfloat16 else torch.float32)
        return Store(self.format, master, weight, *states)

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Sets new states to zeros, or to the initial value that an option of the rule gives."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        slices.clear(self._slice(bucket, index), self.rule.start_value(options[bucket.params[index].group]))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """False, because weights do not pass through the host."""
        return False

    # The update.

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """Returns an update that copies no state, because all of the state is on the device."""
        bucket = task.bucket
        weights = () if self.is_aliased(bucket.plan) else self._weights(bucket, bucket.store)
        return Passage(None, self.update_of(bucket.store, task, factor, decision), None, weights)

    def update_of(self, store: Store, task: Task, factor: float, decision: Tensor | None) -> Callable[[], None]:
        """A function that updates the state in `store`."""
        grads = task.grads
        assert grads is not None
        return partial(self.writer(store, task, factor, grads.device), grads, decision)

    def writer(
        self, store: Store, task: Task, factor: float, device: torch.device
    ) -> Callable[[Tensor, Tensor | None], None]:
        """A function that updates the state in `store` with the given gradients and clipping decision."""
        if device.type == "cuda" and self._is_fused:
            return partial(self._update_fused, store, task, factor)
        numbers = {i: self._hypers.of(task, i, factor) for i in task.present}
        return partial(self._update_plainly, task.bucket, store, numbers)

    def _update_fused(self, store: Store, task: Task, factor: float, grads: Tensor, decision: Tensor | None) -> None:
        """Updates with the bucket's Triton kernel, or without Triton if the first launch fails.

        The kernel's tables are allocated on the stream that runs the kernel, because memory of another stream may still
        be in use by that stream. A GPU stream calls this function at once, so the step counts are still those of the
        task.
        """
        try:
            fused = self._fused_of(task.bucket, store)
            self._hypers.put(fused.rows, task, factor)
            fused.run(store, grads, decision)
        except Exception as error:  # Triton compiles at the first launch, and needs a C compiler for that
            if self._has_run or isinstance(error, AssertionError):
                raise
            warnings.warn(
                f"Updates on the GPU use slower torch kernels, because Triton cannot compile or run the fused kernel "
                f"({error}). If the error is about a missing C compiler, install one.",
                stacklevel=2,
            )
            self._is_fused = False
            numbers = {i: self._hypers.of(task, i, factor) for i in task.present}
            self._update_plainly(task.bucket, store, numbers, grads, decision)
        self._has_run = True

    def _fused_of(self, bucket: Bucket, store: Store) -> FusedUpdate:
        """The bucket's kernel with its tables. The tables are made again if addresses of weights have changed."""
        found = self._fused.get(bucket.plan.index)
        addresses = bucket.addresses
        if not self.is_aliased(bucket.plan):
            addresses = [(store.master if store.weight is None else store.weight).data_ptr()]
        if found is None or found[0] != addresses:
            weights = zip(self._weights(bucket, store), bucket.slices, strict=True)
            pieces = [Piece(weight, s.offset, s.numel, s.start) for weight, s in weights]
            found = (
                addresses,
                FusedUpdate(self.rule, pieces, self.max_programs, has_master=self.master != "none"),
            )
            self._fused[bucket.plan.index] = found
        return found[1]

    def _update_plainly(
        self, bucket: Bucket, store: Store, numbers: Mapping[int, Numbers], grads: Tensor, decision: Tensor | None
    ) -> None:
        """Updates without Triton: by the native kernels on the CPU, by the torch reference on a GPU."""
        found = []
        if decision is not None:
            _, factor, skip = decision.tolist()
            if skip:
                return
            numbers = {i: number._replace(factor=number.factor * factor) for i, number in numbers.items()}
        for i, number in numbers.items():
            piece = bucket.slices[i]
            gradient = grads.narrow(0, piece.offset, piece.numel)
            name = bucket.params[i].name
            state = self._slice_of(store, bucket, i)
            numbers_of = (number.factor, number.key, piece.start)
            found.append(Segment(self.rule, number.hyper, gradient, state, *numbers_of, None, name))
        reference.update(found) if grads.device.type == "cuda" else native.update(found, check=False)

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns the separate weights in the state, for a bucket whose parameters are not part of the state."""
        assert not self.is_aliased(bucket.plan)
        return self._weights(bucket, bucket.store)

    def _round(self, store: Store) -> None:
        """Rounds the fp32 master into the separate weights of the state, if it has such a master and such weights."""
        if store.weight is not None and not store.is_split:
            store.weight.copy_(store.master)

    def _weights(self, bucket: Bucket, store: Store) -> list[Tensor]:
        """The weight of each slice, or its master if the state has no separate weight."""
        own = (self._slice_of(store, bucket, i) for i in range(len(bucket.slices)))
        return [one.master if one.weight is None else one.weight for one in own]

    def forget(self, bucket: Bucket) -> None:
        self._fused.pop(bucket.plan.index, None)

    # State as numbers.

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """Master and states of one slice as flat fp32 tensors on the host."""
        return {key: value.cpu() for key, value in slices.read(self.rule, self._mended(bucket, index)).items()}

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """The value that `read` returns under `key`, except that a bf16 state is not converted to fp32."""
        found = slices.read_one(self.rule, self._mended(bucket, index), key)
        return found.cpu() if found is not None else None

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        """Replaces the state of one slice by values that `read` has returned.

        If the parameter is part of the state, elements of the master that do not round to the parameter are set to the
        parameter.
        """
        store = self._slice(bucket, index)
        if not self.is_aliased(bucket.plan):
            slices.write(self.rule, store, values)
            return self._round(store)
        own = _param_values(bucket, index).clone()
        slices.write(self.rule, store, values)
        slices.write_master(store, own, keep=True)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """Sets the master to the parameter's values. With `keep`, elements that round to these values do not change.

        A parameter that is part of the master does not change, because a backward may still need it. The value that it
        had before the user's write is not known. With `keep`, an element's lower half is therefore kept if it can
        belong to the new upper half (`slices.mend_lower`).
        """
        store = self._slice(bucket, index)
        if not self.is_aliased(bucket.plan) or bucket.plan.dtype == torch.float16:
            slices.write_master(store, values, keep)
            if not self.is_aliased(bucket.plan):
                self._round(store)
        elif store.is_split:
            slices.mend_lower(store) if keep else store.master.zero_()

    def _mended(self, bucket: Bucket, index: int) -> Store:
        """The state of a slice. Lower halves that a write by the user has made invalid are replaced by zero."""
        store = self._slice(bucket, index)
        if store.is_split and self.is_aliased(bucket.plan):
            slices.mend_lower(store)
        return store

    def _slice(self, bucket: Bucket, index: int) -> Store:
        return self._slice_of(bucket.store, bucket, index)

    def _slice_of(self, whole: Store, bucket: Bucket, index: int) -> Store:
        piece = bucket.slices[index]
        store = whole.narrow(piece.offset, piece.numel)
        if not self.is_aliased(bucket.plan):
            return store
        target = bucket.targets[index]
        is_master = is_own_master(bucket.plan.dtype, self.master)
        return replace(store, master=target) if is_master else replace(store, weight=target)


def _param_values(bucket: Bucket, index: int) -> Tensor:
    return bucket.targets[index].reshape(-1)
