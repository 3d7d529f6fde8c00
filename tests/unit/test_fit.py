# SPDX-License-Identifier: Apache-2.0
"""The chooser of `twinflow plan` and `twinflow finetune`: what it recommends fits, and what it proposes helps."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import planner_support
import pytest

from twinflow.models.gpt import PRESETS, cost_of
from twinflow.planner.cases import Setting, case_at
from twinflow.planner.costs import (
    Memory,
    Placed,
    Run,
    bucket_numel,
    bytes_of,
    fetches_of,
    items_of,
    placed_at,
    timing_of,
    usable,
)
from twinflow.planner.fit import Wish, choose_fit
from twinflow.planner.formats import UPDATE_BYTES
from twinflow.planner.machines import GB, GPUS, Host, Machine, Rates, gpu_named, rates_of, recognise
from twinflow.planner.models import ModelCost, from_counts, from_hf, with_fused_head

LLAMA_8B = from_hf(planner_support.LLAMA_8B, "llama3-8b")


def setting_of(gpu: str, ram_gb: int, gpu_gb: float | None = None) -> Setting:
    machine = Machine(GPUS[gpu], Host(ram_gb * GB, 16, 150e9))
    gpu_bytes = machine.gpu.memory_bytes if gpu_gb is None else int(gpu_gb * GB)
    return Setting(rates_of(machine), Memory(gpu_bytes, ram_gb * GB))


@pytest.mark.parametrize(("gpu", "ram_gb"), [("rtx4070", 32), ("rtx4090", 64), ("rtx4090", 128), ("h200", 64)])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_what_is_recommended_fits_with_a_margin(gpu: str, ram_gb: int, method: str) -> None:
    setting = setting_of(gpu, ram_gb)
    fit = choose_fit(Wish(LLAMA_8B, 2048, sequences=8, method=method), setting)
    limit = usable(setting.memory)
    assert limit.gpu_bytes < 0.99 * setting.memory.gpu_bytes
    if fit.fits:
        assert fit.gpu_bytes <= limit.gpu_bytes
        assert fit.host_bytes - fit.case.used.host["shadows"] <= limit.host_bytes
        assert fit.helps == ()
        assert fit.changes or fit.micro_batch * fit.accumulation == 8
    else:
        assert fit.short_gpu_bytes + fit.short_host_bytes > 0
        assert fit.helps
    assert fit.fits == (method != "full" or ram_gb > 32)


def test_clipping_goes_before_sequences_and_both_are_named() -> None:
    setting = setting_of("rtx4090", 60)
    few = choose_fit(Wish(LLAMA_8B, 2048), setting)
    assert (few.clips, few.states, few.offload_params, few.micro_batch) == (False, "int8", True, 4)
    assert few.changes == ("Gradients are not clipped: those that wait for their norm would not fit.",)
    many = choose_fit(Wish(LLAMA_8B, 2048, sequences=64), setting)
    assert many.fits
    assert many.changes[0].startswith(f"A step has {many.micro_batch} sequences, not 64")
    assert not choose_fit(Wish(LLAMA_8B, 2048, clips=True), setting_of("rtx4090", 50)).fits


def test_several_ranks_share_the_machine() -> None:
    """Without GPUs each rank has its own process and weights. A base in 4 bits is not on the hosts of several ranks."""
    no_gpu = Setting(Rates(0.0, 0.0, 0.0, {}, {}, 0.0, 0.0), Memory(0, 64 * GB))
    one, two = (
        choose_fit(Wish(cost_of(PRESETS["tiny"], "tiny"), 64, weights="fp32", world=world, stage=2), no_gpu)
        for world in (1, 2)
    )
    assert 1.9 * one.host_bytes < two.host_bytes < 2.1 * one.host_bytes
    small = setting_of("rtx4070", 64, gpu_gb=8)
    fits = [choose_fit(Wish(LLAMA_8B, 2048, method="qlora", world=world, stage=2), small) for world in (1, 2)]
    assert [fit.offload_params for fit in fits] == [True, False]
    assert [fit.fits for fit in fits] == [True, False]


def test_exact_formats_are_preferred() -> None:
    assert choose_fit(Wish(LLAMA_8B, 2048), setting_of("rtx4090", 256)).states == "fp32"
    assert choose_fit(Wish(LLAMA_8B, 2048), setting_of("rtx4090", 128)).states == "bf16"


def test_what_is_given_is_kept() -> None:
    wish = Wish(LLAMA_8B, 512, sequences=4, states="int8", micro_batch=1, checkpointing=True, offload_params=True)
    fit = choose_fit(wish, setting_of("h200", 256))
    assert (fit.states, fit.micro_batch, fit.accumulation) == ("int8", 1, 4)
    assert fit.checkpointing
    assert fit.offload_params
    assert fit.ratio == 0.0  # this GPU has room for all state and all weights
    assert choose_fit(replace(wish, ratio=1.0), setting_of("h200", 256)).ratio == 1.0
    assert choose_fit(replace(wish, offload_params=None, ratio=0.5), setting_of("h200", 256)).ratio == 0.5


def test_selective_recomputation_is_chosen_where_it_is_enough() -> None:
    gpt, setting = cost_of(PRESETS["gpt2-1.5b"]), setting_of("rtx4090", 128)
    wish = Wish(gpt, 1024, sequences=8, micro_batch=8, clips=True, offload_params=False)
    fit = choose_fit(wish, setting)
    assert (fit.checkpointing, fit.selective) == (False, True)
    assert not choose_fit(replace(wish, checkpointing=False), setting).fits
    assert choose_fit(replace(wish, checkpointing=True), setting).step_s > fit.step_s
    assert choose_fit(replace(wish, checkpointing=False, selective=True), setting).step_s == fit.step_s
    assert not choose_fit(Wish(LLAMA_8B, 2048), setting).selective  # its memory is not known


def test_each_help_is_enough() -> None:
    setting, wish = setting_of("rtx4090", 32), Wish(LLAMA_8B, 2048, sequences=2)
    fit = choose_fit(wish, setting)
    assert not fit.fits
    method, host, gpu, master = fit.helps
    assert "--master none" in master
    assert choose_fit(replace(wish, master="none"), setting).fits
    assert not any("master" in text for text in choose_fit(replace(wish, matrix_steps=5), setting).helps)
    assert choose_fit(replace(wish, method=method.removeprefix("method ")), setting).fits
    (ram_gb,) = map(int, re.findall(r"at least (\d+) GB of host", host))
    assert choose_fit(wish, setting_of("rtx4090", ram_gb)).fits
    assert not choose_fit(wish, setting_of("rtx4090", ram_gb - 1)).fits
    (gpu_gb,) = map(int, re.findall(r"at least (\d+) GB of GPU", gpu))
    assert choose_fit(wish, setting_of("rtx4090", 32, gpu_gb)).fits
    assert not choose_fit(wish, setting_of("rtx4090", 32, gpu_gb - 1)).fits


def test_without_a_gpu_the_host_has_everything() -> None:
    tiny = cost_of(PRESETS["tiny"], "tiny")
    setting = Setting(Rates(0.0, 0.0, 0.0, {}, {}, 0.0, 0.0), Memory(0, 8 * GB))
    fit = choose_fit(Wish(tiny, 64, sequences=8, weights="fp32"), setting)
    assert fit.fits
    assert (fit.gpu_bytes, fit.step_s, fit.states, fit.micro_batch, fit.checkpointing) == (0, 0.0, "fp32", 8, False)
    assert not choose_fit(Wish(LLAMA_8B, 64, weights="fp32"), setting).fits


def load_benchmark(name: str) -> Any:
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for the module there
    spec.loader.exec_module(module)
    return module


plan_errors = load_benchmark("plan_errors")
# The cause of this error is not known. The step of this run took 0.75 s, of which the host was busy for about 0.5 s.
UNEXPLAINED = {("OPT 12.85 B, bf16, no clipping", 0.25)}


@pytest.mark.parametrize("measured", plan_errors.runs(), ids=lambda run: f"{run.what}, {run.ratio:g}")
def test_newer_runs_are_as_planned(measured: Any) -> None:
    error = plan_errors.error_of(measured)
    assert error.gpu is None or abs(error.gpu) < 0.05
    assert error.host is None or abs(error.host) < 0.05 or abs(error.host) * measured.host_gb < 1.5
    assert abs(error.seconds) < 0.16 or (measured.what, measured.ratio) in UNEXPLAINED


def test_fetches_take_their_time() -> None:
    setting = setting_of("rtx4090", 128)
    for batches in (1, 2, 9):
        run = Run(LLAMA_8B, 1, 512, micro_batches=batches, states="int8", clips=False, offload_params=True)
        timing = timing_of(run, setting.rates)
        fetched = sum(fetch.nbytes for fetch in fetches_of(run, timing))
        step_s = case_at("", run, setting, 1.0).prediction.step_s
        # The last block stays on the GPU between forward and backward.
        least = batches * (2 * fetched - run.block_bytes[-1]) / setting.rates.in_bytes
        assert least <= step_s <= 1.6 * max(least, timing.gpu_s) + run.own_numel / 4e9


def test_frozen_weights_have_no_state_and_four_bits_a_quarter_of_the_bytes() -> None:
    full = Run(LLAMA_8B, 1, 2048)
    lora, qlora = replace(full, adapter_rank=16), replace(full, adapter_rank=16, four_bits=True)
    assert lora.own_numel == 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # as peft counts
    memory = Memory(100 * GB, 100 * GB)
    sizes = [bytes_of(run, Placed(run.own_numel), memory) for run in (full, lora, qlora)]
    assert sizes[1].host["state"] < 0.01 * sizes[0].host["state"]
    assert sizes[2].gpu["weights"] < 0.4 * sizes[1].gpu["weights"]
    on_host = bytes_of(replace(qlora, offload_params=True), Placed(qlora.own_numel), memory)
    assert on_host.host["weights"] == sum(qlora.frozen_bytes)


def test_blocks_with_state_on_the_gpu_have_their_weights_there() -> None:
    memory = Memory(60 * GB, 200 * GB)
    for rank in (0, 16):
        run = Run(LLAMA_8B, 1, 2048, adapter_rank=rank, offload_params=True)
        own = [sum(run.trained_root), *(run.trained_blocks[:1] * 32)]
        for num_blocks in (0, 7, 32):
            ratio = 1.0 - (own[0] + num_blocks * own[1]) / run.own_numel
            for near in (ratio - 0.4 / 32, ratio + 0.4 / 32):  # a block is not split
                if not rank or num_blocks:
                    placed = placed_at(run, min(1.0, max(0.0, near if num_blocks else ratio)))
                    assert placed.resident == own[0] + num_blocks * own[1]
            used = bytes_of(run, placed_at(run, ratio), memory)
            few = bytes_of(run, placed_at(run, 1.0), memory)
            fetched = min(4, 32 - num_blocks) * run.block_bytes[0]  # blocks on the GPU for a time
            more = num_blocks * run.block_bytes[0] + fetched - 4 * run.block_bytes[0]
            assert used.gpu["weights"] - few.gpu["weights"] == more
            assert used.host["weights"] == sum(run.frozen_bytes[num_blocks:])


@pytest.mark.parametrize("clips", [False, True])
def test_blocks_with_state_on_the_gpu_are_not_copied(clips: bool) -> None:
    setting = setting_of("rtx4090", 400, gpu_gb=400)
    run = Run(LLAMA_8B, 1, 512, states="bf16", clips=clips, offload_params=True)
    found = [case_at("", run, setting, ratio) for ratio in (1.0, 0.5, 0.0)]
    copied = [case.prediction.in_s for case in found]
    assert copied[0] > 1.7 * copied[1] > 0.0 == copied[2]
    assert found[0].prediction.step_s > found[1].prediction.step_s > found[2].prediction.step_s
    # Only the update of the GPU is left, which reads and writes all state.
    rest_s = found[2].prediction.step_s - timing_of(run, setting.rates).gpu_s
    assert rest_s == pytest.approx(run.own_numel * UPDATE_BYTES["bf16"] / setting.rates.device_bytes, rel=0.01)


TIED = from_hf({**planner_support.LLAMA_8B, "tie_word_embeddings": True}, "tied")
TABLE = 128256 * 4096  # elements of the embedding, and of an output layer that is not tied


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("model", [LLAMA_8B, TIED], ids=["untied", "tied"])
def test_embedding_and_output_layers_by_hand(model: ModelCost, world: int) -> None:
    stays = Run(model, 1, 2048, world=world, stage=3, offload_params=True)
    moved = replace(stays, offload_embeddings=True)
    memory, block = Memory(60 * GB, 200 * GB), 2 * model.blocks[0]
    num_layers = 1 if model is TIED else 2
    used = [bytes_of(run, Placed(run.own_numel), memory) for run in (stays, moved)]
    # One of the four blocks that are there at a time may be the output layer.
    assert used[0].gpu["weights"] - used[1].gpu["weights"] == 2 * (num_layers - 1) * TABLE + block
    assert used[0].host["weights"] == used[1].host["weights"] == 0  # they are a part of the state
    assert used[0].host["state"] == used[1].host["state"]
    timing = timing_of(moved, setting_of("h200", 200).rates)
    fetches = fetches_of(moved, timing)
    assert [fetch.owner for fetch in fetches] == [None] * 33 + [0 if model is TIED else None]
    assert [k for k, fetch in enumerate(fetches) if fetch.backward_s is None] == [0, 33]
    assert fetches[0].nbytes == 2 * TABLE // world
    assert fetches[33].nbytes == (2 * TABLE + 8192 * (model is LLAMA_8B)) // world
    assert fetches[1:33] == tuple(replace(f) for f in fetches_of(stays, timing))
    items = [items_of(run, timing) for run in (stays, moved)]
    assert sum(item.numel for item in items[0]) == pytest.approx(sum(item.numel for item in items[1]), rel=1e-6)
    # Updates of the output layer have the whole forward before they are needed.
    assert [it.need > 0.8 * timing.forward_s for it in items[1] if it.block == 33] == [True] * (
        0 if model is TIED else 8 // world
    )
    # The embedding is the first block, and the output layer the last one.
    assert moved.num_blocks_here(TABLE // world + 8 + 3 * block // 2 // world) == 4
    every = bytes_of(moved, placed_at(moved, 0.0), memory)
    assert every.gpu["weights"] == 2 * model.numel


def test_gradients_do_not_take_the_memory_that_embeddings_leave() -> None:
    """On a GPU where gradients fit into half of the memory only without embeddings, they wait on the host."""
    stays = Run(LLAMA_8B, 4, 2048, states="bf16", offload_params=True)
    width, end = 2, 2 * sum(LLAMA_8B.ends)
    memory = Memory(2 * width * stays.own_numel + end // 2, 200 * GB)
    moved = replace(stays, offload_embeddings=True)
    first, second = (bytes_of(run, Placed(run.own_numel), memory).host["gradients"] for run in (stays, moved))
    assert first == second == width * stays.own_numel
    here = bytes_of(moved, placed_at(moved, 0.0), memory)
    assert here.host["gradients"] == 0  # the layers are on the GPU and count once


def test_gradients_that_wait_on_the_gpu_leave_it_before_the_activations_have_their_peak() -> None:
    model = with_fused_head(LLAMA_8B.with_layers(8), True)
    runs = [Run(model, batch, 2048, states="bf16", offload_params=True) for batch in (1, 4, 64)]
    short, middle, long = (bytes_of(run, Placed(run.own_numel), Memory(60 * GB, 200 * GB)) for run in runs)
    assert short.host["gradients"] == middle.host["gradients"] == long.host["gradients"] == 0
    every, root, block = 2 * model.numel, 4 * TABLE, 2 * model.blocks[0]
    # At the end of backward, with the gradient of the embedding in `.grad` and in buffers.
    assert short.gpu_total == pytest.approx(root + 2 * block + every + 2 * TABLE, rel=0.001)
    # In the backward of the third block.
    backward = runs[1].first_block_bytes + 2 * 2 * 4096 * 4 * 2048
    assert middle.gpu_total == pytest.approx(root + 4 * block + every - 2 * TABLE - 3 * block + backward, rel=0.001)
    # At its beginning, with the buffers of a few buckets.
    few = 6 * 2 * bucket_numel(runs[2])
    assert long.gpu_total == pytest.approx(root + 4 * block + runs[2].activation_bytes + few, rel=0.001)


def test_frozen_embeddings_take_memory_on_the_host() -> None:
    memory = Memory(60 * GB, 200 * GB)
    run = Run(LLAMA_8B, 1, 2048, adapter_rank=16, offload_params=True, offload_embeddings=True)
    stays = replace(run, offload_embeddings=False)
    for ratio in (1.0, 0.5, 0.0):
        used = [bytes_of(each, placed_at(each, ratio), memory) for each in (stays, run)]
        assert used[1].host["weights"] - used[0].host["weights"] == 2 * (LLAMA_8B.embedding_numel + LLAMA_8B.head_numel)
        assert used[1].gpu["weights"] < used[0].gpu["weights"]


def test_embeddings_on_the_host_are_copied_once_a_forward() -> None:
    setting = setting_of("rtx4090", 256)
    for batches in (1, 3):
        found = []
        for embeddings in (False, True):
            run = Run(LLAMA_8B, 1, 512, batches, states="bf16", clips=False, offload_params=True)
            run = replace(run, offload_embeddings=embeddings)
            found.append(case_at("", run, setting, 1.0).prediction)
        more = batches * (4 * TABLE + run.layer_bytes[-1])  # the last block is not the last one of a forward any more
        less = 4 * TABLE  # weights that stay on the GPU are copied there after their update
        # The units copy at different rates, by the number of directions that copy.
        least, most = ((more - less) / rate for rate in (setting.rates.in_bytes, setting.rates.duplex_bytes))
        assert 0.8 * least - 0.02 <= found[1].in_s - found[0].in_s <= 1.2 * most + 0.02


def test_embeddings_are_on_the_host_only_where_a_run_does_not_fit_or_becomes_faster() -> None:
    wish = Wish(LLAMA_8B, 2048, sequences=1, states="bf16", clips=True)
    kept, moved = (choose_fit(wish, setting_of("rtx4090", 256, gpu_gb)) for gpu_gb in (10, 7))
    assert kept.fits
    assert kept.offload_params
    assert not kept.offload_embeddings
    assert moved.fits
    assert moved.offload_embeddings
    assert moved.changes == ()
    assert moved.gpu_bytes < kept.gpu_bytes
    never = choose_fit(replace(wish, offload_embeddings=False), setting_of("rtx4090", 256, 7))
    assert not never.fits
    always = choose_fit(replace(wish, offload_embeddings=True), setting_of("rtx4090", 256, 10))
    assert always.offload_embeddings
    # With more room for sequences, a step has fewer micro-batches.
    four = replace(wish, sequences=4)
    faster = choose_fit(four, setting_of("rtx4090", 256, 11))
    slower = choose_fit(replace(four, offload_embeddings=False), setting_of("rtx4090", 256, 11))
    assert faster.offload_embeddings
    assert faster.micro_batch > slower.micro_batch
    assert 1.01 * faster.step_s < slower.step_s


def test_several_gpus_may_have_their_embeddings_on_the_host() -> None:
    wish = Wish(LLAMA_8B, 2048, sequences=1, states="bf16", clips=True, ratio=1.0, world=4, stage=2)
    machine = Machine(GPUS["rtx4090"], Host(256 * GB, 16, 150e9), 4)
    for gpu_gb, expected in ((10, False), (7, True)):
        fit = choose_fit(wish, Setting(rates_of(machine), Memory(gpu_gb * GB, 256 * GB), 25e9))
        assert fit.fits
        assert (fit.offload_params, fit.offload_embeddings, fit.case.run.stage) == (True, expected, 3)


def test_models_without_large_layers_outside_of_their_blocks() -> None:
    small = from_counts("small", [10_000_000] * 8, 1000, 1000, 512, 2)
    assert small.ends == (0, 0)
    fit = choose_fit(Wish(small, 512, offload_params=True, offload_embeddings=True), setting_of("rtx4090", 64))
    assert not fit.offload_embeddings


def test_more_gpu_memory_takes_more_blocks_and_makes_steps_shorter() -> None:
    wish = Wish(LLAMA_8B, 2048, states="bf16", clips=True, offload_params=True, checkpointing=True)
    found = []
    for gpu_gb in (24, 40, 60):
        setting = setting_of("h200", 200, gpu_gb)
        fit = choose_fit(wish, setting)
        assert fit.fits
        assert fit.gpu_bytes <= usable(setting.memory).gpu_bytes
        found.append(fit)
    assert [fit.ratio for fit in found] == sorted((fit.ratio for fit in found), reverse=True)
    assert found[0].ratio > 0.8 > 0.75 > found[2].ratio
    assert found[2].step_s < found[0].step_s
    fixed = choose_fit(replace(wish, ratio=1.0), setting)
    assert fixed.step_s > found[2].step_s


def test_cards_of_the_longer_list_are_recognised() -> None:
    for title, name in (
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40", "l40"),
    ):
        assert recognise(title) is gpu_named(name)
    assert recognise("NVIDIA RTX A3000 Laptop GPU") is None


def test_clipping_is_given_up_for_a_step_with_twice_as_many_sequences() -> None:
    """In 64 GB, gradients that wait on the host for their norm leave the GPU so little that few sequences fit."""
    wish = Wish(with_fused_head(LLAMA_8B, trains_head=True), 2048, sequences=16)
    fit = choose_fit(wish, setting_of("h200", 64, gpu_gb=15))
    clipped = choose_fit(replace(wish, clips=True), setting_of("h200", 64, gpu_gb=15))
    assert fit.fits
    assert not fit.clips
    assert fit.micro_batch >= 2 * clipped.micro_batch
    assert len(fit.changes) == 2
    roomy = choose_fit(wish, setting_of("h200", 64, gpu_gb=20))
    assert roomy.clips
    assert (
        2 * roomy.micro_batch >= choose_fit(replace(wish, clips=False), setting_of("h200", 64, gpu_gb=20)).micro_batch
    )
