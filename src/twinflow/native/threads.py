"""How many threads the pool should have: what this process may use, not what the machine has.

Ranks of one machine divide its CPUs. A launcher such as torchrun leaves that to them: every rank may run on all CPUs,
and pools of that size would get in each other's way. Others (mpirun, srun) give each rank CPUs of its own, and nothing
is left to divide. Which of the two holds is seen from the affinity mask: see `is_bound`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from twinflow.errors import invalid_value
from twinflow.launch.environment import rank_environment
from twinflow.native.cgroup import cgroup_cpus, cgroup_folders, read_text

MAX_THREADS: Final = 1024


def default_threads(environ: Mapping[str, str]) -> int:
    """TWINFLOW_THREADS, else the smaller of the affinity mask and the cgroup's CPU quota, or this rank's part of them.

    OMP_NUM_THREADS is not looked at: torchrun sets it to 1 for each rank, for reasons that do not concern this pool.
    """
    given = environ.get("TWINFLOW_THREADS")
    if given:
        return check_threads(given, "TWINFLOW_THREADS")
    num_local = count_local_ranks(environ)
    return limit_threads(count_own_cpus(own_cpus(), num_local), cgroup_cpus(), num_local)


def limit_threads(num_cpus: int, quota: int | None, num_local: int) -> int:
    """Threads of one of so many ranks, for so many CPUs of its own; the quota is always that of all ranks."""
    allowed = num_cpus if quota is None else min(num_cpus, quota // num_local)
    return max(1, min(allowed, MAX_THREADS))


def count_own_cpus(mask: Set[int], num_local: int, root: Path = Path("/")) -> int:
    """How many of the CPUs in the mask are this rank's, whichever they are; 0 where there are fewer than ranks.

    A rank that is bound may still share its CPUs: mpirun binds all ranks of a NUMA node to all of that node. So it
    never counts for more than its part of the machine.
    """
    if num_local == 1:
        return len(mask)
    if is_bound(mask, root):
        return min(len(mask), -(-len(group_cpus(root)) // num_local))
    return len(mask) // num_local


def count_local_ranks(environ: Mapping[str, str]) -> int:
    """Ranks on this machine by what a launcher said; 1 without one.

    Variables that make no sense count as none: joining the process group is the place to refuse them.
    """
    try:
        found = rank_environment(environ)
    except ValueError:
        return 1
    return found.local_world_size if found is not None else 1


def own_cpus() -> frozenset[int]:
    """The CPUs that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def is_bound(mask: Set[int], root: Path = Path("/")) -> bool:
    """Whether somebody gave this process CPUs of its own: fewer than its launcher has, and than its control group has.

    One of the two is not enough. Under `taskset torchrun` all ranks share what the launcher got; in a job step whose
    tasks are not bound they share what the group has, while the launcher sits outside and has the machine.
    """
    launcher = launcher_cpus()
    return (launcher is None or not launcher <= mask) and not group_cpus(root) <= mask


def launcher_cpus() -> frozenset[int] | None:
    """The CPUs of the process that started this one; None where that cannot be seen."""
    parent = os.getppid()
    if parent <= 0 or not hasattr(os, "sched_getaffinity"):  # 0: it lives in another namespace
        return None
    try:
        return frozenset(os.sched_getaffinity(parent))
    except OSError:
        return None


def group_cpus(root: Path = Path("/")) -> frozenset[int]:
    """The CPUs a process of this control group starts with: those online that every level allows, but isolated ones."""
    cpus = root / "sys/devices/system/cpu"
    found = parse_cpus(read_text(cpus / "online")) or frozenset(range(os.cpu_count() or 1))
    for folder in cgroup_folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):  # version 2, version 1, old
            allowed = parse_cpus(read_text(folder / name))
            found = found & allowed if allowed else found  # empty: as the parent
    return found - parse_cpus(read_text(cpus / "isolated"))


def parse_cpus(text: str) -> frozenset[int]:
    """CPUs as the kernel lists them: `0-3,8` is 0, 1, 2, 3 and 8."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(cpu for first, last in found for cpu in range(int(first), int(last or first) + 1))


def check_threads(value: object, option: str) -> int:
    """`value` as a number of threads, or a ValueError naming the option."""
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        raise invalid_value(option, value, f"a whole number from 1 to {MAX_THREADS}")
    return number
