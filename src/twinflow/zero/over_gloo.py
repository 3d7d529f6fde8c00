"""Stage 3 over gloo: `fully_shard` gathers and sums with our collectives.

gloo's own reduce-scatter sends as much as an all-reduce, and has none for a GPU's memory. Ours (dist/group.py) is an
exchange of parts on the host, summed in fp32 in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.dist.group import Group


class _OnHost:
    """What `fully_shard` asks of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer on the device."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _group(self, handle: dist.ProcessGroup) -> Group:
        return Group(handle, dist.get_process_group_ranks(handle), is_on_host=True)


class HostAllGather(_OnHost):
    """Every rank's rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Done when it returns."""
        found = self._group(group)
        whole = output_tensor.view(-1)
        size = input_tensor.numel()
        own = whole[found.rank * size : (found.rank + 1) * size]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        found.all_gather(whole)


class HostReduceScatter(_OnHost):
    """This rank's rows of the sum."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Done when it returns."""
        found = self._group(group)
        found.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), input_tensor.dtype)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(found.world)
        else:
            assert op == dist.ReduceOp.SUM, op


@runtime_checkable
class _TakesCollectives(Protocol):
    """A module that `fully_shard` has been on, where torch is newer than 2.8."""

    def set_custom_all_gather(self, comm: HostAllGather) -> None: ...

    def set_custom_reduce_scatter(self, comm: HostReduceScatter) -> None: ...


def use_host(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Let these modules, which `fully_shard` has been on, gather and sum so; with torch 2.8 as gloo does, on a CPU."""
    for module in modules:
        if not isinstance(module, _TakesCollectives):
            if device.type == "cpu":
                return
            raise RuntimeError(
                f"torch {torch.__version__}: stage 3 on GPUs needs NCCL, or a torch in which fully_shard takes "
                "collectives of others (set_custom_reduce_scatter). Use stage 2, or a newer torch"
            )
        module.set_custom_all_gather(HostAllGather())
        module.set_custom_reduce_scatter(HostReduceScatter())
