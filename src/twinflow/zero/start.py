"""What ranks do before they train together: watch each other, compare notes, and share the machines they are on."""

from __future__ import annotations

import logging
import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from twinflow import native
from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, new_group
from twinflow.launch.environment import RankEnvironment, joined
from twinflow.launch.same import check_same, param_lines
from twinflow.launch.store import group_store
from twinflow.launch.watch import Watch
from twinflow.native.cgroup import free_host_bytes
from twinflow.native.shares import gpu_node_of, share_host, share_of_memory
from twinflow.parallel.grid import Grid
from twinflow.parallel.topology import DATA
from twinflow.version import __version__

LOGGER = logging.getLogger("twinflow")


def start_watch(ranks: RankEnvironment, hang_timeout_s: float) -> Watch | None:
    """A watch over all ranks; none over a process that is alone, which may well sit idle."""
    if ranks.world_size == 1:
        return None
    store = group_store()
    if not hasattr(store, "clone"):  # torch 2.8 has stores that have no connection to spare
        LOGGER.warning("this process group's store cannot be watched: a rank that fails may leave others waiting")
        return None
    return Watch(store, ranks.rank, ranks.world_size, hang_timeout_s)


def meet(ranks: RankEnvironment, module: nn.Module, config: str, grid: Grid | None = None) -> None:
    """Refuse ranks that differ, and bind each to its part of its machine. On a grid, parameters are compared with those
    of the same part of the model."""
    if ranks.world_size == 1:
        return
    facts = {"twinflow": __version__, "torch": torch.__version__, "config": config}
    own = {"parameters": param_lines(module.named_parameters())}
    own["frozen parameters"] = "\n".join(name for name, p in module.named_parameters() if not p.requires_grad)
    if grid is None:
        check_same(group_store(), ranks.rank, ranks.world_size, {**facts, **own})
    else:
        check_same(group_store(), ranks.rank, ranks.world_size, facts)
        _check_replicas(grid, own)
    share_machine(ranks, next((p.device for p in module.parameters()), torch.device("cpu")))


def _check_replicas(grid: Grid, facts: dict[str, str]) -> None:
    """The ranks of the data axis have the same part of the model, and so the same parameters."""
    along = grid.ranks_along(DATA)
    store = PrefixStore(f"twinflow/replicas/{along[0]}", group_store())
    if len(along) > 1:
        check_same(store, along.index(grid.rank), len(along), facts)


def share_machine(ranks: RankEnvironment, device: torch.device) -> None:
    """Bind this rank to its part of the CPUs, near its GPU where that can be, and size the pool of threads to it."""
    group = new_group("gloo")
    nodes = _local_nodes(group, ranks, device)
    share = share_host(ranks.local_rank, ranks.local_world_size, nodes)
    native.set_threads(share.num_threads)
    LOGGER.debug(f"rank {ranks.rank}: {share.note}")
    dist.destroy_process_group(group.handle)


def _local_nodes(group: Group, ranks: RankEnvironment, device: torch.device) -> list[int | None]:
    """NUMA nodes of the GPUs of this machine's ranks, in their order; nothing where that cannot be told for all."""
    said = gather_json(group, {"host": socket.gethostname(), "local_rank": ranks.local_rank, "node": _node_of(device)})
    here = {one["local_rank"]: one["node"] for one in said if one["host"] == socket.gethostname()}
    if sorted(here) != list(range(ranks.local_world_size)):  # machines of one name
        return []
    return [here[rank] for rank in range(ranks.local_world_size)]


def _node_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    found: object = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(found, name) for name in names):
        return None
    domain, bus, number = (getattr(found, name) for name in names)
    return gpu_node_of(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def own_host_bytes() -> int:
    """What the host has available for this rank; 0 where nothing is known."""
    return share_of_memory(free_host_bytes(), joined(os.environ).local_world_size)
