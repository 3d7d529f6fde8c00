"""How much host memory is left to this process."""

from __future__ import annotations

from pathlib import Path

_CGROUP_FILES = (  # limit and use, of both versions of cgroups
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_host_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has available, or what the cgroup leaves of it; 0 where nothing is known."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    for limit_file, use_file in _CGROUP_FILES:
        try:
            limit, use = ((cgroup / file).read_text().strip() for file in (limit_file, use_file))
            found.append(max(0, int(limit) - int(use)))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return min(found, default=0)
