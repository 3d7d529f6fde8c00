"""The overlap runtime: takes gradients during backward, submits tasks to the executor, and makes forwards wait for
weights.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together. A job is one optimizer step, and a
task is the work for one bucket in a job.

The path of a gradient, in execution order:

1. A hook notes in the queue of the parameter's block that the gradient is complete (hooks.py).
2. The hook of the block's last gradient calls `take_queue`. It gathers the gradients of the block in the flat device
   buffers of their buckets (collector.py).
3. A complete bucket becomes a task. If its state is on the host, the native threads of the executor copy the gradients
   to the host, update the state and copy the weights back (executor.py). If its state is on the device, the update is
   queued on a stream (device_work.py).
4. `step` closes the job and does not wait for it (steps.py).
5. In the next forward a hook calls `before_forward`, which waits for the weights of one block. Other code that reads a
   weight waits for that weight only (weight_guard.py).

Gradients are taken during backward if `early` allows it (early.py). Otherwise `step` takes them from `.grad`, and items
3 to 5 do not change. Until `step`, gradients that were taken can be put back into `.grad` as long as no update has
changed weights or state (`can_undo`). Another backward, or a changed gradient, option or weight, then has the same
effect as with torch. If updates have already changed weights or state during backward, such a loop gets an error.
Before the error is raised, the step is completed with the gradients so far.

Threads: the user's thread (forward, `step`, `wait`) and autograd's thread (`take_queue`) call the runtime. They never
run at the same time, because backward() blocks its caller. Only backwards of several threads may run at the same time;
the lock `_taking` orders their calls of `take_queue`. There is no other lock in the runtime: the fields of `Runtime`,
`Param` and open jobs belong to the thread that currently calls the runtime. Any thread may read a weight (`settle`).
Submitted tasks belong to the native executor (`mutex_` in csrc/executor.h), to `DeviceWork` (`_lock`) or to the reducer
(`Executor.changed`).

Order: `Task.ready` orders a copy or an update after the gradients. `Job.after` orders the new weights of a delayed job
after the work that uses the old weights. `Executor.make_due` names the job whose weights the next forward waits for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter, is_
from typing import Protocol

import torch
from torch import Tensor, nn

from twinflow.device import Device
from twinflow.errors import incompatible, wrong_state
from twinflow.offload import changes, refusals, weight_guard
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Param, Updater, local_of, new_bucket, note_step
from twinflow.offload.collector import Collector
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.early import EarlyPolicy, num_watched
from twinflow.offload.executor import Executor, Held
from twinflow.offload.fetcher import Gather
from twinflow.offload.forwards import Forwards
from twinflow.offload.frozen import FrozenState
from twinflow.offload.hooks import GradientQueue, ModelHooks, in_backward, new_queues, take_gradients
from twinflow.offload.job import Job
from twinflow.offload.param_offload import ParamOffload
from twinflow.offload.plan import HOST, ROOT, BucketPlan
from twinflow.offload.pools import new_executor
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import NormReducer, PythonThread, Shards, SharedBuckets, Sharing
from twinflow.offload.speculative_stores import SpeculativeStores
from twinflow.offload.step_timer import StepTimer
from twinflow.offload.steps import Steps
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.offload.torch_worker import TorchWorker
from twinflow.offload.updater import RuleUpdater
from twinflow.offload.weight_guard import plain
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store

LOGGER = logging.getLogger("twinflow")

# Getters for `map`, which reads attributes of many parameters and gradients at once.
_LAYOUT = Tensor.layout.__get__  # type: ignore[attr-defined]
_CONDITION = attrgetter("hits", "is_seen", "is_late", "is_bypassed", "is_sharded")
_HITS = attrgetter("hits")
_TAKEN = attrgetter("taken")
_ONLY_TENSORS = {Tensor}
_ONLY_STRIDED = {torch.strided}
_ONLY_ORDINARY = {(0, True, False, False, False)}


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
    ) -> None:
        """`options` returns the options of each param group. `option_names`: the options that an update depends on;
        None means all of them. `owner`: a weak reference to the optimizer, so that the model's hooks do not keep the
        optimizer alive. `where`: the device of the model, needed only without trained parameters."""
        self.device = device
        self._where = where
        self.updaters = updaters
        self.params = params
        self.settings = settings
        self.options = options
        self._loss_scale = loss_scale
        self._option_names = option_names
        wholes = shards.wholes if isinstance(shards, SharedBuckets) else [None] * len(plans)
        host = updaters[HOST]
        rule = host.rule if isinstance(host, RuleUpdater) else None
        self.executor = executor = new_executor(device, rule, plans, settings, self._tensor_device)
        self.buckets = [
            new_bucket(params, plan, whole, updaters[plan.place], self._offloads_params(plan), executor)
            for plan, whole in zip(plans, wholes, strict=True)
        ]
        self._by_tensor: dict[Tensor, Param] = {param.tensor: param for param in params}
        self._num_forwards = 0  # forwards of the model in this step
        self._forwards = Forwards(params, self.buckets)
        self._hooks: ModelHooks | None = None
        self.model_owner: dict[str, object] = {}  # the model's `__dict__`, where `_twinflow_owner` is set
        self._handles: list[Removable] = []
        self._untrained: dict[str, nn.Parameter] = {}  # parameters that were frozen when the hooks were attached
        self._is_taking: bool | None = None  # whether this step's gradients are taken; None before the first gradient
        self._taking = threading.RLock()  # held while gradients of a queue are taken; several backwards may run at once
        self._is_disturbed = False  # the user read or changed gradients or weights between backward and step
        self._has_complete = False  # a parameter has all of its gradients of this step
        self._watched_options: Sequence[Options] | None = None  # options during backward, if `EarlyPolicy.watches`
        # Parameters that were frozen in a forward of this step. If one of them gets a gradient from another forward, no
        # hook shows when backward has read the weight for the last time. No update may then run before `step`.
        self._used_frozen: set[Param] = set()
        # If several backwards are summed, each gradient goes to its sum at once, so that its memory is free again.
        self._all_queues, self._queues, self._wholes = new_queues(params, self.buckets, settings.num_gathered > 1)
        self._is_covered = False  # weights are guarded, and no backward has begun since
        self._late_from_now: set[Param] = set()  # parameters that become late with the next step
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
        self.collector = Collector(device, executor, self.device_work, self.buckets, num_gathered, where, self.sharing)
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
        self.waited_s = 0.0  # seconds that forwards have waited for weights
        self.timer = StepTimer(device)
        self.param_offload: ParamOffload | None = None  # manages weights that live on the host
        self._before_gathering: Callable[[], None] | None = None
        self._before_update: Callable[[], None] | None = None
        self._num_copied = 0  # open contexts of `without_steps`
        self._owner = owner
        self._early = EarlyPolicy(settings.early, num_watched(settings, self.can_undo, self._has_ranks))
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
        """Whether updates that have begun during backward can be dropped until `step`.

        This is possible if no update changes the state before the clipping decision and there are no other ranks.
        """
        return self.settings.limits.any and not self._has_ranks

    @property
    def _has_ranks(self) -> bool:
        """Whether other ranks take part in the clipping decision."""
        return self.sharing is not None or self._norm_reducer is not None

    @property
    def _tensor_device(self) -> torch.device:
        return self.params[0].tensor.device if self.params else self._where or torch.device("cpu")

    def _offloads_params(self, plan: BucketPlan) -> bool:
        """Whether the weights of a bucket are only on the host: those of a block whose state is there."""
        return self.settings.offload_params and plan.block != ROOT and plan.place == HOST

    def offload_params(
        self,
        frozen: Mapping[int, Sequence[nn.Parameter]],
        values: Mapping[nn.Parameter, Tensor],
        gather: Gather | None,
        can_move: bool = False,
    ) -> None:
        """Keep the weights of blocks on the host, if their state is there. Called once, before all other methods.

        `can_move`: blocks may move between host and device later (`reconfigure.move_block`).
        """
        where = self._tensor_device
        me = weakref.ref(self)

        def on_write(tensor: Tensor, written: Tensor, is_running: bool, is_counted: bool) -> None:
            runtime = me()
            if runtime is not None:
                runtime.store(tensor, written, is_running, is_counted)

        def before_error() -> None:
            runtime = me()
            if runtime is not None:
                runtime.complete_written()

        self.param_offload = ParamOffload(
            self.device, self.executor, self.buckets, frozen, values, gather, where, on_write, before_error, can_move
        )
        self._threads += self.param_offload.threads
        weight_guard.claim(self.param_offload.tensors, self)

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
        self._forwards.find_users(blocks, self.param_offload)
        if self.param_offload is not None:
            self._handles += self.param_offload.attach(model, blocks)
        self._hooks = ModelHooks(model, blocks, self)
        if in_order:
            self._forwards.set_order([block.index for block in blocks])
        self._untrained = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._handles += take_gradients(self.params, self._queues, self.device.stream_ids, self)

    def call_before_update(self, callback: Callable[[], None]) -> None:
        """Set the only function that is called before a step reads the options. It may change the options."""
        self._before_update = callback

    def check(self) -> None:
        """Raise if an update has failed or the optimizer is closed."""
        self.executor.check()

    def _set_late(self, param: Param) -> None:
        """Mark a parameter as late: it gets several gradients in one backward, and each is taken when it comes."""
        param.is_late = True
        self._queues[param.index].set_late(param.index)

    # Forward.

    def before_model(self) -> None:
        """Prepare a forward of the whole model. The runs of its blocks are counted from here."""
        self._take_queues()
        if self._before_gathering is not None:
            self._before_gathering()
        self.steps.close_part()
        self._forwards.begin()
        self._num_forwards += torch.is_grad_enabled()
        if self.param_offload is not None:
            self._collect_loans()
            self.param_offload.before_model()
        if self.settings.early and self._is_taking is None and not self.steps.num_parts:
            with plain():  # gradients that the user has put into `.grad` stay there, and backward adds to them
                for param in self.params:
                    grad = param.tensor.grad
                    if grad is not None and _is_foreign(grad):
                        self._is_taking = False
                        break
        self.timer.before_model()

    def after_model(self) -> None:
        """Guard the weights (weight_guard.py) after a forward of the whole model was queued."""
        self._finish_recording()
        self.timer.after_model()
        self._cover(self.params)

    @property
    def watches_gradients(self) -> bool:
        """Whether updates will start during backward only after some more steps (early.py)."""
        return self._early.watches

    def before_forward(self, block: int) -> None:
        """Wait for the weights of one block.

        The calling thread waits until their copies are queued. The model's streams wait until the copies have ended.
        """
        self.executor.check()
        self.steps.close_part()
        if self._has_complete:
            self._disturb("A forward ran")
        if block != ROOT:
            for param in self._forwards.enter(block):
                if self._is_taking and param.hits >= self.settings.num_gathered:
                    self._late_from_now.add(param)  # from the next step on, because this step's task is complete
                else:
                    self._set_late(param)
        self._hold(self._forwards.held(block))
        weight_guard.uncover(self._forwards.guarded(block))
        is_recorded = torch.is_grad_enabled() and not self.can_undo
        for param in self._forwards.used(block):
            param.is_seen = True
            if is_recorded and not param.tensor.requires_grad:
                self._used_frozen.add(param)

    def _hold(self, held: Held) -> None:
        """Make the model wait for the weights of these buckets."""
        if held.buckets:
            start = time.perf_counter()
            waited_s = self.executor.hold(held)
            if waited_s:
                self.waited_s += waited_s
                self.device.trace.add("wait", "main", start, start + waited_s, bucket=held.buckets[0].plan.index)

    def before_recompute(self, block: int) -> None:
        """Prepare a forward of a block inside a backward. It does not wait, because the first forward has waited."""
        weight_guard.uncover(self._forwards.guarded(block))

    def _lives_away(self, tensor: Tensor) -> bool:
        offload = self.param_offload
        return offload is not None and offload.is_away(tensor)

    # Reads and writes of weights outside of forwards (weight_guard.py).

    def settle(self, tensor: Tensor) -> None:
        """Block until the parameter has the values that it would have with torch now."""
        param = self._by_tensor.get(tensor)
        if param is None:
            return  # a frozen weight that lives on the host
        is_complete = param.hits >= self.settings.num_gathered and not param.is_late and not self.steps.is_part_open
        if is_complete and (self._is_taking or self._early.watches):
            self._disturb(f"{param.name} was read")
        self.executor.check()
        self.executor.wait_for_weights(param.buckets)
        param.is_seen = True

    def settle_all(self) -> None:
        """Block until all weights have the values that they would have with torch now."""
        if self.param_offload is not None:
            self._collect_loans()
        for param in self.params:
            self.settle(param.tensor)

    def before_load(self, module: nn.Module) -> None:
        """Raise an exception before `load_state_dict` writes to a module's own weights, if the write would raise one.

        If the write itself raised it, `load_state_dict` would replace it by an exception of its own.
        """
        if self._is_taking and not self.can_undo:
            for tensor in module.parameters(recurse=False):
                if self._lives_away(tensor):
                    raise self._too_late("A weight was written")
                self.settle(tensor)

    def note_alias(self, tensor: Tensor, alias: Tensor) -> None:
        """Note a `.data` tensor of the parameter. A write to it changes the weight, but not the parameter's version."""
        self._by_tensor[tensor].note_alias(alias)

    def lives_on_host(self, tensor: Tensor) -> bool:
        """Whether the parameter has no memory of its own on the device, because its weights live on the host."""
        return self._lives_away(tensor)

    def fetch_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of a weight that lives on the host."""
        assert self.param_offload is not None
        self._collect_loans()
        self.settle(tensor)
        return self.param_offload.copy_of(tensor)

    def store(
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
                self._return_gradients("a weight was written")
            self.wait()
            self.wait_for_copies()
            self.wait_for_readers()
            if self.param_offload.is_away(tensor) or self.param_offload.is_shown(tensor):
                self.param_offload.store(tensor, values.detach(), is_running, is_counted, is_on_all_ranks)
            else:  # its block has moved to the device since the user got the copy that was written to
                tensor.copy_(values.detach())

    def lend(self, tensor: Tensor, copied: Tensor, is_counted: bool) -> None:
        """Note a copy of a weight that the user has got. If the user writes to the copy, the weight gets its values."""
        assert self.param_offload is not None
        self.param_offload.lend(tensor, copied, is_counted)

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
        self._collect_loans()
        if on_host:
            offload.send_away(block, buckets)
        else:
            offload.bring(block)
        for bucket in buckets:
            bucket.place_weights(on_host)
            for param in bucket.members:
                for alias in param.take_aliases() if on_host else ():
                    offload.lend(param.tensor, alias, is_counted=False)  # the user may write to it
                param.note_write()
        self._forwards.note_places()

    def _collect_loans(self) -> None:
        """Store copies that the user has written to, and memory that the user has put into a weight with `set_`."""
        assert self.param_offload is not None
        for param, values in self.param_offload.replaced():
            self.store(param, values)
        self.param_offload.store_loans()

    def _cover(self, params: Sequence[Param]) -> None:
        """Guard weights, except weights that compiled graphs use without our hooks. `step` waits for these weights."""
        self._is_covered = True
        weight_guard.cover([param.tensor for param in params if not param.is_bypassed])

    # Backward.

    def take_queue(self, queue: GradientQueue) -> None:
        """Take the gradients of a queue, unless this step's gradients stay in `.grad`."""
        with self._taking:
            self._take_queue(queue)

    def _take_queue(self, queue: GradientQueue) -> None:
        self.executor.check()
        if self._take_whole(queue):
            return
        indices, streams = zip(*queue.arrived, strict=True)
        queue.arrived.clear()
        self.device.join_streams(set(streams))
        params = [self.params[index] for index in dict.fromkeys(indices)]
        queue.count(len(params))
        with plain():
            self._forget_zeroed(params)
            found: list[tuple[Param, Tensor]] = []
            for param in params:
                grad = param.tensor.grad
                if param.was_hit or type(grad) is not Tensor or grad.layout is not torch.strided:
                    grad = self._new_gradient(param)
                if grad is not None:
                    found.append((param, grad))
            if self._is_taking is None and self.param_offload is not None:
                self.param_offload.store_loans()  # now, because no work of this step has begun yet
            if torch.is_grad_enabled() and (in_backward() or any(grad.requires_grad for _, grad in found)):
                if self._is_taking:
                    self._return_gradients("backward(create_graph=True) ran")
                self._is_taking = False  # these gradients have an autograd graph, which a copy would not have
            if self._is_taking is None and found:
                self._is_taking = self._early.takes and not any(p.tensor.requires_grad for p in self._used_frozen)
            if self._is_covered:  # blocks that are recomputed use their weights again
                self._is_covered = False
                again = [p.tensor for p in self.params if p.is_seen and not p.hits]  # others wait when they are used
                weight_guard.uncover([tensor for tensor in again if not self._lives_away(tensor)])
            if self._is_taking:
                self._take(queue, found)
            else:
                for param, grad in found:
                    self._leave(param, grad)
            weight_guard.cover([param.tensor for param, _ in found if not param.is_bypassed])

    def _take_whole(self, queue: GradientQueue) -> bool:
        """Take the gradients of a queue in the usual case: each parameter has got its only gradient of this step.

        This needs no checks for each parameter, so it takes a third of the time of the general
        case. In all other cases this method does nothing and returns False.
        """
        job, whole = self.steps.job, self._wholes.get(queue)
        if not self._is_taking or self._is_covered or job is None or whole is None or self.settings.num_gathered > 1:
            return False
        if self.steps.num_parts:  # `_new_gradient` checks that the stand-ins of earlier backwards are still in `.grad`
            return False
        arrived = dict(queue.arrived)
        if len(arrived) != queue.size or len(queue.arrived) != queue.size:
            return False
        with plain():
            grads = [tensor.grad for tensor in whole.tensors]
            if {*map(type, grads)} != _ONLY_TENSORS or {*map(_LAYOUT, grads)} != _ONLY_STRIDED:
                return False
            if {*map(_CONDITION, whole.params)} != _ONLY_ORDINARY:
                return False
            queue.arrived.clear()
            queue.count(queue.size)
            self.device.join_streams({*arrived.values()})
            by_index: dict[int, Tensor] = {}
            for param, tensor, grad in zip(whole.params, whole.tensors, grads, strict=True):
                assert grad is not None
                by_index[param.index] = grad
                param.hits = 1
                param.was_hit = True
                tensor.grad = self._stand_in(param)
            del grads, grad
            self._has_complete |= not job.is_part
            self.collector.put_wholes(job, by_index, whole.buckets)
            weight_guard.cover(whole.tensors)
        return True

    def _take_queues(self) -> None:
        """Take gradients that still wait after backward, because their block got fewer gradients than last time."""
        for queue in self._all_queues:
            if queue.arrived:
                self.take_queue(queue)
                queue.count_all()
            queue.end_backward()

    def _forget_zeroed(self, arrived: Sequence[Param]) -> None:
        """Drop the gradients of this step's earlier backwards if the user has removed all of them from `.grad`, as
        `module.zero_grad()` does between micro-batches. If only some were removed, `_new_gradient` handles it.

        `arrived`: parameters whose gradients have arrived in the current backward. No update has begun, so nothing has
        to be undone, and other ranks have at most summed gradients that they drop too.
        """
        if not self._is_taking or self._has_complete or not any(map(_is_stand_in_lost, arrived)):
            return
        hit = [param for param in self.params if param.was_hit]
        if all(map(_is_stand_in_lost, hit)):
            self._is_disturbed |= self._early.watches
            self._drop()
            for param in hit:
                param.hits = 0
                param.was_hit = False

    def _new_gradient(self, param: Param) -> Tensor | None:
        """Return the gradient that this backward has added; None if the user has removed it from `.grad`."""
        grad = param.tensor.grad
        taken = param.taken
        if isinstance(grad, TakenGradient):
            stand_in = grad
            grad = stand_in.arrived
            stand_in.arrived = None
            if grad is not None and param.watched is not None:
                grad = param.watched.add_(grad)
        elif grad is not None and param.watched is not None:
            if taken is not None and taken.arrived is grad:
                taken.arrived = None
                grad = param.watched.add_(grad)
            else:
                self._is_disturbed = True  # the user has replaced the stand-in in `.grad`
        elif grad is not None and self._is_taking:
            if _is_stand_in_lost(param):
                self._return_gradients(f"{param.name}.grad was changed")
            elif taken is not None and taken.arrived is grad:
                taken.arrived = None
        if grad is not None:
            refusals.check_layout(param, grad)
        return grad

    def _leave(self, param: Param, grad: Tensor) -> None:
        """Leave a gradient in `.grad`. If later steps will take gradients, a TakenGradient detects uses of it."""
        if not param.was_hit:
            refusals.check_seen(param)
        param.hits += 1
        param.was_hit = True
        if self._early.watches and not grad.requires_grad:
            if param.hits > self.settings.num_gathered and not param.is_late:
                self._set_late(param)
            elif param.is_late or param.hits == self.settings.num_gathered:
                self._has_complete |= not param.is_late
                if self._watched_options is None:
                    with suppress(ValueError):  # an invalid option is refused in `step`, as without `early`
                        self._watched_options = self.options()
                if not param.is_sharded:
                    param.watched = grad
                    param.tensor.grad = self._stand_in(param)

    def _take(self, queue: GradientQueue, found: Sequence[tuple[Param, Tensor]]) -> None:
        self._finish_recording()
        if self.is_rest_submitted:
            raise self._too_late(f"{found[0][0].name} got another gradient after the gradients of this step were read")
        wanted = self.settings.num_gathered
        most = min(wanted, max(1, self._num_forwards))  # gradients of a parameter if each forward has one backward
        last: list[tuple[Param, Tensor]] = []  # gradients that are the last of their parameters in this step
        others: list[tuple[Param, Tensor]] = []
        for pair in found:
            param = pair[0]
            if not param.is_seen and not param.was_hit:
                refusals.check_seen(param)
            if param.hits >= most:
                self._take_another(param, wanted)
            param.hits += 1
            param.was_hit = True
            if param.is_sharded:
                pair = (param, local_of(pair[1]))
            elif pair[1].shape != param.shape:
                raise changes.resized(param, pair[1])
            # A late parameter gets several gradients in one backward, so `hits` is not the number of backwards.
            (last if param.hits == wanted and not param.is_late else others).append(pair)
        if self.steps.job is None and (last or (others and wanted == 1)):
            if self.settings.sums_on_host and self.steps.num_parts + 1 < self.settings.accumulation_steps:
                self.steps.open_part()
            else:
                self._begin()
        for param, _ in found:  # so that the memory of a gradient is free as soon as it is in the bucket
            param.tensor.grad = None if param.is_sharded else self._stand_in(param)
        job = self.steps.job
        if others:
            self.collector.add(job, others)
        if last:
            assert job is not None
            self._has_complete |= not job.is_part
            whole = self._wholes.get(queue)
            if whole is not None and wanted == 1 and len(last) == queue.size:
                self.collector.put_wholes(job, {param.index: grad for param, grad in last}, whole.buckets)
            else:
                self.collector.add_last(job, last)

    def _take_another(self, param: Param, wanted: int) -> None:
        """Handle a gradient of a parameter that has already got one for each forward, or all gradients of this step."""
        if param.hits >= wanted and not param.is_late and self.steps.is_part_open:
            self.steps.close_part()  # another backward without a forward before it
        if param.hits >= max(1, self._num_forwards) and param.hits < wanted:
            self._set_late(param)  # it gets several gradients in one backward: reentrant checkpointing
        if param.hits >= wanted and not param.is_late:
            raise self._too_late(f"{param.name} got {param.hits + 1} gradients")

    def _stand_in(self, param: Param) -> TakenGradient:
        """Return a stand-in for `.grad`. The last one is reused, unless the user holds a reference to it."""
        taken = param.taken
        if taken is None or taken.held is not None or sys.getrefcount(taken) > 4:
            taken = param.taken = TakenGradient(param.tensor, self)
        taken.is_used = False
        return taken

    def expects_more(self, tensor: Tensor) -> bool:
        """Whether the runtime will take the next gradient of this parameter too."""
        param = self._by_tensor[tensor]
        if not self._is_taking:
            return param.is_late and param.watched is not None and not torch.is_grad_enabled()
        is_open = param.is_late or param.hits < self.settings.num_gathered
        if not is_open and self.can_undo:
            self._late_from_now.add(param)  # a loop that adds gradients like this once does so in every step
        return is_open or self.steps.is_part_open

    def give_back(self, tensor: Tensor) -> None:
        """Put the gradients of this step back into `.grad`, because the user uses the gradient of `tensor`."""
        name = self._by_tensor[tensor].name
        with plain(), torch.no_grad():
            self._return_gradients(f"{name}.grad was used")
        if self.sharing is not None:
            refusals.warn_of_own_gradient(f"{name}.grad was used between backward() and step()")

    def note_gradient_read(self, tensor: Tensor) -> None:
        """Note that the user reads `.grad`. A parameter of which this rank has some rows has no stand-in there, because
        `fully_shard` would add the next gradient to it. Raises RuntimeError if its gradient was taken.
        """
        param = self._by_tensor.get(tensor)
        if param is None or not param.is_sharded or not param.hits or in_backward():
            return
        if self._is_taking:
            with plain(), torch.no_grad():
                raise self._too_late(f"{param.name}.grad was used")
        self._is_disturbed |= self._early.watches

    def _return_gradients(self, reason: str) -> None:
        """Put the gradients of this step back into `.grad` and drop the updates that have begun.

        From here on this step takes its gradients from `.grad`. A `.grad` that the user has set is not changed. Raises
        the error of `_too_late` if updates may have changed weights. `reason`: a clause in the past tense, for it.
        """
        if not self._is_taking:
            self._is_disturbed = True
            for param in self.params:
                watched, param.watched = param.watched, None
                if watched is not None:
                    param.put_back(watched)
            return
        if not self.can_undo:
            raise self._too_late(reason)
        self._is_disturbed = True
        self.steps.close_part()
        wanted = [p for p in self.params if p.hits or self.steps.num_parts]
        found = self.collector.read_back(
            self.steps.job, [p for p in wanted if isinstance(p.tensor.grad, TakenGradient)]
        )
        self._drop()
        for param, grad in found.items():
            param.put_back(grad)
        self._is_taking = False

    def return_gradients(self, reason: str) -> None:
        """Put the gradients of this step back into `.grad`. `reason`: see `_return_gradients`."""
        with plain(), torch.no_grad():
            self._return_gradients(reason)

    # Reads of gradients between backward and `step` (read_gradient.py).

    def look_at_gradients(self) -> None:
        """Take the gradients that still wait after backward, and note that the user reads gradients."""
        self._take_queues()
        self.steps.close_part()
        self._is_disturbed |= self._early.watches

    @property
    def is_taking(self) -> bool:
        """Whether the gradients of this step were taken from `.grad` during backward."""
        return bool(self._is_taking)

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

    def _disturb(self, what: str) -> None:
        """Handle an access between backward and `step`: raise if updates may have changed weights, or note it."""
        self._is_disturbed |= self._early.watches
        if self._is_taking and not self.settings.limits.any:
            raise self._too_late(what)

    def _too_late(self, what: str) -> RuntimeError:
        """Return the error for an access (`what`) that comes when updates may have changed weights.

        First the step is completed with the gradients so far, so that weights and optimizer state are consistent and
        can be saved.
        """
        self.complete_written()
        return refusals.too_late(what, self._has_ranks)

    def complete_written(self) -> None:
        """Complete a step whose updates may have changed weights, so that weights and state are consistent."""
        job = self.steps.job
        if job is not None and not job.is_part and not self.can_undo:
            with plain():
                self._close(job)

    # Step.

    def _begin(self) -> None:
        """Open the job of this step with the current options."""
        if self._before_update is not None:
            self._before_update()
        self._finish_recording()
        self._check_params()
        self.steps.open(self.options(), self._loss_scale() * self._divisor)

    def _finish_recording(self) -> None:
        """End the recording of the first forward. The order of its blocks is the order of deadlines."""
        order = self._forwards.finish_recording()
        if order is not None and self.param_offload is not None:
            self.param_offload.set_order(order)

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
        self._take_queues()
        if self.param_offload is not None:
            self._collect_loans()
        with plain():
            if self._is_taking and (reason := self._find_change()):
                self._return_gradients(reason)
            if not self._is_taking:
                self._is_disturbed |= self._has_watched_change()
                self._look_at_gradients()
            self.steps.close_part()
            self.steps.fill_parts()
            has_some = bool(self.steps.num_parts) or any(param.hits for param in self.params)
            if self.steps.job is None and (has_some or self.sharing is not None):
                self._begin()  # gradients were not taken early, or there were fewer backwards than declared
            job = self.steps.job
            if job is None:
                self._reset()
                return None
            self._close(job)
        return job

    def _find_change(self) -> str:
        """Return a clause that names what the user has changed since the gradients were taken; "" if nothing."""
        grads = [param.tensor.grad for param in self.params]
        is_all_taken = all(map(_HITS, self.params)) and all(map(is_, grads, map(_TAKEN, self.params)))
        for param, grad in () if is_all_taken else zip(self.params, grads, strict=True):
            if isinstance(grad, TakenGradient) and grad.is_used and not param.hits:
                self.complete_written()
                raise refusals.used_twice(param)
            is_taken = param.was_hit and not param.is_sharded
            if grad is not param.taken if is_taken else _is_foreign(grad):
                return f"{param.name}.grad was changed"
        job = self.steps.job
        if job is None or job.is_part:
            return ""
        option = refusals.changed_option(job.options, self.options(), self._option_names)
        if option:
            return option
        if not self.can_undo:  # this step's own updates may have written to the weights
            return ""
        # The last step may still write to weights, but not to weights that this step's forward has waited for.
        written = changes.written(param for param in self.params if param.was_hit and param.is_seen)
        moved = [] if written else changes.moved(self.buckets)
        return f"{(written or moved)[0].name} was written" if written or moved else ""

    def _has_watched_change(self) -> bool:
        """Whether a gradient was replaced or an option changed after backward, in a step that `EarlyPolicy.watches`."""
        if self._watched_options is None:
            return False
        for param in self.params:
            grad = param.tensor.grad
            if grad is not param.taken if param.watched is not None else not param.hits and _is_foreign(grad):
                return True
        return bool(refusals.changed_option(self._watched_options, self.options(), self._option_names))

    def _look_at_gradients(self) -> None:
        """Check the gradients of a step that were left in `.grad`, and note which parameters have one."""
        for param in self.params:
            grad = param.tensor.grad
            if isinstance(grad, TakenGradient) and grad.is_used and grad.held is None:
                raise refusals.used_twice(param)
            param.hits = int(grad is not None)
            param.was_hit = bool(param.hits)
            refusals.check_layout(param, grad)

    def _close(self, job: Job) -> None:
        """Close a job, guard the weights that it updates, and prepare for the next step."""
        self.timer.after_backward()
        self.steps.close(job, bool(self._is_taking), self._stand_in)
        if job.is_dropped:  # the weights do not change
            self._reset()
            return
        updated = [param for param in self.params if param.was_hit or self.sharing is not None]
        is_traced = self._hooks is not None and self._hooks.is_traced
        bypassed = refusals.note_bypassed(self.params, is_traced)
        # Weights that live on the host have editions instead of versions (fetch_hooks.py).
        note_step([param for param in updated if not self._lives_away(param.tensor)])
        if self._is_taking:
            for grad in [param.tensor.grad for param in updated]:
                if type(grad) is TakenGradient:
                    grad.is_used = True
        if self.param_offload is not None:
            self.param_offload.after_step()
        self._early.after_step(self._is_disturbed)
        self._reset()
        self._hold(Held.of(bypassed))
        if self._hooks is not None:
            self._hooks.find_compiled()
            self._cover(updated)

    def _reset(self) -> None:
        """Prepare for the gradients of the next step."""
        for param in self.params:
            param.hits = 0
            param.was_hit = False
            param.watched = None
        for param in self._late_from_now:
            self._set_late(param)
        self._late_from_now.clear()
        self._forwards.forget_runs()
        self._num_forwards = 0
        self._is_taking = None
        self._is_disturbed = False
        self._has_complete = False
        self._watched_options = None
        self._used_frozen.clear()

    # Outside of the training loop.

    def wait(self) -> None:
        """Block until all updates that have begun are done, and all weights that the next forward uses are copied."""
        self._is_disturbed |= self._early.watches and self._has_complete
        self._wait()

    def _wait(self) -> None:
        """Wait as `wait` does, but do not count this as an access of the user."""
        self.executor.check()
        self.steps.close_part()
        if self.steps.job is not None and not self.settings.limits.any:
            raise self._too_late("Weights and state were read")
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

    def adopt(self, params: Sequence[Param], keep: bool, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Set the master weights from parameters that the user has written, for example by loading a checkpoint.

        `keep`: a master weight that rounds to the value of its parameter is not changed. `values`: the values of
        offloaded parameters.
        """
        changes.adopt(params, keep, values or {})

    def flush(self) -> None:
        """Copy the weights of a delayed update into the parameters now, and wait for the copies."""
        self.steps.release()
        self.wait()

    def forget_gradients(self) -> None:
        """Drop the gradients and the begun updates of a step that is not closed.

        Raises RuntimeError if updates may have changed weights.
        """
        for queue in self._all_queues:
            queue.forget()
        is_disturbed = self._is_disturbed or (self._early.watches and self._has_complete)
        if self._is_taking and self._has_complete and not self.can_undo:
            raise self._too_late("zero_grad() was called")
        self._drop()
        self._reset()
        self._is_disturbed = is_disturbed  # until the next step, which the policy counts

    def _drop(self) -> None:
        """Drop the open step: its gradients, its sums, and its updates that run ahead of the clipping decision."""
        self.steps.close_part()
        job = self.steps.job
        if job is not None:
            job.drop()
            is_taking, is_disturbed = self._is_taking, self._is_disturbed
            self._close(job)
            self._is_taking, self._is_disturbed = is_taking, is_disturbed
        elif self.steps.num_parts:
            self.steps.forget_sums()

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
                    self._collect_loans()  # the last write to a weight, which no later use of a weight has stored
                self.flush()
            elif not self.settings.limits.any and self.executor.error is None:
                LOGGER.warning(
                    "The optimizer was closed between backward() and step(), when this step had updated only some "
                    "weights. Call step() before close(), or load the last checkpoint."
                )
        finally:
            if self.param_offload is not None and self.executor.error is None:
                self.param_offload.close(keep_weights)
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
            weight_guard.release(self.param_offload.tensors)
        for param in self.params:
            if isinstance(param.tensor.grad, TakenGradient) and param.tensor.grad.held is None:
                param.tensor.grad = None


_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()
_FORKED: list[Runtime] = []  # keeps the runtimes of the parent process: freeing them would wait for their threads


def _before_fork() -> None:
    for runtime in list(_RUNTIMES):
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


def _is_stand_in_lost(param: Param) -> bool:
    """Whether a gradient of this step was taken and the user has removed or replaced its stand-in in `.grad`."""
    grad = param.tensor.grad
    if not param.was_hit or param.is_sharded or grad is param.taken:
        return False
    return grad is None or param.taken is None or param.taken.arrived is not grad


def _is_foreign(grad: Tensor | None) -> bool:
    return grad is not None and not isinstance(grad, TakenGradient)
