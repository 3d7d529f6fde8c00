# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` with optimizer state on a disk: the run in memory, --resume, the header, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import write_text
from twin_support import quick_torch
from typer.testing import CliRunner, Result

from twinflow.cli import run as run_module
from twinflow.cli.main import app
from twinflow.monitor.metrics import StepRecord, read_metrics
from twinflow.native import get_threads, set_threads

SHAPE = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--context", 16, "--vocab-size", 256)
RUN = (*SHAPE, "--batch-size", 2, "--valid-every", 0, "--threads", 1)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run_module, "VALID_BATCHES", 1)
    threads = get_threads()
    with quick_torch():
        yield
    set_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path, 100)


def train(text: Path, out: Path, *options: Any) -> Result:
    every = ("train", *RUN, "--data", text, "--out", out, *options)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, every)))


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_metrics(out / "metrics.jsonl") if isinstance(record, StepRecord)]


def test_a_run_is_that_in_memory_and_keeps_its_disk_when_it_is_resumed(tmp_path: Path, text: Path) -> None:
    disk = tmp_path / "disk"
    plain = train(text, tmp_path / "plain", "--steps", 4, "--no-save")
    assert plain.exit_code == 0, plain.output
    assert "in a step" not in plain.output
    first = train(text, tmp_path / "run", "--steps", 4, "--nvme-path", disk)
    assert first.exit_code == 0, first.output
    assert f"GB of fp32 state in {disk}" in first.output
    assert "s a step to read and write it at" in first.output
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert not list(disk.iterdir())
    more = train(text, tmp_path / "run", "--steps", 5, "--resume")
    assert more.exit_code == 0, more.output
    assert f"GB of fp32 state in {disk}" in more.output
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert saved["nvme_path"] == str(disk)


@pytest.mark.parametrize("weights", ["cpu", "nvme"])
def test_a_config_file_names_the_disk(tmp_path: Path, text: Path, weights: str) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "states": "int8", "ratio": 0.5}
    section = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": weights}}
    if weights == "nvme":
        section["offload_param"] |= {"nvme_path": str(tmp_path / "disk")}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": section, "bf16": {"enabled": True}}))
    result = train(text, tmp_path / "run", "--steps", 2, "--no-save", "--deepspeed_config", config)
    assert result.exit_code == 0, result.output
    assert f"GB of int8 state in {tmp_path / 'disk'}" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ratio", "auto"), ['ratio="auto" cannot be used with state on the disk']),
        (("--rule", "muon"), ['rule="muon" cannot be used with state on the disk']),
        (("--delayed-update",), ["delayed_update=True cannot be used with state on the disk"]),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_named(tmp_path: Path, text: Path, options: Any, words: list[str]) -> None:
    result = train(text, tmp_path / "run", "--nvme-path", tmp_path / "disk", *options)
    assert result.exit_code == 1
    assert all(word in result.stderr for word in words)
    assert not (tmp_path / "disk").exists()


def test_a_disk_that_is_too_small_is_named_before_anything_is_built(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path: _Usage(1000))
    monkeypatch.setattr(run_module, "build_engine", lambda *_: pytest.fail("an engine was built"))
    result = train(text, tmp_path / "run", "--nvme-path", tmp_path / "disk")
    assert result.exit_code == 1
    assert "Not enough space on the disk: the int8 state" in result.stderr
    assert "--nvme-path" in result.stderr


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free
