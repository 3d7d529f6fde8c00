# SPDX-License-Identifier: Apache-2.0
"""Sums the gradients of tied parameters whose copies are on several pipeline ranks.

A hook takes the gradient of each micro-batch away from the parameter before other hooks see it, and sums it in fp32.
After the last micro-batch the ranks with a copy sum their gradients. Each of them gets the sum as one gradient, with
the usual hooks. Copies start equal and get equal gradients and updates, so their bits stay equal.

Links between pipeline stages are often slow, and links between the replicas of one stage are fast. So little is sent
between stages:

1. The replicas of a stage reduce-scatter the gradient: each replica gets the sum of one part.
2. The stages with a copy sum this part. Between two stages each replica sends only its own part.
3. Each replica puts zeros into the other parts of its gradient. The usual reduction over replicas, which does not know
   about ties, then adds all parts to the whole sum.

Stages send their sums in the dtype of the parameter, or in `dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.dist.group import Group
from twinflow.dist.sharded import is_dtensor, with_rows
from twinflow.errors import wrong_state
from twinflow.offload.bucket import local_of


class TiedGradients:
    """The gradients of one tied parameter, on one of the ranks that hold a copy.

    All of these ranks have to call `finish` after the last backward of every step, with the ties in the same order.
    `group`: the pipeline ranks with a copy. `replicas`: the ranks with the same part of the model, or this rank alone.
    `dtype`: the dtype in which sums are sent. None: that of the parameter.
    """

    def __init__(self, param: nn.Parameter, group: Group, replicas: Group, dtype: torch.dtype | None = None) -> None:
        self._param, self._group, self._replicas, self._dtype = param, group, replicas, dtype or param.dtype
        self._sum: Tensor | None = None
        self._is_done = False  # the hook does not take the gradient, because it is the sum of all ranks
        self._handle: RemovableHandle | None = None
        if param.requires_grad:
            hooked: Any = param  # torch has no type for this method
            self._handle = hooked.register_post_accumulate_grad_hook(self._take)

    def start(self) -> None:
        """Copy the parameter of the first rank with a copy to all ranks with a copy."""
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
        """Set this replica's part of the sum over all ranks with a copy as the gradient, if some rank has one."""
        here = _local(self._param)
        size, own = -(-here.numel() // self._replicas.world), self._replicas.rank
        rows = self._take_rows(here, size)
        part, total = (torch.empty(size + 1, dtype=rows.dtype, device=rows.device) for _ in range(2))
        self._replicas.reduce_scatter(part, rows.view(-1), rows.dtype)
        del rows
        self._group.all_reduce(total, part, total.dtype)
        if not float(total[-1]):
            return
        if not self._param.requires_grad:
            raise wrong_state(
                "The gradients of a tied parameter cannot be summed",
                "this rank has frozen its copy and another pipeline rank has not",
                "Set requires_grad to the same value on all ranks that have a copy.",
            )
        grad = torch.zeros_like(here, memory_format=torch.contiguous_format)
        where = slice(own * size, min(here.numel(), (own + 1) * size))
        grad.view(-1)[where] = total[: max(0, where.stop - where.start)]
        self._is_done = True
        try:
            self._deliver(grad)
        finally:
            self._is_done = False

    def _take_rows(self, here: Tensor, size: int) -> Tensor:
        """The summed gradient as one row for each replica. The last number of a row is 1 if there is a gradient."""
        taken, self._sum = self._sum, None
        rows = torch.zeros(self._replicas.world, size + 1, dtype=self._dtype, device=here.device)
        if taken is not None:
            for i, row in enumerate(rows):
                piece = taken.view(-1)[i * size : (i + 1) * size]  # the last pieces may be short or empty
                row[: piece.numel()] = piece
            rows[:, -1] = 1.0
        return rows

    def _deliver(self, grad: Tensor) -> None:
        param = self._param
        if is_dtensor(param):  # `grad` has only this rank's rows
            grad = with_rows(param, grad)
        with torch.enable_grad():
            torch.autograd.backward([param.view_as(param)], [grad])

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor.detach())
