# SPDX-License-Identifier: Apache-2.0
"""Bytes that training sends between two hosts, by the counters of their interfaces, against the formula of its stage.

Per rank and step, of W ranks, with the weights' bytes (gradients have as many) and A micro-batches in a step:
stage 0 sums gradients for everyone, 2 (W-1)/W; stage 1 gives each rank its part and publishes new weights, the same;
stage 2 keeps no sum of other ranks' parts, so every micro-batch sends: (A+1) (W-1)/W; stage 3 gathers weights for each
forward and backward, and sums: 3 A (W-1)/W, less what belongs to no block and is gathered once for both. Activations
that are recomputed send nothing more: the weights are there. What TCP/IP, gloo, and ranks that agree and watch each
other add is told too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from netns_support import LINK, Counters, NetHost
from two_hosts_cases import Launch

SHAPE = {"vocab_size": 512, "context": 16, "num_layers": 4, "hidden": 256, "num_heads": 4}  # 3.3 M parameters
NUM_STEPS = 3
SETTLE_S = 0.3  # for the last acknowledgements
CASES = [(stage, accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 4)]


@dataclass(frozen=True)
class Row:
    """Of all ranks, in all counted steps."""

    stage: int
    accumulation: int
    world: int
    formula_bytes: float
    counted_bytes: int  # by the collectives themselves
    wire: Counters

    @property
    def wire_excess(self) -> float:
        """What the interfaces sent beyond the formula, headers included."""
        return self.wire.bytes / self.formula_bytes - 1.0

    @property
    def payload_excess(self) -> float:
        """The same without the headers."""
        return self.wire.payload_bytes / self.formula_bytes - 1.0


def formula(stage: int, accumulation: int, world: int) -> float:
    """What a rank sends in a step, in bytes of the weights."""
    sends = {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}
    return sends[stage] * (world - 1) / world


def order_of(world: int, recompute: bool = False, cases: Sequence[tuple[int, int]] = tuple(CASES)) -> dict[str, Any]:
    """For ranks that count."""
    configs = {
        f"{stage}-{accumulation}": _config(stage, accumulation, world, recompute) for stage, accumulation in cases
    }
    return {"configs": configs, "shape": SHAPE, "num_steps": NUM_STEPS}


def _config(stage: int, accumulation: int, world: int, recompute: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": accumulation * world,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }
    return {**config, "activation_checkpointing": {"layers": ["Block"]}} if recompute else config


def measure(launch: Launch, hosts: Sequence[NetHost], order: dict[str, Any], world: int) -> list[Row]:
    """A row for each config that the ranks of a launch count."""
    interfaces = (LINK,) if world == len(hosts) else (LINK, "lo")  # ranks of one host talk over the second
    found: dict[str, Counters] = {}
    for name in order["configs"]:
        before = _counters(launch, hosts, interfaces, f"{name}.before", world)
        found[name] = _counters(launch, hosts, interfaces, f"{name}.after", world) - before
    ranks = launch.found("count", world)
    rows = []
    for name, wire in found.items():
        stage, accumulation = (int(word) for word in name.split("-"))
        weight_bytes = ranks[0][name]["weight_bytes"]
        expected = formula(stage, accumulation, world) * weight_bytes * world * order["num_steps"]
        counted = sum(rank[name]["sent_bytes"] for rank in ranks)
        rows.append(Row(stage, accumulation, world, expected, counted, wire))
    return rows


def _counters(launch: Launch, hosts: Sequence[NetHost], interfaces: Sequence[str], mark: str, world: int) -> Counters:
    """While all ranks stand still, which may then go on."""
    launch.wait_for(*(f"{mark}.{rank}" for rank in range(world)))
    time.sleep(SETTLE_S)
    total = reduce(add, [host.sent(name) for host in hosts for name in interfaces])
    launch.go_on(mark)
    return total
