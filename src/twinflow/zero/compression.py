# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam with partitioned state: ranks send compressed momenta to the owner of a part, and owners send compressed
weight changes back.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. It is divided into
one part for each rank, which is the owner of the part.

Before the switch, communication is not compressed. At the switch the second moment v is frozen and rounded such that
sqrt(v) + eps is a power of two. Every rank gets the exponents k of all elements, where 2**k = 1 / (sqrt(v) + eps).
Before that, v is raised for elements whose v is much smaller than in the rest of their parameter: in Adam, v would grow
with a rare large gradient and limit the step, but a frozen v does not grow. After the switch a step has three phases
for each bucket:

1. Every rank encodes (b1 * shared + (1 - b1) * its gradient) * 2**k plus its error, and sends each part to the owner of
   the part. `shared` is the momentum by which the last step changed the weights. Its term is not
   added again, because phase 3 has added b1 * shared * 2**k to the rank's error.
2. The owner decodes the mean, which is the new momentum. The owner's update, on the host or on the device, uses this
   momentum and subtracts lr * momentum * 2**k, with the bias correction of v, from the weights of its part.
3. The owner encodes the difference between its weights and the weights of all ranks. All ranks, including the owner,
   change their weights by the decoded difference. The rounding error is part of the next difference. All ranks
   therefore have bitwise equal weights. `shared` of the next step follows from this difference (`_share_momentum`).

If a step is skipped, or no rank has a gradient for a parameter, only phase 1 has run. Each rank then adds the values
that it has sent to its error again, because on ranks that are not the owner only the error contains the momentum.

A rank stores an error for every element of the model (4 bytes), k (1 byte), its last codes, and a copy of the published
weights of its own part. This memory is allocated at the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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
from twinflow.state_dict import float_of, int_of, value_of

THRESHOLD = 0.96
MAX_WINDOW = 1000
FLOOR = 0.1  # smallest frozen second moment, relative to the mean of its parameter


@dataclass(frozen=True)
class Compression:
    """Options of compressed communication: the code, and when the second moment is frozen."""

    code: str = "1bit"
    freeze_step: int | None = None  # last step without compression; None: the step at which the second moment is stable
    # The second moment is stable if, of its sums at both ends of a window, smaller / larger is at least this.
    freeze_threshold: float = THRESHOLD
    freeze_window: int | None = None  # steps of the window; None: 1 / (1 - b2), limited to 2 to 1000

    def __post_init__(self) -> None:
        code_named(self.code)
        if self.freeze_step is not None and self.freeze_step < 1:
            raise invalid_value("freeze_step", self.freeze_step, "a whole number >= 1, or None")
        if not 0.0 < self.freeze_threshold < 1.0:
            raise invalid_value("freeze_threshold", self.freeze_threshold, "a number above 0 and below 1")
        if self.freeze_window is not None and self.freeze_window < 1:
            raise invalid_value("freeze_window", self.freeze_window, "a whole number >= 1, or None")


def default_window(b2: float) -> int:
    """The number of steps in an average with decay `b2`: 1 / (1 - b2), limited to 2 to `MAX_WINDOW`."""
    return min(MAX_WINDOW, max(2, round(1.0 / (1.0 - b2))))


@dataclass
class VarianceWatch:
    """Watches the bias-corrected sum of the second moment and decides when it is stable and may be frozen.

    Adam's second moment changes much at the start of training. It is frozen when its sum has changed little over
    `window` steps. With a frozen second moment Adam is linear in the gradients, so that errors of
    compressed communication cancel over time. The second moment is not frozen while the learning rate rises, nor within
    `window` steps after that, because training at the higher learning rate would need another second moment.
    """

    window: int
    threshold: float
    sums: deque[float] = field(default_factory=deque)  # the sums of the last `window` + 1 calls
    last_lr: float = -math.inf
    num_level: int = 0  # number of calls since the learning rate last rose

    def see(self, total: float, lr: float) -> bool:
        """Adds a sum and returns whether the second moment is stable. All ranks must pass the same numbers."""
        self.num_level = 0 if lr > self.last_lr else self.num_level + 1
        self.last_lr = lr
        self.sums.append(total)
        while len(self.sums) > self.window + 1:
            self.sums.popleft()
        if len(self.sums) <= self.window or self.num_level < self.window:
            return False
        least, most = sorted((self.sums[0], total))
        return least > 0.0 and least / most >= self.threshold

    def state_dict(self) -> dict[str, object]:
        """The sums and the history of the learning rate."""
        return {"sums": list(self.sums), "last_lr": self.last_lr, "num_level": self.num_level}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Loads a state of `state_dict`."""
        self.sums = deque(float(value) for value in value_of(state, "sums", list))
        self.last_lr, self.num_level = float_of(state, "last_lr"), int_of(state, "num_level")


@dataclass(eq=False)
class Exchange:
    """The buffers for the compressed communication of one bucket on one rank."""

    exponents: Tensor  # k + 127 for the whole bucket; 0 for elements that never had a gradient
    error: Tensor  # error of the whole bucket, in units of weight change / learning rate
    published: Tensor  # weights of this rank's part, as all ranks have them
    sent_codes: Tensor  # the last codes that this rank has sent, one row for each owner


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Compressed exchanges of all buckets after the switch."""

    code: Code
    b1: float
    of: Mapping[int, Exchange]  # by index of the bucket

    def reduce(self, group: Group, bucket: Bucket, part: Tensor, whole: Tensor, job: Job) -> None:
        """Writes this rank's part of the new momentum to `part`, times `job.scale`, by which the update divides it."""
        own, scale = self.of[bucket.plan.index], job.scale
        coding = Coding(self.code, own.exponents, (1.0 - self.b1) * group.world / scale)
        compressed_reduce_scatter(group, part, whole, coding, Errors(own.error, None, own.sent_codes))
        part.mul_(scale)

    def take_back(self, bucket: Bucket, unused: Collection[int]) -> None:
        """Adds the last sent values of the parameters `unused`, which are not updated, to the error again."""
        own = self.of[bucket.plan.index]
        pieces = [piece for piece in bucket.gathered.slices if piece.param in unused]
        wheres = [slice(piece.offset, piece.offset + piece.numel) for piece in pieces]
        take_back(self.code, own.error, own.sent_codes, own.exponents, wheres)

    def publish(self, group: Group, bucket: Bucket, flat: Tensor, job: Job) -> None:
        """Sends weight changes. `flat` has the published weights, with new ones in this rank's part.

        Afterwards `flat` has the new weights, which are equal on all ranks.
        """
        own = self.of[bucket.plan.index]
        here = own_part(group, flat)
        new = here.clone()
        here.copy_(own.published)
        before = flat.to(torch.float32, copy=True)
        publish(group, flat, new, Coding(self.code, own.exponents))
        own.published.copy_(here)
        self._share_momentum(own, bucket, before, flat, job)

    def _share_momentum(self, own: Exchange, bucket: Bucket, before: Tensor, after: Tensor, job: Job) -> None:
        """Adds b1 * `shared` of the next step to this rank's error, computed from the weights before and after."""
        params = {param.index: param for param in bucket.members}
        for piece in bucket.gathered.slices:
            options = job.options[params[piece.param].group]
            lr, steps = number(options, "lr"), int(number(options, "second_step"))
            # the factor of momentum * 2**k in a step; the bias correction of the first moment is 1 after the switch
            rate, decay = lr * second_correction(options, steps), lr * number(options, "weight_decay")
            if rate <= 0.0:
                continue
            where = slice(piece.offset, piece.offset + piece.numel)
            moved = before[where].mul(1.0 - decay).sub_(after[where])
            moved.mul_(own.exponents[where] != 0)
            own.error[where].add_(moved, alpha=self.b1 / rate)


def second_correction(options: Options, steps: int) -> float:
    """The bias correction of the square root of the second moment after `steps` gradients; 1 if it is turned off."""
    has_correction = options.get("bias_correction", True)  # older checkpoints do not have this option
    return math.sqrt(1.0 - numbers(options, "betas")[1] ** steps) if has_correction else 1.0


def floor_of(total: float, count: float) -> float:
    """The lower limit of a parameter's frozen second moments: `FLOOR` times the mean of its nonzero ones (`total` /
    `count`), rounded down to a power of two, so that the order of addition in `total` rarely matters. 0 if there is no
    finite mean.
    """
    if not (count > 0 and 0.0 < total < math.inf):
        return 0.0
    return math.ldexp(0.5, math.frexp(FLOOR * total / count)[1])


def raised(variance: Tensor, floor: float) -> Tensor:
    """Raises elements below `floor` to `floor`, except zeros, which are elements that never had a gradient."""
    return torch.where(variance != 0, variance.clamp(min=floor), variance)


def rounded_variance(exponents: Tensor) -> Tensor:
    """The second moment 2**(-2k) of each element. `exponents` holds k + 127, or 0 for elements without a gradient."""
    inverse = two_to(exponents, -1)
    return torch.where(exponents != 0, inverse * inverse, 0.0)
