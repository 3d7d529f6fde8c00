# SPDX-License-Identifier: Apache-2.0
"""What several test files share: comparing stores bit by bit, making them, and cutting a large matrix down."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from twinflow.config.fields import DiskIo
from twinflow.offload import state_file
from twinflow.rules import RULES, Rule
from twinflow.rules.segment import FLOATS, Store, encode_state, new_store

# One set of options for all rules: each reads its own.
OPTIONS: dict[str, Any] = {name: value for rule in RULES.values() for name, value in rule.defaults.items()}
OPTIONS |= {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "lr_decay": 0.01, "momentum": 0.9}
WEIGHTS = (None, *FLOATS)
# every rule x state format x gradient dtype x weight dtype
CELLS = [
    (rule.name, format, grad, weight)
    for rule in RULES.values()
    for format in rule.formats
    for grad, weight in itertools.product(FLOATS, WEIGHTS)
]


def cell_name(cell: tuple[Any, ...]) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in cell)


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A small set of combinations in which every pair of values of two axes occurs together."""
    return pairwise_of(itertools.product(*axes))


def pairwise_of(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A small set of these cells in which every pair of values that occurs together in any of them still does.

    Among equally good cells the first is taken: put cheap ones first.
    """
    pairs = {cell: _pairs(cell) for cell in cells}
    wanted = set().union(*pairs.values())
    chosen = []
    while wanted:
        best = max(pairs, key=lambda cell: len(wanted & pairs[cell]))
        chosen.append(best)
        wanted -= pairs[best]
    return chosen


def _pairs(combination: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(combination), 2)}


def buffers(store: Store) -> dict[str, Tensor]:
    named = {
        "master": store.master,
        "weight": store.weight,
        "first": store.states[0],
        "second": store.states[1],
        "first scale": store.scales[0],
        "second scale": store.scales[1],
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def clone(store: Store) -> Store:
    copy = store.empty_like()
    for name, tensor in buffers(copy).items():
        tensor.copy_(buffers(store)[name])
    return copy


def poisoned(store: Store) -> Store:
    """Fresh buffers full of 0xFF, which is NaN in every float: an element that is not written shows."""
    copy = store.empty_like()
    for tensor in buffers(copy).values():
        as_integers(tensor).fill_(-1 if tensor.element_size() > 1 else 255)
    return copy


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(a: Store, b: Store, note: str = "") -> None:
    for name, tensor in buffers(a).items():
        x, y = as_integers(tensor), as_integers(buffers(b)[name])
        if not torch.equal(x, y):
            where = (x != y).nonzero()[:3].flatten().tolist()
            raise AssertionError(f"{note} {name} differs at {where}: {tensor[where]} and {buffers(b)[name][where]}")


def make_store(
    rule: Rule,
    format: str,
    weight: torch.dtype | None,
    numel: int,
    seed: int = 0,
    split: bool | None = None,
    master: str = "fp32",
) -> Store:
    """A store in the middle of training: weights of order 1, momentum 1e-3, variance 1e-6."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    room = torch.zeros(numel, dtype=weight) if weight else None
    store = new_store(rule, format, values, room, split=split, master=master)
    moments = torch.randn(numel, generator=generator) * 1e-3
    encode_state(store, 0, moments, 0, (1, 2))
    encode_state(store, 1, moments.square(), 0, (1, 2))
    return store


def make_gradient(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary numbers with zeros, tiny ones and subnormals among them."""
    generator = torch.Generator().manual_seed(seed + 1)
    grad = torch.randn(numel, generator=generator)
    scale = torch.tensor([1.0, 1.0, 1.0, 1e-4, 1e-20, 1e-31, 1e-38, 1e-42, 0.0])
    return (grad * scale[torch.randint(len(scale), (numel,), generator=generator)]).to(dtype)


def in_pairs(*axes: Sequence[Any]) -> list[Any]:
    """All combinations for parametrize: in the quick suite enough of them for every pair of values, else the rest."""
    chosen = [tuple(cell) for cell in pairwise(*axes)]
    marks = [pytest.mark.matrix]
    return [pytest.param(*cell, marks=[] if cell in chosen else marks) for cell in itertools.product(*axes)]


NO_MEMORY = "/proc/self/mem"  # reads and writes at addresses without memory, such as 0, fail with EIO


def use_disk_io(io: DiskIo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `io` read and write the state on a disk. Skips the test if the kernel refuses io_uring."""
    if io == state_file.IO_URING and (refusal := state_file.ring_refusal()) is not None:
        pytest.skip(f"no io_uring: {refusal}")
    monkeypatch.setattr(state_file, "AUTO", io)


@contextmanager
def another_file(fd: int, path: str) -> Iterator[None]:
    """Lets a file descriptor refer to the file at `path`, which fails as a broken or full disk does."""
    kept, other = os.dup(fd), os.open(path, os.O_RDWR)
    try:
        os.dup2(other, fd)
        yield
    finally:
        os.dup2(kept, fd)
        os.close(other)
        os.close(kept)
