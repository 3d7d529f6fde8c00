# SPDX-License-Identifier: Apache-2.0
"""Chooses where the optimizer state of each bucket is placed: the placement that fits and has the shortest predicted
step. A bucket is a group of parameters that are copied and updated together. An item is a bucket in the simulation.

The input side of the model needs its weights first in forward and has its gradients last in backward, so there is no
time for an update on the host. Its state is therefore the first that becomes resident, which means that it stays on the
GPU. More resident state means less work for the host. Once the GPU alone determines the time of a step, more resident
state would only need memory. The state of a streamed bucket is in host memory, is copied to the GPU for its update, and
is copied back. Streamed buckets are chosen only if the step becomes clearly faster, or if nothing else fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Final

from twinflow.planner.costs import Memory
from twinflow.planner.formats import AUTOMATIC, STATES, StateBytes, state_bytes
from twinflow.planner.machines import Rates
from twinflow.planner.simulate import NUM_STAGES, PLACES, ClipDecision, Item, Prediction, Timing, Ways, predict

CLOSE: Final = 1.005  # steps within this factor are equally good, and the one with less GPU memory is chosen
STREAM_WIN: Final = 1.02  # least speedup for which streaming is chosen
_SHARES: Final = (0.25, 0.5, 0.75, 1.0)  # shares of the non-resident buckets that are tried as streamed
_NUM_TRIES: Final = 16
_NUM_RATIOS: Final = 8


@dataclass(frozen=True)
class Choice:
    """The place of every item, in the order of the items, with the predicted step and a line for the log."""

    places: tuple[str, ...]
    prediction: Prediction
    why: str


def choose(
    items: Sequence[Item],
    timing: Timing,
    rates: Rates,
    states: str,
    decision: ClipDecision,
    room: Memory,
    size: StateBytes | None = None,
    ways: Ways | None = None,
) -> Choice:
    """The placement with the shortest predicted step. Of placements that are nearly as fast, it is the one with the
    fewest resident items.

    The places of `items` are ignored. Raises a MemoryError if nothing fits.
    """
    size, ways, order = size or state_bytes(states), ways or Ways(), input_side_first(items)

    @cache
    def tried(num_resident: int, share: float) -> tuple[tuple[str, ...], Prediction] | None:
        """A placement and its prediction, or None if it does not fit."""
        places = place(len(items), order, num_resident, share)
        placed = [item.at(where) for item, where in zip(items, places, strict=True)]
        used = _used(placed, size)
        if used.gpu_bytes > room.gpu_bytes or used.host_bytes > room.host_bytes:
            return None
        return tuple(item.place for item in placed), predict(placed, timing, rates, states, decision, ways)

    found = _fewest(partial(tried, share=0.0), len(items))
    for share in _SHARES if ways.streams and not ways.delayed else ():
        streamed = _fewest(partial(tried, share=share), len(items))
        if streamed is not None and (found is None or streamed[1].step_s * STREAM_WIN < found[1].step_s):
            found = streamed
    if found is None:
        raise _nothing_fits(items, states, decision, room, size)
    return Choice(*found, reason(found[0], found[1], timing))


def best_ratio(
    items: Sequence[Item],
    timing: Timing,
    rates: Rates,
    states: str,
    decision: ClipDecision,
    room: Memory,
    size: StateBytes | None = None,
    ways: Ways | None = None,
) -> tuple[float, Prediction]:
    """The share of elements with state on the host that gives the shortest step (of nearly equal steps: the largest
    share), and the prediction. No bucket is streamed. A bucket may be split. Raises a MemoryError if nothing
    fits.
    """
    size = size or state_bytes(states)
    total = max(1, sum(item.numel for item in items))
    least = max(0.0, 1.0 - room.gpu_bytes / (size.resident * total))
    most = min(1.0, room.host_bytes / (size.host * total))
    if least > most:
        raise _nothing_fits(items, states, decision, room, size)

    @cache
    def run(ratio: float) -> Prediction:
        return predict(at_ratio(items, ratio), timing, rates, states, decision, ways)

    grid = {least + (most - least) * i / _NUM_RATIOS for i in range(_NUM_RATIOS + 1)}
    goal = CLOSE * min(run(ratio).step_s for ratio in grid)
    # The largest good ratio takes the least GPU memory. It is between the largest good ratio of the grid and the next
    # ratio of the grid.
    low = max(ratio for ratio in grid if run(ratio).step_s <= goal)
    high = min((ratio for ratio in grid if ratio > low), default=low)
    for _ in range(5 if high > low else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if run(middle).step_s <= goal else (low, middle)
    return low, run(low)


def at_ratio(items: Sequence[Item], ratio: float, placement: str = "auto", streamed: float = 0.0) -> list[Item]:
    """The items with a share `ratio` of their elements on the host, beginning at the output side of the model. One item
    may be split in two. `placement`: "spread" distributes the blocks on the host evenly. `streamed`: the share of the
    items on the host that are streamed, evenly distributed.
    """
    total = sum(item.numel for item in items)
    left = round((1.0 - ratio) * total)
    order = input_side_first(items)
    if placement == "spread":
        root = sum(item.numel for item in items if item.block < 0)
        hosted = spread_blocks({item.block for item in items if item.block >= 0}, (left - root) / max(1, total - root))
        order.sort(key=lambda i: items[i].block in hosted)
    placed: list[Item] = []
    for i in order:
        item = items[i]
        numel = min(item.numel, left)
        left -= numel
        if numel:
            placed.append(replace(item, numel=numel, place="resident"))
        if numel < item.numel:
            placed.append(replace(item, numel=item.numel - numel).at("host"))
    on_host = [i for i, item in enumerate(placed) if item.place == "host"]
    for i in _evenly(on_host, streamed):
        placed[i] = placed[i].at("streamed")
    return placed


def _evenly(found: Sequence[int], share: float) -> list[int]:
    """A share of the numbers, evenly distributed."""
    return [i for k, i in enumerate(found) if int((k + 1) * share) > int(k * share)]


def spread_blocks(blocks: Collection[int], share: float) -> set[int]:
    """The blocks on the host if about the share `share` of all blocks is on the GPU, evenly distributed. The last block
    is one of them, because its gradients come first.
    """
    num_host = len(blocks) - min(len(blocks), max(0, round(len(blocks) * share)))
    pairs = enumerate(sorted(blocks))
    return {block for k, block in pairs if (k + 1) * num_host // len(blocks) > k * num_host // len(blocks)}


def _used(items: Sequence[Item], size: StateBytes) -> Memory:
    """Bytes of the state of items on GPU and host, with the buffers for streamed state."""
    numel = {place: sum(item.numel for item in items if item.place == place) for place in PLACES}
    largest = max((item.numel for item in items if item.place == "streamed"), default=0)
    gpu = numel["resident"] * size.resident + NUM_STAGES * largest * size.streamed
    return Memory(int(gpu), int(numel["host"] * size.host + numel["streamed"] * size.streamed))


def input_side_first(items: Sequence[Item]) -> list[int]:
    """Indices of the items. Items whose weights are needed first come first. Of items that are needed at the same time,
    the one whose gradient is complete last comes first.
    """
    return sorted(range(len(items)), key=lambda i: (items[i].need, -items[i].ready))


def place(num_items: int, order: Sequence[int], num_resident: int, share: float) -> tuple[str, ...]:
    """Places of items: the first of `order` are resident, a share of the others is streamed, the rest is on the
    host."""
    places = ["host"] * num_items
    for i in order[:num_resident]:
        places[i] = "resident"
    for i in _evenly(order[num_resident:], share):
        places[i] = "streamed"
    return tuple(places)


def _fewest(
    tried: Callable[[int], tuple[tuple[str, ...], Prediction] | None], num_items: int
) -> tuple[tuple[str, ...], Prediction] | None:
    """The result with the fewest resident items among those close to the fastest.

    Tries some numbers of resident items across the range. Then bisects below the smallest number that was close to the
    fastest.
    """
    grid = sorted({round(num_items * i / _NUM_TRIES) for i in range(_NUM_TRIES + 1)} | _edges(tried, num_items))
    results = {n: result for n in grid if (result := tried(n)) is not None}
    if not results:
        return None
    goal = CLOSE * min(prediction.step_s for _, prediction in results.values())
    high = min(n for n, (_, prediction) in results.items() if prediction.step_s <= goal)
    low = max((n for n in grid if n < high), default=high)
    found = results[high]
    while high - low > 1:
        middle = (low + high) // 2
        result = tried(middle)
        if result is not None and result[1].step_s <= goal:
            high, found = middle, result
        else:
            low = middle
    return found


def _edges(tried: Callable[[int], object | None], num_items: int) -> set[int]:
    """The fewest and the most resident items that fit. Memory is monotone in their number, so all between them fit."""
    fits = next((n for n in range(num_items + 1) if tried(n) is not None), None)
    if fits is None:
        return set()
    beyond = bisect_left(range(num_items + 1), True, lo=fits, key=lambda n: tried(n) is None)
    return {fits, beyond - 1}


def shares(places: Sequence[str]) -> str:
    """The number of buckets in each place, as text."""
    return ", ".join(f"{count} {name}" for name in PLACES if (count := places.count(name)))


def reason(places: Sequence[str], prediction: Prediction, timing: Timing) -> str:
    """The placement and its predicted step as one line for a log."""
    over = 100.0 * (prediction.step_s / timing.gpu_s - 1.0) if timing.gpu_s else 0.0
    step = f"predicted step {prediction.step_s:.3f} s, {over:.0f}% over the GPU alone"
    return f"{shares(places)} of {len(places)} buckets; {step}"


def _nothing_fits(
    items: Sequence[Item], states: str, decision: ClipDecision, room: Memory, size: StateBytes
) -> MemoryError:
    """The error with the missing bytes and changes that help."""
    ends = [0, *accumulate(items[i].numel for i in input_side_first(items))]

    def missing(size: StateBytes) -> float:
        """Missing host memory if as many items as possible are resident."""
        resident = max(end for end in ends if end * size.resident <= room.gpu_bytes)
        return (ends[-1] - resident) * size.host - room.host_bytes

    remedies = []
    if room.gpu_bytes < 0:
        lack = f"GPU memory: {-room.gpu_bytes / 1e9:.1f} GB are missing for weights, gradients and activations"
    else:
        lack = f"host memory: {missing(size) / 1e9:.1f} GB are missing for the {states} state that the GPU cannot store"
        fitting = [other for other in AUTOMATIC[STATES.index(states) + 1 :] if missing(state_bytes(other)) <= 0]
        remedies += [f'set "states" to "{other}", with which the run would fit' for other in fitting[:1]]
    if decision.clips:
        remedies.append("turn gradient clipping off, which frees the memory of gradients that wait for the norm")
    remedies.append("free GPU memory with a smaller batch or activation checkpointing")
    remedy = ", or ".join(remedies)
    return MemoryError(f"Not enough {lack}. {remedy[0].upper()}{remedy[1:]}.")
