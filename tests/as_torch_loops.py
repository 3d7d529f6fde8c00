# SPDX-License-Identifier: Apache-2.0
"""Cases of as_torch_cases.py about the order of forward, backward, `step`, and about several models.

In a case that is not neutral, `loop.acts` guards what the case is about. The harness checks that the reference without
it ends somewhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from as_torch_support import (
    OPTIONS,
    WIDTH,
    Block,
    Case,
    Loop,
    gradients,
    loudness,
    net_loss,
    noise,
    registering,
    tokens,
    trains,
)
from torch import Tensor, nn

STEPS = 3
LOOPS: list[Case] = []
loop_case = registering(LOOPS, "loop")


LOOPS.append(Case("ordinary_training", trains, "loop", is_neutral=True))


# Several backwards.


@loop_case()
def two_losses(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.backward(loop.loss(10 + number))
        loop.finish()


@loop_case()
def two_losses_of_two_forwards(loop: Loop) -> None:
    """Both forwards come first."""
    for number in range(STEPS):
        first = loop.loss(number)
        second = loop.loss(10 + number)
        loop.backward(first)
        if loop.acts:
            loop.backward(second)
        loop.finish()


@loop_case()
def backwards_in_another_order(loop: Loop) -> None:
    for number in range(STEPS):
        first = loop.loss(number)
        second = loop.loss(10 + number)
        loop.backward(second)
        if loop.acts:
            loop.backward(first)
        loop.finish()


@loop_case()
def retain_graph(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.backward(loss, retain_graph=True)
        if loop.acts:
            loop.backward(0.5 * loss.square())
        loop.finish()


@loop_case(has_failed="twin-early-1-clip-device")
def two_losses_on_parts_of_the_model(loop: Loop) -> None:
    """The second loss reaches the first block only."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.backward(loop.model.blocks[0](loop.model.embed(tokens(number))).square().mean())
        loop.finish()


@loop_case()
def number_of_backwards_changes(loop: Loop) -> None:
    """One backward in most steps, then three, then none."""
    for number, count in enumerate((1, 1, 3 if loop.acts else 1, 0 if loop.acts else 1, 1, 2 if loop.acts else 1)):
        for part in range(count):
            loop.backward(loop.loss(10 * number + part))
        loop.finish()


@loop_case()
def double_forward_one_backward(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        if loop.acts:
            loss = loss + loop.loss(10 + number)
        loop.backward(loss)
        loop.finish()


@loop_case(is_neutral=True)
def forward_that_nobody_uses(loop: Loop) -> None:
    """Its graph is dropped without a backward."""
    for number in range(STEPS):
        loop.loss(10 + number)
        loop.train(number)
        loop.loss(20 + number)


@loop_case()
def backward_of_the_older_forward(loop: Loop) -> None:
    for number in range(STEPS):
        older = loop.loss(number)
        newer = loop.loss(10 + number)
        loop.backward(older if loop.acts else newer)
        loop.finish()


@loop_case()
def backward_with_inputs(loop: Loop) -> None:
    """Only some parameters get a gradient."""
    for number in range(STEPS):
        loss = loop.loss(number)
        if loop.acts:
            loss.backward(inputs=[loop.model.head.weight, loop.model.blocks[1].up.weight])
        else:
            loss.backward()
        loop.finish()


@loop_case()
def backward_of_a_vector(loop: Loop) -> None:
    for number in range(STEPS):
        logits = loop.forward(tokens(number))
        factor = 0.01 if loop.acts else 0.02
        logits.backward(factor * noise(number, *logits.shape))
        loop.finish()


@loop_case(is_neutral=True)
def backward_in_another_thread(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        thread = threading.Thread(target=loop.backward, args=(loss,))
        thread.start()
        thread.join()
        loop.finish()


LOSSES_THAT_END: dict[str, Callable[[Loop, int], Tensor]] = {
    "loss_of_one_block": lambda loop, number: loop.model.blocks[1](noise(number, 3, WIDTH)).square().mean(),
    "loss_of_the_head": lambda loop, number: loop.model.head(noise(number, 3, WIDTH)).square().mean(),
}


def alternates(look: Callable[[Loop, int], Tensor]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        for number in range(STEPS):
            loss = look(loop, number) if loop.acts and number % 2 else loop.loss(number)
            loop.record("this loss", loss)
            loop.backward(loss)
            loop.finish()

    return run


LOOPS += [Case(name, alternates(look), "loop") for name, look in LOSSES_THAT_END.items()]


# Two models.


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Painter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def painter_loss(front: Any, number: int) -> Tensor:
    return front(noise(number, 4, WIDTH)).square().mean() * loudness(number)


def judged(judge: Loop, number: int, fake: Tensor) -> Tensor:
    real = F.softplus(-judge.forward(noise(50 + number, 4, WIDTH)))
    return (real + F.softplus(judge.forward(fake))).mean() * loudness(number)


@loop_case(make=Painter, loss=painter_loss)
def gan(loop: Loop) -> None:
    """The fake is not detached: the judge's loss also leaves gradients in the painter, which are dropped."""
    judge = loop.another("judge", Judge)
    for number in range(STEPS):
        fake = loop.forward(noise(number, 4, WIDTH))
        loss = judged(judge, number, fake)
        loop.record("judge", loss)
        judge.backward(loss)
        judge.finish()
        loop.zero_grad()
        if loop.acts:
            fake = loop.forward(noise(number, 4, WIDTH))
            loss = F.softplus(-judge.forward(fake)).mean()
            loop.record("painter", loss)
            loop.backward(loss)
            loop.finish()
            judge.zero_grad()


@loop_case(make=Painter, loss=painter_loss)
def gan_that_keeps_gradients(loop: Loop) -> None:
    """The judge's loss adds to the gradients that the painter steps with."""
    judge = loop.another("judge", Judge)
    for number in range(STEPS):
        fake = loop.forward(noise(number, 4, WIDTH))
        judge.backward(judged(judge, number, fake if loop.acts else fake.detach()))
        judge.finish()
        loss = F.softplus(-judge.forward(loop.forward(noise(20 + number, 4, WIDTH)))).mean()
        loop.backward(loss)
        loop.finish()
        judge.zero_grad()


@loop_case(make=Painter, loss=painter_loss)
def gan_with_a_detached_fake(loop: Loop) -> None:
    judge = loop.another("judge", Judge)
    for number in range(STEPS):
        fake = loop.forward(noise(number, 4, WIDTH))
        judge.backward(judged(judge, number, fake.detach()))
        judge.finish()
        judge.model.requires_grad_(False)
        loss = F.softplus(-judge.forward(fake)).mean()
        loop.record("painter", loss)
        if loop.acts:
            loop.backward(loss)
            loop.finish()
        judge.model.requires_grad_(True)


@loop_case(make=Painter, loss=painter_loss)
def two_models_one_backward(loop: Loop) -> None:
    """Both optimizers step after one backward through both models."""
    judge = loop.another("judge", Judge)
    for number in range(STEPS):
        loss = judge.forward(loop.forward(noise(number, 4, WIDTH))).square().mean()
        loop.record("common loss", loss)
        loop.backward(loss)
        loop.finish()
        if loop.acts:
            judge.finish()
        else:
            judge.zero_grad()


@loop_case(make=Painter, loss=painter_loss)
def the_judge_steps_more_often(loop: Loop) -> None:
    judge = loop.another("judge", Judge)
    for number in range(STEPS):
        for part in range(2 if loop.acts else 1):
            fake = loop.forward(noise(number, 4, WIDTH)).detach()
            judge.backward(judged(judge, 10 * part + number, fake))
            judge.finish()
        loss = F.softplus(-judge.forward(loop.forward(noise(number, 4, WIDTH)))).mean()
        loop.backward(loss)
        loop.finish()
        judge.zero_grad()


# Accumulation.


@loop_case(accumulation=3, is_neutral=True)
def accumulation_as_declared(loop: Loop) -> None:
    for number in range(3):
        loop.train(number)


@loop_case(accumulation=2)
def one_micro_batch_more(loop: Loop) -> None:
    """Three micro-batches where two were declared: the engine is told, torch only counts backwards."""
    for number in range(STEPS):
        count = 3 if loop.acts and number in (1, 2) else 2
        for part in range(count):
            if loop.is_engine:
                loop.set_boundary(part == count - 1)
            loop.backward(loop.loss(10 * number + part))
            loop.micro_step(part == count - 1)
    if loop.is_engine:
        loop.set_boundary(None)


@loop_case(accumulation=3)
def one_micro_batch_less(loop: Loop) -> None:
    """As at the end of an epoch."""
    for number in range(STEPS):
        count = 2 if loop.acts and number in (1, 2) else 3
        for part in range(count):
            if loop.is_engine:
                loop.set_boundary(part == count - 1)
            loop.backward(loop.loss(10 * number + part))
            loop.micro_step(part == count - 1)
    if loop.is_engine:
        loop.set_boundary(None)


@loop_case()
def undeclared_accumulation(loop: Loop) -> None:
    """Four backwards, each with a quarter of the loss, and one `step`."""
    for number in range(STEPS):
        for part in range(4 if loop.acts else 1):
            loop.backward(loop.loss(10 * number + part) / 4)
        loop.finish()


@loop_case(accumulation=2, is_neutral=True)
def evaluation_between_micro_batches(loop: Loop) -> None:
    for number in range(STEPS):
        for part in range(2):
            loop.backward(loop.loss(2 * number + part))
            with torch.no_grad():
                loop.record("evaluation", loop.forward(tokens(0)))
            loop.micro_step(part == 1)
            loop.record("weight", loop.model.head.weight.clone())


@loop_case(accumulation=2)
def zero_grad_between_micro_batches(loop: Loop) -> None:
    """The step starts again: the gradients so far are dropped, and two micro-batches follow."""
    for number in range(STEPS):
        if loop.acts and number in (1, 2):
            loop.backward(loop.loss(50 + number))
            loop.micro_step(False)
            loop.zero_grad()
        loop.train(number)
    if not loop.acts:
        loop.train(STEPS)


@loop_case(accumulation=2)
def model_zero_grad_between_micro_batches(loop: Loop) -> None:
    """torch drops the gradients so far, and the next micro-batch is still the last one of the step."""
    for number in range(STEPS):
        for part in range(2):
            loop.backward(loop.loss(2 * number + part))
            if loop.acts and part == 0:
                loop.model.zero_grad()
            loop.micro_step(part == 1)


@loop_case(accumulation=2)
def write_between_micro_batches(loop: Loop) -> None:
    for number in range(STEPS):
        for part in range(2):
            loop.backward(loop.loss(2 * number + part))
            if loop.acts and part == 0:
                with torch.no_grad():
                    loop.model.blocks[1].up.weight.mul_(0.9)
            loop.micro_step(part == 1)


@loop_case(accumulation=2)
def gradient_changed_between_micro_batches(loop: Loop) -> None:
    for number in range(STEPS):
        for part in range(2):
            loop.backward(loop.loss(2 * number + part))
            if loop.acts and part == 0:
                for p in loop.model.blocks[1].parameters():
                    p.grad.mul_(0.5)
            loop.record("gradients", gradients(loop))
            loop.micro_step(part == 1)


@loop_case(apis=("engine",))
def engine_no_sync(loop: Loop) -> None:
    for number in range(STEPS):
        with loop.no_sync():
            if loop.acts:
                loop.backward(loop.loss(10 + number))
        loop.backward(loop.loss(number))
        loop.step()


@loop_case(apis=("engine",), accumulation=2)
def engine_no_sync_with_accumulation(loop: Loop) -> None:
    """`engine.step` is only called at the boundary, which the loop names."""
    for number in range(STEPS):
        loop.set_boundary(False)
        with loop.no_sync():
            loop.backward(loop.loss(2 * number))
        loop.set_boundary(True)
        if loop.acts:
            loop.backward(loop.loss(2 * number + 1))
        loop.step()
    loop.set_boundary(None)


@loop_case(apis=("engine",), accumulation=2)
def engine_boundary_is_set(loop: Loop) -> None:
    """The caller says where steps end: after 1, 3 and 2 micro-batches."""
    for number, count in enumerate((1, 3, 2) if loop.acts else (2, 2, 2)):
        for part in range(count):
            loop.set_boundary(part == count - 1)
            loop.backward(loop.loss(10 * number + part))
            loop.step()
    loop.set_boundary(None)


@loop_case(apis=("engine",))
def engine_plain_backward(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        (loss if loop.acts else 0.5 * loss).backward()
        loop.step()


@loop_case(apis=("engine",), accumulation=2)
def engine_plain_backward_with_accumulation(loop: Loop) -> None:
    """`loss.backward()` gives the gradients of the loss as it is: the loop divides where it wants to."""
    for number in range(STEPS):
        for part in range(2):
            loss = loop.loss(4 * number + 2 * part)
            (loss if loop.acts else 0.5 * loss).backward()
            loop.step()


@loop_case(apis=("engine",), accumulation=2)
def engine_plain_and_own_backward(loop: Loop) -> None:
    """One micro-batch goes through `engine.backward`, the other does not."""
    for number in range(STEPS):
        loop.backward(loop.loss(2 * number))
        loop.step()
        loss = loop.loss(2 * number + 1)
        (loss / 2 if loop.acts else loss).backward()
        loop.step()


@loop_case(apis=("engine",), accumulation=2)
def engine_scale(loop: Loop) -> None:
    for number in range(STEPS):
        for part in range(2):
            loss = loop.loss(4 * number + 2 * part)
            (loop.scale(loss) if loop.acts else loss).backward()
            loop.step()


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def forget_schedule(loop: Loop) -> None:
    """What the loop would be if the scheduler did not move."""
    if not loop.acts:
        loop.optimizer.param_groups[0]["lr"] = OPTIONS["adamw"]["lr"]


@loop_case(schedule=falling)
def scheduler(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        forget_schedule(loop)
        loop.record("lr", loop.lr)


@loop_case(schedule=falling)
def scheduler_that_nobody_asks(loop: Loop) -> None:
    """Only the weights show whether it has moved."""
    for number in range(5):
        loop.train(number)
        forget_schedule(loop)


@loop_case(schedule=halving)
def scheduler_with_plain_backward(loop: Loop) -> None:
    for number in range(5):
        loop.loss(number).backward()
        loop.finish()
        forget_schedule(loop)


@loop_case(schedule=falling, accumulation=2)
def scheduler_with_plain_backward_and_accumulation(loop: Loop) -> None:
    for number in range(4):
        for part in range(2):
            (loop.loss(2 * number + part) / 2).backward()
            loop.micro_step(part == 1)
        forget_schedule(loop)


HALF: dict[str, Any] = {"apis": ("engine",), "half": True, "rule": "sgd", "tolerance": 2e-3}


@loop_case(**HALF)
def fp16_with_a_fixed_scale(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.backward(loss if loop.acts else 0.1 * loss)
        loop.step()


@loop_case(**HALF, accumulation=2)
def fp16_with_accumulation(loop: Loop) -> None:
    for number in range(STEPS):
        for part in range(2):
            loss = loop.loss(2 * number + part)
            loop.backward(loss if loop.acts else 0.1 * loss)
            loop.step()


@loop_case(**HALF)
def fp16_with_scale_by_hand(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.scale(loss if loop.acts else 0.1 * loss).backward()
        loop.step()


@loop_case(**HALF)
def fp16_with_plain_backward(loop: Loop) -> None:
    """The loss was not scaled, so its gradients are not divided by the scale."""
    for number in range(STEPS):
        loss = loop.loss(number)
        (loss if loop.acts else 0.1 * loss).backward()
        loop.step()


@loop_case(**HALF)
def fp16_reads(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.backward(loss if loop.acts else 0.1 * loss)
        loop.step()
        loop.record("weight", loop.model.blocks[2].up.weight.clone())


# Errors, and what comes between backward and step.


@loop_case(is_neutral=True)
def detect_anomaly(loop: Loop) -> None:
    for number in range(STEPS):
        with torch.autograd.set_detect_anomaly(True):
            loop.backward(loop.loss(number))
        loop.finish()


class Stumbled(Exception):
    pass


def stumble(*_: Any) -> None:
    raise Stumbled


@loop_case(is_neutral=True)
def error_in_forward(loop: Loop) -> None:
    """A hook in the second block raises; the loop goes on with the next batch."""
    for number in range(STEPS):
        if number in (1, 2):
            handle = loop.model.blocks[1].up.register_forward_hook(stumble)
            try:
                loop.loss(30 + number)
            except Stumbled:
                loop.record("raised", 1.0)
            handle.remove()
        loop.train(number)


def fail_in_backward(loop: Loop, number: int) -> None:
    """Backward reaches the head and the last two blocks, and then raises."""

    def prepare(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(stumble)

    handle = loop.model.blocks[0].register_forward_hook(prepare)
    loss = loop.loss(number)
    handle.remove()
    try:
        loop.backward(loss)
    except Stumbled:
        loop.record("raised", 1.0)


@loop_case(is_neutral=True)
def error_in_backward(loop: Loop) -> None:
    """The loop drops the gradients that are there and goes on."""
    for number in range(STEPS):
        if number in (1, 2):
            fail_in_backward(loop, 30 + number)
            loop.zero_grad()
        loop.train(number)


@loop_case()
def error_in_backward_that_is_ignored(loop: Loop) -> None:
    """The gradients that are there count for the next step."""
    for number in range(STEPS):
        if loop.acts and number in (1, 2):
            fail_in_backward(loop, 30 + number)
        loop.train(number)


@loop_case(is_neutral=True)
def evaluation_before_step(loop: Loop) -> None:
    """A forward between backward and step sees the weights as they were."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.model.eval()
        with torch.no_grad():
            loop.record("evaluation", loop.forward(tokens(0)))
        loop.model.train()
        loop.finish()


@loop_case(is_neutral=True)
def weights_read_before_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.record("weights", torch.cat([p.detach().flatten() for p in loop.model.parameters()]))
        loop.record("state dict", loop.model.state_dict()["blocks.1.up.weight"])
        loop.finish()


@loop_case(is_neutral=True)
def forward_with_a_graph_before_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.record("looked at", net_loss(loop.front, 0).item())
        loop.finish()


@loop_case(is_neutral=True)
def retained_graph_after_step(loop: Loop) -> None:
    """torch raises, because `step` has changed weights that the graph needs."""
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.backward(loss, retain_graph=True)
        loop.finish()
        expect_error(loop, loss)
        loop.zero_grad()


@loop_case(is_neutral=True)
def older_graph_after_step(loop: Loop) -> None:
    """The same for a forward whose own backward has not run."""
    for number in range(STEPS):
        older = loop.loss(20 + number)
        loop.train(number)
        expect_error(loop, older)
        loop.zero_grad()


def expect_error(loop: Loop, loss: Tensor) -> None:
    try:
        loop.backward(loss)
    except RuntimeError:
        loop.record("raised", 1.0)
    else:
        loop.record("raised", 0.0)
