"""Stage 3 over gloo: `fully_shard` uses twinflow's collectives.

gloo's reduce-scatter sends as much as an all-reduce and does not support GPU memory. twinflow's reduce-scatter
(dist/group.py) exchanges parts on the host and sums them in fp32 in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.dist.group import Group
from twinflow.errors import wrong_state


class _OnHost:
    """The part of torch's protocol for collectives of `fully_shard` that both classes share."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a buffer, as `fully_shard` requires."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _group(self, handle: dist.ProcessGroup) -> Group:
        return Group(handle, dist.get_process_group_ranks(handle), is_on_host=True)


class HostAllGather(_OnHost):
    """Gathers the rows of all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Runs the collective synchronously; `async_op` is ignored."""
        found = self._group(group)
        whole = output_tensor.view(-1)
        size = input_tensor.numel()
        own = whole[found.rank * size : (found.rank + 1) * size]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        found.all_gather(whole)


class HostReduceScatter(_OnHost):
    """Gives this rank its rows of the sum."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Runs the collective synchronously; `async_op` is ignored."""
        found = self._group(group)
        found.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), input_tensor.dtype)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(found.world)
        else:
            assert op == dist.ReduceOp.SUM, op


@runtime_checkable
class _TakesCollectives(Protocol):
    """A module after `fully_shard`, in torch versions later than 2.8."""

    def set_custom_all_gather(self, comm: HostAllGather) -> None: ...

    def set_custom_reduce_scatter(self, comm: HostReduceScatter) -> None: ...


def use_host(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Sets the collectives of modules after `fully_shard`. With torch 2.8 on a CPU, gloo's own collectives are used.

    Raises RuntimeError with torch 2.8 on a GPU.
    """
    for module in modules:
        if not isinstance(module, _TakesCollectives):
            if device.type == "cpu":
                return
            raise wrong_state(
                "ZeRO stage 3 on GPUs cannot run over gloo",
                f"fully_shard of torch {torch.__version__} has no set_custom_reduce_scatter",
                "Use the NCCL backend, zero_optimization.stage 2, or a torch version later than 2.8.",
            )
        module.set_custom_all_gather(HostAllGather())
        module.set_custom_reduce_scatter(HostReduceScatter())
