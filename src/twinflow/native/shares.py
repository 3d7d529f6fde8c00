# SPDX-License-Identifier: Apache-2.0
"""The share of a rank in a host with several ranks: its CPUs and its part of the memory.

Every rank computes how the whole machine is divided between ranks, and uses its own part. This needs no communication:
all ranks get the same result, because they have the same inputs. Therefore `gpu_nodes` lists the NUMA nodes of the GPUs
of all local ranks.

With at least as many cores as ranks, the hyper-threads of a core belong to one rank. The slowest rank determines the
time of a step, so parts are as equal as the nodes allow, even if a rank then gets CPUs far from its GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from twinflow.errors import invalid_value
from twinflow.native.cgroup import cgroup_cpus, read_text
from twinflow.native.threads import check_threads, count_own_cpus, is_bound, limit_threads, own_cpus, parse_cpus

_MAX_PASSES: Final = 4  # passes over the threads of a process, because new threads may start meanwhile
Core = tuple[int, ...]  # the CPUs of one core, which are its hyper-threads


@dataclass(frozen=True)
class HostShare:
    """The CPUs of this rank, the number of threads for its pool, and a line of text that explains both."""

    cores: tuple[int, ...]
    num_threads: int
    note: str


def share_host(
    local_rank: int,
    num_local: int,
    gpu_nodes: Sequence[int | None] = (),
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> HostShare:
    """Bind this process to its share of the CPUs, and return this share with the number of threads for its pool.

    Call it in every rank before large host buffers are written for the first time, because memory is allocated on the
    NUMA node of the thread that first writes it. Existing threads get the new mask too, unless they have a mask of
    their own. Threads that are created later inherit the mask of their creator.

    `gpu_nodes` lists the NUMA node of each local rank's GPU (`gpu_node_of`). It must be the same on all ranks; omit it
    if a rank knows only its own node. Nothing is bound if there is one rank, if TWINFLOW_THREADS is set, if the process
    is bound already, if there are fewer CPUs than ranks, or if the system does not bind. A second call changes nothing.
    """
    _check_rank(local_rank, num_local, gpu_nodes)
    before, quota = own_cpus(), cgroup_cpus(root)
    mask = tuple(sorted(before))
    given = environ.get("TWINFLOW_THREADS")
    if given:
        number = check_threads(given, "TWINFLOW_THREADS")
        return HostShare(mask, number, f"TWINFLOW_THREADS: {number} threads on CPUs {format_cpus(mask)}")

    def left(why: str) -> HostShare:
        number = limit_threads(count_own_cpus(before, num_local, root), quota, num_local)
        return HostShare(mask, number, f"{why}: CPUs {format_cpus(mask)}")

    if num_local == 1:
        return left("one rank")
    if not hasattr(os, "sched_setaffinity"):
        return left(f"{num_local} ranks share all CPUs, because this system cannot bind processes")
    if is_bound(before, root):
        return left("the process is bound already")
    if num_local > len(mask):
        return left(f"{num_local} ranks share {len(mask)} CPUs, too few to bind each rank to its own")
    cores = cores_of(local_rank, num_local, mask, read_nodes(root), gpu_nodes, read_siblings(root))
    try:
        bind_threads(cores, before)
    except OSError as error:
        return left(f"{num_local} ranks share all CPUs, because the system refuses to bind them ({error.strerror})")
    number = limit_threads(len(cores), quota, num_local)
    return HostShare(cores, number, f"rank {local_rank} of {num_local}: CPUs {format_cpus(cores)} of {len(mask)}")


def bind_threads(cores: Collection[int], before: Collection[int]) -> None:
    """Bind all threads of this process whose mask is `before` to the CPUs `cores`.

    On Linux each thread has its own mask. A thread with another mask was bound on purpose, and is not changed. Raises
    OSError if the system does not allow binding.
    """
    os.sched_setaffinity(0, cores)  # this thread first, to raise before any other thread is bound
    for _ in range(_MAX_PASSES):  # a thread that is not bound yet may have started another one
        num_moved = 0
        for task in Path("/proc/self/task").glob("*"):
            with suppress(OSError):  # the thread may have ended
                if os.sched_getaffinity(int(task.name)) == set(before) != set(cores):
                    os.sched_setaffinity(int(task.name), cores)
                    num_moved += 1
        if not num_moved:
            return


def share_of_memory(free_bytes: int, num_local: int) -> int:
    """One rank's part of the free host memory. 0 means that it is not known, as in `free_bytes`.

    All ranks must measure `free_bytes` before any of them allocates its part: call this after a barrier.
    """
    _check_rank(0, num_local)
    return max(1, free_bytes // num_local) if free_bytes > 0 else 0


def _check_rank(local_rank: int, num_local: int, gpu_nodes: Sequence[int | None] = ()) -> None:
    if num_local < 1:
        raise invalid_value("num_local", num_local, "a whole number >= 1")
    if not 0 <= local_rank < num_local:
        raise invalid_value("local_rank", local_rank, f"a whole number from 0 to {num_local - 1}")
    if gpu_nodes and len(gpu_nodes) != num_local:
        expected = f"a list of {num_local} NUMA nodes, one for the GPU of each local rank, or an empty list"
        raise invalid_value("gpu_nodes", list(gpu_nodes), expected)


# Division of the CPUs.


def cores_of(
    local_rank: int,
    num_local: int,
    allowed: Collection[int],
    nodes: Mapping[int, Sequence[int]],
    gpu_nodes: Sequence[int | None] = (),
    siblings: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """The CPUs of one rank, out of `allowed`. All ranks must pass the same arguments except `local_rank`.

    If there are fewer CPUs than ranks, every rank gets all CPUs. Otherwise no CPU belongs to two ranks. With at least
    as many ranks as NUMA nodes, the CPUs of a rank are on one node: its GPU's, unless other ranks fill that node.
    With fewer ranks than nodes, a rank may get CPUs of several nodes, first those of its GPU's node.
    """
    _check_rank(local_rank, num_local, gpu_nodes)
    cpus = sorted(set(allowed))
    if num_local > len(cpus):
        return tuple(cpus)
    cores = list(_cores(cpus, siblings))
    if num_local > len(cores):
        # There are fewer cores than ranks, so the hyper-threads of one core go to different ranks.
        cores = [(cpu,) for core in cores for cpu in core]
    rooms = _by_node(cores, nodes)
    wanted = list(gpu_nodes) or [None] * num_local
    parts = _within_nodes(rooms, wanted) if num_local >= len(rooms) else _across_nodes(rooms, wanted)
    return tuple(sorted(cpu for core in parts[local_rank] for cpu in core))


def _cores(cpus: Sequence[int], siblings: Sequence[Sequence[int]]) -> Iterator[Core]:
    """The CPUs grouped by core, in the order of the first CPU of each core. A CPU without siblings is a core."""
    core_of = {cpu: tuple(sorted(group)) for group in siblings for cpu in group}
    found: dict[Core, list[int]] = {}
    for cpu in cpus:
        found.setdefault(core_of.get(cpu, (cpu,)), []).append(cpu)
    return (tuple(core) for core in found.values())


def _by_node(cores: Sequence[Core], nodes: Mapping[int, Sequence[int]]) -> dict[int, list[Core]]:
    """The cores of each node that has cores. Cores without a node are added to the first node."""
    node_of: dict[int, int] = {}
    for node in sorted(nodes):
        for cpu in nodes[node]:
            node_of.setdefault(cpu, node)
    first = min((node_of[core[0]] for core in cores if core[0] in node_of), default=0)
    found: dict[int, list[Core]] = {}
    for core in cores:
        found.setdefault(node_of.get(core[0], first), []).append(core)
    return dict(sorted(found.items()))


def _within_nodes(rooms: Mapping[int, Sequence[Core]], wanted: Sequence[int | None]) -> list[Sequence[Core]]:
    """The cores of each rank. Those of one rank are all on one node."""
    seats = _seats({node: len(cores) for node, cores in rooms.items()}, wanted)
    homes = _homes(seats, wanted)
    parts = {node: iter(_even(cores, seats[node])) for node, cores in rooms.items()}
    return [next(parts[home]) for home in homes]


def _seats(sizes: Mapping[int, int], wanted: Sequence[int | None]) -> dict[int, int]:
    """Number of ranks on each node, at least one. Each further rank goes to the node that then has the most cores per
    rank.

    This maximises the smallest share. Among equal nodes, the rank goes to the node with more GPUs that have no rank
    yet. If there are at least as many cores as ranks, no node has more ranks than cores.
    """
    seats = dict.fromkeys(sizes, 1)
    for _ in range(len(wanted) - len(sizes)):
        claims = {n: (size / (seats[n] + 1), wanted.count(n) - seats[n], -n) for n, size in sizes.items()}
        seats[max(claims, key=claims.__getitem__)] += 1
    return seats


def _homes(seats: Mapping[int, int], wanted: Sequence[int | None]) -> list[int]:
    """The node of each rank: that of its GPU while it has free `seats`, otherwise one with free seats at the end."""
    free = [node for node in seats for _ in range(seats[node])]
    homes: list[int | None] = []
    for node in wanted:
        homes.append(node if node in free else None)
        if node in free:
            free.remove(node)
    rest = iter(free)
    return [home if home is not None else next(rest) for home in homes]


def _across_nodes(rooms: Mapping[int, Sequence[Core]], wanted: Sequence[int | None]) -> list[Sequence[Core]]:
    """The cores of each rank if there are more nodes than ranks: first those of its GPU's node, then remaining ones."""
    left = {node: list(cores) for node, cores in rooms.items()}
    all_cores = [core for cores in rooms.values() for core in cores]
    sizes = [len(part) for part in _even(all_cores, len(wanted))]
    parts = [_take(left[node], size) if node in left else [] for node, size in zip(wanted, sizes, strict=True)]
    for part, size in zip(parts, sizes, strict=True):
        for cores in left.values():
            part += _take(cores, size - len(part))
    return list(parts)


def _take(cores: list[Core], count: int) -> list[Core]:
    """Remove the first `count` cores from a list and return them."""
    taken = cores[:count]
    del cores[:count]
    return taken


def _even(cores: Sequence[Core], num_parts: int) -> list[Sequence[Core]]:
    """Divide `cores` into parts of adjacent cores. Sizes differ by at most one, and larger parts come first."""
    size, larger = divmod(len(cores), num_parts)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(num_parts)]
    return [cores[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# Topology of the machine.


def read_nodes(root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node. A node may have memory and no CPUs. Empty if the system does not report nodes."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(folder.name[4:]): tuple(sorted(parse_cpus(read_text(folder / "cpulist")))) for folder in folders}
    return dict(sorted(found.items()))


def read_siblings(root: Path = Path("/")) -> tuple[Core, ...]:
    """The CPUs of each core. CPUs that are offline are missing."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    found = {tuple(sorted(parse_cpus(read_text(file)))) for file in files}
    return tuple(sorted(core for core in found if core))


def gpu_node_of(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a GPU, or None if it is not known. `pci_bus_id`: for example 0000:3B:00.0."""
    match = re.fullmatch(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", pci_bus_id.lower())
    if match is None:
        raise invalid_value("pci_bus_id", pci_bus_id, "an address such as 0000:3b:00.0 (domain:bus:device.function)")
    name = f"{int(match[1], 16):04x}{match[2]}"  # the tools of the driver write eight digits before the first colon
    node = read_text(root / "sys/bus/pci/devices" / name / "numa_node")
    return int(node) if node.isdigit() else None  # -1: not known


def format_cpus(cpus: Collection[int]) -> str:
    """CPUs in the list format of the kernel, such as `0-3,8`. The inverse of `parse_cpus`."""
    runs = groupby(enumerate(sorted(cpus)), key=lambda pair: pair[1] - pair[0])
    lists = ([cpu for _, cpu in run] for _, run in runs)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in lists)
