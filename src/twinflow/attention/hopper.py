"""Launches the kernels for Hopper. They support a head dimension of 128 in half precision, one pattern for all heads,
whole tiles, and scores without bias, mask and dropout. triton_attention.py uses its own kernels for all other calls,
with the same results.
"""

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
    Rows,
    bind_context,
    forward_scratch,
    gradient_scratch,
    is_interpreting,
    launch,
    reduce_forward,
    reduce_gradients,
    rows_of,
    strides_of,
)

HEAD_DIM = 128
HALF = 64
WHOLE_TILE = 128  # tokens of other tiles in forward if all tiles are whole
STAGES = {64: 4, 128: 2}  # pipeline stages of other tiles in forward, by their tokens
BACKWARD_STAGES = 3
MIN_SCALE = 1e-30  # smallest supported scale of scores; it is far from zero in fp32
NUM_PROCESSORS = 132  # number of multiprocessors that is assumed if kernels are only compiled, without a GPU
OPTIONS = {"num_warps": 4}
TRITONS = (("3", "6"), ("3", "7"))  # versions of Triton whose machine code for the kernels was checked


class Shape(NamedTuple):
    """Constants for which a kernel is compiled."""

    STAGES: int  # pipeline stages of other tiles
    GROUP: int  # query heads per head of keys
    HAS_CUTS: bool
    HAS_CELLS: bool  # False: every tile is whole
    CAUSAL: bool


def plan_for(call: Call, tensors: Sequence[Tensor], by_keys: bool, is_forward: bool = False) -> CellPlan | None:
    """The plan of a kernel, or None if the kernel does not support the call."""
    if not _allows(call) or not all(rows_of(tensor) is not None for tensor in tensors):
        return None
    is_whole = is_forward and call.layout.block >= OWN and not call.layout.is_causal
    other = WHOLE_TILE if is_whole else CELL
    return device_cells(call.layout, call.span, other, by_keys, call.work(by_keys), call.device)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, plan: CellPlan) -> tuple[Tensor, Tensor]:
    """Does the same as `forward` of triton_attention.py, with a kernel for Hopper."""
    from twinflow.attention import kernels_hopper as kernels

    bind_context(q.device)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    pieces = forward_scratch(call, plan.tiles, plan.size)
    other = plan.size.other
    rows, places = _described((q, HALF), (k, other), (v, other), (out, HALF))
    _launch(kernels.forward, (*rows, lse, *pieces), places, call, plan, by_keys=False, num_stages=STAGES[other])
    reduce_forward(out, lse, strides_of(q=q, k=k, v=v, out=out), call, plan.tiles, plan.size, pieces)
    return out, lse


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call, plan: CellPlan
) -> tuple[Tensor, Tensor]:
    """Does the same as `query_gradients` of triton_attention.py, with a kernel for Hopper."""
    from twinflow.attention import kernels_hopper as kernels

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
    """Does the same as `key_gradients` of triton_attention.py, with a kernel for Hopper."""
    from twinflow.attention import kernels_hopper as kernels

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
    words = plan.words if plan.words is not None else tiles.tables.items
    scale = float(scale_of(call.extras, sizes.head_dim))
    shape = Shape(num_stages, sizes.group, tiles.num_slots > 0, plan.words is not None, call.layout.is_causal)
    args = (*tensors, (tiles.tables.items, tiles.tables.codes, words), places, *numbers, scale, shape)
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


def _described(*tensors: tuple[Tensor, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """TMA descriptors for pairs of a tensor and the number of rows per copy, and the positions of heads in them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptors, places = [], []
    for tensor, count in tensors:
        rows = _rows(tensor)
        shape = [count, tensor.shape[-1]]
        descriptors.append(TensorDescriptor.from_tensor(rows.matrix, shape, _swizzled(*shape, tensor.dtype)))
        places += [rows.fold, rows.step]
    return tuple(descriptors), tuple(places)


def _rows(tensor: Tensor) -> Rows:
    """The rows of a tensor that plan_for has checked, or of an empty tensor like it."""
    rows = rows_of(tensor)
    assert rows is not None, (tensor.shape, tensor.stride())
    return rows


def _vector(tensor: Tensor, count: int) -> Any:
    """A TMA descriptor that copies `count` numbers at once."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(tensor.reshape(-1), [count], layout)


@lru_cache
def _swizzled(count: int, dim: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([count, dim], kinds[dtype])
