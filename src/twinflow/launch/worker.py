# SPDX-License-Identifier: Apache-2.0
"""The process that torchrun starts for each rank. It runs the script as a child process and reports its failure.

A failure is one line of text. Workers write it, and the launcher reads it from the output of the nodes.

A thread copies the stderr of the script and keeps its end, from which the failure gets its text. The worker notices at
once if a signal kills the script. After a signal to stop, the script has some seconds to end (torchrun signals the
whole process group). Then the worker kills it: a script with a SIGTERM handler that waits in a collective would delay
the end of the run. This module does not import torch, to stay small.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_LINE = re.compile(r"twinflow: rank ([0-9]+) failed at ([0-9.]+) with exit code ([0-9]+) in attempt ([0-9]+): (.*)")
_END_LINE = re.compile(r"twinflow: rank ([0-9]+) ended at ([0-9.]+) with exit code 0 in attempt ([0-9]+)")
# With a process group, torch writes this prefix before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ?")
TRACEBACK = "Traceback (most recent call last)"
# Errors of a rank that lost the connection to another one. They are never the first cause if there is another error.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|DistBackendError|DistNetworkError|Gloo"
    r"|ends: rank [0-9]+ (failed|hung)|collective was abandoned",  # the latter: dist/group.py
    re.I,
)
ELASTIC = "TWINFLOW_ELASTIC"  # set to 1 for the ranks of an elastic run
STOP_GRACE_S = 8.0
FLUSH_S = 0.2
TAIL_CHARS = 65536
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    rank: int
    time_s: float
    exit_code: int
    attempt: int  # number of restarts before this failure
    error: str

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank has only lost the connection to another one."""
        return bool(LOST_PEER.search(self.error))

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


@dataclass(frozen=True)
class End:
    """The end of a rank with exit code 0. It is the cause if others were still waiting for the rank."""

    rank: int
    time_s: float
    attempt: int

    def line(self) -> str:
        """The line that `read_end` parses. The launcher does not show it."""
        return f"twinflow: rank {self.rank} ended at {self.time_s:.6f} with exit code 0 in attempt {self.attempt}\n"


def read_end(line: str) -> End | None:
    """The end in a line of output. None for other lines."""
    match = _END_LINE.search(line)
    return None if match is None else End(int(match[1]), float(match[2]), int(match[3]))


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure of the last attempt. A failure that is only a lost connection to another rank is used only
    if there is no other one.
    """
    return min(failures, key=lambda f: (-f.attempt, f.is_lost_peer, f.time_s), default=None)


def early_end(cause: Failure, ends: Iterable[End]) -> End | None:
    """The rank that ended with exit code 0 before `cause`, if `cause` is only a lost connection to another rank."""
    earlier = [end for end in ends if end.attempt == cause.attempt and end.time_s < cause.time_s]
    return min(earlier, key=lambda end: end.time_s, default=None) if cause.is_lost_peer else None


def error_of(tail: str) -> str:
    """The exception at the end of a rank's stderr: the line after the last traceback, or the last line."""
    lines = [_RANK_PREFIX.sub("", line) for line in tail.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if starts:
        for line in lines[starts[-1] + 1 :]:
            if line.strip() and not line[0].isspace():
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output on stderr")


def end_with_parent(number: int) -> Callable[[], None]:
    """Returns a function that makes Linux send this signal to the calling process when its parent dies."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)  # The library is loaded before the fork, because after the fork only the call is safe.
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


class Tail:
    """Copies a pipe in whole lines, so that lines of two ranks do not mix. Keeps the end of the text and the time of
    the last traceback.

    An incomplete line is written too if nothing follows for a moment.
    """

    def __init__(self, pipe: IO[bytes], out: int) -> None:
        self.text = ""
        self.traceback_s: float | None = None
        self._pipe = pipe
        self._out = out
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits for the rest of the output, with a limit: a process that the script has started may keep the pipe
        open.
        """
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        held = b""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], FLUSH_S if held else None)
            data = os.read(self._pipe.fileno(), 65536) if ready else b""
            held += data
            end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1 if data else len(held)
            write_all(self._out, held[:end])
            self._keep(held[:end].decode(errors="replace"))
            held = held[end:]
            if ready and not data:
                return

    def _keep(self, text: str) -> None:
        if TRACEBACK in text:
            self.traceback_s = time.time()
        self.text = (self.text + text)[-TAIL_CHARS:]


def write_all(out: int, data: bytes) -> None:
    """Writes to a file descriptor. Errors are ignored: the rank must not stop because its output is closed."""
    with suppress(OSError):
        while data:
            data = data[os.write(out, data) :]


def run_rank(argv: Sequence[str], rank: int, attempt: int) -> int:
    """Runs a rank until it ends. Returns the exit code, which is 128 + n after signal n as in a shell."""
    orphaned = end_with_parent(signal.SIGKILL)
    orphaned()
    stops_s: list[float] = []  # when this process was told to end
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stops_s.append(time.monotonic()))
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=orphaned,  # noqa: PLW1509 (no thread is running yet)
    )
    assert child.stdout is not None
    assert child.stderr is not None
    output, tail = Tail(child.stdout, 1), Tail(child.stderr, 2)
    while (code := child.poll()) is None:
        if stops_s and time.monotonic() - stops_s[0] > STOP_GRACE_S:
            child.kill()
        time.sleep(0.02)
    ended_s = time.time()
    output.finish(1.0)
    tail.finish(1.0)
    exit_code = code if code >= 0 else 128 - code
    if code != 0 and not stops_s:  # A rank that was told to stop is not the cause.
        killer = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        error = error_of(tail.text) if code > 0 else f"killed by {killer}"
        time_s = tail.traceback_s if code > 0 and tail.traceback_s is not None else ended_s
        write_all(2, Failure(rank, time_s, exit_code, attempt, error).line().encode())
    if code == 0 and not stops_s:
        write_all(2, End(rank, ended_s, attempt).line().encode())
    return exit_code


def rank_words(words: list[str], local_rank: str) -> list[str]:
    """The arguments of Python for a rank. With --compat and not --no_local_rank, the script gets `--local_rank=N`."""
    words = list(words)

    def take(option: str) -> bool:
        return words[0] == option and bool(words.pop(0))

    is_compat = take("--compat")
    is_told = is_compat and not take("--no_local_rank")
    found = [*(["-m", "twinflow.compat"] if is_compat else []), *(["-m"] if take("--module") else []), words.pop(0)]
    return [*found, *([f"--local_rank={local_rank}"] if is_told else []), *words]


def main() -> None:
    """`python -m twinflow.launch.worker [--attempt=N] [--elastic] [--compat [--no_local_rank]] [--module] script
    arguments`. torchrun starts this command.
    """
    words = sys.argv[1:]
    if words[0].startswith("--attempt="):  # torchrun counts from 0 again if the launcher has restarted it.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = words.pop(0).partition("=")[2]
    if words[0] == "--elastic":
        words.pop(0)
        os.environ[ELASTIC] = "1"
        # Each node of an elastic run counts its own restarts. Ranks need a number that is the same on all of them.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    argv = [sys.executable, "-u", *rank_words(words, os.environ["LOCAL_RANK"])]
    sys.exit(run_rank(argv, int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))


if __name__ == "__main__":
    main()
