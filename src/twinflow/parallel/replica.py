# SPDX-License-Identifier: Apache-2.0
"""Checks that the ranks of one replica of the model work on the same step.

These ranks have parts of one model: stages of a pipeline, or parts of tensors. Three things must be equal on them, and
nothing else would report it if they differ:

- the batch. It is compared before each forward. The ranks exchange a digest of it. If the values are on a GPU, their
  digest is exchanged there, and the result is read before backward, so that the host does not wait for the GPU.
- the random numbers of tensor ranks, which repeat the dropout of replicated activations. Before each forward all tensor
  ranks of a stage continue with the state of the first one if their states differ.
- parameters that all tensor ranks have whole. Their digests are compared after the steps 1, 2, 4, 8 and so on, after
  every hundredth step, and before a checkpoint is saved.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twinflow.dist.group import Group
from twinflow.errors import wrong_state
from twinflow.parallel.collectives import joined
from twinflow.parallel.grid import Grid
from twinflow.parallel.shard import shard_of
from twinflow.parallel.tensor import same_randoms
from twinflow.parallel.topology import MODEL

LOGGER = logging.getLogger("twinflow")
CHECK_STEPS: Final = 100  # number of steps between two comparisons of replicated parameters
_CHUNK_NUMEL: Final = 1 << 20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_ODD: Final = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)  # multipliers that spread the bits
_CACHES: Final = ("past_key_values",)  # arguments that have only the heads of a rank


class Replica:
    """The checks of one rank. Every rank of the replica calls the same methods in the same order."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        along = grid.ranks_along(MODEL)
        self._tensor_rows = [i for i, rank in enumerate(grid.replica_ranks) if rank in along]
        self._pending: _Pending | None = None
        self._compared_step = 0  # all ranks start with equal parameters
        self._has_warned = False

    @property
    def group(self) -> Group:
        """All ranks of the replica, over gloo."""
        return self._grid.replica

    def check_inputs(self, args: Sequence[object], kwargs: Mapping[str, object], device: torch.device) -> None:
        """Compares the arguments of a model's forward between tensor ranks. Raises ValueError if they differ. Values on
        a GPU are compared in the next call of `check_pending`.
        """
        self.check_pending()
        given = {name: value for name, value in kwargs.items() if name not in _CACHES}
        found = digest((tuple(args), given))
        self._exchange([(True, found.host)], device)
        if found.device is not None:
            self._pending = _Pending(joined(found.device.view(1), self._grid.model, 0), self._grid.ranks_along(MODEL))

    def check_pending(self) -> None:
        """Raises ValueError if tensor ranks got different batches on their GPUs."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.check()

    def check_batches(self, batches: Sequence[tuple[object, object]], device: torch.device) -> None:
        """Compares the micro-batches of a step, pairs of inputs and target, between all ranks that have read them. A
        rank without inputs or targets has None instead. Raises ValueError if they differ.
        """
        halves = ([inputs for inputs, _ in batches], [target for _, target in batches])
        self._exchange([(any(one is not None for one in half), digest(half).total()) for half in halves], device)

    def _exchange(self, parts: Sequence[tuple[bool, int]], device: torch.device) -> None:
        """Compares digests of a batch, and makes the random states of tensor ranks equal. `parts`: for each part of the
        batch, whether this rank has it, and its digest.
        """
        grid = self._grid
        numbers = [*_random_digests(device), *(number for part in parts for number in part)]
        rows = grid.replica.gather_rows(torch.tensor(numbers, dtype=torch.int64)).tolist()
        for start in range(2, len(numbers), 2):
            said = {rank: row[start : start + 2] for rank, row in zip(grid.replica_ranks, rows, strict=True)}
            _check_equal({rank: number for rank, (is_here, number) in said.items() if is_here})
        states = [rows[i][:2] for i in self._tensor_rows]
        if any(state != states[0] for state in states):
            self._warn_of_states()
            same_randoms(grid.model, device)

    def _warn_of_states(self) -> None:
        if self._grid.model.rank == 0 and not self._has_warned:
            ranks = self._grid.ranks_along(MODEL)
            LOGGER.warning(
                f"The random states of the tensor ranks {_listed(ranks)} differ. All of them continue with the state "
                f"of rank {ranks[0]}, because dropout of replicated activations needs one mask. This is logged only "
                "once."
            )
        self._has_warned = True

    def compare_copies(self, module: nn.Module, step: int, is_due: bool = False) -> None:
        """Compares the parameters that all tensor ranks have whole. Raises RuntimeError if one differs.

        Does nothing if `step` was compared before. Without `is_due`, it compares only after steps of the module's list.
        """
        is_due = is_due or step % CHECK_STEPS == 0 or step & (step - 1) == 0
        if self._grid.num_model == 1 or step == self._compared_step or not is_due:
            return
        copies = {name: param for name, param in module.named_parameters() if shard_of(param) is None}
        rows = []
        if copies:
            own = torch.stack([hash_values(param) for param in copies.values()])
            rows = joined(own[None], self._grid.model, 0).tolist()
        for name, numbers in zip(copies, zip(*rows, strict=True), strict=True):
            if len(set(numbers)) > 1:
                raise wrong_state(
                    "Training cannot continue",
                    f"the copies of the parameter {name} on the tensor ranks {_listed(self._grid.ranks_along(MODEL))} "
                    f"have different values after step {step}",
                    "Draw random numbers inside forward, and change weights, on all of these ranks or on none. If an "
                    "operation of the model is not deterministic, call torch.use_deterministic_algorithms(True). Then "
                    "load the last checkpoint.",
                )
        self._compared_step = step


class _Pending:
    """Digests of all tensor ranks, which are on their way to the host."""

    def __init__(self, rows: Tensor, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._rows.copy_(rows, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def check(self) -> None:
        self._event.synchronize()
        _check_equal(dict(zip(self._ranks, self._rows.tolist(), strict=True)))


def _check_equal(found: Mapping[int, int]) -> None:
    """Raises ValueError if the digests of ranks differ."""
    first = next(iter(found), None)
    other = next((rank for rank, number in found.items() if first is not None and number != found[first]), None)
    if other is not None:
        raise ValueError(
            f"Ranks {first} and {other} have parts of the same replica of the model, but were given different batches. "
            "All ranks of a replica must get the same batch. Divide the data by engine.dp_rank and "
            "engine.dp_world_size instead of by the rank of the process, for example with DistributedSampler(data, "
            "engine.dp_world_size, engine.dp_rank), or pass training_data to initialize()."
        )


def _random_digests(device: torch.device) -> tuple[int, int]:
    """Digests of the states of the random generators on the CPU and on the GPU."""
    on_gpu = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes()) if device.type == "cuda" else 0
    return zlib.crc32(torch.get_rng_state().numpy().tobytes()), on_gpu


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


# Digests of batches and parameters.


@dataclass(frozen=True)
class Digest:
    host: int  # of shapes, dtypes, numbers, and values of tensors on the host
    device: Tensor | None  # of values of tensors on a GPU, as a tensor there

    def total(self) -> int:
        """One number for both. Waits for the GPU."""
        return self.host if self.device is None else self.host ^ (int(self.device) & 0xFFFFFFFF)


def digest(value: object) -> Digest:
    """A digest of nested tuples, lists, mappings and dataclasses of tensors and numbers. Other objects count only by
    their types.
    """
    text, on_device = [], []
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            text.append(f"tensor {leaf.dtype} {tuple(leaf.shape)} {leaf.device.type}")
            if leaf.layout is torch.strided and leaf.device.type in ("cpu", "cuda"):
                found = hash_values(leaf)
                if found.is_cuda:
                    on_device.append(found)
                else:
                    text.append(str(int(found)))
        else:
            text.append(repr(leaf) if isinstance(leaf, int | float) else type(leaf).__name__)
    total = hash_values(torch.stack(on_device)) if on_device else None
    return Digest(zlib.crc32(" ".join(text).encode()), total)


def _leaves(value: object) -> Iterator[object]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Mapping):
            yield from _leaves(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            yield leaf


@torch.no_grad()
def hash_values(x: Tensor) -> Tensor:
    """A hash of the bits of a tensor and of their order, as an integer on its device."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start, chunk in _integers(x):
        mixed = torch.arange(start, start + len(chunk), device=x.device).mul_(_ODD[0]).bitwise_xor_(chunk).mul_(_ODD[1])
        total += mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2]).sum()
    return total


def _integers(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The bits of a tensor as integers, in chunks, with the index of the first one."""
    x = x.detach()
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    if flat.numel():
        whole = flat.view(_INTEGERS[flat.element_size()])
        for start in range(0, len(whole), _CHUNK_NUMEL):
            yield start, whole[start : start + _CHUNK_NUMEL].to(torch.int64)
