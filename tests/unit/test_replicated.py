# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam and 1-bit LAMB by config, in one process: the engine trains as the optimizer's class does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import replicated_cases as cases
import torch

from twinflow.config import load_config, optimizer_choice
from twinflow.optim.onebit import OneBitLamb, ZeroOneAdam


@pytest.mark.parametrize("kind", ["ZeroOneAdam", "OneBitLamb"])
def test_an_engine_trains_as_the_class_does_and_resumes(kind: str, tmp_path: Path) -> None:
    found = cases.train(0, 1, [kind], str(tmp_path))[kind]
    assert found["engine"] == found["class"]
    assert found["engine"][16:] == found["resumed"]
    assert len(set(found["engine"])) == len(found["engine"]) - 1  # the learning rate of the first step is 0
    assert found["lr"] == [5e-3]
    assert found["skipped"] == 0
    assert found["norm"] > 1.0


def test_a_step_that_is_not_finite_is_skipped() -> None:
    found = cases.lose(0, 1)
    assert found["same"]
    assert 0 < found["skipped"][0] == found["skipped"][1] - 1
    assert found["scale"] == 2.0 ** (20 - found["skipped"][1])


def test_a_checkpoint_is_refused_while_ranks_differ(tmp_path: Path) -> None:
    engine = cases.engine_of(cases.config_of("ZeroOneAdam"))
    cases.steps(engine, 0, 15)
    assert not engine.optimizer.is_in_step
    with pytest.raises(RuntimeError, match="is_in_step"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="offload_state"):
        engine.offload_states()
    assert "ZeroOneAdam" in repr(engine)
    assert engine.optimizer_name() == "zerooneadam"
    engine.destroy()


def test_a_state_dict_of_another_optimizer_is_refused() -> None:
    engine = cases.engine_of(cases.config_of("OneBitLamb"))
    cases.steps(engine, 0, 6)
    state = engine.optimizer.state_dict()
    other = cases.engine_of(cases.config_of("ZeroOneAdam"))
    with pytest.raises(ValueError, match="rule"):
        other.optimizer.load_state_dict(state)
    other.destroy()
    before = cases.digest(engine.module)
    engine.optimizer.load_state_dict(state)
    assert cases.digest(engine.module) == before
    state["compression"] = {**state["compression"], "kind": "ZeroOneAdam"}
    with pytest.raises(ValueError, match="kind"):
        engine.optimizer.load_state_dict(state)
    engine.destroy()


REFUSED: dict[str, dict[str, Any]] = {
    "zero_optimization.stage 1": {"zero_optimization": {"stage": 1}},
    "offload_optimizer": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "gradient_clipping_value": {"gradient_clipping_value": 1.0},
    "gradient_allreduce_op": {"gradient_allreduce_op": "sum"},
    "checkpoint.background": {"checkpoint": {"background": True}},
    "prescale_gradients": {"prescale_gradients": True},
    "min_coeff": {"params": {"min_coeff": 0.5}},  # max_coeff is 0.3
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        cases.engine_of(cases.config_of("OneBitLamb", **REFUSED[name]))


def test_the_config_has_the_defaults_of_the_classes() -> None:
    for kind in (ZeroOneAdam, OneBitLamb):
        name, options = optimizer_choice(load_config({"optimizer": {"type": kind.__name__}}))
        assert name == kind.__name__.lower()
        optimizer = kind([torch.nn.Parameter(torch.zeros(2))])
        given = kind([torch.nn.Parameter(torch.zeros(2))], **options)
        for key, value in vars(given).items():
            if isinstance(value, (int, float, str, tuple)):
                assert value == getattr(optimizer, key), key
        assert given.defaults == optimizer.defaults


@pytest.mark.parametrize("kind", [ZeroOneAdam, OneBitLamb])
def test_without_bias_correction_the_first_step_is_smaller(kind: type[ZeroOneAdam]) -> None:
    """The first step of Adam has the size lr, and without correction 0.1 / sqrt(0.001) of it."""
    moved = []
    for corrected in (True, False):
        param = torch.nn.Parameter(torch.full((200,), 2.0))
        options: dict[str, Any] = {} if kind is ZeroOneAdam else {"max_coeff": 1.0, "min_coeff": 1.0}
        optimizer = kind([param], lr=1e-2, bias_correction=corrected, **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        moved.append(2.0 - param.detach()[0].item())
    assert moved[0] == pytest.approx(1e-2, rel=1e-3)
    assert moved[1] == pytest.approx(1e-2 * 0.1 / 0.001**0.5, rel=1e-3)
