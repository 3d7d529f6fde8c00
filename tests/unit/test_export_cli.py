# SPDX-License-Identifier: Apache-2.0
"""`twinflow export`: what it writes are the model's weights, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twin_support import gpt, quick_torch
from twin_support import run_engine as run
from typer.testing import CliRunner, Result

import twinflow
from twinflow.checkpoint import Entry, open_checkpoint, save
from twinflow.checkpoint.exporting import export_checkpoint
from twinflow.cli.main import app
from twinflow.engine import Engine


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def build(offload: Any = None, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **(offload or {})}},
        **changes,
    }
    return twinflow.initialize(model=gpt(), config=config)[0]


def export(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def load(folder: Path) -> dict[str, torch.Tensor]:
    """What a folder in Hugging Face's layout holds, one file or shards."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {name: load_file(folder / file)[name] for name, file in weight_map.items()}
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(set(weight_map.values()))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint of bf16 training, the model's weights, and its masters."""
    root = tmp_path_factory.mktemp("saved")
    with quick_torch():
        engine = build(bf16={"enabled": True})
        run(engine, range(2))
        engine.save_checkpoint(root)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        state = engine.optimizer.state_dict()["state"]
        masters = {name: entry["master"].clone() for name, entry in state.items()}
        engine.destroy()
    return root, weights, masters


def test_masters_in_fp32_and_weights_in_the_models_dtype(saved: Any, tmp_path: Path) -> None:
    root, weights, masters = saved
    result = export(root, tmp_path / "fp32")
    assert result.exit_code == 0, result.output
    assert f"{len(masters)} of them from fp32 masters" in result.output
    assert "head.weight is tied to" in result.output
    found = load(tmp_path / "fp32")
    assert set(found) == set(weights) - {"head.weight"}
    assert all(torch.equal(found[name], master) for name, master in masters.items())
    assert any(not torch.equal(found[name].bfloat16().float(), found[name]) for name in masters)
    assert export(root, tmp_path / "bf16", "--dtype", "bf16").exit_code == 0
    found = load(tmp_path / "bf16")
    assert all(torch.equal(found[name], weights[name]) for name in found)
    assert export(root, tmp_path / "fp16", "--dtype", "fp16").exit_code == 0
    found = load(tmp_path / "fp16")
    assert all(torch.equal(found[name], master.half()) for name, master in masters.items())


@pytest.mark.parametrize("offload", [{}, {"states": "bf16"}, {"states": "int8"}, {"delayed_update": True}])
def test_round_trip_in_every_format(offload: dict[str, Any], tmp_path: Path) -> None:
    engine = build(offload)
    run(engine, range(2))
    engine.save_checkpoint(tmp_path / "c", tag="t")
    assert export(tmp_path / "c" / "t", tmp_path / "out").exit_code == 0
    engine.optimizer.flush()  # a delayed update is in the masters already
    own = engine.module.state_dict()
    found = load(tmp_path / "out")
    assert all(torch.equal(value, own[name]) for name, value in found.items())
    other = gpt(seed=5)
    missing, unexpected = other.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    engine.destroy()


def test_a_weight_that_was_written_to_wins_over_its_master(tmp_path: Path) -> None:
    engine = build(bf16={"enabled": True})
    run(engine, range(2))
    engine.optimizer.wait()
    with torch.no_grad():
        engine.module.blocks[0].mlp.up.weight[0] = 3.0
    engine.save_checkpoint(tmp_path / "c")
    export(tmp_path / "c", tmp_path / "out")
    found = load(tmp_path / "out")["blocks.0.mlp.up.weight"]
    assert (found[0] == 3.0).all()
    assert not torch.equal(found[1:].bfloat16().float(), found[1:])
    engine.destroy()


def test_shards_have_an_index(saved: Any, tmp_path: Path) -> None:
    root, _, masters = saved
    assert export(root, tmp_path / "out", "--max-shard-size", "20000B").exit_code == 0
    found = load(tmp_path / "out")
    assert all(torch.equal(found[name], master) for name, master in masters.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert len(set(index["weight_map"].values())) > 2
    largest = max(value.nbytes for value in found.values())
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert path.stat().st_size < max(20000, largest) + 10000  # the header comes on top


def test_config_and_force(saved: Any, tmp_path: Path) -> None:
    root, out = saved[0], tmp_path / "out"
    config = tmp_path / "mine.json"
    config.write_text('{"model_type": "gpt2"}')
    assert export(root, out, "--config", config, "--max-shard-size", "20000B").exit_code == 0
    assert json.loads((out / "config.json").read_text()) == {"model_type": "gpt2"}
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = export(root, out)
    assert result.exit_code == 1
    assert "--force" in result.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert export(root, out, "--force").exit_code == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    (out / "tokenizer.json").write_text("{}")
    assert "tokenizer.json, which `twinflow export` did not write" in export(root, out, "--force").output
    assert (out / "tokenizer.json").exists()
    config.write_text("[1]")
    assert "must contain a valid JSON object" in export(root, tmp_path / "b", "--config", config).output
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_mistakes_are_named(saved: Any, tmp_path: Path) -> None:
    root = saved[0]
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ((tmp_path / "nowhere", tmp_path / "out"), "nowhere"),
        (
            (tmp_path / "nowhere", tmp_path / "out"),
            "does not exist. Check the path. twinflow train writes to the folder checkpoints in its --out.",
        ),
        ((tmp_path / "empty", tmp_path / "out"), "contains no checkpoint"),
        ((root, tmp_path / "out", "--tag", "other"), "global_step2"),
        ((root, tmp_path / "out", "--dtype", "int4"), "'bf16'"),
        ((root, tmp_path / "out", "--max-shard-size", "much"), "--max-shard-size"),
        ((root, tmp_path / "file"), "not a folder"),
        ((root, tmp_path / "out", "--config", tmp_path / "none.json"), "none.json"),
    ):
        result = export(*arguments)
        assert result.exit_code == 1, arguments
        assert words in result.output, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_damaged_checkpoint_leaves_nothing(saved: Any, tmp_path: Path) -> None:
    found = open_checkpoint(saved[0])
    assert found is not None
    save(tmp_path / "c", "t", {"model": [Entry("w", torch.float32, (4,), lambda: torch.ones(4))]}, {})
    victim = tmp_path / "c" / "t" / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1] + b"\1")
    result = export(tmp_path / "c", tmp_path / "out")
    assert result.exit_code == 1
    assert "model.safetensors: tensor 'w' does not match its checksum" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_values_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    entries = [
        Entry("big", torch.float32, (2,), lambda: torch.tensor([1.0, 1e6])),
        Entry("mask", torch.bool, (2,), lambda: torch.tensor([True, False])),
        Entry("count", torch.int64, (), lambda: torch.tensor(7)),
    ]
    save(tmp_path / "c", "t", {"model": entries}, {})
    assert (
        "big exceed 65504, the largest value of fp16"
        in export(tmp_path / "c", tmp_path / "out", "--dtype", "fp16").output
    )
    assert export(tmp_path / "c", tmp_path / "out", "--dtype", "bf16").exit_code == 0
    found = load(tmp_path / "out")
    assert (found["mask"].tolist(), found["count"].item(), found["big"].dtype) == ([True, False], 7, torch.bfloat16)


def test_a_full_disk_leaves_the_old_export(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = saved[0], tmp_path / "out"
    export_checkpoint(root, out)
    before = (out / "model.safetensors").read_bytes()

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            export_checkpoint(root, out, dtype="bf16", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / f".out.partial-{2**31 - 1}").mkdir()  # left by a process that died
    seen: list[tuple[int, int]] = []
    done = export_checkpoint(root, out, dtype="bf16", replace=True, on_progress=lambda *at: seen.append(at))
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    assert len(seen) == done.num_tensors
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
