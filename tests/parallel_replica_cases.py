# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of batches and random numbers that differ between the ranks of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from parallel_cases import SHAPE, config_of, digests, make, one_step, tokens
from parallel_tensor_cases import refused
from parallel_trap_cases import batches, layers, loss_of, pipe_config
from torch import Tensor
from torch.utils._pytree import tree_leaves

import twinflow
from twinflow.models.gpt import GPT
from twinflow.parallel import PipelineModule, replica
from twinflow.parallel.replica import Digest, hash_values

DROPOUT = 0.2


def tensor_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Everything that two tensor ranks do, in one start."""
    config = config_of(1, max(world, 1), 1, num_micro=2)
    found: dict[str, Any] = {
        "drift": drift(rank, config, reseeds=False),
        "seeds": drift(rank, config, reseeds=True),
    }
    if folder:
        found["batches"] = other_batches(rank, config)
        found["inside"] = draws_inside(rank, config, folder)
    return found


class _Later:
    """Digests of all ranks, as if they came from a GPU: they are compared later."""

    def __init__(self, rows: Tensor, ranks: list[int]) -> None:
        self.found = dict(zip(ranks, rows.tolist(), strict=True))

    def check(self) -> None:
        replica._check_equal(self.found)


def later_batches(rank: int, world: int) -> list[Any]:
    """`other_batches` with values whose digest is known only after forward. Also with a plain backward."""

    def digest(value: object) -> Digest:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return Digest(len(tensors), hash_values(torch.cat([tensor.flatten() for tensor in tensors])))

    with mock.patch.object(replica, "digest", digest), mock.patch.object(replica, "_Pending", _Later):
        engine = make(config_of(1, 2, 1, num_micro=1))
        before = digests(engine)
        batch = tokens(0)[8 * rank : 8 * rank + 8]
        found: list[Any] = []
        for backward in (engine.backward, Tensor.backward):
            loss = engine(batch[:, :-1], batch[:, 1:]).loss  # no error yet
            found.append(refused(lambda loss=loss, backward=backward: backward(loss)) or refused(engine.step))  # type: ignore[misc]
        found.append(before == digests(engine))
        engine.zero_grad()
        engine.destroy()
    return found


def drift(rank: int, config: dict[str, Any], reseeds: bool) -> dict[str, Any]:
    """Three steps with dropout. Rank 1 draws more numbers than rank 0, or has a seed of its own before each step."""
    engine = make(config, dropout=DROPOUT)
    torch.manual_seed(5 + rank)
    losses = []
    for step in range(3):
        if reseeds:
            torch.manual_seed(10 * step + rank)
        elif rank == 1:
            torch.rand(1, device=engine.device)
        losses.append(one_step(engine, step))
    found = {"losses": losses, "digests": digests(engine)}
    engine.destroy()
    return found


def other_batches(rank: int, config: dict[str, Any]) -> list[Any]:
    """A sampler that divides the data by the rank of the process. Other shapes, and a mask that only one rank gives."""
    engine = make(config)
    before = digests(engine)
    whole = tokens(0).to(engine.device)
    batch = whole[8 * rank : 8 * rank + 8]
    said = [
        refused(lambda: engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)),
        refused(lambda: engine(batch[: 4 + rank, :-1])),
        refused(lambda: engine(whole[:2, :-1], *([whole[:2, 1:]] if rank else []))),
    ]
    is_unchanged = before == digests(engine)
    loss = one_step(engine, 0)
    found = [said, is_unchanged, loss]
    engine.destroy()
    return found


def draws_inside(rank: int, config: dict[str, Any], folder: str) -> list[str]:
    """Rank 1 draws a number in the middle of forward, where nobody can notice it: its dropout differs from then on."""
    said = []
    for act in (lambda engine: one_step(engine, 1), lambda engine: engine.save_checkpoint(folder)):
        engine = make(config, dropout=DROPOUT)
        if rank == 1:
            draw = partial(torch.rand, 1, device=engine.device)
            engine.module.blocks[0].register_forward_pre_hook(lambda *_, draw=draw: (draw(), None)[1])
        one_step(engine, 0)
        said.append(refused(lambda act=act, engine=engine: act(engine)))  # type: ignore[misc]
        engine.destroy()
    return said


def stages(rank: int, world: int) -> dict[str, Any]:
    """Two stages, each of which reads a data iterator of its own."""
    module = PipelineModule(layers(), world, loss_fn=loss_of)
    engine = twinflow.initialize(model=module, config=pipe_config())[0]
    train: Callable[[Iterator[Any]], float] = lambda data: float(engine.train_batch(data))  # noqa: E731
    found: dict[str, Any] = {
        "other": refused(lambda: train(batches(rank))),
        "other eval": refused(lambda: engine.eval_batch(batches(rank))),
        "targets": refused(lambda: train(other_targets(rank))),
    }
    try:
        train(iter([next(batches())] * (1 if rank == 0 else 4)))
    except Exception as error:
        found["ended"] = f"{type(error).__name__}: {error}"
    found["losses"] = [train(batches(1)), train(own_halves(rank, 2)), train(batches(3))]
    engine.destroy()
    return found


def other_targets(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, target in batches():
        yield inputs, target.roll(rank, 0)


def own_halves(rank: int, seed: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Only what the rank's stage needs."""
    for inputs, target in batches(seed):
        yield (inputs, None) if rank == 0 else (None, target)


def one_process(rank: int, world: int) -> list[float]:
    """The losses of `stages` with the right data."""
    engine = twinflow.initialize(model=PipelineModule(layers(), 1, loss_fn=loss_of), config=pipe_config())[0]
    losses = [float(engine.train_batch(batches(seed))) for seed in (1, 2, 3)]
    engine.destroy()
    return losses


def engine_loader(rank: int, world: int) -> list[list[int]]:
    """The batches of the engine's own loader, on ranks with different seeds. 2 tensor ranks x 2 replicas."""
    config = config_of(1, 2, 2, num_micro=2)
    data = [(torch.tensor([i]), torch.tensor([i])) for i in range(64)]
    torch.manual_seed(rank)
    engine, _, loader, _ = twinflow.initialize(model=GPT(SHAPE), config=config, training_data=data)
    assert loader is not None
    found = [batch[0].flatten().tolist() for batch in loader]
    engine.destroy()
    return found
