# SPDX-License-Identifier: Apache-2.0
"""Position of this rank on the axes pipe, data and model, and the process groups along them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from twinflow.dist.group import TIMEOUT, Group, alone, backend_for, new_group
from twinflow.parallel.topology import MODEL, PipeModelDataParallelTopology, check_product


@dataclass(frozen=True)
class Grid:
    """All ranks of a training run, and the position of this rank."""

    topology: PipeModelDataParallelTopology
    rank: int
    pipe: int  # position of this rank in the pipeline
    data: int  # number of the model replica that this rank belongs to
    num_pipe: int
    num_data: int  # number of model replicas
    num_model: int
    model: Group  # the tensor ranks with the other parts of this rank's layers
    everyone: Group  # all ranks; on the host, for small messages
    replica: Group  # the ranks that together have this replica of the model; on the host, for small messages

    def ranks_along(self, axis: str) -> list[int]:
        """The ranks that differ from this one only on the given axis, in order. Includes this rank."""
        here = self.topology.get_coord(self.rank)._asdict()
        del here[axis]
        return self.topology.filter_match(**here)

    @property
    def replica_ranks(self) -> list[int]:
        """The ranks that together have one replica of the model."""
        return self.topology.filter_match(data=self.data)


def make_grid(num_pipe: int, num_model: int, num_data: int, device: torch.device, timeout: timedelta = TIMEOUT) -> Grid:
    """Make the grid over all ranks of torch.distributed. A collective call: every rank has to make it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    check_product(num_pipe, num_model, num_data, world)
    topology = PipeModelDataParallelTopology(num_pipe, num_model, num_data)
    coord, everyone = topology.get_coord(rank), new_group("gloo", timeout=timeout)
    replica = new_group("gloo", topology.filter_match(data=coord.data), timeout)
    grid = Grid(topology, rank, coord.pipe, coord.data, num_pipe, num_data, num_model, alone(), everyone, replica)
    if num_model == 1:
        return grid
    return replace(grid, model=new_group(backend_for(device), grid.ranks_along(MODEL), timeout))
