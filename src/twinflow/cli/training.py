"""The training loop of `twinflow train`: a model, a corpus and a host optimizer in, records out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR

from twinflow.data.text import VOCAB_SIZE, Corpus, Split
from twinflow.errors import bad_value
from twinflow.models.gpt import GPT, PRESETS, GPTConfig
from twinflow.monitor.metrics import Record, StepRecord, ValidRecord, host_memory_bytes
from twinflow.native.threads import check_threads
from twinflow.optim import HostAdagrad, HostAdam, HostAdamW, HostLion, HostOptimizer, HostSGD
from twinflow.rules import RULES

VALID_BATCHES: Final = 16
MIN_LR_SHARE: Final = 0.1  # where the cosine ends, as a share of the peak


@dataclass(frozen=True)
class RuleChoice:
    """An optimizer and what it starts from when the user names nothing else."""

    optimizer: type[HostOptimizer]
    lr: float
    weight_decay: float
    options: dict[str, Any]


RULE_CHOICES: Final = {
    "adamw": RuleChoice(HostAdamW, 2e-3, 0.1, {"betas": (0.9, 0.95)}),
    "adam": RuleChoice(HostAdam, 2e-3, 0.0, {"betas": (0.9, 0.95)}),
    "adagrad": RuleChoice(HostAdagrad, 1e-2, 0.0, {}),
    "lion": RuleChoice(HostLion, 3e-4, 0.3, {"betas": (0.9, 0.99)}),
    "sgd": RuleChoice(HostSGD, 0.1, 0.0, {"momentum": 0.9}),
}


@dataclass(frozen=True)
class TrainSettings:
    """What the user asked for, every default filled in."""

    preset: str
    steps: int
    batch_size: int
    context: int
    lr: float
    warmup: int
    weight_decay: float
    grad_clip: float  # 0: do not clip
    rule: str
    states: str
    data: str
    seed: int
    valid_every: int  # 0: only before the first step and after the last
    threads: int
    out: Path


def check_settings(settings: TrainSettings) -> None:
    """Raise a ValueError that names the option when a value cannot work."""
    at_least_one = ("steps", "batch_size", "context")
    for name in (*at_least_one, "warmup", "seed", "valid_every"):
        least = 1 if name in at_least_one else 0
        if getattr(settings, name) < least:
            raise bad_value(option(name), getattr(settings, name), f"a whole number >= {least}")
    for name in ("lr", "weight_decay", "grad_clip"):
        value = getattr(settings, name)
        if not 0.0 <= value < math.inf:
            raise bad_value(option(name), value, "a finite number >= 0")
    check_threads(settings.threads, "--threads")
    formats = RULES[settings.rule].formats
    if settings.states not in formats:
        remedy = f"These are what --rule {settings.rule} comes in."
        raise bad_value("--states", settings.states, formats, remedy)


def option(name: str) -> str:
    """A setting's name as it is typed."""
    return "--" + name.replace("_", "-")


def choose_preset(name: str) -> GPTConfig:
    """The preset's shape."""
    if name not in PRESETS:
        raise bad_value("--preset", name, PRESETS)
    return PRESETS[name]


def choose_rule(name: str) -> RuleChoice:
    """The optimizer of an update rule."""
    if name not in RULE_CHOICES:
        raise bad_value("--rule", name, RULE_CHOICES)
    return RULE_CHOICES[name]


def build_model(settings: TrainSettings) -> GPT:
    """The preset at the asked context, its weights drawn from the seed."""
    torch.manual_seed(settings.seed)
    return GPT(replace(choose_preset(settings.preset), vocab_size=VOCAB_SIZE, context=settings.context))


def build_optimizer(settings: TrainSettings, model: GPT) -> HostOptimizer:
    """The host optimizer; weight decay pulls on matrices only, never on norms and biases."""
    choice = choose_rule(settings.rule)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    make: Any = choice.optimizer  # each class has its own options; `choice` holds the ones that fit
    optimizer: HostOptimizer = make(groups, lr=settings.lr, states=settings.states, **choice.options)
    return optimizer


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate for a step counted from 0: a line up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return MIN_LR_SHARE + (1.0 - MIN_LR_SHARE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def training_records(settings: TrainSettings, model: GPT, corpus: Corpus, optimizer: HostOptimizer) -> Iterator[Record]:
    """Train, yielding each step and each validation as it happens.

    A step whose loss or gradient is not finite is yielded without having changed the weights, and is the last one.
    """
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, settings.warmup, settings.steps))
    yield ValidRecord(0, valid_loss(settings, model, corpus))
    for step in range(1, settings.steps + 1):
        record = train_step(settings, model, corpus, optimizer, step)
        yield record
        if not record.is_finite:
            return
        schedule.step()
        if step == settings.steps or (settings.valid_every and step % settings.valid_every == 0):
            yield ValidRecord(step, valid_loss(settings, model, corpus))


def train_step(settings: TrainSettings, model: GPT, corpus: Corpus, optimizer: HostOptimizer, step: int) -> StepRecord:
    """Forward, backward, clip and update on the batch of this step."""
    tokens, targets = batch(settings, corpus, "train", step)
    params = list(model.parameters())
    start = time.perf_counter()
    loss = model(tokens, targets).loss
    forward_done = time.perf_counter()
    loss.backward()
    backward_done = time.perf_counter()
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).item()
    lr = float(optimizer.param_groups[0]["lr"])
    if math.isfinite(loss.item()) and math.isfinite(norm):
        optimizer.step(factor=clip_factor(norm, settings.grad_clip))
    optimizer.zero_grad()
    update_done = time.perf_counter()
    return StepRecord(
        step=step,
        loss=loss.item(),
        lr=lr,
        grad_norm=norm,
        num_tokens=tokens.numel(),
        forward_s=forward_done - start,
        backward_s=backward_done - forward_done,
        update_s=update_done - backward_done,
        host_bytes=host_memory_bytes(),
    )


def clip_factor(norm: float, limit: float) -> float:
    """What the update multiplies gradients with so that their norm is at most `limit`; a limit of 0 means none.

    The kernel applies it while it reads the gradient: no pass over all gradients of its own, as clipping in place has.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


@torch.no_grad()
def valid_loss(settings: TrainSettings, model: GPT, corpus: Corpus) -> float:
    """Mean loss over the same few batches each time, so that two measurements differ by the weights alone."""
    model.eval()
    losses = [float(model(*batch(settings, corpus, "valid", i)).loss) for i in range(VALID_BATCHES)]
    model.train()
    return sum(losses) / len(losses)


def batch(settings: TrainSettings, corpus: Corpus, split: Split, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The corpus's batch for a step, in this run's size."""
    return corpus.batch(split, step, settings.batch_size, settings.context)
