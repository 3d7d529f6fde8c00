# SPDX-License-Identifier: Apache-2.0
"""A disk without space, and a standard output that cannot be written: a warning names the file, and the run goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from run_support import TrainProcess

from twinflow import files
from twinflow.files import LineFile, keep_lines, write_whole
from twinflow.monitor.writers import CsvWriter

SHAPE = ("--num-layers", 1, "--hidden-size", 8, "--num-attention-heads", 1, "--context", 8, "--vocab-size", 256)
RUN = (*SHAPE, "--batch-size", 1, "--threads", 1, "--valid-every", 0)


def full_after(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """From now on the disk takes only so many bytes. The result's value can be raised."""
    left, write = {"bytes": num_bytes}, os.write

    def write_some(fd: int, data: bytes) -> int:
        if not left["bytes"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, bytes(data)[: left["bytes"]])
        left["bytes"] -= done
        return done

    monkeypatch.setattr("os.write", write_some)
    return left


def test_lines_wait_for_space_and_none_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    file = LineFile(tmp_path / "lines", warnings.append)
    left = full_after(7, monkeypatch)
    for line in ("one\n", "two\n", "three\n"):
        file.add(line)
        file.flush()
        assert (tmp_path / "lines").read_text() == "one\n"
    assert len(warnings) == 1
    assert f"{tmp_path / 'lines'} could not be written: No space left" in warnings[0]
    left["bytes"] = 100
    file.add("four\n")
    file.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\nthree\nfour\n"


def test_lines_that_are_lost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    file = LineFile(tmp_path / "lines", warnings.append)
    full_after(0, monkeypatch)
    file.add("one\ntwo\n")
    file.close()
    assert "The last 2 lines could not be written" in warnings[-1]


def test_a_file_is_cut_back_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n4")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_whole", full)
    keep_lines(path, lambda line: int(line) <= 2)
    assert path.read_text() == "1\n2\n"
    path.write_text("1\n9\n2\n")
    with pytest.raises(OSError, match="No space"):
        keep_lines(path, lambda line: int(line) <= 2)  # a line in the middle cannot be cut


def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match=r"target'$"):
        write_whole(tmp_path / "target", "text")


def test_rows_of_csv_wait_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CsvWriter(tmp_path, "job")
    left = full_after(0, monkeypatch)
    writer.write([("loss", 1.0, 8)])
    with pytest.warns(UserWarning, match=r"loss\.csv could not be written: No space left"):
        writer.flush()
    left["bytes"] = 100
    writer.close()
    assert (tmp_path / "job" / "loss.csv").read_text() == "step,loss\n8,1.0\n"


def test_a_disk_that_fills_up_costs_files_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{i} is {i}\n" for i in range(300)))
    run = (*RUN, "--data", tmp_path / "text", "--steps", 12, "--save-every", 4, "--out", tmp_path / "run")
    process = TrainProcess(run, tmp_path / "log", file_bytes=5000)
    code, said = process.wait(), process.text()
    assert code == 1, said
    assert "Traceback" not in said
    assert f"{tmp_path / 'run' / 'metrics.jsonl'} could not be written: File too large" in said
    assert "The checkpoint after 4 steps could not be saved" in said
    assert "There is no earlier checkpoint." in said
    assert "is kept" not in said
    assert "warning: The report could not be written" in said
    assert str(tmp_path / "run" / "report.html") in said
    assert "No checkpoint could be saved, so the trained weights are lost." in said
    assert "Next:" not in said
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_an_export_to_a_full_disk_is_one_line_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{i} is {i}\n" for i in range(300)))
    run = (*RUN, "--data", tmp_path / "text", "--steps", 1, "--out", tmp_path / "run")
    assert TrainProcess(run, tmp_path / "log").wait() == 0
    given = (tmp_path / "run" / "checkpoints", tmp_path / "weights")
    process = TrainProcess(given, tmp_path / "log2", command="export", file_bytes=3000)
    assert process.wait() == 1
    (line,) = process.text().splitlines()
    assert line.startswith("error: [Errno 27] File too large: ")
    assert str(tmp_path) in line
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_full_standard_output_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{i} is {i}\n" for i in range(300)))
    run = (*RUN, "--data", tmp_path / "text", "--steps", 1, "--out", tmp_path / "run")
    given: tuple[Any, ...] = run if command == "train" else ("--preset", "tiny", "--gpu", "h200")
    process = TrainProcess(given, tmp_path / "log", command=command, stdout="/dev/full")
    assert process.wait() == (0 if command == "train" else 1), process.text()
    assert process.text() == "warning: Standard output cannot be written: No space left on device.\n"
    assert command == "plan" or (tmp_path / "run" / "report.html").exists()


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{i} is {i}\n" for i in range(300)))
    out = f"{tmp_path}/run\udcff"
    for more in ((), ("--resume",)):
        steps = 2 if more else 1
        run = (*RUN, "--data", tmp_path / "text", "--steps", steps, "--out", out, *more)
        process = TrainProcess(run, tmp_path / "log")
        assert process.wait() == 0, process.text()
        assert "run\\udcff" in process.text()
    assert "run\\udcff" in Path(out, "report.html").read_text()
