"""A config with a mistake anywhere loads, or raises a ValueError that names the key. Nothing else ever happens."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinflow.config import Config, json_schema, load_config, notes

BASE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 10,
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": True,
    "prescale_gradients": False,
    "communication_data_type": "fp32",
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bfloat16": {"enabled": True, "check_grad_overflow": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "amp": {"enabled": False, "opt_level": "O1"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}},
    "zero_optimization": {
        "stage": 2,
        "cpu_offload_use_pin_memory": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5, "states": "bf16", "host_threads": 2, "bucket_numel": 128},
        "offload_param": {"device": "none", "buffer_size": 1e8},
        "overlap_comm": True,
        "prefetch_bucket_size": 5e7,
        "leaf_module": {"classes": ["a.B"]},
        "zenflow": None,
    },
    "activation_checkpointing": {"number_checkpoints": 4},
    "checkpoint": {"tag_validation": "Warn", "keep_last": 2, "parallel_write": {"pipeline_stage": False}},
    "tensorboard": {"enabled": True, "output_path": "out", "job_name": "run"},
    "flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None},
    "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}},
    "elasticity": {"enabled": False},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 7, 2.5, 1e9, -0.5, math.inf, math.nan, 10**400, 10**5000, -(10**30)),
    *("", "auto", "2", "cpu", "nvme", "none", "fp32", "sum", "adam", "SGD", "RMSprop", "Lamb", "StepLR", "{key}", "\0"),
    *([], [1], [0.9, 0.95], ["a", 3], [None], (), {}, {"a": 1}, {"enabled": True}, {"stage": []}, {"type": "Lion"}),
    *({1: 2}, b"bytes", object()),
]
FIRST = sorted(json_schema()["properties"])


def objects(tree: dict[Any, Any]) -> list[dict[Any, Any]]:
    found = [tree]
    for value in tree.values():
        if isinstance(value, dict):
            found += objects(value)
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A config with one to three changes, and the keys that were touched, as they were and as they are."""
    config = copy.deepcopy(BASE)
    touched: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(objects(config)))
        old = draw(st.sampled_from(sorted(place, key=str))) if place else "enabled"
        how = draw(st.sampled_from(["rename", "delete", "insert", "change", "change"]))
        new = draw(
            st.sampled_from([f"{old}s", str(old)[1:], str(old).upper(), f" {old}", *FIRST]) | st.text(max_size=8)
        )
        if how == "rename":
            place[new] = place.pop(old, 1)
            touched += [str(old), new]
        elif how == "delete":
            place.pop(old, None)
            touched.append(str(old))
        else:
            key = old if how == "change" else new
            place[key] = copy.copy(draw(st.sampled_from(VALUES)))
            touched.append(str(key))
    return config, touched


def error_of(source: Any) -> str:
    """What load_config says; nothing if it loads. Any other exception is the test's failure."""
    try:
        loaded = load_config(source)
    except ValueError as error:
        return str(error)
    assert isinstance(loaded, Config)
    assert all(isinstance(line, str) for line in notes(loaded))
    return ""


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_a_mutated_config_loads_or_names_the_key(case: tuple[dict[str, Any], list[str]]) -> None:
    config, touched = case
    text = error_of(config)
    if text:
        assert any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) for key in touched), text


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_a_change_anywhere_loads_or_is_named(data: st.DataObject, tmp_path: Path) -> None:
    text = json.dumps(BASE, indent=1)
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
    piece = data.draw(st.sampled_from(['"', "{", "}", "[", ",", ":", "", "\n", "1e999", "#", "'''", "null"]))
    file = tmp_path / "config.json"
    file.write_text(text[:at] + piece + text[at + length :])
    error = error_of(file)
    assert not error or str(file) in error


def test_the_config_that_is_mutated_is_right() -> None:
    assert load_config(BASE).zero_optimization.stage == 2
