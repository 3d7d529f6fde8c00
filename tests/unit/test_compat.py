# SPDX-License-Identifier: Apache-2.0
"""`import deepspeed` as twinflow: what is found, what is refused with which words, and that it is only when asked."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from twinflow import compat
from twinflow.cli.launch import CONTEXT, launch
from twinflow.compat import CompatFinder, missing
from twinflow.compat import __main__ as command
from twinflow.compat.names import ALIASES, TABLE, Ours, Refused
from twinflow.launch.worker import rank_words


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def test_nothing_is_there_until_it_is_asked_for() -> None:
    assert not any(isinstance(finder, CompatFinder) for finder in sys.meta_path)
    code = (
        "import importlib.util, sys, twinflow.compat\n"
        "before = importlib.util.find_spec('deepspeed')\n"
        "assert 'twinflow' not in str(before), before\n"
        "twinflow.compat.install()\n"
        "import deepspeed\n"
        "assert deepspeed.__version__ == '0.19.8', deepspeed\n"
        "assert 'torch' not in sys.modules, 'names are looked up when they are used'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def known_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def test_libraries_that_look_for_it_find_it() -> None:
    before = known_version()  # of a real one, where the tests run beside it
    compat.install()
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.ops.adam") is not None
    assert importlib.metadata.version("deepspeed") == compat.VERSION
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.version("torch")  # others are found as before
    compat.uninstall()
    assert "deepspeed" not in sys.modules
    assert known_version() == before


def test_the_real_one_is_not_pushed_aside_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(RuntimeError, match="imported already"):
        compat.install()


@pytest.mark.parametrize("path", [path for path in TABLE if path])
def test_every_module_is_imported_by_name(path: str, installed: None) -> None:
    module = importlib.import_module(f"deepspeed.{path}")
    top = importlib.import_module("deepspeed")
    for part in path.split("."):
        top = getattr(top, part)
    assert module is top
    for name, entry in TABLE[path].items():
        if isinstance(entry, Ours):
            assert getattr(module, name) is entry.resolve()
            assert name in dir(module)


def test_a_module_with_two_names_is_one_module(installed: None) -> None:
    for alias, path in ALIASES.items():
        assert importlib.import_module(f"deepspeed.{alias}") is importlib.import_module(f"deepspeed.{path}")
    assert importlib.import_module("twinflow.compat.deepspeed") is importlib.import_module("deepspeed")


REFUSED = [
    (f"deepspeed.{path}.{name}" if path else f"deepspeed.{name}", entry)
    for path, names in TABLE.items()
    for name, entry in names.items()
    if isinstance(entry, Refused)
]


def test_what_is_refused_can_be_imported_and_says_what_to_use(installed: None) -> None:
    """A script may mention a name that it does not use, also as a base class and in isinstance()."""
    for name, entry in REFUSED:
        above, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(above), last)
        names: dict[str, type] = {}
        exec(f"from {above} import {last} as found\nclass Own(found): pass", names)
        assert names["found"] is found
        assert not isinstance(3, found)
        for call in (found, names["Own"], lambda used=found: used.attribute):
            with pytest.raises((NotImplementedError, AttributeError), match=re.escape(entry.remedy)):
                call()
        assert importlib.import_module(f"{name}.deeper") is importlib.import_module(f"{name}.deeper")


def test_modules_below_a_refused_one(installed: None) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import has_moe_layers
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    with pytest.raises(NotImplementedError, match=r"deepspeed\.moe\.layer\.MoE is not.*experts of transformers"):
        MoE(hidden_size=4)
    assert OffloadStateTypeEnum("hp_params") is OffloadStateTypeEnum.hp_params
    assert has_moe_layers(None) == (False, 0)
    with pytest.raises(ImportError, match=r"deepspeed\.momo is not available"):
        importlib.import_module("deepspeed.momo")


def test_a_name_that_nobody_knows(installed: None) -> None:
    with pytest.raises(AttributeError, match=r"deepspeed\.initialise is not available.*Did you mean initialize\?"):
        _ = importlib.import_module("deepspeed").initialise
    with pytest.raises(ImportError, match=r"ops\.adam\.FusedAdm is not available.*Did you mean FusedAdam\?"):
        exec("from deepspeed.ops.adam import FusedAdm")
    assert "Available names: DeepSpeedCPULion" in missing("ops.lion", "zzz")


# The command.


def test_a_script_runs_as_main_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside, deepspeed\n"
        "print(__name__, sys.argv[1:], beside.VALUE, deepspeed.__version__, os.environ['LOCAL_RANK'])\n"
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in command.alone():
        monkeypatch.setenv(name, "")  # so that it is taken away afterwards
        monkeypatch.delenv(name)
    command.main([str(script), "--deepspeed_config", "a b"])
    compat.uninstall()
    assert capsys.readouterr().out == "__main__ ['--deepspeed_config', 'a b'] 3 0.19.8 0\n"


@pytest.mark.parametrize(("words", "error"), [([], "No script"), (["-m"], "No module"), (["gone.py"], "gone.py")])
def test_a_command_without_a_script(words: list[str], error: str) -> None:
    before = dict(os.environ)
    with pytest.raises(SystemExit, match=error):
        command.main(words)
    assert os.environ == before
    assert not any(isinstance(finder, CompatFinder) for finder in sys.meta_path)


def test_the_launcher_hands_it_on(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    app = typer.Typer()
    app.command(context_settings=CONTEXT)(launch)
    for options, found in ((["--compat"], True), ([], False)):
        words = [*options, "--num_procs", "2", "--dry_run", str(script), "--compat"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert (f"twinflow.launch.worker --compat {script} --compat" in result.output) is found
        assert result.output.strip().endswith(f"{script} --compat")
    theirs = ["--num_accelerators", "2", "--force_multi", "-q", "--launcher", "pdsh", "--log_level", "info"]
    result = CliRunner().invoke(app, ["--compat", *theirs, "--dry_run", str(script)])
    assert result.exit_code == 0, result.output
    assert "note: --force_multi has no effect, because" in result.output
    for words in (["--launcher", "slurm"], ["--no_ssh"], ["--autotuning", "run"]):
        refused = CliRunner().invoke(app, ["--compat", *words, "--dry_run", str(script)])
        assert refused.exit_code == 1
        assert f"error: {words[0]} is " in refused.output
    refused = CliRunner().invoke(app, ["--no_local_rank", "--dry_run", str(script)])
    assert refused.exit_code == 1
    assert "--no_local_rank cannot be used with a launch without --compat" in refused.output


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--compat", "x.py", "--compat"], ["-m", "twinflow.compat", "x.py", "--local_rank=1", "--compat"]),
        (["--compat", "--module", "m", "a"], ["-m", "twinflow.compat", "-m", "m", "--local_rank=1", "a"]),
        (["--compat", "--no_local_rank", "x.py"], ["-m", "twinflow.compat", "x.py"]),
        (["--module", "m", "--no_local_rank"], ["-m", "m", "--no_local_rank"]),
    ],
)
def test_scripts_for_deepspeed_are_told_their_local_rank(words: list[str], found: list[str]) -> None:
    """As DeepSpeed's launcher does: many take -1, their default, for a run without ranks."""
    assert rank_words(words, "1") == found
