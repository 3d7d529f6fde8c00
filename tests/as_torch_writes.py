# SPDX-License-Identifier: Apache-2.0
"""Cases of as_torch_cases.py that write to weights.

What is written comes right after `step` (or between backward and `step`) and must be there in the next forward and in
all later updates. Values come from a generator, so that no read before the write waits for the update. The harness
checks that the reference without the write ends somewhere else.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from as_torch_support import (
    WIDTH,
    Block,
    Case,
    Loop,
    Net,
    net_loss,
    noise,
    registering,
    seeded,
    tokens,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

STEPS = 3
WRITES: list[Case] = []
write = registering(WRITES, "write")


def victims(model: Any, number: int) -> list[nn.Parameter]:
    """Weights of different blocks and buckets, in another order at each step."""
    found = [model.blocks[1].up.weight, model.head.weight, model.embed.weight, model.blocks[2].down.bias]
    return found[number % 4 :] + found[: number % 4]


def fresh(p: Tensor, number: int = 0) -> Tensor:
    return 0.3 * noise(number, *p.shape)


# One parameter after the other.


def assign_data(p: nn.Parameter) -> None:
    p.data = fresh(p)


def assign_halved_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def assign_first_of_data(p: nn.Parameter) -> None:
    p.data[0] = 0.25


def assign_first(p: nn.Parameter) -> None:
    p[0] = 0.25


def subtract_in_place(p: nn.Parameter) -> None:
    p -= 0.1


def write_through_numpy(p: nn.Parameter) -> None:
    values = p.detach().numpy()
    values *= 0.5


def write_through_view(p: nn.Parameter) -> None:
    p.detach().view(-1)[::2].mul_(0.5)


def write_through_kept_data(p: nn.Parameter) -> None:
    alias = p.data
    alias.add_(0.1)


def replace_memory(p: nn.Parameter) -> None:
    p.set_(fresh(p))


ONE_BY_ONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(fresh(p)),
    "add_": lambda p: p.add_(fresh(p), alpha=0.5),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.2),
    "operator": subtract_in_place,
    "first_row": assign_first,
    "masked_fill_": lambda p: p.masked_fill_(p > 0.1, 0.1),
    "out_argument": lambda p: torch.mul(p, 0.5, out=p),
    "foreach_mul_": lambda p: torch._foreach_mul_([p], 0.5),
    "data_assigned": assign_data,
    "data_halved": assign_halved_data,
    "data_clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "data_copy_": lambda p: p.data.copy_(fresh(p)),
    "data_mul_": lambda p: p.data.mul_(0.5),
    "data_first_row": assign_first_of_data,
    "data_normal_": lambda p: p.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5)),
    "detached_mul_": lambda p: p.detach().mul_(0.5),
    "detached_view": write_through_view,
    "kept_data": write_through_kept_data,
    "numpy": write_through_numpy,
    "init_uniform_": lambda p: nn.init.uniform_(p, -0.2, 0.2, generator=torch.Generator().manual_seed(6)),
    "set_": replace_memory,
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(fresh(p))),
}
BETWEEN = ("clamp_", "mul_", "copy_", "data_assigned", "data_mul_", "data_copy_", "numpy")


def after_step(name: str, change: Callable[[nn.Parameter], Any]) -> Case:
    def run(loop: Loop) -> None:
        for number in range(STEPS):
            loop.train(number)
            # The writes of one step are read at once, those of the other only by the next forward.
            if number in (1, 2) and loop.acts:
                for p in victims(loop.model, number):
                    with torch.no_grad():
                        change(p)
                    if number == 2:
                        loop.record("written", p.clone())

    # torch does not swap tensors that have weak references, which may be anybody's.
    return Case(f"write_{name}", run, "write", torch_refuses="has weakref" if name == "swap_tensors" else None)


def between_backward_and_step(name: str, change: Callable[[nn.Parameter], Any]) -> Case:
    def run(loop: Loop) -> None:
        for number in range(STEPS):
            loop.backward(loop.loss(number))
            if number in (1, 2) and loop.acts:
                for p in victims(loop.model, number):
                    with torch.no_grad():
                        change(p)
            loop.finish()

    return Case(f"write_{name}_before_step", run, "write")


WRITES += [after_step(name, change) for name, change in ONE_BY_ONE.items()]
WRITES += [between_backward_and_step(name, ONE_BY_ONE[name]) for name in BETWEEN]


# All weights, or a whole layer.


@write()
def write_before_the_first_forward(loop: Loop) -> None:
    """The optimizer is built and has its masters when the weights change."""
    if loop.acts:
        with torch.no_grad():
            loop.model.blocks[0].up.weight.mul_(2.0)
            loop.model.head.weight.copy_(fresh(loop.model.head.weight))
        loop.model.blocks[2].down.weight.data.clamp_(-0.05, 0.05)
    for number in range(STEPS):
        loop.train(number)


@write()
def load_before_the_first_forward(loop: Loop) -> None:
    if loop.acts:
        loop.model.load_state_dict(seeded(loop.case.make, 3).state_dict())
    for number in range(STEPS):
        loop.train(number)


@write()
def wgan_clipping(loop: Loop) -> None:
    """Every weight is clipped after every step."""
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            for p in loop.model.parameters():
                p.data.clamp_(-0.2, 0.2)


@write()
def projection_after_step(loop: Loop) -> None:
    """Rows are scaled to a norm of at most 0.8, under no_grad: a read and a write of each weight."""
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            with torch.no_grad():
                for block in reversed(loop.model.blocks):
                    norm = block.up.weight.norm(dim=1, keepdim=True)
                    block.up.weight.mul_((0.5 / norm).clamp(max=1.0))


@write()
def rescale_between_backward_and_step(loop: Loop) -> None:
    """As spectral normalisation by hand does it."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            with torch.no_grad():
                for block in loop.model.blocks:
                    block.down.weight.div_(torch.linalg.matrix_norm(block.down.weight, 2))
        loop.finish()


@write(has_failed="twin-late-1-clip-host")
def write_between_forward_and_backward(loop: Loop) -> None:
    """Through `.data`, so that torch does not notice: backward then uses the new weights."""
    for number in range(STEPS):
        loss = loop.loss(number)
        if loop.acts and number > 0:
            loop.model.head.weight.data.mul_(0.8)
            loop.model.blocks[1].down.weight.data.mul_(1.2)
        loop.backward(loss)
        loop.finish()


@write()
def write_twice_and_read(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            for p in victims(loop.model, number):
                with torch.no_grad():
                    p.mul_(0.9)
                loop.record("once", p.sum())
                p.data.add_(0.01)
                loop.record("twice", p.sum())


@write()
def write_every_step_without_reading(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            with torch.no_grad():
                torch._foreach_mul_(list(loop.model.parameters()), 0.95)


@write()
def write_vector_to_parameters(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number in (0, 2):
            vector = parameters_to_vector(loop.model.parameters())
            vector_to_parameters(vector.detach() * 0.9, loop.model.parameters())


@write()
def write_vector_of_other_weights(loop: Loop) -> None:
    """`vector_to_parameters` assigns `p.data` views of the vector, which the user keeps and changes."""
    vector = parameters_to_vector(seeded(loop.case.make, 3).parameters()).detach()
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            vector_to_parameters(vector.clone(), loop.model.parameters())


@write()
def load_state_dict_between_steps(loop: Loop) -> None:
    other = seeded(loop.case.make, 3).state_dict()
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            loop.model.load_state_dict(other)


@write(has_failed="twin-early-1-free-device")
def load_state_dict_between_backward_and_step(loop: Loop) -> None:
    other = seeded(loop.case.make, 3).state_dict()
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts and number == 1:
            loop.model.load_state_dict(other)
        loop.finish()


@write()
def load_state_dict_of_one_block(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number in (1, 2):
            loop.model.blocks[1].load_state_dict(loop.model.blocks[2].state_dict())


@write()
def load_state_dict_with_assign(loop: Loop) -> None:
    """The model gets new parameters; torch's optimizer goes on with the old ones, which nothing uses any more."""
    other = seeded(loop.case.make, 3).state_dict()
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            loop.model.load_state_dict(other, assign=True)


@write()
def replace_a_parameter(loop: Loop) -> None:
    """A new nn.Parameter that the optimizer does not have is not trained."""
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            loop.model.head.weight = nn.Parameter(fresh(loop.model.head.weight))


@write()
def restore_the_best(loop: Loop) -> None:
    """Weights are kept after one step and put back two steps later."""
    kept: dict[str, Tensor] = {}
    for number in range(STEPS):
        loop.train(number)
        if number == 0:
            kept = {key: value.clone() for key, value in loop.model.state_dict().items()}
        if loop.acts and number == 2:
            loop.model.load_state_dict(kept)


@write()
def roll_back_a_bad_step(loop: Loop) -> None:
    """`before` is a deep copy of the state dict; a step that made the loss worse is undone."""
    for number in range(STEPS):
        before = copy.deepcopy(loop.model.state_dict())
        loop.train(number)
        with torch.no_grad():
            loop.record("after the step", net_loss(loop.front, 0))
        if loop.acts and number % 2:
            loop.model.load_state_dict(before)


@write()
def initialise_one_layer_again(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            torch.manual_seed(4)
            nn.init.xavier_uniform_(loop.model.blocks[1].up.weight)
            nn.init.zeros_(loop.model.blocks[1].up.bias)
            nn.init.normal_(loop.model.embed.weight, std=0.3)


@write()
def reset_parameters(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            torch.manual_seed(4)
            loop.model.blocks[2].down.reset_parameters()
            loop.model.head.reset_parameters()


@write()
def initialise_all_again(loop: Loop) -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)

    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            torch.manual_seed(4)
            loop.model.apply(start)


# Algorithms that write.


@write()
def sharpness_aware(loop: Loop) -> None:
    """SAM: weights are moved along the gradient, a second backward runs there, and they are moved back."""
    for number in range(STEPS):
        loss = loop.loss(number)
        if loop.acts:
            params = list(loop.model.parameters())
            moves = [0.05 * grad for grad in torch.autograd.grad(loss, params)]
            with torch.no_grad():
                torch._foreach_add_(params, moves)
            loop.backward(loop.loss(number))
            with torch.no_grad():
                torch._foreach_sub_(params, moves)
        else:
            loop.backward(loss)
        loop.finish()


@write()
def sharpness_aware_with_two_backwards(loop: Loop) -> None:
    """The usual form: backward, move by `.grad`, zero_grad, backward, move back, step."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            moves = {}
            with torch.no_grad():
                for p in loop.model.parameters():
                    moves[p] = 0.05 * p.grad
                    p.add_(moves[p])
            loop.zero_grad()
            loop.backward(loop.loss(number))
            with torch.no_grad():
                for p, move in moves.items():
                    p.sub_(move)
        loop.finish()


@write()
def lookahead(loop: Loop) -> None:
    slow = [p.detach().clone() for p in loop.model.parameters()]
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number % 2:
            with torch.no_grad():
                for p, kept in zip(loop.model.parameters(), slow, strict=True):
                    kept.lerp_(p, 0.5)
                    p.copy_(kept)


@write()
def evaluate_with_the_mean(loop: Loop) -> None:
    """The average takes the place of the weights for an evaluation; then they come back."""
    means = [p.detach().clone() for p in loop.model.parameters()]
    for number in range(STEPS):
        loop.train(number)
        params = list(loop.model.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(means, params, 0.3)
        kept = [p.data for p in params]
        if loop.acts:
            for p, mean in zip(params, means, strict=True):
                p.data = mean
        with torch.no_grad():
            loop.record("with the mean", loop.forward(tokens(0)))
        for p, value in zip(params, kept, strict=True):
            p.data = value


@write()
def evaluate_with_copied_mean(loop: Loop) -> None:
    """The same with `copy_`."""
    means = [p.detach().clone() for p in loop.model.parameters()]
    for number in range(STEPS):
        loop.train(number)
        params = list(loop.model.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(means, params, 0.3)
            kept = [p.clone() for p in params]
            if loop.acts:
                torch._foreach_copy_(params, means)
            loop.record("with the mean", loop.forward(tokens(0)))
            torch._foreach_copy_(params, kept)


@write()
def update_one_by_hand(loop: Loop) -> None:
    """One weight is updated by hand with its gradient, which is then dropped."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            with torch.no_grad():
                p = loop.model.blocks[1].down.weight
                p.sub_(0.1 * p.grad)
                p.grad = None
        loop.finish()


@write()
def noise_before_forward(loop: Loop) -> None:
    """Weights are perturbed for a forward and restored before the step."""
    for number in range(STEPS):
        p = loop.model.blocks[1].up.weight
        change = 0.1 * noise(number, *p.shape) if loop.acts else torch.zeros(p.shape)
        p.data.add_(change)
        loss = loop.loss(number)
        loop.backward(loss)
        p.data.sub_(change)
        loop.finish()


class Restrained(Net):
    """The model writes to its own weights when it runs."""

    is_restrained = True

    def encode(self, tokens: Tensor) -> Tensor:
        if self.is_restrained and self.training:
            with torch.no_grad():
                for block in self.blocks:
                    block.up.weight.clamp_(-0.2, 0.2)
        return super().encode(tokens)


class RestrainedBlock(Block):
    is_restrained = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_restrained:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class RestrainedBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RestrainedBlock() for _ in range(3))


def trains_restrained(loop: Loop) -> None:
    for module in loop.model.modules():
        if hasattr(module, "is_restrained"):
            module.is_restrained = loop.acts
    for number in range(STEPS):
        loop.train(number)


class MaxNorm(Net):
    """`max_norm` scales rows of the embedding in place, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.embed.num_embeddings, WIDTH, max_norm=1.0)


@write(make=MaxNorm)
def embedding_with_max_norm(loop: Loop) -> None:
    if not loop.acts:
        loop.model.embed.max_norm = None
    for number in range(STEPS):
        loop.train(number)


WRITES += [
    Case("model_writes_in_forward", trains_restrained, "write", make=Restrained),
    Case("block_writes_in_forward", trains_restrained, "write", make=RestrainedBlocks),
]


@write()
def write_in_a_forward_hook(loop: Loop) -> None:
    """A hook on the first block changes weights of the last one."""

    def change(*_: Any) -> None:
        if loop.acts:
            loop.model.blocks[2].up.weight.data.mul_(0.9)
            loop.model.head.weight.data.mul_(0.9)

    handle = loop.model.blocks[0].register_forward_hook(change)
    for number in range(STEPS):
        loop.train(number)
    handle.remove()


@write()
def write_in_another_thread(loop: Loop) -> None:
    def change() -> None:
        with torch.no_grad():
            for p in victims(loop.model, 0):
                p.mul_(0.8)

    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number in (1, 2):
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()


@write(apis=("twin",))
def write_in_a_step_hook(loop: Loop) -> None:
    """The optimizer's own hook after `step` clips the weights."""

    def clip(*_: Any) -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.clamp_(-0.2, 0.2)

    handle = loop.optimizer.register_step_post_hook(clip) if loop.acts else contextlib.nullcontext()
    for number in range(STEPS):
        loop.train(number)
    if loop.acts:
        handle.remove()


def freeze_first_block(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)


@write(prepare=freeze_first_block)
def write_frozen_weights(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            loop.model.blocks[0].up.weight.mul_(0.8)
            loop.model.blocks[0].down.weight.data = fresh(loop.model.blocks[0].down.weight, number)
            loop.record("written", loop.model.blocks[0].down.weight.clone())


@write()
def prune_in_the_middle(loop: Loop) -> None:
    """torch's pruning renames the parameter and multiplies it with a mask before each forward."""
    for number in range(STEPS):
        loop.train(number)
        if loop.acts and number == 1:
            prune.l1_unstructured(loop.model.blocks[1].up, "weight", amount=0.5)
            prune.random_structured(loop.model.blocks[2].down, "weight", amount=2, dim=0)
    if loop.acts:
        prune.remove(loop.model.blocks[1].up, "weight")
        prune.remove(loop.model.blocks[2].down, "weight")


@write()
def prune_with_a_mask(loop: Loop) -> None:
    """The mask is applied to the weights by hand after every step."""
    mask = (noise(0, 2 * WIDTH, WIDTH) > 0).float()
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            for block in loop.model.blocks:
                block.up.weight.data *= mask


@write()
def grow_from_zero(loop: Loop) -> None:
    """A weight is set to zero under no_grad between two forwards of one step."""
    for number in range(STEPS):
        loss = loop.loss(number)
        loop.backward(loss)
        with torch.no_grad():
            before = loop.forward(tokens(0))
            if loop.acts:
                loop.model.blocks[0].down.bias.zero_()
            after = F.softmax(loop.forward(tokens(0)), -1)
        loop.record("before", before)
        loop.record("after", after)
        loop.finish()
