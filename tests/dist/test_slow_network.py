# SPDX-License-Identifier: Apache-2.0
"""benchmarks/slow_network.py on a small model: hosts on a bridge with a limited rate, and the bytes that they send,
against arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from netns_support import has_ended, why_no_switch

import twinflow
from twinflow.codes import CODES
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.rules.formats import BLOCK

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]  # five processes that import torch, on a busy machine
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_network.py"
LIMIT_S = 400.0
NEAR = 0.03


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    reason = why_no_switch(4, 1000.0)
    if reason:
        pytest.skip(f"no hosts on a bridge here: {reason}")


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(Path(twinflow.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), "--tiny"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@cache
def facts() -> dict[str, Any]:
    with started() as process:
        text, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(text.split("```json\n")[1].split("\n```")[0])
    return found


def row(way: str) -> dict[str, Any]:
    (found,) = (row for row in facts()["rows"] if row["way"] == way)
    return found


def sizes() -> list[int]:
    return [param.numel() for param in GPT(GPTConfig(**facts()["shape"])).parameters()]


def padded(numel: int, to: int) -> int:
    return -(-numel // to) * to


def agreed_bytes() -> int:
    """Each rank's norm, and which gradients it has."""
    return (facts()["world"] - 1) * 8 * (1 + len(sizes()))


def compressed_bytes() -> int:
    """Of a rank and step: signs and scales to the owners of parts, and from the owner of one to all."""
    world = facts()["world"]
    numel = padded(sum(padded(size, BLOCK) for size in sizes()), world * BLOCK)
    return 2 * (world - 1) * CODES["1bit"].row_bytes(numel // world) + agreed_bytes()


def ring_bytes(item_bytes: int) -> float:
    """Of a rank and step that sums gradients of this size."""
    world = facts()["world"]
    return 2 * (world - 1) / world * item_bytes * sum(sizes())


def test_compressed_steps_send_one_bit_an_element() -> None:
    found, expected = row("onebit"), compressed_bytes()
    assert found["counted_bytes"] == expected
    assert 1.0 < found["payload_bytes"] / expected < 1.0 + NEAR
    assert found["payload_bytes"] < found["wire_bytes"]


@pytest.mark.parametrize(("way", "item_bytes", "fewer"), [("fp32", 4, 30.0), ("bf16", 2, 15.0)])
def test_they_send_far_less_than_gradients(way: str, item_bytes: int, fewer: float) -> None:
    assert row(way)["payload_bytes"] == pytest.approx(ring_bytes(item_bytes), rel=NEAR)
    assert row(way)["payload_bytes"] > fewer * row("onebit")["payload_bytes"]


def test_steps_before_the_switch_send_bf16() -> None:
    assert row("warmup")["payload_bytes"] == pytest.approx(ring_bytes(2) + agreed_bytes(), rel=NEAR)


def test_a_whole_run_is_the_formula() -> None:
    num_steps, freeze_step = facts()["num_steps"]["whole-onebit"], facts()["freeze_step"]
    # At the switch rank 0 sends one byte for each parameter to all others, which is a quarter of a step in bf16.
    switch_bytes = ring_bytes(2) / 4
    before, after = freeze_step * (ring_bytes(2) + agreed_bytes()), (num_steps - freeze_step) * compressed_bytes()
    assert row("whole-onebit")["payload_bytes"] == pytest.approx((before + after + switch_bytes) / num_steps, rel=0.01)
    share = freeze_step / num_steps
    fewer = row("whole-bf16")["payload_bytes"] / row("whole-onebit")["payload_bytes"]
    assert fewer == pytest.approx(1.0 / (share + (1.0 - share) / 16.0 + 0.25 / num_steps), rel=NEAR)


def test_a_rate_is_not_exceeded() -> None:
    for found in facts()["rows"]:
        assert found["wire_bytes"] * 8 < 1.1e6 * found["mbit"] * found["seconds"], found["way"]


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(folder.name))
    return found


def is_rank(pid: int) -> bool:
    try:
        return b"--rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def wait_until(is_so: Any) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_nothing_is_left_when_it_is_killed() -> None:
    with started() as process:
        wait_until(lambda: sum(map(is_rank, children(process.pid))) == 4 or process.poll() is not None)
        below = children(process.pid)
        assert len(below) >= 9  # four ranks, and those that keep five namespaces
        process.kill()
    wait_until(lambda: all(map(has_ended, below)))
