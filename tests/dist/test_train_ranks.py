# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` on several ranks: the run of one process with the same global batch, stopped and resumed too."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_support import steps_of, write_text
from train_ranks_support import TrainRanks, saved_steps

import twinflow
from twinflow.monitor.metrics import ValidRecord, read_metrics

# A rate at which rounding stays rounding: at the preset's own, losses of so small a model jump about.
SHAPE = ("--preset", "tiny", "--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--context", 16)
STEPS, HALF = 12, 6
RUN = (*SHAPE, "--lr", 5e-4, "--threads", 1, "--steps", STEPS, "--save-every", HALF, "--valid-every", HALF)
SEQUENCES = 8  # of a step
# Ranks: sequences of a rank's forward, forwards of a step.
PARTS = {1: (4, 2), 2: (2, 2), 4: (1, 2)}


def batch(world: int) -> tuple[Any, ...]:
    size, parts = PARTS[world]
    return ("--batch-size", size, "--accumulation", parts)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"), 1500)


def finish(world: int, out: Path, *options: Any) -> list[str]:
    """A run to its end; what each rank has printed."""
    ranks = TrainRanks((*RUN, *batch(world), *options, "--out", out), out.with_suffix(".logs"), world)
    assert ranks.wait() == [0] * world, ranks.texts()
    return ranks.texts()


@pytest.fixture(scope="module")
def one(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    finish(1, out, "--data", text)
    return out


@pytest.fixture(scope="module")
def two(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of two ranks."""
    out = tmp_path_factory.mktemp("two") / "run"
    finish(2, out, "--data", text, "--trace", out / "trace.json")
    return out


def records(out: Path) -> list[tuple[Any, ...]]:
    found = read_metrics(out / "metrics.jsonl")
    return [(type(record).__name__, record.step) for record in found]


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_metrics(out / "metrics.jsonl")]


def assert_same_run(out: Path, expected: Path) -> None:
    assert records(out) == records(expected)
    assert losses(out) == pytest.approx(losses(expected), abs=1e-5)
    norms, rates = (
        [[getattr(r, name) for r in steps_of(path)] for path in (out, expected)] for name in ("grad_norm", "lr")
    )
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert rates[0] == rates[1]


def test_two_ranks_train_what_one_process_does(one: Path, two: Path) -> None:
    assert_same_run(two, one)
    assert len({round(loss, 4) for loss in losses(two)}) > STEPS / 2  # not the same numbers again and again
    assert [r.num_tokens for r in steps_of(two)] == [r.num_tokens for r in steps_of(one)] == [SEQUENCES * 16] * STEPS
    assert steps_of(two)[-1].tokens_total == STEPS * SEQUENCES * 16


def test_the_first_rank_speaks_for_all(two: Path) -> None:
    first, second = (two.with_suffix(".logs") / f"rank{rank}.log" for rank in (0, 1))
    assert second.read_text() == ""
    assert "ranks        2, ZeRO stage 2" in first.read_text()
    assert first.read_text().count(f"Finished {STEPS} steps") == 1
    names = sorted(path.name for path in two.iterdir())
    assert names == ["checkpoints", "metrics.jsonl", "report.html", "settings.json", "trace.json"]
    page = (two / "report.html").read_text()
    assert "2, ZeRO stage 2" in page
    assert "finished" in page
    assert json.loads((two / "settings.json").read_text())["world"] == 2


def test_load_and_speed_are_of_all_ranks(one: Path, two: Path) -> None:
    # Resident memory of two processes, and tokens a second that fit the tokens of both.
    assert steps_of(two)[-1].host_bytes > 1.5 * steps_of(one)[-1].host_bytes
    for record in steps_of(two):
        assert record.tflops == pytest.approx(steps_of(one)[0].tflops * seconds(one) / record.step_s, rel=0.05)


def seconds(out: Path) -> float:
    return steps_of(out)[0].step_s


def from_the_middle(run: Path, out: Path) -> Path:
    """A copy of a finished run as it was after its first checkpoint."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / f"global_step{STEPS}")
    (out / "checkpoints" / "latest").write_text(f"global_step{HALF}")
    assert saved_steps(out) == HALF
    return out


def test_one_process_goes_on_with_what_two_ranks_began(one: Path, two: Path, text: Path, tmp_path: Path) -> None:
    out = from_the_middle(two, tmp_path / "run")
    # The same sequences in other parts: micro-batches of 2, four a step.
    ranks = TrainRanks(
        (*RUN, "--batch-size", 2, "--accumulation", 4, "--data", text, "--resume", "--out", out), tmp_path / "logs", 1
    )
    assert ranks.wait() == [0], ranks.texts()
    assert "Resuming from" in ranks.texts()[0]
    assert_same_run(out, one)
    assert saved_steps(out) == STEPS


def test_two_ranks_go_on_with_what_one_process_began(one: Path, text: Path, tmp_path: Path) -> None:
    out = from_the_middle(one, tmp_path / "run")
    texts = finish(2, out, "--data", text, "--resume")
    assert texts[1] == ""
    assert_same_run(out, one)
    assert saved_steps(out) == STEPS


@pytest.mark.matrix
def test_the_same_ranks_go_on_with_the_same_bits(two: Path, text: Path, tmp_path: Path) -> None:
    out = from_the_middle(two, tmp_path / "run")
    finish(2, out, "--data", text, "--resume")
    assert (records(out), losses(out)) == (records(two), losses(two))


@pytest.mark.matrix
def test_another_global_batch_is_not_resumed(one: Path, text: Path, tmp_path: Path) -> None:
    out = from_the_middle(one, tmp_path / "run")
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    ranks = TrainRanks((*RUN, *batch(1), "--data", text, "--resume", "--out", out), tmp_path / "logs", 2)
    assert ranks.wait() == [1, 1]
    named = "error: The number of sequences in a step (--batch-size x --accumulation x replicas) is 16, but must be "
    assert ranks.texts()[0].startswith(named)
    assert ranks.texts()[0].count("\n") == 1
    assert ranks.texts()[1] == ""
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before


def test_a_signal_to_one_rank_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = (*RUN, *batch(2), "--data", text, "--out", out)
    ranks = TrainRanks(options, tmp_path / "logs", fault="late signal")
    assert ranks.wait() == [130, 130], ranks.texts()
    stopped = saved_steps(out)
    assert stopped in (6, 7)  # the signal comes after the sixth step's exchange
    assert steps_of(out)[-1].step == stopped
    assert f"Interrupted after {stopped} of {STEPS} steps" in ranks.texts()[0]
    assert "interrupted" in (out / "report.html").read_text()


@pytest.mark.matrix
def test_a_loss_that_is_not_finite_stops_all(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = (*RUN, *batch(2), "--data", text, "--lr", 1e38, "--weight-decay", 0, "--grad-clip", 0, "--out", out)
    ranks = TrainRanks(options, tmp_path / "logs")
    assert ranks.wait() == [1, 1], ranks.texts()
    assert not math.isfinite(steps_of(out)[-1].loss)
    assert not (out / "checkpoints").exists()
    assert "stopped" in (out / "report.html").read_text()
    assert "error: Stopped at step" in ranks.texts()[0]


@pytest.mark.matrix
def test_a_disk_that_is_full_on_one_rank_costs_checkpoints_but_not_the_run(
    one: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = (*RUN, *batch(2), "--data", text, "--out", out)
    ranks = TrainRanks(options, tmp_path / "logs", fault="full disk")
    assert ranks.wait() == [1, 1], ranks.texts()  # the last weights are in no checkpoint
    assert f"warning: The checkpoint after {STEPS} steps could not be saved: " in ranks.texts()[0]
    assert "No space left" in (out / "report.html").read_text()
    assert saved_steps(out) == HALF
    assert_same_run(out, one)


@pytest.mark.matrix
def test_ranks_with_other_data_are_refused(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = TrainRanks((*RUN, *batch(2), "--data", text, "--out", out), tmp_path / "logs", fault="other data")
    assert ranks.wait() == [1, 1]
    assert ranks.texts()[0].startswith(
        "error: The data of rank 1 differs from the data of rank 0: the checksums of --data are another and "
    )
    assert not out.exists()


def launcher(words: tuple[Any, ...], log: Path) -> subprocess.Popen[bytes]:
    """`words` as arguments of this Python, in a process of its own."""
    root = str(Path(twinflow.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + 200
    while not ((out / "metrics.jsonl").exists() and any(record.step >= step for record in steps_of(out))):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.matrix
def test_the_launcher_s_sigterm_saves_and_a_second_start_ends_the_same(text: Path, tmp_path: Path) -> None:
    out, plain, log, config = (tmp_path / name for name in ("run", "plain", "log", "config.json"))
    # A rate that does not follow from the number of steps, which nobody knows before.
    config.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}}))
    run = (*SHAPE, "--valid-every", 0, "--threads", 1, "--deepspeed_config", config, "--data", text)
    train = ("twinflow", "train", *run, *batch(2), "--steps", 100_000, "--out", out)
    process = launcher(("twinflow", "launch", "--num_procs", 2, "--module", *train), log)
    wait_for_step(process, out, 4, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, log.read_text()
    stopped = saved_steps(out)
    assert stopped == steps_of(out)[-1].step
    assert log.read_text().count(f"Interrupted after {stopped} of 100000 steps") == 1
    again = (*run, "--steps", stopped + 4)
    resumed = TrainRanks((*again, *batch(2), "--resume", "--out", out), tmp_path / "resumed")
    straight = TrainRanks((*again, *batch(1), "--out", plain), tmp_path / "straight", 1)
    assert (resumed.wait(), straight.wait()) == ([0, 0], [0]), resumed.texts() + straight.texts()
    assert_same_run(out, plain)


@pytest.mark.matrix
def test_torchrun_starts_it_as_well(one: Path, text: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "twinflow", "train")
    process = launcher((*start, *RUN, *batch(2), "--data", text, "--out", out), log)
    assert process.wait(180) == 0, log.read_text()
    assert_same_run(out, one)


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (4, 2)])
def test_every_stage(world: int, stage: int, one: Path, text: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}, "train_batch_size": SEQUENCES}))
    out = tmp_path / "run"
    size, parts = PARTS[world]
    options = (*RUN, "--accumulation", parts, "--deepspeed_config", config, "--data", text, "--out", out)
    ranks = TrainRanks(options, tmp_path / "logs", world)
    assert ranks.wait() == [0] * world, ranks.texts()
    assert json.loads((out / "settings.json").read_text())["batch_size"] == size
    assert f"{world}, ZeRO stage {stage}" in (out / "report.html").read_text()
    assert (out / "checkpoints").exists()
    assert_same_run(out, one)


@pytest.mark.matrix
def test_an_error_of_one_rank_ends_all(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = TrainRanks((*RUN, *batch(2), "--data", text, "--out", out), tmp_path / "logs", fault="bad batch")
    assert all(ranks.wait())
    assert "error: rank 1: a token of this file is 999" in ranks.texts()[1]
    assert "rank 1 failed in step" in ranks.texts()[0]


@pytest.mark.matrix
def test_two_signals_end_all_at_once(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = TrainRanks((*RUN, "--steps", 100_000, *batch(2), "--data", text, "--out", out), tmp_path / "logs")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len(steps_of(out)) < 3:
        assert ranks.is_alive(), ranks.texts()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(ranks.processes[1].pid or 0, signal.SIGSTOP)  # it takes part in nothing any more
    ranks.send(signal.SIGINT, 0)
    time.sleep(2.5)
    ranks.send(signal.SIGINT, 0)
    ranks.send(signal.SIGKILL, 1)
    assert all(ranks.wait(60))
    assert not (out / "checkpoints").exists()


def test_validations_are_of_the_same_sequences_at_any_number_of_ranks(one: Path, two: Path) -> None:
    valid = [[r.loss for r in read_metrics(out / "metrics.jsonl") if isinstance(r, ValidRecord)] for out in (one, two)]
    assert len(valid[0]) == 3
    assert valid[0] == pytest.approx(valid[1], abs=1e-6)
    numbers = {json.loads((out / "settings.json").read_text())["num_valid"] for out in (one, two)}
    assert numbers == {16 * 4}
