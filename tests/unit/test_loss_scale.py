# SPDX-License-Identifier: Apache-2.0
"""The loss scale: DeepSpeed's state machine, step by step."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from twinflow.optim.loss_scale import LossScale, after_step, dynamic, from_dict, static, to_dict

# (what it is, options, overflows of the steps: x overflow, . good, the scale before each step and after the last)
TABLE: list[tuple[str, dict[str, Any], str, list[float]]] = [
    ("no hysteresis: every overflow halves", {"hysteresis": 1}, "xxx", [16, 8, 4, 2]),
    ("the first overflow is forgiven, the next are not", {"hysteresis": 2}, "xxx", [16, 16, 8, 4]),
    ("good steps do not refill the hysteresis", {"hysteresis": 2}, "x..x.x", [16, 16, 16, 16, 8, 8, 4]),
    (
        "unless it counts consecutive overflows",
        {"hysteresis": 2, "consecutive_hysteresis": True},
        "x.x.xx",
        [16, 16, 16, 16, 16, 16, 8],
    ),
    ("it grows after the window and one more", {"window": 3}, "........", [16, 16, 16, 16, 32, 32, 32, 64, 64]),
    (
        "an overflow starts the window anew",
        {"window": 2, "hysteresis": 1},
        ".x...x...",
        [16, 16, 8, 8, 8, 16, 8, 8, 8, 16],
    ),
    (
        "growing refills the hysteresis",
        {"window": 2, "hysteresis": 2},
        "xx...xx",
        [16, 16, 8, 8, 8, 16, 16, 8],
    ),
    ("a window of 1", {"window": 1}, "....", [16, 16, 32, 64, 128]),
    ("the last shrink stops at the minimum", {"hysteresis": 1, "min_scale": 6.0}, "xx", [16, 8, 6]),
    (
        "at the minimum it stays, if that is no error",
        {"hysteresis": 1, "min_scale": 8.0, "raise_at_min": False},
        "xxx",
        [16, 8, 8, 8],
    ),
]


@pytest.mark.parametrize(("options", "steps", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table(options: dict[str, Any], steps: str, expected: list[float]) -> None:
    scale = dynamic(initial_power=4, **options)
    seen = [scale.scale]
    for step in steps:
        scale = after_step(scale, step == "x")
        seen.append(scale.scale)
    assert seen == expected
    assert scale.iteration == len(steps)
    assert scale.last_overflow == steps.rfind("x")


def deepspeed_loop(
    overflows: list[bool], scale: float, window: int, hysteresis: int, least: float, refill: bool
) -> Any:
    """DeepSpeed's algorithm in plain variables: the scale after each step, and "raised" where it would stop the run."""
    left, last, scales = hysteresis, -1, []
    for now, overflow in enumerate(overflows):
        if overflow and (hysteresis == 1 or left == 1):
            if scale == least:
                return [*scales, "raised"]
            scale = max(scale / 2.0, least)
        elif overflow:
            left -= 1
        if overflow:
            last = now
        else:
            stable = now - last - 1
            if refill:
                left = hysteresis
            if stable > 0 and stable % window == 0:
                scale *= 2.0
                left = hysteresis if not refill else left
        scales.append(scale)
    return scales


@pytest.mark.parametrize("seed", range(200))
def test_it_moves_as_deepspeed_does(seed: int) -> None:
    rng = random.Random(seed)
    power, window, hysteresis = rng.randint(2, 20), rng.randint(1, 6), rng.randint(1, 4)
    least, refill, rate = rng.choice([0.25, 1.0, 3.0]), rng.random() < 0.5, rng.choice([0.05, 0.3, 0.6])
    overflows = [rng.random() < rate for _ in range(300)]
    scale, seen = dynamic(power, window, hysteresis, least, refill), []
    try:
        for overflow in overflows:
            scale = after_step(scale, overflow)
            seen.append(scale.scale)
    except FloatingPointError:
        seen.append("raised")  # type: ignore[arg-type]
    assert seen == deepspeed_loop(overflows, 2.0**power, window, hysteresis, least, refill)


def test_the_defaults_are_deepspeeds() -> None:
    scale = dynamic()
    assert (scale.scale, scale.window, scale.hysteresis, scale.min_scale) == (65536.0, 1000, 2, 1.0)
    assert not scale.consecutive_hysteresis
    assert scale.factor == 2.0
    for _ in range(1000):
        scale = after_step(scale, False)
    assert scale.scale == 65536.0
    assert after_step(scale, False).scale == 131072.0


def test_an_overflow_at_the_minimum_names_the_remedy() -> None:
    scale = after_step(dynamic(initial_power=0), True)  # uses the hysteresis up
    with pytest.raises(FloatingPointError, match=r"smallest loss scale, 1 \(step 2\).*learning rate.*bf16"):
        after_step(scale, True)
    assert after_step(scale, False).scale == 1.0  # nothing has changed


def test_a_static_scale_stays() -> None:
    scale = static(128.0)
    assert after_step(scale, True) == after_step(scale, False) == scale
    assert not scale.dynamic


def test_the_scale_stays_finite() -> None:
    scale = dataclasses.replace(dynamic(window=1), scale=1e308)
    for _ in range(5):
        scale = after_step(scale, False)
    assert scale.scale == 1e308


def test_a_checkpoint_goes_on_where_it_stopped() -> None:
    rng = random.Random(0)
    overflows = [rng.random() < 0.2 for _ in range(200)]
    scale = dynamic(window=5, hysteresis=3)
    for i, overflow in enumerate(overflows):
        scale = after_step(scale, overflow)
        assert from_dict(json.loads(json.dumps(to_dict(scale)))) == scale, i


def test_a_checkpoint_with_other_keys_is_refused() -> None:
    saved = to_dict(dynamic())
    for other in ({**saved, "more": 1}, {key: saved[key] for key in saved if key != "scale"}):
        with pytest.raises(ValueError, match=r"The saved loss scale has the keys .*, but must have the keys"):
            from_dict(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_power": -1}, "initial_power is -1"),
        ({"initial_power": 2000}, "initial_power is 2000"),
        ({"initial_power": 3.0}, "initial_power is 3.0"),
        ({"window": 0}, "window is 0, but must be a whole number >= 1"),
        ({"window": True}, "window is True"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"min_scale": 0.0}, "min_scale is 0.0"),
        ({"min_scale": float("nan")}, "min_scale is nan"),
        ({"initial_power": 2, "min_scale": 5.0}, "scale is 4.0, but must be a number >= min_scale"),
        ({"consecutive_hysteresis": "false"}, "consecutive_hysteresis is 'false'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamic(**options)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), "8"])
def test_a_bad_static_scale(value: Any) -> None:
    with pytest.raises(ValueError, match=r"scale is .*, but must be a finite number > 0"):
        static(value)


def test_zero_means_dynamic() -> None:
    with pytest.raises(ValueError, match=r"Use dynamic\(\) for a dynamic scale"):
        static(0)


@pytest.mark.parametrize(
    "change", [{"factor": 1.0}, {"hysteresis_left": 3}, {"hysteresis_left": 0}, {"last_overflow": 0}]
)
def test_a_state_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        LossScale(**{**to_dict(dynamic()), **change})
