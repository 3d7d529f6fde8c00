"""The update of one bucket by our kernels: gradient in, state changed, weight out, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device, hide_from_children
from twinflow.offload.bucket import Bucket, Options, Task
from twinflow.offload.plan import BucketPlan
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK, Key, rounding_key, rounds_to
from twinflow.rules.rule import Hyper
from twinflow.rules.segment import (
    Segment,
    Store,
    decode_state,
    encode_saved,
    new_states,
)

Pair = tuple[Tensor | None, Tensor | None]
_CHUNK = 1 << 22  # elements that are read or written at once


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
        """Update the task's bucket, into its shadow where it has one; sets `task.weights` to the new weights."""
        ...

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice's master and states as flat fp32 tensors, by name."""
        ...

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave."""
        ...

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """One slice's states as before the first update; the master stays."""
        ...

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master for one slice from its parameter's values; `keep` it where they are what it rounds to."""
        ...

    def publish(self, task: Task) -> None:
        """Set `task.weights` to what follows from the master as it is."""
        ...


class _Numbers(NamedTuple):
    hyper: Hyper
    factor: float
    key: Key


@dataclass(frozen=True)
class _Cuts:
    """A store's slices, in every form an update needs."""

    whole: Store  # kept, so that its id stays its own
    stores: list[Store]
    weights: list[Tensor]  # what is sent, where the state itself holds it
    pointers: list[native.Pointers]


class RuleUpdater:
    """One of our rules in one of our formats."""

    splits_params = True
    can_shadow = True

    def __init__(self, rule: Rule, format: str, device: Device, keeps_states: bool = True) -> None:
        self.rule = rule
        self.format = format
        self.keeps_states = keeps_states  # SGD without momentum keeps none
        self._device = device
        self._kept: dict[int, _Cuts] = {}
        self._hypers: dict[str, Any] = {}

    def new_store(self, plan: BucketPlan) -> Store:
        """Zeros. Weights go back straight from the state where it holds them: from an fp32 master whose parameter is
        fp32, or from a split master's upper half, whose parameter is bf16. Only that part is page-locked."""
        states: tuple[Pair, Pair] = ((None, None), (None, None))
        if self.keeps_states:
            states = new_states(self.rule, self.format, plan.numel, hidden_zeros)
        if plan.dtype == torch.float32:
            return Store(self.format, self._device.pinned(plan.numel, torch.float32).zero_(), None, *states)
        if plan.dtype == torch.bfloat16:
            weight = self._device.pinned(plan.numel, torch.bfloat16).zero_()
            return Store(self.format, hidden_zeros(plan.numel, dtype=torch.int16), weight, *states)
        return Store(self.format, hidden_zeros(plan.numel, dtype=torch.float32), None, *states)

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Fresh states are zeros; only Adagrad may start from something else."""
        if self.rule.name == "adagrad":
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """Zeros; for Adagrad the sum it starts from."""
        store, option = self._slice(bucket, index), options[bucket.params[index].group]
        for tensor in (*store.states, *store.scales):
            if tensor is not None:
                tensor.fill_(float(option.get("initial_accumulator_value", 0.0)))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Half precision beside an fp32 master: not bf16, which is half of its master."""
        return plan.dtype not in (torch.float32, torch.bfloat16)

    def update(self, task: Task, factor: float) -> None:
        """One call of the kernel for all slices of the bucket that have a gradient."""
        store = task.bucket.store
        target = task.shadow if task.shadow is not None else store
        task.weights = self._weights(task, target)
        if native.available():
            native.update_at([self._addresses(task, i, store, target, factor) for i in task.present])
        else:
            native.update([self._segment(task, i, store, target, factor) for i in task.present], check=False)

    def _weights(self, task: Task, target: Store) -> Sequence[Tensor]:
        """Where each slice's new weights will be."""
        if task.weight_slot is not None:
            return task.weight_slot.pieces(task.bucket.plan)
        return self._cuts(task.bucket, target).weights

    def _addresses(self, task: Task, i: int, store: Store, target: Store, factor: float) -> native.Addresses:
        """A slice's update as plain numbers: making tensors would give other threads the interpreter, many times."""
        bucket, piece, grads, numbers = task.bucket, task.bucket.slices[i], task.grads, self._numbers(task, i, factor)
        assert grads is not None
        read, write = self._cuts(bucket, store).pointers[i], self._cuts(bucket, target).pointers[i]
        if task.weight_slot is not None:
            write = write._replace(weight=task.weights[i].data_ptr())
        return native.Addresses(
            grad=grads.data_ptr() + piece.offset * grads.element_size(),
            grad_dtype=grads.dtype,
            numel=piece.numel,
            rule=self.rule,
            format=self.format,
            hyper=numbers.hyper,
            factor=numbers.factor,
            key=numbers.key,
            first_index=piece.start,
            weight_dtype=None if bucket.plan.dtype == torch.float32 else bucket.plan.dtype,
            is_split=store.is_split,
            read=read,
            write=write,
        )

    def _segment(self, task: Task, i: int, store: Store, target: Store, factor: float) -> Segment:
        """The same for the torch reference, where there is no native library."""
        bucket, piece, grads, numbers = task.bucket, task.bucket.slices[i], task.grads, self._numbers(task, i, factor)
        assert grads is not None
        read, write = self._cuts(bucket, store).stores[i], self._cuts(bucket, target).stores[i]
        if task.weight_slot is not None:
            read, write = (replace(cut, weight=task.weights[i]) for cut in (read, write))
        return Segment(
            self.rule,
            numbers.hyper,
            grads.narrow(0, piece.offset, piece.numel),
            read,
            numbers.factor,
            numbers.key,
            piece.start,
            None if target is store else write,
            bucket.params[i].name,
        )

    def _numbers(self, task: Task, i: int, factor: float) -> _Numbers:
        """What one slice's update takes besides buffers."""
        param, step = task.bucket.params[i], task.bucket.steps[i] + 1
        options = task.job.options[param.group]
        signed = -factor if options.get("maximize") else factor
        return _Numbers(self._hyper(options, step), signed, rounding_key(step, param.index))

    def _cuts(self, bucket: Bucket, store: Store) -> _Cuts:
        """A store cut into the bucket's slices, once: stores move between buckets of equal layout only."""
        if id(store) not in self._kept:
            stores = [store.narrow(piece.offset, piece.numel) for piece in bucket.slices]
            weights = [cut.weight if cut.weight is not None else cut.master for cut in stores]
            self._kept[id(store)] = _Cuts(store, stores, weights, [native.pointers(cut) for cut in stores])
        return self._kept[id(store)]

    def _hyper(self, options: Options, step: int) -> Hyper:
        """The rule's numbers for a step, worked out once for all slices of a job that share them."""
        key = (id(options), step)
        if self._hypers.get("key") != key:
            self._hypers = {"key": key, "value": self.rule.hyper(options, step), "options": options}
        value: Hyper = self._hypers["value"]
        return value

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice as fp32 numbers, flat: master and states; views where the state itself is fp32."""
        keys = ["master", *(name for name in self.rule.states if name is not None)]
        values = {key: found for key in keys if (found := self.read_one(bucket, index, key)) is not None}
        for name, scale in zip(self.rule.states, self._slice(bucket, index).scales, strict=True):
            if scale is not None:
                values[f"{name}_scale"] = scale  # makes 8-bit codes exact on the way back
        return {key: value if key.endswith("_scale") else value.float() for key, value in values.items()}

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """One of them; a bf16 state as it is."""
        store = self._slice(bucket, index)
        if key == "master":
            if not store.is_split:
                return store.master
            assert store.weight is not None
            return native.join(store.weight, store.master)
        which = self.rule.states.index(key.removesuffix("_scale"))
        if key.endswith("_scale"):
            return store.scales[which]
        return decode_state(store, which) if store.format == "int8" else store.states[which]

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave, from any format."""
        whole = self._slice(bucket, index)
        for at, store in _chunks(whole):
            numel = store.master.numel()
            _set_master(store, values["master"][at : at + numel].float())
            for which, name in enumerate(self.rule.states):
                if name is not None and name in values and store.states[which] is not None:
                    scale = values.get(f"{name}_scale")
                    cut = scale[at // BLOCK : -(-(at + numel) // BLOCK)] if scale is not None else None
                    encode_saved(store, which, values[name][at : at + numel].float(), cut)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master from the parameter's values; with `keep`, only where the old one is not what they round from."""
        for at, store in _chunks(self._slice(bucket, index)):
            given = values[at : at + store.master.numel()]
            wide = given.float()
            if keep:
                old = store.master
                if store.is_split and store.weight is not None:
                    old = native.join(store.weight, store.master)
                wide = torch.where(rounds_to(old, given), old, wide)
            _set_master(store, wide)

    def publish(self, task: Task) -> None:
        """Weights as they follow from the master: rounded into the slot, or straight from the state."""
        store, plan = task.bucket.store, task.bucket.plan
        if task.weight_slot is not None:
            native.cast(task.weight_slot.view(plan.dtype, plan.numel), store.master)
        task.weights = self._weights(task, store)

    def _slice(self, bucket: Bucket, index: int) -> Store:
        piece = bucket.slices[index]
        return bucket.store.narrow(piece.offset, piece.numel)


def hidden_zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages, which forked processes do not get."""
    return hide_from_children(native.advise_huge(torch.empty(numel, dtype=dtype))).zero_()


def _chunks(store: Store) -> Iterator[tuple[int, Store]]:
    """A store in pieces, with their starts: what is worked out for one should not need much memory."""
    for at in range(0, store.master.numel(), _CHUNK):
        yield at, store.narrow(at, min(_CHUNK, store.master.numel() - at))


def _set_master(store: Store, values: Tensor) -> None:
    """fp32 values as the master, in halves where it is kept so."""
    if not store.is_split:
        store.master.copy_(values)
        return
    assert store.weight is not None
    upper, lower = native.split(values)
    store.weight.copy_(upper)
    store.master.copy_(lower)
