"""What hangs on the model: each block waits for its own weights, and gradients are reported when they are made.

There is one hook before the model and one before each block, and none on the modules inside. All hooks are closures
over the runtime, so that a deep copy of the model copies no runtime. Recomputation inside a backward (activation
checkpointing) runs forwards too: it must not wait, for what it would wait for may need this very backward.

torch.compile: Dynamo traces a module's hooks with its forward. Ours trace to nothing, so that the graphs are those of
the model without hooks. The waits of a compiled block run before its compiled call instead (`CompiledCall`): outside
the graph, and before Dynamo looks at the parameters' classes (weight_guard.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Param
from twinflow.offload.plan import ROOT


class Listener(Protocol):
    """Who the hooks report to."""

    def check(self) -> None:
        """Raise if an update has failed: nobody must save weights that it should have changed."""
        ...

    def before_model(self) -> None:
        """The whole model's forward is about to run."""
        ...

    def after_model(self) -> None:
        """The whole model's forward has been queued."""
        ...

    def before_forward(self, block: int) -> None:
        """A block's forward is about to run; ROOT for what lies outside any block."""
        ...

    def before_recompute(self, block: int) -> None:
        """The same inside a backward."""
        ...

    def grad_ready(self, param: Param) -> None:
        """A gradient has been accumulated into a parameter."""
        ...


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


class ModelHooks:
    """The hooks of one model."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], listener: Listener) -> None:
        self._model = model
        self._listener = listener
        self._traced = _Traced()
        self._handles = [
            model.register_forward_pre_hook(self._hook(model, self._enter_model), prepend=True),
            model.register_forward_hook(self._hook(model, self._leave_model)),
            model.register_state_dict_pre_hook(self._hook(model, listener.check)),  # type: ignore[no-untyped-call]
        ]
        self._places: list[tuple[dict[str, nn.Module | None], str, Block]] = []  # where each block is registered
        self._enter: dict[int, Callable[[], None]] = {}
        self._wrapped: set[int] = set()  # blocks in whose place torch.compile(block) was put
        for block in blocks:
            enter = self._enter[block.index] = self._entry(block.index)
            if block.module is not model:
                # torch's CheckpointWrapper recomputes the module inside, and not itself.
                runs = getattr(block.module, "_checkpoint_wrapped_module", block.module)
                self._handles.append(runs.register_forward_pre_hook(self._hook(runs, enter), prepend=True))
                parent, _, key = block.name.rpartition(".")
                self._places.append((model.get_submodule(parent)._modules, key, block))
        self.find_compiled()

    @property
    def is_traced(self) -> bool:
        """Whether torch.compile has traced a module of the model together with our hooks, which then do nothing."""
        return self._traced.is_seen

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in [self._model, *(block.module for _, _, block in self._places)]:
            compiled = module._compiled_call_impl
            if isinstance(compiled, CompiledCall):
                module._compiled_call_impl = compiled.call

    def find_compiled(self) -> None:
        """Let blocks that were compiled since the last look wait outside their graphs."""
        if self._model._compiled_call_impl is not None:
            _wrap(self._model, self._enter_all)
        for modules, key, block in self._places:
            if block.module._compiled_call_impl is not None:
                _wrap(block.module, self._enter[block.index])
            found = modules.get(key)
            is_wrapped = found is not block.module and getattr(found, "_orig_mod", None) is block.module
            if found is not None and is_wrapped and block.index not in self._wrapped:
                self._wrapped.add(block.index)  # torch.compile(block) in the block's place
                hook = self._hook(found, self._enter[block.index])
                self._handles.append(found.register_forward_pre_hook(hook, prepend=True))

    def _entry(self, block: int) -> Callable[[], None]:
        listener = self._listener

        def enter() -> None:
            if in_backward():
                listener.before_recompute(block)
            else:
                listener.before_forward(block)

        return enter

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
        """Before the compiled call of the whole model, in which no hook runs."""
        self._enter_model()
        for enter in self._enter.values():
            enter()

    def _hook(self, module: nn.Module, call: Callable[[], None]) -> Hook:
        traced = self._traced

        def hook(caller: nn.Module, *_: Any) -> None:
            if torch.compiler.is_compiling():
                traced.note()
            elif caller is module:  # a deep copy has the same hooks
                call()

        return Hook(hook)


class Hook:
    """A hook on a module. It is not copied and not saved with the module: it belongs to the optimizer."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module calls."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self

    def __reduce__(self) -> Any:
        return Hook, (_do_nothing,)


def _do_nothing(*_: Any, **__: Any) -> None:
    """What a loaded model has in a hook's place."""


class _Traced:
    """Whether Dynamo has seen a hook."""

    is_seen = False

    def note(self) -> None:
        _note_traced(id(self))

    def __init__(self) -> None:
        _TRACED[id(self)] = weakref.ref(self)


_TRACED: dict[int, weakref.ref[_Traced]] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Dynamo calls it while it traces
def _note_traced(key: int) -> int:
    found = _TRACED.get(key)
    traced = found() if found is not None else None
    if traced is not None:
        traced.is_seen = True
    return key


class CompiledCall:
    """The compiled call of a module, and what happens before it."""

    def __init__(self, call: Callable[..., Any], before: Callable[[], None]) -> None:
        self.call = call
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Not traced: the call inside is the compiled one."""
        if not torch.compiler.is_compiling():
            self._before()
        return self.call(*args, **kwargs)


def _wrap(module: nn.Module, before: Callable[[], None]) -> None:
    compiled = module._compiled_call_impl
    if compiled is not None and not isinstance(compiled, CompiledCall):
        module._compiled_call_impl = CompiledCall(compiled, before)


def take_gradients(params: list[Param], listener: Listener) -> list[RemovableHandle]:
    """Report every gradient as soon as it is accumulated.

    torch's hooks on tensors hide what they hold from the garbage collector: they must not hold the listener, which
    holds the tensors.
    """
    reference = weakref.ref(listener)

    def hook_for(param: weakref.ref[Param]) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            owner, found = reference(), param()
            if owner is not None and found is not None:
                owner.grad_ready(found)

        return hook

    tensors: list[Any] = [param.tensor for param in params]  # torch does not type this method
    hooks = [hook_for(weakref.ref(param)) for param in params]
    return [tensor.register_post_accumulate_grad_hook(hook) for tensor, hook in zip(tensors, hooks, strict=True)]
