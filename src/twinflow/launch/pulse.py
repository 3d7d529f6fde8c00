"""The heartbeat of a rank, and the rule that finds the rank that hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.launch.failure import Failure

LONGEST_TICK_S = 2.0
RUNNING, PAUSED, CLOSED, LEFT = "running", "paused", "closed", "left"


@dataclass(frozen=True)
class Timing:
    """Intervals of the watch in seconds. With the defaults, a run ends within 30 s of the death of a rank."""

    poll_s: float = 1.0  # interval between two reads of the store
    dead_after_s: float = 20.0  # A rank without a heartbeat for this time is dead.
    suspect_after_s: float = 6.0  # Replaces dead_after_s after a rank has lost its connection to another one.
    grace_s: float = 3.0  # time for the main thread to end by itself
    hold_s: float = 5.0  # time for which rank 0 keeps the store for the others


@dataclass(frozen=True)
class Cause:
    """The first failure, for which the run ends."""

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
        """The cause as a `Failure`, which `twinflow launch` reads from the output."""
        how = "hung" if self.kind == "hang" else f"in step {self.step}"
        return Failure(self.rank, self.time_s, 1, self.attempt, f"{how}: {self.error}")


@dataclass(frozen=True)
class Pulse:
    """The state of a rank, which it publishes each second."""

    rank: int
    life: int  # number of heartbeats
    beats: int  # number of signs of progress
    step: int
    doing: str
    stalled_s: float  # time since the last sign of progress
    limit_s: float  # limit of stalled_s; 0: no limit
    state: str

    @property
    def is_over(self) -> bool:
        """Whether the rank has made no progress for longer than its limit. There is no limit before the first beat."""
        return self.beats > 0 and 0 < self.limit_s <= self.stalled_s


def hung_rank(me: Pulse, others: Sequence[Pulse]) -> Pulse | None:
    """The rank that hangs, called when this rank has made no progress for too long. None if this rank may be waiting
    for a rank that works.

    A rank works if it is in a pause, or if it is not ahead of this rank and made progress recently. The rank in the
    lowest step hangs. Among several in that step, the rank with the longest stall hangs: the others went further and
    wait for it.
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
    """Counts the seconds in which this process runs. Time in which it is stopped (SIGSTOP, a debugger, a suspended
    machine) counts for at most `LONGEST_TICK_S`.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def tick(self) -> None:
        """Advances the clock. The judge calls this method several times a second."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._last_s, LONGEST_TICK_S)
        self._last_s = now_s
