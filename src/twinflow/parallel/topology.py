# SPDX-License-Identifier: Apache-2.0
"""Ranks on named axes, and their assignment to machines. This is arithmetic: no process group is made.

The last axis varies fastest, and ranks fill one machine after the other. With the axes pipe, data, model, the ranks of
a tensor group are neighbours, those of a data group come next, and stages are furthest apart. So the groups that
communicate most are the first to fit into one machine, and those that communicate least use the network.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from twinflow.errors import invalid_value

PIPE, DATA, MODEL = "pipe", "data", "model"


@cache
def _coord_class(axes: tuple[str, ...]) -> Any:
    return namedtuple("Coord", axes)  # the names are known only at run time


class ProcessTopology:
    """A grid of ranks. The last axis varies fastest. The methods have the names of DeepSpeed's class."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes):
            raise invalid_value("axes", list(axes), f"a list of different names, one for each size in {list(dims)}")
        for axis, dim in zip(axes, dims, strict=True):
            if dim < 1:
                raise invalid_value(f"The size of the axis {axis!r}", dim, "a whole number >= 1")
        self.axes = tuple(axes)
        self.dims = tuple(dims)
        coord = _coord_class(self.axes)
        self._coords = [coord(*place) for place in product(*map(range, self.dims))]  # by rank

    def world_size(self) -> int:
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """The names of the axes, the slowest first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Number of ranks along an axis. 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """The rank at a position. All axes must be given."""
        if set(coords) != set(self.axes):
            remedy = "To give only some axes, use filter_match."
            raise invalid_value("The list of given axes", sorted(coords), f"{sorted(self.axes)}, all axes", remedy)
        return self.filter_match(**coords)[0]

    def get_coord(self, rank: int) -> Any:
        """The position of a rank on every axis, as a named tuple: `coord.pipe`, or as a dict `coord._asdict()`."""
        if not 0 <= rank < self.world_size():
            raise invalid_value("rank", rank, f"a number from 0 to {self.world_size() - 1}")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ only on this axis. Empty for an unknown axis."""
        if axis not in self.axes:
            return []
        groups: dict[object, list[int]] = {}
        for rank, coord in enumerate(self._coords):
            groups.setdefault(coord._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks at one index of an axis."""
        return self.filter_match(**{axis: idx})

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks at the given indices, in order: `filter_match(pipe=0, data=1)`."""
        unknown = sorted(set(filter_kwargs) - set(self.axes))
        if unknown:
            raise invalid_value("axis", unknown[0], self.axes)
        for axis, index in filter_kwargs.items():
            if not 0 <= index < self.get_dim(axis):
                raise invalid_value(axis, index, f"a number from 0 to {self.get_dim(axis) - 1}")
        wanted = filter_kwargs.items()
        return [rank for rank, coord in enumerate(self._coords) if wanted <= coord._asdict().items()]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = (DATA, PIPE), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The position of a rank as text for file names, for example `model_00`, without `omit_axes`."""
        coord = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{a}{inner_sep}{coord[a]:02d}" for a in self.axes if a not in omit_axes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(zip(self.axes, self.dims, strict=True))})"


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism. The ranks of a stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__((PIPE, DATA), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor parallelism. Tensor ranks are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__((PIPE, DATA, MODEL), (num_pp, num_dp, num_mp))


@dataclass(frozen=True)
class RankPlace:
    """The machine, the GPU and the coordinates of a rank."""

    rank: int
    node: int
    local_rank: int
    pipe: int
    data: int
    model: int


@dataclass(frozen=True)
class Group:
    """Ranks that communicate along one axis."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]  # machines of the ranks


@dataclass(frozen=True)
class Mapped:
    places: tuple[RankPlace, ...]  # by rank
    groups: Mapping[str, tuple[Group, ...]]  # by axis

    def crosses(self, axis: str) -> bool:
        """Whether at least one group of an axis spans several machines."""
        return any(len(group.nodes) > 1 for group in self.groups[axis])


def map_ranks(num_pp: int, num_mp: int, num_dp: int, per_node: int, world: int | None = None) -> Mapped:
    """The machine and the coordinates of every rank.

    The module's docstring explains the order of ranks. `world`: the number of ranks, which must be the product of the
    three sizes.
    """
    if per_node < 1:
        raise invalid_value("The number of GPUs in a machine", per_node, "a whole number >= 1")
    check_product(num_pp, num_mp, num_dp, num_pp * num_mp * num_dp if world is None else world)
    topology = PipeModelDataParallelTopology(num_pp, num_mp, num_dp)
    places = tuple(
        RankPlace(rank, rank // per_node, rank % per_node, **topology.get_coord(rank)._asdict())
        for rank in range(topology.world_size())
    )
    groups = {
        axis: tuple(
            Group(tuple(ranks), tuple(sorted({rank // per_node for rank in ranks})))
            for ranks in topology.get_axis_comm_lists(axis)
        )
        for axis in (PIPE, DATA, MODEL)
    }
    return Mapped(places, groups)


def check_product(num_pp: int, num_mp: int, num_dp: int, world: int) -> None:
    """Raise a ValueError if the product of the sizes is not the number of ranks."""
    for name, size in (("pipeline stages", num_pp), ("tensor ranks", num_mp), ("data ranks", num_dp)):
        if size < 1:
            raise invalid_value(f"The number of {name}", size, "a whole number >= 1")
    if num_pp * num_mp * num_dp == world:
        return
    name = f"The product pipe x model x data = {num_pp} x {num_mp} x {num_dp}"
    remedy = (
        f"Set the data axis to {world // (num_pp * num_mp)}, or leave it out."
        if world % (num_pp * num_mp) == 0
        else f"Choose pipeline stages and tensor ranks whose product divides {world}."
    )
    raise invalid_value(name, num_pp * num_mp * num_dp, f"{world}, the number of ranks", remedy)
