# SPDX-License-Identifier: Apache-2.0
"""The attention kernels for Hopper, run on the CPU by an emulator: barriers, tiles, masks and results."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import hopper_emulator as emulator
import pytest

from twinflow.attention import hopper

pytestmark = pytest.mark.skipif(not hopper._has_language(), reason="needs a Triton that the kernels know")
FAST = ("64 heads with patterns of their own", "80")


def problems(*names: str) -> dict[str, str]:
    """What went wrong in each case, all of them in one process."""
    paths = [str(Path(emulator.__file__).parent), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, emulator.__file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_some_cases_against_the_truth() -> None:
    """A width of two parts, patterns of heads, documents, and odd lengths."""
    assert problems(*FAST) == dict.fromkeys(FAST, "")


@pytest.mark.matrix
@pytest.mark.parametrize("start", range(3))
def test_all_other_cases_against_the_truth(start: int) -> None:
    names = [case.name for case in emulator.CASES if case.name not in FAST][start::3]
    assert problems(*names) == dict.fromkeys(names, "")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("acc, operand = finish_sums(acc, operand)", "finish_sums(acc, operand)"),
        ("scores = warpgroup_mma_wait(S.NUM_PARTS, deps=[scores])", "pass"),
        ("mbarrier.arrive(bars[5].index(v_stage), count=1)", "pass"),
        ("mbarrier.wait(bars[4].index(v_stage), (number // SECOND) & 1)", "pass"),
    ],
)
def test_without_a_wait_the_emulator_notices(old: str, new: str, tmp_path: Path) -> None:
    """A result that is not waited for, a buffer that is never given back, or one that is read before it is full."""
    spec = importlib.util.find_spec("twinflow.attention.kernels_hopper")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert old in source
    broken = tmp_path / "kernels_hopper.py"
    broken.write_text(source.replace(old, new))
    ast.parse(broken.read_text())
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nimport hopper_emulator as emulator\nfrom pathlib import Path\n"
        "emulator.PATIENCE_S = 3.0\n"
        f"emulator.SOURCE = Path({str(broken)!r})\n"
        "sys.argv[1:] = ['128 odd causal', '64']\nemulator.main()\n"
    )
    paths = [str(Path(emulator.__file__).parent), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=280)
    assert any(json.loads(line)[1] for line in done.stdout.splitlines()), done.stderr[-2000:]
