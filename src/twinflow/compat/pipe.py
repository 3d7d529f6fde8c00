"""`deepspeed.pipe`: PipelineModule with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from twinflow.compat.checkpointing import checkpoint
from twinflow.errors import invalid_value
from twinflow.parallel import pipeline
from twinflow.parallel.topology import ProcessTopology


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
            remedy = "twinflow always uses torch.utils.checkpoint to run layers again in backward."
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
