"""Timing on a machine that is shared: contenders take turns, so that its drift hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Work = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """Something to time. `bytes_per_param` is set for our kernels; a rival names the kernel it is compared with."""

    name: str
    run: Work
    prepare: Work | None = None  # before every timed call, not timed
    bytes_per_param: float | None = None
    rival_of: str | None = None


@dataclass
class Timing:
    """Seconds of every timed call of one contender and, for our kernels, of the memory pass before and after each."""

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
    """Time each contender `repeats` times, one call of each in every round, by name.

    The pause lets other runtimes' threads stop spinning: OpenMP's keep a core busy for a while after their last work.
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
