"""Checkpoints in the background: the state at the call, whatever training does meanwhile, within the memory allowed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import twinflow
from twinflow.checkpoint import Entry
from twinflow.checkpoint.tensors import TensorWriter
from twinflow.models.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, num_heads=2)
LARGEST = 4 * 128 * 32


def engine_of(limit: int | str | None, **offload: Any) -> Any:
    """`limit`: "free" for the default limit of a background checkpoint, None for no background checkpoint."""
    torch.manual_seed(0)
    checkpoint = {"background": limit is not None, "background_bytes": None if limit == "free" else limit}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "bucket_numel": 4096, **offload}},
        "checkpoint": checkpoint,
    }
    return twinflow.initialize(model=GPT(SHAPE), config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 64, (4, 17), generator=generator)
        engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)
        engine.step()


def state_of(engine: Any) -> dict[str, Any]:
    state = engine.optimizer.state_dict()["state"]
    return {
        f"{name} {key}": value.clone() for name, entry in state.items() for key, value in entry.items() if key != "step"
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor takes a while to be read for writing."""
    write = TensorWriter.write

    def slowly(entry: Entry) -> torch.Tensor:
        time.sleep(0.01)
        return entry.read()

    def slow(self: TensorWriter, path: Path, entries: Sequence[Entry], *rest: Any) -> Any:
        return write(self, path, [replace(entry, read=partial(slowly, entry)) for entry in entries], *rest)

    monkeypatch.setattr(TensorWriter, "write", slow)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    "offload",
    [
        {"ratio": 0.4},
        {"delayed_update": True},
        *(pytest.param(o, marks=pytest.mark.matrix) for o in ({}, {"states": "int8"})),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "limit", [3 * LARGEST, *(pytest.param(limit, marks=pytest.mark.matrix) for limit in (0, 1 << 30))]
)
def test_it_holds_the_state_at_the_call(tmp_path: Path, limit: int, offload: dict[str, Any]) -> None:
    plain = engine_of(None, **offload)
    train(plain, 0, 3)
    plain.save_checkpoint(tmp_path / "plain")
    truth = state_of(plain)
    train(plain, 3, 7)
    ended = state_of(plain)
    plain.destroy()

    engine = engine_of(limit, **offload)
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "beside")
    assert engine.background is not None
    background = engine.background
    assert not background.is_done
    train(engine, 3, 7)  # while it is written
    engine.wait_for_checkpoint()
    assert background.peak_bytes <= limit
    if limit >= 1 << 30:
        assert background.peak_bytes > 0  # updates did not wait for the disk
    assert same(state_of(engine), ended)  # training has not noticed
    engine.load_checkpoint(tmp_path / "beside")
    assert same(state_of(engine), truth)
    files = sorted(path.name for path in (tmp_path / "plain" / "global_step3").glob("*.safetensors"))
    assert files
    for name in files:
        one, other = (tmp_path / where / "global_step3" / name for where in ("plain", "beside"))
        assert one.read_bytes() == other.read_bytes(), name
    train(engine, 3, 7)
    assert same(state_of(engine), ended)
    engine.destroy()
    assert not [thread for thread in threading.enumerate() if thread.name in ("twinflow-copier", "twinflow-save")]


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("limit", ["free", LARGEST])
def test_copies_use_the_memory_that_is_free_at_the_call(
    tmp_path: Path, limit: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(limit)
    train(engine, 0, 1)
    # Half of so little memory is left to others. A limit in the config is used instead.
    monkeypatch.setattr("twinflow.engine.state.own_host_bytes", lambda: 2 * 3 * LARGEST)
    engine.save_checkpoint(tmp_path)
    background = engine.background
    train(engine, 1, 3)
    engine.destroy()
    least, most = (LARGEST, 3 * LARGEST) if limit == "free" else (0, LARGEST)
    assert least < background.peak_bytes <= most


@pytest.mark.usefixtures("slow_disk")
def test_one_after_the_other_and_the_last_before_the_end(tmp_path: Path) -> None:
    engine = engine_of(1 << 30)
    for step in range(3):
        train(engine, step, step + 1)
        engine.save_checkpoint(tmp_path)
    engine.destroy()  # waits
    assert (tmp_path / "latest").read_text().strip() == "global_step3"
    assert len(list(tmp_path.glob("global_step*/manifest.json"))) == 3


def test_what_goes_wrong_is_raised_by_the_next_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(1 << 30)
    train(engine, 0, 1)
    (tmp_path / "file").write_text("")
    engine.save_checkpoint(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="must be a folder, and not a file"):
        engine.save_checkpoint(tmp_path / "other")
    engine.save_checkpoint("/proc/below")  # where nobody can make a folder
    with caplog.at_level("ERROR"), pytest.raises(OSError, match="/proc/below"):
        engine.save_checkpoint(tmp_path / "other")
    assert "/proc/below" in caplog.text  # a script that ends here has only this line
    train(engine, 1, 2)  # goes on
    engine.save_checkpoint(tmp_path / "other")
    engine.wait_for_checkpoint()
    assert (tmp_path / "other" / "latest").exists()
    engine.destroy()


@pytest.mark.matrix
def test_the_benchmark_runs_without_a_gpu() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "background_save.py"
    done = subprocess.run([sys.executable, str(script), "--tiny"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| slowdown with a checkpoint every 4 steps |" in done.stdout
