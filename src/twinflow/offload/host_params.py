# SPDX-License-Identifier: Apache-2.0
"""The parameters whose weights are on the host (`offload_param`): how their weights are read and written there, and
what the parameters have while their block does not run.

While a block does not run, each of its parameters is an expanded NaN on the device, which needs no memory, and is
guarded (weight_guard.py): a read returns a copy, and a write changes the state. `ParamOffload` gives the parameters
their views of the device buffers when the block runs. `show` gives a parameter whole values in memory of its own.

A quantised weight (quantised.py) consists of other parameters. These have buffers, and it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Bucket
from twinflow.offload.fetch_hooks import check_transform
from twinflow.offload.quantised import inner_tensors, rebuilt
from twinflow.offload.weight_buffers import WeightBuffer
from twinflow.offload.weight_guard import cover, plain, uncover
from twinflow.offload.weight_source import WeightSource


class Piece(NamedTuple):
    """Elements [start, start + numel) of a parameter that this process has."""

    start: int
    numel: int
    read: Callable[[], Tensor]  # returns the present values, flat
    write: Callable[[Tensor], None]
    is_on_disk: bool = False  # `read` copies the values from a disk; otherwise it returns a view


class HostParams:
    """The parameters, and the buffers with their weights. `rank`: of this process, among those that share weights."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._views: dict[Tensor, Tensor] = {}  # the views of the parameters in device buffers
        self._buffers: dict[Tensor, list[WeightBuffer]] = {}  # with parts of a parameter; it begins in the first one
        self._storages: set[int] = set()  # of the device buffers
        self._quantised: dict[Tensor, type] = {}  # ordinary classes of quantised weights
        self._shown: dict[Tensor, Tensor] = {}  # whole values of parameters (`show`)
        self._nothing: dict[torch.dtype, Tensor] = {}

    def add(self, buffer: WeightBuffer) -> None:
        """Adds the parameters of a buffer. They have no values from now on."""
        self._storages.add(buffer.flat.untyped_storage()._cdata)
        self._views.update(buffer.views)
        for param in buffer.params:
            self._buffers.setdefault(param, []).append(buffer)
        self.empty(buffer)

    def remove(self, buffer: WeightBuffer) -> None:
        """Removes the parameters of a buffer, because they keep the memory that they have on the device now."""
        self._storages.discard(buffer.flat.untyped_storage()._cdata)
        for param, _ in buffer.views:
            del self._views[param]
            del self._buffers[param]

    def add_quantised(self, weights: Sequence[nn.Parameter]) -> None:
        self._quantised.update((weight, type(weight)) for weight in weights)
        cover(weights)

    def remove_quantised(self, weights: Sequence[nn.Parameter]) -> None:
        for weight in weights:
            del self._quantised[weight]

    def has_quantised(self, weight: Tensor) -> bool:
        return weight in self._quantised

    def holds(self, param: Tensor) -> bool:
        """Whether the weights of a parameter are offloaded."""
        return param in self._views

    @property
    def offloaded(self) -> list[Tensor]:
        """All parameters whose weights are offloaded. Quantised weights are among them."""
        return [*self._views, *self._quantised]

    def buffers_of(self, param: Tensor) -> Sequence[WeightBuffer]:
        """The buffers with parts of a parameter, which are all of one block."""
        return self._buffers[param]

    def view_of(self, param: Tensor) -> Tensor:
        """The view of a parameter in its device buffer, which has memory only while the block runs."""
        return self._views[param]

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor uses the memory of a device buffer."""
        if self._quantised:  # autograd may save a quantised weight, or a tensor of which it consists
            return any(one.untyped_storage()._cdata in self._storages for _, one in inner_tensors(tensor))
        return tensor.untyped_storage()._cdata in self._storages

    # What a parameter has while its block does not run.

    def empty(self, buffer: WeightBuffer) -> None:
        """Takes the memory on the device from a buffer, and the values from its parameters."""
        with plain():
            for param, view in buffer.views:
                param.data = self._shown.get(param, self._nan(view))
        cover(param for param, _ in buffer.views if param not in self._shown)
        buffer.resize(0)

    def _nan(self, view: Tensor) -> Tensor:
        if view.dtype not in self._nothing:
            nothing = float("nan") if view.dtype.is_floating_point else 0
            self._nothing[view.dtype] = torch.full((), nothing, dtype=view.dtype, device=view.device)
        return self._nothing[view.dtype].expand(view.shape)

    def is_away(self, param: Tensor) -> bool:
        """Whether a parameter has no values outside of its block."""
        return (param in self._views and param not in self._shown) or param in self._quantised

    def show(self, param: Tensor, values: Tensor) -> None:
        self._shown[param] = values
        with plain():
            param.data = values
        uncover((param,))

    def conceal(self, param: Tensor) -> None:
        """Takes the values of `show` from a parameter."""
        del self._shown[param]
        with plain():
            param.data = self._nan(self._views[param])
        cover((param,))

    def is_shown(self, param: Tensor) -> bool:
        return param in self._shown

    def are_shown(self, buffers: Iterable[WeightBuffer]) -> bool:
        """Whether all parameters that begin in these buffers are shown."""
        return bool(self._shown) and all(param in self._shown for buffer in buffers for param, _ in buffer.views)

    def take_replaced(self, params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Those of these parameters whose memory the user has replaced by `set_`, with their new values. Their blocks
        do not run. torch has no hook for `set_`.
        """
        found: list[tuple[nn.Parameter, Tensor]] = []
        check_transform()
        with plain():
            for param in params:
                nothing = self._nan(self._views[param])
                if param not in self._shown and param.data_ptr() != nothing.data_ptr():
                    found.append((param, param.detach()))
                    param.data = nothing
        return found

    # Reads and writes on the host.

    def pieces(self, param: Tensor) -> list[Piece]:
        """The parts of a parameter's weights that this process has."""
        buffers = self._buffers[param]
        buffer = buffers[0]
        if buffer.bucket is not None:
            found = [(one.host, one.bucket) for one in buffers if one.bucket is not None]
            return [piece for host, bucket in found for piece in _pieces_in(host, bucket, param)]
        host, size, at = buffer.host, buffer.host.numel, buffer.start_of(self._views[param])
        low = 0 if buffer.is_whole else self._rank * size
        start, stop = max(at, low), min(at + param.numel(), low + size)
        if start >= stop:
            return []
        read = partial(host.read, start - low, stop - start)
        return [Piece(start - at, stop - start, read, partial(_write, host, start - low), buffer.is_on_disk)]

    def copy_of(self, param: Tensor) -> Tensor:
        """A copy of a parameter's weights in separate device memory. It includes all updates that are due."""
        if param in self._quantised:
            return rebuilt(param, self._quantised[param], self._copy_of_inner)
        self._check_whole(param)
        buffer, view = self._buffers[param][0], self._views[param]
        if len(self._buffers[param]) == 1:
            return self._view_on_host(param).to(view.device, copy=not buffer.is_on_disk)
        return self._joined(param, view.device)

    def _copy_of_inner(self, tensor: Tensor) -> Tensor:
        return self.copy_of(tensor) if tensor in self._views else tensor.clone()

    def on_host(self, param: Tensor) -> Tensor:
        """The weights on the host: a copy, or a view of frozen weights in memory."""
        with torch.inference_mode(False):  # in an inference tensor no write would be counted
            if self._buffers[param][0].bucket is None:
                return self._view_on_host(param)
            return self._joined(param, torch.device("cpu"))

    def quantised_on_host(self, weight: Tensor) -> Tensor:
        """A quantised weight, all of whose tensors are on the host."""
        return rebuilt(weight, self._quantised[weight], lambda tensor: tensor.detach().cpu())

    def _view_on_host(self, param: Tensor) -> Tensor:
        """The weights of one buffer: a view, or a copy if they are on a disk. This process has all of them."""
        buffer = self._buffers[param][0]
        return buffer.host.read(buffer.start_of(self._views[param]), param.numel()).view(param.shape)

    def _joined(self, param: Tensor, where: torch.device) -> Tensor:
        """A copy of the weights of all buffers."""
        whole = torch.empty(param.shape, dtype=param.dtype, device=where)
        for piece in self.pieces(param):
            whole.view(-1)[piece.start : piece.start + piece.numel].copy_(piece.read())
        return whole

    def write(self, param: Tensor, values: Tensor, is_on_all_ranks: bool) -> None:
        """Writes the values of a parameter to the host. `is_on_all_ranks`: every rank does that, each its part."""
        if param in self._quantised:
            raise wrong_state(
                "A quantised weight cannot be written",
                "it is on the host (offload_param), in the format of its library",
                "Write to it after close() of the optimizer, or train without offload_param.",
            )
        if not is_on_all_ranks:
            self._check_whole(param)
        if values.shape != param.shape:
            raise invalid_value(
                "The shape of the new values of an offloaded parameter (offload_param)",
                tuple(values.shape),
                f"the parameter's shape {tuple(param.shape)}",
                "Assign values of that shape.",
            )
        flat = values.to(device="cpu", dtype=param.dtype).reshape(-1)
        for piece in self.pieces(param):
            piece.write(flat[piece.start : piece.start + piece.numel])

    def _check_whole(self, param: Tensor) -> None:
        if not self._buffers[param][0].is_whole:
            raise wrong_state(
                "A weight cannot be used outside the forward of its block",
                "with offload_param and several ranks, each rank has only a part of the weight outside of the block",
                "Use it inside `with twinflow.compat.zero.GatheredParameters(param)`, or train without offload_param.",
            )


def _pieces_in(host: WeightSource, bucket: Bucket, param: Tensor) -> list[Piece]:
    """The parts of a parameter that a bucket has."""
    return [
        Piece(
            piece.start,
            piece.numel,
            partial(host.read, piece.offset, piece.numel),
            partial(_write_master, bucket, index),
            host.record >= 0,
        )
        for index, piece in enumerate(bucket.slices)
        if bucket.params[index].tensor is param
    ]


def _write(host: WeightSource, start: int, values: Tensor) -> None:
    with host.hold(is_changed=True) as whole:
        whole[start : start + values.numel()].copy_(values.reshape(-1))


def _write_master(bucket: Bucket, index: int, values: Tensor) -> None:
    bucket.updater.write_master(bucket, index, values.reshape(-1), keep=True)
