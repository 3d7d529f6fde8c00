# SPDX-License-Identifier: Apache-2.0
"""benchmarks/delayed_update.py with a tiny model: table, curves and picture, and runs without time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "delayed_update.py"


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [200, 10])  # 10 s are kept for validation, so that no run has time
def test_quality_is_saved(tmp_path: Path, budget: int) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--parts", "quality", "--budget", str(budget)]
    command += ["--save", "--save-to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table, curves, drawing = (next(tmp_path.glob(f"*-delayed-update.{kind}")) for kind in ("md", "json", "svg"))
    runs = json.loads(curves.read_text())["runs"]
    assert len(runs) == 4
    is_done = budget > 10
    assert [("valid" in run) for run in runs] == [is_done] * 4
    assert table.read_text().count("Left out") == (0 if is_done else 4)
    before = drawing.read_text()
    drawing.unlink()
    subprocess.run([sys.executable, str(SCRIPT), "--plot", str(curves)], check=True)
    assert drawing.read_text() == before
