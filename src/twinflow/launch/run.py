# SPDX-License-Identifier: Apache-2.0
"""Starts the nodes, copies their output, and ends all of them when the first one fails.

Two threads for each node copy its stdout and stderr and collect failures from this output. The main thread waits for
the nodes, and reads the failures after it has joined these threads.
"""

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
from twinflow.launch.worker import End, Failure, early_end, end_with_parent, first_failure, read_end, read_failure

TERMINATE_GRACE_S = 12.0  # longer than the grace period of a worker, so that workers end first
DRAIN_S = 2.0
SETTLE_S = TERMINATE_GRACE_S  # Ranks whose connection is lost end within this time. The launcher cannot see their end.
SSH_LOST = 255  # exit code of ssh after a failure of the connection


@dataclass(frozen=True)
class Outcome:
    """The result of a launch: the exit code, and the reason of a failure."""

    exit_code: int
    message: str = ""
    is_final: bool = True  # A restart would not help.
    settle_s: float = 0.0  # time until all ranks have certainly ended


class Stopped(Exception):
    """The launcher received a signal to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Node:
    """A running node and the threads that copy its output."""

    def __init__(self, command: NodeCommand, process: subprocess.Popen[bytes]) -> None:
        self.command = command
        self.process = process
        self.failures: list[Failure] = []
        self.ends: list[End] = []
        self.port_error = ""  # the line in which torchrun reports that its port is in use
        self._threads: list[threading.Thread] = []

    def stream(self, prefix: str) -> None:
        """Copies stdout to stdout and stderr to stderr line by line, in two threads."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for pipe, out in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            thread = threading.Thread(target=self._copy, args=(pipe, out, prefix), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, pipe: IO[bytes], out: TextIO, prefix: str) -> None:
        # With newline="", the \r of a progress bar ends a line and is kept.
        for line in io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline=""):
            failure = read_failure(line)  # With ssh -tt, the stderr of a node arrives on stdout.
            if failure is not None:
                self.failures.append(failure)
            elif (ended := read_end(line)) is not None:
                self.ends.append(ended)
                continue
            elif "EADDRINUSE" in line:
                self.port_error = line.strip()
            with suppress(OSError, ValueError):  # A closed output of the launcher must not stop the nodes.
                out.write(f"{prefix}{line}")  # One write for a line, so that lines of two nodes do not mix.
                out.flush()

    def finish(self) -> None:
        """Waits for the rest of the output. The wait has a limit, because a process that is still running may keep the
        pipe open.
        """
        for thread in self._threads:
            thread.join(DRAIN_S)

    def signal(self, number: int) -> None:
        """Sends a signal to the process group of the node."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run_and_restart(commands_of: Callable[[int], Sequence[NodeCommand]], max_restarts: int) -> Outcome:
    """Runs all nodes. After a failure that is not final, restarts all of them, at most `max_restarts` times."""
    attempt = 0
    while True:
        outcome = run_nodes(commands_of(attempt))
        if outcome.exit_code == 0 or outcome.is_final or attempt == max_restarts:
            return outcome
        attempt += 1
        print(f"twinflow: {outcome.message}; restart {attempt} of {max_restarts}", file=sys.stderr, flush=True)
        with signals_raise():
            try:
                time.sleep(outcome.settle_s)
            except Stopped as stopped:
                return stopped_by(stopped)


def run_nodes(commands: Sequence[NodeCommand]) -> Outcome:
    """Runs all nodes until all have ended or one has failed. Then ends the others."""
    nodes: list[Node] = []
    with signals_raise():
        try:
            for command in commands:
                nodes += [Node(command, start(command))]  # If a later node cannot start, the earlier ones are ended.
            for node in nodes:  # Threads start after the last fork: forking with threads is not safe.
                node.stream(f"[{node.command.host}] " if len(nodes) > 1 else "")
            failed = _wait_for_first_failure(nodes)
            lost = [node for node in nodes if node.process.poll() in (None, SSH_LOST)]
            end(nodes)
        except Stopped as stopped:
            end(nodes)
            return stopped_by(stopped)
        except OSError as error:
            end(nodes)
            return Outcome(1, f"{commands[len(nodes)].argv[0]} cannot be started: {error}. Install it or correct PATH.")
    settle_s = SETTLE_S if any(node.command.is_remote for node in lost) else 0.0
    return replace(_failure(failed, nodes), is_final=False, settle_s=settle_s) if failed is not None else Outcome(0)


def stopped_by(stopped: Stopped) -> Outcome:
    name = signal.Signals(stopped.number).name
    return Outcome(128 + stopped.number, f"{name} has stopped the launch. All ranks have ended.")


def start(command: NodeCommand) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Only the launcher gets Ctrl-C. It ends all nodes in the same way.
        preexec_fn=end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (it only calls prctl, which needs no lock)
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


def end(nodes: Sequence[Node]) -> None:
    """Sends SIGTERM, and SIGKILL after a grace period. Then reads the rest of the output."""
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
        ends = {end: node for node in nodes for end in node.ends}
        if (early := early_end(cause, ends)) is not None:
            who = f"rank {early.rank} on {ends[early].command.host} ended with exit code 0 before the other ranks"
            lost = f"rank {cause.rank} lost its connection: {cause.error}"
            return Outcome(cause.exit_code, f"{who}, and {lost} (exit code {cause.exit_code})")
        words = f"rank {cause.rank} on {host} failed first: {cause.error} (exit code {cause.exit_code})"
        return Outcome(cause.exit_code, words)
    code = failed.process.returncode
    taken = next((node.port_error for node in nodes if node.port_error), "")
    if taken:
        remedy = "Another process listens on it. End that process, or choose another --master_port"
        return Outcome(code, f"the port of rank 0 is in use: {taken}. {remedy}")
    code = 128 - code if code < 0 else code
    words = f"{failed.command.argv[0]} for {failed.command.host} ended with exit code {code}, and no rank gave a reason"
    return Outcome(code, words)


@contextmanager
def signals_raise() -> Iterator[None]:
    """In this context, the first SIGINT, SIGTERM or SIGHUP raises Stopped. Later signals are ignored, so that they do
    not interrupt the shutdown.
    """
    if threading.current_thread() is not threading.main_thread():  # Only the main thread can set handlers.
        yield
        return

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # An ignored signal stays ignored, for example SIGHUP with nohup.
    numbers = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]

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
