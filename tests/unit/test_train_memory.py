"""The memory plan of `twinflow train`: arithmetic, tested with no device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinflow.cli.memory import check_gpu, gradient_bytes, plan_memory
from twinflow.cli.settings import TrainSettings, choose_shape, default_lr, parse_bytes
from twinflow.models.gpt import PRESETS, count_params

ALL = ("fp32", "bf16", "int8")
CARD = 32 * 10**9


def settings(preset: str, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = dict.fromkeys(TrainSettings.__dataclass_fields__)
    values |= {"model": PRESETS[preset], "accumulation": 1, "grad_clip": 1.0, "precision": "bf16", "out": Path()}
    return TrainSettings(**(values | {"delayed_update": False} | changes))


@pytest.mark.parametrize(
    ("free_gb", "states"), [(1000, "fp32"), (150, "fp32"), (133, "bf16"), (100, "bf16"), (75, "int8")]
)
def test_the_widest_format_that_fits(free_gb: int, states: str) -> None:
    plan = plan_memory(PRESETS["gpt2-10b"], "auto", ALL, 0, free_gb * 10**9)
    assert plan.states == states
    assert plan.host_bytes < plan.free_bytes
    assert ("fp32 would need" in plan.why) == (states != "fp32")


def test_a_format_that_was_asked_for_is_taken() -> None:
    assert plan_memory(PRESETS["gpt2-10b"], "int8", ALL, 0, 10**12).states == "int8"
    assert plan_memory(PRESETS["tiny"], "auto", ("fp32", "bf16"), 0, 0).states == "fp32"  # nothing is known


def test_too_little_memory_is_refused_with_the_sum() -> None:
    with pytest.raises(ValueError, match=r"host memory is '50.0 GB available'; allowed: at least 68"):
        plan_memory(PRESETS["gpt2-10b"], "auto", ALL, 0, 50 * 10**9)
    with pytest.raises(ValueError, match="--grad-clip 0"):
        plan_memory(PRESETS["gpt2-13b"], "auto", ALL, 27 * 10**9, 100 * 10**9)


def test_gradients_wait_on_the_host_where_the_card_has_no_room() -> None:
    numel = count_params(PRESETS["gpt2-10b"])
    big, small = settings("gpt2-10b"), settings("gpt2-1.5b")
    assert gradient_bytes(big, CARD) == 2 * numel
    assert gradient_bytes(big, 140 * 10**9) == 0
    assert gradient_bytes(small, CARD) == 0
    assert gradient_bytes(big, None) == 0
    assert gradient_bytes(replace(big, grad_clip=0.0), CARD) == 0
    assert gradient_bytes(replace(big, grad_clip=0.0, precision="fp16"), CARD) == 2 * numel  # may skip: must wait
    assert gradient_bytes(replace(big, grad_clip=0.0, delayed_update=True), CARD) == 2 * numel
    assert gradient_bytes(replace(big, accumulation=4), CARD) == 4 * numel


def test_weights_that_do_not_fit_the_card_are_refused() -> None:
    assert "20.6 GB of weights" in check_gpu(PRESETS["gpt2-10b"], 10, CARD)
    with pytest.raises(ValueError, match=r"GPU memory is '16.0 GB'; allowed: at least 20.6 GB"):
        check_gpu(PRESETS["gpt2-10b"], 10, CARD // 2)


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
    name, shape = choose_shape(None, 50, 4096, 32, None, True)
    assert (name, shape) == ("custom", replace(PRESETS["gpt2-10b"], checkpoint_activations=True))
    assert choose_shape(None, None, None, None, None, None)[0] == "tiny"
    assert choose_shape("gpt2-13b", None, None, None, None, None)[1].checkpoint_activations
    assert default_lr("adamw", shape) < default_lr("adamw", PRESETS["tiny"])
