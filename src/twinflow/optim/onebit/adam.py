# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam: Adam until its second moment is stable, then ranks exchange one bit for each element of the momentum.

After the switch the second moment v is frozen. A rank computes its momentum from the last mean momentum of all ranks
and its own gradient. It sends the signs and one scale for each 4096 elements. Each rank owns a part of the elements: it
computes the mean of what it receives for this part, and sends signs and scales of the mean back. Elements are
multiplied by a power of two near 1 / (sqrt(v) + eps) before they share a scale, because Adam's steps have similar
sizes, but momenta have not.

Elements with v = 0 never had a gradient, and only weight decay changes them. Elements whose v is much smaller than in
the rest of their parameter have rare gradients. In Adam, v grows with the next gradient and limits the step. A frozen v
does not grow, and the step could be of any size. Therefore v of these elements is raised before it is frozen.

The bias correction of the first moment continues after the switch. That of the second moment is frozen. Clipping uses
the norm of the mean gradient before the switch. After the switch that norm is not known, and clipping uses the mean of
the ranks' own norms, which is never smaller than that norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinflow.optim.onebit.base import FreezingOptimizer
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.zero.compression import floor_of, raised


class OneBitAdam(FreezingOptimizer):
    """AdamW over all ranks of the process group. After the switch, 1-bit codes have 1/16 of the bits of bf16 gradients.

    `freeze_step` is the last step of plain Adam. With None, the switch is made when the second moment is stable and the
    learning rate has not risen for `freeze_window` steps. The second moment is stable if, of its sums before and after
    these steps, the smaller is at least `freeze_threshold` times the larger. `shared`: see `Shared` in base.py.
    """

    def _update_bucket(self, bucket: FlatBucket, hits: Sequence[bool], factor: float) -> None:
        self._adam_step(bucket, hits, factor, self.is_compressed)

    def _before_freezing(self, bucket: FlatBucket) -> None:
        found = [bucket.exp_avg_sq[where] for where in bucket.ranges()]
        sums = [floor_of(float(v.sum(dtype=torch.float64)), int(v.count_nonzero())) for v in found]
        floors = torch.tensor(sums, dtype=torch.float64)
        self._agree.broadcast(floors)  # different machines may compute sums with different rounding
        for variance, floor in zip(found, floors.tolist(), strict=True):
            variance.copy_(raised(variance, floor))
