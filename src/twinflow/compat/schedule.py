"""`deepspeed.runtime.pipe.schedule`: what a stage does, as lists of instructions, made of twinflow's schedules.

For looking at: the engine runs its own lists (`twinflow.parallel.schedules`). The order of forwards and backwards is
that of 1F1B, as DeepSpeed's is; a step here is one of them with what has to be sent and received, where DeepSpeed's
steps are moments that all stages share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinflow.parallel.schedules import one_f_one_b


class PipeInstruction:
    """One thing that a stage does."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """The update."""


class ReduceGrads(PipeInstruction):
    """Gradients, summed over replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Gradients of parameters that several stages hold, summed."""


class BufferOpInstruction(PipeInstruction):
    """What a micro-batch needs, in one of the stage's buffers."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Inputs for the first stage, targets for the last."""


class ForwardPass(BufferOpInstruction):
    """Of the stage."""


class BackwardPass(BufferOpInstruction):
    """Of the stage."""


class SendActivation(BufferOpInstruction):
    """To the stage after."""


class RecvActivation(BufferOpInstruction):
    """From the stage before."""


class SendGrad(BufferOpInstruction):
    """To the stage before."""


class RecvGrad(BufferOpInstruction):
    """From the stage after."""


class PipeSchedule:
    """The instructions of one stage; iterate, or call `steps`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Instruction by instruction, in lists."""
        raise NotImplementedError

    def num_pipe_buffers(self) -> int:
        """Micro-batches that a stage holds at once."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether inputs are loaded here."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss is here."""
        return self.stage_id == self.stages - 1

    def _forward(self, buffer: int) -> list[PipeInstruction]:
        made: list[PipeInstruction] = []
        if self.is_first_stage or self.is_last_stage:
            made.append(LoadMicroBatch(buffer))
        if not self.is_first_stage:
            made.append(RecvActivation(buffer))
        made.append(ForwardPass(buffer))
        return made if self.is_last_stage else [*made, SendActivation(buffer)]

    def _backward(self, buffer: int) -> list[PipeInstruction]:
        made: list[PipeInstruction] = [] if self.is_last_stage else [RecvGrad(buffer)]
        made.append(BackwardPass(buffer))
        return made if self.is_first_stage else [*made, SendGrad(buffer)]

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class TrainSchedule(PipeSchedule):
    """1F1B, then the update."""

    def num_pipe_buffers(self) -> int:
        """As many as there are stages from this one on, and two at least."""
        return min(max(2, self.stages - self.stage_id), self.micro_batches)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Forwards and backwards in turn."""
        num = self.num_pipe_buffers()
        for action in one_f_one_b(self.stages, self.micro_batches).actions[self.stage_id]:
            buffer = action.micro_batch % num
            yield self._forward(buffer) if action.kind == "F" else self._backward(buffer)
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class InferenceSchedule(PipeSchedule):
    """Forwards alone."""

    def num_pipe_buffers(self) -> int:
        """One that is computed, one that is sent."""
        return min(2, self.micro_batches)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One micro-batch after the other."""
        for i in range(self.micro_batches):
            yield self._forward(i % self.num_pipe_buffers())


class DataParallelSchedule(PipeSchedule):
    """No pipeline: each micro-batch forward and backward at once."""

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The last one comes with the update."""
        for i in range(self.micro_batches):
            step: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield [*step, ReduceGrads(), OptimizerStep()] if i == self.micro_batches - 1 else step
