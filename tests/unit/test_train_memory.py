# SPDX-License-Identifier: Apache-2.0
"""The memory plan of `twinflow train`: arithmetic, tested with no device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twinflow.cli.memory import (
    Available,
    MemoryPlan,
    available_to,
    bytes_at,
    case_of,
    plan_memory,
    remedies,
    start_ratio,
)
from twinflow.cli.settings import (
    TrainOptions,
    TrainSettings,
    choose_shape,
    default_lr,
    engine_config,
    make_settings,
    parse_bytes,
    parse_ratio,
    parse_recompute,
)
from twinflow.config import load_config
from twinflow.launch.environment import RankEnvironment
from twinflow.models.gpt import PRESET_BATCH, PRESETS, activation_bytes, count_params
from twinflow.offload.plan import HOST, RESIDENT, BucketPlan
from twinflow.optim.twin_build import StateKind
from twinflow.planner import costs
from twinflow.rules import RULES

GB = 10**9
CARD, H200 = 32 * GB, 150 * GB


def settings(preset: str, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = dict.fromkeys(TrainSettings.__dataclass_fields__)
    # The large shapes with whole blocks recomputed, whatever the memory is: most tests are about the other memory.
    recompute = "full" if PRESETS[preset].hidden >= 1600 else "none"
    shape = replace(choose_shape(TrainOptions(preset=preset))[1], recompute=recompute)
    values |= {"recompute": recompute}
    values |= {"preset": preset, "model": shape, "batch_size": PRESET_BATCH[preset], "accumulation": 1, "lr": 1e-4}
    values |= {"weight_decay": 0.1, "grad_clip": 1.0, "rule": "adamw", "ratio": 1.0, "placement": "auto"}
    values |= {"precision": "bf16", "delayed_update": False, "threads": 1, "out": Path(), "file_config": {}}
    return TrainSettings(**(values | {"world": 1} | changes))


def plan(
    asked: TrainSettings | str, states: str = "auto", gpu: int | None = CARD, host: int = 128 * GB, **changes: Any
) -> MemoryPlan:
    """As `twinflow train` makes it, where so much is free."""
    asked = settings(asked, **changes) if isinstance(asked, str) else asked
    return plan_memory(case_of(asked, engine_config(asked, "fp32")), states, Available(gpu, host))


def waiting(asked: TrainSettings, gpu: int | None) -> int:
    """Gradients that wait in host memory."""
    case = case_of(asked, engine_config(asked, "fp32"))
    return bytes_at(case, Available(gpu, 0)).host["gradients"]


@pytest.mark.parametrize(
    ("free_gb", "states"), [(1000, "fp32"), (150, "fp32"), (132, "bf16"), (100, "bf16"), (75, "int8")]
)
def test_the_widest_format_that_fits(free_gb: int, states: str) -> None:
    found = plan("gpt2-10b", host=free_gb * GB, grad_clip=0.0)
    assert found.states == states
    assert found.used.host_total < free_gb * GB
    assert ("fp32 would need 126" in found.host_line) == (states != "fp32")
    assert not found.tight


def test_a_format_that_was_asked_for_is_taken() -> None:
    assert plan("gpt2-10b", "int8", host=1000 * GB).states == "int8"
    assert plan("tiny", gpu=None, host=0).states == "fp32"  # nothing is known
    assert plan("gpt2-10b", "fp32", host=0).states == "fp32"


def test_what_ran_on_a_card_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Speculative stores took at most half of the free host memory then.
    monkeypatch.setattr(costs, "reserved_bytes", lambda free_bytes: free_bytes - free_bytes // 2)
    # Measured under a cap of 32 GB: 28.4 and 118.5 GB, 31.5 and up to 130.1 GB, 30.6 and 114.7 GB on GPU and host.
    ten = plan("gpt2-10b")
    assert (ten.states, ten.why, ten.tight) == ("bf16", "fp32 would need 146.2 GB", "")
    assert ten.used.gpu_total == pytest.approx(28.36 * GB, rel=0.03)
    assert ten.used.host_total == pytest.approx(118.5 * GB, rel=0.03)
    thirteen = plan("gpt2-13b", "bf16", grad_clip=0.0)
    assert (thirteen.states, thirteen.why, thirteen.tight) == ("bf16", "as requested", "")
    assert thirteen.used.gpu_total == pytest.approx(31.53 * GB, rel=0.03)
    shape = choose_shape(TrainOptions(num_layers=69, hidden=4096, num_heads=32, checkpoint_activations=True))[1]
    largest = plan(settings("gpt2-13b", model=shape, batch_size=1, grad_clip=0.0), "bf16")
    assert (largest.states, largest.tight) == ("bf16", "")
    assert largest.used.gpu_total == pytest.approx(30.57 * GB, rel=0.03)
    assert largest.used.host_total == pytest.approx(114.7 * GB, rel=0.03)


@pytest.mark.parametrize(
    ("preset", "states", "gpu_gb", "host_gb", "changes", "words"),
    [
        (
            *("gpt2-10b", "fp32", 32, 128, {}),
            [
                "Not enough host memory: a model of 10.28 B parameters needs at least 143.9 GB (123.4 GB of fp32 state",
                "and 128.0 GB are available",
            ],
        ),
        (
            "gpt2-10b",
            "fp32",
            32,
            128,
            {},
            ["20.6 GB of gradients", "15.9 GB are missing", "Use --states bf16."],
        ),
        (
            "gpt2-10b",
            "auto",
            32,
            50,
            {"grad_clip": 0.0},
            ["50.0 GB are available", "needs at least 62.3", "int8", "12.3 GB are missing"],
        ),
        (
            "gpt2-13b",
            "auto",
            32,
            100,
            {},
            ["26.6 GB of gradients", "7.2 GB are missing", "Use --grad-clip 0."],
        ),
        ("gpt2-13b", "fp32", 32, 90, {}, ["Use --states int8 and --grad-clip 0."]),
        ("gpt2-13b", "fp32", 150, 60, {}, ["99.6 GB are missing", "Use --ratio 0.28."]),
        (
            *("gpt2-1.5b", "fp32", 16, 128, {"ratio": 0.0}),
            ["Not enough GPU memory", "16.0 GB are available", "5.8 GB are missing"],
        ),
        (
            *("gpt2-1.5b", "fp32", 16, 128, {"ratio": 0.0}),
            ["15.6 GB of fp32 state", "Use --states int8, or --ratio 0.48."],
        ),
        (
            "gpt2-10b",
            "auto",
            32,
            128,
            {"ratio": 0.0},
            ["Not enough GPU memory", "32.0 GB are available", "50.9 GB are missing", "Use --ratio 0.94."],
        ),
        ("gpt2-10b", "fp32", 32, 40, {"ratio": 0.5}, ["Not enough GPU memory", "of host memory are also missing"]),
        (
            *("gpt2-10b", "auto", 16, 128, {}),
            ["Not enough GPU memory", "needs at least 20.6 GB", "16.0 GB are available", "The weights alone"],
        ),
        ("gpt2-10b", "auto", None, 64, {"precision": "fp32"}, ["41.1 GB of weights", "Train a smaller model"]),
    ],
)
def test_what_surely_does_not_fit_is_refused_with_the_sum(
    preset: str, states: str, gpu_gb: int | None, host_gb: int, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(MemoryError, match=r"needs at least .* are available\. .* are missing\.") as error:
        plan(preset, states, None if gpu_gb is None else gpu_gb * GB, host_gb * GB, **changes)
    for word in words:
        assert word in str(error.value), error.value


def test_what_a_refusal_proposes_fits() -> None:
    assert plan("gpt2-10b", "bf16").tight == ""
    assert plan("gpt2-13b", host=100 * GB, grad_clip=0.0).tight == ""
    assert plan("gpt2-13b", "int8", host=90 * GB, grad_clip=0.0).tight == ""
    assert plan("gpt2-13b", "fp32", gpu=H200, host=60 * GB, ratio=0.28).tight == ""
    assert plan("gpt2-1.5b", "fp32", gpu=16 * GB, ratio=0.48).tight == ""
    assert plan("gpt2-10b", ratio=0.96).tight == ""


def test_only_estimates_do_not_refuse() -> None:
    # Activations: the run starts, with a warning; another state format would not help and is not taken.
    found = plan("gpt2-10b", batch_size=64)
    assert found.states == "bf16"
    assert "--batch-size 8 would leave more room" in found.tight
    shape = replace(PRESETS["gpt-350m"], recompute="none")
    kept = plan(settings("gpt-350m", model=shape), gpu=10 * GB)
    assert kept.states == "fp32"
    assert "--recompute full" in kept.tight
    # The process, and the share that is left to the machine.
    assert "tight" in plan("gpt2-10b", "fp32", host=124 * GB, grad_clip=0.0).tight
    with pytest.raises(MemoryError, match=r"0\.4 GB are missing"):
        plan("gpt2-10b", "fp32", host=123 * GB, grad_clip=0.0)


@pytest.mark.parametrize(
    ("preset", "gpu_gb", "accumulation", "expected"),
    [
        ("gpt2-1.5b", 32, 1, "none"),
        ("gpt2-1.5b", 24, 1, "selective"),
        ("gpt2-1.5b", 16, 1, 30),
        ("gpt2-10b", 32, 52, "full"),
        ("gpt2-10b", 150, 52, "selective"),
        ("gpt2-10b", 150, 1, "none"),
    ],
)
def test_as_little_is_recomputed_as_fits(preset: str, gpu_gb: int, accumulation: int, expected: str | int) -> None:
    asked = settings(preset, accumulation=accumulation, recompute="auto")
    found = plan(asked, gpu=gpu_gb * GB, host=240 * GB)
    assert (found.recompute, found.tight) == (expected, "")
    assert found.used.gpu_total < 0.95 * gpu_gb * GB
    shape = replace(asked.model, recompute=expected)
    assert found.used.gpu["activations"] == activation_bytes(shape, PRESET_BATCH[preset], 1024)
    less = {"selective": "none", 30: 24, "full": 48}.get(expected)
    if less is not None:
        less_again = replace(asked, recompute=less, model=replace(shape, recompute=less))
        assert plan(less_again, gpu=gpu_gb * GB, host=240 * GB).used.gpu_total > 0.92 * gpu_gb * GB


def weights_on_host(**others: bool) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", **others}}}


@pytest.mark.parametrize("world", [1, 4])
def test_embeddings_are_on_the_host_only_where_a_run_does_not_fit_otherwise(world: int) -> None:
    asked = settings("gpt2-10b", world=world, batch_size=1, file_config=weights_on_host())
    here, away = (replace(asked, file_config=weights_on_host(embeddings=each)) for each in (False, True))
    larger, smaller = (plan(each, gpu=16 * GB, host=400 * GB).used for each in (here, away))
    shape = asked.model
    assert larger.gpu["weights"] - smaller.gpu["weights"] == pytest.approx(
        2 * (shape.vocab_size + shape.context) * shape.hidden, rel=0.1
    )
    sizes = (size * GB // 10 for size in range(160, 20, -1))
    between = next(size for size in sizes if plan(here, "fp32", gpu=size, host=400 * GB).tight)
    for gpu, expected in ((16 * GB, False), (between, True)):
        found = plan(asked, "fp32", gpu=gpu, host=400 * GB)
        assert (found.offload_embeddings, found.tight) == (expected, "")
        assert ("without those of the embedding and output layers" in found.gpu_line) == expected
        assert case_of(asked, engine_config(asked, "fp32")).run.world == world
    assert plan(away, "fp32", gpu=16 * GB, host=400 * GB).offload_embeddings
    assert not plan("gpt2-10b", "fp32", host=400 * GB).offload_embeddings  # the weights are on the GPU
    assert not plan(asked, gpu=None, host=400 * GB).offload_embeddings


def test_what_is_recomputed_without_a_gpu_and_with_other_settings() -> None:
    asked = settings("gpt2-1.5b", recompute="auto")
    assert plan(asked, gpu=None, host=0).recompute == "none"  # nothing is known
    assert plan(asked, gpu=None, host=64 * GB).recompute == "none"
    assert plan(asked, gpu=None, host=40 * GB).recompute == 18
    # Ranks that share a model recompute it as a whole. The section of a file lets the engine do it.
    pipe = {"pipeline": {"stages": 2}}
    assert plan(replace(asked, file_config=pipe, world=2, accumulation=4), gpu=16 * GB).recompute == "full"
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    kept = replace(asked, file_config=section, recompute="none", model=replace(asked.model, recompute="none"))
    full = replace(asked, recompute="full", model=replace(asked.model, recompute="full"))
    assert plan(kept).used.gpu == plan(full).used.gpu


def test_the_options_for_recomputation() -> None:
    assert [parse_recompute(TrainOptions(recompute=text)) for text in ("full", "12", "auto", None)] == [
        "full",
        12,
        "auto",
        "auto",
    ]
    assert parse_recompute(TrainOptions(checkpoint_activations=False)) == "none"
    with pytest.raises(ValueError, match="--recompute 2 cannot be used with --checkpoint-activations"):
        parse_recompute(TrainOptions(recompute="2", checkpoint_activations=True))
    with pytest.raises(ValueError, match="--recompute is 'half', but must be none, selective, full, auto"):
        parse_recompute(TrainOptions(recompute="half"))
    with pytest.raises(ValueError, match="--recompute is 5, but must be at most 4"):
        choose_shape(TrainOptions(preset="tiny", recompute="5"))


def test_float8_compiles_unless_told_otherwise() -> None:
    for options, compiles in (({}, False), ({"float8": True}, True), ({"float8": True, "compile": False}, False)):
        asked = make_settings(TrainOptions(**options), 1)
        assert asked.compile is compiles
        config = load_config(engine_config(asked, "fp32"))
        assert config.compile.blocks is compiles
        assert config.float8.enabled is bool(options.get("float8", False))


def test_the_line_is_where_weights_state_and_held_gradients_are_all_there_is() -> None:
    needed = (2 + 10 + 2) * count_params(PRESETS["gpt2-1.5b"])
    assert plan("gpt2-1.5b", "fp32", gpu=needed, ratio=0.0).tight
    with pytest.raises(MemoryError, match="Not enough GPU memory"):
        plan("gpt2-1.5b", "fp32", gpu=int(0.99 * needed), ratio=0.0)
    needed = 12 * count_params(PRESETS["gpt2-10b"])
    assert plan("gpt2-10b", "fp32", host=needed, grad_clip=0.0).tight
    with pytest.raises(MemoryError, match="Not enough host memory"):
        plan("gpt2-10b", "fp32", host=needed - 1, grad_clip=0.0)


@pytest.mark.parametrize(
    ("gpu_gb", "expected"),
    [
        (24, {"states": "bf16", "batch_size": 1, "grad_clip": 0}),
        (23, {"states": "bf16", "ratio": 0.22}),
    ],
)
def test_the_remedy_is_the_mildest_of_its_kind(gpu_gb: int, expected: dict[str, Any]) -> None:
    asked = settings("gpt2-1.5b", ratio=0.0, batch_size=16)
    case, card = case_of(asked, engine_config(asked, "fp32")), Available(gpu_gb * GB, 128 * GB)
    assert remedies(case, card) == [f"--{name.replace('_', '-')} {value}" for name, value in expected.items()]
    assert plan(asked, "fp32", gpu_gb * GB).tight
    for name, value in expected.items():
        changed = asked if name == "states" else replace(asked, **{name: value})
        assert not plan(changed, value if name == "states" else "fp32", gpu_gb * GB).tight


def test_gradients_wait_on_the_host_where_the_card_has_no_room() -> None:
    numel = count_params(PRESETS["gpt2-10b"])
    big, small = settings("gpt2-10b"), settings("gpt2-1.5b")
    assert waiting(big, CARD) == 2 * numel
    assert waiting(big, 140 * GB) == 0
    assert waiting(small, CARD) == 0
    assert waiting(replace(big, grad_clip=0.0), CARD) == 0
    assert waiting(replace(big, grad_clip=0.0, precision="fp16"), CARD) == 2 * numel  # may skip: must wait
    assert waiting(replace(big, grad_clip=0.0, delayed_update=True), CARD) == 2 * numel
    assert waiting(replace(big, accumulation=4), CARD) == 4 * numel
    assert waiting(replace(big, file_config={"gradient_clipping": 0.0, "bf16": {"enabled": True}}), CARD) == 2 * numel


def test_resident_state_leaves_less_to_gradients() -> None:
    # 20.6 GB of gradients are less than half of what weights leave, but more than half of what the state leaves of it.
    asked = settings("gpt2-10b", ratio=0.5)
    assert waiting(replace(asked, ratio=1.0), 100 * GB) == 0
    assert waiting(asked, 100 * GB) == pytest.approx(count_params(asked.model), rel=1e-6)


def test_the_file_decides_where_gradients_wait() -> None:
    told = {"zero_optimization": {"offload_optimizer": {"hold": "device"}}}
    with pytest.raises(MemoryError, match="gradients"):
        plan("gpt2-10b", "bf16", host=90 * GB)
    assert plan("gpt2-10b", "bf16", host=90 * GB, file_config=told).tight  # not sure: they may not be on the host


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("rule", "states"), [(r, s) for r in RULES for s in RULES[r].formats])
def test_state_is_counted_as_the_optimizer_allocates_it(rule: str, states: str, precision: str) -> None:
    numel, dtype = 128 * 10**6, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    asked = settings("gpt2-1.5b", rule=rule, precision=precision)
    run = replace(case_of(asked, engine_config(asked, "fp32")).run, states=states)
    for place, size in ((HOST, run.size.host), (RESIDENT, run.size.resident)):
        bucket = BucketPlan(0, 0, dtype, (), numel, place)
        assert size * numel == pytest.approx(StateKind(RULES[rule], None, states).nbytes(bucket))


@pytest.mark.parametrize(
    ("optimizer", "formats", "size"),
    [
        ({"type": "Lion"}, ("fp32", "bf16"), 8.0),
        ({"type": "SGD", "params": {"lr": 0.1}}, ("fp32", "bf16"), 4.0),  # without momentum
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, ("fp32", "bf16"), 8.0),
        ({"type": "RMSprop"}, ("fp32",), 12.0),
    ],
)
def test_the_optimizer_of_a_file_is_the_one_that_is_counted(
    optimizer: dict[str, Any], formats: tuple[str, ...], size: float
) -> None:
    file_config = load_config({"optimizer": optimizer}).model_dump(mode="json", exclude_unset=True)
    asked = settings("gpt2-1.5b", file_config=file_config)
    case = case_of(asked, engine_config(asked, "fp32"))
    assert case.formats == formats
    assert case.run.size.host == size


def test_the_lines_of_the_header() -> None:
    found = plan("gpt2-10b")
    assert found.host_line == ("82.23 GB of bf16 state, about 123.7 GB in all of 128.0 GB: fp32 would need 146.2 GB")
    assert found.gpu_line == "20.6 GB of weights, 0.6 GB of gradients, about 6.4 GB of activations, of 32.0 GB"
    shape = settings("gpt2-10b").model
    assert found.used.gpu["activations"] == activation_bytes(shape, 10, 1024)
    half = plan("gpt2-10b", "fp32", gpu=H200, ratio=0.5)
    assert half.gpu_line.startswith("20.6 GB of weights, 51.4 GB of fp32 state, 20.6 GB of gradients")
    assert half.host_line.startswith("61.68 GB of fp32 state")
    assert plan("tiny", gpu=None).gpu_line == "no GPU"
    assert "the rest may hold optimizer state" in plan("gpt2-10b", ratio="auto").gpu_line


def test_auto_starts_with_what_the_host_takes() -> None:
    # More fp32 state than the host's memory takes: the card has room for the rest.
    found = plan("gpt2-10b", ratio="auto", gpu=H200, host=100 * GB)
    assert found.states == "fp32"
    assert found.used.host["state"] == pytest.approx(94 * GB, rel=1e-3)
    assert found.used.gpu["state"] > 0
    with pytest.raises(MemoryError, match="Not enough GPU memory"):
        plan("gpt2-10b", "fp32", ratio="auto", host=60 * GB)


def test_without_a_gpu_everything_is_on_the_host() -> None:
    used, numel = plan("gpt2-1.5b", gpu=None, precision="fp32").used, count_params(PRESETS["gpt2-1.5b"])
    assert used.gpu == {}
    assert used.host["weights"] == used.host["gradients"] == 4 * numel
    assert used.host["state"] == 12 * numel
    assert used.host["activations"] > 0


def on_ranks(num_ranks: int, gpu: int | None = CARD, host: int = 128 * GB, **changes: Any) -> MemoryPlan:
    """The fp32 plan of gpt2-1.5b for so many ranks, where so much is free on the hosts of all."""
    asked = settings("gpt2-1.5b", world=num_ranks, **changes)
    return plan_memory(case_of(asked, engine_config(asked, "fp32")), "fp32", Available(gpu, host))


def test_ranks_share_the_state_and_each_has_a_process() -> None:
    numel = count_params(PRESETS["gpt2-1.5b"])
    one, four = on_ranks(1), on_ranks(4)
    assert four.used.host["state"] == pytest.approx(one.used.host["state"], rel=1e-6)
    assert four.used.host["process"] == 4 * one.used.host["process"]
    assert four.used.gpu["weights"] == one.used.gpu["weights"]
    assert four.host_line.startswith(f"{12 * numel / 1e9:.2f} GB of fp32 state on 4 ranks, about ")
    assert " ranks" not in one.host_line
    here = on_ranks(4, gpu=None, precision="fp32").used.host
    assert here["weights"] == 4 * on_ranks(1, gpu=None, precision="fp32").used.host["weights"] == 4 * 4 * numel
    assert here["process"] == 4 * GB


def test_ranks_that_are_too_many_for_the_host_are_refused() -> None:
    numel = count_params(PRESETS["gpt2-1.5b"])
    needed = (12 + 4 * (4 + 1)) * numel  # state once, weights in every rank and a fourth of the gradients
    assert on_ranks(1, None, needed, precision="fp32").tight == ""
    assert on_ranks(4, None, needed + GB, precision="fp32").tight  # there are activations as well
    with pytest.raises(
        MemoryError, match=r"host memory: a model of 1\.56 B parameters on 4 ranks needs at least .* \("
    ):
        on_ranks(4, None, needed - GB, precision="fp32")


def test_auto_gives_every_rank_its_part_of_the_host() -> None:
    runs = (settings("gpt2-10b", ratio="auto", world=num_ranks) for num_ranks in (1, 4))
    one, four = (case_of(asked, engine_config(asked, "fp32")) for asked in runs)
    scarce = Available(H200, 60 * GB)
    assert start_ratio(one, scarce) == pytest.approx(60 / 123.4 * 0.94, rel=0.02)
    assert 0.8 * start_ratio(one, scarce) < start_ratio(four, scarce) <= start_ratio(one, scarce)


def test_a_run_that_needs_more_than_ram_allows_is_refused() -> None:
    asked = settings("gpt2-10b", ratio=1.0, grad_clip=0.0)
    case = case_of(asked, engine_config(asked, "fp32"))
    used = plan_memory(case, "fp32", Available(H200, 1000 * GB)).used
    needed = int((used.host_total - used.host["shadows"]) / 0.95)
    assert not plan_memory(case, "fp32", Available(H200, needed + GB, is_limit=True)).tight
    short = Available(H200, needed - GB)
    assert "would leave more room" in plan_memory(case, "fp32", short).tight
    with pytest.raises(MemoryError, match=r"needs about .* are available\. Use --states bf16, .*or a larger --ram\."):
        plan_memory(case, "fp32", replace(short, is_limit=True))
    assert plan_memory(case, "auto", replace(short, is_limit=True)).states == "bf16"


@pytest.mark.parametrize(("world", "local", "host_gb"), [(1, 1, 100), (4, 4, 100), (8, 4, 200), (3, 1, 300)])
def test_memory_counts_once_for_a_machine(world: int, local: int, host_gb: int) -> None:
    ranks = RankEnvironment(0, 0, world, local, "127.0.0.1", 29500)
    assert available_to(ranks, CARD, 100 * GB) == Available(CARD, host_gb * GB)
    assert available_to(ranks, None, 0) == Available(None, 0)  # not known


@pytest.mark.parametrize(("text", "ratio"), [(None, None), ("auto", "auto"), ("0", 0.0), ("0.3", 0.3), ("1", 1.0)])
def test_ratios(text: str | None, ratio: float | str | None) -> None:
    assert parse_ratio(text) == ratio


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("options", "config", "ratio"),
    [
        ({}, {}, "auto"),
        ({}, {"zero_optimization": {"stage": 2}}, "auto"),
        ({"ratio": "0.3"}, {}, 0.3),
        ({"placement": "tail"}, {}, 1.0),
        ({"stages": 2}, {}, 1.0),
        ({"tensor_ranks": 2}, {}, "auto"),
        ({}, OFFLOAD, 1.0),  # DeepSpeed's default
        ({}, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, 1.0),
        ({}, {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}, 1.0),
    ],
    ids=str,
)
def test_the_ratio_of_a_run_that_names_none(
    options: dict[str, Any], config: dict[str, Any], ratio: float | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    given = TrainOptions(config=path if config else None, precision="fp32", **options)
    assert make_settings(given, 2).ratio == (ratio if isinstance(ratio, float) else 1.0)  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_settings(given, 2).ratio == ratio


@pytest.mark.parametrize("text", ["", "half", "-0.1", "1.01", "nan", "inf", "30%"])
def test_what_is_no_ratio(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ratio is .*0 .*to 1 .*or auto"):
        parse_ratio(text)


@pytest.mark.parametrize(
    ("text", "size"), [("32GB", 32 * 10**9), ("24GiB", 24 * 2**30), ("1.5 gb", 15 * 10**8), ("500MB", 5 * 10**8)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes("--gpu-memory", text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "nan", "infGB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="--gpu-memory"):
        parse_bytes("--gpu-memory", text)


def test_a_shape_by_hand_is_a_gpt2() -> None:
    name, shape = choose_shape(TrainOptions(num_layers=50, hidden=4096, num_heads=32, checkpoint_activations=True))
    assert (name, shape) == ("custom", replace(PRESETS["gpt2-10b"], recompute="full"))
    assert choose_shape(TrainOptions())[0] == "tiny"
    assert choose_shape(TrainOptions(preset="gpt2-13b", recompute="7"))[1].num_recomputed == 7
    assert default_lr("adamw", shape) < default_lr("adamw", PRESETS["tiny"])
