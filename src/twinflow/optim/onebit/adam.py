"""1-bit Adam: Adam until its second moment has settled, then momentum exchanged in one bit for each element.

After the switch the second moment v stays as it is. A rank sends its momentum, made of the momentum that all share and
its own gradient, as signs and one scale for 4096 elements; the owner of a part sends back the signs of the mean.
Elements are multiplied by a power of two near 1 / (sqrt(v) + eps) before they share a scale: steps of Adam are of about
one size, momenta are not. Where v is zero no gradient was ever seen: such elements are left alone. Where it is much
smaller than elsewhere in its parameter, gradients are rare, and it is raised before it is frozen: the next one would
move such an element without bound, where Adam's own v would grow with it.

Bias correction goes on as if nothing had happened for the first moment, and stays what it was for the second.
Clipping: before the switch by the norm of the mean gradient; after it nobody knows that, and the mean of the ranks' own
norms takes its place, which is never smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from twinflow.optim.onebit.base import Shared
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.optim.onebit.freezing import FreezingOptimizer
from twinflow.rules.adam import adamw_hyper
from twinflow.rules.rule import Hyper, numbers
from twinflow.zero.compression import THRESHOLD, Compression, floor_of, raised


class OneBitAdam(FreezingOptimizer):
    """AdamW over all ranks of the process group, with 1/16 of the communication of bf16 gradients after the switch.

    `freeze_step` names the last step of plain Adam; None: when the second moment has settled, its sum within
    `freeze_threshold` of what it was `freeze_window` steps before, and the learning rate no longer rises.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        freeze_threshold: float = THRESHOLD,
        freeze_window: int | None = None,
        code: str = "1bit",
        **shared: Unpack[Shared],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, Compression(code, freeze_step, freeze_threshold, freeze_window), **shared)

    def _update(self, present: list[list[bool]], norms: Sequence[float]) -> None:
        if self.is_compressed:
            factor = self._bounded_norm(norms)
            for bucket, hits in zip(self._buckets, present, strict=True):
                self._compressed_step(bucket, hits, factor)
            return
        factor = self._mean_gradients()
        for bucket, hits in zip(self._buckets, present, strict=True):
            bucket.update(self._hypers(bucket, hits), factor)
        self._maybe_freeze()

    def _hypers(self, bucket: FlatBucket, hits: Sequence[bool]) -> list[Hyper | None]:
        """Numbers of each parameter's step; a step is counted."""
        options, found = self._options(bucket), []
        for i, hit in enumerate(hits):
            bucket.steps[i] += hit
            if bucket.frozen_at is not None:
                options = {**options, "second_step": bucket.frozen_at[i], "is_frozen": True}
            found.append(adamw_hyper(options, bucket.steps[i]) if hit else None)
        return found

    def _before_freezing(self, bucket: FlatBucket) -> None:
        found = [bucket.exp_avg_sq[where] for where in bucket.ranges()]
        sums = [floor_of(float(v.sum(dtype=torch.float64)), int(v.count_nonzero())) for v in found]
        floors = torch.tensor(sums, dtype=torch.float64)
        self._agree.broadcast(floors)  # machines of different kinds may add up otherwise
        for variance, floor in zip(found, floors.tolist(), strict=True):
            variance.copy_(raised(variance, floor))

    def _compressed_step(self, bucket: FlatBucket, hits: Sequence[bool], factor: float) -> None:
        self._warn_of_late(bucket, hits)
        b1 = numbers(self._options(bucket), "betas")[0]
        self._exchange(bucket, bucket.exp_avg, bucket.grads, (1.0 - b1) * factor, bucket.exp_avg, b1)
        hypers = self._hypers(bucket, hits)
        # The momentum is there already: none of the gradient goes into it.
        bucket.update([None if hyper is None else (0.0, *hyper[1:]) for hyper in hypers])
