# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam, 1-bit LAMB and 0/1 Adam over gloo: after every step all ranks have the bits of a simulation.

The simulation (onebit_simulation.py) is checked against torch's AdamW and a LAMB in float64 where nothing is packed.
Many cases share a spawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from onebit_cases import (
    DTYPES,
    EMBEDDING,
    FLAT_SHAPES,
    GROUPS,
    KINDS,
    NEVER,
    SHAPES,
    UNUSED_ROWS,
    Case,
    first_weights,
    train_all,
)
from onebit_simulation import EPS, Simulation
from support import cell_name, pairwise
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from twinflow.codes import CODES

FREEZE_STEP, LONG_S = 4, 900
pytestmark = pytest.mark.timeout(LONG_S + 100)
SWITCH: dict[str, dict[str, Any]] = {
    "adam": {"freeze_step": FREEZE_STEP},
    "lamb": {"freeze_step": FREEZE_STEP},
    # Refreshes in steps 1, 2, 4 and 6; then exchanges in 7, 8, 9, 11, 13.
    "zero_one": {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
}
NUM_STEPS = {"adam": 8, "lamb": 8, "zero_one": 13}
BAD_AT = {"adam": 5, "lamb": 5, "zero_one": 9}  # in few bits, or local


def make(kind: str, dtype: str = "fp32", world: int = 2, options: dict[str, Any] | None = None, **rest: Any) -> Case:
    return Case(kind, world, dtype, {**SWITCH[kind], **(options or {})}, **{"num_steps": NUM_STEPS[kind], **rest})


MIXED = {"max_grad_norm": 3.0, "bucket_numel": 200}
AUTO = {"freeze_step": None, "freeze_window": 5, "freeze_threshold": 0.9}
AXES: tuple[Any, ...] = (list(KINDS), list(DTYPES), (1, 2, 4))
PAIRS = {cell_name(cell): make(*cell) for cell in pairwise(*AXES) if cell[2] != 2}
# On two ranks: clipped, in small buckets, one parameter without gradients in some steps, and one step that is skipped.
PAIRS |= {
    f"{kind}, mixed": make(kind, dtype, 2, MIXED, has_gaps=True, bad=(BAD_AT[kind], 1, math.nan))
    for kind, dtype, world in pairwise(*AXES)
    if world == 2
}
LEVEL = make("adam", num_steps=12, options=AUTO)
QUICK: dict[str, Case] = {
    **PAIRS,
    "adam, by itself": replace(LEVEL, num_steps=21, num_rising=12, is_torn=True),
    "adam, uncorrected": make("adam", options={"bias_correction": False}),
    "adam, in step 1": make("adam", options={"freeze_step": 1}, num_steps=4, is_by_hand=True),
    "adam, large": make("adam", "fp16", 4, num_steps=3, size=6500.0),
}


def saved(names: list[str], *steps: int) -> dict[str, Case]:
    every = {**QUICK, **CELLS}
    return {f"{name}, saved at {at}": replace(every[name], saved_at=at) for name in names for at in steps}


CELLS = {cell_name(cell): make(*cell) for cell in itertools.product(*AXES)}
QUICK_SAVED = {**saved(["adam, mixed"], 5), **saved(["lamb, mixed"], 2), **saved(["zero_one, mixed"], 9)}
SPECIAL: dict[str, Case] = {
    f"{kind}, {name}": make(kind, **change)
    for kind in KINDS
    for name, change in {
        "clipped": {"options": {"max_grad_norm": 3.0}},
        "never clipped": {"options": {"max_grad_norm": 1e6}},
        "in small buckets": {"options": {"bucket_numel": 200}},
        "of 4 bits": {"options": {"code": "int4"}, "world": 3},
        "of 8 bits": {"options": {"code": "int8"}, "dtype": "bf16"},
        "with gaps": {"has_gaps": True, "world": 4},
        "bad in step 1": {"bad": (1, 0, math.inf)},
        "bad in step 7": {"bad": (7, 1, -math.inf)},
        "bf16 on the wire": {"options": {"wire_dtype": torch.bfloat16}, "dtype": "bf16"},
    }.items()
}
SPECIAL |= {
    "adam, by itself, rising": make("adam", num_steps=30, num_rising=20, options=AUTO),
    "lamb, by itself": make("lamb", world=3, num_steps=20, options=AUTO),
}
FAR = [name for name in CELLS if CELLS[name].world == 4]
MOVED = {
    "adam": make("adam", "fp32", 4, num_steps=12),
    "lamb": make("lamb", "bf16", 4, num_steps=24),
    "zero_one": make("zero_one", "fp16", 4, num_steps=26, options={"local_step_clipper": 1}),
}
SETS = {
    "quick": {**QUICK, **QUICK_SAVED},
    "cells": CELLS,
    "special": SPECIAL,
    "saved": {**CELLS, **saved(FAR, 2, 9), **saved([name for name in FAR if "zero_one" not in name], 5, 6)},
}


@cache
def attempt(name: str) -> list[dict[str, Any]] | AssertionError:
    """Once, also where it fails: ranks that wait for each other in vain do so for minutes."""
    moving = {kind: case for kind, case in MOVED.items() if name != "quick" or kind == "adam"}
    try:
        return run_ranks(4, train_all, SETS[name], moving, timeout_s=LONG_S)
    except AssertionError as error:
        return error


def together(name: str) -> list[dict[str, Any]]:
    found = attempt(name)
    assert not isinstance(found, AssertionError), found
    return found


@cache
def simulated(name: str, group: str = "quick") -> tuple[list[list[dict[str, Any]]], list[float], Simulation]:
    """What each rank should record after each step; norms; and the end."""
    case = SETS[group][name]
    simulation = Simulation(case, [record["norm"] for record in together(group)[0][name]["trace"]])
    trace: list[list[dict[str, Any]]] = [[] for _ in range(case.world)]
    norms = []
    for step in range(case.num_steps):
        simulation.step(step)
        norms.append(simulation.norm)
        for rank in range(case.world):
            trace[rank].append(simulation.record(rank))
    return trace, norms, simulation


def check(name: str, group: str = "quick") -> None:
    case, (trace, norms, _) = SETS[group][name], simulated(name, group)
    ranks = [found[name] for found in together(group)[: case.world]]
    assert len({record["params"] for record in ranks[0]["trace"]}) > case.num_steps // 2  # something was learnt
    for step in range(case.num_steps):
        for rank in range(case.world):
            found, wanted = ranks[rank]["trace"][step], trace[rank][step]
            wrong = [key for key in wanted if found[key] != wanted[key]]
            assert not wrong, f"step {step + 1}, rank {rank}: {wrong}"
            assert found["norm"] == pytest.approx(norms[step], rel=1e-6, nan_ok=True)
            assert found["norm"] == pytest.approx(ranks[0]["trace"][step]["norm"], rel=0, abs=0, nan_ok=True)
            assert not found["in_step"] or found["params"] == ranks[0]["trace"][step]["params"]
    for found in ranks:
        check_left_alone(case, [torch.tensor(values) for values in found["values"]])


def check_left_alone(case: Case, found: list[Tensor]) -> None:
    """Parameters that nobody has a gradient of, with weight decay or without; rows of an embedding that nobody uses."""
    before = [weight.float() for weight in first_weights(case.dtype)]
    for i in NEVER:
        assert torch.equal(found[i], before[i].view(-1)), i
    is_same = found[EMBEDDING].view(FLAT_SHAPES[EMBEDDING]) == before[EMBEDDING]
    assert is_same[UNUSED_ROWS].all()
    assert int(is_same.all(1).sum()) == len(UNUSED_ROWS)


@pytest.mark.parametrize("name", QUICK)
def test_ranks_do_what_the_simulation_does(name: str) -> None:
    check(name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
def test_every_kind_dtype_and_world(name: str) -> None:
    check(name, "cells")


@pytest.mark.matrix
@pytest.mark.parametrize("name", SPECIAL)
def test_everything_else(name: str) -> None:
    check(name, "special")


# The simulation itself, where there are other truths.


@pytest.mark.parametrize("name", [name for name in QUICK if "lamb" not in name and "uncorrected" not in name])
def test_before_the_switch_it_is_adamw_of_one_process(name: str) -> None:
    check_start(QUICK[name], adamw)


@pytest.mark.parametrize("name", [name for name in QUICK if "lamb" in name])
def test_before_the_switch_it_is_lamb(name: str) -> None:
    check_start(QUICK[name], lamb)


def check_start(case: Case, optimize: Callable[[Case, list[dict[int, Tensor]]], list[Tensor]]) -> None:
    """Steps in full precision, with the mean of all ranks' gradients in float64, clipped."""
    simulation = Simulation(case)
    num_steps = 2 if case.kind == "zero_one" else case.options["freeze_step"] or 5
    for step in range(num_steps):
        simulation.step(step)
    assert len(simulation.means) == num_steps
    # A mean of gradients of 8 bits of precision has no more.
    precision = {"fp32": 1e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}[case.dtype]
    most = case.options.get("max_grad_norm")
    for means in simulation.means if most else ():
        norm = math.sqrt(sum(float(mean.square().sum()) for mean in means.values()))
        assert norm == pytest.approx(most, rel=max(1e-4, precision))
    wanted = optimize(case, simulation.means)
    precision *= 10.0 if optimize is lamb else 1.0  # its steps may be as much larger
    for flat in simulation.flats:
        atol = max(1e-6, GROUPS[flat.group]["lr"] * num_steps * precision)
        for i, place in flat.places.items():
            found = flat.weights[0, place].double()
            assert torch.allclose(found, wanted[i].double().view(-1), rtol=1e-6, atol=atol), i


def has_gradient(case: Case, step: int, i: int) -> bool:
    return any(case.has_gradient(step, rank, i) for rank in range(case.world))


def adamw(case: Case, means: list[dict[int, Tensor]]) -> list[Tensor]:
    """torch's."""
    weights = [weight.float() for weight in first_weights(case.dtype)]
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    counts = [torch.zeros(()) for _ in weights]
    for (step, mean), i in itertools.product(enumerate(means), range(len(weights))):
        if has_gradient(case, step, i):
            options = GROUPS[int(i >= len(SHAPES[0]))]
            (b1, b2), rest = options["betas"], {"eps": EPS, "maximize": False, "amsgrad": False, "foreach": False}
            rest |= {"lr": options["lr"] * case.rate(step), "weight_decay": options["weight_decay"]}
            first, second = [moments[0][i]], [moments[1][i]]
            grad = mean[i].float().view(weights[i].shape)
            torch_adamw([weights[i]], [grad], first, second, [], [counts[i]], beta1=b1, beta2=b2, **rest)
    return weights


def lamb(case: Case, means: list[dict[int, Tensor]]) -> list[Tensor]:
    """In float64."""
    weights = [weight.double().view(-1) for weight in first_weights(case.dtype)]
    for i in range(len(weights)):
        options = GROUPS[int(i >= len(SHAPES[0]))]
        b1, b2 = options["betas"]
        m = v = torch.zeros_like(weights[i])
        count = 0
        for step, mean in enumerate(means):
            if not has_gradient(case, step, i):
                continue
            count += 1
            m, v = b1 * m + (1 - b1) * mean[i], b2 * v + (1 - b2) * mean[i].square()
            move = (m / (1 - b1**count)) / ((v / (1 - b2**count)).sqrt() + EPS) + options["weight_decay"] * weights[i]
            trust = (weights[i].norm() / move.norm()).clamp(0.01, 10.0)
            weights[i] = weights[i] - options["lr"] * case.rate(step) * trust * move
    return weights


def test_large_gradients_have_a_mean_where_they_have_no_sum() -> None:
    """Else the case of that name shows nothing."""
    means = simulated("adam, large")[2].means
    largest = max(float(mean.abs().max()) for step in means for mean in step.values())
    assert largest < 65504 < 4 * largest
    assert len(means) == QUICK["adam, large"].num_steps


# Skipped steps.


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_finite_are_skipped_by_all(kind: str) -> None:
    """Nothing changes, errors included, on any rank; and what follows is finite."""
    name, step = f"{kind}, mixed", BAD_AT[kind]
    for found in together("quick")[:2]:
        trace = found[name]["trace"]
        before, after = trace[step - 1], trace[step]
        assert {key for key in before if before[key] != after[key]} == {"num_skipped", "norm"}
        assert (trace[-1]["num_steps"], trace[-1]["num_skipped"]) == (NUM_STEPS[kind] - 1, 1)
        assert all(math.isfinite(value) for values in found[name]["values"] for value in values)


# The switch.


def check_switch(name: str, group: str = "quick") -> int:
    """Where all ranks have switched."""
    case, wanted = SETS[group][name], simulated(name, group)[2].frozen
    assert wanted is not None
    assert wanted < case.num_steps - 1
    for found in together(group)[: case.world]:
        trace = found[name]["trace"]
        assert [record["frozen"] for record in trace] == [None] * (wanted - 1) + [wanted] * (len(trace) - wanted + 1)
        assert len({record["exp_avg_sq"] for record in trace[wanted - 1 :]}) == 1
        assert len({record["exp_avg_sq"] for record in trace[:wanted]}) == wanted
    return wanted


def test_ranks_switch_together_when_the_second_moment_has_settled_and_the_learning_rate_no_longer_rises() -> None:
    """Ranks have other data, and all but the first would see sums that never settle."""
    level = Simulation(LEVEL)
    for step in range(LEVEL.num_steps):
        level.step(step)
    assert level.frozen is not None
    assert AUTO["freeze_window"] < level.frozen < QUICK["adam, by itself"].num_rising
    assert check_switch("adam, by itself") > QUICK["adam, by itself"].num_rising


@pytest.mark.matrix
def test_other_switches() -> None:
    assert check_switch("adam, by itself, rising", "special") > 20
    check_switch("lamb, by itself", "special")


@pytest.mark.parametrize("name", ["adam, in step 1", "adam, mixed", "lamb, mixed"])
def test_the_switch_is_where_it_was_asked_for(name: str) -> None:
    assert check_switch(name) == QUICK[name].options["freeze_step"]


def test_a_step_in_one_bit_sends_a_16th_and_less() -> None:
    """Beside the numbers that ranks agree by: a row of fp64 with one for each parameter."""
    name = "adam, in step 1"
    case, flats = QUICK[name], Simulation(QUICK[name]).flats
    rows = 8 * (1 + len(FLAT_SHAPES)) * (case.world - 1)
    at_first = sum(2 * 4 * flat.v.numel() // 2 for flat in flats)
    later = sum(2 * CODES["1bit"].row_bytes(flat.v.numel() // 2) for flat in flats)
    weights = sum(4 * math.prod(shape) for shape in FLAT_SHAPES)  # sent once, by the first rank
    weights += sum(flat.v.numel() for flat in flats)  # exponents, likewise
    weights += 8 * len(FLAT_SHAPES)  # what second moments are raised to
    for rank, found in enumerate(together("quick")[: case.world]):
        assert found[name]["sent"] == at_first + (case.num_steps - 1) * later + case.num_steps * rows + (
            0 if rank else weights
        )
    assert later * 16 < at_first


# Saving.


def check_saved(name: str, group: str) -> None:
    whole = name.split(", saved")[0]
    for found in together(group)[: SETS[group][name].world]:
        for key in ("trace", "values", "loss"):
            assert found[name][key] == found[whole][key]


@pytest.mark.parametrize("name", QUICK_SAVED)
def test_it_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    check_saved(name, "quick")


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in SETS["saved"] if "saved" in name])
def test_every_kind_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    check_saved(name, "saved")


@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("lamb", "zero_one"))]
)
def test_fewer_ranks_go_on(name: str) -> None:
    """The mean of the ranks' own errors and the owners' errors are what they were; so is nearly the loss."""
    ranks = [found["moved"][name] for found in together("quick" if name == "adam" else "special")]
    worker = torch.tensor([found["before"]["worker_error"] for found in ranks]).double().mean(0)
    server = torch.tensor([found["before"]["server_error"] for found in ranks]).double().sum(0)
    assert worker.abs().max() > 1e-2
    assert server.abs().max() > 1e-2
    all_four = ranks[0]["after"]["4"]
    assert all_four["loss"] < ranks[0]["half"]
    for size in (1, 2, 3, 4):
        some = [found["after"][str(size)] for found in ranks[:size]]
        kept = torch.tensor([found["worker_error"] for found in some]).double().mean(0)
        assert torch.allclose(kept, worker, rtol=0, atol=1e-6)
        kept = torch.tensor([found["server_error"] for found in some]).double().sum(0)
        assert torch.allclose(kept, server, rtol=0, atol=1e-6)
        assert all(found["states"] == all_four["states"] for found in some)
        assert all(found["params"] == some[0]["params"] for found in some)
        assert some[0]["loss"] == pytest.approx(all_four["loss"], rel=0.1)


def test_wrong_states_are_refused_before_anything_changes() -> None:
    for found in together("quick")[:2]:
        assert len(found["refused"]) == 10
        for name, answer in found["refused"].items():
            assert answer.startswith("ValueError: "), (name, answer)
            assert "CHANGED" not in answer, name
