# SPDX-License-Identifier: Apache-2.0
"""`offload_param`: weights are on the host and are copied to the device block by block.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together.

The trainable weights of a block are part of the optimizer state on the host. If that state is on a disk, they are the
part of it that stays in memory (disk_updater.py). Frozen weights, and those whose state is on a disk, can be in a file
of their own (weight_source.py). Its records are read some blocks ahead of the fetches (`_expect`).

On the device a block has buffers (weight_buffers.py). The storage of a buffer has memory only from the fetch until the
block has run: it is resized to 0 after the block has run, and to its full size before the next fetch. Views that
autograd has saved are therefore valid again in the block's backward. While the block does not run, its parameters have
no values, and code that uses them gets copies (host_params.py, weight_copies.py, state_dict_weights.py).

Tied layers are two blocks with the same weights (`Block.owner`). A block whose optimizer state is on the device (ratio
below 1) is not offloaded: its weights stay on the device, and nothing here concerns it. With ratio "auto", blocks move
between steps (`bring`, `send_away`).

Threads and order: the thread that runs the model asks for the copies ("fetches"), in the order of the blocks and
`BLOCKS_AHEAD` blocks ahead. It resizes the storage at once, on the model's stream, and records an event there. The
executor copies the weights on the stream "fetch", after that event and after the block's update. The model's stream
waits for the event of the copy before the block runs. If ranks share the buckets, the thread of `SharedFetcher` copies
this rank's part and gathers the other parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.fetch_hooks import put_hooks
from twinflow.offload.fetcher import Fetch, Gather, NativeFetcher, SharedFetcher
from twinflow.offload.hooks import call_after_backward, in_backward
from twinflow.offload.host_params import HostParams
from twinflow.offload.lost_weights import refuse_use
from twinflow.offload.quantised import inner_tensors, is_wrapper, plain_params
from twinflow.offload.state_dict_weights import StateDictHooks
from twinflow.offload.state_file import StateFile
from twinflow.offload.sync import FORWARD
from twinflow.offload.weight_buffers import BufferMaker, WeightBuffer
from twinflow.offload.weight_copies import GraphCopies, OnWrite, UserCopies
from twinflow.offload.weight_guard import cover, plain, uncover
from twinflow.offload.weight_source import OnDisk

BLOCKS_AHEAD = 2  # blocks that are fetched while one runs


@dataclass(eq=False)
class BlockWeights:
    """The weights of one block and whether they are on the device."""

    buffers: list[WeightBuffer] = field(default_factory=list)
    is_here: bool = False  # the buffers have memory on the device
    fetch: Fetch | None = None  # the fetch that was asked for and that the model does not wait for yet
    due: int = 0  # `newest` when the weights were fetched
    num_written: int = 0  # number of writes by the user
    quantised: list[nn.Parameter] = field(default_factory=list)  # weights that consist of other parameters

    @property
    def newest(self) -> int:
        """Sum of the job numbers of the buckets, which changes with each step."""
        return sum(buffer.bucket.due for buffer in self.buffers if buffer.bucket is not None)


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
        on_write: OnWrite,
        before_error: Callable[[], None],
        can_move: bool = False,
        file: StateFile | None = None,
        max_frozen_bytes: int | None = None,
    ) -> None:
        """`frozen`: the frozen weights of each block. `values`: the values of all weights for the host. A block stays
        on the device if the weights of its buckets do. `before_error`: called before a backward raises an exception.
        `can_move`: blocks may move later (`bring`, `send_away`). `file`: for frozen weights, with records of
        `max_frozen_bytes`.
        """
        assert not can_move or (file is None and gather is None)
        world, rank = (gather.world, gather.rank) if gather is not None else (1, 0)
        self.params = HostParams(rank)
        self.user_copies = UserCopies(on_write)
        self.before_error = before_error
        self._graph_copies = GraphCopies()
        self._on_write = on_write
        self._device = device
        self._executor = executor
        self._frozen = frozen
        self._file = file
        self._gathers = gather is not None
        self._can_move = can_move
        self._maker = BufferMaker(device, where, world, rank, file, max_frozen_bytes)
        self._blocks: dict[int, BlockWeights] = {}
        self._owner_of: dict[int, int] = {}  # by block whose weights are tied to those of another one: that block
        self._owners: list[weakref.ref[nn.Module]] = []  # modules with these parameters
        self._wrappers = {p for params in frozen.values() for p in params if is_wrapper(p)}
        self._registered: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]] = []  # quantised weights in modules
        self._recorded: Sequence[int] = ()  # order of all blocks in the first forward
        self._order: list[int] = []  # order of the offloaded blocks in a forward
        self._writes: dict[int, int] = {}  # by block that has moved to the device: the next `num_written`
        self._trail: list[int] = []  # blocks that have run forward and whose backward has not begun
        self._begun: set[int] = set()  # blocks whose backward has begun
        self._is_in_backward = False
        self._versions: dict[Tensor, int] = {}  # versions of parameters when their block began to run
        by_block: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if bucket.offloads_params:
                by_block.setdefault(bucket.plan.block, []).append(bucket)
        for own in by_block.values():
            self._add(self._maker.of_buckets(own))
        kept = {bucket.plan.block for bucket in buckets if not bucket.offloads_params}
        for block in [block for block in frozen if block not in kept]:
            self._add(self._maker.of_frozen(block, plain_params(frozen[block], values), values))
            self._add_quantised(block)
        self._order = sorted(self._blocks)
        self.fetcher: NativeFetcher | SharedFetcher = NativeFetcher(executor)
        self.threads: list[SharedFetcher] = []
        if gather is not None:
            self.fetcher = SharedFetcher(executor, device, gather)
            self.threads.append(self.fetcher)

    def _add(self, buffers: Iterable[WeightBuffer]) -> None:
        """Adds buffers to their blocks and releases their device memory, before `buffers` makes the next ones."""
        for buffer in buffers:
            self._blocks.setdefault(buffer.block, BlockWeights()).buffers.append(buffer)
            self.params.add(buffer)

    def _add_quantised(self, block: int) -> None:
        quantised = [param for param in self._frozen.get(block, ()) if param in self._wrappers]
        if quantised:
            self._blocks.setdefault(block, BlockWeights()).quantised = quantised
            self.params.add_quantised(quantised)

    # Calls by hooks on the model.

    def attach(self, model: nn.Module, blocks: Sequence[Block]) -> list[RemovableHandle]:
        """Registers the hooks. They run after the runtime's own hooks, which are registered later with `prepend`."""
        known = {*self.params.offloaded}
        self._owner_of = {block.index: block.tied_to for block in blocks if block.tied_to is not None}
        if self._can_move:
            known.update(param for block in blocks for param in block.module.parameters())
        owners = [m for m in model.modules() if any(p in known for p in m._parameters.values())]
        self._owners = [weakref.ref(module) for module in owners]
        for module in model.modules() if self._wrappers else ():
            for name, param in module._parameters.items():
                if param is not None and param in self._wrappers:
                    self._registered.append((weakref.ref(module), name, param))
        handles = StateDictHooks(self.params, self.user_copies, self._before_state_dict).attach(owners)
        for block in blocks:
            if self.is_offloaded(block.index) or self._can_move:
                handles += put_hooks(self, block)
        return handles

    def set_order(self, order: Sequence[int]) -> None:
        """Sets the order of the blocks, which the first forward has recorded."""
        self._recorded = order
        self._order = [block for block in dict.fromkeys(order) if self.is_offloaded(block)]

    def is_offloaded(self, block: int) -> bool:
        """Whether the weights of a block are on the host."""
        return self._owner(block) in self._blocks

    def _owner(self, block: int) -> int:
        """The block that has the weights of a block."""
        return self._owner_of.get(block, block)

    def _of(self, block: int) -> BlockWeights:
        return self._blocks[self._owner(block)]

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
        self.user_copies.store()
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
                    self._on_write(param, view, is_running=True)
                    self._versions[param] = param._version

    def before_backward(self, block: int) -> None:
        """Before the backward of a block: waits for its weights and asks for the weights of the blocks that follow."""
        if not self.is_offloaded(block):  # a graph from before the block has moved to the device
            return
        self._at_first_gradient()
        self.user_copies.store()
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
            call_after_backward(self._end_backward)

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
        return (weights.newest << 20) + weights.num_written if weights is not None else -1

    def owns(self, tensor: Tensor) -> bool:
        return self.params.owns(tensor)

    def copy_for_graph(self, view: Tensor) -> Tensor:
        return self._graph_copies.add(view)

    # Device memory of a block.

    def _ask_for(self, block: int) -> None:
        """Gives the buffers of a block memory and asks for the copy of its weights."""
        weights = self._of(block)
        if weights.is_here or self.params.are_shown(weights.buffers):
            return
        for buffer in weights.buffers:
            buffer.resize(buffer.storage_bytes)
        weights.is_here = True
        weights.due = weights.newest
        weights.fetch = self.fetcher.ask(weights.buffers, self._device.compute().record())

    def _enter(self, block: int) -> None:
        """Blocks until the copy of the weights is queued, and makes the model's stream wait for the copy."""
        weights = self._of(block)
        if weights.is_here and weights.due != weights.newest:  # they were fetched before a step
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
        elif self.params.are_shown(weights.buffers):
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

    def _leave(self, block: int) -> None:
        """Takes the memory from the buffers of a block."""
        weights = self._of(block)
        if not weights.is_here:
            return
        if weights.fetch is not None:  # the block never ran, and the copy may still write to the memory
            self._hold(weights.fetch)
            weights.fetch = None
        else:
            self._keep_writes(block)
        for buffer in weights.buffers:
            self.params.empty(buffer)
        cover(weights.quantised)
        weights.is_here = False

    def leave_all(self) -> None:
        """Releases the weights of all blocks."""
        self._trail.clear()
        self._begun.clear()
        for block in self._blocks:
            self._leave(block)

    # Reads and writes of weights outside of their block.

    def _before_state_dict(self, params: Sequence[nn.Parameter]) -> None:
        """Stores what the user has written to these weights, and waits for their updates."""
        away = [param for param in params if not self._blocks[self._block_of(param)].is_here]
        self._store_replaced(away)
        self.user_copies.store()
        buffers = [buffer for param in params for buffer in self.params.buffers_of(param)]
        self._executor.wait_for_weights([buffer.bucket for buffer in buffers if buffer.bucket is not None])

    def _block_of(self, param: Tensor) -> int:
        return self.params.buffers_of(param)[0].block

    def store_written(self) -> None:
        """Stores what the user has written to copies of weights, or has put into weights by `set_`."""
        away = (weights for weights in self._blocks.values() if not weights.is_here)
        self._store_replaced(param for weights in away for buffer in weights.buffers for param, _ in buffer.views)
        self.user_copies.store()

    def _store_replaced(self, params: Iterable[nn.Parameter]) -> None:
        for param, values in self.params.take_replaced(params):
            self._on_write(param, values)

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
        self.params.write(param, values, is_on_all_ranks)
        self.user_copies.note_write(param, values)
        if not is_running:
            self.forget_fetched(param, is_counted)

    def forget_fetched(self, param: Tensor, is_counted: bool = True) -> None:
        """Releases the device copy of a parameter's block, because the weights on the host are written."""
        block = self._block_of(param)
        self._blocks[block].num_written += is_counted
        self._leave(block)
        self._graph_copies.invalidate(self.params.buffers_of(param)[0])

    def after_step(self) -> None:
        """Invalidates all copies of weights, because the step changes the weights."""
        self.user_copies.note_step()
        self._graph_copies.invalidate()

    # Whole values for some time, as in DeepSpeed's GatheredParameters. A block all of whose weights are shown runs
    # with them: it fetches nothing, so ranks may run it different numbers of times.

    def show(self, param: Tensor, values: Tensor) -> None:
        """Gives a parameter its whole values, in memory of its own, until `conceal`."""
        self._leave(self._block_of(param))
        self.params.show(param, values)

    def conceal(self, param: Tensor) -> None:
        """Takes the values of `show` from a parameter."""
        self._leave(self._block_of(param))
        self.params.conceal(param)

    # Moves of whole blocks between steps (ratio "auto"), in a process whose weights no other rank shares.

    def bring(self, block: int) -> None:
        """Moves the weights of a block to the device. Its parameters are ordinary ones from now on.

        Raises MemoryError, and changes nothing, if the device has too little memory.
        """
        assert self._can_move
        self.leave_all()
        weights = self._blocks[block]
        try:
            self._ask_for(block)
        except RuntimeError as error:  # torch reports full memory as a RuntimeError
            for buffer in weights.buffers:
                buffer.resize(0)
            raise MemoryError(str(error)) from error
        assert weights.fetch is not None
        weights.fetch.wait().synchronize()  # the memory on the host is released soon
        self._enter(block)
        del self._blocks[block]
        for buffer in weights.buffers:
            self.params.remove(buffer)
            self._graph_copies.invalidate(buffer)
            if buffer.bucket is None:
                buffer.free_host(self._device)
            for param, _ in buffer.views:
                self._versions.pop(param, None)
        self.params.remove_quantised(weights.quantised)
        self._writes[block] = weights.num_written + 1  # graphs of earlier forwards cannot use the weights any more
        self.set_order(self._recorded or self._order)

    def send_away(self, block: int, buckets: Sequence[Bucket]) -> None:
        """Moves the weights of a block to the host. The state of its buckets is there already, with the weights.

        Raises MemoryError, and changes nothing, if there is too little memory.
        """
        assert self._can_move
        frozen = self._frozen.get(block, ())
        inner = [one for param in frozen for _, one in inner_tensors(param)]
        values = {one: one.detach().cpu() for one in inner if isinstance(one, nn.Parameter)}
        try:
            own = self._maker.of_frozen(block, plain_params(frozen, values), values)
            buffers = [*self._maker.of_buckets(buckets), *own]
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        # Graphs of earlier forwards have saved the memory on the device. Their backward must raise an exception.
        with plain():
            torch._C._increment_version([param for buffer in buffers for param, _ in buffer.views])
        self._add(buffers)
        self._add_quantised(block)
        self._blocks[block].num_written = self._writes.get(block, 0)
        self.set_order(self._recorded or [*self._order, block])

    # The end.

    def settle(self) -> None:
        """Releases all weights and waits until no copy reads the weights on the host."""
        self.leave_all()
        self._device.stream("fetch").synchronize()

    def close(self, keep_weights: bool) -> None:
        """Gives the parameters their values as tensors on the host. Weights that ranks share stay without values, and
        their modules raise an error. Without `keep_weights`, this holds for all weights, and after an exception for
        those that could not be read.
        """
        kept: set[Tensor] = set()
        try:
            self.settle()
            for weights in self._blocks.values():
                for buffer in weights.buffers:
                    if keep_weights and buffer.is_whole:
                        self._keep(buffer, kept)
                    if buffer.bucket is None:  # freed here, so that there is never a second copy of all frozen weights
                        buffer.free_host(self._device)
        finally:
            self.give_up(kept)
        for reference, name, param in self._registered if keep_weights else ():
            module = reference() if self.params.has_quantised(param) else None
            if module is not None and param.device.type != "cpu":  # a quantised weight cannot change its device
                made = self.params.quantised_on_host(param)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)

    def _keep(self, buffer: WeightBuffer, kept: set[Tensor]) -> None:
        """Gives the parameters of a buffer their values on the host, and adds them to `kept`."""
        is_view = buffer.bucket is None and not buffer.is_on_disk
        for param, _ in buffer.views:
            found = self.params.on_host(param)
            with plain():
                param.data = found.clone() if is_view else found
            kept.add(param)

    def give_up(self, kept: Collection[Tensor] = ()) -> None:
        """Ends the guard of all weights. From now on modules refuse the use of those without values."""
        lost = [param for param in self.params.offloaded if self.params.holds(param) and param not in kept]
        refuse_use(lost, [module for reference in self._owners if (module := reference()) is not None])
        uncover(self.params.offloaded)
