# SPDX-License-Identifier: Apache-2.0
"""A run that was killed, interrupted or short of disk goes on, and ends as if nothing had happened: bit by bit."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import TrainProcess, steps_of, write_text
from twin_support import quick_torch
from typer.testing import CliRunner, Result

from twinflow.checkpoint import disk, open_checkpoint
from twinflow.cli import run
from twinflow.cli.main import app
from twinflow.engine import Engine
from twinflow.monitor.metrics import StepRecord, ValidRecord, read_metrics
from twinflow.native import get_threads, set_threads

SHAPE = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--context", 16, "--vocab-size", 256)
STEPS = 30
RUN = (*SHAPE, "--batch-size", 2, "--steps", STEPS, "--save-every", 3, "--valid-every", 10, "--threads", 1)
VARIANTS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "accumulation": ("--accumulation", 2),
    "delayed": ("--delayed-update", "--valid-every", 6),
    "bf16 states": ("--states", "bf16", "--valid-every", 3),  # each checkpoint right beside a validation
}
KILLERS = ("moment", "saving", "disk")
MOMENTS = 50
DISK_EVENTS = 190  # about what a run does to its folder
QUICK = {2}  # the slow tests have all variants and killers

Ending = tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Straight:
    """A run that nothing happened to."""

    ending: Ending
    seconds: float


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"), 500)


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Straight]:
    found: dict[str, Straight] = {}
    TrainProcess(("--help",), tmp_path_factory.mktemp("help") / "log").wait()  # the server's own start is not counted

    def get(variant: str) -> Straight:
        if variant not in found:
            out = tmp_path_factory.mktemp("straight") / "run"
            start = time.perf_counter()
            finish(options(variant, text, out))
            found[variant] = Straight(ending(out), time.perf_counter() - start)
        return found[variant]

    return get


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of the CLI that are not processes of their own: on the CPU, and torch's threads as they were."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "VALID_BATCHES", 2)  # as in run_support
    threads = get_threads()
    with quick_torch():
        yield
    set_threads(threads)


def options(variant: str, text: Path, out: Path) -> tuple[Any, ...]:
    return (*RUN, "--data", text, *VARIANTS[variant], "--out", out)


def log_of(out: Any) -> Path:
    return Path(out).with_suffix(".log")


def finish(options: tuple[Any, ...]) -> str:
    """Let it run to its end; what it printed."""
    process = TrainProcess(options, log_of(options[-1]))
    assert process.wait() == 0, process.text()
    assert "Traceback" not in process.text()
    return process.text()


def ending(out: Path) -> Ending:
    """All that was recorded, in order, and every tensor of the last checkpoint."""
    records = [
        (record.step, "step", record.loss, record.grad_norm, record.lr)
        if isinstance(record, StepRecord)
        else (record.step, "valid", record.loss)
        for record in read_metrics(out / "metrics.jsonl")
    ]
    found = open_checkpoint(out / "checkpoints")
    assert found is not None
    found.verify()
    return records, {f"{file}/{name}": value for file in found.files() for name, value in found.tensors(file)}


def assert_same(one: Ending, two: Ending) -> None:
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    for name, value in one[1].items():
        other = two[1][name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert torch.equal(value.flatten().view(torch.uint8), other.flatten().view(torch.uint8)), name


def start_and_kill(options: tuple[Any, ...], killer: str, seconds: float, dice: random.Random) -> int:
    """Start a run, and end it with SIGKILL: at any moment, as a checkpoint is being written, or between two things it
    does to the disk. Its exit code: 0 where it was faster.
    """
    out = Path(options[-1])
    if killer == "disk":
        return TrainProcess(options, log_of(out), die_at=(out, dice.randint(1, DISK_EVENTS))).wait()
    process = TrainProcess(options, log_of(out))
    if killer == "moment":
        time.sleep(dice.uniform(0.0, seconds))
    else:
        wanted, seen = dice.randint(1, 6), set()
        while process.is_alive() and len(seen) < wanted:
            seen |= {path.name for path in (out / "checkpoints").glob(".*.partial-*")}
        time.sleep(dice.uniform(0.0, 0.03))
    process.send(signal.SIGKILL)
    return process.wait()


def moments() -> list[Any]:
    """One case is a seed, a variant and a killer."""
    cases = []
    for number in range(MOMENTS):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        killer = KILLERS[number % len(KILLERS)]
        marks = () if number in QUICK else (pytest.mark.slow,)
        cases.append(pytest.param(number, variant, killer, marks=marks, id=f"{number}-{variant}-{killer}"))
    return cases


@pytest.mark.parametrize(("number", "variant", "killer"), moments())
def test_killed_at_any_moment_it_ends_the_same(
    number: int, variant: str, killer: str, text: Path, tmp_path: Path, straight: Callable[[str], Straight]
) -> None:
    expected = straight(variant)
    dice, out = random.Random(number), tmp_path / "run"
    code = start_and_kill(options(variant, text, out), killer, expected.seconds, dice)
    assert code in (0, -signal.SIGKILL), log_of(out).read_text()
    resume = ("--resume", *options(variant, text, out))
    if dice.random() < 0.5:  # and once more
        code = start_and_kill(resume, dice.choice(KILLERS), expected.seconds, dice)
        assert code in (0, -signal.SIGKILL), log_of(out).read_text()
    finish(resume)
    assert_same(ending(out), expected.ending)


@pytest.mark.parametrize(("number", "variant"), [(signal.SIGINT, "accumulation"), (signal.SIGTERM, "delayed")])
def test_ctrl_c_and_sigterm_save_and_the_rest_is_the_same(
    number: int, variant: str, text: Path, tmp_path: Path, straight: Callable[[str], Straight]
) -> None:
    expected, out = straight(variant), tmp_path / "run"
    process = TrainProcess((*options(variant, text, out)[:-2], "--save-every", 0, "--out", out), log_of(out))
    wait_for_step(process, out, 4)
    process.send(number)
    assert process.wait() == 130, process.text()
    assert "Interrupted after" in process.text()
    assert f"--resume --out {out}" in process.text().replace("\n", "")
    assert "Traceback" not in process.text()
    assert "interrupted" in (out / "report.html").read_text()
    found = open_checkpoint(out / "checkpoints")
    assert found is not None
    assert found.meta["global_steps"] == steps_of(out)[-1].step < STEPS
    finish(("--resume", *options(variant, text, out)))
    assert_same(ending(out), expected.ending)


def wait_for_step(process: TrainProcess, out: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not ((out / "metrics.jsonl").exists() and any(record.step >= step for record in steps_of(out))):
        assert process.is_alive(), process.text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


# What follows runs in this process: it needs no signal.

SHORT = (*SHAPE, "--batch-size", 2, "--valid-every", 0, "--threads", 1)


def train(*options: Any) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, options)])


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    result = train(*SHORT, "--steps", 4, "--data", text, "--out", out)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.matrix  # loading the compiler takes seconds
def test_a_run_goes_on_with_another_recomputation_and_compiled_blocks(text: Path, tmp_path: Path) -> None:
    given, plain, changed = [*SHORT, "--data", text], tmp_path / "plain", tmp_path / "changed"
    assert train(*given, "--steps", 2, "--out", plain, "--recompute", "1").exit_code == 0
    shutil.copytree(plain, changed)
    assert train(*given, "--steps", 4, "--out", plain, "--resume").exit_code == 0
    config = tmp_path / "config.json"
    config.write_text('{"compile": {"blocks": true, "backend": "eager"}}')
    options = ["--recompute", "full", "--deepspeed_config", config]
    again = train(*given, "--steps", 4, "--out", changed, "--resume", *options)
    assert again.exit_code == 0, again.output
    assert "activations recomputed, blocks compiled" in again.output
    assert "Compiling the blocks" in again.output
    assert [record.loss for record in steps_of(changed)] == [record.loss for record in steps_of(plain)]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (("--seed", 1), "--seed"),
        (("--num-layers", 3), "--num-layers"),
        (("--hidden-size", 64), "--hidden-size"),
        (("--num-attention-heads", 4), "--num-attention-heads"),
        (("--context", 8), "--seq-length"),
        (("--vocab-size", 300), "--vocab-size"),
        (("--batch-size", 4), "--batch-size"),
        (("--accumulation", 2), "--accumulation"),
        (("--rule", "sgd"), "--rule"),
        (("--precision", "bf16"), "--precision"),
        (("--lr", 0.5), "--lr"),
        (("--weight-decay", 0.5), "--weight-decay"),
        (("--json-key", "body"), "--json-key"),
    ],
    ids=lambda value: value[2:] if isinstance(value, str) else "",
)
def test_another_run_is_not_resumed(changed: tuple[Any, ...], name: str, finished: Path, text: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()}
    result = train(*SHORT, "--steps", 8, "--data", text, "--resume", "--out", finished, *changed)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {name} is ")
    assert "another --out" in line
    assert {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()} == before


def test_other_data_or_another_config_file_is_not_resumed(finished: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text())
    config = tmp_path / "config.json"
    config.write_text('{"steps_per_print": 7}')
    for changed, name in ((("--data", other), "--data"), (("--config", config), "--deepspeed_config")):
        result = train(*SHORT, "--steps", 8, "--data", text, "--resume", "--out", finished, *changed)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {name} is "), result.stderr


def test_data_that_has_changed_is_not_resumed(text: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.txt", tmp_path / "run"
    data.write_text(text.read_text())
    run = (*SHORT, "--data", data, "--out", out)
    assert train(*run, "--steps", 2).exit_code == 0
    data.write_text(text.read_text().replace("7", "8"))
    result = train(*run, "--steps", 4, "--resume")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: The data {data} has changed since the run began")
    assert "fingerprint" in line
    data.write_text(text.read_text())
    assert train(*run, "--steps", 4, "--resume").exit_code == 0


def test_a_finished_run_has_nothing_to_do_and_goes_on_with_more_steps(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = (*SHORT, "--data", text, "--warmup", 0, "--out", out)
    assert train(*run, "--steps", 4).exit_code == 0
    before = ending(out)
    again = train(*run, "--steps", 4, "--resume")
    assert again.exit_code == 0, again.output
    assert "Finished 4 steps" in again.output
    assert_same(ending(out), before)
    more = train(*run, "--steps", 7, "--resume")
    assert more.exit_code == 0, more.output
    assert [record.step for record in steps_of(out)] == [1, 2, 3, 4, 5, 6, 7]
    assert ending(out)[0][: len(before[0])] == before[0]
    assert "finished" in (out / "report.html").read_text()
    planned = train(*SHORT, "--data", text, "--warmup", 0, "--out", tmp_path / "planned", "--steps", 7)
    assert planned.exit_code == 0, planned.output
    rates = [record.lr for record in steps_of(tmp_path / "planned")]
    assert [record.lr for record in steps_of(out)][4:] == rates[4:]  # the new schedule, from the first step on


def test_fewer_steps_than_were_done_is_nothing_to_do(finished: Path, text: Path) -> None:
    before = ending(finished)
    result = train(*SHORT, "--steps", 2, "--data", text, "--resume", "--out", finished)
    assert result.exit_code == 0, result.output
    assert_same(ending(finished), before)


def test_resume_without_a_run_starts_one(text: Path, tmp_path: Path) -> None:
    result = train(*SHORT, "--steps", 2, "--data", text, "--resume", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "Training starts from step 0." in result.output
    assert [record.step for record in steps_of(tmp_path / "run")] == [1, 2]


def test_a_full_disk_costs_checkpoints_but_not_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "run"
    run = (*SHORT, "--steps", 8, "--save-every", 2, "--data", text)
    assert train(*run, "--out", plain).exit_code == 0
    write, is_full = disk.DurableFile.write, False

    def write_or_not(self: disk.DurableFile, data: bytes | memoryview, *start: int) -> None:
        if is_full:
            write(self, memoryview(data)[:10], *start)
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, data, *start)

    def note(self: Any, text: str) -> None:
        nonlocal is_full
        is_full = is_full or "Checkpoint after 2 steps" in text
        notes.append(text)

    notes: list[str] = []
    monkeypatch.setattr(disk.DurableFile, "write", write_or_not)
    monkeypatch.setattr("twinflow.monitor.progress.TrainProgress.note", note)
    result = train(*run, "--out", out)
    assert result.exit_code == 1, result.output  # the last weights are in no checkpoint
    assert "error: Finished 8 steps" in result.stderr
    assert "The newest one is after 2 steps." in result.stderr
    warnings = [text for text in notes if text.startswith("warning")]
    assert [f"after {step} steps" in text for step, text in zip((4, 6, 8), warnings, strict=True)] == [True] * 3
    assert all("No space left" in text and "kept" in text for text in warnings)
    assert "No space left" in (out / "report.html").read_text()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["global_step2", "latest"]
    assert ending(out)[0] == ending(plain)[0]
    is_full = False
    notes.clear()
    monkeypatch.undo()
    resumed = train(*run, "--resume", "--out", out)
    assert resumed.exit_code == 0, resumed.output
    assert_same(ending(out), ending(plain))


def test_a_disk_without_room_for_a_line_costs_no_line_and_not_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "run"
    run = (*SHORT, "--steps", 6, "--save-every", 2, "--data", text)
    assert train(*run, "--out", plain).exit_code == 0
    write = os.write

    def write_or_not(fd: int, data: bytes) -> int:
        if b'"step": 3' in bytes(data) and b'"step": 5' not in bytes(data):  # full in steps 3 and 4
            write(fd, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write_or_not)
        result = train(*run, "--out", out)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert said.count("metrics.jsonl could not be written: No space left on device. The run continues.") == 1
    assert "metrics.jsonl" in (out / "report.html").read_text()
    assert_same(ending(out), ending(plain))  # also the lines that waited


def test_a_damaged_checkpoint_is_found_when_it_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(engine: Any, folder: Path) -> None:
        save(engine, folder)
        (file,) = folder.glob("global_step*/model*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    save = Engine.save_checkpoint
    words = (*SHORT, "--steps", 2, "--save-every", 1, "--data", text, "--verify-saves")
    assert train(*words, "--out", tmp_path / "good").exit_code == 0
    monkeypatch.setattr(Engine, "save_checkpoint", damage)
    result = train(*words, "--out", tmp_path / "bad")
    assert result.exit_code == 1
    assert "error: " in result.output
    assert "model" in result.output.partition("error: ")[2]
    assert "global_step1" in result.output.partition("error: ")[2]


def test_repeated_steps_are_counted(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = (*SHORT, "--data", text, "--out", out, "--global-batch-size", 5, "--resume")
    assert train(*words, "--steps", 2).exit_code == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    later = [json.dumps({**json.loads(lines[-2]), "step": step}) for step in (3, 4, 5)]  # of a process that was killed
    (out / "metrics.jsonl").write_text("\n".join([*lines, *later, ""]))
    result = train(*words, "--steps", 4)
    assert result.exit_code == 0, result.output
    assert re.search(r"resumes +1, 3 steps repeated", result.output)
    assert [record.step for record in steps_of(out)] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_uneven_micro_batches_train_as_one_batch(text: Path, tmp_path: Path, size: int) -> None:
    for folder, micro in (("one", 5), ("uneven", size)):
        words = (*SHORT, "--steps", 3, "--data", text, "--out", tmp_path / folder, "--no-save")
        result = train(*words, "--global-batch-size", 5, "--batch-size", micro)
        assert result.exit_code == 0, result.output
    one, uneven = ([record.loss for record in steps_of(tmp_path / folder)] for folder in ("one", "uneven"))
    assert uneven == pytest.approx(one, abs=1e-5)


def test_no_save_keeps_nothing(text: Path, tmp_path: Path) -> None:
    result = train(*SHORT, "--steps", 2, "--no-save", "--data", text, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_damaged_checkpoint_is_one_line_and_stays(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = (*SHORT, "--data", text, "--out", out)
    assert train(*run, "--steps", 2).exit_code == 0
    file = out / "checkpoints" / "global_step2" / "meta.json"
    file.write_bytes(file.read_bytes().replace(b"2", b"3", 1))
    result = train(*run, "--steps", 4, "--resume")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(file) in line
    assert [record.step for record in read_metrics(out / "metrics.jsonl") if isinstance(record, ValidRecord)] == [0, 2]
