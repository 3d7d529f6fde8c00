"""How a rank failed, as one line of text: workers write it, the launcher reads it from the output of the nodes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"twinflow: rank ([0-9]+) failed at ([0-9.]+) with exit code ([0-9]+) in attempt ([0-9]+): (.*)")
_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ?")  # torch puts it before each line once there is a process group
TRACEBACK = "Traceback (most recent call last)"
# What a rank says when it lost another one: never the first cause where there is a second report.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|DistBackendError|DistNetworkError|Gloo"
    r"|ends: rank [0-9]+ (failed|hung)",
    re.I,
)


@dataclass(frozen=True)
class Failure:
    """One rank's end."""

    rank: int
    time_s: float
    exit_code: int
    attempt: int  # grows with each restart
    error: str

    def line(self) -> str:
        """The line that `read_failure` reads."""
        error = " ".join(self.error.split())[:1000]  # one line, short enough for one write
        how = f"with exit code {self.exit_code} in attempt {self.attempt}"
        return f"twinflow: rank {self.rank} failed at {self.time_s:.6f} {how}: {error}\n"


def read_failure(line: str) -> Failure | None:
    """The failure a line of output tells of, if it does."""
    match = _LINE.search(line)
    if match is None:
        return None
    return Failure(int(match[1]), float(match[2]), int(match[3]), int(match[4]), match[5].rstrip())


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Of the last attempt, the earliest that is not the loss of another rank; else the earliest."""
    return min(failures, key=lambda f: (-f.attempt, bool(LOST_PEER.search(f.error)), f.time_s), default=None)


def error_of(tail: str) -> str:
    """The exception at the end of a rank's stderr: the line below its last traceback, or the last line."""
    lines = [_RANK_PREFIX.sub("", line) for line in tail.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if starts:
        for line in lines[starts[-1] + 1 :]:
            if line.strip() and not line[0].isspace():
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing to stderr")


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
