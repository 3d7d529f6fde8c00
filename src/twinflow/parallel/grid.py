"""This rank's place on the axes pipe, data and model, and the groups of ranks that it shares them with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from twinflow.dist.group import TIMEOUT, Group, alone, backend_for, new_group
from twinflow.parallel.topology import DATA, MODEL, PIPE, PipeModelDataParallelTopology, check_product


@dataclass(frozen=True)
class Grid:
    """All ranks that train together; `model` is the group that this rank's tensors are shared with."""

    topology: PipeModelDataParallelTopology
    rank: int
    model: Group
    everyone: Group  # on the host, for few words

    @property
    def pipe(self) -> int:
        """Which of the pipeline's ranks this is."""
        return self.topology.get_coord(self.rank).pipe

    @property
    def data(self) -> int:
        """Which replica of the model this rank is in."""
        return self.topology.get_coord(self.rank).data

    @property
    def num_pipe(self) -> int:
        """Ranks of a pipeline."""
        return self.topology.get_dim(PIPE)

    @property
    def num_data(self) -> int:
        """Replicas of the model."""
        return self.topology.get_dim(DATA)

    @property
    def num_model(self) -> int:
        """Ranks that share each tensor."""
        return self.topology.get_dim(MODEL)

    def ranks_along(self, axis: str) -> list[int]:
        """Ranks that differ from this one on an axis alone, in its order; this one too."""
        here = self.topology.get_coord(self.rank).to_dict()
        del here[axis]
        return self.topology.filter_match(**here)

    @property
    def replica_ranks(self) -> list[int]:
        """Ranks that together have one copy of the model."""
        return self.topology.filter_match(data=self.data)


def make_grid(num_pipe: int, num_model: int, num_data: int, device: torch.device, timeout: timedelta = TIMEOUT) -> Grid:
    """The grid over all ranks of torch.distributed's world; every rank has to ask for it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    check_product(num_pipe, num_model, num_data, world)
    topology = PipeModelDataParallelTopology(num_pipe, num_model, num_data)
    grid = Grid(topology, rank, alone(), new_group("gloo", timeout=timeout))
    if num_model == 1:
        return grid
    return replace(grid, model=new_group(backend_for(device), grid.ranks_along(MODEL), timeout))
