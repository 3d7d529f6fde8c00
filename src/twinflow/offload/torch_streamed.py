# SPDX-License-Identifier: Apache-2.0
"""Streamed updates of a torch.optim.Optimizer: its state is on the host and is copied to the device for each step.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from twinflow.device import Device
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.job import Passage, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.recipe import Recipe
from twinflow.offload.staging import Stage
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store
from twinflow.state_dict import StateDict


class StreamedTorchUpdater:
    """The `Updater` (bucket.py) of streamed buckets. Each bucket has its own instance of the user's optimizer.

    Between steps the parameters and the state of that instance are in host memory.
    """

    is_all_in_store = False
    is_on_device = True
    reads_decision = False

    def __init__(self, recipe: Recipe, device: Device, where: torch.device) -> None:
        self._device = device
        self._where = where
        self._host = TorchUpdater(recipe, device)

    @property
    def host(self) -> TorchUpdater:
        """Has the optimizers between steps."""
        return self._host

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates page-locked memory for fp32 copies of the parameters. The states belong to the optimizer."""
        return Store("fp32", self._device.pinned(plan.numel, torch.float32))

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Builds the torch optimizer that updates this bucket."""
        self._host.start(bucket, options)

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """False, because the update on the device writes the parameters."""
        return False

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """Returns the copy to the device, the step there, and the copy back. The stage's stream allocates memory."""
        bucket, grads = task.bucket, task.grads
        assert grads is not None
        return Passage(
            partial(self._load, bucket), partial(self._update, task, grads, factor), partial(self._store, bucket)
        )

    def _load(self, bucket: Bucket) -> None:
        inner = self._host.inner(bucket)
        for param, flat in zip(inner.params, inner.flats, strict=True):
            param.data = flat.to(self._where, non_blocking=True, copy=True).view(param.shape)
            self._kept(bucket)[param] = dict(inner.optimizer.state.get(param, {}))
            if param in inner.optimizer.state:
                inner.optimizer.state[param] = self._host.beside(bucket, param)

    def _update(self, task: Task, grads: Tensor, factor: float) -> None:
        bucket, inner = task.bucket, self._host.inner(task.bucket)
        self._host.step_on(task, grads.to(self._where), factor)
        targets = [bucket.targets[i] for i in task.present]
        torch._foreach_copy_(targets, [inner.params[i].detach().view(bucket.targets[i].shape) for i in task.present])
        for param in (bucket.params[i] for i in task.present):
            _seen(param)

    def _store(self, bucket: Bucket) -> None:
        inner, kept = self._host.inner(bucket), self._kept(bucket)
        for param, flat in zip(inner.params, inner.flats, strict=True):
            flat.copy_(param.detach().reshape(-1), non_blocking=True)
            param.data = flat.view(param.shape)
            if param in inner.optimizer.state:
                old = kept.get(param, {})
                state = inner.optimizer.state[param]
                inner.optimizer.state[param] = {k: self._back(v, old.get(k)) for k, v in state.items()}
        kept.clear()

    def _back(self, value: object, old: object) -> object:
        """Copies a state to the host, into its old tensors if shape and dtype are unchanged."""
        if isinstance(value, dict):
            return {k: self._back(v, old.get(k) if isinstance(old, dict) else None) for k, v in value.items()}
        if type(value) is list or type(value) is tuple:
            known = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
            moved = [self._back(item, before) for item, before in zip(value, known, strict=True)]
            return moved if type(value) is list else tuple(moved)
        if not isinstance(value, Tensor) or (value.ndim == 0 and value.device.type == "cpu"):
            return value
        if isinstance(old, Tensor):
            if (old.shape, old.dtype) == (value.shape, value.dtype) and old is not value:
                return old.copy_(value, non_blocking=True)
            self._device.release(old)
        fresh = self._device.pinned(value.numel(), value.dtype).view(value.shape)
        return fresh.copy_(value, non_blocking=True)

    def _kept(self, bucket: Bucket) -> dict[nn.Parameter, StateDict]:
        return self._host.inner(bucket).kept

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns no weights, because the update on the device writes the parameters."""
        return ()

    def forget(self, bucket: Bucket) -> None:
        self._release(list(self._host.inner(bucket).optimizer.state.values()))
        self._host.forget(bucket)

    def _release(self, value: object) -> None:
        if isinstance(value, Tensor):
            self._device.release(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            self._release(item)

    def read(self, bucket: Bucket, index: int) -> StateDict:
        return self._host.read(bucket, index)

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        self._host.write(bucket, index, values)
        inner = self._host.inner(bucket)
        state = inner.optimizer.state[inner.params[index]]
        inner.optimizer.state[inner.params[index]] = {key: self._back(value, None) for key, value in state.items()}

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        self._host.clear(bucket, index, options)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        self._host.write_master(bucket, index, values, keep)


def _seen(param: Param) -> None:
    param.note_write()
