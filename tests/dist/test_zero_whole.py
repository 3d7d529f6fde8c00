"""Whole weights under ZeRO-3 on several ranks: as in one process, on rank 0, with every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import zero_whole_cases as cases
from dist_support import run_ranks

PLACES = ["device", "host"]


def equal(found: dict[str, list[float]], truth: dict[str, list[float]]) -> None:
    assert list(found) == list(truth)
    for name, values in truth.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    [("plain", 2, "device"), ("plain", 3, "host"), ("gpt2", 3, "device"), ("gpt2", 2, "host"), ("bert", 2, "device")],
)
def test_rank_0_gets_the_weights_of_one_process(kind: str, world: int, place: str) -> None:
    truth: Any = run_ranks(1, cases.weights, kind, 0, "device")[0]
    first, *others = run_ranks(world, cases.weights, kind, 3, place)
    for key in ("before", "after", "last"):
        equal(first[key], truth[key])
    assert first["num"] == truth["num"]
    assert first["again"] == 1
    assert all(other["after"] == {} and other["again"] == 0 for other in others)
