# SPDX-License-Identifier: Apache-2.0
"""Scaling over many GPUs: volumes and memory by hand, what hides and what does not, near-linear, the crossover."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from twinflow.cli.main import app
from twinflow.planner.cases import Setting, case_at
from twinflow.planner.costs import GPU_RESERVE, Run, timing_of
from twinflow.planner.machines import GB, GPUS, Host, Machine, rates_of
from twinflow.planner.models import gpt_cost
from twinflow.planner.placement import CLOSE
from twinflow.planner.scaling import (
    OFFLOAD,
    PLAIN,
    RATIOS,
    Ask,
    Cluster,
    Point,
    Row,
    crossover,
    default_network,
    doubling,
    efficiency,
    largest_batch,
    play,
    point,
    ring_bytes,
    scaling,
    used_bytes,
)

# The machine of the published figure: a DGX-2 with 16 V100 of 32 GB, and a GPT-2 of 50 blocks of width 4096.
DGX2 = Machine(GPUS["v100-32"], Host(1500 * GB, 48, 190e9), 16)
CLUSTER = Cluster(DGX2, default_network(DGX2))
MODEL = gpt_cost("gpt2-10b", 50_304, 1024, 50, 4096, 32)
RUN = Run(MODEL, batch=1, tokens=1024, weights="fp16")
WORLDS = doubling(128)


@pytest.fixture(scope="module")
def beside() -> list[Row]:
    return scaling(RUN, CLUSTER, WORLDS, Ask(512))


@pytest.fixture(scope="module")
def before() -> list[Row]:
    return scaling(RUN, CLUSTER, WORLDS, Ask(512, gathers_first=True))


def points(rows: Sequence[Row]) -> list[Point]:
    return [p for row in rows for p in (row.offload, row.plain) if p is not None]


def at(rows: Sequence[Row], world: int) -> Row:
    return next(row for row in rows if row.world == world)


def test_every_gpu_sends_all_but_its_own_part() -> None:
    assert ring_bytes(100.0, 1) == 0.0
    assert ring_bytes(100.0, 2) == 50.0
    assert ring_bytes(100.0, 4) == 75.0
    assert ring_bytes(128.0, 128) == 127.0


def test_gpus_fill_machines_and_share_hosts() -> None:
    assert [CLUSTER.num_nodes(w) for w in (1, 16, 17, 32, 128)] == [1, 1, 2, 2, 8]
    assert [CLUSTER.local(w).num_gpus for w in (1, 8, 16, 17, 32, 128)] == [1, 8, 16, 9, 16, 16]
    assert CLUSTER.memory(16).host_bytes == 1500 * GB
    assert CLUSTER.memory(128).host_bytes == 8 * 1500 * GB
    assert CLUSTER.memory(128).gpu_bytes == int(33.5e9 * (1 - GPU_RESERVE))
    assert CLUSTER.network_rate == pytest.approx(0.8 * 8 * 100e9 / 8)  # 8 cards of 100 Gb/s
    assert CLUSTER.ring_rate(16) == 120e9
    assert CLUSTER.ring_rate(17) == 80e9
    assert replace(CLUSTER, network_rate=500e9).ring_rate(32) == 120e9


@pytest.mark.parametrize(("world", "rate"), [(2, 120e9), (16, 120e9), (32, 80e9), (128, 80e9)])
def test_seconds_of_communication_by_hand(world: int, rate: float) -> None:
    run = replace(RUN, batch=4, world=world, stage=2)
    talk = play(OFFLOAD, run, CLUSTER).talk
    expected = 2 * MODEL.numel * (world - 1) / world / rate
    assert talk.scatter_s == pytest.approx(expected, rel=1e-5)
    assert talk.gather_s == pytest.approx(expected, rel=1e-5)
    # Behind backward: the embedding, whose gradient is complete last. Before forward: it and the first block.
    outside = MODEL.embedding_numel + MODEL.head_numel
    share = 2 * (world - 1) / world / rate
    assert 0.9 * share * outside <= talk.tail_s <= share * (outside + MODEL.blocks[0]) * 1.01
    assert talk.lead_s == pytest.approx(share * (outside + MODEL.blocks[0]), rel=1e-3)


def test_one_gpu_talks_to_nobody_and_is_the_plan_of_one_machine() -> None:
    run = replace(RUN, batch=10, micro_batches=3)
    found = play(OFFLOAD, run, CLUSTER)
    assert found.talk.exposed_s == found.talk.gather_s == 0.0
    setting = Setting(rates_of(CLUSTER.local(1)), CLUSTER.memory(1))
    case = case_at("full offload", run, setting, 1.0)
    assert found.used == case.used
    assert found.step_s == pytest.approx(case.prediction.step_s, rel=1e-3)


@pytest.mark.parametrize("kind", RATIOS)
def test_with_links_that_take_no_time_a_machine_is_as_planned_alone(kind: str) -> None:
    fast = replace(DGX2, gpu=replace(DGX2.gpu, link_rate=1e18))
    run = replace(RUN, batch=4, world=16, stage=2)
    found = play(kind, run, Cluster(fast, 80e9))
    setting = Setting(rates_of(fast), CLUSTER.memory(16))
    case = case_at(kind, run, setting, RATIOS[kind])
    assert found.step_s == pytest.approx(case.prediction.step_s, rel=2e-3)
    assert found.used.host == case.used.host


def test_memory_of_zero_2_by_hand() -> None:
    run = replace(RUN, batch=4, world=32, stage=2)
    used = used_bytes(run, 0.0, CLUSTER.memory(32))
    own = -(-MODEL.numel // 32)
    blocks = 2 * 2 * MODEL.blocks[0]  # two whole gradients of two bytes an element
    expected = 2 * MODEL.numel + (12 + 2) * own + blocks + Run(MODEL, 4, 1024).activation_bytes
    assert used.gpu_total == pytest.approx(expected, rel=1e-6)
    offloaded = used_bytes(run, 1.0, CLUSTER.memory(32))
    assert used.gpu_total - offloaded.gpu_total == pytest.approx(12 * own, rel=1e-6)
    assert offloaded.host["state"] == pytest.approx(12 * MODEL.numel, rel=1e-6)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("world", [16, 32, 64])
def test_no_larger_batch_would_fit(kind: str, world: int) -> None:
    run = replace(RUN, world=world, stage=2)
    found = largest_batch(run, CLUSTER, RATIOS[kind], 100_000)
    memory = CLUSTER.memory(world)
    assert found is not None
    assert not used_bytes(found, RATIOS[kind], memory).missing(memory).gpu_bytes
    more = replace(found, batch=found.batch + 1)
    assert used_bytes(more, RATIOS[kind], memory).missing(memory).gpu_bytes > 0


def test_batches_make_up_the_total_and_never_more(beside: list[Row]) -> None:
    for p in points(beside):
        sequences = p.run.batch * p.run.micro_batches * p.run.world
        assert sequences <= 512
        # Whole micro-batches of the largest size leave at most one of them over, but where only one fits at all.
        assert p.run.micro_batches == 1 or 512 - sequences < p.run.batch * p.run.world
    assert largest_batch(replace(RUN, world=64), CLUSTER, 1.0, 63) is None
    assert point(OFFLOAD, RUN, CLUSTER, 128, Ask(127)) is None


def test_zero_2_needs_many_gpus_and_its_batch_catches_up(beside: list[Row]) -> None:
    assert [row.plain is None for row in beside] == [True] * 4 + [False] * 4
    few = at(beside, 16).plain
    assert few is not None
    assert few.run.batch * few.run.micro_batches <= 3
    pairs = [(row.offload, row.plain) for row in beside if row.world >= 16]
    batches = [(a.run.batch, b.run.batch) for a, b in pairs if a is not None and b is not None]
    assert batches[0][0] > 3 * batches[0][1]
    assert batches[1][0] > 1.3 * batches[1][1]  # on 32 GPUs offload's is larger,
    assert [a == b for a, b in batches[2:]] == [True, True]  # on 64 and 128 they are the same


def test_offload_is_near_linear_to_128_gpus(beside: list[Row], before: list[Row]) -> None:
    for rows, least in ((beside, 0.99), (before, 0.94)):
        shares = efficiency([row.offload for row in rows])
        assert shares[0] == 1.0
        assert all(share is not None and least <= share <= 1.0 for share in shares)
        totals = [row.offload.total_tflops for row in rows if row.offload is not None]
        assert all(1.85 < more / less <= 2.02 for less, more in pairwise(totals))
        assert all(row.offload is not None and row.offload.tflops > 30.0 for row in rows)


def test_a_step_is_never_shorter_than_its_parts(beside: list[Row], before: list[Row]) -> None:
    for rows in (beside, before):
        for p in points(rows):
            assert p.step_s >= p.compute_s + p.talk.exposed_s - 1e-9
            assert p.compute_s == pytest.approx(timing_of(p.run, rates_of(CLUSTER.local(p.run.world))).gpu_s)
            flops = MODEL.model_flops(1024) * 1024 * p.run.batch * p.run.micro_batches
            assert p.tflops == pytest.approx(flops / p.step_s / 1e12)


def test_with_weights_gathered_first_zero_2_catches_up_between_32_and_64(before: list[Row]) -> None:
    """The published figure: slightly behind on 32 for its smaller batch; on 64 and 128 batches are the same."""
    assert crossover(before) == (32, 64)
    gain = at(before, 32).gain
    assert gain is not None
    assert CLOSE < gain < 1.02
    for world in (64, 128):
        assert at(before, world).ahead == ""
    for p in points(before):
        assert p.talk.lead_s == pytest.approx(p.talk.gather_s)


def test_with_weights_gathered_beside_forward_it_does_so_one_doubling_earlier(beside: list[Row]) -> None:
    assert crossover(beside) == (16, 32)
    for world in (32, 64, 128):
        gain = at(beside, world).gain
        assert gain is not None
        assert gain == pytest.approx(1.0, abs=2e-3)


def test_a_slow_network_shows_and_is_named() -> None:
    run = replace(RUN, batch=4, world=32, stage=2)
    steps = [play(PLAIN, run, replace(CLUSTER, network_rate=rate)) for rate in (80e9, 8e9, 2e9)]
    assert [p.bound_by for p in steps] == ["gpu", "link", "link"]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    slow = steps[2]
    compute = timing_of(run, rates_of(DGX2))
    # Both collectives are longer than what they run beside: nearly all of a step is communication.
    assert slow.step_s >= slow.talk.scatter_s + slow.talk.gather_s
    assert slow.step_s <= compute.gpu_s + slow.talk.scatter_s + slow.talk.gather_s
    again = play(PLAIN, replace(run, micro_batches=3), replace(CLUSTER, network_rate=2e9))
    assert again.step_s - slow.step_s == pytest.approx(2 * (compute.forward_s + slow.talk.scatter_s), rel=0.01)


def test_a_slow_host_is_the_offloads_trouble_alone() -> None:
    slow = Cluster(replace(DGX2, host=replace(DGX2.host, dram_rate=4e9)), 80e9)
    run = replace(RUN, batch=4, world=16, stage=2)
    offloaded, plain = play(OFFLOAD, run, slow), play(PLAIN, run, slow)
    assert offloaded.bound_by == "host"
    assert plain.bound_by == "gpu"
    assert plain.step_s == pytest.approx(play(PLAIN, run, CLUSTER).step_s)
    # 26 bytes a parameter and nothing hides them: a machine's ranks share its memory.
    assert offloaded.step_s > MODEL.numel * 26 / 4e9


def test_who_is_ahead_and_from_where_on(before: list[Row]) -> None:
    row = at(before, 32)
    one = row.plain
    assert one is not None

    def made(world: int, gain: float | None) -> Row:
        slower = replace(one, step_s=one.step_s / gain) if gain is not None else None
        return Row(world, one, None) if slower is None else Row(world, slower, one)

    rows = [made(1, None), made(2, 1.2), made(4, 1.004), made(8, 0.9)]
    assert [r.ahead for r in rows] == [OFFLOAD, OFFLOAD, "", PLAIN]
    assert rows[1].gain == pytest.approx(1.2)
    assert crossover(rows) == (2, 4)
    assert crossover(rows[:2]) is None
    assert crossover(rows[2:]) is None
    assert crossover([*rows, made(16, 1.1)]) is None
    assert Row(1, None, one).ahead == PLAIN
    assert Row(1, None, None).ahead == ""
    assert efficiency([None, one, replace(one, step_s=2 * one.step_s)]) == [None, 1.0, pytest.approx(0.5)]


def test_other_machines_scale_too() -> None:
    machine = Machine(GPUS["h100"], Host(2000 * GB, 112, 460e9), 8)
    cluster = Cluster(machine, default_network(machine))
    assert cluster.network_rate == 320e9
    rows = scaling(replace(RUN, weights="bf16", states="bf16"), cluster, doubling(24), Ask(256))
    assert [row.world for row in rows] == [1, 2, 4, 8, 16, 24]
    shares = efficiency([row.offload for row in rows])
    assert all(share is not None and 0.9 < share <= 1.01 for share in shares)


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="delayed_update: true cannot be used with --scaling"):
        scaling(replace(RUN, delayed=True), CLUSTER, [2], Ask(512))
    with pytest.raises(ValueError, match="--scaling is 0"):
        doubling(0)


# The command.

FLAGS = [
    "--preset",
    "gpt2-10b",
    "--gpu",
    "v100-32",
    "--gpus",
    "16",
    "--ram",
    "1500GB",
    "--cores",
    "48",
    "--dram",
    "190GB/s",
]


def plan(*options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *options])


def test_the_command_prints_a_table(beside: list[Row]) -> None:
    result = plan(*FLAGS, "--scaling", "128")
    assert result.exit_code == 0, result.output
    assert "16 x V100 32 GB" in result.stdout
    assert "80 GB/s between machines" in result.stdout
    assert "faster up to 16 GPUs. From 32 GPUs on ZeRO-2" in result.stdout
    assert result.stdout.count("does not fit") == 4
    last = at(beside, 128).offload
    assert last is not None
    assert f"{last.total_tflops:,.0f}" in result.stdout


def test_the_command_as_json(beside: list[Row]) -> None:
    result = plan(*FLAGS, "--scaling", "64", "--json", "--total-batch", "512", "--network", "80GB/s")
    found: dict[str, Any] = json.loads(result.stdout)
    assert [row["world"] for row in found["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["crossover"] == [16, 32]
    for row, expected in zip(found["rows"], beside, strict=False):
        assert expected.offload is not None
        assert row[OFFLOAD]["step_s"] == pytest.approx(expected.offload.step_s)
        assert (row[PLAIN] is None) == (expected.plain is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scaling", "0"], "--scaling is 0"),
        (["--scaling", "2", "--total-batch", "0"], "--total-batch is 0"),
        (["--scaling", "2", "--html", "x.html"], "--scaling 2 cannot be used with --html"),
        (["--scaling", "2", "--network", "fast"], "--network"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str) -> None:
    result = plan(*FLAGS, *options)
    assert result.exit_code == 1
    assert message in result.output


def test_nothing_fits_says_so() -> None:
    result = plan(*["--params", "40b", "--gpu", "v100-16", "--gpus", "8", "--scaling", "8"])
    assert result.exit_code == 1
    assert "Nothing fits on any number of GPUs." in result.output
