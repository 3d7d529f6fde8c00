# SPDX-License-Identifier: Apache-2.0
"""Limits of control groups. systemd, Slurm or a nested container may set a limit at any level between the group of this
process and the root of the mount. The smallest limit applies.

`root` is the folder that contains proc and sys. Versions 1 and 2 of control groups are read in the same way: a folder
or a file that does not exist sets no limit.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePosixPath


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Possible folders of this process's groups under `controller` (`cpu`, ...), and their parents up to the mounts."""
    mount = root / "sys/fs/cgroup"
    return [
        mount / base / group
        for base, own in own_groups(read_text(root / "proc/self/cgroup"), controller).items()
        for group in (own, *own.parents)
    ]


def own_groups(text: str, controller: str) -> dict[str, PurePosixPath]:
    """The group under each possible mount point of a hierarchy, from the text of /proc/self/cgroup.

    In a container the file may contain a path of the host, although the mount begins at the container's own group. Then
    only the root of the mount exists, and the root is the right group. The same is true for a group outside of the
    namespace, whose path begins with `..`.
    """
    top = PurePosixPath()
    # Mount points of version 2, of version 2 beside version 1, and of version 1.
    groups = {"": top, "unified": top, controller: top}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path.lstrip("/"))
        if ".." in own.parts:
            own = top
        if number == "0" and not controllers:
            groups[""] = groups["unified"] = own
        elif controller in controllers.split(","):
            groups[controller] = groups[controllers] = own  # a mount may be called `cpu` or `cpu,cpuacct`
    return groups


def cgroup_cpus(root: Path = Path("/")) -> int | None:
    """Number of CPUs that the smallest quota allows, rounded up, or None without a quota."""
    quotas = [
        parse_quota(*(read_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")))
        for folder in cgroup_folders("cpu", root)
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def parse_meminfo(meminfo: str) -> dict[str, int]:
    """Bytes by name in the text of /proc/meminfo."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, flags=re.MULTILINE)}


def memory_limits(root: Path = Path("/")) -> list[tuple[int, int | None]]:
    """Limit and used bytes (without file cache; None: not known) of each memory group of this process with a limit."""
    found = []
    for folder in cgroup_folders("memory", root):
        limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
        if not limit.isdigit() or int(limit) >= 1 << 60:  # "max", no such file, or version 1's number for unlimited
            continue
        used = read_text(folder / "memory.current") or read_text(folder / "memory.usage_in_bytes")
        # The file cache counts as used, but the kernel frees it when memory is needed. In version 1, only the lines
        # with `total_` include subgroups.
        stat = dict(re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE))
        cache = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
        found.append((int(limit), int(used) - cache if used.isdigit() else None))
    return found


_withheld_bytes = 0  # available memory that this process must leave to others


def limit_host_bytes(limit: int) -> None:
    """From now on `free_host_bytes` counts only `limit` bytes of the memory that is available at this moment."""
    global _withheld_bytes
    _withheld_bytes = 0
    _withheld_bytes = max(0, free_host_bytes() - limit)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that is available, considering the limits of control groups and that of `limit_host_bytes`. 0 if it
    is not known.
    """
    memory = parse_meminfo(read_text(root / "proc/meminfo"))
    free = [memory["MemAvailable"]] if "MemAvailable" in memory else []
    free += [max(0, limit - used) for limit, used in memory_limits(root) if used is not None]
    return max(0, min(free, default=0) - _withheld_bytes)


def parse_quota(v2_max: str, v1_quota: str, v1_period: str) -> int | None:
    """Number of CPUs of one group's quota, rounded up, or None if it sets no quota."""
    fields = v2_max.split() if v2_max else [v1_quota, v1_period]
    try:
        quota, period = int(fields[0]), int(fields[1])
    except (ValueError, IndexError):  # "max", or no such file
        return None
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None


def read_text(path: Path) -> str:
    """The text of a file, stripped of white space. Empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
