# SPDX-License-Identifier: Apache-2.0
"""How ranks share a host: the division as arithmetic over made-up machines, and two real processes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fork_support import run_script

from twinflow import native
from twinflow.native import shares, threads
from twinflow.native.shares import (
    bind_threads,
    cores_of,
    format_cpus,
    gpu_node_of,
    read_nodes,
    read_siblings,
    share_host,
    share_of_memory,
)
from twinflow.native.threads import count_local_ranks, default_threads, group_cpus, is_bound, parse_cpus

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process")
SYSTEM = "sys/devices/system"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(root: Path, nodes: dict[int, str], siblings: Sequence[str] = ()) -> Path:
    """A tree of /sys with these CPUs in these nodes, and these lists of hyper-threads."""
    cpus = sorted(cpu for text in nodes.values() for cpu in parse_cpus(text))
    files: dict[str, object] = {f"{SYSTEM}/cpu/online": format_cpus(cpus), f"{SYSTEM}/cpu/isolated": ""}
    files |= {f"{SYSTEM}/node/node{node}/cpulist": text for node, text in nodes.items()}
    for text in siblings:
        for cpu in parse_cpus(text):
            files[f"{SYSTEM}/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    return write(root, files)


def divide(
    num_local: int, root: Path, allowed: str | None = None, gpu_nodes: Sequence[int | None] = ()
) -> list[tuple[int, ...]]:
    """Every rank's CPUs on a machine, each computed on its own as a rank does."""
    nodes = read_nodes(root)
    cpus = parse_cpus(allowed) if allowed is not None else [cpu for node in nodes.values() for cpu in node]
    return [cores_of(rank, num_local, cpus, nodes, gpu_nodes, read_siblings(root)) for rank in range(num_local)]


def lists(parts: Sequence[tuple[int, ...]]) -> list[str]:
    return [format_cpus(part) for part in parts]


# The division.


def test_one_node_is_cut_into_neighbours(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7"})
    assert lists(divide(1, root)) == ["0-7"]
    assert lists(divide(2, root)) == ["0-3", "4-7"]
    assert lists(divide(3, root)) == ["0-2", "3-5", "6-7"]
    assert lists(divide(8, root)) == [str(cpu) for cpu in range(8)]


def test_a_machine_that_tells_nothing_of_nodes(tmp_path: Path) -> None:
    assert read_nodes(tmp_path) == {}
    assert read_siblings(tmp_path) == ()
    assert lists(divide(2, tmp_path, "0-3")) == ["0-1", "2-3"]


def test_two_nodes_with_interleaved_hyper_threads(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, [f"{cpu},{cpu + 8}" for cpu in range(8)])
    assert lists(divide(2, root)) == ["0-3,8-11", "4-7,12-15"]
    assert lists(divide(4, root)) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert lists(divide(8, root)) == [f"{cpu},{cpu + 8}" for cpu in range(8)]
    assert sorted(cpu for part in divide(16, root) for cpu in part) == list(range(16))  # hyper-threads have to part


@pytest.mark.parametrize(
    ("gpu_nodes", "expected"),
    [
        ((), ["0-1", "2-3", "4-5", "6-7"]),
        ((None, None, None, None), ["0-1", "2-3", "4-5", "6-7"]),
        ((1, 1, 0, 0), ["4-5", "6-7", "0-1", "2-3"]),
        ((1, 0, 1, 0), ["4-5", "0-1", "6-7", "2-3"]),
        ((None, 1, None, None), ["0-1", "4-5", "2-3", "6-7"]),
        ((1, 1, 1, 1), ["4-5", "6-7", "0-1", "2-3"]),  # a node that no GPU is on is used too
        ((7, 7, 7, 7), ["0-1", "2-3", "4-5", "6-7"]),  # a node without CPUs
    ],
)
def test_ranks_go_to_the_node_of_their_gpu(
    tmp_path: Path, gpu_nodes: Sequence[int | None], expected: list[str]
) -> None:
    assert lists(divide(4, machine(tmp_path, {0: "0-3", 1: "4-7"}), gpu_nodes=gpu_nodes)) == expected


def test_eight_gpus_on_four_of_eight_nodes(tmp_path: Path) -> None:
    nodes = {node: f"{4 * node}-{4 * node + 3}" for node in range(8)}
    parts = divide(8, machine(tmp_path, nodes), gpu_nodes=(3, 3, 1, 1, 7, 7, 5, 5))
    homes = [part[0] // 4 for part in parts]
    assert [homes[rank] for rank in (0, 2, 4, 6)] == [3, 1, 7, 5]
    assert {homes[1], homes[3]} == {0, 2}  # still on the socket of nodes 0 to 3
    assert {homes[5], homes[7]} == {4, 6}


def test_three_ranks_on_two_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3", 1: "4-7"})
    assert lists(divide(3, root)) == ["0-1", "2-3", "4-7"]
    assert lists(divide(3, root, gpu_nodes=(0, 1, 1))) == ["0-3", "4-5", "6-7"]  # two GPUs on node 1: two ranks


def test_four_nodes_of_unequal_size(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-1", 1: "2-7", 2: "8-9", 3: "10-15"})
    assert lists(divide(4, root)) == ["0-1", "2-7", "8-9", "10-15"]
    assert lists(divide(8, root)) == ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"]
    assert lists(divide(2, root)) == ["0-7", "8-15"]


def test_the_poorest_rank_has_as_much_as_it_can(tmp_path: Path) -> None:
    # Two ranks for the smaller node would leave one with two CPUs.
    assert lists(divide(4, machine(tmp_path, {0: "0-4", 1: "5-13"}))) == ["0-4", "5-7", "8-10", "11-13"]


def test_fewer_ranks_than_nodes_begin_with_their_gpus_node(tmp_path: Path) -> None:
    root = machine(tmp_path, {node: f"{4 * node}-{4 * node + 3}" for node in range(4)})
    assert lists(divide(2, root)) == ["0-7", "8-15"]
    assert lists(divide(2, root, gpu_nodes=(3, 1))) == ["0-3,12-15", "4-11"]
    assert lists(divide(2, root, gpu_nodes=(None, 0))) == ["4-11", "0-3,12-15"]
    assert lists(divide(3, root)) == ["0-5", "6-10", "11-15"]


def test_only_what_is_allowed_is_divided(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3", 1: "4-7"})
    assert lists(divide(2, root, "2-5")) == ["2-3", "4-5"]
    assert lists(divide(2, root, "4-7")) == ["4-5", "6-7"]
    assert lists(divide(3, root, "3-7")) == ["3", "4-5", "6-7"]


def test_offline_cpus_and_nodes_of_memory_alone(tmp_path: Path) -> None:
    # CPUs 2 and 5 are offline: their siblings 6 and 1 are cores of one thread.
    root = machine(tmp_path, {0: "0-1,4", 1: "3,6-7", 2: ""}, ["0,4", "1", "6", "3,7"])
    assert read_nodes(root) == {0: (0, 1, 4), 1: (3, 6, 7), 2: ()}
    assert lists(divide(2, root, gpu_nodes=(2, 2))) == ["0-1,4", "3,6-7"]
    assert lists(divide(4, root)) == ["0,4", "1", "3,7", "6"]
    assert lists(divide(2, root, "0-7")) == ["0-2,4-5", "3,6-7"]  # a mask may name them all the same


def test_a_core_whose_sibling_is_not_allowed(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7"}, ["0,4", "1,5", "2,6", "3,7"])
    assert lists(divide(2, root, "0-5")) == ["0-1,4-5", "2-3"]  # by cores: 0 and 1 have two threads here, 2 and 3 one


def test_cpus_of_no_node_are_not_lost() -> None:
    parts = [cores_of(rank, 2, range(6), {1: (2, 3), 3: (4, 5)}) for rank in range(2)]
    assert lists(parts) == ["0-3", "4-5"]


def test_a_cpu_that_two_nodes_name_is_used_once() -> None:
    nodes = {0: range(4), 1: range(4)}
    assert lists([cores_of(rank, 2, range(4), nodes) for rank in range(2)]) == ["0-1", "2-3"]


def test_more_ranks_than_cpus_share_all(tmp_path: Path) -> None:
    assert lists(divide(3, machine(tmp_path, {0: "0", 1: "1"}))) == ["0-1"] * 3


def test_any_machine_is_divided_whole_and_fairly() -> None:
    draw = random.Random(7)
    for _ in range(300):
        num_threads, nodes, siblings, cpu = draw.choice([1, 2]), {}, [], 0
        for node in draw.sample(range(9), draw.randint(1, 5)):
            cores = [
                tuple(range(cpu + i * num_threads, cpu + (i + 1) * num_threads)) for i in range(draw.randint(1, 9))
            ]
            nodes[node] = [one for core in cores for one in core]
            siblings, cpu = siblings + cores, cpu + len(nodes[node])
        num_local = draw.randint(1, 12)
        gpu_nodes = [draw.choice([None, *range(9)]) for _ in range(num_local)]
        parts = [cores_of(rank, num_local, range(cpu), nodes, gpu_nodes, siblings) for rank in range(num_local)]
        if num_local > cpu:
            assert parts == [tuple(range(cpu))] * num_local
            continue
        assert sorted(one for part in parts for one in part) == list(range(cpu))
        assert all(parts)
        if num_local <= len(siblings):
            assert all(set(core) <= set(part) or not set(core) & set(part) for core, part in product(siblings, parts))
        homes = [{node for node in nodes if set(nodes[node]) & set(part)} for part in parts]
        sizes = [len(part) for part in parts]
        if num_local >= len(nodes):
            assert all(len(home) == 1 for home in homes)
        else:
            assert max(sizes) - min(sizes) <= num_threads
        if num_local <= len(siblings) and len(nodes) <= num_local <= 6:
            assert min(sizes) // num_threads == best_poorest([len(n) // num_threads for n in nodes.values()], num_local)


def best_poorest(sizes: list[int], num_ranks: int) -> int:
    """The most that the poorest rank can have, over all ways to give each node some ranks."""
    ways = product(*(range(1, num_ranks + 1) for _ in sizes))
    return max(
        min(size // ranks for size, ranks in zip(sizes, way, strict=True)) for way in ways if sum(way) == num_ranks
    )


def test_memory_is_cut_into_equal_parts() -> None:
    assert [share_of_memory(1000, n) for n in (1, 2, 3)] == [1000, 500, 333]
    assert share_of_memory(0, 4) == 0  # not known
    assert share_of_memory(3, 4) == 1  # known, and next to nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "num_local is 0"),
        ((2, 2), "local_rank is 2, but must be a whole number from 0 to 1"),
        ((-1, 2), "local_rank is -1"),
        ((0, 2, [1]), r"gpu_nodes is \[1\], but must be a list of 2 NUMA nodes"),
    ],
)
def test_ranks_that_cannot_be(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share_host(*arguments)
    with pytest.raises(ValueError, match=message):
        cores_of(*arguments[:2], range(4), {}, *arguments[2:])


# What the machine says.


def test_lists_of_cpus() -> None:
    for text, cpus in (("", []), ("5", [5]), ("0-3,8", [0, 1, 2, 3, 8]), ("0,2-3,5", [0, 2, 3, 5])):
        assert sorted(parse_cpus(text)) == cpus
        assert format_cpus(cpus) == text
    assert parse_cpus("\n") == frozenset()


def test_siblings(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3"}, ["0,2", "1,3"])
    assert read_siblings(root) == ((0, 2), (1, 3))
    write(root, {f"{SYSTEM}/cpu/cpu3/topology/thread_siblings_list": ""})
    assert read_siblings(root) == ((0, 2), (1, 3))


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("0", 0), ("-1", None), ("", None)])
def test_the_node_of_a_gpu(tmp_path: Path, text: str, node: int | None) -> None:
    write(tmp_path, {"sys/bus/pci/devices/0000:3b:00.0/numa_node": text})
    write(tmp_path, {"sys/bus/pci/devices/0001:3b:00.0/numa_node": 7})
    for name in ("0000:3b:00.0", "0000:3B:00.0", "00000000:3B:00.0"):
        assert gpu_node_of(name, tmp_path) == node
    assert gpu_node_of("00000001:3B:00.0", tmp_path) == 7
    assert gpu_node_of("0000:af:00.0", tmp_path) is None


@pytest.mark.parametrize("name", ["", "3b:00.0", "0000:3b:00", "../../0000:3b:00.0", "GPU-1234"])
def test_what_is_no_bus_id(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="pci_bus_id is"):
        gpu_node_of(name, tmp_path)


def test_the_cpus_of_a_control_group(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7"})
    assert group_cpus(root) == frozenset(range(8))
    write(root, {"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/cpuset.cpus.effective": "0-5"})
    assert group_cpus(root) == frozenset(range(6))
    write(root, {"sys/fs/cgroup/job/step/cpuset.cpus.effective": "2-5", "sys/fs/cgroup/job/step/cpuset.cpus": ""})
    assert group_cpus(root) == frozenset(range(2, 6))
    write(root, {f"{SYSTEM}/cpu/isolated": "5"})
    assert group_cpus(root) == frozenset(range(2, 5))
    write(root, {"proc/self/cgroup": "4:cpuset:/job", "sys/fs/cgroup/cpuset/job/cpuset.cpus": "1-3"})
    assert group_cpus(root) == frozenset(range(1, 4))


# Whether somebody has divided the CPUs already, and what that makes of the pool.


def pretend(monkeypatch: pytest.MonkeyPatch, own: str, launcher: str | None, quota: int | None = None) -> None:
    """A process with this mask, started by one with that; None: by one that cannot be seen."""
    masks = {0: parse_cpus(own), 77: parse_cpus(launcher or "")}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(masks[process]), raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 77 if launcher is not None else 0)
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: quota)
    monkeypatch.setattr(shares, "cgroup_cpus", lambda root: quota)


@pytest.mark.parametrize(
    ("own", "launcher", "group", "bound"),
    [
        ("0-7", "0-7", "0-7", False),  # torchrun
        ("0-3", "0-3", "0-7", False),  # taskset torchrun: all ranks share 0-3
        ("0-3", "0-7", "0-3", False),  # a job step with a control group, its tasks not bound
        ("0-3", "0-7", "0-7", True),  # mpirun or srun binds
        ("0-1", "0-7", "0-3", True),  # srun binds, in a control group
        ("0-1", "0-3", "0-7", True),  # mpirun binds, itself under taskset
        ("0-3", None, "0-7", True),
        ("0-7", None, "0-7", False),
    ],
)
def test_who_is_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, launcher: str | None, group: str, bound: bool
) -> None:
    root = machine(tmp_path, {0: "0-7"})
    write(root, {"sys/fs/cgroup/cpuset.cpus.effective": group})
    pretend(monkeypatch, own, launcher)
    assert is_bound(parse_cpus(own), root) == bound


def test_a_launcher_that_is_gone_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: int) -> set[int]:
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_getaffinity", gone, raising=False)
    assert threads.launcher_cpus() is None


def torchrun(num_local: int, local_rank: int = 0) -> dict[str, str]:
    sizes = {"WORLD_SIZE": num_local, "LOCAL_WORLD_SIZE": num_local, "RANK": local_rank, "LOCAL_RANK": local_rank}
    return {name: str(value) for name, value in sizes.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


MPI = {"RANK": 1, "LOCAL_RANK": 1, "SIZE": 4, "LOCAL_SIZE": 4}


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 1),
        (torchrun(1), 1),
        (torchrun(4), 4),
        (torchrun(8) | {"LOCAL_WORLD_SIZE": "2"}, 2),  # four machines
        ({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in MPI.items()}, 4),
        ({k: v for k, v in torchrun(4).items() if not k.startswith("LOCAL_")}, 1),  # not known before the ranks meet
        ({"WORLD_SIZE": "4"}, 1),  # half of a launcher's variables
        (torchrun(4) | {"RANK": "x"}, 1),
    ],
)
def test_local_ranks_are_those_a_launcher_names(environ: dict[str, str], count: int) -> None:
    assert count_local_ranks(environ) == count


@pytest.mark.parametrize(
    ("own", "launcher", "quota", "num_local", "expected"),
    [
        ("0-15", "0-15", None, 1, 16),
        ("0-15", "0-15", None, 4, 4),
        ("0-14", "0-14", None, 4, 3),
        ("0-15", "0-15", None, 16, 1),
        ("0-15", "0-15", None, 100, 1),
        ("0-15", "0-15", 8, 4, 2),
        ("0-15", "0-15", 3, 4, 1),
        ("0-15", "0-15", 8, 1, 8),
        ("0-3", "0-15", None, 4, 4),  # its own CPUs already
        ("0-1", "0-15", None, 4, 2),
        ("0-7", "0-15", None, 4, 4),  # bound to a node together with another rank
        ("0-3", "0-15", 8, 4, 2),  # the quota is everybody's, bound or not
        ("0-3", "0-15", None, 1, 4),
    ],
)
def test_the_pool_is_a_ranks_part(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    launcher: str,
    quota: int | None,
    num_local: int,
    expected: int,
) -> None:
    pretend(monkeypatch, own, launcher, quota)
    monkeypatch.setattr(threads, "group_cpus", lambda root: frozenset(range(16)))
    environ = torchrun(num_local)
    assert default_threads(environ) == expected
    assert default_threads(environ | {"TWINFLOW_THREADS": "9"}) == 9


# The process itself.


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the process is bound to, which it is not."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(shares, "bind_threads", lambda cores, before: calls.append(tuple(cores)))
    return calls


def test_a_rank_is_bound_to_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: list[tuple[int, ...]]
) -> None:
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, [f"{cpu},{cpu + 8}" for cpu in range(8)])
    pretend(monkeypatch, "0-15", "0-15")
    share = share_host(1, 4, (1, 1, 0, 0), {}, root)
    assert (format_cpus(share.cores), share.num_threads) == ("6-7,14-15", 4)
    assert share.note == "rank 1 of 4: CPUs 6-7,14-15 of 16"
    assert bound == [share.cores]
    pretend(monkeypatch, "0-15", "0-15", quota=12)
    assert share_host(1, 4, (), {}, root).num_threads == 3


def test_what_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: list[tuple[int, ...]]) -> None:
    root, all_cpus = machine(tmp_path, {0: "0-7"}), tuple(range(8))
    pretend(monkeypatch, "0-7", "0-7")
    share = share_host(0, 1, (), {}, root)
    assert (share.cores, share.num_threads, share.note) == (all_cpus, 8, "one rank: CPUs 0-7")
    share = share_host(0, 4, (), {"TWINFLOW_THREADS": "3"}, root)
    assert (share.cores, share.num_threads) == (all_cpus, 3)
    assert share.note == "TWINFLOW_THREADS: 3 threads on CPUs 0-7"
    share = share_host(0, 16, (), {}, root)
    assert (share.cores, share.num_threads) == (all_cpus, 1)
    with pytest.raises(ValueError, match="TWINFLOW_THREADS is 'many'"):
        share_host(0, 4, (), {"TWINFLOW_THREADS": "many"}, root)
    pretend(monkeypatch, "2-3", "0-7")
    share = share_host(0, 4, (), {}, root)
    assert (share.cores, share.num_threads, share.note) == ((2, 3), 2, "the process is bound already: CPUs 2-3")
    assert bound == []


def test_a_system_that_binds_nothing_divides_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_setaffinity", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    share = share_host(1, 3, (), {}, tmp_path)
    assert (share.cores, share.num_threads) == (tuple(range(8)), 2)
    assert default_threads(torchrun(3)) == 2


def test_a_system_that_refuses_divides_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int, cpus: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    pretend(monkeypatch, "0-7", "0-7")
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    share = share_host(1, 2, (), {}, machine(tmp_path, {0: "0-7"}))
    assert (share.cores, share.num_threads) == (tuple(range(8)), 4)
    assert "because the system refuses to bind them (Operation not permitted)" in share.note


def run_python(code: str, folder: Path, *arguments: str) -> list[Any]:
    """What a process of its own, that has torch but no pool yet, prints as JSON."""
    script = write(folder, {"script.py": code}) / "script.py"
    ended = run_script(script, folder, folder, *arguments)
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout)
    return found


RANK = """
import json, os, sys, threading
os.environ.pop("TWINFLOW_THREADS", None)
import torch
from twinflow import native
from twinflow.native.shares import share_host

def masks():
    return [sorted(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")]

def work():
    native.accumulate(torch.zeros(1 << 20), torch.ones(1 << 20))

rank, num_local = int(sys.argv[1]), int(sys.argv[2])
whole = sorted(os.sched_getaffinity(0))
asleep = threading.Event()
kept = threading.Thread(target=asleep.wait)
kept.start()
if rank == 0:  # a pool that is there already
    native.set_threads(3)
    work()
early = len(masks())
share = share_host(rank, num_local)
moved = masks()
native.set_threads(5)  # other threads, started afterwards
work()
late = masks()
again = share_host(rank, num_local)
print(json.dumps([whole, share.cores, share.num_threads, early, moved, late, again.cores, again.num_threads]))
asleep.set()
"""


@linux
@pytest.mark.skipif(not native.available(), reason="the native library is not installed")
def test_two_processes_share_this_machine(tmp_path: Path) -> None:
    """Neither needs the other: they run one after the other."""
    found = [run_python(RANK, tmp_path, str(rank), "2") for rank in range(2)]
    whole = found[0][0]
    assert whole == found[1][0] == sorted(os.sched_getaffinity(0))
    if len(whole) > 1:
        assert sorted(found[0][1] + found[1][1]) == whole
        assert all(cores for _, cores, *_ in found)
    for _, cores, num_threads, early, moved, late, again, again_threads in found:
        assert 1 <= num_threads <= len(cores)
        assert len(moved) >= early
        assert moved == [cores] * len(moved)  # threads that were there before, a pool's and a Python thread's
        assert len(late) >= 5
        assert late == [cores] * len(late)  # the new pool's
        assert (again, again_threads) == (cores, num_threads)
    assert found[0][3] >= 4  # the test saw a pool of three and the thread that sleeps


NARROWED = """
import json, os, threading
from twinflow.native.shares import bind_threads

whole = sorted(os.sched_getaffinity(0))
ready, asleep = threading.Event(), threading.Event()
own = []

def stay():
    os.sched_setaffinity(0, whole[-1:])
    ready.set()
    asleep.wait()
    own.extend(sorted(os.sched_getaffinity(0)))

kept = threading.Thread(target=stay)
kept.start()
ready.wait()
bind_threads(whole[:1], whole)
now = sorted(os.sched_getaffinity(0))
asleep.set()
kept.join()
print(json.dumps([whole, now, own]))
"""


@linux
@pytest.mark.skipif(len(threads.own_cpus()) < 2, reason="one CPU cannot be divided")
def test_a_thread_with_cpus_of_its_own_keeps_them(tmp_path: Path) -> None:
    whole, now, own = run_python(NARROWED, tmp_path)
    assert (now, own) == (whole[:1], whole[-1:])


@linux
def test_binding_to_what_a_process_has_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind_threads(before, before)
    assert os.sched_getaffinity(0) == before
