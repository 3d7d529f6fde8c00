"""What a rank uses of a host that it shares with other ranks: its CPUs, and its part of the memory.

Every rank computes the division of the whole machine and takes its own part of it, so nobody has to talk. It comes out
the same for all because all put in the same: that is why GPU nodes are those of all local ranks, not of this one.

CPUs are dealt out in cores: hyper-threads of one core compete for it and stay with one rank. The slowest rank decides
how long a step takes, so parts are as equal as they can be; where GPUs sit comes after that.
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

_MAX_PASSES: Final = 4  # over the threads of a process, while new ones appear
Core = tuple[int, ...]  # the CPUs of one core: its hyper-threads


@dataclass(frozen=True)
class HostShare:
    """The CPUs this rank may run on, the threads its pool should have, and a line that says why."""

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
    """Bind this process to its share of the CPUs, and say how many threads its pool should have.

    Call it early in every rank: before large host buffers are first written, since memory comes from the NUMA node of
    the thread that does that. Threads that exist already, a pool's among them, get the new mask as well, unless they
    were given one of their own; threads made later inherit that of the thread that makes them.

    `gpu_nodes` has the NUMA node of each local rank's GPU (`gpu_node_of`), the same list in every rank; leave it out
    where a rank knows only its own. Nothing is bound for one rank alone, where TWINFLOW_THREADS is set, where somebody
    has bound the process before, and where there are fewer CPUs than ranks. A second call binds nothing more.
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
        return left(f"{num_local} ranks share, for this system binds no process")
    if is_bound(before, root):
        return left("bound already")
    if num_local > len(mask):
        return left(f"{num_local} ranks share too few")
    cores = cores_of(local_rank, num_local, mask, read_nodes(root), gpu_nodes, read_siblings(root))
    try:
        bind_threads(cores, before)
    except OSError as error:
        return left(f"{num_local} ranks share, for the system refuses to bind them ({error.strerror})")
    number = limit_threads(len(cores), quota, num_local)
    return HostShare(cores, number, f"rank {local_rank} of {num_local}: CPUs {format_cpus(cores)} of {len(mask)}")


def bind_threads(cores: Collection[int], before: Collection[int]) -> None:
    """Let all threads of this process that may run on the CPUs `before` run on `cores` from now on.

    Linux has a mask for each thread. One that was narrowed on purpose is not `before`, and stays.
    """
    os.sched_setaffinity(0, cores)  # first this thread's: an OSError where nothing may be bound
    for _ in range(_MAX_PASSES):  # a thread that was not reached yet may have started another meanwhile
        moved = [number for number in _thread_numbers() if _move(number, cores, before)]
        if not moved:
            return


def _thread_numbers() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []


def _move(thread: int, cores: Collection[int], before: Collection[int]) -> bool:
    with suppress(OSError):  # it has ended
        if os.sched_getaffinity(thread) == set(before) != set(cores):
            os.sched_setaffinity(thread, cores)
            return True
    return False


def share_of_memory(free_bytes: int, num_local: int) -> int:
    """One rank's part of the host memory that is free; 0 where that is not known.

    Fair only when all ranks look at the same moment, before any of them takes its part: behind a barrier.
    """
    _check_rank(0, num_local)
    return max(1, free_bytes // num_local) if free_bytes > 0 else 0


def _check_rank(local_rank: int, num_local: int, gpu_nodes: Sequence[int | None] = ()) -> None:
    if num_local < 1:
        raise invalid_value("num_local", num_local, "a whole number >= 1")
    if not 0 <= local_rank < num_local:
        raise invalid_value("local_rank", local_rank, f"0 to {num_local - 1}")
    if gpu_nodes and len(gpu_nodes) != num_local:
        raise invalid_value("gpu_nodes", list(gpu_nodes), f"one for each of {num_local} local ranks, or none at all")


# Who gets which CPUs.


def cores_of(
    local_rank: int,
    num_local: int,
    allowed: Collection[int],
    nodes: Mapping[int, Sequence[int]],
    gpu_nodes: Sequence[int | None] = (),
    siblings: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """The CPUs of one rank, of those that are `allowed`. All ranks put in the same, and no CPU is used twice.

    With at least as many ranks as NUMA nodes each rank's CPUs are of one node, that of its GPU where the node has a
    seat left. With fewer, a rank spans nodes and begins with its GPU's. With fewer CPUs than ranks all use all.
    """
    _check_rank(local_rank, num_local, gpu_nodes)
    cpus = sorted(set(allowed))
    if num_local > len(cpus):
        return tuple(cpus)
    cores = list(_cores(cpus, siblings))
    if num_local > len(cores):
        cores = [(cpu,) for core in cores for cpu in core]  # hyper-threads have to part
    rooms = _by_node(cores, nodes)
    wanted = list(gpu_nodes) or [None] * num_local
    parts = _within_nodes(rooms, wanted) if num_local >= len(rooms) else _across_nodes(rooms, wanted)
    return tuple(sorted(cpu for core in parts[local_rank] for cpu in core))


def _cores(cpus: Sequence[int], siblings: Sequence[Sequence[int]]) -> Iterator[Core]:
    """The CPUs by core, in the order of their first; one that is in no list of siblings is a core."""
    core_of = {cpu: tuple(sorted(group)) for group in siblings for cpu in group}
    found: dict[Core, list[int]] = {}
    for cpu in cpus:
        found.setdefault(core_of.get(cpu, (cpu,)), []).append(cpu)
    return (tuple(core) for core in found.values())


def _by_node(cores: Sequence[Core], nodes: Mapping[int, Sequence[int]]) -> dict[int, list[Core]]:
    """The cores of each node that has some; those of no node are counted to the first."""
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
    """Each rank's cores, of one node."""
    seats = _seats({node: len(cores) for node, cores in rooms.items()}, wanted)
    homes = _homes(seats, wanted)
    parts = {node: iter(_even(cores, seats[node])) for node, cores in rooms.items()}
    return [next(parts[home]) for home in homes]


def _seats(sizes: Mapping[int, int], wanted: Sequence[int | None]) -> dict[int, int]:
    """Ranks of each node, at least one: the next goes where most is left for each, so the poorest has the most it can.

    Between equals it goes where more GPUs wait for a rank. A node never has more ranks than cores, as long as there are
    as many cores as ranks.
    """
    seats = dict.fromkeys(sizes, 1)
    for _ in range(len(wanted) - len(sizes)):
        claims = {n: (size / (seats[n] + 1), wanted.count(n) - seats[n], -n) for n, size in sizes.items()}
        seats[max(claims, key=claims.__getitem__)] += 1
    return seats


def _homes(seats: Mapping[int, int], wanted: Sequence[int | None]) -> list[int]:
    """The node of each rank: the one it wants while that has seats, and the next free one for all others."""
    free = [node for node in seats for _ in range(seats[node])]
    homes: list[int | None] = []
    for node in wanted:
        homes.append(node if node in free else None)
        if node in free:
            free.remove(node)
    rest = iter(free)
    return [home if home is not None else next(rest) for home in homes]


def _across_nodes(rooms: Mapping[int, Sequence[Core]], wanted: Sequence[int | None]) -> list[Sequence[Core]]:
    """Each rank's cores where there are more nodes than ranks: first of its GPU's node, then of what nobody has."""
    left = {node: list(cores) for node, cores in rooms.items()}
    all_cores = [core for cores in rooms.values() for core in cores]
    sizes = [len(part) for part in _even(all_cores, len(wanted))]
    parts = [_take(left[node], size) if node in left else [] for node, size in zip(wanted, sizes, strict=True)]
    for part, size in zip(parts, sizes, strict=True):
        for cores in left.values():
            part += _take(cores, size - len(part))
    return list(parts)


def _take(cores: list[Core], count: int) -> list[Core]:
    """The first cores of a list, which then has them no more."""
    taken = cores[:count]
    del cores[:count]
    return taken


def _even(cores: Sequence[Core], num_parts: int) -> list[Sequence[Core]]:
    """Neighbours in parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(cores), num_parts)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(num_parts)]
    return [cores[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# What the machine looks like.


def read_nodes(root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node; a node of memory alone has none. Empty where the system tells nothing."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(folder.name[4:]): tuple(sorted(parse_cpus(read_text(folder / "cpulist")))) for folder in folders}
    return dict(sorted(found.items()))


def read_siblings(root: Path = Path("/")) -> tuple[Core, ...]:
    """The CPUs of each core; a CPU that is offline has no entry."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    found = {tuple(sorted(parse_cpus(read_text(file)))) for file in files}
    return tuple(sorted(core for core in found if core))


def gpu_node_of(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a GPU hangs on; None where the system does not tell. `pci_bus_id`: like 0000:3B:00.0."""
    match = re.fullmatch(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", pci_bus_id.lower())
    if match is None:
        raise invalid_value("pci_bus_id", pci_bus_id, "domain:bus:device.function, like 0000:3b:00.0")
    name = f"{int(match[1], 16):04x}{match[2]}"  # the driver's tools write eight digits before the first colon
    node = read_text(root / "sys/bus/pci/devices" / name / "numa_node")
    return int(node) if node.isdigit() else None  # -1: not known


def format_cpus(cpus: Collection[int]) -> str:
    """CPUs as the kernel lists them, the other way around: `0-3,8`."""
    runs = groupby(enumerate(sorted(cpus)), key=lambda pair: pair[1] - pair[0])
    lists = ([cpu for _, cpu in run] for _, run in runs)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in lists)
