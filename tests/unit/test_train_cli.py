# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` from the command line, on the CPU, at sizes that take seconds."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TrainProcess, steps_of, write_text
from twin_support import quick_torch
from typer.testing import CliRunner, Result

from twinflow.build import initialize
from twinflow.cli import run, settings
from twinflow.cli.main import app
from twinflow.cli.memory import Available, MemoryPlan, case_of, plan_memory
from twinflow.cli.ranks import Ranks
from twinflow.cli.settings import TrainSettings, as_json, check_same_run, engine_config, lr_factor
from twinflow.cli.training import Loop, Talk, batches_at_once, measure, run_step
from twinflow.launch.environment import ALONE
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.monitor.metrics import ValidRecord, read_metrics
from twinflow.monitor.timers import Clock
from twinflow.native import get_threads, set_threads
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel import split_model
from twinflow.planner.costs import Bytes
from twinflow.rules import RULES
from twinflow.version import __version__

SMALL = ("--steps", "4", "--batch-size", "2", "--context", "8", "--valid-every", "0", "--threads", "1")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "VALID_BATCHES", 2)  # or validations would take more time than these short trainings


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = get_threads()
    with quick_torch():
        yield
    set_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path, 500)


def train(*options: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["train", *(str(option) for option in options)])


def test_experts_show_the_balance_of_their_routers(tmp_path: Path, text: Path) -> None:
    size = ("--preset", "tiny-moe", "--batch-size", "2", "--context", "16", "--threads", "1", "--data", text)
    result = train(*size, "--steps", "3", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "8 experts a layer of which a token uses 2" in result.output
    balances = [record.balance for record in steps_of(tmp_path / "run")]
    assert [f"balance {balance:.2f}" in result.output for balance in balances] == [True] * 3
    assert all(0.9 < balance < 4.0 for balance in balances)


def test_the_loss_falls_and_everything_is_written(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "runs" / "first"
    size = ("--steps", "40", "--batch-size", "4", "--context", "32", "--valid-every", "20", "--threads", "1")
    result = train(*size, "--data", text, "--out", out)
    assert result.exit_code == 0, result.output
    for words in (
        "M parameters",
        "TwinOptimizer, adamw",
        "threads",
        str(text),
        "first loss",
        "last loss",
        "tokens/s",
        "report",
    ):
        assert words in result.output, words

    records = read_metrics(out / "metrics.jsonl")
    losses = [record.loss for record in steps_of(out)]
    valids = [record for record in records if isinstance(record, ValidRecord)]
    assert [record.step for record in steps_of(out)] == list(range(1, 41))
    assert [record.step for record in valids] == [0, 20, 40]
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    assert valids[-1].loss < valids[0].loss - 1.5
    assert f"{losses[0]:.4f}" in result.output
    assert result.output.replace("\n", "").endswith(f"Next: twinflow export {out}/checkpoints {out}/weights")
    given, written = result.output.partition("Text of the validation data:\n")[2].split("The model goes on with:\n")
    assert given.replace(" ", "").replace("\n", "") in text.read_text().replace(" ", "").replace("\n", "")
    assert len(written.partition("Next:")[0]) > 40

    settings = json.loads((out / "settings.json").read_text())
    assert (settings["rule"], settings["model"]["context"], settings["warmup"]) == ("adamw", 32, 2)
    page = (out / "report.html").read_text()
    for words in (
        "finished",
        "--weight-decay",
        "TwinOptimizer, adamw",
        "Host memory",
        f"{losses[0]:.4f}",
        torch.__version__,
    ):
        assert words in page, words


def test_the_same_seed_gives_the_same_run(tmp_path: Path, text: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = train(*SMALL, "--data", text, "--seed", seed, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        losses.append([record.loss for record in steps_of(tmp_path / name)])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        ("lion", "bf16"),
        *(pytest.param("adamw", states, marks=pytest.mark.matrix) for states in ("int8", "bf16")),
        *(pytest.param(rule, "fp32", marks=pytest.mark.matrix) for rule in RULES),
    ],
)
def test_every_rule_learns(rule: str, states: str, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    size = ("--steps", 25, "--batch-size", 4, "--context", 16, "--valid-every", 0, "--threads", 1)
    result = train(*size, "--data", text, "--rule", rule, "--states", states, "--out", out)
    assert result.exit_code == 0, result.output
    losses = [record.loss for record in steps_of(out)]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


def test_the_learning_rate_follows_the_schedule(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    train(*SMALL, "--data", text, "--lr", "0.01", "--warmup", "2", "--out", out)
    assert [record.lr for record in steps_of(out)] == pytest.approx([0.005, 0.01, 0.01, 0.0055])


def test_lr_factor_rises_and_falls() -> None:
    factors = [lr_factor(step, warmup=10, steps=110) for step in range(110)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert all(a >= b for a, b in pairwise(factors[10:]))
    assert factors[60] == pytest.approx(0.55)
    assert 0.1 <= factors[-1] < 0.101
    assert lr_factor(5, warmup=5, steps=5) == 1.0
    assert lr_factor(500, warmup=0, steps=10) == pytest.approx(0.1)


def test_every_bucket_is_counted_and_the_times_add_up(tmp_path: Path, text: Path) -> None:
    start = time.perf_counter()
    result = train(*SMALL, "--data", text, "--grad-clip", "1e-3", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "early updates" in result.output
    records = steps_of(tmp_path / "run")
    for record in records:
        assert record.num_ahead + record.num_held == 5  # four blocks, and what lies around them
        assert record.num_dropped == record.num_ahead  # every step is clipped: nothing ahead of the norm is kept
        assert min(record.forward_s, record.backward_s, record.update_s) > 0.0
    assert sum(record.step_s for record in records) < time.perf_counter() - start


@pytest.mark.matrix
def test_a_delayed_update_is_seen_one_step_later(tmp_path: Path, text: Path) -> None:
    runs = {}
    for name, options in {"plain": (), "delayed": ("--delayed-update",)}.items():
        result = train(*SMALL, "--data", text, "--warmup", "0", *options, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert ("delayed by one step" in result.output) == (name == "delayed")
        runs[name] = steps_of(tmp_path / name)
    plain, delayed = ([record.loss for record in runs[name]] for name in ("plain", "delayed"))
    fresh = train(*SMALL, "--steps", "2", "--data", text, "--lr", "0", "--out", tmp_path / "fresh")
    assert fresh.exit_code == 0, fresh.output
    assert delayed[0] == plain[0]
    assert delayed[1] == steps_of(tmp_path / "fresh")[1].loss != plain[1]  # the second step still has the first weights
    assert all(record.num_ahead == 0 for record in runs["delayed"])


@pytest.mark.matrix
def test_the_last_validation_sees_a_delayed_update(tmp_path: Path, text: Path) -> None:
    losses = []
    for name, options in {"plain": (), "delayed": ("--delayed-update",)}.items():
        assert train(*SMALL, "--steps", "1", "--data", text, *options, "--out", tmp_path / name).exit_code == 0
        losses.append([r.loss for r in read_metrics(tmp_path / name / "metrics.jsonl") if isinstance(r, ValidRecord)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (("--ratio", "0.3", "--placement", "tail"), 0.3),
        *(
            pytest.param(("--ratio", word), share, marks=pytest.mark.matrix)
            for word, share in (("0", 0.0), ("auto", 1.0))
        ),
    ],
)
def test_a_ratio_reaches_the_optimizer_and_every_report(
    options: tuple[str, ...], share: float, tmp_path: Path, text: Path
) -> None:
    assert train(*SMALL, "--data", text, "--out", tmp_path / "plain").exit_code == 0
    result = train(*SMALL, "--data", text, "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    records = steps_of(tmp_path / "run")
    assert [r.host_share for r in records] == pytest.approx([share] * 4, abs=0.01)
    # Where the state lives changes nothing but the place.
    assert [r.loss for r in records] == [r.loss for r in steps_of(tmp_path / "plain")]
    asked: float | str = "auto" if options[1] == "auto" else float(options[1])
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (settings["ratio"], settings["placement"]) == (asked, options[-1] if len(options) > 2 else "auto")
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"ratio {options[1]}, lr" in result.output
    assert f"ratio {options[1]}, lr" in page
    if asked == "auto":  # without a GPU nothing is gained by calling memory its own: it stays on the host
        assert "--ratio auto has chosen 1.00." in result.output
        assert "auto, 1.00 after the last step" in page
    else:
        assert f"ratio {share:.2f}  left" in result.output
        assert "state on the host" in result.output
        assert f"{100 * share:.0f}%" in page


def test_embeddings_that_are_planned_for_the_host_are_there(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunings: list[bool] = []
    build = run.build_engine

    def built(*given: Any) -> Any:
        engine = build(*given)
        tunings.append(engine.optimizer.tuning.offload_embeddings)  # type: ignore[union-attr]
        return engine

    monkeypatch.setattr(run, "build_engine", built)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    given = (*SMALL, "--data", text, "--config", config, "--out")
    assert train(*given, tmp_path / "plain").exit_code == 0

    def moved(*args: Any) -> MemoryPlan:
        return replace(plan_memory(*args), offload_embeddings=True)

    monkeypatch.setattr(run, "plan_memory", moved)
    result = train(*given, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert tunings == [False, True]
    assert [r.loss for r in steps_of(tmp_path / "run")] == [r.loss for r in steps_of(tmp_path / "plain")]
    assert "&quot;embeddings&quot;: true" in (tmp_path / "run" / "report.html").read_text()


def test_a_move_of_state_is_said_once(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `auto` does on a GPU: after the third step less is on the host.
    monkeypatch.setattr(TwinOptimizer, "host_share", property(lambda self: 1.0 if self.num_steps < 3 else 0.25))
    result = train(*SMALL, "--data", text, "--ratio", "auto", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert [r.host_share for r in steps_of(tmp_path / "run")] == [1.0, 1.0, 0.25, 0.25]
    assert result.output.count("From this step on the ratio is 0.25") == 1
    assert "--ratio auto has chosen 0.25." in result.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "auto, 0.25 after the last step" in page
    assert '<th scope="col">ratio</th>' in page


def test_what_auto_has_chosen_is_said_once(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While placements are tried, nothing is said."""
    is_placed = property(lambda self: self.num_steps >= 3)
    monkeypatch.setattr(TwinOptimizer, "is_placed", is_placed)
    monkeypatch.setattr(TwinOptimizer, "host_share", property(lambda self: 0.25 * self.num_steps))
    report = "ratio auto: 0.75 of the state on the host"
    monkeypatch.setattr(TwinOptimizer, "auto_report", property(lambda self: report if self.num_steps >= 3 else ""))
    result = train(*SMALL, "--data", text, "--ratio", "auto", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert result.output.count(report) == 1
    assert result.output.count("From this step on the ratio is") == 1  # a move after the choice, in the fourth step


def test_a_resume_of_a_finished_run_says_that_no_step_was_made(tmp_path: Path, text: Path) -> None:
    run = (*SMALL, "--data", text, "--out", tmp_path / "run")
    assert train(*run).exit_code == 0
    result = train(*run, "--resume", "--steps", 3)
    assert result.exit_code == 0, result.output
    assert "The run has 4 steps already, so no step was made. To train on, use --steps" in result.output


@pytest.mark.matrix
def test_a_run_may_be_resumed_with_another_ratio(tmp_path: Path, text: Path) -> None:
    for name, ratio in (("plain", 1), ("moved", 0.5)):
        run = (*SMALL, "--data", text, "--out", tmp_path / name, "--lr", "0.001", "--warmup", "1")
        assert train(*run, "--ratio", 1).exit_code == 0
        result = train(*run, "--steps", "8", "--resume", "--ratio", ratio)
        assert result.exit_code == 0, result.output
    plain, moved = (steps_of(tmp_path / name) for name in ("plain", "moved"))
    assert [r.loss for r in plain] == [r.loss for r in moved]
    assert [r.host_share for r in moved] == pytest.approx([1.0] * 4 + [0.5] * 4, abs=0.01)


def test_a_run_that_cannot_fit_is_refused_before_anything_is_built(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinflow.native.cgroup._withheld_bytes", 0)
    monkeypatch.setattr("twinflow.cli.run.build_engine", lambda *_: pytest.fail("built"))
    result = train(
        "--preset", "gpt2-1.5b", "--data", text, "--context", "16", "--out", tmp_path / "run", "--ram", "4GB"
    )
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    for word in ("Not enough host memory", "4.0 GB are available", "GB of int8 state", "GB are missing"):
        assert word in line, line
    assert not (tmp_path / "run").exists()


def test_a_run_that_needs_more_than_ram_allows_is_refused_before_anything_is_built(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinflow.native.cgroup._withheld_bytes", 0)
    monkeypatch.setattr("twinflow.cli.run.build_engine", lambda *_: pytest.fail("built"))
    result = train(*SMALL, "--data", text, "--out", tmp_path / "run", "--ram", "900MB")
    assert result.exit_code == 1
    assert "0.9 GB are available" in result.stderr
    assert "larger --ram" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_tight_says_so(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a --ram above the free memory, which limits nothing."""
    monkeypatch.setattr("twinflow.native.cgroup._withheld_bytes", 0)
    monkeypatch.setattr("twinflow.cli.run.free_host_bytes", lambda: 9 * 10**8)
    result = train(*SMALL, "--data", text, "--out", tmp_path / "run", "--ram", "64GB")
    assert result.exit_code == 0, result.output
    assert "memory is tight" in result.output
    assert "memory is tight" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rule", "adamx"), ["--rule", "'adamx'", "adagrad"]),
        (("--preset", "huge"), ["--preset", "'huge'", "tiny"]),
        (("--states", "fp8"), ["--states", "'fp8'", "int8"]),
        (("--rule", "lion", "--states", "int8"), ["--states", "'int8'", "bf16", "--rule lion"]),
        (("--ratio", "1.5"), ["--ratio", "'1.5'", "from 0", "to 1", "auto"]),
        (("--ratio", "half"), ["--ratio", "'half'"]),
        (("--placement", "middle"), ["--placement", "'middle'", "front", "tail"]),
        (("--steps", "0"), ["--steps", "0", ">= 1"]),
        (("--batch-size", "-1"), ["--batch-size", "-1"]),
        (("--context", "0"), ["--context", "0"]),
        (("--lr", "-0.1"), ["--lr", "-0.1"]),
        (("--lr", "nan"), ["--lr", "nan"]),
        (("--weight-decay", "inf"), ["--weight-decay", "inf"]),
        (("--grad-clip", "-1"), ["--grad-clip", "-1"]),
        (("--warmup", "-1"), ["--warmup", "-1"]),
        (("--seed", "-1"), ["--seed", "-1"]),
        (("--threads", "0"), ["--threads", "0"]),
        (("--valid-every", "-5"), ["--valid-every", "-5"]),
        (("--data", "/nowhere/at/all"), ["data", "/nowhere/at/all", "'stdlib'"]),
        (("--context", "4000"), ["context 4000", "4,001"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_option_is_one_clear_line(options: tuple[str, ...], words: list[str], tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    result = train(*SMALL, "--data", text, "--out", out, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line, word
    assert not out.exists()


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, text: Path) -> None:
    assert train(*SMALL, "--data", text, "--out", tmp_path / "run").exit_code == 0
    result = train(*SMALL, "--data", text, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "--out" in result.stderr
    assert len(steps_of(tmp_path / "run")) == 4


def test_an_output_that_cannot_be_made_is_one_line(tmp_path: Path, text: Path) -> None:
    result = train(*SMALL, "--data", text, "--out", text / "run")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert str(text) in result.stderr


def test_a_loss_that_is_not_finite_stops_with_advice(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    options = ("--steps", "50", "--lr", "1e30", "--rule", "sgd", "--grad-clip", "0", "--warmup", "0")
    result = train(*SMALL, "--data", text, "--out", out, *options)
    assert result.exit_code == 1
    for words in ("not a finite number", "--lr", "1e+30", "--warmup", "--grad-clip 1.0"):
        assert words in result.output, words
    records = steps_of(out)
    assert len(records) < 50
    assert math.isnan(records[-1].loss) or math.isnan(records[-1].grad_norm)
    assert "stopped" in (out / "report.html").read_text()


def test_ctrl_c_ends_cleanly_with_a_report(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    process = TrainProcess((*SMALL, "--steps", "100000", "--data", text, "--out", out), tmp_path / "log")
    try:
        deadline = time.monotonic() + 120
        while not ((out / "metrics.jsonl").exists() and len(read_metrics(out / "metrics.jsonl")) > 3):
            assert process.is_alive(), process.text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send(signal.SIGINT)
        assert process.wait(60) == 130, process.text()
    finally:
        process.send(signal.SIGKILL)
    assert "Traceback" not in process.text()
    assert "Interrupted after" in process.text()
    assert "interrupted" in (out / "report.html").read_text()


def test_version_and_help_name_what_there_is() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"twinflow {__version__}\n"
    shown = CliRunner().invoke(app, ["--help"]).output
    for command in ("train", "doctor", "bench"):
        assert command in shown


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("doktor", "doctor"), ("exprot", "export")])
def test_a_misspelt_command_gets_a_suggestion(typed: str, meant: str) -> None:
    result = CliRunner().invoke(app, [typed])
    assert result.exit_code == 2
    assert f"No such command {typed!r}. Did you mean {meant!r}?" in result.output
    assert "Did you mean" not in CliRunner().invoke(app, ["zzz"]).output


# Command lines and config files as Megatron's and DeepSpeed's tutorials have them.

MEGATRON = (
    *("--model-parallel-size", 1, "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2),
    *("--batch-size", 2, "--checkpoint-activations", "--seq-length", 16, "--max-position-embeddings", 16),
    *("--no-pipeline-parallel", "--cpu-optimizer"),
)
BRIEF = ("--steps", 2, "--valid-every", 0, "--threads", 1, "--no-save", "--vocab-size", 256)
# Exactly as printed in the ZeRO-Offload tutorial: a comma too many and one too few.
TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""
# As printed in the Twin-Flow tutorial: pieces, without the braces around them.
TWIN_FLOW = """    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true,
      "ratio": 0.3
    }
"""
PRESCALE = """  "prescale_gradients": false,
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(content: str) -> Path:
        path = tmp_path / "ds_zero_offload.config"
        path.write_text(content)
        return path

    return write


def megatron(*options: str | Path | int) -> Result:
    return train(*MEGATRON, *BRIEF, *options)


def only_line(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "content",
    [TUTORIAL, TWIN_FLOW, PRESCALE, f'"zero_optimization": {{\n"stage": 3,\n{TWIN_FLOW}}},\n{PRESCALE}'],
    ids=["tutorial", "twin-flow alone", "prescale alone", "both"],
)
def test_the_tutorials_command_and_file_run(
    content: str, config: Callable[[str], Path], tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "run"
    result = megatron("--deepspeed_config", config(content), "--data", text, "--out", out)
    assert result.exit_code == 0, result.output
    assert "2 layers, hidden 32, 2 heads, context 16, activations recomputed" in result.output
    plain = megatron("--data", text, "--out", tmp_path / "plain")
    assert plain.exit_code == 0, plain.output
    assert [r.loss for r in steps_of(out)] == [r.loss for r in steps_of(tmp_path / "plain")]
    settings = json.loads((out / "settings.json").read_text())
    assert settings["model"]["recompute"] == settings["recompute"] == "full"
    assert not (out / "checkpoints").exists()


def test_the_same_file_twice_is_the_same_run(config: Callable[[str], Path], tmp_path: Path, text: Path) -> None:
    file, out = config(TUTORIAL), tmp_path / "run"
    run = (*MEGATRON, *BRIEF, "--save", "--deepspeed_config", file, "--data", text, "--out", out)
    assert train(*run).exit_code == 0
    result = train(*run, "--resume", "--steps", 4)
    assert result.exit_code == 0, result.output
    assert [record.step for record in steps_of(out)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--tensor-model-parallel-size", 4),
            ["--model-parallel-size 4", "ranks is 1, but must be a multiple of 4", "--num_gpus 4"],
        ),
        (
            ("--pipeline-model-parallel-size", 2),
            ["--pipeline-parallel-size 2", "ranks is 1, but must be a multiple of 2"],
        ),
        (("--pipeline-parallel-size", 0), ["--pipeline-parallel-size", "0", ">= 1"]),
        (("--pipeline-schedule", "2f2b"), ["--pipeline-schedule", "'2f2b'", "gpipe", "zbv"]),
        (("--max-position-embeddings", 8), ["--seq-length", "16", "--max-position-embeddings", "8"]),
        (("--gpu-memory", "32GB"), ["--gpu-memory is given, but this machine has no GPU. Leave --gpu-memory out."]),
        (("--gpu-memory", "much"), ["--gpu-memory", "'much'", "32GB"]),
        (("--fp16", "--bf16"), ["--precision", "bf16", "fp16"]),
        (("--precision", "fp32", "--bf16"), ["--precision", "fp32", "bf16"]),
        (("--precision", "fp8"), ["--precision", "'fp8'"]),
        (("--num-attention-heads", 3), ["hidden", "32", "3"]),
        (("--accumulation", 0), ["--accumulation", "0"]),
        (("--keep-last", 0), ["--keep-last", "0"]),
        (("--save-every", -1), ["--save-every", "-1"]),
        (("--vocab-size", 10), ["vocab_size", "10", "256"]),
        (("--json-key", "body"), []),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_megatron_options_that_cannot_work(
    options: tuple[str | int, ...], words: list[str], tmp_path: Path, text: Path
) -> None:
    result = megatron("--data", text, "--out", tmp_path / "run", *options)
    if not words:
        assert result.exit_code == 0, result.output  # a key of JSONL means nothing for plain text
        return
    line = only_line(result)
    for word in words:
        assert word in line, line
    assert not (tmp_path / "run").exists()


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (ADAM, ("--lr", 0.1), ["--lr", "'optimizer'"]),
        (ADAM, ("--rule", "sgd"), ["--rule", "'optimizer'"]),
        (ADAM, ("--weight-decay", 0.1), ["--weight-decay", "'optimizer'"]),
        ({"gradient_clipping": 0.5}, ("--grad-clip", 1.0), ["--grad-clip", "'gradient_clipping'"]),
        ({"train_micro_batch_size_per_gpu": 4}, (), ["--batch-size", "2", "4", "'train_micro_batch_size_per_gpu'"]),
        (
            {"gradient_accumulation_steps": 4},
            ("--accumulation", 2),
            ["--accumulation", "'gradient_accumulation_steps'"],
        ),
        ({"train_batch_size": 7}, (), ["train_batch_size 7", "train_micro_batch_size_per_gpu 2"]),
        ({"fp16": {"enabled": True}}, ("--bf16",), ["--precision", "bf16", "fp16"]),
        ({"bf16": {"enabled": True}}, ("--precision", "fp32"), ["--precision", "bf16", "fp32"]),
        ({"bfloat16": {"enabled": True}}, ("--fp16",), ["--precision", "bf16", "fp16"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, (), ["FILE", "fp16.enabled", "bf16.enabled"]),
        ({"zero_optimization": {"offload_optimizer": {"states": "int8"}}}, ("--states", "fp32"), ["--states", "fp32"]),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}}, ("--ratio", 0.5), ["--ratio", "'ratio'"]),
        ({"zero_optimization": {"offload_optimizer": {"ratio": "auto"}}}, ("--ratio", 1), ["--ratio", "'ratio'"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, ("--ratio", 0.5), ["--ratio", "'device'"]),
        (
            {"zero_optimization": {"offload_optimizer": {"placement": "tail"}}},
            ("--placement", "front"),
            ["--placement", "'placement'"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"delayed_update": False}}},
            ("--delayed-update",),
            ["--delayed-update", "'delayed_update'"],
        ),
        ({"pipeline": {"stages": 3}}, (), ["--pipeline-parallel-size 3 and --model-parallel-size 1"]),
        ({"pipeline": {"stages": 1}}, ("--pipeline-parallel-size", 2), ["--pipeline-parallel-size", "'stages'"]),
        ({"tensor_parallel": {"autotp_size": 2}}, (), ["--model-parallel-size", "'autotp_size'"]),
        ({"zero_optimization": {"offload_optimiser": {}}}, (), ["FILE", "offload_optimiser", "'offload_optimizer'"]),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}},
            ("--nvme-path", "other"),
            ["--nvme-path other", "'device' in the config file", "only one"],
        ),
        ({"wandb": {"enabled": True}}, (), ["wandb.enabled", "pip install wandb"]),
        ("", (), ["FILE", "empty"]),
        ("{", (), ["FILE", "line 1"]),
        ("[1, 2]", (), ["FILE", "object"]),
        ('{"fp16": {}, "fp16": {}}', (), ["FILE", "fp16", "twice"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, (dict, str)) else "",
)
def test_a_config_file_that_does_not_fit_is_one_line(
    content: dict[str, Any] | str,
    options: tuple[str | int, ...],
    words: list[str],
    config: Callable[[str], Path],
    tmp_path: Path,
    text: Path,
) -> None:
    if isinstance(content, dict) and "wandb" in content and find_spec("wandb"):
        pytest.skip("wandb is installed")
    file = config(content if isinstance(content, str) else json.dumps(content))
    line = only_line(megatron("--data", text, "--out", tmp_path / "run", "--deepspeed_config", file, *options))
    for word in words:
        assert (str(file) if word == "FILE" else word) in line, line
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_at_the_top_of_a_config_file_is_ignored_with_a_warning(
    config: Callable[[str], Path], tmp_path: Path, text: Path
) -> None:
    file = config(json.dumps({"zero_optimisation": {}}))
    with pytest.warns(UserWarning, match="zero_optimisation.*zero_optimization"):
        result = megatron("--data", text, "--out", tmp_path / "run", "--deepspeed_config", file)
    assert result.exit_code == 0, result.output


def test_a_config_file_that_is_not_there_is_one_line(tmp_path: Path, text: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        line = only_line(megatron("--data", text, "--out", tmp_path / "run", "--deepspeed_config", path))
        assert "--deepspeed_config" in line
        assert str(path) in line


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, "TwinOptimizer, Lion, fp32 state, lr 0.0001"),
        ({"optimizer": {"type": "Adam"}}, "TwinOptimizer, Adam"),
        ({"optimizer": {"type": "RMSprop", "params": {"lr": "auto"}}}, "TwinOptimizer, RMSprop"),
        ({"gradient_clipping": 0}, "no clipping"),
        ({"train_batch_size": 8}, "in 4 micro-batches"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, "2 of 32 tokens"),
        ({"fp16": {"enabled": True}}, "TwinOptimizer"),
        ({"bf16": {"enabled": True}}, "TwinOptimizer"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}, "TwinOptimizer"),
        ({"zero_optimization": {"offload_optimizer": {"states": "int8", "delayed_update": True}}}, "int8 state"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.25}}}, "fp32 state, ratio 0.25, lr"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": "auto"}}}, "fp32 state, ratio auto, lr"),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "fp32 state, ratio 0, lr"),
        ({"steps_per_print": 1, "wall_clock_breakdown": True}, "TwinOptimizer"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_config_file_decides_what_it_names(
    content: dict[str, Any], shown: str, config: Callable[[str], Path], tmp_path: Path, text: Path
) -> None:
    result = megatron("--data", text, "--out", tmp_path / "run", "--deepspeed_config", config(json.dumps(content)))
    assert result.exit_code == 0, result.output
    assert shown in result.output
    assert [record.step for record in steps_of(tmp_path / "run")] == [1, 2]


def write_jsonl(path: Path, values: np.ndarray[Any, Any]) -> None:
    lines = [json.dumps({"text": " ".join(map(str, row))}) for row in values.reshape(-1, 20)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".bin"])
def test_files_of_lines_and_of_tokens_train(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "VALID_BATCHES", 16)  # enough to meet every token
    path, values = tmp_path / f"data{suffix}", np.arange(4000, dtype=np.uint16) % 300
    if suffix == ".jsonl":
        write_jsonl(path, values)
    elif suffix == ".npy":
        np.save(path, values)
    else:
        values.tofile(path)
    result = megatron("--data", path, "--out", tmp_path / "run", "--vocab-size", 300)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["model"]["vocab_size"] == 300
    assert len(steps_of(tmp_path / "run")) == 2
    assert ("The model goes on with:" in result.output) == (suffix == ".jsonl")  # else the tokenizer is not known
    if suffix != ".jsonl":
        few = megatron("--data", path, "--out", tmp_path / "few", "--vocab-size", 299)
        assert few.exit_code == 1, "a token outside the vocabulary was trained on"
        (line,) = few.stderr.splitlines()
        assert str(path) in line
        assert "299" in line


def test_the_key_of_jsonl_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"body": f"number {i} and more"}) + "\n" for i in range(200)))
    assert megatron("--data", path, "--out", tmp_path / "run", "--json-key", "body").exit_code == 0
    line = only_line(megatron("--data", path, "--out", tmp_path / "other"))
    assert "'text'" in line
    assert "body" in line


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_a_timeline_is_written_as_json(steps: int, tmp_path: Path, text: Path) -> None:
    trace = tmp_path / "run" / "traces" / "timeline.json"  # in a folder that is not there yet
    result = megatron("--data", text, "--out", tmp_path / "run", "--steps", steps, "--trace", trace)
    assert result.exit_code == 0, result.output
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any(event.get("ph") == "X" for event in events)


def test_a_timeline_that_cannot_be_written_is_known_at_once(tmp_path: Path, text: Path) -> None:
    line = only_line(megatron("--data", text, "--out", tmp_path / "run", "--trace", text / "timeline.json"))
    assert str(text) in line


def test_a_report_that_cannot_be_written_does_not_hide_the_numbers(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinflow.cli.train.write_report", full)
    result = megatron("--data", text, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "No space left" in result.stderr
    assert "last loss" in result.stdout


def test_a_validation_can_be_stopped() -> None:
    asked = 0

    def stop_at_the_fifth() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 5

    model = torch.nn.Linear(1, 1)
    model.forward = lambda *_: type("Out", (), {"loss": torch.tensor(1.0)})()  # type: ignore[method-assign]
    parts = {"module": model, "dp_rank": 0, "dp_world_size": 1, "watch": None, "settings": SimpleNamespace(grid=None)}
    loop: Any = Loop.__new__(Loop)
    loop._engine, loop._settings, loop._num_valid = SimpleNamespace(**parts), SimpleNamespace(batch_size=1), 16
    loop.batch = lambda *_: (torch.zeros(1), torch.zeros(1))
    loop._talk = Talk(Ranks(), stop_at_the_fifth, torch.device("cpu"))
    assert loop.valid_loss() is None
    loop._talk = Talk(Ranks(), lambda: False, torch.device("cpu"))
    assert loop.valid_loss() == 1.0
    assert model.training


# Pipeline and tensor ranks.

SHAPE = GPTConfig(vocab_size=256, context=16, num_layers=4, hidden=32, num_heads=4)


def layout(stages: int = 1, tensor: int = 1, schedule: str | None = None) -> dict[str, Any]:
    return settings.with_axes({}, stages, tensor, schedule)


@pytest.mark.parametrize(
    ("config", "world", "words"),
    [
        (layout(2), 3, ["size 2 and", "size 1 divide", "is 3, but must be a multiple of 2", "--num_gpus 2"]),
        (layout(2, 2), 2, ["size 2 and", "size 2 divide", "is 2, but must be a multiple of 4"]),
        (layout(1, 8), 8, ["--num-attention-heads is 4", "--model-parallel-size, which is 8"]),
        (layout(8), 8, ["--num-layers is 4", "at least 8"]),
        (layout(4, 1, "zbv"), 4, ["--num-layers is 4", "at least 8", "zbv: 2 on each of 4 ranks"]),
        ({"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 3}}, 2, ["--num-layers", "at least 6"]),
    ],
    ids=str,
)
def test_a_layout_that_does_not_come_out_even_is_refused(config: dict[str, Any], world: int, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r" is .*, but must be ") as found:
        settings.check_layout(config, SHAPE, world)
    for word in words:
        assert word in str(found.value)


def test_a_layout_is_dealt_to_replicas_and_described() -> None:
    for stages, tensor, world in ((1, 1, 1), (1, 1, 8), (2, 1, 2), (2, 2, 8), (4, 1, 4)):
        replicas = settings.check_layout(layout(stages, tensor), SHAPE, world)
        assert replicas == settings.num_replicas(layout(stages, tensor), world) == world // (stages * tensor)
    assert settings.describe_layout(layout(2, 2, "zbv"), 8) == "pipeline 2 (zbv) x tensor 2 x data 2"
    assert settings.describe_layout(layout(1, 2), 2) == "tensor 2 x data 1"
    assert settings.describe_layout({}, 4) == ""
    assert layout(1, 1) == {}  # as without the options


def test_a_vocabulary_that_tensor_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The vocabulary size is 257, but .*Use --vocab-size 258"):
        settings.check_vocabulary(layout(1, 2), replace(SHAPE, vocab_size=257))


@pytest.mark.parametrize(
    ("offload", "word"),
    [({"ratio": "auto"}, "ratio='auto' cannot be used with pipeline ranks"), ({"delayed_update": True}, "delayed")],
)
def test_what_does_not_go_with_a_pipeline_is_refused(offload: dict[str, Any], word: str) -> None:
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu", **offload}}}
    settings.check_combination(config, SHAPE, replace(ALONE, world_size=2))
    with pytest.raises(ValueError, match=word):
        settings.check_combination({**config, **layout(2)}, SHAPE, replace(ALONE, world_size=2))


def settings_of(world: int, batch_size: int, config: dict[str, Any]) -> TrainSettings:
    values: dict[str, Any] = dict.fromkeys(TrainSettings.__dataclass_fields__)
    values |= {"preset": "custom", "model": SHAPE, "batch_size": batch_size, "accumulation": 4, "precision": "fp32"}
    values |= {"rule": "adamw", "lr": 1e-3, "weight_decay": 0.1, "grad_clip": 1.0, "ratio": 1.0, "placement": "auto"}
    values |= {"threads": 1, "delayed_update": False, "file_config": config, "world": world}
    return TrainSettings(**values)


def test_a_run_goes_on_in_another_layout_with_the_same_sequences() -> None:
    began = settings_of(4, 2, layout(2))
    saved = as_json(began)
    assert began.sequences == 2 * 4 * 2
    assert began.tokens == 16 * began.sequences
    for world, size, config in (
        (1, 4, {}),
        (2, 4, layout(1, 2)),
        (2, 2, {}),
        (8, 2, layout(2, 2)),
        (4, 2, layout(1, 2)),
    ):
        check_same_run(saved, settings_of(world, size, config))
    check_same_run(saved, settings_of(4, 2, layout(2, 1, "zbv")))
    with pytest.raises(ValueError, match=r"number of sequences in a step .* is 32, but must be 16"):
        check_same_run(saved, settings_of(4, 2, {}))


def test_parts_of_a_model_are_counted_as_parts() -> None:
    def used(world: int, config: dict[str, Any], stage: int) -> Bytes:
        asked = settings_of(world, 2, {**config, "zero_optimization": {"stage": stage}})
        case = case_of(asked, engine_config(asked, "fp32"))
        return plan_memory(case, "fp32", Available(10**9, 10**11)).used

    whole, half = used(1, {}, 0), used(2, layout(2), 0)
    assert half.gpu["weights"] == pytest.approx(whole.gpu["weights"] / 2, rel=0.01)
    assert half.host["state"] == pytest.approx(whole.host["state"], rel=0.01)  # once, on both ranks together
    assert used(4, layout(1, 2), 0).host["state"] == pytest.approx(2 * whole.host["state"], rel=0.01)  # two replicas
    assert used(4, layout(1, 2), 1).host["state"] == pytest.approx(whole.host["state"], rel=0.01)
    kinds = (layout(1, 2), layout(2), layout(2, 1, "gpipe"))  # of 4 micro-batches two, or all, are under way
    kept = [used(2, config, 1).gpu["activations"] / whole.gpu["activations"] for config in kinds]
    assert kept == pytest.approx([0.5, 1.0, 2.0], rel=0.01)


def test_a_step_is_the_same_for_both_kinds_of_engine() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": None,
    }
    tokens = torch.randint(0, 256, (8, 2, 17), generator=torch.Generator().manual_seed(0))
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in tokens]
    found, told = [], list[float]()
    for splits in (False, True):
        torch.manual_seed(0)
        model = GPT(SHAPE)
        engine, *_ = initialize(model=split_model(model, 1, 0) if splits else model, config=config)
        clock = Clock(torch.device("cpu"))
        done = [run_step(engine, iter(batches[i : i + 2]), clock, told.append) for i in (0, 2, 4)]
        assert done[0].is_mixed is splits
        assert batches_at_once(engine) == (2 if splits else 1)
        forward_s, backward_s = done[0].seconds(clock, 0.0)
        assert (forward_s > 0.0) is not splits
        assert backward_s > 0.0
        found.append([*(one.loss() for one in done), *measure(engine, batches[6:])])
        assert engine.module.training
        engine.destroy()
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert told == pytest.approx([*found[0][:3], *found[1][:3]], abs=1e-6)
    assert len(found[0]) == 5


def test_one_rank_may_be_named_as_a_layout(tmp_path: Path, text: Path) -> None:
    options = ("--pipeline-parallel-size", 1, "--tensor-model-parallel-size", 1, "--pipeline-schedule", "zbv")
    assert train(*SMALL, "--steps", 2, "--data", text, "--out", tmp_path / "plain").exit_code == 0
    result = train(*SMALL, "--steps", 2, "--data", text, "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    assert [r.loss for r in steps_of(tmp_path / "run")] == [r.loss for r in steps_of(tmp_path / "plain")]


def test_a_run_that_cannot_be_named_is_not_resumed(tmp_path: Path) -> None:
    assert "--resume needs the folder of the run. Give it with --out" in only_line(train("--resume", "--steps", "1"))
    file = tmp_path / "file"
    file.write_text("")
    assert "must be a folder. This is a file." in only_line(train(*SMALL, "--out", file))
