# SPDX-License-Identifier: Apache-2.0
"""Compares the native kernels with their references (`rules.reference`), bit for bit, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from twinflow import native
from twinflow.rules import RULES, Rule, reference
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store, new_store

# The options of all rules. Each rule reads only its own options.
OPTIONS: Final[dict[str, Any]] = {
    **{name: value for rule in RULES.values() for name, value in rule.defaults.items()},
    **{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "lr_decay": 0.01, "momentum": 0.9},
}
_DTYPES: Final = ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    rule: Rule
    format: str
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    out_of_place: bool
    split: bool = False

    def __str__(self) -> str:
        weight = self.weight_dtype if self.weight_dtype is not None else "no weight"
        master = ", split master" if self.split else ""
        place = "out of place" if self.out_of_place else "in place"
        return f"{self.rule.name}, {self.format} state, {self.grad_dtype} gradient, {weight}{master}, {place}"


def cases() -> Iterator[Case]:
    """Every rule and format, in place and out of place, with each pair of `_DTYPES`, bf16 also with split master."""
    formats = [(rule, format) for rule in RULES.values() for format in rule.formats]
    for (rule, format), (grad_dtype, weight_dtype) in product(formats, _DTYPES):
        for split in (False, True) if weight_dtype == torch.bfloat16 else (False,):
            for out_of_place in (False, True):
                yield Case(rule, format, grad_dtype, weight_dtype, out_of_place, split)


def disagreements(numel: int = 20_077) -> list[str]:
    """Names of the kernels whose results differ from the references in at least one bit. Empty if all are equal.

    The default `numel` needs more than one task of the thread pool, and is not a multiple of the block size or of the
    vector width.
    """
    found = [f"update: {case}" for case in cases() if not _agrees(case, numel)]
    values = _random(numel, seed=3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = values.to(dtype)
        if native.sum_squares([given]) != reference.sum_squares([given]):
            found.append(f"sum of squares: {dtype}")
        ours, truth = values.clone(), values.clone()
        native.accumulate(ours, given)
        reference.accumulate(truth, given)
        if not same_bits(ours, truth):
            found.append(f"accumulate: {dtype}")
    return found


def _agrees(case: Case, numel: int) -> bool:
    """Compare after two steps, so that the second step starts from states that are not zero."""
    results = []
    for update in (native.update, reference.update):
        weight = torch.zeros(numel, dtype=case.weight_dtype) if case.weight_dtype is not None else None
        store = new_store(case.rule, case.format, _random(numel, seed=1), weight, split=case.split)
        update([_segment(case, store, step=1, target=None)])
        target = store.empty_like() if case.out_of_place else None
        update([_segment(case, store, step=2, target=target)])
        results.append(_tensors(store) + (_tensors(target) if target is not None else []))
    return all(same_bits(ours, truth) for ours, truth in zip(*results, strict=True))


def _segment(case: Case, store: Store, step: int, target: Store | None) -> Segment:
    grad = _random(store.master.numel(), seed=10 + step)
    grad[::7] = 0.0
    grad[3::11] *= 1e-38  # subnormal after multiplication by the factor
    hyper = case.rule.hyper(OPTIONS, step)
    key = rounding_key(step, parameter=5)
    return Segment(case.rule, hyper, grad.to(case.grad_dtype), store, factor=0.3, key=key, target=target)


def _random(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _tensors(store: Store) -> list[Tensor]:
    return [t for t in (store.master, store.weight, *store.states, *store.scales) if t is not None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether bit patterns are equal. Here NaN equals itself, and -0 differs from +0."""
    dtype = _BITS[a.element_size()]
    return torch.equal(a.view(dtype), b.view(dtype))
