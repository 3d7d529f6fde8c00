"""Parameters and buckets, as Python sees them.

What the executor knows of a bucket (where its weights are, which store is its own) is asked from the executor: there is
no second copy of it here.
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
    """A trainable parameter."""

    index: int
    name: str
    tensor: nn.Parameter
    group: int  # index of its param group
    is_late: bool = False  # its gradient is complete only when the outermost backward has ended
    hits: int = 0  # gradients taken since the last step
    was_hit: bool = False  # ... in any backward of this step
    is_seen: bool = False  # a forward, or a reader, has waited for its weights since the last step
    is_bypassed: bool = False  # compiled graphs use it past our hooks: `step` waits for it
    version: int = 0  # of the tensor, after our last write: another number means that somebody else wrote
    aliases: list[tuple[Tensor, int]] = field(default_factory=list)  # `.data` that somebody has, and their versions
    buckets: list[Bucket] = field(default_factory=list)
    _places: list[Place] = field(default_factory=list)
    first: int = 0  # where this rank's part starts in the whole, flattened; 0 where it has all of it
    guard: threading.Lock = field(default_factory=threading.Lock)  # several streams write to it, each to a part
    taken: TakenGradient | None = None  # what `.grad` holds when the gradient is taken
    watched: Tensor | None = None  # a gradient that was not taken, behind such a stand-in
    is_sharded: bool = field(init=False)  # this rank has only a part of it

    def __post_init__(self) -> None:
        self.is_sharded = self.local is not self.tensor

    @property
    def local(self) -> Tensor:
        """What this rank has of it."""
        return local_of(self.tensor)

    @property
    def places(self) -> list[Place]:
        """Where its gradient is gathered."""
        if len(self._places) != len(self.buckets):
            self._places = [_place(self.index, bucket) for bucket in self.buckets]
        return self._places

    @property
    def is_written(self) -> bool:
        """Whether somebody else has written to it since our last write."""
        local = self.local if self.is_sharded else self.tensor
        if self.version != local._version:
            return True
        return bool(self.aliases) and any(alias._version != version for alias, version in self.aliases)

    def note_write(self) -> None:
        """We have written to it."""
        with self.guard:
            self.version = self.local._version
            if self.aliases:
                self.aliases = [(alias, alias._version) for alias, _ in self.aliases]

    def note_alias(self, alias: Tensor) -> None:
        """Somebody has a `.data` of it, and may write there."""
        self.aliases = [(known, version) for known, version in self.aliases if _is_kept(known, version)]
        self.aliases.append((alias, alias._version))

    def put_back(self, grad: Tensor) -> None:
        """Give a gradient to `.grad`, unless somebody has put something else there, and to its stand-in."""
        taken, self.taken = self.taken, None
        if taken is not None:
            taken.held = grad
            if self.tensor.grad is taken:
                self.tensor.grad = grad


def note_step(params: Sequence[Param]) -> None:
    """The values of these will change: a graph that needs the old ones must fail, as with torch."""
    own = [param.local if param.is_sharded else param.tensor for param in params]
    torch._C._increment_version(own)
    for param, local in zip(params, own, strict=True):
        with param.guard:
            param.version = local._version


class Place(NamedTuple):
    """Where a parameter lies in a bucket."""

    bucket: Bucket
    cuts: list[Slice]  # of what gradients are gathered in
    own: list[int]  # which of this rank's slices are its


class BucketKeeper(Protocol):
    """What a bucket asks of the executor, which knows where its weights and its state are."""

    def register(self, bucket: Bucket) -> None:
        """The bucket is new, or its parameters or its state are elsewhere now."""
        ...

    def set_deadline(self, bucket: Bucket, deadline: int) -> None:
        """The order in which the next forward needs its weights."""
        ...

    def store_of(self, bucket: Bucket) -> Store:
        """Its state."""
        ...

    def replace_store(self, bucket: Bucket, store: Store) -> None:
        """Another state: it has moved to another place."""
        ...

    def due(self, bucket: Bucket) -> int:
        """The last job whose weights the next forward has to see."""
        ...


@dataclass(eq=False)
class Bucket:
    """Slices that travel together, their state, and what updates it.

    Where ranks share it, the plan is this rank's part, and `whole` is all of it.
    """

    plan: BucketPlan
    params: list[Param]  # of each slice
    updater: Updater
    first_store: Store  # the first one; updates ahead of the clipping decision swap stores
    executor: BucketKeeper
    offloads_params: bool = False  # its weights live in the state alone: blocks fetch them (param_offload.py)
    whole: BucketPlan | None = None
    members: list[Param] = field(default_factory=list)  # parameters of the whole, each once
    total: Tensor | None = None  # fp32 sum of this step's gradients, where they are summed as tasks
    added: set[int] = field(default_factory=set)  # the slices that are in it, where it is on the device
    stored: Event | None = None  # when streamed state is on the host again
    targets: list[Tensor] = field(default_factory=list)  # each slice's place in its parameter
    addresses: list[int] = field(default_factory=list)  # of the parameters, when the places were found
    landing: Tensor | None = None  # where weights arrive whose parameters are not contiguous

    def __post_init__(self) -> None:
        self.members = self.members or list(dict.fromkeys(self.params))
        self._deadline = 0
        # Updates so far, of each slice. The native executor counts those on the host in this memory (`keep`),
        # `DeviceWork` those on the device.
        self.steps: ctypes.Array[ctypes.c_int64] = (ctypes.c_int64 * len(self.plan.slices))()
        self.find_targets()

    @property
    def deadline(self) -> int:
        """The forward's order."""
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: int) -> None:
        self._deadline = deadline
        self.executor.set_deadline(self, deadline)

    @property
    def store(self) -> Store:
        """Its state."""
        return self.executor.store_of(self)

    @property
    def due(self) -> int:
        """The last job whose weights the next forward has to see."""
        return self.executor.due(self)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of it."""
        return self.whole is not None

    @property
    def gathered(self) -> BucketPlan:
        """What gradients are gathered in."""
        return self.plan if self.whole is None else self.whole

    def find_targets(self) -> None:
        """Views of the parameters as they are now; the executor writes there."""
        if not self.offloads_params:
            with plain():
                self.targets = [target(p.local, piece) for p, piece in zip(self.params, self.slices, strict=True)]
                self.addresses = [param.local.data_ptr() for param in self.params]
            is_scattered = any(one.dim() != 1 for one in self.targets) and self.plan.place == HOST
            if is_scattered and self.landing is None:
                where = self.targets[0].device
                self.landing = torch.zeros(self.plan.numel, dtype=self.plan.dtype, device=where)
            elif not is_scattered:
                self.landing = None
        self.executor.register(self)

    def move(self, plan: BucketPlan, updater: Updater, store: Store) -> None:
        """Its state lives in another place from now on."""
        self.executor.replace_store(self, store)
        self.plan = plan
        self.updater = updater
        self.total = None
        self.find_targets()

    @property
    def slices(self) -> Sequence[Slice]:
        """Where each slice lies."""
        return self.plan.slices

    @property
    def nbytes(self) -> int:
        """Memory of its state."""
        store = self.store
        tensors = (store.master, store.weight, *store.states, *store.scales)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None and not t.is_meta)

    @property
    def is_on_device(self) -> bool:
        """Whether its gradients stay on the device."""
        return self.updater.is_on_device


class Updater(Protocol):
    """Keeps the state of buckets: what every optimizer offers, wherever its state lives.

    Who makes the update depends on the place: the executor for our rules on the host, `HostOptimizer.update` for a
    user's optimizer there, `DeviceOptimizer.passage` on the device (job.py).
    """

    is_on_device: bool  # whether the update runs on a stream of the device
    is_all_in_store: bool  # whether a bucket's store, and its parameters, hold all of its state

    def new_store(self, plan: BucketPlan) -> Store:
        """State for a bucket, its master not yet written."""
        ...

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Give fresh states the values the optimizer starts from."""
        ...

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Whether new weights need a page-locked slot; else they can be sent from the state itself."""
        ...

    def read(self, bucket: Bucket, index: int) -> Mapping[str, object]:
        """One slice's master and states as flat fp32 tensors, by name; of a user's optimizer also its options."""
        ...

    def write(self, bucket: Bucket, index: int, values: Mapping[str, object]) -> None:
        """Take over what `read` gave."""
        ...

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """One slice's states as before the first update; the master stays."""
        ...

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master for one slice from its parameter's values; `keep` it where they are what it rounds to."""
        ...

    def forget(self, bucket: Bucket) -> None:
        """The bucket moves to another place: drop all that was kept for it."""
        ...


def new_bucket(
    params: Sequence[Param],
    plan: BucketPlan,
    whole: BucketPlan | None,
    updater: Updater,
    offloads_params: bool,
    executor: BucketKeeper,
) -> Bucket:
    """A bucket with empty state, known to its parameters; `whole`: with the other ranks' parts."""
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
    """Whether an alias has been written to, or still may be: somebody else holds it."""
    return alias._version != version or sys.getrefcount(alias) > 4


def set_deadlines(buckets: Sequence[Bucket], order: Sequence[int]) -> list[Bucket]:
    """By the order of the blocks in a forward; those of blocks whose forward is never called are returned."""
    first = {block: i + 1 for i, block in reversed(list(enumerate(order)))}
    for bucket in buckets:
        bucket.deadline = first.get(bucket.plan.block, 0)
    return [bucket for bucket in buckets if bucket.plan.block not in (ROOT, *first)]


def local_of(tensor: Tensor) -> Tensor:
    """A rank's part of a tensor that ranks have in parts; any other as it is."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def target(tensor: Tensor, piece: Slice) -> Tensor:
    """Where a slice's weights go. A parameter that is not contiguous is one slice, in its own shape."""
    values = tensor.detach()
    if values.is_contiguous():
        return values.view(-1)[piece.start : piece.start + piece.numel]
    assert piece.numel == tensor.numel()
    return values
