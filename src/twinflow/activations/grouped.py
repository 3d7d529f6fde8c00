# SPDX-License-Identifier: Apache-2.0
"""Groups of checkpointed layers that keep one input: that of the first layer of a group.

The input of a layer is the output of the layer before it. Backward needs the inputs of a group in reverse order. When
it needs the input of the last layer, all layers of the group except this one run once more, without gradients, and the
inputs of all layers are kept until their backward. A model with groups of n layers keeps 1/n of the inputs, and n - 1
inputs more while backward is in a group. It runs (n - 1)/n of its layers once more than with a checkpoint for each.

A layer whose input is not the very output of the layer before it keeps its input itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from twinflow.activations.offload import hooks_for, memory_key
from twinflow.activations.rerun import autocast_of, randoms_of, with_randoms


class LayerCall:
    """One call of a layer in forward: what is needed to run it again, without the input that is not kept."""

    def __init__(self, run: Callable[..., Any], given: Sequence[Tensor | None], device: torch.device) -> None:
        """`device`: that of the input that is not kept. Often it is the only input."""
        self._run = run
        self._given = given  # None in the place of the input that the layer before has computed
        self._randoms = randoms_of(device)
        self._autocast = autocast_of(device.type, has_gradients=False)
        self.output = 0  # index of the tensor in the output that is the input of the next layer

    def __call__(self, x: Tensor) -> Tensor:
        """The output that is the input of the next layer."""
        with torch.no_grad(), with_randoms(self._randoms), self._autocast():
            found: Tensor = tree_flatten(self._run(*(x if one is None else one for one in self._given)))[0][self.output]
            return found


class Group:
    """The calls of the layers of one group in one forward."""

    def __init__(self) -> None:
        self._calls: list[LayerCall] = []
        # The node of this tensor has saved the input of the first layer. It frees the input when the tensor is gone.
        self._first: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}  # inputs of later layers, from the second run until their backward
        self._outputs: list[weakref.ref[Tensor] | None] = []  # of the last call, until the next one

    def start(self, run: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        """Adds the first layer. Autograd saves its first input once more, for `_restore`."""
        self._first = _First.apply(inputs[0], torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        self._calls.append(LayerCall(run, [None, *inputs[1:]], inputs[0].device))

    def link(self, run: Callable[..., Any], inputs: Sequence[Tensor]) -> saved_tensors_hooks | None:
        """Adds the next layer. Returns hooks that save no input which the layer before has computed; None if no input
        is its output.
        """
        for index, reference in enumerate(self._outputs):
            output = reference() if reference is not None else None
            if output is not None and any(one is output for one in inputs):
                self._calls[-1].output = index
                number = len(self._calls)
                given = [None if one is output else one for one in inputs]
                self._calls.append(LayerCall(run, given, output.device))
                self._outputs = []
                return hooks_for({memory_key(output): number}, lambda tensor: True, self._restore)
        self._outputs = []
        return None

    def note(self, output: object) -> None:
        """Notes the output of the last call, until the next layer is called."""
        leaves = tree_flatten(output)[0]
        self._outputs = [weakref.ref(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]

    def _restore(self, number: int) -> Tensor:
        """The input of a layer. The inputs of the layers before it are computed with it."""
        if number not in self._inputs:
            assert self._first is not None
            node: Any = self._first.grad_fn
            (x,) = node.saved_tensors
            for i, call in enumerate(self._calls[:number], 1):
                x = call(x)
                self._inputs[i] = x
        return self._inputs.pop(number)


class _First(Function):
    """Saves the input of the first layer of a group for `Group`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class Grouping:
    """Assigns checkpointed layers to groups of `every` layers, in their order in the model."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._group: Group | None = None

    @contextmanager
    def calling(
        self,
        number: int,
        run: Callable[..., Any],
        inputs: Sequence[Tensor],
        saving: Callable[[], AbstractContextManager[object]],
    ) -> Iterator[Callable[[object], None]]:
        """A context for the call of layer `number`, in which autograd saves its inputs. It yields a function that must
        get the output of the layer. `saving` makes the context for a layer that keeps its input.
        """
        if self._group is not None and number % self.every:
            hooks = self._group.link(run, inputs)
            if hooks is not None:
                with hooks:
                    yield self._group.note
                return
        self._group = group = Group()
        with saving():
            group.start(run, inputs)
            yield group.note
