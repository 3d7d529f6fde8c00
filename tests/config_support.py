# SPDX-License-Identifier: Apache-2.0
"""A config that uses many keys, and ways to spoil it: what the tests of mutated configs share."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from twinflow.config import json_schema

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
def mutated(draw: st.DrawFn, base: Mapping[str, Any] = BASE, most: int = 3) -> tuple[dict[str, Any], list[str]]:
    """A config with one to `most` changes, and the keys that were touched, as they were and as they are."""
    config = copy.deepcopy(dict(base))
    touched: list[str] = []
    for _ in range(draw(st.integers(1, most))):
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


def names_one_of(text: str, keys: list[str]) -> bool:
    """Whether an error names one of the keys, as a word."""
    return any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) for key in keys)
