# SPDX-License-Identifier: Apache-2.0
"""TwinOptimizer on a GPU: nothing but the algorithm decides the result, whatever the streams' timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.twin import Tuning, TwinOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=4, hidden=128, num_heads=4)
STREAMS = ("compute", "out", "in")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (4, 65), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def model_of(dtype: torch.dtype) -> GPT:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    return GPT(CONFIG).to("cuda", dtype)


def train(
    delay: str = "", dtype: torch.dtype = torch.bfloat16, parts: int = 1, num_steps: int = 8, **options: Any
) -> torch.Tensor:
    """Flat weights after some steps. All state is on the host, unless `options` has another ratio."""
    model = model_of(dtype)
    tuning = {"bucket_numel": 1 << 15, "shadow_bytes": 1 << 30, "num_slots": 3, **options.pop("tuning", {})}
    if options.get("early"):
        options["accumulation_steps"] = parts
    optimizer = TwinOptimizer(model, lr=1e-2, tuning=Tuning(**tuning), **{"ratio": 1.0, **options})
    if delay:
        optimizer.runtime.device.delay(delay, 0.001)
    for step in range(num_steps):
        for part in range(parts):
            (model(*batch(parts * step + part)).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()]).cpu()
    optimizer.close()
    return flat


@pytest.mark.parametrize(
    ("states", "dtype"),
    [("fp32", torch.bfloat16), ("bf16", torch.bfloat16), ("int8", torch.bfloat16), ("fp32", torch.float32)],
    ids=str,
)
def test_overlap_changes_no_bit(states: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"states": states, "dtype": dtype, "max_grad_norm": 0.8}
    plain = train(**options)
    assert torch.equal(plain, train(early=True, **options))
    assert torch.equal(plain, train(early=True, tuning={"shadow_bytes": 0}, **options))
    assert torch.equal(plain, train(early=True, tuning={"hold": "host"}, **options))
    for stream in STREAMS:
        assert torch.equal(plain, train(early=True, delay=stream, **options)), stream


def large_layers() -> torch.nn.Module:
    layers = (torch.nn.Linear(2048, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(12))
    return torch.nn.Sequential(*layers)  # each weight has 16 MiB


def has_neighbours(model: torch.nn.Module) -> bool:
    starts = {p.data_ptr() for p in model.parameters()}
    return any(p.data_ptr() + p.nbytes in starts for p in model.parameters())


def test_weights_in_adjacent_allocations() -> None:
    """torch allocates a large weight by itself. One copy must not cross from one allocation into the next."""
    torch.cuda.empty_cache()
    others = []  # they keep their memory, so that the next model gets other allocations
    while not has_neighbours(model := large_layers()):
        others.append(model)
        assert len(others) < 16, "nothing is tested"
    del others
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = TwinOptimizer(model, "sgd", lr=0.5, ratio=1.0)
    sum(layer(torch.ones(1, 2048, device="cuda", dtype=torch.bfloat16)).sum() for layer in model).backward()
    optimizer.step()
    optimizer.wait()
    for weight, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(weight.float(), old.float() - 0.5, rtol=0.0, atol=2**-8)  # rounded to bf16
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"delayed_update": True}], ids=str)
def test_without_a_clip_decision(options: dict[str, Any]) -> None:
    plain = train(**options)
    assert torch.equal(plain, train(early=True, **options))
    for stream in STREAMS:
        assert torch.equal(plain, train(early=True, delay=stream, **options)), stream


def test_sums_on_the_host_are_those_on_the_device() -> None:
    """In fp32; in bf16 the device rounds the sum for its way to the host."""
    options: dict[str, Any] = {"dtype": torch.float32, "parts": 3, "early": True, "max_grad_norm": 0.8}
    on_device = train(tuning={"sums": "device"}, **options)
    torch.testing.assert_close(on_device, train(tuning={"sums": "host"}, **options), atol=1e-5, rtol=0)


def test_losses_are_those_of_plain_adamw() -> None:
    losses: list[list[float]] = []
    for is_ours in (False, True):
        model = model_of(torch.float32)
        ours = TwinOptimizer(model, lr=1e-3, early=True, max_grad_norm=1.0) if is_ours else None
        optimizer = ours or torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for step in range(10):
            loss = model(*batch(step)).loss
            loss.backward()
            if ours is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bytes_over_the_bus() -> None:
    """Two bytes out and two back for each parameter and step, whatever the number of micro-batches."""
    model = model_of(torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = TwinOptimizer(
        model, lr=1e-3, ratio=1.0, early=True, accumulation_steps=2, tuning=Tuning(bucket_numel=1 << 15)
    )
    for step in range(3):
        for part in range(2):
            (model(*batch(2 * step + part)).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    moved = optimizer.metrics()
    optimizer.close()
    assert moved["bytes_back"] == 3 * 2 * numel
    assert moved["bytes_out"] == pytest.approx(3 * 2 * numel, rel=0.01)  # padding between slices travels too
