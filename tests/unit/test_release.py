# SPDX-License-Identifier: Apache-2.0
"""What a release is made of: one version and license, wheels for two architectures, and completion for shells."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fork_support import run_script
from typer.main import get_command

import twinflow
from twinflow.cli.main import Subcommands, app

ROOT = Path(__file__).parents[2]
if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None


def test_the_citation_names_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {twinflow.__version__}" in lines


def test_every_source_file_names_the_license() -> None:
    found = {path: mark for mark, path in sources()}
    assert {path.suffix for path in found} == {".py", ".h", ".cpp", ".sh", ".txt", ""}
    without = []
    for path, mark in found.items():
        lines = path.read_text().splitlines()
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        if first != f"{mark} SPDX-License-Identifier: Apache-2.0":
            without.append(str(path.relative_to(ROOT)))
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert not without, "the first line of a source file, or the one after #!, names the license"


def sources() -> Iterator[tuple[str, Path]]:
    """The sources of this checkout, with what begins a comment in their language."""
    for folder in ("src", "csrc", "tests", "benchmarks", "examples", "docs"):
        for pattern, mark in (("*.py", "#"), ("*.sh", "#"), ("*.h", "//"), ("*.cpp", "//")):
            for path in (ROOT / folder).rglob(pattern):
                yield mark, path
    yield "#", ROOT / "CMakeLists.txt"
    yield "#", ROOT / "Makefile"


@pytest.mark.skipif(tomllib is None, reason="tomllib is in Python 3.11")
def test_the_version_has_one_place_and_wheels_two_architectures() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    source = project["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert (ROOT / source).read_text().count(f'"{twinflow.__version__}"') == 1
    assert project["tool"]["cibuildwheel"]["archs"] == ["x86_64", "aarch64"]


@pytest.mark.skipif(tomllib is None, reason="tomllib is in Python 3.11")
def test_the_workflow_tests_the_pythons_that_the_package_names() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [found[1] for line in classifiers if (found := re.fullmatch(r"Programming .* :: (3\.\d+)", line))]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert named
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("twinflow train --pipeline-s", {"--pipeline-schedule"}),
        ("twinflow tr", {"train"}),
        ("twinflow ", {"train", "finetune", "plan", "doctor", "launch", "export", "import", "bench", "attention"}),
    ],
)
def test_the_shell_completes(words: str, completed: set[str], tmp_path: Path) -> None:
    env = {"_TWINFLOW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    script = tmp_path / "complete.py"
    script.write_text("from twinflow.cli.main import app; app(prog_name='twinflow')")
    done = run_script(script, tmp_path, tmp_path, timeout_s=60, **env)
    assert set(done.stdout.split()) == completed, done.stderr


def test_every_subcommand_is_there_under_its_name() -> None:
    group = get_command(app)
    with group.make_context("twinflow", ["--help"], resilient_parsing=True) as context:
        assert isinstance(group, Subcommands)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found.name == name
            assert found.help
        assert group.get_command(context, "nonsense") is None


def test_the_help_and_the_version_do_not_wait_for_torch() -> None:
    for words in (["--version"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "twinflow", *words], capture_output=True, text=True, check=True
        )
        assert "twinflow" in done.stdout
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert "twinflow.cli.main" in loaded
        assert "torch" not in loaded
