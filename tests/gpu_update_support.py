# SPDX-License-Identifier: Apache-2.0
"""Cases of the fused GPU update: run on CUDA, or on the CPU in Triton's interpreter.

The interpreter is chosen when Triton is first imported, so it gets a process of its own:
`TRITON_INTERPRET=1 python tests/gpu_update_support.py CASE ...` prints a line of JSON for each case. Without the
variable the same runs them on CUDA, and without names it runs all there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from interpreter_support import run_cases
from support import OPTIONS, as_integers, buffers, clone, make_gradient, make_store, pairwise
from torch import Tensor

from twinflow import native
from twinflow.gpu import FusedUpdate, Numbers, Piece
from twinflow.rules import RULES, Rule, reference
from twinflow.rules.formats import BLOCK, join, rounding_key
from twinflow.rules.segment import FLOATS, Segment, Store, new_states

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULE_FORMATS = [(rule.name, format) for rule in RULES.values() for format in rule.formats]
SMALL = (1, 1500, 128, 127, 1024)  # below, at and above a block; below, at and above a tile


@dataclass(frozen=True)
class Case:
    """Some steps of one bucket."""

    rule: str
    format: str
    grad: torch.dtype
    weight: torch.dtype
    kind: str = "plain"  # or "bits": any bit pattern in any buffer; "shifted": no weight is aligned
    options: dict[str, Any] = field(default_factory=dict)
    is_stateless: bool = False  # SGD without momentum
    has_master: bool = True

    @property
    def name(self) -> str:
        parts = (self.rule, self.format, str(self.grad)[6:], str(self.weight)[6:], self.kind)
        options = [f"{key}={value}" for key, value in self.options.items()]
        flags = {"stateless": self.is_stateless, "no master": not self.has_master}
        return "-".join([*parts, *options, *(name for name, is_on in flags.items() if is_on)])


def _variants() -> list[Case]:
    """Options that take another path through a rule."""
    changes: dict[str, list[dict[str, Any]]] = {
        "adamw": [{"eps": 0.0}],
        "adagrad": [{"weight_decay": 0.0, "eps": 0.0}],
        "sgd": [{"nesterov": True}, {"dampening": 0.5}],
    }
    return [
        *(Case(rule, "fp32", BF16, BF16, options=options) for rule, sets in changes.items() for options in sets),
        Case("sgd", "fp32", BF16, BF16, "plain", {"weight_decay": 0.0, "momentum": 0.0}, True),
    ]


def _more_variants() -> list[Case]:
    """Each of those options in other rules, or with other options."""
    decays = {rule: {"weight_decay": 0.0} for rule in ("adamw", "adam", "lion", "sgd")}
    return [
        *(Case(rule, "fp32", BF16, BF16, options=options) for rule, options in decays.items()),
        *(Case(*pair, BF16, BF16, kind, has_master=False) for pair in RULE_FORMATS for kind in ("plain", "bits")),
        Case("sgd", "fp32", BF16, BF16, options={"weight_decay": 0.0, "momentum": 0.0}),
        Case("sgd", "bf16", FP16, FP32, "plain", {"momentum": 0.0}, True),
    ]


_MATRIX = [Case(*pair, grad, weight) for pair, grad, weight in itertools.product(RULE_FORMATS, FLOATS, FLOATS)]
_PAIRS = [Case(*pair, grad, weight) for pair, grad, weight in pairwise(RULE_FORMATS, FLOATS, FLOATS)]
_SHIFTED = [replace(case, kind="shifted") for case in _PAIRS[::24]]
_BITS = [replace(case, kind="bits") for case in _PAIRS[1::24]]
# Every rule in every format, with dtypes in turn; their pairs, and all of them, are in the matrix.
_FIRST = [[case for case in _PAIRS if (case.rule, case.format) == pair][i % 3] for i, pair in enumerate(RULE_FORMATS)]
_NO_MASTER = [Case("adamw", "4bit", BF16, BF16, has_master=False), Case("lion", "fp32", FP32, BF16, has_master=False)]
QUICK = [*_FIRST, *_SHIFTED, *_BITS, *_variants(), *_NO_MASTER]  # enough for the interpreter, which takes its time
DEFAULT = [*QUICK, *(case for case in _more_variants() if case not in QUICK)]
REST = [
    c for c in (replace(c, kind=kind) for c in _MATRIX for kind in ("plain", "bits", "shifted")) if c not in DEFAULT
]
CASES = {case.name: case for case in (*DEFAULT, *REST)}


@dataclass(frozen=True)
class Bucket:
    """Buffers of a whole bucket, and the weights of its pieces."""

    rule: Rule
    store: Store
    weights: list[Tensor]
    places: list[tuple[int, int, int]]  # offset, numel, first index
    is_shifted: bool

    def to(self, device: str) -> Bucket:
        """A copy, each weight in memory of its own, off by one element if it is shifted."""
        weights = []
        for weight in self.weights:
            room = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=device)
            weights.append(room[1:] if self.is_shifted else room[:-1])
            weights[-1].copy_(weight)
        moved = clone(self.store)
        states = [t.to(device) if t is not None else None for t in (*moved.states, *moved.scales)]
        store = Store(moved.format, moved.master.to(device), None, (states[0], states[1]), (states[2], states[3]))
        return replace(self, store=store, weights=weights)

    def pieces(self) -> list[Piece]:
        return [Piece(weight, *place) for weight, place in zip(self.weights, self.places, strict=True)]

    def part(self, index: int) -> Store:
        """One piece as the host kernels know it."""
        offset, numel, _ = self.places[index]
        part, weight = self.store.narrow(offset, numel), self.weights[index]
        is_master = weight.dtype == FP32 or not self.store.has_master
        return replace(part, master=weight) if is_master else replace(part, weight=weight)


def make_bucket(case: Case, numels: Sequence[int]) -> Bucket:
    """Pieces with gaps between them; what is in the gaps is NaN, or 255."""
    rule, places, offset = RULES[case.rule], [], BLOCK
    for i, numel in enumerate(numels):
        places.append((offset, numel, BLOCK * 1000 * i))
        offset += (numel + BLOCK - 1) // BLOCK * BLOCK + (BLOCK if i % 2 else 0)
    end = places[-1][0] + places[-1][1]
    states, scales = new_states(rule, case.format, end)
    if case.is_stateless:
        states = (None, None)
    master = FP32 if case.weight != BF16 else torch.int16 if case.has_master else BF16
    store = Store(case.format, torch.empty(end, dtype=master), None, states, scales)
    for tensor in buffers(store).values():
        as_integers(tensor).fill_(-1 if tensor.element_size() > 1 else 255)
    bucket = Bucket(rule, store, [torch.empty(n, dtype=case.weight) for n in numels], places, case.kind == "shifted")
    for i, numel in enumerate(numels):
        is_split = case.weight == BF16 and case.has_master
        master = "fp32" if case.has_master else "none"
        source = make_store(rule, case.format, case.weight, numel, seed=i, split=is_split, master=master)
        part = bucket.part(i)
        for name, tensor in buffers(part).items():
            tensor.copy_(buffers(source)[name])
        if case.kind == "bits":
            scramble(part, seed=i)
    return bucket


def scramble(store: Store, seed: int) -> None:
    """Any bit patterns, where they make sense: no negative variance, no code that the encoders never write."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in buffers(store).items():
        words = as_integers(tensor)
        limit = {1: 256, 2: 2**15, 4: 2**31}[tensor.element_size()]
        words.copy_(torch.randint(0 if tensor.element_size() == 1 else -limit, limit, words.shape, generator=generator))
        if tensor.dtype == torch.uint8:
            if store.format != "4bit":  # every 4-bit code may occur
                words.clamp_(max=247) if name == "second" else words.bitwise_and_(0xFE)
        elif name == "second":
            words.bitwise_and_(limit - 1)
        elif "scale" in name:  # as a finite block of flushed numbers has them, but for some
            tensor.copy_(2.0 ** torch.randint(-90, 100, words.shape, generator=generator))
            tensor[::5] = float("nan")
            tensor[1::5] = 0.0


def make_grads(case: Case, bucket: Bucket, step: int) -> Tensor:
    """Gradients of the whole bucket; NaN in the gaps."""
    end = sum(bucket.places[-1][:2])
    grads = torch.full((end,), float("nan"), dtype=case.grad)
    for i, (offset, numel, _) in enumerate(bucket.places):
        own = grads.narrow(0, offset, numel)
        own.copy_(make_gradient(numel, case.grad, seed=100 * step + i))
        if case.kind == "bits":
            scramble(Store("fp32", own), seed=100 * step + i)
    return grads


def make_numbers(case: Case, bucket: Bucket, step: int) -> dict[int, Numbers]:
    """Each piece has its own step and its own factor; in the second step two have no gradient."""
    found = {}
    for i in range(len(bucket.places)):
        options = {**OPTIONS, **case.options, "lr": OPTIONS["lr"] * (1 + i)}
        if step != 2 or i not in (1, 3):
            hyper = bucket.rule.hyper(options, step + i)
            found[i] = Numbers(hyper, 1.0 if i % 2 else 0.3 * (i + 1), rounding_key(step, i))
    return found


def truth(bucket: Bucket, grads: Tensor, numbers: dict[int, Numbers]) -> list[Segment]:
    """The same step as the host kernels and the references take it."""
    segments = []
    for index, (hyper, factor, key) in numbers.items():
        offset, numel, first_index = bucket.places[index]
        grad = grads.narrow(0, offset, numel)
        segments.append(Segment(bucket.rule, hyper, grad, bucket.part(index), factor, key, first_index))
    return segments


def run_case(case: Case, device: str, numels: Sequence[int] = SMALL) -> None:
    """Kernel, references on the same device and host kernels, step by step: all buffers have the same bits.

    A NaN's own bits differ between machines. With any bit pattern in the buffers the host kernels are left out: they
    promise their bits for states that they have written themselves.
    """
    start = make_bucket(case, numels)
    ours, reference_there, on_host = start.to(device), start.to(device), start.to("cpu")
    fused = FusedUpdate(ours.rule, ours.pieces(), has_master=case.has_master)
    for step in range(1, 2 if case.kind == "bits" else 4):
        host_grads, numbers = make_grads(case, start, step), make_numbers(case, start, step)
        grads = host_grads.to(device)
        if step == 2:  # a decision on the device: half of the factor; before that a step that is skipped
            fused(ours.store, grads, numbers, torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64, device=device))
            if device != "cpu":
                torch.cuda.synchronize()
            fused(ours.store, grads, numbers, torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64, device=device))
            numbers = {i: own._replace(factor=own.factor * 0.5) for i, own in numbers.items()}
        else:
            fused(ours.store, grads, numbers)
        reference.update(truth(reference_there, grads, numbers))
        if device != "cpu":
            torch.cuda.synchronize()  # as FusedUpdate wants it before the next call
        assert_same(case, ours, reference_there, f"step {step}, reference,")
        if case.kind != "bits":
            native.update(truth(on_host, host_grads, numbers))
            assert_same(case, ours, on_host, f"step {step}, host kernels,")


def assert_same(case: Case, a: Bucket, b: Bucket, note: str) -> None:
    """Bit by bit, the gaps too; where both are NaN, its sign and payload are not looked at."""
    for i, (x, y) in enumerate(zip(a.weights, b.weights, strict=True)):
        place = f"{note} weight of piece {i}"
        if case.weight == BF16 and case.has_master:  # the halves of a NaN mean nothing by themselves
            lower_a, lower_b = a.part(i).master, b.part(i).master
            equal(join(x, lower_a), join(y, lower_b), place)
            keep = ~x.isnan().cpu()
            equal(lower_a.cpu()[keep], lower_b.cpu()[keep], f"{place}, lower half")
        equal(x, y, place)
    ours, theirs = buffers(a.store), buffers(b.store)
    if case.weight != FP32 and case.has_master and case.kind == "bits":
        ours.pop("master"), theirs.pop("master")  # compared above, but for gaps
    for name, tensor in ours.items():
        equal(tensor, theirs[name], f"{note} {name}")


def equal(a: Tensor, b: Tensor, note: str) -> None:
    x, y = a.cpu(), b.cpu()
    differs = as_integers(x) != as_integers(y)
    if x.is_floating_point():
        differs &= ~(x.isnan() & y.isnan())
    if differs.any():
        where = differs.nonzero()[:3].flatten()
        raise AssertionError(f"{note} differs at {where.tolist()} of {x.numel()}: {x[where]} and {y[where]}")


def main() -> None:
    run_cases({name: partial(run_case, case) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
