# SPDX-License-Identifier: Apache-2.0
"""The modules `deepspeed.pipe`, with the list of instructions of each stage, and `deepspeed.checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from twinflow.config import load_config
from twinflow.errors import invalid_value
from twinflow.parallel import pipeline
from twinflow.parallel.schedules import one_f_one_b
from twinflow.parallel.topology import ProcessTopology

_SECTION = (
    "Leave it and deepspeed_config out here. Set the section activation_checkpointing in the config of initialize(), "
    "which checkpoints the model's layers."
)
_STATE = {"configured": False}  # whether `configure` was called


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Checks the options for `checkpoint`.

    `partition_activations` and `checkpoint_in_cpu` work only through the config. A ValueError is raised if one of them
    is true. `contiguous_checkpointing`, `num_checkpoints`, `synchronize` and `profile` have no effect on results, as in
    DeepSpeed.
    """
    asked = {"partition_activations": partition_activations, "checkpoint_in_cpu": checkpoint_in_cpu}
    if deepspeed_config is not None:
        section = load_config(deepspeed_config).activation_checkpointing
        asked["partition_activations"] = asked["partition_activations"] or section.partition_activations
        asked["checkpoint_in_cpu"] = asked["checkpoint_in_cpu"] or section.offloads
    for name, value in asked.items():
        if value:
            raise invalid_value(f"{name} for deepspeed.checkpointing.checkpoint()", value, [False], _SECTION)
    _STATE["configured"] = True


def is_configured() -> bool:
    return _STATE["configured"]


def reset() -> None:
    """Does nothing: no activations are kept between steps. DeepSpeed scripts call this function."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` and saves only its inputs for backward."""
    # Not as arguments by name, because torch's function has some of its own.
    return torch_checkpoint(partial(function, **kwargs), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


class PipelineModule(pipeline.PipelineModule):
    """twinflow's PipelineModule with the positional and keyword arguments of DeepSpeed's.

    `dynamic_shape` has no effect: stages always send the shapes of their tensors.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if activation_checkpoint_func not in (checkpoint, torch_checkpoint):
            remedy = "Leave this argument out: twinflow always uses torch.utils.checkpoint."
            given = getattr(activation_checkpoint_func, "__name__", "a function")
            raise invalid_value("activation_checkpoint_func", given, "deepspeed.checkpointing.checkpoint", remedy)
        super().__init__(
            layers,
            num_stages,
            topology,
            loss_fn,
            seed_layers,
            seed_fn,
            base_seed,
            partition_method,
            activation_checkpoint_interval,
            checkpointable_layers,
        )


# `deepspeed.runtime.pipe.schedule`, for inspection: the engine runs the schedules of `twinflow.parallel.schedules`. The
# order of forwards and backwards is 1F1B, as in DeepSpeed. A step here is one forward or one backward with its sends
# and receives. DeepSpeed's steps differ: they are time slots that all stages share.


class PipeInstruction:
    """One instruction of a stage. Its keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction): ...


class ReduceGrads(PipeInstruction): ...


class ReduceTiedGrads(PipeInstruction):
    """Sums gradients of parameters that several stages share."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for one micro-batch. `buffer_id` is the number of the buffer that contains the micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Loads inputs on the first stage and targets on the last stage."""


class ForwardPass(BufferOpInstruction): ...


class BackwardPass(BufferOpInstruction): ...


class SendActivation(BufferOpInstruction): ...


class RecvActivation(BufferOpInstruction): ...


class SendGrad(BufferOpInstruction): ...


class RecvGrad(BufferOpInstruction): ...


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
        """The number of micro-batches that a stage keeps at a time."""
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
    """The schedule 1F1B (one forward, then one backward), followed by the update."""

    def num_pipe_buffers(self) -> int:
        """The number of stages from this one to the last, but at least two, and at most `micro_batches`."""
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
        """Two: the stage computes one micro-batch while it sends another. One if there is only one micro-batch."""
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
