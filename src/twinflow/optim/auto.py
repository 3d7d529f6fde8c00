# SPDX-License-Identifier: Apache-2.0
"""`ratio="auto"`: times steps, places the state of each bucket of parameters, and reacts when steps change.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed").

1. Start (`_begin`): as much state as possible is on the host. The memory of activations is not yet known, and state on
   the device must not take memory that a forward needs.
2. Time (`_time`): forward and backward are timed alone, with a barrier between steps.
3. Watch (`_watch`): some steps without the barrier give the time of a step with the present placement.
4. Choose (`_choose`): if steps with the first measured placement are nearly as fast as forward and backward alone, it
   stays. Otherwise buckets move, and steps are watched again. Two placements are tried: the planner's, for which the
   rates of the host are corrected so that the planner's time of the present placement is the measured one, and the one
   with as much state on the device as fits. A placement is not tried if it is predicted to be slower than the fastest
   one so far (`_to_beat`). Of all measured placements the fastest stays.
5. Later (`_check`): every `_CHECK_EVERY` steps, state moves to the host if activations have grown. If steps have become
   longer or shorter, or more or fewer steps are clipped, for two checks in a row, everything is measured again from 2.
   Each time the shortest distance to the next time doubles, and the present placement stays unless another one is
   clearly faster. So state does not move back and forth.

Steps 1 to 4 take 5 to 12 training steps, and more only if the times of steps differ (`_NUM_MANY`). The ranks of a team
use the times of rank 0, so that they make the same moves in the same steps. No hook runs in a model that is compiled as
a whole, and the wait for its weights is in `step()`. Whole steps are timed then (step_timer.py).

With weights on the host, the buckets of a block always move together and with the weights of the block. Such buckets
are a unit. Otherwise the buckets of several experts of a block are a unit, because the time to choose a placement
grows with the number of units, and every other bucket is a unit of its own.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final

from twinflow.dist.agree import gather_json
from twinflow.offload import reconfigure
from twinflow.offload.bucket import Bucket
from twinflow.offload.early import WATCHED_STEPS
from twinflow.offload.muon import update_flops
from twinflow.offload.plan import HOST, PLACES, RESIDENT, ROOT, STREAMED, BucketPlan
from twinflow.offload.runtime import Runtime
from twinflow.offload.step_timer import StepMarks
from twinflow.planner.costs import BUCKET_NUMEL, Memory
from twinflow.planner.formats import StateBytes, reserved_bytes
from twinflow.planner.machines import Rates
from twinflow.planner.placement import choose, input_side_first, shares
from twinflow.planner.simulate import ClipDecision, Fetch, Item, Timing, Ways, predict
from twinflow.state_dict import Kind
from twinflow.zero import Team
from twinflow.zero.start import own_host_bytes

LOGGER = logging.getLogger("twinflow")

_NUM_FEW: Final = 2  # steps that are watched if they differ by `_AGREE` at most, and clipping does not vary
_NUM_MANY: Final = 8  # steps that are watched otherwise
_AGREE: Final = 0.03
_RISE: Final = 0.06  # by how much the second of `_NUM_FEW` steps may be longer than the first
_NEAR: Final = 0.01  # a step that is longer than forward and backward alone by this share at most is good enough
_WORSE: Final = 0.01  # a placement is tried if it is predicted to be slower than the fastest one by this share at most
_MUCH_WORSE: Final = 0.04  # the same for the placement with as much state on the device as fits
_GAIN: Final = 0.003  # a placement with more state on the device stays if steps are shorter by this share at least
_GAIN_AGAIN: Final = 0.02  # the same if another placement was chosen before
_MARGIN: Final = 0.95  # the planner's host is slower by this factor, so that updates are not only just hidden
_SLOWEST, _FASTEST = 0.1, 4.0  # limits of the factor by which measured steps correct the rates of the host
_CHECK_EVERY: Final = 16  # steps between two checks
_NUM_CHECKS: Final = 2  # checks in a row that must find the same kind of change
_CHANGE: Final = 0.15  # by how much the times of steps must change
_CLIP_CHANGE: Final = 0.3  # by how much the share of clipped steps must change
_FIRST_REST: Final = 64  # steps from one choice to the next at least; doubles with each choice
_LONGEST_REST: Final = 4096
_DEVICE_SHARE, _DEVICE_LEAST = 0.05, 1 << 30  # device memory that stays free (share, least bytes)
# If the times of backwards differ by more, the sizes of inputs vary, and so does the memory of steps. The times of
# whole steps also vary if updates and copies share the bandwidth of the host's memory.
_VARIED: Final = 0.1
_GROWTH: Final = 0.25  # then so much of the memory that steps need stays free in addition, for larger inputs
_HOST_SHARE, _HOST_LEAST = 0.06, 2 << 30
_UNKNOWN: Final = Timing(math.inf, math.inf)


@dataclass(frozen=True)
class Times:
    """Seconds of a step, of its forwards and backwards, and of the last forward and the last backward."""

    step_s: float
    work_s: float  # without the wait for updates in `step()`, which is usual if the whole model is compiled
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Seen:
    """A placement that was measured."""

    step_s: float
    places: tuple[str, ...]
    share: float  # of the state on the host

    @property
    def name(self) -> str:
        named = {1.0: "all on the host", 0.0: "none on the host"}
        return named.get(self.share, f"{self.share:.2f} on the host")


class ChangeWatch:
    """Notices lasting changes of the training loop: the batch size, the length of sequences, the clipped steps."""

    def __init__(self) -> None:
        self._usual: tuple[float, float, float] | None = None
        self._num_odd = 0  # checks in a row that differ from `_usual`

    def forget(self) -> None:
        """The next values are the usual ones."""
        self._usual = None
        self._num_odd = 0

    def has_changed(self, step_s: float, backward_s: float, clipped_share: float) -> bool:
        """Whether `_NUM_CHECKS` checks in a row have differed from the first one.

        If the host limits the time of a step, a change of the batch size only shows in the time of the backward.
        """
        if self._usual is None:
            self._usual = (step_s, backward_s, clipped_share)
            return False
        usual_step_s, usual_backward_s, usual_share = self._usual
        is_odd = abs(clipped_share - usual_share) > _CLIP_CHANGE
        for seconds, usual_s in ((step_s, usual_step_s), (backward_s, usual_backward_s)):
            is_odd |= not usual_s / (1.0 + _CHANGE) <= seconds <= usual_s * (1.0 + _CHANGE)
        self._num_odd = self._num_odd + 1 if is_odd else 0
        return self._num_odd >= _NUM_CHECKS


class AutoPlacement:
    """Chooses the placement. The optimizer calls `after_step` between `step()` and the next forward.

    `measure` returns the rates of the machine. It is called only if they are needed, because it may take some seconds.
    """

    def __init__(
        self,
        runtime: Runtime,
        states: str,
        state_bytes: Callable[[BucketPlan], int],
        measure: Callable[[], Rates],
        on_placed: Callable[[Runtime], None],
        team: Team | None = None,
        weight_bytes: Mapping[int, float] | None = None,
    ) -> None:
        """`weight_bytes`: if weights are on the host, the bytes of the weights of each block for each element of its
        state. `state_bytes` includes them for state on the device.
        """
        self._runtime = runtime
        self._states = states
        self._state_bytes = state_bytes
        self._measure = measure
        self._rates: Rates | None = None
        self._weight_bytes = weight_bytes or {}
        self._units = units_of(runtime.buckets, self._has_weights)
        self._team = team  # ranks that must make the same choice
        self._on_placed = on_placed  # called after a move, when the remaining memory is free for other uses
        self._phase: Callable[[StepMarks], None] = self._begin
        self._num_steps = 0
        self._since = 0  # steps since the last move or barrier
        self._is_quiet = False  # no update was pending when this step began
        self._alone: list[StepMarks] = []  # steps that began when no update was pending
        self._watched: list[StepMarks] = []  # steps with the present placement
        self._least = _UNKNOWN  # the shortest forward and the shortest backward of all watched steps
        self._after_clipped: list[bool] = []  # for each of them: whether the step before it was clipped
        self._seen: list[Seen] = []
        self._num_tried = 0  # placements of `_choose` that were considered
        self._is_varied = False  # the sizes of inputs vary
        self._speed = 1.0  # the speed of the host in training, relative to `_rates`
        self._clipped: deque[bool] = deque(maxlen=_NUM_CHECKS * _CHECK_EVERY)  # of the last steps
        self._change = ChangeWatch()
        self._rest = _FIRST_REST
        self._trouble = ""
        self.report = ""  # the last choice, and what it has gained
        self.is_settled = False  # whether a placement was chosen; true from then on
        runtime.timer.start()
        runtime.device.reset_peak()  # the peak of building the model does not matter for steps

    def after_step(self, was_clipped: bool) -> None:
        """Runs the present phase. `was_clipped`: whether the step before this one was clipped."""
        self._num_steps += 1
        self._since += 1
        if self._num_steps > 2:  # the norm of the first step is often larger than all later ones
            self._clipped.append(was_clipped)
        self._phase(self._runtime.timer.take())
        self._runtime.timer.begin_step()

    # Measurements.

    def _begin(self, marks: StepMarks) -> None:
        """After the first step, which is a warm-up."""
        self._runtime.device.reset_peak()  # compilers and libraries take memory in the first step only
        self._wait()
        self._phase = self._time

    def _time(self, marks: StepMarks) -> None:
        """Times forward and backward alone, until updates start when they will start from then on."""
        self._alone.append(marks)
        is_early = self._agreed(len(self._alone) >= WATCHED_STEPS or not self._runtime.watches_gradients)
        self._wait()
        if is_early:
            self._phase = self._watch

    def _wait(self) -> None:
        """A barrier: the next step begins without pending updates."""
        self._runtime.wait()
        self._is_quiet = True
        self._since = 0

    def _watch(self, marks: StepMarks) -> None:
        """Times steps from the first forward to the end of `step()`, with the updates of the step before."""
        num_unsteady = 2 if self._runtime.settings.delayed_update else 1
        num_watched = self._since - num_unsteady
        # Reading the times waits for the device, so that the step after it is not like the others.
        if num_watched > 0 and num_watched != _NUM_FEW + 1:
            self._watched.append(marks)
            self._after_clipped.append(self._clipped[-1])
        if self._since == 1 and self._is_quiet:
            self._alone.append(marks)
        self._is_quiet = False
        if num_watched not in (_NUM_FEW, _NUM_MANY + 1):
            return
        found = self._read(self._watched)
        times = [each.step_s for each in found]
        is_clear = max(times) <= (1.0 + _AGREE) * min(times)
        # The step of a move is long, and the host is done with its updates before the next one begins. The first step
        # that is watched may therefore be shorter than all later ones.
        is_rising = num_watched == _NUM_FEW and times[0] < times[1] <= (1.0 + _RISE) * times[0]
        is_known = (is_clear or is_rising) and len(set(self._clipped)) == 1
        if not is_known and num_watched == _NUM_FEW:
            return
        if not is_known:
            backwards = sorted(each.backward_s for each in found)
            self._is_varied |= backwards[-2] > (1.0 + _VARIED) * backwards[0]  # one step may have been disturbed
        shortest_s, longest_s = (end(each.backward_s for each in found) for end in (min, max))
        # Otherwise the shortest times are those of the smallest inputs.
        if not self._is_varied and longest_s <= (1.0 + _VARIED) * shortest_s:
            self._least = Timing(
                min(self._least.forward_s, *(each.forward_s for each in found)),
                min(self._least.backward_s, *(each.backward_s for each in found)),
            )
        step_s = self._mean(times) if not is_known else min(times) if is_clear else times[1]
        LOGGER.debug(f"ratio auto: {step_s:.3f} s a step, {shares(self._places())}")
        self._seen.append(Seen(step_s, self._places(), host_share(self._runtime.buckets)))
        self._choose()

    def _mean(self, times: Sequence[float]) -> float:
        """The mean time of a step. The few watched steps count as many clipped steps as there were for longer."""
        clipped = [time for time, after in zip(times, self._after_clipped, strict=True) if after]
        others = [time for time, after in zip(times, self._after_clipped, strict=True) if not after]
        share = self._clipped_share if clipped and others else float(bool(clipped))
        return share * _typical(clipped) + (1.0 - share) * _typical(others)

    def _read(self, marks: Sequence[StepMarks]) -> list[Times]:
        """The times of rank 0. Waits for the last mark."""
        seconds = self._runtime.device.seconds
        own = []
        for one in marks:
            step_s, work_s = seconds(one.start, one.end), seconds(one.start, one.after_backward)
            each_s = work_s / self._runtime.settings.accumulation_steps
            parts = [each_s / 3, each_s * 2 / 3]  # usually a backward takes twice as long as a forward
            if one.parts is not None:
                forward, backward = one.parts
                parts = [seconds(forward, backward), seconds(backward, one.after_backward)]
            own.append([step_s, work_s, *parts])
        return [Times(*times) for times in self._agreed(own)]

    # The choice.

    def _choose(self) -> None:
        """Moves buckets to the next placement that is worth a try. If there is none, the fastest placement stays."""
        fastest_s = min(seen.step_s for seen in self._seen)
        alone_s, alone = self._times_alone()
        # Times alone that are longer than those with updates were disturbed, and say nothing. They may be disturbed
        # without such a sign, so after the first move nothing is concluded from them.
        is_near = alone_s <= (1.0 + 2.0 * _NEAR) * fastest_s and fastest_s <= (1.0 + _NEAR) * alone_s
        tries = (self._planned, self._fullest)
        while not (is_near and self._num_tried == 0) and self._num_tried < len(tries):
            self._runtime.wait()
            self._runtime.wait_for_copies()
            scale = min(1.0, fastest_s / alone_s)
            timing = replace(alone, forward_s=scale * alone.forward_s, backward_s=scale * alone.backward_s)
            find = tries[self._num_tried]
            self._num_tried += 1
            places = self._agreed(find(timing))
            if places is not None and all(tuple(places) != seen.places for seen in self._seen):
                self._move(places)
                return
        gain = _GAIN_AGAIN if self.is_settled else _GAIN
        # Later ones have more state on the device, or replace a placement with which training has run for some time.
        kept = next(seen for seen in self._seen if (1.0 - gain) * seen.step_s <= fastest_s)
        if kept.places != self._places():
            self._move(kept.places)
        self._report(kept, alone_s)
        self._settle()

    def _times_alone(self) -> tuple[float, Timing]:
        """Seconds of the forwards and backwards of a step alone, and the times of one of each.

        A watched step with a shorter forward or backward shows that the times alone were disturbed, because updates
        only make them longer.
        """
        alone = self._read(self._alone)
        forward_s = min(times.forward_s for times in alone)
        backward_s = min(times.backward_s for times in alone)
        timing = Timing(
            min(forward_s, self._least.forward_s),
            min(backward_s, self._least.backward_s),
            self._runtime.settings.accumulation_steps,
        )
        share = (timing.forward_s + timing.backward_s) / (forward_s + backward_s)
        return share * min(times.work_s for times in alone), timing

    def _planned(self, timing: Timing) -> Sequence[str] | None:
        """The planner's placement, if it is predicted to be as fast as the fastest one so far."""
        size, room, ways = self._size(), self._room(), self._ways(timing)
        items = items_of(self._units, timing, is_early=self._runtime.settings.early)
        if self._rates is None:
            rates = self._measure()
            self._rates = rates if self._team is None else Rates(**gather_json(self._team.calls, asdict(rates))[0])
        if any(item.place == HOST for item in items):
            self._speed = self._speed_of(items, timing, self._seen[-1].step_s, ways)
        decision = self._decision(self._ahead_numel(items, size, room))
        # All inputs of a prediction, so that a log shows why a placement was rejected.
        LOGGER.debug(f"ratio auto: {self._rates}, host {self._speed:.2f}; {timing}; {decision}; {room}")
        with suppress(MemoryError):  # no placement leaves the reserve that the planner wants; the present one works
            rates = _scaled(self._rates, _MARGIN * self._speed)
            choice = choose(items, timing, rates, self._states, decision, room, size, ways)
            LOGGER.debug(f"ratio auto: {choice.why}")
            if choice.prediction.step_s <= (1.0 + _WORSE) * self._to_beat(items, timing, rates, room):
                return self._by_bucket(choice.places)
        return None

    def _fullest(self, timing: Timing) -> Sequence[str] | None:
        """As much state on the device as fits, if it is predicted to be as fast as the fastest placement so far."""
        room, beside = self._room(), self._beside()
        left = room.gpu_bytes
        before = items_of(self._units, timing, is_early=self._runtime.settings.early)
        items = list(before)
        for i in input_side_first(items):
            left -= self._unit_bytes(self._units[i], RESIDENT) + int(items[i].numel * beside)
            items[i] = items[i].at(RESIDENT if left >= 0 else HOST)
        assert self._rates is not None
        rates = _scaled(self._rates, self._speed)
        decision = self._decision(self._ahead_numel(items, self._size(), room))
        found = predict(items, timing, rates, self._states, decision, self._ways(timing))
        is_tried = found.step_s <= (1.0 + _MUCH_WORSE) * self._to_beat(before, timing, rates, room)
        return self._by_bucket([item.place for item in items]) if is_tried else None

    def _to_beat(self, items: Sequence[Item], timing: Timing, rates: Rates, room: Memory) -> float:
        """The time of the fastest placement so far: as measured, or as predicted if that is longer.

        A prediction is compared with a prediction, because both have the same error. If forward and backward alone or
        the rates of the host were measured too slow, all predictions are longer than the measured step, and a
        comparison with that step alone would reject placements that are faster.
        """
        fastest = min(self._seen, key=lambda seen: seen.step_s)
        placed = [item.at(fastest.places[unit[0].plan.index]) for unit, item in zip(self._units, items, strict=True)]
        decision = self._decision(self._ahead_numel(placed, self._size(), room))
        found = predict(placed, timing, rates, self._states, decision, self._ways(timing))
        return max(fastest.step_s, found.step_s)

    def _speed_of(self, items: Sequence[Item], timing: Timing, step_s: float, ways: Ways) -> float:
        """The factor of the host's rates with which the present placement is predicted to take `step_s`."""
        assert self._rates is not None
        known = self._rates
        decision = self._decision(int(self._runtime.speculative_stores.num_bytes / self._size().host))

        def predicted(speed: float) -> float:
            return predict(items, timing, _scaled(known, speed), self._states, decision, ways).step_s

        low, high = (_SLOWEST, 1.0) if predicted(1.0) < step_s else (1.0, _FASTEST)
        if predicted(high) > step_s:
            return 1.0  # even the fastest host does not explain such a short step, so the host is not the reason
        if predicted(low) < step_s:
            return low
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if predicted(middle) > step_s else (low, middle)
        return (low + high) / 2

    def _decision(self, ahead_numel: int) -> ClipDecision:
        return ClipDecision(self._runtime.settings.limits.any, ahead_numel, self._clipped_share)

    @property
    def _clipped_share(self) -> float:
        return sum(self._clipped) / max(1, len(self._clipped))

    def _settle(self) -> None:
        """Keeps the present placement, and compares later steps with those that follow now (`_keep`)."""
        self.is_settled = True
        self._since = 0
        self._watched = []
        self._change.forget()
        self._phase = self._keep

    def _report(self, kept: Seen, alone_s: float) -> None:
        others = [
            f"{seen.name} {seen.step_s:.3f} s ({seen.step_s / kept.step_s - 1.0:+.0%})"
            for seen in self._seen
            if seen is not kept
        ]
        compared = "; ".join([", ".join(others), ""]) if others else ""
        share = host_share(self._runtime.buckets)
        self.report = (
            f"ratio auto: {share:.2f} of the state on the host, {kept.step_s:.3f} s a step; {compared}forward and "
            f"backward alone {alone_s:.3f} s{self._trouble}"
        )
        self._log(self.report)

    def _log(self, text: str) -> None:
        if self._team is None or self._team.rank == 0:
            LOGGER.info(text)

    def _by_bucket(self, places: Sequence[str]) -> tuple[str, ...]:
        """The place of each bucket, from the place of each unit."""
        found = {b.plan.index: b.plan.at(p).place for unit, p in zip(self._units, places, strict=True) for b in unit}
        return tuple(found[bucket.plan.index] for bucket in self._runtime.buckets)

    def _unit_bytes(self, unit: Sequence[Bucket], place: str) -> int:
        """Bytes of a unit's state in a place, on the device with the weights that are there because of it."""
        return sum(self._state_bytes(bucket.plan.at(place)) for bucket in unit)

    def _places(self) -> tuple[str, ...]:
        return tuple(bucket.plan.place for bucket in self._runtime.buckets)

    def _move(self, places: Sequence[str]) -> int:
        """Moves units to `places`, the host's first, until memory is full. Returns the number of moved units."""
        runtime = self._runtime
        runtime.wait()
        runtime.wait_for_copies()
        moves = []
        for unit in self._units:
            place = places[unit[0].plan.index]
            # State cannot move to the device if the user has changed the memory format of a parameter.
            can_alias = all(not b.plan.can_alias or all(target.dim() == 1 for target in b.targets) for b in unit)
            if any(bucket.plan.place != place for bucket in unit) and (place == HOST or can_alias):
                moves.append((unit, place))
        if any(place == HOST for _, place in moves):
            # They may have the memory that the state needs. `on_placed` makes those for which there is room.
            runtime.speculative_stores.prepare([])
        num_moved = 0
        for unit, place in sorted(moves, key=lambda move: move[1] != HOST):
            try:
                if self._has_weights and unit[0].plan.block != ROOT:
                    reconfigure.move_block(runtime, unit[0].plan.block, place)
                else:
                    for bucket in unit:
                        reconfigure.move(runtime, bucket, place)
            except MemoryError:
                where = "the device's" if place == RESIDENT else "the host's"
                self._trouble = f"; {where} memory was full after {num_moved} of {len(moves)} moves"
                break
            num_moved += 1
        runtime.device.reset_peak()  # to measure the peak of steps with the new placement
        self._on_placed(runtime)
        self._watched = []
        self._after_clipped = []
        self._wait()
        return num_moved

    def _size(self) -> StateBytes:
        """Bytes of state for each element, by place. Resident state includes gradients that wait or are added there.

        With weights on the host, resident state includes weights, which only blocks need. All state then counts as that
        of the largest blocks.
        """
        numel = sum(bucket.plan.numel for bucket in self._runtime.buckets)
        each = {place: sum(self._unit_bytes(unit, place) for unit in self._units) / numel for place in PLACES}
        if self._has_weights:
            each[RESIDENT] = max(self._unit_bytes(unit, RESIDENT) / _numel(unit) for unit in self._units)
        return StateBytes(each[HOST], each[RESIDENT] + self._beside(), each[STREAMED])

    @property
    def _has_weights(self) -> bool:
        """Whether the weights of a block move with its state."""
        return bool(self._weight_bytes)

    def _beside(self) -> float:
        """Bytes of gradients for each element of resident state that wait or are added on the device."""
        settings = self._runtime.settings
        waits_there = (settings.limits.any and settings.hold_on_host) or settings.delayed_update
        return (self._width() if waits_there else 0.0) + (4.0 if settings.sums_on_host else 0.0)

    def _width(self) -> float:
        """Mean number of bytes of a gradient element."""
        plans = [bucket.plan for bucket in self._runtime.buckets]
        return sum(plan.numel * plan.dtype.itemsize for plan in plans) / sum(plan.numel for plan in plans)

    def _ways(self, timing: Timing) -> Ways:
        """The planner's inputs: bytes of a gradient and of a weight element, and options of the runtime.

        Streamed state is excluded if gradients wait or are summed on the host, or if weights are there.
        """
        settings, width = self._runtime.settings, self._width()
        streams = not (settings.hold_on_host and settings.limits.any) and not settings.sums_on_host
        fetches = fetches_of(self._units, timing, self._weight_bytes) if self._has_weights else ()
        return Ways(
            width, width, settings.num_slots, settings.delayed_update, streams and not self._has_weights, fetches
        )

    def _room(self, share: float = 1.0) -> Memory:
        """Memory for state: the memory that state and speculative stores use now, plus free memory, minus a reserve.

        `share` scales the device's reserve.
        """
        runtime = self._runtime
        capacity = runtime.device.capacity_bytes()
        on_device, on_host = self._used()
        host = own_host_bytes() + on_host + runtime.speculative_stores.num_bytes
        host -= max(_HOST_LEAST, int(_HOST_SHARE * host))
        there = 0  # if the model is on the CPU, device memory is host memory
        if capacity is not None:
            needed = runtime.device.peak_bytes() - on_device  # without state
            reserve = max(_DEVICE_LEAST, _DEVICE_SHARE * capacity) + (_GROWTH * needed if self._is_varied else 0.0)
            there = capacity - needed - int(share * reserve)
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

    def _keep(self, marks: StepMarks) -> None:
        self._watched.append(marks)
        if self._since % _CHECK_EVERY == 0:
            self._check()

    def _check(self) -> None:
        """Moves state to the host if the device has too little free memory, or measures again after a change."""
        found = self._read(self._watched[:-1])  # the last step may still run
        self._watched = []
        moves = self._agreed(self._back_off())
        if moves is not None:
            if num_moved := self._move(moves):
                what = "blocks" if self._has_weights else "buckets"
                self._log(
                    f"ratio auto: the device has too little free memory. {num_moved} {what} were moved to the host, "
                    f"which has {host_share(self._runtime.buckets):.2f} of the state now{self._trouble}"
                )
            self._change.forget()
        elif found:
            step_s = statistics.median(times.step_s for times in found)
            backward_s = statistics.median(times.backward_s for times in found)
            if self._change.has_changed(step_s, backward_s, self._clipped_share) and self._since >= self._rest:
                self._log(f"ratio auto: steps have changed (now {step_s:.3f} s), and the placement is chosen again.")
                self._start_again()

    def _start_again(self) -> None:
        self._rest = min(2 * self._rest, _LONGEST_REST)
        self._alone = []
        self._least = _UNKNOWN
        self._after_clipped = []
        self._seen = []
        self._num_tried = 0
        self._trouble = ""
        self._runtime.device.reset_peak()  # the memory that steps need may have changed too
        self._wait()
        self._phase = self._time

    def _back_off(self) -> list[str] | None:
        """Places with more state on the host, if the device has too little free memory."""
        room = self._room(share=0.5)
        resident = [unit for unit in self._units if any(bucket.plan.place == RESIDENT for bucket in unit)]
        on_device, on_host = self._used()
        over = on_device - room.gpu_bytes
        places, spare = list(self._places()), room.host_bytes - on_host
        for unit in sorted(resident, key=lambda unit: -unit[0].deadline):
            needed = self._unit_bytes(unit, HOST)
            if over <= 0 or needed > spare:
                break
            for bucket in unit:
                places[bucket.plan.index] = bucket.plan.at(HOST).place
            over, spare = over - self._unit_bytes(unit, RESIDENT), spare - needed
        return places if tuple(places) != self._places() else None


def host_share(buckets: Sequence[Bucket]) -> float:
    """The share of the elements whose state is on the host."""
    return sum(b.plan.numel for b in buckets if b.plan.place != RESIDENT) / sum(b.plan.numel for b in buckets)


def units_of(buckets: Sequence[Bucket], has_weights: bool) -> list[list[Bucket]]:
    """The buckets that move together: with weights on the host those of a block, otherwise several experts of a block,
    or each bucket on its own.
    """
    units: list[list[Bucket]] = []
    open_units: dict[int, list[Bucket]] = {}  # by block: the unit to which its next bucket belongs
    for bucket in buckets:
        block = bucket.plan.block
        unit = open_units.get(block, [])
        is_expert = bool(unit) and bucket.plan.expert > 0 and unit[0].plan.expert > 0
        together = has_weights or (is_expert and _numel(unit) + bucket.plan.numel <= BUCKET_NUMEL)
        if not unit or block == ROOT or not together:
            open_units[block] = unit = []
            units.append(unit)
        unit.append(bucket)
    return units


def items_of(units: Sequence[Sequence[Bucket]], timing: Timing, is_early: bool) -> list[Item]:
    """Estimates when gradients of each unit are complete and its weights are needed, with equal time per element."""
    places = _places_in_forward(units)
    items = []
    for i, unit in enumerate(units):
        block, x, _ = places.get(i, (-1, 0.0, 0.0))  # parameters outside all blocks are needed first
        ready = (1.0 - x) * timing.backward_s if is_early else timing.backward_s
        products = sum(update_flops(bucket) for bucket in unit)
        items.append(Item(_numel(unit), unit[0].plan.place, ready, x * timing.forward_s, block, products))
    return items


def fetches_of(
    units: Sequence[Sequence[Bucket]], timing: Timing, weight_bytes: Mapping[int, float]
) -> tuple[Fetch, ...]:
    """The copies of the weights of each block, in the order of a forward. `weight_bytes`: see `AutoPlacement`."""
    found = []
    for i, (_, start, end) in _places_in_forward(units).items():
        nbytes = int(weight_bytes[units[i][0].plan.block] * _numel(units[i]))
        found.append(Fetch(nbytes, start * timing.forward_s, (1.0 - end) * timing.backward_s))
    return tuple(found)


def _places_in_forward(units: Sequence[Sequence[Bucket]]) -> dict[int, tuple[int, float, float]]:
    """For the index of each unit inside of blocks: its position in a forward, and the shares of the elements inside of
    blocks that come before it and that have passed after it. In the order of a forward.
    """
    inside = [i for i, unit in enumerate(units) if unit[0].plan.block != ROOT]
    inside.sort(key=lambda i: (units[i][0].deadline, units[i][0].plan.index))
    total = sum(_numel(units[i]) for i in inside)
    found, passed = {}, 0
    for position, i in enumerate(inside):
        start, passed = passed, passed + _numel(units[i])
        found[i] = position, start / total, passed / total
    return found


def _numel(unit: Sequence[Bucket]) -> int:
    return sum(bucket.plan.numel for bucket in unit)


def _typical(times: Sequence[float]) -> float:
    """The mean without the shortest and the longest time, which may have been disturbed. 0 if there are no times."""
    return statistics.mean(sorted(times)[1:-1] or times) if times else 0.0


def _scaled(rates: Rates, speed: float) -> Rates:
    """A copy of `rates` for a host that updates at `speed` times its rate. Copies slow down by half as much."""
    link = (1.0 + speed) / 2
    return replace(
        rates,
        host_params={name: rate * speed for name, rate in rates.host_params.items()},
        host_params_copying={name: rate * speed for name, rate in rates.host_params_copying.items()},
        out_bytes=rates.out_bytes * link,
        in_bytes=rates.in_bytes * link,
        duplex_bytes=rates.duplex_bytes * link,
    )


def first_ratio(needed: int, free_bytes: int) -> float:
    """The first ratio: the share of the `needed` bytes that fits on the host; 1 if `free_bytes` is 0 (not known)."""
    usable = free_bytes - max(_HOST_LEAST, int(_HOST_SHARE * free_bytes))
    return 1.0 if free_bytes == 0 or needed <= usable else max(0.0, usable / needed)
