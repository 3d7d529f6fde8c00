"""What ranks do in the tests of batches and random numbers that differ between the ranks of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from parallel_cases import SHAPE, config_of, digests, make, one_step, tokens
from parallel_tensor_cases import refused
from parallel_trap_cases import batches, layers, loss_of, pipe_config
from torch import Tensor

import twinflow
from twinflow.parallel import PipelineModule

DROPOUT = 0.2


def tensor_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Everything that two tensor ranks do, in one start."""
    config = config_of(1, max(world, 1), 1, num_micro=2)
    return {
        "drift": drift(rank, config, reseeds=False),
        "seeds": drift(rank, config, reseeds=True),
        **({"batches": other_batches(rank, config), "inside": draws_inside(rank, config, folder)} if world > 1 else {}),
    }


def drift(rank: int, config: dict[str, Any], reseeds: bool) -> dict[str, Any]:
    """Three steps with dropout. Rank 1 draws more numbers than rank 0, or has a seed of its own before each step."""
    engine = make(config, dropout=DROPOUT)
    torch.manual_seed(5 + rank)
    losses = []
    for step in range(3):
        if reseeds:
            torch.manual_seed(10 * step + rank)
        elif rank == 1:
            torch.rand(1)
        losses.append(one_step(engine, step))
    found = {"losses": losses, "digests": digests(engine)}
    engine.destroy()
    return found


def other_batches(rank: int, config: dict[str, Any]) -> list[Any]:
    """A sampler that divides the data by the rank of the process. Other shapes, and a mask that only one rank gives."""
    engine = make(config)
    before = digests(engine)
    batch = tokens(0)[8 * rank : 8 * rank + 8]
    said = [
        refused(lambda: engine(batch[:, :-1], batch[:, 1:])),
        refused(lambda: engine(batch[: 4 + rank, :-1])),
        refused(lambda: engine(tokens(0)[:2, :-1], *([tokens(0)[:2, 1:]] if rank else []))),
    ]
    loss = one_step(engine, 0)
    found = [said, before != digests(engine), loss]
    engine.destroy()
    return found


def draws_inside(rank: int, config: dict[str, Any], folder: str) -> list[str]:
    """Rank 1 draws a number in the middle of forward, where nobody can notice it: its dropout differs from then on."""
    said = []
    for act in (lambda engine: one_step(engine, 1), lambda engine: engine.save_checkpoint(folder)):
        engine = make(config, dropout=DROPOUT)
        if rank == 1:
            engine.module.blocks[0].register_forward_pre_hook(lambda *_: torch.rand(1) and None)
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
    torch.manual_seed(0)
    data = [(torch.tensor([i]), torch.tensor([i])) for i in range(64)]
    from twinflow.models.gpt import GPT

    torch.manual_seed(rank)
    engine, _, loader, _ = twinflow.initialize(model=GPT(SHAPE), config=config, training_data=data)
    assert loader is not None
    found = [batch[0].flatten().tolist() for batch in loader]
    engine.destroy()
    return found
