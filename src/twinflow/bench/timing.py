"""Timing on a shared machine. Contenders take turns, so that changes of the machine's speed affect
all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Work = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """A function to be timed. `bytes_per_param` is set for our kernels. A rival has the name of the kernel that it is
    compared with.
    """

    name: str
    run: Work
    prepare: Work | None = None  # runs before every timed call and is not timed
    bytes_per_param: float | None = None
    rival_of: str | None = None


@dataclass
class Timing:
    """Seconds of every timed call of one contender. For our kernels also of the memory passes before and after each
    call.
    """

    call_s: list[float] = field(default_factory=list)
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)


def take_turns(
    contenders: Sequence[Contender],
    memory_pass: Work,
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    pause_s: float = 0.005,
) -> dict[str, Timing]:
    """Time each contender `repeats` times, with one call of each in every round. Returns timings by name.

    After the last work the threads of OpenMP keep a core busy for some time. The pause lets them stop.
    """
    timings = {contender.name: Timing() for contender in contenders}
    for round_index in range(warmup + repeats):
        for contender in contenders:
            if contender.prepare is not None:
                contender.prepare()
            time.sleep(pause_s)
            is_kernel = contender.rival_of is None
            before = _seconds(memory_pass, clock) if is_kernel else None
            call = _seconds(contender.run, clock)
            after = _seconds(memory_pass, clock) if is_kernel else None
            if round_index < warmup:
                continue
            timing = timings[contender.name]
            timing.call_s.append(call)
            if before is not None and after is not None:
                timing.before_s.append(before)
                timing.after_s.append(after)
    return timings


def _seconds(work: Work, clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start
