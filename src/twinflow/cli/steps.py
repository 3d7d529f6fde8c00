"""Runs and times one training step for both kinds of engine: a whole model, and the stages of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinflow.engine import Engine
from twinflow.engine.late import LateScalar
from twinflow.engine.pipeline import PipelineEngine

Batch = tuple[Tensor, Tensor]  # tokens and targets
Tell = Callable[[float], None]  # sends this rank's loss of a step to the other ranks


class Clock:
    """Timestamps on the device. They are read after the step, because reading a CUDA event earlier would stall the
    queue."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two timestamps. Waits until the device has reached the second one."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Done:
    """Results of a step that the device may still be computing."""

    losses: Sequence[Tensor]
    marks: Sequence[tuple[Any, Any, Any]]  # of each micro-batch: start, end of the forward, end of the backward
    is_mixed: bool = False  # forwards and backwards alternate, so only their sum is known

    def loss(self) -> float:
        """Mean loss of the micro-batches."""
        return float(torch.stack(list(self.losses)).mean())

    def seconds(self, clock: Clock, wait_s: float) -> tuple[float, float]:
        """Seconds of forward and backward, without the time that forwards waited for new weights.

        A mixed step reports all its time as backward.
        """
        forward_s = sum(clock.seconds(start, middle) for start, middle, _ in self.marks)
        backward_s = sum(clock.seconds(middle, end) for _, middle, end in self.marks)
        if self.is_mixed:
            return 0.0, max(0.0, backward_s - wait_s)
        return max(0.0, forward_s - wait_s), backward_s


def run_step(engine: Engine, batches: Iterator[Batch], clock: Clock, tell: Tell | None = None) -> Done:
    """Forward, backward and update on the micro-batches of a step."""
    if isinstance(engine, PipelineEngine):
        return _run_pipeline(engine, batches, clock, tell)
    losses: list[Tensor] = []
    late: list[LateScalar] = []
    marks: list[tuple[Any, Any, Any]] = []
    for batch in batches:
        start = clock.now()
        loss = engine(*batch).loss
        middle = clock.now()
        if tell is not None:
            # The copy to the host starts here, so that reading the loss waits only for the forward.
            late.append(LateScalar(loss))
        engine.backward(loss)
        marks.append((start, middle, clock.now()))
        losses.append(loss.detach())
        engine.step()
    if tell is not None:  # the ranks exchange losses while the GPU computes the last backward
        tell(sum(one.get() for one in late) / len(late))
    return Done(losses, marks)


def _run_pipeline(engine: PipelineEngine, batches: Iterator[Batch], clock: Clock, tell: Tell | None) -> Done:
    start = clock.now()
    loss = engine.train_batch(batches)
    marks = [(start, start, clock.now())]
    if tell is not None:
        tell(float(loss))
    return Done([loss], marks, is_mixed=True)


def batches_at_once(engine: Engine) -> int:
    """Batches to evaluate in one call. A pipeline keeps all its ranks busy only with several micro-batches."""
    return engine.gradient_accumulation_steps() if isinstance(engine, PipelineEngine) else 1


@torch.no_grad()
def measure(engine: Engine, batches: Sequence[Batch]) -> list[float]:
    """Losses of batches. Empty on ranks without the loss, and on all but the first tensor rank of a replica."""
    if isinstance(engine, PipelineEngine):
        found = engine.eval_batch(iter(batches), reduce_output=None, num_micro_batches=len(batches))
    else:
        module = engine.module.eval()
        found = [module(*batch).loss for batch in batches]
        module.train()
    grid = engine.settings.grid
    if found is None or (grid is not None and grid.model.rank > 0):
        return []
    return [float(loss) for loss in found]
