# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing on a GPU: no bit changes whatever the streams' timing, and memory falls as it should."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from twinflow.activations import checkpoint_layers
from twinflow.activations.disk import InputFile
from twinflow.activations.offload import BACK, KEPT, MADE, ROOM, STREAM
from twinflow.device import CudaDevice, Event
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.twin import Tuning, TwinOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LAYERS, TOKENS = 12, 1024
CONFIG = GPTConfig(vocab_size=256, context=TOKENS, num_layers=LAYERS, hidden=256, num_heads=4, dropout=0.1)
INPUT_BYTES = 4 * TOKENS * 256 * 2


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (4, TOKENS + 1), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def model_of() -> GPT:
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills fresh memory with NaN
    torch.manual_seed(0)
    return GPT(CONFIG).to("cuda", torch.bfloat16)


def gradients(
    offload: bool | None,
    delay: str = "",
    disabled: tuple[str, ...] = (),
    steps: int = 2,
    disk: Path | None = None,
) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of some steps, and the most memory beyond the model's; `offload` None: no checkpointing."""
    gc.collect()
    torch.cuda.empty_cache()
    model, handle = model_of(), None
    if offload is not None:
        device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
        device.disabled = frozenset(disabled)
        if delay == STREAM:
            device.delay(STREAM, 0.02)  # longer than it takes to queue a layer
        handle = checkpoint_layers(model, ["Block"], offload=offload, device=device, disk=disk)
        if delay == "compute":
            for block in model.blocks:
                block.mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
    found = []
    for step in range(steps):
        model.zero_grad(set_to_none=False)  # gradients of the first step stay, and are in no later peak
        torch.manual_seed(step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(*batch(step)).loss
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if handle is not None:
        if handle.offload is not None:
            # Two layers keep their inputs, three buffers wait for the disk, and backward reads four inputs ahead.
            most = LAYERS if disk is None else 6
            assert handle.offload.host_bytes <= most * INPUT_BYTES
            assert handle.offload.bytes_back == steps * (LAYERS - 2) * INPUT_BYTES
        handle.remove()
    return found, peak


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_bit_changes_and_memory_falls() -> None:
    plain, plain_peak = gradients(None)
    checkpointed, checkpointed_peak = gradients(False)
    offloaded, offloaded_peak = gradients(True)
    assert same(plain, checkpointed)
    assert same(plain, offloaded)
    assert checkpointed_peak < plain_peak / 2
    # Of the inputs there are at most two on their way out, two ahead and the one at work.
    assert offloaded_peak <= checkpointed_peak - (LAYERS - 6) * INPUT_BYTES


@pytest.mark.parametrize("delay", [STREAM, "compute"])
def test_delays_change_no_bit(delay: str) -> None:
    plain, _ = gradients(False)
    assert same(plain, gradients(True, delay)[0])


@pytest.mark.parametrize("delay", ["", STREAM, "compute"])
def test_inputs_on_a_disk_change_no_bit(tmp_path: Path, delay: str) -> None:
    plain, _ = gradients(False)
    assert same(plain, gradients(True, delay, disk=tmp_path)[0])


@pytest.mark.parametrize("name", ["write", "read"])
def test_a_missing_wait_of_the_disk_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A buffer is written when the copy to it has ended, and read into when the copy from it has ended."""
    plain, _ = gradients(False)
    real: Any = getattr(InputFile, name)

    def at_once(self: InputFile, first: Any, second: Any, third: Any) -> Any:
        passed = Event(None)
        passed.fire(None)
        given = (first, passed, third) if name == "write" else (first, second, passed)
        record = real(self, *given)
        (record if name == "write" else first).wait()
        return record

    monkeypatch.setattr(InputFile, name, at_once)
    assert not same(plain, gradients(True, STREAM, disk=tmp_path)[0])


@pytest.mark.parametrize(
    ("point", "delay"), [(BACK, STREAM), (KEPT, STREAM), (MADE, "compute"), (ROOM, "compute")], ids=str
)
def test_a_missing_wait_shows(point: str, delay: str) -> None:
    """Each wait alone is needed: without it, and with one side slowed down, results change."""
    plain, _ = gradients(False)
    assert not same(plain, gradients(True, delay, (point,))[0])


def test_the_host_is_ahead_of_the_gpu_and_memory_still_falls() -> None:
    """A host that has queued the whole step before the GPU begins must not keep every input."""
    _, peak = gradients(True)
    _, delayed = gradients(True, "compute")
    assert delayed <= peak + INPUT_BYTES


@pytest.mark.parametrize("delay", ["", STREAM, "in", "out"])
def test_with_the_overlapped_optimizer(delay: str) -> None:
    def weights(is_on: bool) -> torch.Tensor:
        model = model_of()
        tuning = Tuning(bucket_numel=1 << 15, shadow_bytes=1 << 30)
        options: dict[str, Any] = {"max_grad_norm": 0.8, "accumulation_steps": 2, "tuning": tuning}
        optimizer = TwinOptimizer(model, lr=1e-2, ratio=1.0, early=True, **options)
        handle = None
        if is_on:
            handle = checkpoint_layers(model, ["Block"], offload=True)
            assert handle.offload is not None
            streams = handle.offload.device if delay == STREAM else optimizer.runtime.device
            if delay:
                streams.delay(delay, 0.001)
        for step in range(3):
            for part in range(2):
                torch.manual_seed(2 * step + part)
                (model(*batch(2 * step + part)).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()]).cpu()
        optimizer.close()
        if handle is not None:
            handle.remove()
        return flat

    assert torch.equal(weights(False), weights(True))


def test_a_graph_that_is_dropped_frees_its_memory() -> None:
    model = model_of()
    handle = checkpoint_layers(model, ["Block"], offload=True)
    assert handle.offload is not None
    model(*batch(0)).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handle.offload.device.delay(STREAM, 0.01)
    loss = model(*batch(1)).loss
    del loss
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before
    assert handle.offload.host_bytes == LAYERS * INPUT_BYTES
    handle.remove()
