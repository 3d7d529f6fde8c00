# SPDX-License-Identifier: Apache-2.0
"""A model whose gradients are whole numbers, trained by ranks and by one process: the bits have to be the same.

Its loss is the sum of weights times small whole numbers, so gradients are those numbers, sums over ranks and backwards
are exact in every dtype, and a mean over 2 or 4 ranks is too. Every block notes the weights that its forward saw.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from twinflow.offload.settings import Tuning
from twinflow.optim.loss_scale import dynamic
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero import Zero

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"one": (1,), "odd": (13, 10)},
    {"long": (1000,), "short": (7,)},
    {"wide": (10, 100), "turned": (9, 31)},
    {"some": (300,), "other": (5,)},
]
NUM_STEPS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULE_OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.01},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "sgd without momentum": {"lr": 1e-2, "weight_decay": 0.1},
    "torch adagrad": {"lr": 1e-2},
    "torch normed": {"lr": 1e-1},
}


class Normed(torch.optim.Optimizer):
    """Not element by element: every parameter moves by its gradient over the gradient's norm, and remembers norms."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param]
                    kept["norm"] = param.grad.norm() + 0.5 * kept.get("norm", 0.0)
                    param.sub_(group["lr"] * param.grad / (kept["norm"] + 1e-3))


@dataclass(frozen=True)
class Case:
    """One way to train; `zero` is what only ranks have, the rest is the same for one process."""

    zero: dict[str, Any]
    rule: str = "adamw"
    dtype: str = "fp32"
    parts: int = 1  # backwards of a step
    pattern: str = "all"  # which blocks run where, see `runs`
    shape: str = "plain"  # of the model, see Toy
    bad: float | None = None  # in one gradient of one rank, in step 2
    scaled: bool = False  # with a dynamic loss scale
    groups: bool = False  # of different options
    event: str = ""  # something between steps, see `between`
    watched: bool = True  # wait and look after every step
    num_steps: int = NUM_STEPS
    options: dict[str, Any] = field(default_factory=dict)  # TwinOptimizer's
    tuning: dict[str, Any] = field(default_factory=dict)
    delays: dict[str, float] = field(default_factory=dict)  # of streams, on the ranks with an odd number
    sleeps: tuple[float, ...] = ()  # between forward, backward and step, on those with an even one
    disabled: tuple[str, ...] = ()  # sync points, on the ranks with an odd number
    saved: str = ""  # a file to go on from, after some steps


class Block(nn.Module):
    """Weights times numbers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen: list[str] = []
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(values.t() if name == "turned" else values))

    def forward(self, numbers: dict[str, Tensor]) -> Tensor:
        self.seen.append(digest(self))
        return sum_of(self, numbers)


def sum_of(module: nn.Module, numbers: dict[str, Tensor]) -> Tensor:
    own = [(p, numbers[name]) for name, p in module.named_parameters(recurse=False) if name in numbers]
    return torch.stack([(p * x).float().sum() for p, x in own]).sum()


class Toy(nn.Module):
    """Four blocks and parameters outside of them: one that is used, one that never is, and one that is frozen."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        super().__init__()
        generator, dtype = torch.Generator().manual_seed(seed), DTYPES[case.dtype]
        self.seen: list[str] = []
        self.outside = nn.Parameter(torch.randn(7, generator=generator).to(dtype))
        self.never = nn.Parameter(torch.randn(200, generator=generator).to(dtype))
        self.frozen = nn.Parameter(torch.randn(3, generator=generator).to(dtype), requires_grad=False)
        self.blocks = nn.ModuleList(Block(shapes, generator, dtype) for shapes in SHAPES)
        if case.shape == "tied":
            self.blocks[3].some = self.blocks[0].odd

    def forward(self, numbers: dict[str, Tensor], order: list[int]) -> Tensor:
        self.seen.append(hash_of([self.outside]))
        total = (self.outside * numbers["outside"]).float().sum()
        for i in order:
            total = total + self.blocks[i]({name: numbers[f"blocks.{i}.{name}"] for name in dict(self.names(i))})
        return total

    def names(self, i: int) -> list[tuple[str, nn.Parameter]]:
        return list(self.blocks[i].named_parameters(recurse=False))


def hash_of(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def digest(module: nn.Module) -> str:
    return hash_of(list(module.parameters()))


def runs(case: Case, step: int, part: int, rank: int) -> list[int] | None:
    """The blocks that a forward runs, in order; None: this rank has no forward at all."""
    if case.pattern == "all":
        return [0, 1, 2, 3]
    if case.pattern == "turned round":  # on some ranks
        return [3, 1, 2, 0] if rank % 2 else [0, 1, 2, 3]
    if case.pattern == "some":  # block 1 on one rank, 2 now and then, 3 on one rank in one of the backwards
        used = [0] + [1] * (rank == 1) + [2] * (step % 2 == 0) + [3] * (rank == 0 and part == step % 3 % case.parts)
        return used
    if case.pattern == "fewer":  # backwards on one rank than on the others, or none
        return None if rank == 1 and part >= step % 3 else [0, 1, 2, 3]
    assert case.pattern == "one alone"  # has anything to do
    return [0, 1, 2, 3] if rank == 0 else None


def numbers_of(model: Toy, case: Case, step: int, part: int, rank: int) -> dict[str, Tensor]:
    """Every parameter's gradient on one rank, by name."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found[name] = torch.randint(-4, 5, param.shape, generator=generator).to(param.dtype)
    if case.bad is not None and step == 2 and part == 0 and rank == 1:
        found["blocks.1.long"][977] = case.bad
    return found


def mean_of(model: Toy, case: Case, step: int, part: int, world: int) -> tuple[dict[str, Tensor], list[int] | None]:
    """What one process has to see to do what `world` ranks do together."""
    orders = [runs(case, step, part, rank) for rank in range(world)]
    present = [(rank, order) for rank, order in enumerate(orders) if order is not None]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for rank, order in present:
        for name, values in numbers_of(model, case, step, part, rank).items():
            if not name.startswith("blocks.") or int(name.split(".")[1]) in order:
                total[name] += values
    divisor = 1 if case.zero.get("op") == "sum" else world
    used = sorted({i for _, order in present for i in order})
    return {name: values / divisor for name, values in total.items()}, used if present else None


def rule_of(name: str) -> Any:
    return {"torch adagrad": torch.optim.Adagrad, "torch normed": Normed}.get(name, name.split()[0])


def build(model: Toy, case: Case, is_alone: bool) -> TwinOptimizer:
    options = {**RULE_OPTIONS[case.rule], **case.options}
    if case.groups:
        small = [p for p in model.parameters() if p.numel() <= 7]
        large = [p for p in model.parameters() if p.numel() > 7]
        options["param_groups"] = [{"params": small, "lr": 3e-2}, {"params": large, "weight_decay": 0.3}]
    if case.scaled:
        options["loss_scale"] = dynamic(initial_power=4, hysteresis=1, window=2)
    sums = {"sums": "host"} if case.zero.get("stage") == 2 else {}  # as ranks do it
    own = case.tuning if not is_alone else {k: v for k, v in case.tuning.items() if k != "nvme_path"}
    tuning = Tuning(**{"bucket_numel": 384, "shadow_bytes": 1 << 20, **sums, **own})
    zero = None if is_alone else Zero(**case.zero)
    return TwinOptimizer(model, rule_of(case.rule), accumulation_steps=case.parts, zero=zero, tuning=tuning, **options)


def train(rank: int, world: int, case: Case, is_alone: bool) -> dict[str, Any]:
    """What forwards saw, the weights after each step and what else there is to compare."""
    model = Toy(case, seed=0 if is_alone else rank)  # all start with the first rank's
    optimizer = build(model, case, is_alone)
    if not is_alone:
        device = optimizer.runtime.device
        for name, seconds in case.delays.items() if rank % 2 else ():
            device.delay(name, seconds)
        device.disabled = frozenset(case.disabled if rank % 2 else ())
    sleeps = (*case.sleeps, 0.0, 0.0, 0.0) if rank % 2 == 0 and not is_alone else (0.0,) * 3
    found: dict[str, Any] = {"seen": [], "after": [], "norms": [], "scales": [], "frozen": hash_of([model.frozen])}
    for step in range(_load(case.saved, model, optimizer), case.num_steps):
        for part in range(case.parts):
            numbers, order = numbers_of(model, case, step, part, rank), runs(case, step, part, rank)
            if is_alone:
                numbers, order = mean_of(model, case, step, part, world)
            if order is not None:
                time.sleep(sleeps[0])
                loss = model(numbers, order)
                time.sleep(sleeps[1])
                optimizer.backward(loss)
                found["seen"].append({"at": [step, part], **_seen(model)})
            if case.event == "drop" and step in (1, 3) and part == 0:
                optimizer.zero_grad()
        time.sleep(sleeps[2])
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = between(model, optimizer, case, step, is_alone)
        if case.watched:
            optimizer.wait()
            found["after"].append(digest(model))
            found["norms"].append(optimizer.grad_norm)
            found["scales"].append(optimizer.loss_scale)
    if case.options.get("delayed_update"):
        optimizer.flush()
    optimizer.close()
    found["end"] = {name: hash_of([p]) for name, p in model.named_parameters()}
    found["skipped"], found["steps"] = optimizer.num_skipped, optimizer.num_steps
    return found


def save_after(path: str, case: Case, num_steps: int) -> None:
    """A file that `Case.saved` names: what one process has after so many steps, for two ranks to go on from."""
    model = Toy(case)
    optimizer = build(model, case, is_alone=True)
    for step in range(num_steps):
        numbers, order = mean_of(model, case, step, 0, 2)
        assert order is not None
        optimizer.backward(model(numbers, order))
        optimizer.step()
        optimizer.zero_grad()
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    optimizer.close()


def _load(path: str, model: Toy, optimizer: TwinOptimizer) -> int:
    """The step to go on with."""
    if not path:
        return 0
    weights, state = torch.load(path, weights_only=True)
    assert state["has_unsent"]
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return int(state["num_steps"])


def between(model: Toy, optimizer: TwinOptimizer, case: Case, step: int, is_alone: bool) -> tuple[Toy, TwinOptimizer]:
    """Things that happen between two steps."""
    if case.event == "load" and step == 1:
        model.load_state_dict(Toy(case, seed=77).state_dict())
    if case.event == "edit" and step == 1:
        optimizer.wait()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    if case.event == "new memory" and step == 1:
        optimizer.wait()
        for param in model.parameters():
            param.data = param.data.clone() * 2
    if case.event == "rebuild" and step == 1:
        optimizer.close()
        optimizer = build(model, case, is_alone)
    if case.event == "rates":
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    return model, optimizer


def _seen(model: Toy) -> dict[str, str]:
    """Of the last forward, and forgotten."""
    found = {str(i): block.seen.pop() for i, block in enumerate(model.blocks) if block.seen}
    return {**found, "outside": model.seen.pop()}


def train_all(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: train(rank, world, case, is_alone=False) for name, case in cases.items()}


def differences(ranks: list[dict[str, Any]], truth: dict[str, Any]) -> list[str]:
    """Where ranks did not do what one process did; nothing if all is well."""
    wrong = []
    for rank, found in enumerate(ranks):
        forwards = {tuple(seen["at"]): seen for seen in truth["seen"]}
        for seen in found["seen"]:
            theirs = forwards[tuple(seen["at"])]
            wrong += [f"rank {rank}, forward {seen['at']}, {k}" for k in seen if seen[k] != theirs[k]]
        for key in ("after", "scales", "skipped", "steps", "end", "frozen"):
            if found[key] != truth[key]:
                wrong.append(f"rank {rank}, {key}: {found[key]} instead of {truth[key]}")
        for norm, theirs in zip(found["norms"], truth["norms"], strict=True):
            wrong += [] if _is_norm(norm, theirs) else [f"rank {rank}, norm {norm} instead of {theirs}"]
    return wrong


def _is_norm(norm: float | None, truth: float | None) -> bool:
    if norm is None or truth is None:  # before an optimizer's first step
        return norm is truth
    return math.isclose(norm, truth, rel_tol=1e-12) if math.isfinite(truth) else not math.isfinite(norm)


# Ends.


def fail(rank: int, world: int, where: str) -> dict[str, str]:
    """Something breaks on the second rank in the third step; what the loop there and elsewhere got to hear."""
    rule = "torch adagrad" if where == "worker" else "adamw"  # an update of ours is no Python that could raise
    disk = {"nvme_path": tempfile.gettempdir(), "buffer_count": 1, "shadow_bytes": 0} if where == "disk" else {}
    options = {"early": True, "max_grad_norm": 50.0, "ratio": 1.0}
    case = Case({"stage": 2}, rule, options=options, tuning=disk)
    model = Toy(case)
    optimizer = build(model, case, is_alone=False)
    for step in range(20):
        if step == 2 and rank == 1:
            _break(optimizer, where)
        try:
            optimizer.backward(model(numbers_of(model, case, step, 0, rank), [0, 1, 2, 3]))
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            return {"error": type(error).__name__, "cause": repr(error.__cause__)}
    return {"error": "none", "cause": ""}


def _break(optimizer: TwinOptimizer, where: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    runtime = optimizer.runtime
    if where == "disk":
        assert runtime.executor.file is not None
        os.dup2(os.open("/proc/self/mem", os.O_RDWR), runtime.executor.file.fd)  # EIO
    elif where == "worker":
        for bucket in (bucket for bucket in runtime.buckets if bucket.slices):
            runtime.updater.inner(bucket).optimizer.step = broken  # type: ignore[attr-defined]
    else:
        stream = runtime.device.stream(where)
        run = stream.run
        stream.run = lambda work, *args, **kwargs: run(broken, *args, **kwargs)  # type: ignore[method-assign]


def leave(folder: str) -> None:
    """The first rank fails between two steps, when its threads wait for the second, a child that never steps."""
    torch.set_num_threads(1)
    rank = 0 if os.fork() else 1
    if rank == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or who reads what the first says would wait for this one
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    case = Case({"stage": 2}, options={"early": True, "max_grad_norm": 50.0})
    model = Toy(case)
    optimizer = build(model, case, is_alone=False)
    if rank == 1:
        while not Path(folder, "gone").exists():
            time.sleep(0.1)
        Path(folder, "left").touch()
        os._exit(0)
    optimizer.backward(model(numbers_of(model, case, 0, 0, rank), [0, 1, 2, 3]))
    optimizer.step()
    time.sleep(0.5)
    Path(folder, "leaving").touch()
    raise ZeroDivisionError


def close_in_the_middle(rank: int, world: int) -> dict[str, Any]:
    """With another number of buckets on their way on each rank; then all go on with a new optimizer."""
    cases = (Case({"stage": 1}, options={"early": True}), Case({"stage": 2}, parts=3, options={"early": True}))
    took: list[float] = []
    model = Toy(cases[0])
    for case in cases:
        optimizer = build(model, case, is_alone=False)
        for part in range(case.parts):
            numbers = numbers_of(model, case, 0, part, rank)
            loss = model(numbers, [0, 1, 2, 3])
            if part == 0 or rank == 0:
                optimizer.backward(loss)
            if part == 0:
                optimizer.step() if case.parts == 1 else None
        if case.parts == 1 and rank == 0:
            optimizer.backward(model(numbers_of(model, case, 1, 0, rank), [0, 1, 2, 3]))
        start = time.monotonic()
        optimizer.close()
        took.append(time.monotonic() - start)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("twinflow-")]
    return {"took_s": took, "threads": threads, "after": train(rank, world, cases[0], is_alone=False)["after"]}


class Samples(Dataset[int]):
    """Numbers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index
