"""Every script of examples/ runs as it is, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_support import run_script

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PROMISES = {
    "host_adamw.py": "the resumed run ends with the same bits",
    "state_formats.py": "int8     6.0",
    "twin_optimizer.py": "the loss fell",
    "engine.py": "the resumed run has the same bits",
    "sparse_attention.py": "the sparse model learns",
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
