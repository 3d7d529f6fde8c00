"""Updates of a bucket whose buffers lie on the GPU: the tables that the kernel reads, and its launch.

Triton is imported when the first FusedUpdate is made: it comes with torch for CUDA, but not with every torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinflow.rules.formats import BLOCK, Key
from twinflow.rules.rule import Hyper, Rule
from twinflow.rules.segment import Store, check_format

TILE = 1024  # elements of one program, where each has one tile
LARGE_TILE = 4096  # ... where a few programs have them all: as many threads as a program can have
_WARP_NUMEL = 128  # elements of 32 threads: four for each thread, as the note in kernel.py wants it
_NUMBER_COLUMNS = 12  # as kernel.py has it
_VECTOR_BYTES = 16  # the widest load of a thread
_MAX_KNOWN = 8  # stores of one bucket, which has one for each staging buffer that it passes through
_WEIGHTS = {torch.bfloat16: "split", torch.float16: "fp16", torch.float32: "fp32"}
_MASTERS = {"split": torch.int16, "fp16": torch.float32}


class Piece(NamedTuple):
    """One slice of a bucket."""

    weight: Tensor  # flat, what the update writes: bf16 (upper halves of a split master), fp16, or fp32 (the master)
    offset: int  # in the bucket's flat buffers (gradients, master, states); a multiple of 128
    numel: int
    first_index: int  # position of its element 0 in its parameter; a multiple of 128


class Rows:
    """A row of numbers for each piece of a bucket: (whether to update, factor, key, hyper); floats as fp32 bits. The
    rows lie in host memory, page-locked for a GPU."""

    def __init__(self, num_pieces: int, is_pinned: bool) -> None:
        self.words = torch.zeros(num_pieces, _NUMBER_COLUMNS, dtype=torch.int32, pin_memory=is_pinned)
        words = self.words.numpy()
        self.is_updated = words[:, 0]
        self.factors = words.view(np.float32)[:, 1]
        self.keys = words.view(np.uint32)[:, 2:4]
        self.hypers = words.view(np.float32)[:, 4:]

    @property
    def are_stateless(self) -> bool:
        """Whether no piece has a momentum."""
        return not self.hypers[self.is_updated != 0, 0].any()

    def put(self, index: int, numbers: Numbers) -> None:
        """One piece's row."""
        self.is_updated[index] = 1
        self.factors[index] = numbers.factor
        self.keys[index] = numbers.key
        self.hypers[index, : len(numbers.hyper)] = numbers.hyper


class _Checked(NamedTuple):
    """A store that has passed all checks."""

    store: Store
    buffers: tuple[Tensor | None, ...]  # as the kernel takes them
    kinds: tuple[object, ...]


class Numbers(NamedTuple):
    """What a step of one piece needs beside tensors."""

    hyper: Hyper  # rule.hyper(options, step)
    factor: float  # multiplies the gradient
    key: Key  # formats.rounding_key(step, parameter)


def is_available() -> bool:
    """Whether Triton can be imported, and CUDA is there or Triton's interpreter is on."""
    return importlib.util.find_spec("triton") is not None and (is_interpreting() or torch.cuda.is_available())


def is_interpreting() -> bool:
    """Whether Triton runs kernels on the host, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


class FusedUpdate:
    """Updates of one bucket: a launch each.

    The kernel knows the weights by address: they must stay where they are. All launches share the numbers in `rows`:
    the previous one must have finished before anybody writes there.

    With `max_programs` no more than so many programs run, and leave the rest of the device to others; without, there is
    one for each tile. Neither that nor the `tile` changes a bit.
    """

    def __init__(
        self, rule: Rule, pieces: Sequence[Piece], max_programs: int | None = None, tile: int | None = None
    ) -> None:
        from twinflow.gpu import kernel

        weight = _check_pieces(pieces)
        assert max_programs is None or max_programs > 0, max_programs
        self._tile = tile or (TILE if max_programs is None else LARGE_TILE)
        self._kernel = kernel.update
        self._rule = rule
        self._pieces = tuple(pieces)  # keeps the weights alive
        self._end = max(piece.offset + piece.numel for piece in pieces)
        self._device = weight.device
        self._weight = _WEIGHTS[weight.dtype]
        is_aligned = all(piece.weight.data_ptr() % _VECTOR_BYTES == 0 for piece in pieces)
        self._alignment = _VECTOR_BYTES if is_aligned else weight.element_size()
        table = _tile_table(pieces, self._tile)
        self._is_bounded = max_programs is not None
        self._num_programs = min(len(table), max_programs) if max_programs is not None else len(table)
        self._tiles = table.to(self._device)
        self.rows = Rows(len(pieces), is_pinned=self._device.type == "cuda")
        self._numbers = torch.empty_like(self.rows.words, device=self._device)
        self._known: dict[int, _Checked] = {}  # by the ids of stores
        self._compiled: dict[object, Callable[..., None]] = {}  # launches of the kernel as it was compiled

    def __call__(
        self, store: Store, grads: Tensor, numbers: Mapping[int, Numbers], decision: Tensor | None = None
    ) -> None:
        """One step of the pieces whose index is in `numbers`, in place, queued on the current stream.

        `decision`: norm, factor and whether to skip, in fp64 on the device; the factor multiplies that of the numbers.

        `store` has the flat buffers of the whole bucket; its weight is not used, nor is its master where the weights
        are fp32. `grads`, flat as well: bf16, fp16 or fp32.
        """
        if numbers:
            self.rows.is_updated[:] = 0
            for index, own in numbers.items():
                assert 0 <= index < len(self._pieces) and len(own.hyper) == self._rule.num_scalars, (index, own)
                self.rows.put(index, own)
            self.run(store, grads, decision)

    def run(self, store: Store, grads: Tensor, decision: Tensor | None) -> None:
        """The same with the numbers that are in `rows`."""
        checked = self._checked(store)
        assert grads.dtype in _WEIGHTS, grads.dtype
        self._check_buffer(grads, self._end)
        self._numbers.copy_(self.rows.words, non_blocking=True)
        shape = (self._rule.name, store.format, self._weight, self._alignment, self._tile, self._is_bounded)
        arguments = (
            self._tiles,
            self._numbers,
            decision,
            _without_bf16(grads),
            *checked.buffers,
            len(self._tiles),
            *shape,
        )
        # Triton compiles a kernel for each kind of arguments: types, what is None, what lies at a multiple of 16 bytes.
        kind = (store.format, _kind(grads), _kind(decision), *checked.kinds)
        is_elsewhere = self._device.type == "cuda" and torch.cuda.current_device() != self._device.index
        with torch.cuda.device(self._device) if is_elsewhere else nullcontext():
            self._launch(kind, arguments)

    def _launch(self, kind: tuple[object, ...], arguments: tuple[object, ...]) -> None:
        """At each launch Triton finds out which of its compiled kernels fits, which takes longer than all the rest. So
        we ask for it once for each kind of arguments."""
        known = self._compiled.get(kind)
        if known is not None:
            known(*arguments)
            return
        compiled = self._kernel[(self._num_programs,)](
            *arguments,
            num_warps=self._tile // _WARP_NUMEL,
            enable_fp_fusion=False,  # each product is rounded before it is added, as on the host
        )
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[kind] = compiled[(self._num_programs, 1, 1)]

    def _checked(self, store: Store) -> _Checked:
        """What the kernel works on. It writes wherever it is told to, so our mistakes have to end here; a store is
        checked when it comes for the first time."""
        known = self._known.get(id(store))
        if known is None:
            self._check(store)
            master = store.master if self._weight != "fp32" else None
            buffers = tuple(_without_bf16(tensor) for tensor in (master, *store.states, *store.scales))
            if len(self._known) >= _MAX_KNOWN:  # they are kept, or another store could get the id of one of them
                self._known.clear()
            known = self._known[id(store)] = _Checked(store, buffers, tuple(map(_kind, buffers)))
        return known

    def _check(self, store: Store) -> None:
        rule = self._rule
        check_format(rule, store.format)
        if self._weight != "fp32":
            assert store.master.dtype == _MASTERS[self._weight], store.master.dtype
            self._check_buffer(store.master, self._end)
        for name, state, scales in zip(rule.states, store.states, store.scales, strict=True):
            may_be_none = name is None or (rule.state_option is not None and self.rows.are_stateless)
            assert (state is None and may_be_none) or (state is not None and name is not None), name
            if state is not None:
                self._check_buffer(state, self._end)
            if state is not None and store.format == "int8":
                assert scales is not None
                self._check_buffer(scales, -(-self._end // BLOCK))

    def _check_buffer(self, buffer: Tensor, numel: int) -> None:
        assert buffer.device == self._device and buffer.is_contiguous(), (buffer.device, buffer.stride())
        assert buffer.numel() >= numel, (buffer.numel(), numel)


def _check_pieces(pieces: Sequence[Piece]) -> Tensor:
    """All lie on one device, in one dtype: the first one's weight."""
    assert pieces
    first = pieces[0].weight
    # The interpreter follows addresses on the host, a compiled kernel on the device.
    assert first.is_cuda != is_interpreting(), (first.device, is_interpreting())
    assert first.dtype in _WEIGHTS, first.dtype
    for weight, offset, numel, first_index in pieces:
        assert (weight.dtype, weight.device) == (first.dtype, first.device), weight.dtype
        assert weight.is_contiguous() and weight.numel() == numel, (weight.shape, numel)
        assert offset % BLOCK == 0 and first_index % BLOCK == 0, (offset, first_index)
    return first


def _tile_table(pieces: Sequence[Piece], tile: int = TILE) -> Tensor:
    """For each tile: the weight's address, offset in the bucket, first block in the parameter, elements, piece."""
    parts = []
    for number, (weight, offset, numel, first_index) in enumerate(pieces):
        start = torch.arange(0, numel, tile, dtype=torch.int64)
        columns = (
            weight.data_ptr() + start * weight.element_size(),
            offset + start,
            (first_index + start) // BLOCK,
            (numel - start).clamp(max=tile),
            torch.full_like(start, number),
        )
        parts.append(torch.stack(columns, dim=1))
    return torch.cat(parts)


def _kind(tensor: Tensor | None) -> object:
    """What a compiled kernel depends on."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % _VECTOR_BYTES)


def _without_bf16(tensor: Tensor | None) -> Tensor | None:
    """The kernel takes bf16 as int16 and converts it by shifts."""
    return tensor.view(torch.int16) if tensor is not None and tensor.dtype == torch.bfloat16 else tensor
