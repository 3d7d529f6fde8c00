"""The update of one bucket by our kernels: gradient in, state changed, weight out, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device
from twinflow.offload.bucket import Bucket, Options, Task
from twinflow.offload.plan import BucketPlan
from twinflow.rules import Rule
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import (
    Segment,
    Store,
    decode_master,
    decode_state,
    encode_master,
    encode_saved,
    new_states,
)

Pair = tuple[Tensor | None, Tensor | None]


class Updater(Protocol):
    """What the runtime needs from an optimizer."""

    splits_params: bool  # whether a parameter may be updated in pieces
    can_shadow: bool  # whether an update can be written beside the state

    def new_store(self, plan: BucketPlan) -> Store:
        """State for a bucket, its master not yet written."""
        ...

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Give fresh states the values the optimizer starts from."""
        ...

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Whether new weights need a page-locked slot; else they can be sent from the state itself."""
        ...

    def update(self, task: Task, factor: float) -> None:
        """Update the task's bucket, into its shadow where it has one; sets `task.weight` to the new weights."""
        ...

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice's master and states as flat fp32 tensors, by name."""
        ...

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave."""
        ...

    def write_master(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """A new master for one slice, from the parameter's own values (flat, fp32)."""
        ...

    def weight(self, bucket: Bucket, into: Tensor | None) -> Tensor:
        """The bucket's weights as they follow from the master, for sending."""
        ...


class RuleUpdater:
    """One of our rules in one of our formats."""

    splits_params = True
    can_shadow = True

    def __init__(self, rule: Rule, format: str, device: Device, keeps_states: bool = True) -> None:
        self.rule = rule
        self.format = format
        self.keeps_states = keeps_states  # SGD without momentum keeps none
        self._device = device

    def new_store(self, plan: BucketPlan) -> Store:
        """Weights go back straight from the state where it holds them: the fp32 master, or a split master's upper half.

        Only that part is page-locked.
        """
        states: tuple[Pair, Pair] = ((None, None), (None, None))
        if self.keeps_states:
            states = new_states(self.rule, self.format, plan.numel, native.huge_zeros)
        if plan.dtype == torch.float32:
            return Store(self.format, self._device.pinned(plan.numel, torch.float32).zero_(), None, *states)
        if self._is_split(plan):
            weight = self._device.pinned(plan.numel, torch.bfloat16).zero_()
            return Store(self.format, native.huge_zeros(plan.numel, dtype=torch.int16), weight, *states)
        return Store(self.format, native.huge_zeros(plan.numel, dtype=torch.float32), None, *states)

    def _is_split(self, plan: BucketPlan) -> bool:
        return self.format != "fp32" and plan.dtype == torch.bfloat16

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Adagrad may start from a sum other than zero."""
        if self.rule.name != "adagrad":
            return
        for piece, param in zip(bucket.slices, bucket.params, strict=True):
            first = bucket.store.narrow(piece.offset, piece.numel).states[1]
            assert first is not None
            first.fill_(float(options[param.group]["initial_accumulator_value"]))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Half precision beside an fp32 master."""
        return plan.dtype != torch.float32 and not self._is_split(plan)

    def update(self, task: Task, factor: float) -> None:
        """One call of the kernel for all slices of the bucket that have a gradient."""
        store, target = self._with_weight(task.bucket.store, task), task.shadow
        if target is not None:
            target = self._with_weight(target, task)
        native.update([self._segment(task, i, store, target, factor) for i in task.present], check=False)
        final = target if target is not None else store
        task.weight = final.weight if final.weight is not None else final.master

    def _with_weight(self, store: Store, task: Task) -> Store:
        """The store with the slot that the kernel writes new weights to, where the state does not hold them."""
        if not self.needs_weight_slot(task.bucket.plan):
            return store
        return replace(store, weight=task.weight)

    def _segment(self, task: Task, i: int, store: Store, target: Store | None, factor: float) -> Segment:
        bucket = task.bucket
        piece, param, step = bucket.slices[i], bucket.params[i], bucket.steps[i] + 1
        assert task.grads is not None
        options = task.job.options[param.group]
        return Segment(
            self.rule,
            self.rule.hyper(options, step),
            task.grads.narrow(0, piece.offset, piece.numel),
            store.narrow(piece.offset, piece.numel),
            -factor if options.get("maximize") else factor,
            rounding_key(step, param.index),
            piece.start,
            target.narrow(piece.offset, piece.numel) if target is not None else None,
            param.name,
        )

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice as fp32 numbers, flat: master and states; views where the state itself is fp32."""
        store = self._slice(bucket, index)
        values = {"master": decode_master(store)}
        for which, name in enumerate(self.rule.states):
            decoded, scale = decode_state(store, which), store.scales[which]
            if name is not None and decoded is not None:
                values[name] = decoded if store.format != "fp32" else store.states[which]
                if scale is not None:
                    values[f"{name}_scale"] = scale  # makes 8-bit codes exact on the way back
        return values

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave, from any format."""
        store = self._slice(bucket, index)
        encode_master(store, values["master"])
        for which, name in enumerate(self.rule.states):
            if name in values and store.states[which] is not None:
                encode_saved(store, which, values[name], values.get(f"{name}_scale"))

    def write_master(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """A new master, from the parameter's own values."""
        encode_master(self._slice(bucket, index), values)

    def weight(self, bucket: Bucket, into: Tensor | None) -> Tensor:
        """The whole bucket's weights as they follow from the master, for sending; in `into` where a slot is needed."""
        store = bucket.store
        if into is not None:
            native.cast(into, store.master)
            return into
        return store.weight if store.weight is not None else store.master

    def _slice(self, bucket: Bucket, index: int) -> Store:
        piece = bucket.slices[index]
        return bucket.store.narrow(piece.offset, piece.numel)
