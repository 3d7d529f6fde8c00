# SPDX-License-Identifier: Apache-2.0
"""A layout of a training run on GPUs: sizes of the three axes, ZeRO stage, micro-batches, schedule, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from twinflow.errors import invalid_value
from twinflow.parallel.partition import partition_balanced
from twinflow.parallel.schedules import LOOP, V, make_schedule, rank_of, round_size
from twinflow.parallel.shapes import Shape
from twinflow.planner.formats import WEIGHT_BYTES

HALF_BYTES = WEIGHT_BYTES["bf16"]  # size of an activation, gradient or weight


@dataclass(frozen=True)
class Layout:
    """The numbers of pipeline (pp), tensor (tp) and data ranks (dp), and the options that affect memory and time.

    In a step, each data rank runs `num_micro_batches` micro-batches of `micro_batch` sequences.
    """

    num_pp: int
    num_tp: int
    num_dp: int
    num_micro_batches: int
    micro_batch: int = 1
    zero: int = 1  # ZeRO stage
    schedule: str = "1f1b"
    num_chunks: int = 1  # stages of each rank
    checkpointing: bool = True  # layers keep only their input and are recomputed in backward
    partitions: bool = True  # tensor ranks split the kept activations and the messages between stages
    offload: bool = False  # optimizer state is in host memory and is updated there
    published: bool = False  # compute memory as in published tables, not as twinflow's engine does

    @property
    def world(self) -> int:
        return self.num_pp * self.num_tp * self.num_dp

    @property
    def batch(self) -> int:
        """Sequences in a step of all GPUs."""
        return self.micro_batch * self.num_micro_batches * self.num_dp

    @property
    def num_stages(self) -> int:
        return self.num_pp * self.num_chunks

    @property
    def placement(self) -> str:
        """How stages are assigned to ranks: V or LOOP of schedules.py."""
        return V if self.schedule == "zbv" else LOOP

    @property
    def kept_by(self) -> int:
        """Number of tensor ranks among which a kept activation is split."""
        return self.num_tp if self.partitions else 1

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of every micro-batch are reduced. Otherwise their sums are reduced once in a step.

        A pipeline has several micro-batches in flight, so every rank sums its gradients, also with ZeRO-2.
        """
        return self.zero == 3 or (self.zero == 2 and self.num_pp == 1)

    def ties_ranks(self, shape: Shape) -> bool:
        """Whether two ranks have the weight of a tied embedding. In a V placement only the first rank has it."""
        return shape.tied and self.num_pp > 1 and self.placement != V

    def __str__(self) -> str:
        parts = [f"pp {self.num_pp} x tp {self.num_tp} x dp {self.num_dp}", f"ZeRO-{self.zero}"]
        if self.num_pp > 1:
            chunked = f" of {self.num_chunks} chunks" if self.schedule == "interleaved" else ""
            parts.append(f"{self.schedule}{chunked}")
        parts.append(f"{self.num_micro_batches} x {self.micro_batch} sequences")
        parts += ["checkpointing"] if self.checkpointing else []
        parts += ["offload"] if self.offload else []
        return ", ".join(parts)


def check_layout(layout: Layout, shape: Shape) -> None:
    """Raise a ValueError for a layout that is not possible."""
    for key in ("num_pp", "num_tp", "num_dp", "num_micro_batches", "micro_batch", "num_chunks"):
        if getattr(layout, key) < 1:
            raise invalid_value(key, getattr(layout, key), "a whole number >= 1")
    if layout.zero not in (0, 1, 2, 3):
        raise invalid_value("zero", layout.zero, (0, 1, 2, 3))
    expected = {"zbv": 2, "gpipe": 1, "1f1b": 1}.get(layout.schedule)
    if expected is not None and layout.num_chunks != expected:
        raise invalid_value("num_chunks", layout.num_chunks, f"{expected} with the schedule {layout.schedule!r}")
    if layout.num_stages > shape.num_layers:
        allowed = f"at most {shape.num_layers}, the number of layers"
        raise invalid_value("The number of stages", layout.num_stages, allowed, "Use fewer stages or chunks.")
    for what, size in shape.tensor_sizes.items():
        if size % layout.num_tp:
            raise invalid_value("num_tp", layout.num_tp, f"a divisor of {size}, {what}")
    if layout.schedule == "interleaved":
        round_size(layout.num_pp, layout.num_micro_batches)
    else:
        make_schedule(layout.schedule, 1, 1)  # raises for an unknown name


def stream_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes of a micro-batch's activations between two layers."""
    return HALF_BYTES * shape.sequence * layout.micro_batch * shape.hidden


@lru_cache(maxsize=1024)
def layers_of(num_layers: int, num_stages: int, end: float = 0.0, joins_last: bool = False) -> tuple[int, ...]:
    """Layers of each stage, without embedding and head, as the engine assigns them: the largest stage is minimal.

    `end`: size of the embedding, and of the head, in units of a layer. `joins_last`: the last layer and the head are
    always on the same stage, as in the models of transformers.
    """
    last = [1.0 + end] if joins_last else [1.0, end]
    bounds = partition_balanced([end, *[1.0] * (num_layers - 1), *last], num_stages)
    counts = [stop - start for start, stop in pairwise(bounds)]
    counts[0] -= 1
    counts[-1] -= not joins_last
    return tuple(counts)


def stage_layers(shape: Shape, layout: Layout) -> tuple[int, ...]:
    """Layers of each stage, without embedding and head."""
    return layers_of(shape.num_layers, layout.num_stages, shape.end_numel / shape.layer_numel, shape.joins_last)


def rank_layers(shape: Shape, layout: Layout) -> tuple[int, ...]:
    """Layers of each pipeline rank, over all its chunks."""
    totals = [0] * layout.num_pp
    for stage, count in enumerate(stage_layers(shape, layout)):
        totals[rank_of(stage, layout.num_pp, layout.placement)] += count
    return tuple(totals)
