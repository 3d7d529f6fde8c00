"""The script for machines with several GPUs, with two processes on the CPU: every way gives the losses of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "several_gpus.py"


@pytest.mark.matrix
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--cpu", "--ranks", "2", "--out", str(tmp_path / "report.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = (tmp_path / "report.md").read_text()
    assert report.count("| ok |") == 11
    assert "All ways agree." in report
    assert "GB/s" in report
    assert "forward and backward alone" in report


@pytest.mark.matrix
def test_more_ranks_than_gpus_are_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--ranks", "99"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "99 ranks need 99 GPUs" in done.stderr
