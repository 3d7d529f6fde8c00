# SPDX-License-Identifier: Apache-2.0
"""The planner: bytes and seconds against measured runs, and what must hold for any model and machine."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
import torch

from twinflow.cli.plan import config_of, plan_around
from twinflow.cli.plan_input import count_module
from twinflow.models.gpt import GPT, PRESETS, cost_of, count_params, flops_per_token
from twinflow.offload.placement import place_by_ratio, whole_blocks
from twinflow.offload.plan import HOST, ParamSpec
from twinflow.parallel.shapes import shape_of
from twinflow.planner import costs
from twinflow.planner.cases import ON_HOST, Setting, all_cases, best_case, case_at, largest_layers, recommended
from twinflow.planner.costs import (
    PROCESS_BYTES,
    Memory,
    Placed,
    Run,
    bucket_numel,
    bytes_of,
    clip_decision_of,
    fits,
    items_of,
    placed_at,
    room_of,
    timing_of,
    ways_of,
)
from twinflow.planner.fit import Fit, Wish, choose_fit, place_blocks
from twinflow.planner.formats import AUTOMATIC, STATES, UPDATE_BYTES, state_bytes
from twinflow.planner.machines import GB, GPUS, Host, Machine, Rates, gpu_named, rates_of, recognise
from twinflow.planner.models import ModelCost, from_counts, from_hf, gpt2_like
from twinflow.planner.placement import at_ratio, best_ratio, choose, spread_blocks
from twinflow.planner.simulate import PLACES, ClipDecision, Fetch, Item, Timing, Ways, predict


def llama(hidden: int, layers: int, inner: int) -> ModelCost:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    return from_hf(config, "llama")


def preset(name: str, **changes: int) -> ModelCost:
    return cost_of(replace(PRESETS[name], **changes), name)  # type: ignore[arg-type]


# The machine of record: H200, 16 Xeon cores, 126 GiB.
MACHINE = Machine(GPUS["h200"], Host(135 * GB, 16, 150e9))
RATES = rates_of(MACHINE)
MEMORY = Memory(MACHINE.gpu.memory_bytes, MACHINE.host.ram_bytes)
CAPPED = Memory(32 * GB, MACHINE.host.ram_bytes)
B3, B7 = llama(3200, 26, 8640), llama(4096, 32, 11008)


@dataclass(frozen=True)
class Measured:
    """A run of benchmarks/results: seconds, GB on the GPU, GB on the host; None where it was not measured alone."""

    name: str
    run: Run
    step_s: float
    gpu_gb: float | None
    host_gb: float | None
    memory: Memory = MEMORY
    with_process: bool = False  # host GB are the whole process's, not what was added since the model was there


# The planner's constants were fitted on some of these runs (forward and backward of the 3b, 7b and 10b models; the
# host's rate on 3b; the process's memory on 14b), so this shows that one set of constants serves all of them, not how
# well a run is foretold that it has never seen. Rows of the same files that are left out, predicted / measured:
# - 3b delayed of offload-3b.md: host 48.6 / 56.5 GB. Older than the split master: it still had slots for new weights.
# - 13b bf16 of large-models.md: host 110 / 130 GB. Not explained; 14b, run later with the same flags, took 114.7 GB.
# - 3b batch 1: GPU bytes, which were not measured apart from batch 16's.
MEASURED = [
    # 2026-11-15-offload-3b.md
    Measured("3b fp32", Run(B3, 4, 2048, clips=False), 0.783, 13.18, 42.62),
    Measured("3b fp32 clip", Run(B3, 4, 2048), 0.755, 18.49, 87.28),
    Measured("3b fp32 batch 16", Run(B3, 16, 2048), 2.246, 32.65, 87.44),
    Measured("3b fp32 batch 1", Run(B3, 1, 2048), 0.704, None, 87.44),  # its GPU GB are batch 16's
    Measured("3b bf16", Run(B3, 4, 2048, states="bf16"), 0.624, 18.49, 57.23),
    Measured("3b int8", Run(B3, 4, 2048, states="int8"), 0.610, 18.49, 41.90),
    Measured("3b 4 micro-batches", Run(B3, 4, 2048, micro_batches=4, clips=False), 2.430, 26.86, 41.44),
    # 2026-11-15-offload-3b-short.md
    Measured("3b short fp32", Run(B3, 4, 2048, clips=False), 0.782, 13.21, 43.85),
    Measured("3b short fp32 clip", Run(B3, 4, 2048), 0.800, 18.49, 82.06),
    Measured("3b short batch 16", Run(B3, 16, 2048), 2.179, 32.65, 82.06),
    Measured("3b delayed", Run(B3, 4, 2048, micro_batches=4, clips=False, delayed=True), 2.268, 26.25, 48.79),
    # 2026-11-15-offload-7b.md
    Measured("7b fp32", Run(B7, 4, 2048, clips=False), 1.501, 20.65, 82.48),
    # 2026-11-15-large-models.md, -accumulated.md, -14b.md: `twinflow train`, a cap of 32 GB but for the second
    Measured("10b bf16", Run(preset("gpt2-10b"), 10, 1024, states="bf16"), 2.536, 28.36, 118.5, CAPPED, True),
    Measured("10b 52", Run(preset("gpt2-10b"), 10, 1024, micro_batches=52, states="bf16"), 70.24, 88.81, None),
    Measured(
        "14b bf16",
        Run(preset("gpt2-13b", num_layers=69), 1, 1024, states="bf16", clips=False),
        2.253,
        30.57,
        114.7,
        CAPPED,
        True,
    ),
]


# Runs that the planner's constants were not fitted on: 2026-11-15-twin-flow-sweep.md and -13b.md, with rates as
# measured in the same run. Share on the host, then seconds, GB on the GPU, GB on the host.
PROBED = Rates(
    out_bytes=53.3e9,
    in_bytes=53.7e9,
    duplex_bytes=42.6e9,
    host_params={"fp32": 4.554e9, "bf16": 6.581e9, "int8": 7.743e9, "4bit": 7.743e9},
    host_params_copying={"fp32": 2.952e9, "bf16": 3.789e9, "int8": 4.940e9, "4bit": 4.940e9},
    device_bytes=4.118e12,
    flops=698.6e12,
)
PROBED_13B = Rates(
    out_bytes=53.2e9,
    in_bytes=53.8e9,
    duplex_bytes=47.4e9,
    host_params={"fp32": 5.529e9, "bf16": 7.705e9, "int8": 7.730e9, "4bit": 7.730e9},
    host_params_copying={"fp32": 4.068e9, "bf16": 5.386e9, "int8": 5.690e9, "4bit": 5.690e9},
    device_bytes=4.049e12,
    flops=670.8e12,
)
PLACED = [
    (B3, PROBED, 1.0, 0.857, 18.49, 83.71),
    (B3, PROBED, 0.75, 0.6588, 27.09, 62.85),
    (B3, PROBED, 0.5, 0.5757, 35.69, 42.18),
    (B3, PROBED, 0.25, 0.5733, 44.29, 21.45),
    (B3, PROBED, 0.0, 0.5778, 52.89, 0.04),
    (B3, PROBED, 0.6328, 0.5728, 31.12, 52.47),
    # A tenth of its buckets were streamed. All its gradients waited on the GPU (139.4 GB). Later code chooses by memory
    # that is left beside resident state, so that gradients of state on the host wait there.
    (llama(5120, 40, 13824), PROBED_13B, 0.3997, 1.8375, None, None),
]


@pytest.mark.parametrize(("model", "rates", "ratio", "step_s", "gpu_gb", "host_gb"), PLACED)
def test_ratios_are_those_measured(
    model: ModelCost, rates: Rates, ratio: float, step_s: float, gpu_gb: float | None, host_gb: float | None
) -> None:
    case = case_at("", Run(model, 4, 2048), Setting(rates, MEMORY), ratio)
    if gpu_gb is not None and host_gb is not None:
        assert case.used.gpu_total / 1e9 == pytest.approx(gpu_gb, rel=0.05)
        assert (case.used.host_total - PROCESS_BYTES) / 1e9 == pytest.approx(host_gb, rel=0.05, abs=1.0)
    assert case.prediction.step_s == pytest.approx(step_s, rel=0.15)


@pytest.fixture
def half_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """When these runs were measured, speculative stores took at most half of the free host memory."""
    monkeypatch.setattr(costs, "reserved_bytes", lambda free_bytes: free_bytes - free_bytes // 2)


@pytest.mark.usefixtures("half_is_reserved")
@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: m.name)
def test_bytes_are_those_measured(measured: Measured) -> None:
    used = bytes_of(measured.run, Placed(measured.run.own_numel), measured.memory)
    if measured.gpu_gb is not None:
        assert used.gpu_total / 1e9 == pytest.approx(measured.gpu_gb, rel=0.05)
    if measured.host_gb is not None:
        host = used.host_total - (0 if measured.with_process else PROCESS_BYTES)
        assert host / 1e9 == pytest.approx(measured.host_gb, rel=0.05)


@pytest.mark.usefixtures("half_is_reserved")
@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: m.name)
def test_steps_are_those_measured(measured: Measured) -> None:
    run = measured.run
    used, timing = bytes_of(run, Placed(run.own_numel), measured.memory), timing_of(run, RATES)
    found = predict(items_of(run, timing), timing, RATES, run.states, clip_decision_of(run, used), ways_of(run, timing))
    assert found.step_s == pytest.approx(measured.step_s, rel=0.15)


@pytest.mark.parametrize(
    ("step_s", "states", "decision", "micro_batches"),
    [
        (0.783, "fp32", ClipDecision(False), 1),
        (0.755, "fp32", ClipDecision(True, B3.numel), 1),
        (1.214, "fp32", ClipDecision(True, 0), 1),  # every step clipped: nothing runs ahead
        (0.624, "bf16", ClipDecision(True, B3.numel), 1),
        (0.610, "int8", ClipDecision(True, B3.numel), 1),
        (2.430, "fp32", ClipDecision(False), 4),
    ],
)
def test_with_measured_forward_and_backward_steps_are_close(
    step_s: float, states: str, decision: ClipDecision, micro_batches: int
) -> None:
    timing = Timing(0.1477, 0.4093, micro_batches)
    found = predict(items_of(Run(B3, 4, 2048), timing), timing, RATES, states, decision)
    assert found.step_s == pytest.approx(step_s, rel=0.06)


# The simulation.


def some_items(count: int = 12, numel: int = 50_000_000) -> tuple[list[Item], Timing]:
    timing = Timing(0.1, 0.3)
    items = [Item(numel, "host", 0.3 * (count - i) / count, 0.1 * i / count) for i in range(count)]
    return items, timing


def placed(items: Sequence[Item], place: str) -> list[Item]:
    return [replace(item, place=place) for item in items]


def test_a_step_is_never_shorter_than_its_parts() -> None:
    items, timing = some_items()
    for states in STATES:
        for decision in (ClipDecision(False), ClipDecision(True, 0), ClipDecision(True, 200_000_000)):
            for place in ("host", "resident", "streamed"):
                found = predict(placed(items, place), timing, RATES, states, decision)
                busiest = max(found.host_busy_s, found.out_s, found.in_s, timing.gpu_s)
                assert found.step_s >= busiest * 0.999, (states, decision, place)
                assert found.step_s >= timing.gpu_s + found.waited_s - 1e-6


def test_without_updates_to_wait_for_a_step_is_the_gpus() -> None:
    items, timing = some_items(numel=1_000_000)
    found = predict(items, timing, RATES, "fp32", ClipDecision(False))
    assert found.bound_by == "gpu"
    assert found.step_s == pytest.approx(timing.gpu_s, rel=0.03)


def test_what_bounds_a_step_is_named() -> None:
    items, timing = some_items(numel=200_000_000)
    slow_copies = replace(RATES, out_bytes=2e9, in_bytes=2e9, duplex_bytes=2e9)
    assert predict(items, timing, RATES, "fp32", ClipDecision(False)).bound_by == "host"
    assert predict(items, timing, slow_copies, "fp32", ClipDecision(False)).bound_by == "copies"
    few, timing = some_items()
    assert predict(few, timing, RATES, "fp32", ClipDecision(True, 0)).bound_by == "gate"


def test_waiting_for_the_norm_costs_and_speculative_stores_win_it_back() -> None:
    items, timing = some_items(numel=120_000_000)
    total = sum(item.numel for item in items)
    steps = [
        predict(items, timing, RATES, "fp32", ClipDecision(True, int(total * share))).step_s for share in (0, 0.3, 1)
    ]
    free = predict(items, timing, RATES, "fp32", ClipDecision(False)).step_s
    assert steps[0] > 1.1 * steps[2]
    assert steps[0] >= steps[1] >= steps[2] >= free * 0.98


def test_resident_updates_cost_the_gpu_their_traffic() -> None:
    items, timing = some_items()
    numel = sum(item.numel for item in items)
    for decision in (ClipDecision(False), ClipDecision(True, 0)):
        found = predict(placed(items, "resident"), timing, RATES, "bf16", decision)
        assert found.step_s == pytest.approx(timing.gpu_s + numel * UPDATE_BYTES["bf16"] / RATES.device_bytes)
        assert found.host_busy_s == found.out_s == found.in_s == 0.0


def test_accumulation_is_plain_time() -> None:
    items, timing = some_items()
    one = predict(items, timing, RATES, "fp32", ClipDecision(False)).step_s
    many = predict(items, replace(timing, micro_batches=5), RATES, "fp32", ClipDecision(False)).step_s
    assert many == pytest.approx(one + 4 * timing.gpu_s, rel=1e-3)


def test_streamed_states_move_both_ways() -> None:
    items, timing = some_items()
    found = predict(placed(items, "streamed"), timing, RATES, "fp32", ClipDecision(False))
    numel = sum(item.numel for item in items)
    assert found.host_busy_s == 0.0
    for seconds in (found.out_s, found.in_s):
        assert numel * 10 / RATES.out_bytes * 0.99 <= seconds <= numel * 10 / RATES.duplex_bytes * 1.1


def test_streamed_states_move_in_every_step() -> None:
    """A slow link limits the step, however long the run is: the next update needs the state on the GPU again."""
    items, timing = some_items()
    rates = replace(RATES, out_bytes=5e9, in_bytes=5e9, duplex_bytes=5e9)
    found = predict(placed(items, "streamed"), timing, rates, "fp32", ClipDecision(False))
    total = sum(item.numel for item in items) * state_bytes("fp32").streamed
    assert found.step_s == pytest.approx(total / 5e9, rel=0.02)


def test_streamed_states_are_those_measured() -> None:
    """2026-11-15-twin-flow-sweep.md: 40% of the buckets."""
    case = case_at("", Run(B3, 4, 2048, streamed=0.4), Setting(PROBED, MEMORY), 1.0)
    assert case.used.gpu_total / 1e9 == pytest.approx(20.40, rel=0.02)
    assert (case.used.host_total - PROCESS_BYTES) / 1e9 == pytest.approx(64.42, rel=0.02)
    assert case.prediction.step_s == pytest.approx(0.8098, rel=0.1)


@pytest.mark.parametrize(
    ("states", "weights", "each"), [("fp32", "bf16", 12), ("bf16", "bf16", 8), ("fp32", "fp16", 14)]
)
def test_streamed_states_have_the_weights_that_blocks_fetch(states: str, weights: str, each: int) -> None:
    run = Run(B3, 4, 2048, states=states, weights=weights, clips=False, offload_params=True)
    kept, streamed = (case_at("", one, Setting(RATES, MEMORY), 1.0) for one in (run, replace(run, streamed=0.5)))
    assert streamed.used.gpu["staging"] == 3 * bucket_numel(run) * each
    assert streamed.used.gpu_total == kept.used.gpu_total + streamed.used.gpu["staging"]
    assert streamed.used.host["state"] == pytest.approx(kept.used.host["state"])
    assert streamed.ratio == kept.ratio == 1.0
    assert streamed.prediction.host_busy_s < kept.prediction.host_busy_s


def test_streamed_states_and_fetches_share_the_bus() -> None:
    rates = replace(RATES, out_bytes=5e9, in_bytes=5e9, duplex_bytes=5e9)
    run = Run(B3, 4, 2048, clips=False, offload_params=True, streamed=1.0)
    found = case_at("", run, Setting(rates, MEMORY), 1.0).prediction
    blocks, root = sum(B3.blocks), B3.numel - sum(B3.blocks)
    assert found.in_s == pytest.approx(((12 + 2 * 2) * blocks + 10 * root) / 5e9, rel=0.02)
    assert found.out_s == pytest.approx((12 * blocks + 10 * root) / 5e9, rel=0.02)
    assert found.step_s >= found.in_s * 0.99


def test_a_fetch_waits_until_streamed_state_is_stored() -> None:
    timing, numel, rates = Timing(0.1, 0.3), 50_000_000, replace(RATES, out_bytes=6e8, duplex_bytes=6e8)
    fetches = (Fetch(2 * numel, 0.0, 0.15), Fetch(2 * numel, 0.05, 0.0))
    first, second = Item(numel, "streamed", 0.3, 0.0, 0), Item(numel, "resident", 0.15, 0.05, 1)
    found = predict([first, second], timing, rates, "fp32", ClipDecision(False), Ways(fetches=fetches))
    stored_s = 12 * numel / 6e8
    assert found.step_s == pytest.approx(timing.gpu_s + stored_s, rel=0.1)


def test_streamed_items_are_evenly_distributed() -> None:
    items, _ = some_items()
    found = [item.place for item in at_ratio(items, 0.5, streamed=0.5)]
    assert found == ["resident"] * 6 + ["host", "streamed"] * 3


def test_some_clipped_steps_cost_their_share() -> None:
    items, timing = some_items()
    every, never, third = (
        predict(items, timing, RATES, "fp32", ClipDecision(True, 10**12, share)).step_s for share in (1.0, 0.0, 1 / 3)
    )
    assert every == predict(items, timing, RATES, "fp32", ClipDecision(True, 0)).step_s > 1.01 * never
    assert third == pytest.approx(every / 3 + never * 2 / 3)


def test_no_items_is_the_gpu_alone() -> None:
    assert predict([], Timing(0.1, 0.2), RATES, "fp32", ClipDecision(True, 0)).step_s == pytest.approx(0.3)


def test_sixty_buckets_take_less_than_twenty_milliseconds() -> None:
    run = Run(B3, 4, 2048)
    timing = timing_of(run, RATES)
    items = items_of(run, timing)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        predict(items, timing, RATES, "fp32", ClipDecision(True, run.own_numel))
        times.append(time.perf_counter() - start)
    assert len(items) == 56
    assert min(times) < 0.02


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("clips", [False, True])
def test_less_on_the_host_is_never_slower_but_for_the_gpus_own_updates(states: str, clips: bool) -> None:
    run = Run(B3, 4, 2048, states=states, clips=clips)
    timing = timing_of(run, RATES)
    items, decision = items_of(run, timing), ClipDecision(clips, run.own_numel)
    ratios = [i / 20 for i in range(21)]
    steps = [predict(at_ratio(items, r), timing, RATES, states, decision).step_s for r in ratios]
    for low, high, less, more in zip(ratios, ratios[1:], steps, steps[1:], strict=False):
        on_gpu = (high - low) * run.own_numel * UPDATE_BYTES[states] / RATES.device_bytes
        assert less <= more + on_gpu + 0.01 * more, (low, high)


# Placement.


def numel_by_place(items: Sequence[Item], places: Sequence[str]) -> dict[str, int]:
    pairs = list(zip(items, places, strict=True))
    return {place: sum(item.numel for item, at in pairs if at == place) for place in PLACES}


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_fits_and_is_no_slower_than_all_on_the_host(seed: int) -> None:
    random.seed(seed)
    count = random.randrange(2, 40)
    timing = Timing(random.uniform(0.01, 0.4), random.uniform(0.02, 1.0), random.choice((1, 1, 4)))
    items = [
        Item(random.randrange(10**6, 7 * 10**7), "host", random.uniform(0, timing.backward_s), need)
        for need in sorted(random.uniform(0, timing.forward_s) for _ in range(count))
    ]
    states, clips = random.choice(STATES), random.choice((False, True))
    total = sum(item.numel for item in items)
    room = Memory(int(random.uniform(0, 12) * total), int(random.uniform(5, 14) * total))
    decision = ClipDecision(clips, random.randrange(total))
    try:
        found = choose(items, timing, RATES, states, decision, room)
    except MemoryError as error:
        assert "are missing" in str(error)  # noqa: PT017
        return
    size, numel = state_bytes(states), numel_by_place(items, found.places)
    assert numel["host"] + numel["resident"] + numel["streamed"] == total
    assert numel["resident"] * size.resident <= room.gpu_bytes
    assert numel["host"] * size.host + numel["streamed"] * size.streamed <= room.host_bytes
    if total * size.host <= room.host_bytes:
        assert found.prediction.step_s <= predict(items, timing, RATES, states, decision).step_s * 1.006


def test_resident_state_is_the_input_side() -> None:
    run = Run(B3, 4, 2048)
    timing = timing_of(run, RATES)
    items = items_of(run, timing)
    found = choose(items, timing, RATES, "fp32", ClipDecision(False), Memory(30 * GB, 100 * GB))
    first = max(item.need for item, place in zip(items, found.places, strict=True) if place == "resident")
    rest = min(item.need for item, place in zip(items, found.places, strict=True) if place != "resident")
    assert first <= rest
    assert found.prediction.step_s < 1.03 * timing.gpu_s
    assert "resident" in found.why


def test_no_more_gpu_memory_is_taken_than_pays() -> None:
    run = Run(B3, 4, 2048)
    timing = timing_of(run, RATES)
    items = items_of(run, timing)
    found = choose(items, timing, RATES, "fp32", ClipDecision(False), Memory(10**12, 10**12))
    assert 0 < found.places.count("resident") < len(items) // 2


def test_nothing_fits_says_what_is_missing_and_what_would_fit() -> None:
    run = Run(B3, 4, 2048)
    timing = timing_of(run, RATES)
    items = items_of(run, timing)
    with pytest.raises(
        MemoryError, match=r"host memory: 17\.\d GB are missing.*\"int8\", with which the run would fit, or turn"
    ):
        choose(items, timing, RATES, "fp32", ClipDecision(True, 0), Memory(3 * GB, 20 * GB))
    with pytest.raises(MemoryError, match="are missing"):
        best_ratio(items, timing, RATES, "fp32", ClipDecision(False), Memory(0, 20 * GB))
    with pytest.raises(MemoryError, match=r"Not enough GPU memory: 2\.0 GB are missing for weights.* Free GPU memory"):
        best_ratio(items, timing, RATES, "fp32", ClipDecision(False), Memory(-2 * GB, 100 * GB))


def test_the_best_ratio_is_the_same_as_the_best_buckets() -> None:
    run = Run(B3, 4, 2048)
    timing = timing_of(run, RATES)
    items, room = items_of(run, timing), Memory(60 * GB, 100 * GB)
    ratio, prediction = best_ratio(items, timing, RATES, "fp32", ClipDecision(False), room)
    found = choose(items, timing, RATES, "fp32", ClipDecision(False), room)
    on_host = sum(i.numel for i, p in zip(items, found.places, strict=True) if p != "resident")
    assert ratio == pytest.approx(on_host / sum(i.numel for i in items), abs=0.04)
    assert prediction.step_s == pytest.approx(found.prediction.step_s, rel=0.02)


# Bytes.


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp32"])
def test_bytes_move_from_gpu_to_host_with_the_ratio(states: str, clips: bool, weights: str) -> None:
    run = Run(B3, 4, 2048, states=states, clips=clips, weights=weights)
    used = [bytes_of(run, placed_at(run, i / 10), MEMORY) for i in range(11)]
    for before, after in pairwise(used):
        assert after.gpu_total <= before.gpu_total
        assert after.host["state"] >= before.host["state"]
        assert after.gpu_total == sum(after.gpu.values())
        assert after.host_total == sum(after.host.values())


def test_state_bytes_a_parameter() -> None:
    rows = {
        (states, weights): state_bytes(states, weights) for states in STATES for weights in ("bf16", "fp16", "fp32")
    }
    assert [rows[s, "bf16"].host for s in STATES] == [12, 8, 6.0625, 5.0625]
    assert [rows[s, "bf16"].resident for s in STATES] == [10, 6, 4.0625, 3.0625]
    assert [rows[s, "bf16"].streamed for s in STATES] == [10, 6, 4.0625, 3.0625]
    assert rows["fp32", "fp16"].resident == 12
    assert rows["fp32", "fp32"].resident == 8
    assert state_bytes("fp32", delayed=True).resident == 12
    without = state_bytes("4bit", master="none")
    assert (without.host, without.resident, without.streamed) == (3.0625, 1.0625, 1.0625)
    assert state_bytes("4bit", delayed=True, master="none").resident == 3.0625
    with pytest.raises(ValueError, match="must be one of 'fp32', 'bf16', 'int8'"):
        state_bytes("fp8")


def test_gradients_wait_on_the_host_where_the_gpu_is_full() -> None:
    run = Run(B3, 4, 2048)
    roomy, tight = (bytes_of(run, Placed(run.own_numel), Memory(n * GB, 135 * GB)) for n in (100, 16))
    assert roomy.gpu["gradients"] == 2 * run.own_numel
    assert roomy.host["gradients"] == 0
    assert tight.host["gradients"] == 2 * run.own_numel
    summed = replace(run, micro_batches=4)
    assert bytes_of(summed, Placed(run.own_numel), Memory(16 * GB, 135 * GB)).host["gradients"] == 4 * run.own_numel


def test_many_gpus_share_state_and_stage_three_weights() -> None:
    one = bytes_of(Run(B7, 1, 2048, clips=False), Placed(B7.numel), MEMORY)
    run = Run(B7, 1, 2048, clips=False, world=8, stage=2)
    eight = bytes_of(run, Placed(run.own_numel), MEMORY)
    assert eight.host["state"] == pytest.approx(one.host["state"], rel=1e-6)
    assert eight.gpu["weights"] == one.gpu["weights"]
    third = bytes_of(replace(run, stage=3), Placed(run.own_numel), MEMORY)
    assert third.gpu["weights"] < eight.gpu["weights"] / 4


# Models.


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_costs_what_its_model_has(name: str) -> None:
    shape, cost = PRESETS[name], cost_of(PRESETS[name], name)
    with torch.device("meta"):
        assert cost.numel == count_params(shape) == sum(p.numel() for p in GPT(shape).parameters())
    h, layers = shape.hidden, shape.num_layers
    products = layers * (12 * h * h + shape.num_experts * h) + shape.vocab_size * h
    assert cost.model_flops(shape.context) == flops_per_token(shape) == 6 * (products + layers * 2 * shape.context * h)
    for checkpointing, batch in product((False, True), (1, 4, 16)):
        num_tokens = batch * shape.context
        stream, block = 2 * num_tokens * h, num_tokens * (32 * h + 4 * (4 + shape.num_heads))
        block += num_tokens * 6 * h * shape.num_experts_per_tok * bool(shape.num_experts)  # copies of the tokens
        kept = layers * (stream if checkpointing else block) + stream + 24 * num_tokens
        loss = 2 * stream + shape.vocab_size * h * 4 + min(num_tokens, 2048) * shape.vocab_size * 6
        expected = kept + max(loss, block * (1.6 if checkpointing else 1.0))
        found = Run(cost, batch, shape.context, checkpointing=checkpointing).activation_bytes
        assert found == pytest.approx(expected, abs=1)


def test_less_memory_for_activations_takes_more_time() -> None:
    cost = cost_of(PRESETS["gpt2-10b"])
    kept = Run(cost, 8, 1024, checkpointing=False)
    runs = [
        kept,
        replace(kept, selective=True),
        replace(kept, checkpointing=True, checkpointed=25, selective=True),
        replace(kept, checkpointing=True),
    ]
    assert [run.num_recomputed for run in runs] == [0, 0, 25, 50]
    sizes = [run.activation_bytes for run in runs]
    times = [timing_of(run, RATES).backward_s for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    # Selective recomputation takes a tenth of the time of a full one, and saves a third of its memory.
    assert times[1] - times[0] < 0.15 * (times[3] - times[0])
    assert sizes[0] - sizes[1] > 0.3 * (sizes[0] - sizes[3])
    few = replace(runs[2], model=cost.with_layers(4))
    assert few.num_recomputed == 4


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_activations_of_a_llama_are_those_measured(batch: int) -> None:
    measured = {1: 1.180509184, 4: 4.719526912, 16: 18.875597824}[batch]
    assert Run(B3, batch, 2048).activation_bytes / 1e9 == pytest.approx(measured, rel=0.001)


HF = {
    "llama": ("LlamaConfig", {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}),
    "mistral": ("MistralConfig", {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}),
    "qwen2": ("Qwen2Config", {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}),
    "opt": ("OPTConfig", {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}),
    "bert": ("BertConfig", {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}),
}


@pytest.mark.parametrize("kind", HF)
def test_a_hugging_face_config_counts_as_its_model_does(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, numbers = HF[kind]
    heads = {"num_attention_heads": 4} if kind != "gpt2" else {}
    config = getattr(transformers, name)(vocab_size=1000, **numbers, **heads)
    if kind in ("llama", "mistral", "qwen2"):
        config.num_key_value_heads = 2
    build = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = build.from_config(config)
    cost = from_hf(config.to_dict())
    assert cost.numel == sum(p.numel() for p in model.parameters())
    assert len(cost.blocks) == (3 if kind == "mistral" else 2)


_SPARSE = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {
    "olmoe": ("OlmoeConfig", {"num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "first_k_dense_replace": 1},
    ),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_count_as_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, numbers = EXPERTS[kind]
    sizes = {**_SPARSE, "vocab_size": 1000, "num_attention_heads": 4, "num_experts_per_tok": 2, **numbers}
    config = getattr(transformers, name)(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built, cost = count_module(model, kind), from_hf(config.to_dict()) if kind != "deepseek_v3" else None
    experts = {key: p.numel() for key, p in model.named_parameters() if ".experts." in key}
    total = sum(p.numel() for p in model.parameters())
    for found in [built, *([cost] if cost is not None else [])]:
        assert found.numel == total
        assert len(found.blocks) == len(found.idle) == 3
        assert found.with_layers(2).idle == found.idle[:2]
        assert found.expert_stack == max(p.numel() for p in model.parameters() if p.dim() == 3)
        assert found.divides_experts
        assert sum(found.experts) == sum(experts.values())
        here = sum(p.numel() // 4 if key in experts else p.numel() for key, p in model.named_parameters())
        assert sum(found.experts_here(4)) + found.embedding_numel + found.head_numel == here
    if cost is not None:
        assert cost.active_numel == total - sum(experts.values()) * 6 // 8
        products = sum(p.numel() for key, p in model.named_parameters() if p.dim() == 2 and "bias" not in key)
        fused = sum(p.numel() for p in model.parameters() if p.dim() == 3)
        ends = 2 * 1000 * 64  # embedding and head
        assert sum(cost.block_products) == products - ends + fused * 2 // 8
    assert built.forward_flops(128) < 2.5 * built.active_numel


OLMOE = {
    **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "vocab_size": 32000,
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
}


def test_experts_take_the_measured_time_and_memory() -> None:
    """2026-11-19-real-models.md and -qwen3-30b-a3b.md, on which EXPERT_TRAFFIC is fitted, so the times of forward and
    backward show that one constant serves both shapes. The step and its bytes are foretold. This run had 16 slots."""
    olmoe = Run(from_hf(OLMOE), 4, 2048)
    run = Run(from_hf(QWEN3_30B), 16, 2048, states="int8", clips=False, offload_params=True, placement="spread")
    for each, seconds in ((olmoe, 0.3635), (run, 4.08)):
        timing = costs.timing_of(each, RATES)
        assert timing.forward_s + timing.backward_s == pytest.approx(seconds, rel=0.03)
    case = case_at(ON_HOST, run, Setting(RATES, MEMORY), 0.3674)
    assert case.prediction.step_s == pytest.approx(4.34, rel=0.06)
    more = (16 - costs.NUM_SLOTS) * 2 * costs.bucket_numel(run)
    assert (case.used.host_total + more) / GB == pytest.approx(83.45, rel=0.03)
    assert case.used.host["state"] / GB == pytest.approx(68.0, rel=0.01)


def test_expert_ranks_by_hand() -> None:
    """OLMoE on 8 GPUs, of which 4 have all experts together."""
    run = Run(from_hf(OLMOE), 4, 2048, world=8, stage=2, checkpointing=True)
    divided = replace(run, expert_parallel=4)
    experts = 16 * 64 * 3 * 2048 * 1024
    others = run.model.numel - experts
    placed = Placed(run.own_numel)
    before, after = (bytes_of(each, placed, MEMORY) for each in (run, divided))
    assert before.gpu["weights"] - after.gpu["weights"] == 2 * experts * 3 // 4
    # Two GPUs have the same experts and divide their state, so each has the state of an eighth of all experts.
    assert divided.own_numel == run.own_numel
    assert after.host["state"] == before.host["state"]
    # Of 16 blocks, for each token and each of 8 chosen experts: the row that arrived and the result, in 16 bits.
    kept = [replace(each, checkpointing=False).activation_bytes for each in (run, divided)]
    assert kept[1] - kept[0] == 16 * 4 * 2048 * 8 * 2 * 2 * 2048
    assert costs.shared_bytes(divided) == pytest.approx(2 * (others * 7 / 8 + experts / 4 / 2))
    assert costs.shared_bytes(run) == pytest.approx(2 * run.model.numel * 7 / 8)
    tokens = 2 * 2 * 2048 * (4 * 2048 * 8) * 16 * 3 / 4  # there and back, width, hidden, rows, layers, other GPUs
    assert costs.token_bytes(divided) == pytest.approx(tokens)
    assert costs.token_bytes(run) == 0.0
    rate = 1e12  # gradients are not the bottleneck
    one, two = timing_of(run, RATES, rate), timing_of(divided, RATES, rate)
    assert two.forward_s - one.forward_s == pytest.approx(tokens / rate)
    assert two.backward_s - one.backward_s == pytest.approx(2 * tokens / rate)  # recomputation exchanges them again


def test_a_plan_divides_experts_only_where_all_of_them_do_not_fit() -> None:
    machine = Machine(gpu_named("h100"), Host(2000 * GB, 96, 600e9), 8)
    setting = Setting(rates_of(machine), Memory(machine.gpu.memory_bytes, machine.host.ram_bytes), 300e9)
    mixtral = from_hf(MIXTRAL)

    def fit(model: ModelCost = mixtral, on_host: bool | None = False, size: int | None = None, world: int = 8) -> Fit:
        found = Wish(model, 2048, world=world, stage=2, offload_params=on_host, expert_parallel=size)
        return choose_fit(found, setting)

    assert not fit(size=1).fits
    chosen = fit()
    assert chosen.fits
    assert chosen.case.run.expert_parallel == 2
    assert any("Every 2 GPUs have all experts together" in change for change in chosen.changes)
    assert fit(on_host=None).case.run.expert_parallel in (1, 2)  # weights on the host are the other way
    assert fit(on_host=True).case.run.expert_parallel == 1
    assert fit(size=4).case.run.expert_parallel == 4
    assert fit(size=4).changes == ()
    assert fit(from_hf(OLMOE)).case.run.expert_parallel == 1  # all experts fit
    assert not fit(replace(mixtral, divides_experts=False)).fits
    assert not fit(replace(mixtral, num_experts=9)).fits  # 8 GPUs cannot divide them equally
    assert not fit(world=1).fits


def test_sizes_of_published_shapes() -> None:
    """OLMoE-1B-7B, Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b, in billions. The embedding counts as active."""
    gpt_oss = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    gpt_oss |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32}
    gpt_oss |= {"num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True}
    found = [from_hf(config) for config in (OLMOE, QWEN3_30B, MIXTRAL, gpt_oss)]
    assert [round(one.numel / 1e9, 1) for one in found] == [6.9, 30.5, 46.7, 20.9]
    assert [round(one.active_numel / 1e9, 1) for one in found] == [1.3, 3.4, 12.9, 4.2]
    for one in found:  # the plan of layouts over several GPUs
        assert shape_of(one, 2048).model_flops(2048) == pytest.approx(one.model_flops(2048) * 2048, rel=0.25)
    with pytest.raises(ValueError, match=r"num_experts_per_tok in config.json is 65, but must be at most .* 64"):
        from_hf({**OLMOE, "num_experts_per_tok": 65})


def test_an_unknown_model_type_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"model_type is 'mamba', but must be one of 'llama', 'mistral'.*module:function"
    ):
        from_hf({"model_type": "mamba"})
    with pytest.raises(ValueError, match="has no key 'intermediate_size'"):
        from_hf({"model_type": "llama", "hidden_size": 64})


def test_shapes_of_a_size() -> None:
    for size in (125e6, 350e6, 1.3e9, 6.7e9, 13e9, 40e9, 175e9):
        assert gpt2_like(size).numel == pytest.approx(size, rel=0.12)
    cost = from_counts("x", [100, 100], 50, 20, hidden=4, vocab_size=10)
    assert cost.numel == 270
    assert cost.with_layers(5).numel == 570


# Machines and cases.


def test_cards_are_known_by_their_short_and_by_their_full_names() -> None:
    assert gpu_named("H200") is GPUS["h200"]
    assert recognise("NVIDIA H200") is GPUS["h200"]
    assert recognise("NVIDIA A100-SXM4-40GB") is GPUS["a100-40"]
    assert recognise("NVIDIA A100 80GB PCIe") is GPUS["a100-80"]
    assert recognise("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"]
    assert recognise("Tesla V100-SXM2-32GB") is GPUS["v100-32"]
    assert recognise("Something Else") is None
    with pytest.raises(ValueError, match="--gpu is 'h300', but must be one of 'b200', 'h200'"):
        gpu_named("h300")


def test_cards_of_a_machine_share_its_host() -> None:
    one, eight = rates_of(MACHINE), rates_of(replace(MACHINE, num_gpus=8))
    for states in STATES:
        assert eight.host_params[states] == pytest.approx(one.host_params[states] / 8)
        assert eight.host_params_copying[states] < eight.host_params[states]
    assert eight.out_bytes == one.out_bytes


def test_cases_cover_every_way_and_the_recommended_one_fits() -> None:
    setting = Setting(RATES, MEMORY)
    cases = all_cases(Run(preset("gpt2-13b"), 4, 1024), setting)
    assert [(c.kind, c.run.states) for c in cases] == [
        (kind, states) for kind in ("no offload", "full offload", "best ratio") for states in AUTOMATIC
    ]
    best = recommended(cases)
    assert best is not None
    assert best.fits
    for case in cases[6:]:
        assert case.fits
        others = [c for c in cases if c.run.states == case.run.states and c.fits]
        assert case.prediction.step_s <= 1.01 * min(c.prediction.step_s for c in others)


@pytest.mark.parametrize("gpu", ["v100-16", "rtx4090", "a100-40", "h200"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_best_ratio_fits_wherever_anything_does(gpu: str, micro_batches: int) -> None:
    for size in (1e9, 6e9, 13e9):
        for clips in (False, True):
            run = Run(gpt2_like(size), 2, 1024, micro_batches=micro_batches, states="bf16", clips=clips)
            memory = Memory(GPUS[gpu].memory_bytes, 128 * GB)
            case = best_case(run, Setting(rates_of(Machine(GPUS[gpu], Host(128 * GB, 16, 150e9))), memory))
            assert case.fits or not fits(run, memory)


def test_where_nothing_fits_nothing_is_recommended() -> None:
    setting = Setting(RATES, Memory(8 * GB, 16 * GB))
    run = Run(preset("gpt2-13b"), 4, 1024)
    assert recommended(all_cases(run, setting)) is None
    assert not best_case(run, setting).fits
    assert not fits(run, setting.memory)


def test_the_largest_model_fits_and_one_block_more_does_not() -> None:
    run = Run(preset("gpt2-13b"), 4, 1024, states="bf16")
    layers = largest_layers(run, CAPPED)
    assert fits(replace(run, model=run.model.with_layers(layers)), CAPPED)
    assert not fits(replace(run, model=run.model.with_layers(layers + 1)), CAPPED)
    assert largest_layers(run, Memory(GB, GB)) == 0


def test_thirteen_billion_on_one_v100() -> None:
    """ZeRO-Offload's headline, with 1.5 TB of RAM."""
    memory = Memory(GPUS["v100-32"].memory_bytes, 1500 * GB)
    run = Run(preset("gpt2-13b"), 4, 1024, weights="fp16")
    assert fits(run, memory)
    assert room_of(run, memory).gpu_bytes < 2 * GB


def test_blocks_on_the_host_are_spread_where_backward_would_wait_for_their_updates() -> None:
    """Half of the blocks on the host, whose updates take as long as all of backward, and room for few gradients."""
    model = replace(gpt2_like(40e9), joins_last=True)
    setting = Setting(rates_of(Machine(GPUS["h200"], Host(125 << 30, 16, 100e9))), Memory(90 * GB, 125 << 30))
    wish = Wish(model, 2048, states="4bit", master="none", clips=False, offload_params=True, micro_batch=4)
    neighbours = choose_fit(wish, setting)
    spread = place_blocks(neighbours, setting)
    assert 0.2 < spread.ratio == neighbours.ratio < 0.8
    assert (neighbours.case.run.placement, spread.case.run.placement) == ("auto", "spread")
    assert spread.step_s < 0.95 * neighbours.step_s
    assert (spread.gpu_bytes, spread.host_bytes) == (neighbours.gpu_bytes, neighbours.host_bytes)
    clipped = choose_fit(replace(wish, clips=True), setting)
    assert place_blocks(clipped, setting) == clipped
    # Cases with all weights on the GPU, and a config without the key, are placed as before.
    cases = all_cases(spread.case.run, setting, ["4bit"])
    assert {case.run.placement for case in cases if not case.run.offload_params} == {"auto"}
    offload = {"device": "cpu", "states": "4bit", "ratio": spread.ratio}
    config = {"zero_optimization": {"offload_optimizer": offload, "offload_param": {"device": "cpu"}}}
    (given,) = (case for case in plan_around(spread, wish, setting, config).cases if case.kind == "config's")
    assert given.run.placement == "auto"
    offload["placement"] = "spread"
    for fit in (neighbours, spread):
        written = config_of(fit.case, config)["zero_optimization"]["offload_optimizer"]
        assert written["placement"] == fit.case.run.placement
    # The executor places the same blocks as the planner.
    for num_blocks, share in ((80, 0.55), (7, 0.3), (3, 0.0), (3, 1.0)):
        specs = [ParamSpec(str(k), 1 << 20, k, torch.bfloat16) for k in range(num_blocks)]
        parts = whole_blocks(specs, place_by_ratio(specs, range(num_blocks), 1.0 - share, "spread"))
        hosted = {k for k, cuts in enumerate(parts) if cuts[0].place == HOST}
        assert hosted == spread_blocks(range(num_blocks), share)
