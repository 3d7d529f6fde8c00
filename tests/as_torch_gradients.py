# SPDX-License-Identifier: Apache-2.0
"""Cases of as_torch_cases.py about what an update gets: gradients, options, frozen parameters and saved state.

In a case that is not neutral, `loop.acts` guards what the case is about. The harness checks that the reference without
it ends somewhere else.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from as_torch_support import WIDTH, Case, Loop, Net, gradients, loudness, net_loss, noise, registering, tokens, trains
from torch import Tensor, nn

STEPS = 3
GRADIENTS: list[Case] = []
loop_case = registering(GRADIENTS, "loop")


# Gradients that the user reads and writes.


@loop_case(is_neutral=True)
def gradients_read_before_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.record("gradients", gradients(loop))
        norms = [p.grad.norm() for p in loop.model.parameters()]
        loop.record("norm", torch.stack(norms).norm())
        loop.record("copied", loop.model.head.weight.grad.clone())
        loop.finish()


@loop_case(apis=("twin",), is_neutral=True)
def gradients_read_after_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.step()
        loop.record("gradients", gradients(loop))
        loop.zero_grad()
        loop.record("dropped", gradients(loop))


@loop_case()
def gradients_set_by_hand(loop: Loop) -> None:
    """No backward at all."""
    for number in range(STEPS):
        for p in loop.model.parameters():
            p.grad = 0.1 * noise(number if loop.acts else 0, *p.shape)
        loop.finish()
        loop.record("weight", loop.model.blocks[1].up.weight.clone())


@loop_case()
def one_gradient_set_by_hand(loop: Loop) -> None:
    """All others come from backward."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.model.blocks[1].up.weight.grad = 0.1 * noise(number, 2 * WIDTH, WIDTH)
            loop.model.head.weight.grad = loop.model.head.weight.grad * 0.5
        loop.finish()


@loop_case()
def gradient_set_before_backward(loop: Loop) -> None:
    """backward adds to what is there."""
    for number in range(STEPS):
        if loop.acts:
            for p in loop.model.parameters():
                p.grad = 0.05 * noise(number, *p.shape)
        loop.backward(loop.loss(number))
        loop.finish()


@loop_case()
def one_gradient_dropped(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts and number > 0:
            loop.model.blocks[1].up.weight.grad = None
            loop.model.embed.weight.grad = None
        loop.finish()


@loop_case()
def gradients_scaled_in_place(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            for p in loop.model.parameters():
                p.grad.mul_(0.3)
        loop.finish()


@loop_case()
def gradients_scaled_through_data(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            torch._foreach_div_([p.grad.data for p in loop.model.parameters()], 4.0)
        loop.finish()


@loop_case()
def gradient_noise(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            for p in loop.model.parameters():
                p.grad += 0.05 * noise(number, *p.shape)
        loop.finish()


@loop_case()
def clip_by_value(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            nn.utils.clip_grad_value_(loop.model.parameters(), 0.02)
        loop.finish()


@loop_case()
def clip_by_norm(loop: Loop) -> None:
    """By hand, beside what the optimizer does."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.record("norm", nn.utils.clip_grad_norm_(loop.model.parameters(), 0.2))
        loop.finish()


@loop_case()
def clip_each_block(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            for block in loop.model.blocks:
                nn.utils.clip_grad_norm_(block.parameters(), 0.05, foreach=False)
        loop.finish()


@loop_case(has_failed="twin-early-1-free-device")
def gradient_buffers_of_the_user(loop: Loop) -> None:
    """`.grad` are views of a buffer that is overwritten as soon as `step` returns."""
    params = list(loop.model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in params))
    views = [part.view(p.shape) for part, p in zip(buffer.split([p.numel() for p in params]), params, strict=True)]
    for number in range(STEPS):
        if loop.acts:
            for p, view in zip(params, views, strict=True):
                p.grad = view
            buffer.fill_(0.01)  # what was there before backward counts
        loop.backward(loop.loss(number))
        loop.step()
        buffer.fill_(torch.nan)
        buffer.zero_()
        for p in params:
            p.grad = None


@loop_case(apis=("twin",), has_failed="twin-early-0-free-device")
def gradient_buffers_for_all_steps(loop: Loop) -> None:
    """The views stay; the user sets them to zero after each step."""
    params = list(loop.model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, buffer.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)
    for number in range(STEPS):
        if loop.acts:
            buffer.add_(0.01)
        loop.backward(loop.loss(number))
        loop.record("buffer", buffer)
        loop.step()
        buffer.fill_(torch.nan)
        buffer.zero_()
    loop.zero_grad()


@loop_case(apis=("twin",), has_failed="twin-early-0-clip-device")
def gradients_overwritten_after_step(loop: Loop) -> None:
    """The gradients' memory belongs to the user again when `step` has returned."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.step()
        for p in loop.model.parameters():
            p.grad.fill_(torch.nan)
        if loop.acts:
            for p in loop.model.parameters():
                p.grad.fill_(0.01)
        else:
            loop.zero_grad()


@loop_case()
def autograd_grad(loop: Loop) -> None:
    """torch.autograd.grad, and gradients assigned by hand."""
    params = list(loop.model.parameters())
    for number in range(STEPS):
        for p, grad in zip(params, torch.autograd.grad(loop.loss(number), params), strict=True):
            p.grad = grad if loop.acts else 0.5 * grad
        loop.finish()


@loop_case()
def gradient_surgery(loop: Loop) -> None:
    """Two losses; what one takes from the other is projected away, and the sum is assigned."""
    params = list(loop.model.parameters())
    for number in range(STEPS):
        first = torch.autograd.grad(loop.loss(number), params)
        second = torch.autograd.grad(loop.loss(10 + number), params)
        for p, a, b in zip(params, first, second, strict=True):
            dot = (a * b).sum()
            p.grad = a + b - (torch.clamp(dot, max=0) / a.square().sum().clamp(min=1e-6) * a if loop.acts else 0.0)
        loop.finish()


@loop_case(is_neutral=True)
def autograd_grad_beside_backward(loop: Loop) -> None:
    """Gradients of another loss are only looked at, between backward and step."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        other = loop.loss(20 + number)
        loop.record("looked at", torch.autograd.grad(other, loop.model.blocks[1].up.weight)[0])
        loop.finish()


@loop_case(has_failed="engine-early-1-clip-host")
def gradient_penalty(loop: Loop) -> None:
    """On the gradient of an input, with a graph of the gradient."""
    for number in range(STEPS):
        loss = loop.loss(number)
        x = noise(number, 4, WIDTH).requires_grad_()
        y = loop.model.blocks[2](loop.model.blocks[1](x)).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        if loop.acts:
            loss = loss + (slope.norm(dim=1) - 1.0).square().mean()
        loop.backward(loss)
        loop.finish()


@loop_case(has_failed="twin-late-1-free-host")
def gradient_penalty_on_weights(loop: Loop) -> None:
    params = list(loop.model.parameters())
    for number in range(STEPS):
        loss = loop.loss(number)
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        if loop.acts:
            loss = loss + 0.1 * torch.stack([slope.square().sum() for slope in slopes]).sum()
        loop.backward(loss)
        loop.finish()


@loop_case(has_failed="engine-early-0-free-device")
def backward_with_a_graph(loop: Loop) -> None:
    """`create_graph=True` leaves gradients with graphs, which a second backward goes through."""
    for number in range(STEPS):
        loss = loop.loss(number)
        loss.backward(create_graph=True)
        if loop.acts:
            penalty = 0.1 * torch.stack([p.grad.square().sum() for p in loop.model.parameters()]).sum()
            penalty.backward()
        for p in loop.model.parameters():
            p.grad = p.grad.detach()
        loop.finish()


@loop_case()
def inner_step_of_meta_learning(loop: Loop) -> None:
    """MAML: the loss after one step of gradient descent, differentiated through that step."""
    for number in range(STEPS):
        given = dict(loop.model.named_parameters())
        if loop.acts:
            inner = net_loss(lambda x, given=given: torch.func.functional_call(loop.model, given, (x,)), 0)
            slopes = torch.autograd.grad(inner, list(given.values()), create_graph=True)
            given = {key: p - 0.1 * slope for (key, p), slope in zip(given.items(), slopes, strict=True)}
        loss = net_loss(lambda x, given=given: torch.func.functional_call(loop.model, given, (x,)), number)
        loop.record("outer loss", loss)
        loop.backward(loss)
        loop.finish()


@loop_case(apis=("twin",))
def closure(loop: Loop) -> None:
    def evaluate(number: int) -> Tensor:
        loop.zero_grad()
        loss = loop.loss(number if loop.acts else 40)
        loop.backward(loss)
        return loss

    for number in range(STEPS):
        loop.record("returned", loop.step(lambda number=number: evaluate(number)))
    loop.zero_grad()


@loop_case(apis=("twin",))
def step_hooks(loop: Loop) -> None:
    """A hook before `step` changes the gradients."""

    def before(*_: Any) -> None:
        for p in loop.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    handles = [loop.optimizer.register_step_pre_hook(before)] if loop.acts else []
    for number in range(STEPS):
        loop.train(number)
    for handle in handles:
        handle.remove()


@loop_case(apis=("twin",))
def grad_scaler(loop: Loop) -> None:
    """torch's own loss scaling, which divides the gradients in place."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for number in range(STEPS):
        loss = loop.loss(number)
        scaler.scale(loss if loop.acts else 0.5 * loss).backward()
        scaler.unscale_(loop.optimizer)
        loop.record("gradients", gradients(loop))
        if loop.is_reference:
            loop.step()  # as scaler.step, and clips
        else:
            scaler.step(loop.optimizer)
        scaler.update()
        loop.zero_grad()


@loop_case(is_neutral=True)
def step_under_no_grad(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        with torch.no_grad():
            loop.finish()
            loop.record("weight", loop.model.head.weight.clone())


# zero_grad and steps without gradients.


@loop_case(is_neutral=True)
def zero_grad_before_backward(loop: Loop) -> None:
    for number in range(STEPS):
        loop.zero_grad()
        loss = loop.loss(number)
        loop.zero_grad()
        loop.backward(loss)
        loop.step()
    loop.zero_grad()


@loop_case()
def zero_grad_between_backward_and_step(loop: Loop) -> None:
    """The step has no gradients and changes nothing."""
    for number in range(5):
        loop.backward(loop.loss(number))
        if loop.acts and number in (1, 2):
            loop.zero_grad()
        loop.finish()
        loop.record("weight", loop.model.head.weight.clone())


@loop_case()
def zero_grad_and_a_second_backward(loop: Loop) -> None:
    """The first backward is dropped, the second one counts."""
    for number in range(STEPS):
        if loop.acts:
            loop.backward(loop.loss(20 + number))
            loop.zero_grad()
        loop.backward(loop.loss(number) if loop.acts else loop.loss(20 + number))
        loop.finish()


@loop_case(is_neutral=True)
def zero_grad_twice(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.step()
        loop.zero_grad()
        loop.zero_grad()


@loop_case(apis=("twin",))
def zero_grad_never(loop: Loop) -> None:
    """Gradients of all steps add up."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.record("gradients", gradients(loop))
        loop.step()
        if not loop.acts:
            loop.zero_grad()


@loop_case(apis=("twin",))
def zero_grad_in_every_other_step(loop: Loop) -> None:
    for number in range(5):
        loop.backward(loop.loss(number))
        loop.step()
        if not loop.acts or number % 2:
            loop.zero_grad()


@loop_case(apis=("twin",))
def zero_grad_to_zeros(loop: Loop) -> None:
    """With zeros instead of None the step in between still decays weights and moves them by momentum."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.step()
        loop.zero_grad(set_to_none=not loop.acts)
        loop.record("gradients", gradients(loop))
        loop.step()


@loop_case()
def zero_grad_to_zeros_before_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if number in (1, 2):
            loop.zero_grad(set_to_none=not loop.acts)
        loop.finish()


@loop_case()
def model_zero_grad(loop: Loop) -> None:
    """`model.zero_grad()` drops what the optimizer does not know of."""
    for number in range(5):
        loop.backward(loop.loss(number))
        if loop.acts and number in (1, 2):
            loop.model.zero_grad()
        loop.step()
        loop.model.zero_grad()


@loop_case()
def zero_grad_of_one_block(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.model.blocks[number % 3].zero_grad()
        loop.finish()


@loop_case(is_neutral=True)
def step_without_backward(loop: Loop) -> None:
    """Nothing changes, neither before the first backward nor later."""
    for number in range(STEPS):
        loop.finish()
        loop.record("before", loop.model.head.weight.clone())
        loop.train(number)
        loop.finish()
        loop.finish()
        loop.record("after", loop.model.head.weight.clone())


@loop_case()
def step_twice(loop: Loop) -> None:
    """torch updates twice with the same gradients. The engine has dropped them by then."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        loop.step()
        if loop.acts:
            loop.step()
        if not loop.is_engine:
            loop.zero_grad()
        elif not loop.acts:
            loop.train(60 + number)


class Branches(Net):
    """Each input goes through some of the blocks only."""

    def forward(self, tokens: Tensor, used: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.embed(tokens)
        for index in used:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


def branch_loss(front: Any, number: int, used: tuple[int, ...]) -> Tensor:
    given = tokens(number)
    logits = front(given[:, :-1], used)
    return F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten()) * loudness(number)


@loop_case(make=Branches)
def branches_not_taken(loop: Loop) -> None:
    for number, used in enumerate([(0, 1, 2), (0, 2), (1,), (), (2, 1, 0), (0, 1)]):
        loss = branch_loss(loop.front, number, used if loop.acts else (0, 1, 2))
        loop.record("branch loss", loss)
        loop.backward(loss)
        loop.finish()


@loop_case(make=Branches)
def branches_taken_twice(loop: Loop) -> None:
    """A block runs twice, or three times, in one forward."""
    for number, used in enumerate([(0, 0, 1, 2), (0, 1, 2, 2, 2), (1, 0, 1), (2, 2)]):
        loss = branch_loss(loop.front, number, used if loop.acts else (0, 1, 2))
        loop.record("branch loss", loss)
        loop.backward(loss)
        loop.finish()


@loop_case(make=Branches, accumulation=2)
def branches_with_accumulation(loop: Loop) -> None:
    """A block gets a gradient from one of the micro-batches only."""
    for number, parts in enumerate([((0, 1, 2), (0,)), ((1,), (2,)), ((0, 1), (0, 1)), ((), (0, 1, 2))]):
        for part, used in enumerate(parts):
            loss = branch_loss(loop.front, 2 * number + part, used if loop.acts else (0, 1, 2))
            loop.record("branch loss", loss)
            loop.backward(loss)
            loop.micro_step(part == 1)


# Freezing.


@loop_case()
def freeze_later(loop: Loop) -> None:
    for number in range(STEPS):
        if loop.acts and number == 2:
            loop.model.blocks[1].requires_grad_(False)
            loop.model.embed.weight.requires_grad = False
        loop.train(number)


@loop_case()
def freeze_and_unfreeze(loop: Loop) -> None:
    for number in range(6):
        if loop.acts and number == 1:
            loop.model.blocks[1].requires_grad_(False)
        if loop.acts and number == 3:
            loop.model.blocks[1].requires_grad_(True)
        loop.train(number)


@loop_case()
def freeze_between_backward_and_step(loop: Loop) -> None:
    """The gradient is there, so torch still updates the parameter in this step."""
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts and number == 1:
            loop.model.blocks[1].up.weight.requires_grad_(False)
        loop.finish()


def freeze_some(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)


@loop_case(prepare=freeze_some)
def unfreeze_later(loop: Loop) -> None:
    """torch.optim has all parameters, those that are frozen at the start among them."""
    for number in range(STEPS):
        if loop.acts and number == 2:
            loop.model.blocks[1].requires_grad_(True)
            loop.model.head.bias.requires_grad_(True)
        loop.train(number)


GRADIENTS.append(Case("frozen_from_the_start", trains, "loop", is_neutral=True, prepare=freeze_some))


@loop_case()
def freeze_by_turns(loop: Loop) -> None:
    """One block is trained at a time."""
    for number in range(STEPS):
        for index, block in enumerate(loop.model.blocks):
            block.requires_grad_(not loop.acts or index == number % 3)
        loop.train(number)
    loop.model.requires_grad_(True)


# Options.


@loop_case()
def lr_changed_between_backward_and_step(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts:
            loop.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        loop.finish()


@loop_case()
def lr_changed_after_step(loop: Loop) -> None:
    """The step that is still under way keeps the old rate."""
    for number in range(STEPS):
        loop.train(number)
        if loop.acts:
            loop.optimizer.param_groups[0]["lr"] = 0.01 / (number + 2)


@loop_case()
def lr_is_a_tensor(loop: Loop) -> None:
    """The same tensor is changed in place after each step, as a warm-up that runs on the device does it."""
    rate = torch.tensor(0.01)
    if loop.acts:
        loop.optimizer.param_groups[0]["lr"] = rate
    for number in range(STEPS):
        loop.train(number)
        rate.mul_(0.5)


@loop_case()
def other_options_changed(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts and number == 1:
            loop.optimizer.param_groups[0]["weight_decay"] = 0.5
            loop.optimizer.param_groups[0]["betas"] = (0.8, 0.95)
        loop.finish()
        if loop.acts and number == 2:
            loop.optimizer.param_groups[0]["eps"] = 1e-2


def two_groups(model: nn.Module) -> list[Any]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]


@loop_case(groups=two_groups)
def two_param_groups(loop: Loop) -> None:
    for number in range(STEPS):
        loop.backward(loop.loss(number))
        if loop.acts and number > 0:
            loop.optimizer.param_groups[1]["lr"] *= 0.5
        loop.finish()


@loop_case(apis=("twin",))
def schedulers_in_a_chain(loop: Loop) -> None:
    """torch's warm-up and cosine over the optimizer, stepped by the loop."""
    warm_up = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.2, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 4)
    chain = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, [warm_up, cosine], [2])
    for number in range(6):
        loop.train(number)
        if loop.acts:
            chain.step()
        loop.record("lr", loop.optimizer.param_groups[0]["lr"])


@loop_case(apis=("twin",))
def add_param_group(loop: Loop) -> None:
    extra = nn.Parameter(torch.full((3,), 0.5))
    loop.train(0)
    loop.optimizer.add_param_group({"params": [extra]})
    for number in range(1, STEPS):
        loss = loop.loss(number)
        loop.backward(loss + extra.square().sum() if loop.acts else loss)
        loop.finish()
        loop.record("extra", extra)


# Saving and loading.


@loop_case(apis=("twin",))
def optimizer_state_goes_back(loop: Loop) -> None:
    """Model and optimizer return to where they were two steps before."""
    loop.train(0)
    kept = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    for number in range(1, 3):
        loop.train(number)
    if loop.acts:
        loop.model.load_state_dict(kept[0])
        loop.optimizer.load_state_dict(kept[1])
    for number in range(3, 5):
        loop.train(number)


@loop_case(apis=("twin",), is_neutral=True)
def optimizer_state_saved_in_between(loop: Loop) -> None:
    """Saving has no effect, wherever it happens."""
    for number in range(STEPS):
        loop.train(number)
        loop.optimizer.state_dict()
        loop.backward(loop.loss(10 + number))
        loop.optimizer.state_dict()
        loop.finish()


@loop_case(apis=("twin",), has_failed="twin-late-1-clip-host")
def optimizer_state_loaded_without_the_model(loop: Loop) -> None:
    """Only the state goes back. torch's state has no weights, so these stay."""
    loop.train(0)
    kept = copy.deepcopy(loop.optimizer.state_dict())
    loop.train(1)
    loop.train(2)
    if loop.acts:
        loop.optimizer.load_state_dict(kept)
    loop.train(3)
