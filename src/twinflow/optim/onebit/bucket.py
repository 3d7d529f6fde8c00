# SPDX-License-Identifier: Apache-2.0
"""Parameters in flat buffers. Ranks exchange one buffer at a time.

fp32 parameters become views of the bucket's weights. For half-precision parameters the weights are fp32 masters, and
the parameters are rounded from them after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from twinflow import native
from twinflow.codes.reference import two_to
from twinflow.dist.compressed import Errors, own_part
from twinflow.dist.group import Group
from twinflow.gpu import update as gpu
from twinflow.rules import ADAMW, reference
from twinflow.rules.formats import BLOCK
from twinflow.rules.rule import Hyper
from twinflow.rules.segment import Segment, Store


class FlatBucket:
    """Some parameters of one param group, with one dtype on one device, and their state.

    `group` is the index of the param group. Parameters start at multiples of 128 elements, and the length of each of
    the `world` parts of a flat tensor, one for each rank, is a multiple of 128.
    """

    @torch.no_grad()
    def __init__(self, params: list[nn.Parameter], group: int, world: int) -> None:
        self.params = params
        self.group = group
        *self.offsets, end = accumulate((_padded(param.numel()) for param in params), initial=0)
        numel = _padded(end, world * BLOCK)
        self.weights, self.exp_avg, self.exp_avg_sq = (torch.zeros(numel, device=params[0].device) for _ in range(3))
        self.grads = torch.zeros_like(self.weights, dtype=params[0].dtype)
        self.steps = [0] * len(params)  # number of updates of each parameter
        self.second_steps = [0] * len(params)  # number of gradients in the second moment of each parameter
        self.errors: Errors | None = None  # None before the first exchange
        self.exponents: Tensor | None = None  # None before the second moment is frozen
        self.extra: dict[str, Tensor] = {}  # more flat states of an optimizer
        self._versions: list[int] = []  # versions of the parameters after `write_params`
        for view, param in zip(self.views(self.weights), params, strict=True):
            view.copy_(param)
            if param.dtype == torch.float32:
                param.data = view

    def ranges(self) -> Iterator[slice]:
        """The range of each parameter in a flat tensor."""
        for offset, param in zip(self.offsets, self.params, strict=True):
            yield slice(offset, offset + param.numel())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the parameters."""
        return [flat[where].view(param.shape) for where, param in zip(self.ranges(), self.params, strict=True)]

    def gather(self) -> list[bool]:
        """Copies gradients into `grads`, with zeros for missing ones. Returns which parameters have a gradient."""
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
        """Copies weights that the user has changed into the bucket: fp32 parameters that have new memory, and
        half-precision parameters that were written to.
        """
        for i, (view, param) in enumerate(zip(self.views(self.weights), self.params, strict=True)):
            if param.dtype == torch.float32:
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param)
                    param.data = view
            elif self._versions and self._versions[i] != param._version:
                view.copy_(torch.where(view.to(param.dtype) == param, view, param.float()))

    def sum_squares(self) -> float:
        """The sum of squared gradients; not finite if a gradient is not finite or a sum of 128 overflows fp32."""
        rows = self.grads.view(-1, BLOCK)  # one fp32 sum over all elements would lose precision
        return float(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum())

    def update(self, hypers: Sequence[Hyper | None], factor: float = 1.0) -> None:
        """Runs one AdamW step and writes the weights into the parameters. Parameters with None in `hypers` do not
        change.
        """
        if len(set(hypers)) == 1 and hypers[0] is not None:
            self._update_range(hypers[0], factor, slice(0, self.weights.numel()))
        else:
            for hyper, where in zip(hypers, self.ranges(), strict=True):
                if hyper is not None:
                    self._update_range(hyper, factor, where)
        self.write_params()

    def _update_range(self, hyper: Hyper, factor: float, where: slice) -> None:
        weights, grads = self.weights[where], self.grads[where]
        store = Store("fp32", weights, None, (self.exp_avg[where], self.exp_avg_sq[where]))
        if weights.is_cuda and gpu.is_available():
            update = self._whole if weights.numel() == self.weights.numel() else _fused(weights)
            update(store, grads, {0: gpu.Numbers(hyper, factor, (0, 0))})
        else:
            module = native if weights.device.type == "cpu" else reference
            module.update([Segment(ADAMW, hyper, grads, store, factor)])

    @cached_property
    def _whole(self) -> gpu.FusedUpdate:
        return _fused(self.weights)

    def write_params(self) -> None:
        """Writes the weights into parameters that are not views of them."""
        if self.params[0].dtype != torch.float32:
            torch._foreach_copy_([param.detach() for param in self.params], self.views(self.weights))
        for param in self.params:
            torch.autograd.graph.increment_version(param)
        self._versions = [param._version for param in self.params]

    def set_exponents(self, exponents: Tensor, group: Group) -> None:
        """Sets new exponents of the factors 2**k by which elements are multiplied before they are encoded.

        Compression errors are converted to the new factors.
        """
        old, self.exponents = self.exponents, exponents
        if old is not None and self.errors is not None:
            ratio = torch.where((old != 0) & (exponents != 0), two_to(exponents) * two_to(old, -1), 0.0)
            self.errors.worker.mul_(ratio)
            assert self.errors.server is not None
            self.errors.server.mul_(own_part(group, ratio))


def _fused(weights: Tensor) -> gpu.FusedUpdate:
    return gpu.FusedUpdate(ADAMW, [gpu.Piece(weights, 0, weights.numel(), 0)])


def _padded(numel: int, multiple: int = BLOCK) -> int:
    return -(-numel // multiple) * multiple


def make_buckets(params: Sequence[nn.Parameter], group: int, world: int, max_numel: int) -> Iterator[FlatBucket]:
    """Makes buckets of at most `max_numel` elements, each of one dtype and device. A larger parameter has a bucket
    alone.
    """
    kinds = dict.fromkeys((param.dtype, param.device) for param in params)
    for kind in kinds:
        chosen: list[nn.Parameter] = []
        size = 0
        for param in (param for param in params if (param.dtype, param.device) == kind):
            own = _padded(param.numel())
            if chosen and size + own > max_numel:
                yield FlatBucket(chosen, group, world)
                chosen, size = [], 0
            chosen.append(param)
            size += own
        yield FlatBucket(chosen, group, world)
