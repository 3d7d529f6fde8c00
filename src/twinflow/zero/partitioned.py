"""Stage 3: weights are partitioned too. torch's `fully_shard` keeps every rank's rows of each parameter, gathers a
block before it runs and scatters the sums of its gradients; our runtime works on the rows that this rank has.

Weights go back into those rows on a stream of ours. The forward's own stream waits for them in the hook before a block,
and so must the stream on which `fully_shard` packs the rows for the other ranks: it runs ahead of the forward's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from twinflow.dist.group import backend_for, new_group
from twinflow.offload.blocks import find_blocks
from twinflow.zero.shared import Zero


def partition(model: nn.Module, zero: Zero) -> None:
    """Let every rank keep its rows of all parameters, from the first rank's values; in place."""
    device = next(model.parameters()).device
    group = new_group(backend_for(device))
    with torch.no_grad():
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            group.broadcast(tensor)
    dist.destroy_process_group(group.handle)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(model, zero, device))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": OffloadPolicy()}
    for block in find_blocks(model):
        fully_shard(block.module, **options)
    fully_shard(model, **options)


def _reduce_dtype(model: nn.Module, zero: Zero, device: torch.device) -> torch.dtype | None:
    """gloo would sum half precision in half precision."""
    is_half = any(param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())
    return zero.dtype or (torch.float32 if is_half and backend_for(device) == "gloo" else None)


def gathering_streams(model: nn.Module) -> list[torch.cuda.Stream]:
    """The streams that read a rank's rows before a block runs; none until the first forward has begun."""
    if not isinstance(model, FSDPModule):
        return []
    context: Any = model._get_fsdp_state()._comm_ctx  # torch has no public name for it
    streams = [getattr(context, name, None) for name in ("all_gather_copy_in_stream", "all_gather_stream")]
    return [stream for stream in streams if isinstance(stream, torch.cuda.Stream)]
