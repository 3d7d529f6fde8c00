"""The training loop of `twinflow train`: a model, a corpus and an optimizer in, records out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from twinflow.data.text import VOCAB_SIZE, Corpus, Split
from twinflow.errors import bad_value
from twinflow.models.gpt import GPT, PRESETS, GPTConfig
from twinflow.monitor.metrics import Record, StepRecord, ValidRecord, host_memory_bytes
from twinflow.native.threads import check_threads
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES

VALID_BATCHES: Final = 16
MIN_LR_SHARE: Final = 0.1  # where the cosine ends, as a share of the peak


@dataclass(frozen=True)
class RuleChoice:
    """What a rule starts from when the user names nothing else."""

    lr: float
    weight_decay: float
    options: dict[str, Any]


RULE_CHOICES: Final = {
    "adamw": RuleChoice(2e-3, 0.1, {"betas": (0.9, 0.95)}),
    "adam": RuleChoice(2e-3, 0.0, {"betas": (0.9, 0.95)}),
    "adagrad": RuleChoice(1e-2, 0.0, {}),
    "lion": RuleChoice(3e-4, 0.3, {"betas": (0.9, 0.99)}),
    "sgd": RuleChoice(0.1, 0.0, {"momentum": 0.9}),
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
    delayed_update: bool
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
    """An update rule's defaults."""
    if name not in RULE_CHOICES:
        raise bad_value("--rule", name, RULE_CHOICES)
    return RULE_CHOICES[name]


def choose_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(settings: TrainSettings) -> GPT:
    """The preset at the asked context, its weights drawn from the seed: in bf16 on a GPU, in fp32 on the CPU."""
    torch.manual_seed(settings.seed)
    device = choose_device()
    model = GPT(replace(choose_preset(settings.preset), vocab_size=VOCAB_SIZE, context=settings.context))
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def build_optimizer(settings: TrainSettings, model: GPT) -> TwinOptimizer:
    """The optimizer; weight decay pulls on matrices only, never on norms and biases."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return TwinOptimizer(
        model,
        settings.rule,
        param_groups=groups,
        states=settings.states,
        max_grad_norm=settings.grad_clip or None,
        skip_nonfinite=True,
        early=True,
        delayed_update=settings.delayed_update,
        host_threads=settings.threads,
        lr=settings.lr,
        **choose_rule(settings.rule).options,
    )


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate for a step counted from 0: a line up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return MIN_LR_SHARE + (1.0 - MIN_LR_SHARE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def training_records(settings: TrainSettings, model: GPT, corpus: Corpus, optimizer: TwinOptimizer) -> Iterator[Record]:
    """Train, yielding each step and each validation as it happens.

    A step whose loss or gradient is not finite is yielded without having changed the weights, and is the last one.
    """
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, settings.warmup, settings.steps))
    waits = WaitTimer(model)
    yield ValidRecord(0, valid_loss(settings, model, corpus))
    for step in range(1, settings.steps + 1):
        record = train_step(settings, model, corpus, optimizer, waits, step)
        yield record
        if not record.is_finite:
            return
        schedule.step()
        if step == settings.steps:
            optimizer.flush()  # a delayed update that is still to come belongs to the model that is measured last
        if step == settings.steps or (settings.valid_every and step % settings.valid_every == 0):
            yield ValidRecord(step, valid_loss(settings, model, corpus))


class WaitTimer:
    """Seconds that forwards spend in the optimizer's hooks, where they wait for new weights.

    Two hooks of our own around those of the optimizer, so it is built after that.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._start_s = 0.0
        for module in model.modules():
            module.register_forward_pre_hook(self._before, prepend=True)
            module.register_forward_pre_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._start_s = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start_s


def train_step(
    settings: TrainSettings, model: GPT, corpus: Corpus, optimizer: TwinOptimizer, waits: WaitTimer, step: int
) -> StepRecord:
    """Forward, backward and update on the batch of this step.

    The update runs beside backward and the next forward. What is measured of it is what the loop waits for: new
    weights in this forward, and the norm after this backward.
    """
    tokens, targets = batch(settings, corpus, "train", step)
    lr = float(optimizer.param_groups[0]["lr"])
    waits.seconds = 0.0
    start = time.perf_counter()
    output = model(tokens, targets).loss
    loss = output.item()  # where the GPU has come this far
    forward_done = backward_done = time.perf_counter()
    norm, counts = math.nan, {}
    if math.isfinite(loss):
        output.backward()
        if tokens.is_cuda:
            torch.cuda.current_stream().synchronize()
        backward_done = time.perf_counter()
        optimizer.step()
        counts = optimizer.metrics()
        norm = counts["grad_norm"]
    update_done = time.perf_counter()
    return StepRecord(
        step=step,
        loss=loss,
        lr=lr,
        grad_norm=norm,
        num_tokens=tokens.numel(),
        forward_s=forward_done - start - waits.seconds,
        backward_s=backward_done - forward_done,
        update_s=update_done - backward_done + waits.seconds,
        host_bytes=host_memory_bytes(),
        num_ahead=int(counts.get("gate_speculated", 0)),
        num_dropped=int(counts.get("gate_dropped", 0)),
        num_held=int(counts.get("gate_held", 0)),
    )


@torch.no_grad()
def valid_loss(settings: TrainSettings, model: GPT, corpus: Corpus) -> float:
    """Mean loss over the same few batches each time, so that two measurements differ by the weights alone."""
    model.eval()
    losses = [float(model(*batch(settings, corpus, "valid", i)).loss) for i in range(VALID_BATCHES)]
    model.train()
    return sum(losses) / len(losses)


def batch(settings: TrainSettings, corpus: Corpus, split: Split, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The corpus's batch for a step, in this run's size, where the model is."""
    tokens, targets = corpus.batch(split, step, settings.batch_size, settings.context)
    return tokens.to(choose_device()), targets.to(choose_device())
