# SPDX-License-Identifier: Apache-2.0
"""Cases of as_torch_cases.py about models that are built, or changed later, in ways that runtimes stumble over.

In a case that is not neutral, `loop.acts` guards what the case is about. The harness checks that the reference without
it ends somewhere else.
"""

from __future__ import annotations

import torch
from as_torch_support import WIDTH, Block, Case, Loop, Net, registering, tokens, trains
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3
MODELS: list[Case] = []
loop_case = registering(MODELS, "loop")


class Checkpointed(Net):
    is_reentrant = False

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.norm(x)


class Reentrant(Checkpointed):
    is_reentrant = True


class Twice(Net):
    """All blocks run twice in one forward."""

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.norm(x)


class CheckpointedTwice(Net):
    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


class Nested(Net):
    """ModuleLists and Sequentials inside a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleList([Block(), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))]), nn.ModuleList([Block()])]
        )

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for blocks in self.blocks:
            for block in blocks:
                x = block(x)
        return self.norm(x)


class Forgetful(Net):
    """Dropout, and statistics in a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.drop(super().encode(tokens))
        return self.statistics(x.flatten(0, 1)).view_as(x)


class Dictionaries(Net):
    """Blocks in a ModuleDict, and a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"b": Block(), "a": Block()})
        self.shifts = nn.ParameterList([torch.randn(WIDTH) * 0.1 for _ in range(2)])

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for shift, block in zip(self.shifts, self.blocks.values(), strict=True):
            x = block(x) + shift
        return self.norm(x)


class Attending(Net):
    """nn.MultiheadAttention never calls its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )


class InPlaceBlock(Block):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.9))


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(3))


LAYOUTS = {
    "checkpointed_blocks": Checkpointed,
    "checkpointed_blocks_reentrant": Reentrant,
    "blocks_run_twice": Twice,
    "checkpointed_blocks_run_twice": CheckpointedTwice,
    "nested_module_lists": Nested,
    "module_dict_and_parameter_list": Dictionaries,
    "attention_layers": Attending,
    "in_place_activations": InPlace,
}


def trains_and_evaluates(loop: Loop) -> None:
    for number in range(STEPS):
        loop.train(number)
        with torch.no_grad():
            loop.record("evaluation", loop.forward(tokens(0)))


MODELS += [Case(name, trains_and_evaluates, "loop", make=model, is_neutral=True) for name, model in LAYOUTS.items()]
MODELS += [
    Case(f"{name}_with_accumulation", trains, "loop", make=LAYOUTS[name], is_neutral=True, accumulation=2)
    for name in ("checkpointed_blocks_reentrant", "blocks_run_twice")
]


@loop_case(make=Forgetful)
def train_and_eval_modes(loop: Loop) -> None:
    """Dropout and batch statistics follow the mode."""
    for number in range(STEPS):
        torch.manual_seed(number)
        loop.model.train(not loop.acts or number % 2 == 0)
        loop.train(number)
        loop.model.eval()
        with torch.no_grad():
            loop.record("evaluation", loop.forward(tokens(0)))
        loop.model.train()


@loop_case()
def forward_replaced_later(loop: Loop) -> None:
    """A block gets another forward after the optimizer was built, as adapters and compilers do it."""
    for number in range(STEPS):
        if loop.acts and number == 1:
            block = loop.model.blocks[1]
            block.forward = lambda x, block=block: x - torch.sin(block.up(x))[..., :WIDTH] + block.down.bias
        loop.train(number)
    vars(loop.model.blocks[1]).pop("forward", None)


@loop_case()
def forward_wrapped_later(loop: Loop) -> None:
    """The model's own forward is wrapped."""
    for number in range(STEPS):
        if loop.acts and number == 1:
            inner = loop.model.forward
            loop.model.forward = lambda x, inner=inner: inner(x) * 0.5
        loop.train(number)
    vars(loop.model).pop("forward", None)


@loop_case()
def blocks_in_another_order_later(loop: Loop) -> None:
    for number in range(STEPS):
        if loop.acts and number == 2:
            loop.model.blocks = nn.ModuleList(reversed(loop.model.blocks))
        loop.train(number)


@loop_case()
def block_removed_later(loop: Loop) -> None:
    kept = loop.model.blocks
    for number in range(STEPS):
        if loop.acts and number == 2:
            loop.model.blocks = nn.ModuleList([kept[0], kept[2]])
        loop.train(number)
    loop.model.blocks = kept


@loop_case()
def block_wrapped_later(loop: Loop) -> None:
    """A block is put into another module, with an adapter around it that is not trained."""
    for number in range(STEPS):
        if loop.acts and number == 1:
            loop.model.blocks[1] = nn.Sequential(loop.model.blocks[1], nn.Tanh())
        loop.train(number)


@loop_case()
def module_hooks(loop: Loop) -> None:
    """Hooks of the user change outputs and gradients between blocks."""
    block = loop.model.blocks[1]
    handles = []
    if loop.acts:
        handles.append(block.register_forward_hook(lambda module, args, out: out * 0.9))
        handles.append(block.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,)))
        handles.append(block.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,)))
    for number in range(STEPS):
        loop.train(number)
    for handle in handles:
        handle.remove()


@loop_case()
def tensor_hooks(loop: Loop) -> None:
    """`p.register_hook`: what the hook returns is the gradient."""
    handles = []
    if loop.acts:
        handles = [p.register_hook(lambda grad: grad * 0.3) for p in loop.model.blocks[1].parameters()]
        handles.append(loop.model.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)))
    for number in range(STEPS):
        loop.train(number)
    for handle in handles:
        handle.remove()


def hook_all(model: nn.Module) -> None:
    for p in model.blocks[1].parameters():
        p.register_hook(lambda grad: grad * 0.3)


MODELS.append(Case("tensor_hooks_from_the_start", trains, "loop", prepare=hook_all, is_neutral=True))


@loop_case()
def hooks_after_accumulation(loop: Loop) -> None:
    """`register_post_accumulate_grad_hook` of the user changes `.grad` in place."""

    def shrink(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.3)

    handles = []
    if loop.acts:
        handles = [p.register_post_accumulate_grad_hook(shrink) for p in loop.model.blocks[1].parameters()]
    for number in range(STEPS):
        loop.train(number)
    for handle in handles:
        handle.remove()


@loop_case()
def hooks_that_drop_gradients(loop: Loop) -> None:
    """A hook of the user takes the gradient away and updates the weight itself, in backward."""

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    handles = []
    if loop.acts:
        handles = [p.register_post_accumulate_grad_hook(update) for p in loop.model.blocks[2].down.parameters()]
    for number in range(STEPS):
        loop.train(number)
    for handle in handles:
        handle.remove()


@loop_case(is_neutral=True)
def autocast(loop: Loop) -> None:
    """fp32 weights, bfloat16 activations."""
    for number in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.loss(number)
        loop.backward(loss)
        loop.finish()
