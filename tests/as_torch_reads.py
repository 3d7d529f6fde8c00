# SPDX-License-Identifier: Apache-2.0
"""Cases of as_torch_cases.py that read weights: between `step` and the next forward, and outside their own module.

Each read comes right after `step`, when the update is still under way, and is recorded at once. The harness checks in
the reference that each recorded value changes from step to step, so that an old value cannot pass.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from as_torch_support import WIDTH, Block, Case, Loop, Net, loudness, net_loss, noise, registering, seeded, tokens
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 3
READS: list[Case] = []
read = registering(READS, "read")


def ordered(model: nn.Module, number: int) -> list[tuple[str, nn.Parameter]]:
    """The parameters, in another order at each step: the first read waits for what the others then find done."""
    named = list(model.named_parameters())
    start = 5 * number % len(named)
    turned = named[start:] + named[:start]
    return turned[::-1] if number % 2 else turned


# One parameter after the other.


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_ordinary(p: Any) -> Tensor:
    """Whether it is a parameter as torch makes it, beside its values."""
    flag = float(type(p) is nn.Parameter and p.requires_grad and p.is_leaf)
    return torch.cat([p.detach().flatten(), torch.tensor([flag])])


def numbers_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.\d*(?:e[+-]?\d+)?", text)]


def printed(p: nn.Parameter) -> list[float]:
    torch.set_printoptions(precision=8, threshold=10_000)
    try:
        return [float(repr(p).startswith("Parameter containing")), *numbers_in(str(p))]
    finally:
        torch.set_printoptions(profile="default")


def as_new_tensors(p: nn.Parameter) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against torch.tensor(p)
        return torch.cat([torch.tensor(p).flatten(), torch.as_tensor(p).flatten(), p.new_tensor(p).flatten()])


def into_out(p: nn.Parameter) -> Tensor:
    out = torch.empty_like(p, requires_grad=False)
    with torch.no_grad():
        torch.mul(p, 2.0, out=out)
    return out


def copied_from(p: nn.Parameter) -> Tensor:
    return torch.zeros(p.shape).copy_(p.data)


def from_storage(p: nn.Parameter) -> Tensor:
    return torch.empty(0).set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride())


ONE_BY_ONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "clone": lambda p: p.clone(),
    "data_clone": lambda p: p.data.clone(),
    "detach": lambda p: p.detach(),
    "index": lambda p: p[0],
    "slice": lambda p: p[..., 1:3],
    "masked": lambda p: p[p.abs() >= 0],
    "sum": lambda p: p.sum(),
    "reductions": lambda p: [p.mean().item(), p.norm().item(), p.abs().max().item(), p.var().item()],
    "item": lambda p: p.view(-1)[1].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "dlpack": lambda p: np.from_dlpack(p.detach()),
    "iterate": lambda p: torch.stack([row.sum() for row in p]),
    "arithmetic": lambda p: 1.0 - p * 2.0 + p**2,
    "matmul": lambda p: p.reshape(p.shape[0], -1) @ p.reshape(p.shape[0], -1).t(),
    "reshape": lambda p: p.reshape(-1).unsqueeze(0),
    "einsum": lambda p: torch.einsum("...i,...i->...", p, p),
    "to_float64": lambda p: p.to(torch.float64),
    "float_and_cpu": lambda p: p.float().cpu().contiguous(),
    "clone_function": torch.clone,
    "foreach_norm": lambda p: torch._foreach_norm([p])[0],
    "new_tensors": as_new_tensors,
    "out_argument": into_out,
    "copied_from": copied_from,
    "raw_storage": from_storage,
    "print_parameter": printed,
    "new_parameter": lambda p: is_ordinary(nn.Parameter(p)),
    "deepcopy_parameter": lambda p: is_ordinary(copy.deepcopy(p)),
    "save_parameter": lambda p: is_ordinary(saved_and_loaded(p)),
    "pickle_parameter": lambda p: is_ordinary(pickle.loads(pickle.dumps(p))),
}


def one_by_one(name: str, look: Callable[[nn.Parameter], Any]) -> Case:
    def run(loop: Loop) -> None:
        for number in range(STEPS):
            loop.train(number)
            for key, p in ordered(loop.model, number):
                loop.record(f"{name} of {key}", look(p))

    return Case(f"read_{name}", run, "read")


READS += [one_by_one(name, look) for name, look in ONE_BY_ONE.items()]


# Several parameters together.


def flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in values])


ALL_TOGETHER: dict[str, Callable[[nn.Module], Any]] = {
    "parameters_to_vector": lambda model: parameters_to_vector(model.parameters()),
    "cat": lambda model: torch.cat([p.flatten() for p in model.parameters()]),
    "stack": lambda model: torch.stack([block.up.weight for block in model.blocks]),
    "total_norm": lambda model: nn.utils.get_total_norm(model.parameters()),
    "foreach_add": lambda model: flat(torch._foreach_add([p.data for p in model.parameters()], 1.0)),
    "state_dict": lambda model: flat(model.state_dict().values()),
    "state_dict_of_block": lambda model: flat(model.blocks[2].state_dict().values()),
    "save_state_dict": lambda model: flat(saved_and_loaded(model.state_dict()).values()),
    "deepcopy_state_dict": lambda model: flat(copy.deepcopy(model.state_dict()).values()),
    "get_parameter": lambda model: model.get_parameter("blocks.2.down.weight").clone(),
    "linear_with_weight": lambda model: F.linear(
        noise(0, 3, WIDTH), model.blocks[2].up.weight, model.blocks[2].up.bias
    ),
}


def all_together(name: str, look: Callable[[nn.Module], Any]) -> Case:
    def run(loop: Loop) -> None:
        for number in range(STEPS):
            loop.train(number)
            loop.record(name, look(loop.model))

    return Case(f"read_{name}", run, "read")


READS += [all_together(name, look) for name, look in ALL_TOGETHER.items()]


@read()
def read_equal(loop: Loop) -> None:
    """A weight after the step is not what it was before."""
    for number in range(STEPS):
        before = {key: p.detach().clone() for key, p in loop.model.named_parameters()}
        loop.train(number)
        for key, p in ordered(loop.model, number):
            loop.record(f"equal {key} {number}", float(torch.equal(p, before[key])))
            loop.record(f"close {key} {number}", float(torch.allclose(p, before[key], atol=1e-7)))


@read()
def read_metadata(loop: Loop) -> None:
    """Metadata is right while the update runs, and reading it changes nothing."""
    for number in range(STEPS):
        loop.train(number)
        for key, p in ordered(loop.model, number):
            facts = [p.requires_grad, p.is_leaf, p.grad is None, isinstance(p, nn.Parameter), p.is_contiguous()]
            kinds = [p.dtype == torch.float32, p.device.type == "cpu", p.layout == torch.strided, len(p) == p.shape[0]]
            sizes = [p.numel(), p.dim(), p.element_size(), *p.shape, *p.size(), *p.stride()]
            loop.record(f"{key} {number}", [float(value) for value in (*facts, *kinds, *sizes)])
            loop.record(
                f"{key} is itself {number}", float({p: 1}[p] == 1 and hash(p) == id(p) and p is p.requires_grad_())
            )


@read()
def read_through_param_groups(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        for group in loop.optimizer.param_groups:
            loop.record("groups", flat(reversed(group["params"])).sum())


@read()
def read_in_another_thread(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda found=found: found.extend(p.clone() for p in loop.model.parameters()))
        thread.start()
        thread.join()
        loop.record("in a thread", flat(found))


@read()
def read_in_two_threads(loop: Loop) -> None:
    """Two threads read while the main thread goes on with the next forward."""
    for number in range(STEPS):
        loop.train(number)
        found: list[list[Tensor]] = [[], []]

        def look(into: list[Tensor], order: int) -> None:
            into.extend(p.detach().clone() for _, p in sorted(loop.model.named_parameters(), reverse=bool(order)))

        threads = [threading.Thread(target=look, args=(into, order)) for order, into in enumerate(found)]
        for thread in threads:
            thread.start()
        with torch.no_grad():
            loop.record("forward", loop.forward(tokens(number)))
        for thread in threads:
            thread.join()
        for order, values in enumerate(found):
            loop.record(f"thread {order}", flat(values))


@read()
def forward_in_another_thread(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        found: list[Tensor] = []

        def look(found: list[Tensor] = found) -> None:
            with torch.no_grad():
                found.append(loop.forward(tokens(0)))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        loop.record("forward", found[0])


# Copies of the model.


def record_model(loop: Loop, name: str, model: nn.Module) -> None:
    """The weights, the types of the parameters and a forward of a copy."""
    loop.record(f"{name}: weights", flat(model.parameters()))
    loop.record(f"{name}: forward", model(tokens(7)))


@read()
def deepcopy_model(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        copied = copy.deepcopy(loop.model)
        record_model(loop, "copy", copied)
        loop.record(
            f"ordinary {number}", [float(type(p) is nn.Parameter and p.requires_grad) for p in copied.parameters()]
        )


@read()
def deepcopy_is_independent(loop: Loop) -> None:
    """The copy is a model of its own: it keeps its values, and another optimizer can train it."""
    for number in range(STEPS):
        loop.train(number)
        copied = copy.deepcopy(loop.model)
        loop.train(10 + number)
        record_model(loop, "kept", copied)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        net_loss(copied, number).backward()
        optimizer.step()
        record_model(loop, "trained", copied)


@read()
def deepcopy_block(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        copied = copy.deepcopy(loop.model.blocks[2])
        loop.record("copy", flat(copied.parameters()))
        loop.record("forward", copied(noise(0, 3, WIDTH)))


@read()
def pickle_model(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        record_model(loop, "pickled", pickle.loads(pickle.dumps(loop.model)))


@read()
def save_whole_model(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        file = io.BytesIO()
        torch.save(loop.model, file)
        file.seek(0)
        record_model(loop, "saved", torch.load(file, weights_only=False))


@read()
def load_into_another_model(loop: Loop) -> None:
    """The target network of reinforcement learning."""
    target = seeded(loop.case.make, 5)
    for number in range(STEPS):
        loop.train(number)
        target.load_state_dict(loop.model.state_dict())
        record_model(loop, "target", target)


@read()
def ema_with_lerp(loop: Loop) -> None:
    means = {key: torch.zeros_like(p) for key, p in loop.model.named_parameters()}
    for number in range(STEPS):
        loop.train(number)
        with torch.no_grad():
            for key, p in ordered(loop.model, number):
                means[key].lerp_(p, 0.3)
        loop.record("mean", flat(means.values()))


@read()
def ema_with_data(loop: Loop) -> None:
    means = {key: torch.zeros_like(p) for key, p in loop.model.named_parameters()}
    for number in range(STEPS):
        loop.train(number)
        for key, p in ordered(loop.model, number):
            means[key].mul_(0.7).add_(p.data, alpha=0.3)
        loop.record("mean", flat(means.values()))


@read()
def ema_with_foreach(loop: Loop) -> None:
    params = list(loop.model.parameters())
    means = [torch.zeros_like(p) for p in params]
    for number in range(STEPS):
        loop.train(number)
        with torch.no_grad():
            if number % 2:
                torch._foreach_lerp_(means, params, 0.3)
            else:
                torch._foreach_mul_(means, 0.7)
                torch._foreach_add_(means, params, alpha=0.3)
        loop.record("mean", flat(means))


@read()
def averaged_model(loop: Loop) -> None:
    mean = AveragedModel(seeded(loop.case.make))
    for number in range(STEPS):
        loop.train(number)
        mean.update_parameters(loop.model)
        record_model(loop, "mean", mean)


@read()
def averaged_model_of_the_model(loop: Loop) -> None:
    """The average starts as a deep copy in the middle of training."""
    loop.train(20)
    mean = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for number in range(STEPS):
        loop.train(number)
        mean.update_parameters(loop.model)
        record_model(loop, "mean", mean)


# Functional use.


@read()
def functional_call(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        given = dict(loop.model.named_parameters())
        with torch.no_grad():
            loop.record("call", torch.func.functional_call(loop.model, given, (tokens(0),)))


@read()
def functional_call_with_other_weights(loop: Loop) -> None:
    """The weights of this call are given; those of the model stay."""
    for number in range(STEPS):
        loop.train(number)
        given = {key: p.detach() * 0.5 for key, p in loop.model.named_parameters()}
        loop.record("call", torch.func.functional_call(loop.model, given, (tokens(0),)))


@read()
def functional_loss(loop: Loop) -> None:
    """The step's own loss comes from functional_call."""
    for number in range(STEPS):
        given = dict(loop.model.named_parameters())
        loss = net_loss(lambda x, given=given: torch.func.functional_call(loop.model, given, (x,)), number)
        loop.record("functional loss", loss)
        loop.backward(loss)
        loop.finish()


@read()
def func_grad(loop: Loop) -> None:
    def loss(given: dict[str, Tensor], number: int) -> Tensor:
        return net_loss(lambda x: torch.func.functional_call(loop.model, given, (x,)), number)

    for number in range(STEPS):
        loop.train(number)
        given = dict(loop.model.named_parameters())
        loop.record("gradients", flat(torch.func.grad(loss)(given, 0).values()))


@read()
def func_grad_of_samples(loop: Loop) -> None:
    """Gradients of each sample: vmap over grad, with the model's own weights."""

    def loss(given: dict[str, Tensor], sample: Tensor) -> Tensor:
        logits = torch.func.functional_call(loop.model, given, (sample[None, :-1],))
        return F.cross_entropy(logits[0], sample[1:])

    for number in range(STEPS):
        loop.train(number)
        given = {key: p.detach() for key, p in loop.model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(given, tokens(0))
        loop.record("gradients", flat(found.values()))


@read(has_failed="engine-late-1-clip-host")
def func_vmap(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        weight = loop.model.head.weight
        loop.record("vmap", torch.func.vmap(lambda row: row.square().sum())(weight))
        loop.record("vmap of a block", torch.func.vmap(loop.model.blocks[2].up)(noise(0, 3, WIDTH)))


@read()
def stack_module_state(loop: Loop) -> None:
    """All blocks as an ensemble."""
    blank = Block()

    def call(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(blank, (params, buffers), (x,))

    for number in range(STEPS):
        loop.train(number)
        params, buffers = torch.func.stack_module_state(list(loop.model.blocks))
        loop.record("ensemble", torch.func.vmap(call, in_dims=(0, 0, None))(params, buffers, noise(0, 3, WIDTH)))


# Weights outside the forward of the module that has them.


@read()
def linear_before_forward(loop: Loop) -> None:
    """A weight is used by a function before the model runs, and the result is part of the loss."""
    for number in range(STEPS):
        extra = F.linear(noise(number, 3, WIDTH), loop.model.blocks[2].up.weight).square().mean()
        loss = loop.loss(number) + extra
        loop.record("extra", extra)
        loop.backward(loss)
        loop.finish()


def squares(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in reversed(list(model.parameters()))), torch.zeros(()))


@read()
def regulariser_before_forward(loop: Loop) -> None:
    for number in range(STEPS):
        penalty = squares(loop.model)
        loop.record("penalty", penalty)
        loop.backward(loop.loss(number) + 0.01 * penalty)
        loop.finish()


@read()
def regulariser_after_forward(loop: Loop) -> None:
    for number in range(STEPS):
        loss = loop.loss(number)
        penalty = squares(loop.model)
        loop.record("penalty", penalty)
        loop.backward(loss + 0.01 * penalty)
        loop.finish()


@read()
def regulariser_alone(loop: Loop) -> None:
    """A step whose loss never calls the model."""
    for number in range(STEPS):
        loop.train(number)
        penalty = squares(loop.model.blocks[1])
        loop.record("penalty", penalty)
        loop.backward(penalty)
        loop.finish()


class RootReads(Net):
    """The root uses its layers' weights before the layers run."""

    def forward(self, tokens: Tensor) -> Tensor:
        size = sum(block.up.weight.square().mean() for block in self.blocks)
        x = self.embed(tokens.to(next(self.parameters()).device)) * (1.0 + size)
        x = x + F.linear(x, self.blocks[2].down.weight @ self.blocks[1].up.weight)
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        return self.head(self.norm(x))


class Prompted(Block):
    """Uses the weight of an embedding that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.prompt.weight)


class PromptedNet(Net):
    """The root reads an embedding inside its first block, and one of its own that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Prompted() for _ in range(3))
        self.points = nn.ModuleList([nn.Embedding(1, WIDTH), nn.Embedding(1, WIDTH)])

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.blocks[0].prompt.weight + self.points[0].weight - self.points[1].weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Neighbours(Net):
    """Each block also uses a weight of the one after it."""

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, other in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            x = block(x) + 0.1 * F.linear(x, other.down.weight.t())[..., :WIDTH]
        return self.norm(x)


def keeps_training(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        with torch.no_grad():
            loop.record("evaluation", loop.forward(tokens(0)))


MODELS = {"root_reads_layers": RootReads, "uncalled_embedding": PromptedNet, "block_reads_its_neighbour": Neighbours}
READS += [Case(name, keeps_training, "read", make=model) for name, model in MODELS.items()]


@read()
def inner_module_without_gradients(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        block = loop.model.blocks[(2, 0, 1)[number % 3]]
        with torch.no_grad():
            loop.record(f"up {number}", block.up(noise(0, 3, WIDTH)))
            loop.record(f"down {number}", block.down(noise(0, 3, 2 * WIDTH)))
        with torch.no_grad():
            loop.record("norm and head", loop.model.head(loop.model.norm(noise(0, 3, WIDTH))))


@read()
def inner_module_with_gradients(loop: Loop) -> None:
    """The loss has a part that comes from a layer inside a block, called before and after the model."""
    for number in range(STEPS):
        before = loop.model.blocks[2].up(noise(number, 3, WIDTH)).square().mean()
        loss = loop.loss(number)
        after = loop.model.blocks[0].down(noise(number, 3, 2 * WIDTH)).square().mean()
        loop.record("before", before)
        loop.record("after", after)
        loop.backward(loss + before + after)
        loop.finish()


@read()
def inner_module_alone(loop: Loop) -> None:
    """Every other step trains one layer inside a block and nothing else."""
    for number in range(STEPS):
        loop.train(number)
        loss = loop.model.blocks[1].up(noise(number, 3, WIDTH)).square().mean()
        loop.record("alone", loss)
        loop.backward(loss)
        loop.finish()


@read()
def block_alone(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        loss = loop.model.blocks[2](noise(number, 3, WIDTH)).square().mean()
        loop.record("alone", loss)
        loop.backward(loss)
        loop.finish()


@read()
def blocks_out_of_order(loop: Loop) -> None:
    """The blocks are called from the loop, last one first."""
    for number in range(STEPS):
        loop.train(number)
        x = noise(number, 3, WIDTH)
        for block in reversed(loop.model.blocks):
            x = block(x)
        loop.record("reversed", x)
        loop.backward(x.square().mean())
        loop.finish()


@read()
def another_method(loop: Loop) -> None:
    """`model.encode` instead of `forward`, without and with gradients."""
    for number in range(STEPS):
        loop.train(number)
        with torch.no_grad():
            loop.record("encoded", loop.front.encode(tokens(0)))
        loop.train(10 + number)
        loss = loop.front.encode(tokens(number)).sin().mean()
        loop.record("loss of encode", loss)
        loop.backward(loss)
        loop.finish()


def tie(model: nn.Module) -> None:
    model.head.weight = model.embed.weight


def tie_blocks(model: nn.Module) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def put_on_one_memory(model: nn.Module) -> None:
    model.head.weight.data = model.embed.weight.data


def put_into_one_buffer(model: nn.Module) -> None:
    """Parameters lie one behind the other in a buffer, as flat-parameter wrappers place them."""
    params = list(model.parameters())
    buffer = torch.cat([p.detach().flatten() for p in params])
    start = 0
    for p in params:
        p.data = buffer[start : start + p.numel()].view(p.shape)
        start += p.numel()


def trains_and_reads(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        loop.record("head", loop.model.head.weight.clone())
        loop.record("embed", loop.model.embed.weight[0])
        loop.record("last block", loop.model.blocks[2].up.weight.clone())


READS += [
    Case("tied_parameter", trains_and_reads, "read", prepare=tie),
    Case("parameter_in_two_blocks", trains_and_reads, "read", prepare=tie_blocks),
    Case("two_parameters_on_one_memory", trains_and_reads, "read", prepare=put_on_one_memory),
    Case("parameters_in_one_buffer", trains_and_reads, "read", prepare=put_into_one_buffer),
]


@read()
def callback_in_forward(loop: Loop) -> None:
    """A hook of the user reads weights that later blocks, and the head, wait for."""

    def look(*_: Any) -> None:
        loop.record("head", loop.model.head.weight.clone())
        loop.record("last block", loop.model.blocks[2].down.weight.sum())
        loop.record("first block", loop.model.blocks[0].down.weight.sum())

    handle = loop.model.blocks[0].register_forward_hook(look)
    for number in range(STEPS):
        loop.train(number)
    handle.remove()


@read()
def callback_before_forward(loop: Loop) -> None:
    """The hook was there before the optimizer's own, which waits for nothing yet when it runs."""
    for number in range(STEPS):
        handle = loop.model.register_forward_pre_hook(
            lambda model, _: loop.record("weights", parameters_to_vector(model.parameters())), prepend=True
        )
        loop.train(number)
        handle.remove()


@read(has_failed="twin-early-1-free-host")
def callback_in_backward(loop: Loop) -> None:
    """Weights are read while backward runs, before this step changes them."""
    for number in range(STEPS):
        handle = loop.model.blocks[1].register_full_backward_hook(
            lambda *_: loop.record("weights", flat(loop.model.parameters()))
        )
        loop.train(number)
        handle.remove()


# Evaluation.


@read()
def evaluation_without_gradients(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        loop.model.eval()
        with torch.no_grad():
            loop.record("evaluation", net_loss(loop.front, 0))
        loop.model.train()


@read()
def evaluation_in_inference_mode(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        with torch.inference_mode():
            loop.record("weight", loop.model.head.weight.sum().item())
            loop.record("evaluation", net_loss(loop.front, 0).item())


@read()
def evaluation_with_a_graph(loop: Loop) -> None:
    """A forward with gradients switched on whose result is only looked at."""
    for number in range(STEPS):
        loop.train(number)
        loop.record("evaluation", net_loss(loop.front, 0).item())


@read()
def generation(loop: Loop) -> None:
    """A sequence grows token by token. The logits are recorded: a token would hide small differences."""
    for number in range(STEPS):
        loop.train(number)
        loop.model.eval()
        with torch.no_grad():
            found = tokens(0)[:, :2]
            for _ in range(3):
                logits = loop.forward(found)[:, -1]
                found = torch.cat([found, logits.argmax(-1, keepdim=True)], 1)
            loop.record("logits", logits)
        loop.model.train()


@read()
def input_gradients(loop: Loop) -> None:
    """Gradients with respect to an input, without touching those of the weights."""
    for number in range(STEPS):
        loop.train(number)
        x = noise(0, 3, WIDTH).requires_grad_()
        (found,) = torch.autograd.grad(loop.model.blocks[2](loop.model.blocks[0](x)).square().sum(), x)
        loop.record("gradient", found)
        loop.record(f"untouched {number}", [float(p.grad is None) for p in loop.model.parameters()])


class Low(nn.Module):
    """LoRA: a frozen weight, and a product of two small ones that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.base(x)
        return x if self.is_merged else x + F.linear(F.linear(x, self.a), self.b)

    def merge(self, sign: float) -> None:
        self.base.weight.data += sign * (self.b @ self.a).data
        self.is_merged = sign > 0


class LowNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Low() for _ in range(3))


@read(make=LowNet)
def lora_merge(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        for layer in loop.model.blocks:
            layer.merge(1.0)
        with torch.no_grad():
            loop.record("merged", loop.forward(tokens(0)))
        for layer in loop.model.blocks:
            layer.merge(-1.0)


def weight_norm(model: nn.Module) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)


@read(prepare=weight_norm)
def parametrized_weight(loop: Loop) -> None:
    """`up.weight` is computed from two parameters whenever it is read."""
    for number in range(STEPS):
        loop.train(number)
        loop.record("weight", loop.model.blocks[2].up.weight)
        loop.record("magnitude", loop.model.blocks[1].up.parametrizations.weight.original0)


@read()
def conversions_that_do_nothing(loop: Loop) -> None:
    """`model.to` the device and dtype that it has."""
    for number in range(STEPS):
        loop.train(number)
        loop.model.to("cpu").float().requires_grad_(True)
        loop.record("weights", parameters_to_vector(loop.model.parameters()))


@read()
def loudness_is_seen(loop: Loop) -> None:
    """The norm of the gradients of a step is larger than MAX_NORM in some steps and smaller in others."""
    for number in range(STEPS):
        loss = loop.loss(number)
        grads = torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
        norm = float(nn.utils.get_total_norm(grads))
        assert (norm > 1.0) == (loudness(number) > 1.0), norm
        loop.record("norm", norm)
        loop.backward(loss)
        loop.finish()
