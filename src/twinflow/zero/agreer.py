"""The norm of gradients of which every rank has a part: a thread that adds up what all ranks have measured.

This is all that ranks have to agree on where somebody else has summed and partitioned the gradients (stage 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.device import Event
from twinflow.dist.group import Group
from twinflow.offload.board import POLL_S, Board, Now
from twinflow.offload.bucket import Bucket, Job
from twinflow.offload.threads import BoardThread
from twinflow.zero.reducer import of_all_axes, sum_of_squares


class Agreer(BoardThread):
    """Closes a step's job when all ranks have said what their gradients come to."""

    reduces = False

    def __init__(
        self, board: Board, buckets: Sequence[Bucket], group: Group, replica: Group | None, divisor: float
    ) -> None:
        self._buckets, self._group, self._replica = buckets, group, replica
        self.divisor = divisor  # what comes, the mean, is so many times what is wanted
        self._closed: deque[tuple[Job, Tensor, Event]] = deque()
        self.threads = (self,)
        super().__init__(board, "agreer")

    def close_job(self, job: Job, norms: Tensor, event: Event) -> None:
        """All tasks of the job are submitted; `norms` holds this rank's norms once `event` is done."""
        with self.board.changed:
            self._closed.append((job, norms, event))
            self.board.changed.notify_all()

    def _turn(self) -> None:
        board = self.board
        with board.changed:
            if not self._closed:
                self._sleep(has_events=False)
                return
            job, norms, event = self._closed.popleft()
            while not event.done():
                if board.is_closing or board.error is not None:
                    return
                board.changed.wait(POLL_S)
        own = [norm for norm, bucket in zip(norms.tolist(), self._buckets, strict=True) if bucket.plan.is_counted]
        sums = self._group.gather_rows(torch.tensor([sum_of_squares(own)], dtype=torch.float64))[:, 0]
        board.close_job(job, of_all_axes(sums, self._replica), Now(), are_squares=True)
