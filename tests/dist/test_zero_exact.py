# SPDX-License-Identifier: Apache-2.0
"""ZeRO is exact: where sums over ranks are, ranks train as one process does with the mean, bit for bit.

Rules, formats, stages and ratios; parameters that are odd, split, dealt whole, tied, unused on some ranks or on all;
clip decisions, accumulation and delays; ranks that differ in time and order. Many cases share a spawn, which takes
longer.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from support import cell_name, pairwise
from zero_exact_cases import (
    Case,
    Samples,
    close_in_the_middle,
    differences,
    fail,
    save_after,
    train,
    train_all,
)

from twinflow.engine.loader import ResumableLoader
from twinflow.offload import sync
from twinflow.rules import RULES

STAGES = (0, 1, 2)
EARLY: dict[str, Any] = {"early": True}
ALL_ON_HOST: dict[str, Any] = {"ratio": 1.0}
ON_DISK: dict[str, Any] = {"nvme_path": tempfile.gettempdir(), "buffer_count": 1, "shadow_bytes": 0}
LONG_S = 900  # for hundreds of cases on a busy machine
pytestmark = pytest.mark.timeout(LONG_S + 100)


def cell(rule: str, states: str, stage: int, ratio: float, early: bool) -> Case:
    """The compact formats are for bf16 weights."""
    dtype = "fp32" if states == "fp32" else "bf16"
    return Case({"stage": stage}, rule, dtype, options={"states": states, "ratio": ratio, "early": early})


AXES: tuple[Any, ...] = (list(RULES), ("fp32", "bf16", "int8"), STAGES, (1.0, 0.5, 0.0), (False, True))
CELLS = {cell_name(c): cell(*c) for c in itertools.product(*AXES) if c[1] in RULES[c[0]].formats}
PAIRS = {cell_name(c): cell(*c) for c in pairwise(*AXES) if c[1] in RULES[c[0]].formats}

# Each with one name for all stages.
KINDS: dict[str, Case] = {
    "buckets of one block": Case({}, options=EARLY, tuning={"bucket_numel": 128}),
    "one bucket a block": Case({}, options=EARLY, tuning={"bucket_numel": 1 << 20}),
    "fp16 weights": Case({}, dtype="fp16", options={**EARLY, "ratio": 0.5}),
    "fp16 weights, 8-bit states": Case({}, dtype="fp16", options={"states": "int8"}),
    "bf16 weights": Case({}, dtype="bf16", options={**EARLY, "ratio": 0.5}),
    "no state at all": Case({}, "sgd without momentum", options=EARLY),
    "groups and rates": Case({}, groups=True, event="rates", options=EARLY),
    "torch's Adagrad": Case({}, "torch adagrad", options={"ratio": 0.5}),
    "torch's Adagrad, early": Case({}, "torch adagrad", dtype="bf16", options={**EARLY, "max_grad_norm": 50.0}),
    "a norm of each parameter": Case({}, "torch normed", options=EARLY),
    "a norm of each parameter, on the device": Case({}, "torch normed", options={**EARLY, "ratio": 0.0}),
    "tied": Case({}, shape="tied", options=EARLY),
    "tied, late": Case({}, shape="tied", parts=2, options={"ratio": 0.5}),
    "some used": Case({}, pattern="some"),
    "some used, early": Case({}, pattern="some", options={**EARLY, "ratio": 0.5}),
    "some used, clipped": Case({}, pattern="some", options={**EARLY, "max_grad_norm": 20.0}),
    "some used, three backwards": Case({}, pattern="some", parts=3, options={**EARLY, "ratio": 0.5}),
    "some used, three backwards, late": Case({}, pattern="some", parts=3, options={"max_grad_norm": 20.0}),
    "some used, by torch": Case({}, "torch normed", pattern="some", parts=3, options={**EARLY, "ratio": 0.5}),
    "other order": Case({}, pattern="turned round", watched=False, options=EARLY),
    "other order, late": Case({}, pattern="turned round", options={"max_grad_norm": 50.0}),
    "never clipped": Case({}, options={**EARLY, "max_grad_norm": 1e6}),
    "clipped": Case({}, options={**EARLY, "max_grad_norm": 1.0, "ratio": 0.5}),
    "clipped, held on the host": Case({}, options={**EARLY, "max_grad_norm": 1.0}, tuning={"hold": "host"}),
    "clipped, one slot": Case({}, parts=3, options={**EARLY, "max_grad_norm": 1.0}, tuning={"num_slots": 1}),
    "nan": Case({}, bad=math.nan, options={**EARLY, "skip_nonfinite": True}),
    "inf, scaled": Case({}, bad=math.inf, scaled=True, options=EARLY),
    "nan, scaled, bf16, late": Case({}, bad=math.nan, dtype="bf16", scaled=True, options={"ratio": 0.5}),
    "nan in one of three": Case({}, bad=math.nan, parts=3, scaled=True, options={**EARLY, "ratio": 0.5}),
    "a nan that nobody minds": Case({}, bad=math.nan, options=EARLY),
    "three backwards": Case({}, parts=3, options=EARLY),
    "three backwards, late": Case({}, parts=3, options={"ratio": 0.5}),
    "three backwards, on the device": Case({}, parts=3, options={**EARLY, "ratio": 0.0, "max_grad_norm": 50.0}),
    "delayed": Case({}, options={**EARLY, "delayed_update": True}),
    "delayed, bf16, clipped": Case({}, dtype="bf16", options={"delayed_update": True, "max_grad_norm": 50.0}),
    "delayed, fp16, half": Case({}, dtype="fp16", options={**EARLY, "delayed_update": True, "ratio": 0.5}),
    "delayed, three backwards": Case({}, parts=3, options={**EARLY, "delayed_update": True, "ratio": 0.5}),
    "delayed, some used": Case({}, pattern="some", bad=math.inf, scaled=True, options={"delayed_update": True}),
    "streamed": Case({}, options=EARLY, tuning={"streamed": 1.0}),
    "on disk": Case({}, options={**EARLY, **ALL_ON_HOST}, tuning=ON_DISK),
    "on disk, fp16, scaled": Case({}, dtype="fp16", bad=math.inf, scaled=True, options={"ratio": 0.5}, tuning=ON_DISK),
    "on disk, bf16, other order": Case(
        {}, dtype="bf16", pattern="turned round", watched=False, options={**EARLY, **ALL_ON_HOST}, tuning=ON_DISK
    ),
    "closed and built again": Case({}, event="rebuild", options=EARLY),
    "model loaded": Case({}, dtype="bf16", event="load", options={**EARLY, "ratio": 0.5}),
    "weights edited": Case({}, event="edit", options={**EARLY, "ratio": 0.5}),
    "weights in new memory": Case({}, event="new memory", options={**EARLY, "ratio": 1.0}),
    "gradients dropped": Case(
        {}, parts=3, event="drop", options=EARLY, tuning={"flat_bytes": 512}, delays={"out": 0.002}
    ),
    "divided before": Case({"predivide": 2.0}, options={**EARLY, "max_grad_norm": 50.0}),
    "divided before by more": Case({"predivide": 8.0}, dtype="bf16", bad=math.inf, scaled=True),
    "sums": Case({"op": "sum"}, options={**EARLY, "max_grad_norm": 50.0}),
    "sums, divided before": Case({"op": "sum", "predivide": 4.0}, parts=3, options=EARLY),
    "sent as bf16": Case({"dtype": torch.bfloat16}, options=EARLY),
    "sent as fp32": Case({"dtype": torch.float32}, dtype="bf16", parts=3, options={**EARLY, "ratio": 0.5}),
    "slow ranks": Case({}, watched=False, sleeps=(0.01, 0.02, 0.01), options={**EARLY, "max_grad_norm": 50.0}),
    "slow gather": Case({}, watched=False, delays={"compute": 0.002}, options={**EARLY, "max_grad_norm": 50.0}),
    "slow reduce": Case({}, watched=False, parts=2, delays={"reduce": 0.002}, options={**EARLY, "ratio": 0.5}),
    "slow publish": Case({}, watched=False, delays={"publish": 0.003}, options={**EARLY, "ratio": 0.5}),
    "slow out": Case({}, watched=False, delays={"out": 0.003}, sleeps=(0.0, 0.01), options=EARLY),
    "slow in": Case({}, watched=False, delays={"in": 0.003}, options={"max_grad_norm": 50.0}),
    "slow update": Case({}, watched=False, delays={"update": 0.003}, options={"ratio": 0.0, "max_grad_norm": 50.0}),
}
# Where a wait for what will never come would stop everything.
STUCK: dict[str, Case] = {
    "one rank alone": Case({}, pattern="one alone", options=EARLY),
    "one rank alone, few buffers": Case({}, pattern="one alone", options=EARLY, tuning={"flat_bytes": 512}),
    "one rank alone, few buffers, on the device": Case(
        {}, pattern="one alone", options={**EARLY, "ratio": 0.0}, tuning={"flat_bytes": 512}
    ),
    "some used, few buffers": Case({}, pattern="some", options=EARLY, tuning={"flat_bytes": 512}),
    "other order, few buffers": Case({}, pattern="turned round", options=EARLY, tuning={"flat_bytes": 512}),
    "few buffers, three backwards": Case(
        {}, pattern="some", parts=3, options={**EARLY, "max_grad_norm": 50.0}, tuning={"flat_bytes": 512}
    ),
    "on disk, some used, few buffers": Case(
        {}, pattern="some", parts=3, options={**EARLY, **ALL_ON_HOST, "max_grad_norm": 20.0}, tuning=ON_DISK
    ),
    "delayed, few buffers": Case(
        {}, options={**EARLY, "delayed_update": True, "ratio": 0.5}, tuning={"flat_bytes": 512, "num_slots": 1}
    ),
    "fewer backwards on one rank": Case({}, pattern="fewer", parts=3, options=EARLY),
    "fewer backwards on one rank, clipped": Case({}, pattern="fewer", parts=3, options={"max_grad_norm": 50.0}),
}


def staged(cases: dict[str, Case], stages: tuple[int, ...] = STAGES) -> dict[str, Case]:
    every = itertools.product(stages, cases.items())
    return {
        f"stage {stage}, {name}": replace(case, zero={**case.zero, "stage": stage}) for stage, (name, case) in every
    }


def quick(cases: dict[str, Case]) -> dict[str, Case]:
    """Every fourth kind, in one stage: in that of its own ways where it has some. The matrix has them all."""
    names = list({name.split(", ", 1)[1]: None for name in cases})[::4]
    turns = {name: 2 if KINDS[name].parts > 1 else 1 + i % 2 for i, name in enumerate(names)}
    return {f"stage {stage}, {name}": cases[f"stage {stage}, {name}"] for name, stage in turns.items()}


SPECIAL = staged({**KINDS, **STUCK})
GROUPS: dict[str, dict[str, Case]] = {
    "pairs": PAIRS,
    "quick": quick(staged(KINDS)),
    "stuck": staged(STUCK, (2,)),
    "cells": CELLS,
    "special": SPECIAL,
}


@cache
def together(group: str, world: int) -> list[dict[str, Any]]:
    return run_ranks(world, train_all, GROUPS[group], timeout_s=LONG_S)


@cache
def alone(group: str, name: str, world: int) -> dict[str, Any]:
    return train(0, world, GROUPS[group][name], is_alone=True)


def check(group: str, name: str, world: int) -> None:
    case, truth = GROUPS[group][name], alone(group, name, world)
    assert len(set(truth["after"])) != 1 or not case.watched  # something was learnt
    wrong = differences([rank[name] for rank in together(group, world)], truth)
    assert not wrong, "\n".join(wrong)


@pytest.mark.matrix
@pytest.mark.parametrize("name", PAIRS)
def test_rules_formats_stages_and_ratios(name: str) -> None:
    check("pairs", name, 2)


@pytest.mark.parametrize("name", GROUPS["quick"])
def test_everything_else(name: str) -> None:
    check("quick", name, 2)


@pytest.mark.parametrize("name", GROUPS["stuck"])
def test_nobody_waits_for_what_will_not_come(name: str) -> None:
    check("stuck", name, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
def test_every_rule_format_stage_and_ratio(name: str) -> None:
    check("cells", name, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SPECIAL)
def test_everything_else_in_every_stage(name: str) -> None:
    check("special", name, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("group", ["pairs", "quick", "stuck"])
def test_four_ranks(group: str) -> None:
    for name in GROUPS[group]:
        check(group, name, 4)


# A state that is one update ahead of its weights.


@pytest.mark.matrix
def test_a_delayed_update_goes_on_from_one_process_to_many(tmp_path: Path) -> None:
    options = {"delayed_update": True, "early": True, "ratio": 0.5}
    cases = {}
    for dtype in ("fp32", "bf16", "fp16"):
        path = str(tmp_path / dtype)
        case = Case({}, dtype=dtype, watched=False, options=options, delays={"publish": 0.01, "in": 0.01})
        save_after(path, case, num_steps=3)
        cases |= {f"{dtype} {name}": one for name, one in staged({"resumed": replace(case, saved=path)}).items()}
    found = run_ranks(2, train_all, cases)
    for name, case in cases.items():
        wrong = differences([rank[name] for rank in found], train(0, 2, case, is_alone=True))
        assert not wrong, "\n".join([name, *wrong])


# The waits between ranks.

POINTS = {
    sync.REDUCE_READY: Case({"stage": 1}, delays={"compute": 0.01}),
    sync.PUBLISH_READY: Case({"stage": 1}, delays={"in": 0.01}),
}


@cache
def without(world: int = 2) -> list[dict[str, Any]]:
    cases = dict(POINTS)
    cases |= {f"no {point}": replace(case, disabled=(point,)) for point, case in POINTS.items()}
    return run_ranks(world, train_all, cases)


@pytest.mark.parametrize("point", POINTS)
def test_a_result_changes_without_this_sync_point_and_not_with_it(point: str) -> None:
    truth = train(0, 2, POINTS[point], is_alone=True)
    assert not differences([rank[point] for rank in without()], truth), "a delay alone changed the result"
    assert differences([rank[f"no {point}"] for rank in without()], truth), "nothing changed: is the wait needed?"


# Ends.


@pytest.mark.parametrize("where", ["worker", "publish", "disk"])
def test_a_failure_on_one_rank_ends_all(where: str) -> None:
    """The rank where something failed says what; the others hear of it when that one leaves."""
    first, second = run_ranks(2, fail, where, timeout_s=120)
    assert second["error"] == "WorkerError"
    assert ("Input/output error" if where == "disk" else "ZeroDivisionError") in second["cause"]
    assert first["error"] == "WorkerError"


@pytest.mark.matrix
def test_a_rank_that_leaves_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """Its process ends as any Python process does, with all that waits for threads; the other is a child of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TWINFLOW_THREADS": "1"}
    code = "import sys; from zero_exact_cases import leave; leave(sys.argv[1])"
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    try:
        assert b"ZeroDivisionError" in first.communicate(timeout=240)[1]
        took_s = time.time() - (tmp_path / "leaving").stat().st_mtime
        assert first.returncode == 1
        assert took_s < 60  # not the ten minutes of a collective
        assert not (tmp_path / "left").exists()  # the other was there all the time
    finally:
        (tmp_path / "gone").touch()
        first.kill()
        first.wait()
    end = time.monotonic() + 60
    while not (tmp_path / "left").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_closing_in_the_middle_of_a_step_waits_for_nobody() -> None:
    ranks = run_ranks(2, close_in_the_middle, timeout_s=90)
    for found in ranks:
        assert max(found["took_s"]) < 60
        assert found["threads"] == []
        assert found["after"] == ranks[0]["after"]


# Samples.


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [48, 50, 3, 97])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_see_every_sample_once(world: int, num_samples: int, drop_last: bool) -> None:
    loaders = [share(num_samples, rank, world, drop_last=drop_last) for rank in range(world)]
    for _ in range(2):
        seen = [[batch.tolist() for batch in loader] for loader in loaders]
        assert {len(batches) for batches in seen} == {len(loaders[0])}
        assert len({tuple(map(len, batches)) for batches in seen}) == 1  # ranks step together
        flat = [sample for batches in seen for batch in batches for sample in batch]
        if drop_last:
            assert len(set(flat)) == len(flat) > num_samples - 4 * world - world
        else:
            assert set(flat) == set(range(num_samples))
            assert len(flat) < num_samples + world


def share(num_samples: int, rank: int, world: int, batch_size: int = 4, drop_last: bool = False) -> ResumableLoader:
    return ResumableLoader(
        Samples(num_samples), batch_size, drop_last=drop_last, seed=5, shuffle=True, share=(rank, world)
    )


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 2)])
def test_an_epoch_goes_on_with_another_number_of_ranks(before: int, after: int) -> None:
    num_samples, seen = 64, []
    loaders = [share(num_samples, rank, before) for rank in range(before)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(8 // before):  # half of it
        seen += [sample for iterator in iterators for sample in next(iterator).tolist()]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    for rank in range(after):
        loader = share(num_samples, rank, after)
        loader.load_state_dict(states[0])
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(seen) == list(range(num_samples))


def test_an_epoch_cannot_go_on_where_batches_do_not_fit() -> None:
    loader = share(64, 0, 1)
    next(iter(loader))
    words = r"saved after (\d+) samples of an epoch, but this .* multiple of \d+ .* divides \1\.$"
    with pytest.raises(ValueError, match=words):
        share(64, 0, 4).load_state_dict(loader.state_dict())
