# SPDX-License-Identifier: Apache-2.0
"""Runs the actions of one pipeline rank: forwards and backwards of its stages, and communication with other ranks.

The calling thread runs all actions in the order of the schedule. The threads of `Wire` send and receive messages. An
action waits only for the message that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from twinflow.errors import invalid_value
from twinflow.parallel.deferral import Batch, Deferral
from twinflow.parallel.schedules import Action, Schedule
from twinflow.parallel.wire import Value, Wire, incoming, made, needed

# Inputs of the first stage and target of the last stage. They are used only on the ranks with these stages.
MicroBatch = tuple[Any, Any]


def forward_only(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """A schedule of forwards only: each rank runs its stages one after the other, each for all micro-batches."""
    lists = tuple(
        tuple(Action("F", stage, i) for stage in schedule.stages_of(rank) for i in range(num_micro_batches))
        for rank in range(schedule.num_ranks)
    )
    return replace(schedule, name="forward", num_micro_batches=num_micro_batches, actions=lists)


@dataclass
class _Step:
    """Data of one batch, by stage and micro-batch."""

    micro_batches: Sequence[MicroBatch]
    # Inputs of a forward, and the edges of the autograd graph at which its backward starts. Outputs are not kept.
    kept: dict[tuple[int, int], tuple[Value, list[GradientEdge | None]]] = field(default_factory=dict)
    deferred: dict[tuple[int, int], Batch] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)  # losses or outputs of the last stage, by micro-batch

    def ordered(self) -> list[Any]:
        return [self.results[i] for i in range(len(self.micro_batches))]


class Runner:
    """Trains with a schedule. `index`: position of this rank. `stages(stage, *inputs)` computes a stage of this rank.

    A value between stages is a tensor, or a tuple or list of tensors and None. A tuple is passed to a stage as several
    inputs, and a list as one. Gradients are those of the mean loss times `scale()`, and accumulate in the parameters as
    usual. Without `loss_fn(output, target)` the output of the last stage is the loss. Without a deferral, the action I
    runs the whole backward and the action W does nothing. `after` is called after each action.
    """

    def __init__(
        self,
        stages: Callable[..., Any],
        schedule: Schedule,
        index: int,
        wire: Wire,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        deferral: Deferral | None = None,
        scale: Callable[[], float] = lambda: 1.0,
        after: Callable[[Action], None] | None = None,
    ) -> None:
        self.schedule, self.index = schedule, index
        self._stages, self._wire, self._loss_fn, self._deferral = stages, wire, loss_fn, deferral
        self._scale, self._after = scale, after
        self._last_stage = schedule.num_stages - 1
        self._has_last = schedule.rank_of(self._last_stage) == index

    def train(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Run forwards and backwards of a batch. Returns the losses on the rank with the last stage.

        After an error the wire cannot be used again, and the other ranks fail too.
        """
        num = self.schedule.num_micro_batches
        if len(micro_batches) != num:
            expected = f"{num} on every pipeline rank, as in the schedule"
            raise invalid_value("The number of micro-batches", len(micro_batches), expected)
        step = _Step(micro_batches)
        do = {"F": self._forward, "B": self._backward, "I": self._input_half, "W": self._weight_half}
        self._play(self.schedule, lambda action: do[action.kind](action, step))
        assert not step.kept and not step.deferred
        return step.ordered() if self._has_last else None

    def evaluate(self, micro_batches: Sequence[MicroBatch], compute_loss: bool = True) -> list[Any] | None:
        """Run only forwards, of any number of micro-batches. The rank with the last stage returns losses or outputs."""
        step = _Step(micro_batches)
        with torch.no_grad():
            self._play(
                forward_only(self.schedule, len(micro_batches)), lambda action: self._infer(action, step, compute_loss)
            )
        return step.ordered() if self._has_last else None

    def _play(self, schedule: Schedule, do: Callable[[Action], None]) -> None:
        try:
            self._wire.expect(incoming(schedule, self.index))
            for action in schedule.actions[self.index]:
                do(action)
                if self._after is not None:
                    self._after(action)
        except BaseException as error:
            self._wire.fail(error)
            raise

    def _forward(self, action: Action, step: _Step) -> None:
        inputs = self._inputs(action, step)
        output = self._stages(action.stage, *_arguments([_changeable(one) for one in inputs], inputs))
        if action.stage == self._last_stage:
            output = self._loss(output, action, step)
            if not output.requires_grad:  # torch refuses the backward of such a loss too
                remedy = "Compute it from the output of the model, without no_grad(), detach() or item()."
                raise invalid_value("loss.requires_grad", False, [True], remedy)
            step.results[action.micro_batch] = output.detach()
        outputs = _as_value(output)
        edges = [get_gradient_edge(one) if one is not None and one.requires_grad else None for one in outputs]
        step.kept[action[1:]] = inputs, edges
        self._send(action, outputs)

    def _backward(self, action: Action, step: _Step) -> None:
        """Compute the gradients of a stage's parameters, and send the gradients of its inputs to the previous stage."""
        inputs, edges = step.kept.pop(action[1:])
        key = needed(self.schedule, action)
        if key is not None:
            grads = self._wire.receive(key)
        else:  # the gradient of the scaled mean loss with respect to the loss of this micro-batch
            grads = (torch.full_like(step.results[action.micro_batch], self._scale() / len(step.micro_batches)),)
        # Unused outputs get no gradient. A stage without trainable parameters has no edges.
        pairs = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None and g is not None]
        if pairs:
            with self._no_autocast():
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        self._send(action, tuple(None if one is None else one.grad for one in inputs))

    def _input_half(self, action: Action, step: _Step) -> None:
        if self._deferral is None:
            self._backward(action, step)
            return
        with self._deferral.collecting() as batch:
            self._backward(action, step)
        step.deferred[action[1:]] = batch

    def _weight_half(self, action: Action, step: _Step) -> None:
        if self._deferral is not None:
            with self._no_autocast():
                step.deferred.pop(action[1:]).run()

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """Backward computes in the dtypes of forward, even if the whole batch runs under autocast."""
        return torch.autocast(self._wire.device.type, enabled=False)

    def _infer(self, action: Action, step: _Step, compute_loss: bool) -> None:
        inputs = self._inputs(action, step)
        output = self._stages(action.stage, *_arguments(inputs, inputs))
        if action.stage == self._last_stage:
            step.results[action.micro_batch] = self._loss(output, action, step) if compute_loss else output
        self._send(action, _as_value(output))

    def _inputs(self, action: Action, step: _Step) -> Value:
        key = needed(self.schedule, action)
        if key is not None:
            return self._wire.receive(key)
        return tuple(_as_value(step.micro_batches[action.micro_batch][0]))  # loaders make lists of tuples

    def _loss(self, output: Any, action: Action, step: _Step) -> Tensor:
        loss: Tensor = output
        if self._loss_fn is not None:
            loss = self._loss_fn(output, step.micro_batches[action.micro_batch][1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            given = f"has the shape {tuple(loss.shape)}" if is_tensor else f"is of type {type(loss).__name__}"
            remedy = "Return one number from loss_fn, for example with .mean()."
            if self._loss_fn is None:
                remedy = "Pass loss_fn to PipelineModule, or let the last layer return the loss."
            raise ValueError(f"The loss {given}, but must be a tensor with one element. {remedy}")
        return loss

    def _send(self, action: Action, value: Value) -> None:
        key = made(self.schedule, action)
        if key is not None:
            self._wire.send(key, value)


class _Entry(torch.autograd.Function):
    """An alias of a leaf's values that may be changed in place, unlike a leaf or a view of one.

    It shares the version counter of the leaf, so autograd detects a change of values that backward needs.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _changeable(one: Tensor | None) -> Tensor | None:
    """A stage's input in a form that its first layer may change in place, like the output of a layer in the stage."""
    if one is None or not (one.requires_grad and one.is_leaf):
        return one
    entered: Tensor = _Entry.apply(one)  # type: ignore[no-untyped-call]
    return entered


def _arguments(values: Sequence[Tensor | None], given: Value) -> Sequence[Any]:
    """The arguments of a stage that gets `values`, in place of `given`. A list stays a list, as inside a stage."""
    return [list(values)] if isinstance(given, list) else values


def _as_value(value: Any) -> Value:
    if isinstance(value, Tensor):
        return (value,)
    is_value = isinstance(value, tuple | list) and all(one is None or isinstance(one, Tensor) for one in value)
    if not is_value:
        raise ValueError(
            f"An input or output of a pipeline stage is of type {type(value).__name__}, but must be a tensor, or a "
            "tuple or list of tensors and None. Convert the value in the data or in the layer that returns it."
        )
    return value if isinstance(value, list) else tuple(value)
