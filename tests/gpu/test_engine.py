# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: resumed bit for bit, numbers that come late, monitors and profile, fp16, a capped card."""

from __future__ import annotations

import csv
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import twinflow
from twinflow.checkpoint.tensors import TensorWriter
from twinflow.engine import Engine
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.monitor.metrics import StepRecord, read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=4, hidden=128, num_heads=4)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (4, 65), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def build(seed: int = 0, **changes: Any) -> Engine:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **changes,
    }
    return twinflow.initialize(model=lambda: GPT(CONFIG), config=config)[0]


def run(engine: Engine, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(*batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize(
    "offload", [{}, {"states": "int8"}, {"delayed_update": True}, {"hold": "host", "sums": "host"}]
)
def test_going_on_is_not_having_stopped(offload: dict[str, Any], tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}}
    one, two = build(zero_optimization=zero), build(1, zero_optimization=zero)
    run(one, range(6))
    one.save_checkpoint(tmp_path)
    two.load_checkpoint(tmp_path)
    assert run(one, range(6, 12)) == run(two, range(6, 12))
    own, other = one.module_state_dict(), two.module_state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    one.destroy()
    two.destroy()


@pytest.mark.parametrize(
    "offload",
    [{"ratio": 1.0}, {"ratio": 1.0, "states": "int8"}, {"ratio": 0.5}, {"ratio": 1.0, "delayed_update": True}],
)
@pytest.mark.parametrize("clipping", [0.0, 1e-2, 1e3])
def test_a_checkpoint_beside_training_is_that_of_the_call(
    offload: dict[str, Any], clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer reads its first tensor after three more steps. State on the host is not copied."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}}
    more: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": clipping, "gradient_accumulation_steps": 1}
    plain, beside = build(**more), build(**more, checkpoint={"background": True})
    run(plain, range(3))
    plain.save_checkpoint(tmp_path / "plain")
    go, write = threading.Event(), TensorWriter.write

    def wait_and_write(writer: TensorWriter, *rest: Any) -> dict[str, int]:
        assert go.wait(60)
        return write(writer, *rest)

    monkeypatch.setattr(TensorWriter, "write", wait_and_write)
    run(beside, range(3))
    beside.save_checkpoint(tmp_path / "beside")
    background = beside.background
    assert run(beside, range(3, 6)) == run(plain, range(3, 6))
    assert background is not None
    costs = background.costs
    go.set()
    beside.wait_for_checkpoint()
    if offload["ratio"] == 1.0:
        assert costs.num_aside > 0
        assert (costs.num_copies > 0) == ("delayed_update" in offload)
    files = sorted(path.name for path in (tmp_path / "plain" / "global_step3").glob("*.safetensors"))
    assert files
    for name in files:
        one, other = (tmp_path / where / "global_step3" / name for where in ("plain", "beside"))
        assert one.read_bytes() == other.read_bytes(), name
    plain.destroy()
    beside.destroy()


def test_numbers_that_come_late_are_the_right_ones(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    profile = {"enabled": True, "profile_step": 2, "output_file": str(tmp_path / "profile.txt")}
    engine = build(csv_monitor=monitor, steps_per_print=2, wall_clock_breakdown=True, flops_profiler=profile)
    losses = run(engine, range(8))
    engine.destroy()
    rows = next(list(csv.reader(path.open())) for path in (tmp_path / "job").glob("*loss.csv"))
    written = [float(row[1]) for row in rows[1:]]
    assert written == pytest.approx([(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-3)
    assert "GPT" in (tmp_path / "profile.txt").read_text()


def test_fp16_trains_after_it_has_found_its_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 100, "hysteresis": 1}
    engine = build(bf16={"enabled": False}, fp16=fp16, gradient_accumulation_steps=1)
    losses = run(engine, [0] * 40)  # one batch over and over: what a model can learn
    assert engine.loss_scale() < 2**24
    assert 0 < engine.skipped_steps < 30
    assert losses[-1] < losses[0]
    engine.destroy()


def test_the_command_under_a_cap(tmp_path: Path) -> None:
    shape = ("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "2", "--seq-length", "64")
    command = [sys.executable, "-m", "twinflow", "train", *shape, "--steps", "6", "--gpu-memory", "2GB"]
    command += ["--trace", str(tmp_path / "trace.json"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert all(0 < record.gpu_bytes < 2 * 10**9 for record in records)
    assert (tmp_path / "trace.json").stat().st_size > 1000
