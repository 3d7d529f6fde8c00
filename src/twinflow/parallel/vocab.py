"""Cross entropy with the rows of the head's weight split across tensor ranks, without all logits in memory.

Each rank computes the logits of its own symbols, a chunk of tokens at a time. For each token the ranks exchange three
numbers: the largest logit, the sum of exponentials relative to it, and the logit of the target if the rank has it. From
these all ranks compute the loss with equal bits, and each rank computes the gradient of its own logits.
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
    """Mean of `F.cross_entropy(hidden @ whole.T, targets)` in fp32 or wider, where `weight` has this rank's rows.

    `hidden`: [tokens, hidden], replicated. `weight`: [vocab / world, hidden]. `targets`: [tokens]; a token with -100 is
    ignored. A target that is outside of the vocabulary makes the loss infinite. The gradient of `hidden` is replicated:
    each rank computes its share, and the shares are summed.
    """
    return chunked_cross_entropy(copy_in(hidden, group), weight, targets, chunk, SharedSoftmax(group))


class SharedSoftmax:
    """Softmax over the symbols of all ranks. All ranks have the same number of rows."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        """The rows of the targets on this rank."""
        return own_targets(targets, num_rows, self._group.rank)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The losses, equal on all ranks, and the probabilities of this rank's symbols, in the memory of the logits."""
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
    """The rows of the targets on a rank. All ranks have `num_rows` rows."""
    is_counted = targets != IGNORE_INDEX
    local = targets - rank * num_rows
    is_here = is_counted & (local >= 0) & (local < num_rows)
    return Targets(local.where(is_here, 0)[:, None], is_here, is_counted)
