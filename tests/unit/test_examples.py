"""Every script of examples/ runs as it is, and says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_support import run_script

import twinflow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PROMISES = {
    "host_adamw.py": "the resumed run ends with the same bits",
    "state_formats.py": "int8     6.0",
    "twin_optimizer.py": "the loss fell",
    "engine.py": "the resumed run has the same bits",
    "sparse_attention.py": "the sparse model learns",
    "pipeline.py": "the loss fell",
}


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= set(PROMISES)


SLOW = ("state_formats.py",)  # in the matrix


def cell(script: Path) -> object:
    return pytest.param(script, id=script.name, marks=[pytest.mark.matrix] if script.name in SLOW else [])


@pytest.mark.parametrize("script", [cell(script) for script in EXAMPLES])
def test_example_runs(script: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    result = run_script(script, cwd, tmp_path)
    assert result.returncode == 0, result.stderr
    assert PROMISES.get(script.name, "") in result.stdout
    assert not list(cwd.iterdir()), "an example leaves nothing behind"


@pytest.mark.matrix
def test_the_pipeline_of_two_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    script = next(path for path in EXAMPLES if path.name == "pipeline.py")
    alone = run_script(script, tmp_path, tmp_path)
    path = os.pathsep.join([str(Path(twinflow.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "twinflow", "launch", "--num_gpus", "2", str(script), "--stages", "2"]
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    two = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert two.returncode == 0, two.stderr
    losses = [text.split("losses ")[1].splitlines()[0].split() for text in (alone.stdout, two.stdout)]
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], abs=2e-3)
    assert "ranks 2, stages 2" in two.stdout
    assert two.stdout.count(PROMISES["pipeline.py"]) == 1
