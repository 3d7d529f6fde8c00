# SPDX-License-Identifier: Apache-2.0
"""Runs one training loop twice, with plain torch and with twinflow, and compares everything that the loop has seen.

A case (as_torch_cases.py) is a function that gets a `Loop` and trains with it. `TorchLoop` and `TorchEngineLoop` are
the references: torch.optim and torch.nn.utils.clip_grad_norm_, the second with the engine's calls. `TwinLoop` and
`EngineLoop` are what is tested. A `Combination` is one cell of the matrix.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twinflow
from twinflow.optim.twin import Tuning, TwinOptimizer

WIDTH = 8
VOCABULARY = 11
BUCKET_NUMEL = 384
MAX_NORM = 1.0  # the gradients of about half of the steps are larger
TOLERANCE = 1e-6
# Some true gradients are zero. A larger eps keeps Adam from dividing their rounding errors by themselves.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1},
    "sgd": {"lr": 5e-2, "momentum": 0.9},
}
CONFIG_NAMES = {"adamw": "AdamW", "sgd": "SGD"}
TORCH_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
LOSS_SCALE = 64.0
WARM_UP = 3
PACKAGE = Path(twinflow.__file__).parent

# Lines about the config would hide the report.
logging.getLogger("twinflow").addHandler(logging.NullHandler())


# The model.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model in small: an embedding, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (4, 7), generator=generator)


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + number))


def loudness(number: int) -> float:
    """Makes the gradients of every other step larger than MAX_NORM."""
    return 3.0 if number % 2 else 0.3


def net_loss(front: Any, number: int) -> Tensor:
    given = tokens(number)
    logits = front(given[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten()) * loudness(number)


# Cases and the matrix.


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix."""

    api: str  # "twin" or "engine"
    early: bool
    ratio: float
    clips: bool
    on_host: bool  # the weights
    # Chosen at random for updates that start in backward: an update that runs into spare memory can be taken back. One
    # that has no such memory may start early only when the loop has shown its pattern for some steps.
    has_spare: bool = True
    warm_up: int = 0  # ordinary steps before the case

    def __str__(self) -> str:
        early = "early" if self.early else "late"
        place = "host" if self.on_host else "device"
        more = f"{'' if self.has_spare else '-tight'}{'-warm' if self.warm_up else ''}"
        return f"{self.api}-{early}-{self.ratio:g}-{'clip' if self.clips else 'free'}-{place}{more}"


PLACES = ((0.0, False), (0.5, False), (1.0, False), (0.5, True), (1.0, True))
COMBINATIONS = [
    Combination(api, early, ratio, clips, on_host)
    for api, early, (ratio, on_host), clips in itertools.product(
        ("twin", "engine"), (True, False), PLACES, (True, False)
    )
]


@dataclass(frozen=True)
class Case:
    """One legal pattern of a training loop."""

    name: str
    run: Callable[[Loop], None]
    kind: str  # "read", "write" or "loop"
    make: Callable[[], nn.Module] = Net
    loss: Callable[[Any, int], Tensor] = net_loss
    apis: tuple[str, ...] = ("twin", "engine")
    accumulation: int = 1  # declared micro-batches of a step
    rule: str = "adamw"
    half: bool = False  # the engine's fp16 section with a fixed loss scale
    schedule: Callable[[Any], Any] | None = None  # from an optimizer to a scheduler
    groups: Callable[[nn.Module], list[Any]] | None = None  # from a model to param groups
    # What the case does changes no value in torch. Other cases must change some: see `Loop.acts`.
    is_neutral: bool = False
    tolerance: float = TOLERANCE
    prepare: Callable[[nn.Module], None] | None = None  # changes the model before the optimizer is built
    has_failed: str = ""  # in this combination, once: it is one of those in `make test`
    # What torch itself may say where twinflow cannot step in: counts as a refusal.
    torch_refuses: str | None = None

    @property
    def num_quick(self) -> int:
        """Combinations in `make test`. A loop calls methods of both APIs. Weights are read and written without them."""
        return 2 if self.kind == "loop" else 1

    @property
    def combinations(self) -> list[Combination]:
        return [self._drawn(combination) for combination in COMBINATIONS if combination.api in self.apis]

    def _drawn(self, combination: Combination) -> Combination:
        if not combination.early:
            return combination
        choose = random.Random(f"{self.name} {combination}")
        has_spare = choose.random() < 0.5
        warm_up = WARM_UP if self.kind != "read" and choose.random() < 0.5 else 0
        return replace(combination, has_spare=has_spare, warm_up=warm_up)


# Loops.


class Loop:
    """What a case sees. All values that it records are compared with the reference.

    `acts` is False in one more reference run, in which a case leaves out what it is about. Its values must differ from
    those of the full run: otherwise the case would not notice when twinflow ignores the same thing.
    """

    is_engine = False
    is_reference = False
    optimizer: Any
    front: Any  # what the user calls: the model or the engine

    def __init__(self, case: Case, combination: Combination, acts: bool = True) -> None:
        self.case = case
        self.combination = combination
        self.acts = acts
        self.accumulation = case.accumulation
        self.scheduler: Any = None
        self.records: dict[str, list[Tensor]] = {}
        self.others: list[Loop] = []
        self.model: Any = seeded(case.make)
        if case.prepare is not None:
            case.prepare(self.model)

    def record(self, name: str, value: Any) -> None:
        """Copies the value at once, so that what arrives later does not hide an old one."""
        with torch.no_grad():
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
            copied = tensor.detach().to(torch.float64, copy=True).flatten()
        self.records.setdefault(name, []).append(copied)

    def another(self, name: str, make: Callable[[], nn.Module]) -> Loop:
        """A second model with an optimizer of its own."""
        case = Case(name, self.case.run, self.case.kind, make, accumulation=self.accumulation, rule=self.case.rule)
        loop = type(self)(case, self.combination, self.acts)
        self.others.append(loop)
        return loop

    def forward(self, *args: Any) -> Any:
        return self.front(*args)

    def loss(self, number: int) -> Tensor:
        loss = self.case.loss(self.front, number)
        self.record("loss", loss)
        return loss

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The gradients of one micro-batch, divided by the declared number of them."""
        (loss / self.accumulation if self.accumulation > 1 else loss).backward(**options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def finish(self) -> None:
        """`step`, after which no gradients are left."""
        self.step()
        if not self.is_engine:
            self.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()

    def micro_step(self, is_last: bool) -> None:
        """After each micro-batch: the engine counts them itself."""
        if self.is_engine:
            self.step()
        elif is_last:
            self.finish()

    def train(self, number: int) -> None:
        """One ordinary step."""
        for part in range(self.accumulation):
            self.backward(self.loss(number * self.accumulation + part))
            self.micro_step(part == self.accumulation - 1)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def scale(self) -> Callable[[Tensor], Tensor]:
        raise NotImplementedError

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def set_boundary(self, is_boundary: bool | None) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until the weights can be read in any way. Only the harness calls it, after the case."""

    def record_weights(self, prefix: str = "") -> None:
        self.wait()
        for name, value in self.model.state_dict().items():
            self.record(f"{prefix}final {name}", value)
        for other in self.others:
            other.record_weights(f"{other.case.name} ")
            self.records.update(other.records)

    def close(self) -> None:
        for other in self.others:
            other.close()


def registering(cases: list[Case], kind: str) -> Callable[..., Any]:
    """A decorator that makes a case of a function and puts it into the list."""

    def with_options(**options: Any) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
        def register(run: Callable[[Loop], None]) -> Callable[[Loop], None]:
            cases.append(Case(run.__name__, run, kind, **options))
            return run

        return register

    return with_options


def trains(loop: Loop) -> None:
    """A case of a few ordinary steps."""
    for number in range(3):
        loop.train(number)


def gradients(loop: Loop) -> Tensor:
    """All gradients one after the other, each with a flag; zeros where there is none."""
    found = []
    for p in loop.model.parameters():
        found.append(torch.zeros(p.numel()) if p.grad is None else p.grad.detach().flatten())
        found.append(torch.tensor([float(p.grad is None)]))
    return torch.cat(found)


class TorchLoop(Loop):
    """The reference for TwinOptimizer."""

    is_reference = True

    def __init__(self, case: Case, combination: Combination, acts: bool = True) -> None:
        super().__init__(case, combination, acts)
        self.front = self.model
        self.is_scaled = False
        if case.half:
            self.model.half()
        self.params = list(self.model.parameters())
        # fp16 weights are updated in fp32.
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params] if case.half else self.params
        groups = self.masters if case.groups is None else case.groups(self.model)
        self.optimizer = TORCH_CLASSES[case.rule](groups, foreach=False, **OPTIONS[case.rule])
        if case.schedule is not None:
            self.scheduler = case.schedule(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.case.half:
            self._take_half_gradients()
        # Clipping is a part of the update. It comes after the user's own hooks, because this one is the newest, and it
        # leaves `.grad` as it was.
        before: dict[Tensor, Tensor] = {}
        hook = self.optimizer.register_step_pre_hook(lambda *_: self._clip(before))
        self.optimizer.step()
        hook.remove()
        for p, grad in before.items():
            if p.grad is not None:
                p.grad.copy_(grad)
        if self.case.half:
            with torch.no_grad():
                for p, master in zip(self.params, self.masters, strict=True):
                    p.copy_(master)
        return loss

    def _clip(self, before: dict[Tensor, Tensor]) -> None:
        given = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.combination.clips:
            before.update((p, p.grad.clone()) for p in given)
            nn.utils.clip_grad_norm_(given, MAX_NORM)

    def _take_half_gradients(self) -> None:
        scale = LOSS_SCALE if self.is_scaled else 1.0
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float() / scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        if self.case.half:
            self.model.zero_grad(set_to_none)


class TorchEngineLoop(TorchLoop):
    """The reference for the engine: `step` counts micro-batches, drops the gradients and moves the schedule."""

    is_engine = True

    def __init__(self, case: Case, combination: Combination, acts: bool = True) -> None:
        super().__init__(case, combination, acts)
        self.part = 0
        self.is_last: bool | None = None

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.scale(loss).backward(**options)

    @property
    def scale(self) -> Callable[[Tensor], Tensor]:
        def scaled(loss: Tensor) -> Tensor:
            self.is_scaled = True
            return loss / self.accumulation * (LOSS_SCALE if self.case.half else 1.0)

        return scaled

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None, "engine.step() takes no closure"
        is_last = self.part + 1 >= self.accumulation if self.is_last is None else self.is_last
        self.part += 1
        if is_last:
            super().step()
            self.optimizer.zero_grad()
            self.model.zero_grad()
            self.is_scaled = False
            self.part = 0
            if self.scheduler is not None:
                self.scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.part = 0  # the step starts again

    def set_boundary(self, is_boundary: bool | None) -> None:
        self.is_last = is_boundary


class TwinLoop(Loop):
    def __init__(self, case: Case, combination: Combination, acts: bool = True) -> None:
        super().__init__(case, combination, acts)
        self.front = self.model
        self.optimizer = TwinOptimizer(
            self.model,
            case.rule,
            param_groups=None if case.groups is None else case.groups(self.model),
            early=combination.early,
            ratio=combination.ratio,
            max_grad_norm=MAX_NORM if combination.clips else None,
            offload_params=combination.on_host,
            accumulation_steps=case.accumulation,
            tuning=Tuning(bucket_numel=BUCKET_NUMEL, shadow_bytes=None if combination.has_spare else 0),
            **OPTIONS[case.rule],
        )
        delay_streams(self.optimizer, f"{case.name} {combination}")
        if case.schedule is not None:
            self.scheduler = case.schedule(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def wait(self) -> None:
        self.optimizer.wait()

    def close(self) -> None:
        super().close()
        self.optimizer.close()


class EngineLoop(Loop):
    is_engine = True

    def __init__(self, case: Case, combination: Combination, acts: bool = True) -> None:
        super().__init__(case, combination, acts)
        given = None if case.groups is None else case.groups(self.model)
        self.engine = self._build(case, combination, given)
        self.front = self.engine
        self.model = self.engine.module
        self.optimizer = self.engine.optimizer
        self.scheduler = self.engine.lr_scheduler
        delay_streams(self.optimizer, f"{case.name} {combination}")

    def _build(self, case: Case, combination: Combination, given: list[Any] | None) -> Any:
        offload: dict[str, Any] = {
            "device": "cpu",
            "ratio": combination.ratio,
            "bucket_numel": BUCKET_NUMEL,
            "early": combination.early,
        }
        if not combination.has_spare:
            offload["shadow_bytes"] = 0
        zero: dict[str, Any] = {"stage": 2, "offload_optimizer": offload}
        if combination.on_host:
            zero = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu"}}
        if not config_has_early():
            del offload["early"]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": case.accumulation,
            "optimizer": {"type": CONFIG_NAMES[case.rule], "params": OPTIONS[case.rule]},
            "zero_optimization": zero,
        }
        config["gradient_clipping"] = MAX_NORM if combination.clips else 0.0
        if case.half:
            config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
        engine, *_ = twinflow.initialize(
            model=self.model, config=config, model_parameters=given, lr_scheduler=case.schedule
        )
        return engine

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.engine.backward(loss, **options)

    @property
    def scale(self) -> Callable[[Tensor], Tensor]:
        return self.engine.scale

    @property
    def lr(self) -> float:
        return float(self.engine.get_lr()[0])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None, "engine.step() takes no closure"
        return self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.engine.no_sync()

    def set_boundary(self, is_boundary: bool | None) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def wait(self) -> None:
        self.optimizer.wait()

    def close(self) -> None:
        super().close()
        self.engine.destroy()


@functools.cache
def config_has_early() -> bool:
    """Whether the config knows `offload_optimizer.early`. Without it the engine runs as it does by default."""
    from twinflow.config.schema import OffloadOptimizer

    return "early" in OffloadOptimizer.model_fields


def delay_streams(optimizer: TwinOptimizer, seed: str) -> None:
    """Slows the streams that carry gradients out and weights back, so that a read that does not wait shows."""
    choose = random.Random(seed)
    delays = {
        "out": choose.choice((0.0, 0.3, 1.0)),
        "in": choose.choice((0.5, 1.0, 2.0)),
        "update": choose.choice((0.5, 1.0, 2.0)),
        "fetch": choose.choice((0.0, 0.5)),
    }
    for name, milliseconds in delays.items():
        optimizer.runtime.device.delay(name, milliseconds / 1e3)


# Running and comparing.


REFERENCES: dict[str, Any] = {"twin": TorchLoop, "engine": TorchEngineLoop}
TESTED: dict[str, Any] = {"twin": TwinLoop, "engine": EngineLoop}
EPILOGUE = (100,)  # an ordinary step after each case: a wrong state shows in the weights only later


@dataclass
class Outcome:
    verdict: str  # "equal", "refused", "DIFFERENT" or "CRASHED"
    detail: str = ""
    error: BaseException | None = field(default=None, repr=False)

    @property
    def first_sentence(self) -> str:
        return self.detail.partition(". ")[0].strip()


def run_case(loop: Loop) -> dict[str, list[Tensor]]:
    """Everything that the case has recorded, and the weights after one more ordinary step."""
    # Random numbers that the case draws itself are the same for all loops.
    torch.manual_seed(1)
    for number in range(loop.combination.warm_up):
        loop.train(90 + number)
    loop.case.run(loop)
    for number in EPILOGUE:
        loop.train(number)
    loop.record_weights()
    return loop.records


def reference(case: Case, combination: Combination, acts: bool = True) -> dict[str, list[Tensor]]:
    """What torch gives. Only some of the combination's values matter to it."""
    plain = Combination(combination.api, False, 1.0, combination.clips, False, True, combination.warm_up)
    return run_case(REFERENCES[combination.api](case, plain, acts))


@functools.lru_cache(maxsize=16)  # the combinations of one case follow each other
def cached_reference(case: Case, api: str, clips: bool, warm_up: int) -> dict[str, list[Tensor]]:
    return reference(case, Combination(api, False, 1.0, clips, False, True, warm_up))


def difference(wanted: dict[str, list[Tensor]], found: dict[str, list[Tensor]], tolerance: float) -> str:
    """The first difference, or an empty text."""
    if list(wanted) != list(found):
        return f"recorded {sorted(set(found) ^ set(wanted))} only once"
    for name, values in wanted.items():
        others = found[name]
        if len(values) != len(others):
            return f"{name}: {len(others)} values instead of {len(values)}"
        for index, (a, b) in enumerate(zip(values, others, strict=True)):
            if a.shape != b.shape:
                return f"{name}[{index}]: shape {tuple(b.shape)} instead of {tuple(a.shape)}"
            gap = largest_gap(a, b)
            if not gap <= tolerance:
                return f"{name}[{index}] differs by {gap:.2g}"
    return ""


def largest_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value where that is above 1. NaN where either has one."""
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max()) / max(1.0, float(a.abs().max()))


def is_named(error: BaseException) -> bool:
    """Whether twinflow itself raised the error, with a reason and a remedy: two sentences at least."""
    if not isinstance(error, (RuntimeError, ValueError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return is_ours and ". " in str(error)


def attempt(case: Case, combination: Combination) -> Outcome:
    """Runs a case with twinflow and compares it with torch."""
    wanted = cached_reference(case, combination.api, combination.clips, combination.warm_up)
    loop: Loop | None = None
    try:
        loop = TESTED[combination.api](case, combination)
        found = run_case(loop)
    except Exception as error:
        return _after_error(case, loop, error)
    gap = difference(wanted, found, case.tolerance)
    try:
        loop.close()
    except Exception as error:
        return Outcome("CRASHED", f"close(): {type(error).__name__}: {error}", error)
    return Outcome("DIFFERENT", gap) if gap else Outcome("equal")


def _after_error(case: Case, loop: Loop | None, error: Exception) -> Outcome:
    """A refusal has to leave a state that can be saved."""
    text = f"{type(error).__name__}: {error}"
    is_refusal = is_named(error) or (case.torch_refuses is not None and case.torch_refuses in text)
    problem = _problem_of_saving(loop) if is_refusal and loop is not None else ""
    _close(loop)
    if problem:
        return Outcome("CRASHED", f"the state cannot be saved after the refusal ({problem}). It was {text}", error)
    return Outcome("refused" if is_refusal else "CRASHED", text, error)


def _problem_of_saving(loop: Loop) -> str:
    try:
        weights = loop.model.state_dict()
        loop.optimizer.state_dict()
    except Exception as error:
        return str(error)
    bad = [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]
    return f"{bad[0]} is not finite" if bad else ""


def _close(loop: Loop | None) -> None:
    """After an error: what goes wrong now has been reported already."""
    if loop is not None:
        with contextlib.suppress(Exception):
            loop.close()


# The subset of the matrix for `make test`.


def axes(combination: Combination) -> list[tuple[str, Any]]:
    """The values of a combination, each with the name of its axis."""
    place = (combination.ratio, combination.on_host)
    return [
        ("api", combination.api),
        ("early", combination.early),
        ("place", place),
        ("clips", combination.clips),
    ]


def chosen(cases: Sequence[Case]) -> list[tuple[Case, Combination]]:
    """For each case the combinations with most values that it has not had, then with pairs that others have not had."""
    seen: Counter[Any] = Counter()
    cells: list[tuple[Case, Combination]] = []
    for case in cases:
        covered: set[Any] = set()
        left = case.combinations
        for number in range(case.num_quick):
            gains = [len(set(axes(cell)) - covered) for cell in left]
            gainful = [cell for cell, gain in zip(left, gains, strict=True) if gain == max(gains)]
            best = min(
                [cell for cell in left if str(cell).startswith(case.has_failed)] if number == 0 else gainful,
                key=lambda cell: sum(seen[pair] for pair in itertools.combinations(axes(cell), 2)),
            )
            left.remove(best)
            covered |= set(axes(best))
            seen.update(itertools.combinations(axes(best), 2))
            cells.append((case, best))
    return cells
