"""Cross entropy where each tensor rank has some rows of the head's weight, without all logits at once.

A rank makes logits of its own symbols, a chunk of tokens at a time. Of each token the ranks tell each other three
numbers: the largest logit, the sum of exponentials below it, and the target's logit where it is theirs. From these all
ranks have the same loss, in the same bits, and each has the gradient of its own logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.dist.group import Group
from twinflow.loss import IGNORE_INDEX, LOSS_CHUNK, Targets, chunked_cross_entropy
from twinflow.parallel.collectives import copy_in


def vocab_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, chunk: int = LOSS_CHUNK
) -> Tensor:
    """Mean of `F.cross_entropy(hidden @ whole.T, targets)` in fp32 or wider, where `weight` is this rank's rows.

    `hidden` is [tokens, hidden] and replicated, `weight` [vocab / world, hidden], `targets` [tokens]; -100 leaves a
    token out. A target that is in nobody's rows makes the loss infinite. The gradient of `hidden` is replicated too:
    each rank makes its share, and the shares are summed.
    """
    return chunked_cross_entropy(copy_in(hidden, group), weight, targets, chunk, SharedSoftmax(group))


class SharedSoftmax:
    """Over the symbols of all ranks, each of which has as many rows."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        """Those among this rank's symbols."""
        return own_targets(targets, num_rows, self._group.rank)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Losses as all ranks have them, and this rank's probabilities, in the place of the logits."""
        group, largest = self._group, logits.amax(-1)
        chosen = logits.gather(-1, targets.rows).squeeze(-1).where(targets.is_here, -torch.inf)
        probs = logits.sub_(largest[:, None]).exp_()
        said = torch.stack([largest, probs.sum(-1), chosen])
        heard = said.new_empty((group.world, *said.shape))
        heard[group.rank] = said
        group.all_gather(heard.view(-1))
        top = heard[:, 0].amax(0)
        sums = (heard[:, 1] * (heard[:, 0] - top).exp()).sum(0)
        losses = (sums.log() - (heard[:, 2].amax(0) - top)).where(targets.is_counted, 0.0)
        return losses, probs.mul_(((largest - top).exp() / sums)[:, None])


def own_targets(targets: Tensor, num_rows: int, rank: int) -> Targets:
    """Where this rank, with `num_rows` rows like all others, has the targets."""
    is_counted = targets != IGNORE_INDEX
    local = targets - rank * num_rows
    is_here = is_counted & (local >= 0) & (local < num_rows)
    return Targets(local.where(is_here, 0)[:, None], is_here, is_counted)
