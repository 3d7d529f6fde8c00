# SPDX-License-Identifier: Apache-2.0
"""What `twinflow train` counts for several ranks: batches, memory, and which runs may be resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinflow.cli.memory import Available, MemoryPlan, case_of, plan_memory
from twinflow.cli.settings import (
    TrainOptions,
    TrainSettings,
    _batch,
    as_json,
    check_same_run,
    choose_shape,
    engine_config,
    make_settings,
)
from twinflow.models.gpt import PRESETS, count_params

GB = 10**9


def settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = dict.fromkeys(TrainSettings.__dataclass_fields__)
    shape = choose_shape(TrainOptions(preset="gpt2-1.5b"))[1]
    values |= {"preset": "gpt2-1.5b", "model": shape, "batch_size": 4, "accumulation": 1, "lr": 1e-4}
    values |= {"weight_decay": 0.1, "grad_clip": 1.0, "rule": "adamw", "ratio": 1.0, "placement": "auto"}
    values |= {"precision": "bf16", "delayed_update": False, "threads": 1, "out": Path("run"), "file_config": {}}
    return TrainSettings(**(values | {"world": 1} | changes))


def plan(num_ranks: int, stage: int | None) -> MemoryPlan:
    file = {} if stage is None else {"zero_optimization": {"stage": stage}}
    asked = settings(world=num_ranks, file_config=file)
    case = case_of(asked, engine_config(asked, "fp32"))
    return plan_memory(case, "fp32", Available(32 * GB, 500 * GB))


def test_stage_0_keeps_all_state_on_every_rank() -> None:
    numel, one = count_params(PRESETS["gpt2-1.5b"]), plan(1, None)
    for stage in (None, 1, 2):
        assert plan(4, stage).used.host["state"] == pytest.approx(12 * numel, rel=1e-6)
    alike = plan(4, 0)
    assert alike.used.host["state"] == 4 * one.used.host["state"] == 4 * 12 * numel
    assert alike.used.host["process"] == 4 * one.used.host["process"]
    assert alike.used.gpu == one.used.gpu
    assert alike.num_ranks == 4
    assert f"{4 * 12 * numel / 1e9:.2f} GB of fp32 state on 4 ranks" in alike.host_line


def test_the_stage_is_2_unless_the_file_names_one() -> None:
    assert engine_config(settings(world=2), "fp32")["zero_optimization"]["stage"] == 2
    assert "stage" not in engine_config(settings(), "fp32")["zero_optimization"]
    named = settings(world=2, file_config={"zero_optimization": {"stage": 1}})
    assert engine_config(named, "fp32")["zero_optimization"]["stage"] == 1


def test_tokens_are_of_all_ranks() -> None:
    assert settings(world=4, accumulation=3).sequences == 4 * 4 * 3
    assert settings(world=4, accumulation=3).tokens == 4 * 4 * 3 * 1024


@pytest.mark.parametrize(
    ("given", "file", "world", "wanted"),
    [
        ((None, None), {}, 4, (8, 1)),
        ((2, 3), {}, 4, (2, 3)),
        ((None, None), {"train_batch_size": 64}, 4, (8, 2)),  # micro-batches as the preset has them
        ((2, None), {"train_batch_size": 64}, 4, (2, 8)),
        ((None, None), {"train_batch_size": 4}, 4, (1, 1)),
    ],
)
def test_a_batch_is_dealt_out(
    given: tuple[int | None, int | None], file: dict[str, int], world: int, wanted: tuple[int, int]
) -> None:
    assert _batch(*given, file, 8, world) == wanted


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="world size 4"):
        _batch(None, None, {"train_batch_size": 6}, 8, 4)


def saved(one: TrainSettings) -> dict[str, Any]:
    return as_json(one)


def test_other_ranks_resume_the_same_sequences_only() -> None:
    began = settings(world=2, batch_size=4, accumulation=2)
    for parts in ((1, 8, 2), (1, 4, 4), (4, 2, 2), (8, 2, 1)):
        world, size, accumulation = parts
        check_same_run(saved(began), settings(world=world, batch_size=size, accumulation=accumulation))
    with pytest.raises(ValueError, match=r"number of sequences in a step .* is 8, but must be 16"):
        check_same_run(saved(began), settings(world=1, batch_size=4, accumulation=2))
    with pytest.raises(ValueError, match="--batch-size is 8, but must be 4"):  # the same ranks: the same bits
        check_same_run(saved(began), replace(began, batch_size=8, accumulation=1))
    before = {key: value for key, value in saved(settings(batch_size=8)).items() if key != "world"}
    check_same_run(before, settings(world=2, batch_size=4))  # of a run from before there were ranks


def test_batch_sizes_of_a_file_may_follow_the_ranks() -> None:
    micro = "train_micro_batch_size_per_gpu"
    file = {micro: 4, "gradient_clipping": 1.0}
    began = settings(world=2, batch_size=4, file_config=file)
    check_same_run(saved(began), settings(world=1, batch_size=8, file_config={**file, micro: 8}))
    with pytest.raises(ValueError, match="--deepspeed_config"):
        check_same_run(saved(began), settings(world=1, batch_size=8, file_config={**file, "gradient_clipping": 2.0}))


@pytest.mark.parametrize(("world", "sizes"), [(1, [4, 3, 3]), (2, [3, 2]), (3, [4]), (4, [3])])
def test_any_number_of_ranks_shares_a_global_batch(world: int, sizes: list[int]) -> None:
    made = make_settings(TrainOptions(global_batch=10, batch_size=4), world)
    assert made.micro_sizes(0) == sizes
    assert made.sequences == sum(sum(made.micro_sizes(replica)) for replica in range(world)) == 10
    assert max(size for replica in range(world) for size in made.micro_sizes(replica)) == made.batch_size <= 4


def test_ranks_that_a_global_batch_does_not_reach_are_refused() -> None:
    with pytest.raises(ValueError, match="--global-batch-size is 3, but must be at least 4"):
        make_settings(TrainOptions(global_batch=3), 4)
    with pytest.raises(ValueError, match="--global-batch-size 8 cannot be used with --accumulation 2"):
        make_settings(TrainOptions(global_batch=8, accumulation=2), 1)
    with pytest.raises(ValueError, match="--global-batch-size is 6, but must be a multiple of 4"):
        make_settings(TrainOptions(global_batch=6, batch_size=2, stages=2), 4)


def test_other_ranks_resume_with_the_same_global_batch_only() -> None:
    before = saved(make_settings(TrainOptions(global_batch=10), 4))
    check_same_run(before, make_settings(TrainOptions(global_batch=10), 3))
    with pytest.raises(ValueError, match="The number of sequences in a step"):
        check_same_run(before, make_settings(TrainOptions(global_batch=12), 3))


def test_an_elastic_run_needs_what_it_goes_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFLOW_ELASTIC", "1")
    with pytest.raises(ValueError, match="`twinflow train` with no --out and no --global-batch-size cannot be used"):
        make_settings(TrainOptions(resume=True), 2)
    options = TrainOptions(resume=True, out=Path("x"), global_batch=8)
    assert make_settings(options, 2).sequences == 8
    with pytest.raises(ValueError, match="with --no-save cannot be used with an elastic run"):
        make_settings(replace(options, save=False), 2)
