# SPDX-License-Identifier: Apache-2.0
"""The Python records of parameters and buckets, and the interfaces between a bucket, the executor and an updater.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. A job is one optimizer step. Master weights are the fp32 copies of the
parameters, to which updates are applied. To take a gradient is to move it from `.grad` to a buffer of the runtime.

The executor (executor.py) copies gradients and weights and updates the state. It knows which store has the state of a
bucket, and which job's weights the next forward must use. A `Bucket` asks the executor for both (`BucketKeeper`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from twinflow.device import Event
from twinflow.offload.plan import HOST, ROOT, BucketPlan, Slice
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.weight_guard import plain
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store


@dataclass(eq=False, slots=True)
class Param:
    """A trainable parameter: its tensor, its buckets, and the state of its gradient and weights in this step."""

    index: int
    name: str
    tensor: nn.Parameter
    group: int  # index of its param group
    is_late: bool = False  # it gets several gradients in one backward, so its gradient is complete only at the end
    hits: int = 0  # number of gradients taken since the last step
    was_hit: bool = False  # a gradient was taken in at least one backward of this step
    is_filled: bool = False  # its gradients in this step are zeros that replace missing ones (zero/partitioned.py)
    is_seen: bool = False  # a forward, or other code that reads the weights, has waited for them since the last step
    was_updated: bool = False  # a step has updated it, so its uses have to wait for the last update
    is_bypassed: bool = False  # compiled graphs use it without the runtime's hooks, so `step` waits for its weights
    version: int = 0  # the tensor's version after the runtime's last write; the user's writes make it larger
    aliases: list[tuple[Tensor, int]] = field(default_factory=list)  # `.data` tensors of the user, with their versions
    buckets: list[Bucket] = field(default_factory=list)
    _places: list[Place] = field(default_factory=list)
    first: int = 0  # start of this rank's part in the flattened parameter; 0 if this rank has all of it
    unit: int | None = None  # for a matrix that Muon updates: the number of its unit (plan.py)
    guard: threading.Lock = field(default_factory=threading.Lock)  # several streams write to parts of the parameter
    taken: TakenGradient | None = None  # the tensor that replaces the gradient in `.grad` after the gradient was taken
    watched: Tensor | None = None  # a gradient that was not taken; a TakenGradient in `.grad` detects uses by the user
    is_sharded: bool = field(init=False)  # this rank has only a part of the parameter
    shape: torch.Size = field(init=False)  # the shape for which the state was planned

    def __post_init__(self) -> None:
        self.is_sharded = self.local is not self.tensor
        self.shape = self.local.shape

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter; the parameter itself if it is not sharded."""
        return local_of(self.tensor)

    @property
    def places(self) -> list[Place]:
        """The buckets that collect the gradient of this parameter, with the slices of the parameter in each bucket."""
        if len(self._places) != len(self.buckets):
            self._places = [_place(self.index, bucket) for bucket in self.buckets]
        return self._places

    def own_slices(self) -> list[tuple[Bucket, int]]:
        """This rank's slices of the parameter, in order, as the bucket and the index of the slice in it."""
        found = [(b, i) for b in self.buckets for i, piece in enumerate(b.slices) if piece.param == self.index]
        return sorted(found, key=lambda at: at[0].slices[at[1]].start)

    @property
    def is_written(self) -> bool:
        """Whether the user has written to the parameter, or to one of its aliases, since the runtime's last write."""
        if self.version != self.counted_writes:
            return True
        return bool(self.aliases) and any(alias._version != version for alias, version in self.aliases)

    @property
    def counted_writes(self) -> int:
        """The number of writes that torch has counted. An in-place operation on a DTensor does not count as a write to
        the local part, and a write to the local part does not count for the DTensor.
        """
        version = self.tensor._version
        return version + self.local._version if self.is_sharded else version

    def note_write(self) -> None:
        """Records a write by the runtime, so that `is_written` does not report it as a write by the user."""
        with self.guard:
            self.version = self.counted_writes
            if self.aliases:
                self.aliases = [(alias, alias._version) for alias, _ in self.aliases]

    def note_alias(self, alias: Tensor) -> None:
        """Records a `.data` tensor that was handed to the user. A write to this tensor changes the parameter."""
        self.aliases = [(known, version) for known, version in self.aliases if _is_kept(known, version)]
        self.aliases.append((alias, alias._version))

    def take_aliases(self) -> list[Tensor]:
        """Forgets the `.data` tensors that were handed to the user, and returns them."""
        aliases, self.aliases = self.aliases, []
        return [alias for alias, _ in aliases]

    def put_back(self, grad: Tensor) -> None:
        """Puts a gradient back into `taken`, and into `.grad` unless the user has assigned another tensor there."""
        taken, self.taken = self.taken, None
        if taken is not None:
            taken.held = grad
            if self.tensor.grad is taken:
                self.tensor.grad = grad


def note_step(params: Sequence[Param]) -> None:
    """Increments the versions of parameters that an update will change.

    The backward of a graph that saved the old values then fails, as with a torch optimizer.
    """
    own = [param.local if param.is_sharded else param.tensor for param in params]
    torch._C._increment_version(own)
    for param in params:
        with param.guard:
            param.version = param.counted_writes


class Place(NamedTuple):
    """The slices of one parameter in one bucket."""

    bucket: Bucket
    cuts: list[Slice]  # its slices in `Bucket.gathered`
    own: list[int]  # indices of its slices in this rank's part of the bucket


class BucketKeeper(Protocol):
    """The methods of `Executor` that a bucket calls. executor.py describes them."""

    def register(self, bucket: Bucket) -> None: ...
    def take_sent(self, bucket: Bucket) -> list[int]: ...
    def set_deadline(self, bucket: Bucket, deadline: int) -> None: ...
    def store_of(self, bucket: Bucket) -> Store: ...
    def replace_store(self, bucket: Bucket, store: Store) -> None: ...
    def due(self, bucket: Bucket) -> int: ...


@dataclass(eq=False)
class Bucket:
    """Slices of parameters that are copied and updated together, their optimizer state, and the `Updater` of the state.

    If ranks share the bucket, `plan` describes this rank's part of it, and `whole` describes the whole bucket.
    """

    plan: BucketPlan
    params: list[Param]  # the parameter of each slice
    updater: Updater
    first_store: Store  # the store at the start; an update before the clipping decision swaps it
    executor: BucketKeeper
    offloads_params: bool = False  # its weights are only in the state on the host; blocks fetch them (param_offload.py)
    whole: BucketPlan | None = None
    members: list[Param] = field(default_factory=list)  # parameters of all parts, each once
    total: Tensor | None = None  # fp32 sum of this step's gradients, if the runtime sums gradients of several backwards
    added: set[int] = field(default_factory=set)  # slices that `total` contains, if `total` is on the device
    stored: Event | None = None  # recorded when streamed state has been copied back to the host
    targets: list[Tensor] = field(default_factory=list)  # the view of each slice in its parameter
    addresses: list[int] = field(default_factory=list)  # addresses of the parameters when `targets` were made
    landing: Tensor | None = None  # device buffer for new weights of parameters that are not contiguous

    def __post_init__(self) -> None:
        self.members = self.members or list(dict.fromkeys(self.params))
        self._deadline = 0
        # The number of updates of each slice so far. The native executor counts updates on the host in this memory
        # (`keep`). `DeviceWork` counts updates on the device.
        self.steps: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * len(self.plan.slices))()
        self.find_targets()

    @property
    def deadline(self) -> int:
        """Position in the order in which the next forward needs weights; 0 is first."""
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: int) -> None:
        self._deadline = deadline
        self.executor.set_deadline(self, deadline)

    @property
    def store(self) -> Store:
        """The buffers that hold the optimizer state now."""
        return self.executor.store_of(self)

    @property
    def due(self) -> int:
        """Number of the last job whose weights the next forward must use."""
        return self.executor.due(self)

    @property
    def is_shared(self) -> bool:
        """Whether the gradients of this bucket are summed over ranks."""
        return self.whole is not None

    @property
    def gathered(self) -> BucketPlan:
        """The plan by which gradients are collected: that of the whole bucket, also if ranks share the bucket."""
        return self.plan if self.whole is None else self.whole

    def find_targets(self) -> None:
        """Makes `targets` from the present memory of the parameters and registers the bucket with the executor."""
        is_new = False  # whether `landing` is new
        if not self.offloads_params:
            with plain():
                self.targets = [target(p.local, piece) for p, piece in zip(self.params, self.slices, strict=True)]
                self.addresses = [param.local.data_ptr() for param in self.params]
            is_scattered = any(one.dim() != 1 for one in self.targets) and self.plan.place == HOST
            is_new = is_scattered and self.landing is None
            if is_new:
                where = self.targets[0].device
                self.landing = torch.zeros(self.plan.numel, dtype=self.plan.dtype, device=where)
            elif not is_scattered:
                self.landing = None
        else:  # the weights may have been on the device before
            self.targets = []
            self.addresses = []
            self.landing = None
        self.executor.register(self)
        if is_new:
            self.executor.take_sent(self)  # weights that were sent before are in the parameters, and not in `landing`

    def move(self, plan: BucketPlan, updater: Updater, store: Store) -> None:
        """Replaces plan, updater and store, because the state has moved to another place."""
        self.executor.replace_store(self, store)
        self.plan = plan
        self.updater = updater
        self.total = None
        self.find_targets()

    def place_weights(self, on_host: bool) -> None:
        """Notes whether the weights are only in the state on the host, or in the parameters."""
        self.offloads_params = on_host
        self.find_targets()

    @property
    def slices(self) -> Sequence[Slice]:
        return self.plan.slices

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer state."""
        store = self.store
        tensors = (store.master, store.weight, *store.states, *store.scales)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None and not t.is_meta)

    @property
    def is_on_device(self) -> bool:
        """Whether the update runs on the device, so that gradients are not copied to the host."""
        return self.updater.is_on_device


class Updater(Protocol):
    """Makes, reads and writes the state of buckets.

    The update itself depends on the place of the state. The executor runs twinflow's rules on the host.
    `HostOptimizer.update` runs a user's optimizer on the host. `DeviceOptimizer.passage` describes an update on the
    device (job.py).
    """

    is_on_device: bool  # whether the update runs on a stream of the device
    is_all_in_store: bool  # whether a bucket's store and parameters contain all of its state

    def new_store(self, plan: BucketPlan) -> Store:
        """Allocates the state of a bucket. The caller writes the master weights later."""
        ...

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Sets new states to the values from which the optimizer starts."""
        ...

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Whether new weights need a slot, which is a page-locked buffer. Otherwise they are copied from the state."""
        ...

    def read(self, bucket: Bucket, index: int) -> Mapping[str, object]:
        """Returns master and states of a slice by name, as flat fp32 tensors or as a user's optimizer stores them."""
        ...

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        """Replaces the state of one slice by values that `read` has returned."""
        ...

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """Sets the states of one slice to their values before the first update. The master weights do not change."""
        ...

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """Sets the master weights of one slice to `values`, the values of its parameter.

        With `keep`, an element of the master weights does not change if it rounds to the given value.
        """
        ...

    def forget(self, bucket: Bucket) -> None:
        """Releases all memory and records of a bucket whose state moves to another place."""
        ...


def new_bucket(
    params: Sequence[Param],
    plan: BucketPlan,
    whole: BucketPlan | None,
    updater: Updater,
    offloads_params: bool,
    executor: BucketKeeper,
) -> Bucket:
    """Makes a bucket with new state and adds it to the records of its parameters. `whole`: see `Bucket`."""
    own = [params[piece.param] for piece in plan.slices]
    members = list(dict.fromkeys(params[piece.param] for piece in whole.slices)) if whole is not None else []
    bucket = Bucket(plan, own, updater, updater.new_store(plan), executor, offloads_params, whole, members)
    for param in bucket.members:
        param.buckets.append(bucket)
    return bucket


def _place(index: int, bucket: Bucket) -> Place:
    cuts = [piece for piece in bucket.gathered.slices if piece.param == index]
    return Place(bucket, cuts, [i for i, piece in enumerate(bucket.slices) if piece.param == index])


def _is_kept(alias: Tensor, version: int) -> bool:
    """Whether an alias has been written to, or the user still holds it and may write to it."""
    return alias._version != version or sys.getrefcount(alias) > 4


def set_deadlines(buckets: Sequence[Bucket], order: Sequence[int]) -> list[Bucket]:
    """Sets deadlines by the order of the blocks in a forward. Returns the buckets of blocks that are not in `order`."""
    first = {block: i + 1 for i, block in reversed(list(enumerate(order)))}
    for bucket in buckets:
        bucket.deadline = first.get(bucket.plan.block, 0)
    return [bucket for bucket in buckets if bucket.plan.block not in (ROOT, *first)]


def local_of(tensor: Tensor) -> Tensor:
    """The local part of a DTensor. Any other tensor is returned unchanged."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def target(tensor: Tensor, piece: Slice) -> Tensor:
    """The view of a slice in its parameter: flat if the parameter is contiguous, otherwise the whole tensor."""
    values = tensor.detach()
    if values.is_contiguous():
        return values.view(-1)[piece.start : piece.start + piece.numel]
    assert piece.numel == tensor.numel()
    return values
