"""Tied parameters whose copies are on several ranks of a pipeline: their gradients are summed before the update.

A tie's gradients are taken away as backward makes them, before anybody else sees them, and added up in fp32. When the
last micro-batch is through, the ranks that hold a copy sum what they have, and the sum comes to each of them as one
gradient, with the hooks that a gradient has. Copies start equal, get equal gradients and equal updates: they stay equal
to the last bit.
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
    backward, in the same order of ties."""

    def __init__(self, param: nn.Parameter, group: Group) -> None:
        self._param, self._group = param, group
        self._sum: Tensor | None = None
        self._is_done = False  # the sum of all ranks comes now: let it pass
        hooked: Any = param  # torch does not type this method
        self._handle: RemovableHandle = hooked.register_post_accumulate_grad_hook(self._take)

    def start(self) -> None:
        """All copies are the first holder's."""
        with torch.no_grad():
            self._group.broadcast(_local(self._param))

    def _take(self, param: Tensor) -> None:
        if self._is_done or param.grad is None:
            return
        grad = _local(param.grad)
        if self._sum is None:
            self._sum = grad.float()
        else:
            self._sum += grad
        param.grad = None

    def finish(self) -> None:
        """The sum over all holders, as a gradient; nothing where none of them had one."""
        taken, self._sum = self._sum, None
        here = _local(self._param)
        own = torch.zeros(here.numel() + 1, dtype=torch.float32, device=here.device)
        if taken is not None:
            own[:-1], own[-1] = taken.reshape(-1), 1.0
        total = torch.empty_like(own)
        self._group.all_reduce(total, own, torch.float32)
        if not float(total[-1]):
            return
        grad = total[:-1].view(here.shape).to(here.dtype)
        self._is_done = True
        try:
            self._deliver(grad)
        finally:
            self._is_done = False

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
