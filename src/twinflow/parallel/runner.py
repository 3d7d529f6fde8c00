"""Runs one pipeline rank's list of actions: forwards and backwards of its stages, and what goes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from twinflow.errors import invalid_value
from twinflow.parallel.deferral import Batch, Deferral
from twinflow.parallel.schedules import Action, Schedule
from twinflow.parallel.wire import Value, Wire, incoming, made, needed

MicroBatch = tuple[Any, Any]  # inputs of the first stage, target of the last; looked at only where those stages are


def forward_only(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """All forwards of a rank's stages, one stage after the other."""
    lists = tuple(
        tuple(Action("F", stage, i) for stage in schedule.stages_of(rank) for i in range(num_micro_batches))
        for rank in range(schedule.num_ranks)
    )
    return replace(schedule, name="forward", num_micro_batches=num_micro_batches, actions=lists)


class _Kept(NamedTuple):
    """Of a stage's forward, for its backward. What it has made is not kept: an edge of the graph is enough to start."""

    inputs: Value
    edges: tuple[GradientEdge | None, ...]


@dataclass
class _Step:
    """Of one batch, by stage and micro-batch."""

    micro_batches: Sequence[MicroBatch]
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    deferred: dict[tuple[int, int], Batch] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)  # of the last stage, by micro-batch: losses or outputs

    def ordered(self) -> list[Any]:
        return [self.results[i] for i in range(len(self.micro_batches))]


class Runner:
    """Trains with a schedule. `stages(stage, *inputs)` computes a stage of this rank, number `index` of the pipeline.

    Between stages go a tensor, or several and None in a tuple. Gradients are those of the losses' mean times `scale()`;
    they accumulate in the parameters as ever. Without `loss_fn(output, target)` the last stage's output is the loss.
    Without a deferral I is the whole backward and W nothing. `after` is called after each action.
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
        """Forwards and backwards of a batch; the losses, on the rank that has the last stage.

        After an error the wire is of no more use: the other ranks have been made to fail too.
        """
        num = self.schedule.num_micro_batches
        if len(micro_batches) != num:
            raise invalid_value("micro-batches", len(micro_batches), f"the schedule's {num}, on every pipeline rank")
        step = _Step(micro_batches)
        do = {"F": self._forward, "B": self._backward, "I": self._input_half, "W": self._weight_half}
        self._play(self.schedule, lambda action: do[action.kind](action, step))
        assert not step.kept and not step.deferred
        return step.ordered() if self._has_last else None

    def evaluate(self, micro_batches: Sequence[MicroBatch], compute_loss: bool = True) -> list[Any] | None:
        """Forwards alone, of any number of micro-batches: losses, or what the last stage makes, on its rank."""
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
        output = self._stages(action.stage, *map(_changeable, inputs))
        if action.stage == self._last_stage:
            output = self._loss(output, action, step)
            step.results[action.micro_batch] = output.detach()
        outputs = _as_tuple(output)
        edges = tuple(get_gradient_edge(one) if one is not None and one.requires_grad else None for one in outputs)
        step.kept[action[1:]] = _Kept(inputs, edges)
        self._send(action, outputs)

    def _backward(self, action: Action, step: _Step) -> None:
        """Gradients of a stage's parameters, and of its inputs to the stage before."""
        inputs, edges = step.kept.pop(action[1:])
        key = needed(self.schedule, action)
        grads = self._loss_grad(action, step) if key is None else self._wire.receive(key)
        # Outputs that are not used get no gradient, and a stage that has nothing to train has no edges.
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
        """Backward computes in what forward has computed in, also where the whole batch is run under autocast."""
        return torch.autocast(self._wire.device.type, enabled=False)

    def _infer(self, action: Action, step: _Step, compute_loss: bool) -> None:
        output = self._stages(action.stage, *self._inputs(action, step))
        if action.stage == self._last_stage:
            step.results[action.micro_batch] = self._loss(output, action, step) if compute_loss else output
        self._send(action, _as_tuple(output))

    def _inputs(self, action: Action, step: _Step) -> Value:
        key = needed(self.schedule, action)
        return _as_tuple(step.micro_batches[action.micro_batch][0]) if key is None else self._wire.receive(key)

    def _loss(self, output: Any, action: Action, step: _Step) -> Tensor:
        loss: Tensor = output
        if self._loss_fn is not None:
            loss = self._loss_fn(output, step.micro_batches[action.micro_batch][1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise invalid_value("loss", getattr(loss, "shape", type(loss).__name__), "a tensor of one number")
        return loss

    def _loss_grad(self, action: Action, step: _Step) -> Value:
        """Of the losses' mean, scaled."""
        return (torch.full_like(step.results[action.micro_batch], self._scale() / len(step.micro_batches)),)

    def _send(self, action: Action, value: Value) -> None:
        key = made(self.schedule, action)
        if key is not None:
            self._wire.send(key, value)


class _Entry(torch.autograd.Function):
    """A leaf's values, in its memory. Autograd lets nobody change a leaf in place, nor a view of one, but lets them
    change this. The version is the leaf's too: who needs the values as they were is told."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _changeable(one: Tensor | None) -> Tensor | None:
    """An input as a stage gets it: its first layer may work in place, as after a layer of the same process."""
    if one is None or not (one.requires_grad and one.is_leaf):
        return one
    entered: Tensor = _Entry.apply(one)  # type: ignore[no-untyped-call]
    return entered


def _as_tuple(value: Any) -> Value:
    if isinstance(value, Tensor):
        return (value,)
    is_value = isinstance(value, tuple | list) and all(one is None or isinstance(one, Tensor) for one in value)
    if not is_value:
        raise invalid_value("value between stages", type(value).__name__, "a tensor, or a tuple of tensors and None")
    return tuple(value)
