"""Launches the kernels made for Hopper, where a call allows them: heads of 128 in half precision, one pattern for all
heads, whole tiles, and nothing added to scores. Their results are those of triton_attention.py, which falls back on its
own kernels elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinflow.attention.cells import CELL, OWN, CellPlan, device_cells
from twinflow.attention.extras import scale_of
from twinflow.attention.launch import (
    Call,
    ForwardStrides,
    Rows,
    bind_context,
    is_interpreting,
    launch,
    rows_of,
    strides_of,
)
from twinflow.attention.pieces import forward_scratch, gradient_scratch, reduce_forward, reduce_gradients

HEAD_DIM = 128
HALF = 64
WHOLE_TILE = 128  # other tokens in forward, where all tiles are whole
STAGES = {64: 4, 128: 2}  # of other tiles in forward, by their tokens
BACKWARD_STAGES = 3
MIN_SCALE = 1e-30  # of scores; in fp32 it is not zero
NUM_PROCESSORS = 132  # where kernels are only compiled
OPTIONS = {"num_warps": 4}
TRITONS = (("3", "6"), ("3", "7"))  # whose code for the kernels has been looked at


class Shape(NamedTuple):
    """Constants of a compiled kernel."""

    STAGES: int  # of other tiles
    GROUP: int  # query heads for each head of keys
    HAS_CUTS: bool
    HAS_CELLS: bool  # else every tile is whole
    CAUSAL: bool


def plan_for(call: Call, tensors: Sequence[Tensor], by_keys: bool, is_forward: bool = False) -> CellPlan | None:
    """The plan of a kernel; None where the call does not allow it."""
    if not _allows(call) or not all(rows_of(tensor) is not None for tensor in tensors):
        return None
    is_whole = is_forward and call.layout.block >= OWN and not call.layout.is_causal
    other = WHOLE_TILE if is_whole else CELL
    return device_cells(call.layout, call.span, other, by_keys, call.work(by_keys), call.device)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, plan: CellPlan) -> tuple[Tensor, Tensor]:
    """As triton_attention.forward."""
    from twinflow.attention import kernels_hopper_forward as kernels

    bind_context(q.device)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    pieces = forward_scratch(call, plan.tiles, plan.size)
    other = plan.size.other
    rows, places = _described((q, HALF), (k, other), (v, other), (out, HALF))
    _launch(kernels.forward, (*rows, lse, *pieces), places, call, plan, by_keys=False, num_stages=STAGES[other])
    strides = ForwardStrides(*(strides_of(tensor) for tensor in (q, k, v, out)))
    reduce_forward(out, lse, strides, call, plan.tiles, plan.size, pieces)
    return out, lse


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call, plan: CellPlan
) -> tuple[Tensor, Tensor]:
    """As triton_attention.query_gradients."""
    from twinflow.attention import kernels_hopper_queries as kernels

    bind_context(q.device)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    pieces = gradient_scratch(call, plan.tiles, plan.size, 1)
    other = plan.size.other
    rows, places = _described((q, HALF), (grad, HALF), (k, other), (v, other), (dq, HALF))
    own = _rows(out)
    places = (*places, own.fold, own.step, own.matrix.stride(0))
    tensors = (*rows, out, lse, delta, pieces.first)
    _launch(kernels.query_gradients, tensors, places, call, plan, by_keys=False)
    reduce_gradients(dq, None, 0, call, plan.tiles, plan.size, pieces)
    return dq, delta


def key_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, delta: Tensor, call: Call, plan: CellPlan
) -> tuple[Tensor, Tensor]:
    """As triton_attention.key_gradients."""
    from twinflow.attention import kernels_hopper_keys as kernels

    bind_context(q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    pieces = gradient_scratch(call, plan.tiles, plan.size, 2)
    other = plan.size.other
    rows, places = _described((k, HALF), (v, HALF), (q, other), (grad, other), (dk, HALF), (dv, HALF))
    tensors = (*rows, _vector(lse, other), _vector(delta, other), *pieces)
    _launch(kernels.key_gradients, tensors, places, call, plan, by_keys=True)
    reduce_gradients(dk, dv, 0, call, plan.tiles, plan.size, pieces)
    return dk, dv


def _launch(
    kernel: Any,
    tensors: tuple[Any, ...],
    places: tuple[int, ...],
    call: Call,
    plan: CellPlan,
    by_keys: bool,
    num_stages: int = BACKWARD_STAGES,
) -> None:
    sizes, tiles = call.sizes, plan.tiles
    num_heads = sizes.num_kv_heads if by_keys else sizes.num_heads
    total = tiles.max_items * sizes.batch * num_heads
    rows = (sizes.num_keys, sizes.num_queries) if by_keys else (sizes.num_queries, sizes.num_keys)
    numbers = (total, tiles.max_items, tiles.num_long, *rows, tiles.num_slots // num_heads)
    words = plan.words if plan.words is not None else tiles.items
    scale = float(scale_of(call.extras, sizes.head_dim))
    shape = Shape(num_stages, sizes.group, tiles.num_slots > 0, plan.words is not None, call.layout.is_causal)
    args = (*tensors, (tiles.items, tiles.codes, words), places, *numbers, scale, shape)
    launch(kernel, min(total, _num_processors(call.device)), args, OPTIONS)


def _allows(call: Call) -> bool:
    sizes = call.sizes
    is_whole = call.extras.q_start == 0 and sizes.num_queries % OWN == 0 and sizes.num_keys % OWN == 0
    is_fit = sizes.head_dim == HEAD_DIM and call.layout.num_patterns == 1 and call.is_plain
    is_fit = is_fit and scale_of(call.extras, sizes.head_dim) >= MIN_SCALE
    is_ours = call.tunings.hopper and is_whole and is_fit
    return is_ours and not is_interpreting() and _is_hopper(call.device) and _has_language()


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Of a GPU; where there is none, kernels are only compiled."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache
def _has_language() -> bool:
    """Whether this Triton has the language of the kernels as they know it: it is not settled yet."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(triton.__version__.split(".")[:2]) in TRITONS


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_PROCESSORS


def _described(*tensors: tuple[Tensor, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Descriptors of so many rows at a time, and the places of heads in them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptors, places = [], []
    for tensor, count in tensors:
        rows = _rows(tensor)
        shape = [count, tensor.shape[-1]]
        descriptors.append(TensorDescriptor.from_tensor(rows.matrix, shape, _swizzled(*shape, tensor.dtype)))
        places += [rows.fold, rows.step]
    return tuple(descriptors), tuple(places)


def _rows(tensor: Tensor) -> Rows:
    """Of a tensor that plan_for has seen, or of an empty one like it."""
    rows = rows_of(tensor)
    assert rows is not None, (tensor.shape, tensor.stride())
    return rows


def _vector(tensor: Tensor, count: int) -> Any:
    """A descriptor of so many numbers at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(tensor.reshape(-1), [count], layout)


@lru_cache
def _swizzled(count: int, dim: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([count, dim], kinds[dtype])
