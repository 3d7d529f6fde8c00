# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a training step by simulating what the runtime does with every bucket. A bucket is a group of
parameters that are copied and updated together.

Four units work concurrently: the GPU, a copy channel in each direction, and the update worker of the host. Between two
events each unit has a constant rate. The rate depends on the other units: copies slow down each other and the host. The
simulation advances from event to event, so sixty buckets take some milliseconds. Steps are simulated until two
consecutive ones take nearly equally long (at most seven). Such a step also includes the updates of the previous step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Final

from twinflow.planner.formats import UPDATE_BYTES, StateBytes, state_bytes
from twinflow.planner.machines import Rates

PLACES: Final = ("resident", "host", "streamed")  # state on the GPU; on the host; on the host, updated on the GPU
NUM_STAGES: Final = 3  # streamed buckets on the GPU at a time: one is loaded, one is updated, one is stored
_HOST_TASK_S: Final = 3e-4  # overhead of an update: threads wake up, a bucket is selected
_COPY_TASK_S: Final = 2e-4  # overhead of a copy
_DECISION_S: Final = 1e-3  # from the end of backward until the host has read the norm
_MAX_STEPS: Final = 6
_SAME: Final = 2e-3  # relative difference below which two steps count as equally long
_EPS: Final = 1e-9
_BLOCKS_AHEAD: Final = 2  # blocks that are fetched while one runs, if weights are on the host
_MOST_MICRO_BATCHES: Final = 4  # simulated micro-batches with weights on the host; others take as long as the third
# The units beside the GPU: copies to the host, copies to the GPU, updates on the host.
_UNITS: Final = ("out", "in", "host")
_OUT, _IN, _HOST = _UNITS


@dataclass(frozen=True)
class Item:
    """A bucket: its size, the place of its state, and the times when its gradient is complete and its weights are
    needed."""

    numel: int
    place: str
    ready: float  # time at which the gradient is complete, in seconds after the start of the last backward
    need: float  # time at which the weights are needed, in seconds after the start of the next step's first forward
    block: int = -1  # index of its block in `Ways.fetches`; -1: outside of all blocks
    # For matrices that Muon updates: FLOPs of the update. Their state is streamed if it is on the host.
    products: float = 0.0

    def at(self, place: str) -> Item:
        """The item in another place."""
        return replace(self, place="streamed" if self.products and place == "host" else place)


@dataclass(frozen=True)
class Fetch:
    """The weights of a block that are on the host and are copied to the GPU before each forward and each backward.

    If the state of some of the block's elements is on the GPU, their weights are there too and are not copied.
    """

    nbytes: int  # of all weights of the block
    forward_s: float  # time at which the block starts, in seconds after the start of a forward
    # The same in a backward. None: an embedding or output layer, which is copied before each forward only.
    backward_s: float | None
    owner: int | None = None  # for a tied output layer: the index of the block that has its weights


@dataclass(frozen=True)
class Timing:
    """Time of forward and backward of one micro-batch on the GPU alone."""

    forward_s: float
    backward_s: float
    micro_batches: int = 1

    @property
    def gpu_s(self) -> float:
        """Seconds of a step without updates."""
        return self.micro_batches * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class ClipDecision:
    """Whether updates wait for the gradient norm, and how many elements may be updated before it is known."""

    clips: bool
    ahead_numel: int = 0
    clipped_share: float = 0.0  # share of the steps that are clipped, in which early updates are repeated


@dataclass(frozen=True)
class Ways:
    """Bytes and limits of the copies between GPU and host."""

    grad_bytes: float = 2.0  # of a gradient for each parameter, copied to the host
    weight_bytes: float = 2.0  # of a weight for each parameter, copied to the GPU
    num_slots: int = 4  # buckets of gradients on the host at a time
    delayed: bool = False  # an update may take a whole step
    streams: bool = True  # whether state may be streamed to the GPU for its update
    fetches: tuple[Fetch, ...] = ()  # weights on the host, by block; () if all weights are on the GPU
    # Of streamed state, copied for each parameter; `host`: with weights that blocks fetch. None: that of bf16 weights.
    copied: StateBytes | None = None
    flat_bytes: float = inf  # of gradients that wait on the GPU for their copy to the host; backward waits for room


@dataclass(frozen=True)
class Prediction:
    """Time of a step in the steady state."""

    step_s: float
    bound_by: str  # "gpu", "host", "copies", or "gate": the wait for the gradient norm
    host_busy_s: float  # time of updates on the host
    out_s: float  # time of copies to the host
    in_s: float  # time of copies to the GPU
    waited_s: float  # time that the GPU waits for weights


_SECONDS: Final = ("step_s", "host_busy_s", "out_s", "in_s", "waited_s")


def predict(
    items: Sequence[Item], timing: Timing, rates: Rates, states: str, decision: ClipDecision, ways: Ways | None = None
) -> Prediction:
    """Predict a step in the steady state. `items`: the buckets of the run.

    If some steps are clipped, the result is the mean over all steps.
    """
    ways = ways or Ways()
    if ways.delayed:
        return _delayed(items, timing, rates, states, ways)
    share = decision.clipped_share if decision.clips and decision.ahead_numel else 0.0
    if share > 0.0:
        # A clipped step takes as long as one without early updates: they are repeated when the norm is known.
        clipped = predict(items, timing, rates, states, ClipDecision(clips=True), ways)
        if share >= 1.0:
            return clipped
        kept = predict(items, timing, rates, states, ClipDecision(True, decision.ahead_numel), ways)
        return _mixed(clipped, kept, share)
    play = Play(items, timing, rates, states, decision, ways)
    last = play.step()
    for _ in range(_MAX_STEPS):
        this = play.step()
        if abs(this.step_s - last.step_s) <= _SAME * last.step_s:
            break
        last = this
    return this


def _mixed(first: Prediction, second: Prediction, share: float) -> Prediction:
    """The mean of two predictions, of which the first has the weight `share`."""
    values = {name: share * getattr(first, name) + (1.0 - share) * getattr(second, name) for name in _SECONDS}
    return Prediction(bound_by=first.bound_by if share > 0.5 else second.bound_by, **values)


def _delayed(items: Sequence[Item], timing: Timing, rates: Rates, states: str, ways: Ways) -> Prediction:
    """Prediction with delayed updates, which may take a whole step: the slowest unit determines the time of a step."""
    numel = {place: sum(i.numel for i in items if i.place == place) for place in PLACES}
    on_gpu = (numel["resident"] + numel["streamed"]) * UPDATE_BYTES[states] / rates.device_bytes
    stream = numel["streamed"] * state_bytes(states).streamed
    out_s = (numel["host"] * ways.grad_bytes + stream) / rates.duplex_bytes
    in_s = (numel["host"] * ways.weight_bytes + stream) / rates.duplex_bytes
    host_s = numel["host"] / rates.host_params[states] + _HOST_TASK_S * sum(i.place == "host" for i in items)
    gpu_s = timing.gpu_s + on_gpu
    longest = {"gpu": gpu_s, "host": host_s, "copies": max(out_s, in_s)}
    bound = max(longest, key=lambda name: longest[name])
    return Prediction(longest[bound], bound, host_s, out_s, in_s, longest[bound] - gpu_s)


def _in_order(events: Sequence[tuple[float, str, int]], length_s: float) -> list[tuple[str, float]]:
    """The program of one forward or backward of `length_s`: events at their times, with work between them."""
    program: list[tuple[str, float]] = []
    at = 0.0
    for time, what, index in sorted(events, key=lambda event: event[0]):
        time = min(max(time, at), length_s)
        program += [("work", time - at), (what, float(index))]
        at = time
    return [*program, ("work", length_s - at)]


class Play:
    """Simulation of the machine and of the executor (`csrc/executor.h`), which orders copies and updates."""

    def __init__(
        self, items: Sequence[Item], timing: Timing, rates: Rates, states: str, decision: ClipDecision, ways: Ways
    ) -> None:
        self.items, self.timing, self.decision, self.ways = items, timing, decision, ways
        self.device_s = [item.numel * UPDATE_BYTES[states] / rates.device_bytes for item in items]
        if rates.flops:
            self.device_s = [s + item.products / rates.flops for s, item in zip(self.device_s, items, strict=True)]
        copied, matrix = ways.copied or state_bytes(states), state_bytes(states, num_moments=1)
        self.stream_bytes = [
            matrix.streamed if item.products else copied.host if self._is_fetched(i) else copied.streamed
            for i, item in enumerate(items)
        ]
        host, copying = rates.host_params[states], rates.host_params_copying[states]
        # Rates of the units, by the number of directions that copy.
        self.unit_rates = (
            {_OUT: rates.out_bytes, _IN: rates.in_bytes, _HOST: host},
            {_OUT: rates.out_bytes, _IN: rates.in_bytes, _HOST: 0.5 * (host + copying)},
            {_OUT: rates.duplex_bytes, _IN: rates.duplex_bytes, _HOST: copying},
        )
        self.program = self._program()
        self.is_fresh = [True] * len(items)  # whether the GPU has the weights that the next forward needs
        self.has_grad = [False] * len(items)
        self.is_staged = [False] * len(items)  # streamed: the GPU has the state for the next update
        self.is_stored = [True] * len(items)  # streamed: the host has the state of the last update
        order = [i for i, item in enumerate(items) if item.place == "streamed"]
        # States are loaded in the order of use. This is the order of the gradients, or with clipping the order of the
        # next forward.
        self.stream_order = sorted(order, key=lambda i: items[i].need if decision.clips else items[i].ready)
        self.next_stage, self.free_stages, self.free_slots = 0, NUM_STAGES, ways.num_slots
        self.to_out: list[tuple[float, int]] = []  # heap, first needed first: gradients that are complete on the GPU
        self.arrived: list[tuple[float, int]] = []  # heap: gradients on the host
        self.to_send: list[tuple[float, int]] = []  # heap: weights that are updated on the host
        self.ahead: list[int] = []  # buckets updated before the norm is known
        self.to_store: list[int] = []  # streamed states to copy back to the host
        self.tasks: dict[str, tuple[str, int]] = {}  # kind and item of the current task of each busy unit
        self.left: dict[str, float] = {}  # remaining bytes of a copy, remaining elements of an update
        self.is_open, self.ahead_left, self.decision_in = True, 0, -1.0
        self.debt_s = 0.0  # seconds of updates that the GPU does before its next work
        self.asked: list[int] = []  # blocks to fetch, in this order
        self.block_items = [[i for i, it in enumerate(items) if it.block == k] for k in range(len(ways.fetches))]
        owners = [k if fetch.owner is None else fetch.owner for k, fetch in enumerate(ways.fetches)]
        self.fetch_bytes = [
            fetch.nbytes * self._host_share(self.block_items[owner])
            for fetch, owner in zip(ways.fetches, owners, strict=True)
        ]
        self.is_here = [not nbytes for nbytes in self.fetch_bytes]  # blocks whose weights are on the GPU

    def _is_fetched(self, i: int) -> bool:
        """Whether the weights of an item that is not resident are on the host."""
        return bool(self.ways.fetches) and self.items[i].block >= 0

    def _host_share(self, own: Sequence[int]) -> float:
        """The share of a block's elements whose state, and with it their weights, is on the host. `own`: its items."""
        total = sum(self.items[i].numel for i in own)
        here = sum(self.items[i].numel for i in own if self.items[i].place == "resident")
        return 1.0 - here / total if total else 1.0

    def _program(self) -> list[tuple[str, float]]:
        """The program of the GPU for a step: compute for some seconds, wait for weights, complete a gradient."""
        if self.ways.fetches:
            return self._program_with_fetches()
        timing, program = self.timing, [("begin", 0.0)]
        at = 0.0
        for i in sorted(range(len(self.items)), key=lambda i: self.items[i].need):
            item = self.items[i]
            need = min(max(item.need, at), timing.forward_s)
            program += [("work", need - at), ("wait", i)]
            if item.place == "resident" and self.decision.clips:
                program.append(("work", self.device_s[i]))
            at = need
        between = (timing.micro_batches - 1) * (timing.forward_s + timing.backward_s)
        program += [("work", timing.forward_s - at + between), ("close", 0.0)]
        at = 0.0
        for i in sorted(range(len(self.items)), key=lambda i: self.items[i].ready):
            ready = min(max(self.items[i].ready, at), timing.backward_s)
            program += [("work", ready - at), ("ready", i)]
            at = ready
        return [p for p in (*program, ("work", timing.backward_s - at), ("end", 0.0)) if p[0] != "work" or p[1] > 0]

    def _program_with_fetches(self) -> list[tuple[str, float]]:
        """The program if weights are on the host: each micro-batch fetches every block in forward and in backward."""
        timing, fetches = self.timing, self.ways.fetches
        num_simulated = min(timing.micro_batches, _MOST_MICRO_BATCHES)
        roots = [(0.0, "wait", i) for i, item in enumerate(self.items) if item.block < 0]
        ready = [(item.ready, "ready", i) for i, item in enumerate(self.items)]
        if self.decision.clips:  # without clipping, the GPU updates its state in backward (`_ready`)
            roots += [(item.need, "update", i) for i, item in enumerate(self.items) if item.place == "resident"]
        forward = [(fetch.forward_s, "forward", k) for k, fetch in enumerate(fetches)]
        backward = [
            (fetch.backward_s, "backward", k) for k, fetch in enumerate(fetches) if fetch.backward_s is not None
        ]
        program: list[tuple[str, float]] = []
        for number in range(num_simulated):
            is_last = number == num_simulated - 1
            program.append(("micro-batch", number))
            program += _in_order([*(roots if number == 0 else []), *forward], timing.forward_s)
            program += [("close", 0.0)] if is_last else []
            program += _in_order([*backward[::-1], *(ready if is_last else [])], timing.backward_s)
        return [p for p in (*program, ("end", 0.0)) if p[0] != "work" or p[1] > 0]

    def step(self) -> Prediction:
        """Simulate one more step and return its times."""
        self.now = self.waited_s = self.undecided_s = 0.0
        starts: list[float] = []  # of the micro-batches, if weights are on the host
        self.busy_s = dict.fromkeys(_UNITS, 0.0)
        for what, value in self.program:
            if what == "work":
                self._run(value)
            elif what == "wait":
                i = int(value)
                before = self.now
                while not self.is_fresh[i] or self.debt_s > _EPS:
                    self._advance(self.debt_s if self.debt_s > _EPS else None)
                self.waited_s += self.now - before
            elif what == "ready":
                self._ready(int(value))
            elif what == "update":
                self.debt_s += self.device_s[int(value)]
            elif what == "micro-batch":
                starts.append(self.now)
                self.is_here = [not nbytes for nbytes in self.fetch_bytes]
                self.asked.clear()
                self._ask(self._ahead(0, 1))
            elif what in ("forward", "backward"):
                self._enter(int(value), 1 if what == "forward" else -1)
            elif what == "close" and self.decision.clips:
                self.is_open, self.ahead_left = False, self.decision.ahead_numel
            elif what == "end" and self.decision.clips:
                self.decision_in = _DECISION_S
        busy, step_s = self.busy_s, self.now
        if len(starts) == _MOST_MICRO_BATCHES:  # neither updates nor their copies run in the third micro-batch
            step_s += (self.timing.micro_batches - _MOST_MICRO_BATCHES) * (starts[3] - starts[2])
        return Prediction(step_s, self._bound_by(), busy[_HOST], busy[_OUT], busy[_IN], self.waited_s)

    def _enter(self, block: int, direction: int) -> None:
        """A block runs, in a forward (direction 1) or a backward (-1): the GPU waits for its weights and asks for those
        of the next blocks. The block before it is freed.
        """
        self._ask([block])
        before = self.now
        while not self.is_here[block] or self.debt_s > _EPS:
            self._advance(self.debt_s if self.debt_s > _EPS else None)
        self.waited_s += self.now - before
        if 0 <= block - direction < len(self.is_here):
            self.is_here[block - direction] = not self.fetch_bytes[block - direction]
        self._ask(self._ahead(block + direction, direction))

    def _ahead(self, start: int, direction: int) -> list[int]:
        """The next blocks with weights on the host, from the block `start` on."""
        blocks = range(start, len(self.fetch_bytes) if direction > 0 else -1, direction)
        wanted = [k for k in blocks if direction > 0 or self.ways.fetches[k].backward_s is not None]
        return [k for k in wanted if self.fetch_bytes[k]][:_BLOCKS_AHEAD]

    def _ask(self, blocks: Iterable[int]) -> None:
        fetching = self.tasks[_IN][1] if self.tasks.get(_IN, ("", 0))[0] == "fetch" else -1
        for k in blocks:
            if 0 <= k < len(self.is_here) and not self.is_here[k] and k not in self.asked and k != fetching:
                self.asked.append(k)

    def _bound_by(self) -> str:
        if self.waited_s < 0.03 * self.now:
            return "gpu"
        if self.undecided_s > 0.5 * self.waited_s:
            return "gate"
        host_s, copies_s = self.busy_s[_HOST], max(self.busy_s[_OUT], self.busy_s[_IN])
        if not max(host_s, copies_s):  # the wait is for updates on the GPU
            return "gpu"
        return "host" if host_s >= copies_s else "copies"

    def _run(self, seconds: float) -> None:
        """The GPU computes for some seconds, after its pending updates."""
        while seconds > _EPS or self.debt_s > _EPS:
            is_paying = self.debt_s > _EPS
            taken = self._advance(self.debt_s if is_paying else seconds)
            if not is_paying:
                seconds -= taken

    def _ready(self, i: int) -> None:
        item = self.items[i]
        if item.place == "resident":
            if not self.decision.clips:
                self.debt_s += self.device_s[i]
            return
        before, room = self.now, self.ways.flat_bytes - item.numel * self.ways.grad_bytes
        while self._waiting_bytes() > max(0.0, room):
            self._advance(self.debt_s if self.debt_s > _EPS else None)
        self.waited_s += self.now - before
        self.is_fresh[i] = False
        if item.place == "host":
            heappush(self.to_out, (item.need, i))
        else:
            self.has_grad[i] = True
            self._try_streamed(i)

    def _waiting_bytes(self) -> float:
        """Bytes of gradients on the GPU that wait for their copy to the host, with the one that is copied, or for their
        update on the GPU.
        """
        copied = self.left[_OUT] if self.tasks.get(_OUT, ("", 0))[0] == "gradient" else 0.0
        waiting = [*(i for _, i in self.to_out), *(i for i in self.stream_order if self.has_grad[i])]
        return copied + sum(self.items[i].numel for i in waiting) * self.ways.grad_bytes

    def _advance(self, limit: float | None) -> float:
        """Advance to the next event, at most by `limit` seconds of GPU work. Returns the seconds that passed."""
        self._start()
        rates = self.unit_rates[(_OUT in self.tasks) + (_IN in self.tasks)]
        busy = [unit for unit in _UNITS if unit in self.tasks]
        seconds = inf if limit is None else limit
        for unit in busy:
            seconds = min(seconds, self.left[unit] / rates[unit])
        if self.decision_in > 0.0:
            seconds = min(seconds, self.decision_in)
        assert seconds < inf, "the step waits for weights that no task produces"
        self.now += seconds
        self.debt_s = max(0.0, self.debt_s - seconds)
        if self.decision_in > 0.0:
            self.decision_in -= seconds
            if self.decision_in <= _EPS:
                self._open()
        for unit in busy:
            self.busy_s[unit] += seconds
            self.left[unit] -= seconds * rates[unit]
            if self.left[unit] <= 1.0:
                self._finish(*self.tasks.pop(unit))
        if _HOST not in busy and not self.is_open and self.to_out:
            self.undecided_s += seconds
        return seconds

    def _start(self) -> None:
        """Start the next task of every idle unit that has one."""
        if _HOST not in self.tasks and self.arrived:
            self._begin(_HOST, "update", heappop(self.arrived)[1], 1.0, _HOST_TASK_S)
        if _OUT not in self.tasks:
            if self.to_out and self.free_slots and (i := self._next_out()) is not None:
                self.free_slots -= 1
                self._begin(_OUT, "gradient", i, self.ways.grad_bytes, _COPY_TASK_S)
            elif self.to_store:
                i = self.to_store.pop(0)
                self._begin(_OUT, "store state", i, self.stream_bytes[i], _COPY_TASK_S)
        if _IN not in self.tasks:
            if self.to_send:
                self._begin(_IN, "weight", heappop(self.to_send)[1], self.ways.weight_bytes, _COPY_TASK_S)
            elif (block := self._next_fetch()) is not None:
                self.asked.remove(block)
                self.tasks[_IN] = "fetch", block
                overhead_s = _COPY_TASK_S * max(1, len(self.block_items[block]))
                self.left[_IN] = self.fetch_bytes[block] + overhead_s * self.unit_rates[0][_IN]
            elif self.stream_order and self.free_stages and self._can_load(self.stream_order[self.next_stage]):
                self.free_stages -= 1
                i = self.stream_order[self.next_stage]
                self._begin(_IN, "load state", i, self.stream_bytes[i], _COPY_TASK_S)
                self.next_stage = (self.next_stage + 1) % len(self.stream_order)

    def _begin(self, unit: str, kind: str, i: int, width: float, overhead_s: float) -> None:
        """Start a task of item `i`. `width`: bytes that a copy moves for each element; 1 for an update."""
        self.tasks[unit] = kind, i
        self.left[unit] = self.items[i].numel * width + overhead_s * self.unit_rates[0][unit]

    def _can_load(self, i: int) -> bool:
        return self.is_stored[i] and not self.is_staged[i]

    def _next_fetch(self) -> int | None:
        """The first block that was asked for and whose weights are up to date on the host."""
        return next((k for k in self.asked if all(self.is_fresh[i] for i in self.block_items[k])), None)

    def _next_out(self) -> int | None:
        """The index of the gradient to copy next: of the buckets that may be updated, the one that is needed first.

        Before the norm is known, a bucket may be updated only if memory for early updates is left.
        """
        if self.is_open:
            return heappop(self.to_out)[1]
        found = next((e for e in sorted(self.to_out) if self.items[e[1]].numel <= self.ahead_left), None)
        if found is None:
            return None
        self.to_out.remove(found)
        self.to_out.sort()  # a sorted list is a heap
        self.ahead_left -= self.items[found[1]].numel
        return found[1]

    def _finish(self, kind: str, i: int) -> None:
        """Update the state after a task of item `i` is done."""
        if kind == "gradient":
            heappush(self.arrived, (self.items[i].need, i))
        elif kind == "update":
            self.free_slots += 1
            if self.is_open:
                self._updated(i)
            else:
                self.ahead.append(i)
        elif kind == "weight":
            self.is_fresh[i] = True
        elif kind == "fetch":
            self.is_here[i] = True
        elif kind == "load state":
            self.is_staged[i] = True
            self._try_streamed(i)
        else:
            self.is_stored[i] = True
            self.is_fresh[i] |= self._is_fetched(i)
            self.free_stages += 1

    def _open(self) -> None:
        """The norm is known: send the weights that were updated before, and continue with the waiting buckets."""
        self.is_open, self.decision_in = True, -1.0
        for i in self.ahead:
            self._updated(i)
        self.ahead.clear()
        for i in self.stream_order:
            self._try_streamed(i)

    def _updated(self, i: int) -> None:
        """The weights of an item are updated on the host. They are sent, or fetched later with their block."""
        if self._is_fetched(i):
            self.is_fresh[i] = True
        else:
            heappush(self.to_send, (self.items[i].need, i))

    def _try_streamed(self, i: int) -> None:
        """Update a streamed bucket on the GPU if its state and gradient are available and the norm is known."""
        if self.is_staged[i] and self.has_grad[i] and self.is_open:
            self.debt_s += self.device_s[i]
            self.has_grad[i] = False
            self.is_fresh[i] = not self._is_fetched(i)  # blocks fetch the weights when the state is on the host again
            self.is_staged[i] = self.is_stored[i] = False
            self.to_store.append(i)
