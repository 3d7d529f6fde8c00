# SPDX-License-Identifier: Apache-2.0
"""1-bit optimizers in one process, and what users do to their parameters."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor, nn

from twinflow.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from twinflow.zero.compression import floor_of, raised, second_correction


def step(optimizer: torch.optim.Optimizer, *params: nn.Parameter, grad: float = 1.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.step()


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam, OneBitLamb])
def test_a_process_alone_trains(kind: type[OneBitAdam]) -> None:
    param = nn.Parameter(torch.linspace(-1.0, 1.0, 300))
    optimizer = kind([param], lr=1e-2)
    for _ in range(5):
        step(optimizer, param)
    assert (param < torch.linspace(-1.0, 1.0, 300)).all()
    assert optimizer.sent_bytes == 0


def test_weights_in_other_memory_are_taken_over() -> None:
    """As `model.to()` or `load_state_dict(assign=True)` leave them."""
    param = nn.Parameter(torch.zeros(10))
    optimizer = OneBitAdam([param], lr=1e-2)
    step(optimizer, param)
    param.data = torch.full((10,), 5.0)
    step(optimizer, param)
    torch.testing.assert_close(param.detach(), torch.full((10,), 4.99))


def test_weights_written_into_half_precision_are_taken_over() -> None:
    param = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    optimizer = OneBitAdam([param], lr=1e-4)
    step(optimizer, param)
    master: Tensor = optimizer._buckets[0].weights
    before = master[0].item()
    with torch.no_grad():
        param[5:] = 3.0
    step(optimizer, param)
    torch.testing.assert_close(master[0].item(), before - 1e-4)  # untouched: its lower bits are still there
    torch.testing.assert_close(master[5].item(), 3.0 - 1e-4)


@pytest.mark.parametrize("code", ["1bit", "int8"])
def test_a_rare_gradient_does_not_move_an_element_without_bound(code: str) -> None:
    """Adam's second moment would grow with it; one that is frozen as small as it was would not."""
    param = nn.Parameter(torch.zeros(512))
    optimizer = OneBitAdam([param], lr=1e-2, freeze_step=30, code=code)
    grad = torch.full((512,), 1.0)
    grad[7] = 1e-5
    for _ in range(30):
        param.grad = grad.clone()
        optimizer.step()
    assert optimizer.is_compressed
    before = param.detach().clone()
    param.grad = torch.ones(512)
    optimizer.step()
    moved = (param.detach() - before).abs()
    assert 0.0 < float(moved.max()) < 0.1


def test_second_moments_are_raised_to_a_power_of_two_below_a_tenth_of_their_mean() -> None:
    assert floor_of(3 * 10.0, 3) == 1.0
    assert floor_of(3 * 19.9, 3) == 1.0
    assert floor_of(3 * 20.0, 3) == 2.0
    assert floor_of(2.0**-90 * 10.0, 1) == 2.0**-90
    for total, count in ((0.0, 0), (0.0, 5), (math.nan, 5), (math.inf, 5)):
        assert floor_of(total, count) == 0.0
    found = raised(torch.tensor([0.0, 1e-9, 0.5, 4.0]), 0.25)
    assert found.tolist() == [0.0, 0.25, 0.5, 4.0]


def test_a_long_sum_of_squares_is_exact() -> None:
    """In one sweep of fp32, torch is off by a thousandth there."""
    param = nn.Parameter(torch.zeros(1 << 24))
    optimizer = OneBitAdam([param], lr=1e-4)
    param.grad = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(float(param.grad.double().norm()), rel=1e-6)


def test_a_parameter_that_comes_too_late_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    first, late = nn.Parameter(torch.zeros(200)), nn.Parameter(torch.zeros(200))
    optimizer = OneBitAdam([first, late], lr=1e-2, freeze_step=2)
    for _ in range(3):
        step(optimizer, first)
    with caplog.at_level(logging.WARNING, "twinflow"):
        step(optimizer, first, late)
        step(optimizer, first, late)
    assert caplog.text.count("does not update 1 parameters, because their first gradient came after") == 1
    assert not late.any()


def test_error_feedback_without_bias_correction() -> None:
    """The weight changes that ranks send become momenta with the step size of the update."""
    options = {"betas": (0.9, 0.95)}
    corrected = math.sqrt(1.0 - 0.95**3)
    assert second_correction(options, 3) == second_correction({**options, "bias_correction": True}, 3) == corrected
    assert second_correction({**options, "bias_correction": False}, 3) == 1.0
