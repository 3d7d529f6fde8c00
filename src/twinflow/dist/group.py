# SPDX-License-Identifier: Apache-2.0
"""All communication between ranks: groups, collectives, messages, and counters of sent bytes.

No other module calls a collective of torch.distributed (tests/unit/test_collectives_module.py checks it). Only torch's
`fully_shard` (ZeRO stage 3) makes collectives of its own: over NCCL, and over gloo with torch 2.8. A bucket is a flat
tensor with the elements of several parameters.

NCCL works on GPU memory, concurrently with other streams. gloo works on the host: tensors of a GPU are copied to the
host, and the calling thread waits. gloo's reduce-scatter sends as much as an all-reduce and sums bf16 in bf16. The
reduce-scatter that this module runs over gloo exchanges parts, and the owner of a part sums it, at least in fp32, in
the order of the ranks. It sends fewer bytes and gives the same bits every time.

An NCCL group has one communicator (for messages: one per pair of ranks). These groups can use NCCL, all others use
gloo:

- `reduce` of `Team` (zero/shared.py): used by the thread twinflow-reducer on the stream "reduce", in the order that
  zero/reducer.py describes.
- `publish` of `Team`: used by the thread twinflow-publisher on the stream "publish", in the order of the next forward
  (zero/publisher.py).
- `fetch` of `Team`: used by the thread twinflow-fetcher on the stream "fetch", in the order of the blocks
  (offload/fetcher.py).
- `matrices` of `Team`: used by updates of matrices by Muon (stage 3) on their streams, in the order in which they were
  queued (zero/matrices.py).
- `Grid.model` (tensor ranks): used by forward and backward on the model's stream. All tensor ranks run the same layers.
- `SequenceRanks.group` and the group of its loss: used by forward and backward on the model's stream, as above.
- `ExpertRanks.group`: used by forward and backward on the model's stream, as above.
- `expert reduce` and `expert publish` of `Team`: used like `reduce` and `publish`, by the same threads, for the buckets
  of experts.
- Ties of a pipeline (weights in several stages): used by the training loop on the model's stream, in their order.
- Messages of a pipeline: sent by the training loop on the model's stream, received by a thread for each sender on its
  own stream. The schedule orders them, and a header over gloo precedes each message (parallel/wire.py).
- `fully_shard` of torch (ZeRO stage 3): used by forward and backward on torch's streams, in the order of the blocks.

Rules that NCCL needs:

1. All ranks of a group call the same collectives in the same order, with equal sizes and dtypes.
2. Only one thread at a time uses a group. Messages are exempt: each group is used for one direction only.
3. Two groups have no common order, because two threads call them. This is safe if the kernels of both fit on the GPU
   together, so nothing that a collective waits for may wait for a collective of another group on the same rank.
4. A tensor may be freed or changed only when the collective has ended on its stream. The callers record an event on
   that stream (device.py). `Sending.wait` does this for messages, and `use_here` for received tensors.

With the environment variable TWINFLOW_CHECK_COLLECTIVES=1 the rules 1 and 2 are checked in every collective, by
comparison through the store of the process group, and groups with one rank call the backend too instead of skipping it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from twinflow.errors import wrong_state
from twinflow.launch.store import group_store, own_keys

TIMEOUT = timedelta(minutes=10)
_PATIENCE = timedelta(seconds=0.5)  # interval between two checks whether to give up waiting
_UNUSED_TAG = 1  # messages have tag 0
CHECK = "TWINFLOW_CHECK_COLLECTIVES"


@dataclass(frozen=True)
class Sending:
    """A message on its way. It keeps the sent memory alive."""

    work: Any
    memory: Tensor
    is_on_host: bool

    def wait(self) -> None:
        """Blocks until the memory was sent and may be freed.

        With NCCL, torch's `wait` blocks only the current stream. The memory belongs to another stream, so the calling
        thread then waits for its current stream.
        """
        self.work.wait()
        if not self.is_on_host:
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Shifting:
    """Tensors on their way around the ranks of a group. It keeps the sent memory alive."""

    works: Sequence[Any]
    sent: Tensor
    received: Tensor
    device: torch.device | None = None  # of the result; None: that of `received`

    def wait(self) -> Tensor:
        """The received tensor. Blocks the calling thread (gloo) or the current stream (NCCL) until both messages are
        complete.
        """
        for work in self.works:
            work.wait()
        return self.received if self.device is None else self.received.to(self.device)


class _CallOrder:
    """Compares call number n of this rank in a group with call n of the rank that was first to make it, without waiting
    for other ranks. The store keeps one key for each call, so this is for debugging only."""

    def __init__(self, handle: Any) -> None:
        self._keys = own_keys(group_store(), f"collectives/{handle.group_name}", dist.get_rank())
        self._busy = threading.Lock()
        self._count = 0

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise wrong_state(
                f"The collective {what} cannot start",
                "another thread is using the same group",
                "Give each thread a group of its own.",
            )
        try:
            first = self._keys.compare_set(str(self._count), "", what).decode()
            if first != what:
                raise wrong_state(
                    f"The collective {what} cannot start",
                    f"another rank called {first} as number {self._count} of this group",
                    "Call the same collectives in the same order on all ranks.",
                )
            self._count += 1
            yield
        finally:
            self._busy.release()


class Group:
    """Ranks that call the same collectives in the same order. Only one thread at a time may use a group."""

    def __init__(self, handle: Any, ranks: Sequence[int], is_on_host: bool) -> None:
        self.handle = handle
        self.ranks = tuple(ranks)
        self.world = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if handle is not None else 0
        self.is_on_host = is_on_host  # True for gloo.
        self.sent_bytes = 0  # bytes that this rank sent, without the overhead of the backend
        self.num_calls = 0  # number of collectives that the backend has run
        self._gives_up: Callable[[], bool] | None = None
        is_checked = handle is not None and os.environ.get(CHECK) == "1"
        self._order = _CallOrder(handle) if is_checked else None
        self._is_skipped = self.world == 1 and not is_checked  # one rank has nothing to send

    def give_up_when(self, gives_up: Callable[[], bool]) -> None:
        """Lets a thread that waits for other ranks over gloo raise RuntimeError when `gives_up` returns True, because
        they may never arrive.
        """
        self._gives_up = gives_up

    def reduce_scatter(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """`out` = the sum over all ranks of this rank's part of `whole`, sent as `dtype`."""
        assert whole.numel() == out.numel() * self.world
        self._count(whole.numel() * dtype.itemsize)
        if self._is_skipped:
            out.copy_(whole)
            return
        with self._call("reduce_scatter", whole.numel(), dtype):
            if self.is_on_host:
                out.copy_(self._exchange_and_sum(whole, dtype))
                return
            part = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
            _reduce_scatter(part, whole.to(dtype), self.handle)
            if part is not out:
                out.copy_(part)

    def _exchange_and_sum(self, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """Gets the versions of this rank's part from all ranks and sums them, at least in fp32."""
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
        if self._is_skipped:
            return rows
        given = rows.cpu() if rows.is_cuda and self.is_on_host else rows
        with self._call("exchange", rows.numel(), rows.dtype):
            return self._exchange(given).to(rows.device)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` rows to rank 0, the next `sent[1]` rows to rank 1, and so on. Returns the rows that
        all ranks sent to this rank, in the order of the ranks. `received`: their numbers, by rank.
        """
        assert rows.dim() == 2 and rows.is_contiguous() and rows.shape[0] == sum(sent)
        own_bytes = rows.shape[1] * rows.element_size() * sent[self.rank]
        self.sent_bytes += rows.numel() * rows.element_size() - own_bytes
        if self._is_skipped:
            return rows
        given = rows.cpu() if rows.is_cuda and self.is_on_host else rows
        taken = given.new_empty(sum(received), rows.shape[1])
        with self._call("exchange_rows", rows.shape[1], rows.dtype):  # ranks have different numbers of rows
            self._all_to_all(taken.view(torch.uint8), given.view(torch.uint8), list(received), list(sent))
        return taken.to(rows.device)

    def _exchange(self, given: Tensor) -> Tensor:
        taken = torch.empty_like(given)
        self._all_to_all(taken, given)
        return taken

    def _all_to_all(
        self, taken: Tensor, given: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> None:
        work = dist.all_to_all_single(taken, given, received, sent, group=self.handle, async_op=self.is_on_host)
        if self.is_on_host:
            self._wait(work)

    def all_reduce(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """`out` = the sum over all ranks of `whole`, sent as `dtype` and bitwise equal on all ranks."""
        if self._is_skipped:
            out.copy_(whole)
            return
        with self._call("all_reduce", whole.numel(), dtype):
            if self.is_on_host:
                self._all_reduce_on_host(out, whole, dtype)
                return
            self._count(2 * whole.numel() * dtype.itemsize)
            total = whole.to(dtype, copy=True)
            dist.all_reduce(total, group=self.handle)
            out.copy_(total)

    def _all_reduce_on_host(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        size = -(-whole.numel() // self.world)
        rest = size * self.world - whole.numel()
        padded = pad(whole, (0, rest)) if rest else whole
        self._count(padded.numel() * dtype.itemsize)
        # The sum is sent in the narrower one of the two dtypes.
        total = torch.empty(padded.numel(), dtype=min(dtype, whole.dtype, key=lambda one: one.itemsize))
        total[self.rank * size : (self.rank + 1) * size] = self._exchange_and_sum(padded, dtype)
        self._gather(total)
        out.copy_(total[: whole.numel()])

    def all_gather(self, whole: Tensor) -> None:
        """Gathers the parts of all ranks in place. This rank's part of `whole` is the input."""
        if not self._is_skipped:
            with self._call("all_gather", whole.numel(), whole.dtype):
                self._gather(whole)

    def _gather(self, whole: Tensor) -> None:
        self._count(whole.numel() * whole.element_size())
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

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copies the tensor of one rank of the group, by default the first, to all ranks."""
        if self._is_skipped or not tensor.numel():
            return
        if self.rank == source:
            self.sent_bytes += tensor.numel() * tensor.element_size()
        flat = tensor.detach().reshape(-1)
        if self.is_on_host != (flat.device.type == "cpu"):  # A model on the GPU may have a buffer on the host.
            flat = flat.to("cpu" if self.is_on_host else "cuda")
        flat = flat.contiguous()
        if flat.stride(0) != 1:  # one element, which torch calls contiguous, but does not view as bytes
            flat = flat.new_empty(1).copy_(flat)
        with self._call("broadcast", flat.numel(), flat.dtype):
            raw, first = flat.view(torch.uint8), self.ranks[source]
            work = dist.broadcast(raw, src=first, group=self.handle, async_op=self.is_on_host)
            if self.is_on_host:
                self._wait(work)
        if self.rank != source:
            tensor.detach().copy_(flat.view(tensor.shape))

    def gather_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks in the order of the ranks, on the host."""
        rows = torch.empty(self.world, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        self.all_gather(rows.view(-1))
        return rows

    def gather(self, row: Tensor) -> Tensor | None:
        """The rows of all ranks in the order of the ranks, on the first rank, and None on the others. All rows are on
        the host and have the same size.
        """
        if self._is_skipped:
            return row[None]
        raw = row.contiguous().view(-1).view(torch.uint8)
        is_first = self.rank == 0
        rows = torch.empty(self.world, *row.shape, dtype=row.dtype) if is_first else None
        parts = list(rows.view(self.world, -1).view(torch.uint8)) if rows is not None else None
        if not is_first:
            self.sent_bytes += raw.numel()
        with self._call("gather", row.numel(), row.dtype):
            self._wait(dist.gather(raw, parts, dst=self.ranks[0], group=self.handle, async_op=True))
        return rows

    def shift(self, tensor: Tensor) -> Shifting:
        """Starts to send a contiguous tensor to the next rank, and to receive one of this size from the previous one.
        All ranks call it. `Shifting.wait` returns the received tensor.
        """
        if self.world == 1:
            return Shifting([], tensor, tensor)
        self.sent_bytes += tensor.numel() * tensor.element_size()
        sent = tensor.cpu() if tensor.is_cuda and self.is_on_host else tensor
        received = torch.empty_like(sent)
        to, source = self.ranks[(self.rank + 1) % self.world], self.ranks[self.rank - 1]
        with self._call("shift", tensor.numel(), tensor.dtype):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent.view(-1).view(torch.uint8), to, self.handle),
                    dist.P2POp(dist.irecv, received.view(-1).view(torch.uint8), source, self.handle),
                ]
            )
        return Shifting(works, sent, received, tensor.device)

    # Messages between two ranks, given by their positions in the group. They need no order with collectives, because
    # a group with messages has no collectives.

    def send(self, tensor: Tensor, receiver: int) -> Sending:
        """Starts to send a contiguous tensor."""
        return Sending(dist.isend(tensor, self.ranks[receiver], group=self.handle), tensor, self.is_on_host)

    def receive(self, tensors: Sequence[Tensor], sender: int) -> None:
        """Receives into contiguous tensors. Blocks until they are complete."""
        for tensor in tensors:
            dist.recv(tensor, self.ranks[sender], group=self.handle)
        if tensors and not self.is_on_host:
            torch.cuda.current_stream().synchronize()

    def hang_up(self) -> None:
        """Closes the connections of a gloo group by a wait that times out, because gloo then closes them."""
        for rank in self.ranks[: self.rank] + self.ranks[self.rank + 1 :]:
            with suppress(RuntimeError):  # the connection is already closed
                work = dist.irecv(torch.empty(1), rank, group=self.handle, tag=_UNUSED_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))

    def _call(self, name: str, numel: int, dtype: torch.dtype) -> AbstractContextManager[None]:
        self.num_calls += 1
        if self._order is None:
            return nullcontext()
        return self._order.call(f"{name} of {numel} x {str(dtype).removeprefix('torch.')}")

    def _wait(self, work: Any) -> None:
        """Waits until all ranks have arrived. Raises RuntimeError if the function of `give_up_when` returns True."""
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
        """Adds to `sent_bytes` what a rank sends of the `whole_bytes` of a collective: all parts except its own."""
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


def new_group(
    backend: str, ranks: Sequence[int] | None = None, timeout: timedelta = TIMEOUT, has_collectives: bool = True
) -> Group:
    """Creates a process group. All its ranks (None: all ranks of the world) must call this function in the same order,
    and must have created the same number of groups before: torch names a group by its ranks and that number.

    The NCCL communicator is created here too. Otherwise torch would create it in the first collective, and several
    threads could create communicators in different orders. `has_collectives` is False for a group with messages only,
    for which torch creates a communicator for each pair of ranks.
    """
    members = list(ranks) if ranks is not None else list(range(dist.get_world_size()))
    if ranks is not None and len(members) == 1:
        return alone()
    is_some = ranks is not None  # Ranks outside the group do not make this call.
    handle = dist.new_group(members, backend=backend, timeout=timeout, use_local_synchronization=is_some)
    group = Group(handle, members, is_on_host=backend == "gloo")
    if has_collectives and not group.is_on_host and group.world > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=handle)
        torch.cuda.current_stream().synchronize()
    return group


def world_group() -> Group:
    """The group of all ranks that torch's init_process_group made, for calls outside the training step."""
    handle = dist.group.WORLD
    return Group(handle, range(dist.get_world_size()), is_on_host="nccl" not in dist.get_backend())


def skip_group() -> None:
    """Must be called by a rank that is not in a group, while the ranks of that group call `new_group`.

    torch names a group by its ranks and by the number of groups that exist.
    """
    dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def backend_for(device: torch.device) -> str:
    """The backend for tensors on this device: NCCL for GPUs if the process group has it, else gloo."""
    given = dist.get_backend()
    return "nccl" if device.type == "cuda" and "nccl" in given else "gloo"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Gives the calling thread its own stream of a GPU, so that its waits do not delay the model."""
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def use_here(tensor: Tensor) -> Tensor:
    """Must be called with a tensor of another thread's stream before it is used on the current stream.

    The caching allocator then reuses the memory only after the work of the current stream.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
