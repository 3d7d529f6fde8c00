# SPDX-License-Identifier: Apache-2.0
"""Description of the machine: processors, memory, limits and versions. On systems other than Linux many fields are
empty.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twinflow.monitor.progress import gib
from twinflow.native.cgroup import cgroup_cpus, memory_limits, parse_meminfo, read_text
from twinflow.version import __version__

# On aarch64 /proc/cpuinfo has numbers instead of a name. The keys are (implementer, part) of common server cores.
_ARM_CORES = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1A",
}


@dataclass(frozen=True)
class Machine:
    """Processors and memory of the machine, and the part of them that this process may use."""

    system: str
    architecture: str
    cpu: str
    logical_cores: int
    physical_cores: int
    affinity_cores: int  # logical cores in this process's affinity mask
    cgroup_cores: int | None  # number of cores that the quota of the cgroup allows, rounded up; None: no quota
    memory_bytes: int
    available_bytes: int  # memory that can still be allocated, considering the limit of the cgroup
    cgroup_memory_bytes: int | None
    cache_bytes: int  # all last-level caches together; 0: unknown
    huge_pages: str  # the system's policy: always, madvise, never, or unknown
    numa_nodes: int

    @property
    def usable_cores(self) -> int:
        """Number of logical cores that this process may use, considering affinity mask and quota."""
        return max(1, min(self.affinity_cores, self.cgroup_cores or self.affinity_cores))


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the machine from /proc and /sys under `root`. The affinity is that of this process."""
    memory = parse_meminfo(read_text(root / "proc/meminfo"))
    limit, free = cgroup_memory(root)
    available = memory.get("MemAvailable", 0)
    logical, cpus = os.cpu_count() or 1, root / "sys/devices/system/cpu"
    siblings = {read_text(path) for path in cpus.glob("cpu[0-9]*/topology/thread_siblings_list")}
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        cpu=parse_cpu(read_text(root / "proc/cpuinfo")) or platform.processor() or platform.machine(),
        logical_cores=logical,
        physical_cores=len(siblings) or logical,
        affinity_cores=affinity,
        cgroup_cores=cgroup_cpus(root),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=min(available, free) if free is not None else available,
        cgroup_memory_bytes=limit,
        cache_bytes=_last_level_cache(cpus),
        huge_pages=parse_huge_pages(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
    )


def parse_cpu(cpuinfo: str) -> str:
    """The name of the processor in the text of /proc/cpuinfo, or "" if there is none."""
    fields = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", cpuinfo, flags=re.MULTILINE))
    if "model name" in fields:
        return " ".join(fields["model name"].split())
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer is None or part is None:
        return ""
    return _ARM_CORES.get((implementer, part), f"Arm core, implementer {implementer}, part {part}")


def parse_huge_pages(enabled: str) -> str:
    """The policy that is marked by brackets: "madvise" for `always [madvise] never`."""
    chosen = re.search(r"\[(\w+)\]", enabled)
    return chosen.group(1) if chosen else "unknown"


def cgroup_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """The smallest limit and the smallest free amount of this process's cgroups in bytes. None without a limit."""
    found = memory_limits(root)
    free = [max(0, limit - (used or 0)) for limit, used in found]
    return min((limit for limit, _ in found), default=None), min(free, default=None)


def _last_level_cache(folder: Path) -> int:
    """Total bytes of the last-level caches. Cores that share a cache have the same list of cores."""
    found: dict[int, dict[str, int]] = {}
    for cache in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = read_text(cache / "level"), re.fullmatch(r"(\d+)K", read_text(cache / "size"))
        if level and size:
            found.setdefault(int(level), {})[read_text(cache / "shared_cpu_list")] = int(size.group(1)) * 1024
    return sum(found[max(found)].values()) if found else 0


def version_of(package: str) -> str | None:
    """The installed version of a package, or None. The package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_versions() -> dict[str, str | None]:
    """Versions of twinflow, Python, torch, triton and numpy. Results depend on them."""
    packages: Mapping[str, str | None] = {name: version_of(name) for name in ("torch", "triton", "numpy")}
    return {"twinflow": __version__, "python": platform.python_version(), **packages}


def describe(machine: Machine) -> str:
    quota = f", quota {machine.cgroup_cores}" if machine.cgroup_cores is not None else ""
    nodes = "1 NUMA node" if machine.numa_nodes == 1 else f"{machine.numa_nodes} NUMA nodes"
    return (
        f"{machine.system} {machine.architecture}, {machine.cpu}, {machine.affinity_cores} of {machine.logical_cores} "
        f"cores{quota}, {gib(machine.memory_bytes)} memory, {gib(machine.available_bytes)} "
        f"available, huge pages {machine.huge_pages}, {nodes}"
    )
