# SPDX-License-Identifier: Apache-2.0
"""Scalars for csv files, TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from twinflow.monitor.writers import (
    CsvWriter,
    Event,
    Fanout,
    TensorBoardWriter,
    WandbWriter,
)


class ListWriter:
    def __init__(self, fails: bool = False) -> None:
        self.target = "the disk"
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.fails = fails

    def write(self, events: Any) -> None:
        self.events += events

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")
        if self.fails:
            raise OSError("disk full")


def step_events(samples: int, loss: float, lr: float, loss_scale: float | None = None) -> list[Event]:
    values = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
    return [(f"Train/Samples/{tag}", value, samples) for tag, value in values.items() if value is not None]


def test_csv_has_a_file_a_tag_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    for samples in (8, 16):
        writer = CsvWriter(tmp_path, "a job")
        writer.write(step_events(samples, 2.5, 0.125))
        writer.flush()
        writer.close()
    folder = tmp_path / "a job"
    assert sorted(path.name for path in folder.iterdir()) == ["Train_Samples_lr.csv", "Train_Samples_train_loss.csv"]
    assert (folder / "Train_Samples_train_loss.csv").read_text() == "step,train_loss\n8,2.5\n16,2.5\n"


def test_csv_can_be_read_after_flush(tmp_path: Path) -> None:
    writer = CsvWriter(str(tmp_path), "job")
    writer.write([("x", 1.0, 1), ("x", 2.0, 2)])
    writer.flush()
    assert (tmp_path / "job" / "x.csv").read_text() == "step,x\n1,1.0\n2,2.0\n"
    writer.close()


def test_csv_of_a_resumed_run_loses_what_comes_again(tmp_path: Path) -> None:
    first = CsvWriter(tmp_path, "job")
    first.write([("x", float(i), i) for i in (8, 16, 24)])
    first.close()
    with (tmp_path / "job" / "x.csv").open("a") as file:
        file.write("32,3")  # killed while writing
    resumed = CsvWriter(tmp_path, "job", resume_after=16)
    resumed.write([("x", 25.0, 24)])
    resumed.close()
    assert (tmp_path / "job" / "x.csv").read_text() == "step,x\n8,8.0\n16,16.0\n24,25.0\n"


def test_a_tag_cannot_leave_the_folder(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path, "job")
    writer.write([("../../up and away", 1.0, 1)])
    writer.close()
    assert [path.name for path in (tmp_path / "job").iterdir()] == [".._.._up_and_away.csv"]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    writer = TensorBoardWriter(tmp_path, "job")
    writer.write(step_events(8, 2.5, 0.125, 512.0))
    writer.write(step_events(16, 2.25, 0.125, 512.0))
    writer.flush()
    writer.close()
    found = accumulator.EventAccumulator(str(tmp_path / "job"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("Train/Samples/train_loss")] == [(8, 2.5), (16, 2.25)]
    assert found.Tags()["scalars"] == ["Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"]


def test_tensorboard_hides_what_comes_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    first = TensorBoardWriter(tmp_path, "job")
    first.write([("x", 1.0, 8), ("x", 2.0, 16)])
    first.close()
    resumed = TensorBoardWriter(tmp_path, "job", resume_after=8)
    resumed.write([("x", 3.0, 16)])
    resumed.close()
    found = accumulator.EventAccumulator(str(tmp_path / "job"))
    found.Reload()
    assert [event.value for event in found.Scalars("x")] == [1.0, 3.0]


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"tensorboard\.enabled is True.*pip install tensorboard"):
        TensorBoardWriter(tmp_path, "job")
    with pytest.raises(ValueError, match=r"wandb\.enabled is True.*pip install wandb"):
        WandbWriter("project")
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # what a folder of that name looks like
    with pytest.raises(ValueError, match="pip install wandb"):
        WandbWriter("project")


def test_wandb_gets_one_row_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, row: dict[str, float], step: int) -> None:
            calls.append((row, step))

        def finish(self) -> None:
            calls.append("finish")

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    fake: Any = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandbWriter("project", "group", "team")
    writer.write([("a", 1.0, 8), ("b", 2.0, 8), ("a", 3.0, 16)])
    writer.flush()
    writer.close()
    options = {"project": "project", "group": "group", "entity": "team"}
    assert calls == [options, ({"a": 1.0, "b": 2.0}, 8), ({"a": 3.0}, 16), "finish"]


def test_fanout_reaches_every_writer_and_closes_all() -> None:
    writers = [ListWriter(), ListWriter(fails=True), ListWriter()]
    fanout = Fanout(writers)
    fanout.write([("x", 1.0, 1)])
    fanout.flush()
    with pytest.warns(UserWarning, match="the disk could not be written: disk full"):
        fanout.close()
    for writer in writers:
        assert writer.events == [("x", 1.0, 1)]
        assert writer.calls == ["flush", "close"]
    with Fanout() as nothing:
        nothing.write([("x", 1.0, 1)])
