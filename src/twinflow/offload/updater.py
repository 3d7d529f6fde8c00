"""State of buckets on the host that our kernels update (csrc/executor_worker.cpp): how it is made, read and written."""

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
from twinflow.rules.segment import Store, new_states

Pair = tuple[Tensor | None, Tensor | None]


class RuleUpdater:
    """State of one of our rules in one of our formats; the executor updates it."""

    is_on_device = False
    is_all_in_store = True

    def __init__(
        self, rule: Rule, format: str, device: Device, keeps_states: bool = True, offloads_params: bool = False
    ) -> None:
        self.rule = rule
        self.format = format
        self.keeps_states = keeps_states  # SGD without momentum keeps none
        self.offloads_params = offloads_params  # weights live here, and nowhere else
        self._device = device

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
        kept = self._device.pinned(plan.numel, plan.dtype).zero_() if self.offloads_params else None
        return Store(self.format, hidden_zeros(plan.numel, dtype=torch.float32), kept, *states)

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Fresh states are zeros, unless the rule has an option for what they start from."""
        if self.rule.start_option is not None:
            for i in range(len(bucket.slices)):
                self.clear(bucket, i, options)

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """States as before the first update."""
        slices.clear(self._slice(bucket, index), self.rule.start_value(options[bucket.params[index].group]))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Half precision beside an fp32 master: not bf16, which is half of its master."""
        return plan.dtype not in (torch.float32, torch.bfloat16) and not self.offloads_params

    def read(self, bucket: Bucket, index: int) -> dict[str, Tensor]:
        """One slice as fp32 numbers, flat: master and states; views where the state itself is fp32."""
        return slices.read(self.rule, self._slice(bucket, index))

    def read_one(self, bucket: Bucket, index: int, key: str) -> Tensor | None:
        """One of them; a bf16 state as it is."""
        return slices.read_one(self.rule, self._slice(bucket, index), key)

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
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

    def forget(self, bucket: Bucket) -> None:
        """Give page-locked memory back."""
        self.release(bucket.store)

    def release(self, store: Store) -> None:
        """The same for a store that no bucket has."""
        for tensor in (store.weight, store.master):
            if tensor is not None:
                self._device.release(tensor)

    def _slice(self, bucket: Bucket, index: int) -> Store:
        piece = bucket.slices[index]
        return bucket.store.narrow(piece.offset, piece.numel)


def hidden_zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages, which forked processes do not get."""
    return hide_from_children(native.advise_huge(torch.empty(numel, dtype=dtype))).zero_()
