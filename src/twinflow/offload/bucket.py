"""Parameters, buckets and the work of a step on them, at run time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from twinflow.device import Event
from twinflow.offload.gate import Gate
from twinflow.offload.plan import ROOT, BucketPlan, Slice
from twinflow.offload.slots import Slot
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.weight_guard import plain
from twinflow.rules.segment import Store

Options = Mapping[str, Any]


@dataclass(eq=False)
class Param:
    """A trainable parameter."""

    index: int
    name: str
    tensor: nn.Parameter
    group: int  # index of its param group
    is_late: bool = False  # its gradient is complete only when the outermost backward has ended
    is_queued: bool = False  # a gradient has come, and waits in `.grad` for the others of its block
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
    def is_sharded(self) -> bool:
        """Whether that is not all."""
        return self.local is not self.tensor

    @property
    def is_written(self) -> bool:
        """Whether somebody else has written to it since our last write."""
        local = self.local
        is_aliased = any(alias._version != version for alias, version in self.aliases)
        return self.version != local._version or is_aliased

    def note_write(self) -> None:
        """We have written to it."""
        with self.guard:
            self.version = self.local._version
            if self.aliases:
                self.aliases = [(alias, alias._version) for alias, _ in self.aliases]

    def note_step(self) -> None:
        """Its values will change: a graph that needs the old ones must fail, as with torch."""
        with self.guard:
            torch._C._increment_version([self.local])
            self.version = self.local._version


class Place(NamedTuple):
    """Where a parameter lies in a bucket."""

    bucket: Bucket
    cuts: list[Slice]  # of what gradients are gathered in
    own: list[int]  # which of this rank's slices are its


@dataclass(eq=False)
class Bucket:
    """Slices that travel together, their state, and what updates it.

    Where ranks share it, the plan is this rank's part, and `whole` is all of it.
    """

    plan: BucketPlan
    params: list[Param]  # of each slice
    updater: Updater
    store: Store
    steps: list[int]  # updates so far, of each slice
    is_parked: bool = False  # its weights live in the state alone: blocks fetch them (parking.py)
    deadline: int = 0  # the forward's order
    due: int = 0  # the last job whose weights the next forward has to see
    sent: int = 0  # the last job whose weights are on their way into the parameters
    sent_event: Event | None = None  # when they are there
    updated: int = 0  # the last job that is in the state
    stored: Event | None = None  # when streamed state is on the host again
    task: Task | None = None  # this step's, while gradients come in
    total: Tensor | None = None  # fp32 sum of this step's gradients, where they are summed as tasks
    added: set[int] = field(default_factory=set)  # the slices that are in it
    is_full: bool = False  # it is complete, and waits for its update
    parts: list[Task] = field(default_factory=list)  # tasks still to be added to it, in order
    targets: list[Tensor] = field(default_factory=list)  # each slice's place in its parameter
    addresses: list[int] = field(default_factory=list)  # of the parameters, when the places were found
    whole: BucketPlan | None = None
    members: list[Param] = field(default_factory=list)  # parameters of the whole, each once
    published: int = 0  # where it is shared: the last job whose weights are on their way from all ranks
    published_event: Event | None = None  # when they are there

    def __post_init__(self) -> None:
        self.members = self.members or list(dict.fromkeys(self.params))
        self.find_targets()

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of it."""
        return self.whole is not None

    @property
    def gathered(self) -> BucketPlan:
        """What gradients are gathered in."""
        return self.plan if self.whole is None else self.whole

    @property
    def shown(self) -> int:
        """The last job whose weights are on their way into all of its parameters."""
        return self.published if self.is_shared else self.sent

    @property
    def shown_event(self) -> Event | None:
        """When they are there."""
        return self.published_event if self.is_shared else self.sent_event

    def forget_shown(self) -> None:
        """They are there."""
        if self.is_shared:
            self.published_event = None
        else:
            self.sent_event = None

    def find_targets(self) -> None:
        """Views of the parameters as they are now; writes to them are seen by autograd."""
        if self.is_parked:
            return
        with plain():
            self.targets = [target(p.local, piece) for p, piece in zip(self.params, self.slices, strict=True)]
            self.addresses = [param.local.data_ptr() for param in self.params]

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
    """What the runtime needs from an optimizer."""

    can_shadow: bool  # whether an update can be written beside the state
    is_on_device: bool  # whether the update runs on a stream of the device; else in the worker
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

    def prepare(self, task: Task, factor: float, decision: Tensor | None = None) -> Callable[[], None]:
        """The update of a task's bucket, into its shadow where it has one. By the time it has run, `task.weights` are
        the new weights; on the device they are set here already, or the parameters themselves are written to.

        `decision`: what `decide_there` has written by the time the update runs; its factor multiplies `factor`."""
        ...

    def reads_decision(self, plan: BucketPlan) -> bool:
        """Whether an update takes the clipping decision from the device's memory, and writes the parameters itself."""
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

    def forget(self, bucket: Bucket) -> None:
        """The bucket moves to another place: drop all that was kept for it."""
        ...


@dataclass(eq=False)
class Job:
    """One optimizer step: what was asked for when its gradients became final."""

    number: int
    options: Sequence[Options]  # of each param group
    gate: Gate
    is_delayed: bool = False  # the weights go back one step later
    is_part: bool = False  # gradients of one of several backwards: only summed
    may_run_ahead: bool = False  # updates may start before the gate is open
    is_released: bool = False  # the weights may go back
    after: Event | None = None  # when the forward and backward that still need the old weights have ended
    tasks: list[Task] = field(default_factory=list)
    num_left: int = 0  # tasks whose update is neither kept nor dropped for good
    launched: list[Task] = field(default_factory=list)  # updates on the device that read the decision there
    norms: Tensor | None = None  # of each bucket, where the host measures them

    @property
    def is_done(self) -> bool:
        """Whether every update of a finished step is in the state."""
        return self.num_left == 0


@dataclass(eq=False)
class Task:
    """One bucket's part in a job."""

    bucket: Bucket
    job: Job
    present: list[int]  # the slices that have a gradient
    sources: list[tuple[int, Tensor]] = field(default_factory=list)  # offset in the bucket, and what to copy there
    flat: Tensor | None = None  # the device buffer the gradients are gathered in
    missing: set[int] = field(default_factory=set)  # parameters whose gradient has not come yet
    ready: Event | None = None  # the gradients are complete on the device
    is_complete: bool = False  # ... and were seen to be
    slot: Slot | None = None  # page-locked memory they go to
    grads: Tensor | None = None  # its view as numbers; for an update on the device, the flat buffer or the total
    arrived: Event | None = None  # they are there; on the device: they have been used
    is_summed: bool = False  # the bucket's total has taken them in
    is_held: bool = False  # which slices have a gradient is known only when all ranks have said so
    agreed: list[int] | None = None  # what they have said
    shadow: Store | None = None  # where the update writes before the gate is open
    weight_slot: Slot | None = None  # page-locked memory for new weights, where the state does not hold them
    weights: Sequence[Tensor] = ()  # the new weights of each slice, to go back

    @property
    def deadline(self) -> tuple[int, int]:
        """Earlier jobs first, then what the next forward needs first."""
        return self.job.number, self.bucket.deadline


def new_bucket(
    params: Sequence[Param], plan: BucketPlan, whole: BucketPlan | None, updater: Updater, is_parked: bool
) -> Bucket:
    """A bucket with empty state, known to its parameters; `whole`: with the other ranks' parts."""
    own = [params[piece.param] for piece in plan.slices]
    bucket = Bucket(plan, own, updater, updater.new_store(plan), [0] * len(plan.slices), is_parked)
    if whole is not None:
        bucket.whole = whole
        bucket.members = list(dict.fromkeys(params[piece.param] for piece in whole.slices))
    for param in bucket.members:
        param.buckets.append(bucket)
    return bucket


def _place(index: int, bucket: Bucket) -> Place:
    cuts = [piece for piece in bucket.gathered.slices if piece.param == index]
    return Place(bucket, cuts, [i for i, piece in enumerate(bucket.slices) if piece.param == index])


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
