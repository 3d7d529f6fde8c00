# SPDX-License-Identifier: Apache-2.0
"""Layers to stages: against brute force over all partitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinflow.parallel.partition import LayerFacts, bounds, partition_balanced, partition_uniform


def all_partitions(num: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num) for inner in combinations(range(1, num), parts - 1)]


def part_sums(weights: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [sum(weights[start:stop]) for start, stop in pairwise(cuts)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    weights = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


@given(problems())
def test_balanced_is_the_best_of_all(problem: tuple[list[int], int]) -> None:
    weights, parts = problem
    found = partition_balanced(weights, parts)
    assert found in all_partitions(len(weights), parts)  # contiguous, none empty, all layers
    largest = {cuts: max(part_sums(weights, cuts)) for cuts in all_partitions(len(weights), parts)}
    assert largest[found] == min(largest.values())
    among = [cuts for cuts in largest if largest[cuts] == min(largest.values())]
    squares = [sum(x * x for x in part_sums(weights, cuts)) for cuts in among]
    assert sum(x * x for x in part_sums(weights, found)) == min(squares)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.data())
def test_balanced_is_exact_for_floats(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = partition_balanced(weights, parts)
    assert max(part_sums(weights, found)) == min(
        max(part_sums(weights, cuts)) for cuts in all_partitions(len(weights), parts)
    )


@given(st.integers(1, 60), st.data())
def test_uniform(num: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, num))
    sizes = [stop - start for start, stop in pairwise(partition_uniform(num, parts))]
    assert sum(sizes) == num
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_large_first_layer_leaves_the_others_even() -> None:
    assert partition_balanced([10, 1, 1, 1, 1, 1, 1], 3) == (0, 1, 4, 7)


def test_many_layers_are_quick() -> None:
    assert len(partition_balanced([1.0] * 1000, 64)) == 65


FACTS = [
    LayerFacts("Embedding", 1000, 0.1),
    *[LayerFacts("TransformerBlock", 100, 1.0) for _ in range(4)],
    LayerFacts("lambda", 0, 0.0),
    LayerFacts("Linear", 1000, 3.0),
]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("uniform", (0, 3, 5, 7)),
        ("parameters", (0, 1, 5, 7)),
        ("Parameters", (0, 1, 5, 7)),
        ("type:transformer", (0, 2, 3, 7)),
        ("type:^(Embedding|Linear)$", (0, 1, 2, 7)),
        ("profile", (0, 3, 5, 7)),
    ],
)
def test_methods(method: str, expected: tuple[int, ...]) -> None:
    assert bounds(method, FACTS, 3) == expected


@pytest.mark.parametrize(
    ("method", "facts", "parts", "message"),
    [
        ("best", FACTS, 2, r"partition_method \(pipeline.partition in a config\) is 'best'"),
        ("type:Conv", FACTS, 2, "matches some of"),
        ("type:(", FACTS, 2, "a valid regular expression"),
        ("profile", [LayerFacts("A", 1)], 1, "times of all 1 layers"),
        ("uniform", FACTS, 8, "at most 7, the number of layers"),
        ("parameters", FACTS, 8, "at most 7"),
        ("uniform", FACTS, 0, "a whole number >= 1"),
    ],
)
def test_refusals(method: str, facts: list[LayerFacts], parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds(method, facts, parts)


def test_weights_must_be_numbers() -> None:
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite numbers >= 0"):
            partition_balanced([1.0, bad], 1)
