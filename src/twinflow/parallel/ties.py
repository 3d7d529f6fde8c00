"""Tied parameters whose copies are on several ranks of a pipeline: their gradients are summed before the update.

A tie's gradients are taken away as backward makes them, before anybody else sees them, and added up in fp32. When the
last micro-batch is through, the ranks that hold a copy sum what they have, and the sum comes to each of them as one
gradient, with the hooks that a gradient has. Copies start equal, get equal gradients and equal updates: they stay equal
to the last bit.

Stages are often far apart, and replicas of a stage near. So replicas sum first, each a part; parts are summed over the
stages; and each replica's gradient is its part of that with zeros around it, which the reduction over replicas, that
knows nothing of ties, puts together. What travels between stages is a replica's share, in the parameter's dtype or
the one that sums were asked to travel in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from twinflow.dist.group import Group
from twinflow.offload.bucket import local_of


class TiedGradients:
    """One parameter's, on one of the ranks that hold it; all of them have to call `finish` after every step's last
    backward, in the same order of ties. `replicas`: ranks that have the same part of the model, or this one alone.
    `dtype`: that sums travel in; None: the parameter's."""

    def __init__(self, param: nn.Parameter, group: Group, replicas: Group, dtype: torch.dtype | None = None) -> None:
        self._param, self._group, self._replicas, self._dtype = param, group, replicas, dtype or param.dtype
        self._sum: Tensor | None = None
        self._is_done = False  # the sum of all ranks comes now: let it pass
        hooked: Any = param  # torch does not type this method
        self._handle: RemovableHandle = hooked.register_post_accumulate_grad_hook(self._take)

    def start(self) -> None:
        """All copies are the first holder's. Replicas meet too: what NCCL sets up when ranks first do would otherwise
        come beside the first step's reductions."""
        with torch.no_grad():
            self._replicas.broadcast(_local(self._param))
            self._group.broadcast(_local(self._param))

    def _take(self, param: Tensor) -> None:
        if self._is_done or param.grad is None:
            return
        grad = _local(param.grad)
        if self._sum is None:
            self._sum = grad.float().contiguous()
        else:
            self._sum += grad
        param.grad = None

    def finish(self) -> None:
        """The sum over all holders, as a gradient; nothing where none of them had one."""
        here = _local(self._param)
        size, own = -(-here.numel() // self._replicas.world), self._replicas.rank
        rows = self._take_rows(here, size)
        part, total = (torch.empty(size + 1, dtype=rows.dtype, device=rows.device) for _ in range(2))
        self._replicas.reduce_scatter(part, rows.view(-1), rows.dtype)
        del rows
        self._group.all_reduce(total, part, total.dtype)
        if not float(total[-1]):
            return
        grad = torch.zeros_like(here, memory_format=torch.contiguous_format)
        where = slice(own * size, min(here.numel(), (own + 1) * size))
        grad.view(-1)[where] = total[: max(0, where.stop - where.start)]
        self._is_done = True
        try:
            self._deliver(grad)
        finally:
            self._is_done = False

    def _take_rows(self, here: Tensor, size: int) -> Tensor:
        """What was taken, as it travels: a row for each replica, its last number one if there is any."""
        taken, self._sum = self._sum, None
        rows = torch.zeros(self._replicas.world, size + 1, dtype=self._dtype, device=here.device)
        if taken is not None:
            for i, row in enumerate(rows):
                piece = taken.view(-1)[i * size : (i + 1) * size]  # the last ones may be short, or empty
                row[: piece.numel()] = piece
            rows[:, -1] = 1.0
        return rows

    def _deliver(self, grad: Tensor) -> None:
        param = self._param
        if isinstance(param, DTensor):  # rows of it
            grad = DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        with torch.enable_grad():
            torch.autograd.backward([param.view_as(param)], [grad])

    def close(self) -> None:
        """Gradients of the parameter are nobody's business any more."""
        self._handle.remove()


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor.detach())
