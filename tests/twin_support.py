# SPDX-License-Identifier: Apache-2.0
"""What the TwinOptimizer tests share: a small GPT, ways to train and restart it, and the synchronous truth."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow import native
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.clipping import Limits, decide
from twinflow.optim.host import HOST_OPTIMIZERS as HOSTS
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.rules import RULES

CONFIG = GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, num_heads=2)
RULE_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"lr": 1e-2, "weight_decay": 0.1} for name in RULES},
    "adam": {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.01},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
MAX_NORM = 1.0


def our_threads() -> set[str]:
    """Threads of optimizers that are alive, Python's and the native library's."""
    gc.collect()  # optimizers that other tests have forgotten end their threads now, not in the middle of a test
    found = {f"{thread.name} {thread.native_id}" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has just ended
            found.add(f"{(task / 'comm').read_text().strip()} {task.name}")
    return {name for name in found if name.startswith("twinflow-")}


@contextmanager
def quick_torch() -> Iterator[None]:
    """For tiny tensors: one thread, and no oneDNN, which prepares longer than it computes."""
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    yield
    torch.set_num_threads(before[0])
    torch.backends.mkldnn.enabled = before[1]


def matrix_but(quick: Iterable[Any], cells: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all cells, of which `make test` runs the quick ones."""
    quick, cells = list(quick), list(cells)
    assert all(cell in cells for cell in quick)
    values = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
    marks = [() if cell in quick else (pytest.mark.matrix,) for cell in cells]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(CONFIG)


def batch(step: int, size: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (size, CONFIG.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def is_loud(step: int) -> bool:
    """Steps whose gradients are far above MAX_NORM; those of the others are far below."""
    return step % 5 in (1, 2)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(*batch(step)).loss * (8.0 if is_loud(step) else 0.25)


def train(model: GPT, optimizer: Any, steps: Iterable[int], nan_step: int = -1) -> list[float]:
    """Losses. At `nan_step` one element of one gradient is NaN."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        victim = model.blocks[1].mlp.up.weight.register_hook(one_nan) if step == nan_step else None
        loss.backward()
        if victim is not None:
            victim.remove()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_nan(grad: Tensor) -> Tensor:
    return grad.index_fill(0, torch.tensor(3), torch.nan)


def twin(model: Any, *, delay: str = "", delay_s: float = 0.002, **options: Any) -> TwinOptimizer:
    """A TwinOptimizer with many small buckets; options of Tuning may be among the others."""
    tuning = {"bucket_numel": 4096, "shadow_bytes": 1 << 24}
    tuning |= {name: options.pop(name) for name in Tuning.__dataclass_fields__ if name in options}
    optimizer = TwinOptimizer(model, tuning=Tuning(**tuning), **options)
    if delay:
        optimizer.runtime.device.delay(delay, delay_s)
    return optimizer


class Synchronous:
    """The truth: the same update with nothing beside anything. Norm, then clip or skip, then a host optimizer."""

    def __init__(
        self, params: Iterable[nn.Parameter], rule: str = "adamw", max_norm: float | None = MAX_NORM, **options: Any
    ):
        self.params = list(params)
        self.host = HOSTS[rule](self.params, **options)
        self.max_norm = max_norm

    def step(self) -> None:
        grads = [p.grad.reshape(-1) for p in self.params if p.grad is not None]
        decision = decide(native.sum_squares(grads), 1.0, Limits(self.max_norm, skip_nonfinite=True))
        if not decision.skip:
            self.host.step(factor=decision.factor)

    def zero_grad(self) -> None:
        self.host.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"weight of {name}": p.detach().clone() for name, p in model.named_parameters()}


def snapshot(model: nn.Module, optimizer: TwinOptimizer) -> dict[str, Tensor]:
    """Every weight and every number of the optimizer's state."""
    saved = optimizer.state_dict()
    found = weights(model)
    for name, entry in saved["state"].items():
        found |= {f"{key} of {name}": torch.as_tensor(value).clone() for key, value in entry.items()}
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], note: str = "") -> None:
    """The same tensors, bit for bit."""
    assert a.keys() == b.keys(), note
    for name, tensor in a.items():
        x, y = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, b[name]))
        assert torch.equal(x, y), f"{note} {name} differs by {(tensor.double() - b[name].double()).abs().max()}"


def trained_with_schedule(
    rule: str, states: str, accumulation: int, num_steps: int = 4, **options: Any
) -> dict[str, Tensor]:
    """Weights and state after some steps with a schedule."""
    model = gpt()
    options = {"early": True, "accumulation_steps": accumulation, **RULE_OPTIONS[rule], **options}
    with closing(twin(model, rule=rule, states=states, **options)) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(num_steps):
            for i in range(accumulation):
                loss_of(model, step * accumulation + i).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        optimizer.flush()
        return snapshot(model, optimizer)


def restart(
    model: nn.Module,
    optimizer: TwinOptimizer,
    make: Callable[[nn.Module], TwinOptimizer],
    new_model: Callable[[], nn.Module] = lambda: gpt(seed=99),
    model_first: bool = True,
) -> tuple[Any, TwinOptimizer]:
    """Save to bytes, close, and go on with new objects that started from other weights."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    optimizer.close()
    file.seek(0)
    saved_model, saved_state = torch.load(file, weights_only=True)
    model = new_model()
    if model_first:
        model.load_state_dict(saved_model)
    optimizer = make(model)
    if not model_first:
        model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_state)
    return model, optimizer


class Branchy(nn.Module):
    """A trunk, and branches that only some inputs use: the others get no gradient then."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(24, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.head = nn.Linear(40, 3)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, used: Iterable[int]) -> Tensor:
        x = self.trunk(x).tanh()
        for i in used:
            x = x + self.branches[i](x)
        return self.head(x).square().mean()


def used_at(step: int) -> list[int]:
    return [i for i in range(3) if step % (i + 2) == 0]


def branchy_loss(model: Branchy, step: int) -> Tensor:
    return model(torch.randn(8, 24, generator=torch.Generator().manual_seed(step)), used_at(step))


def run_engine(engine: Any, steps: Iterable[int]) -> list[float]:
    """An engine's losses over micro-batches."""
    losses = []
    for step in steps:
        loss = engine(*batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
