# SPDX-License-Identifier: Apache-2.0
"""TWINFLOW_CHECK_COLLECTIVES: calls in different orders and from two threads fail with an error instead of a hang."""

from __future__ import annotations

from typing import Any

import pytest
from dist_support import run_ranks
from group_cases import (
    broadcast_one_element,
    call_from_two_threads,
    call_in_different_orders,
    collectives_of_one_rank,
    train_checked,
)
from zero_cases import config_of, train_all


def test_another_order_is_an_error() -> None:
    errors = run_ranks(2, call_in_different_orders)
    told = [error for error in errors if "another rank called" in error]
    assert len(told) == 1
    assert "all_gather of 4 x float32" in told[0]
    assert "all_reduce of 4 x float32" in told[0]


def test_two_threads_are_an_error() -> None:
    errors = run_ranks(2, call_from_two_threads)
    assert "another thread is using the same group" in errors[0]
    assert errors[1] == ""


def test_one_rank_gets_the_same_results_from_the_backend() -> None:
    assert run_ranks(1, collectives_of_one_rank, True) == run_ranks(1, collectives_of_one_rank, False)


def test_a_broadcast_takes_one_element_with_any_stride() -> None:
    assert run_ranks(2, broadcast_one_element) == [16.0, 16.0]


@pytest.mark.matrix
def test_training_keeps_the_order() -> None:
    offload: dict[str, Any] = {"ratio": 0.5}
    configs = {
        "2": config_of(2, offload, 2, 2),
        "3": config_of(3, None, 1, 2),
        "params": config_of(3, {"params": True}, 1, 2),
    }
    truth = run_ranks(2, train_all, configs, 2)
    assert run_ranks(2, train_checked, configs, 2) == truth
