"""The failure of a rank as one line of text. Workers write it, and the launcher reads it from the output of the
nodes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"twinflow: rank ([0-9]+) failed at ([0-9.]+) with exit code ([0-9]+) in attempt ([0-9]+): (.*)")
_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ?")  # With a process group, torch puts it before each line of a traceback.
TRACEBACK = "Traceback (most recent call last)"
# Errors of a rank that lost the connection to another one. They are never the first cause if there is another error.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|DistBackendError|DistNetworkError|Gloo"
    r"|ends: rank [0-9]+ (failed|hung)",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank."""

    rank: int
    time_s: float
    exit_code: int
    attempt: int  # number of restarts before it
    error: str

    def line(self) -> str:
        """The line that `read_failure` parses."""
        error = " ".join(self.error.split())[:1000]  # One line that is short enough for one write.
        how = f"with exit code {self.exit_code} in attempt {self.attempt}"
        return f"twinflow: rank {self.rank} failed at {self.time_s:.6f} {how}: {error}\n"


def read_failure(line: str) -> Failure | None:
    """The failure in a line of output. None for other lines."""
    match = _LINE.search(line)
    if match is None:
        return None
    return Failure(int(match[1]), float(match[2]), int(match[3]), int(match[4]), match[5].rstrip())


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure of the last attempt that is not the loss of another rank. If there is none, the earliest
    failure.
    """
    return min(failures, key=lambda f: (-f.attempt, bool(LOST_PEER.search(f.error)), f.time_s), default=None)


def error_of(tail: str) -> str:
    """The exception at the end of a rank's stderr: the line after the last traceback, or the last line."""
    lines = [_RANK_PREFIX.sub("", line) for line in tail.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if starts:
        for line in lines[starts[-1] + 1 :]:
            if line.strip() and not line[0].isspace():
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output on stderr")


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
