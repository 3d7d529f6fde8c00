# SPDX-License-Identifier: Apache-2.0
"""`offload_param`: weights are on the host and are copied to the device block by block.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together.

The trainable weights of a block are part of the optimizer state on the host. If that state is on a disk, they are the
part of it that stays in memory (disk_updater.py). Frozen weights have page-locked buffers of their own. Frozen weights,
and those whose state is on a disk, can be in a file of their own instead (weight_source.py). Its records are read some
blocks ahead of the fetches (`_expect`). On the device a
block has one buffer for each bucket. The storage of the buffer has memory only from the fetch until the block has run:
it is resized to 0 after the block has run, and to its full size before the next fetch. Views that autograd has saved
are therefore valid again in the block's backward. While the block does not run, its parameters have no values (they are
an expanded NaN) and are guarded (weight_guard.py): a read returns a copy, and a write changes the state.

A parameter of an embedding or output layer (`Block.is_embedding`) may be divided over several buckets. The buffers of
these buckets are then parts of one storage, in which the parameter is contiguous. Tied layers are two blocks with the
same weights (`Block.owner`).

A block whose optimizer state is on the device (ratio below 1) is not offloaded: its weights stay on the device, and
nothing here concerns it. With ratio "auto", blocks move between steps (`bring`, `send_away`).

Threads and order: the thread that runs the model asks for the copies ("fetches"), in the order of the blocks and
`BLOCKS_AHEAD` blocks ahead. It resizes the storage at once, on the model's stream, and records an event there. The
executor copies the weights on the stream "fetch", after that event and after the block's update. The model's stream
waits for the event of the copy before the block runs. If ranks share the buckets, the thread of `SharedFetcher` copies
this rank's part and gathers the other parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.device import Device, to_host
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket
from twinflow.offload.disk_updater import DiskUpdater, weights_of
from twinflow.offload.executor import Executor
from twinflow.offload.fetch_hooks import check_transform, put_hooks
from twinflow.offload.fetcher import Fetch, Gather, NativeFetcher, SharedFetcher, WeightBuffer
from twinflow.offload.hooks import Hook, in_backward
from twinflow.offload.plan import padded
from twinflow.offload.quantised import inner_tensors, is_wrapper, rebuilt
from twinflow.offload.state_file import StateFile
from twinflow.offload.sync import FORWARD
from twinflow.offload.weight_guard import cover, plain, uncover
from twinflow.offload.weight_source import InMemory, OnDisk, WeightSource, frozen_groups

BLOCKS_AHEAD = 2  # blocks that are fetched while one runs


@dataclass(eq=False)
class BlockWeights:
    """The weights of one block and whether they are on the device."""

    buffers: list[WeightBuffer] = field(default_factory=list)
    is_here: bool = False  # the buffers have memory on the device
    fetch: Fetch | None = None  # the fetch that was asked for and that the model does not wait for yet
    due: int = 0  # sum of the buckets' job numbers (`_due`) when the weights were fetched; it changes with each step
    num_written: int = 0  # number of writes by the user
    quantised: list[nn.Parameter] = field(default_factory=list)  # weights that consist of other parameters


@dataclass(eq=False)
class Loan:
    """A copy of a parameter that was handed to the user, who may write to it."""

    param: Tensor
    copied: Tensor
    version: int  # version of the copy when it was handed out, or when a write to it was stored last
    is_counted: bool  # torch would increment the parameter's version for a write to the copy
    is_old: bool = False  # the weight has changed since, and the copy has not


class Piece(NamedTuple):
    """Elements [start, start + numel) of a parameter that this process has."""

    start: int
    numel: int
    read: Callable[[], Tensor]  # returns the present values, flat
    write: Callable[[Tensor], None]
    is_on_disk: bool = False  # `read` copies the values from a disk; otherwise it returns a view


class _Engine(Protocol):
    """The method of torch's autograd engine that is used here. torch has no type annotation for it."""

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the outermost backward has ended."""
        ...


class ParamOffload:
    """The offloaded weights of all blocks. The thread that runs the model and autograd's thread call its methods."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        buckets: Sequence[Bucket],
        frozen: Mapping[int, Sequence[nn.Parameter]],
        values: Mapping[nn.Parameter, Tensor],
        gather: Gather | None,
        where: torch.device,
        on_write: Callable[[Tensor, Tensor, bool, bool], None],
        before_error: Callable[[], None],
        can_move: bool = False,
        file: StateFile | None = None,
        max_frozen_bytes: int | None = None,
    ) -> None:
        """`frozen`: the frozen weights of each block. `values`: the values of all weights for the host. A block stays
        on the device if the weights of its buckets do. `can_move`: blocks may move later (`bring`, `send_away`).
        `file`: for frozen weights, with records of `max_frozen_bytes`.
        """
        assert file is None or not can_move
        self._file = file
        self._max_frozen_bytes = max_frozen_bytes
        self._device = device
        self._executor = executor
        self._where = where
        self._frozen = frozen
        self._wrappers = {p for params in frozen.values() for p in params if is_wrapper(p)}
        self._can_move = can_move
        self._world, self._rank = (gather.world, gather.rank) if gather is not None else (1, 0)
        self._num_frozen = 0  # records of frozen weights
        self._blocks: dict[int, BlockWeights] = {}
        self._owner_of: dict[int, int] = {}  # by block whose weights are tied to those of another one: that block
        self._places: dict[Tensor, tuple[WeightBuffer, Tensor]] = {}
        self._divided: dict[Tensor, list[WeightBuffer]] = {}  # by parameter that several buckets have parts of
        self._owners: list[weakref.ref[nn.Module]] = []  # modules with these parameters
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._quantised: dict[Tensor, type] = {}  # classes of quantised weights
        self._registered: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]] = []  # quantised weights
        self._recorded: Sequence[int] = ()  # order of all blocks in the first forward
        self._order: list[int] = []  # order of the offloaded blocks in a forward
        self._writes: dict[int, int] = {}  # by block that has moved to the device: the next `num_written`
        self._trail: list[int] = []  # blocks that have run forward and whose backward has not begun
        self._begun: set[int] = set()  # blocks whose backward has begun
        self._is_in_backward = False
        self._gathers = gather is not None
        self._versions: dict[Tensor, int] = {}  # versions of parameters when their block began to run
        self._on_write = on_write  # called after the user's write to a weight; it calls `store` when the state is free
        self.before_error = before_error  # called before a backward raises an exception
        self._loans: list[Loan] = []
        # Copies of weights in graphs made with create_graph=True, each with the storage of its flat buffer.
        self._in_graphs: list[tuple[int, Tensor]] = []
        self._storages: set[int] = set()
        self._kept: set[Tensor] = set()  # parameters that have got their values in `close`
        self._shown: dict[Tensor, Tensor] = {}  # whole values of parameters for code outside of their block (`show`)
        by_block: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if bucket.offloads_params:
                by_block.setdefault(bucket.plan.block, []).append(bucket)
        for block, own in by_block.items():
            for buffer in self._buffers_of(own):
                self._add(block, buffer)
        kept = {bucket.plan.block for bucket in buckets if not bucket.offloads_params}
        for block in [block for block in frozen if block not in kept]:
            for buffer in self._frozen_buffers(block, values):
                self._add(block, buffer)
            self._add_quantised(block)
        self._order = sorted(self._blocks)
        self.fetcher: NativeFetcher | SharedFetcher = NativeFetcher(executor)
        self.threads: list[SharedFetcher] = []
        if gather is not None:
            self.fetcher = SharedFetcher(executor, device, gather)
            self.threads.append(self.fetcher)

    def _add(self, block: int, buffer: WeightBuffer) -> None:
        """Adds a buffer to a block and releases its device memory, because all buffers together may not fit."""
        self._blocks.setdefault(block, BlockWeights()).buffers.append(buffer)
        self._storages.add(buffer.flat.untyped_storage()._cdata)
        self._places.update((param, (buffer, view)) for param, view in buffer.views)
        self._empty(buffer)

    def _add_quantised(self, block: int) -> None:
        quantised = [param for param in self._frozen.get(block, ()) if param in self._wrappers]
        if quantised:
            self._blocks.setdefault(block, BlockWeights()).quantised = quantised
            self._quantised.update((weight, type(weight)) for weight in quantised)
            cover(quantised)

    def _buffers_of(self, buckets: Sequence[Bucket]) -> Iterator[WeightBuffer]:
        """The buffers of a block's buckets."""
        chain: list[Bucket] = []
        for bucket in buckets:
            if chain and chain[-1].gathered.slices[-1].param != bucket.gathered.slices[0].param:
                yield from self._chained(chain)
                chain = []
            chain.append(bucket)
        yield from self._chained(chain)

    def _chained(self, buckets: Sequence[Bucket]) -> list[WeightBuffer]:
        """Buffers in one storage, of buckets whose last parameter continues in the next bucket.

        The padding at the end of a buffer is the beginning of the next one, which is copied later.
        """
        starts = [0]
        for bucket in buckets:
            last = bucket.gathered.slices[-1]
            starts.append(starts[-1] + last.offset + last.numel)
        numel = max(start + bucket.gathered.numel for start, bucket in zip(starts, buckets, strict=False))
        storage = _new_flat(numel, buckets[0].plan.dtype, self._where)
        buffers: list[WeightBuffer] = []
        for start, bucket in zip(starts, buckets, strict=False):
            flat = storage[start : start + bucket.gathered.numel]
            buffer = _new_buffer(host_of(bucket), flat, bucket)
            for piece in bucket.gathered.slices:
                tensor = next(p for p in bucket.members if p.index == piece.param).tensor
                if piece.start == 0:
                    _put(buffer, tensor, start + piece.offset)
                if piece.numel != tensor.numel():
                    self._divided.setdefault(tensor, []).append(buffer)
            buffers.append(buffer)
        return buffers

    def _frozen_buffers(self, block: int, values: Mapping[nn.Parameter, Tensor]) -> Iterator[WeightBuffer]:
        """Buffers for the block's frozen weights, each for one dtype."""
        params = plain_params(self._frozen.get(block, ()), values)
        for group in frozen_groups(params, self._max_frozen_bytes if self._file is not None else None):
            yield self._frozen_buffer(group, values)

    def _frozen_buffer(self, params: Sequence[nn.Parameter], values: Mapping[nn.Parameter, Tensor]) -> WeightBuffer:
        """Copies this rank's part of frozen weights into page-locked memory, or into the file."""
        world, rank = self._world, self._rank
        dtype, starts, used = params[0].dtype, [], 0
        for param in params:
            starts.append(used)
            used += padded(param.numel())
        size = -(-used // world)
        whole = torch.zeros(size * world, dtype=dtype)
        for param, start in zip(params, starts, strict=True):
            whole[start : start + param.numel()] = values[param].reshape(-1)
        host = self._new_host(size, dtype)
        with host.hold(is_changed=True) as part:
            part.copy_(whole[rank * size : (rank + 1) * size])
        buffer = _new_buffer(host, _new_flat(size * world, dtype, self._where), None)
        for param, start in zip(params, starts, strict=True):
            _put(buffer, param, start)
        return buffer

    def _new_host(self, numel: int, dtype: torch.dtype) -> WeightSource:
        if self._file is None:
            memory = self._device.pinned(numel, dtype)
            return InMemory(lambda: memory)
        self._num_frozen += 1
        self._file.add(-self._num_frozen, numel * dtype.itemsize)
        return OnDisk(self._file, -self._num_frozen, numel, dtype)

    # Moves of whole blocks between steps (ratio "auto"), in a process whose weights no other rank shares.

    def is_offloaded(self, block: int) -> bool:
        """Whether the weights of a block are on the host."""
        return self._owner(block) in self._blocks

    def _owner(self, block: int) -> int:
        """The block that has the weights of a block."""
        return self._owner_of.get(block, block)

    def _of(self, block: int) -> BlockWeights:
        return self._blocks[self._owner(block)]

    def bring(self, block: int) -> None:
        """Moves the weights of a block to the device. Its parameters are ordinary ones from now on.

        Raises MemoryError, and changes nothing, if the device has too little memory.
        """
        assert self._can_move and self._world == 1
        self.leave_all()
        weights = self._blocks[block]
        try:
            self._ask_for(block)
        except RuntimeError as error:  # torch reports full memory as a RuntimeError
            for buffer in weights.buffers:
                _resize(buffer, 0)
            raise MemoryError(str(error)) from error
        assert weights.fetch is not None
        weights.fetch.wait().synchronize()  # the memory on the host is released soon
        self._enter(block)
        del self._blocks[block]
        for buffer in weights.buffers:
            self._storages.discard(buffer.flat.untyped_storage()._cdata)
            self._spoil_graphs(buffer)
            if buffer.bucket is None:
                self._device.release(buffer.host.read(0, buffer.host.numel))
            for param, _ in buffer.views:
                del self._places[param]
                self._divided.pop(param, None)
                self._versions.pop(param, None)
        for param in weights.quantised:
            del self._quantised[param]
        self._writes[block] = weights.num_written + 1  # graphs of earlier forwards cannot use the weights any more
        self.set_order(self._recorded or self._order)

    def send_away(self, block: int, buckets: Sequence[Bucket]) -> None:
        """Moves the weights of a block to the host. The state of its buckets is there already, with the weights.

        Raises MemoryError, and changes nothing, if there is too little memory.
        """
        assert self._can_move and self._world == 1
        inner = [one for param in self._frozen.get(block, ()) for _, one in inner_tensors(param)]
        values = {one: one.detach().cpu() for one in inner if isinstance(one, nn.Parameter)}
        try:
            buffers = [*self._buffers_of(buckets), *self._frozen_buffers(block, values)]
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        # Graphs of earlier forwards have saved the memory on the device. Their backward must raise an exception.
        with plain():
            torch._C._increment_version([param for buffer in buffers for param, _ in buffer.views])
        for buffer in buffers:
            self._add(block, buffer)
        self._add_quantised(block)
        self._blocks[block].num_written = self._writes.get(block, 0)
        self.set_order(self._recorded or [*self._order, block])

    # Values of the weights.

    def holds(self, param: Tensor) -> bool:
        """Whether the weights of a parameter are offloaded."""
        return param in self._places

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters whose weights are offloaded."""
        return [*self._places, *self._quantised]

    def is_away(self, param: Tensor) -> bool:
        """Whether a parameter has no values outside of its block."""
        return (param in self._places and param not in self._shown) or param in self._quantised

    # Whole values for some time, as in DeepSpeed's GatheredParameters. A block all of whose weights are shown runs
    # with them: it fetches nothing, so ranks may run it different numbers of times.

    def show(self, param: Tensor, values: Tensor) -> None:
        """Gives a parameter its whole values, in memory of its own, until `conceal`."""
        buffer, _ = self._places[param]
        for block, weights in self._blocks.items():
            if buffer in weights.buffers:
                self._leave(block)
        self._shown[param] = values
        with plain():
            param.data = values
        uncover((param,))

    def conceal(self, param: Tensor) -> None:
        """Takes the values of `show` from a parameter."""
        buffer, view = self._places[param]
        for block, weights in self._blocks.items():
            if buffer in weights.buffers:
                self._leave(block)
        del self._shown[param]
        with plain():
            param.data = self._nan(view)
        cover((param,))

    def is_shown(self, param: Tensor) -> bool:
        return param in self._shown

    def _is_all_shown(self, block: int) -> bool:
        if not self._shown:
            return False
        return all(param in self._shown for buffer in self._of(block).buffers for param, _ in buffer.views)

    def copy_of(self, param: Tensor) -> Tensor:
        """A copy of a parameter's weights in separate device memory. It includes all updates that are due."""
        if param in self._quantised:
            return rebuilt(param, self._quantised[param], self._copy_of_inner)
        buffer, view = self._places[param]
        self._check_whole(buffer)
        if param not in self._divided:
            return host_view(buffer, view).to(buffer.flat.device, copy=buffer.host.record < 0)
        copied = torch.empty(param.shape, dtype=param.dtype, device=buffer.flat.device)
        self._read_into(copied, param)
        return copied

    def _read_into(self, whole: Tensor, param: Tensor) -> None:
        """Copies the weights on the host into a tensor of the parameter's shape."""
        for piece in self.pieces(param):
            whole.view(-1)[piece.start : piece.start + piece.numel].copy_(piece.read())

    def _on_host(self, param: Tensor) -> Tensor:
        """The weights on the host: a copy, or a view of frozen weights in memory."""
        buffer, view = self._places[param]
        with torch.inference_mode(False):  # in an inference tensor no write would be counted
            if buffer.bucket is None:
                return host_view(buffer, view)
            copied = torch.empty(param.shape, dtype=param.dtype)
            self._read_into(copied, param)
            return copied

    def _copy_of_inner(self, tensor: Tensor) -> Tensor:
        return self.copy_of(tensor) if tensor in self._places else tensor.clone()

    def store(
        self,
        param: Tensor,
        values: Tensor,
        is_running: bool = False,
        is_counted: bool = True,
        is_on_all_ranks: bool = False,
    ) -> None:
        """Replaces the values of a parameter. The caller ensures that no thread reads or updates the state.

        `is_on_all_ranks`: all ranks store the same values, each its part. `is_running`: the block itself wrote to its
        weight while it ran, so its graph already uses the new values. `is_counted`: the write increments the
        parameter's version, so the backward of older graphs must fail. If it is false, the backward of older graphs
        uses the new values. Both are as with torch.
        """
        if param in self._quantised:
            raise wrong_state(
                "A quantised weight cannot be written",
                "it is on the host (offload_param), in the format of its library",
                "Write to it after close() of the optimizer, or train without offload_param.",
            )
        buffer, _ = self._places[param]
        if not is_on_all_ranks:
            self._check_whole(buffer)
        if values.shape != param.shape:
            raise invalid_value(
                "The shape of the new values of an offloaded parameter (offload_param)",
                tuple(values.shape),
                f"the parameter's shape {tuple(param.shape)}",
                "Assign values of that shape.",
            )
        for it in self._loans:
            if it.param is param and it.copied.untyped_storage()._cdata != values.untyped_storage()._cdata:
                it.is_old = True
        values = values.to(device="cpu", dtype=param.dtype)
        for piece in self.pieces(param):
            piece.write(values.reshape(-1)[piece.start : piece.start + piece.numel])
        if not is_running:
            self.forget_fetched(param, is_counted)

    def forget_fetched(self, param: Tensor, is_counted: bool = True) -> None:
        """Releases the device copy of a parameter's block, because the weights on the host are written."""
        buffer, _ = self._places[param]
        for block, weights in self._blocks.items():
            if buffer in weights.buffers:
                weights.num_written += is_counted
                self._leave(block)
                self._spoil_graphs(buffer)

    def replaced(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters whose memory the user has replaced by `set_`, with their new values.

        This method searches for them, because torch has no hook for `set_`.
        """
        away = (weights for weights in self._blocks.values() if not weights.is_here)
        return self._replaced(pair for weights in away for buffer in weights.buffers for pair in buffer.views)

    def _replaced(self, views: Iterable[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        found: list[tuple[nn.Parameter, Tensor]] = []
        check_transform()
        with plain():
            for param, view in views:
                if param not in self._shown and param.data_ptr() != self._nan(view).data_ptr():
                    found.append((param, param.detach()))
                    param.data = self._nan(view)
        return found

    def lend(self, tensor: Tensor, copied: Tensor, is_counted: bool) -> None:
        """Remembers a copy that was handed to the user, who may write to it."""
        self._loans.append(Loan(tensor, copied, copied._version, is_counted))

    def store_loans(self) -> None:
        """Stores lent copies that the user has written to. Forgets copies that the user does not hold any more.

        Raises RuntimeError if the user has written to a copy from before a step or before another write to the weight,
        after all other copies are stored.
        """
        written = [it for it in self._loans if it.copied._version != it.version]
        stored: dict[int, Tensor] = {}
        is_lost = False
        for it in written:
            it.version = it.copied._version
            other = stored.get(id(it.param))  # a dict has several copies of a weight with several names
            if other is not None and torch.equal(other.to(it.copied.device), it.copied):
                it.is_old = False
            elif it.is_old:
                is_lost = True
            else:
                self._on_write(it.param, it.copied, False, it.is_counted)
                stored[id(it.param)] = it.copied
        self._loans = [it for it in self._loans if _has_other_users(it.copied)]
        if is_lost:
            raise wrong_state(
                "A write to a copy of a weight on the host cannot be stored",
                "a step, or a write to the weight or to another copy of it, has changed the weight since the copy was "
                "made, and this copy would undo that",
                "Take a new copy with state_dict() or param.data before you write, or write to the parameter itself.",
            )

    def copy_for_graph(self, view: Tensor) -> Tensor:
        """Copies a weight for a graph with create_graph=True, which needs it after the backward of its block."""
        copied = view.clone()
        self._in_graphs = [it for it in self._in_graphs if _has_other_users(it[1])]
        self._in_graphs.append((view.untyped_storage()._cdata, copied))
        return copied

    def after_step(self) -> None:
        """Invalidates all copies of weights, because the step changes the weights."""
        for it in self._loans:
            it.is_old = True
        for weights in self._blocks.values():
            for buffer in weights.buffers if self._in_graphs else ():
                self._spoil_graphs(buffer)

    def _spoil_graphs(self, buffer: WeightBuffer) -> None:
        """Increments the versions of copied weights, so that torch raises an exception in a backward that uses them."""
        storage = buffer.flat.untyped_storage()._cdata
        torch._C._increment_version([copied for where, copied in self._in_graphs if where == storage])
        self._in_graphs = [it for it in self._in_graphs if it[0] != storage]

    def _check_whole(self, buffer: WeightBuffer) -> None:
        if buffer.host.numel != buffer.flat.numel():
            raise wrong_state(
                "A weight cannot be used outside the forward of its block",
                "with offload_param and several ranks, each rank has only a part of the weight outside of the block",
                "Use it inside `with twinflow.compat.zero.GatheredParameters(param)`, or train without offload_param.",
            )

    def pieces(self, param: Tensor) -> list[Piece]:
        """The parts of a parameter's weights that this process has."""
        buffer, view = self._places[param]
        host, at, bucket = buffer.host, int(view.storage_offset() - buffer.flat.storage_offset()), buffer.bucket
        size = host.numel
        if bucket is not None:
            found = [(one, one.bucket) for one in self._divided.get(param, [buffer]) if one.bucket is not None]
            return [piece for one, own in found for piece in _pieces_in(one.host, own, param)]
        low = self._rank * size if buffer.flat.numel() > size else 0
        start, stop = max(at, low), min(at + param.numel(), low + size)
        if start >= stop:
            return []
        read = partial(host.read, start - low, stop - start)
        return [Piece(start - at, stop - start, read, _copier(host, start - low), host.record >= 0)]

    def _hide(self, module: nn.Module, *_: object) -> None:
        """Removes the guard before state_dict() reads the parameters. `_show` then replaces the values in the dict."""
        params = [p for p in module._parameters.values() if isinstance(p, nn.Parameter) and p in self._places]
        here = {id(buffer) for weights in self._blocks.values() if weights.is_here for buffer in weights.buffers}
        places = [(param, *self._places[param]) for param in params]
        for param, values in self._replaced((p, view) for p, buffer, view in places if id(buffer) not in here):
            self._on_write(param, values, False, True)
        self.store_loans()
        buffers = [one for param, buffer, _ in places for one in self._divided.get(param, [buffer])]
        buckets = [buffer.bucket for buffer in buffers if buffer.bucket is not None]
        self._executor.wait_for_weights(buckets)
        uncover(params)

    def _show(self, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        """Puts weights on the host into a state dict: copies, or views of frozen weights in memory. Weights that ranks
        share, and copies in `listed`, become `NoValues`.

        A write to a view of trained weights would not change a separate fp32 master, and would join an upper half with
        the lower half of another number. After a step the view could belong to a free store.
        """
        for name, param in module._parameters.items():
            if param is None or param not in self._places or param in self._shown:
                continue
            cover((param,))
            if prefix + name not in state:
                continue
            buffer, view = self._places[param]
            is_copied = buffer.bucket is not None or buffer.host.record >= 0
            if buffer.host.numel != buffer.flat.numel() or (is_copied and _IS_LISTING.get()):
                state[prefix + name] = NoValues.like(view)
                continue
            found = self._on_host(param)
            if is_copied:
                self.lend(param, found.detach(), is_counted=True)  # the user may write to the copy
            state[prefix + name] = found

    # Calls by hooks on the model.

    def attach(self, model: nn.Module, blocks: Sequence[Block]) -> list[RemovableHandle]:
        """Registers the hooks. They run after the runtime's own hooks, which are registered later with `prepend`."""
        known = {*self._places}
        self._owner_of = {block.index: block.tied_to for block in blocks if block.tied_to is not None}
        if self._can_move:
            known.update(param for block in blocks for param in block.module.parameters())
        owners = [m for m in model.modules() if any(p in known for p in m._parameters.values())]
        self._owners = [weakref.ref(module) for module in owners]
        handles: list[RemovableHandle] = []
        for module in model.modules() if self._wrappers else ():
            for name, param in module._parameters.items():
                if param is not None and param in self._wrappers:
                    self._registered.append((weakref.ref(module), name, param))
        for module in owners:
            handles.append(module.register_state_dict_pre_hook(Hook(self._hide)))  # type: ignore[no-untyped-call]
            handles.append(module.register_state_dict_post_hook(Hook(self._show)))  # type: ignore[no-untyped-call]
            # Hooks of the user, which may rename or convert tensors, run after it.
            module._state_dict_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
        for block in blocks:
            if self.is_offloaded(block.index) or self._can_move:
                handles += put_hooks(self, block)
        return handles

    def set_order(self, order: Sequence[int]) -> None:
        """Sets the order of the blocks, which the first forward has recorded."""
        self._recorded = order
        self._order = [block for block in dict.fromkeys(order) if self.is_offloaded(block)]

    def before_model(self) -> None:
        """Before a forward of the model: releases all weights and asks for the weights of the first blocks."""
        self._is_in_backward = False  # the last backward may have raised an exception
        self.leave_all()
        for block in self._order[:BLOCKS_AHEAD]:
            self._ask_for(block)
        self._expect(self._order[BLOCKS_AHEAD:])

    def before_block(self, block: int) -> None:
        """Before a block runs, in a forward or again in a backward: waits for its weights and fetches the next ones."""
        if in_backward():  # recomputation
            self.before_backward(block)
            return
        self.store_loans()
        if torch.is_grad_enabled():
            self._trail.append(block)
        self._enter(block)
        # The updates of this block have ended. When the last block runs, all gradients have left the device, and the
        # activations of the forward can use the memory in which they have waited for the clipping decision.
        self._executor.shrink_flats()
        at = self._order.index(block) if block in self._order else len(self._order)
        for other in self._order[at + 1 : at + 1 + BLOCKS_AHEAD]:
            self._ask_for(other)
        if self._file is not None:
            back = reversed(self._order[:-1]) if torch.is_grad_enabled() else ()
            self._expect([*self._order[at + 1 + BLOCKS_AHEAD :], *back])

    def after_block(self, block: int, is_needed: bool = True) -> None:
        """After a block has run in a forward: releases its weights, unless it is the last block before a backward.

        `is_needed`: the backward of the block may need its weights.
        """
        self._keep_writes(block)
        if in_backward():
            return
        is_last = bool(self._order) and block == self._order[-1] and torch.is_grad_enabled()
        if not is_needed and self._trail[-1:] == [block]:
            self._trail.pop()
        if not (is_last and is_needed):
            self._leave(block)
        if is_last and not is_needed and self._trail:  # backward begins with the block before it
            self._ask_for(self._trail[-1])

    def hold_block(self, block: int) -> None:
        """After an output layer has returned logits that are not computed yet: keeps its weights for the loss, which
        uses them in `fetch_hooks.run_inside`. Code outside of it gets copies, as of all weights on the host.
        """
        self._keep_writes(block)
        if self._trail[-1:] == [block]:
            self._trail.pop()
        cover(param for buffer in self._of(block).buffers for param, _ in buffer.views)

    def _keep_writes(self, block: int) -> None:
        """Copies the weights that a block has changed while it ran to the host."""
        weights = self._of(block)
        for buffer in weights.buffers if weights.is_here else ():
            for param, view in buffer.views:
                if param._version != self._versions.get(param, param._version):
                    self._on_write(param, view, True, True)
                    self._versions[param] = param._version

    def before_backward(self, block: int) -> None:
        """Before the backward of a block: waits for its weights and asks for the weights of the blocks that follow."""
        if not self.is_offloaded(block):  # a graph from before the block has moved to the device
            return
        self._at_first_gradient()
        self.store_loans()
        self._begun.add(block)
        self._enter(block)
        while self._trail and self._trail[-1] != block:
            self._trail.pop()
        for other in reversed(self._trail[-1 - BLOCKS_AHEAD : -1]):
            self._ask_for(other)
        self._expect(self._trail[: -1 - BLOCKS_AHEAD][::-1])

    def _expect(self, blocks: Iterable[int]) -> None:
        """Lets the file read the weights of these blocks, which will be fetched next, in this order."""
        if self._file is None:
            return
        found: list[int] = []
        for weights in (self._blocks[block] for block in blocks if block in self._blocks):
            found += [buffer.host.key for buffer in weights.buffers if isinstance(buffer.host, OnDisk)]
            if len(found) >= self._file.sizes.num_buffers:
                break
        self._file.expect(found)

    def _at_first_gradient(self) -> None:
        """Registers `_end_backward` with autograd at the first hook of a backward."""
        if not self._is_in_backward and in_backward():
            self._is_in_backward = True
            engine: _Engine = torch.autograd.Variable._execution_engine  # torch has no public name for it
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        if self._gathers:  # the other ranks fetch these blocks, so this rank must take part in the collectives
            for block in reversed([block for block in self._trail if block not in self._begun]):
                self._ask_for(block)
        self.leave_all()

    def after_backward(self, block: int) -> None:
        """After the backward of a block: releases its weights."""
        if self.is_offloaded(block):
            self._leave(block)

    def leave_others(self, block: int) -> None:
        """Releases the weights of all other blocks that have run, because this backward does not need them any more."""
        for other, weights in self._blocks.items():
            if other != self._owner(block) and weights.fetch is None:
                self._leave(other)

    def edition(self, block: int) -> int:
        """A number that changes with each step that updates the block, each counted write of the user (`store`) and
        each move of the block. It is -1 while the block is on the device.
        """
        weights = self._blocks.get(self._owner(block))
        return (_due(weights) << 20) + weights.num_written if weights is not None else -1

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor uses the memory of a block's device buffers."""
        if self._quantised:  # autograd may save a quantised weight, or a tensor of which it consists
            return any(one.untyped_storage()._cdata in self._storages for _, one in inner_tensors(tensor))
        return tensor.untyped_storage()._cdata in self._storages

    # Device memory of a block.

    def _enter(self, block: int) -> None:
        """Blocks until the copy of the weights is queued, and makes the model's stream wait for the copy."""
        weights = self._of(block)
        if weights.is_here and weights.due != _due(weights):  # they were fetched before a step
            self._leave(block)
        self._ask_for(block)
        if weights.fetch is not None:
            self._hold(weights.fetch)
            weights.fetch = None
            with plain():
                for buffer in weights.buffers:
                    for param, view in buffer.views:
                        param.data = view
                        self._versions[param] = param._version
        elif self._is_all_shown(block):
            return
        for buffer in weights.buffers:
            uncover(param for param, _ in buffer.views)
        uncover(weights.quantised)

    def _hold(self, fetch: Fetch) -> None:
        """Makes the model's stream wait for a fetch."""
        try:
            self._device.hold_compute(fetch.wait(), FORWARD)
        except Exception:
            self._executor.check()
            raise

    def _ask_for(self, block: int) -> None:
        weights = self._of(block)
        if weights.is_here or self._is_all_shown(block):
            return
        for buffer in weights.buffers:
            _resize(buffer, buffer.storage_bytes)
        weights.is_here, weights.due = True, _due(weights)
        weights.fetch = self.fetcher.ask(weights.buffers, self._device.compute().record())

    def _leave(self, block: int) -> None:
        weights = self._of(block)
        if not weights.is_here:
            return
        if weights.fetch is not None:  # the block never ran, and the copy may still write to the memory
            self._hold(weights.fetch)
            weights.fetch = None
        else:
            self._keep_writes(block)
        self._give_back(weights)

    def leave_all(self) -> None:
        """Releases the weights of all blocks."""
        self._trail.clear()
        self._begun.clear()
        for block in self._blocks:
            self._leave(block)

    def _give_back(self, weights: BlockWeights) -> None:
        for buffer in weights.buffers:
            self._empty(buffer)
        cover(weights.quantised)
        weights.is_here = False

    def _empty(self, buffer: WeightBuffer) -> None:
        with plain():
            for param, view in buffer.views:
                param.data = self._shown.get(param, self._nan(view))
        cover(param for param, _ in buffer.views if param not in self._shown)
        _resize(buffer, 0)

    def _nan(self, view: Tensor) -> Tensor:
        if view.dtype not in self._nothing:
            nothing = float("nan") if view.dtype.is_floating_point else 0
            self._nothing[view.dtype] = torch.full((), nothing, dtype=view.dtype, device=view.device)
        return self._nothing[view.dtype].expand(view.shape)

    def settle(self) -> None:
        """Releases all weights and waits until no copy reads the weights on the host."""
        self.leave_all()
        self._device.stream("fetch").synchronize()

    def close(self, keep_weights: bool) -> None:
        """Gives the parameters their values as tensors on the host. Weights that ranks share stay without values, and
        their modules raise an error. Without `keep_weights`, this holds for all weights, and after an exception for
        those that could not be read.
        """
        try:
            self.settle()
            for weights in self._blocks.values():
                for buffer in weights.buffers:
                    self._close(buffer, keep_weights)
        finally:
            self.give_up()
        for reference, name, param in self._registered if keep_weights else ():
            module = reference() if param in self._quantised else None
            if module is not None and param.device.type != "cpu":  # a quantised weight cannot change its device
                made = rebuilt(param, self._quantised[param], _on_host)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)

    def _close(self, buffer: WeightBuffer, keep_weights: bool) -> None:
        is_whole, is_in_memory = buffer.host.numel == buffer.flat.numel(), buffer.host.record < 0
        for param, _ in buffer.views if keep_weights and is_whole else ():
            found = self._on_host(param)
            with plain():
                param.data = found.clone() if buffer.bucket is None and is_in_memory else found
            self._kept.add(param)
        if buffer.bucket is None:  # freed here, so that there is never a second copy of all frozen weights
            if is_in_memory:
                self._device.release(buffer.host.read(0, buffer.host.numel))
            buffer.host = InMemory(_no_host)

    def give_up(self) -> None:
        """Ends the guard of all weights. From now on modules refuse the use of those without values."""
        lost = self._places.keys() - self._kept
        _LOST.update(dict.fromkeys(lost))
        for module in [module for reference in self._owners if (module := reference()) is not None]:
            if module not in _REFUSING and any(param in _LOST for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(_refuse)
                module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
                _REFUSING.add(module)
        uncover(self.tensors)


def _no_host() -> Tensor:
    raise AssertionError("the weights were released")


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


# Parameters that lost their values when their optimizer was closed, and modules that refuse their use.
_LOST: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
_REFUSING: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_lost(param: Tensor) -> bool:
    """Whether a parameter has had no values since its optimizer was closed. It may have been converted since then."""
    if param not in _LOST:
        return False
    if param.is_floating_point():
        has_values = not bool(param.detach()[(0,) * param.dim()].isnan())
    else:
        has_values = any(param.stride())  # otherwise it is an expanded scalar
    if has_values:
        del _LOST[param]  # the forward asks once
    return not has_values


def check_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RuntimeError if a parameter has no values."""
    for name, param in named:
        if is_lost(param):
            raise wrong_state(
                f"{name} cannot be used",
                "it has no values: with offload_param and several ranks each rank has a part of the weights, until the "
                "optimizer is closed; close(keep_weights=False) releases all weights; and after a failure in the "
                "background, or of a disk, they cannot be read",
                "Save the whole model before close() or destroy(), for example with save_pretrained(), and load it.",
            )


def _refuse(module: nn.Module, *_: object) -> None:
    check_values((name, param) for name, param in module._parameters.items() if param is not None)


class NoValues(Tensor):
    """A weight in a state dict of which this rank has only a part: a meta tensor that cannot be saved."""

    @classmethod
    def like(cls, weight: Tensor) -> Tensor:
        return torch.empty_like(weight, device="meta").as_subclass(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise wrong_state(
            "This state dict cannot be saved",
            "with offload_param and several ranks, it has the shapes and no values of weights, because each rank has "
            "only a part of them",
            "Save whole weights: call engine.save_16bit_model(), engine.module_state_dict(), "
            "accelerator.get_state_dict() or model.save_pretrained() on all ranks.",
        )


# Whether `listed` reads a state dict. The threads of a process have a value each.
_IS_LISTING: ContextVar[bool] = ContextVar("_IS_LISTING", default=False)


def listed(model: nn.Module) -> dict[str, object]:
    """The model's state dict, for its names, shapes and other objects: weights that it would copy are `NoValues`.
    Names that are not those of parameters, as hooks may give them, have their values.
    """
    reset = _IS_LISTING.set(True)
    try:
        found: dict[str, object] = model.state_dict()
    finally:
        _IS_LISTING.reset(reset)
    params = dict(model.named_parameters(remove_duplicate=False))
    if any(isinstance(value, NoValues) and name not in params for name, value in found.items()):
        return model.state_dict()
    return found


def host_view(buffer: WeightBuffer, view: Tensor) -> Tensor:
    """A parameter's weights on the host: a view, or a copy if they are on a disk. This process has all of them."""
    start = int(view.storage_offset() - buffer.flat.storage_offset())
    return buffer.host.read(start, view.numel()).view(view.shape)


def take_aside(model: nn.Module, params: Sequence[nn.Parameter], where: torch.device) -> dict[nn.Parameter, Tensor]:
    """Moves the values of `params` to the host and returns them. Moves the rest of the model to the device `where`.

    The parameters become expanded scalars on the device, which need no memory.
    """
    values = {param: to_host(param.detach()).contiguous() for param in params}
    for param in params:
        param.data = torch.zeros((), dtype=param.dtype, device=where).expand(param.shape)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and tensor not in values and tensor.device != where:
                    tensor.data = tensor.data.to(where)
    return values


def _put(buffer: WeightBuffer, param: nn.Parameter, offset: int) -> None:
    buffer.views.append((param, buffer.flat.as_strided(param.shape, _strides(param.shape), offset)))


def _new_buffer(host: WeightSource, flat: Tensor, bucket: Bucket | None) -> WeightBuffer:
    return WeightBuffer(host, flat, [], bucket, flat.untyped_storage().nbytes())


def _resize(buffer: WeightBuffer, num_bytes: int) -> None:
    """Resizes the storage of a buffer. Buffers may have one storage together, and `resize_` copies what is there."""
    storage = buffer.flat.untyped_storage()
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


def _pieces_in(host: WeightSource, bucket: Bucket, param: Tensor) -> list[Piece]:
    """The parts of a parameter that a bucket has."""
    own = [(i, p) for i, p in enumerate(bucket.slices) if bucket.params[i].tensor is param]
    reads = (partial(host.read, p.offset, p.numel) for _, p in own)
    return [
        Piece(p.start, p.numel, read, _writer(bucket, i), host.record >= 0)
        for (i, p), read in zip(own, reads, strict=True)
    ]


def plain_params(given: Iterable[nn.Parameter], values: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
    """Frozen weights of a block. Quantised ones are replaced by the parameters of which they consist."""
    params = [param for param in given if not is_wrapper(param)]
    inner = [one for param in given if is_wrapper(param) for _, one in inner_tensors(param)]
    return params + [one for one in inner if isinstance(one, nn.Parameter) and one in values]


def _copier(host: WeightSource, start: int) -> Callable[[Tensor], None]:
    def write(values: Tensor) -> None:
        with host.hold(is_changed=True) as whole:
            whole[start : start + values.numel()].copy_(values.reshape(-1))

    return write


def _writer(bucket: Bucket, index: int) -> Callable[[Tensor], None]:
    return lambda values: bucket.updater.write_master(bucket, index, values.reshape(-1), keep=True)


def _due(weights: BlockWeights) -> int:
    return sum(buffer.bucket.due for buffer in weights.buffers if buffer.bucket is not None)


def host_of(bucket: Bucket) -> WeightSource:
    """The weights of a bucket that blocks fetch: in its store, or on a disk."""
    there = bucket.updater.weights_on_disk(bucket) if isinstance(bucket.updater, DiskUpdater) else None
    return there if there is not None else InMemory(lambda: weights_of(bucket.store))


def _new_flat(numel: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """A flat device buffer. `_add` releases its memory at once."""
    return torch.empty(numel, dtype=dtype, device=where)


def _has_other_users(copied: Tensor) -> bool:
    """Whether other tensors use the memory of this tensor."""
    return int(torch._C._storage_Use_Count(copied.untyped_storage()._cdata)) > 2


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
