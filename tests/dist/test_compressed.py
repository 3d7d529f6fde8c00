# SPDX-License-Identifier: Apache-2.0
"""Collectives in few bits over gloo: the same bits on all ranks, and those of a simulation of all ranks in one process.

The simulation is made of codes/reference.py alone. Sizes are odd, worlds go from 1 to 5, and many cases share a spawn.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from onebit_cases import DTYPES, Exchange, digest, exchange_all
from support import cell_name, pairwise
from torch import Tensor

from twinflow.codes import CODES, reference

WORLDS = (1, 2, 3, 4, 5)
AXES: tuple[Any, ...] = (list(CODES), list(DTYPES), (1, 7, 129, 4095, 4097), (False, True), WORLDS)
CELLS = {cell_name(cell): Exchange(*cell) for cell in itertools.product(*AXES)}
QUICK = {cell_name(cell): Exchange(*cell, num_steps=2) for cell in pairwise(*AXES)}
LONG_S = 900
pytestmark = pytest.mark.timeout(LONG_S + 100)

# Over time, with and without feedback; short enough for totals.
NUM_LONG = 16
LONG: dict[str, Exchange] = {
    f"{code}{' dropped' if not has_feedback else ''}": Exchange(
        code, "fp32", 33, False, 2, num_steps=NUM_LONG, has_feedback=has_feedback
    )
    for code, has_feedback in itertools.product(CODES, (True, False))
}
PUBLISHED = {"1bit": "bf16", "int4": "fp16", "int8": "bf16"}
LONG |= {f"{code} published": Exchange(code, PUBLISHED[code], 33, False, 2, num_steps=NUM_LONG) for code in CODES}
BAD = {
    f"{code} {bad}": Exchange(code, "fp32", 4097, is_scaled, 3, bad=bad)
    for code, bad, is_scaled in (("1bit", math.nan, True), ("int4", -math.inf, False), ("int8", math.nan, False))
}
SETS = {"quick": {**QUICK, **LONG, **BAD}, "cells": CELLS}


@cache
def together(name: str) -> list[dict[str, Any]]:
    return run_ranks(max(WORLDS), exchange_all, SETS[name], timeout_s=LONG_S)


# The simulation.


def to_owners(case: Exchange, wholes: Tensor, base: Tensor | None, workers: Tensor, exponents: Tensor | None) -> Tensor:
    """Everybody's packed rows for everybody: [owner, sender, bytes]. `wholes` and `workers`, the errors, are of all."""
    code, world, (factor, base_factor) = CODES[case.code], case.world, case.factors
    rows = torch.empty(world * world, code.row_bytes(case.part), dtype=torch.uint8)
    reference.encode(
        code,
        rows,
        wholes.view(-1),
        workers.view(-1),
        factor=factor,
        base=base.repeat(world) if base is not None else None,
        base_factor=base_factor,
        exponents=exponents.repeat(world) if exponents is not None else None,
    )
    if not case.has_feedback:
        workers.zero_()
    return rows.view(world, world, -1).transpose(0, 1).contiguous()


def simulate(case: Exchange) -> list[dict[str, Any]]:
    """What each rank should have found."""
    code, world, exponents = CODES[case.code], case.world, case.exponents()
    parts = exponents.view(world, -1) if exponents is not None else [None] * world
    scattered, workers, servers = (
        torch.zeros(world, case.numel),
        torch.zeros(world, case.numel),
        torch.zeros(case.numel),
    )
    momentum, published, owned = torch.zeros(case.numel), case.published(), case.owned()
    names = ("scattered", "reduced", "published", "worker", "server")
    found: list[dict[str, Any]] = [{name: [] for name in names} for _ in range(world)]
    packed, told = (torch.empty(world, code.row_bytes(case.part), dtype=torch.uint8) for _ in range(2))
    for step in range(case.num_steps):
        wholes = torch.stack([case.given(rank, step) for rank in range(world)])
        base = momentum if case.is_scaled else None
        rows = to_owners(case, wholes, base, scattered, exponents)
        part = torch.empty(case.part)
        for rank in range(world):
            reference.mean(code, part, rows[rank], parts[rank])
            found[rank]["scattered"].append(digest([part]))
        rows = to_owners(case, wholes, base, workers, exponents)
        mean, out = torch.empty(world, case.part), torch.empty(case.numel)
        for rank in range(world):
            reference.mean(code, mean[rank], rows[rank])
        reference.encode(code, packed, mean.view(-1), servers, exponents=exponents, is_scaled=False)
        if not case.has_feedback:
            servers.zero_()
        reference.decode(code, out, packed, exponents=exponents)
        reference.encode(code, told, owned, base=published, base_factor=-1.0, exponents=exponents, is_scaled=False)
        reference.decode(code, published, told, exponents=exponents, is_scaled=False, is_added=True)
        momentum = out
        for rank in range(world):
            found[rank]["reduced"].append(digest([out]))
            found[rank]["published"].append(digest([published]))
            found[rank]["worker"].append(digest([workers[rank], scattered[rank]]))
            found[rank]["server"].append(digest([servers.view(world, -1)[rank]]))
    return found


def check(name: str, case: Exchange, ranks: list[dict[str, Any]]) -> None:
    for rank, (found, wanted) in enumerate(zip(ranks[: case.world], simulate(case), strict=True)):
        for key in wanted:
            assert found[name][key] == wanted[key], f"{key} of rank {rank}"
        assert found[name]["reduced"] == ranks[0][name]["reduced"]
        assert found[name]["published"] == ranks[0][name]["published"]


@pytest.mark.parametrize("name", QUICK)
def test_ranks_find_what_the_simulation_finds(name: str) -> None:
    check(name, QUICK[name], together("quick"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
def test_every_code_dtype_size_and_world(name: str) -> None:
    check(name, CELLS[name], together("cells"))


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_finite_is_so_everywhere_and_leaves_no_trace(name: str) -> None:
    """The step after it is as good as ever: errors are what they were."""
    check(name, BAD[name], together("quick"))


@pytest.mark.parametrize("name", QUICK)
def test_bytes_are_those_of_packed_rows(name: str) -> None:
    """Each rank sends its packed rows but its own, once there and once back."""
    case = QUICK[name]
    one_way = (case.world - 1) * CODES[case.code].row_bytes(case.part)
    assert 8 * CODES[case.code].row_bytes(case.part) < case.part * CODES[case.code].bits + 8 * 16 + 8 * 8
    for found in together("quick")[: case.world]:
        assert found[name]["bytes"] == [[one_way, 2 * one_way, one_way]] * case.num_steps


# Over time.


@pytest.mark.parametrize("code", CODES)
def test_over_time_the_mean_is_that_of_what_was_given(code: str) -> None:
    """All that came out, and the errors that are left, are together all that was given; and errors stay small."""
    case = LONG[code]
    ranks = together("quick")[: case.world]
    every = itertools.product(range(case.world), range(NUM_LONG))
    given = torch.stack([case.given(*which).double() for which in every]).sum(0) / case.world
    came, dropped = (torch.tensor(ranks[0][name]["total"], dtype=torch.float64) for name in (code, f"{code} dropped"))
    workers = torch.tensor([found[code]["errors"][0] for found in ranks], dtype=torch.float64)
    server = torch.tensor([found[code]["errors"][1] for found in ranks], dtype=torch.float64).view(-1)
    assert torch.allclose(came + workers.mean(0) + server, given, rtol=0, atol=1e-4)
    off, without = (float((total - given).abs().max()) / NUM_LONG for total in (came, dropped))
    assert off < {"1bit": 0.8, "int4": 0.03, "int8": 0.0015}[code]
    assert without > 1.5 * off


@pytest.mark.parametrize("name", [name for name in LONG if "dropped" not in name])
def test_what_is_published_comes_near_what_the_owners_have(name: str) -> None:
    """One bit comes near by a factor a step; and nothing comes nearer than its dtype can say."""
    case = LONG[name]
    at_first = float((case.published().float() - case.owned()).abs().max())
    near = at_first * (0.2 if case.code == "1bit" else 1e-6)
    for found in together("quick")[: case.world]:
        off = float((torch.tensor(found[name]["last"]) - case.owned()).abs().max())
        assert off < max(near, {"fp32": 1e-6, "bf16": 2.0**-6, "fp16": 2.0**-9}[case.dtype])
