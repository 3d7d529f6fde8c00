# SPDX-License-Identifier: Apache-2.0
"""Runs that go on when nodes come and go (`twinflow launch --min-nodes --max-nodes`).

torchrun's rendezvous forms the group of ranks: each node has an agent of torchrun, and the agents meet in a store. When
a rank fails or a node comes back, all agents stop their ranks, meet again and start new ones. The launcher keeps this
store, because the store must outlive every node. It also starts nodes again that have ended, and counts failures.

The main thread polls the nodes and owns all data here. Two threads for each node copy its output (run.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from twinflow.launch.commands import NodeCommand
from twinflow.launch.environment import port_in_use
from twinflow.launch.run import SSH_LOST, Node, Outcome, Stopped, end, signals_raise, start, stopped_by
from twinflow.launch.worker import Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

RETURN_S = 2.0  # default pause before a node is started again
LOST_RETURN_S = 30.0  # the shortest pause for a machine that ssh does not reach
INCIDENT_S = 5.0  # Failures within this time have one cause.
POLL_S = 0.05


def host_store(address: str, port: int) -> TCPStore:
    """The store in which the agents meet. `port`: 0 for a free one. Raises ValueError if the port is in use."""
    from torch._C._distributed_c10d import TCPStore

    with port_in_use("--master_port", port):
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@dataclass
class Seat:
    """A place for a node. `node` is None while it waits to be started again."""

    command: NodeCommand
    node: Node | None = None
    return_s: float = 0.0  # when it is started again
    num_read: int = 0  # failures of the current node that were handled
    is_done: bool = False


class Elastic:
    """The nodes of an elastic run and the failures so far."""

    def __init__(self, commands: Sequence[NodeCommand], max_restarts: int, return_s: float) -> None:
        self.seats = [Seat(command) for command in commands]
        self._max_restarts = max_restarts
        self._return_s = return_s
        self._num_failures = 0
        self._last_s = -INCIDENT_S  # when the last failure was counted
        self.outcome: Outcome | None = None  # set when the run is over

    @property
    def nodes(self) -> list[Node]:
        return [seat.node for seat in self.seats if seat.node is not None]

    def poll(self) -> None:
        """Starts nodes that are due, and handles what has happened to the others."""
        for seat in self.seats:
            if seat.node is not None:
                self._look_at(seat, seat.node)
            elif not seat.is_done and time.monotonic() >= seat.return_s:
                seat.node = Node(seat.command, start(seat.command))
                seat.num_read = 0
                seat.node.stream(f"[{seat.command.host}] ")
        if any(seat.is_done for seat in self.seats):
            # The ranks have finished. A node that would come back now finds no group.
            for seat in self.seats:
                seat.is_done |= seat.node is None
        if self.outcome is None and all(seat.is_done for seat in self.seats):
            self.outcome = Outcome(0)

    def _look_at(self, seat: Seat, node: Node) -> None:
        code = node.process.poll()
        if code is not None:
            node.finish()
        for failure in node.failures[seat.num_read :]:
            seat.num_read += 1
            self._handle(failure, seat.command.host)
        if code is None:
            return
        seat.node = None
        seat.is_done = code == 0
        if code == 0 or any(other.is_done for other in self.seats):
            return
        code = 128 - code if code < 0 else code
        words = f"the node {seat.command.host} ended with exit code {code}"
        seat.return_s = time.monotonic() + self._return_s
        if code == SSH_LOST and seat.command.is_remote:  # It costs no restart: the others train on without it.
            seat.return_s = time.monotonic() + max(self._return_s, LOST_RETURN_S)
            print(f"twinflow: {words}, and is tried again later", file=sys.stderr, flush=True)
        else:
            self._count(Outcome(code, words))

    def _handle(self, failure: Failure, host: str) -> None:
        ends = {end: seat for seat in self.seats if seat.node is not None for end in seat.node.ends}
        earlier = [end for end in ends if end.time_s < failure.time_s and end.rank != failure.rank]
        words = f"rank {failure.rank} on {host} failed: {failure.error} (exit code {failure.exit_code})"
        if earlier:  # The group cannot form again without a rank that has finished.
            first = min(earlier, key=lambda end: end.time_s)
            who = f"rank {first.rank} on {ends[first].command.host} ended with exit code 0 before the other ranks"
            self.outcome = Outcome(failure.exit_code, f"{who}, and then {words}")
        elif not failure.is_lost_peer:  # that rank has only lost another one
            self._count(Outcome(failure.exit_code, words))

    def _count(self, cause: Outcome) -> None:
        """Counts a failure, unless it follows so soon on another one that both have the same cause."""
        now_s = time.monotonic()
        if self.outcome is not None or now_s - self._last_s < INCIDENT_S:
            return
        self._num_failures += 1
        self._last_s = now_s
        if self._num_failures > self._max_restarts:
            often = f"This was failure {self._num_failures}, and --max_restarts is {self._max_restarts}"
            self.outcome = Outcome(cause.exit_code, f"{cause.message}. {often}")
            return
        count = f"{self._num_failures} of {self._max_restarts}"
        print(f"twinflow: {cause.message}; the ranks form a new group ({count})", file=sys.stderr, flush=True)


def run_elastic(commands: Sequence[NodeCommand], max_restarts: int, return_s: float = RETURN_S) -> Outcome:
    """Runs the nodes until all of them have ended well, or more than `max_restarts` failures have happened.

    `return_s`: pause before a node that has ended is started again.
    """
    run = Elastic(commands, max_restarts, return_s)
    with signals_raise():
        try:
            while run.outcome is None:
                run.poll()
                time.sleep(POLL_S)
        except Stopped as stopped:
            run.outcome = stopped_by(stopped)
        except OSError as error:
            text = f"{commands[0].argv[0]} cannot be started: {error}. Install it or correct PATH."
            run.outcome = Outcome(1, text)
        end(run.nodes)
    return run.outcome
