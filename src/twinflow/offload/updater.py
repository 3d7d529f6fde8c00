"""The update of one bucket by our kernels: gradient in, state changed, weight out, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device, hide_from_children
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket, Options, Task
from twinflow.offload.numbers import Hypers
from twinflow.offload.plan import BucketPlan
from twinflow.rules import Rule
from twinflow.rules.segment import Segment, Store, new_states

Pair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Cuts:
    """A store's slices, in every form an update needs."""

    whole: Store  # kept, so that its id stays its own
    stores: list[Store]
    weights: list[Tensor]  # what is sent, where the state itself holds it
    pointers: list[native.Pointers]


class RuleUpdater:
    """One of our rules in one of our formats."""

    can_shadow = True
    is_on_device = False
    is_all_in_store = True

    def __init__(self, rule: Rule, format: str, device: Device, keeps_states: bool = True, parks: bool = False) -> None:
        self.rule = rule
        self.format = format
        self.keeps_states = keeps_states  # SGD without momentum keeps none
        self.parks = parks  # weights live here, and nowhere else
        self._device = device
        self._kept: dict[int, _Cuts] = {}
        self._hypers = Hypers(rule)

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
        kept = self._device.pinned(plan.numel, plan.dtype).zero_() if self.parks else None
        return Store(self.format, hidden_zeros(plan.numel, dtype=torch.float32), kept, *states)

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Fresh states are zeros, unless the rule has an option for what they start from."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """States as before the first update."""
        slices.clear(self._slice(bucket, index), self.rule.start_value(options[bucket.params[index].group]))

    def reads_decision(self, plan: BucketPlan) -> bool:
        """Whether an update takes the clipping decision from the device's memory, and writes the parameters itself."""
        return False

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Half precision beside an fp32 master: not bf16, which is half of its master."""
        return plan.dtype not in (torch.float32, torch.bfloat16) and not self.parks

    def prepare(self, task: Task, factor: float, decision: Tensor | None = None) -> Callable[[], None]:
        """The update, to be run by the worker."""
        return partial(self.update, task, factor)

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
        bucket, piece, grads, numbers = task.bucket, task.bucket.slices[i], task.grads, self._hypers.of(task, i, factor)
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
        bucket, piece, grads, numbers = task.bucket, task.bucket.slices[i], task.grads, self._hypers.of(task, i, factor)
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

    def _cuts(self, bucket: Bucket, store: Store) -> _Cuts:
        """A store cut into the bucket's slices, once: stores move between buckets of equal layout only."""
        if id(store) not in self._kept:
            stores = [store.narrow(piece.offset, piece.numel) for piece in bucket.slices]
            weights = [cut.weight if cut.weight is not None else cut.master for cut in stores]
            self._kept[id(store)] = _Cuts(store, stores, weights, [native.pointers(cut) for cut in stores])
        return self._kept[id(store)]

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice as fp32 numbers, flat: master and states; views where the state itself is fp32."""
        return slices.read(self.rule, self._slice(bucket, index))

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """One of them; a bf16 state as it is."""
        return slices.read_one(self.rule, self._slice(bucket, index), key)

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Tensor]) -> None:
        """Take over what `read` gave, from any format."""
        slices.write(self.rule, self._slice(bucket, index), values)
        self._round(bucket, index)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master from the parameter's values; with `keep`, only where the old one is not what they round from."""
        slices.write_master(self._slice(bucket, index), values, keep)
        self._round(bucket, index)

    def _round(self, bucket: Bucket, index: int) -> None:
        """Weights that are kept beside their fp32 master follow it."""
        store = self._slice(bucket, index)
        if store.weight is not None and not store.is_split:
            native.cast(store.weight, store.master)

    def publish(self, task: Task) -> None:
        """Weights as they follow from the master: rounded into the slot, or straight from the state."""
        store, plan = task.bucket.store, task.bucket.plan
        if task.weight_slot is not None:
            native.cast(task.weight_slot.view(plan.dtype, plan.numel), store.master)
        task.weights = self._weights(task, store)

    def forget(self, bucket: Bucket) -> None:
        """Give page-locked memory back, and the views of its store."""
        self.release(bucket.store)

    def release(self, store: Store) -> None:
        """The same for a store that no bucket has."""
        self._kept.pop(id(store), None)
        for tensor in (store.weight, store.master):
            if tensor is not None:
                self._device.release(tensor)

    def _slice(self, bucket: Bucket, index: int) -> Store:
        piece = bucket.slices[index]
        return bucket.store.narrow(piece.offset, piece.numel)


def hidden_zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages, which forked processes do not get."""
    return hide_from_children(native.advise_huge(torch.empty(numel, dtype=dtype))).zero_()
