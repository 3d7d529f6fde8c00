# SPDX-License-Identifier: Apache-2.0
"""The script for machines with several GPUs, on the CPU: two processes give the losses of PyTorch, and one process has
the bits of a run without a process group.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "several_gpus.py"


@pytest.mark.matrix
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--cpu",
        "--ranks",
        "2",
        "--budget",
        "250",
        "--out",
        str(tmp_path / "report.md"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = (tmp_path / "report.md").read_text()
    assert report.count("| ok |") == 12
    assert "all results are exact: ok" in report
    assert "All ways agree." in report
    assert "GB/s" in report
    assert "forward and backward alone" in report


@pytest.mark.matrix
def test_one_rank_has_the_bits_of_no_group(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    command = [
        sys.executable,
        str(SCRIPT),
        "--cpu",
        "--ranks",
        "1",
        "--budget",
        "250",
        "--save",
        "--save-to",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = folder.iterdir()
    report = path.read_text()
    assert report.count("| 0.0e+00 |") == report.count("| ok |") == 14
    assert "all results are exact: ok" in report


@pytest.mark.matrix
def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    command = [sys.executable, str(SCRIPT), "--cpu", "--ranks", "1", "--budget", "15", "--out", str(out)]
    subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert out.read_text().count("not run: no time left") == 14


@pytest.mark.matrix
def test_more_ranks_than_gpus_are_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--ranks", "99"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "99 ranks need 99 GPUs" in done.stderr
