# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels for Hopper. They support head dimensions from 72 to 128 in half precision, one pattern for all
heads, whole tiles, and scores without bias, mask and dropout. For other calls, triton_attention.py launches the kernels
of kernels.py, with the same results. A program computes its own tile of queries or keys and iterates over other tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinflow.attention.direct_launch import Box, Slot
from twinflow.attention.extras import scale_of
from twinflow.attention.launch import SCRATCH_SLOTS, Call, Launch, is_interpreting
from twinflow.attention.tiles import CELL, OWN, TilePlan, device_cells

DIM = 128  # columns of a tile; TMA fills those that a head does not have with zeros
LEAST_DIM = 72  # the kernels in plain Triton have tiles of 64 columns for narrower heads
HALF = 64
WHOLE_TILE = 128  # tokens of other tiles in forward if all tiles are whole
STAGES = {64: 4, 128: 2}  # pipeline stages of other tiles in forward, by their tokens
BACKWARD_STAGES = 3
MIN_SCALE = 1e-30  # smallest supported scale of scores; it is far from zero in fp32
NUM_PROCESSORS = 132  # number of multiprocessors that is assumed if kernels are only compiled, without a GPU
OPTIONS = {"num_warps": 4}
TRITONS = (("3", "6"), ("3", "7"))  # versions of Triton whose machine code for the kernels was checked


# By kernel: the tensors of its own tiles, of other tiles, and of results.
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("q",), ("k", "v"), ("out",)),
    "query_gradients": (("q", "grad"), ("k", "v"), ("dq",)),
    "key_gradients": (("k", "v"), ("q", "grad"), ("dk", "dv")),
}


class Shape(NamedTuple):
    """Constants for which a kernel is compiled."""

    HEAD_DIM: int
    STAGES: int  # pipeline stages of other tiles
    GROUP: int  # query heads per head of keys
    HAS_CUTS: bool
    HAS_CELLS: bool  # False: every tile is whole
    CAUSAL: bool


def plan_for(name: str, tensors: Mapping[str, Tensor], call: Call) -> TilePlan | None:
    """The plan of a kernel, or None if the kernel does not support the call."""
    if not _allows(call) or not all(_is_described(tensor) for tensor in tensors.values() if tensor.dim() == 4):
        return None
    is_whole = name == "forward" and call.layout.block >= OWN and not call.layout.is_causal
    other = WHOLE_TILE if is_whole else CELL
    by_keys = name == "key_gradients"
    return device_cells(call.layout, call.span, other, by_keys, call.work(by_keys), call.device)


def launch_of(name: str, tensors: Mapping[str, Tensor], call: Call, plan: TilePlan) -> Launch:
    """The launch of a kernel for Hopper, which computes results, or pieces of rows that are cut (see tiles.py)."""
    from twinflow.attention import kernels_hopper

    sizes, other, by_keys = call.sizes, plan.size.other, name == "key_gradients"
    own, others, results = TENSORS[name]
    counts = [HALF] * len(own) + [other] * len(others) + [HALF] * len(results)
    boxes = [_box(key, tensors[key], n) for key, n in zip((*own, *others, *results), counts, strict=True)]
    more: tuple[object, ...]
    if name == "forward":
        more = (Slot("lse"), SCRATCH_SLOTS.sums, SCRATCH_SLOTS.tops, SCRATCH_SLOTS.weights)
    elif name == "query_gradients":
        more = (Slot("out"), _steps(tensors["out"]), Slot("lse"), Slot("delta"), SCRATCH_SLOTS.sums)
    else:
        num_rows = tensors["lse"].numel()
        vectors = (_vector("lse", num_rows, other), _vector("delta", num_rows, other))
        more = (*vectors, SCRATCH_SLOTS.sums, SCRATCH_SLOTS.second_sums)
    num_heads = sizes.num_kv_heads if by_keys else sizes.num_heads
    total = plan.max_items * sizes.batch * num_heads
    lengths = (sizes.num_keys, sizes.num_queries) if by_keys else (sizes.num_queries, sizes.num_keys)
    numbers = (total, plan.max_items, plan.num_long, *lengths, plan.num_slots // num_heads, num_heads)
    tables = (plan.tables.items, plan.tables.codes, plan.tables.items if plan.words is None else plan.words)
    stages = STAGES[other] if name == "forward" else BACKWARD_STAGES
    shape = Shape(
        sizes.head_dim, stages, sizes.group, plan.num_slots > 0, plan.words is not None, call.layout.is_causal
    )
    scale = float(scale_of(call.extras, sizes.head_dim))
    args = (*boxes, *more, tables, *numbers, scale, shape)
    return Launch(getattr(kernels_hopper, name), min(total, _num_processors(call.device)), OPTIONS, args)


def _allows(call: Call) -> bool:
    sizes = call.sizes
    is_whole = call.extras.q_start == 0 and sizes.num_queries % OWN == 0 and sizes.num_keys % OWN == 0
    is_fit = LEAST_DIM <= sizes.head_dim <= DIM and call.layout.num_patterns == 1
    is_fit = is_fit and call.is_plain and call.layout.window is None
    is_fit = is_fit and scale_of(call.extras, sizes.head_dim) >= MIN_SCALE
    is_ours = call.tunings.hopper and is_whole and is_fit
    return is_ours and not is_interpreting() and _is_hopper(call.device) and _has_language()


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU. True without a GPU, because kernels are then only compiled."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache
def _has_language() -> bool:
    """Whether the kernels work with this version of Triton. Their language, Gluon, still changes between versions."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(triton.__version__.split(".")[:2]) in TRITONS


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_PROCESSORS


def _is_described(tensor: Tensor) -> bool:
    """Whether a TMA descriptor can describe a tensor [batch, heads, tokens, dim]."""
    steps = _steps(tensor)
    are_aligned = all(step > 0 and step * tensor.element_size() % 16 == 0 for step in steps)
    return are_aligned and tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0 and tensor[..., 0].numel() < 2**31


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """The strides of batch, heads and tokens. Those of dimensions of size one, which may have any value, are replaced,
    because a descriptor needs multiples of 16 bytes, and because Triton 3.6 confuses the numbers of a tuple if one of
    them is 1.
    """
    whole = tensor.shape[2] * tensor.stride(2)
    return tuple(tensor.stride(i) if tensor.shape[i] > 1 or i == 2 else whole for i in range(3))


def _box(name: str, tensor: Tensor, count: int) -> Box:
    """The TMA descriptor of a tensor that copies `count` rows of a head at once."""
    block = (1, 1, count, DIM)
    return Box(name, tuple(tensor.shape), (*_steps(tensor), 1), block, _swizzled(block, tensor.dtype))


@lru_cache
def _swizzled(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])


def _vector(name: str, num_rows: int, count: int) -> Box:
    """The TMA descriptor of a tensor with a number for each row that copies `count` numbers at once."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return Box(name, (num_rows,), (1,), (count,), layout)
