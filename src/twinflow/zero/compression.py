"""1-bit Adam where ranks partition the state: momenta travel in few bits to the owner of a part, and weights back.

Before the switch nothing is different. At the switch the second moment v is frozen, such that sqrt(v) + eps is a power
of two, and every rank learns 2**k, one over that, of each element. Where v is much smaller than elsewhere in its
parameter it is raised first: Adam's own grows with a rare large gradient, which bounds the step, and a frozen one does
not. From then on a step is, for each bucket:

1. Every rank encodes b1 * shared + (1 - b1) * its gradient, times 2**k, with its error, and sends each part to its
   owner. The shared momentum is the one that the last step moved the weights by: it is in the error already.
2. The owner decodes the mean: the new momentum. Its update (on the host or the device, as ever) takes that as it is,
   and moves the weights of its part by lr * momentum * 2**k.
3. The owner encodes how far its weights are from those that all ranks have, and all ranks, the owner too, move theirs
   by what the codes say. What is left is in the next difference. So all ranks have the same weights to the last bit,
   and divided by the learning rate the move is the shared momentum of the next step.

A step that is skipped, and a parameter that got no gradient anywhere, go no further than 1. Then each rank takes back
what it has said: the momentum is in there, and nowhere else on a rank that does not own it.

A rank keeps an error for every element of the model (4 bytes), k (1 byte) and its last codes, and a copy of the
published weights of its own part; it takes that memory when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinflow.codes import Code, code_named
from twinflow.codes.reference import two_to
from twinflow.dist.compressed import Coding, Errors, compressed_reduce_scatter, own_part, publish, take_back
from twinflow.dist.group import Group
from twinflow.errors import invalid_value
from twinflow.offload.bucket import Bucket
from twinflow.offload.job import Job
from twinflow.rules.rule import Options, number, numbers

THRESHOLD = 0.96
FLOOR = 0.1  # of the mean of a parameter's second moment: nothing that ever saw a gradient is frozen below


@dataclass(frozen=True)
class Compression:
    """When, and how."""

    code: str = "1bit"
    freeze_step: int | None = None  # the last step in full precision; None: when the second moment has settled
    freeze_threshold: float = THRESHOLD
    freeze_window: int | None = None  # None: as many steps as the second moment remembers

    def __post_init__(self) -> None:
        code_named(self.code)
        if self.freeze_step is not None and self.freeze_step < 1:
            raise invalid_value("freeze_step", self.freeze_step, "a whole number >= 1, or None")
        if not 0.0 < self.freeze_threshold < 1.0:
            raise invalid_value("freeze_threshold", self.freeze_threshold, "a number above 0 and below 1")
        if self.freeze_window is not None and self.freeze_window < 1:
            raise invalid_value("freeze_window", self.freeze_window, "a whole number >= 1, or None")


@dataclass(eq=False)
class Exchange:
    """What a rank keeps for one bucket."""

    exponents: Tensor  # k + 127 of the whole bucket; 0 where no gradient was ever seen
    error: Tensor  # of the whole bucket, in units of the weights' moves over the learning rate
    told: Tensor  # of this rank's part, as all ranks have it
    said: Tensor  # by this rank to the owners, in codes: a row for each


class Exchanges:
    """Compressed exchanges of all buckets, once the switch is made."""

    def __init__(self, code: Code, b1: float, of: Mapping[int, Exchange]) -> None:
        self.code, self.b1 = code, b1
        self.of = of  # by the bucket's index

    def reduce(self, group: Group, bucket: Bucket, part: Tensor, whole: Tensor, job: Job) -> None:
        """This rank's part of the new momentum, times what the update will divide gradients by."""
        own, scale = self.of[bucket.plan.index], job.scale
        coding = Coding(self.code, own.exponents, (1.0 - self.b1) * group.world / scale)
        compressed_reduce_scatter(group, part, whole, coding, Errors(own.error, None, own.said))
        part.mul_(scale)

    def take_back(self, bucket: Bucket, unused: Collection[int]) -> None:
        """What this rank has said in the last `reduce` of these parameters, which are not updated after all."""
        own = self.of[bucket.plan.index]
        pieces = [piece for piece in bucket.gathered.slices if piece.param in unused]
        wheres = [slice(piece.offset, piece.offset + piece.numel) for piece in pieces]
        take_back(self.code, own.error, own.said, own.exponents, wheres)

    def publish(self, group: Group, bucket: Bucket, flat: Tensor, job: Job) -> None:
        """`flat`: the published weights, but new ones in this rank's part; afterwards, those that all ranks have."""
        own = self.of[bucket.plan.index]
        here = own_part(group, flat)
        new = here.clone()
        here.copy_(own.told)
        before = flat.to(torch.float32, copy=True)
        publish(group, flat, new, Coding(self.code, own.exponents))
        own.told.copy_(here)
        self._share_momentum(own, bucket, before, flat, job)

    def _share_momentum(self, own: Exchange, bucket: Bucket, before: Tensor, after: Tensor, job: Job) -> None:
        """The weights' move, without decay and over the learning rate, goes into what this rank sends next."""
        params = {param.index: param for param in bucket.members}
        for piece in bucket.gathered.slices:
            options = job.options[params[piece.param].group]
            rate, decay = step_size(options), number(options, "lr") * number(options, "weight_decay")
            if rate <= 0.0:
                continue
            where = slice(piece.offset, piece.offset + piece.numel)
            moved = before[where].mul(1.0 - decay).sub_(after[where])
            moved.mul_(own.exponents[where] != 0)
            own.error[where].add_(moved, alpha=self.b1 / rate)


def step_size(options: Options) -> float:
    """What a momentum times 2**k is multiplied with; the first moment's correction is 1 by then."""
    second = math.sqrt(1.0 - numbers(options, "betas")[1] ** int(number(options, "second_step")))
    return number(options, "lr") * second


def floor_of(total: float, count: float) -> float:
    """What a parameter's second moment is raised to when it is frozen, from the sum and the number of those elements
    that are not zero: a power of two, so that sums that were added up otherwise give the same."""
    if not (count > 0 and 0.0 < total < math.inf):
        return 0.0
    return math.ldexp(0.5, math.frexp(FLOOR * total / count)[1])


def raised(variance: Tensor, floor: float) -> Tensor:
    """No element below the floor, but those that never saw a gradient."""
    return torch.where(variance != 0, variance.clamp(min=floor), variance)


def rounded_variance(exponents: Tensor) -> Tensor:
    """The second moment whose exponents these are."""
    inverse = two_to(exponents, -1)
    return torch.where(exponents != 0, inverse * inverse, 0.0)


def check_groups(groups: Sequence[Options]) -> float:
    """The decay of the first moment, which all groups must share: it is in the codes."""
    betas = {numbers(group, "betas")[0] for group in groups}
    if len(betas) > 1:
        remedy = "A bucket may hold parameters of several groups, and its momenta share their codes."
        raise invalid_value("betas[0] of the param groups with compressed communication", sorted(betas), "one", remedy)
    return betas.pop()
