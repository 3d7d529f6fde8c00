# SPDX-License-Identifier: Apache-2.0
"""A pipeline that runs: every schedule's gradients are those of one process, and a rank that fails takes all with it.

One process computes the same products and sums, and here the same bits come out. They are compared within 1e-6, because
a BLAS may round by where in memory its operands are.
"""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from parallel_runner_cases import (
    BATCH,
    CPU,
    HIDDEN,
    OWN_ERROR,
    drop_received,
    evaluate_all,
    micro_batches,
    one_dies,
    one_leaves,
    one_raises,
    train_all,
    train_in_place,
)
from support import pairwise
from torch import nn

from twinflow.cli.launch import free_port
from twinflow.parallel.runner import Runner, forward_only
from twinflow.parallel.schedules import Action, make_schedule
from twinflow.parallel.wire import Key, Wire, decode, encode, incoming, made, needed

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
# schedule, rounds of as many micro-batches as there are ranks (0: one micro-batch), checkpointed, loss, deferral
AXES = (SCHEDULES, (0, 1, 2, 3), (False, True), ("sum", "square"), (False, True))
QUICK = pairwise(*AXES)
CASES = list(product(*AXES))
PARAMS = [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.matrix], id=str(case)) for case in CASES]


def case_of(cell: tuple[Any, ...], world: int) -> dict[str, Any]:
    schedule, rounds, checkpointed, loss, deferred = cell
    given = {"schedule": schedule, "checkpointed": checkpointed, "loss": loss, "deferred": deferred}
    return {**given, "num": rounds * world or 1, "times": 2 if rounds == 1 else 1}


@cache
def together(world: int, is_quick: bool) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """What each rank finds, of all cases: processes are started once."""
    cells = [cell for cell in CASES if (cell in QUICK) == is_quick]
    ranks = run_ranks(world, train_all, [case_of(cell, world) for cell in cells])
    return {cell: [rank[i] for rank in ranks] for i, cell in enumerate(cells)}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("cell", PARAMS)
def test_gradients_are_those_of_one_process(cell: tuple[Any, ...], world: int) -> None:
    case, ranks = case_of(cell, world), together(world, cell in QUICK)[cell]
    schedule = make_schedule(case["schedule"], world, case["num"], 2)
    last = schedule.rank_of(schedule.num_stages - 1)
    for rank, found in enumerate(ranks):
        assert max(found["errors"].values()) < 1e-6, found["errors"]
        assert len(found["errors"]) == 6 * 8 // world
        assert not found["strays"]
        assert (found["losses"] is None) == (rank != last)
        # Every block runs once, or twice where it is checkpointed, whatever the schedule.
        assert set(found["runs"]) == {case["num"] * (2 if case["checkpointed"] else 1)}
        assert found["trace"] == [str(action) for action in schedule.actions[rank]]
    assert ranks[last]["losses"] == pytest.approx(ranks[last]["true_losses"], rel=1e-6)


def test_bytes_are_those_of_the_tensors() -> None:
    """Two ranks, cut in the middle: activations, what skips, the integers and a single number; back, the first two."""
    cell = next(cell for cell in QUICK if cell[0] in ("gpipe", "1f1b"))
    case, found = case_of(cell, 2), together(2, True)[cell]
    tokens = [inputs[1].numel() for inputs, _ in micro_batches(case["num"])]
    assert found[0]["sent_bytes"] == sum(n * (2 * 4 * HIDDEN + 8) + 4 for n in tokens)
    assert found[1]["sent_bytes"] == sum(n * 2 * 4 * HIDDEN for n in tokens)


def test_evaluation() -> None:
    cases = [case_of((name, 1, True, "square", False), 2) for name in SCHEDULES]
    for rank, found in enumerate(run_ranks(2, evaluate_all, cases)):
        for case, one in zip(cases, found, strict=True):
            is_last = rank == (0 if case["schedule"] == "zbv" else 1)
            assert one["is_last"] == one["losses"] == one["outputs"] == is_last
            assert one["is_none"] != is_last
            assert not one["has_grads"]


@pytest.mark.parametrize(("name", "failing"), [("zbv", 1), pytest.param("1f1b", 3, marks=pytest.mark.matrix)])
def test_a_rank_that_fails_makes_the_others_fail(name: str, failing: int) -> None:
    ranks = run_ranks(4, one_raises, failing, name)
    for rank, found in enumerate(ranks):
        assert found["error"] == ("ArithmeticError" if rank == failing else "RuntimeError"), found
        assert_names(found, rank, failing)
        assert rank == failing or found["cause"] != "None"
        assert found["seconds"] < 60  # of a timeout of 100


def assert_names(found: dict[str, Any], rank: int, failing: int) -> None:
    """Every rank tells which failed first, and of what; the one that failed raises its own error, and then tells."""
    cause = f"has failed, first on pipeline rank {failing}: ArithmeticError: {OWN_ERROR}!"
    assert (OWN_ERROR if rank == failing else cause) in found["text"], found
    assert cause in found["again"], found
    assert len(found["again"]) < 600


@pytest.mark.matrix
def test_the_first_cause_reaches_a_rank_that_is_long_at_work() -> None:
    """Though the process that failed is gone by then, and the store with it."""
    for rank, found in enumerate(run_ranks(4, one_raises, 0, "1f1b", free_port(), backend="")):
        assert_names(found, rank, 0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("fail", f"ArithmeticError: {OWN_ERROR}"),
        ("close", "RuntimeError: The pipeline was closed in the middle of a batch."),
    ],
)
def test_a_rank_that_leaves_is_named_before_its_process_ends(how: str, cause: str) -> None:
    assert f"first on pipeline rank 0: {cause}" in run_ranks(2, one_leaves, how, free_port(), backend="")[1]


def test_what_came_is_freed() -> None:
    assert run_ranks(2, drop_received) == [True, True]


@pytest.mark.parametrize(("name", "is_deferred"), [("zbv", True), ("1f1b", False)])
def test_a_stage_may_begin_in_place(name: str, is_deferred: bool) -> None:
    for rank, errors in enumerate(run_ranks(2, train_in_place, name, is_deferred)):
        assert max(errors.values()) < 1e-6, errors
        assert ("x0" in errors) == (rank == 0)


@pytest.mark.matrix
def test_a_rank_that_dies_makes_the_others_fail(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes.*1: 3"):
        run_ranks(4, one_dies, 1, str(tmp_path))
    for rank in (0, 2, 3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["error"] == "RuntimeError"
        assert re.search("from pipeline rank 1 failed|message to pipeline rank 1 could not be sent", found["text"]), (
            found
        )
        assert found["seconds"] < 60


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("world", "num"), [(1, 2), (2, 1), (2, 4), (3, 3), (4, 12)])
def test_messages_of_a_schedule(name: str, world: int, num: int) -> None:
    schedule = make_schedule(name, world, num, 2)
    wanted = [key for actions in schedule.actions for key in (needed(schedule, a) for a in actions) if key]
    sent = [key for actions in schedule.actions for key in (made(schedule, a) for a in actions) if key]
    assert sorted(wanted) == sorted(sent)
    assert len(set(sent)) == len(sent) == 2 * (schedule.num_stages - 1) * num
    for index in range(world):
        found = incoming(schedule, index)
        assert index not in found
        for sender, keys in found.items():
            assert list(keys) == [key for key in sent if key.sender == sender and key.receiver == index]
        others = {key for key in wanted if key.receiver == index and key.sender != index}
        assert {key for keys in found.values() for key in keys} == others


def test_messages_by_hand() -> None:
    schedule = make_schedule("zbv", 2, 1)  # stages 0 and 3 on the first rank, 1 and 2 on the second
    assert incoming(schedule, 0) == {1: (Key("F", 3, 0, 1, 0), Key("B", 0, 0, 1, 0))}
    assert incoming(schedule, 1) == {0: (Key("F", 1, 0, 0, 1), Key("B", 2, 0, 0, 1))}
    assert made(schedule, Action("F", 1, 0)) == Key("F", 2, 0, 1, 1)
    assert made(schedule, Action("W", 1, 0)) is None


def test_forward_only() -> None:
    lists = forward_only(make_schedule("zbv", 2, 4), 2).actions
    assert [str(action) for action in lists[0]] == ["0F0", "0F1", "3F0", "3F1"]
    assert [str(action) for action in lists[1]] == ["1F0", "1F1", "2F0", "2F1"]


def test_headers() -> None:
    key = Key("B", 3, 17, 2, 1)
    value = (torch.zeros(2, 0, 5).bfloat16(), None, torch.tensor(True), torch.zeros(3, requires_grad=True), None)
    found, specs = decode(encode(key, value))
    assert found == key
    assert len(specs) == len(value)
    for spec, tensor in zip(specs, value, strict=True):
        assert (spec is None) == (tensor is None)
        assert spec is None or spec == (tensor.dtype, tensor.requires_grad, tuple(tensor.shape))
    with pytest.raises(ValueError, match="tensors between stages"):
        encode(key, (torch.zeros(1, 1, 1),) * 100)
    with pytest.raises(ValueError, match="The dtype of a tensor between stages"):
        encode(key, (torch.zeros(2, dtype=torch.float8_e4m3fnuz),))


def test_one_rank_alone_needs_no_group() -> None:
    for name in SCHEDULES:
        runner = Runner(Doubling(), make_schedule(name, 1, 2, 2), 0, Wire([0], 0, CPU), None)
        losses = runner.train([(torch.tensor(1.0), None), (torch.tensor(3.0), None)])
        assert losses is not None
        num_stages = runner.schedule.num_stages
        assert [loss.item() for loss in losses] == [2.0**num_stages, 3 * 2.0**num_stages]


class Doubling(nn.Module):
    """Stages with one weight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_backward_is_not_under_autocast() -> None:
    """A part of the model that computes in fp32 gets its gradients in fp32, where the batch is run under autocast."""

    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(16, 16)

        def forward(self, stage: int, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x).square().mean()

    module, truth, x = Precise(), Precise(), torch.randn(8, 16)
    truth(0, x).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Runner(module, make_schedule("1f1b", 1, 1), 0, Wire([0], 0, CPU)).train([(x, None)])
    assert torch.equal(module.inner.weight.grad, truth.inner.weight.grad)


def test_a_message_that_never_comes() -> None:
    wire = Wire([0], 0, CPU, timedelta(seconds=0.1))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not come within"):
        wire.receive(Key("F", 1, 0, 0, 0))
    assert time.monotonic() - started < 30
    wire.close()
    wire.close()
    with pytest.raises(RuntimeError, match="closed"):
        wire.receive(Key("F", 1, 0, 0, 0))
    with pytest.raises(RuntimeError, match="closed"):
        wire.send(Key("F", 1, 0, 0, 0), ())


def test_mistakes_are_named() -> None:
    schedule = make_schedule("gpipe", 1, 2)
    with pytest.raises(ValueError, match="micro-batches is 1, but must be 2 on every pipeline rank"):
        Runner(Doubling(), schedule, 0, Wire([0], 0, CPU)).train([(torch.tensor(1.0), None)])
    with pytest.raises(ValueError, match=r"The loss has the shape \(.*but must be a tensor with one element"):
        Runner(Doubling(), schedule, 0, Wire([0], 0, CPU)).train([(torch.ones(BATCH), None)] * 2)
    with pytest.raises(ValueError, match="output of a pipeline stage is of type dict"):
        Runner(Doubling(), schedule, 0, Wire([0], 0, CPU)).train([({}, None)] * 2)
