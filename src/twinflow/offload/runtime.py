"""The overlap runtime: takes gradients as backward makes them, hands tasks to the worker, lets forwards wait.

The way of a gradient, in execution order: `grad_ready` (a hook, during backward) gathers it in its bucket's flat device
buffer; a complete bucket becomes a task on the board (board.py), and two threads (threads.py) copy it out, update on
the host and send the weights back; `step` closes the job without waiting for it; `before_forward` (a hook, in the next
forward) waits for one block's weights. Without permission to start early, `step` does the gathering from `.grad` and
the rest is the same.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload import changes, gather, waits
from twinflow.offload.blocks import Block
from twinflow.offload.board import AllSummed
from twinflow.offload.bucket import Bucket, Job, Options, Param, Task, Updater, local_of, new_bucket, set_deadlines
from twinflow.offload.collector import Collector
from twinflow.offload.fetcher import Gather
from twinflow.offload.gate import Decision, Gate, Limits
from twinflow.offload.hooks import Recorder, install, take_gradients
from twinflow.offload.marks import Marks
from twinflow.offload.parking import Parking
from twinflow.offload.plan import HOST, ROOT, BucketPlan
from twinflow.offload.pools import fit_slots, flat_bytes, new_board
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import Shards, Sharing
from twinflow.offload.threads import BoardThread, Mover, Worker, end


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
        self._options, self._loss_scale = options, loss_scale
        wholes = shards.wholes if shards is not None and shards.wholes is not None else [None] * len(plans)
        pairs = zip(plans, wholes, strict=True)
        self.buckets = [
            new_bucket(params, plan, whole, updaters[plan.place], self._parks(plan)) for plan, whole in pairs
        ]
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

    @property
    def updater(self) -> Updater:
        """The host's."""
        return self.updaters[HOST]

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
        if self.parking is not None:
            self.parking.before_model()
        self.marks.before_model()

    def after_model(self) -> None:
        """The forward is queued."""
        self._finish_recording()
        self.marks.after_model()

    def before_forward(self, block: int) -> None:
        """Wait for one block's weights: here until they are on their way, on the device until they are there."""
        self.board.check()
        self._close_part()
        if self.job is not None:
            raise RuntimeError(
                "a forward runs before step(), but the update of the last backward has already begun (early=True). "
                "Call step() after every `accumulation_steps` backwards, or build the optimizer with early=False"
            )
        if block != ROOT:
            self._runs[block] = self._runs.get(block, 0) + 1
            if self._runs[block] > 1:
                for bucket in self._by_block.get(block, ()):
                    for param in bucket.members:
                        param.is_late = True
        for bucket in self._by_block.get(block, ()):
            if not bucket.is_parked:
                self.waited_s += waits.hold_forward(self.device, self.board, bucket)

    # Backward.

    def grad_ready(self, param: Param) -> None:
        """A gradient is there: take it."""
        self.board.check()
        grad = param.tensor.grad
        if grad is None:
            return
        _check_grad(param, grad)
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
            self._options(),
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
        self._by_block.setdefault(ROOT, []).extend(set_deadlines(self.buckets, order))

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
        if not self.settings.early:
            for param in self.params:
                param.hits = int(param.tensor.grad is not None)
                param.was_hit = bool(param.hits)
                _check_grad(param, param.tensor.grad)
        self._close_part()
        self._fill_parts()
        has_some = bool(self._num_parts) or any(param.hits for param in self.params)
        if self.job is None and (has_some or self.sharing is not None):
            self._begin()  # not early, or fewer backwards than declared: step with what came, here or on other ranks
        job = self.job
        if job is None:
            return None
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
        self._make_due(job)
        self._forget_hits()
        for param in self.params:
            param.was_hit = False
        self._runs.clear()
        self.last, self.job, self._num_parts = job, None, 0
        return job

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

    def hold_back(self, number: int) -> None:
        """The state holds a delayed update that the weights do not: send it with the next step."""
        decision = Decision(norm=math.nan, factor=1.0, skip=False, clipped=False)
        gate = Gate(self.settings.limits, 1.0)
        gate.decision = decision
        job = Job(number, (), gate, is_delayed=True)
        job.tasks = [Task(bucket, job, list(range(len(bucket.slices)))) for bucket in self.buckets]
        self.board.hold_back(job.tasks)
        if self.sharing is not None:
            self.sharing.hold_back(job)
        self.last, self.num_jobs = job, number

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

    def wait_for_copies(self) -> None:
        """After `wait`: until no stream reads the state any more, so that this thread may write to it."""
        waits.finish_copies(self.device, self.buckets)

    def wait_for_readers(self) -> None:
        """Until nobody reads the state as it was (frozen.py), so that it may be written to."""
        self.board.wait_for(lambda: self.board.frozen is None)

    @property
    def has_unsent(self) -> bool:
        """Whether a delayed update is in the state and not yet in the weights."""
        return self.last is not None and not self.last.is_released

    def adopt(self, params: Sequence[Param], keep: bool, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Take over values that somebody else wrote into parameters: a checkpoint loaded into the model, say.

        `keep`: where a master rounds to its parameter, it stays as it is. `values`: of parked parameters.
        """
        changes.adopt(params, keep, values or {})

    def move(self, bucket: Bucket, place: str) -> None:
        """Let a bucket's state live in another place from now on. MemoryError, and nothing has changed, where that is
        full. Only after `wait` and `wait_for_copies`, when nothing of it is under way."""
        self.wait_for_readers()
        if place != bucket.plan.place:
            changes.move(bucket, place, self.updaters[place], self._options())
            self.board.publish_again(bucket)
            self._fit_pools()

    def flush(self) -> None:
        """Put a delayed update that is still to come into the weights now."""
        last = self.last
        if last is not None and not last.is_released:
            self.board.release(last, self.device.compute().record())
            for task in last.tasks:
                task.bucket.due = last.number
        self.wait()

    def change(self, settings: Settings) -> None:
        """Another number of backwards from the next step on."""
        if self.job is not None or self._num_parts or any(param.hits for param in self.params):
            raise RuntimeError("the number of backwards of a step is changed while gradients of one are there")
        self.wait()
        self.settings = settings
        self.board.sums_on_host = settings.sums_on_host
        self._fit_pools()
        self.collector.num_parts = settings.num_gathered

    def _fit_pools(self) -> None:
        board, settings = self.board, self.settings
        fit_slots(board, settings, sum(not bucket.is_on_device for bucket in self.buckets))
        board.flats.max_bytes = flat_bytes(settings, [bucket.plan for bucket in self.buckets])

    def forget_gradients(self) -> None:
        """Drop what a step in the making has gathered, as far as no update has begun."""
        self._close_part()
        if self.job is None:
            self._forget_hits()
            for param in self.params:
                param.was_hit = False
        if self.job is None and self._num_parts:
            if self.sharing is not None:
                self.sharing.wait_for_sums()
            self.board.forget_sums(self.buckets)
            self._num_parts = 0

    def forget_jobs(self, num_jobs: int) -> None:
        """Start counting anew: the state and the weights are now somebody else's."""
        self.num_jobs, self.last = num_jobs, None
        if self.parking is not None:
            self.parking.leave_all()
        with self.board.changed:
            if self.sharing is not None:
                self.sharing.forget()  # before buckets look as if they had been sent
            for task in self.board.outbox:  # a delayed update that was still to be sent
                self.board.free_shadow(task)
            self.board.outbox.clear()
            for bucket in self.buckets:
                bucket.due = bucket.sent = bucket.updated = bucket.published = num_jobs

    def close(self) -> None:
        """Finish what has begun, then take all hooks off and end the threads. In the middle of a step: just end."""
        if self.board.is_closing:
            return
        try:
            if self.job is None:
                self.flush()
        finally:
            if self.parking is not None and self.board.error is None:
                self.parking.close()
            for handle in self._handles:
                handle.remove()
            if self._recorder is not None:
                self._recorder.finish()
            self.model_owner.pop("_twinflow_owner", None)
            self._end()
            for param in self.params:
                if isinstance(param.tensor.grad, gather.TakenGradient):
                    param.tensor.grad = None


def _check_grad(param: Param, grad: Tensor | None) -> None:
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"{param.name} has a sparse gradient, which is not supported. Build its module with sparse=False"
        )
