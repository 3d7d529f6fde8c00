# SPDX-License-Identifier: Apache-2.0
"""The file of state over a ring with short reads, interrupted requests and failures (tests/native/ring_faults.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["csrc/state_file.cpp", "csrc/crc32.cpp", "tests/native/ring_faults.cpp"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("ring") / "ring_faults"
    flags = ["-std=c++17", "-O1", "-pthread", "-DTF_BUILDING"]
    subprocess.run([compiler, *flags, *(ROOT / source for source in SOURCES), "-o", path], check=True)
    return path


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("rare", "works"),
        ("result", "Input/output error"),
        ("submit", "Operation not permitted"),
        ("next", "Bad file descriptor"),
    ],
)
def test_what_kernels_rarely_do(program: Path, tmp_path: Path, fault: str, found: str) -> None:
    """Blocks of which a part is moved are completed, and a ring that breaks is an error of the file."""
    run = subprocess.run([program, tmp_path / "file", fault], capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout) == (0, found + "\n"), run.stderr
