# SPDX-License-Identifier: Apache-2.0
"""The default number of threads for the native kernels. It depends on the CPUs that this process may use.

Ranks of one machine must divide its CPUs. Launchers such as torchrun do not do it: every rank may run on all CPUs, and
pools with one thread per CPU would compete for them. Other launchers (mpirun, srun) bind each rank to its own CPUs, and
nothing has to be divided. The affinity mask tells which case applies: see `is_bound`.
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
    """TWINFLOW_THREADS if it is set. Otherwise this rank's part of the CPUs that affinity mask and CPU quota allow.

    OMP_NUM_THREADS is ignored, because torchrun sets it to 1 for each rank, for reasons that do not apply to this pool.
    """
    given = environ.get("TWINFLOW_THREADS")
    if given:
        return check_threads(given, "TWINFLOW_THREADS")
    num_local = count_local_ranks(environ)
    return limit_threads(count_own_cpus(own_cpus(), num_local), cgroup_cpus(), num_local)


def limit_threads(num_cpus: int, quota: int | None, num_local: int) -> int:
    """Number of threads of one rank that has `num_cpus` CPUs of its own.

    `quota` is the number of CPUs that the control group allows all local ranks together. None means no limit.
    """
    allowed = num_cpus if quota is None else min(num_cpus, quota // num_local)
    return max(1, min(allowed, MAX_THREADS))


def count_own_cpus(mask: Set[int], num_local: int, root: Path = Path("/")) -> int:
    """Number of CPUs in the mask that are this rank's part. 0 if ranks share a mask with fewer CPUs than ranks.

    A rank that is bound may share its CPUs: mpirun binds all ranks of a NUMA node to all CPUs of this node. Therefore
    the result for a bound rank is at most its part, rounded up, of the CPUs of the control group.
    """
    if num_local == 1:
        return len(mask)
    if is_bound(mask, root):
        return min(len(mask), -(-len(group_cpus(root)) // num_local))
    return len(mask) // num_local


def count_local_ranks(environ: Mapping[str, str]) -> int:
    """Number of ranks on this machine, from the environment variables of the launcher. 1 without a launcher.

    Invalid variables are ignored here. Joining the process group raises an error for them.
    """
    try:
        found = rank_environment(environ)
    except ValueError:
        return 1
    return max(1, found.local_world_size) if found is not None else 1  # -1: not known before the ranks have met


def own_cpus() -> frozenset[int]:
    """The CPUs that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def is_bound(mask: Set[int], root: Path = Path("/")) -> bool:
    """Whether this process has CPUs of its own: launcher (if known) and control group both have CPUs outside `mask`.

    Neither of the two conditions is sufficient alone. Under `taskset torchrun` all ranks share the CPUs of the
    launcher. In a Slurm job step whose tasks are not bound, ranks share the CPUs of the group, while the launcher is
    outside of the group and may use the whole machine.
    """
    launcher = launcher_cpus()
    return (launcher is None or not launcher <= mask) and not group_cpus(root) <= mask


def launcher_cpus() -> frozenset[int] | None:
    """The CPUs of the parent process, or None if they are not known."""
    parent = os.getppid()
    if parent <= 0 or not hasattr(os, "sched_getaffinity"):  # 0: the parent is in another namespace
        return None
    try:
        return frozenset(os.sched_getaffinity(parent))
    except OSError:
        return None


def group_cpus(root: Path = Path("/")) -> frozenset[int]:
    """The initial CPUs of a process in this control group: online, allowed on every level, and not isolated."""
    cpus = root / "sys/devices/system/cpu"
    found = parse_cpus(read_text(cpus / "online")) or frozenset(range(os.cpu_count() or 1))
    for folder in cgroup_folders("cpuset", root):
        # Names of the file in version 2, in version 1 and in old kernels.
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            allowed = parse_cpus(read_text(folder / name))
            found = found & allowed if allowed else found  # an empty file means the CPUs of the parent group
    return found - parse_cpus(read_text(cpus / "isolated"))


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of CPUs in the format of the kernel: `0-3,8` is 0, 1, 2, 3 and 8."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(cpu for first, last in found for cpu in range(int(first), int(last or first) + 1))


def check_threads(value: object, option: str) -> int:
    """`value` as a number of threads. Raises ValueError with the name of the option if `value` is invalid."""
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        raise invalid_value(option, value, f"a whole number from 1 to {MAX_THREADS}")
    return number
