"""What ranks do in the tests of a pipeline's execution: a stack of blocks, cut by hand, beside the whole stack."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinflow.parallel.deferral import Deferral, defer
from twinflow.parallel.runner import Runner
from twinflow.parallel.schedules import Schedule, make_schedule
from twinflow.parallel.wire import Wire

NUM_BLOCKS, HIDDEN, NUM_IDS, BATCH = 8, 6, 5, 2
CPU = torch.device("cpu")
SCALE = 8.0


class Block(nn.Module):
    """Takes and makes a tuple: activations, integers, a tensor that skips some blocks, and one that nobody uses."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.num_runs = number, 0
        self.norm, self.table = nn.LayerNorm(HIDDEN), nn.Embedding(NUM_IDS, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, ids: Tensor, skip: Tensor | None = None, unused: Tensor | None = None) -> Any:
        self.num_runs += 1
        x = x + self.down(functional.gelu(self.up(self.norm(x)))) + self.table(ids)
        if self.number == 1:
            skip = 2 * x
        if self.number == 6:
            assert skip is not None
            x, skip = x + skip, None
        return (x, ids, skip, x.mean()) if self.number < NUM_BLOCKS - 1 else x


class Stack(nn.Module):
    """All blocks, with the same weights everywhere; a rank runs those of its stages."""

    def __init__(self, num_stages: int, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(number) for number in range(NUM_BLOCKS))
        self.size, self.is_checkpointed = NUM_BLOCKS // num_stages, is_checkpointed

    def forward(self, stage: int, *values: Any) -> Any:
        for block in self.blocks[stage * self.size : (stage + 1) * self.size]:
            made = checkpoint(block, *values, use_reentrant=False) if self.is_checkpointed else block(*values)
            values = made if isinstance(made, tuple) else (made,)
        return values if len(values) > 1 else values[0]


def micro_batches(num: int) -> list[tuple[Any, Any]]:
    """Inputs and targets, of different lengths."""
    torch.manual_seed(num)
    shapes = [(BATCH, 3 + i % 4) for i in range(num)]
    return [
        ((torch.randn(*shape, HIDDEN), torch.randint(NUM_IDS, shape)), torch.randn(*shape, HIDDEN)) for shape in shapes
    ]


def loss_sum(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient has strides of 0."""
    return output.sum()


def loss_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


LOSSES = {"sum": loss_sum, "square": loss_square}


@cache
def whole(num: int, loss_name: str) -> tuple[Stack, list[Tensor]]:
    """One process and plain autograd: gradients and losses."""
    stack, batches = Stack(1, False), micro_batches(num)
    losses = []
    for inputs, target in batches:
        loss = LOSSES[loss_name](stack(0, *inputs), target)
        torch.autograd.backward(loss, torch.full_like(loss, SCALE / len(batches)))
        losses.append(loss.detach())
    return stack, losses


def schedule_of(case: dict[str, Any], world: int) -> Schedule:
    return make_schedule(case["schedule"], world, case["num"], 2)


def train_all(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case over one wire."""
    wire = Wire(range(world), rank, CPU, timedelta(seconds=100))
    found = [train(rank, world, case, wire) for case in cases]
    wire.close()
    return found


def train(rank: int, world: int, case: dict[str, Any], wire: Wire) -> dict[str, Any]:
    """What the last of some batches gives, beside the truth."""
    schedule = schedule_of(case, world)
    stack = Stack(schedule.num_stages, case["checkpointed"])
    deferral = Deferral() if case["deferred"] else None
    if deferral is not None:
        defer(stack, deferral)
    trace: list[str] = []
    runner = Runner(
        *(stack, schedule, rank, wire, LOSSES[case["loss"]], deferral, lambda: SCALE),
        after=lambda action: trace.append(str(action)),
    )
    batches, before = micro_batches(case["num"]), wire.sent_bytes
    for _ in range(case["times"]):
        trace.clear()
        stack.zero_grad()
        for block in stack.blocks:
            block.num_runs = 0
        losses = runner.train(batches)
    truth, true_losses = whole(case["num"], case["loss"])
    own = [stage * stack.size + i for stage in schedule.stages_of(rank) for i in range(stack.size)]
    return {
        "losses": None if losses is None else [loss.item() for loss in losses],
        "true_losses": [loss.item() for loss in true_losses],
        "errors": {n: _error(p.grad, truth.get_parameter(n).grad) for n, p in _params(stack, own)},
        "strays": [n for n, p in stack.named_parameters() if p.grad is not None and int(n.split(".")[1]) not in own],
        "runs": [stack.blocks[number].num_runs for number in own],
        "trace": trace,
        "sent_bytes": (wire.sent_bytes - before) // case["times"],
    }


def _params(stack: Stack, blocks: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in stack.named_parameters() if int(n.split(".")[1]) in blocks]


def _error(grad: Tensor | None, truth: Tensor | None) -> float:
    """The largest difference, beside the largest gradient."""
    assert truth is not None
    return float("inf") if grad is None else ((grad - truth).abs().max() / truth.abs().max()).item()


def evaluate_all(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses and outputs without training, from runners whose schedules have another number of micro-batches."""
    wire, found = Wire(range(world), rank, CPU, timedelta(seconds=100)), []
    for case in cases:
        schedule = schedule_of(case, world)
        stack, whole_stack = Stack(schedule.num_stages, case["checkpointed"]), Stack(1, False)
        runner = Runner(stack, schedule, rank, wire, LOSSES[case["loss"]])
        batches = micro_batches(case["num"] + 1)
        losses, outputs = runner.evaluate(batches), runner.evaluate(batches, compute_loss=False)
        truth = [whole_stack(0, *inputs) for inputs, _ in batches]
        pairs = zip(truth, batches, strict=True)
        true_losses = [LOSSES[case["loss"]](output, target).item() for output, (_, target) in pairs]
        is_last = outputs is not None and losses is not None
        found.append(
            {
                "is_last": is_last,
                "is_none": losses is None and outputs is None,
                "losses": is_last and [loss.item() for loss in losses] == true_losses,
                "outputs": is_last and all(torch.equal(a, b) for a, b in zip(outputs, truth, strict=True)),
                "has_grads": is_last and any(one.requires_grad for one in (*losses, *outputs)),
            }
        )
    wire.close()
    return found


def one_raises(rank: int, world: int, failing: int, name: str) -> dict[str, Any]:
    """A stage fails on one rank, which lives on; what the others see, and how soon."""
    case = {"schedule": name, "num": 2 * world}
    schedule, wire = schedule_of(case, world), Wire(range(world), rank, CPU, timedelta(seconds=100))
    stack = Stack(schedule.num_stages, False)
    num_runs = 0

    def stages(stage: int, *values: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        if rank == failing and num_runs == 3:
            raise ArithmeticError("a stage's own error")
        return stack(stage, *values)

    return _until_failed(Runner(stages, schedule, rank, wire, loss_sum), wire, case["num"])


def _until_failed(runner: Runner, wire: Wire, num: int) -> dict[str, Any]:
    started = time.monotonic()
    found: dict[str, Any] = {}
    try:
        runner.train(micro_batches(num))
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error), "cause": repr(error.__cause__)}
    try:
        runner.train(micro_batches(num))
    except RuntimeError as error:
        found["again"] = str(error)
    wire.close()
    return {**found, "seconds": time.monotonic() - started}


def one_dies(rank: int, world: int, dying: int, folder: str) -> None:
    """A process ends in the middle of a batch; the others write down what they see."""
    case = {"schedule": "1f1b", "num": 2 * world}
    schedule, wire = schedule_of(case, world), Wire(range(world), rank, CPU, timedelta(seconds=100))
    stack = Stack(schedule.num_stages, False)

    def after(action: Any) -> None:
        if rank == dying and action.kind == "B":
            os._exit(3)

    found = _until_failed(Runner(stack, schedule, rank, wire, loss_sum, after=after), wire, case["num"])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
