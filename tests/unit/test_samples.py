# SPDX-License-Identifier: Apache-2.0
"""The cases of slow tests that `make test` runs."""

from __future__ import annotations

import re
from itertools import pairwise, product
from pathlib import Path

import pytest
from samples import SAMPLES, choose

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", SAMPLES)
def test_every_sampled_test_exists(file: str) -> None:
    found = set(re.findall(r"^def (test_\w+)\(", (TESTS / file).read_text(), re.MULTILINE))
    assert not set(SAMPLES[file]) - found


def test_a_sample_has_every_value_if_it_can() -> None:
    cases = [frozenset([("a", str(a)), ("b", str(b))]) for a, b in product(range(4), range(3))]
    chosen = choose(cases, 4)
    assert len(chosen) == 4
    assert len(frozenset().union(*(cases[number] for number in chosen))) == 7
    assert choose(cases, 20) == set(range(12))
    assert choose(cases, 0) == set()


def test_a_sample_of_one_list_is_spread_over_it() -> None:
    chosen = sorted(choose([frozenset([("name", str(i))]) for i in range(30)], 10))
    assert all(b - a <= 6 for a, b in pairwise(chosen))
