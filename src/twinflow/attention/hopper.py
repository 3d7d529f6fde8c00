# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels for Hopper. They support half precision, heads of 40 to 256 columns (see tuning.HOPPER),
padding, documents, windows and softcaps, but no bias, mask, dropout or cached keys. For other calls,
triton_attention.py launches the kernels of kernels.py, which compute the same. A program computes its own tile of
queries or keys and iterates over other tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinflow.attention.direct_launch import Box, Given, Slot
from twinflow.attention.extras import scale_of
from twinflow.attention.launch import SCRATCH_SLOTS, Call, Launch, is_interpreting
from twinflow.attention.tiles import CELL, OWN, TilePlan, device_cells
from twinflow.attention.tuning import HOPPER, hopper_limit, padded_dim

HALF = 64
WHOLE_TILE = 128  # tokens of other tiles in forward if no tile has a mask
SHARED_BYTES = 225 * 1024  # for tiles; some of the 227 KiB are for barriers and vectors
MAX_STAGES = 4  # pipeline stages of other tiles
ALIGNED = 4  # numbers of a vector in 16 bytes
NO_ID = -(2**31)  # of keys that are padding
MIN_SCALE = 1e-30  # smallest supported scale of scores; it is far from zero in fp32
NUM_PROCESSORS = 132  # number of multiprocessors that is assumed if kernels are only compiled, without a GPU
OPTIONS = {"num_warps": 4}
TRITONS = (("3", "6"), ("3", "7"))  # versions of Triton whose machine code for the kernels was checked


# By kernel, also for those of kernels.py: the tensors of its own tiles, of other tiles, and of results.
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("q",), ("k", "v"), ("out",)),
    "query_gradients": (("q", "grad"), ("k", "v"), ("dq",)),
    "key_gradients": (("k", "v"), ("q", "grad"), ("dk", "dv")),
}


class Shape(NamedTuple):
    """Constants for which a kernel is compiled."""

    SLOTS: int  # own tiles in shared memory: 2 if the tile of the next item is loaded early
    FIRST: int  # pipeline stages of the first tensor of other tiles
    SECOND: int  # and of the second
    OTHER: int  # tokens of an other tile
    HEAD_DIM: int
    NUM_PARTS: int
    WIDTHS: tuple[int, ...]  # of the parts of a tile; together they may be wider than a head
    PADDED: int  # width of rows in scratch memory
    GROUP: int  # query heads per head of keys
    ONE_PATTERN: bool  # all heads have the same pattern
    HAS_CUTS: bool
    HAS_MASKED: bool  # there are tiles with a mask
    CAUSAL: bool
    HAS_EDGE: bool  # the last cell is not full
    HAS_WINDOW: bool
    WINDOW_REST: int  # tokens of the window beyond whole cells
    HAS_CAP: bool
    HAS_IDS: bool  # tokens have ids, and those with different ids do not see each other
    WANTS_K: bool  # key_gradients computes the gradients of keys
    WANTS_V: bool
    SCORES: Any  # layout in registers of scores, and of the sums of each part; Gluon has no types
    SUMS: tuple[Any, ...]


def plan_for(name: str, tensors: Mapping[str, Tensor], call: Call) -> TilePlan | None:
    """The plan of a kernel, or None if the kernel does not support the call."""
    by_keys = name == "key_gradients"
    if not _allows(call) or (by_keys and call.in_program != call.sizes.group):
        return None
    if not all(_is_described(tensor) for tensor in tensors.values()):
        return None
    if not _has_aligned_lines(name, call):
        return None
    is_wide = name == "forward" and call.layout.block >= OWN and call.sizes.head_dim <= 128
    wide = WHOLE_TILE if is_wide and call.sizes.num_keys % WHOLE_TILE == 0 and not call.layout.is_causal else CELL
    plan = device_cells(call.layout, call.span, wide, by_keys, call.work(by_keys), call.device)
    is_long = plan is not None and plan.mean_tiles * plan.size.other > call.tunings.hopper_tokens
    return None if is_long else plan


def _has_aligned_lines(name: str, call: Call) -> bool:
    """Whether every line of the vectors that TMA copies begins at a multiple of 16 bytes, as on an H200 it must. The
    lines are those of each head (log-sum-exp and delta) or of each element of the batch (ids).
    """
    sizes = call.sizes
    if name == "key_gradients":
        return sizes.num_queries % ALIGNED == 0 or sizes.batch * sizes.num_heads == 1
    return sizes.num_keys % ALIGNED == 0 or sizes.batch == 1 or not _has_ids(call)


def _has_ids(call: Call) -> bool:
    return call.extras.key_padding is not None or call.extras.documents is not None


class HopperLaunch:
    """The launches of a kernel for Hopper, which computes results, or pieces of rows that are cut (see tiles.py)."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], call: Call, plan: TilePlan) -> None:
        from twinflow.attention import kernels_hopper

        self._call = call
        self._has_ids = _has_ids(call)
        num_heads = call.sizes.num_kv_heads if name == "key_gradients" else call.sizes.num_heads
        num_programs = min(plan.max_items * call.sizes.batch * num_heads, _num_processors(call.device))
        # The sums of wide heads for keys and values do not fit into registers together.
        is_split = name == "key_gradients" and call.sizes.head_dim > 128
        self._launches = [
            Launch(getattr(kernels_hopper, name), num_programs, OPTIONS, _args(name, tensors, call, plan, wants))
            for wants in (((True, False), (False, True)) if is_split else ((True, True),))
        ]

    def __call__(self, given: Given, device: torch.device) -> None:
        if self._has_ids:
            given = {**given, **_ids_of(given, self._call)}
        for launch in self._launches:
            launch(given, device)


def _args(
    name: str, tensors: Mapping[str, Tensor], call: Call, plan: TilePlan, wants: tuple[bool, bool]
) -> tuple[object, ...]:
    """The arguments of a kernel."""
    sizes, other, by_keys = call.sizes, plan.size.other, name == "key_gradients"
    own, others, results = TENSORS[name]
    lengths = (sizes.num_keys, sizes.num_queries) if by_keys else (sizes.num_queries, sizes.num_keys)
    num_heads = sizes.num_kv_heads if by_keys else sizes.num_heads
    has_ids = _has_ids(call)
    counts = [HALF] * len(own) + [other] * len(others) + [HALF] * len(results)
    boxes: list[object] = []
    for key, count in zip((*own, *others, *results), counts, strict=True):
        boxes += _boxes(key, tensors[key], count)
    own_ids, other_ids = ("key_ids", "query_id_bits") if by_keys else ("query_ids", "key_id_bits")
    ids = (_vector(other_ids, sizes.batch * lengths[1], other), Slot(own_ids)) if has_ids else (None, None)
    total = plan.max_items * sizes.batch * num_heads
    numbers = (total, plan.max_items, plan.num_long, *lengths, plan.num_slots, num_heads)
    words = plan.tables.items if plan.words is None else plan.words
    tables = (plan.tables.items, plan.tables.codes, words, plan.tables.heads)
    out_steps = _steps(tensors["out"]) if "out" in tensors else ()
    scratch, num_lines = SCRATCH_SLOTS, sizes.batch * sizes.num_heads * sizes.num_queries
    more: dict[str, tuple[object, ...]] = {
        "forward": (Slot("lse"), scratch.sums, scratch.tops, scratch.weights),
        "query_gradients": (Slot("out"), out_steps, Slot("lse"), Slot("delta"), scratch.sums),
        "key_gradients": (
            _vector("lse", num_lines, other),
            _vector("delta", num_lines, other),
            scratch.sums,
            scratch.second_sums,
        ),
    }
    scale = float(scale_of(call.extras, sizes.head_dim))
    shape = _shape(name, call, plan, wants, lengths[1] % CELL)
    return (*boxes, *ids, *more[name], tables, *numbers, scale, float(call.extras.softcap), shape)


def _shape(name: str, call: Call, plan: TilePlan, wants: tuple[bool, bool], edge: int) -> Shape:
    """The constants of a kernel. All of the shared memory is used for pipeline stages."""
    widths, other = widths_of(call.sizes.head_dim), plan.size.other
    dim = sum(widths)
    num_own = len(TENSORS[name][0])
    slots = 2 if dim <= 128 else 1
    free = SHARED_BYTES - slots * num_own * OWN * dim * 2
    num_tiles = free // (other * dim * 2)  # of both tensors
    first = min(MAX_STAGES, -(-num_tiles // 2))
    return Shape(
        SLOTS=slots,
        FIRST=first,
        SECOND=min(MAX_STAGES, num_tiles - first),
        OTHER=other,
        HEAD_DIM=call.sizes.head_dim,
        NUM_PARTS=len(widths),
        WIDTHS=widths,
        PADDED=padded_dim(call.sizes.head_dim),
        GROUP=call.sizes.group,
        ONE_PATTERN=call.layout.num_patterns == 1,
        HAS_CUTS=plan.num_slots > 0,
        HAS_MASKED=plan.words is not None,
        CAUSAL=call.layout.is_causal,
        HAS_EDGE=edge > 0,
        HAS_WINDOW=call.layout.window is not None,
        WINDOW_REST=(call.layout.window or 0) % CELL,
        HAS_CAP=call.extras.softcap > 0.0,
        HAS_IDS=_has_ids(call),
        WANTS_K=wants[0],
        WANTS_V=wants[1],
        SCORES=_registers(other),
        SUMS=tuple(_registers(width) for width in widths),
    )


def _allows(call: Call) -> bool:
    sizes, extras = call.sizes, call.extras
    has_scores = extras.bias is not None or extras.relative is not None or extras.mask is not None
    is_fit = (
        hopper_limit(sizes.head_dim) is not None
        and call.dtype != torch.float32
        and not has_scores
        and extras.q_start == 0
    )
    is_fit = is_fit and extras.dropout == 0.0
    is_fit = is_fit and scale_of(extras, sizes.head_dim) >= MIN_SCALE and sizes.num_queries >= HALF <= sizes.num_keys
    return is_fit and call.tunings.hopper and not is_interpreting() and _is_hopper(call.device) and _has_language()


def widths_of(head_dim: int) -> tuple[int, ...]:
    """The widths of the parts of a tile."""
    limit = hopper_limit(head_dim)
    assert limit is not None, head_dim
    return HOPPER[limit][0]


def _is_described(tensor: Tensor) -> bool:
    """Whether a TMA descriptor can describe a tensor [batch, heads, tokens, dim], or a vector."""
    if tensor.data_ptr() % 16:
        return False
    if tensor.dim() != 4:
        return tensor.is_contiguous()
    are_aligned = all(step > 0 and step * tensor.element_size() % 16 == 0 for step in _steps(tensor))
    return are_aligned and tensor.stride(3) == 1 and tensor[..., 0].numel() < 2**31


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """The strides of batch, heads and tokens. Those of dimensions of size one, which may have any value, are replaced,
    because a descriptor needs multiples of 16 bytes, and because Triton 3.6 confuses the numbers of a tuple if one of
    them is 1.
    """
    whole = tensor.shape[2] * tensor.stride(2)
    return tuple(tensor.stride(i) if tensor.shape[i] > 1 or i == 2 else whole for i in range(3))


def _ids_of(given: Given, call: Call) -> dict[str, Tensor]:
    """Ids of queries and of keys: the documents, and no query's id for keys that are padding."""
    sizes = call.sizes
    padding, documents = given.get("padding"), given.get("documents")
    if not isinstance(documents, Tensor):
        shape = (sizes.batch, max(sizes.num_queries, sizes.num_keys))
        documents = torch.zeros(shape, dtype=torch.int32, device=call.device)
    queries, keys = documents[:, : sizes.num_queries], documents[:, : sizes.num_keys]
    if isinstance(padding, Tensor):
        keys = torch.where(padding.view(torch.bool), keys, NO_ID)
    found = {"query_ids": _aligned(queries), "key_ids": _aligned(keys)}
    # Vectors that TMA copies are of fp32. Kernels read their bits as int32.
    return found | {name.replace("_ids", "_id_bits"): ids.view(torch.float32) for name, ids in found.items()}


def _aligned(ids: Tensor) -> Tensor:
    """Contiguous ids that begin at a multiple of 16 bytes, as TMA requires. A slice of the user's documents may not."""
    ids = ids.contiguous()
    return ids if ids.data_ptr() % 16 == 0 else ids.clone()


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


def _boxes(name: str, tensor: Tensor, count: int) -> tuple[Box, Box | None]:
    """TMA descriptors of a tensor that copy `count` rows of each part of a head at once."""
    shape, steps, widths = tuple(tensor.shape), _steps(tensor), widths_of(tensor.shape[3])
    boxes = [Box(name, shape, (*steps, 1), (1, 1, count, w), _swizzled(count, w, tensor.dtype)) for w in widths]
    return boxes[0], boxes[1] if len(boxes) == 2 else None


@lru_cache
def _swizzled(count: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([1, 1, count, width], kinds[dtype])


@lru_cache
def _registers(width: int) -> Any:
    """The layout in registers of the products of a warpgroup with `width` columns."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


def _vector(name: str, numel: int, count: int) -> Box:
    """A TMA descriptor that copies `count` numbers at once."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return Box(name, (numel,), (1,), (count,), layout)
