# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of a pipeline's execution: a stack of blocks, cut by hand, beside the whole stack."""

from __future__ import annotations

import copy
import json
import os
import time
import weakref
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinflow.parallel.deferral import Deferral, defer
from twinflow.parallel.runner import Runner
from twinflow.parallel.schedules import Schedule, make_schedule
from twinflow.parallel.wire import Key, Wire

NUM_BLOCKS, HIDDEN, NUM_IDS, BATCH = 8, 6, 5, 2
CPU = torch.device("cpu")
SCALE = 8.0
OWN_ERROR = "a stage's own error"


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


def one_raises(rank: int, world: int, failing: int, name: str, port: int | None = None) -> dict[str, Any]:
    """A stage fails on one rank; what the others see, and how soon.

    With a port the first rank keeps the store, which ends with its process, and the last is long at work meanwhile.
    """
    if port is not None:
        _keep_store_on_first_rank(rank, world, port)
    case = {"schedule": name, "num": 2 * world}
    schedule, wire = schedule_of(case, world), Wire(range(world), rank, CPU, timedelta(seconds=100))
    stack = Stack(schedule.num_stages, False)
    num_runs = 0

    def stages(stage: int, *values: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        if rank == failing and num_runs == 3:
            raise ArithmeticError(OWN_ERROR + 5000 * "!")
        if port is not None and rank == world - 1:
            time.sleep(8)  # longer than a rank that fails waits for others
        return stack(stage, *values)

    return _until_failed(Runner(stages, schedule, rank, wire, loss_sum), wire, case["num"])


def _keep_store_on_first_rank(rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)


def one_leaves(rank: int, world: int, how: str, port: int) -> str:
    """The first rank leaves in the middle of a batch, and its process ends, with the store; what the other sees."""
    _keep_store_on_first_rank(rank, world, port)
    wire = Wire(range(world), rank, CPU, timedelta(seconds=100))
    there, back = Key("F", 1, 0, 0, 1), Key("B", 0, 0, 1, 0)
    text = ""
    if rank == 0:
        wire.expect({1: [back]})
        if how == "fail":
            wire.fail(ArithmeticError(OWN_ERROR))
        wire.close()
        return text
    time.sleep(1)  # the other would be gone by now
    try:
        wire.expect({0: [there]})
        wire.receive(there)
    except RuntimeError as error:
        text = str(error)
    wire.close()
    return text


def drop_received(rank: int, world: int) -> bool:
    """Whether what came is freed when nobody has it any more, while the next message is waited for."""
    wire = Wire(range(world), rank, CPU, timedelta(seconds=100))
    keys = [Key("F", 1, i, 0, 1) for i in range(2)]
    is_free = True
    if rank == 0:
        wire.send(keys[0], (torch.ones(3), torch.ones(2, requires_grad=True)))
        dist.barrier()
        wire.send(keys[1], (torch.ones(3),))
    else:
        wire.expect({0: keys})
        refs = [weakref.ref(one) for one in wire.receive(keys[0])]
        deadline = time.monotonic() + 20
        while any(ref() is not None for ref in refs) and time.monotonic() < deadline:
            time.sleep(0.01)  # its thread may not have come further yet
        is_free = all(ref() is None for ref in refs)
        dist.barrier()
        wire.receive(keys[1])
    wire.close()
    return is_free


def train_in_place(rank: int, world: int, name: str, is_deferred: bool) -> dict[str, float]:
    """Stages whose first layer changes its input, and inputs that need a gradient; errors beside one process."""
    schedule = make_schedule(name, world, 2 * world, 2)
    torch.manual_seed(0)
    stages = nn.ModuleList(
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(HIDDEN, HIDDEN)) for _ in range(schedule.num_stages)
    )
    truth = copy.deepcopy(stages)
    xs = [torch.randn(BATCH, HIDDEN, requires_grad=True) for _ in range(schedule.num_micro_batches)]
    true_xs = [x.detach().clone().requires_grad_() for x in xs]
    for x in true_xs:
        value = x.clone()
        for stage in truth:
            value = stage(value)
        (value.square().mean() / len(xs)).backward()
    deferral = Deferral() if is_deferred else None
    if deferral is not None:
        defer(stages, deferral)
    wire = Wire(range(world), rank, CPU, timedelta(seconds=100))
    runner = Runner(
        *(lambda stage, value: stages[stage](value), schedule, rank, wire),
        *(lambda output, _: output.square().mean(), deferral),
    )
    runner.train([(x, None) for x in xs])
    wire.close()
    own = [str(stage) for stage in schedule.stages_of(rank)]
    params = [(n, p) for n, p in stages.named_parameters() if n.split(".")[0] in own]
    errors = {n: _error(p.grad, truth.get_parameter(n).grad) for n, p in params}
    if "0" in own:
        errors |= {f"x{i}": _error(a.grad, b.grad) for i, (a, b) in enumerate(zip(xs, true_xs, strict=True))}
    return errors


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
