# SPDX-License-Identifier: Apache-2.0
"""Weights on the host, blocks on a GPU: no bit changes whatever the streams' timing; waits are needed; memory falls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import AWAY, check_same, gpt, logits_loss, loss_of, movable, move, places, train
from torch import Tensor

from twinflow.offload.sync import FETCH_ROOM, FORWARD
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.optim.twin_build import materialised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LARGE = {"hidden": 256, "num_heads": 4, "num_layers": 12}


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills fresh memory with NaN


@pytest.mark.parametrize("stream", ["", "fetch", "out", "in"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_bit_changes(stream: str, is_checkpointed: bool) -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    make = gpt(torch.bfloat16, recompute="full" if is_checkpointed else "none", **LARGE)
    tuning = Tuning(bucket_numel=1 << 20)  # a block is one bucket
    check_same(make, watch=slow, steps=3, accumulation_steps=2, states="bf16", tuning=tuning)


@pytest.mark.parametrize("stream", ["", "fetch", "out", "in"])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_weights_on_a_disk_change_no_bit(tmp_path: Path, stream: str, num_buffers: int) -> None:
    """A buffer of the file gets another record only when its copy to the device has ended."""

    def slow(optimizer: TwinOptimizer) -> None:
        assert optimizer.runtime.executor.weights is not None
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    make = gpt(torch.bfloat16, **LARGE)
    state = {"nvme_path": str(tmp_path), "shadow_bytes": 0, "buffer_count": 2}
    weights = {"param_nvme_path": str(tmp_path), "param_buffer_count": num_buffers}
    options: dict[str, Any] = {"states": "bf16", "accumulation_steps": 2, "steps": 3, "ratio": 1.0}
    losses, expected = train(make, True, tuning=Tuning(bucket_numel=1 << 18), **options)
    tuning = Tuning(bucket_numel=1 << 18, **state, **weights)  # a block has several records
    found, others = train(make, True, watch=slow, tuning=tuning, **options)
    assert found == losses
    assert len(set(losses)) > 2
    assert [name for name, value in expected.items() if not torch.equal(value, others[name])] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stream", ["", "streamed0", "streamed1", "fetch", "update"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_no_bit_changes_with_streamed_state(stream: str, max_grad_norm: float | None) -> None:
    """Half of the buckets of each kind. Their update needs the last fetch of the weights, and the next fetch needs the
    update.
    """

    def slow(optimizer: TwinOptimizer) -> None:
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    tuning = Tuning(bucket_numel=1 << 18, streamed=0.5)
    check_same(gpt(torch.bfloat16, **LARGE), watch=slow, steps=3, tuning=tuning, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_the_host_updates_to_the_bits_of_streamed_state(dtype: torch.dtype, states: str) -> None:
    options: dict[str, Any] = {"steps": 3, "states": states, "accumulation_steps": 2}
    losses, weights = train(gpt(dtype, **LARGE), True, tuning=Tuning(bucket_numel=1 << 18), **options)
    found, others = train(gpt(dtype, **LARGE), True, tuning=Tuning(bucket_numel=1 << 18, streamed=1.0), **options)
    assert found == losses
    assert all(torch.equal(others[name], value) for name, value in weights.items())


@pytest.mark.parametrize("stream", ["", "fetch", "out", "in"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("loss", [loss_of, logits_loss])
def test_embeddings_on_the_host_change_no_bit(stream: str, is_tied: bool, loss: Callable[[Any, int], Tensor]) -> None:
    """The losses in chunks do not need the output layer in backward, and those of all logits do."""

    def slow(optimizer: TwinOptimizer) -> None:
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    # The embedding has several buckets. Norms are not clipped, because their sums have the order of the buckets.
    make = gpt(torch.bfloat16, vocab_size=4096, recompute="full", tied=is_tied, **LARGE)
    options: dict[str, Any] = {"states": "bf16", "accumulation_steps": 2, "steps": 3, "max_grad_norm": 1e6}
    losses, weights = train(make, False, loss=loss, tuning=Tuning(bucket_numel=1 << 18), **options)
    tuning = Tuning(bucket_numel=1 << 18, offload_embeddings=True)
    found, others = train(make, True, loss=loss, watch=slow, tuning=tuning, **options)
    assert found == losses
    assert len(set(losses)) > 2
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check_same(gpt(dtype, **LARGE), steps=3)


@pytest.mark.parametrize("stream", ["", "fetch", "update"])
@pytest.mark.parametrize("placement", ["front", "tail"])
def test_no_bit_changes_with_blocks_on_either_side(stream: str, placement: str) -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    make = gpt(torch.bfloat16, **LARGE)
    options: dict[str, Any] = {"states": "bf16", "accumulation_steps": 2, "steps": 3}
    losses, weights = train(make, False, **options)
    found, others = train(make, True, watch=slow, ratio=0.5, placement=placement, **options)
    assert found == losses
    assert all(torch.equal(others[name], value) for name, value in weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moves_of_blocks_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(moves: dict[int, list[int]]) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, losses = gpt(dtype, **LARGE)(), []
        optimizer = movable(model, monkeypatch, early=True, max_grad_norm=0.5)
        for step in range(5):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            move(optimizer, *moves.get(step, []))
        found = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        optimizer.close()
        return losses, found

    losses, weights = run({})
    found, others = run({0: [1, 5], 1: [0, 11], 2: [1, 2], 3: [11]})
    assert found == losses
    assert all(torch.equal(others[name], value) for name, value in weights.items())


def test_auto_changes_no_bit() -> None:
    """The first placement has all state on the host. Which one is chosen depends on the times of this machine."""

    def run(ratio: float | str) -> list[float]:
        model: Any = gpt(torch.bfloat16, **LARGE)()
        optimizer = TwinOptimizer(model, lr=1e-3, early=True, offload_params=True, ratio=ratio)
        assert [*places(optimizer).values()] == [AWAY] * LARGE["num_layers"]
        losses = []
        for step in range(40):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.is_placed
        optimizer.close()
        return losses

    assert run("auto") == run(1.0)


@pytest.mark.parametrize("point", [FETCH_ROOM, FORWARD])
def test_a_result_changes_without_this_sync_point(point: str) -> None:
    """With the model's stream, or the copies, held up by as much."""

    def hasty(optimizer: TwinOptimizer) -> None:
        device = optimizer.runtime.device
        device.disabled = frozenset({point})
        if point == FORWARD:
            device.delay("fetch", 0.005)

    def loss(model: Any, step: int) -> torch.Tensor:
        if point == FETCH_ROOM and not hasattr(model, "is_slow"):
            model.is_slow = True
            for block in model.blocks:
                block.mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
        return loss_of(model, step)

    make = gpt(torch.bfloat16, **LARGE)
    calm, _ = train(make, True, steps=3, loss=loss)
    found, _ = train(make, True, steps=3, loss=loss, watch=hasty)
    assert found != calm


def test_building_takes_the_memory_of_one_block() -> None:
    """Also where the outermost module initialises all others, as in models of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=4, vocab_size=512
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    numels = [p.numel() for p in model.parameters()]
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = sum(numels) - 12 * block
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made, _ = materialised(model, is_for_host=True)
    assert all(p.device.type == "cpu" for p in made.parameters())
    assert torch.cuda.max_memory_allocated() - before <= 2 * (outside + 2 * block)


@pytest.mark.parametrize("stream", ["", "out", "update", "fetch"])
def test_no_bit_changes_with_memory_that_gradients_have_left(stream: str) -> None:
    """Activations use this memory, which is filled with NaN first."""

    def slow(optimizer: TwinOptimizer) -> None:
        if stream:
            optimizer.runtime.device.delay(stream, 0.002)

    tuning = Tuning(bucket_numel=1 << 18, hold="device", flat_bytes=0, streamed=0.4)
    check_same(gpt(torch.bfloat16, **LARGE), watch=slow, steps=3, ratio=0.7, states="bf16", tuning=tuning)


def test_gradients_leave_their_memory_to_the_forward() -> None:
    """The memory goes to torch's allocator and comes back, so that no step asks the driver for memory."""
    gc.collect()
    torch.cuda.empty_cache()
    model: Any = gpt(torch.bfloat16, hidden=1024, num_heads=8, num_layers=16)()
    tuning = Tuning(hold="device", flat_bytes=0)
    optimizer = TwinOptimizer(
        model, lr=1e-3, early=True, offload_params=True, ratio=1.0, max_grad_norm=1.0, tuning=tuning
    )
    flats = optimizer.runtime.executor.flats
    grad_bytes, seen, allocations = flats.max_bytes, [], []
    model.blocks[-1].register_forward_hook(lambda *_: seen.append((flats.num_bytes, torch.cuda.memory_allocated())))
    for step in range(8):
        loss_of(model, step).backward()
        assert flats.num_bytes == grad_bytes
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert not any(flat_bytes for flat_bytes, _ in seen)
    assert max(allocated for _, allocated in seen[1:]) < seen[0][1] + grad_bytes // 4
    assert allocations[-1] < allocations[3] + 4  # less than one in a step
    optimizer.close()


def test_memory_is_that_of_a_few_blocks() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    make = gpt(torch.bfloat16, hidden=1024, num_heads=8, num_layers=16, recompute="full")
    model: Any = make()
    block_bytes = sum(p.numel() for p in model.blocks[0].parameters()) * 2
    root_bytes = sum(p.numel() for p in model.parameters()) * 2 - 16 * block_bytes
    before = torch.cuda.memory_allocated()
    optimizer = TwinOptimizer(model, lr=1e-3, early=True, offload_params=True)
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = optimizer.runtime.executor.flats.num_bytes
    assert peak < root_bytes + 6 * block_bytes + gradients + (64 << 20)
    assert peak < 12 * block_bytes + gradients
    optimizer.close()
