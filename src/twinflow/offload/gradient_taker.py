# SPDX-License-Identifier: Apache-2.0
"""Takes the gradients of a step during backward, or leaves them in `.grad` until `step`.

The path of a gradient: a hook notes in the queue of the parameter's block that the gradient is complete (hooks.py). The
hook of the block's last gradient calls `take_queue`, which gives the gradients of the block to the collector
(collector.py) and puts stand-ins into `.grad` (taken_gradient.py).

Gradients are taken during backward if `EarlyPolicy` allows it (early.py). Until `step`, gradients that were taken can
be put back into `.grad` as long as no update has changed weights or state (`can_undo`). Another backward, or a changed
gradient, option or weight, then has the same effect as with torch. If updates have already changed weights or state
during backward, such a loop gets an error. Before the error is raised, the step is completed with the gradients so far.

Threads: autograd's thread calls `take_queue`, and the user's thread calls all other methods. They never run at the same
time, because backward() blocks its caller. Only backwards of several threads may run at the same time; the lock
`_taking` orders their calls of `take_queue`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from twinflow.device import Device
from twinflow.offload import changes, refusals, weight_guard
from twinflow.offload.bucket import Bucket, Param, local_of
from twinflow.offload.collector import Collector
from twinflow.offload.early import EarlyPolicy, num_watched
from twinflow.offload.executor import Executor
from twinflow.offload.hooks import GradientQueue, in_backward, new_queues, take_gradients
from twinflow.offload.job import Job
from twinflow.offload.settings import Settings
from twinflow.offload.step_timer import StepTimer
from twinflow.offload.steps import Steps
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.weight_guard import plain
from twinflow.offload.weight_waits import WeightWaits
from twinflow.rules.rule import Options

# Getters for `map`, which reads attributes of many parameters and gradients at once.
_LAYOUT = Tensor.layout.__get__  # type: ignore[attr-defined]
_CONDITION = attrgetter("hits", "is_seen", "is_late", "is_bypassed", "is_sharded")
_HITS = attrgetter("hits")
_TAKEN = attrgetter("taken")
_ONLY_TENSORS = {Tensor}
_ONLY_STRIDED = {torch.strided}
_ONLY_ORDINARY = {(0, True, False, False, False)}


class StepOwner(Protocol):
    """The runtime, which opens and completes the step whose gradients are taken."""

    def begin(self) -> None:
        """Open the job of this step with the current options."""
        ...

    def complete_written(self) -> None:
        """Complete a step whose updates may have changed weights, so that weights and state are consistent."""
        ...


class GradientTaker:
    """The gradients of the step that is not closed yet."""

    def __init__(
        self,
        owner: StepOwner,
        device: Device,
        executor: Executor,
        by_tensor: Mapping[Tensor, Param],
        params: Sequence[Param],
        buckets: Sequence[Bucket],
        collector: Collector,
        steps: Steps,
        waits: WeightWaits,
        timer: StepTimer,
        settings: Settings,
        options: Callable[[], Sequence[Options]],
        option_names: frozenset[str] | None,
        has_ranks: bool,
        is_shared: bool,
    ) -> None:
        """`has_ranks`: other ranks take part in the clipping decision. `is_shared`: ranks share buckets."""
        self._owner = weakref.ref(owner)
        self._device = device
        self._executor = executor
        self._by_tensor = by_tensor
        self._params = params
        self._buckets = buckets
        self._collector = collector
        self._steps = steps
        self._waits = waits
        self._timer = timer
        self._settings = settings
        self._options = options
        self._option_names = option_names
        self._has_ranks = has_ranks
        self._is_shared = is_shared
        # If several backwards are summed, each gradient goes to its sum at once, so that its memory is free again.
        self._all_queues, self._queues, self._wholes = new_queues(params, buckets, settings.num_gathered > 1)
        self._early = EarlyPolicy(settings.early, num_watched(settings, self.can_undo, has_ranks))
        self._taking = threading.RLock()  # held while gradients of a queue are taken; several backwards may run at once
        self._late_from_now: set[Param] = set()  # parameters that become late with the next step
        # Of this step.
        self._is_taking: bool | None = None  # whether this step's gradients are taken; None before the first gradient
        self._is_disturbed = False  # the user read or changed gradients or weights between backward and step
        self._has_complete = False  # a parameter has all of its gradients of this step
        self._has_used = False  # a backward has added to a gradient that the last step has used
        self._watched_options: Sequence[Options] | None = None  # options during backward, if `EarlyPolicy.watches`

    @property
    def is_taking(self) -> bool:
        """Whether the gradients of this step were taken from `.grad` during backward."""
        return bool(self._is_taking)

    @property
    def watches(self) -> bool:
        """Whether updates will start during backward only after some more steps (early.py)."""
        return self._early.watches

    @property
    def can_undo(self) -> bool:
        """Whether updates that have begun during backward can be dropped until `step`.

        This is possible if no update changes the state before the clipping decision and there are no other ranks.
        """
        return self._settings.limits.any and not self._has_ranks

    def attach(self) -> list[RemovableHandle]:
        """Put the hooks on the parameters. They do not keep this object alive."""
        return take_gradients(self._params, self._queues, self._device.stream_ids, self)

    def change_settings(self, settings: Settings) -> None:
        """Use other settings from the next step on."""
        self._settings = settings

    # Forward.

    def before_model(self) -> None:
        """Find gradients that the user has put into `.grad`. They stay there, and backward adds to them."""
        if self._settings.early and self._is_taking is None and not self._steps.num_parts:
            with plain():
                if any(_is_foreign(param.tensor.grad) for param in self._params):
                    self._is_taking = False

    def before_forward(self) -> None:
        """Handle a forward that runs between backward and `step`."""
        if self._has_complete:
            self._disturb("A forward ran")

    def expect_several(self, params: Sequence[Param]) -> None:
        """Expect several gradients in one backward, because the block of these parameters runs again in a forward."""
        for param in params:
            if self._is_taking and param.hits >= self._settings.num_gathered:
                self._late_from_now.add(param)  # from the next step on, because this step's task is complete
            else:
                self._set_late(param)

    # Backward.

    def take_queue(self, queue: GradientQueue) -> None:
        """Take the gradients of a queue, unless this step's gradients stay in `.grad`."""
        with self._taking:
            self._take_queue(queue)

    def _take_queue(self, queue: GradientQueue) -> None:
        self._executor.check()
        if self._take_whole(queue):
            return
        indices, streams = zip(*queue.arrived, strict=True)
        queue.arrived.clear()
        self._device.join_streams(set(streams))
        params = [self._params[index] for index in dict.fromkeys(indices)]
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
            if self._is_taking is None and self._waits.param_offload is not None:
                self._waits.param_offload.user_copies.store()  # now, because no work of this step has begun yet
            if torch.is_grad_enabled() and (in_backward() or any(grad.requires_grad for _, grad in found)):
                if self._is_taking:
                    self._return_gradients("backward(create_graph=True) ran")
                self._is_taking = False  # these gradients have an autograd graph, which a copy would not have
            if self._is_taking is None and found:
                self._is_taking = self._early.takes and not self._waits.has_unfrozen and not self._has_used
            self._waits.begin_backward()
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
        job, whole = self._steps.job, self._wholes.get(queue)
        if not self._is_taking or self._waits.is_covered or job is None or whole is None:
            return False
        if self._settings.num_gathered > 1:
            return False
        if self._steps.num_parts:  # `_new_gradient` checks that the stand-ins of earlier backwards are still in `.grad`
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
            self._device.join_streams({*arrived.values()})
            by_index: dict[int, Tensor] = {}
            for param, tensor, grad in zip(whole.params, whole.tensors, grads, strict=True):
                assert grad is not None
                by_index[param.index] = grad
                param.hits = 1
                param.was_hit = True
                tensor.grad = self._stand_in(param)
            del grads, grad
            self._has_complete |= not job.is_part
            self._collector.put_wholes(job, by_index, whole.buckets)
            weight_guard.cover(whole.tensors)
        return True

    def take_waiting(self) -> None:
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
        hit = [param for param in self._params if param.was_hit]
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
            if param.hits > self._settings.num_gathered and not param.is_late:
                self._set_late(param)
            elif param.is_late or param.hits == self._settings.num_gathered:
                self._has_complete |= not param.is_late
                if self._watched_options is None:
                    with suppress(ValueError):  # an invalid option is refused in `step`, as without `early`
                        self._watched_options = self._options()
                if not param.is_sharded:
                    param.watched = grad
                    param.tensor.grad = self._stand_in(param)

    def _take(self, queue: GradientQueue, found: Sequence[tuple[Param, Tensor]]) -> None:
        self._waits.finish_recording()
        if self._steps.job is not None and self._steps.job.is_submitted:
            raise self.too_late(f"{found[0][0].name} got another gradient after the gradients of this step were read")
        wanted = self._settings.num_gathered
        num_forwards = max(1, self._waits.num_forwards)
        most = min(wanted, num_forwards)  # gradients of a parameter if each forward has one backward
        last: list[tuple[Param, Tensor]] = []  # gradients that are the last of their parameters in this step
        others: list[tuple[Param, Tensor]] = []
        for pair in found:
            param = pair[0]
            if not param.is_seen and not param.was_hit:
                refusals.check_seen(param)
            if param.hits >= most:
                self._take_another(param, wanted, num_forwards)
            param.hits += 1
            param.was_hit = True
            if param.is_sharded:
                pair = (param, local_of(pair[1]))
            elif pair[1].shape != param.shape:
                raise changes.resized(param, pair[1])
            # A late parameter gets several gradients in one backward, so `hits` is not the number of backwards.
            (last if param.hits == wanted and not param.is_late else others).append(pair)
        if self._steps.job is None and (last or (others and wanted == 1)):
            if self._settings.sums_on_host and self._steps.num_parts + 1 < self._settings.accumulation_steps:
                self._steps.open_part()
            else:
                self._step.begin()
        for param, _ in found:  # so that the memory of a gradient is free as soon as it is in the bucket
            param.tensor.grad = None if param.is_sharded else self._stand_in(param)
        job = self._steps.job
        if others:
            self._collector.add(job, others)
        if last:
            assert job is not None
            self._has_complete |= not job.is_part
            whole = self._wholes.get(queue)
            if whole is not None and wanted == 1 and len(last) == queue.size:
                self._collector.put_wholes(job, {param.index: grad for param, grad in last}, whole.buckets)
            else:
                self._collector.add_last(job, last)

    def _take_another(self, param: Param, wanted: int, num_forwards: int) -> None:
        """Handle a gradient of a parameter that has already got one for each forward, or all gradients of this step."""
        if param.hits >= wanted and not param.is_late and self._steps.is_part_open:
            self._steps.close_part()  # another backward without a forward before it
        if param.hits >= num_forwards and param.hits < wanted:
            self._set_late(param)  # it gets several gradients in one backward: reentrant checkpointing
        if param.hits >= wanted and not param.is_late:
            raise self.too_late(f"{param.name} got {param.hits + 1} gradients")

    def _set_late(self, param: Param) -> None:
        """Mark a parameter as late: it gets several gradients in one backward, and each is taken when it comes."""
        param.is_late = True
        self._queues[param.index].set_late(param.index)

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
        is_open = param.is_late or param.hits < self._settings.num_gathered
        if not is_open and self.can_undo:
            self._late_from_now.add(param)  # a loop that adds gradients like this once does so in every step
        return is_open or self._steps.is_part_open

    def note_added(self) -> None:
        """Note that a backward adds a gradient to one that `step()` has used and that was not reset.

        Most loops drop this sum: the backward of another model has passed through this one, and `zero_grad()` follows.
        The gradients therefore stay in `.grad`, because an update could not be undone then.
        """
        self._has_used = True

    # Reads and writes between backward and `step`.

    def give_back(self, tensor: Tensor) -> None:
        """Put the gradients of this step back into `.grad`, because the user uses the gradient of `tensor`."""
        name = self._by_tensor[tensor].name
        with plain(), torch.no_grad():
            self._return_gradients(f"{name}.grad was used")
        if self._is_shared:
            refusals.warn_of_own_gradient(f"{name}.grad was used between backward() and step()")

    def return_gradients(self, reason: str) -> None:
        """Put the gradients of this step back into `.grad`. `reason`: see `_return_gradients`."""
        with plain(), torch.no_grad():
            self._return_gradients(reason)

    def _return_gradients(self, reason: str) -> None:
        """Put the gradients of this step back into `.grad` and drop the updates that have begun.

        From here on this step takes its gradients from `.grad`. A `.grad` that the user has set is not changed. Raises
        the error of `too_late` if updates may have changed weights. `reason`: a clause in the past tense, for it.
        """
        if not self._is_taking:
            self._is_disturbed = True
            for param in self._params:
                watched, param.watched = param.watched, None
                if watched is not None:
                    param.put_back(watched)
            return
        if not self.can_undo:
            raise self.too_late(reason)
        self._is_disturbed = True
        self._steps.close_part()
        wanted = [p for p in self._params if p.hits or self._steps.num_parts]
        found = self._collector.read_back(
            self._steps.job, [p for p in wanted if isinstance(p.tensor.grad, TakenGradient)]
        )
        self._drop()
        for param, grad in found.items():
            param.put_back(grad)
        self._is_taking = False

    def note_gradient_read(self, tensor: Tensor) -> None:
        """Note that the user reads `.grad`. A parameter of which this rank has some rows has no stand-in there, because
        `fully_shard` would add the next gradient to it. Raises RuntimeError if its gradient was taken.
        """
        param = self._by_tensor.get(tensor)
        if param is None or not param.is_sharded or not param.hits or in_backward():
            return
        if self._is_taking:
            with plain(), torch.no_grad():
                raise self.too_late(f"{param.name}.grad was used")
        self._is_disturbed |= self._early.watches

    def note_weight_read(self, param: Param) -> None:
        """Handle a read of a weight. Raises RuntimeError if this step may already have changed the weight."""
        is_complete = param.hits >= self._settings.num_gathered and not param.is_late and not self._steps.is_part_open
        if is_complete and (self._is_taking or self._early.watches):
            self._disturb(f"{param.name} was read")

    def note_wait(self) -> None:
        """Note that the user waits for all weights."""
        self._is_disturbed |= self._early.watches and self._has_complete

    def look(self) -> None:
        """Take the gradients that still wait after backward, and note that the user reads gradients."""
        self.take_waiting()
        self._steps.close_part()
        self._is_disturbed |= self._early.watches

    def _disturb(self, what: str) -> None:
        """Handle an access between backward and `step`: raise if updates may have changed weights, or note it."""
        self._is_disturbed |= self._early.watches
        if self._is_taking and not self._settings.limits.any:
            raise self.too_late(what)

    def too_late(self, what: str) -> RuntimeError:
        """Return the error for an access (`what`) that comes when updates may have changed weights.

        First the step is completed with the gradients so far, so that weights and optimizer state are consistent and
        can be saved.
        """
        self._step.complete_written()
        return refusals.too_late(what, self._has_ranks)

    @property
    def _step(self) -> StepOwner:
        owner = self._owner()
        assert owner is not None
        return owner

    def forget(self) -> None:
        """Drop the gradients and the begun updates of a step that is not closed.

        Raises RuntimeError if updates may have changed weights.
        """
        for queue in self._all_queues:
            queue.forget()
        is_disturbed = self._is_disturbed or (self._early.watches and self._has_complete)
        if self._is_taking and self._has_complete and not self.can_undo:
            raise self.too_late("zero_grad() was called")
        self._drop()
        self.end_step()
        self._is_disturbed = is_disturbed  # until the next step, which the policy counts

    def _drop(self) -> None:
        """Drop the open step: its gradients, its sums, and its updates that run ahead of the clipping decision."""
        self._steps.close_part()
        job = self._steps.job
        if job is not None:
            job.drop()
            is_taking, is_disturbed = self._is_taking, self._is_disturbed
            self.close(job)
            self.end_step()
            self._is_taking, self._is_disturbed = is_taking, is_disturbed
        elif self._steps.num_parts:
            self._steps.forget_sums()

    # Step.

    def before_step(self) -> None:
        """Find what the user has changed since backward. Gradients that were taken go back into `.grad` if something
        has changed, and the step then takes them from there."""
        if self._is_taking and (reason := self._find_change()):
            self._return_gradients(reason)
        if not self._is_taking:
            self._is_disturbed |= self._has_watched_change()
            self._check_left()

    def _find_change(self) -> str:
        """Return a clause that names what the user has changed since the gradients were taken; "" if nothing."""
        grads = [param.tensor.grad for param in self._params]
        is_all_taken = all(map(_HITS, self._params)) and all(map(is_, grads, map(_TAKEN, self._params)))
        for param, grad in () if is_all_taken else zip(self._params, grads, strict=True):
            if isinstance(grad, TakenGradient) and grad.is_used and not param.hits:
                self._step.complete_written()
                raise refusals.used_twice(param)
            is_taken = param.was_hit and not param.is_sharded
            if grad is not param.taken if is_taken else _is_foreign(grad):
                return f"{param.name}.grad was changed"
        job = self._steps.job
        if job is None or job.is_part:
            return ""
        option = refusals.changed_option(job.options, self._options(), self._option_names)
        if option:
            return option
        if not self.can_undo:  # this step's own updates may have written to the weights
            return ""
        # The last step may still write to weights, but not to weights that this step's forward has waited for.
        written = changes.written(param for param in self._params if param.was_hit and param.is_seen)
        moved = [] if written else changes.moved(self._buckets)
        return f"{(written or moved)[0].name} was written" if written or moved else ""

    def _has_watched_change(self) -> bool:
        """Whether a gradient was replaced or an option changed after backward, in a step that `EarlyPolicy.watches`."""
        if self._watched_options is None:
            return False
        for param in self._params:
            grad = param.tensor.grad
            if grad is not param.taken if param.watched is not None else not param.hits and _is_foreign(grad):
                return True
        return bool(refusals.changed_option(self._watched_options, self._options(), self._option_names))

    def _check_left(self) -> None:
        """Check the gradients of a step that were left in `.grad`, and note which parameters have one."""
        for param in self._params:
            grad = param.tensor.grad
            if isinstance(grad, TakenGradient) and grad.is_used and grad.held is None:
                raise refusals.used_twice(param)
            param.hits = int(grad is not None)
            param.was_hit = bool(param.hits)
            refusals.check_layout(param, grad)

    def close(self, job: Job) -> None:
        """Submit the rest of the open job and close it, without waiting for its updates."""
        self._timer.after_backward()
        self._steps.close(job, self.is_taking, self._stand_in)

    def note_used(self, params: Sequence[Param]) -> None:
        """Note that a step has used the gradients of these parameters."""
        if self._is_taking:
            for grad in [param.tensor.grad for param in params]:
                if type(grad) is TakenGradient:
                    grad.is_used = True
        self._early.after_step(self._is_disturbed)

    def end_step(self) -> None:
        """Prepare for the gradients of the next step."""
        for param in self._params:
            param.hits = 0
            param.was_hit = False
            param.is_filled = False
            param.watched = None
        for param in self._late_from_now:
            self._set_late(param)
        self._late_from_now.clear()
        self._waits.end_step()
        self._is_taking = None
        self._is_disturbed = False
        self._has_complete = False
        self._has_used = False
        self._watched_options = None


def _is_stand_in_lost(param: Param) -> bool:
    """Whether a gradient of this step was taken and the user has removed or replaced its stand-in in `.grad`."""
    grad = param.tensor.grad
    if not param.was_hit or param.is_sharded or grad is param.taken:
        return False
    return grad is None or param.taken is None or param.taken.arrived is not grad


def _is_foreign(grad: Tensor | None) -> bool:
    return grad is not None and not isinstance(grad, TakenGradient)
