# SPDX-License-Identifier: Apache-2.0
"""benchmarks/pipeline_network.py with one small batch: over a slow network stages across machines beat data
parallelism, with the same losses, and the links carry what arithmetic says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from netns_support import why_no_switch

import twinflow
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel.wire import HEADER_NUMEL

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]  # five processes that import torch, on a busy machine
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline_network.py"
LIMIT_S = 800.0
STAGED = ("pipeline", "hybrid")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    reason = why_no_switch(4, 500.0)
    if reason:
        pytest.skip(f"no hosts on a bridge here: {reason}")


@cache
def facts() -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(Path(twinflow.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), "--tiny"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            text, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
        finally:
            process.kill()
    found: dict[str, Any] = json.loads(text.split("```json\n")[1].split("\n```")[0])
    return found


def row(way: str) -> dict[str, Any]:
    (found,) = (row for row in facts()["rows"] if row["way"] == way)
    return found


def shape() -> GPTConfig:
    return GPTConfig(**facts()["scale"]["shape"])


@pytest.mark.parametrize("way", STAGED)
def test_stages_across_machines_are_twice_as_fast(way: str) -> None:
    assert row("data")["seconds"] > 2.0 * row(way)["seconds"]


@pytest.mark.parametrize("way", STAGED)
def test_losses_are_those_of_data_parallelism(way: str) -> None:
    losses = row("data")["losses"]
    assert len(losses) == facts()["scale"]["num_steps"]
    assert losses[-1] < losses[0]
    assert row(way)["losses"] == pytest.approx(losses, abs=1e-4)


def test_data_sends_all_gradients_and_weights() -> None:
    """A quarter of the gradients from each of two ranks to each of two, and weights in a ring of four."""
    numel = sum(param.numel() for param in GPT(shape()).parameters())
    assert row("data")["sent_bytes"] == pytest.approx(4 * numel * (4 / 4 + 3 / 4), rel=0.04)


@pytest.mark.parametrize("way", STAGED)
def test_stages_send_activations_and_what_is_tied(way: str) -> None:
    """What is tied once, however many replicas there are: each sends its share (parallel/ties.py)."""
    found = shape()
    messages = row(way)["batch"] * (4 * found.context * found.hidden + 8 * HEADER_NUMEL)
    tied = 4 * found.vocab_size * found.hidden
    assert row(way)["sent_bytes"] == pytest.approx(messages + tied, rel=0.06)
    assert 8 * row(way)["sent_bytes"] < row("data")["sent_bytes"]


def test_rates_are_as_in_the_figure_and_are_not_exceeded() -> None:
    between = facts()["scale"]["between_mbit"]
    assert facts()["inside_mbit"] / between == 50 / 4
    for way in ("data", *STAGED):
        assert row(way)["sent_bytes"] * 8 < 1.1e6 * between * row(way)["seconds"], way
