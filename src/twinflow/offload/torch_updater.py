# SPDX-License-Identifier: Apache-2.0
"""Updates of a bucket by a user's torch.optim.Optimizer, on fp32 copies of the bucket's parameters.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

The fp32 copies (the master) and the optimizer's state are on the host, or on the device if the bucket is resident.

Each bucket has its own instance of the optimizer. The instance gets whole parameters, which are views of the bucket's
flat master. An optimizer is therefore supported if its update of a parameter depends only on that parameter and
the options of its group, as in Muon and Adafactor. An optimizer that combines several parameters, for example in a line
search or in a trust ratio over the model, would combine only the parameters of one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow import native
from twinflow.device import Device
from twinflow.offload import slices
from twinflow.offload.bucket import Bucket
from twinflow.offload.job import Passage, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.recipe import Hosts, Recipe
from twinflow.offload.staging import Stage
from twinflow.offload.torch_state import (
    beside,
    changes,
    dict_on_host,
    host_options,
    num_steps,
    one_group,
    own_gradients,
    read_back,
)
from twinflow.offload.updater import hidden_zeros
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store
from twinflow.state_dict import StateDict, dict_of, params_of, tensor_of


@dataclass
class Inner:
    """The optimizer instance of one bucket."""

    optimizer: Optimizer
    params: list[nn.Parameter]  # one for each slice
    flats: list[Tensor]  # flat views of the same memory: the slices of the master
    outer: list[int | None]  # for each group of this instance, the index of the user's group; None: an empty group
    seen: dict[int, StateDict]  # by index of the user's group: its options at the last step
    # The states on the host while a streamed update works with copies on the device.
    kept: dict[nn.Parameter, StateDict] = field(default_factory=dict)

    def groups(self) -> list[tuple[StateDict, int]]:
        """The instance's param groups that are not empty, each with the index of the user's group."""
        pairs = zip(self.optimizer.param_groups, self.outer, strict=True)
        return [(group, outer) for group, outer in pairs if outer is not None]

    def group_of(self, param: nn.Parameter) -> tuple[StateDict, StateDict]:
        """The instance's group that contains `param`, and the user's options of that group."""
        return next((group, self.seen[g]) for group, g in self.groups() if any(p is param for p in params_of(group)))

    def follow(self, options: Sequence[Options]) -> None:
        """Copies the options that the user has changed since the last step.

        Other entries stay as they are, because some optimizers store counters and estimates in their groups.
        """
        for group, g in self.groups():
            group.update(dict_on_host(changes(options[g], self.seen[g])))
        for g, seen in self.seen.items():
            seen.update(dict_on_host(changes(options[g], seen)))

    def step(self, task: Task, grads: Tensor) -> None:
        """Runs one step with fp32 gradients, for the slices that have a gradient."""
        self.follow(task.job.options)
        for i in task.present:
            piece, param = task.bucket.slices[i], self.params[i]
            param.grad = grads.narrow(0, piece.offset, piece.numel).view(param.shape)
        self.optimizer.step()
        for i in task.present:
            self.params[i].grad = None
            own_gradients(self.optimizer.state.get(self.params[i], {}), grads)


class TorchUpdater:
    """The `Updater` (bucket.py) of buckets with a user's optimizer, on the device `where` (None: on the host)."""

    is_all_in_store = False
    reads_decision = False

    def __init__(self, recipe: Recipe, device: Device, where: torch.device | None = None) -> None:
        self.recipe = recipe
        self.is_on_device = where is not None
        self._device = device
        self._where = where
        self._inners: dict[int, Inner] = {}
        self._grads = torch.empty(0)  # fp32 gradients of the bucket that is updated now; one worker thread uses it

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates a master of zeros, page-locked if weights are copied from it. The optimizer has the states."""
        if self._where is not None:
            return Store("fp32", torch.zeros(plan.numel, dtype=torch.float32, device=self._where))
        if plan.dtype == torch.float32:
            return Store("fp32", self._device.pinned(plan.numel, torch.float32))
        return Store("fp32", hidden_zeros(plan.numel, dtype=torch.float32))

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Builds the bucket's optimizer. The master must hold the weights already: some constructors read them."""
        flats = [bucket.store.master.narrow(0, piece.offset, piece.numel) for piece in bucket.slices]
        params = [nn.Parameter(flat.view(p.local.shape)) for flat, p in zip(flats, bucket.params, strict=True)]
        hosts: Hosts = {param.tensor: host for param, host in zip(bucket.params, params, strict=True)}
        optimizer = self.recipe.build(hosts)
        outer_of = {host: param.group for param, host in zip(bucket.params, params, strict=True)}
        outer = [one_group(group["params"], outer_of) for group in optimizer.param_groups]
        seen = {g: host_options(options[g]) for g in set(outer_of.values())}
        inner = self._inners[bucket.plan.index] = Inner(optimizer, params, flats, outer, seen)
        for group, g in inner.groups():
            group.update(dict_on_host(seen[g]))
            if "capturable" in group:
                group["capturable"] = False
        for i, host in enumerate(params):  # an optimizer that has made steps continues its count
            bucket.steps[i] = num_steps(optimizer.state.get(host, {}))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """True for half-precision parameters on the host, because their fp32 master does not contain the weights."""
        return plan.dtype != torch.float32 and not self.is_on_device

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """Returns the update on the device. Afterwards weights are copied from the master to the parameters."""
        assert decision is None and task.grads is not None
        return Passage(None, partial(self._step, task, task.grads, factor), None, self.publish(task.bucket))

    def update(self, task: Task, factor: float, weight_slot: Tensor | None) -> Sequence[Tensor]:
        """Runs one step of the bucket's optimizer on the host, in the calling thread. Returns the new weights."""
        assert task.grads is not None
        if torch.get_num_threads() != native.get_threads():
            # The setting applies to this thread only. With torchrun it would otherwise be 1 (OMP_NUM_THREADS).
            torch.set_num_threads(native.get_threads())
        self._step(task, task.grads, factor)
        if weight_slot is None:
            return self.publish(task.bucket)
        native.cast(weight_slot, task.bucket.store.master)
        return [weight_slot.narrow(0, piece.offset, piece.numel) for piece in task.bucket.slices]

    def inner(self, bucket: Bucket) -> Inner:
        return self._inners[bucket.plan.index]

    def has_modes(self, bucket: Bucket) -> bool:
        """Whether the optimizer exchanges the weights for evaluation: a schedule-free optimizer."""
        optimizer = self.inner(bucket).optimizer
        return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))

    def set_mode(self, bucket: Bucket, is_training: bool) -> None:
        """Calls `train` or `eval` of the bucket's optimizer, which changes the master. The caller waits for updates
        before, and copies the master to the parameters afterwards.
        """
        inner = self.inner(bucket)
        change: Callable[[], object] = getattr(inner.optimizer, "train" if is_training else "eval")
        change()
        self._keep_memory(inner, range(len(inner.params)))

    def is_in_mode(self, bucket: Bucket, is_training: bool) -> bool:
        """Whether the optimizer says that it is in this mode. The package schedulefree uses the key `train_mode`."""
        groups = self.inner(bucket).optimizer.param_groups
        return all(group.get("train_mode") is is_training for group in groups)

    def beside(self, bucket: Bucket, param: nn.Parameter) -> StateDict:
        """Copies of a parameter's state on the parameter's present device."""
        inner = self.inner(bucket)
        return beside(param, inner.optimizer.state[param], inner.group_of(param)[0], copies=True)

    def step_on(self, task: Task, given: Tensor, factor: float) -> None:
        """Runs one step of the bucket's optimizer on the present device of its parameters."""
        inner, wide = self.inner(task.bucket), given.to(torch.float32, copy=True)
        inner.step(task, wide.mul_(factor) if factor != 1.0 else wide)

    def _step(self, task: Task, given: Tensor, factor: float) -> None:
        """Runs one step, and copies parameters back into the master if the optimizer replaced their memory."""
        inner = self.inner(task.bucket)
        inner.step(task, self._wide_grads(given, factor))
        self._keep_memory(inner, task.present)

    def _keep_memory(self, inner: Inner, indices: Iterable[int]) -> None:
        for i in indices:
            param, flat = inner.params[i], inner.flats[i]
            if param.data_ptr() != flat.data_ptr():
                param.data = flat.copy_(param.detach().reshape(-1)).view(param.shape)

    def _wide_grads(self, grads: Tensor, factor: float) -> Tensor:
        """The gradients in fp32, times the factor. fp32 gradients are scaled in place, as they are not read again."""
        if grads.device.type != "cpu":
            wide = grads.float()
            return wide.mul_(factor) if factor != 1.0 else wide
        if grads.dtype != torch.float32:
            if self._grads.numel() < grads.numel():
                self._grads = native.huge_zeros(grads.numel(), dtype=torch.float32)
            wide = self._grads[: grads.numel()]
            native.cast(wide, grads)
            grads = wide
        if factor != 1.0:
            native.scale_in_place(grads, factor)
        return grads

    def read(self, bucket: Bucket, index: int) -> StateDict:
        """The flat master of one slice, the optimizer's `state` of this slice, and `group`.

        `group` has the entries that the optimizer itself has changed in its param group, for example counters.
        """
        inner = self._inners[bucket.plan.index]
        param = inner.params[index]
        state = dict(inner.optimizer.state.get(param, {}))
        values: StateDict = {"master": inner.flats[index].cpu(), "state": read_back(state)}
        own = changes(*inner.group_of(param))
        return {**values, "group": own} if own else values

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        """Replaces the state of one slice by copies of values that `read` has returned."""
        inner = self._inners[bucket.plan.index]
        param = inner.params[index]
        inner.flats[index].copy_(tensor_of(values, "master"))
        group = inner.group_of(param)[0]
        inner.optimizer.state[param] = beside(param, dict_on_host(dict_of(values, "state")), group)
        group.update(dict_on_host(dict_of(values, "group")))

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """Removes the optimizer's state of one slice."""
        inner = self._inners[bucket.plan.index]
        inner.optimizer.state.pop(inner.params[index], None)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        piece = bucket.slices[index]
        slices.write_master(bucket.store.narrow(piece.offset, piece.numel), values, keep)

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """Returns the weights, which are in the master."""
        return self._inners[bucket.plan.index].flats

    def forget(self, bucket: Bucket) -> None:
        self._inners.pop(bucket.plan.index, None)
        self._device.release(bucket.store.master)
