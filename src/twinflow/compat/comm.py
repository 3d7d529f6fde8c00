"""`deepspeed.comm`: torch.distributed, with answers for a process without a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from twinflow.launch.environment import joined


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """The rank of this process in a group. 0 without a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of processes in a group. 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """The rank of this process on its machine."""
    return joined().local_rank


def get_world_group() -> Any:
    """The group of all processes."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a rank of a group."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank
