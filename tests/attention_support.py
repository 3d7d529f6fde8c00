# SPDX-License-Identifier: Apache-2.0
"""Cases of block-sparse attention in Triton: run on CUDA, or on the CPU in Triton's interpreter.

The interpreter is chosen when Triton is first imported, so it gets a process of its own:
`TRITON_INTERPRET=1 python tests/attention_support.py CASE ...` prints a line of JSON for each case. Without the
variable the same runs them on CUDA, at larger sizes, and without names it runs all there are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from interpreter_support import run_cases
from support import pairwise
from torch import Tensor

from twinflow.attention import patterns
from twinflow.attention.extras import Extras
from twinflow.attention.layout import Layout, from_dense
from twinflow.attention.operators import attend
from twinflow.attention.reference import dense_attention
from twinflow.attention.tiles import Span, Work, tile_plan
from twinflow.attention.tuning import Tuning, Tunings, tunings_for

STRUCTURES = ("dense", "fixed", "variable", "bigbird", "longformer", "sliding", "random")
BLOCKS = (16, 32, 64, 128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3}  # of the largest element
# Small, and such that tiles are larger and smaller than blocks on either side: own, other.
SMALL_TILES = {16: (64, 32), 32: (64, 64), 64: (32, 64), 128: (128, 64)}
SMALL_LENGTHS = {16: 75, 32: 103, 64: 139, 128: 261}
LARGE_LENGTHS = {16: 203, 32: 299, 64: 391, 128: 647}


@dataclass(frozen=True)
class Case:
    """One forward and backward."""

    structure: str
    block: int
    dtype: str = "fp32"
    is_causal: bool = False
    extra: str = "none"
    head_dim: int | None = None
    heads: tuple[int, int] = (2, 2)  # of queries, and of keys
    batch: int = 1
    cached: int = 0  # keys before the first query
    is_cut: bool = False  # every row that can be
    is_default: bool = False  # the tiles of the table, in the interpreter too
    is_strided: bool = False  # [batch, tokens, heads, dim] in memory

    @property
    def name(self) -> str:
        parts: list[object] = [self.structure, self.block, self.dtype, "causal" if self.is_causal else "both"]
        parts += [self.extra, *(f"{key}={getattr(self, key)}" for key in _DEFAULTS if self._differs(key))]
        return "-".join(str(part).replace(" ", "") for part in parts)

    def _differs(self, key: str) -> bool:
        return bool(getattr(self, key) != _DEFAULTS[key])


_DEFAULTS: dict[str, Any] = {
    "head_dim": None,
    "heads": (2, 2),
    "batch": 1,
    "cached": 0,
    "is_cut": False,
    "is_default": False,
    "is_strided": False,
}

_AXES: tuple[tuple[Any, ...], ...] = (STRUCTURES, BLOCKS, tuple(DTYPES), (False, True), ("none", "padding", "bias"))
SPECIAL = [
    Case("random", 32, "fp32", False, "key bias", batch=2, cached=40),
    Case("variable", 32, "fp32", False, "dropout", batch=2, cached=70),
    Case("random", 16, "fp32", True, "everything", heads=(2, 1), batch=2, cached=9),
    Case("random", 16, "fp32", False, "nothing kept"),
    Case("sliding", 32, "bf16", True, "none", heads=(4, 1)),
    Case("dense", 16, "fp32", False, "none", head_dim=20, heads=(1, 1)),
    Case("longformer", 16, "fp32", False, "none", is_cut=True, heads=(1, 1)),
    Case("fixed", 16, "fp32", False, "none", is_strided=True, batch=2),
    Case("bigbird", 16, "fp16", True, "none", heads=(1, 1), is_default=True),
]
# The same ways again, with other neighbours or alone: in the matrix.
MORE = [
    Case("bigbird", 16, "fp32", True, "mask"),
    Case("random", 16, "fp32", True, "shared bias"),
    Case("random", 16, "fp32", True, "relative"),
    Case("random", 16, "fp32", False, "none", heads=(4, 2)),
    Case("random", 32, "fp32", False, "mask2d"),
    Case("random", 32, "fp32", False, "documents", batch=2, cached=30),
    Case("sliding", 16, "bf16", True, "documents", heads=(2, 1), batch=2),
    Case("random", 32, "fp32", False, "query bias"),
    Case("random", 32, "bf16", False, "shared relative", batch=2, cached=60),
    Case("random", 16, "fp16", True, "dropout"),
    Case("dense", 16, "fp32", False, "window", cached=9, heads=(2, 1)),
    Case("dense", 32, "fp16", True, "window"),
    Case("random", 16, "fp32", False, "negative scale"),
    Case("sliding", 32, "fp16", True, "softcap", heads=(2, 1)),
    Case("longformer", 16, "fp16", False, "sinks", heads=(2, 1), is_cut=True),
    Case("random", 16, "fp32", False, "sinks", batch=2),
    Case("longformer", 32, "fp32", True, "none", heads=(4, 2)),
    Case("random", 32, "fp32", False, "none", head_dim=7),
    Case("dense", 16, "fp32", True, "none", cached=70),
    Case("fixed", 32, "fp32", True, "padding", cached=45, batch=2),
    Case("longformer", 16, "bf16", False, "padding", is_cut=True, heads=(2, 1)),
    Case("dense", 16, "fp32", True, "relative", is_cut=True, cached=10, heads=(2, 1)),
    *(Case("bigbird", block, "fp16", True, "none", heads=(1, 1), is_default=True) for block in BLOCKS[1:]),
]
# Head dimensions with tiles of their own; too large for the interpreter.
LARGE = [
    *(Case("bigbird", 64, dtype, True, "none", head_dim=dim) for dim in (16, 32, 128, 256) for dtype in DTYPES),
    Case("random", 16, "bf16", False, "padding", head_dim=128),
    Case("random", 128, "fp16", False, "bias", head_dim=80),
    Case("longformer", 128, "bf16", False, "none", head_dim=256, heads=(4, 1)),
    Case("sliding", 64, "bf16", True, "documents", head_dim=96, heads=(4, 2), batch=2),
    Case("random", 128, "fp16", True, "softcap", head_dim=128),
    Case("random", 128, "bf16", False, "sinks", head_dim=64, batch=2),
    Case("dense", 64, "bf16", True, "window", head_dim=80),
]


def _cell(structure: str, *rest: Any) -> Case:
    """Two heads where they differ."""
    return Case(structure, *rest, heads=(1, 1) if structure in ("dense", "longformer", "sliding") else (2, 2))


_PAIRS = [_cell(*cell) for cell in pairwise(*_AXES)]
# A cell for each block size that no special case has, and one with padding alone. The special cases have the rest.
_FIRST = (("longformer", 16), ("random", 64), ("sliding", 128))
DEFAULT = [*(c for c in _PAIRS if (c.structure, c.block) in _FIRST), *SPECIAL]
MATRIX = [_cell(*cell) for cell in itertools.product(*_AXES)]
CASES = {case.name: case for case in (*DEFAULT, *MORE, *MATRIX, *LARGE)}


@dataclass(frozen=True)
class Inputs:
    """What attention is called with, and a gradient of its result; inputs that have gradients are leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    options: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        return [
            t for t in (self.q, self.k, self.v, *self.options.values()) if isinstance(t, Tensor) and t.requires_grad
        ]

    def in_double(self) -> Inputs:
        """The same numbers in float64."""
        options = {name: _double(value) for name, value in self.options.items()}
        return Inputs(_double(self.q), _double(self.k), _double(self.v), self.grad.double(), options)


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def make_layout(case: Case, length: int) -> Layout:
    """A layout with the structure, random ones with a pattern for each head."""
    heads, block = case.heads[0], case.block
    side = "unidirectional" if case.is_causal else "bidirectional"
    num_blocks = -(-length // block)
    generator = torch.Generator().manual_seed(num_blocks)
    grids = {
        "dense": lambda: torch.ones(1, num_blocks, num_blocks, dtype=torch.bool),
        "random": lambda: torch.rand(heads, num_blocks, num_blocks, generator=generator) < 0.5,
    }
    if case.extra == "window":  # the last key of a window is in the middle of a block
        both = from_dense(grids["dense"](), block, is_causal=case.is_causal, num_heads=heads)
        return both.windowed(block + 5)
    if case.structure in grids:
        grid = grids[case.structure]()
        if case.extra == "nothing kept":
            grid[:, : num_blocks // 2] = False
        return from_dense(grid, block, is_causal=case.is_causal, num_heads=heads)
    config: patterns.SparsityConfig
    if case.structure == "fixed":
        config = patterns.FixedSparsityConfig(
            heads, block, True, num_local_blocks=2, attention=side, num_different_global_patterns=2
        )
    elif case.structure == "variable":
        config = patterns.VariableSparsityConfig(
            heads, block, True, num_random_blocks=1, local_window_blocks=[1, 2], attention=side
        )
    elif case.structure == "bigbird":
        config = patterns.BigBirdSparsityConfig(heads, block, True, num_sliding_window_blocks=1, attention=side)
    elif case.structure == "longformer":
        config = patterns.BSLongformerSparsityConfig(heads, block, global_block_indices=[1], attention=side)
    else:
        config = patterns.LocalSlidingWindowSparsityConfig(heads, block, attention=side)
    return config.layout(length)


def make_inputs(case: Case, length: int, head_dim: int, device: str) -> Inputs:
    """Random inputs; keys are `length` positions, queries the last of them."""
    generator = torch.Generator().manual_seed(length)
    dtype, (heads, kv_heads), batch = DTYPES[case.dtype], case.heads, case.batch
    num_queries = length - case.cached

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def random_4d(heads: int, tokens: int) -> Tensor:
        if case.is_strided:
            return random(batch, tokens, heads, head_dim).transpose(1, 2)
        return random(batch, heads, tokens, head_dim)

    def random_bool(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) < 0.7).to(device)

    width = num_queries + length - 1
    makers: dict[str, Any] = {
        "none": dict,
        "window": dict,
        "nothing kept": dict,
        "padding": lambda: {"key_padding": random_bool(batch, length)},
        "documents": lambda: {
            "documents": (torch.rand(batch, length, generator=generator) < 0.05).cumsum(1).to(device)
        },
        "bias": lambda: {"bias": random(1, heads, num_queries, length)},
        "shared bias": lambda: {"bias": random(num_queries, length)},
        "key bias": lambda: {"bias": random(batch, 1, 1, length)},
        "query bias": lambda: {"bias": random(1, heads, num_queries, 1)},
        "mask": lambda: {"mask": random_bool(batch, heads, num_queries, length)},
        "mask2d": lambda: {"mask": random_bool(num_queries, length)},
        "relative": lambda: {"relative": random(heads, width)},
        "shared relative": lambda: {"relative": random(1, width)},
        "dropout": lambda: {"dropout": 0.3, "seed": 2**40 + 12345},
        "negative scale": lambda: {"scale": -0.7},
        "softcap": lambda: {"softcap": 1.5},
        "sinks": lambda: {"sinks": random(heads)},
        "everything": lambda: {
            "key_padding": random_bool(batch, length),
            "documents": torch.arange(length, device=device).expand(batch, -1) // 40,
            "mask": random_bool(num_queries, length),
            "bias": random(1, heads, num_queries, length),
            "relative": random(heads, width),
            "dropout": 0.2,
            "seed": 7,
            "scale": 0.5,
            "softcap": 1.2,
            "sinks": random(heads),
        },
    }
    options = makers[case.extra]()
    for tensor in options.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    q, k, v = (
        random_4d(h, n).requires_grad_() for h, n in ((heads, num_queries), (kv_heads, length), (kv_heads, length))
    )
    return Inputs(q, k, v, random_4d(heads, num_queries), {**options, "q_start": case.cached})


def make_tunings(case: Case, head_dim: int, is_small: bool) -> Tunings:
    found = tunings_for(head_dim, DTYPES[case.dtype])
    if is_small and not case.is_default:
        tile = Tuning(*SMALL_TILES[case.block], 4, 2)
        found = Tunings(tile, tile, tile)
    return replace(found, min_piece=1) if case.is_cut else found


def results(out: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """The result and all gradients."""
    names = ["q", "k", "v", *(name for name, value in inputs.options.items() if getattr(value, "requires_grad", False))]
    grads = torch.autograd.grad(out, inputs.leaves, inputs.grad)
    return {"out": out.detach(), **{f"grad of {name}": grad for name, grad in zip(names, grads, strict=True)}}


def run_case(case: Case, device: str) -> None:
    """Result and gradients are those of the truth in float64 from the same inputs, close to the dtype's precision.

    Fresh memory is full of NaN: an element that is not written shows.
    """
    is_small = device == "cpu"
    length = (SMALL_LENGTHS if is_small else LARGE_LENGTHS)[case.block]
    head_dim = case.head_dim or (16 if is_small else 64)
    layout, inputs = make_layout(case, length), make_inputs(case, length, head_dim, device)
    tunings = make_tunings(case, head_dim, is_small)
    if case.is_cut:
        span, work = Span((case.cached, length), (0, length)), Work(layout.head_to_pattern, case.batch, 1, 1)
        size = (tunings.forward.otherwise or tunings.forward).size  # these calls allow no descriptors
        assert tile_plan(layout, span, size, False, work).num_slots > 0
    torch.use_deterministic_algorithms(True)
    try:
        out = attend(inputs.q, inputs.k, inputs.v, layout, Extras(**inputs.options), "triton", tunings)
        ours = results(out, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = inputs.in_double()
    truth = results(dense_attention(exact.q, exact.k, exact.v, layout, **exact.options), exact)
    for name, expected in truth.items():
        found = ours[name]
        assert (found.dtype, found.shape) == (DTYPES[case.dtype], expected.shape), name
        error = (found.double() - expected).abs().max().item()
        limit = TOLERANCE[case.dtype] * max(expected.abs().max().item(), 0.1)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"  # NaN is no less either


if __name__ == "__main__":
    run_cases({name: partial(run_case, case) for name, case in CASES.items()})
