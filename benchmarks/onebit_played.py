# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam of several ranks in one process, for benchmarks on one GPU: NCCL refuses several ranks on one GPU.

All ranks have the same weights, momentum and second moment. Only gradients and compression errors differ, so this
process holds these once for each rank, and everything else once. The step, the switch, the update and the codes are
those of `twinflow.optim.onebit` and `twinflow.dist.compressed`. A test compares weights and sent bytes with real
`OneBitAdam` ranks, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twinflow.dist.compressed import packing_for
from twinflow.dist.group import Group
from twinflow.optim.onebit import OneBitAdam
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.rules.formats import BLOCK

NO_SCALING = 127  # exponent of the factor 2**0


class PlayedGroup(Group):
    """Rank 0 of a group whose other ranks are in the same process. Counts bytes, and sends nothing."""

    def __init__(self, world: int) -> None:
        super().__init__(None, range(world), is_on_host=True)

    def all_gather(self, whole: Tensor) -> None:
        self._count(whole.numel() * whole.element_size())

    def broadcast(self, tensor: Tensor) -> None:
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def gather_rows(self, row: Tensor) -> Tensor:
        """The row of this rank for all ranks. Callers pass numbers that are equal on all ranks."""
        rows = row.repeat(self.world, 1)
        self.all_gather(rows)
        return rows


class PlayedAdam(OneBitAdam):
    """`OneBitAdam` of `world` ranks. Pass the gradients of all ranks to `take` before each `step`."""

    def __init__(self, params: Sequence[nn.Parameter], world: int, **options: Any) -> None:
        super().__init__(params, group=PlayedGroup(world), **options)
        device = self._buckets[0].weights.device
        sizes = [bucket.weights.numel() for bucket in self._buckets]
        self._grads = [torch.zeros(world, size, device=device) for size in sizes]
        self._workers = [torch.zeros(world, size, device=device) for size in sizes]  # errors of all ranks
        self._servers = [torch.zeros(size, device=device) for size in sizes]  # errors of the owners of all parts
        self._views: dict[nn.Parameter, Tensor] = {}
        for bucket, flat in zip(self._buckets, self._grads, strict=True):
            for param, where in zip(bucket.params, bucket.ranges(), strict=True):
                self._views[param] = flat[:, where].view(world, *param.shape)

    @torch.no_grad()
    def take(self, grads: Sequence[Tensor]) -> None:
        """Copies gradients [world, *shape], one for each parameter in their order."""
        params = [param for group in self.param_groups for param in group["params"]]
        torch._foreach_copy_([self._views[param] for param in params], list(grads))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """As `CompressedOptimizer.step`, for all ranks. All parameters have a gradient."""
        world = self.group.world
        squares = torch.zeros(world, dtype=torch.float64, device=self._grads[0].device)
        for flat in self._grads:
            rows = flat.view(world, -1, BLOCK)
            squares += torch.linalg.vector_norm(rows, dim=2).double().square().sum(1)
        hits = [[True] * len(bucket.params) for bucket in self._buckets]
        self.group._count(world * 8 * (1 + sum(map(len, hits))))  # the ranks agree on norms and on gradients
        norms = squares.sqrt().tolist()
        if not all(map(math.isfinite, norms)):
            self.num_skipped += 1
            self.grad_norm = math.nan
            return
        self.num_steps += 1
        self._update(hits, norms)

    def _mean_gradients(self) -> float:
        """As gloo's all-reduce of `Group`: shares are summed in fp32 in the order of the ranks."""
        wire = self.wire_dtype or torch.float32
        for bucket, flat in zip(self._buckets, self._grads, strict=True):
            shares = (flat * (1.0 / self.group.world)).to(wire)
            total = shares[0].float()
            for share in shares[1:]:
                total += share
            bucket.grads.copy_(total.to(wire))
            self.group._count(2 * bucket.grads.numel() * wire.itemsize)
        self.grad_norm = math.sqrt(sum(bucket.sum_squares() for bucket in self._buckets))
        return self._clip()

    def _exchange_momenta(self, bucket: FlatBucket, factor: float) -> None:
        b1 = self.param_groups[bucket.group]["betas"][0]
        assert bucket.exponents is not None
        self._play(bucket, bucket.exp_avg, bucket.exponents, (1.0 - b1) * factor, bucket.exp_avg, b1)

    def _play(
        self,
        bucket: FlatBucket,
        out: Tensor,
        exponents: Tensor,
        factor: float,
        base: Tensor | None = None,
        base_factor: float = 0.0,
    ) -> None:
        """`compressed_all_reduce` on all ranks: `out` = the mean of factor * gradient + base_factor * base."""
        index, world, code = self._buckets.index(bucket), self.group.world, self.code
        part, packing = out.numel() // world, packing_for(out.device)
        rows = torch.empty(world, world, code.row_bytes(part), dtype=torch.uint8, device=out.device)
        for rank in range(world):
            packing.encode(
                code,
                rows[rank],
                self._grads[index][rank],
                self._workers[index][rank],
                factor=factor,
                base=base,
                base_factor=base_factor,
                exponents=exponents,
            )
        self.group._count(rows[0].numel())
        means = torch.empty(world, part, device=out.device)
        for owner in range(world):
            packing.mean(code, means[owner], rows[:, owner].contiguous())
        packed = torch.empty_like(rows[0])
        packing.encode(code, packed, means.view(-1), self._servers[index], exponents=exponents, is_scaled=False)
        self.group._count(packed.numel())
        packing.decode(code, out, packed, exponents=exponents)


class PlainAdam(PlayedAdam):
    """Adam on the mean gradient: 1-bit Adam that never switches."""

    rule_step: int | None = None  # the step after which 1-bit Adam would have switched by itself

    def freeze(self) -> None:
        self.rule_step = self.rule_step or self.num_steps


class CompressedAdam(PlayedAdam):
    """Error-compensated Adam: both moments are those of gradients of one bit, after `freeze_step` plain steps.

    With `freeze_step` 0 gradients are compressed from the first step on.
    """

    def __init__(self, params: Sequence[nn.Parameter], world: int, *, freeze_step: int, **options: Any) -> None:
        super().__init__(params, world, freeze_step=freeze_step or 1, **options)
        self.frozen_step = None if freeze_step else 0

    def _update_bucket(self, bucket: FlatBucket, hits: Sequence[bool], factor: float) -> None:
        if self.is_compressed:
            if bucket.exponents is None:
                bucket.exponents = torch.zeros_like(bucket.weights, dtype=torch.uint8)  # 0 in gaps between parameters
                for where in bucket.ranges():
                    bucket.exponents[where] = NO_SCALING
            self._play(bucket, bucket.grads, bucket.exponents, factor)
            factor = 1.0
        self._adam_step(bucket, hits, factor, is_frozen=False)

    def freeze(self) -> None:
        self.frozen_step = self.num_steps

    def _warn_of_late(self, bucket: FlatBucket, hits: Sequence[bool]) -> None:
        pass
