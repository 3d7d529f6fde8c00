# SPDX-License-Identifier: Apache-2.0
"""Training with compact states follows fp32 states (benchmarks/compact_states.py runs all 2,000 steps)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compact_states.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_the_small_gpt_follows_fp32(states: str) -> None:
    spec = importlib.util.spec_from_file_location("compact_states", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    exact, compact = (benchmark.train(kind, seed=0, steps=250, batch_size=4) for kind in ("fp32", states))
    assert exact < 3.0
    assert compact == pytest.approx(exact, rel=0.01)
