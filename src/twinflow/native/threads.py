"""How many threads the pool should have: what this process may use, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from twinflow.errors import bad_value
from twinflow.native.cgroup import cgroup_cpus

MAX_THREADS: Final = 1024


def default_threads(environ: Mapping[str, str]) -> int:
    """TWINFLOW_THREADS, else the smaller of the affinity mask and the cgroup's CPU quota.

    OMP_NUM_THREADS is not looked at: torchrun sets it to 1 for each rank, for reasons that do not concern this pool.
    """
    given = environ.get("TWINFLOW_THREADS")
    if given:
        return check_threads(given, "TWINFLOW_THREADS")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, cgroup_cpus() or allowed, MAX_THREADS)


def check_threads(value: object, option: str) -> int:
    """`value` as a number of threads, or a ValueError naming the option."""
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        raise bad_value(option, value, f"a whole number from 1 to {MAX_THREADS}")
    return number
