# SPDX-License-Identifier: Apache-2.0
"""Nodes that are started again by the launcher, and the interface that gloo is given over several machines."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from twinflow.launch import environment, run
from twinflow.launch.commands import NodeCommand
from twinflow.launch.environment import RankEnvironment, gloo_variables, interface_towards
from twinflow.launch.run import run_and_restart
from twinflow.launch.worker import End, Failure


def nodes(*codes: str) -> list[NodeCommand]:
    """Nodes that run some Python each; the second as if over ssh."""
    return [NodeCommand(f"n{i}", (sys.executable, "-S", "-c", code), i == 1) for i, code in enumerate(codes)]


def test_all_nodes_start_again_until_they_are_through(capfd: pytest.CaptureFixture[str]) -> None:
    attempts: list[int] = []

    def commands_of(attempt: int) -> list[NodeCommand]:
        attempts.append(attempt)
        return nodes("", f"raise SystemExit({2 if attempt < 2 else 0})")

    assert run_and_restart(commands_of, 5).exit_code == 0
    assert attempts == [0, 1, 2]
    assert "restart 2 of 5" in capfd.readouterr().err


def test_restarts_end() -> None:
    attempts: list[int] = []

    def commands_of(attempt: int) -> list[NodeCommand]:
        attempts.append(attempt)
        return nodes("raise SystemExit(3)")

    assert run_and_restart(commands_of, 1).exit_code == 3
    assert attempts == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "settles"),
    [
        ("raise SystemExit(3)", "import time; time.sleep(60)", True),  # its ssh is ended, and who knows about its ranks
        ("", "raise SystemExit(255)", True),  # its connection is lost
        ("", "raise SystemExit(3)", False),  # it ended by itself
    ],
)
def test_ranks_that_may_still_be_there_get_time_to_end(first: str, second: str, settles: bool) -> None:
    outcome = run.run_nodes(nodes(first, second))
    assert not outcome.is_final
    assert outcome.settle_s == (run.SETTLE_S if settles else 0.0)


LOST = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("ends", "failures", "cause"),
    [
        ([End(1, 1.0, 0)], [Failure(0, 2.0, 1, 0, LOST)], "rank 1 on n1 ended with exit code 0 before the other ranks"),
        ([End(1, 3.0, 0)], [Failure(0, 2.0, 1, 0, LOST)], "rank 0 on n1 failed first: RuntimeError"),
        ([End(1, 1.0, 0)], [Failure(0, 2.0, 1, 0, "ValueError: x")], "rank 0 on n1 failed first: ValueError: x"),
        ([End(1, 1.0, 0)], [Failure(0, 2.0, 1, 1, LOST)], "rank 0 on n1 failed first: RuntimeError"),
    ],
    ids=["early", "late", "another", "earlier-attempt"],
)
def test_a_rank_that_ends_well_too_early_is_the_cause(
    ends: list[End], failures: list[Failure], cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(line.line() for line in [*ends, *failures])
    outcome = run.run_nodes(nodes("", f"import sys; sys.stderr.write({lines!r}); sys.exit(1)"))
    assert outcome.message.startswith(cause)
    assert outcome.exit_code == 1
    assert "ended at" not in capfd.readouterr().err  # only the launcher needs these lines


def test_a_port_in_use_is_the_cause() -> None:
    line = "[E] The server socket has failed to listen. port: 7, name: EADDRINUSE, message: address already in use"
    outcome = run.run_nodes(nodes(f"import sys; sys.stderr.write({line!r}); sys.exit(1)"))
    assert outcome.message.startswith("the port of rank 0 is in use: [E] The server socket")


def test_a_signal_while_it_waits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE_S", 60.0)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # for one that comes too early
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(0.5):
            os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    start_s = time.monotonic()
    teller.start()
    try:
        outcome = run_and_restart(lambda attempt: nodes("", "raise SystemExit(255)"), 3)
    finally:
        is_over.set()
        teller.join()
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - start_s < 50
    assert outcome.exit_code == 128 + signal.SIGTERM


def test_what_cannot_be_started_is_not_tried_again() -> None:
    attempts: list[int] = []

    def commands_of(attempt: int) -> list[NodeCommand]:
        attempts.append(attempt)
        return [NodeCommand("n", ("/no/such/program",))]

    assert run_and_restart(commands_of, 3).exit_code == 1
    assert attempts == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_the_interface_towards_an_address() -> None:
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("no-such-host.invalid") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((environment.OUTSIDE, 9))
        except OSError:
            pytest.skip("no way out of this machine")
        own = probe.getsockname()[0]
    name = interface_towards(environment.OUTSIDE)
    assert name in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_towards(own) == name  # rank 0's machine finds its own
    assert Path(f"/sys/class/net/{name}").exists()


def test_gloo_gets_an_interface_over_several_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def towards(address: str) -> str | None:
        asked.append(address)
        return "eth7" if address == environment.OUTSIDE else None

    monkeypatch.setattr(environment, "interface_towards", towards)
    two, one = RankEnvironment(0, 0, 2, 1, "a", 1), RankEnvironment(0, 0, 2, 2, "a", 1)
    assert gloo_variables(one, {}) == {}
    assert gloo_variables(two, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
    assert asked == []
    assert gloo_variables(two, {}) == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert asked == ["a", environment.OUTSIDE]  # where its own name is loopback, the way out
