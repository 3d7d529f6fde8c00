# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts train as with plain torch: an expert without a gradient is not updated, and one with a gradient
of zeros is."""

from __future__ import annotations

from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experts_support import DECAY, EPS, LR, MAX_NORM, MODELS, Modules, check, loss_of, plain, tokens_of
from torch import Tensor
from twin_support import HOSTS, assert_same, matrix_but, quick_torch, restart, snapshot, weights

from twinflow.offload.plan import BucketPlan
from twinflow.optim.auto import units_of
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.planner.costs import BUCKET_NUMEL

STEPS = 40
plain = cache(plain)


@pytest.fixture(autouse=True)
def _quick() -> Any:
    with quick_torch():
        yield


def twin(model: Any, parts: int = 1, clips: bool = False, **options: Any) -> TwinOptimizer:
    return TwinOptimizer(
        model,
        lr=LR,
        weight_decay=DECAY,
        eps=EPS,
        max_grad_norm=MAX_NORM if clips else None,
        accumulation_steps=parts,
        tuning=Tuning(bucket_numel=1024),
        **options,
    )


def train(model: Any, optimizer: Any, parts: int, steps: range) -> None:
    for step in steps:
        for part in range(parts):
            (loss_of(model, tokens_of(step, part), step) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


PLACES: dict[str, dict[str, Any]] = {
    "device": {"ratio": 0.0},
    "half": {"ratio": 0.5},
    "host": {"ratio": 1.0},
    "host early": {"ratio": 1.0, "early": True},
    "half early": {"ratio": 0.5, "early": True},
    "auto early": {"ratio": 1.0, "early": "auto"},
    "weights": {"ratio": 1.0, "early": True, "offload_params": True},
    "half weights": {"ratio": 0.5, "offload_params": True},
}
CELLS = [(name, place, parts, clips) for name, place, parts, clips in product(MODELS, PLACES, (1, 3), (False, True))]
QUICK = [
    ("Modules", "half early", 1, False),
    ("Modules", "host early", 3, True),
    ("Modules", "weights", 1, True),
    ("Modules", "device", 3, False),
    ("Olmoe", "half early", 1, True),
    ("Qwen3Moe", "host", 1, True),
    ("Mixtral", "weights", 1, True),
    ("DeepseekV3", "auto early", 1, True),
    ("GptOss", "device", 1, True),
]


@pytest.mark.parametrize(("name", "place", "parts", "clips"), matrix_but(QUICK, CELLS))
def test_experts_train_as_with_plain_torch(name: str, place: str, parts: int, clips: bool) -> None:
    steps = STEPS if name == "Modules" else 10
    truth, counts = plain(name, parts, clips, steps)
    assert counts["zeros"] > 10  # an expert of a fused tensor, or one whose output was multiplied by zero
    assert counts["missing"] > 100 or name != "Modules"
    model = MODELS[name]()
    optimizer = twin(model, parts, clips, **PLACES[place])
    train(model, optimizer, parts, range(steps))
    optimizer.wait()
    check(model.state_dict(), truth)
    optimizer.close()


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_compact_states_of_experts(states: str) -> None:
    """The same bits as a synchronous optimizer."""
    model, reference = Modules(), Modules()
    optimizer = twin(model, ratio=0.5, states=states, early=True)
    host = HOSTS["adamw"](reference.parameters(), lr=LR, weight_decay=DECAY, eps=EPS, states=states)
    train(model, optimizer, 1, range(10))
    train(reference, host, 1, range(10))
    optimizer.wait()
    assert_same(weights(model), weights(reference))
    optimizer.close()


def test_an_expert_without_tokens_keeps_its_state_and_one_with_zeros_does_not() -> None:
    model = Modules(num_layers=1)
    optimizer = twin(model, ratio=0.5)
    train(model, optimizer, 1, range(4))
    before = snapshot(model, optimizer)
    tokens = torch.full((2, 8), 2)  # expert 2 alone, which counts nothing in step 5
    loss_of(model, tokens, 5).backward()
    optimizer.step()
    after = snapshot(model, optimizer)
    changed = {name.split("experts.")[1][0] for name in before if "experts." in name and _differs(name, before, after)}
    assert changed == {"2"}
    optimizer.close()


@pytest.mark.parametrize("offloads", [False, True])
def test_updates_begin_in_backward_for_experts_with_tokens_alone(offloads: bool) -> None:
    """An expert waits for no other expert, and one without tokens has no buffer for gradients."""
    model = Modules()
    optimizer = twin(model, early=True, ratio=1.0, offload_params=offloads)
    runtime = optimizer.runtime
    train(model, optimizer, 1, range(1))  # gradients are not taken in the first step
    for step in range(1, 6):
        loss_of(model, tokens_of(step), 0).backward()
        begun = {param.name for task in runtime.steps.job.tasks for param in task.bucket.members}
        assert begun == {param.name for param in runtime.params if param.was_hit}
        assert len(begun) < len(runtime.params)
        assert not any(map(runtime.collector.task_of, runtime.buckets))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_small_experts_share_buckets() -> None:
    model = Modules()
    optimizer = TwinOptimizer(model, lr=LR)
    assert len({bucket.plan.block for bucket in optimizer.runtime.buckets}) == len(optimizer.runtime.buckets)
    optimizer.close()


def test_auto_moves_several_experts_of_a_block_together() -> None:
    """The time to choose a placement grows with the square of the number of units."""
    size = BUCKET_NUMEL // 4
    plans = [BucketPlan(0, 0, torch.float32, (), size)]
    plans += [BucketPlan(i, i // 7, torch.float32, (), size, expert=i) for i in range(1, 14)]
    buckets: Any = [SimpleNamespace(plan=plan) for plan in plans]
    found = [[bucket.plan.index for bucket in unit] for unit in units_of(buckets, False)]
    assert found == [[0], [1, 2, 3, 4], [5, 6], [7, 8, 9, 10], [11, 12, 13]]
    assert [len(unit) for unit in units_of(buckets, True)] == [7, 7]


def _differs(name: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return not torch.equal(before[name], after[name])


def test_a_restart_between_steps_changes_no_bit() -> None:
    model, reference = Modules(), Modules()
    straight = twin(reference, 2, True, early=True)
    train(reference, straight, 2, range(8))
    optimizer = twin(model, 2, True, early=True)
    train(model, optimizer, 2, range(4))
    made, optimizer = restart(model, optimizer, lambda model: twin(model, 2, True, early=True), Modules)
    train(made, optimizer, 2, range(4, 8))
    assert_same(snapshot(made, optimizer), snapshot(reference, straight))
    optimizer.close()
    straight.close()
