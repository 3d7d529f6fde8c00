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
    found += [left for files in _CGROUP_FILES if (left := _left(*(cgroup / file for file in files))) is not None]
    return min(found, default=0)


def _left(limit: Path, use: Path) -> int | None:
    """What a limit leaves; None where there is no such file, or "max" in it: no limit."""
    try:
        return max(0, int(limit.read_text()) - int(use.read_text()))
    except (OSError, ValueError):
        return None
