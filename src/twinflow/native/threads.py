"""How many threads the pool should have: what this process may use, not what the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from twinflow.errors import bad_value

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def default_threads(environ: Mapping[str, str]) -> int:
    """TWINFLOW_THREADS, else the smaller of the affinity mask and the cgroup's CPU quota.

    OMP_NUM_THREADS is not looked at: torchrun sets it to 1 for each rank, for reasons that do not concern this pool.
    """
    given = environ.get("TWINFLOW_THREADS")
    if given:
        return check_threads(given, "TWINFLOW_THREADS")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(
        1,
        min(
            allowed,
            cgroup_cpus(
                _read(_CGROUP_V2), _read(_CGROUP_V1 / "cpu.cfs_quota_us"), _read(_CGROUP_V1 / "cpu.cfs_period_us")
            ),
        ),
    )


def check_threads(value: object, option: str) -> int:
    """`value` as a number of threads, or a ValueError naming the option."""
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if not 1 <= number <= 1024:
        raise bad_value(option, value, "a whole number from 1 to 1024")
    return number


def cgroup_cpus(v2_max: str, v1_quota: str, v1_period: str) -> int:
    """Whole CPUs that the cgroup's quota allows, rounded up; very many where there is no quota."""
    fields = v2_max.split() if v2_max else [v1_quota, v1_period]
    try:
        quota, period = float(fields[0]), float(fields[1])
    except (ValueError, IndexError):  # "max", or no such file
        return 1 << 16
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else 1 << 16


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
