# SPDX-License-Identifier: Apache-2.0
"""Two hosts made of network namespaces, under `twinflow launch`: they train as one process does, send what the formulas
say, and do not outlive each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from netns_support import NetHost, two_hosts, why_not
from network_cases import CASES, Row, measure, order_of
from two_hosts_cases import SCRIPT, Launch, launched
from zero_cases import config_of, train

pytestmark = pytest.mark.timeout(900)  # five processes that import torch, on a machine that may be busy
LIMIT_S = 30.0  # for one host to end after the other
SAVED_S = 200.0  # for a start and some steps, on a machine that is busy with other tests
NUM_STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")


@cache
def losses_alone(parts: int) -> list[float]:
    found: list[float] = train(0, 1, config_of(0, {}, parts, 1))["losses"]
    return found


def training(world: int) -> dict[str, Any]:
    """Every stage, for ranks of zero_cases."""
    return {"configs": {f"{s}-{a}": config_of(s, {"ratio": 0.5}, a, world) for s, a in CASES}}


def check_training(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]:
        for rank in ranks:
            assert rank[name]["losses"] == pytest.approx(losses_alone(int(name[2:])), rel=1e-5), name
            assert rank[name]["digests"] == ranks[0][name]["digests"], name


def check_bytes(rows: list[Row]) -> None:
    for row in rows:
        low = -0.03 if row.stage == 3 else 0.0  # the formula gathers twice what belongs to no block: 4% of the weights
        assert low < row.payload_excess < 0.03, row
        assert row.payload_excess < row.wire_excess < 0.03, row  # headers of frames of 9,000 bytes included


def going_on(stage: int = 2, pause_s: float = 0.0) -> dict[str, Any]:
    return {"stage": stage, "num_steps": NUM_STEPS, "pause_s": pause_s}


def saved(launch: Launch, step: int, rank: int = 0) -> None:
    """Wait for a checkpoint of this step or a later one."""
    deadline_s = time.monotonic() + SAVED_S
    path = launch.folder / f"rank{rank}.saved"
    while not (path.exists() and int(path.read_text()) >= step):
        assert launch.process.poll() is None, launch.output()
        assert time.monotonic() < deadline_s, (launch.folder / "output").read_text()
        time.sleep(0.02)


@dataclass
class Story:
    """One launch: what its ranks found, and how it ended."""

    trained: list[Any]
    rows: list[Row]
    num_killed: int
    ended_after_s: float
    left: int
    exit_code: int
    output: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Train, count, and then one host dies: in one launch, because starts take longest."""
    counting = order_of(2)
    order = {"train": training(2), "count": counting, "resume": {**going_on(pause_s=0.2), "num_steps": 10_000}}
    with two_hosts() as hosts, launched(tmp_path_factory.mktemp("hosts"), hosts, order) as launch:
        trained = launch.found("train", 2)
        rows = measure(launch, hosts, counting, 2)
        saved(launch, 2)
        killed = hosts[1].kill_all()
        start_s = time.monotonic()
        output = launch.output(60)
        ended_s = time.monotonic() - start_s
        while hosts[0].pids() and time.monotonic() - start_s < LIMIT_S:
            time.sleep(0.1)
        return Story(trained, rows, killed, ended_s, len(hosts[0].pids()), launch.process.returncode, output)


@pytest.mark.matrix
def test_they_train_as_one_process(story: Story) -> None:
    assert len(story.trained[0]) == len(CASES)
    check_training(story.trained)


@pytest.mark.matrix
def test_they_send_what_the_formulas_say(story: Story) -> None:
    assert [(row.stage, row.accumulation) for row in story.rows] == CASES
    check_bytes(story.rows)


@pytest.mark.matrix
def test_one_host_s_death_ends_the_other(story: Story) -> None:
    assert story.num_killed >= 3  # torchrun, the worker and the rank
    assert story.ended_after_s < LIMIT_S
    assert story.left == 0
    assert story.exit_code == 255
    assert "error: ssh for 10.77.0.2 ended with exit code 255, and no rank gave a reason" in story.output


@contextmanager
def one(folder: Path, order: Mapping[str, Any], *options: str, slots: int = 1) -> Iterator[tuple[Launch, Any]]:
    with two_hosts() as hosts, launched(folder, hosts, order, slots, options) as launch:
        yield launch, hosts


@pytest.mark.matrix
def test_two_ranks_on_each_host(tmp_path: Path) -> None:
    counting = order_of(4, recompute=True, cases=[(0, 1), (1, 1), (2, 1), (2, 4), (3, 1)])
    with one(tmp_path, {"train": training(4), "count": counting}, slots=2) as (launch, hosts):
        check_training(launch.found("train", 4))
        check_bytes(measure(launch, hosts, counting, 4))
        assert launch.output() is not None
        assert launch.process.returncode == 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ranks find that nobody killed."""
    with one(tmp_path_factory.mktemp("straight"), {"resume": going_on()}) as (launch, _):
        found = launch.found("resume", 2)
        launch.output()
        assert launch.process.returncode == 0
    assert [rank["began"] for rank in found] == [0, 0]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("host", [0, 1])
def test_after_a_host_s_death_all_start_again(tmp_path: Path, straight: list[Any], host: int) -> None:
    with one(tmp_path, {"resume": going_on(pause_s=1.0)}, "--max_restarts", "1") as (launch, hosts):
        saved(launch, 2, rank=1 - host)
        hosts[host].kill_all()
        found = launch.found("resume", 2)
        assert "restart 1 of 1" in launch.output()
        assert launch.process.returncode == 0
    assert [rank["weights"] for rank in found] == [rank["weights"] for rank in straight]
    assert found[0]["began"] == found[1]["began"] >= 2
    assert [rank["attempt"] for rank in found] == ["1", "1"]


@pytest.mark.matrix
def test_one_rank_s_death_is_named(tmp_path: Path) -> None:
    order = {"resume": {**going_on(pause_s=0.2), "num_steps": 10_000}}
    with one(tmp_path, order) as (launch, hosts):
        saved(launch, 2)
        ranks = [pid for pid in hosts[1].pids() if _words(pid)[1:3] == ["-u", str(SCRIPT)]]
        assert len(ranks) == 1
        start_s = time.monotonic()
        hosts[1].run("kill", "-9", str(ranks[0]))
        output = launch.output(60)
        assert time.monotonic() - start_s < LIMIT_S
        assert launch.process.returncode == 137
    assert "error: rank 1 on 10.77.0.2 failed first: killed by SIGKILL (exit code 137)" in output


@pytest.mark.matrix
@pytest.mark.parametrize("host", [0, 1])
def test_a_network_that_is_gone_ends_both(tmp_path: Path, host: int) -> None:
    """No packet tells of it: only that signs of life stop."""
    order = {"resume": {**going_on(pause_s=0.2), "num_steps": 10_000}}
    with one(tmp_path, order) as (launch, hosts):
        saved(launch, 2)
        start_s = time.monotonic()
        hosts[host].run("ip", "link", "set", "tf0", "down")
        output = launch.output(90)
        assert time.monotonic() - start_s < LIMIT_S + 15  # 20 s without a sign, then an end in order
        assert launch.process.returncode == 1
    assert "no heartbeat for" in output or "does not respond" in output
    assert "error: rank" in output


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_hosts_are_namespaces_of_their_own() -> None:
    with two_hosts() as hosts:
        before = hosts[0].sent()
        assert isinstance(hosts[0], NetHost)
        assert hosts[0].run("hostname") != hosts[1].run("hostname")
        code = "import socket; s = socket.socket(2, 2); s.sendto(bytes(5000), ('10.77.0.2', 9))"
        hosts[0].run("python3", "-c", code)
        assert (hosts[0].sent() - before).bytes >= 5000 + 42
