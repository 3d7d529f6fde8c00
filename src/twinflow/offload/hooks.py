# SPDX-License-Identifier: Apache-2.0
"""The hooks on the model. They make each block's forward wait for its weights, and report gradients to the runtime.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together.

There are hooks before and after the forward of the model, and one before the forward of each block. Modules inside a
block have no such hooks. Every module that has parameters has a hook for `load_state_dict`. All hooks are closures over
the runtime, so a deep copy of the model does not copy the runtime. Activation checkpointing runs forwards inside a
backward. These forwards must not wait for an update, because that update may need gradients of the same backward.

Threads: hooks on modules run in the thread that calls the forward. Inside a backward, and for gradients, this is
autograd's thread. The two never run at the same time, because backward() blocks its caller, so there is no lock. A
`GradientQueue` belongs to autograd's thread during backward, and to the user's thread in `step` and before a forward.
Each gradient is noted with the id of the stream that made it. Before the gradients are copied, the copying stream waits
for all of these streams (`Device.join_streams`).

torch.compile: Dynamo traces the hooks of a module together with its forward. Our hooks add nothing to the traced graph.
A compiled block waits for its weights outside of the graph, before its compiled call (`CompiledCall`). A parameter that
waits for its update has another class (weight_guard.py). The wait restores the class before Dynamo compares it with the
class for which the graph was compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.plan import ROOT

GradientHook = Callable[[torch.Tensor], object]


class Listener(Protocol):
    """The methods of the runtime that the hooks call."""

    def check(self) -> None:
        """Raise if an update has failed. Called before `state_dict`, so that weights after a failure are not saved."""
        ...

    def before_model(self) -> None:
        """Called before the forward of the whole model."""
        ...

    def after_model(self) -> None:
        """Called when the forward of the whole model is queued."""
        ...

    def before_forward(self, block: int) -> None:
        """Called before the forward of a block. ROOT stands for the parameters outside of all blocks."""
        ...

    def after_forward(self, block: int) -> None:
        """Called when the forward of a block is queued."""
        ...

    def before_recompute(self, block: int) -> None:
        """Called before a forward of a block that runs inside a backward."""
        ...

    def found_compiled(self) -> None:
        """Called when the model was compiled in place, and its calls run the other methods from now on."""
        ...

    def before_load(self, module: nn.Module) -> None:
        """Called before `load_state_dict` writes to the module's own parameters."""
        ...


class Taker(Protocol):
    """The method of the gradient taker that the hooks on parameters call."""

    def take_queue(self, queue: GradientQueue) -> None:
        """Called when all expected gradients of a queue, or one of a late parameter, are in `.grad`."""
        ...


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


class _Engine(Protocol):
    """The method of torch's autograd engine that is used here. torch has no type annotation for it."""

    def queue_callback(self, callback: Callable[[], None]) -> None: ...


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward that runs now has ended: the innermost one, with reentrant checkpointing."""
    engine: _Engine = torch.autograd.Variable._execution_engine  # torch has no public name for it
    engine.queue_callback(callback)


class ModelHooks:
    """The hooks on the modules of one model."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], listener: Listener) -> None:
        self._model = model
        self._listener = listener
        self._traced = _Traced()
        self._handles = [
            model.register_forward_pre_hook(self._hook(model, self._enter_model), prepend=True),
            model.register_forward_hook(self._hook(model, self._leave_model)),
            # torch does not type this method.
            model.register_state_dict_pre_hook(self._hook(model, listener.check)),  # type: ignore[no-untyped-call]
        ]
        for module in model.modules():
            if module._parameters:
                hook = self._load_hook(module)
                self._handles.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        self._places: list[tuple[dict[str, nn.Module | None], str, Block]] = []  # `_modules` of the parent, key, block
        self._enter: dict[int, Callable[[], None]] = {}
        self._leave: dict[int, Callable[[], None]] = {}
        self._wrapped: set[int] = set()  # blocks that the user has replaced by torch.compile(block)
        for block in blocks:
            enter = self._enter[block.index] = self._entry(block.index)
            leave = self._leave[block.index] = self._exit(block.index)
            if block.module is not model:
                # torch's CheckpointWrapper recomputes the module that it wraps, and not itself.
                runs = getattr(block.module, "_checkpoint_wrapped_module", block.module)
                self._handles.append(runs.register_forward_pre_hook(self._hook(runs, enter), prepend=True))
                self._handles.append(runs.register_forward_hook(self._hook(runs, leave)))
                parent, _, key = block.name.rpartition(".")
                self._places.append((model.get_submodule(parent)._modules, key, block))
        self.find_compiled()

    @property
    def is_traced(self) -> bool:
        """Whether torch.compile has traced a module together with our hooks. The hooks of such a module do nothing."""
        return self._traced.is_seen

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in [self._model, *(block.module for _, _, block in self._places)]:
            compiled = module._compiled_call_impl
            if isinstance(compiled, CompiledCall):
                module._compiled_call_impl = compiled.call

    def find_compiled(self) -> None:
        """Make the model and the blocks wait for their weights, if they were compiled since the last call."""
        if self._model._compiled_call_impl is not None and _wrap(self._model, self._enter_all, self._leave_model):
            self._listener.found_compiled()
        for modules, key, block in self._places:
            if block.module._compiled_call_impl is not None:
                _wrap(block.module, self._enter[block.index], self._leave[block.index])
            found = modules.get(key)
            is_wrapped = found is not block.module and getattr(found, "_orig_mod", None) is block.module
            if found is not None and is_wrapped and block.index not in self._wrapped:
                self._wrapped.add(block.index)
                hook = self._hook(found, self._enter[block.index])
                self._handles.append(found.register_forward_pre_hook(hook, prepend=True))
                self._handles.append(found.register_forward_hook(self._hook(found, self._leave[block.index])))

    def _entry(self, block: int) -> Callable[[], None]:
        listener = self._listener

        def enter() -> None:
            if in_backward():
                listener.before_recompute(block)
            else:
                listener.before_forward(block)

        return enter

    def _exit(self, block: int) -> Callable[[], None]:
        listener = self._listener

        def leave() -> None:
            if not in_backward():
                listener.after_forward(block)

        return leave

    def _enter_model(self) -> None:
        if in_backward():
            self._listener.before_recompute(ROOT)
            return
        self.find_compiled()
        self._listener.before_model()
        self._listener.before_forward(ROOT)

    def _leave_model(self) -> None:
        if not in_backward():
            self._listener.after_model()

    def _enter_all(self) -> None:
        """Called before the compiled call of the whole model, because no hook runs inside a compiled graph."""
        self._enter_model()
        for enter in self._enter.values():
            enter()

    def _load_hook(self, module: nn.Module) -> Hook:
        listener = self._listener

        def hook(caller: nn.Module, *_: object) -> None:
            if caller is module:
                listener.before_load(module)

        return Hook(hook)

    def _hook(self, module: nn.Module, call: Callable[[], None]) -> Hook:
        traced = self._traced

        def hook(caller: nn.Module, *_: object) -> None:
            if torch.compiler.is_compiling():
                traced.note()
            elif caller is module:  # a deep copy of the module has the same hooks and must not call the runtime
                call()

        return Hook(hook)


class Hook:
    """A hook on a module. It belongs to the optimizer, so it is not copied or saved with the module."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the hook. The result replaces the inputs or outputs of the module, unless it is None."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> Hook:
        return self

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., object]]]:
        return Hook, (_do_nothing,)


def _do_nothing(*_: object, **__: object) -> None:
    """The function that replaces our hooks in a model that was loaded from a pickle."""


class _Traced:
    """Notes whether Dynamo has traced a hook."""

    is_seen = False

    def note(self) -> None:
        _note_traced(id(self))

    def __init__(self) -> None:
        _TRACED[id(self)] = weakref.ref(self)
        # Dynamo calls the function while it traces. As a decorator this would import Dynamo, which takes seconds.
        torch.compiler.assume_constant_result(_note_traced)  # type: ignore[no-untyped-call]


_TRACED: dict[int, weakref.ref[_Traced]] = {}


def _note_traced(key: int) -> int:
    found = _TRACED.get(key)
    traced = found() if found is not None else None
    if traced is not None:
        traced.is_seen = True
    return key


class CompiledCall:
    """The compiled call of a module, with functions that run before and after it."""

    def __init__(self, call: Callable[..., object], before: Callable[[], None], after: Callable[[], None]) -> None:
        self.call = call
        self._before = before
        self._after = after

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self._before()
        result = self.call(*args, **kwargs)
        self._after()
        return result


def _wrap(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> bool:
    """Returns whether the compiled call was not wrapped before."""
    compiled = module._compiled_call_impl
    if compiled is None or isinstance(compiled, CompiledCall):
        return False
    module._compiled_call_impl = CompiledCall(compiled, before, after)
    return True


class GradientQueue:
    """Gradients of a block (or of one parameter) that wait in `.grad` until all expected gradients of it are there.

    They are taken together, because each kernel call from Python takes longer than the copy of a small gradient.

    A hook on each parameter notes that its gradient is complete. There are many of these hooks, and a hook in Python
    takes several microseconds. So most hooks are made of builtins and only append to `arrived`. The parameter whose
    gradient came last in the previous backward has a hook in Python that counts the gradients. While this parameter is
    not known, all parameters have the hook that counts.

    The garbage collector cannot see the objects to which torch's hooks on tensors refer, so it never frees a reference
    cycle through such a hook. The hooks on parameters refer to the queue. The queue must therefore not refer to a
    parameter or to the `Listener`.
    """

    def __init__(self) -> None:
        self.arrived: list[tuple[int, int]] = []  # index of the parameter, and id of the stream of its gradient
        self.size = 0  # number of parameters of this queue
        self.num_expected = 0  # number of gradients in the last backward
        self.num_taken = 0  # number of gradients in this backward so far
        self._backward = -1  # autograd's id of the backward that `num_taken` counts
        self._late: set[int] = set()  # parameters with several gradients in one backward; each is taken at once
        self._last: int | None = None  # the parameter whose hook counts; None: all hooks count
        self._handles: dict[int, RemovableHandle] = {}
        self._quick: dict[int, GradientHook] = {}  # hooks that only append to `arrived`
        self._counting: dict[int, GradientHook] = {}  # hooks that take the gradients when all have come

    def add(self, index: int, is_late: bool) -> None:
        """Add a parameter to this queue. `is_late`: it gets several gradients in one backward."""
        self.size += 1
        self.num_expected += 1
        if is_late:
            self.set_late(index)

    def attach(self, param: Param, streams: Iterator[int], take: Callable[[GradientQueue], None]) -> RemovableHandle:
        index = param.index
        # The hook calls next(iterator, tensor), which appends one pair.
        pairs: Iterator[tuple[int, int]] = zip(repeat(index), streams)
        self._quick[index] = partial(next, map(self.arrived.append, pairs))

        def hook(tensor: torch.Tensor) -> None:
            self._quick[index](tensor)
            if index in self._late:
                take(self)
            elif len(dict(self.arrived)) < self.num_expected:
                self.count_all()
            else:
                self._count_at(index)
                take(self)

        self._counting[index] = hook
        # torch does not type this method.
        handle: RemovableHandle = param.tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles[index] = handle
        return handle

    def set_late(self, index: int) -> None:
        self._late.add(index)
        self._put(index, self._counting)

    def count_all(self) -> None:
        """Let all hooks count, because it is not known which gradient will come last."""
        if self._last is not None:
            self._last = None
            for index in self._handles:
                self._put(index, self._counting)

    def _count_at(self, last: int) -> None:
        if self._last != last:
            self._last = last
            for index in self._handles:
                self._put(index, self._counting if index == last or index in self._late else self._quick)

    def _put(self, index: int, hooks: dict[int, GradientHook]) -> None:
        handle = self._handles.get(index)
        here = handle.hooks_dict_ref() if handle is not None else None
        if handle is not None and here is not None and handle.id in here:
            here[handle.id] = hooks[index]

    def count(self, num_taken: int) -> None:
        """Count gradients that are taken now. Another id of autograd's backward shows that the last one has ended."""
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):  # -1: gradients that still waited after the backward
            self.end_backward()
            self._backward = backward
        self.num_taken += num_taken

    def end_backward(self) -> None:
        """Expect as many gradients in the next backward as were taken in this one."""
        if self.num_taken:
            self.num_expected = self.num_taken
        self.num_taken = 0

    def forget(self) -> None:
        self.arrived.clear()
        self.num_taken = 0


class Whole(NamedTuple):
    """The parameters and buckets of a queue that shares no bucket with another queue."""

    params: list[Param]
    tensors: list[nn.Parameter]
    buckets: list[Bucket]


class Queues(NamedTuple):
    """The queues of all parameters."""

    every: list[GradientQueue]
    of_param: list[GradientQueue]  # by index of the parameter
    wholes: dict[GradientQueue, Whole]


def new_queues(params: Sequence[Param], buckets: Sequence[Bucket], is_each_alone: bool) -> Queues:
    """Make one queue for each block, for each expert with buckets of its own, and for each parameter outside of all
    blocks.

    Parameters outside of all blocks have separate queues, because they get their gradients at very different times.
    `is_each_alone`: make a separate queue for every parameter.
    """
    by_block: dict[tuple[int, int], GradientQueue] = {}
    found = Queues([], [], {})
    for param in params:
        block, expert = (param.buckets[0].plan.block, param.buckets[0].plan.expert) if param.buckets else (ROOT, 0)
        is_alone = is_each_alone or block == ROOT
        queue = GradientQueue() if is_alone else by_block.setdefault((block, expert), GradientQueue())
        if queue not in found.every:
            found.every.append(queue)
            found.wholes[queue] = Whole([], [], [])
        queue.add(param.index, param.is_late)
        found.of_param.append(queue)
        found.wholes[queue].params.append(param)
        found.wholes[queue].tensors.append(param.tensor)
    shared: set[GradientQueue] = set()
    for bucket in buckets:
        queues = {found.of_param[param.index] for param in bucket.members}
        for queue in queues:
            found.wholes[queue].buckets.append(bucket)
        if len(queues) > 1:
            shared |= queues
    for queue in shared:
        del found.wholes[queue]
    return found


def take_gradients(
    params: Sequence[Param], queues: Sequence[GradientQueue], streams: Iterator[int], taker: Taker
) -> list[RemovableHandle]:
    """Register hooks that call `taker.take_queue` as soon as all expected gradients of a queue are accumulated.

    `streams`: next() gives the id of the calling thread's current stream.
    """
    reference = weakref.ref(taker)

    def take(queue: GradientQueue) -> None:
        owner = reference()
        if owner is not None:
            owner.take_queue(queue)

    handles = [queue.attach(param, streams, take) for param, queue in zip(params, queues, strict=True)]
    weakref.finalize(taker, _remove, handles).atexit = False  # hooks have no use after the taker is freed
    return handles


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
