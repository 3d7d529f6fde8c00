"""One way to run a step, and to measure, for both kinds of engine: of a whole model, and of a pipeline's stages."""

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
Tell = Callable[[float], None]  # the other ranks of a step's loss here


class Clock:
    """Moments on the device, read when a step is over: on a GPU reading one earlier would hold up the queue."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """This moment."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments; waits for the second."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Done:
    """A step that the device may still be busy with."""

    losses: Sequence[Tensor]
    marks: Sequence[tuple[Any, Any, Any]]  # of each part: its start, the end of the forward, the end
    is_mixed: bool = False  # forwards and backwards take turns: only their sum is known

    def loss(self) -> float:
        """The mean of its parts'."""
        return float(torch.stack(list(self.losses)).mean())

    def seconds(self, clock: Clock, wait_s: float) -> tuple[float, float]:
        """Forward and backward without what forwards waited for new weights; of a mixed step all is the second."""
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
            late.append(LateScalar(loss))  # copied out here, so that reading it waits for no more than the forward
        engine.backward(loss)
        marks.append((start, middle, clock.now()))
        losses.append(loss.detach())
        engine.step()
    if tell is not None:  # while the GPU is busy with the last backward
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
    """Batches to measure in one call: a pipeline is busy on all ranks only with several."""
    return engine.gradient_accumulation_steps() if isinstance(engine, PipelineEngine) else 1


@torch.no_grad()
def measure(engine: Engine, batches: Sequence[Batch]) -> list[float]:
    """Losses of batches; nothing on ranks that do not know them, or that another one of their replica speaks for."""
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
