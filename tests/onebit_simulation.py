# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam, 1-bit LAMB and 0/1 Adam of all ranks in one process: the truth that ranks are held against.

Plain arithmetic on flat tensors as the optimizers' docstrings define it, and codes/reference.py for what is packed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from onebit_cases import DTYPES, FLAT_SHAPES, GROUPS, SHAPES, Case, digest, first_weights
from torch import Tensor

from twinflow.codes import CODES, reference

EPS = 1e-8


@dataclass
class Flat:
    """A bucket as all ranks have it; weights and momentum are of each rank, equal while ranks are in step."""

    group: int
    numbers: list[int]  # of its parameters
    places: dict[int, slice]
    weights: Tensor  # [world, numel]
    m: Tensor
    v: Tensor
    workers: Tensor
    servers: Tensor
    exponents: Tensor | None = None
    steps: Counter[int] = field(default_factory=Counter)  # of each parameter
    seen: Counter[int] = field(default_factory=Counter)  # gradients that its v has
    coeffs: dict[int, float] = field(default_factory=dict)  # LAMB
    factors: dict[int, float] = field(default_factory=dict)
    fresh: Tensor | None = None
    shared: Tensor | None = None  # 0/1 Adam: what all had at the last exchange
    added: Tensor | None = None  # since then, and the three of each parameter below
    rates: dict[int, float] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)
    eps: dict[int, float] = field(default_factory=dict)


def layout(case: Case) -> Iterator[Flat]:
    """Parameters at multiples of 128, buckets of a multiple of 128 for each rank."""
    most, values, first = case.options.get("bucket_numel", 1 << 24), first_weights(case.dtype), 0
    for group, shapes in enumerate(SHAPES):
        chunks: list[list[int]] = [[]]
        room = 0
        for i in range(first, first + len(shapes)):
            size = -(-values[i].numel() // 128) * 128
            if chunks[-1] and room + size > most:
                chunks.append([])
                room = 0
            chunks[-1].append(i)
            room += size
        first += len(shapes)
        for numbers in chunks:
            places, end = {}, 0
            for i in numbers:
                places[i] = slice(end, end + values[i].numel())
                end += -(-values[i].numel() // 128) * 128
            numel = -(-end // (128 * case.world)) * 128 * case.world
            weights = torch.zeros(numel)
            for i, place in places.items():
                weights[place] = values[i].float().view(-1)
            weights = weights.repeat(case.world, 1)
            m, workers, v, servers = (torch.zeros_like(like) for like in (weights, weights, weights[0], weights[0]))
            yield Flat(group, numbers, places, weights, m, v, workers, servers)


class Simulation:
    """All ranks of a case.

    `norms` are those that ranks have found: one may differ from another in its last bits, by the order of a sum, and
    with it everything that is clipped by it. Whether they are right is seen from `norm`.
    """

    def __init__(self, case: Case, norms: Sequence[float] = ()) -> None:
        self.norms = norms
        self.is_corrected = case.options.get("bias_correction", True)
        self.case, self.world, self.code = case, case.world, CODES[case.options.get("code", "1bit")]
        self.flats = list(layout(case))
        self.num_steps = self.num_skipped = 0
        self.frozen: int | None = None
        self.norm = 0.0
        self.sums: list[float] = []
        self.num_level = 0  # steps since the learning rate last rose
        self.last_rate = -math.inf
        self.interval, self.count = 1, 0  # 0/1 Adam
        self.local_interval, self.local_count, self.since = 1, 0, 0
        self.means: list[dict[int, Tensor]] = []  # the true mean gradients of each step in full precision, clipped

    # Numbers of a step.

    def options(self, flat: Flat) -> dict[str, Any]:
        given = GROUPS[flat.group]
        return {**given, "lr": given["lr"] * self.rate, "eps": EPS}

    def param(self, rank: int, flat: Flat, i: int) -> Tensor:
        return flat.weights[rank, flat.places[i]].view(FLAT_SHAPES[i]).to(DTYPES[self.case.dtype])

    def step(self, step: int) -> None:
        self.rate, self.number = self.case.rate(step), step
        dtype = DTYPES[self.case.dtype]
        given = []  # of each bucket: [world, numel]
        hits = set()
        for flat in self.flats:
            grads = torch.zeros(self.world, flat.v.numel(), dtype=dtype)
            for rank, i in itertools.product(range(self.world), flat.numbers):
                grad = self.case.gradient(step, rank, i, self.param(rank, flat, i))
                if grad is not None:
                    hits.add(i)
                    grads[rank, flat.places[i]] = grad.view(-1)
            given.append(grads)
        norms = torch.stack([grads.double().square().sum(1) for grads in given]).sum(0).sqrt()
        if not norms.isfinite().all():
            self.num_skipped += 1
            self.norm = math.nan
            return
        self.num_steps += 1
        {"adam": self.adam, "lamb": self.lamb, "zero_one": self.zero_one}[self.case.kind](given, hits, norms)

    def mean(self, given: list[Tensor]) -> list[Tensor]:
        """Shares summed in the order of ranks, rounded to what travels; clipped."""
        means = []
        for grads in given:
            shares = (grads * (1.0 / self.world)).float()
            total = shares[0]
            for share in shares[1:]:
                total = total + share
            means.append(total.to(grads.dtype).float())
        self.norm = math.sqrt(sum(float(mean.double().square().sum()) for mean in means))
        factor = self.clip()
        true = {}
        for flat, grads in zip(self.flats, given, strict=True):
            true |= {i: grads[:, place].double().mean(0) * factor for i, place in flat.places.items()}
        self.means.append(true)
        return [mean * factor for mean in means]

    def bounded(self, norms: Tensor) -> float:
        self.norm = float(norms.mean())
        return self.clip()

    def clip(self) -> float:
        most = self.case.options.get("max_grad_norm", math.inf)
        norm = self.norms[self.number] if self.norms else self.norm
        return 1.0 if norm <= most else most / (norm + 1e-6)

    def exchange(self, flat: Flat, given: Tensor, factor: float, base: Tensor | None, base_factor: float) -> Tensor:
        """The mean of all ranks' `given` and `base`, there and back in few bits."""
        world, code, assigned = self.world, self.code, flat.exponents
        assert assigned is not None
        part = flat.v.numel() // world
        rows = torch.empty(world * world, code.row_bytes(part), dtype=torch.uint8)
        error = flat.workers.view(-1)
        reference.encode(
            code,
            rows,
            given.reshape(-1),
            error,
            factor=factor,
            base=base.reshape(-1) if base is not None else None,
            base_factor=base_factor,
            exponents=assigned.repeat(world),
        )
        means = torch.empty(world, part)
        for owner in range(world):
            reference.mean(code, means[owner], rows[owner::world])
        packed = torch.empty(world, code.row_bytes(part), dtype=torch.uint8)
        reference.encode(code, packed, means.view(-1), flat.servers, exponents=assigned, is_scaled=False)
        out = torch.empty(flat.v.numel())
        reference.decode(code, out, packed, exponents=assigned)
        return out

    # 1-bit Adam.

    def adam(self, given: list[Tensor], hits: set[int], norms: Tensor) -> None:
        if self.frozen is not None:
            self.adam_compressed(given, hits, self.bounded(norms))
            return
        means = self.mean(given)
        for flat, grad in zip(self.flats, means, strict=True):
            self.adam_plain(flat, grad, hits)
        self.maybe_freeze()

    def adam_plain(self, flat: Flat, grad: Tensor, hits: set[int]) -> None:
        b1, b2 = self.options(flat)["betas"]
        for i in hits & set(flat.numbers):
            place = flat.places[i]
            flat.steps[i] += 1
            flat.seen[i] += 1
            g, m, v = grad[place], flat.m[:, place], flat.v[place]
            m += (g - m) * (1.0 - b1)
            v.copy_(b2 * v + ((1.0 - b2) * g) * g)
            self.move(flat, i)

    def adam_compressed(self, given: list[Tensor], hits: set[int], factor: float) -> None:
        for flat, grads in zip(self.flats, given, strict=True):
            b1 = self.options(flat)["betas"][0]
            flat.m = self.exchange(flat, grads, (1.0 - b1) * factor, flat.m, b1).repeat(self.world, 1)
            for i in hits & set(flat.numbers):
                flat.steps[i] += 1
                self.move(flat, i)

    def numbers(self, flat: Flat, i: int) -> tuple[float, float, float]:
        """Step size, eps and what is left of a weight, with both biases in the first two."""
        options = self.options(flat)
        b1, b2 = options["betas"]
        second = math.sqrt(1.0 - b2 ** max(1, flat.seen[i])) if self.is_corrected else 1.0
        size = options["lr"] * second / (1.0 - b1 ** flat.steps[i] if self.is_corrected else 1.0)
        return size, EPS * second, 1.0 - options["lr"] * options["weight_decay"]

    def move(self, flat: Flat, i: int) -> None:
        place, (size, eps, kept) = flat.places[i], self.numbers(flat, i)
        move = flat.m[:, place] / (flat.v[place].double().sqrt().float() + fp32(eps))
        flat.weights[:, place] = flat.weights[:, place] * fp32(kept) - fp32(size) * move

    def maybe_freeze(self) -> None:
        at = self.case.options["freeze_step"]
        is_settled = at is not None and self.num_steps >= at
        if at is None:
            total = 0.0
            for flat in self.flats:
                b2 = self.options(flat)["betas"][1]
                total += float(flat.v.sum(dtype=torch.float64)) / (1.0 - b2 ** max(1, *flat.steps.values()))
            self.sums.append(total)
            window, threshold = self.case.options["freeze_window"], self.case.options["freeze_threshold"]
            self.num_level = 0 if self.rate > self.last_rate else self.num_level + 1
            if len(self.sums) > window and self.num_level >= window:
                least, most = sorted((self.sums[-1 - window], total))
                is_settled = least / most >= threshold
            self.last_rate = self.rate
        if is_settled:
            self.frozen = self.num_steps
            for flat in self.flats:
                for place in flat.places.values() if self.case.kind == "adam" else ():
                    seen = flat.v[place] != 0
                    if bool(seen.any()):  # nothing below the power of two under a tenth of the mean
                        mean = float(flat.v[place][seen].double().mean())
                        flat.v[place][seen] = flat.v[place][seen].clamp(min=2.0 ** math.floor(math.log2(mean / 10.0)))
                flat.exponents = reference.exponents_of(flat.v, EPS)
                flat.fresh = flat.v.clone()

    # 1-bit LAMB.

    def lamb(self, given: list[Tensor], hits: set[int], norms: Tensor) -> None:
        if self.frozen is None:
            means = self.mean(given)
            for flat, grad in zip(self.flats, means, strict=True):
                self.lamb_plain(flat, grad, hits)
            self.maybe_freeze()
            return
        factor = self.bounded(norms)
        for flat, grads in zip(self.flats, given, strict=True):
            self.lamb_compressed(flat, grads, hits, factor)

    def lamb_plain(self, flat: Flat, grad: Tensor, hits: set[int]) -> None:
        options = self.options(flat)
        b1, b2 = options["betas"]
        for i in flat.numbers:
            if i not in hits:
                continue
            place = flat.places[i]
            flat.steps[i] += 1
            flat.seen[i] += 1
            g, m, v = grad[place], flat.m[0, place], flat.v[place]
            m.lerp_(g, 1.0 - b1)
            flat.m[1:, place] = m
            v.mul_(b2).addcmul_(g, g, value=1.0 - b2)
            first, second = 1.0 - b1 ** flat.steps[i], 1.0 - b2 ** flat.seen[i]
            move = ((m / first) / ((v / second).sqrt() + EPS)).add(
                flat.weights[0, place], alpha=options["weight_decay"]
            )
            ratio = float(flat.weights[0, place].norm()) / float(move.norm())
            ratio = min(max(ratio, 0.01), 10.0)
            flat.coeffs[i] = 0.9 * flat.coeffs[i] + (1.0 - 0.9) * ratio if i in flat.coeffs else ratio
            flat.weights[:, place] = flat.weights[0, place].sub(move, alpha=options["lr"] * ratio)

    def lamb_compressed(self, flat: Flat, grads: Tensor, hits: set[int], factor: float) -> None:
        options = self.options(flat)
        b1, b2 = options["betas"]
        before = flat.m[0].clone()
        mean = self.exchange(flat, grads, (1.0 - b1) * factor, flat.m, b1)
        flat.m = mean.repeat(self.world, 1)
        implied = (mean - before * b1) * (1.0 / (1.0 - b1))
        assert flat.fresh is not None
        flat.fresh.mul_(b2).addcmul_(implied, implied, value=1.0 - b2)
        for i in hits & set(flat.numbers):
            place = flat.places[i]
            flat.steps[i] += 1
            v, second = flat.v[place], 1.0 - b2 ** flat.seen[i]
            frozen = (v / second).sqrt() + EPS
            fresh = (flat.fresh[place] / second).sqrt() + EPS
            wanted = min(max(float((frozen / fresh).max()), 0.5), 4.0)
            last = flat.factors.get(i, 1.0)
            flat.factors[i] = min(max(wanted, last * 0.9), last * (1.0 + 0.1))
            move = torch.where(v != 0, (mean[place] / (1.0 - b1 ** flat.steps[i])) / frozen, 0.0)
            move = move.add(flat.weights[0, place], alpha=options["weight_decay"])
            size = options["lr"] * (flat.coeffs[i] * flat.factors[i])
            flat.weights[:, place] = flat.weights[0, place].sub(move, alpha=size)

    # 0/1 Adam.

    def zero_one(self, given: list[Tensor], hits: set[int], norms: Tensor) -> None:
        options = self.case.options
        if self.num_steps > options["var_freeze_step"]:
            self.local(given, hits, self.bounded(norms))
        elif self.num_steps % self.interval:
            self.adam_compressed(given, hits, self.bounded(norms))
        else:
            means = self.mean(given)
            for flat, grad in zip(self.flats, means, strict=True):
                self.adam_plain(flat, grad, hits)
                self.new_exponents(flat)
            self.count += 1
            if self.count == options["var_update_scaler"]:
                self.interval, self.count = 2 * self.interval, 0

    def new_exponents(self, flat: Flat) -> None:
        """Errors are what they were, in new units."""
        old, flat.exponents = flat.exponents, reference.exponents_of(flat.v, EPS)
        if old is not None:
            unit = torch.where(old != 0, torch.pow(2.0, flat.exponents.float() - old.float()), 0.0)
            flat.workers *= unit
            flat.servers *= unit

    def local(self, given: list[Tensor], hits: set[int], factor: float) -> None:
        self.since += 1
        is_due = self.since >= self.local_interval
        for flat, grads in zip(self.flats, given, strict=True):
            self.local_step(flat, grads, hits, factor, is_due)
        if is_due:
            self.since = 0
        self.local_count += 1
        if self.local_count == self.case.options["local_step_scaler"]:
            self.local_interval = min(2 * self.local_interval, self.case.options["local_step_clipper"])
            self.local_count = 0

    def local_step(self, flat: Flat, grads: Tensor, hits: set[int], factor: float, is_due: bool) -> None:
        b1 = self.options(flat)["betas"][0]
        if flat.shared is None or flat.added is None:
            flat.shared, flat.added = flat.weights[0].clone(), torch.zeros_like(flat.weights)
        flat.m.mul_(b1).add_(grads, alpha=(1.0 - b1) * factor)
        flat.m *= flat.v != 0
        for i in hits & set(flat.numbers):
            flat.steps[i] += 1
            size, flat.eps[i], kept = (fp32(x) for x in self.numbers(flat, i))
            flat.added[:, flat.places[i]].add_(flat.m[:, flat.places[i]], alpha=size)
            flat.rates[i] = flat.rates.get(i, 0.0) + size
            flat.kept[i] = flat.kept.get(i, 1.0) * kept
            self.move(flat, i)
        if is_due:
            self.take_over(flat, flat.shared, flat.added)

    def take_over(self, flat: Flat, shared: Tensor, added: Tensor) -> None:
        """All that was added, over the rates, is the mean momentum of all steps. What had no gradient stays."""
        for i, place in flat.places.items():
            added[:, place] = added[:, place] * (1.0 / flat.rates[i]) if i in flat.rates else flat.m[:, place]
        mean = self.exchange(flat, added, 1.0, None, 0.0)
        flat.m = mean.repeat(self.world, 1)
        for i, rate in flat.rates.items():
            place = flat.places[i]
            move = mean[place] / (flat.v[place].sqrt() + flat.eps[i])
            shared[place] = (shared[place] * flat.kept[i]).sub(move, alpha=rate)
        flat.weights = shared.repeat(self.world, 1)
        flat.rates, flat.kept = {}, {}
        added.zero_()

    # What ranks record.

    def record(self, rank: int) -> dict[str, Any]:
        owner = {i: flat for flat in self.flats for i in flat.numbers}
        numbers = range(len(FLAT_SHAPES))
        is_in_step = self.since == 0
        params = [self.param(rank, owner[i], i) for i in numbers]
        found = {"params": digest(params), "in_step": is_in_step, "frozen": self.frozen}
        found |= {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        if is_in_step:
            found["exp_avg"] = digest(owner[i].m[rank, owner[i].places[i]] for i in numbers)
            found["exp_avg_sq"] = digest(owner[i].v[owner[i].places[i]] for i in numbers)
            if self.frozen is not None and self.num_steps > self.frozen:
                found["worker_error"] = digest(owner[i].workers[rank, owner[i].places[i]] for i in numbers)
        return found


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))
