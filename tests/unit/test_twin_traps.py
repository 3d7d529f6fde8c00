# SPDX-License-Identifier: Apache-2.0
"""What models and loops do that an overlapping optimizer must survive (DESIGN, section 7): each trap is held against
plain PyTorch, with slow streams; each refusal names what it refuses; each sync point is shown to be needed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin_support import matrix_but

from twinflow.offload import sync
from twinflow.offload.executor import WorkerError
from twinflow.offload.weight_guard import plain
from twinflow.optim.twin import Tuning, TwinOptimizer

WIDTH, STEPS = 8, 3
# eps: some true gradients are zero (attention's key bias), and Adam would blow their rounding errors up
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
STREAMS = ("in", "out", "compute")
MODES: dict[str, dict[str, Any]] = {
    "early": {"early": True},
    "early-clipped": {"early": True, "max_grad_norm": 0.5},
    "in-step": {},
}
Losses = Callable[[nn.Module, Tensor], Sequence[Tensor]]
in_all_modes = pytest.mark.parametrize("mode", MODES)
in_two_modes = pytest.mark.parametrize("mode", ["early-clipped", "in-step"])
early = pytest.mark.parametrize("mode", ["early", "early-clipped"])
pytestmark = pytest.mark.timeout(60)


def batch(step: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def one_loss(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    return [(model(x) - x.flip(1)).square().mean() * 4]


def sum_backward(losses: Sequence[Tensor]) -> None:
    torch.stack(list(losses)).sum().backward()


@dataclass
class Run:
    """A short training, and all that was seen of it."""

    losses: Losses = one_loss
    backward: Callable[[Sequence[Tensor]], None] = sum_backward
    micro_batches: int = 1
    look: Callable[[nn.Module], Any] | None = None  # what to read after each step
    seen: list[Any] = field(default_factory=list)

    def train(self, model: nn.Module, finish: Callable[[], None], steps: int = STEPS) -> None:
        for step in range(steps):
            for micro in range(self.micro_batches):
                losses = self.losses(model, batch(step * self.micro_batches + micro))
                self.backward(losses)
                self.seen.append(torch.stack([loss.detach() for loss in losses]))
            finish()
            if self.look is not None:
                self.seen.append(self.look(model))

    def plain(self, model: nn.Module, max_grad_norm: float | None = None) -> list[Any]:
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, **ADAMW)

        def finish() -> None:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(params, max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        self.seen = []
        self.train(model, finish)
        return [*self.seen, copied(model)]

    def twin(self, model: nn.Module, after: Callable[[nn.Module], None] | None = None, **options: Any) -> list[Any]:
        self.seen = []
        with twin(model, **options) as optimizer:
            if after is not None:
                after(model)

            def finish() -> None:
                optimizer.step()
                optimizer.zero_grad()

            self.train(model, finish)
            return [*self.seen, copied(model)]


def threads_of(optimizer: TwinOptimizer) -> list[threading.Thread]:
    runtime = optimizer.runtime
    owners = (*runtime._threads, *runtime.device._streams.values())
    return [owner._thread for owner in owners]


@contextmanager
def twin(model: Any, delay: float = 0.0003, **options: Any) -> Iterator[TwinOptimizer]:
    """An optimizer with many small buckets and slow streams, that leaves no thread behind."""
    tuning = options.pop("tuning", Tuning(bucket_numel=128))
    optimizer = TwinOptimizer(model, **ADAMW, tuning=tuning, **options)
    for stream in STREAMS:
        optimizer.runtime.device.delay(stream, delay)
    try:
        yield optimizer
    finally:
        with suppress(RuntimeError):  # also what a failed test has left
            optimizer.close()
        assert [thread for thread in threads_of(optimizer) if thread.is_alive()] == []


def assert_as_plain(make: Callable[[], nn.Module], run: Run | None = None, **options: Any) -> None:
    run = run or Run()
    wanted = run.plain(build(make), options.get("max_grad_norm"))
    found = run.twin(build(make), **options)
    assert len(found) == len(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# Models.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Fine(nn.Module):
    """A block that uses a submodule twice, each time in a checkpointed region of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(lambda y: F.gelu(self.inner(y)), x, use_reentrant=self.reentrant)
        return x


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Net(nn.Module):
    """Blocks between a first layer and a head, with a parameter outside any block."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Block,
        num_blocks: int = 2,
        reentrant: bool | None = None,  # kind of checkpointing; None: none
        runs: int = 1,  # of each block
        tie: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.runs = reentrant, runs
        if tie:
            self.head.weight = self.first.weight
            for block in self.blocks[1:]:
                block.up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            for _ in range(self.runs):
                x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        if self.reentrant is None:
            return self.head(x * self.scale)
        return checkpoint(lambda y: self.head(y * self.scale), x, use_reentrant=self.reentrant)


# Checkpointing, ties and modules that run several times.

CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "non-reentrant": partial(Net, reentrant=False),
    "reentrant": partial(Net, reentrant=True),
    "tied": partial(Net, tie=True),
    "tied-non-reentrant": partial(Net, reentrant=False, tie=True),
    "tied-reentrant": partial(Net, reentrant=True, tie=True),
    "repeated": partial(Net, num_blocks=1, runs=3),
    "repeated-non-reentrant": partial(Net, num_blocks=1, runs=3, reentrant=False),
    "repeated-reentrant": partial(Net, num_blocks=1, runs=3, reentrant=True),
    "fine-non-reentrant": partial(Net, partial(Fine, False)),
    "fine-reentrant": partial(Net, partial(Fine, True)),
    "fine-reentrant-twice": partial(Net, partial(Fine, True), reentrant=True),
}


@early
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_ties_and_repeated_blocks(name: str, mode: str) -> None:
    assert_as_plain(CHECKPOINTED[name], **MODES[mode])


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_the_same_with_declared_accumulation(name: str) -> None:
    assert_as_plain(CHECKPOINTED[name], Run(micro_batches=2), early=True, accumulation_steps=2, max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("name", "reentrant"), matrix_but([("gpt2", True)], [("gpt2", False), ("gpt2", True), ("llama", True)])
)
def test_checkpointing_of_hugging_face_models(name: str, reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
        if name == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, n_positions=8))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=32))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model.train()  # type: ignore[no-any-return]

    def losses(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        ids = (x.abs() * 100).long() % 16
        torch.manual_seed(int(ids.sum()))  # dropout
        return [model(input_ids=ids, labels=ids).loss]

    for options in (MODES["early"], MODES["early-clipped"]):
        assert_as_plain(make, Run(losses), tuning=Tuning(bucket_numel=1024), **options)


class Hidden(nn.Module):
    """Uses one weight in two reentrant regions. No module runs twice, so nothing tells that it gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(y @ self.weight), x, use_reentrant=True)
        return x


@in_all_modes
def test_a_weight_used_in_two_reentrant_regions_of_one_module(mode: str) -> None:
    assert_as_plain(partial(Net, Hidden), Run(), **MODES[mode])


def test_micro_batches_and_evaluations_before_the_first_step_are_no_repeated_blocks() -> None:
    """Only modules that run twice in one forward have to wait for the end of backward."""
    model = build(Net)
    with twin(model, early=True, accumulation_steps=2) as optimizer:
        with torch.no_grad():
            model(batch(0))
        for micro in range(2):
            sum_backward(one_loss(model, batch(micro)))
        optimizer.step()
        assert not [param.name for param in optimizer.runtime.params if param.is_late]


def test_late_gradients_larger_than_the_flat_buffers_do_not_hang() -> None:
    """They all stay on the device until step(), whatever `flat_bytes` says."""
    model = build(partial(Net, num_blocks=2, runs=2))
    with twin(model, early=True, tuning=Tuning(bucket_numel=128, flat_bytes=512)) as optimizer:

        def work() -> None:
            with suppress(WorkerError):
                sum_backward(one_loss(model, batch(0)))
                optimizer.step()
                optimizer.wait()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(2)
        hangs = thread.is_alive()
        if hangs:
            optimizer.runtime.executor.fail(RuntimeError("let it go"))
            thread.join(5)
        assert not hangs


# Several losses, frozen and unused parameters.


class TwoHeads(Net):
    def __init__(self, unused: bool = False, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 3 * WIDTH) if unused else None
        if unused:
            self.blocks.append(Block())  # never run: see forward
            self.blocks[0].unused = nn.Parameter(torch.ones(20))
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x * self.scale), self.other(x)


def two_losses(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    one, other = model(x)
    return [(one - x.flip(1)).square().mean(), (other + x).abs().mean()]


def one_after_the_other(losses: Sequence[Tensor]) -> None:
    losses[0].backward(retain_graph=True)  # type: ignore[no-untyped-call]
    losses[1].backward()  # type: ignore[no-untyped-call]


@in_all_modes
def test_the_sum_of_several_losses(mode: str) -> None:
    assert_as_plain(TwoHeads, Run(two_losses), **MODES[mode])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_several_backwards_of_one_forward(max_grad_norm: float | None) -> None:
    assert_as_plain(TwoHeads, Run(two_losses, one_after_the_other), max_grad_norm=max_grad_norm)


@early
def test_several_backwards_that_were_declared(mode: str) -> None:
    assert_as_plain(TwoHeads, Run(two_losses, one_after_the_other), accumulation_steps=2, **MODES[mode])


def test_a_second_backward_that_was_not_declared() -> None:
    """Updates that wait for the norm are dropped, and made again from both gradients. Others have been written."""
    assert_as_plain(TwoHeads, Run(two_losses, one_after_the_other), **MODES["early-clipped"])
    assert_as_plain(TwoHeads, Run(two_losses, one_after_the_other), **MODES["early"], tuning=Tuning(bucket_numel=128))


@in_all_modes
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_accumulation(micro_batches: int, mode: str) -> None:
    options = {**MODES[mode], "accumulation_steps": micro_batches if "early" in mode else 1}
    assert_as_plain(Net, Run(micro_batches=micro_batches), **options)


@in_all_modes
def test_frozen_parameters(mode: str) -> None:
    frozen = ["first.weight", "blocks.0.up.weight", "blocks.1.up.bias", "blocks.1.norm.weight", "head.bias"]
    assert_as_plain(partial(TwoHeads, frozen=frozen), Run(two_losses), **MODES[mode])


@in_all_modes
def test_unused_parameters(mode: str) -> None:
    assert_as_plain(partial(TwoHeads, unused=True), Run(two_losses), **MODES[mode])


@in_all_modes
def test_parameters_that_are_used_now_and_then(mode: str) -> None:
    """A weight may come back long after the forward that did not need it."""

    def losses(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        return two_losses(model, x)[: 1 if torch.equal(x, batch(1)) else 2]

    assert_as_plain(TwoHeads, Run(losses), **MODES[mode])


# Whoever reads the weights sees the new ones.


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(batch(99))
    model.train()
    return found


READERS: dict[str, Callable[[nn.Module], Any]] = {
    "evaluation": evaluate,
    "state-dict": copied,
    "block-state-dict": lambda model: copied(model.get_submodule("blocks.1")),
    "leaf-state-dict": lambda model: copied(model.get_submodule("blocks.1.down")),
    "list-state-dict": lambda model: copied(model.get_submodule("blocks")),
    "block-forward": lambda model: model.get_submodule("blocks.1")(batch(98)).detach(),
    "head-forward": lambda model: model.get_submodule("head")(batch(98)).detach(),
}


@pytest.mark.parametrize("mode", matrix_but(["early-clipped"], ["early-clipped", "in-step"]))
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_right_after_step_sees_the_new_weights(reader: str, mode: str) -> None:
    assert_as_plain(Net, Run(look=READERS[reader]), delay=0.002, **MODES[mode])


@in_all_modes
def test_submodules_called_without_their_root(mode: str) -> None:
    def losses(model: Any, x: Tensor) -> Sequence[Tensor]:
        y = model.first(x)
        for block in model.blocks:
            y = block(y)
        return [(model.head(y) - x.flip(1)).square().mean()]

    assert_as_plain(Net, Run(losses), delay=0.002, **MODES[mode])


def test_blocks_that_share_a_weight_called_without_their_root() -> None:
    """The shared weight belongs to no block, and is the last to come back: whichever runs first has to wait for it."""

    def losses(model: Any, x: Tensor) -> Sequence[Tensor]:
        for block in model.blocks:
            x = block(x)
        return [(x - 1).square().mean()]

    assert_as_plain(partial(Net, tie=True), Run(losses), delay=0.005, early=True)


def test_a_part_that_was_not_updated_is_used_without_the_root() -> None:
    """The head shares a bucket with the first layer. A step that updates only the first layer does not concern it."""
    found = []
    for is_twin in (False, True):
        model = build(Net)
        plain_one = partial(torch.optim.AdamW, model.parameters())
        made: Any = (partial(TwinOptimizer, model, early=True) if is_twin else plain_one)(**ADAMW)
        for number, part in enumerate(("first", "head", "first", "head")):
            model.get_submodule(part)(batch(number)).square().mean().backward()
            made.step()
            made.zero_grad()
        found.append(copied(model))
        if is_twin:
            made.close()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_zero_grad_drops_the_gradients_of_a_block_that_ran_again(ratio: float) -> None:
    """No clipping decision holds its update back."""
    model = build(Net)
    optimizer = TwinOptimizer(model, **ADAMW, early=True, ratio=ratio)
    for number in range(2):
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copied(model)
    model(batch(2))
    model.get_submodule("blocks.1")(batch(3)).square().mean().backward()
    optimizer.zero_grad()
    optimizer.wait()
    assert [name for name, value in copied(model).items() if not torch.equal(value, before[name])] == []
    optimizer.close()


def test_an_update_on_the_device_is_clipped_as_its_own_step() -> None:
    """The steps after the first one use a layer with state on the host, and do not wait for the first update."""
    found = []
    for is_slow in (False, True):
        model = build(Net)
        optimizer = TwinOptimizer(model, "sgd", lr=1e-2, max_grad_norm=1.0, ratio=0.5, placement="tail")
        if is_slow:
            optimizer.runtime.device.delay("update", 0.02)
        for number, (part, size) in enumerate([("blocks.1", 10.0), ("first", 1e3), ("first", 1e5), ("first", 1e7)]):
            (model.get_submodule(part)(batch(number)) * size).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not is_slow:
                optimizer.wait()
        found.append(copied(model))
        optimizer.close()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@pytest.mark.parametrize("calls_block", [True, False])
def test_a_write_through_data_is_kept_without_a_forward_of_the_root(calls_block: bool) -> None:
    """After a block was called alone, and after a step in which the weight has got no gradient."""
    model = build(Net)
    optimizer = TwinOptimizer(model, "sgd", lr=1e-2)
    weight = model.get_parameter("blocks.1.down.weight")
    model(batch(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if calls_block:
        evaluate(model.get_submodule("blocks.1"))
    else:
        model(batch(1))
        model.get_submodule("head")(batch(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight.data.fill_(3.0)
    model(batch(2)).square().mean().backward()
    optimizer.step()
    assert float(weight.detach().min()) > 2.0
    optimizer.close()


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = build(Net)
    with twin(model, early=True) as optimizer:
        for step in range(2):
            sum_backward(one_loss(model, batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        double, before = copy.deepcopy(model), copied(model)
        assert torch.equal(evaluate(double), evaluate(model))
        sum_backward(one_loss(model, batch(2)))  # the original is in the middle of its step, the copy is not
        Run().plain(double)
        optimizer.step()
        optimizer.wait()
        changed = copied(model)
    assert not any(torch.equal(copied(double)[key], changed[key]) for key in before)
    again = build(Net)
    again.load_state_dict(before)
    Run().plain(again)
    assert all(torch.equal(value, copied(again)[key]) for key, value in copied(double).items())


# Shapes of models.


class Odd(nn.Module):
    """Parameters that are not contiguous, one of them larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(WIDTH, 6).t())
        self.wide = nn.Parameter(torch.randn(3 * WIDTH, WIDTH).t() * 0.1)
        assert not any(p.is_contiguous() for p in (self.conv.weight, self.turned, self.wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.reshape(5, 4, 2, 1).expand(5, 4, 2, 2)).mean((2, 3)) @ self.turned
        return x + torch.tanh(y @ self.wide) @ self.wide.t()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sequential(Block(), nn.LayerNorm(WIDTH))
    ),
    # buckets of equal size with their gaps in other places: nothing of one may be seen in the norm of another
    "uneven": lambda: nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((8, 16), (16, 6), (6, 8)))),
    "one-layer": lambda: nn.Linear(WIDTH, WIDTH),
    "no-blocks": Block,
    "attention": partial(Net, Attention),
    "attention-alone": Attention,
    "not-contiguous": Odd,
    "not-contiguous-in-blocks": partial(Net, Odd),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0), 2, enable_nested_tensor=False
    ),
}


@in_two_modes
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_shapes(name: str, mode: str) -> None:
    assert_as_plain(MODELS[name], **MODES[mode])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_parameters_without_a_model(max_grad_norm: float | None) -> None:
    """Nobody could wait in the next forward: step() does."""
    wanted = Run().plain(build(Net), max_grad_norm)
    model, run = build(Net), Run(look=lambda model: [p.detach().clone() for p in model.parameters()])
    with twin(model.parameters(), delay=0.003, max_grad_norm=max_grad_norm) as optimizer:

        def finish() -> None:
            optimizer.step()
            optimizer.zero_grad()

        run.train(model, finish)
    torch.testing.assert_close(run.seen[::2], wanted[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.seen[-1], [wanted[-1][key] for key, _ in model.named_parameters()])


# Compiled blocks.


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def with_compiled_blocks(in_place: bool) -> nn.Module:
    model = Net()
    if in_place:
        compile_blocks(model)
    else:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    model(batch(0)).sum().backward()
    model.zero_grad()
    return model


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", matrix_but(["early-clipped"], ["early-clipped", "in-step"]))
def test_blocks_compiled_after_the_optimizer_was_built(mode: str) -> None:
    wanted = Run().plain(build(Net), MODES[mode].get("max_grad_norm"))
    found = Run().twin(build(Net), after=compile_blocks, delay=0.005, **MODES[mode])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_first", [False, True], ids=["before", "after"])
def test_writes_through_data_persist_in_a_model_that_is_compiled_in_place(is_first: bool) -> None:
    """If a model is compiled after the optimizer was built, its first call runs without our functions."""
    models = [build(Net), build(Net)]
    if is_first:
        models[1].compile(backend="eager")
    optimizers = [torch.optim.AdamW(models[0].parameters(), lr=1e-2), TwinOptimizer(models[1], lr=1e-2, early=True)]
    if not is_first:
        models[1].compile(backend="eager")
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for i, param in enumerate(model.parameters()):
                if i % 2 == step % 2:
                    param.data.mul_(0.9)
    optimizers[1].close()
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in-place"])
def test_blocks_compiled_and_run_before_the_optimizer_is_built(in_place: bool) -> None:
    """Their graphs were traced without our hooks."""
    wanted = Run().plain(build(Net), 0.5)
    found = Run().twin(build(partial(with_compiled_blocks, in_place)), delay=0.005, early=True, max_grad_norm=0.5)
    torch.testing.assert_close(found[:-1], wanted[:-1], rtol=1e-5, atol=1e-5)


# Refusals: in backward where updates start early, else in step().


def backward_and_step(optimizer: TwinOptimizer, backward: Callable[[], None]) -> None:
    backward()
    optimizer.step()


def test_a_second_backward_through_weights_that_have_changed_raises() -> None:
    """The weights are written so that autograd sees it; the gradient would be wrong."""
    model = build(Net)
    with twin(model) as optimizer:
        loss = one_loss(model, batch(0))[0]
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("early", [True, False])
def test_sparse_gradients_are_refused_by_name(early: bool) -> None:
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    message = (
        r"0\.weight\.grad\.layout is torch\.sparse_coo, but must be torch\.strided, because sparse gradients are not "
        r"supported.*sparse=False"
    )
    with twin(model, early=early) as optimizer, pytest.raises(ValueError, match=message):
        backward_and_step(optimizer, lambda: model(torch.arange(3)).sum().backward())


@pytest.mark.parametrize("early", [True, False])
def test_a_parameter_that_is_unfrozen_after_the_start_is_refused_by_name(early: bool) -> None:
    model = build(Net)
    param = model.get_parameter("blocks.1.up.weight").requires_grad_(False)
    with twin(model, early=early) as optimizer:
        sum_backward(one_loss(model, batch(0)))
        optimizer.step()
        optimizer.zero_grad()
        param.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight now requires a gradient"):
            backward_and_step(optimizer, lambda: sum_backward(one_loss(model, batch(1))))


@in_all_modes
def test_a_parameter_that_is_frozen_for_some_steps(mode: str) -> None:
    def losses(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        is_frozen = any(torch.equal(x, batch(step)) for step in (1, 2))
        model.get_parameter("blocks.1.up.weight").requires_grad_(not is_frozen)
        return one_loss(model, x)

    assert_as_plain(Net, Run(losses), **MODES[mode])


class Convolutions(nn.Module):
    """Two weights that are not contiguous, of which the second gets a gradient in the third step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.second = nn.Conv2d(2, 3, 2)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        found = self.first(x).mean()
        return found + self.second(x).mean() if self.num_calls == 3 else found


@in_all_modes
def test_a_weight_that_is_not_contiguous_stays_as_it_is_without_a_gradient(mode: str) -> None:
    """Weights of the others in its bucket arrive; what somebody has written to this one must not be lost."""

    def train(optimizer_of: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
        model = build(lambda: nn.Sequential(Convolutions()).to(memory_format=torch.channels_last))
        optimizer = optimizer_of(model)
        for step in range(4):
            x = batch(step)[:4].reshape(1, 2, 4, 4).to(memory_format=torch.channels_last)
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with torch.no_grad():
                    model.get_parameter("0.second.weight").mul_(0.5)
        return copied(model)

    options = {key: value for key, value in MODES[mode].items() if key != "max_grad_norm"}
    if mode == "early-clipped":
        options["max_grad_norm"] = 1e6
    truth = train(lambda model: torch.optim.AdamW(model.parameters(), **ADAMW))
    for name, value in train(lambda model: TwinOptimizer(model, **ADAMW, **options)).items():
        torch.testing.assert_close(value, truth[name], rtol=0, atol=1e-6, msg=name)


# Failures in the background.


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("on purpose")


def until_failed(optimizer: TwinOptimizer, call: Callable[[], Any]) -> WorkerError:
    """Call until the failure shows; it has to within a second."""
    start = time.perf_counter()
    while time.perf_counter() < start + 1.0:
        try:
            call()
        except WorkerError as error:
            assert time.perf_counter() < start + 1.0
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was raised within a second")


CALLS: dict[str, Callable[[TwinOptimizer, nn.Module], Any]] = {
    "step": lambda optimizer, _: optimizer.step(),
    "forward": lambda _, model: model(batch(0)),
    "wait": lambda optimizer, _: optimizer.wait(),
    "state-dict": lambda _, model: model.state_dict(),
}


def assert_it_fails(optimizer: TwinOptimizer, model: nn.Module, call: str) -> None:
    error = until_failed(optimizer, partial(CALLS[call], optimizer, model))
    cause = error.__cause__
    assert isinstance(cause, ZeroDivisionError), repr(cause)
    start = time.perf_counter()
    with suppress(WorkerError):
        optimizer.close()
    assert time.perf_counter() < start + 1.0
    model(batch(0))  # the hooks are off: the model is an ordinary one again


class Failing(torch.optim.AdamW):
    """An optimizer of the user's, whose step raises."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        fails()


@in_all_modes
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ratio", matrix_but([1.0], [1.0, 0.0]))
def test_an_exception_in_the_update_reaches_whoever_comes_next(call: str, mode: str, ratio: float) -> None:
    model = build(Net)
    with twin(model, delay=0.0, rule=Failing, ratio=ratio, **MODES[mode]) as optimizer:
        with suppress(WorkerError):  # a hook or step() may see it already
            sum_backward(one_loss(model, batch(0)))
        time.sleep(0.05)
        with suppress(WorkerError):
            optimizer.step()
            optimizer.zero_grad()
        assert_it_fails(optimizer, model, call)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_in_a_stream_reaches_whoever_comes_next(call: str, stream: str) -> None:
    model = build(Net)
    before = copied(model)
    with twin(model, delay=0.0, early=True, max_grad_norm=0.5) as optimizer:
        optimizer.runtime.device.stream(stream).run(fails)
        time.sleep(0.05)  # it has failed before anybody waits
        with suppress(WorkerError):
            sum_backward(one_loss(model, batch(0)))
            optimizer.step()
        assert_it_fails(optimizer, model, call)
    if stream != "in":
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Slow(torch.optim.AdamW):
    """An optimizer of the user's that keeps its thread busy."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.02)
        super().step()


def test_gradients_that_fail_are_seen_by_a_worker_that_was_busy() -> None:
    """When it looks, the event of their copy has long been over: that does not mean that the gradients are there."""
    model = build(Net)
    before = copied(model)
    with twin(model, delay=0.0, rule=Slow) as optimizer:
        compute = optimizer.runtime.device.compute()
        run, count = compute.run, iter(range(100))

        def third_fails(work: Callable[[], Any], *arguments: Any, **options: Any) -> None:
            run(fails if next(count) == 2 else work, *arguments, **options)  # norms are zeroed, a bucket is measured

        compute.run = third_fails  # type: ignore[method-assign]
        with suppress(WorkerError):
            sum_backward(one_loss(model, batch(0)))
            optimizer.step()
        error = until_failed(optimizer, optimizer.wait)
        assert isinstance(error.__cause__, ZeroDivisionError)
        with suppress(WorkerError):
            optimizer.close()
        changed = [name for name, value in copied(model).items() if not torch.equal(value, before[name])]
        assert len(changed) <= 1  # of the bucket whose gradients were there


def test_weights_that_cannot_be_sent_are_seen_by_whoever_waits() -> None:
    """Those of a delayed update go back when the work before them has ended: it fails, and they stay away."""
    model = build(Net)
    before = copied(model)
    with twin(model, delay=0.0, rule=Slow, delayed_update=True) as optimizer:
        sum_backward(one_loss(model, batch(0)))
        optimizer.step()
        optimizer.zero_grad()
        sum_backward(one_loss(model, batch(1)))
        go = threading.Event()
        optimizer.runtime.device.compute().run(lambda: (go.wait(), fails()))
        optimizer.step()  # it lets the weights of the first step go
        go.set()
        error = until_failed(optimizer, optimizer.wait)
        assert isinstance(error.__cause__, ZeroDivisionError)
        with suppress(WorkerError):
            optimizer.close()
        assert all(torch.equal(value, before[name]) for name, value in copied(model).items())


# Every sync point is needed: without it results change.


@dataclass
class Case:
    """Options and delays under which one sync point alone keeps the result right."""

    delays: dict[str, float]
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    read_old: bool = False  # the device reads weights when Python has gone on, as a GPU does


class Scales(nn.Module):
    """fp16 weights, the ones that go back through slots, without a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(4))
        for i, block in enumerate(self.blocks):
            block.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH).add(i).half())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * block.weight
        return x


EARLY = {"early": True}
CASES = {
    sync.GRAD_READY: Case({"compute": 0.02}, EARLY),
    sync.RESIDENT_READY: Case({"compute": 0.02}, {**EARLY, "ratio": 0.0}),
    sync.STORED: Case({"streamed0": 0.02}, {**EARLY, "tuning": Tuning(bucket_numel=128, streamed=1.0)}),
    sync.FETCH_STORED: Case({"streamed0": 0.02}, {"offload_params": True, "tuning": Tuning(streamed=1.0)}),
    sync.ARRIVED: Case({"out": 0.02}),
    sync.NORMS: Case({"compute": 0.02}, {"max_grad_norm": 0.1}),
    sync.WEIGHT_SENT: Case({"in": 0.05}, {"delayed_update": True}),
    sync.WEIGHT_SLOT: Case({"in": 0.02}, {"tuning": Tuning(bucket_numel=128, num_slots=1)}, Scales),
    sync.OLD_WEIGHTS: Case({"compute": 0.02}, {"delayed_update": True}, read_old=True),
    sync.FLAT_FREE: Case({"out": 0.02}, {**EARLY, "tuning": Tuning(bucket_numel=128, flat_bytes=512)}),
    sync.FORWARD: Case({"in": 0.02}),
    sync.SENT: Case({"out": 0.02}),
    sync.READERS: Case({"in": 0.02}),
}


def points() -> set[str]:
    """Every sync point of the runtime."""
    return {value for name, value in vars(sync).items() if name.isupper() and isinstance(value, str)}


def outcome(
    case: Case, delays: dict[str, float], disabled: frozenset[str] = frozenset()
) -> list[dict[str, Tensor]] | str:
    """What the model, and a reader on the device, saw after the last step; or what was raised."""
    model = build(case.make)
    seen: list[dict[str, Tensor]] = []
    with twin(model, delay=0.0, **{"tuning": Tuning(bucket_numel=128), **case.options}) as optimizer:
        device = optimizer.runtime.device
        for stream, seconds in delays.items():
            device.delay(stream, seconds)
        device.disabled = disabled
        try:
            for step in range(2):
                sum_backward(one_loss(model, batch(step).to(next(model.parameters()).dtype)))
                if case.read_old:
                    device.compute().run(lambda: seen.append(on_the_device(model)))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(copied(model))
            device.compute().synchronize()
        except Exception as error:
            return repr(error)
        finally:
            device.disabled = frozenset()
        return seen


def on_the_device(model: nn.Module) -> dict[str, Tensor]:
    """What a kernel would read that was queued before: no wait comes between."""
    with plain():
        return {name: param.clone() for name, param in model.named_parameters()}


def same(a: list[dict[str, Tensor]] | str, b: list[dict[str, Tensor]] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return False
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


def test_every_sync_point_has_a_case() -> None:
    between_ranks = {sync.REDUCE_READY, sync.PUBLISH_READY}  # tests/dist/test_zero_exact.py
    # tests/gpu/test_param_offload.py: on a CPU the model's work is done when a fetch is asked for.
    on_a_gpu = {sync.FETCH_ROOM}
    beside_a_save = {sync.STATE_READ, sync.PARAMS_READ}  # tests/unit/test_executor.py
    assert points() == set(CASES) | between_ranks | on_a_gpu | beside_a_save


@pytest.mark.parametrize("point", CASES)
def test_a_result_changes_without_this_sync_point_and_not_with_it(point: str) -> None:
    case = CASES[point]
    calm = outcome(case, {})
    assert same(calm, outcome(case, case.delays)), "a delay alone changed the result"
    longer = ({name: seconds * factor for name, seconds in case.delays.items()} for factor in (1, 4, 16))
    changed = (not same(calm, outcome(case, delays, frozenset({point}))) for delays in longer)  # a busy machine is late
    assert any(changed), "nothing changed: is the wait needed?"


DELAYED: dict[str, dict[str, Any]] = {
    "host": {},
    "host-clipped": {"max_grad_norm": 0.1},
    "host-own": {"rule": torch.optim.AdamW, "max_grad_norm": 0.1},
    "device": {"ratio": 0.0},
    "device-clipped": {"ratio": 0.0, "max_grad_norm": 0.1},
    "device-own": {"ratio": 0.0, "rule": torch.optim.AdamW, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("name", DELAYED)
def test_old_weights_stay_until_the_device_has_read_them_before_a_flush(name: str) -> None:
    model = build(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))))
    with twin(model, delay=0.0, delayed_update=True, **DELAYED[name]) as optimizer:
        before, seen = copied(model), []
        sum_backward(one_loss(model, batch(0)))
        compute = optimizer.runtime.device.compute()
        optimizer.step()
        compute.run(lambda: (time.sleep(0.1), seen.append(on_the_device(model))))
        optimizer.flush()
        assert all(torch.equal(value, before[key]) for key, value in seen[0].items())
        assert not any(torch.equal(value, before[key]) for key, value in copied(model).items())


@pytest.mark.parametrize("name", DELAYED)
def test_old_weights_stay_until_the_device_has_read_them(name: str) -> None:
    """Also where a delayed update is so late that its weights may go back at once."""
    options = {**DELAYED[name], "delayed_update": True}
    wanted = outcome(Case({}, {**options, "ratio": 1.0}, read_old=True), {})
    case = Case({"compute": 0.02}, options, read_old=True)
    assert same(wanted, outcome(case, case.delays))


def test_a_model_converted_after_the_start_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with twin(model, early=True) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.to(torch.float64)
        with pytest.raises(RuntimeError, match=r"was moved from torch.float32 on cpu to torch.float64 on cpu"):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
