# SPDX-License-Identifier: Apache-2.0
"""Embedding and output layers on the host, as blocks (`tuning.offload_embeddings`): the bits of weights on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import (
    AWAY,
    DEVICE,
    HERE,
    SHAPE,
    gpt,
    logits_loss,
    loss_of,
    movable,
    move,
    places,
    steps_of,
    tokens,
    train,
)
from torch import Tensor, nn

import twinflow
from twinflow.device import Device
from twinflow.offload.blocks import find_blocks, owners
from twinflow.offload.plan import ROOT
from twinflow.optim.twin import Tuning, TwinOptimizer

NUMEL = 1024  # the embedding has 64 x 32 elements: two buckets
EVERY = Tuning(bucket_numel=NUMEL, offload_embeddings=True)
STAYS = Tuning(bucket_numel=NUMEL)


def check_same(make: Callable[[], nn.Module], loss: Callable[[Any, int], Tensor] = loss_of, **options: Any) -> None:
    losses, weights = train(make, False, loss=loss, tuning=STAYS, **options)
    found, others = train(make, True, loss=loss, tuning=EVERY, **options)
    assert found == losses
    assert len(set(losses)) > 2
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3, "states": "int8"},
        pytest.param({"loss": logits_loss, "max_grad_norm": None}, marks=pytest.mark.matrix, id="logits_loss"),
        pytest.param({"early": False, "states": "bf16", "rule": "lion", "lr": 1e-3}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.5}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.2, "placement": "tail"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_no_bit_changes(is_tied: bool, options: dict[str, Any]) -> None:
    check_same(gpt(tied=is_tied), **options)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_bit_changes_in_half_precision(dtype: torch.dtype) -> None:
    check_same(gpt(dtype, tied=False), steps=3, loss=logits_loss)


@pytest.mark.matrix
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_bit_changes_with_slow_copies_and_checkpointed_blocks(is_tied: bool) -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        optimizer.runtime.device.delay("fetch", 0.01)

    check_same(gpt(recompute="full", tied=is_tied), steps=3, watch=slow)


def test_gradients_do_not_take_the_memory_that_the_layers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device where all gradients fit into half of the free memory only if the layers are on the host."""
    wide, weights = gpt(tied=False, vocab_size=512), 2 * 4 * 512 * SHAPE.hidden
    grads = 4 * sum(param.numel() for param in wide().parameters())
    free = 2 * grads + weights // 2
    found = []
    for embeddings in (False, True):
        monkeypatch.setattr(Device, "free_bytes", lambda self, here=weights * (not embeddings): free - here)
        model, tuning = wide(), Tuning(bucket_numel=NUMEL, offload_embeddings=embeddings)
        options: dict[str, Any] = {"early": True, "max_grad_norm": 0.5, "ratio": 1.0, "tuning": tuning}
        with closing(TwinOptimizer(model, lr=1e-2, offload_params=True, **options)) as optimizer:
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            runtime = optimizer.runtime
            found.append((runtime.settings.hold_on_host, runtime.settings.flat_bytes // 1024))
            assert runtime.executor.flats.num_bytes < grads
    assert found[0] == found[1] == (True, (free - weights) // 8 // 1024)


def test_which_layers_are_blocks() -> None:
    model = gpt(tied=False)()
    blocks = find_blocks(model, with_embeddings=True)
    names = [block.name for block in blocks if block.is_embedding]
    assert names == ["token_embedding", "head"]  # the position embedding is small
    assert [block.name for block in blocks] == ["token_embedding", *(f"blocks.{i}" for i in range(4)), "head"]
    model = gpt(tied=True)()
    blocks = find_blocks(model, with_embeddings=True)
    assert [block.tied_to for block in blocks] == [None] * 5 + [0]
    assert owners(model, blocks)[model.head.weight] == 0  # type: ignore[union-attr, index]
    model.other = nn.ParameterList([model.head.weight])  # used by another module too, so it stays on the GPU
    assert owners(model, find_blocks(model, with_embeddings=True))[model.head.weight] == ROOT  # type: ignore[union-attr, index]
    assert not any(block.is_embedding for block in find_blocks(nn.Sequential(nn.Linear(2, 2)), with_embeddings=True))


@pytest.mark.parametrize("is_tied", [False, True])
def test_they_have_memory_only_while_they_run(is_tied: bool) -> None:
    model: Any = gpt(tied=is_tied)()
    with closing(TwinOptimizer(model, lr=1e-2, offload_params=True, tuning=EVERY, max_grad_norm=1.0)) as optimizer:
        offload = optimizer.runtime.param_offload
        assert offload is not None
        seen: dict[str, list[bool]] = {"embedding": [], "block": [], "head": []}
        embedding, head = model.token_embedding, model.head

        def look(name: str) -> None:
            blocks = (0, 0 if is_tied else 5)
            seen[name] += [offload._blocks[block].is_here for block in blocks]

        embedding.register_forward_hook(lambda *_: look("embedding"))
        model.blocks[0].register_forward_hook(lambda *_: look("block"))
        head.register_forward_hook(lambda *_: look("head"))
        fetched = 0
        for step in range(3):
            loss = loss_of(model, step)
            before_backward = [weights.is_here for weights in offload._blocks.values()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            fetched, before = optimizer.runtime.fetched_bytes, fetched
        # Our hook after the forward runs before those of the user: they see the layers after their release.
        assert seen["embedding"][-2:] == [False, False]
        assert seen["block"][-2:] == [False, False]
        assert seen["head"][-2:] == [False, False]  # the loss in chunks has computed its gradients in the forward
        assert before_backward == [False, False, False, False, True] + [False] * (not is_tied)
        sizes = [
            sum(buffer.flat.numel() * buffer.flat.element_size() for buffer in weights.buffers)
            for weights in offload._blocks.values()
        ]
        # Each block twice, and each layer once: the backward of neither needs its weights.
        layers = [sizes[0], sizes[0] if is_tied else sizes[5]]
        assert fetched - before == 2 * sum(sizes[1:5]) + sum(layers)
        assert layers == [4 * embedding.weight.numel()] * 2


def test_reads_writes_and_state_dicts_of_a_divided_weight() -> None:
    model, other = gpt(tied=False)(), gpt(tied=False)().to(DEVICE)
    weight, expected = model.get_parameter("head.weight"), other.get_parameter("head.weight")
    optimizer = TwinOptimizer(model, lr=1e-2, ratio=1.0, offload_params=True, tuning=EVERY)
    assert len(optimizer.runtime.find(weight).buckets) == 2  # type: ignore[union-attr]
    assert torch.equal(weight, expected)
    state = model.state_dict()
    assert all(torch.equal(state[name].cpu(), value.cpu()) for name, value in other.state_dict().items())
    with torch.no_grad():
        weight[40] = 2.0  # in the second bucket
    weight.data[3].fill_(1.5)
    with torch.no_grad():
        expected[40] = 2.0
        expected[3] = 1.5
    assert torch.equal(weight, expected)
    assert loss_of(model, 0).item() == loss_of(other, 0).item()
    penalty = weight.square().sum()  # a use outside of the layer's forward
    penalty.backward()
    expected.square().sum().backward()
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    weight.grad = None
    model.load_state_dict(gpt(tied=False)().state_dict())
    assert torch.equal(weight.cpu(), gpt(tied=False)().get_parameter("head.weight"))
    loss_of(model, 0).backward()
    optimizer.step()
    values = weight.detach().cpu().clone()
    optimizer.close()  # which puts the weights back on the host
    assert torch.equal(weight, values)
    assert not torch.equal(weight, expected.cpu())


def adapters() -> nn.Module:
    """As with LoRA: the embedding and output layers are frozen."""
    model: Any = gpt(tied=False)()
    model.requires_grad_(False)
    for param in model.blocks.parameters():
        param.requires_grad_(param.dim() == 1)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [loss_of, pytest.param(logits_loss, marks=pytest.mark.matrix)])
def test_frozen_layers(loss: Callable[[Any, int], Tensor]) -> None:
    held: list[bool] = []

    def watch(optimizer: TwinOptimizer) -> None:
        offload = optimizer.runtime.param_offload
        model: Any = optimizer.model
        assert offload is not None
        held.extend(offload.params.holds(layer.weight) for layer in (model.token_embedding, model.head))

    check_same(adapters, loss=loss)
    train(adapters, True, tuning=EVERY, steps=1, watch=watch)
    assert held == [True, True]


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_that_move_between_steps(is_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses_of(model: nn.Module, optimizer: TwinOptimizer, moves: bool) -> list[float]:
        found = []
        for step in range(6):
            loss = logits_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if moves and step in (1, 3):
                move(optimizer, 0, *([] if is_tied else [5]))
                assert places(optimizer)[0] == (HERE if step == 1 else AWAY)
        return found

    plain = gpt(tied=is_tied)().to(DEVICE)
    with closing(TwinOptimizer(plain, lr=1e-2, ratio=1.0, tuning=STAYS)) as optimizer:
        expected = losses_of(plain, optimizer, moves=False)
    model = gpt(tied=is_tied)()
    with closing(movable(model, monkeypatch, tuning=EVERY)) as optimizer:
        assert losses_of(model, optimizer, moves=True) == expected


def test_a_model_on_the_meta_device() -> None:
    losses = []
    for given in ({"offload_params": False, "tuning": STAYS}, {"offload_params": True, "tuning": EVERY, "ratio": 0.5}):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = gpt(tied=False)()
        with closing(TwinOptimizer(model, lr=1e-2, **given)) as optimizer:  # type: ignore[arg-type]
            found = []
            for step in range(3):
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


def test_without_weights_on_the_host_it_is_refused() -> None:
    with pytest.raises(ValueError, match="offload_embeddings"):
        TwinOptimizer(gpt()(), lr=1e-2, tuning=EVERY)


# In a config.


def config(embeddings: bool, **others: Any) -> dict[str, Any]:
    offload = {"device": "cpu", "bucket_numel": NUMEL}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu", "embeddings": embeddings}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    found = {"train_batch_size": 4, "gradient_clipping": 0.5, "optimizer": optimizer, "zero_optimization": zero}
    return {**found, **others}


@pytest.mark.parametrize(
    ("before", "after"), [(False, True), pytest.param(True, False, marks=pytest.mark.matrix), (True, True)]
)
def test_checkpoints_go_on_exactly(tmp_path: Path, before: bool, after: bool) -> None:
    chosen = {"checkpoint": {"background": True}}
    engine, *_ = twinflow.initialize(model=gpt(tied=False)(), config=config(before, **chosen))
    steps_of(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    truth = steps_of(engine, 2, 3)
    engine.destroy()
    engine, *_ = twinflow.initialize(model=gpt(tied=False)(), config=config(after, **chosen))
    assert engine.optimizer.tuning.offload_embeddings == after
    engine.load_checkpoint(str(tmp_path))
    assert steps_of(engine, 2, 3) == truth
    engine.destroy()


@pytest.mark.matrix
def test_state_on_the_disk(tmp_path: Path) -> None:
    losses = []
    for embeddings in (False, True):
        chosen = config(embeddings)
        chosen["zero_optimization"]["offload_optimizer"] |= {"device": "nvme", "nvme_path": str(tmp_path)}
        engine, *_ = twinflow.initialize(model=gpt()(), config=chosen)
        losses.append(steps_of(engine, 0, 4))
        engine.destroy()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("is_tied", [False, True])
def test_inference(is_tied: bool) -> None:
    model: Any = gpt(tied=is_tied)()
    inputs = tokens(0)[:, :-1]
    expected = gpt(tied=is_tied)().to(DEVICE)(inputs).logits
    section = {"stage": 3, "offload_param": {"device": "cpu", "embeddings": True}}
    engine, *_ = twinflow.initialize(model=model, config={"train_batch_size": 4, "zero_optimization": section})
    assert torch.equal(engine(inputs).logits, expected)
    held = [engine.host_weights.runtime.lives_on_host(layer.weight) for layer in (model.token_embedding, model.head)]
    assert held == [True, True]
    engine.destroy()
    assert torch.equal(model.to(DEVICE)(inputs).logits, expected)


def test_configs_that_are_refused() -> None:
    section = {"offload_param": {"device": "none", "embeddings": True}}
    chosen = {**config(False), "zero_optimization": section}
    with pytest.raises(ValueError, match=r"offload_param.embeddings"):
        twinflow.initialize(model=gpt()(), config=chosen)
    optimizer = TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, max_grad_norm=0.5)
    with pytest.raises(ValueError, match=r"offload_param.embeddings"):
        twinflow.initialize(model=optimizer.model, optimizer=optimizer, config=config(True))
    optimizer.close()


def test_both_copies_of_a_tied_weight_may_get_the_same_values() -> None:
    model: Any = gpt(tied=True)()
    with closing(TwinOptimizer(model, ratio=1.0, offload_params=True, tuning=EVERY)):
        state = model.state_dict()
        copies = [name for name, copied in state.items() if copied.shape == model.token_embedding.weight.shape]
        assert len(copies) == 2
        for name in copies:
            state[name].fill_(0.5)
        assert model.token_embedding.weight.eq(0.5).all()
