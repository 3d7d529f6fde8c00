# SPDX-License-Identifier: Apache-2.0
"""Every script of examples/ runs as it is, and says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_support import run_script
from typer.testing import CliRunner

import twinflow
from twinflow.cli.main import app
from twinflow.config import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PROMISES = {
    "host_adamw.py": "the resumed run ends with the same bits",
    "state_formats.py": "int8     6.0",
    "twin_optimizer.py": "the loss fell",
    "engine.py": "the resumed run has the same bits",
    "sparse_attention.py": "the sparse model learns",
    "pipeline.py": "the loss fell",
    "partial_offload.py": "the same losses; the loss fell",
    "onebit_finetune.py": "the fine-tuned model is better",
    "sparse_bert.py": "the loss fell",
    "hf_trainer.py": "the resumed run has the same bits",
    "hf_processes.py": "the saved model has the same loss",
    "lightning_strategy.py": "the resumed run has the same bits",
    "accelerate_loop.py": "the loss fell",
    "peft_lora.py": "the adapters have learned",
    "long_sequences.py": "the loss fell",
}
OTHERS = ("ray_train.py", "tiny_models.py")  # test_integrations_ray.py and test_finetune.py run them


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} == {*PROMISES, *OTHERS}


# In the matrix: of these, other tests look at what is behind them.
SLOW = (
    "state_formats.py",
    "twin_optimizer.py",
    "sparse_attention.py",
    "onebit_finetune.py",
    "sparse_bert.py",
    "hf_trainer.py",
    "hf_processes.py",
    "lightning_strategy.py",
    "peft_lora.py",
    "long_sequences.py",
    "accelerate_loop.py",
)


def cell(script: Path) -> object:
    return pytest.param(script, id=script.name, marks=[pytest.mark.matrix] if script.name in SLOW else [])


@pytest.mark.parametrize("script", [cell(script) for script in EXAMPLES if script.name not in OTHERS])
def test_example_runs(script: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    result = run_script(script, cwd, tmp_path)
    assert result.returncode == 0, result.stderr
    assert PROMISES[script.name] in result.stdout
    assert not list(cwd.iterdir()), "an example leaves nothing behind"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(twinflow.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def launched(cwd: Path, num_ranks: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twinflow", "launch", "--num_gpus", num_ranks, *args]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240)


@pytest.mark.matrix
def test_the_trainer_runs_on_two_processes(tmp_path: Path) -> None:
    result = launched(tmp_path, "2", str(Path(__file__).parents[2] / "examples" / "hf_processes.py"))
    assert result.returncode == 0, result.stderr
    assert "2 processes" in result.stdout
    assert PROMISES["hf_processes.py"] in result.stdout


@pytest.mark.matrix
def test_the_pipeline_of_two_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    script = next(path for path in EXAMPLES if path.name == "pipeline.py")
    alone = run_script(script, tmp_path, tmp_path)
    two = launched(tmp_path, "2", str(script), "--stages", "2")
    assert two.returncode == 0, two.stderr
    losses = [text.split("losses ")[1].splitlines()[0].split() for text in (alone.stdout, two.stdout)]
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], abs=2e-3)
    assert "ranks 2, stages 2" in two.stdout
    assert two.stdout.count(PROMISES["pipeline.py"]) == 1


@pytest.mark.matrix
def test_partial_offload_of_two_ranks_at_stage_3(tmp_path: Path) -> None:
    script = next(path for path in EXAMPLES if path.name == "partial_offload.py")
    two = launched(tmp_path, "2", str(script), "--zero", "3", "--ratio", "0.3")
    assert two.returncode == 0, two.stderr
    assert "ranks 2, stage 3, ratio 0.3" in two.stdout
    assert PROMISES["partial_offload.py"] in two.stdout


@pytest.mark.matrix
def test_a_fine_tune_of_two_ranks_switches_to_one_bit(tmp_path: Path) -> None:
    script = next(path for path in EXAMPLES if path.name == "onebit_finetune.py")
    two = launched(tmp_path, "2", str(script), "--steps", "400")
    assert two.returncode == 0, two.stderr
    assert "in one bit from step" in two.stdout
    assert PROMISES["onebit_finetune.py"] in two.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_two_ranks_share_sequences_with_the_losses_of_one_process(tmp_path: Path, mode: str) -> None:
    script = next(path for path in EXAMPLES if path.name == "long_sequences.py")
    alone = run_script(script, tmp_path, tmp_path)
    two = launched(tmp_path, "2", str(script), "--mode", mode)
    assert two.returncode == 0, two.stderr
    losses = [text.split("losses ")[1].splitlines()[0].split() for text in (alone.stdout, two.stdout)]
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], abs=1e-3)
    assert "2 processes, 128 of 256 tokens on each" in two.stdout


# Tutorials as shell scripts: `small` is the same command at a size for a laptop.

SCRIPTS = {path.name: path for path in (Path(__file__).parents[2] / "examples").glob("*.sh")}


def command_of(script: Path, folder: Path, *args: str) -> list[str]:
    """What a script would run: `twinflow` is one that prints its arguments here."""
    stand_in = folder / "twinflow"
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([str(script), *args], env=env, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.splitlines()


def test_all_shell_scripts_are_tested() -> None:
    assert set(SCRIPTS) == {"zero_offload_10b.sh", "twin_flow_350m.sh", "pretrain_3d.sh"}


@pytest.mark.parametrize("name", ["zero_offload_10b.sh", "twin_flow_350m.sh"])
def test_a_tutorial_trains_when_it_is_small(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    small = command_of(SCRIPTS[name], tmp_path, "small", "--steps", "2", "--data", str(text), "--no-save")
    result = CliRunner().invoke(app, [*small, "--threads", "1", "--valid-every", "0", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_small_and_large_take_the_same_options(name: str, tmp_path: Path) -> None:
    known = set(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300"}).output.replace(",", " ").split())
    for args in ((), ("small",)):
        command = command_of(SCRIPTS[name], tmp_path, *args)
        options = {word for word in command[command.index("train") :] if word.startswith("--")}
        assert options <= known
        assert "--deepspeed_config" in options
        load_config(Path(command[command.index("--deepspeed_config") + 1]))


@pytest.mark.matrix
def test_pretraining_over_three_axes_trains_when_it_is_small(tmp_path: Path) -> None:
    command = command_of(SCRIPTS["pretrain_3d.sh"], tmp_path, "small")
    assert command[:3] == ["launch", "--num_gpus", "4"]
    ended = launched(tmp_path, "4", *command[3:], "--no-save", "--out", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "report.html").exists()
