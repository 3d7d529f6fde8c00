# SPDX-License-Identifier: Apache-2.0
"""Ranks on axes and axes on machines: the arithmetic of grids, the published figures, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from twinflow.parallel.costs import link_of
from twinflow.parallel.layout import Layout
from twinflow.parallel.topology import (
    DATA,
    MODEL,
    PIPE,
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    map_ranks,
)
from twinflow.planner.machines import GB, GPUS, Host, Machine, link_rate
from twinflow.planner.scaling import Cluster


def test_the_last_axis_is_fastest() -> None:
    topology = ProcessTopology(axes=["row", "column"], dims=[2, 3])
    assert topology.world_size() == 6
    assert [topology.get_rank(row=r, column=c) for r, c in product(range(2), range(3))] == list(range(6))
    assert topology.get_axis_list("row", 1) == [3, 4, 5]
    assert topology.get_axis_list("column", 0) == [0, 3]
    assert topology.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("column") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("nowhere") == []
    assert (topology.get_dim("column"), topology.get_dim("nowhere")) == (3, 0)


def test_places_and_ranks_are_inverse() -> None:
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=4)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    for rank in range(24):
        coord = topology.get_coord(rank)
        assert topology.get_rank(**coord._asdict()) == rank
        assert tuple(coord) == (coord.pipe, coord.data, coord.model)
    assert topology.get_coord(13) == topology.get_coord(topology.get_rank(pipe=1, data=2, model=1))


def test_filters_and_names_of_files() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.filter_match(model=1) == [1, 3, 5, 7]
    assert topology.filter_match() == list(range(8))
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"], inner_sep="", outer_sep=".") == "pipe01.model01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_the_groups_of_an_axis_hold_every_rank_once() -> None:
    topology = PipeModelDataParallelTopology(4, 2, 3)
    for axis, size in (("pipe", 4), ("model", 2), ("data", 3)):
        groups = topology.get_axis_comm_lists(axis)
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(24))


def test_figures_1_and_2_four_by_four_by_two_on_eight_machines_of_four() -> None:
    """32 workers: four stages, four tensor ranks, two replicas; each machine is one tensor group of one replica."""
    mapped = map_ranks(num_pp=4, num_mp=4, num_dp=2, per_node=4, world=32)
    for place in mapped.places:
        assert place.node == 2 * place.pipe + place.data
        assert place.local_rank == place.model
    assert {place.node for place in mapped.places} == set(range(8))
    assert [group.ranks for group in mapped.groups[MODEL][:2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [group.nodes for group in mapped.groups[DATA][:4]] == [(0, 1)] * 4
    assert mapped.groups[PIPE][0].nodes == (0, 2, 4, 6)
    crossing = {axis: sum(len(group.nodes) > 1 for group in groups) for axis, groups in mapped.groups.items()}
    assert crossing[MODEL] == 0
    assert (crossing[DATA], len(mapped.groups[DATA])) == (16, 16)
    assert (crossing[PIPE], len(mapped.groups[PIPE])) == (8, 8)


def test_data_groups_stay_inside_a_machine_where_they_fit() -> None:
    mapped = map_ranks(num_pp=4, num_mp=2, num_dp=2, per_node=4)
    assert [mapped.crosses(axis) for axis in (MODEL, DATA, PIPE)] == [False, False, True]
    assert [place.node for place in mapped.places] == [place.pipe for place in mapped.places]


@pytest.mark.parametrize("sizes", list(product((1, 2, 4, 8), (1, 2, 3, 8, 16), (1, 2, 4))))
@pytest.mark.parametrize("per_node", [4, 8])
def test_the_formula_of_links_is_the_map_of_ranks(sizes: tuple[int, int, int], per_node: int) -> None:
    pp, tp, dp = sizes
    machine = Machine(GPUS["a100-40"], Host(1000 * GB, 64, 300e9), per_node)
    cluster = Cluster(machine, 100e9)
    mapped = map_ranks(pp, tp, dp, per_node)
    for axis in (MODEL, DATA, PIPE):
        link = link_of(cluster, Layout(pp, tp, dp, 8), axis)
        assert link.crosses == mapped.crosses(axis), axis
        assert link.rate == link_rate(machine) if not link.crosses else link.rate <= 100e9


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        (
            (4, 4, 2),
            64,
            ["pipe x model x data = 4 x 4 x 2 is 32", "must be 64, the number of ranks", "Set the data axis to 4"],
        ),
        ((3, 4, 2), 32, ["whose product divides 32"]),
        ((0, 4, 2), 32, ["The number of pipeline stages is 0"]),
    ],
)
def test_products_that_are_not_the_world(sizes: tuple[int, int, int], world: int, words: list[str]) -> None:
    with pytest.raises(ValueError, match="is") as raised:
        map_ranks(*sizes, per_node=4, world=world)
    for word in words:
        assert word in str(raised.value)


def test_mistakes_are_named() -> None:
    topology = PipeModelDataParallelTopology(2, 2, 2)
    for call, word in (
        (lambda: topology.get_rank(pipe=0), "filter_match"),
        (lambda: topology.get_rank(pipe=0, data=0, model=2), "model is 2, but must be a number from 0 to 1"),
        (lambda: topology.filter_match(expert=0), "axis is 'expert'"),
        (lambda: topology.get_coord(8), "rank is 8"),
        (lambda: ProcessTopology(["a", "a"], [1, 2]), "different names"),
        (lambda: ProcessTopology(["a"], [0]), "size of the axis 'a' is 0"),
        (lambda: map_ranks(1, 1, 1, per_node=0), "The number of GPUs in a machine is 0"),
    ):
        with pytest.raises(ValueError, match=r" is .*, but must be ") as raised:
            call()
        assert word in str(raised.value)
    with pytest.raises(AttributeError):
        _ = topology.get_coord(0).expert
