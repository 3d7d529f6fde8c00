# SPDX-License-Identifier: Apache-2.0
"""Preparation of ranks before training: a watch for failures, a comparison of configs, and a share of the machine."""

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
    """Starts a watch that detects ranks that fail or hang. None for one process, or if the store cannot be cloned."""
    if ranks.world_size == 1:
        return None
    store = group_store()
    if not hasattr(store, "clone"):  # some stores of torch 2.8 cannot open a second connection
        LOGGER.warning(
            "Failures of other ranks are not detected, because the key-value store of this process group cannot open a "
            "second connection. If a rank fails, the other ranks may wait for it forever. Use a torch "
            "version later than 2.8."
        )
        return None
    return Watch(store, ranks.rank, ranks.world_size, hang_timeout_s)


def meet(ranks: RankEnvironment, module: nn.Module, config: str, grid: Grid | None = None) -> None:
    """Compares versions, config and parameters of all ranks, and binds each rank to its share of its machine.

    With pipeline or tensor ranks, parameters are compared only between ranks with the same part of the model. Raises
    ValueError if ranks differ.
    """
    if ranks.world_size == 1:
        return
    facts = {"twinflow": __version__, "torch": torch.__version__, "config": config}
    own = {"parameters": param_lines(module.named_parameters())}
    own["frozen parameters"] = "\n".join(name for name, p in module.named_parameters() if not p.requires_grad)
    if grid is None:
        check_same(group_store(), ranks.rank, ranks.world_size, {**facts, **own})
    else:
        check_same(group_store(), ranks.rank, ranks.world_size, facts)
        along = grid.ranks_along(DATA)
        store = PrefixStore(f"twinflow/replicas/{along[0]}", group_store())
        if len(along) > 1:
            check_same(store, along.index(grid.rank), len(along), own)
    # All ranks have met: it is known now whether their variables describe them.
    share_machine(joined(), next((p.device for p in module.parameters()), torch.device("cpu")))


def share_machine(ranks: RankEnvironment, device: torch.device) -> None:
    """Binds this rank to its share of the CPUs, near its GPU if possible, and sets the number of threads for them."""
    group = new_group("gloo")
    nodes = _local_nodes(group, ranks, device)
    share = share_host(ranks.local_rank, ranks.local_world_size, nodes)
    native.set_threads(share.num_threads)
    LOGGER.debug(f"rank {ranks.rank}: {share.note}")
    dist.destroy_process_group(group.handle)


def _local_nodes(group: Group, ranks: RankEnvironment, device: torch.device) -> list[int | None]:
    """The NUMA node of each local rank's GPU, None if not known. The list is empty if another machine has this name."""
    said = gather_json(group, {"host": socket.gethostname(), "local_rank": ranks.local_rank, "node": _node_of(device)})
    here = {one["local_rank"]: one["node"] for one in said if one["host"] == socket.gethostname()}
    if sorted(here) != list(range(ranks.local_world_size)):  # several machines have the same name
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
    """This rank's share of the host's free memory; 0 if it is not known."""
    return share_of_memory(free_host_bytes(), joined(os.environ).local_world_size)
