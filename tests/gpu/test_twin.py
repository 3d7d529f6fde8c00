"""TwinOptimizer on a GPU: nothing but the algorithm decides the result, whatever the streams' timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.twin import Tuning, TwinOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=4, hidden=128, num_heads=4)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (4, 65), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def train(steps: int = 12, delay: str = "", dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    """Flat weights after some steps."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model = GPT(CONFIG).to("cuda", dtype)
    tuning = Tuning(bucket_numel=1 << 15, shadow_bytes=options.pop("shadow_bytes", 1 << 30), num_slots=3)
    optimizer = TwinOptimizer(model, lr=1e-2, tuning=tuning, **options)
    if delay:
        optimizer.runtime.device.delay(delay, 0.002)
    for step in range(steps):
        model(*batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()]).cpu()
    optimizer.close()
    return flat


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_overlap_changes_no_bit(states: str, dtype: torch.dtype) -> None:
    options = {"states": states, "dtype": dtype, "max_grad_norm": 0.8}
    plain = train(**options)
    assert torch.equal(plain, train(early=True, **options))
    assert torch.equal(plain, train(early=True, shadow_bytes=0, **options))
    for stream in ("compute", "out", "in"):
        assert torch.equal(plain, train(early=True, delay=stream, **options)), stream


def test_no_gate_and_delayed() -> None:
    assert torch.equal(train(), train(early=True))
    assert torch.equal(train(delayed_update=True), train(delayed_update=True, early=True))
    assert torch.equal(train(delayed_update=True), train(delayed_update=True, early=True, delay="in"))


def test_fp32_is_plain_adamw_within_rounding() -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(*batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    torch.testing.assert_close(train(2, dtype=torch.float32, early=True), flat, atol=1e-5, rtol=0)
