# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 with Muon: each matrix is orthogonalised by one rank, which gathers the rows of all ranks.

Each rank has some rows of a matrix, of its momentum and of its master weights, as `fully_shard` divides them. The ranks
exchange rows of directions twice: each rank sends its rows to the rank that owns the matrix, and the owner returns the
rows of the result. The owner of a matrix depends on the sizes of the matrices of its bucket alone. Rows are sent in the
dtype of the products, so that the exchanges together send about as many bytes as an all-reduce of bf16 gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from twinflow.dist.group import Group
from twinflow.errors import wrong_state
from twinflow.rules.newton_schulz import products_dtype

_PATIENCE_S = 0.5  # interval between two checks whether to give up waiting


def rows_of(num_rows: int, rank: int, world: int) -> range:
    """The rows of one rank, as `fully_shard` divides them."""
    size = -(-num_rows // world)
    return range(min(num_rows, rank * size), min(num_rows, (rank + 1) * size))


def most_numel(param: Tensor, world: int) -> int:
    """The most elements of a parameter that a rank has."""
    return len(rows_of(param.shape[0], 0, world)) * param.shape[1:].numel()


def owners_of(shapes: Sequence[torch.Size], world: int) -> list[int]:
    """The rank that orthogonalises each matrix: the largest first, each by the rank with the fewest elements so far."""
    found, used = [0] * len(shapes), [0] * world
    for i in sorted(range(len(shapes)), key=lambda i: -shapes[i].numel()):
        found[i] = used.index(min(used))
        used[found[i]] += shapes[i].numel()
    return found


class RowExchange:
    """The `MatrixExchange` (offload/sharing.py) of the ranks of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._num_turns = 0
        self._done = 0  # exchanges that are complete, or are queued on a GPU
        self._changed = threading.Condition()
        self._gives_up: Callable[[], bool] | None = None

    def give_up_when(self, gives_up: Callable[[], bool]) -> None:
        """Lets an update that waits for its turn raise RuntimeError when `gives_up` returns True."""
        self._gives_up = gives_up

    def take_turn(self) -> int:
        with self._changed:
            self._num_turns += 1
            return self._num_turns - 1

    def orthogonalise(
        self,
        turn: int,
        rows: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        work: Callable[[Mapping[int, Tensor]], None],
    ) -> None:
        with self._changed:
            while self._done != turn:
                if self._gives_up is not None and self._gives_up():
                    raise wrong_state(
                        "A matrix was not orthogonalised",
                        "the optimizer is closed or has failed",
                        "Look for the first error in the logs of all ranks.",
                    )
                self._changed.wait(_PATIENCE_S)
        self._exchange(rows, shapes, work)
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def _exchange(
        self, rows: Sequence[Tensor], shapes: Sequence[torch.Size], work: Callable[[Mapping[int, Tensor]], None]
    ) -> None:
        world, rank = self._group.world, self._group.rank
        owners = owners_of(shapes, world)
        dtype, device = products_dtype(rows[0].device), rows[0].device

        def cells(owner: int, sender: int) -> list[tuple[int, range]]:
            """The rows of `sender` of the matrices of `owner`."""
            return [(i, rows_of(shapes[i][0], sender, world)) for i, one in enumerate(owners) if one == owner]

        def numel(i: int, own: range) -> int:
            return len(own) * shapes[i][1:].numel()

        # The first rank has the most rows of each matrix.
        size = max(sum(numel(i, own) for i, own in cells(owner, 0)) for owner in range(world))

        def send(parts: Callable[[int], list[Tensor]]) -> Tensor:
            out = torch.zeros(world, size, dtype=dtype, device=device)
            for other in range(world):
                at = 0
                for part in parts(other):
                    out[other, at : at + part.numel()] = part.reshape(-1)
                    at += part.numel()
            return self._group.exchange(out.view(torch.uint8)).view(dtype)

        taken = send(lambda owner: [rows[i] for i, _ in cells(owner, rank)])
        whole = {i: torch.empty(shapes[i], device=device) for i, one in enumerate(owners) if one == rank}
        for sender in range(world):
            at = 0
            for i, own in cells(rank, sender):
                part = taken[sender, at : at + numel(i, own)]
                whole[i][own.start : own.stop] = part.view(len(own), *shapes[i][1:])
                at += part.numel()
        work(whole)
        taken = send(lambda other: [whole[i][own.start : own.stop] for i, own in cells(rank, other)])
        for owner in range(world):
            at = 0
            for i, own in cells(owner, rank):
                rows[i].copy_(taken[owner, at : at + numel(i, own)].view(rows[i].shape))
                at += numel(i, own)
