"""Stage 3: weights are partitioned too. torch's `fully_shard` keeps every rank's rows of each parameter, gathers a
block before it runs and scatters the sums of its gradients; our runtime works on the rows that this rank has.

Weights go back into those rows on a stream of ours. The forward's own stream waits for them in the hook before a block,
and so must the stream on which `fully_shard` packs the rows for the other ranks: it runs ahead of the forward's.

A tied weight must be in one gathering alone, or it would become several weights. So a block that shares one with
another part of the model is gathered with the root, and its weights are waited for there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from twinflow.dist.group import backend_for, new_group
from twinflow.errors import invalid_value
from twinflow.offload.blocks import Block, find_blocks, owners
from twinflow.offload.plan import ROOT
from twinflow.parallel.shard import keep_marks
from twinflow.parallel.topology import DATA
from twinflow.state_dict import ParamEntry
from twinflow.zero.over_gloo import use_host
from twinflow.zero.shared import Zero

Replaced = dict[nn.Parameter, nn.Parameter]  # by what was there before


def partition(model: nn.Module, zero: Zero) -> Replaced:
    """Let every rank keep its rows of all parameters, from the first rank's values; in place.

    Parameters are other tensors afterwards: `regroup` finds them for groups that were made before.
    """
    _check(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    device = next(iter(before.values())).device
    ranks = None if zero.grid is None else zero.grid.ranks_along(DATA)
    group = new_group(backend_for(device), ranks)
    with torch.no_grad():
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            group.broadcast(tensor)
    mesh = DeviceMesh.from_group(group.handle, device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(model, zero, device))
    blocks = find_blocks(model)
    owner = owners(model, blocks)
    for block in blocks:
        if not any(owner.get(param) == ROOT for param in block.module.parameters()):
            fully_shard(block.module, mesh=mesh, mp_policy=policy, offload_policy=OffloadPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=OffloadPolicy())
    if backend_for(device) == "gloo":
        use_host([module for module in model.modules() if isinstance(module, FSDPModule)], device)
    replaced = {before[name]: param for name, param in model.named_parameters(remove_duplicate=False)}
    for old, new in replaced.items():
        keep_marks(old, new)
    return replaced


def _check(model: nn.Module) -> None:
    """Refuse what `fully_shard` cannot take, before anything has changed."""
    if next(model.parameters(), None) is None:
        raise ValueError("there is no parameter to train: none requires a gradient")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            remedy = "Give the model as it was before fully_shard(): stage 3 calls it."
            raise invalid_value(f"{name}: this rank has", "rows of it (DTensor)", "all of it", remedy)
        if not param.dim():
            remedy = "Make it a tensor with one element, torch.ones(1), or use stage 2."
            raise invalid_value(f"{name} dimensions with zero_optimization.stage 3", 0, "1 or more", remedy)


def regroup(groups: Iterable[ParamEntry], replaced: Replaced) -> list[ParamEntry]:
    """Parameters, names with them, or groups of them, as they are after `partition`."""

    def now(item: ParamEntry) -> ParamEntry:
        if isinstance(item, Mapping):
            params = item["params"]
            assert isinstance(params, Iterable)
            return {**item, "params": regroup([params] if isinstance(params, Tensor) else params, replaced)}
        if isinstance(item, tuple):
            name, tensor = item
            return name, _replacement(tensor, replaced)
        return _replacement(item, replaced)

    return [now(item) for item in groups]


def _replacement(tensor: Tensor, replaced: Replaced) -> Tensor:
    return replaced.get(tensor, tensor) if isinstance(tensor, nn.Parameter) else tensor


def gathered_blocks(model: nn.Module) -> list[Block]:
    """The blocks that wait for their own weights. Where `fully_shard` gathers them, those that are gathered one by one:
    all others are gathered with something around them, which would come before their wait."""
    blocks = find_blocks(model)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return blocks
    gathered = [block for block in blocks if isinstance(block.module, FSDPModule)]
    return [Block(i, block.name, block.module) for i, block in enumerate(gathered)]


def _reduce_dtype(model: nn.Module, zero: Zero, device: torch.device) -> torch.dtype | None:
    """gloo would sum half precision in half precision."""
    is_half = any(param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())
    return zero.dtype or (torch.float32 if is_half and backend_for(device) == "gloo" else None)


def forget_gathered(model: nn.Module | None) -> None:
    """What lies outside all blocks stays gathered until a backward. Where none came, as after an evaluation, the next
    forward would not see what has been written into the rows since."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gathering_streams(model: nn.Module | None) -> list[torch.cuda.Stream]:
    """The streams that read a rank's rows before a block runs; none until the first forward has begun."""
    if not isinstance(model, FSDPModule):
        return []
    context: object = model._get_fsdp_state()._comm_ctx  # torch has no public name for it
    streams = [getattr(context, name, None) for name in ("all_gather_copy_in_stream", "all_gather_stream")]
    return [stream for stream in streams if isinstance(stream, torch.cuda.Stream)]
