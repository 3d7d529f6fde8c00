"""What ranks tell each other of themselves each second, and whom that makes the one that hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.launch.failure import Failure

LONGEST_TICK_S = 2.0
RUNNING, PAUSED, CLOSED, LEFT = "running", "paused", "closed", "left"


@dataclass(frozen=True)
class Timing:
    """Seconds. Together they keep the end of a run within 30 s of a death that nobody noticed otherwise."""

    poll_s: float = 1.0  # between two looks at the store
    dead_after_s: float = 20.0  # a rank without a pulse for so long is dead
    suspect_after_s: float = 6.0  # the same, once some rank has lost its connection to another
    grace_s: float = 3.0  # for the main thread to end by itself
    hold_s: float = 5.0  # for which rank 0 keeps the store for others


@dataclass(frozen=True)
class Cause:
    """Why the run ends: the first failure."""

    rank: int
    step: int
    kind: str  # "error", "death" or "hang"
    error: str
    time_s: float
    attempt: int

    def __str__(self) -> str:
        how = "hung" if self.kind == "hang" else f"failed in step {self.step}"
        return f"rank {self.rank} {how}: {self.error}"

    def failure(self) -> Failure:
        """The same for `twinflow launch`, which reads it from the output."""
        how = "hung" if self.kind == "hang" else f"in step {self.step}"
        return Failure(self.rank, self.time_s, 1, self.attempt, f"{how}: {self.error}")


@dataclass(frozen=True)
class Pulse:
    """Where a rank is, as it tells the others each second."""

    rank: int
    life: int  # grows with each pulse
    beats: int  # grows with each sign of progress
    step: int
    doing: str
    stalled_s: float  # since the last sign of progress
    limit_s: float  # how long that may be; 0: for ever
    state: str

    @property
    def is_over(self) -> bool:
        """Whether it stands still for longer than it may. Nothing is timed before the first beat."""
        return self.beats > 0 and 0 < self.limit_s <= self.stalled_s


def hung_rank(me: Pulse, others: Sequence[Pulse]) -> Pulse | None:
    """Whom to blame when this rank stands still for too long; None while it may be waiting for one that is at work.

    At work is a rank in a pause, and one that is not ahead and has moved lately. To blame is the rank in the lowest
    step, and among equals the one that stands still for longest: the others came further and wait for it.
    """
    for other in others:
        waiting_for = other.state == RUNNING and other.beats > 0 and other.step <= me.step
        if waiting_for and other.stalled_s < me.limit_s / 2:
            return None
        if other.state == PAUSED and not other.is_over:
            return None
    here = [pulse for pulse in (me, *others) if pulse.state != CLOSED]
    return min(here, key=lambda pulse: (pulse.step, -pulse.stalled_s))


class AwakeClock:
    """Seconds in which this process ran. A stop (SIGSTOP, a debugger, a machine asleep) hardly counts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def tick(self) -> None:
        """Go on; called several times a second."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._last_s, LONGEST_TICK_S)
        self._last_s = now_s
