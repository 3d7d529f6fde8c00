# SPDX-License-Identifier: Apache-2.0
"""benchmarks/largest_model.py: the plan of Llama-2-70B on an H200, and the refusal of what does not fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "largest_model.py"


def planned(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--plan-only", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the plan is for the data sheet of an H200
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)


@pytest.mark.matrix
def test_the_plan_of_seventy_billion_parameters() -> None:
    done = planned()
    assert done.returncode == 0, done.stderr
    assert "68.98 B parameters" in done.stdout
    gpu, room = map(float, re.findall(r"GPU ([\d.]+) of ([\d.]+) GB", done.stdout)[0])
    assert 0.9 * room < gpu <= 0.96 * room
    assert 800 < float(re.findall(r"(\d+) tokens/s", done.stdout)[0]) < 1200


@pytest.mark.matrix
def test_what_does_not_fit_is_not_built() -> None:
    done = planned("--layers", "100")
    assert done.returncode == 1
    assert re.search(r"The plan does not fit: .* [1-9][\d.]* GB of host memory are missing", done.stderr)
