"""The update of one bucket by our kernels: gradient in, state changed, weight out, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device
from twinflow.offload.bucket import Bucket, Options, Task
from twinflow.offload.plan import BucketPlan
from twinflow.rules import Rule
from twinflow.rules.formats import rounding_key, rounds_to
from twinflow.rules.rule import Hyper
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

    def new_shadow(self, plan: BucketPlan) -> Store:
        """Buffers of the same kind with nothing in them yet."""
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

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master for one slice from its parameter's values; `keep` it where they are what it rounds to."""
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
        self._pieces: dict[int, tuple[Store, list[Store]]] = {}
        self._hypers: dict[str, Any] = {}

    def new_store(self, plan: BucketPlan) -> Store:
        """Zeros. Weights go back straight from the state where it holds them: from an fp32 master whose parameter is
        fp32, or from a split master's upper half. Only that part is page-locked."""
        store = self.new_shadow(plan)
        for tensor in (store.master, store.weight, *store.states, *store.scales):
            if tensor is not None:
                tensor.zero_()
        return store

    def new_shadow(self, plan: BucketPlan) -> Store:
        """Nothing is written: the update that does so first finds the pages, in all threads at once."""
        states: tuple[Pair, Pair] = ((None, None), (None, None))
        if self.keeps_states:
            states = new_states(self.rule, self.format, plan.numel, _huge_empty)
        if plan.dtype == torch.float32:
            return Store(self.format, self._device.pinned(plan.numel, torch.float32), None, *states)
        if self._is_split(plan):
            weight = self._device.pinned(plan.numel, torch.bfloat16)
            return Store(self.format, _huge_empty(plan.numel, dtype=torch.int16), weight, *states)
        return Store(self.format, _huge_empty(plan.numel, dtype=torch.float32), None, *states)

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
        store = task.bucket.store
        target = task.shadow if task.shadow is not None else store
        native.update([self._segment(task, i, store, target, factor) for i in task.present], check=False)
        if task.weight_slot is None:
            task.weight = target.weight if target.weight is not None else target.master

    def _segment(self, task: Task, i: int, store: Store, target: Store, factor: float) -> Segment:
        bucket = task.bucket
        piece, param, step = bucket.slices[i], bucket.params[i], bucket.steps[i] + 1
        assert task.grads is not None
        options = task.job.options[param.group]
        return Segment(
            self.rule,
            self._hyper(options, step),
            task.grads.narrow(0, piece.offset, piece.numel),
            self._piece(task, i, store),
            -factor if options.get("maximize") else factor,
            rounding_key(step, param.index),
            piece.start,
            None if target is store else self._piece(task, i, target),
            param.name,
        )

    def _piece(self, task: Task, i: int, store: Store) -> Store:
        """One slice of a store, with the slot that the kernel writes new weights to where the state has none.

        Cutting a store takes longer than starting a kernel: the cuts are kept, with the store so that its id stays its.
        Stores move between buckets of equal layout only, so a cut fits wherever its store goes.
        """
        slices = task.bucket.slices
        if id(store) not in self._pieces:
            self._pieces[id(store)] = (store, [store.narrow(s.offset, s.numel) for s in slices])
        cut = self._pieces[id(store)][1][i]
        if task.weight_slot is None:
            return cut
        assert task.weight is not None
        return replace(cut, weight=task.weight.narrow(0, slices[i].offset, slices[i].numel))

    def _hyper(self, options: Options, step: int) -> Hyper:
        """The rule's numbers for a step, worked out once for all slices of a job that share them."""
        key = (id(options), step)
        if self._hypers.get("key") != key:
            self._hypers = {"key": key, "value": self.rule.hyper(options, step), "options": options}
        value: Hyper = self._hypers["value"]
        return value

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice as fp32 numbers, flat: master and states; views where the state itself is fp32."""
        store = self._slice(bucket, index)
        values = {"master": decode_master(store)}
        for which, name in enumerate(self.rule.states):
            state, scale = store.states[which], store.scales[which]
            decoded = state if store.format == "fp32" else decode_state(store, which)
            if name is not None and decoded is not None:
                values[name] = decoded
                if scale is not None:
                    values[f"{name}_scale"] = scale  # makes 8-bit codes exact on the way back
        return values

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave, from any format."""
        store = self._slice(bucket, index)
        encode_master(store, values["master"])
        for which, name in enumerate(self.rule.states):
            if name is not None and name in values and store.states[which] is not None:
                encode_saved(store, which, values[name], values.get(f"{name}_scale"))

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master from the parameter's values; with `keep`, only where the old one is not what they round from."""
        store, wide = self._slice(bucket, index), values.float()
        if keep:
            old = decode_master(store)
            wide = torch.where(rounds_to(old, values), old, wide)
        if store.is_split:
            assert store.weight is not None
            upper, lower = native.split(wide)
            store.weight.copy_(upper)
            store.master.copy_(lower)
        else:
            store.master.copy_(wide)

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


def _huge_empty(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    return native.advise_huge(torch.empty(numel, dtype=dtype))
