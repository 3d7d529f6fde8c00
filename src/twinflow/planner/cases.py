# SPDX-License-Identifier: Apache-2.0
"""Compares cases: the state in one format, with no offload, full offload or the best ratio (share on the host)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from twinflow.planner import costs
from twinflow.planner.costs import Bytes, Memory, Run
from twinflow.planner.formats import AUTOMATIC, STATES
from twinflow.planner.machines import Rates
from twinflow.planner.placement import at_ratio, best_ratio
from twinflow.planner.simulate import Prediction, Timing, predict

WIDER: Final = 1.05  # a wider format is recommended if its step takes at most this many times as long
ON_HOST: Final = "weights on host"  # the kind of a case whose weights are on the host too
ON_DISK: Final = "state on disk"  # the kind of a case whose state is on the GPU and a disk
_MAX_LAYERS: Final = 1 << 18


@dataclass(frozen=True)
class Disk:
    """A disk that the optimizer state of all GPUs may be on."""

    folder: str
    rate: float  # bytes that updates read and write in a second
    free_bytes: int


@dataclass(frozen=True)
class Setting:
    rates: Rates  # rates of one GPU with its share of the host
    memory: Memory
    link_rate: float = 0.0  # bytes/s in each direction between GPUs; 0: the time of communication is ignored
    disk: Disk | None = None  # considered for runs that do not fit otherwise


@dataclass(frozen=True)
class Case:
    """A run with one placement of its optimizer state, the memory that it uses and its predicted step."""

    kind: str
    run: Run
    ratio: float  # share of the elements whose state is on the host
    used: Bytes
    missing: Memory  # bytes that the run lacks, if the reserves stay free
    prediction: Prediction

    @property
    def fits(self) -> bool:
        return self.missing.is_zero

    @property
    def file_bytes(self) -> int:
        """Bytes of state and weights on the disk, of all GPUs. 0 if they are in memory."""
        return costs.file_bytes(self.run, costs.placed_at(self.run, self.ratio))

    @property
    def disk_bytes(self) -> int:
        """Bytes that a step reads from the disk and writes to it."""
        return costs.step_bytes(self.run, costs.placed_at(self.run, self.ratio))

    @property
    def tokens_s(self) -> float:
        """Tokens per second on all GPUs. 0 if the time of a step is not known."""
        return self.run.step_tokens / self.prediction.step_s if self.prediction.step_s else 0.0


@dataclass(frozen=True)
class Plan:
    """The cases of a run on a machine, and the recommended one."""

    run: Run
    setting: Setting
    cases: Sequence[Case]
    best: Case | None  # the recommended case; None if nothing fits
    largest: Mapping[str, int]  # number of blocks of the largest model that fits, by state format

    @property
    def nearest(self) -> Case:
        """The recommended case. If nothing fits, the case that lacks the least memory."""
        return self.best or min(self.cases, key=lambda case: case.missing.gpu_bytes + case.missing.host_bytes)

    def largest_numel(self, states: str) -> int:
        """Parameters of the largest model that fits with the state format `states`. 0 if not even one block fits."""
        num_layers = self.largest[states]
        return self.run.model.with_layers(num_layers).numel if num_layers else 0


def make_plan(
    run: Run,
    setting: Setting,
    states: Sequence[str] = AUTOMATIC,
    given: Case | None = None,
    ways: Sequence[bool] = (False,),
    embeddings: Sequence[bool] = (False,),
) -> Plan:
    """The plan of a run, with the cases of `all_cases`. `given`: a case of the config file, which is never the
    recommended one.
    """
    cases = all_cases(run, setting, states, ways, embeddings)
    largest = {
        name: max(largest_layers(_with_weights(run, name, way, embeddings[-1]), setting.memory) for way in ways)
        for name in states
    }
    return Plan(run, setting, [*cases, *([given] if given is not None else [])], recommended(cases), largest)


def all_cases(
    run: Run,
    setting: Setting,
    states: Sequence[str] = AUTOMATIC,
    ways: Sequence[bool] = (False,),
    embeddings: Sequence[bool] = (False,),
) -> list[Case]:
    """A case for each pair of a way to place the state and a state format, grouped by way.

    `ways`: whether weights are on the host. (False, True): cases of both. `embeddings`: whether those of the embedding
    and output layers are there too. (False, True): if they must be for the case to fit.
    """
    cases: list[Case] = []
    if False in ways:
        runs = [_with_weights(run, name, False) for name in states]
        cases += [case_at("no offload", r, setting, 0.0) for r in runs]
        cases += [case_at("full offload", r, setting, 1.0) for r in runs]
        cases += [best_case(r, setting) for r in runs]
    if True in ways:
        for name in states:
            found = (_on_host(_with_weights(run, name, True, each), setting) for each in embeddings)
            first = next(found)
            cases.append(first if first.fits else next((case for case in found if case.fits), first))
    return cases


def _on_host(run: Run, setting: Setting) -> Case:
    return case_at(ON_HOST, run, setting, costs.least_ratio(run, setting.memory))


def _with_weights(run: Run, states: str, on_host: bool, embeddings: bool = False) -> Run:
    return replace(
        run,
        states=states,
        offload_params=on_host,
        offload_embeddings=embeddings and on_host,
        stage=3 if on_host and run.world > 1 else run.stage,
        placement=run.placement if on_host else "auto",
    )


def case_at(kind: str, run: Run, setting: Setting, ratio: float) -> Case:
    """The case with a given share of the state on the host."""
    placed = costs.placed_at(run, ratio)
    if run.offload_params:  # blocks are not split
        ratio = (placed.host + placed.streamed) / run.own_numel
    used = costs.bytes_of(run, placed, setting.memory)
    timing = _with_inputs(run, costs.timing_of(run, setting.rates, setting.link_rate), setting)
    items = at_ratio(costs.items_of(run, timing), ratio, run.placement, run.streamed)
    rates = _of_disk(run, placed, setting) if run.on_disk or run.weights_on_disk else setting.rates
    prediction = predict(
        items, timing, rates, run.states, costs.clip_decision_of(run, used), costs.ways_of(run, timing)
    )
    if rates.host_params is not setting.rates.host_params and prediction.bound_by == "host":
        prediction = replace(prediction, bound_by="disk")
    return Case(kind, run, ratio, used, used.missing(costs.usable(setting.memory)), prediction)


def _with_inputs(run: Run, timing: Timing, setting: Setting) -> Timing:
    """The times of forward and backward with inputs of blocks on the disk, which a forward writes and a backward reads.
    All GPUs share the disk.
    """
    num_bytes = costs.input_file_bytes(run)
    if not num_bytes or setting.disk is None:
        return timing
    least_s = num_bytes / setting.disk.rate
    return replace(timing, forward_s=max(timing.forward_s, least_s), backward_s=max(timing.backward_s, least_s))


def _of_disk(run: Run, placed: costs.Placed, setting: Setting) -> Rates:
    """The rates with updates on the host that are as slow as the disk, which reads and writes state and weights."""
    rates, disk = setting.rates, setting.disk
    assert disk is not None
    num_bytes = costs.step_bytes(run, placed)
    if not num_bytes:
        return rates
    most = disk.rate * placed.host / num_bytes
    if most >= rates.host_params[run.states]:
        return rates
    both = (rates.host_params, rates.host_params_copying)
    idle, copying = ({name: min(rate, most) for name, rate in each.items()} for each in both)
    return replace(rates, host_params=idle, host_params_copying=copying)


def best_case(run: Run, setting: Setting) -> Case:
    """The case with the ratio of `best_ratio`. If no ratio fits, the case with as much state on the GPU as fits."""
    room, size = costs.room_of(run, setting.memory), costs.placing_size(run, setting.memory)
    least = case_at("best ratio", run, setting, costs.least_ratio(run, setting.memory))
    if not least.fits or room.gpu_bytes < 0:
        return least
    timing = costs.timing_of(run, setting.rates, setting.link_rate)
    decision = costs.clip_decision_of(run, costs.bytes_of(run, costs.Placed(run.own_numel), setting.memory))
    items, ways = costs.items_of(run, timing), costs.ways_of(run, timing)
    try:
        ratio, _ = best_ratio(items, timing, setting.rates, run.states, decision, room, size, ways)
    except MemoryError:
        # `room` counts gradients as if all state were on the host, and with resident state fewer of them wait there.
        return least
    best = case_at("best ratio", run, setting, ratio)
    return best if best.fits else least


def recommended(cases: Sequence[Case]) -> Case | None:
    """The recommended case: the fastest that fits.

    A wider state format is preferred if it is nearly as fast, and then weights on the GPU. Of the cases that are then
    about equally fast, the one without offload is preferred, then one that keeps the embedding and output layers on the
    GPU, and otherwise the one with the least GPU memory.
    """
    fitting = [case for case in cases if case.fits]
    if not fitting:
        return None
    fastest = min(case.prediction.step_s for case in fitting)
    good = [case for case in fitting if case.prediction.step_s <= WIDER * fastest]
    widest = min(STATES.index(case.run.states) for case in good)
    good = [case for case in good if STATES.index(case.run.states) == widest]
    good = [case for case in good if not case.run.offload_params] or good
    least = min(case.prediction.step_s for case in good)
    close = [case for case in good if case.prediction.step_s <= 1.01 * least]
    # The case without offload is the simplest one, so it is preferred if it is as fast.
    return min(close, key=lambda case: (case.kind != "no offload", case.run.offload_embeddings, case.used.gpu_total))


def largest_layers(run: Run, memory: Memory) -> int:
    """Blocks of the deepest model of this shape that fits with some ratio. 0 if not even one block fits."""

    def is_too_large(num_layers: int) -> bool:
        return not costs.fits(replace(run, model=run.model.with_layers(num_layers)), memory)

    # Shapes near the answer are cheap to count, so the search does not start with the deepest ones.
    limit = 64
    while limit < _MAX_LAYERS and not is_too_large(limit):
        limit *= 4
    return bisect_left(range(1, limit), True, key=is_too_large)
