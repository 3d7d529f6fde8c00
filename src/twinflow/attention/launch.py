# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernels (tuples of tensors, numbers, and constants for which kernels are compiled) and launches.

A program computes an item: its own tile of queries or keys, or a piece of a tile that is cut. It iterates over other
tiles. Pieces are written to slots of scratch memory. tiles.py explains these terms.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twinflow.attention.direct_launch import Box, DirectLaunch, Given, Slot, direct_launch, filled
from twinflow.attention.extras import Extras, Sizes, as_4d, scale_of, seed_of, seed_word, threshold
from twinflow.attention.layout import Layout
from twinflow.attention.tiles import Span, TilePlan, TileSize, Work, device_plan
from twinflow.attention.tuning import Tuning, Tunings, padded_dim

REDUCE_ROWS = 16  # rows that one program combines from pieces; small, because few tiles are cut
REDUCE_OPTIONS = {"num_warps": 4}

Strides = tuple[int, int, int]
_NOTHING: Given = {}
_BOUND = threading.local()  # devices whose CUDA context is bound to a thread


class ExtraArgs(NamedTuple):
    """The tensors of Extras; mask and bias are expanded to all scores by strides of zero. The strides are in SizeArgs
    and Shape, because Triton 3.6 confuses the positions in nested tuples if a number is 1.
    """

    padding: Slot | None
    documents: Slot | None
    mask: Slot | None
    bias: Slot | None
    relative: Slot | None


class Drop(NamedTuple):
    """Arguments of dropout. seed and threshold are uint32 words, reinterpreted as int32."""

    seed: int | Slot
    threshold: int
    kept_factor: float


NO_DROP = Drop(0, 0, 1.0)


class SizeArgs(NamedTuple):
    """Sizes and strides of a call."""

    num_items: int  # items of the grid per head
    num_long: int  # long items among them, which come first
    num_heads: int
    num_queries: int
    num_keys: int
    q_start: int
    num_slots: int
    scale: float
    softcap: float
    window: int
    mask_batch: int  # strides
    mask_head: int
    mask_query: int
    bias_batch: int
    bias_head: int
    bias_query: int
    relative_head: int


class Shape(NamedTuple):
    """Constants for which a kernel is compiled."""

    GROUP: int  # query heads per head of keys
    IN_PROGRAM: int  # query heads that one program of key_gradients sums
    HEAD_DIM: int
    PADDED_DIM: int
    OWN: int  # tokens of an own tile
    OTHER: int  # tokens of an other tile
    SUB: int  # own tokens per bit of a code
    UNIT: int  # other tokens per code
    CAUSAL: bool
    HAS_WINDOW: bool
    ONE_PATTERN: bool  # all heads have the same pattern
    HAS_CUTS: bool
    HAS_FULL: bool  # there are tiles without a mask
    HAS_PARTIAL: bool  # there are tiles with a mask
    HAS_BIAS: bool  # also True for a scale <= 0, with which the maximum must be that of scaled scores
    HAS_CAP: bool
    HAS_MASKS: bool
    MASK_STEP: int  # stride between keys
    BIAS_STEP: int
    DROPOUT: bool
    PRECISION: str
    UPCAST: bool
    TMA: bool = False


class TensorStrides(NamedTuple):
    """Strides of batch, head and token of the tensors that a kernel uses."""

    q: Strides | None = None
    k: Strides | None = None
    v: Strides | None = None
    out: Strides | None = None
    grad: Strides | None = None
    dq: Strides | None = None
    dk: Strides | None = None
    dv: Strides | None = None


class Scratch(NamedTuple):
    """Scratch memory for the pieces of rows that are cut, per slot. A kernel that does not use a field gets `sums`."""

    sums: Slot = Slot("sums")
    second_sums: Slot = Slot("second_sums")  # gradients of values
    tops: Slot = Slot("tops")  # forward: maxima and sums of weights
    weights: Slot = Slot("weights")


SCRATCH_SLOTS = Scratch()


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about a call of attention except the values of its tensors. Of the tensors in `extras`, only shapes,
    strides and dtypes are used. `kernels` has the kernels that were prepared for this call, see triton_attention.py.
    """

    layout: Layout
    extras: Extras
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    tunings: Tunings
    kernels: dict[Any, Any] = field(init=False, default_factory=dict)

    @property
    def span(self) -> Span:
        start = self.extras.q_start
        return Span((start, start + self.sizes.num_queries), (0, self.sizes.num_keys))

    @cached_property
    def has_no_tensors(self) -> bool:
        extras = self.extras
        tensors = (extras.bias, extras.relative, extras.key_padding, extras.documents, extras.mask)
        return all(tensor is None for tensor in tensors)

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled products in half precision, without bias, masks, softcap and dropout."""
        is_changed = self.extras.dropout > 0.0 or self.extras.softcap > 0.0
        return self.has_no_tensors and not is_changed and self.dtype != torch.float32

    @cached_property
    def in_program(self) -> int:
        """Query heads that one program can sum: all of a group if in each group they have equal patterns, else one."""
        group, patterns = self.sizes.group, self.layout.head_to_pattern
        is_shared = all(pattern == patterns[i // group * group] for i, pattern in enumerate(patterns))
        return group if is_shared else 1

    def work(self, by_keys: bool) -> Work:
        """The heads, the batch size and the limits from which `tile_plan` computes a plan."""
        in_program = self.in_program if by_keys else 1
        heads = self.layout.head_to_pattern[::in_program]
        return Work(heads, self.sizes.batch, in_program, self.tunings.min_piece)

    def size_args(self, num_items: int, num_slots: int = 0, num_long: int = 0) -> SizeArgs:
        """SizeArgs for a grid of `num_items` items per head."""
        sizes = self.sizes
        scale = float(scale_of(self.extras, sizes.head_dim))
        start = self.extras.q_start
        counts = (num_items, num_long, sizes.num_heads, sizes.num_queries, sizes.num_keys)
        _, mask_strides, _ = _expanded(self.extras.mask, sizes)
        _, bias_strides, _ = _expanded(self.extras.bias, sizes)
        relative = self.extras.relative
        step = relative.shape[1] if relative is not None and relative.shape[0] > 1 else 0
        softcap = float(self.extras.softcap)
        return SizeArgs(
            *counts, start, num_slots, scale, softcap, self.layout.window or 0, *mask_strides, *bias_strides, step
        )

    def shape(self, size: TileSize, plan: TilePlan | None, in_program: int = 1) -> Shape:
        """The constants for tiles of a size and for a plan."""
        sizes, extras, block = self.sizes, self.extras, self.layout.block
        has_bias = extras.bias is not None or extras.relative is not None or scale_of(extras, sizes.head_dim) <= 0.0
        return Shape(
            GROUP=sizes.group,
            IN_PROGRAM=in_program,
            HEAD_DIM=sizes.head_dim,
            PADDED_DIM=padded_dim(sizes.head_dim),
            OWN=size.own,
            OTHER=size.other,
            SUB=min(block, size.own),
            UNIT=min(block, size.other),
            CAUSAL=self.layout.is_causal,
            HAS_WINDOW=self.layout.window is not None,
            ONE_PATTERN=self.layout.num_patterns == 1,
            HAS_CUTS=plan is not None and plan.num_slots > 0,
            HAS_FULL=plan is not None and plan.has_full,
            HAS_PARTIAL=plan is None or plan.has_partial,
            HAS_BIAS=has_bias,
            HAS_CAP=extras.softcap > 0.0,
            HAS_MASKS=any(x is not None for x in (extras.key_padding, extras.documents, extras.mask)),
            MASK_STEP=_expanded(extras.mask, sizes)[2],
            BIAS_STEP=_expanded(extras.bias, sizes)[2],
            DROPOUT=extras.dropout > 0.0,
            PRECISION="ieee" if self.dtype == torch.float32 else "tf32",
            UPCAST=is_interpreting() and self.dtype == torch.bfloat16,
        )

    def prepare(self, tuning: Tuning, others: Sequence[Tensor], by_keys: bool) -> tuple[Tuning, TilePlan, Shape]:
        """The tuning that this call allows for a kernel that iterates over `others`, with its plan and constants."""
        if tuning.tma and not self._allows_descriptors(tuning.size, others, by_keys):
            tuning = tuning.otherwise or replace(tuning, tma=False)
        plan = device_plan(self.layout, self.span, tuning.size, by_keys, self.work(by_keys), self.device)
        assert not (tuning.tma and plan.has_partial)
        shape = self.shape(tuning.size, plan, self.in_program if by_keys else 1)
        return tuning, plan, shape._replace(TMA=tuning.tma)

    def _allows_descriptors(self, size: TileSize, others: Sequence[Tensor], by_keys: bool) -> bool:
        """Whether other tiles can be loaded by TMA descriptors: every tile has whole adjacent rows, its scores have no
        masks and extras, and the GPU supports TMA."""
        layout, dim = self.layout, self.sizes.head_dim
        start, stop = self.span.queries if by_keys else self.span.keys
        is_whole = not layout.is_causal and layout.window is None and max(size.own, size.other) <= layout.block
        is_whole = is_whole and start % size.other == 0 and stop % size.other == 0
        are_rows = all(is_rows(x) for x in others) and dim == padded_dim(dim)
        has_loader = self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) >= (9, 0)
        return is_whole and are_rows and self.is_plain and has_loader

    @cached_property
    def extra_args(self) -> ExtraArgs:
        """The slots of the tensors of `extras`."""
        extras = self.extras
        given = (extras.key_padding, extras.documents, extras.mask, extras.bias, extras.relative)
        return ExtraArgs(*(Slot(n) if x is not None else None for n, x in zip(ExtraArgs._fields, given, strict=True)))

    @cached_property
    def drop_args(self) -> Drop:
        """What kernels need for dropout: the slot of the seed, the threshold below which the random word of a score
        drops it, and the factor of the kept ones.
        """
        p = self.extras.dropout
        return Drop(Slot("seed"), _as_int32(threshold(p)), 1.0 / (1.0 - p)) if p else NO_DROP

    def given(self, extras: Extras) -> Given:
        """The values for the slots of `extra_args` and `drop_args`. Their shapes are those of `self.extras`."""
        if self.has_no_tensors and not extras.dropout:
            return _NOTHING
        found: dict[str, Tensor | int] = {"seed": _as_int32(seed_word(seed_of(extras))) if extras.dropout else 0}
        if extras.key_padding is not None:
            found["padding"] = extras.key_padding.contiguous().view(torch.uint8)
        if extras.documents is not None:
            found["documents"] = extras.documents.to(torch.int32).contiguous()
        mask, bias = _expanded(extras.mask, self.sizes)[0], _expanded(extras.bias, self.sizes)[0]
        if mask is not None:
            found["mask"] = mask.view(torch.uint8)
        if bias is not None:
            found["bias"] = bias
        if extras.relative is not None:
            found["relative"] = extras.relative.detach().contiguous()
        return found


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs kernels on the host, as in tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current if it is not, because Triton launches on the current device."""
    is_elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if is_elsewhere else nullcontext()


def strides_of(**tensors: Tensor) -> TensorStrides:
    """Strides of the named tensors. The elements of a token must be contiguous."""
    return TensorStrides(**{name: strides_of_rows(tensor) for name, tensor in tensors.items()})


def strides_of_rows(tensor: Tensor) -> Strides:
    assert tensor.stride(3) == 1 or tensor.shape[3] == 1, tensor.stride()
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in which the elements of each token are contiguous. The stride of tokens must also fit into
    24 bits, because kernels multiply it by a position in a tile.
    """
    return tensor if tensor.stride(3) == 1 and 0 < tensor.stride(2) < 2**24 else tensor.contiguous()


class Launch:
    """A launch of a kernel that is repeated with other tensors. `args` are its arguments, with a Slot or a Box for each
    tensor and each number that a call gives.

    In the first call Triton finds the compiled kernel. Later calls start this compiled kernel directly, see
    direct_launch.py. A Launch must therefore be used only for tensors of the same shapes, strides, dtypes and
    alignment, on the same device.
    """

    def __init__(
        self,
        kernel: Any,
        num_programs: int,
        options: dict[str, Any],
        args: tuple[Any, ...],
        *,
        is_repeated: bool = True,
    ) -> None:
        assert 0 < num_programs < 2**31, num_programs
        self._is_repeated = is_repeated
        self.kernel = kernel
        self.num_programs = num_programs
        self.options = options
        self.args = args
        self._start: Callable[..., None] | None = None
        self._direct: DirectLaunch | None = None

    def __call__(self, given: Given, device: torch.device) -> None:
        """Launch the kernel on the current stream of the device."""
        bind_context(device)
        if self._direct is not None:
            self._direct(given, current_stream(device))
            return
        args = filled(self.args, given)
        if self._start is not None:
            self._start(*args)
            return
        compiled = self.kernel[(self.num_programs,)](*args, **self.options)
        if compiled is not None and self._is_repeated:  # it is None in Triton's interpreter
            self._direct = direct_launch(compiled, self.num_programs, self.args, given)
            self._start = compiled[(self.num_programs, 1, 1)]


def current_stream(device: torch.device) -> int:
    """The handle of torch's current CUDA stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def is_rows(tensor: Tensor) -> bool:
    """Whether heads follow each other in memory, as the descriptors of the Triton kernels require."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.numel() // tensor.shape[-1] < 2**31


def other_box(name: str, tensor: Tensor, shape: Shape) -> Slot | Box:
    """The place of the tensor of other tiles, or with TMA of a descriptor of its rows over all heads of the batch."""
    if not shape.TMA:
        return Slot(name)
    dim = shape.HEAD_DIM
    return Box(name, (tensor.numel() // dim, dim), (dim, 1), (shape.OTHER, dim), None)


def bind_context(device: torch.device) -> None:
    """Bind the CUDA context of the device to this thread.

    torch binds the context with the first kernel or allocation of a thread, and Triton with its first launch. Triton
    makes descriptors before that. They would fail in a thread of autograd that has not launched a kernel yet and that
    gets its memory from torch's cache.
    """
    if device.type == "cuda" and device not in _BOUND.__dict__.setdefault("devices", set()):
        torch.zeros((), device=device)
        _BOUND.devices.add(device)


def scratch_for(
    call: Call, plan: TilePlan, *, has_second: bool = False, has_weights: bool = False
) -> dict[str, Tensor]:
    """The tensors of Scratch for a plan, empty if no row is cut. The flags say which of them are used."""
    shape = (call.sizes.batch * plan.num_slots, plan.size.own, padded_dim(call.sizes.head_dim))
    new = partial(torch.empty, dtype=torch.float32, device=call.device)
    sums = new(shape)
    return {
        "sums": sums,
        "second_sums": new(shape) if has_second else sums,
        "tops": new(shape[:2]) if has_weights else sums,
        "weights": new(shape[:2]) if has_weights else sums,
    }


class Reduction:
    """The launch that combines the pieces of cut rows in their order. `results` and `more` are arguments before and
    after those of the plan."""

    def __init__(
        self, kernel: Any, num_heads: int, call: Call, plan: TilePlan, results: tuple[Any, ...], more: tuple[int, ...]
    ) -> None:
        num_programs = plan.max_cuts * call.sizes.batch * num_heads * (plan.size.own // REDUCE_ROWS)
        sizes = call.size_args(plan.max_cuts, plan.num_slots)._replace(num_heads=num_heads)
        shape = call.shape(plan.size, plan)
        args = (*results, plan.tables, SCRATCH_SLOTS, sizes, *more, REDUCE_ROWS, shape)
        self._device = call.device
        self._launch = Launch(kernel, num_programs, REDUCE_OPTIONS, args)

    def __call__(self, given: Given) -> None:
        self._launch(given, self._device)


def _expanded(tensor: Tensor | None, sizes: Sizes) -> tuple[Tensor | None, Strides, int]:
    """The tensor expanded to all scores, its strides of batch, head and query, and that of keys, which is 0 or 1."""
    if tensor is None:
        return None, (0, 0, 0), 0
    tensor = as_4d(tensor.detach())
    if tensor.shape[3] > 1 and tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    batch, head, query, key = tensor.expand(sizes.scores).stride()
    return tensor.expand(sizes.scores), (batch, head, query), key if sizes.num_keys > 1 else 0


def _as_int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
