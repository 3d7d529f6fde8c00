# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank: bytes a parameter and activations by hand, and beside the real engine run alone on the CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from dist_support import run_ranks
from planned_stage_cases import measured_beside_planned

from twinflow.parallel.layout import Layout
from twinflow.parallel.memory import (
    WORKSPACE,
    fullest_rank,
    held_bytes,
    in_flight_bytes,
    kept_bytes,
    layer_bytes,
    most_held,
    published_bytes,
    put_off_bytes,
    rank_bytes,
)
from twinflow.parallel.shapes import Shape, shape_like
from twinflow.planner.costs import Memory, Run, bytes_of, placed_at
from twinflow.planner.models import gpt_cost

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "planned_stage.py"
SHAPE = Shape(8, 1024, 16, 512, vocab_size=4096)


def a_param(layout: Layout) -> tuple[float, float]:
    """Bytes on the GPU and on the host."""
    found = held_bytes(100.0, layout)
    return found.gpu_bytes / 100.0, found.host_states / 100.0


def test_zero_shares_what_it_says_as_published() -> None:
    assert [published_bytes(100.0, stage, 4).gpu_bytes for stage in range(4)] == [1600.0, 700.0, 550.0, 400.0]
    offloaded = published_bytes(100.0, 2, 4, offload=True)
    assert (offloaded.gpu_bytes, offloaded.host_states) == (250.0, 300.0)
    table = [Layout(2, 1, 4, 8, zero=stage, published=True) for stage in range(4)]
    block = shape_like(13e9).layer_numel
    assert [fullest_rank(shape_like(13e9), one).staging for one in table] == [0.0, 0.0, 4.0 * block, 8.0 * block]


def test_bytes_a_parameter_of_the_engine() -> None:
    """2 weight, 4 sums, 2 that wait for the norm, 10 of state; the last two of a rank's own part."""
    stages = [Layout(2, 1, 4, 8, zero=zero) for zero in range(4)]
    assert [a_param(one)[0] for one in stages] == [18.0, 9.0, 9.0, 4.5]
    assert a_param(replace(stages[1], num_micro_batches=1))[0] == 5.0  # nothing to sum
    assert a_param(replace(stages[1], offload=True)) == (6.5, 3.0)
    alone = replace(stages[2], num_pp=1)
    assert a_param(alone)[0] == 2.0 + (4.0 + 2.0 + 10.0) / 4  # one micro-batch after the other: sums in parts too
    assert a_param(replace(alone, offload=True)) == (2.5, 4.0)


def test_layers_keep_what_tensor_ranks_share() -> None:
    units, statistics = 512 * 1024, 4 * 512 * (4 + 16)
    assert layer_bytes(SHAPE, Layout(1, 1, 1, 1)) == 32 * units + statistics
    assert layer_bytes(SHAPE, Layout(1, 4, 1, 1)) == (32 * units + statistics) / 4
    assert layer_bytes(SHAPE, Layout(1, 4, 1, 1, partitions=False)) == (8 + 24 / 4) * units + 4 * 512 * (4 + 16 / 4)
    assert layer_bytes(SHAPE, Layout(1, 1, 1, 1, micro_batch=3)) == 3 * (32 * units + statistics)
    table = Layout(1, 1, 1, 1, published=True)
    assert layer_bytes(SHAPE, table) == 34 * units
    assert layer_bytes(SHAPE, replace(table, num_tp=4, partitions=False)) == (10 + 24 / 4) * units
    assert layer_bytes(replace(SHAPE, keeps_scores=True), table) == 34 * units + 5 * 16 * 512 * 512


def test_what_zbv_puts_off_is_held() -> None:
    """With checkpointing the halves of a backward leave far more than a layer's input: the later ranks are fullest."""
    assert most_held(0, 4, 16) == ((8, 0), (7, 1))
    assert (0, 7) in most_held(3, 4, 16)
    layout = Layout(4, 1, 1, 16, schedule="zbv", num_chunks=2)
    kept, put_off = kept_bytes(SHAPE, layout), put_off_bytes(SHAPE, layout)
    assert put_off == 16 * kept
    first, last = (in_flight_bytes(SHAPE, layout, rank, 2) for rank in (0, 3))
    assert first == 7 * kept + put_off
    assert last == 7 * put_off
    plain = replace(layout, checkpointing=False)
    assert in_flight_bytes(SHAPE, plain, 0, 2) == pytest.approx(8 * layer_bytes(SHAPE, plain), rel=0.01)


def test_the_ends_of_the_model() -> None:
    """A tied embedding is summed in fp32 on two ranks, and its copies at the end of a step take most there: without
    replicas what is given, what is taken, their sum and a copy that travels; with two, what is given beside the sum."""
    shape = Shape(8, 512, 8, 64, vocab_size=65_536)
    end, layout = shape.end_numel, Layout(2, 1, 1, 4)
    first, last = (rank_bytes(shape, layout, rank) for rank in (0, 1))
    assert first.working + first.activations == pytest.approx(8 * end)
    assert rank_bytes(shape, replace(layout, num_dp=2), 0).working + first.activations == pytest.approx(
        6 * end, rel=0.1
    )
    assert last.working > 4 * end
    tied_here = replace(layout, schedule="zbv", num_chunks=2)
    assert rank_bytes(shape, tied_here, 0).working < 12 * end
    ends = rank_bytes(shape, tied_here, 0).state.weights + rank_bytes(shape, tied_here, 1).state.weights
    assert ends == 2 * shape.numel  # one copy
    many = rank_bytes(shape, replace(layout, schedule="gpipe", num_micro_batches=8), 1)
    assert many.working > (4 + 8 * 4) * end  # every loss keeps its gradient


def test_without_a_pipeline_it_is_the_planner_of_one_machine() -> None:
    """Weights, gradients and state as `twinflow plan` has them for one card."""
    cost = gpt_cost("gpt", 4096, 512, 8, 1024, 16)
    run = Run(cost, 1, 512)
    used = bytes_of(run, placed_at(run, 0.0), Memory(10**12, 10**12))
    mine = held_bytes(float(cost.numel), Layout(1, 1, 1, 1, zero=0))
    assert mine.states == pytest.approx(used.gpu["state"], rel=0.01)
    assert mine.weights == pytest.approx(used.gpu["weights"], rel=0.01)
    assert mine.gradients == pytest.approx(used.gpu["gradients"], rel=0.01)


def test_workspace_is_counted_once() -> None:
    found = rank_bytes(SHAPE, Layout(2, 1, 2, 4), 0)
    parts = found.state.gpu_bytes + found.activations + found.working + found.staging
    assert found.gpu_bytes == parts + WORKSPACE


@pytest.mark.matrix
@pytest.mark.parametrize("case", [3, 4], ids=["1f1b", "zbv"])
def test_a_stage_run_alone_takes_what_is_planned(case: int) -> None:
    """The real engine on the CPU, live tensors counted, with stand-ins for other ranks: within 5%.

    With 1f1b several backwards run with no forward between them.
    """
    (found,) = run_ranks(1, measured_beside_planned, case)
    assert len(found) == 2
    assert max(map(abs, found)) < 0.05


@pytest.mark.matrix
def test_stages_of_all_kinds_take_what_is_planned() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--tiny"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("MB, measured") == 15
