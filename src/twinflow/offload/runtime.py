# SPDX-License-Identifier: Apache-2.0
"""The overlap runtime: opens and closes steps, and combines the parts that take gradients, make updates and make
forwards wait for weights.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together. A job is one optimizer step, and a
task is the work for one bucket in a job.

The path of a gradient, in execution order:

1. A hook notes in the queue of the parameter's block that the gradient is complete (hooks.py).
2. The hook of the block's last gradient calls `take_queue` (gradient_taker.py). It gathers the gradients of the block
   in the flat device buffers of their buckets (collector.py).
3. A complete bucket becomes a task. If its state is on the host, the native threads of the executor copy the gradients
   to the host, update the state and copy the weights back (executor.py). If its state is on the device, the update is
   queued on a stream (device_work.py).
4. `step` closes the job and does not wait for it (steps.py).
5. In the next forward a hook calls `before_forward`, which waits for the weights of one block (weight_waits.py). Other
   code that reads a weight waits for that weight only (weight_guard.py).

If gradients are not taken during backward (early.py), `step` takes them from `.grad`, and items 3 to 5 do not change.

Threads: the user's thread (forward, `step`, `wait`) and autograd's thread (`take_queue`) call the runtime and its
parts. They never run at the same time, because backward() blocks its caller. There is no lock in the runtime: its
fields, `WeightWaits`, `Param` and open jobs belong to the thread that currently calls the runtime. Any thread may read
a weight (`settle`). Submitted tasks belong to the native executor (`mutex_` in csrc/executor.h), to `DeviceWork`
(`_lock`) or to the reducer (`Executor.changed`).

Order: `Task.ready` orders a copy or an update after the gradients. `Job.after` orders the new weights of a delayed job
after the work that uses the old weights. `Executor.make_due` names the job whose weights the next forward waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from twinflow.device import Device
from twinflow.errors import incompatible, wrong_state
from twinflow.offload import changes, refusals, weight_guard
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket, Param, Updater, new_bucket, note_step
from twinflow.offload.collector import Collector
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.disk_updater import DiskUpdater
from twinflow.offload.executor import Executor, Held, WorkerError
from twinflow.offload.fetcher import Gather
from twinflow.offload.frozen import FrozenState
from twinflow.offload.gradient_taker import GradientTaker
from twinflow.offload.hooks import ModelHooks
from twinflow.offload.job import Job
from twinflow.offload.param_offload import ParamOffload
from twinflow.offload.plan import FETCHED, HOST, RESIDENT, ROOT, STREAMED, BucketPlan
from twinflow.offload.pools import new_executor
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import NormReducer, PythonThread, Shards, SharedBuckets, Sharing
from twinflow.offload.speculative_stores import SpeculativeStores
from twinflow.offload.state_file import StateFile
from twinflow.offload.step_timer import StepTimer
from twinflow.offload.steps import Steps
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.offload.torch_worker import TorchWorker
from twinflow.offload.updater import RuleUpdater
from twinflow.offload.weight_guard import plain
from twinflow.offload.weight_source import max_frozen_bytes
from twinflow.offload.weight_waits import WeightWaits
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store

LOGGER = logging.getLogger("twinflow")


class Removable(Protocol):
    """A hook on the model, as torch's `RemovableHandle`."""

    def remove(self) -> None: ...


class Runtime:
    """The parameters, buckets and background threads of one model."""

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
        owner: Callable[[], object | None] | None = None,
        where: torch.device | None = None,
        on_bucket: Callable[[Bucket], None] | None = None,
        weights: StateFile | None = None,
    ) -> None:
        """`options` returns the options of each param group. `option_names`: the options that an update depends on;
        None means all of them. `owner`: a weak reference to the optimizer, so that the model's hooks do not keep the
        optimizer alive. `where`: the device of the model, needed only without trained parameters. `on_bucket` is called
        with each bucket before the state of the next one is allocated. `weights`: the file with weights that blocks
        fetch, if they are on a disk."""
        self.device = device
        self._where = where
        self.updaters = updaters
        self.params = params
        self.settings = settings
        self.options = options
        self._loss_scale = loss_scale
        wholes = shards.wholes if isinstance(shards, SharedBuckets) else [None] * len(plans)
        host = updaters[HOST]
        rule = host.rule if isinstance(host, (RuleUpdater, DiskUpdater)) else None
        file = host.file if isinstance(host, DiskUpdater) else None
        self.executor = executor = new_executor(device, rule, plans, settings, self._tensor_device, file, weights)
        self.buckets: list[Bucket] = []
        for plan, whole in zip(plans, wholes, strict=True):
            offloads_params = self._offloads_params(plan)
            name = f"{STREAMED} {FETCHED}" if offloads_params and plan.place == STREAMED else plan.updater
            bucket = new_bucket(params, plan, whole, updaters[name], offloads_params, executor)
            self.buckets.append(bucket)
            if on_bucket is not None:
                on_bucket(bucket)
        self._by_tensor: dict[Tensor, Param] = {param.tensor: param for param in params}
        self._waits = WeightWaits(device, executor, params, self.buckets)
        self._hooks: ModelHooks | None = None
        self.model_owner: dict[str, object] = {}  # the model's `__dict__`, where `_twinflow_owner` is set
        self._handles: list[Removable] = []
        self._untrained: dict[str, nn.Parameter] = {}  # parameters that were frozen when the hooks were attached
        self.frozen = FrozenState(executor)
        self.device_work = DeviceWork(device, executor, self.frozen)
        self.speculative_stores = SpeculativeStores(
            executor, host.new_store, host.release if isinstance(host, RuleUpdater) else _keep
        )
        self.worker = TorchWorker(executor, host) if isinstance(host, TorchUpdater) else None
        self._threads: list[PythonThread] = [] if self.worker is None else [self.worker]
        # This also runs when the runtime is freed, and before the interpreter ends while threads still work.
        self._end = weakref.finalize(self, _end, executor, self.device_work, self.speculative_stores, self._threads)
        self.sharing: Sharing | None = None
        self._norm_reducer: NormReducer | None = None
        self._divisor = 1.0
        where, num_gathered = self._tensor_device, self.settings.num_gathered
        if isinstance(shards, SharedBuckets):
            self.sharing = shards.start(device, executor, self.device_work, self.buckets, settings, where)
        elif shards is not None:
            self._norm_reducer = shards.start(device, executor, self.device_work, self.buckets, settings, where)
        between_ranks = self.sharing or self._norm_reducer
        if between_ranks is not None:
            self._threads += between_ranks.threads
            self._divisor = between_ranks.divisor
        self.collector = Collector(
            device,
            executor,
            self.device_work,
            self.buckets,
            num_gathered,
            where,
            self.sharing,
            agrees=self._norm_reducer is not None,
        )
        self.steps = Steps(
            device,
            executor,
            self.device_work,
            self.collector,
            self.speculative_stores,
            params,
            self.buckets,
            settings,
            self.sharing,
            self._norm_reducer,
        )
        self.timer = StepTimer(device)
        self._taker = GradientTaker(
            self,
            device,
            executor,
            self._by_tensor,
            params,
            self.buckets,
            self.collector,
            self.steps,
            self._waits,
            self.timer,
            settings,
            options,
            option_names,
            has_ranks=between_ranks is not None,
            is_shared=self.sharing is not None,
        )
        self.param_offload: ParamOffload | None = None  # manages weights that live on the host
        self._before_gathering: Callable[[], None] | None = None
        self._before_update: Callable[[], None] | None = None
        self._num_copied = 0  # open contexts of `without_steps`
        self._owner = owner
        weight_guard.claim((param.tensor for param in params), self)
        _RUNTIMES.add(self)

    @property
    def updater(self) -> Updater:
        """The updater of state on the host."""
        return self.updaters[HOST]

    @property
    def fetched_bytes(self) -> int:
        """Bytes of weights that were fetched from the host so far."""
        return self.param_offload.fetcher.fetched_bytes if self.param_offload is not None else 0

    @property
    def is_forgotten(self) -> bool:
        """Whether the optimizer was freed. The model's hooks may keep the runtime alive after that."""
        return self._owner is not None and self._owner() is None

    @property
    def optimizer(self) -> object:
        """The optimizer that has built this runtime; None if it was freed."""
        return self._owner() if self._owner is not None else None

    def find(self, tensor: Tensor) -> Param | None:
        """The record of a trained parameter."""
        return self._by_tensor.get(tensor)

    @property
    def is_closed(self) -> bool:
        """Whether the runtime is closed and makes no more updates."""
        return self.executor.is_closing

    @property
    def can_undo(self) -> bool:
        """Whether updates that have begun during backward can be dropped until `step` (gradient_taker.py)."""
        return self._taker.can_undo

    @property
    def waited_s(self) -> float:
        """Seconds that forwards have waited for weights."""
        return self._waits.waited_s

    @property
    def _tensor_device(self) -> torch.device:
        return self.params[0].tensor.device if self.params else self._where or torch.device("cpu")

    def _offloads_params(self, plan: BucketPlan) -> bool:
        """Whether the weights of a bucket are only on the host: those of a block whose state is there."""
        return self.settings.offload_params and plan.block != ROOT and plan.place != RESIDENT

    def offload_params(
        self,
        frozen: Mapping[int, Sequence[nn.Parameter]],
        values: Mapping[nn.Parameter, Tensor],
        gather: Gather | None,
        can_move: bool = False,
        file: StateFile | None = None,
    ) -> None:
        """Keep the weights of blocks on the host, if their state is there. Called once, before all other methods.

        `can_move`: blocks may move between host and device later (`reconfigure.move_block`). `file`: for frozen weights
        on a disk.
        """
        where = self._tensor_device
        me = weakref.ref(self)

        def on_write(param: Tensor, values: Tensor, *, is_running: bool = False, is_counted: bool = True) -> None:
            runtime = me()
            if runtime is not None:
                runtime._store(param, values, is_running, is_counted)

        def before_error() -> None:
            runtime = me()
            if runtime is not None:
                runtime.complete_written()

        self.param_offload = ParamOffload(
            self.device,
            self.executor,
            self.buckets,
            frozen,
            values,
            gather,
            where,
            on_write,
            before_error,
            can_move,
            file,
            max_frozen_bytes(self.settings.tuning),
        )
        self._waits.offload_params(self.param_offload)
        self._threads += self.param_offload.threads
        weight_guard.claim(self.param_offload.params.offloaded, self)

    def attach(
        self,
        model: nn.Module,
        blocks: list[Block],
        in_order: bool = False,
        before_gathering: Callable[[], None] | None = None,
        handles: Sequence[Removable] = (),
    ) -> None:
        """Put the hooks on the model.

        The first forward is recorded to learn the order of blocks. `in_order`: the blocks run in the given order, so
        nothing is recorded. `before_gathering`: called before each forward if each rank has only some rows of the
        weights. `handles`: other changes of the model, which end when the optimizer is closed.
        """
        self._before_gathering = before_gathering
        if model.__dict__.get("_twinflow_owner") == id(model):  # a deep copy has another id
            raise incompatible(
                "A second TwinOptimizer",
                "this model",
                "the model already has a TwinOptimizer",
                "Call close() of that optimizer before you build another one.",
            )
        self.model_owner = model.__dict__
        self.model_owner["_twinflow_owner"] = id(model)
        self._handles += handles
        self._waits.find_users(blocks)
        if self.param_offload is not None:
            self._handles += self.param_offload.attach(model, blocks)
        self._hooks = ModelHooks(model, blocks, self)
        if in_order:
            self._waits.set_order([block.index for block in blocks])
        self._untrained = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._handles += self._taker.attach()

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Set the only function that is called before a step reads the options. It may change the options."""
        self._before_update = callback

    def check(self) -> None:
        """Raise if an update has failed or the optimizer is closed."""
        self.executor.check()

    # Forward.

    def before_model(self) -> None:
        """Prepare a forward of the whole model. The runs of its blocks are counted from here."""
        self._taker.take_waiting()
        if self._before_gathering is not None:
            self._before_gathering()
        self.steps.close_part()
        self._waits.begin_forward()
        if self.param_offload is not None:
            self.param_offload.store_written()
            self.param_offload.before_model()
        self._taker.before_model()
        self.timer.before_model()

    def after_model(self) -> None:
        """Guard the weights (weight_guard.py) after a forward of the whole model was queued."""
        self._waits.finish_recording()
        self.timer.after_model()
        self._waits.cover(self.params)

    @property
    def watches_gradients(self) -> bool:
        """Whether updates will start during backward only after some more steps (early.py)."""
        return self._taker.watches

    def before_forward(self, block: int) -> None:
        """Wait for the weights of one block (`WeightWaits.hold`)."""
        self.executor.check()
        self.steps.close_part()
        self._taker.before_forward()
        if block != ROOT:
            self._taker.expect_several(self._waits.enter(block))
        self._waits.wait_for_block(block, self.can_undo)

    def after_forward(self, block: int) -> None:
        """Guard the weights of a block that was called alone, as `after_model` guards all weights."""
        self._waits.leave_block(block)

    def found_compiled(self) -> None:
        """Guard all weights again. A first call that ran without our functions has left some unguarded."""
        for param in self.params:
            param.is_bypassed = False

    def before_recompute(self, block: int) -> None:
        """Prepare a forward of a block inside a backward. It does not wait, because the first forward has waited."""
        self._waits.uncover_block(block)

    # Reads and writes of weights outside of forwards (weight_guard.py).

    def settle(self, tensor: Tensor) -> None:
        """Block until the parameter has the values that it would have with torch now."""
        param = self._by_tensor.get(tensor)
        if param is None:
            return  # a frozen weight that lives on the host
        self._taker.note_weight_read(param)
        self._waits.wait(param)
        self.frozen.wait_until_weights_read(param.buckets)  # the caller may write to the weight

    def settle_all(self) -> None:
        """Block until all weights have the values that they would have with torch now."""
        if self.param_offload is not None:
            self.param_offload.store_written()
        for param in self.params:
            self.settle(param.tensor)

    def before_load(self, module: nn.Module) -> None:
        """Raise an exception before `load_state_dict` writes to a module's own weights, if the write would raise one.

        If the write itself raised it, `load_state_dict` would replace it by an exception of its own.
        """
        if self._taker.is_taking and not self.can_undo:
            for tensor in module.parameters(recurse=False):
                if self._waits.lives_away(tensor):
                    raise self._taker.too_late("A weight was written")
                self.settle(tensor)

    def note_alias(self, tensor: Tensor, alias: Tensor) -> None:
        """Note a `.data` tensor of the parameter. A write to it changes the weight, but not the parameter's version."""
        self._by_tensor[tensor].note_alias(alias)

    def lives_on_host(self, tensor: Tensor) -> bool:
        """Whether the parameter has no memory of its own on the device, because its weights live on the host."""
        return self._waits.lives_away(tensor)

    def check_fork(self, tensor: Tensor) -> None:
        """Raise RuntimeError if the weights are on the host of the process from which this one was forked."""
        if self.executor.is_forked and self.lives_on_host(tensor):
            self.executor.check()

    def fetch_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of a weight that lives on the host."""
        assert self.param_offload is not None
        self.param_offload.store_written()
        self.settle(tensor)
        return self.param_offload.params.copy_of(tensor)

    def store(self, tensor: Tensor, values: Tensor, *, is_on_all_ranks: bool = False) -> None:
        """Set the values of a weight that lives on the host, after earlier writes to copies of weights."""
        assert self.param_offload is not None
        self.param_offload.store_written()
        self._store(tensor, values, is_on_all_ranks=is_on_all_ranks)

    def _store(
        self,
        tensor: Tensor,
        values: Tensor,
        is_running: bool = False,
        is_counted: bool = True,
        is_on_all_ranks: bool = False,
    ) -> None:
        """Set the values of a weight that lives on the host.

        `is_running`: the forward of the weight's own block has written them. `is_counted`: torch counts the write in
        the version of the parameter, which it does not for a write through `.data`. `is_on_all_ranks`: all ranks store
        these values.
        """
        assert self.param_offload is not None
        with plain(), torch.no_grad():
            if self.has_gradients:
                self._taker.return_gradients("a weight was written")
            self.wait()
            self.wait_for_copies()
            self.wait_for_readers()
            if self.param_offload.params.is_away(tensor) or self.param_offload.params.is_shown(tensor):
                self.param_offload.store(tensor, values.detach(), is_running, is_counted, is_on_all_ranks)
            else:  # its block has moved to the device since the user got the copy that was written to
                tensor.copy_(values.detach())

    def note_copy(self, tensor: Tensor, copied: Tensor, is_counted: bool) -> None:
        """Note a copy of a weight that the user has got. If the user writes to the copy, the weight gets its values."""
        assert self.param_offload is not None
        self.param_offload.user_copies.add(tensor, copied, is_counted)

    def place_weights(self, block: int, on_host: bool) -> None:
        """Move the weights of a block, if they are not there yet. Call `wait` and `wait_for_copies` first.

        The state of the block must be on the host. Raises MemoryError if the other place has too little memory. Nothing
        has changed then.
        """
        offload = self.param_offload
        assert offload is not None
        if offload.is_offloaded(block) == on_host:
            return
        buckets = [bucket for bucket in self.buckets if bucket.plan.block == block]
        assert all(bucket.plan.place == HOST for bucket in buckets)
        self.wait_for_readers()
        offload.store_written()
        if on_host:
            offload.send_away(block, buckets)
        else:
            offload.bring(block)
        for bucket in buckets:
            bucket.place_weights(on_host)
            for param in bucket.members:
                for alias in param.take_aliases() if on_host else ():
                    offload.user_copies.add(param.tensor, alias, is_counted=False)  # the user may write to it
                param.note_write()
        self._waits.note_places()

    # Backward.

    def note_gradient_read(self, tensor: Tensor) -> None:
        """Note that the user reads `.grad`. A parameter of which this rank has some rows has no stand-in there, because
        `fully_shard` would add the next gradient to it. Raises RuntimeError if its gradient was taken.
        """
        self._taker.note_gradient_read(tensor)

    def note_filled(self, tensor: Tensor, is_filled: bool) -> None:
        """Note that the next gradient of a parameter is zeros, because this rank's backward has made none, or that it
        is a gradient of this backward.
        """
        param = self._by_tensor.get(tensor)
        if param is None:
            return
        with plain():
            is_first = not param.hits and tensor.grad is None
        param.is_filled = is_filled and (is_first or param.is_filled)

    def give_back(self, tensor: Tensor) -> None:
        """Put the gradients of this step back into `.grad`, because the user uses the gradient of `tensor`."""
        self._taker.give_back(tensor)

    def return_gradients(self, reason: str) -> None:
        """Put the gradients of this step back into `.grad`. `reason`: see `GradientTaker.return_gradients`."""
        self._taker.return_gradients(reason)

    # Reads of gradients between backward and `step` (read_gradient.py).

    def look_at_gradients(self) -> None:
        """Take the gradients that still wait after backward, and note that the user reads gradients."""
        self._taker.look()

    @property
    def is_taking(self) -> bool:
        """Whether the gradients of this step were taken from `.grad` during backward."""
        return self._taker.is_taking

    @property
    def is_complete(self) -> bool:
        """Whether the last backward of this step has run, as far as gradients show it."""
        wanted = self.settings.num_gathered
        ordinary = [param for param in self.params if param.hits and not param.is_late]
        return any(param.hits >= wanted for param in ordinary) or (not ordinary and wanted == 1)

    @property
    def is_rest_submitted(self) -> bool:
        """Whether `submit_rest` was called in this step."""
        return self.steps.job is not None and self.steps.job.is_submitted

    @property
    def gradient_scale(self) -> float:
        """Gradients in tasks are the true gradients times this number."""
        job = self.steps.job
        return job.scale if job is not None and not job.is_part else self._loss_scale() * self._divisor

    def submit_rest(self) -> None:
        """Submit the rest of this step now, as `step` would do, and wait until all of it is summed over the ranks."""
        assert self.sharing is not None
        with plain():
            self.steps.submit_rest()

    def complete_written(self) -> None:
        """Complete a step whose updates may have changed weights, so that weights and state are consistent."""
        job = self.steps.job
        if job is not None and not job.is_part and not self.can_undo:
            with plain():
                self._close(job)

    # Step.

    def begin(self) -> None:
        """Open the job of this step with the current options."""
        if self._before_update is not None:
            self._before_update()
        self._waits.finish_recording()
        self._check_params()
        self.steps.open(self.options(), self._loss_scale() * self._divisor)

    def _check_params(self) -> None:
        """Raise if parameters were unfrozen or do not fit their state. Adopt values that the user has written."""
        changes.check_flags(self._untrained)
        changed = changes.find_changed(self.params, self.buckets, self._wait)
        if self.steps.num_jobs == 0:  # writes through `.data` before the first step were not detected
            changed = self.params
        if changed:
            changes.check_changed(changed, self.steps.has_unsent)
            self.adopt(changed, keep=True)

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """A context in which a step raises an exception, because code uses copies of the weights."""
        self._num_copied += 1
        try:
            yield
        finally:
            self._num_copied -= 1

    def step(self) -> Job | None:
        """Close the job and return it without waiting for its updates; None if there are no gradients."""
        self.executor.check()
        if self._num_copied:
            raise wrong_state(
                "step() cannot run inside GatheredParameters",
                "the gathered weights would keep the values before the step",
                "Call step() after the block.",
            )
        self._taker.take_waiting()
        if self.param_offload is not None:
            self.param_offload.store_written()
        with plain():
            self._taker.before_step()
            self.steps.close_part()
            self.steps.fill_parts()
            has_some = bool(self.steps.num_parts) or any(param.hits for param in self.params)
            if self.steps.job is None and (has_some or self.sharing is not None):
                self.begin()  # gradients were not taken early, or there were fewer backwards than declared
            job = self.steps.job
            if job is None:
                self._taker.end_step()
                return None
            self._close(job)
        return job

    def _close(self, job: Job) -> None:
        """Close a job, guard the weights, and prepare for the next step."""
        self._taker.close(job)
        updated = [param for param in self.params if param.was_hit or self.sharing is not None]
        is_traced = self._hooks is not None and self._hooks.is_traced
        bypassed = refusals.note_bypassed(updated, is_traced)
        # Weights that live on the host have editions instead of versions (fetch_hooks.py).
        note_step([param for param in updated if not self._waits.lives_away(param.tensor)])
        self._taker.note_used(updated)
        if self.param_offload is not None:
            self.param_offload.after_step()
        self._taker.end_step()
        self._waits.hold(Held.of(bypassed))
        if self._hooks is not None:
            self._hooks.find_compiled()
            self._waits.cover(self.params)  # also those without a gradient, whose guards the backward has removed

    # Outside of the training loop.

    def wait(self) -> None:
        """Block until all updates that have begun are done, and all weights that the next forward uses are copied."""
        self._taker.note_wait()
        self._wait()

    def _wait(self) -> None:
        """Wait as `wait` does, but do not count this as an access of the user."""
        self.executor.check()
        self.steps.close_part()
        if self.steps.job is not None and not self.settings.limits.any:
            raise self._taker.too_late("Weights and state were read")
        self.steps.wait()
        for param in self.params:
            param.is_seen = True

    def wait_for_copies(self) -> None:
        """Block until no stream reads the state, so that this thread may write to it. Call `wait` first."""
        self.steps.wait_for_copies()

    def wait_for_readers(self) -> None:
        """Block until no background save reads the state (frozen.py), so that this thread may write to it."""
        self.frozen.wait_until_over()

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients of a step that is not closed yet."""
        return self.steps.job is not None or bool(self.steps.num_parts) or any(param.hits for param in self.params)

    def change_settings(self, settings: Settings) -> None:
        """Use other settings from the next step on."""
        self.settings = settings
        self.steps.change_settings(settings)
        self._taker.change_settings(settings)

    def adopt(self, params: Sequence[Param], keep: bool, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Set the master weights from parameters that the user has written, for example by loading a checkpoint.

        `keep`: a master weight that rounds to the value of its parameter is not changed. `values`: the values of
        offloaded parameters.
        """
        for bucket in {bucket: None for param in params for bucket in param.buckets}:
            self.frozen.wait_until_read(bucket)
        changes.adopt(params, keep, values or {})

    def flush(self) -> None:
        """Copy the weights of a delayed update into the parameters now, and wait for the copies."""
        self.steps.release()
        self.wait()

    def forget_gradients(self) -> None:
        """Drop the gradients and the begun updates of a step that is not closed.

        Raises RuntimeError if updates may have changed weights.
        """
        self._taker.forget()

    def before_fork(self) -> None:
        """Wait for the weights, because the child has no thread that copies them. Native threads then hold no lock."""
        if not self.is_closed and self.executor.error is None:
            self.executor.wait_for_weights([bucket for bucket in self.buckets if not bucket.offloads_params])
            if self.steps.last is not None and self.steps.last.is_released:
                self.executor.wait_until_done(self.steps.last)

    def after_fork(self) -> None:
        """Make the model of a forked process an ordinary one, because threads and state exist only in the parent.

        Weights that live on the host exist only in the parent, too. Their use raises an error.
        """
        self._end.detach()
        self.executor.is_forked = True
        self.executor.is_closing = True
        if self.param_offload is None:
            self._detach()

    def close(self, keep_weights: bool = True) -> None:
        """Wait for all updates, then remove the hooks and end the threads. An open step is not completed."""
        if self.executor.is_closing:
            return
        try:
            if self.steps.job is None:
                if self.param_offload is not None:
                    self.param_offload.store_written()  # the last writes, which no later use of a weight has stored
                self.flush()
            elif not self.settings.limits.any and self.executor.error is None:
                LOGGER.warning(
                    "The optimizer was closed between backward() and step(), when this step had updated only some "
                    "weights. Call step() before close(), or load the last checkpoint."
                )
        finally:
            try:
                if self.param_offload is not None:
                    if self.executor.error is None:
                        self.param_offload.close(keep_weights)
                    else:
                        self.param_offload.give_up()
            finally:  # also if the weights cannot be copied back, because an update has failed
                self._detach()
                self._end()

    def _detach(self) -> None:
        """Remove the hooks from the model, the guards from its weights, and the stand-ins from `.grad`."""
        for handle in self._handles:
            handle.remove()
        if self._hooks is not None:
            self._hooks.remove()
        self.model_owner.pop("_twinflow_owner", None)
        weight_guard.release(param.tensor for param in self.params)
        if self.param_offload is not None:
            weight_guard.release(self.param_offload.params.offloaded)
        for param in self.params:
            if isinstance(param.tensor.grad, TakenGradient) and param.tensor.grad.held is None:
                param.tensor.grad = None


_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()
_FORKED: list[Runtime] = []  # keeps the runtimes of the parent process: freeing them would wait for their threads


def _before_fork() -> None:
    for runtime in list(_RUNTIMES):
        # A failure in the background is raised where its optimizer is used. The other ones have to wait all the same.
        with suppress(WorkerError):
            runtime.before_fork()


def _after_fork() -> None:
    _FORKED.extend(_RUNTIMES)
    _RUNTIMES.clear()
    for runtime in _FORKED:
        runtime.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _keep(store: Store) -> None:
    """Do nothing: updaters of a user's optimizer free their stores elsewhere."""


def _end(
    executor: Executor, device_work: DeviceWork, speculative_stores: SpeculativeStores, threads: Sequence[PythonThread]
) -> None:
    """End all threads after their current work, and unlock page-locked memory."""
    if threading.current_thread().name.startswith("twinflow-"):
        # The garbage collector runs in one of the runtime's own threads. This thread must not wait for its own end.
        arguments = (executor, device_work, speculative_stores, threads)
        threading.Thread(target=_join, args=arguments, name="cleaner", daemon=True).start()
    else:
        _join(executor, device_work, speculative_stores, threads)


def _join(
    executor: Executor, device_work: DeviceWork, speculative_stores: SpeculativeStores, threads: Sequence[PythonThread]
) -> None:
    executor.close()
    device_work.close()
    for thread in threads:
        thread.join()
    executor.free_slots()
    speculative_stores.close()
    executor.device.close()  # page-locked memory must be unregistered before it is freed
