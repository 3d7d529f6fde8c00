"""A group of ranks with the collectives for buckets, and counters of sent bytes.

A bucket is a flat tensor with the elements of several parameters.

NCCL works on GPU memory, concurrently with other streams. gloo works on the host: tensors of a GPU are copied to the
host, and the calling thread waits. gloo's reduce-scatter sends as much as an all-reduce and sums bf16 in bf16. The
reduce-scatter here exchanges parts, and the owner of a part sums it in fp32 in the order of the ranks. It sends fewer
bytes and gives the same bits every time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from twinflow.errors import wrong_state

TIMEOUT = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=0.5)  # interval between two checks whether to give up waiting


class Group:
    """Ranks that call the same collectives in the same order. Only one thread at a time may use a group."""

    def __init__(self, handle: Any, ranks: Sequence[int], is_on_host: bool) -> None:
        self.handle = handle
        self.ranks = tuple(ranks)
        self.world = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if handle is not None else 0
        self.is_on_host = is_on_host  # True for gloo.
        self.sent_bytes = 0  # bytes that this rank sent, without the overhead of the backend
        self._gives_up: Callable[[], bool] | None = None

    def give_up_when(self, gives_up: Callable[[], bool]) -> None:
        """With gloo, a thread stops waiting for other ranks when `gives_up` returns True, because they may never
        arrive.
        """
        self._gives_up = gives_up

    def reduce_scatter(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """`out` = the sum over all ranks of this rank's part of `whole`, sent as `dtype`."""
        assert whole.numel() == out.numel() * self.world
        self._count(whole.numel() * dtype.itemsize)
        if self.world == 1:
            out.copy_(whole)
        elif self.is_on_host:
            out.copy_(self._exchange_and_sum(whole, dtype))
        else:
            part = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
            _reduce_scatter(part, whole.to(dtype), self.handle)
            if part is not out:
                out.copy_(part)

    def _exchange_and_sum(self, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """Gets the versions of this rank's part from all ranks and sums them in fp32."""
        given = whole.to(dtype).cpu() if whole.is_cuda else whole.to(dtype)
        parts = self._exchange(given.view(torch.uint8)).view(dtype).view(self.world, -1)
        total = parts[0].to(torch.promote_types(dtype, torch.float32))
        for part in parts[1:]:
            total += part
        return total

    def exchange(self, rows: Tensor) -> Tensor:
        """Sends row i to rank i, as bytes. Returns the rows that all ranks sent to this rank, in the order of the
        ranks.
        """
        assert rows.dtype == torch.uint8 and rows.shape[0] == self.world and rows.is_contiguous()
        self._count(rows.numel())
        if self.world == 1:
            return rows
        given = rows.cpu() if rows.is_cuda and self.is_on_host else rows
        return self._exchange(given).to(rows.device)

    def _exchange(self, given: Tensor) -> Tensor:
        taken = torch.empty_like(given)
        work = dist.all_to_all_single(taken, given, group=self.handle, async_op=self.is_on_host)
        if self.is_on_host:
            self._wait(work)
        return taken

    def all_reduce(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """`out` = the sum over all ranks of `whole`, sent as `dtype` and bitwise equal on all ranks."""
        if self.world == 1:
            out.copy_(whole)
        elif not self.is_on_host:
            self._count(2 * whole.numel() * dtype.itemsize)
            total = whole.to(dtype, copy=True)
            dist.all_reduce(total, group=self.handle)
            out.copy_(total)
        else:
            size = -(-whole.numel() // self.world)
            rest = size * self.world - whole.numel()
            padded = pad(whole, (0, rest)) if rest else whole
            self._count(padded.numel() * dtype.itemsize)
            # The sum is sent in the narrower one of the two dtypes.
            total = torch.empty(padded.numel(), dtype=min(dtype, whole.dtype, key=lambda one: one.itemsize))
            total[self.rank * size : (self.rank + 1) * size] = self._exchange_and_sum(padded, dtype)
            self.all_gather(total)
            out.copy_(total[: whole.numel()])

    def all_gather(self, whole: Tensor) -> None:
        """Gathers the parts of all ranks in place. This rank's part of `whole` is the input."""
        self._count(whole.numel() * whole.element_size())
        if self.world == 1:
            return
        size = whole.numel() // self.world
        if not self.is_on_host:
            _all_gather(whole, whole[self.rank * size : (self.rank + 1) * size], self.handle)
            return
        host = whole.cpu() if whole.is_cuda else whole
        raw = host.view(torch.uint8)
        mine = raw.view(self.world, -1)[self.rank].clone()
        self._wait(_all_gather(raw, mine, self.handle, is_async=True))
        if whole.is_cuda:
            whole.copy_(host)

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the tensor of the first rank to all ranks."""
        if self.world == 1 or not tensor.numel():
            return
        if self.rank == 0:
            self.sent_bytes += tensor.numel() * tensor.element_size()
        flat = tensor.detach().reshape(-1)
        if self.is_on_host != (flat.device.type == "cpu"):  # A model on the GPU may have a buffer on the host.
            flat = flat.to("cpu" if self.is_on_host else "cuda")
        flat = flat.contiguous()
        work = dist.broadcast(flat.view(torch.uint8), src=self.ranks[0], group=self.handle, async_op=self.is_on_host)
        if self.is_on_host:
            self._wait(work)
        if self.rank != 0:
            tensor.detach().copy_(flat.view(tensor.shape))

    def gather_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks in the order of the ranks, on the host."""
        rows = torch.empty(self.world, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        self.all_gather(rows.view(-1))
        return rows

    def _wait(self, work: Any) -> None:
        """Waits until all ranks have arrived. RuntimeError if the caller gives up."""
        while not work.is_completed():
            if self._gives_up is not None and self._gives_up():
                # torch waits for pending work when it destroys a group, also at interpreter exit. The extra
                # reference keeps this group alive.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.handle))
                raise wrong_state(
                    "A collective was abandoned before all ranks arrived",
                    "the optimizer is closed or has failed",
                    "Look for the first error in the logs of all ranks.",
                )
            with suppress(RuntimeError):  # The ranks have not arrived yet. The last wait raises other errors.
                work.wait(_PATIENCE)
        work.wait()

    def _count(self, whole_bytes: int) -> None:
        """Adds the bytes that a rank sends in a collective: all parts except its own."""
        self.sent_bytes += whole_bytes * (self.world - 1) // self.world


def _all_gather(whole: Tensor, part: Tensor, handle: Any, is_async: bool = False) -> Any:
    """Calls torch's all-gather into one tensor, which has another name since torch 2.13."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=handle, async_op=is_async)


def _reduce_scatter(part: Tensor, whole: Tensor, handle: Any) -> None:
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(part, whole, group=handle)


def alone() -> Group:
    return Group(None, (0,), is_on_host=True)


def new_group(backend: str, ranks: Sequence[int] | None = None, timeout: timedelta = TIMEOUT) -> Group:
    """Creates a process group. All its ranks (None: all ranks of the world) must call this function in the same order,
    and must have created the same number of groups before: torch names a group by that number.
    """
    members = list(ranks) if ranks is not None else list(range(dist.get_world_size()))
    if ranks is not None and len(members) == 1:
        return alone()
    is_some = ranks is not None  # Ranks outside the group do not make this call.
    handle = dist.new_group(members, backend=backend, timeout=timeout, use_local_synchronization=is_some)
    return Group(handle, members, is_on_host=backend == "gloo")


def backend_for(device: torch.device) -> str:
    """The backend for tensors on this device: NCCL for GPUs if the process group has it, else gloo."""
    given = dist.get_backend()
    return "nccl" if device.type == "cuda" and "nccl" in given else "gloo"
