"""`ratio="auto"`: measures the first steps, places the state of each bucket of parameters, and checks the result.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed").

1. Start: as much state as possible is on the host. The memory of activations is not yet known, and state on the device
   must not take memory that a forward needs.
2. Fill (`_fill`): after the first step the peak memory is known, and the free device memory is filled with state.
3. Time (`_time`): forward and backward are timed with a barrier between steps, so that work on the host hardly disturbs
   them.
4. Watch (`_watch`): some steps without the barrier give the time of a step.
5. Choose (`_choose`): the planner chooses the fastest placement. Buckets move, and steps are watched again. If they are
   not faster than before, the buckets move back. Otherwise a placement with more state on the host is tried, because
   the planner is careful at first (`_COMFORTS`).
6. Later (`_back_off`): only the free device memory is checked, every `_WATCH_EVERY` steps. If activations have grown,
   state moves to the host.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

from twinflow.device import Mark
from twinflow.dist.agree import gather_json
from twinflow.offload import reconfigure
from twinflow.offload.bucket import Bucket
from twinflow.offload.plan import HOST, PLACES, RESIDENT, ROOT, STREAMED, BucketPlan
from twinflow.offload.runtime import Runtime
from twinflow.planner.costs import Memory
from twinflow.planner.formats import StateBytes, reserved_bytes
from twinflow.planner.machines import Rates
from twinflow.planner.placement import choose, input_side_first, shares
from twinflow.planner.simulate import ClipDecision, Item, Timing, Ways
from twinflow.state_dict import Kind
from twinflow.zero import Team
from twinflow.zero.start import own_host_bytes

LOGGER = logging.getLogger("twinflow")

NUM_TIMED: Final = 3  # steps with a barrier; the first one is a warm-up
_SETTLE: Final = 2  # steps after a move that are not measured
_WATCHED: Final = 5  # steps whose median is the time of a step
_WORSE: Final = 0.01  # a placement is tried if the planner predicts steps that are longer by this share at most
_GAIN: Final = 0.003  # a placement that was tried stays if it has made steps shorter by this share at least
_MAX_UNTIMED: Final = 8  # steps after which the optimizer gives up waiting for timings
_WATCH_EVERY: Final = 16  # steps between two checks of the device's memory
# The rates of updates on the host, and of copies between host and device, are measured without other work. The planner
# multiplies them by these pairs, so that a bucket is not placed on the host if its update would only just be hidden.
# The second pair is tried if the placement with the first pair was faster than the placement before.
_COMFORTS: Final = ((0.7, 0.85), (0.85, 0.95))
_DEVICE_SHARE, _DEVICE_LEAST = 0.05, 1 << 30  # device memory that stays free (share, least bytes), as inputs vary
_HOST_SHARE, _HOST_LEAST = 0.06, 2 << 30


class AutoPlacement:
    """Chooses the placement. The optimizer calls `after_step` between `step()` and the next forward."""

    def __init__(
        self,
        runtime: Runtime,
        states: str,
        state_bytes: Callable[[BucketPlan], int],
        rates: Rates,
        on_placed: Callable[[Runtime], None],
        team: Team | None = None,
    ) -> None:
        self._runtime = runtime
        self._states = states
        self._state_bytes = state_bytes
        self._rates = rates
        self._team = team  # ranks that must make the same choice
        if team is not None:
            self._rates = Rates(**gather_json(team.calls, asdict(rates))[0])
        self._on_placed = on_placed  # called after a move, when the remaining memory is free for other uses
        self._phase: Callable[[], None] = self._fill
        self._timings: list[Timing] = []
        self._num_steps = 0
        self._since = 0  # steps since the last move
        self._steps: list[tuple[Mark, Mark]] = []  # begin and end of the watched steps
        self._seen: list[tuple[float, tuple[str, ...]]] = []  # time of a step, and the places
        self._comforts = list(_COMFORTS)  # the pairs that were not tried yet
        self._trouble = ""
        self._wanted = self._places()  # the chosen places; some moves may have failed for lack of memory
        self.is_settled = False
        runtime.timer.start()
        runtime.device.reset_peak()  # the peak of building the model does not matter for steps

    def after_step(self) -> None:
        """Runs the present phase. After the last phase, checks the device memory every `_WATCH_EVERY` steps."""
        self._num_steps += 1
        self._since += 1
        if not self.is_settled:
            self._phase()
        elif self._since % _WATCH_EVERY == 0:
            self._back_off()

    # The first steps.

    def _fill(self) -> None:
        """Moves state to the device memory that the first step did not need."""
        runtime = self._runtime
        runtime.wait()
        if len(runtime.timer.part) != 3:
            if self._num_steps >= _MAX_UNTIMED:
                LOGGER.info(
                    "ratio auto: the placement stays as it is, because the loop calls only parts of the model, and "
                    "steps cannot be timed."
                )
                self._settle()
            return
        size, left = self._size(), self._room().gpu_bytes
        places = [HOST] * len(runtime.buckets)
        items = items_of(runtime.buckets, Timing(1.0, 1.0), is_early=True)
        for i in input_side_first(items):
            left -= int(items[i].numel * size.resident)
            if left < 0:
                break
            places[i] = RESIDENT
        self._move(self._agreed(places))
        self._phase = self._time

    def _time(self) -> None:
        """Times forward and backward without updates: waits for every update before the next step."""
        runtime, marks = self._runtime, self._runtime.timer.part
        runtime.wait()
        if len(marks) == 3:
            forward_s, backward_s = (runtime.device.seconds(*pair) for pair in (marks[:2], marks[1:]))
            self._timings.append(Timing(forward_s, backward_s, runtime.settings.accumulation_steps))
        if len(self._timings) >= NUM_TIMED:
            self._since, self._phase = 0, self._watch

    def _timing(self) -> Timing:
        """The shortest measured times, because other work on the machine lengthens steps. Excludes the warm-up."""
        later = self._timings[1:]
        num_parts = self._runtime.settings.accumulation_steps
        forward_s, backward_s = self._agreed([min(t.forward_s for t in later), min(t.backward_s for t in later)])
        return Timing(forward_s, backward_s, num_parts)

    def _watch(self) -> None:
        """Times steps from forward to the end of backward. After `_WATCHED` steps, changes the placement or settles."""
        marks = self._runtime.timer.step
        if self._since > _SETTLE and marks is not None:
            self._steps.append(marks)
        if len(self._steps) < _WATCHED:
            return
        step_s = self._agreed(statistics.median(self._runtime.device.seconds(*marks) for marks in self._steps))
        LOGGER.debug(f"ratio auto: {step_s:.3f} s a step, {shares(self._places())}")
        best_s, best = min(self._seen, default=(step_s, self._wanted))
        self._seen.append((step_s, self._wanted))
        if len(self._seen) > 1 and step_s > (1.0 - _GAIN) * best_s:
            self._move(best)
            self._settle()
        else:
            self._choose(step_s)

    # The choice.

    def _choose(self, step_s: float) -> None:
        """Moves buckets to the next placement that is worth a try. If there is none, the present placement stays."""
        runtime, timing = self._runtime, self._timing()
        runtime.wait()
        runtime.wait_for_copies()
        size, room, ways = self._size(), self._room(), self._ways()
        items = items_of(runtime.buckets, timing, is_early=runtime.settings.early)
        decision = ClipDecision(runtime.settings.limits.any, self._ahead_numel(items, size, room))
        places: Sequence[str] | None = None
        while places is None and self._comforts:
            careful = _scaled(self._rates, *self._comforts.pop(0))
            with suppress(MemoryError):  # no placement leaves the reserve that the planner wants; the present one works
                choice = choose(items, timing, careful, self._states, decision, room, size, ways)
                LOGGER.debug(f"ratio auto: {choice.why}; this placement is tried if it is not the present one")
                if choice.places != self._wanted and choice.prediction.step_s <= (1.0 + _WORSE) * step_s:
                    places = choice.places
            places = self._agreed(places)
        self._settle() if places is None else self._move(places)

    def _settle(self) -> None:
        """Ends the choice and logs the placement with the measured times."""
        self.is_settled = True
        self._since = 0
        self._runtime.timer.stop()
        if not self._seen:
            return
        share, now = host_share(self._runtime.buckets), shares(self._places())
        took = ", ".join(f"{seconds:.3f} s with {shares(places)}" for seconds, places in self._seen)
        LOGGER.info(
            f"ratio auto: {share:.2f} of the state on the host (buckets: {now}). A step took {took}; forward and "
            f"backward alone {self._timing().gpu_s:.3f} s{self._trouble}"
        )

    def _places(self) -> tuple[str, ...]:
        return tuple(bucket.plan.place for bucket in self._runtime.buckets)

    def _move(self, places: Sequence[str]) -> int:
        """Moves buckets to `places`, the host's first, until memory is full. Returns the number of moved buckets."""
        runtime, self._wanted = self._runtime, tuple(places)
        runtime.wait()
        runtime.wait_for_copies()
        moves = []
        for bucket, place in zip(runtime.buckets, places, strict=True):
            # State cannot move to the device if the user has changed the memory format of a parameter.
            can_alias = not bucket.plan.can_alias or all(target.dim() == 1 for target in bucket.targets)
            if bucket.plan.place != place and (place == HOST or can_alias):
                moves.append((bucket, place))
        num_moved = 0
        for bucket, place in sorted(moves, key=lambda move: move[1] != HOST):
            try:
                reconfigure.move(runtime, bucket, place)
            except MemoryError:
                where = "the device's" if place == RESIDENT else "the host's"
                self._trouble = f"; {where} memory was full after {num_moved} of {len(moves)} moves"
                break
            num_moved += 1
        runtime.device.reset_peak()  # to measure the peak of steps with the new placement
        self._on_placed(runtime)
        self._since, self._steps = 0, []
        return num_moved

    def _size(self) -> StateBytes:
        """Bytes of state for each element, by place. Resident state includes gradients that wait or are added there."""
        runtime, settings = self._runtime, self._runtime.settings
        numel = sum(bucket.plan.numel for bucket in runtime.buckets)
        each = {}
        for place in PLACES:
            plans = [replace(bucket.plan, place=place) for bucket in runtime.buckets]
            each[place] = sum(self._state_bytes(plan) for plan in plans) / numel
        waits_there = (settings.limits.any and settings.hold_on_host) or settings.delayed_update
        there = (self._width() if waits_there else 0.0) + (4.0 if settings.sums_on_host else 0.0)
        return StateBytes(each[HOST], each[RESIDENT] + there, each[STREAMED])

    def _width(self) -> float:
        """Mean number of bytes of a gradient element."""
        plans = [bucket.plan for bucket in self._runtime.buckets]
        return sum(plan.numel * plan.dtype.itemsize for plan in plans) / sum(plan.numel for plan in plans)

    def _ways(self) -> Ways:
        """The planner's inputs: bytes of a gradient and of a weight element, and options of the runtime.

        Streamed state is excluded if gradients wait or are summed on the host.
        """
        settings, width = self._runtime.settings, self._width()
        streams = not (settings.hold_on_host and settings.limits.any) and not settings.sums_on_host
        return Ways(width, width, settings.num_slots, settings.delayed_update, streams)

    def _room(self, share: float = 1.0) -> Memory:
        """Memory for state: the memory that state uses now, plus free memory, minus a reserve.

        `share` scales the device's reserve.
        """
        runtime = self._runtime
        capacity = runtime.device.capacity_bytes()
        on_device, on_host = self._used()
        host = own_host_bytes() + on_host
        host -= max(_HOST_LEAST, int(_HOST_SHARE * host))
        there = 0  # if the model is on the CPU, device memory is host memory
        if capacity is not None:
            reserve = int(share * max(_DEVICE_LEAST, _DEVICE_SHARE * capacity))
            there = capacity - runtime.device.peak_bytes() + on_device - reserve
        if self._team is not None:
            there, host = (int(value) for value in self._team.least([there, host]))
        return Memory(there, host)

    def _agreed(self, value: Kind) -> Kind:
        """Rank 0's value on all ranks. Measured times differ, but all ranks must make the same choice."""
        if self._team is None:
            return value
        said: list[Kind] = gather_json(self._team.calls, value)
        return said[0]

    def _used(self) -> tuple[int, int]:
        """Bytes of state on the device and on the host."""
        sizes = [(bucket.plan.place, self._state_bytes(bucket.plan)) for bucket in self._runtime.buckets]
        on_device = sum(size for place, size in sizes if place == RESIDENT)
        return on_device, sum(size for place, size in sizes if place != RESIDENT)

    def _ahead_numel(self, items: Sequence[Item], size: StateBytes, room: Memory) -> int:
        """Number of elements whose updates can run before the clipping decision, with the spare host memory."""
        runtime = self._runtime
        if not (runtime.settings.may_run_ahead and runtime.worker is None):
            return 0
        total = sum(item.numel for item in items)
        resident = min(total, max(0, room.gpu_bytes) / size.resident)
        spare = max(0, int(room.host_bytes - (total - resident) * size.host))
        return int(min(total, (spare - reserved_bytes(spare)) / size.host))

    # Later.

    def _back_off(self) -> None:
        """Moves state to the host if the device has too little free memory."""
        room, runtime = self._room(share=0.5), self._runtime
        resident = [b for b in runtime.buckets if b.plan.place == RESIDENT]
        on_device, on_host = self._used()
        over = on_device - room.gpu_bytes
        places, spare = list(self._places()), room.host_bytes - on_host
        for bucket in sorted(resident, key=lambda b: -b.deadline):
            needed = self._state_bytes(replace(bucket.plan, place=HOST))
            if over <= 0 or needed > spare:
                break
            places[bucket.plan.index] = HOST
            over, spare = over - self._state_bytes(bucket.plan), spare - needed
        agreed = self._agreed(places if tuple(places) != self._places() else None)
        if agreed is not None and (num_moved := self._move(agreed)):
            LOGGER.info(
                f"ratio auto: the device has too little free memory. {num_moved} buckets were moved to the host, which "
                f"has {host_share(runtime.buckets):.2f} of the state now{self._trouble}"
            )


def host_share(buckets: Sequence[Bucket]) -> float:
    """The share of the elements whose state is on the host."""
    return sum(b.plan.numel for b in buckets if b.plan.place != RESIDENT) / sum(b.plan.numel for b in buckets)


def items_of(buckets: Sequence[Bucket], timing: Timing, is_early: bool) -> list[Item]:
    """Estimates when each bucket's gradient is complete and its weights are needed, with equal time per element."""
    inside = [b for b in buckets if b.plan.block != ROOT]
    total = sum(b.plan.numel for b in inside) or 1
    passed, depth = 0, {}
    for bucket in sorted(inside, key=lambda b: (b.deadline, b.plan.index)):
        depth[bucket.plan.index] = passed / total
        passed += bucket.plan.numel
    items = []
    for bucket in buckets:
        x = depth.get(bucket.plan.index, 0.0)  # parameters outside all blocks are needed first
        ready = (1.0 - x) * timing.backward_s if is_early else timing.backward_s
        items.append(Item(bucket.plan.numel, bucket.plan.place, ready, x * timing.forward_s))
    return items


def _scaled(rates: Rates, host: float, link: float) -> Rates:
    """A copy of `rates`: those of updates on the host times `host`, and those of copies to and from it times `link`."""
    return replace(
        rates,
        host_params={name: rate * host for name, rate in rates.host_params.items()},
        host_params_copying={name: rate * host for name, rate in rates.host_params_copying.items()},
        out_bytes=rates.out_bytes * link,
        in_bytes=rates.in_bytes * link,
        duplex_bytes=rates.duplex_bytes * link,
    )


def first_ratio(needed: int, free_bytes: int) -> float:
    """The first ratio: the share of the `needed` bytes that fits on the host; 1 if `free_bytes` is 0 (not known)."""
    usable = free_bytes - max(_HOST_LEAST, int(_HOST_SHARE * free_bytes))
    return 1.0 if free_bytes == 0 or needed <= usable else max(0.0, usable / needed)
