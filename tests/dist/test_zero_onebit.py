# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam where ranks partition the state: the same weights on all ranks, few bytes, checkpoints for any world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from support import pairwise
from zero_onebit_cases import FREEZE, config_for, load_and_go_on, lose_steps, save_and_go_on, train_all

import twinflow
from twinflow.models.gpt import GPT, GPTConfig

OFFLOADS: dict[str, dict[str, Any] | None] = {"none": None, "full": {}, "half": {"ratio": 0.5}}
CODES = ("1bit", "int4", "int8")
NUM_STEPS = FREEZE + 16
LONG_S = 600  # on a machine that may be busy
pytestmark = pytest.mark.timeout(LONG_S + 100)


def check(name: str, ranks: list[dict[str, Any]], truth: dict[str, Any] | None = None) -> None:
    """What holds for every way to train."""
    first = ranks[0][name]
    for rank in ranks:
        assert rank[name]["digests"] == first["digests"], name
        assert rank[name]["losses"] == first["losses"], name
    assert first["compressed"] == [step + 1 >= FREEZE for step in range(NUM_STEPS)], name
    assert first["losses"][-1] < first["losses"][FREEZE] - 0.2, name
    assert first["unused_same"], name
    # Raised to a power of two above a twentieth of the mean, with roots that are rounded to powers of two: within 2.
    assert first["least"][0] < 0.01 < 0.05 / 4 < first["least"][1], name
    if truth is not None:  # of plain AdamW in one process
        assert first["losses"][:FREEZE] == pytest.approx(truth["losses"][:FREEZE], rel=1e-4), name
        assert first["losses"][-1] < truth["losses"][-1] * 1.1 + 0.05, name
    sent = [after - before for before, after in zip(first["sent"], first["sent"][1:], strict=False)]
    assert max(sent[FREEZE:]) * 14 < sent[0], (name, sent)  # of fp32: small buckets have much padding


CASES: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "half": (2, "half", 3, {}),
    "uncorrected": (1, "full", 1, {"bias_correction": False}),
    "full": (1, "full", 1, {}),
    "none": (0, "none", 1, {}),
}
MORE = [pytest.param([name], marks=pytest.mark.matrix) for name in ("full", "none")]


@pytest.mark.parametrize("names", [["half", "uncorrected"], *MORE])
def test_ranks_have_the_same_weights(names: list[str]) -> None:
    """Stages 0 to 2, without offload, with it, and half; and without bias correction."""
    alone, configs = {}, {}
    for name in names:
        stage, offload, accumulation, options = CASES[name]
        adamw = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], **options}}
        alone[name] = {**config_for(0, None, 1), "optimizer": adamw}
        configs[name] = config_for(stage, OFFLOADS[offload], 2, accumulation=accumulation, params=options)
    truth = run_ranks(0, train_all, alone, NUM_STEPS)[0]
    ranks = run_ranks(2, train_all, configs, NUM_STEPS)
    for name in names:
        check(name, ranks, truth[name])


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_way(world: int) -> None:
    configs = {
        f"{stage} {offload} {code} {states}": config_for(
            stage, None if offload == "none" else {**(OFFLOADS[offload] or {}), "states": states}, world,
            params={"code": code},
        )
        for stage, offload, code, states in pairwise((0, 1, 2), tuple(OFFLOADS), CODES, ("fp32", "bf16"))
    }  # fmt: skip
    ranks = run_ranks(world, train_all, configs, NUM_STEPS, timeout_s=LONG_S)
    for name in configs:
        first = ranks[0][name]
        assert all(rank[name]["digests"] == first["digests"] for rank in ranks), name
        assert first["losses"][-1] < first["losses"][FREEZE] - 0.2, name
        assert first["unused_same"], name


def test_a_checkpoint_keeps_errors(tmp_path: Path) -> None:
    """The same world goes on bit for bit."""
    config = config_for(1, {"ratio": 0.5}, 2)
    saved = run_ranks(2, save_and_go_on, config, str(tmp_path))
    loaded = run_ranks(2, load_and_go_on, config, str(tmp_path))
    assert [rank["digests"] for rank in loaded] == [rank["digests"] for rank in saved]
    assert [rank["losses"] for rank in loaded] == [rank["losses"] for rank in saved]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2])
def test_other_worlds_keep_the_mean_of_the_errors(tmp_path: Path, stage: int) -> None:
    """And go on as well; one process does so with plain AdamW."""
    saved = run_ranks(2, save_and_go_on, config_for(stage, {}, 2), str(tmp_path))
    others = run_ranks(3, load_and_go_on, config_for(1, {}, 3), str(tmp_path))
    assert others[0]["errors"].keys() == saved[0]["errors"].keys()
    for name, errors in saved[0]["errors"].items():
        assert others[0]["errors"][name] == pytest.approx(errors, abs=1e-6), name
    assert all(rank["digests"] == others[0]["digests"] for rank in others)
    assert others[0]["losses"] == pytest.approx(saved[0]["losses"], rel=0.15)
    alone = run_ranks(0, load_and_go_on, config_for(0, {}, 1), str(tmp_path))[0]
    assert alone["losses"] == pytest.approx(saved[0]["losses"], rel=0.3)
    assert not any(alone["compressed"])


def test_momenta_outlast_a_step_that_is_skipped() -> None:
    """They are on their way when that is known; and so are those of parameters that got no gradient."""
    for found in run_ranks(2, lose_steps, config_for(1, {"bucket_numel": 2048}, 2, params={"freeze_step": 3})):
        assert found["skipped"] == 1
        assert found["number"] >= 3
        assert found["in a skipped step"] < 1e-5
        assert found["without gradients"] < 1e-5


REFUSED = {
    "zero_optimization.stage": config_for(3, {}, 2),
    "prescale_gradients": config_for(1, {}, 2, prescale_gradients=True),
    "states": config_for(1, {"states": "int8"}, 2),
    "ratio": config_for(1, {"ratio": "auto"}, 2),
    "delayed_update": config_for(1, {"delayed_update": True}, 2),
}


def refusals(rank: int, world: int, configs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What each config is refused with."""
    found = {}
    for key, config in configs.items():
        try:
            twinflow.initialize(model=GPT(GPTConfig(64, 16, 1, 32, 2)), config=config)
            found[key] = "not refused"
        except ValueError as error:  # noqa: PERF203
            found[key] = str(error)
    model = GPT(GPTConfig(64, 16, 1, 32, 2))
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = twinflow.initialize(model=model, optimizer=given, config=config_for(1, {}, 2))[0]
    found["given"] = str(engine.optimizer.zero.compression)
    engine.destroy()
    return found


def test_what_cannot_hold_is_refused_and_an_optimizer_that_was_given_overrules_the_config() -> None:
    for rank in run_ranks(2, refusals, REFUSED):
        assert rank.pop("given") == "None"
        for key, said in rank.items():
            assert key in said, (key, said)
            assert any(word in said for word in ("OneBitAdam", "compressed", "states")), (key, said)
