# SPDX-License-Identifier: Apache-2.0
"""Twin-Flow on a GPU: its half of the state is updated there, with the bits that the host would give."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.test_twin import batch, model_of, train

from twinflow.offload import reconfigure
from twinflow.offload.plan import RESIDENT
from twinflow.optim.twin import Tuning, TwinOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CASES = [
    ("adamw", "fp32", torch.bfloat16),
    ("adamw", "bf16", torch.bfloat16),
    ("adamw", "int8", torch.bfloat16),
    ("adam", "fp32", torch.float32),
    ("lion", "bf16", torch.bfloat16),
    ("sgd", "fp32", torch.bfloat16),
    ("adagrad", "fp32", torch.float16),
]


@pytest.mark.parametrize(("rule", "states", "dtype"), CASES, ids=str)
def test_any_ratio_gives_the_same_bits(rule: str, states: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"rule": rule, "states": states, "dtype": dtype, "early": True, "max_grad_norm": 0.8}
    if rule == "sgd":
        options["momentum"] = 0.9
    on_host = train(**options)
    for ratio in (0.0, 0.3, 0.7):
        assert torch.equal(on_host, train(ratio=ratio, **options)), ratio


@pytest.mark.parametrize(("rule", "states", "dtype"), CASES, ids=str)
def test_state_on_a_disk_gives_the_same_bits(tmp_path: Path, rule: str, states: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"rule": rule, "states": states, "dtype": dtype, "early": True, "max_grad_norm": 0.8}
    if rule == "sgd":
        options["momentum"] = 0.9
    on_host = train(**options)
    disk = {"nvme_path": str(tmp_path), "shadow_bytes": 0, "buffer_count": 2}
    for ratio, delay in ((1.0, ""), (1.0, "in"), (0.5, "out")):
        assert torch.equal(on_host, train(delay, ratio=ratio, tuning=disk, **options)), (ratio, delay)


@pytest.mark.parametrize(
    "options",
    [
        {"early": True},
        {"early": False, "max_grad_norm": 0.8},
        {"early": True, "delayed_update": True},
        {"early": True, "parts": 3, "max_grad_norm": 0.8},
        {"early": True, "parts": 3, "max_grad_norm": 0.8, "tuning": {"sums": "host", "hold": "host"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("delay", ["", "update", "compute", "out", "in"])
def test_timing_changes_no_bit(options: dict[str, Any], delay: str) -> None:
    assert torch.equal(train(**options), train(delay, ratio=0.4, **options))


def test_any_optimizer_on_both_halves() -> None:
    """torch's own kernels differ between CPU and GPU in the last bits."""
    options: dict[str, Any] = {"rule": torch.optim.AdamW, "early": True, "dtype": torch.float32}
    a, b = (train(ratio=ratio, **options) for ratio in (1.0, 0.4))
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_loads_at_any_ratio() -> None:
    def make(model: torch.nn.Module, ratio: float) -> TwinOptimizer:
        return TwinOptimizer(model, lr=1e-2, early=True, ratio=ratio, tuning=Tuning(bucket_numel=1 << 15))

    def steps(model: Any, optimizer: TwinOptimizer, numbers: range) -> None:
        for step in numbers:
            model(*batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()

    model = model_of(torch.bfloat16)
    optimizer = make(model, 0.5)
    steps(model, optimizer, range(6))
    wanted = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    model = model_of(torch.bfloat16)
    optimizer = make(model, 0.2)
    steps(model, optimizer, range(3))
    saved, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    optimizer.close()
    other = model_of(torch.bfloat16)
    other.load_state_dict(saved)
    optimizer = make(other, 0.9)
    optimizer.load_state_dict(state)
    steps(other, optimizer, range(3, 6))
    assert all(torch.equal(p, w) for p, w in zip(other.parameters(), wanted, strict=True))
    optimizer.close()


def test_auto_chooses_moves_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWINFLOW_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, logger="twinflow")
    options: dict[str, Any] = {"early": True, "max_grad_norm": 0.8, "num_steps": 40}  # it has settled by then
    assert torch.equal(train(**options), train(ratio=None, **options))  # auto is the default
    assert any("ratio auto" in line for line in caplog.messages), caplog.messages
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = model_of(torch.bfloat16)
    optimizer = TwinOptimizer(model, lr=1e-2, ratio="auto", early=True, tuning=Tuning(bucket_numel=1 << 15))
    for bucket in list(optimizer.runtime.buckets):  # every bucket there and back
        optimizer.wait()
        optimizer.runtime.wait_for_copies()
        reconfigure.move(optimizer.runtime, bucket, RESIDENT)
        reconfigure.move(optimizer.runtime, bucket, "host")
    model(*batch(0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    del model, optimizer, bucket
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
