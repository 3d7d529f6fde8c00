"""The overlap runtime: takes gradients as backward makes them, hands tasks to the worker, lets forwards wait.

The way of a gradient, in execution order: `grad_ready` (a hook, during backward) gathers it in its bucket's flat device
buffer; a complete bucket becomes a task on the board (board.py), and two threads (threads.py) copy it out, update on
the host and send the weights back; `step` closes the job without waiting for it; `before_forward` (a hook, in the next
forward) waits for one block's weights. Without permission to start early, `step` does the gathering from `.grad` and
the rest is the same.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload import changes, gather, refusals, waits
from twinflow.offload.blocks import Block
from twinflow.offload.board import AllSummed
from twinflow.offload.bucket import Bucket, Job, Options, Param, Updater, local_of, new_bucket, set_deadlines
from twinflow.offload.collector import Collector
from twinflow.offload.fetcher import Gather
from twinflow.offload.gate import Gate, Limits
from twinflow.offload.hooks import Recorder, install, take_gradients
from twinflow.offload.marks import Marks
from twinflow.offload.parking import Parking
from twinflow.offload.plan import HOST, ROOT, BucketPlan
from twinflow.offload.pools import new_board
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import Shards, Sharing
from twinflow.offload.threads import BoardThread, Mover, Worker, end

LOGGER = logging.getLogger("twinflow")


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
    ) -> None:
        self.device, self.updaters, self.params, self.settings = device, updaters, params, settings
        self.options, self._loss_scale = options, loss_scale
        wholes = shards.wholes if shards is not None and shards.wholes is not None else [None] * len(plans)
        pairs = zip(plans, wholes, strict=True)
        self.buckets = [
            new_bucket(params, plan, whole, updaters[plan.place], self._parks(plan)) for plan, whole in pairs
        ]
        self._by_tensor = {param.tensor: param for param in params}
        self.job: Job | None = None  # the step whose gradients come in now
        self.last: Job | None = None  # the step before
        self.num_jobs = 0
        self._by_block: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            self._by_block.setdefault(bucket.plan.block, []).append(bucket)
        self._num_parts = 0  # backwards of this step whose gradients are on their way to the host's sums
        self._runs: dict[int, int] = {}  # of each block, in this forward of the model
        self._recorder: Recorder | None = None
        self._blocks: list[Block] = []
        self.model_owner: dict[str, Any] = {}  # where the model says that it has an optimizer
        self._handles: list[RemovableHandle] = []
        self._frozen: dict[str, nn.Parameter] = {}  # parameters that were so at the start
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
        self.is_scaled = False  # the loss of the backward under way is what `TwinOptimizer.backward` makes of it
        self.check_backward: Callable[[], None] = lambda: None  # an engine's, at every gradient
        self.optimizer: Callable[[], Any] | None = None  # a weak reference to whom this belongs
        refusals.claim(params, self)

    @property
    def updater(self) -> Updater:
        """The host's."""
        return self.updaters[HOST]

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody has the optimizer any more; the model's hooks still hold this."""
        return self.optimizer is not None and self.optimizer() is None

    @property
    def _can_drop(self) -> bool:
        """Whether a step whose update has begun can be dropped."""
        settings = self.settings
        return settings.limits.any and not settings.delayed_update and not self._has_ranks

    @property
    def _has_ranks(self) -> bool:
        """Whether others decide on a step with this one."""
        return self.sharing is not None or self._close_job != self.board.close_job

    @property
    def _tensor_device(self) -> torch.device:
        return self.params[0].tensor.device if self.params else torch.device("cpu")

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
        self.parking = Parking(self.device, self.board, self.buckets, frozen, values, gather, where)
        self._threads.append(self.parking.fetcher)

    def attach(self, model: nn.Module, blocks: list[Block], in_order: bool = False) -> None:
        """Put the hooks on the model, and watch its first forward; unless blocks are known to run `in_order`."""
        if model.__dict__.get("_twinflow_owner") == id(model):  # a deep copy has another id
            raise ValueError("the model already has a TwinOptimizer. Call its close() before building another")
        self.model_owner = model.__dict__
        self.model_owner["_twinflow_owner"] = id(model)
        if self.parking is not None:
            self._handles += self.parking.attach(model, blocks)
        self._handles += install(model, blocks, self)
        self._recorder, self._blocks = None if in_order else Recorder(model, blocks), blocks
        if in_order:
            self._set_deadlines([block.index for block in blocks])
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if self.settings.early:
            self._handles += take_gradients(self.params, self)

    # Forward.

    def before_model(self) -> None:
        """A new forward of the whole model: count the runs of its blocks from here."""
        self.before_gathering()
        self._close_part()
        self._runs.clear()
        self.is_scaled = False
        if self.parking is not None:
            self.parking.before_model()
        self.marks.before_model()

    def after_model(self) -> None:
        """The forward is queued."""
        self._finish_recording()
        self.marks.after_model()

    def before_forward(self, block: int, own: Iterable[nn.Parameter] | None = None) -> None:
        """Wait for one block's weights: here until they are on their way, on the device until they are there. Of those
        the caller will use its `own`; None: any."""
        self.board.check()
        self._close_part()
        if self.job is not None:
            raise refusals.forward_before_step(self._can_drop)
        if block != ROOT:
            self._runs[block] = self._runs.get(block, 0) + 1
            if self._runs[block] > 1:
                for bucket in self._by_block.get(block, ()):
                    for param in bucket.members:
                        param.is_late = True
        buckets = self._by_block.get(block, ())
        for bucket in buckets:
            if not bucket.is_parked:
                self.waited_s += waits.hold_forward(self.device, self.board, bucket)
        members = (param for bucket in buckets for param in bucket.members)
        for param in members if own is None else (self._by_tensor[p] for p in own if p in self._by_tensor):
            param.is_seen = True

    # Backward.

    def grad_ready(self, param: Param) -> None:
        """A gradient is there: take it."""
        self.board.check()
        grad = param.tensor.grad
        if grad is None:
            return
        refusals.check_layout(param, grad)
        self.check_backward()
        if not param.was_hit:
            refusals.check_seen(param)
        grad = local_of(grad)
        self._finish_recording()
        param.hits += 1
        param.was_hit = True
        wanted = self.settings.num_gathered
        if param.hits > wanted and not param.is_late:
            raise RuntimeError(
                f"{param.name} got {param.hits} gradients, but its update has already begun after {wanted} "
                "(early=True). Declare the number of backwards with accumulation_steps=, or build the optimizer with "
                "early=False"
            )
        is_last = param.hits == wanted and not param.is_late  # pieces for a late parameter say nothing about backwards
        if self.job is None and (is_last or wanted == 1):
            if self.settings.sums_on_host and self._num_parts + 1 < self.settings.accumulation_steps:
                self.job = self._new_part()
            else:
                self._begin()
        param.tensor.grad = None  # its memory is free again as soon as it is in the bucket
        if is_last and self.job is not None:
            self.collector.add_last(self.job, param, grad.detach().reshape(-1))
            param.tensor.grad = None if param.is_sharded else param.taken  # torch adds to what it finds there
        else:
            self.collector.add(self.job, param, grad.detach().reshape(-1))

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
            if isinstance(param.tensor.grad, gather.TakenGradient):
                param.tensor.grad = None

    # Step.

    def _begin(self) -> None:
        """A new job, with the options as they are now."""
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
        if self._recorder is None:
            return
        repeated = self._recorder.finish()
        for param in self.params:
            param.is_late |= param.tensor in repeated
        if self.parking is not None:
            unused = [block for block in self._blocks if block.index not in self._recorder.order]
            self.parking.check_blocks(unused, self._recorder.has_run)
            self.parking.set_order(self._recorder.order)
        self._set_deadlines(self._recorder.order)
        self._recorder = None

    def _set_deadlines(self, order: Sequence[int]) -> None:
        unused = set_deadlines(self.buckets, order)  # whose blocks do not run: whoever uses them waits with the rest
        self._by_block.setdefault(ROOT, []).extend(unused)
        for param in (param for bucket in unused for param in bucket.members):
            param.is_seen = True

    def _check_params(self) -> None:
        """Refuse what was frozen or moved since the start; take over weights that somebody else has written."""
        changes.check_flags(self.params, self._frozen)
        changed = changes.find_changed(self.params, self.buckets, self.wait)
        if changed:
            changes.check_changed(changed, self.has_unsent)
            self.adopt(changed, keep=True)

    def step(self) -> Job | None:
        """Close the job: everything that is left of it happens beside what the caller does next."""
        self.board.check()
        if self.settings.early:
            refusals.check_taken(self.params, self.settings.num_gathered)
            if self.settings.limits.any:
                refusals.check_unwritten(self.params, self.job)
        else:
            for param in self.params:
                param.hits = int(param.tensor.grad is not None)
                param.was_hit = bool(param.hits)
                refusals.check_layout(param, param.tensor.grad)
                if param.was_hit and self._handles:
                    refusals.check_seen(param)
        self._close_part()
        self._fill_parts()
        has_some = bool(self._num_parts) or any(param.hits for param in self.params)
        if self.job is None and (has_some or self.sharing is not None):
            self._begin()  # not early, or fewer backwards than declared: step with what came, here or on other ranks
        job = self.job
        if job is None:
            return None
        self._close(job)
        return job

    def _close(self, job: Job) -> None:
        """No more gradients come for it."""
        self.marks.after_backward()
        if self.settings.early:
            self.collector.complete(job, self.params)
        else:
            self.collector.take_all(job, self.params)
        if self.sharing is not None:
            self.sharing.close(job, [param.was_hit for param in self.params])
        elif self.settings.sums_on_host:
            self.board.submit_sums(job, self.buckets)
            assert job.norms is not None
            self._close_job(job, job.norms, AllSummed(job))
        else:
            self._close_job(job, *self.collector.fetch_norms(job))
        is_dropped = job.gate.is_dropped
        if not is_dropped:  # else weights stay as they were
            self._make_due(job)
            self.last = job
        bypassed = [] if is_dropped else refusals.note_bypassed(self.params)
        self._forget_hits()
        for param in self.params:
            param.was_hit = False
        self._runs.clear()
        self.job, self._num_parts, self.is_scaled = None, 0, False
        for bucket in bypassed:
            self.waited_s += waits.hold_forward(self.device, self.board, bucket)

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
            raise RuntimeError(
                "weights and state are read between backward() and step(), when some of them are already updated "
                "(early=True). Call step() first"
            )
        self.board.wait_for(lambda: all(bucket.shown >= bucket.due for bucket in self.buckets))
        last = self.last
        if last is not None:
            self.board.wait_for(lambda: last.gate.decision is not None and last.is_done)
        waits.hold_readers(self.device, self.board, self.buckets)
        self._see_all()

    def show(self) -> None:
        """Until every weight that is due is on its way; whatever is queued from here on finds it there."""
        for bucket in self.buckets:
            if not bucket.is_parked:
                waits.hold_forward(self.device, self.board, bucket)
        self._see_all()

    def _see_all(self) -> None:
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
        """Drop what a step in the making has gathered. Where updates wait for the norm, one that has begun too."""
        self._close_part()
        if self.job is not None:
            if not self._can_drop:
                raise refusals.cannot_drop(self._has_ranks)
            self.job.gate.is_dropped = True
            self._close(self.job)
        if self.job is None:
            self._forget_hits()
            for param in self.params:
                param.was_hit = False
        if self.job is None and self._num_parts:
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
            if self._recorder is not None:
                self._recorder.finish()
            self.model_owner.pop("_twinflow_owner", None)
            refusals.release(self.params)
            self._end()
            for param in self.params:
                if isinstance(param.tensor.grad, gather.TakenGradient):
                    param.tensor.grad = None
