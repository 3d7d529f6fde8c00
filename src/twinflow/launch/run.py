"""Start the nodes, show their output, and end all of them with the first that fails."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO, TextIO

from twinflow.launch.commands import NodeCommand
from twinflow.launch.failure import Failure, first_failure, read_failure
from twinflow.launch.worker import end_with_parent

TERMINATE_GRACE_S = 12.0  # longer than a worker's own grace, so that nodes end in order
DRAIN_S = 2.0
SETTLE_S = TERMINATE_GRACE_S  # in which ranks end whose connection is gone: nobody tells that they have
SSH_LOST = 255  # ssh's exit code where it is the connection that failed


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: what to exit with, and why where it failed."""

    exit_code: int
    message: str = ""
    is_final: bool = True  # no use to start again
    settle_s: float = 0.0  # before all ranks are surely gone


class Stopped(Exception):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Node:
    """A running node and the threads that show its output."""

    def __init__(self, command: NodeCommand, process: subprocess.Popen[bytes]) -> None:
        self.command = command
        self.process = process
        self.failures: list[Failure] = []
        self._threads: list[threading.Thread] = []

    def stream(self, prefix: str) -> None:
        """Copy stdout to stdout and stderr to stderr, line by line, from threads."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for pipe, out in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            thread = threading.Thread(target=self._copy, args=(pipe, out, prefix), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, pipe: IO[bytes], out: TextIO, prefix: str) -> None:
        # newline="" keeps the \r of progress bars as ends of lines of their own.
        for line in io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline=""):
            failure = read_failure(line)  # over ssh -tt what a node writes to stderr arrives on stdout
            if failure is not None:
                self.failures.append(failure)
            with suppress(OSError, ValueError):  # output that nobody reads any more must not stop the nodes
                out.write(f"{prefix}{line}")  # one write, so that lines of two nodes do not mix
                out.flush()

    def finish(self) -> None:
        """Wait for the rest of the output; not for ever, where something left behind holds the pipe."""
        for thread in self._threads:
            thread.join(DRAIN_S)

    def signal(self, number: int) -> None:
        """Signal the node's whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run_and_restart(commands_of: Callable[[int], Sequence[NodeCommand]], max_restarts: int) -> Outcome:
    """Run all nodes; after a failure all of them again, by the commands of the next attempt."""
    attempt = 0
    while True:
        outcome = run_nodes(commands_of(attempt))
        if outcome.exit_code == 0 or outcome.is_final or attempt == max_restarts:
            return outcome
        attempt += 1
        print(f"twinflow: {outcome.message}; restart {attempt} of {max_restarts}", file=sys.stderr, flush=True)
        with _signals_raise():
            try:
                time.sleep(outcome.settle_s)
            except Stopped as stopped:
                return _stopped(stopped)


def run_nodes(commands: Sequence[NodeCommand]) -> Outcome:
    """Run all nodes to their end, or to the end of the first that fails."""
    nodes: list[Node] = []
    with _signals_raise():
        try:
            for command in commands:
                nodes += [Node(command, _start(command))]  # those that started are known where a later one cannot
            for node in nodes:  # after the last fork: threads and forks do not mix
                node.stream(f"[{node.command.host}] " if len(nodes) > 1 else "")
            failed = _wait_for_first_failure(nodes)
            lost = [node for node in nodes if node.process.poll() in (None, SSH_LOST)]
            _end(nodes)
        except Stopped as stopped:
            _end(nodes)
            return _stopped(stopped)
        except OSError as error:
            _end(nodes)
            return Outcome(1, f"cannot start {commands[len(nodes)].argv[0]}: {error}")
    settle_s = SETTLE_S if any(node.command.is_remote for node in lost) else 0.0
    return replace(_failure(failed, nodes), is_final=False, settle_s=settle_s) if failed is not None else Outcome(0)


def _stopped(stopped: Stopped) -> Outcome:
    return Outcome(128 + stopped.number, f"stopped by {signal.Signals(stopped.number).name}; all ranks ended")


def _start(command: NodeCommand) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends every node in the same way
        preexec_fn=end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (no thread is running yet)
    )


def _wait_for_first_failure(nodes: Sequence[Node]) -> Node | None:
    while True:
        codes = [node.process.poll() for node in nodes]
        for node, code in zip(nodes, codes, strict=True):
            if code:
                return node
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)


def _end(nodes: Sequence[Node]) -> None:
    """SIGTERM, some seconds, SIGKILL; then the rest of the output."""
    running = [node for node in nodes if node.process.poll() is None]
    for node in running:
        node.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + TERMINATE_GRACE_S
    for node in running:
        while node.process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if node.process.poll() is None:
            node.signal(signal.SIGKILL)
        node.process.wait()
    for node in nodes:
        node.finish()


def _failure(failed: Node, nodes: Sequence[Node]) -> Outcome:
    found = {failure: node for node in nodes for failure in node.failures}
    cause = first_failure(found)
    if cause is not None:
        host = found[cause].command.host
        words = f"rank {cause.rank} on {host} failed first: {cause.error} (exit code {cause.exit_code})"
        return Outcome(cause.exit_code, words)
    code = failed.process.returncode
    code = 128 - code if code < 0 else code
    words = f"{failed.command.argv[0]} for {failed.command.host} ended with exit code {code}, and no rank gave a reason"
    return Outcome(code, words)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP raises Stopped; later ones must not break off the ending."""
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one

    def stop(number: int, frame: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    old = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
