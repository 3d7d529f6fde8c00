"""`ratio="auto"`: see what the first steps need, place every bucket's state, look again whether it was right.

The optimizer starts with as much state on the host as fits: nothing is known yet about activations, and state on the
device must never be what a forward has no memory for. After the first step that is known, and the device is filled.
Now forward and backward are timed, with a barrier between steps: little is left on the host that could disturb them.
Some steps without the barrier say what a step takes so. Then the planner chooses what would be quickest, or as quick
with less of the device's memory; buckets move, and the steps are watched. Where they take longer than before, the state
goes back to where it was. From then on only the device's free memory is looked at now and then: where activations have
grown, state goes to the host.
"""

from __future__ import annotations

import logging
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
from twinflow.planner.formats import StateBytes
from twinflow.planner.placement import Room, choose, input_side_first
from twinflow.planner.rates import Rates
from twinflow.planner.simulate import ClipDecision, Item, Timing, Ways
from twinflow.state_dict import Kind
from twinflow.zero import Team
from twinflow.zero.start import own_host_bytes

LOGGER = logging.getLogger("twinflow")

NUM_TIMED: Final = 3  # steps with a barrier; the first warms up
_SETTLE: Final = 2  # steps after a move that say nothing
_WATCHED: Final = 3  # steps that say what one takes
_WORSE: Final = 0.01  # what a step may take longer than with another placement
_MAX_UNTIMED: Final = 8  # steps to wait for timings
_WATCH_EVERY: Final = 16  # steps between two looks at the device's memory
# Rates are the machine's best; a step has other work beside it. A bucket that would just be hidden is better not there.
_HOST_COMFORT, _LINK_COMFORT = 0.7, 0.85
_DEVICE_SHARE, _DEVICE_LEAST = 0.05, 1 << 30  # of the device that stays free: allocators fragment, inputs vary
_HOST_SHARE, _HOST_LEAST = 0.06, 2 << 30


class AutoPlacement:
    """Called once a step, between `step()` and the next forward."""

    def __init__(
        self,
        runtime: Runtime,
        states: str,
        state_bytes: Callable[[BucketPlan], int],
        rates: Rates,
        on_placed: Callable[[Runtime], None],
        team: Team | None = None,
    ) -> None:
        self._runtime, self._states, self._state_bytes, self._rates = runtime, states, state_bytes, rates
        self._team = team  # ranks that choose alike
        if team is not None:
            self._rates = Rates.from_dict(gather_json(team.calls, asdict(rates))[0])
        self._on_placed = on_placed  # state has moved: what memory is left is free for other uses
        self._phase: Callable[[], None] = self._fill
        self._timings: list[Timing] = []
        self._num_steps = 0
        self._since = 0  # steps since the last move
        self._steps: list[tuple[Mark, Mark]] = []  # the steps that are watched: where each began and ended
        self._seen: list[tuple[float, tuple[str, ...]]] = []  # what steps took, with these places
        self._trouble = ""
        self._wanted = self._places()  # what was chosen: memory may have been short for some of it
        self.is_settled = False
        runtime.timer.start()
        runtime.device.reset_peak()  # what building the model took at most says nothing about steps

    def after_step(self) -> None:
        """Another step is queued."""
        self._num_steps += 1
        self._since += 1
        if not self.is_settled:
            self._phase()
        elif self._since % _WATCH_EVERY == 0:
            self._back_off()

    # The first steps.

    def _fill(self) -> None:
        """The first step has shown what memory steps need: all that is left is for state."""
        runtime = self._runtime
        runtime.wait()
        if len(runtime.timer.part) != 3:
            if self._num_steps >= _MAX_UNTIMED:
                LOGGER.info("ratio auto: left as it is: only parts of the model are called, so no step can be timed")
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
        """Forward and backward alone: every update is waited for."""
        runtime, marks = self._runtime, self._runtime.timer.part
        runtime.wait()
        if len(marks) == 3:
            forward_s, backward_s = (runtime.device.seconds(*pair) for pair in (marks[:2], marks[1:]))
            self._timings.append(Timing(forward_s, backward_s, runtime.settings.accumulation_steps))
        if len(self._timings) >= NUM_TIMED:
            self._since, self._phase = 0, self._watch

    def _timing(self) -> Timing:
        """The quickest that was seen: what else ran on the machine is not the model's. The first warms up."""
        later = self._timings[1:]
        num_parts = self._runtime.settings.accumulation_steps
        forward_s, backward_s = self._agreed([min(t.forward_s for t in later), min(t.backward_s for t in later)])
        return Timing(forward_s, backward_s, num_parts)

    def _watch(self) -> None:
        """What a step takes, from forward to backward: not what the program does between two steps."""
        marks = self._runtime.timer.step
        if self._since > _SETTLE and marks is not None:
            self._steps.append(marks)
        if len(self._steps) < _WATCHED:
            return
        step_s = self._agreed(sum(self._runtime.device.seconds(*marks) for marks in self._steps) / _WATCHED)
        self._seen.append((step_s, self._wanted))
        LOGGER.debug(f"ratio auto: {step_s:.3f} s a step, {shares(self._places())}")
        if len(self._seen) == 1:
            self._choose(step_s)
        else:
            self._keep_best(step_s)

    # The choice.

    def _choose(self, step_s: float) -> None:
        """Where the planner knows something better than what is there, try it."""
        runtime, timing = self._runtime, self._timing()
        runtime.wait()
        runtime.wait_for_copies()
        size, room, ways = self._size(), self._room(), self._ways()
        items = items_of(runtime.buckets, timing, is_early=runtime.settings.early)
        decision = ClipDecision(runtime.settings.limits.any, self._ahead_numel(items, size, room))
        careful = _scaled(self._rates, _HOST_COMFORT, _LINK_COMFORT)
        places: Sequence[str] | None = None
        with suppress(ValueError):  # it fits as it is, with less to spare than the planner wants
            choice = choose(items, timing, careful, self._states, decision, room, size, ways)
            LOGGER.debug(f"ratio auto: {choice.why}; trying it where that is not what is there")
            if choice.places != self._wanted and choice.prediction.step_s <= (1.0 + _WORSE) * step_s:
                places = choice.places
        places = self._agreed(places)
        self._settle() if places is None else self._move(places)

    def _keep_best(self, step_s: float) -> None:
        """What was there before may have been the better one."""
        best_s, places = min(self._seen)
        if best_s < (1.0 - _WORSE) * step_s:
            self._move(places)
        self._settle()

    def _settle(self) -> None:
        """One line says where state is now, and why."""
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
        """Move buckets, those that free the device first; how many. From the next step on, it is another placement."""
        runtime, self._wanted = self._runtime, tuple(places)
        runtime.wait()
        runtime.wait_for_copies()
        pairs = zip(runtime.buckets, places, strict=True)
        moves = [(b, place) for b, place in pairs if b.plan.place != place and (place == HOST or _can_alias(b))]
        num_moved = 0
        for bucket, place in sorted(moves, key=lambda move: move[1] != HOST):
            try:
                reconfigure.move(runtime, bucket, place)
            except MemoryError:
                where = "the device's" if place == RESIDENT else "the host's"
                self._trouble = f"; {where} memory was full after {num_moved} of {len(moves)} moves"
                break
            num_moved += 1
        runtime.device.reset_peak()  # what steps take at most, with the state where it is now
        self._on_placed(runtime)
        self._since, self._steps = 0, []
        return num_moved

    def _size(self) -> StateBytes:
        """Bytes an element of state takes in each place, gradients that wait there with it."""
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
        """Bytes of a gradient."""
        plans = [bucket.plan for bucket in self._runtime.buckets]
        return sum(plan.numel * plan.dtype.itemsize for plan in plans) / sum(plan.numel for plan in plans)

    def _ways(self) -> Ways:
        """Streaming is not for gradients that would wait on the device until the state comes."""
        settings, width = self._runtime.settings, self._width()
        streams = not (settings.hold_on_host and settings.limits.any) and not settings.sums_on_host
        return Ways(width, width, settings.num_slots, settings.delayed_update, streams)

    def _room(self, share: float = 1.0) -> Room:
        """What state may take: what it has, and what nobody uses, but for a (share of a) reserve."""
        runtime = self._runtime
        capacity = runtime.device.capacity_bytes()
        on_device, on_host = self._used()
        host = own_host_bytes() + on_host
        host -= max(_HOST_LEAST, int(_HOST_SHARE * host))
        there = 0  # where the device is the host, nothing is gained by calling memory its own
        if capacity is not None:
            reserve = int(share * max(_DEVICE_LEAST, _DEVICE_SHARE * capacity))
            there = capacity - runtime.device.peak_bytes() + on_device - reserve
        if self._team is not None:
            there, host = (int(value) for value in self._team.least([there, host]))
        return Room(there, host)

    def _agreed(self, value: Kind) -> Kind:
        """What the first rank says: measured times differ, and all have to come to the same choice."""
        if self._team is None:
            return value
        said: list[Kind] = gather_json(self._team.calls, value)
        return said[0]

    def _used(self) -> tuple[int, int]:
        """Bytes of state on the device and on the host."""
        sizes = [(bucket.plan.place, self._state_bytes(bucket.plan)) for bucket in self._runtime.buckets]
        on_device = sum(size for place, size in sizes if place == RESIDENT)
        return on_device, sum(size for place, size in sizes if place != RESIDENT)

    def _ahead_numel(self, items: Sequence[Item], size: StateBytes, room: Room) -> int:
        """Elements whose updates can run ahead of the clipping decision: half of the spare memory holds them."""
        runtime = self._runtime
        if not (runtime.settings.may_run_ahead and runtime.worker is None):
            return 0
        total = sum(item.numel for item in items)
        resident = min(total, max(0, room.gpu_bytes) / size.resident)
        spare = max(0.0, room.host_bytes - (total - resident) * size.host)
        return int(min(total, spare / 2 / size.host))

    # Later.

    def _back_off(self) -> None:
        """Where the device's memory has become short since, some state goes back to the host."""
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
                f"ratio auto: the device's memory has become short: {num_moved} buckets go back to the host, which has "
                f"{host_share(runtime.buckets):.2f} of the state now{self._trouble}"
            )


def shares(places: Sequence[str]) -> str:
    """How many buckets are where, in words."""
    return ", ".join(f"{count} {place}" for place in (RESIDENT, HOST, STREAMED) if (count := places.count(place)))


def host_share(buckets: Sequence[Bucket]) -> float:
    """The share of the elements whose state is on the host."""
    return sum(b.plan.numel for b in buckets if b.plan.place != RESIDENT) / sum(b.plan.numel for b in buckets)


def _can_alias(bucket: Bucket) -> bool:
    """Whether its state may lie beside its parameters: not if somebody has changed their layout since."""
    return not bucket.plan.can_alias or all(target.dim() == 1 for target in bucket.targets)


def items_of(buckets: Sequence[Bucket], timing: Timing, is_early: bool) -> list[Item]:
    """When each bucket's gradient is complete and its weights are needed, if all elements take the same time."""
    inside = [b for b in buckets if b.plan.block != ROOT]
    total = sum(b.plan.numel for b in inside) or 1
    passed, depth = 0, {}
    for bucket in sorted(inside, key=lambda b: (b.deadline, b.plan.index)):
        depth[bucket.plan.index] = passed / total
        passed += bucket.plan.numel
    items = []
    for bucket in buckets:
        x = depth.get(bucket.plan.index, 0.0)  # what is outside all blocks is needed first
        ready = (1.0 - x) * timing.backward_s if is_early else timing.backward_s
        items.append(Item(bucket.plan.numel, bucket.plan.place, ready, x * timing.forward_s))
    return items


def _scaled(rates: Rates, host: float, link: float) -> Rates:
    """Rates of a machine whose host and link do so much of what this one's do."""
    return replace(
        rates,
        host_params={name: rate * host for name, rate in rates.host_params.items()},
        host_params_copying={name: rate * host for name, rate in rates.host_params_copying.items()},
        out_bytes=rates.out_bytes * link,
        in_bytes=rates.in_bytes * link,
        duplex_bytes=rates.duplex_bytes * link,
    )


def first_ratio(needed: int, free_bytes: int) -> float:
    """The share to start with: all on the host, or as much of it as its memory takes. 0 free bytes: not known."""
    usable = free_bytes - max(_HOST_LEAST, int(_HOST_SHARE * free_bytes))
    return 1.0 if free_bytes == 0 or needed <= usable else max(0.0, usable / needed)
