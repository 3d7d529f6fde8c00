# SPDX-License-Identifier: Apache-2.0
"""When the second moment is taken for settled."""

from __future__ import annotations

import json
import math

import pytest

from twinflow.zero.compression import THRESHOLD, Compression, VarianceWatch, default_window

LEVEL = 1e-3


def first_settled(totals: list[float], rates: list[float] | None = None, window: int = 4) -> int | None:
    """The number of the step, from 1 on, at which it has settled."""
    watch = VarianceWatch(window, THRESHOLD)
    for i, total in enumerate(totals):
        if watch.see(total, rates[i] if rates else LEVEL):
            return i + 1
    return None


def test_it_takes_a_whole_window() -> None:
    for window in (1, 2, 5, 50):
        assert first_settled([3.0] * 100, window=window) == window + 1


def test_it_settles_when_the_sum_has_changed_little() -> None:
    """A sum that falls to 1: over 4 steps by less than 4% from some step on."""
    totals = [1.0 + 10.0 * 0.8**i for i in range(100)]
    wanted = next(i for i in range(4, 100) if totals[i] / totals[i - 4] >= THRESHOLD)
    assert first_settled(totals) == wanted + 1
    assert first_settled([12.0 - total for total in totals]) is not None  # one that grows too


@pytest.mark.parametrize("growth", [1.02, 0.98])
def test_a_sum_that_goes_on_changing_never_settles(growth: float) -> None:
    assert first_settled([growth**i for i in range(200)]) is None


@pytest.mark.parametrize("total", [0.0, math.nan, math.inf])
def test_nothing_settles_without_a_sum(total: float) -> None:
    assert first_settled([total] * 50) is None


def test_not_while_the_learning_rate_rises() -> None:
    num_rising = 20
    rates = [LEVEL * min(1.0, (i + 1) / num_rising) for i in range(100)]
    found = first_settled([3.0] * 100, rates)
    assert found is not None
    assert found > num_rising
    assert first_settled([3.0] * 100, [LEVEL * (i + 1) for i in range(100)]) is None


def test_a_learning_rate_that_falls_does_not_matter() -> None:
    assert first_settled([3.0] * 100, [LEVEL / (i + 1) for i in range(100)]) == 5


def test_it_goes_on_from_where_it_was() -> None:
    totals = [1.0 + 10.0 * 0.8**i for i in range(100)]
    whole = first_settled(totals)
    assert whole is not None
    for stop in range(whole):
        watch, again = VarianceWatch(4, THRESHOLD), VarianceWatch(4, THRESHOLD)
        assert not any(watch.see(total, LEVEL) for total in totals[:stop])
        again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
        found = next(i for i in range(stop, 100) if again.see(totals[i], LEVEL))
        assert found + 1 == whole


def test_a_shorter_window_forgets_what_is_older() -> None:
    """Loaded from one of 50 steps: only the last 4 count."""
    watch, again = VarianceWatch(50, THRESHOLD), VarianceWatch(4, THRESHOLD)
    for total in [100.0] * 30 + [1.0] * 20:
        watch.see(total, LEVEL)
    again.load_state_dict(watch.state_dict())
    assert again.see(1.0, LEVEL)


@pytest.mark.parametrize(("b2", "window"), [(0.999, 1000), (0.99, 100), (0.95, 20), (0.0, 2), (0.99999, 1000)])
def test_the_window_is_what_an_average_remembers(b2: float, window: int) -> None:
    assert default_window(b2) == window


@pytest.mark.parametrize(("window", "threshold"), [(0, 0.96), (-3, 0.96), (4, 0.0), (4, 1.0), (4, math.nan)])
def test_bad_numbers_are_refused(window: int, threshold: float) -> None:
    with pytest.raises(ValueError, match="freeze_"):
        Compression(freeze_threshold=threshold, freeze_window=window)
