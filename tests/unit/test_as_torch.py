# SPDX-License-Identifier: Apache-2.0
"""Every training loop that torch allows gives torch's result with twinflow, or a named error.

`make test` runs one or two combinations of each case, `make test-all` the whole matrix. as_torch_report.py prints all
outcomes and the list of refusals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from as_torch_cases import CASES, LIMITS, REFUSALS, is_allowed, is_limit
from as_torch_support import (
    COMBINATIONS,
    Case,
    Combination,
    Outcome,
    attempt,
    axes,
    chosen,
    difference,
    largest_gap,
    reference,
)
from twin_support import quick_torch

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
QUICK = chosen(CASES)
every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{case.name}" for case in CASES])


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def explain(combination: Combination, outcome: Outcome) -> str:
    return f"{combination}: {outcome.verdict}: {outcome.detail}"


@pytest.mark.parametrize(
    ("case", "combination"), QUICK, ids=[f"{case.kind}-{case.name}-{cell}" for case, cell in QUICK]
)
def test_it_is_as_with_torch(case: Case, combination: Combination) -> None:
    if is_limit(case, combination):
        pytest.skip("a limit that docs/as-torch.md names")
    outcome = attempt(case, combination)
    assert is_allowed(case, combination, outcome), explain(combination, outcome)


@pytest.mark.matrix
@every_case
def test_it_is_as_with_torch_in_every_combination(case: Case) -> None:
    cells = [combination for combination in case.combinations if not is_limit(case, combination)]
    outcomes = [(combination, attempt(case, combination)) for combination in cells]
    failures = [explain(*pair) for pair in outcomes if not is_allowed(case, *pair)]
    assert not failures, "\n".join(failures)


# What makes the tests above mean something.


def test_the_subset_has_every_pair_of_values() -> None:
    wanted = set(itertools.chain.from_iterable(itertools.combinations(axes(cell), 2) for cell in COMBINATIONS))
    found = set(itertools.chain.from_iterable(itertools.combinations(axes(cell), 2) for _, cell in QUICK))
    assert found == wanted
    for case in CASES:
        apis = {cell.api for other, cell in QUICK if other is case}
        assert len(apis) == min(len(case.apis), case.num_quick)


def test_names_are_unique_and_refusals_have_a_case() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(REFUSALS) | set(LIMITS) <= set(names)


def test_a_difference_shows() -> None:
    a = {"x": [torch.tensor([1.0, 2.0])]}
    assert difference(a, {"x": [torch.tensor([1.0, 2.0 + 1e-7])]}, 1e-6) == ""
    assert "differs by" in difference(a, {"x": [torch.tensor([1.0, 2.00001])]}, 1e-6)
    assert "differs by nan" in difference(a, {"x": [torch.tensor([1.0, torch.nan])]}, 1e-6)
    assert "shape" in difference(a, {"x": [torch.tensor([1.0])]}, 1e-6)
    assert "values instead of" in difference(a, {"x": []}, 1e-6)
    assert "only once" in difference(a, {}, 1e-6)


@pytest.mark.matrix
@every_case
def test_the_case_would_notice(case: Case) -> None:
    """In torch alone: the case gives the same twice, and what it is about changes what it records."""
    cells = [cell for cell in case.combinations if cell.early and cell.ratio == 0.5]
    for combination in (cell for cell in cells if cell.clips == (cell.api == "twin")):
        full = reference(case, combination)
        assert difference(full, reference(case, combination), 0.0) == ""
        assert all(bool(torch.isfinite(value).all()) for values in full.values() for value in values)
        if case.kind == "read":
            assert share_of_changes(full) >= 0.95
        elif not case.is_neutral:
            without = reference(case, combination, acts=False)
            gaps = [
                largest_gap(a, b)
                for name in full.keys() & without.keys()
                for a, b in zip(full[name], without[name], strict=False)
                if a.shape == b.shape
            ]
            assert max(gaps) > max(1e-4, 5 * case.tolerance)


def share_of_changes(records: dict[str, list[torch.Tensor]]) -> float:
    """Of the values that were recorded again after a step: how many have changed by more than the tolerance."""
    changes = [
        largest_gap(before, after) > 2e-5
        for name, values in records.items()
        if name != "loss"
        for before, after in itertools.pairwise(values)
    ]
    return sum(changes) / len(changes) if changes else 1.0
