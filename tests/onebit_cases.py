# SPDX-License-Identifier: Apache-2.0
"""Work for ranks: collectives in few bits, and training with 1-bit optimizers; with what goes in, for simulations too.

All cases of one spawn run one after the other, each on the first so many ranks. Results are digests of tensors, step by
step: equal digests are equal bits (any NaN equals any NaN, and a zero any zero).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.codes import CODES
from twinflow.dist.compressed import Coding, Errors, compressed_all_reduce, compressed_reduce_scatter, publish
from twinflow.dist.group import Group
from twinflow.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from twinflow.optim.onebit.base import CompressedOptimizer, FreezingOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WAIT = timedelta(seconds=120)


def digest(tensors: Iterable[Tensor]) -> str:
    flats = [tensor.detach().reshape(-1).float() for tensor in tensors]
    flat = torch.cat(flats) + 0.0 if flats else torch.empty(0)
    flat[flat.isnan()] = math.nan
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def noise(numel: int, *seed: int) -> Tensor:
    mixed = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=7).digest(), "little")
    return torch.randn(numel, generator=torch.Generator().manual_seed(mixed))


def groups(world: int) -> dict[int, Group]:
    """Of the first 1, 2, ... ranks; those that this rank is in."""
    found = {}
    for size in range(1, world + 1):
        handle = dist.new_group(list(range(size)), backend="gloo", timeout=WAIT)
        if dist.get_rank() < size:
            found[size] = Group(handle, range(size), is_on_host=True)
    return found


# Collectives.


@dataclass(frozen=True)
class Exchange:
    """Some steps of each collective over one bucket, a part for each rank."""

    code: str
    dtype: str
    part: int
    is_scaled: bool  # with exponents, a momentum as base, and a factor
    world: int
    num_steps: int = 3
    has_feedback: bool = True
    bad: float | None = None  # what the last rank gives at one element, in the second step

    @property
    def numel(self) -> int:
        return self.part * self.world

    def exponents(self) -> Tensor | None:
        if not self.is_scaled:
            return None
        found = (127 + 4 * noise(self.numel, 1)).clamp(110, 140).to(torch.uint8)
        found[noise(self.numel, 2) > 0.8] = 0
        return found

    def given(self, rank: int, step: int) -> Tensor:
        """Numbers whose signs alone lie."""
        lying = torch.where(torch.arange(self.numel) % 5 == 0, 2.0, -0.1)
        found = lying + 0.5 * noise(self.numel, 3, rank, step)
        exponents = self.exponents()
        if exponents is not None:
            found = torch.ldexp(found, 127 - exponents.int()).clamp(-6e4, 6e4)
        if self.bad is not None and step == 1 and rank == self.world - 1:
            found[self.numel // 2] = self.bad
        return found.to(DTYPES[self.dtype])

    def owned(self) -> Tensor:
        """What the owners have, all parts."""
        return 1.0 + noise(self.numel, 4)

    def published(self) -> Tensor:
        return (self.owned() + 0.3 * noise(self.numel, 5)).to(DTYPES[self.dtype])

    @property
    def factors(self) -> tuple[float, float]:
        """Of what is given, and of the base."""
        return (0.1, 0.9) if self.is_scaled else (1.0, 0.0)


def exchange_all(rank: int, world: int, cases: Mapping[str, Exchange]) -> dict[str, Any]:
    known = groups(world)
    return {name: _exchange(known[case.world], case) for name, case in cases.items() if case.world in known}


def _exchange(group: Group, case: Exchange) -> dict[str, Any]:
    code, exponents, (factor, base_factor) = CODES[case.code], case.exponents(), case.factors
    coding = Coding(code, exponents, factor, case.has_feedback)
    cpu = torch.device("cpu")
    scattered = Errors.zeros(case.numel, case.world, cpu, has_server=False)
    errors = Errors.zeros(case.numel, case.world, cpu)
    momentum, total = torch.zeros(case.numel), torch.zeros(case.numel, dtype=torch.float64)
    published, own = case.published(), case.owned().view(case.world, -1)[group.rank].clone()
    found: dict[str, Any] = {name: [] for name in ("scattered", "reduced", "published", "worker", "server", "bytes")}
    for step in range(case.num_steps):
        whole, base = case.given(group.rank, step), momentum.clone() if case.is_scaled else None
        part, before = torch.full((case.part,), math.nan), group.sent_bytes
        compressed_reduce_scatter(group, part, whole, coding, scattered, base, base_factor)
        bytes_scattered = group.sent_bytes - before
        out = momentum if case.is_scaled else torch.full((case.numel,), math.nan)  # in place, as optimizers have it
        compressed_all_reduce(group, out, whole, coding, errors, momentum if case.is_scaled else None, base_factor)
        bytes_reduced = group.sent_bytes - before - bytes_scattered
        publish(group, published, own, coding)
        bytes_published = group.sent_bytes - before - bytes_scattered - bytes_reduced
        total += out
        found["scattered"].append(digest([part]))
        found["reduced"].append(digest([out]))
        found["published"].append(digest([published]))
        found["worker"].append(digest([errors.worker, scattered.worker]))
        found["server"].append(digest([errors.server]) if errors.server is not None else "")
        found["bytes"].append((bytes_scattered, bytes_reduced, bytes_published))
    if case.numel < 200:
        assert errors.server is not None
        found["total"], found["last"] = total.tolist(), published.tolist()
        found["errors"] = (errors.worker.tolist(), errors.server.tolist())
    return found


# Training.

SHAPES = (((5, 7), (11, 3), (2, 3)), ((13,), (1,), (4, 33), (3,)))  # of the parameters of two groups
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.0},
    {"lr": 0.005, "betas": (0.8, 0.9), "weight_decay": 0.1},
)
FLAT_SHAPES = tuple(shape for group in SHAPES for shape in group)
SIZES = (1.0, 0.05, 1.0, 3.0, 0.2, 0.01, 1.0)  # of the gradients of each
EMBEDDING, NEVER, ON_ONE_RANK, GAPPED = 1, (2, 6), 3, 5  # numbers of parameters
UNUSED_ROWS = [4, 9, 10]
KINDS: dict[str, type[CompressedOptimizer]] = {"adam": OneBitAdam, "lamb": OneBitLamb, "zero_one": ZeroOneAdam}


@dataclass(frozen=True)
class Case:
    kind: str = "adam"
    world: int = 2
    dtype: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 10
    num_rising: int = 0  # steps of a learning rate that rises; it falls a little otherwise
    bad: tuple[int, int, float] | None = None  # step, rank and what one gradient of it holds then
    has_gaps: bool = False  # nobody has a gradient of one parameter in some steps
    saved_at: int | None = None  # everything is built again after so many steps
    size: float = 1.0  # of all gradients
    is_by_hand: bool = False  # freeze() is called where the options name a step
    is_torn: bool = False  # the sums of second moments that other ranks than the first see never settle

    def rate(self, step: int) -> float:
        return (step + 1) / self.num_rising if step < self.num_rising else 1.0 / (1.0 + 0.05 * step)

    def has_gradient(self, step: int, rank: int, i: int) -> bool:
        if i in NEVER or (i == ON_ONE_RANK and step % 2 and rank):
            return False
        return not (self.has_gaps and i == GAPPED and step % 4 >= 2)

    def gradient(self, step: int, rank: int, i: int, weight: Tensor) -> Tensor | None:
        """Towards a target, with noise of this rank and step."""
        if not self.has_gradient(step, rank, i):
            return None
        pull = 0.3 * (weight.detach().float() - target(i))
        found = (self.size * SIZES[i]) * (pull + noise(pull.numel(), 7, step, rank, i).view(pull.shape))
        if i == EMBEDDING:
            found[UNUSED_ROWS] = 0.0
        if self.bad is not None and self.bad[:2] == (step, rank) and i == GAPPED:
            found.view(-1)[77] = self.bad[2]
        return found.to(weight.dtype)


def target(i: int) -> Tensor:
    shape = FLAT_SHAPES[i]
    return noise(math.prod(shape), 8, i).view(shape)


def first_weights(dtype: str, rank: int = 0) -> list[Tensor]:
    return [
        target(i).add(noise(target(i).numel(), 9, i, rank).view(shape)).to(DTYPES[dtype])
        for i, shape in enumerate(FLAT_SHAPES)
    ]


def loss(params: Sequence[Tensor]) -> float:
    return float(sum((param.detach().float() - target(i)).square().sum() for i, param in enumerate(params)))


def build(case: Case, group: Group, weights: Sequence[Tensor]) -> tuple[list[nn.Parameter], CompressedOptimizer]:
    params = [nn.Parameter(weight.detach().clone()) for weight in weights]
    split = len(SHAPES[0])
    given = [{**GROUPS[0], "params": params[:split]}, {**GROUPS[1], "params": params[split:]}]
    make: Callable[..., CompressedOptimizer] = KINDS[case.kind]
    options = {**case.options, "freeze_step": 1000} if case.is_by_hand else case.options
    return params, make(given, group=group, **options)


def set_gradients(case: Case, step: int, rank: int, params: Sequence[nn.Parameter], optimizer: Any) -> None:
    for i, param in enumerate(params):
        param.grad = case.gradient(step, rank, i, param)
    for given, own in zip(optimizer.param_groups, GROUPS, strict=True):
        given["lr"] = own["lr"] * case.rate(step)


def is_in_step(optimizer: CompressedOptimizer) -> bool:
    return optimizer.is_in_step if isinstance(optimizer, ZeroOneAdam) else True


def states_of(optimizer: CompressedOptimizer, name: str) -> list[Tensor]:
    """Of all parameters, in their order; none where there are none."""
    state = optimizer.state_dict()["state"]
    return [state[i][name] for i in range(len(state)) if name in state[i]]


def train(group: Group, case: Case) -> dict[str, Any]:
    sent = group.sent_bytes
    params, optimizer = build(case, group, first_weights(case.dtype, group.rank))  # the first rank's are taken
    if case.is_torn and group.rank:
        numbers = iter(range(1000))
        optimizer._total = lambda: 2.0 ** next(numbers)  # type: ignore[attr-defined]
    trace = []
    for step in range(case.num_steps):
        if step == case.saved_at:
            saved = optimizer.state_dict()
            weights = [param.detach().clone() for param in params]
            for later in range(step, step + 2):  # what happens to the old one is nothing to the new one
                set_gradients(case, later, group.rank, params, optimizer)
                optimizer.step()
            params, optimizer = build(case, group, weights)
            optimizer.load_state_dict(saved)
        set_gradients(case, step, group.rank, params, optimizer)
        optimizer.step()
        if case.is_by_hand and isinstance(optimizer, FreezingOptimizer) and step + 1 >= case.options["freeze_step"]:
            optimizer.freeze()  # a second time it does nothing
        trace.append(_record(params, optimizer))
    values = [param.detach().float().reshape(-1).tolist() for param in params]
    return {"trace": trace, "values": values, "loss": loss(params), "sent": optimizer.sent_bytes - sent}


def _record(params: Sequence[Tensor], optimizer: CompressedOptimizer) -> dict[str, Any]:
    """After a step."""
    found = {"params": digest(params), "in_step": is_in_step(optimizer), "norm": optimizer.grad_norm}
    found |= {"num_steps": optimizer.num_steps, "num_skipped": optimizer.num_skipped}
    found["frozen"] = getattr(optimizer, "frozen_step", None)
    if is_in_step(optimizer):
        state = optimizer.state_dict()["state"]
        for name in ("exp_avg", "exp_avg_sq", "worker_error", "server_error", "master"):
            found[name] = digest(state[i][name] for i in range(len(state)) if name in state[i])
    return found


def train_all(rank: int, world: int, cases: Mapping[str, Case], moving: Mapping[str, Case]) -> dict[str, Any]:
    """Cases as they are; some that are saved on all ranks and go on with fewer; and on two ranks what is refused."""
    known = groups(world)
    found = {name: train(known[case.world], case) for name, case in cases.items() if case.world in known}
    found["moved"] = {name: move(known, case) for name, case in moving.items()}
    found["refused"] = refuse(known[2]) if 2 in known else {}
    return found


# Saving.


def move(known: Mapping[int, Group], case: Case) -> dict[str, Any]:
    """Save on all ranks after half of the steps, go on with fewer; errors and losses of all."""
    group, half = known[case.world], case.num_steps // 2
    params, optimizer = build(case, group, first_weights(case.dtype))
    for step in range(half):
        set_gradients(case, step, group.rank, params, optimizer)
        optimizer.step()
    own = {name: _flat(states_of(optimizer, name)) for name in ("worker_error", "server_error")}
    saved, weights = optimizer.portable_state_dict(), [param.detach().clone() for param in params]
    found: dict[str, Any] = {"before": own, "half": loss(params), "after": {}}
    for size, fewer in known.items():
        params, optimizer = build(replace(case, world=size), fewer, weights)
        optimizer.load_state_dict(saved)
        states = {name: digest(states_of(optimizer, name)) for name in ("exp_avg", "exp_avg_sq", "master")}
        moved = {name: _flat(states_of(optimizer, name)) for name in ("worker_error", "server_error")}
        for step in range(half, case.num_steps):
            set_gradients(case, step, fewer.rank, params, optimizer)
            optimizer.step()
        found["after"][size] = {**moved, "states": states, "loss": loss(params), "params": digest(params)}
    return found


def _flat(tensors: Sequence[Tensor]) -> list[float]:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()


def refuse(group: Group) -> dict[str, str]:
    """What each wrong state is answered with, and whether anything had changed then."""
    case, rank, world = Case(options={"freeze_step": 2}), group.rank, group.world
    params, optimizer = build(case, group, first_weights(case.dtype))
    for step in range(4):
        set_gradients(case, step, rank, params, optimizer)
        optimizer.step()
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "kind": lambda saved: saved["compression"].update(kind="OneBitLamb"),
        "no kind": lambda saved: saved.pop("compression"),
        "rank": lambda saved: saved["compression"].update(rank=(rank + 1) % world),
        "world": lambda saved: saved["compression"].update(world=world + 1),
        "shape": lambda saved: saved["state"][5].update(exp_avg_sq=torch.zeros(33, 4)),
        "shape of an error": lambda saved: saved["state"][6].update(worker_error=torch.zeros(4)),
        "a parameter less": lambda saved: saved["state"].pop(6),
        "groups": lambda saved: saved["param_groups"].pop(),
        "sizes of groups": lambda saved: saved["param_groups"][0]["params"].pop(),
        "nothing": lambda saved: saved.clear(),
    }
    before, found = _everything(params, optimizer), {}
    for name, change in changes.items():
        saved = _with_other_numbers(optimizer.state_dict())
        change(saved)
        try:
            optimizer.load_state_dict(saved)
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[name] += "" if _everything(params, optimizer) == before else " CHANGED"
    return found


def _with_other_numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """So that what is taken over by mistake shows."""
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1.0
    for given in saved["param_groups"]:
        given["lr"] = 17.0
    saved["compression"]["num_steps"] = 1000
    return saved


def _everything(params: Sequence[Tensor], optimizer: CompressedOptimizer) -> Any:
    rates = [given["lr"] for given in optimizer.param_groups]
    return _record(params, optimizer), rates
