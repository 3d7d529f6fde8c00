"""Position of this rank on the axes pipe, data and model, and the process groups along them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from twinflow.dist.group import TIMEOUT, Group, alone, backend_for, new_group
from twinflow.parallel.topology import DATA, MODEL, PIPE, PipeModelDataParallelTopology, check_product


@dataclass(frozen=True)
class Grid:
    """All ranks of a training run. `model`: the group of tensor ranks that this rank belongs to."""

    topology: PipeModelDataParallelTopology
    rank: int
    model: Group
    everyone: Group  # all ranks; on the host, for small messages

    @property
    def pipe(self) -> int:
        """Position of this rank in the pipeline."""
        return int(self.topology.get_coord(self.rank).pipe)

    @property
    def data(self) -> int:
        """Number of the model replica that this rank belongs to."""
        return int(self.topology.get_coord(self.rank).data)

    @property
    def num_pipe(self) -> int:
        return self.topology.get_dim(PIPE)

    @property
    def num_data(self) -> int:
        """Number of model replicas."""
        return self.topology.get_dim(DATA)

    @property
    def num_model(self) -> int:
        return self.topology.get_dim(MODEL)

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
    grid = Grid(topology, rank, alone(), new_group("gloo", timeout=timeout))
    if num_model == 1:
        return grid
    return replace(grid, model=new_group(backend_for(device), grid.ranks_along(MODEL), timeout))
