# SPDX-License-Identifier: Apache-2.0
"""Gradients of an attention bias and of relative positions. A cell is a small square of scores. Its score gradients are
added to the entries of the bias that belong to the cell.

One program computes each sum, and the order of the addends is fixed. The results are therefore deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.attention.extras import Extras, as_4d
from twinflow.attention.launch import Call, Launch, strides_of
from twinflow.attention.tiles import TileSize, cells

CELL = {torch.float32: 32}  # maximum number of tokens along a side of a cell; 64 for other dtypes
LIST_CELLS = 64  # maximum number of cells in a list; several programs share a longer diagonal


class CellArgs(NamedTuple):
    """Lists of cells, and the (batch, head) pairs over which each list is summed."""

    starts: Tensor  # start of each list in `rows` and `cols`
    rows: Tensor  # position of each cell
    cols: Tensor
    members: Tensor  # int32 [sets, pairs]: batch * num_heads + head
    offsets: Tensor  # int64 [sets], start of each set in the sums


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, lse, grad, delta
# For each target (batch, head) of a gradient: the pairs batch * num_heads + head that are summed into it.
Sets = dict[tuple[int, int], list[int]]


@dataclass(frozen=True)
class _Lists:
    """Lists of cells. All cells of a list belong to one entry of the bias. `rank` numbers the lists of an entry."""

    rows: Tensor
    cols: Tensor
    starts: Tensor
    entry: Tensor
    rank: Tensor


def bias_gradient(tensors: Tensors, call: Call, extras: Extras) -> Tensor:
    """The gradient of a bias, in its shape and dtype."""
    bias = extras.bias
    assert bias is not None
    shape = as_4d(bias).shape
    sizes = call.sizes
    sums = torch.zeros(shape, dtype=torch.float32, device=bias.device)
    if shape[3] == 1 and sizes.num_keys > 1:
        # A number that is added to a whole row of scores does not change the softmax. Its gradient is exactly zero.
        return sums.view(bias.shape).to(bias.dtype)
    for pattern in range(call.layout.num_patterns):
        sets = _sets(call, pattern, shape[0] > 1, shape[1] > 1)
        rows, cols = cells(call.layout, pattern, call.span, _cell(call))
        if not len(rows):
            continue
        if shape[2] > 1 or sizes.num_queries == 1:
            lists = _lists(rows, cols, torch.arange(len(rows)))
            places = torch.tensor([b * shape[1] + h for b, h in sets]) * shape[2] * shape[3]
            _launch(tensors, call, extras, lists, sets, places, sums)
        else:
            lists = _lists(rows, cols, cols)
            squares = _squares(tensors, call, extras, lists, sets).sum(2)  # [sets, lists, cell]
            flat = _added(squares, lists, -(-sizes.num_keys // _cell(call)), 1)[:, : sizes.num_keys]
            for number, (b, h) in enumerate(sets):
                sums[b, h, 0] += flat[number]
    return sums.view(bias.shape).to(bias.dtype)


def relative_gradient(tensors: Tensors, call: Call, extras: Extras) -> Tensor:
    """The gradient of relative positions, in their shape and dtype."""
    relative = extras.relative
    assert relative is not None
    sizes, cell = call.sizes, _cell(call)
    sums = torch.zeros(relative.shape, dtype=torch.float32, device=relative.device)
    start = extras.q_start
    for pattern in range(call.layout.num_patterns):
        sets = _sets(call, pattern, False, relative.shape[0] > 1)
        rows, cols = cells(call.layout, pattern, call.span, cell)
        if not len(rows):
            continue
        # The entry of a cell is its key index minus its query index, counted from the lowest difference. The scores of
        # a diagonal of cells have 2 * cell - 1 different offsets.
        lowest = -((start + sizes.num_queries - 1) // cell)
        lists = _lists(rows, cols, cols - rows - lowest)
        diagonals = _diagonal_sums(_squares(tensors, call, extras, lists, sets))  # [sets, lists, 2 * cell - 1]
        diagonals = torch.nn.functional.pad(diagonals, (0, 1))
        num_entries = int(lists.entry.max()) + 1
        flat = _added(diagonals, lists, num_entries, 2)
        # The first number is for key position - query position = lowest * cell - (cell - 1). Its index in `relative` is
        # this difference + start + nq - 1.
        first = lowest * cell - (cell - 1) + start + sizes.num_queries - 1
        low, high = max(0, first), min(sums.shape[1], first + flat.shape[1])
        for number, (_, h) in enumerate(sets):
            sums[h, low:high] += flat[number, low - first : high - first]
    return sums.to(relative.dtype)


def _sets(call: Call, pattern: int, has_batch: bool, has_heads: bool) -> Sets:
    heads = [h for h, own in enumerate(call.layout.head_to_pattern) if own == pattern]
    found: Sets = {}
    for b in range(call.sizes.batch):
        for h in heads:
            target = (b if has_batch else 0, h if has_heads else 0)
            found.setdefault(target, []).append(b * call.sizes.num_heads + h)
    return found


def _lists(rows: Tensor, cols: Tensor, entry: Tensor) -> _Lists:
    """Sort cells by entry and divide them into lists of at most LIST_CELLS."""
    order = torch.argsort(entry, stable=True)
    values, counts = torch.unique_consecutive(entry[order], return_counts=True)
    pieces = -(-counts // LIST_CELLS)
    rank = torch.arange(int(pieces.sum())) - torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, pieces)
    starts = torch.cat([first + rank * LIST_CELLS, torch.tensor([len(rows)])])
    return _Lists(rows[order], cols[order], starts, torch.repeat_interleave(values, pieces), rank)


def _squares(tensors: Tensors, call: Call, extras: Extras, lists: _Lists, sets: Sets) -> Tensor:
    """Sums of score gradients for each set and list: [sets, lists, cell, cell]."""
    cell, num_lists = _cell(call), len(lists.entry)
    squares = torch.empty((len(sets), num_lists, cell, cell), dtype=torch.float32, device=call.device)
    offsets = torch.arange(len(sets)) * (num_lists * cell * cell)
    _launch(tensors, call, extras, lists, sets, offsets, squares, is_dense=False)
    return squares


def _launch(
    tensors: Tensors,
    call: Call,
    extras: Extras,
    lists: _Lists,
    sets: Sets,
    offsets: Tensor,
    sums: Tensor,
    is_dense: bool = True,
) -> None:
    from twinflow.attention import kernels

    q, k, v, lse, grad, delta = tensors
    cell = _cell(call)
    members = torch.tensor(list(sets.values()))
    tables = [table.to(torch.int32) for table in (lists.starts, lists.rows, lists.cols, members)]
    args = CellArgs(*(table.to(call.device) for table in (*tables, offsets)))
    num_lists = len(lists.entry)
    strides = strides_of(q=q, k=k, v=v, grad=grad)
    shape = call.shape(TileSize(cell, cell), None)
    numbers = (call.extra_args, call.drop_args, call.size_args(num_lists), members.shape[1])
    given = (q, k, v, lse, grad, delta, sums, strides, args, *numbers, is_dense, shape)
    options = {"num_warps": 4, "num_stages": 1}
    launch = Launch(kernels.score_sums, num_lists * len(sets), options, given, is_repeated=False)
    launch(call.given(extras), call.device)


def _cell(call: Call) -> int:
    return min(call.layout.block, CELL.get(call.dtype, 64))


def _diagonal_sums(squares: Tensor) -> Tensor:
    """Sums over diagonals, from [..., n, n] to [..., 2 * n - 1]. Entry (i, j) is added to j - i + n - 1."""
    n = squares.shape[-1]
    flipped = torch.nn.functional.pad(squares.flip(-2), (0, n)).flatten(-2)  # entry n - 1 - i + j of a row, padded
    return flipped[..., : n * (2 * n - 1)].reshape(*squares.shape[:-2], n, 2 * n - 1).sum(-2)


def _added(values: Tensor, lists: _Lists, num_entries: int, num_parts: int) -> Tensor:
    """Sum values [sets, lists, parts * cell] to [sets, places * cell]. Part p of a list of entry e is added to place
    e + p. Lists with the same `rank` have different entries, so that their additions do not conflict."""
    num_sets, _, width = values.shape
    cell = width // num_parts
    out = values.new_zeros((num_sets, num_entries + num_parts - 1, cell))
    entry = lists.entry.to(values.device)
    for rank in range(int(lists.rank.max()) + 1):
        chosen = (lists.rank == rank).nonzero()[:, 0].to(values.device)
        for part in range(num_parts):
            out[:, entry[chosen] + part] += values[:, chosen, part * cell : (part + 1) * cell]
    return out.flatten(1)
