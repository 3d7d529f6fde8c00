"""Parameters in flat buffers, one for each exchange between ranks.

fp32 parameters become views of the bucket's weights. For half-precision parameters the weights are fp32 masters, and
the parameters are rounded from them after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from twinflow import native
from twinflow.codes.reference import two_to
from twinflow.dist.compressed import Errors
from twinflow.gpu import update as gpu
from twinflow.rules import ADAMW, reference
from twinflow.rules.formats import BLOCK
from twinflow.rules.rule import Hyper
from twinflow.rules.segment import Segment, Store


@dataclass(eq=False)
class FlatBucket:
    """Some parameters of one param group, with their state."""

    params: list[nn.Parameter]
    offsets: list[int]  # start of each parameter, a multiple of 128
    group: int  # index of the param group
    numel: int  # with padding, so that each rank's part is a multiple of 128
    weights: Tensor
    grads: Tensor  # in the parameters' dtype
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: list[int]  # number of updates of each parameter
    errors: Errors | None = None  # None before the first exchange
    exponents: Tensor | None = None  # None before the second moment is frozen
    frozen_at: list[int] | None = None  # number of gradients in each parameter's second moment, if it may be frozen
    server_start: int = 0  # start of the part that this rank owns
    extra: dict[str, Tensor] = field(default_factory=dict)  # more flat states of an optimizer
    versions: list[int] = field(default_factory=list)  # versions of the parameters after the last write here

    def ranges(self) -> Iterator[slice]:
        """The range of each parameter in a flat tensor."""
        for offset, param in zip(self.offsets, self.params, strict=True):
            yield slice(offset, offset + param.numel())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the parameters."""
        return [flat[where].view(param.shape) for where, param in zip(self.ranges(), self.params, strict=True)]

    def gather(self) -> list[bool]:
        """Copies gradients into `grads`, zeros if there is none. Returns which parameters have a gradient."""
        self._take_over()
        hits = [param.grad is not None for param in self.params]
        views = self.views(self.grads)
        into = [view for view, hit in zip(views, hits, strict=True) if hit]
        if into:
            torch._foreach_copy_(into, [param.grad for param in self.params if param.grad is not None])
        for view, hit in zip(views, hits, strict=True):
            if not hit:
                view.zero_()
        return hits

    def _take_over(self) -> None:
        """Copies weights that the user has written, into new memory or into half-precision parameters."""
        for i, (view, param) in enumerate(zip(self.views(self.weights), self.params, strict=True)):
            if param.dtype == torch.float32:
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
                    param.data = view
            elif self.versions and self.versions[i] != param._version:
                view.copy_(torch.where(view.to(param.dtype) == param, view, param.float()))

    def sum_squares(self) -> float:
        """The sum of squared gradients; not finite if a gradient is not finite or a row's sum overflows fp32."""
        rows = self.grads.view(-1, BLOCK)  # one fp32 sum over all elements would lose precision
        return float(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum())

    def update(self, hypers: Sequence[Hyper | None], factor: float = 1.0) -> None:
        """Runs one AdamW step for parameters with hyperparameters, and writes the weights into the parameters."""
        if len(set(hypers)) == 1 and hypers[0] is not None:
            self._update_range(hypers[0], factor, 0, self.numel)
        else:
            for hyper, where in zip(hypers, self.ranges(), strict=True):
                if hyper is not None:
                    self._update_range(hyper, factor, where.start, where.stop)
        self.write_params()

    def _update_range(self, hyper: Hyper, factor: float, start: int, stop: int) -> None:
        flat = [tensor[start:stop] for tensor in (self.weights, self.exp_avg, self.exp_avg_sq, self.grads)]
        store = Store("fp32", flat[0], None, (flat[1], flat[2]))
        if self.weights.device.type == "cpu":
            native.update([Segment(ADAMW, hyper, flat[3], store, factor)])
        elif self.weights.device.type == "cuda" and gpu.is_available():
            update = self._whole if (start, stop) == (0, self.numel) else _fused(flat[0])
            update(store, flat[3], {0: gpu.Numbers(hyper, factor, (0, 0))})
        else:
            reference.update([Segment(ADAMW, hyper, flat[3], store, factor)])

    @cached_property
    def _whole(self) -> gpu.FusedUpdate:
        return _fused(self.weights)

    def write_params(self) -> None:
        """Writes the weights into parameters that are not views of them."""
        if self.params[0].dtype != torch.float32:
            torch._foreach_copy_([param.detach() for param in self.params], self.views(self.weights))
        for param in self.params:
            torch.autograd.graph.increment_version(param)
        self.versions = [param._version for param in self.params]

    def set_exponents(self, exponents: Tensor) -> None:
        """Sets new exponents and converts the errors to them."""
        old, self.exponents = self.exponents, exponents
        if old is None or self.errors is None:
            return
        ratio = torch.where((old != 0) & (exponents != 0), two_to(exponents) * two_to(old, -1), 0.0)
        self.errors.worker.mul_(ratio)
        if self.errors.server is not None:
            size = self.errors.server.numel()
            self.errors.server.mul_(ratio[self.server_start : self.server_start + size])


def _fused(weights: Tensor) -> gpu.FusedUpdate:
    return gpu.FusedUpdate(ADAMW, [gpu.Piece(weights, 0, weights.numel(), 0)])


def make_buckets(
    params: Sequence[nn.Parameter], group: int, world: int, rank: int, max_numel: int
) -> Iterator[FlatBucket]:
    """Makes buckets of at most `max_numel` elements, each of one dtype and device. A larger parameter has its own."""
    kinds = dict.fromkeys((param.dtype, param.device) for param in params)
    for kind in kinds:
        chosen: list[nn.Parameter] = []
        size = 0
        for param in (param for param in params if (param.dtype, param.device) == kind):
            own = -(-param.numel() // BLOCK) * BLOCK
            if chosen and size + own > max_numel:
                yield _make(chosen, group, world, rank)
                chosen, size = [], 0
            chosen.append(param)
            size += own
        yield _make(chosen, group, world, rank)


@torch.no_grad()
def _make(params: list[nn.Parameter], group: int, world: int, rank: int) -> FlatBucket:
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += -(-param.numel() // BLOCK) * BLOCK
    numel = -(-end // (world * BLOCK)) * world * BLOCK
    device, dtype = params[0].device, params[0].dtype
    weights, exp_avg, exp_avg_sq = (torch.zeros(numel, device=device) for _ in range(3))
    grads = torch.zeros(numel, device=device, dtype=dtype)
    bucket = FlatBucket(params, offsets, group, numel, weights, grads, exp_avg, exp_avg_sq, [0] * len(params))
    bucket.server_start = numel // world * rank
    for view, param in zip(bucket.views(weights), params, strict=True):
        view.copy_(param)
        if dtype == torch.float32:
            param.data = view
    return bucket
