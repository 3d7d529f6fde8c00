# SPDX-License-Identifier: Apache-2.0
"""Updates of a bucket whose buffers are on the GPU: the tables for the kernel, and its launch.

Triton is imported when the first FusedUpdate is built, because not every build of torch includes Triton.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinflow.attention.launch import is_interpreting, on_device
from twinflow.rules.formats import BLOCK, SCALED, Key
from twinflow.rules.rule import Hyper, Rule
from twinflow.rules.segment import Store, check_format

TILE = 1024  # elements of a tile if each program processes one tile
# Elements of a tile if a few programs process all tiles. A program then has the maximum number of threads.
LARGE_TILE = 4096
_WARP_NUMEL = 128  # elements of 32 threads: four per thread, see the note in kernel.py
_NUMBER_COLUMNS = 12  # as in kernel.py
_VECTOR_BYTES = 16  # the widest load of a thread
_MAX_KNOWN = 8  # stores of one bucket, which has one for each staging buffer
_WEIGHTS = {torch.bfloat16: "split", torch.float16: "fp16", torch.float32: "fp32"}
_MASTERS = {"split": torch.int16, "fp16": torch.float32}  # of weights that are not their own master


class Piece(NamedTuple):
    """A slice of a bucket (a group of parameters with flat buffers) that belongs to one parameter."""

    # flat weight that the update writes: bf16 (upper halves of a split master, or a weight without master), fp16, or
    # fp32 (the master)
    weight: Tensor
    offset: int  # in the bucket's flat buffers (gradients, master, states); a multiple of 128
    numel: int
    first_index: int  # position of its element 0 in its parameter; a multiple of 128


class Rows:
    """A table in host memory, page-locked for a GPU, with one row of numbers for each piece of a bucket.

    A row has: whether to update the piece, the factor of the gradient, the key of random rounding, and the
    hyperparameters. Floats are stored as fp32 bits.
    """

    def __init__(self, num_pieces: int, is_pinned: bool) -> None:
        self.words = torch.zeros(num_pieces, _NUMBER_COLUMNS, dtype=torch.int32, pin_memory=is_pinned)
        words = self.words.numpy()
        self.is_updated = words[:, 0]
        self.factors = words.view(np.float32)[:, 1]
        self.keys = words.view(np.uint32)[:, 2:4]
        self.hypers = words.view(np.float32)[:, 4:]

    @property
    def are_stateless(self) -> bool:
        """For SGD: whether all pieces that are updated have momentum 0."""
        return not self.hypers[self.is_updated != 0, 0].any()

    def put(self, index: int, numbers: Numbers) -> None:
        """Fill the row of one piece."""
        self.is_updated[index] = 1
        self.factors[index] = numbers.factor
        self.keys[index] = numbers.key
        self.hypers[index, : len(numbers.hyper)] = numbers.hyper


class _Checked(NamedTuple):
    """A store (the flat buffers of a bucket's state) that has passed all checks."""

    store: Store
    buffers: tuple[Tensor | None, ...]  # in the types that the kernel takes
    kinds: tuple[object, ...]


class Numbers(NamedTuple):
    """The numbers for one step of one piece."""

    hyper: Hyper  # rule.hyper(options, step)
    factor: float  # multiplies the gradient
    key: Key  # formats.rounding_key(step, parameter)


def is_available() -> bool:
    """Whether Triton can be imported, and CUDA is available or Triton's interpreter is on."""
    return importlib.util.find_spec("triton") is not None and (is_interpreting() or torch.cuda.is_available())


def runs(device: torch.device, trial: Callable[[], None], results: str) -> bool:
    """Whether Triton kernels run on this device. `trial` runs them, because they may not compile although Triton is
    installed. `results`: what the kernels compute, for the warning.
    """
    if not is_available() or (device.type == "cuda") == is_interpreting():
        return False
    try:
        trial()
    except Exception as error:
        warnings.warn(
            f"Triton cannot compute {results} on {device} ({error}). Slower torch kernels are used instead. If the "
            "error is about a missing C compiler, install one.",
            stacklevel=3,
        )
        return False
    return True


class FusedUpdate:
    """Updates of one bucket. Each update is one launch.

    The kernel uses the addresses of the weights, so weights must not move. All launches use the same `rows`: the
    previous launch must have finished before the caller writes to `rows`.

    `max_programs` limits the number of programs and leaves the rest of the device to other kernels. Without it, there
    is one program per tile. `max_programs` and `tile` (elements of a tile) do not change the bits of the result.
    `has_master`: False for bf16 weights without a master.
    """

    def __init__(
        self,
        rule: Rule,
        pieces: Sequence[Piece],
        max_programs: int | None = None,
        tile: int | None = None,
        has_master: bool = True,
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
        assert has_master or weight.dtype == torch.bfloat16, weight.dtype
        self._weight = _WEIGHTS[weight.dtype] if has_master else "none"
        is_aligned = all(piece.weight.data_ptr() % _VECTOR_BYTES == 0 for piece in pieces)
        self._alignment = _VECTOR_BYTES if is_aligned else weight.element_size()
        table = _tile_table(pieces, self._tile)
        self._is_bounded = max_programs is not None
        self._num_programs = min(len(table), max_programs) if max_programs is not None else len(table)
        self._tiles = table.to(self._device)
        self.rows = Rows(len(pieces), is_pinned=self._device.type == "cuda")
        self._numbers = torch.empty_like(self.rows.words, device=self._device)
        self._known: dict[int, _Checked] = {}  # by id of the store
        self._compiled: dict[object, Callable[..., None]] = {}  # compiled kernels by kind of arguments

    def __call__(
        self, store: Store, grads: Tensor, numbers: Mapping[int, Numbers], decision: Tensor | None = None
    ) -> None:
        """Queue one step on the current stream. It updates, in place, the pieces whose index is in `numbers`.

        `decision`: norm, factor and whether to skip, in fp64 on the device, or None. The gradient is multiplied by this
        factor and by the factor in `numbers`.

        `store` has the flat buffers of the whole bucket. Its weight is not used. Its master is not used if weights are
        their own master. `grads` is flat, in bf16, fp16 or fp32.
        """
        if numbers:
            self.rows.is_updated[:] = 0
            for index, own in numbers.items():
                assert 0 <= index < len(self._pieces) and len(own.hyper) == self._rule.num_scalars, (index, own)
                self.rows.put(index, own)
            self.run(store, grads, decision)

    def run(self, store: Store, grads: Tensor, decision: Tensor | None) -> None:
        """Queue a step with the numbers that are in `rows`."""
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
        # Triton compiles a kernel for each kind of arguments. The kind includes the dtypes, which arguments are None,
        # and which are aligned to 16 bytes.
        kind = (store.format, _kind(grads), _kind(decision), *checked.kinds)
        with on_device(self._device):
            self._launch(kind, arguments)

    def _launch(self, kind: tuple[object, ...], arguments: tuple[object, ...]) -> None:
        """Launch the compiled kernel for this kind of arguments.

        Triton searches for the compiled kernel at each launch, which takes longer than the rest of the launch. Here the
        search is made once for each kind of arguments.
        """
        known = self._compiled.get(kind)
        if known is not None:
            known(*arguments)
            return
        compiled = self._kernel[(self._num_programs,)](
            *arguments,
            num_warps=self._tile // _WARP_NUMEL,
            enable_fp_fusion=False,  # each product must be rounded before it is added, as on the host
        )
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[kind] = compiled[(self._num_programs, 1, 1)]

    def _checked(self, store: Store) -> _Checked:
        """The buffers of a store, checked when the store is used for the first time. The kernel does not check
        addresses, so wrong arguments must be found here.
        """
        known = self._known.get(id(store))
        if known is None:
            self._check(store)
            master = store.master if self._weight in _MASTERS else None
            buffers = tuple(_without_bf16(tensor) for tensor in (master, *store.states, *store.scales))
            # Known stores are kept alive, because a new store could get the id of a freed one.
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[id(store)] = _Checked(store, buffers, tuple(map(_kind, buffers)))
        return known

    def _check(self, store: Store) -> None:
        rule = self._rule
        check_format(rule, store.format)
        assert store.has_master == (self._weight != "none"), self._weight
        if self._weight in _MASTERS:
            assert store.master.dtype == _MASTERS[self._weight], store.master.dtype
            self._check_buffer(store.master, self._end)
        for which, (name, state, scales) in enumerate(zip(rule.states, store.states, store.scales, strict=True)):
            may_be_none = name is None or (rule.state_option is not None and self.rows.are_stateless)
            assert store.has_state(which) == (name is not None) or may_be_none, name
            if state is not None:
                self._check_buffer(state, self._end)
            if store.has_state(which) and store.format in SCALED:
                assert scales is not None
                self._check_buffer(scales, -(-self._end // BLOCK))

    def _check_buffer(self, buffer: Tensor, numel: int) -> None:
        assert buffer.device == self._device and buffer.is_contiguous(), (buffer.device, buffer.stride())
        assert buffer.numel() >= numel, (buffer.numel(), numel)


def _check_pieces(pieces: Sequence[Piece]) -> Tensor:
    """Check the pieces, which must have one device and one dtype, and return the weight of the first."""
    assert pieces
    first = pieces[0].weight
    # The interpreter uses addresses on the host, and a compiled kernel uses addresses on the device.
    assert first.is_cuda != is_interpreting(), (first.device, is_interpreting())
    assert first.dtype in _WEIGHTS, first.dtype
    for weight, offset, numel, first_index in pieces:
        assert (weight.dtype, weight.device) == (first.dtype, first.device), weight.dtype
        assert weight.is_contiguous() and weight.numel() == numel, (weight.shape, numel)
        assert offset % BLOCK == 0 and first_index % BLOCK == 0, (offset, first_index)
    return first


def _tile_table(pieces: Sequence[Piece], tile: int = TILE) -> Tensor:
    """The table with one row per tile: address of the weight, offset in the bucket, first block in the parameter,
    number of elements, index of the piece.
    """
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
    """The properties of an argument for which Triton compiles a separate kernel."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % _VECTOR_BYTES)


def _without_bf16(tensor: Tensor | None) -> Tensor | None:
    """A bf16 tensor as int16, because the kernel converts bf16 by shifts. Other tensors are not changed."""
    return tensor.view(torch.int16) if tensor is not None and tensor.dtype == torch.bfloat16 else tensor
