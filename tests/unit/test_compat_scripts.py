# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/compat/features and the published configs, against what benchmarks/compat_deepspeed.py found.

The benchmark runs them with the real package too and saves its figures. Tests compare with the saved figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import compat_cases as cases
import pytest
import torch.distributed as dist

from twinflow import compat
from twinflow.compat import __main__ as command
from twinflow.config import load_config

ROOT = Path(__file__).parents[2]
RESULT = sorted((ROOT / "benchmarks" / "results").glob("*-compat-deepspeed.md"))[-1]
# On one process; the others are in the matrix.
QUICK = ("zero_stage2", "client_optimizer", "gathered_parameters", "checkpointing_calls")


def load_benchmark() -> Any:
    spec = spec_from_file_location("compat_deepspeed", ROOT / "benchmarks" / "compat_deepspeed.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()
FOUND = benchmark.saved_result(RESULT)
ROWS = {(row["script"], row["ranks"]): row for row in FOUND["scripts"]}
FEATURES = [case for case in benchmark.all_cases() if case.path.parent == benchmark.SCRIPTS]


def test_there_are_fifty_scripts_and_all_have_a_result() -> None:
    assert len(FEATURES) == 50
    for case in benchmark.all_cases():
        assert all((case.name, ranks) in ROWS for ranks in case.ranks), case.name


def test_scripts_are_equal_or_refused() -> None:
    """On all numbers of processes."""
    refused = {row["script"] for row in FOUND["scripts"] if row["status"] == "refused"}
    assert refused == {"moe", "random_ltd"}
    assert all(row["status"] == "equal" for row in FOUND["scripts"] if row["script"] not in refused)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in command.alone().items():
        monkeypatch.setenv(name, value)
    yield
    compat.uninstall()
    sys.modules.pop("small", None)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.usefixtures("one_process")
def test_a_script_prints_what_deepspeed_prints(name: str) -> None:
    found = cases.printed(f"features/{name}.py")
    assert benchmark.compare(ROWS[name, 1]["expected"], found)[1] == ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = benchmark.Server("twinflow", sys.executable, tmp_path_factory.mktemp("logs"))
    yield found
    found.close()


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [case.name for case in FEATURES])
def test_every_script_prints_what_deepspeed_prints(server: Any, tmp_path: Path, name: str, ranks: int) -> None:
    row = ROWS[name, ranks]
    found, error = server.run(benchmark.SCRIPTS / f"{name}.py", ["--folder", str(tmp_path)], ranks)
    if row["status"] == "refused":
        assert error == row["reason"]
        return
    assert found is not None, error
    assert benchmark.compare(row["expected"], found)[1] == ""


def test_published_configs_load_as_the_result_says() -> None:
    saved = {row["config"]: row["twinflow"] for row in FOUND["configs"]}
    for one in json.loads(benchmark.CONFIGS.read_text()):
        reason = saved[f"{one['project']}: {one['file']}"]
        if not reason:
            load_config(one["config"])
            continue
        with pytest.raises(ValueError, match=r".") as caught:
            load_config(one["config"])
        assert str(caught.value) == reason
