"""What torchrun starts for each rank: the script as a child process, whose end is reported with its cause.

It reads the rank's stderr on its way, so that an exception has a name, and sees a death by signal at once. Told to
stop, it gives the script some seconds (torchrun signals the whole process group) and then kills it: a script with a
handler for SIGTERM that waits in a collective would hold up the end of the run. No torch here: it stays small.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from twinflow.launch.failure import TRACEBACK, Failure, error_of, signal_name

STOP_GRACE_S = 8.0
FLUSH_S = 0.2
TAIL_CHARS = 65536
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> Callable[[], None]:
    """A function that asks Linux to send this signal to the calling process when its parent dies."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)  # loaded here: after a fork only the call itself is safe
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


class Tail:
    """Copies a pipe in whole lines, so that those of two ranks do not mix; keeps its end and its last traceback's time.

    A line without an end goes out as well when nothing follows for a moment.
    """

    def __init__(self, pipe: IO[bytes], out: int) -> None:
        self.text = ""
        self.traceback_s: float | None = None
        self._pipe = pipe
        self._out = out
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the rest. Not for ever: a process that the script left behind may hold the pipe."""
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
    """Write to a file descriptor; where nobody listens any more the rank must not block on a full pipe."""
    with suppress(OSError):
        while data:
            data = data[os.write(out, data) :]


class Stop:
    """Set by a signal: when this process was told to end."""

    def __init__(self) -> None:
        self.since_s: float | None = None

    def __call__(self, number: int, frame: object) -> None:
        """Handle the signal."""
        if self.since_s is None:
            self.since_s = time.monotonic()


def run_rank(argv: Sequence[str], rank: int, attempt: int) -> int:
    """Run a rank to its end; the exit code, 128 + n after signal n as in a shell."""
    orphaned = end_with_parent(signal.SIGKILL)
    orphaned()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=orphaned,  # noqa: PLW1509 (no thread is running yet)
    )
    assert child.stdout is not None
    assert child.stderr is not None
    output, tail = Tail(child.stdout, 1), Tail(child.stderr, 2)
    code = _wait(child, stop)
    ended_s = time.time()
    output.finish(1.0)
    tail.finish(1.0)
    exit_code = code if code >= 0 else 128 - code
    if code != 0 and stop.since_s is None:  # told to stop, it is not the cause
        error = error_of(tail.text) if code > 0 else f"killed by {signal_name(-code)}"
        time_s = tail.traceback_s if code > 0 and tail.traceback_s is not None else ended_s
        write_all(2, Failure(rank, time_s, exit_code, attempt, error).line().encode())
    return exit_code


def _wait(child: subprocess.Popen[bytes], stop: Stop) -> int:
    while (code := child.poll()) is None:
        if stop.since_s is not None and time.monotonic() - stop.since_s > STOP_GRACE_S:
            child.kill()
        time.sleep(0.02)
    return code


def rank_words(words: list[str], local_rank: str) -> list[str]:
    """What Python is given: with --compat also `--local_rank=N`, which DeepSpeed's launcher gives to scripts."""
    words = list(words)

    def take(option: str) -> bool:
        return words[0] == option and bool(words.pop(0))

    is_compat = take("--compat")
    is_told = is_compat and not take("--no_local_rank")
    found = [*(["-m", "twinflow.compat"] if is_compat else []), *(["-m"] if take("--module") else []), words.pop(0)]
    return [*found, *([f"--local_rank={local_rank}"] if is_told else []), *words]


def main() -> None:
    """`python -m twinflow.launch.worker [--attempt=N] [--compat [--no_local_rank]] [--module] script arguments`, by
    torchrun."""
    words = sys.argv[1:]
    if words[0].startswith("--attempt="):  # a torchrun that the launcher has started again counts from 0
        os.environ["TORCHELASTIC_RESTART_COUNT"] = words.pop(0).partition("=")[2]
    argv = [sys.executable, "-u", *rank_words(words, os.environ["LOCAL_RANK"])]
    sys.exit(run_rank(argv, int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))


if __name__ == "__main__":
    main()
