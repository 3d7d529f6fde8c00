"""The overlap runtime: takes gradients as backward makes them, hands tasks to the worker, lets forwards wait.

The way of a gradient, in execution order: `grad_ready` (a hook, during backward) gathers it in its bucket's flat device
buffer; a complete bucket becomes a task on the board (board.py), and two threads (threads.py) copy it out, update on
the host and send the weights back; `step` closes the job without waiting for it; `before_forward` (a hook, in the next
forward) waits for one block's weights, and whoever else reads a weight waits for it alone (weight_guard.py).

Gradients are taken during backward where `early` allows it (early.py). Else `step` takes them from `.grad`, and the
rest is the same. What was taken can be given back until `step`, as long as no update has been written (`can_undo`):
another backward, a changed gradient, option or weight then has the effect that it has with torch. Where updates are
written during backward, such a loop gets an error, after the step has been completed with what came.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload import changes, refusals, waits, weight_guard
from twinflow.offload.blocks import Block
from twinflow.offload.board import AllSummed
from twinflow.offload.bucket import Bucket, Job, Options, Param, Updater, local_of, new_bucket, set_deadlines
from twinflow.offload.collector import Collector
from twinflow.offload.early import WATCHED_STEPS, EarlyPolicy
from twinflow.offload.fetcher import Gather
from twinflow.offload.gate import Gate, Limits
from twinflow.offload.hooks import ModelHooks, take_gradients
from twinflow.offload.marks import Marks
from twinflow.offload.parking import Parking
from twinflow.offload.plan import HOST, ROOT, BucketPlan
from twinflow.offload.pools import new_board
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import Shards, Sharing
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.threads import BoardThread, Mover, Worker, end
from twinflow.offload.weight_guard import plain

LOGGER = logging.getLogger("twinflow")


class GradientQueue:
    """Gradients of one block that have come and wait in `.grad` for the others."""

    def __init__(self) -> None:
        self.params: list[Param] = []
        self.num_expected = 0  # as many as came in the last backward
        self.num_taken = 0  # in this one
        self.stream: int | None = None  # on which the last one was made, where the device has streams

    def forget(self) -> None:
        for param in self.params:
            param.is_queued = False
        self.params.clear()
        self.num_taken = 0


class Runtime:
    """One model's parameters, buckets and worker."""

    def __init__(
        self,
        device: Device,
        updaters: Mapping[str, Updater],
        params: list[Param],
        plans: Sequence[BucketPlan],
        settings: Settings,
        options: Callable[[], Sequence[Options]],
        loss_scale: Callable[[], float],
        shards: Shards | None = None,
        option_names: frozenset[str] | None = None,
    ) -> None:
        self.device, self.updaters, self.params, self.settings = device, updaters, params, settings
        self.options, self._loss_scale = options, loss_scale
        self._option_names = option_names  # that an update depends on; None: all that a group has
        wholes = shards.wholes if shards is not None and shards.wholes is not None else [None] * len(plans)
        pairs = zip(plans, wholes, strict=True)
        self.buckets = [
            new_bucket(params, plan, whole, updaters[plan.place], self._parks(plan)) for plan, whole in pairs
        ]
        self._by_tensor: dict[Tensor, Param] = {param.tensor: param for param in params}
        self.job: Job | None = None  # the step whose gradients come in now
        self.last: Job | None = None  # the step before
        self.num_jobs = 0
        self._by_block: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            self._by_block.setdefault(bucket.plan.block, []).append(bucket)
        self._num_parts = 0  # backwards of this step whose gradients are on their way to the host's sums
        self._runs: dict[int, int] = {}  # of each block, in this forward of the model
        self._num_forwards = 0  # of the model, in this step
        self._order: list[int] | None = None  # of the blocks in the first forward, while it is recorded
        self._is_recorded = False
        self._held_by: dict[int, list[Bucket]] = {}  # what the forward of each block waits for
        self._used_by: dict[int, list[Tensor]] = {}  # the parameters that it uses
        self._hooks: ModelHooks | None = None
        self.model_owner: dict[str, Any] = {}  # where the model says that it has an optimizer
        self._handles: list[RemovableHandle] = []
        self._frozen: dict[str, nn.Parameter] = {}  # parameters that were so at the start
        self._is_taking: bool | None = None  # whether this step's gradients are taken; None before the first of them
        self._is_disturbed = False  # by somebody who used gradients or weights between backward and step
        self._has_complete = False  # a parameter has all of its gradients of this step
        self._all_queues: list[GradientQueue] = []
        self._queues: list[GradientQueue] = []  # of each parameter
        self._set_queues()
        self._is_covered = False  # weights are guarded, and no backward has begun since
        self._late_from_now: set[Param] = set()  # from the next step on their gradients are complete only in `step`
        self.board = new_board(device, updaters[HOST], plans, settings, self._tensor_device)
        self.worker, self.mover = Worker(self.board, "worker"), Mover(self.board)
        self._threads = threads = list[BoardThread]([self.worker, self.mover])
        # Also when this object is forgotten, and before the interpreter ends under threads that still work.
        self._end = weakref.finalize(self, end, self.board, threads)
        self.sharing: Sharing | None = None
        self._close_job, self._divisor = self.board.close_job, 1.0
        where, num_gathered = self._tensor_device, self.settings.num_gathered
        if shards is not None:
            work = shards.start(device, self.board, self.buckets, settings, where)
            threads += work.threads
            self._divisor = work.divisor
            if work.reduces:
                self.sharing = work
            else:
                self._close_job = work.close_job
        self.collector = Collector(device, self.board, self.buckets, num_gathered, where, self.sharing)
        self.waited_s = 0.0  # by forwards, for weights
        self.marks = Marks(device)
        self.parking: Parking | None = None  # of weights that live on the host
        self.before_gathering: Callable[[], None] = lambda: None  # of weights that ranks have rows of
        self.before_update: Callable[[], None] = lambda: None  # an engine's, before a step reads the options
        self.optimizer: Callable[[], Any] | None = None  # a weak reference to whom this belongs
        self._early = EarlyPolicy(settings.early, self._num_watched())
        weight_guard.claim((param.tensor for param in params), self)

    @property
    def updater(self) -> Updater:
        """The host's."""
        return self.updaters[HOST]

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody has the optimizer any more; the model's hooks still hold this."""
        return self.optimizer is not None and self.optimizer() is None

    @property
    def is_closed(self) -> bool:
        """Whether it no longer updates anything."""
        return self.board.is_closing

    @property
    def can_undo(self) -> bool:
        """Whether what was begun during backward can be dropped until `step`: no update has been written by then."""
        return self.settings.limits.any and not self._has_ranks

    @property
    def _has_ranks(self) -> bool:
        """Whether others decide on a step with this one."""
        return self.sharing is not None or self._close_job != self.board.close_job

    @property
    def _tensor_device(self) -> torch.device:
        return self.params[0].tensor.device if self.params else torch.device("cpu")

    def _num_watched(self) -> int:
        """Steps whose gradients stay in `.grad`, before those of others are taken during backward."""
        settings = self.settings
        if self.can_undo or settings.is_short or settings.parks:
            return 0  # or the device has no room for all gradients: they have to leave it at once
        if settings.accumulation_steps > 1 and (self._has_ranks or not settings.watches_first):
            return 0  # sums are made in fp32, by ranks in their own order: that must not change after some steps
        return WATCHED_STEPS if settings.watches_first else 1

    def _parks(self, plan: BucketPlan) -> bool:
        return self.settings.parks and plan.block != ROOT

    def park(
        self,
        frozen: Mapping[int, Sequence[nn.Parameter]],
        values: Mapping[nn.Parameter, Tensor],
        gather: Gather | None,
    ) -> None:
        """Let the weights of blocks live on the host: once, before anything else."""
        where = self._tensor_device
        me = weakref.ref(self)

        def on_write(tensor: Tensor, written: Tensor) -> None:
            runtime = me()
            if runtime is not None:
                runtime.store(tensor, written, is_running=True)

        def before_error() -> None:
            runtime = me()
            if runtime is not None:
                runtime.complete_written()

        self.parking = Parking(
            self.device, self.board, self.buckets, frozen, values, gather, where, on_write, before_error
        )
        self._threads.append(self.parking.fetcher)
        weight_guard.claim(self.parking.tensors, self)

    def attach(self, model: nn.Module, blocks: list[Block], in_order: bool = False) -> None:
        """Put the hooks on the model, and watch its first forward; unless blocks are known to run `in_order`."""
        if model.__dict__.get("_twinflow_owner") == id(model):  # a deep copy has another id
            raise ValueError("the model already has a TwinOptimizer. Call its close() before building another")
        self.model_owner = model.__dict__
        self.model_owner["_twinflow_owner"] = id(model)
        self._find_users(blocks)
        if self.parking is not None:
            self._handles += self.parking.attach(model, blocks)
        self._hooks = ModelHooks(model, blocks, self)
        if in_order:
            self._set_deadlines([block.index for block in blocks])
            self._is_recorded = True
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._handles += take_gradients(self.params, self)

    def check(self) -> None:
        """Raise if an update has failed."""
        self.board.check()

    def _set_queues(self) -> None:
        """One for each block. Parameters outside any block get their gradients at very different times."""
        by_block: dict[int, GradientQueue] = {}
        for param in self.params:
            block = param.buckets[0].plan.block if param.buckets else ROOT
            # Where several backwards are summed, each gradient goes to its sum at once, and takes no memory after that.
            is_alone = block == ROOT or self.settings.num_gathered > 1
            queue = GradientQueue() if is_alone else by_block.setdefault(block, GradientQueue())
            if queue not in self._all_queues:
                self._all_queues.append(queue)
            queue.num_expected += 1
            self._queues.append(queue)

    def _find_users(self, blocks: Sequence[Block]) -> None:
        """What each block's forward has to wait for: its own buckets, and those of parameters that it shares."""
        in_blocks: set[Param] = set()
        for block in blocks:
            own = [self._by_tensor[p] for p in block.module.parameters() if p in self._by_tensor]
            in_blocks.update(own)
            self._used_by[block.index] = [param.tensor for param in own]
            self._held_by[block.index] = list(dict.fromkeys(bucket for param in own for bucket in param.buckets))
        rest = [param for param in self.params if param not in in_blocks]
        self._used_by[ROOT] = [param.tensor for param in rest]
        self._held_by[ROOT] = list(self._by_block.get(ROOT, ()))

    # Forward.

    def before_model(self) -> None:
        """A new forward of the whole model: count the runs of its blocks from here."""
        self._take_queues()
        self.before_gathering()
        self._close_part()
        self._runs.clear()
        self._num_forwards += torch.is_grad_enabled()
        if not self._is_recorded and self._order is None:
            self._order = []
        if self.parking is not None:
            self._collect_loans()
            self.parking.before_model()
        if self.settings.early and self._is_taking is None and not self._num_parts:
            with plain():  # buffers of the user's, which backward will add to, stay where they are
                if any(_is_foreign(param.tensor.grad) for param in self.params):
                    self._is_taking = False
        self.marks.before_model()

    def after_model(self) -> None:
        """The forward is queued."""
        self._finish_recording()
        self.marks.after_model()
        self._cover(self.params)

    def before_forward(self, block: int) -> None:
        """Wait for one block's weights: here until they are on their way, on the device until they are there."""
        self.board.check()
        self._close_part()
        if self._has_complete:
            self._disturb("a forward runs")
        if block != ROOT:
            if self._order is not None:
                self._order.append(block)
            self._runs[block] = self._runs.get(block, 0) + 1
            if self._runs[block] > 1:
                for bucket in self._by_block.get(block, ()):
                    for param in bucket.members:
                        param.is_late = True
        for bucket in self._held_by.get(block, ()):
            if not bucket.is_parked:
                self.waited_s += waits.hold_forward(self.device, self.board, bucket)
        used = self._used_by.get(block, ())
        weight_guard.uncover(tensor for tensor in used if not self._lives_away(tensor))
        for tensor in used:
            self._by_tensor[tensor].is_seen = True

    def before_recompute(self, block: int) -> None:
        """A block runs again inside a backward: its weights are those that its forward has waited for."""
        weight_guard.uncover(tensor for tensor in self._used_by.get(block, ()) if not self._lives_away(tensor))

    def _lives_away(self, tensor: Tensor) -> bool:
        return self.parking is not None and self.parking.holds(tensor)

    # Weights that somebody reads or writes outside of forwards (weight_guard.py).

    def settle(self, tensor: Tensor) -> None:
        """Block until the parameter's values are those that torch would show now."""
        param = self._by_tensor.get(tensor)
        if param is None:
            return  # frozen, on the host
        is_part = self.job is not None and self.job.is_part
        is_complete = param.hits >= self.settings.num_gathered and not param.is_late and not is_part
        if is_complete and (self._is_taking or self._early.watches):
            self._disturb(f"{param.name} is read")
        self.board.check()
        waits.wait_for_weights(self.device, self.board, param.buckets)
        param.is_seen = True

    def note_alias(self, tensor: Tensor, alias: Tensor) -> None:
        """A write to `alias`, a `.data` of the parameter, changes the weight, and torch does not count it."""
        param = self._by_tensor[tensor]
        param.aliases = [(known, version) for known, version in param.aliases if _is_kept(known, version)]
        param.aliases.append((alias, alias._version))

    def lives_on_host(self, tensor: Tensor) -> bool:
        """Whether the parameter has no memory of its own on the device."""
        return self._lives_away(tensor)

    def fetch_copy(self, tensor: Tensor) -> Tensor:
        """The values of a weight that lives on the host, on the device."""
        assert self.parking is not None
        self._collect_loans()
        self.settle(tensor)
        return self.parking.copy_of(tensor)

    def store(self, tensor: Tensor, values: Tensor, is_running: bool = False) -> None:
        """Other values for a weight that lives on the host; `is_running`: written by its own block's forward."""
        assert self.parking is not None
        with plain(), torch.no_grad():
            if self.has_gradients:
                self._return_gradients("a weight is written")
            self.wait()
            self.wait_for_copies()
            self.wait_for_readers()
            self.parking.store(tensor, values.detach(), is_running)

    def lend(self, tensor: Tensor, copied: Tensor) -> None:
        """A copy was handed out whose memory somebody may write to: look again before the weight is used."""
        assert self.parking is not None
        self.parking.loans.append((tensor, copied, copied._version))

    def _collect_loans(self) -> None:
        """Store copies that were written to since they were handed out, and memory that was put in a weight's place."""
        assert self.parking is not None
        for param, values in self.parking.replaced():
            self.store(param, values)
        loans, self.parking.loans = self.parking.loans, []
        for tensor, copied, version in loans:
            if copied._version != version:
                self.store(tensor, copied)
            elif _has_other_users(copied):
                self.parking.loans.append((tensor, copied, version))

    def _cover(self, params: Sequence[Param]) -> None:
        """Guard weights, but for those that compiled graphs use without our hooks: `step` has waited for these."""
        self._is_covered = True
        weight_guard.cover(param.tensor for param in params if not param.is_bypassed)

    # Backward.

    def grad_ready(self, param: Param) -> None:
        """A gradient is there. Those of a block are taken together, when the last of them has come: each call of a
        kernel from Python takes longer than a small gradient's copy."""
        queue = self._queues[param.index]
        self.device.join_streams(queue)
        if not param.is_queued:
            param.is_queued = True
            queue.params.append(param)
        if len(queue.params) >= queue.num_expected or param.is_late:
            self._take_queue(queue)

    def _take_queue(self, queue: GradientQueue) -> None:
        """Take the gradients of one block, unless this step's gradients stay in `.grad`."""
        self.board.check()
        params, queue.params = queue.params, []
        queue.num_taken += len(params)
        with plain():
            for param in params:
                param.is_queued = False
            found = [(param, grad) for param in params if (grad := self._new_gradient(param)) is not None]
            if self._is_taking is None and found:
                self._is_taking = self._early.takes
            if self._is_covered:  # blocks that are recomputed use their weights again
                self._is_covered = False
                weight_guard.uncover(p.tensor for p in self.params if not p.hits and not self._lives_away(p.tensor))
            if self._is_taking:
                self._take(found)
            else:
                for param, grad in found:
                    self._leave(param, grad)
            weight_guard.cover(param.tensor for param, _ in found if not param.is_bypassed)

    def _take_queues(self) -> None:
        """Backward is over: some blocks may have got fewer gradients than the last time."""
        for queue in self._all_queues:
            if queue.params:
                self._take_queue(queue)
            if queue.num_taken:
                queue.num_expected = queue.num_taken
            queue.num_taken = 0

    def _new_gradient(self, param: Param) -> Tensor | None:
        """What backward has added to a parameter's gradient; None where somebody has taken it away."""
        grad = param.tensor.grad
        taken = param.taken
        if isinstance(grad, TakenGradient):
            stand_in = grad
            grad = stand_in.arrived
            stand_in.arrived = None
        elif grad is not None and param.hits and self._is_taking and not param.is_sharded:
            if taken is None or taken.arrived is not grad:  # somebody has dropped what was in `.grad`
                self._return_gradients(f"{param.name}.grad is changed")
            else:
                taken.arrived = None
        if grad is not None:
            refusals.check_layout(param, grad)
        return grad

    def _leave(self, param: Param, grad: Tensor) -> None:
        """A gradient that stays in `.grad`. Where later ones will be taken, see whether anybody looks at it."""
        if not param.was_hit:
            refusals.check_seen(param)
        param.hits += 1
        param.was_hit = True
        if self._early.watches and not param.is_late:
            if param.hits > self.settings.num_gathered:
                param.is_late = True
            elif param.hits == self.settings.num_gathered:
                self._has_complete = True
                if not param.is_sharded:
                    param.watched = grad
                    param.tensor.grad = self._stand_in(param)

    def _take(self, found: Sequence[tuple[Param, Tensor]]) -> None:
        self._finish_recording()
        wanted = self.settings.num_gathered
        last: list[tuple[Param, Tensor]] = []  # gradients with which their parameters are complete
        others: list[tuple[Param, Tensor]] = []
        for param, grad in found:
            if not param.was_hit:
                refusals.check_seen(param)
            if param.hits >= wanted and not param.is_late and self.job is not None and self.job.is_part:
                self._close_part()  # another backward without a forward before it
            param.hits += 1
            param.was_hit = True
            if param.hits > max(1, self._num_forwards) and param.hits <= wanted:
                param.is_late = True  # it gets several gradients in one backward: reentrant checkpointing
            if param.hits > wanted and not param.is_late:
                raise self._too_late(f"{param.name} got {param.hits} gradients")
            # Pieces for a late parameter say nothing about backwards.
            (last if param.hits == wanted and not param.is_late else others).append((param, local_of(grad)))
        if self.job is None and (last or (others and wanted == 1)):
            if self.settings.sums_on_host and self._num_parts + 1 < self.settings.accumulation_steps:
                self.job = self._new_part()
            else:
                self._begin()
        for param, _ in found:  # the memory of a gradient is free again as soon as it is in the bucket
            param.tensor.grad = None if param.is_sharded else self._stand_in(param)
        if others:
            self.collector.add(self.job, others)
        if last:
            assert self.job is not None
            self._has_complete |= not self.job.is_part
            self.collector.add_last(self.job, last)

    def _stand_in(self, param: Param) -> TakenGradient:
        """For `.grad`. It is used again unless somebody else has it."""
        taken = param.taken
        if taken is None or taken.held is not None or sys.getrefcount(taken) > 4:
            taken = param.taken = TakenGradient(param.tensor, self)
        taken.is_used = False
        return taken

    def expects_more(self, tensor: Tensor) -> bool:
        """Whether another gradient of this parameter belongs to the ones that are taken."""
        param = self._by_tensor[tensor]
        is_open = param.is_late or param.hits < self.settings.num_gathered
        if self._is_taking and not is_open and self.can_undo:
            self._late_from_now.add(param)  # loops that do this do it in every step
        return bool(self._is_taking) and (is_open or (self.job is not None and self.job.is_part))

    def give_back(self, tensor: Tensor) -> None:
        """Put the gradients of this step back into `.grad`: somebody uses them."""
        with plain(), torch.no_grad():
            self._return_gradients(f"{self._by_tensor[tensor].name}.grad is used")

    def _return_gradients(self, reason: str) -> None:
        """From here on this step is one whose gradients were not taken. `.grad` that somebody has set stays as it
        is."""
        if not self._is_taking:
            self._is_disturbed = True
            for param in self.params:
                watched, param.watched = param.watched, None
                if watched is not None:
                    _put_back(param, watched)
            return
        if not self.can_undo:
            raise self._too_late(reason)
        self._is_disturbed = True
        self._close_part()
        wanted = [p for p in self.params if p.hits or self._num_parts]
        found = self.collector.read_back(self.job, [p for p in wanted if isinstance(p.tensor.grad, TakenGradient)])
        self._drop()
        for param, grad in found.items():
            _put_back(param, grad)
        self._is_taking = False

    def _disturb(self, what: str) -> None:
        """Something happens between backward and `step`: nothing is lost as long as no update has been written."""
        self._is_disturbed |= self._early.watches
        if self._is_taking and not self.settings.limits.any:
            raise self._too_late(what)

    def _too_late(self, what: str) -> RuntimeError:
        """An update has been written that `what` would change. The step is completed with the gradients that came, so
        that weights and state belong together and can be saved."""
        self.complete_written()
        return refusals.too_late(what, self._has_ranks)

    def complete_written(self) -> None:
        """Complete a step of which some updates have been written: its weights and state then belong together."""
        if self.job is not None and not self.job.is_part and not self.can_undo:
            with plain():
                self._close(self.job)

    def _new_part(self) -> Job:
        return Job(self.num_jobs + 1, (), Gate(Limits(), 1.0), is_part=True, is_released=True)

    def _fill_parts(self) -> None:
        """Other ranks may have had more backwards: zeros for those that this one had not."""
        if self.sharing is not None and self.settings.sums_on_host and self.job is None:
            while self._num_parts + 1 < self.settings.accumulation_steps:
                self.job = self._new_part()
                self._close_part()

    def _close_part(self) -> None:
        """One of several backwards is over, where their gradients are summed on the host."""
        if self.job is not None and self.job.is_part:
            self.collector.complete(self.job, self.params)
            self._forget_hits()
            self._num_parts, self.job = self._num_parts + 1, None

    def _forget_hits(self) -> None:
        for param in self.params:
            param.hits = 0

    # Step.

    def _begin(self) -> None:
        """A new job, with the options as they are now."""
        self.before_update()
        self._finish_recording()
        self._check_params()
        self.num_jobs += 1
        settings = self.settings
        is_delayed = settings.delayed_update and self.num_jobs > settings.delayed_update_start
        gate = Gate(settings.limits, self._loss_scale() * self._divisor)
        self.job = Job(
            self.num_jobs,
            self.options(),
            gate,
            is_delayed=is_delayed,
            may_run_ahead=settings.may_run_ahead and not is_delayed,
            is_released=not is_delayed,
        )
        if self.settings.sums_on_host:
            self.job.norms = self.collector.new_norms(self.job)
        self.collector.zero_norms()

    def _finish_recording(self) -> None:
        """The first forward is over: its order is the order of deadlines."""
        if self._is_recorded or self._order is None:
            return
        self._is_recorded = True
        if self.parking is not None:
            self.parking.set_order(self._order)
        self._set_deadlines(self._order)
        self._order = None

    def _set_deadlines(self, order: Sequence[int]) -> None:
        unused = set_deadlines(self.buckets, order)  # whose blocks do not run: whoever uses them waits with the rest
        self._by_block.setdefault(ROOT, []).extend(unused)
        self._held_by.setdefault(ROOT, []).extend(unused)
        params = dict.fromkeys(param for bucket in unused for param in bucket.members)
        self._used_by.setdefault(ROOT, []).extend(param.tensor for param in params)
        for param in params:
            param.is_seen = True

    def _check_params(self) -> None:
        """Refuse what was unfrozen or moved since the start; take over weights that somebody else has written."""
        changes.check_flags(self._frozen)
        changed = changes.find_changed(self.params, self.buckets, self.wait)
        if self.num_jobs == 0:  # nothing has watched so far what was written through `.data`
            changed = self.params
        if changed:
            changes.check_changed(changed, self.has_unsent)
            self.adopt(changed, keep=True)

    def step(self) -> Job | None:
        """Close the job: everything that is left of it happens beside what the caller does next."""
        self.board.check()
        self._take_queues()
        if self.parking is not None:
            self._collect_loans()
        with plain():
            if self._is_taking and (reason := self._find_change()):
                self._return_gradients(reason)
            if not self._is_taking:
                self._look_at_gradients()
            self._close_part()
            self._fill_parts()
            has_some = bool(self._num_parts) or any(param.hits for param in self.params)
            if self.job is None and (has_some or self.sharing is not None):
                self._begin()  # not early, or fewer backwards than declared: step with what came, here or elsewhere
            job = self.job
            if job is None:
                self._reset()
                return None
            self._close(job)
        return job

    def _find_change(self) -> str:
        """What was changed since the gradients were taken, that the update depends on; "" if nothing was."""
        for param in self.params:
            grad = param.tensor.grad
            if isinstance(grad, TakenGradient) and grad.is_used and not param.hits:
                raise refusals.used_twice(param)
            is_taken = bool(param.hits) and not param.is_sharded
            if grad is not param.taken if is_taken else _is_foreign(grad):
                return f"{param.name}.grad is changed"
        if self.job is None or self.job.is_part:
            return ""
        option = refusals.changed_option(self.job, self.options(), self._option_names)
        if option:
            return option
        if not self.can_undo:  # weights of this step may have arrived
            return ""
        # Weights of the step before may still arrive, but not those that this step's forward has waited for.
        written = changes.written(param for param in self.params if param.was_hit and param.is_seen)
        moved = [] if written else changes.moved(self.buckets)
        return f"{(written or moved)[0].name} is written" if written or moved else ""

    def _look_at_gradients(self) -> None:
        """Of a step whose gradients were left in `.grad`."""
        for param in self.params:
            grad = param.tensor.grad
            if isinstance(grad, TakenGradient) and grad.is_used and grad.held is None:
                raise refusals.used_twice(param)
            param.hits = int(grad is not None)
            param.was_hit = bool(param.hits)
            refusals.check_layout(param, grad)

    def _close(self, job: Job) -> None:
        """No more gradients come for it."""
        self.marks.after_backward()
        if self._is_taking:
            self.collector.complete(job, self.params)
        else:
            self.collector.take_all(job, self.params, self._stand_in)
        if self.sharing is not None:
            self.sharing.close(job, [param.was_hit for param in self.params])
        elif self.settings.sums_on_host:
            self.board.submit_sums(job, self.buckets)
            assert job.norms is not None
            self._close_job(job, job.norms, AllSummed(job))
        elif self._has_ranks:
            self._close_job(job, *self.collector.fetch_norms(job))
        else:
            decision, here, event = self.collector.fetch_decision(job)
            job.gate.is_decided_there = True
            if not job.gate.is_dropped and not job.gate.is_open and not job.is_delayed:
                self._wait_for_decision(self.last)  # the number of updates so far depends on it
                self.board.launch(job, decision, event)
            self.board.close_job(job, here, event)
        if job.gate.is_dropped:  # weights stay as they were
            self._reset()
            return
        self._make_due(job)
        self.last = job
        updated = [param for param in self.params if param.was_hit or self.sharing is not None]
        is_traced = self._hooks is not None and self._hooks.is_traced
        bypassed = refusals.note_bypassed(self.params, is_traced)
        for param in updated:
            if not self._lives_away(param.tensor):  # those have editions (fetch_hooks.py)
                param.note_step()
            if self._is_taking and isinstance(param.tensor.grad, TakenGradient):
                param.tensor.grad.is_used = True
        self._early.after_step(self._is_disturbed)
        self._reset()
        for bucket in bypassed:
            self.waited_s += waits.hold_forward(self.device, self.board, bucket)
        if self._hooks is not None:
            self._hooks.find_compiled()
            self._cover(updated)

    def _reset(self) -> None:
        """The next gradient belongs to another step."""
        for param in self.params:
            param.hits = 0
            param.was_hit = False
            param.watched = None
        for param in self._late_from_now:
            param.is_late = True
        self._late_from_now.clear()
        self._runs.clear()
        self._num_forwards = 0
        self.job = None
        self._num_parts = 0
        self._is_taking = None
        self._is_disturbed = self._has_complete = False

    def _wait_for_decision(self, job: Job | None) -> None:
        if job is not None:
            self.board.wait_for(lambda: job.gate.decision is not None)

    def _make_due(self, job: Job) -> None:
        """Which weights the next forward has to see: this job's, or with a delay the one's before."""
        before = self.last
        if before is not None and not before.is_released:
            self.board.release(before, self.device.compute().record())
            for task in before.tasks:
                task.bucket.due = before.number
        if job.is_released:
            for task in job.tasks:
                task.bucket.due = job.number

    # Outside the loop.

    def wait(self) -> None:
        """Until every update that has begun is in the state, and every weight that is due is in its parameter."""
        self.board.check()
        self._close_part()
        if self.job is not None and not self.settings.limits.any:
            raise self._too_late("weights and state are read")
        self.board.wait_for(lambda: all(bucket.shown >= bucket.due for bucket in self.buckets))
        last = self.last
        if last is not None:
            self.board.wait_for(lambda: last.gate.decision is not None and last.is_done)
        waits.hold_readers(self.device, self.board, self.buckets)
        for param in self.params:
            param.is_seen = True

    def wait_for_copies(self) -> None:
        """After `wait`: until no stream reads the state any more, so that this thread may write to it."""
        waits.finish_copies(self.device, self.buckets)

    def wait_for_readers(self) -> None:
        """Until nobody reads the state as it was (frozen.py), so that it may be written to."""
        self.board.wait_for(lambda: self.board.frozen is None)

    @property
    def has_gradients(self) -> bool:
        """Whether any of a step in the making have come."""
        return self.job is not None or bool(self._num_parts) or any(param.hits for param in self.params)

    @property
    def has_unsent(self) -> bool:
        """Whether a delayed update is in the state and not yet in the weights."""
        return self.last is not None and not self.last.is_released

    def adopt(self, params: Sequence[Param], keep: bool, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Take over values that somebody else wrote into parameters: a checkpoint loaded into the model, say.

        `keep`: where a master rounds to its parameter, it stays as it is. `values`: of parked parameters.
        """
        changes.adopt(params, keep, values or {})

    def flush(self) -> None:
        """Put a delayed update that is still to come into the weights now."""
        last = self.last
        if last is not None and not last.is_released:
            self.board.release(last, self.device.compute().record())
            for task in last.tasks:
                task.bucket.due = last.number
        self.wait()

    def forget_gradients(self) -> None:
        """Drop what a step in the making has gathered, and what it has begun."""
        for queue in self._all_queues:
            queue.forget()
        self._is_disturbed |= self._early.watches and self._has_complete
        if self._is_taking and self._has_complete and not self.can_undo:
            raise self._too_late("zero_grad() is called")
        self._drop()
        self._reset()

    def _drop(self) -> None:
        """Drop the step in the making: its gradients, its sums, and updates that run ahead of the clipping decision."""
        self._close_part()
        if self.job is not None:
            self.job.gate.is_dropped = True
            is_taking, is_disturbed = self._is_taking, self._is_disturbed
            self._close(self.job)
            self._is_taking, self._is_disturbed = is_taking, is_disturbed
        elif self._num_parts:
            if self.sharing is not None:
                self.sharing.wait_for_sums()
            self.board.forget_sums(self.buckets)
            self._num_parts = 0

    def close(self) -> None:
        """Finish what has begun, then take all hooks off and end the threads. In the middle of a step: just end."""
        if self.board.is_closing:
            return
        try:
            if self.job is None:
                self.flush()
            elif not self.settings.limits.any and self.board.error is None:
                LOGGER.warning("closed between backward() and step(): some weights have this step's update, others not")
        finally:
            if self.parking is not None and self.board.error is None:
                self.parking.close()
            for handle in self._handles:
                handle.remove()
            if self._hooks is not None:
                self._hooks.remove()
            self.model_owner.pop("_twinflow_owner", None)
            weight_guard.release(param.tensor for param in self.params)
            if self.parking is not None:
                weight_guard.release(self.parking.tensors)
            self._end()
            for param in self.params:
                if isinstance(param.tensor.grad, TakenGradient) and param.tensor.grad.held is None:
                    param.tensor.grad = None


def _is_foreign(grad: Tensor | None) -> bool:
    return grad is not None and not isinstance(grad, TakenGradient)


def _put_back(param: Param, grad: Tensor) -> None:
    """Give a gradient to `.grad`, unless somebody has put something else there, and to its stand-in."""
    taken, param.taken = param.taken, None
    if taken is not None:
        taken.held = grad
        if param.tensor.grad is taken:
            param.tensor.grad = grad


def _is_kept(alias: Tensor, version: int) -> bool:
    """Whether an alias has been written to, or still may be: somebody else holds it."""
    return alias._version != version or sys.getrefcount(alias) > 4


def _has_other_users(copied: Tensor) -> bool:
    """Whether anything but this tensor uses its memory."""
    return int(torch._C._storage_Use_Count(copied.untyped_storage()._cdata)) > 2
