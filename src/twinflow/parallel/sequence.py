# SPDX-License-Identifier: Apache-2.0
"""Ranks that share each sequence: its split, the positions of tokens, and the exact mean of the loss.

The axes of the ranks are data and sequence. The ranks of a sequence are neighbours: with 8 ranks and 4 of them for each
sequence, the ranks 0 to 3 have one sequence and the ranks 4 to 7 another one. Every rank has all layers. All operations
except attention work on the tokens of a rank; attention communicates (ulysses.py, ring.py).

Which group averages what: a rank computes the gradients of its tokens only. ZeRO therefore treats all ranks, of both
axes, as data ranks: it sums their gradients, divides by the number of all ranks, and divides the optimizer state among
all of them. The loss is the sum over the tokens of all ranks, divided by the number of all tokens with a target. `mean`
computes it, and multiplies the gradient of a rank's tokens by the number of ranks, by which ZeRO divides again. The
sum of the gradients of all ranks is then the gradient of this loss, also if ranks have different numbers of targets,
and its norm is that of one process. Checkpoints are those of data ranks, so they load with any number of ranks.

Positions: a model must know which tokens a rank has. `split` gives models of transformers their `position_ids`;
twinflow's GPT calls `positions`. "ulysses" splits a sequence into equal contiguous parts. "ring" gives each rank two
chunks of a causal sequence, one from its start and one from its end, because late queries have more keys. If the
attention is sparse, "ring" uses contiguous parts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.conflicts import conflict
from twinflow.dist.agree import gather_json
from twinflow.dist.group import TIMEOUT, Group, alone, backend_for, new_group
from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.loss import IGNORE_INDEX
from twinflow.parallel.topology import DATA, ProcessTopology

SEQUENCE: Final = "sequence"  # the name of the axis
MODES: Final = ("ulysses", "ring")
DOCUMENTS: Final = "cu_seq_lens_q"  # argument of transformers with the starts of packed sequences, and the end


class SequenceRanks:
    """The ranks that share a sequence with this one. `split_sequence` makes this object."""

    def __init__(
        self, group: Group, sums: Group, calls: Group, mode: str, data: int, is_zigzag: bool, is_causal: bool = True
    ) -> None:
        self.group = group  # used by attention, on the model's stream
        self.mode = mode
        self.data = data  # index of this sequence among those of all ranks
        self.num_data = sums.world // group.world
        self.is_zigzag = is_zigzag
        self.is_causal = is_causal
        self._sums = sums  # all ranks
        self._calls = calls  # the ranks of this sequence; on the host, for small messages
        self._is_checked = False
        self._has_split = False  # `part` was called, so that equal tokens on all ranks are not a mistake

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.group.world

    @property
    def rank(self) -> int:
        """Index of this rank among those that share a sequence."""
        return self.group.rank

    def chunks(self, num_tokens: int, rank: int | None = None) -> list[tuple[int, int]]:
        """The ranges of positions of the tokens that a rank has, in the order in which it has them. `num_tokens`: the
        tokens of the whole sequence.
        """
        rank = self.rank if rank is None else rank
        if not self.is_zigzag:
            each = num_tokens // self.size
            return [(rank * each, (rank + 1) * each)]
        each = num_tokens // (2 * self.size)
        last = 2 * self.size - 1 - rank
        return [(rank * each, (rank + 1) * each), (last * each, (last + 1) * each)]

    def positions(self, num_local: int, device: torch.device | None = None) -> Tensor:
        """The positions of this rank's tokens in the sequence. `num_local`: the number of these tokens."""
        parts = self.chunks(num_local * self.size)
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in parts])

    def __deepcopy__(self, memo: object) -> SequenceRanks:
        return self  # a copy of a model works on the same ranks

    # The split of a batch.

    @property
    def multiple(self) -> int:
        """The number of tokens of a whole sequence is a multiple of this."""
        return self.size * (2 if self.is_zigzag else 1)

    def split(self, batch: Any) -> Any:
        """This rank's part of a batch of whole sequences, which all ranks of the sequence must have.

        A dict with `input_ids` is a batch for a model of transformers: the labels are shifted before they are split,
        and `position_ids` are added. If `position_ids` start again at 0 within the sequence, it consists of several
        packed sequences, which do not see each other. Of a tuple or list of tensors [batch, tokens, ...], and of a
        tensor, each rank gets its tokens; targets must be shifted already. If the number of tokens is not a multiple of
        `multiple`, tokens without a target are appended.
        """
        if isinstance(batch, Mapping) or hasattr(batch, "items"):
            return self._split_dict(dict(batch.items()))
        if isinstance(batch, Tensor):
            return self.part(batch)
        if isinstance(batch, Sequence) and not isinstance(batch, str):
            sizes = {tensor.shape[:2] for tensor in batch if isinstance(tensor, Tensor) and tensor.dim() > 1}
            if len(sizes) == 1:
                parts = [self._part_of_pair(item, i) for i, item in enumerate(batch)]
                return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # type: ignore[call-arg]
        raise invalid_value(
            "The batch",
            f"a {type(batch).__name__}",
            "a dict with input_ids, a tensor, or a tuple of tensors of the same shape [batch, tokens]",
            "Split it in your loop with sequence.part(tensor), or pass such a batch.",
        )

    def part(self, tensor: Tensor, fill: int = 0) -> Tensor:
        """This rank's tokens of a tensor [batch, tokens, ...]. The tensor is extended with `fill` to whole parts."""
        self._has_split = True
        num_tokens = tensor.shape[1]
        rest = -num_tokens % self.multiple
        if rest and not self.is_causal:
            raise invalid_value(
                "The number of tokens in a sequence",
                num_tokens,
                f"a multiple of {self.multiple}, the number of sequence ranks",
                "Pad the sequence and pass an attention_mask. Only causal models can ignore tokens at the end.",
            )
        if rest:
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, rest), value=fill)
        found = [tensor[:, start:stop] for start, stop in self.chunks(num_tokens + rest)]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, 1)

    def _part_of_pair(self, item: Any, index: int) -> Any:
        is_target = index > 0 and isinstance(item, Tensor) and item.dtype == torch.int64
        return (
            self.part(item, IGNORE_INDEX if is_target else 0) if isinstance(item, Tensor) and item.dim() > 1 else item
        )

    def _split_dict(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids: Tensor | None = batch.get("input_ids", batch.get("inputs_embeds"))
        if ids is None:
            raise invalid_value("The batch", sorted(batch), "a dict with input_ids or inputs_embeds")
        batch_size, num_tokens = ids.shape[:2]
        labels = batch.get("labels")
        if labels is not None and "shift_labels" not in batch:
            batch["shift_labels"] = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        self._drop_padding(batch)
        positions = batch.pop("position_ids", None)
        if positions is None:
            positions = torch.arange(num_tokens, device=ids.device).expand(batch_size, -1)
        documents = _documents(positions)
        if documents is not None and self.is_causal:
            if batch_size > 1:
                raise conflict("Sequence parallelism", "packed batch", batch_size=batch_size)
            if documents[-1] % self.multiple:  # the appended tokens are a sequence of their own
                documents = F.pad(documents, (0, 1), value=num_tokens + -num_tokens % self.multiple)
            batch[DOCUMENTS] = batch["cu_seq_lens_k"] = documents
        rest = -num_tokens % self.multiple
        batch["position_ids"] = F.pad(positions, (0, rest)) if documents is not None else _extended(positions, rest)
        fills = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.shape[:2] == (
                batch_size,
                num_tokens + rest * (name == "position_ids"),
            ):
                batch[name] = self.part(value, fills.get(name, 0))
        return batch

    def _drop_padding(self, batch: dict[str, Any]) -> None:
        """Removes an attention mask with padding on the right, which no token with a target sees in a causal model."""
        mask: Tensor | None = batch.get("attention_mask")
        if mask is None or not self.is_causal:
            return
        if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise conflict("Sequence parallelism", "left padding")
        targets: Tensor | None = batch.get("shift_labels")
        if targets is not None and bool(((mask == 0) & (targets != IGNORE_INDEX)).any()):
            raise invalid_value(
                "labels", "a tensor with targets at padding", f"{IGNORE_INDEX} wherever attention_mask is 0"
            )
        del batch["attention_mask"]

    # The loss.

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The sum of `total` over the tokens of all ranks divided by the sum of `count`, with which ranks that average
        their gradients train as one process does. Without gradients (evaluation): over the ranks of this sequence.
        """
        group = self._sums if torch.is_grad_enabled() else self.group
        mean: Tensor = _Mean.apply(total, count, group)  # type: ignore[no-untyped-call]
        return mean

    def mean_of(self, mean: Tensor, targets: Tensor) -> Tensor:
        """`mean`, for the mean of a loss over this rank's `targets`, of which those with IGNORE_INDEX do not count."""
        count = (targets != IGNORE_INDEX).sum()
        # Without targets the mean is NaN, and the sum is 0.
        return self.mean(torch.where(count > 0, mean, torch.zeros_like(mean)) * count, count)

    def check_inputs(self, tokens: Tensor) -> None:
        """Raises ValueError if ranks of the sequence have different numbers of tokens, or all have the same tokens and
        have not split them. Checks the first batch only.
        """
        if self._is_checked or self.size == 1:
            return
        self._is_checked = True
        flat = tokens.detach().double().reshape(-1)
        digest = float((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())
        said = gather_json(self._calls, [list(tokens.shape), digest])
        if any(one[0] != said[0][0] for one in said):
            raise invalid_value(
                "The shape of the batch on the ranks of a sequence",
                [one[0] for one in said],
                "the same on all of them",
                "Divide the batch with sequence.split(batch).",
            )
        if not self._has_split and all(one == said[0] for one in said):
            raise ValueError(
                "All ranks of a sequence have the same tokens, but each must have its own part of the sequence. Divide "
                "the batch with engine.sequence.split(batch), or let the loader of the engine do it."
            )

    def check_loss(self, loss: Tensor) -> None:
        """Raises ValueError if the loss is not the same on all ranks of the sequence, because it is then the mean over
        the tokens of one rank.
        """
        values = gather_json(self._calls, float(loss.detach()))
        if len(set(map(str, values))) > 1:
            raise ValueError(
                f"The loss is {values} on the ranks of a sequence, but must be the same on all of them: the mean over "
                "all tokens. Compute it with engine.sequence.mean(total, count), or let the model compute it."
            )


class _Mean(Function):
    """sum(total) / sum(count) over the ranks of a group. The gradient is multiplied by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: Group) -> Tensor:
        own = torch.stack([total.detach().double(), count.to(total.device).double()])
        both = torch.empty_like(own)
        group.all_reduce(both, own, torch.float64)
        ctx.factor = torch.where(both[1] > 0, group.world / both[1], 0.0)
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad * ctx.factor).to(grad.dtype), None, None


def make_groups(size: int, device: torch.device, timeout: timedelta = TIMEOUT) -> tuple[Group, Group, Group, int]:
    """The groups of `SequenceRanks`: attention, loss, small messages; and the index of this rank's sequence. A
    collective call. Raises ValueError if `size` does not divide the number of ranks.
    """
    if type(size) is not int or size < 1:
        raise invalid_value("sequence_parallel_size", size, "a whole number >= 1")
    if not dist.is_initialized():
        if size > 1:
            raise wrong_state(
                f"A sequence cannot be split over {size} ranks",
                "there is no process group",
                f"Start {size} processes, for example with `twinflow launch`, and call twinflow.init_distributed().",
            )
        return alone(), alone(), alone(), 0
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        remedy = "Start a multiple of it as processes, or use fewer sequence ranks."
        raise invalid_value("sequence_parallel_size", size, f"a divisor of {world}, the number of processes", remedy)
    topology = ProcessTopology((DATA, SEQUENCE), (world // size, size))
    data = topology.get_coord(rank).data
    own = topology.filter_match(data=data)
    backend = backend_for(device)
    return new_group(backend, own, timeout), new_group(backend, None, timeout), new_group("gloo", own, timeout), data


def _documents(positions: Tensor) -> Tensor | None:
    """The starts of packed sequences, and the end of the last one, on the host. None for one sequence."""
    starts = (positions[:, 1:] != positions[:, :-1] + 1).nonzero()[:, 1].cpu().to(torch.int32) + 1
    if not len(starts):
        return None
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), positions.shape[1])])


def _extended(positions: Tensor, rest: int) -> Tensor:
    """The positions, continued for `rest` more tokens."""
    if not rest:
        return positions
    more = torch.arange(1, rest + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + more], 1)


def check_heads(num_heads: int, size: int) -> None:
    """Raises ValueError if the heads of a layer cannot be divided among ranks."""
    if num_heads % size:
        raise incompatible(
            f"sequence_parallel_size={size} with the mode ulysses",
            f"{num_heads} attention heads",
            "each rank computes the attention of equally many heads",
            'Use the mode "ring", or a number of ranks that divides the number of heads.',
        )
