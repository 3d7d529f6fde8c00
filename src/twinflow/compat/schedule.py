"""`deepspeed.runtime.pipe.schedule`: the instructions of a pipeline stage, made from twinflow's schedules.

These classes are for inspection. The engine runs the schedules of `twinflow.parallel.schedules`. The order of forwards
and backwards is 1F1B, as in DeepSpeed. A step here is one forward or one backward with its sends and receives.
DeepSpeed's steps differ: they are time slots that all stages share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinflow.parallel.schedules import one_f_one_b


class PipeInstruction:
    """One instruction of a stage. Its keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Updates the weights."""


class ReduceGrads(PipeInstruction):
    """Sums gradients over data-parallel replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Sums gradients of parameters that several stages share."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for one micro-batch. `buffer_id` is the buffer of the stage that holds the micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Loads inputs on the first stage and targets on the last stage."""


class ForwardPass(BufferOpInstruction):
    """Runs the forward of the stage."""


class BackwardPass(BufferOpInstruction):
    """Runs the backward of the stage."""


class SendActivation(BufferOpInstruction):
    """Sends outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receives inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Sends gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receives gradients of the outputs from the next stage."""


class PipeSchedule:
    """The instructions of one stage. Iterate over the object, or call `steps`."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields one list of instructions for each step."""
        raise NotImplementedError

    def num_pipe_buffers(self) -> int:
        """The number of micro-batches that a stage holds at once."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage loads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage computes the loss."""
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
    """1F1B, followed by the update."""

    def num_pipe_buffers(self) -> int:
        """The number of stages from this one to the last, but at least two."""
        return min(max(2, self.stages - self.stage_id), self.micro_batches)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        num = self.num_pipe_buffers()
        for action in one_f_one_b(self.stages, self.micro_batches).actions[self.stage_id]:
            buffer = action.micro_batch % num
            yield self._forward(buffer) if action.kind == "F" else self._backward(buffer)
        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class InferenceSchedule(PipeSchedule):
    """The forwards of all micro-batches without backwards."""

    def num_pipe_buffers(self) -> int:
        """Two: the stage computes one micro-batch while it sends another."""
        return min(2, self.micro_batches)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for i in range(self.micro_batches):
            yield self._forward(i % self.num_pipe_buffers())


class DataParallelSchedule(PipeSchedule):
    """A schedule without a pipeline: the backward of a micro-batch follows its forward."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields one step for each micro-batch. The last step includes the update."""
        for i in range(self.micro_batches):
            step: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield [*step, ReduceGrads(), OptimizerStep()] if i == self.micro_batches - 1 else step
