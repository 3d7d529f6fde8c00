# SPDX-License-Identifier: Apache-2.0
"""Code in the README and the docs: what a page shows has been run, or at least read by who would read it.

The name after the fence says which. `python` and `bash` are run, each block by itself in an empty folder (`bash` holds
`twinflow` commands alone, and needs no shell). `py` is compiled. `sh` is for reading, but its options exist. `json` is
a config, which our reader takes. `<!-- slow -->` before a block leaves it to the matrix.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from fork_support import process_with, run_script

from twinflow.cli.main import COMMANDS, app, load
from twinflow.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- slow -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
KINDS = {"", "python", "py", "bash", "sh", "json", "yaml", "text", "diff"}


def blocks(*kinds: str) -> list[Any]:
    """The blocks of these kinds, on all pages."""
    found = []
    for page in PAGES:
        numbers = dict.fromkeys(KINDS, 0)
        for slow, kind, text in BLOCK.findall(page.read_text()):
            numbers[kind] = numbers.get(kind, 0) + 1
            if kind in kinds:
                name = f"{page.name}-{kind}-{numbers[kind]}"
                found.append(pytest.param(text, id=name, marks=[pytest.mark.matrix] if slow else []))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The lines of a shell block, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    assert {kind for _, kind, _ in BLOCK.findall(text)} <= KINDS
    assert len(re.findall(r"^```", text, re.M)) == 2 * len(BLOCK.findall(text)), "a block without an end"


@pytest.fixture(scope="module")
def with_transformers() -> Iterator[Callable[..., Any]]:
    with process_with("transformers.models.llama.modeling_llama", "transformers.trainer") as call:
        yield call


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    script, cwd = tmp_path / "block.py", tmp_path / "cwd"
    script.write_text(block)
    cwd.mkdir()
    if "from transformers import" in block and "compat" not in block:
        result = request.getfixturevalue("with_transformers")(run_script, script, cwd, tmp_path, timeout_s=120)
    else:
        result = run_script(script, cwd, tmp_path, timeout_s=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_run(block: str, tmp_path: Path) -> None:
    script, cwd = tmp_path / "block.py", tmp_path / "cwd"
    cwd.mkdir()
    for words in commands(block):
        assert words[0] == "twinflow", f"{words[0]} is not run here: use ```sh for what is only read"
        script.write_text(f"import sys\n\nfrom twinflow.cli.main import main\n\nsys.argv = {words!r}\nmain()\n")
        result = run_script(script, cwd, tmp_path, timeout_s=120)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("block", blocks("py"))
def test_python_that_is_not_run_compiles(block: str) -> None:
    compile(block, "block", "exec")


@pytest.mark.parametrize("block", blocks("json"))
def test_configs_load(block: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(block)
    load_config(path)


@pytest.mark.parametrize("block", blocks("sh", "bash"))
def test_commands_have_the_options_that_are_shown(block: str) -> None:
    for words in commands(block):
        if words[0] == "torchrun":
            check_torchrun(words[1:])
        if "twinflow" in words:
            check_options(words[words.index("twinflow") + 1 :])


def check_options(words: list[str]) -> None:
    """Every option before a script's own is one of the command's."""
    command: Any = typer.main.get_command(app)
    if words and not words[0].startswith("-"):
        assert words[0] in COMMANDS, words[0]
        command, words = load(words[0]), words[1:]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words[0]
        command, words = command.commands[words[0]], words[1:]
    if command.name == "launch":
        end = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "--module"), len(words))
        if words[end : end + 2] == ["--module", "twinflow"]:
            check_options(words[end + 2 :])
        words = words[:end]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    assert not unknown, f"{command.name} has no {unknown}"


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(words)  # ends with SystemExit where it does not know an option


def test_a_wrong_option_is_found() -> None:
    with pytest.raises(AssertionError, match="--stepz"):
        check_options(["train", "--stepz", "3"])
    with pytest.raises(AssertionError, match="--stepz"):
        check_options(["launch", "--num_procs", "2", "--module", "twinflow", "train", "--stepz", "3"])
    with pytest.raises(SystemExit):
        check_torchrun(["--nodez", "2", "train.py"])


def test_the_kubernetes_job_starts_torchrun_on_every_pod() -> None:
    (text,) = [block.values[0] for block in blocks("yaml") if "pytorchReplicaSpecs" in block.values[0]]
    job = yaml.safe_load(text)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    for pod in replicas.values():
        (container,) = pod["template"]["spec"]["containers"]
        assert (container["name"], container["command"]) == ("pytorch", ["torchrun"])
        given = {"$(RANK)": "1", "$(MASTER_ADDR)": "train-master-0", "$(MASTER_PORT)": "23456"}  # as the operator does
        args = [reduce(lambda arg, name: arg.replace(name, given[name]), given, arg) for arg in container["args"]]
        assert "$" not in "".join(args)
        check_torchrun(args)
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
