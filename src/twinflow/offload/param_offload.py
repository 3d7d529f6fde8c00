"""Weights that live on the host and come to the device block by block: `offload_param`.

A block's trainable weights are what its buckets' state on the host holds anyway; its frozen ones lie beside them. On
the device a block has a buffer for each bucket whose memory is there only while the block runs: the buffer's storage is
given back and taken again, so that what autograd has saved of it is right again when the block's backward begins.
Meanwhile the parameters themselves have no values (one NaN in their shape) and are guarded (weight_guard.py): whoever
reads one outside its block gets a copy, and what he writes goes into the state.

A fetch is asked for by the thread that runs the model, in the order of the blocks, some blocks ahead. It takes the
memory at once, on the model's own stream. As soon as the block's update is in the state, the executor copies the
weights on a stream of its own, after what the model's stream had to do before. Where ranks share the buckets, a thread
(`SharedFetcher`) copies this rank's part, and the ranks gather the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.fetch_hooks import check_transform, put_hooks
from twinflow.offload.fetcher import Fetch, Gather, NativeFetcher, SharedFetcher, WeightBuffer
from twinflow.offload.hooks import Hook, in_backward
from twinflow.offload.plan import padded
from twinflow.offload.sync import FORWARD
from twinflow.offload.weight_guard import cover, plain, uncover

BLOCKS_AHEAD = 2  # blocks that are fetched while one runs


@dataclass(eq=False)
class BlockWeights:
    """A block's weights."""

    buffers: list[WeightBuffer] = field(default_factory=list)
    is_here: bool = False  # it has memory on the device
    fetch: Fetch | None = None  # on its way, and not yet waited for
    due: int = 0  # the job whose weights are here
    num_written: int = 0  # times that somebody else has written to them


class Loan(NamedTuple):
    """A copy of a parameter that somebody has, and may write to."""

    param: Tensor
    copied: Tensor
    version: int  # of the copy, when it was handed out
    is_counted: bool  # torch counts a write to it as one to the parameter


class Piece(NamedTuple):
    """Elements [start, start + numel) of a parameter."""

    start: int
    numel: int
    read: Callable[[], Tensor]  # as they are now, flat
    write: Callable[[Tensor], None]


class _Engine(Protocol):
    """What torch's autograd engine offers, which has no types."""

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call it when the outermost backward has ended."""
        ...


class ParamOffload:
    """All blocks' weights. Everything here is called by the thread that runs the model, or its backward."""

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
    ) -> None:
        self._device = device
        self._executor = executor
        self._blocks: dict[int, BlockWeights] = {}
        self._places: dict[Tensor, tuple[WeightBuffer, Tensor]] = {}
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._order: list[int] = []  # of the blocks, in a forward
        self._trail: list[int] = []  # blocks whose backward is to come
        self._begun: set[int] = set()  # ... or has
        self._is_in_backward = False
        self._gathers = gather is not None
        self._versions: dict[Tensor, int] = {}  # of parameters, when their block began to run
        self._on_write = on_write  # somebody has written to a weight: calls `store` when nobody uses the state
        self.before_error = before_error  # a backward is about to fail
        self._loans: list[Loan] = []
        # Storages of flat buffers, and copies of weights there that graphs of gradients have.
        self._in_graphs: list[tuple[int, Tensor]] = []
        self._storages: set[int] = set()
        for bucket in buckets:
            if bucket.offloads_params:
                buffer = WeightBuffer(
                    _host_of(bucket), _new_flat(bucket.gathered.numel, bucket.plan.dtype, where), [], bucket
                )
                for piece in bucket.gathered.slices:
                    param = next(p for p in bucket.members if p.index == piece.param)
                    self._put(buffer, param.tensor, piece.offset)
                self._add(bucket.plan.block, buffer)
        world, rank = (gather.world, gather.rank) if gather is not None else (1, 0)
        self._rank = rank
        for block, params in frozen.items():
            for dtype in dict.fromkeys(param.dtype for param in params):
                same = [param for param in params if param.dtype == dtype]
                self._add(block, self._offload_frozen(same, values, where, world, rank))
        self._order = sorted(self._blocks)
        self.fetcher: NativeFetcher | SharedFetcher = NativeFetcher(executor)
        self.threads: list[SharedFetcher] = []
        if gather is not None:
            self.fetcher = SharedFetcher(executor, device, gather)
            self.threads.append(self.fetcher)

    def _add(self, block: int, buffer: WeightBuffer) -> None:
        """To a block's weights; the memory it was made with is given back at once, as there is none for all of them."""
        self._blocks.setdefault(block, BlockWeights()).buffers.append(buffer)
        self._storages.add(buffer.flat.untyped_storage()._cdata)
        self._empty(buffer)

    def _put(self, buffer: WeightBuffer, param: nn.Parameter, offset: int) -> None:
        view = buffer.flat.as_strided(param.shape, _strides(param.shape), offset)
        buffer.views.append((param, view))
        self._places[param] = (buffer, view)

    def _offload_frozen(
        self,
        params: Sequence[nn.Parameter],
        values: Mapping[nn.Parameter, Tensor],
        where: torch.device,
        world: int,
        rank: int,
    ) -> WeightBuffer:
        """Weights that nothing updates: this rank's part of them, page-locked."""
        dtype, starts, used = params[0].dtype, [], 0
        for param in params:
            starts.append(used)
            used += padded(param.numel())
        size = -(-used // world)
        whole = torch.zeros(size * world, dtype=dtype)
        for param, start in zip(params, starts, strict=True):
            whole[start : start + param.numel()] = values[param].reshape(-1)
        host = self._device.pinned(size, dtype)
        host.copy_(whole[rank * size : (rank + 1) * size])
        buffer = WeightBuffer(lambda: host, _new_flat(size * world, dtype, where), [], None)
        for param, start in zip(params, starts, strict=True):
            self._put(buffer, param, start)
        return buffer

    # What the weights are.

    def holds(self, param: Tensor) -> bool:
        """Whether a parameter's weights live here."""
        return param in self._places

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters whose weights live here."""
        return list(self._places)

    def copy_of(self, param: Tensor) -> Tensor:
        """A parameter's weights in memory of their own on the device, after the updates that are due."""
        buffer, view = self._places[param]
        self._check_whole(buffer)
        return host_view(buffer, view).to(buffer.flat.device, copy=True)

    def store(self, param: Tensor, values: Tensor, is_running: bool = False, is_counted: bool = True) -> None:
        """Other values for a parameter. Called when nobody reads or updates the state. `is_running`: by its own block,
        whose graph has them already. `is_counted`: torch counts the write, so that graphs from before it must fail;
        else their backward uses the new values, as with torch."""
        buffer, _ = self._places[param]
        self._check_whole(buffer)
        if values.shape != param.shape:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} whose weights live on the host (offload_param) cannot be "
                f"given "
                f"values of shape {tuple(values.shape)}"
            )
        values = values.to(device="cpu", dtype=param.dtype)
        for piece in self.pieces(param):
            piece.write(values.reshape(-1)[piece.start : piece.start + piece.numel])
        for block, weights in self._blocks.items() if not is_running else ():
            if buffer in weights.buffers:
                weights.num_written += is_counted
                self._leave(block)
                self._spoil_graphs(buffer)

    def replaced(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters that somebody gave memory of their own, by `set_`, which torch reports to nobody; and their
        values."""
        found: list[tuple[nn.Parameter, Tensor]] = []
        check_transform()
        with plain():
            for weights in self._blocks.values():
                for buffer in weights.buffers if not weights.is_here else ():
                    for param, view in buffer.views:
                        if param.data_ptr() != self._nan(view).data_ptr():
                            found.append((param, param.detach()))
                            param.data = self._nan(view)
        return found

    def lend(self, tensor: Tensor, copied: Tensor, is_counted: bool) -> None:
        """Remember a copy that was handed out: somebody may write to its memory."""
        self._loans.append(Loan(tensor, copied, copied._version, is_counted))

    def store_loans(self) -> None:
        """Store copies that were written to since they were handed out. Those that nobody else has are forgotten."""
        loans, self._loans = self._loans, []
        self._loans = [it for it in loans if it.copied._version == it.version and _has_other_users(it.copied)]
        for it in loans:
            if it.copied._version != it.version:
                self._on_write(it.param, it.copied, False, it.is_counted)

    def copy_for_graph(self, view: Tensor) -> Tensor:
        """What a graph of gradients (create_graph=True) saves of a weight: it is needed after its block's backward."""
        copied = view.clone()
        self._in_graphs = [it for it in self._in_graphs if _has_other_users(it[1])]
        self._in_graphs.append((view.untyped_storage()._cdata, copied))
        return copied

    def after_step(self) -> None:
        """Weights change."""
        for weights in self._blocks.values():
            for buffer in weights.buffers if self._in_graphs else ():
                self._spoil_graphs(buffer)

    def _spoil_graphs(self, buffer: WeightBuffer) -> None:
        """Let torch refuse the backward of a graph of gradients that has copies of old weights."""
        storage = buffer.flat.untyped_storage()._cdata
        torch._C._increment_version([copied for where, copied in self._in_graphs if where == storage])
        self._in_graphs = [it for it in self._in_graphs if it[0] != storage]

    def _check_whole(self, buffer: WeightBuffer) -> None:
        if buffer.host().numel() != buffer.flat.numel():
            raise RuntimeError(
                "a weight that lives on several hosts in parts (offload_param with more than one rank) is used "
                "outside the "
                "forward of its block, where no rank has all of it. Use it inside its block, or leave offload_param out"
            )

    def pieces(self, param: Tensor) -> list[Piece]:
        """What this process has of a parameter's weights."""
        buffer, view = self._places[param]
        host, at, bucket = buffer.host, int(view.storage_offset()), buffer.bucket
        size = host().numel()
        if bucket is not None:
            own = [(i, p) for i, p in enumerate(bucket.slices) if bucket.params[i].tensor is param]
            return [Piece(p.start, p.numel, _reader(host, p.offset, p.numel), _writer(bucket, i)) for i, p in own]
        low = self._rank * size if buffer.flat.numel() > size else 0
        start, stop = max(at, low), min(at + param.numel(), low + size)
        if start >= stop:
            return []
        read = _reader(host, start - low, stop - start)
        return [Piece(start - at, stop - start, read, _copier(read))]

    def _hide(self, module: nn.Module, *_: object) -> None:
        """A state dict is about to take every parameter as it stands. That needs no copy: `_show` replaces it."""
        params = [param for param in module._parameters.values() if param is not None and param in self._places]
        buckets = [buffer.bucket for buffer, _ in map(self._places.__getitem__, params) if buffer.bucket is not None]
        self._executor.wait_for_weights(buckets)
        uncover(params)

    def _show(self, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        """In a state dict, the weights where they live. Of those that ranks have in parts, nobody can read any."""
        for name, param in module._parameters.items():
            if param is None or param not in self._places:
                continue
            cover((param,))
            if prefix + name not in state:
                continue
            buffer, view = self._places[param]
            is_whole = buffer.host().numel() == buffer.flat.numel()
            state[prefix + name] = host_view(buffer, view) if is_whole else torch.empty_like(view, device="meta")

    # What hangs on the model.

    def attach(self, model: nn.Module, blocks: Sequence[Block]) -> list[RemovableHandle]:
        """Hooks on the blocks; they come after the runtime's own, which are put before them later."""
        owners = [m for m in model.modules() if any(p in self._places for p in m._parameters.values())]
        handles: list[RemovableHandle] = []
        for module in owners:
            handles.append(module.register_state_dict_pre_hook(Hook(self._hide)))  # type: ignore[no-untyped-call]
            handles.append(module.register_state_dict_post_hook(Hook(self._show)))  # type: ignore[no-untyped-call]
        for block in blocks:
            if block.index in self._blocks:
                handles += put_hooks(self, block)
        return handles

    def set_order(self, order: Sequence[int]) -> None:
        """As the first forward has shown."""
        self._order = [block for block in dict.fromkeys(order) if block in self._blocks]

    def before_model(self) -> None:
        """A forward of the whole model begins: nothing is left of the last one, and the first blocks come."""
        self._is_in_backward = False  # the last one may have raised
        self.leave_all()
        for block in self._order[:BLOCKS_AHEAD]:
            self._ask_for(block)

    def before_block(self, block: int) -> None:
        """A block is about to run, forwards or again in a backward."""
        if in_backward():  # recomputed
            self.before_backward(block)
            return
        self.store_loans()
        if torch.is_grad_enabled():
            self._trail.append(block)
        self._enter(block)
        at = self._order.index(block) if block in self._order else len(self._order)
        for other in self._order[at + 1 : at + 1 + BLOCKS_AHEAD]:
            self._ask_for(other)

    def after_block(self, block: int) -> None:
        """A block has run; the last one's backward comes next."""
        self._keep_writes(block)
        is_last = bool(self._order) and block == self._order[-1]
        if not in_backward() and not (is_last and torch.is_grad_enabled()):
            self._leave(block)

    def _keep_writes(self, block: int) -> None:
        """What a block has written to its own weights while it ran goes to the host."""
        for buffer in self._blocks[block].buffers:
            for param, view in buffer.views:
                if param._version != self._versions.get(param, param._version):
                    self._on_write(param, view, True, True)
                    self._versions[param] = param._version

    def before_backward(self, block: int) -> None:
        """A block's backward begins."""
        self._at_first_gradient()
        self.store_loans()
        self._begun.add(block)
        self._enter(block)
        while self._trail and self._trail[-1] != block:
            self._trail.pop()
        for other in reversed(self._trail[-1 - BLOCKS_AHEAD : -1]):
            self._ask_for(other)

    def _at_first_gradient(self) -> None:
        """See to it that nothing stays when this backward has ended."""
        if not self._is_in_backward and in_backward():
            self._is_in_backward = True
            engine: _Engine = torch.autograd.Variable._execution_engine  # torch has no public name for it
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        if self._gathers:  # blocks that this rank's backward left out, as the others ask for them too
            for block in reversed([block for block in self._trail if block not in self._begun]):
                self._ask_for(block)
        self.leave_all()

    def after_backward(self, block: int) -> None:
        """The gradients of a block's inputs are there."""
        self._leave(block)

    def leave_others(self, block: int) -> None:
        """Of all other blocks that have run nothing is needed any more in this backward."""
        for other, weights in self._blocks.items():
            if other != block and weights.fetch is None:
                self._leave(other)

    def edition(self, block: int) -> int:
        """Another number with every step, and every write of the user's, that changes the weights."""
        weights = self._blocks[block]
        return (_due(weights) << 20) + weights.num_written

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a block's weights."""
        return tensor.untyped_storage()._cdata in self._storages

    # A block's memory.

    def _enter(self, block: int) -> None:
        """Wait for its weights: here until they are on their way, on the device until they are there."""
        weights = self._blocks[block]
        if weights.is_here and weights.due != _due(weights):  # from before a step
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
        for buffer in weights.buffers:
            uncover(param for param, _ in buffer.views)

    def _hold(self, fetch: Fetch) -> None:
        """Let the model wait for a fetch."""
        try:
            self._device.hold_compute(fetch.wait(), FORWARD)
        except Exception:
            self._executor.check()
            raise

    def _ask_for(self, block: int) -> None:
        weights = self._blocks[block]
        if weights.is_here:
            return
        for buffer in weights.buffers:
            buffer.flat.untyped_storage().resize_(buffer.flat.numel() * buffer.flat.element_size())
        weights.is_here, weights.due = True, _due(weights)
        weights.fetch = self.fetcher.ask(weights.buffers, self._device.compute().record())

    def _leave(self, block: int) -> None:
        weights = self._blocks[block]
        if not weights.is_here:
            return
        if weights.fetch is not None:  # it never ran, and a copy may still write there
            self._hold(weights.fetch)
            weights.fetch = None
        else:
            self._keep_writes(block)
        self._give_back(weights)

    def leave_all(self) -> None:
        """Nothing of any block stays on the device."""
        self._trail.clear()
        self._begun.clear()
        for block in self._blocks:
            self._leave(block)

    def _give_back(self, weights: BlockWeights) -> None:
        for buffer in weights.buffers:
            self._empty(buffer)
        weights.is_here = False

    def _empty(self, buffer: WeightBuffer) -> None:
        with plain():
            for param, view in buffer.views:
                param.data = self._nan(view)
        cover(param for param, _ in buffer.views)
        buffer.flat.untyped_storage().resize_(0)

    def _nan(self, view: Tensor) -> Tensor:
        if view.dtype not in self._nothing:
            nothing = float("nan") if view.dtype.is_floating_point else 0
            self._nothing[view.dtype] = torch.full((), nothing, dtype=view.dtype, device=view.device)
        return self._nothing[view.dtype].expand(view.shape)

    def settle(self) -> None:
        """Nothing reads the weights on the host any more."""
        self.leave_all()
        self._device.stream("fetch").synchronize()

    def close(self) -> None:
        """Give the parameters their weights again, on the host; where ranks have parts, they stay without."""
        self.settle()
        for weights in self._blocks.values():
            for buffer in weights.buffers:
                if buffer.host().numel() == buffer.flat.numel():
                    for param, view in buffer.views:
                        with plain():
                            param.data = host_view(buffer, view).clone()


def host_view(buffer: WeightBuffer, view: Tensor) -> Tensor:
    """A parameter's weights where they live, where this process has all of them."""
    start = int(view.storage_offset())
    return buffer.host()[start : start + view.numel()].view(view.shape)


def take_aside(model: nn.Module, params: Sequence[nn.Parameter], where: torch.device) -> dict[nn.Parameter, Tensor]:
    """The values of these parameters, on the host; they stay behind with no memory on the device. All else of the model
    goes there."""
    values = {param: param.detach().to("cpu").contiguous() for param in params}
    for param in params:
        param.data = torch.zeros((), dtype=param.dtype, device=where).expand(param.shape)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and tensor not in values and tensor.device != where:
                    tensor.data = tensor.data.to(where)
    return values


def _reader(host: Callable[[], Tensor], start: int, numel: int) -> Callable[[], Tensor]:
    return lambda: host()[start : start + numel]


def _copier(read: Callable[[], Tensor]) -> Callable[[Tensor], None]:
    def write(values: Tensor) -> None:
        read().copy_(values.reshape(-1))

    return write


def _writer(bucket: Bucket, index: int) -> Callable[[Tensor], None]:
    return lambda values: bucket.updater.write_master(bucket, index, values.reshape(-1), keep=True)


def _due(weights: BlockWeights) -> int:
    return sum(buffer.bucket.due for buffer in weights.buffers if buffer.bucket is not None)


def _host_of(bucket: Bucket) -> Callable[[], Tensor]:
    """What the state holds at that moment: stores are swapped."""

    def host() -> Tensor:
        store = bucket.store
        return store.weight if store.weight is not None else store.master

    return host


def _new_flat(numel: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """A buffer; its memory is given back before anything uses it."""
    return torch.empty(numel, dtype=dtype, device=where)


def _has_other_users(copied: Tensor) -> bool:
    """Whether anything but this tensor uses its memory."""
    return int(torch._C._storage_Use_Count(copied.untyped_storage()._cdata)) > 2


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
