# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the background: the state at the call, whatever training does meanwhile, within the memory allowed."""

from __future__ import annotations

import random
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
from torch.nn.functional import linear

import twinflow
from twinflow.checkpoint import Entry
from twinflow.checkpoint.tensors import TensorWriter
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.frozen import Frozen

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, num_heads=2)
LARGEST = 4 * 128 * 32


def engine_of(limit: int | str | None, model: torch.nn.Module | None = None, more: Any = None, **offload: Any) -> Any:
    """`limit`: "free" for the default limit of a background checkpoint, None for no background checkpoint."""
    torch.manual_seed(0)
    checkpoint = {"background": limit is not None, "background_bytes": None if limit == "free" else limit}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "bucket_numel": 4096, **offload}},
        "checkpoint": checkpoint,
        **(more or {}),
    }
    return twinflow.initialize(model=GPT(SHAPE) if model is None else model, config=config)[0]


class Held:
    """Checkpoints whose writer waits before it reads the first tensor, until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = TensorWriter.write

        def wait_and_write(writer: TensorWriter, *rest: Any) -> Any:
            assert self.go.wait(60)
            return write(writer, *rest)

        monkeypatch.setattr(TensorWriter, "write", wait_and_write)


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
    slow_down(monkeypatch, 0.01)


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every tensor takes a while to be read for writing."""
    write = TensorWriter.write

    def slowly(entry: Entry) -> torch.Tensor:
        time.sleep(seconds)
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
    costs = background.costs
    assert costs.peak_bytes <= limit
    if limit >= 1 << 30 and not offload.get("delayed_update") and offload.get("ratio", 1.0) == 1.0:
        assert costs.num_aside > 0
        assert costs.num_copies == 0
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


HALF = {"bf16": {"enabled": True}}
PLAIN = {"gradient_clipping": 0.0}


@pytest.mark.parametrize(
    ("more", "offload"),
    [
        ({}, {}),
        (HALF | PLAIN, {"states": "int8"}),
        *(pytest.param(*one, marks=pytest.mark.matrix) for one in ((PLAIN, {}), (HALF, {"states": "bf16"}))),
    ],
    ids=str,
)
def test_training_neither_copies_state_nor_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], offload: dict[str, Any]
) -> None:
    """The writer reads its first tensor after three more steps, so each byte that it reads is in a store of its own."""
    plain = engine_of(None, more=more, **offload)
    train(plain, 0, 2)
    plain.save_checkpoint(tmp_path / "plain")
    train(plain, 2, 5)
    ended = state_of(plain)
    plain.destroy()
    engine = engine_of(0 if "never" in more else "free", more=more, **offload)
    train(engine, 0, 2)
    held = Held(monkeypatch)
    engine.save_checkpoint(tmp_path / "beside")
    train(engine, 2, 5)
    assert same(state_of(engine), ended)
    costs = engine.background.costs
    held.go.set()
    engine.wait_for_checkpoint()
    assert (costs.num_copies, costs.peak_bytes) == (0, 0)
    assert costs.num_aside == sum(bool(bucket.slices) for bucket in engine.optimizer.runtime.buckets)
    stores = engine.optimizer.runtime.speculative_stores
    assert len(free_stores(engine)) == stores.num_stores  # all of them have come back
    engine.destroy()
    compare_files(tmp_path)


def free_stores(engine: Any) -> list[Any]:
    """Takes all free speculative stores."""
    executor, found = engine.optimizer.runtime.executor, []
    for layout in {bucket.plan.layout for bucket in engine.optimizer.runtime.buckets}:
        while (store := executor.take_speculative_store(layout)) is not None:
            found.append(store)
    return found


def compare_files(folder: Path) -> None:
    files = sorted(path.relative_to(folder / "plain") for path in (folder / "plain").rglob("*.safetensors"))
    assert files
    for name in files:
        assert (folder / "plain" / name).read_bytes() == (folder / "beside" / name).read_bytes(), name


@pytest.mark.parametrize("what", ["written weights", "fp16", "own optimizer", "a parameter without a gradient"])
def test_what_cannot_be_left_to_the_checkpoint_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Weights that are not in the state, state of a user's optimizer, and updates of some parameters of a bucket."""

    def made(limit: str | None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        more: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 1.0}} if what == "fp16" else {}
        if what != "own optimizer":
            return engine_of(limit, model, more)
        checkpoint = {"background": limit is not None}
        config = {"train_micro_batch_size_per_gpu": 4, "checkpoint": checkpoint}
        config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        own = torch.optim.Adamax(model.parameters(), lr=1e-2)
        return twinflow.initialize(model=model, optimizer=own, config=config)[0]

    def steps(engine: Any, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(next(engine.parameters()).dtype)
            first = engine.module[0]
            x = first(x) if step < 2 or what != "a parameter without a gradient" else linear(x, first.weight)
            for layer in engine.module[1:]:
                x = layer(x)
            engine.backward(x.float().square().mean())
            engine.step()

    def write(engine: Any) -> None:
        if what == "written weights":
            with torch.no_grad():
                engine.module[1].weight.mul_(0.5)

    plain = made(None)
    steps(plain, 0, 2)
    write(plain)
    plain.save_checkpoint(tmp_path / "plain")
    plain.destroy()
    engine = made("free")
    steps(engine, 0, 2)
    write(engine)
    held = Held(monkeypatch)
    engine.save_checkpoint(tmp_path / "beside")
    steps(engine, 2, 4)
    costs = engine.background.costs
    held.go.set()
    engine.wait_for_checkpoint()
    engine.destroy()
    assert costs.num_copies > 0
    compare_files(tmp_path)


@pytest.mark.parametrize("is_alias", [False, True], ids=["in place", "data"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_weight_that_the_user_writes_is_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, is_alias: bool
) -> None:
    """On the device the weight is the master weight. On the host the first write makes the state differ from it."""

    def write(engine: Any) -> None:
        with torch.no_grad():
            for param in engine.module.parameters():
                (param.data if is_alias else param).mul_(0.5)

    for limit, folder in ((None, "plain"), ("free", "beside")):
        engine = engine_of(limit, ratio=ratio)
        train(engine, 0, 1)
        write(engine)
        with monkeypatch.context() as patch:
            held = Held(patch)
            if limit is None:
                held.go.set()
            engine.save_checkpoint(tmp_path / folder)
            write(engine)
            held.go.set()
            engine.wait_for_checkpoint()
        engine.destroy()
    compare_files(tmp_path)


def test_a_frozen_weight_that_the_user_writes_ends_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPT(SHAPE)
    model.teacher = torch.nn.Linear(8, 8).requires_grad_(False)
    engine = engine_of("free", model)
    train(engine, 0, 1)
    held = Held(monkeypatch)
    engine.save_checkpoint(tmp_path)
    model.teacher.weight.lerp_(torch.zeros(8, 8), 0.1)
    held.go.set()
    with pytest.raises(RuntimeError, match=r"the frozen parameter teacher\.weight was written after save_checkpoint"):
        engine.wait_for_checkpoint()
    assert not (tmp_path / "latest").exists()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert (tmp_path / "latest").exists()


def test_a_checkpoint_that_fails_releases_stores_after_the_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("free", ratio=0.0)
    train(engine, 0, 1)
    is_copying, order = threading.Event(), []
    value, freeze = Frozen._value, engine.optimizer.runtime.executor.freeze

    def slow_value(frozen: Frozen, reading: Any) -> Any:
        found = value(frozen, reading)
        is_copying.set()
        time.sleep(0.1)
        order.append("copied")
        return found

    def noted_freeze(index: int, has_state: bool, has_params: bool) -> None:
        if not has_state and not has_params:
            order.append("released")
        freeze(index, has_state, has_params)

    def fail(*_: Any) -> Any:
        assert is_copying.wait(60)
        raise OSError("The disk is full")

    monkeypatch.setattr(Frozen, "_value", slow_value)
    monkeypatch.setattr(engine.optimizer.runtime.executor, "freeze", noted_freeze)
    monkeypatch.setattr(TensorWriter, "write", fail)
    engine.save_checkpoint(tmp_path)
    train(engine, 1, 2)  # asks for copies
    with pytest.raises(OSError, match="The disk is full"):
        engine.wait_for_checkpoint()
    assert order.count("copied") == 1
    assert order[0] == "copied"
    engine.destroy()


@pytest.mark.parametrize("seed", [15, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(15))])
def test_random_loops_save_what_a_blocking_save_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Steps with and without clipping and skips, saves in a row, failing saves, writes and reads of weights."""
    slow_down(monkeypatch, 0.001)
    numbers = random.Random(seed)
    limit = numbers.choice([0, LARGEST, 1 << 30, "free"])
    offload = {"ratio": numbers.choice([0.0, 0.4, 1.0, 1.0]), "states": numbers.choice(["fp32", "bf16", "int8"])}
    more = {"gradient_clipping": numbers.choice([0.0, 0.05, 1e3])}
    if numbers.random() < 0.5:
        more["bf16"] = {"enabled": True, "check_grad_overflow": True}
    names = ["step", "step", "step", "save", "save", "write", "read", "skip", "full disk", "wait"]
    actions = [(numbers.choice(names), numbers.random()) for _ in range(12)] + [("save", 0.0)]
    for folder in ("plain", "beside"):
        engine = engine_of(limit if folder == "beside" else None, None, more, **offload)
        for number, (action, choice) in enumerate(actions):
            params = list(engine.module.parameters())
            param = params[int(choice * len(params))]
            if action == "step":
                train(engine, number, number + 1)
            elif action == "skip" and "bf16" in more:
                engine.backward(engine(*(torch.zeros(4, 16, dtype=torch.int64),) * 2).loss * float("nan"))
                engine.step()
            elif action == "save":
                engine.save_checkpoint(tmp_path / folder, tag=f"at{number}")
            elif action == "write":
                with torch.no_grad():
                    param.mul_(1 + choice)
            elif action == "read":
                assert param.detach().clone().isfinite().all()
            elif action == "full disk" and folder == "beside":
                engine.wait_for_checkpoint()
                with monkeypatch.context() as patch:
                    patch.setattr(TensorWriter, "write", _fail)
                    engine.save_checkpoint(tmp_path / "full")
                    if choice < 0.5:
                        time.sleep(0.01)
                    with pytest.raises(OSError, match="The disk is full"):
                        engine.wait_for_checkpoint()
            elif action == "wait":
                engine.wait_for_checkpoint()
        engine.destroy()
    compare_files(tmp_path)


def _fail(*_: Any) -> Any:
    time.sleep(0.01)
    raise OSError("The disk is full")


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("limit", ["free", LARGEST])
def test_copies_use_the_memory_that_is_free_at_the_call(
    tmp_path: Path, limit: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinflow.optim.twin.own_host_bytes", lambda: 0)  # for buffers that make copies unnecessary
    engine = engine_of(limit)
    train(engine, 0, 1)
    # Half of so little memory is left to others. A limit in the config is used instead.
    monkeypatch.setattr("twinflow.engine.state.own_host_bytes", lambda: 2 * 3 * LARGEST)
    engine.save_checkpoint(tmp_path)
    background = engine.background
    train(engine, 1, 3)
    engine.destroy()
    least, most = (LARGEST, 3 * LARGEST) if limit == "free" else (0, LARGEST)
    assert least < background.costs.peak_bytes <= most


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
