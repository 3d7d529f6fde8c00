# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam with pipeline and tensor ranks: momenta travel in one bit along the data axis, and copies stay copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dist_support import run_ranks
from parallel_onebit_cases import FREEZE, NUM_STEPS, load_and_go_on, onebit_config, save_and_go_on, train_all


# The token embedding is tied to the head. With 1f1b the first and the last rank have copies of it; with zbv one rank
# has both stages, and tensor ranks have parts of it, and copies of norms.
def few(**more: Any) -> dict[str, Any]:
    return {
        "pipe data 1f1b": onebit_config(2, 1, 2, offload="half", **more),
        "tensor data": onebit_config(1, 2, 2, stage=2, **more),
    }


FEW = few()
MORE = {
    "pipe data zbv": onebit_config(2, 1, 2, stage=1, schedule="zbv"),
    "pipe data interleaved": onebit_config(2, 1, 2, offload="none", schedule="interleaved"),
    "pipe data gpipe": onebit_config(2, 1, 2, schedule="gpipe"),
    "tensor data sequence": onebit_config(1, 2, 2, tensor_parallel={"autotp_size": 2, "sequence": True}),
}
SINGLE = {"data": onebit_config(1, 1, 4)}


def apart(ranks: list[dict[str, str]]) -> list[str]:
    """Of what several ranks have, that which is not the same everywhere."""
    seen: dict[str, str] = {}
    return [key for rank in ranks for key, digest in rank.items() if seen.setdefault(key, digest) != digest]


def check(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    for name, first in ranks[0].items():
        for step in range(NUM_STEPS):
            assert not apart([rank[name]["prints"][step] for rank in ranks]), (name, step)
        for rank in ranks:
            assert rank[name]["losses"] == first["losses"], name
            assert rank[name]["norms"] == first["norms"], name
            assert rank[name]["compressed"] == [step + 1 >= FREEZE for step in range(NUM_STEPS)], name
            assert set(rank[name]["sent"][FREEZE:]) == {rank[name]["formula"]}, name
        assert first["losses"][:FREEZE] == pytest.approx(single["losses"][:FREEZE], rel=1e-4), name
        assert first["losses"][-1] < first["losses"][FREEZE] - 0.3, name
        assert first["losses"] == pytest.approx(single["losses"], rel=0.03), name


def copies(found: dict[str, str], others: dict[str, str]) -> int:
    """Weights and errors that both have."""
    return len(found.keys() & others.keys())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["pipe data 1f1b", "tensor data"])
def test_copies_stay_copies_and_few_bytes_travel(name: str) -> None:
    ranks = run_ranks(4, train_all, {"data": onebit_config(1, 1, 4, num_micro=2), name: few(num_micro=2)[name]})
    check(ranks, ranks[0]["data"])
    last = [rank[name]["prints"][-1] for rank in ranks]
    if name == "tensor data":
        assert copies(last[0], last[1]) > 20  # tensor ranks share positions, norms and some biases
    else:
        assert copies(last[0], last[2]) == 2  # stages share the embedding: the weight, and the errors of their replica


@pytest.mark.matrix
def test_more_ways() -> None:
    ranks = run_ranks(4, train_all, {**SINGLE, **FEW, **MORE}, timeout_s=300)
    check(ranks, ranks[0]["data"])


@pytest.mark.matrix
def test_all_axes() -> None:
    """And the switch by itself, which all ranks make together."""
    own = {"freeze_step": None, "freeze_window": 4, "freeze_threshold": 0.3}
    configs = {
        "1f1b": onebit_config(2, 2, 2, offload="half"),
        "zbv": onebit_config(2, 2, 2, schedule="zbv"),
        "by itself": onebit_config(2, 2, 2, params=own),
    }
    ranks = run_ranks(8, train_all, configs, timeout_s=600)
    for name in configs:
        first = ranks[0][name]
        for step in range(NUM_STEPS):
            assert not apart([rank[name]["prints"][step] for rank in ranks]), (name, step)
        assert all(rank[name]["compressed"] == first["compressed"] for rank in ranks), name
        assert first["compressed"][-1], name
        assert not first["compressed"][3], name
        assert first["losses"][-1] < first["losses"][FREEZE] - 0.3, name


@pytest.mark.matrix
def test_the_sum_of_the_second_moment_does_not_depend_on_the_axes() -> None:
    """Copies count once: of the embedding twice, or of norms, would be far more than a thousandth."""
    own = {"freeze_step": None, "freeze_window": 3, "freeze_threshold": 0.999}
    layouts = ((1, 1, 4), (2, 1, 2), (1, 2, 2))
    ranks = run_ranks(4, train_all, {str(one): onebit_config(*one, params=own) for one in layouts}, 3, timeout_s=300)
    wanted = ranks[0][str(layouts[0])]["sums"]
    assert len(wanted) == 3
    for rank in ranks:
        for one in layouts:
            assert rank[str(one)]["sums"] == pytest.approx(wanted, rel=1e-3), one


@pytest.mark.matrix
def test_without_buckets_of_their_own_copies_drift_apart() -> None:
    """Else the tests above show nothing."""
    ranks = run_ranks(4, train_all, FEW, FREEZE + 2, True, timeout_s=300)
    for name in FEW:
        drifts = [apart([rank[name]["prints"][step] for rank in ranks]) for step in range(FREEZE + 2)]
        assert not any(drifts[: FREEZE - 1]), name
        assert drifts[-1], name


@pytest.mark.matrix
def test_a_checkpoint_keeps_every_replicas_errors(tmp_path: Path) -> None:
    """The same layout goes on bit for bit; others have the same errors of each replica, or their mean."""
    for name, config in {**FEW, "zbv": MORE["pipe data zbv"]}.items():
        folder = str(tmp_path / name)
        saved = run_ranks(4, save_and_go_on, config, folder, timeout_s=300)
        configs = {"same": config, **{n: c for n, c in FEW.items() if c is not config}, "data": SINGLE["data"]}
        loaded = run_ranks(4, load_and_go_on, configs, folder, timeout_s=300)
        for before, after in zip(saved, loaded, strict=True):
            assert after["same"] == before, name
        errors = {key: digest for rank in saved for key, digest in rank["before"].items()}
        for other in (n for n in configs if n in FEW):
            for rank in loaded:
                for key, digest in rank[other]["before"].items():
                    if "@" not in key and key in errors:  # whole in both layouts
                        assert digest == errors[key], (name, other, key)
        for rank in loaded:
            assert rank["data"]["losses"] == pytest.approx(saved[0]["losses"], rel=0.1), name
            assert all(rank["data"]["compressed"]), name
