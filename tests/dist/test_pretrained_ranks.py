# SPDX-License-Identifier: Apache-2.0
"""twinflow.from_pretrained on several ranks: each reads its rows, and training has the same bits."""

from __future__ import annotations

from pathlib import Path

import pretrained_cases as cases
import pytest
from dist_support import run_ranks
from twin_support import matrix_but


@pytest.mark.parametrize("way", matrix_but(["engine, stage 3"], [way for way in cases.WAYS if "engine" in way]))
def test_unread_parameters_train_as_those_in_memory(way: str) -> None:
    for wanted, found in run_ranks(2, cases.train_unread, way):
        assert found.pop("read") == pytest.approx(0.5, abs=0.01), "a rank reads its rows, once"
        assert found == wanted


@pytest.mark.parametrize(
    ("name", "way", "world"),
    [("llama tied", way, 2) for way in cases.WAYS] + [("mixtral", "engine, weights on the host", 3)],
)
@pytest.mark.matrix
def test_ranks_train_as_with_a_model_that_transformers_has_loaded(
    name: str, way: str, world: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    cases.save(name, tmp_path)
    for wanted, found in run_ranks(world, cases.train_both, str(tmp_path), way):
        assert (found.pop("closed") > 0, wanted.pop("closed")) == (True, 0)
        assert found == wanted
        assert found["still closed"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_train_adapters_over_a_quantised_model(stage: int) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("torchao")
    (alone,) = run_ranks(1, cases.train_adapters, stage)
    base = {name: value for name, value in alone["weights"].items() if not name.endswith(":")}
    assert len(base) == 42
    ranks = run_ranks(2, cases.train_adapters, stage)
    for found in ranks:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert {name: ranks[0]["weights"][name] for name in base} == base


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
def test_there_is_no_second_copy_in_host_memory(world: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4000}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    cases.save("llama", tmp_path, **shape)
    way = "optimizer, weights on the host"
    plain, ours = (run_ranks(world, cases.peak_mb, str(tmp_path), way, plain) for plain in (True, False))
    print(plain, ours)
    for theirs, mine in zip(plain, ours, strict=True):
        # The files are in fp32, so that transformers' copy in bf16 takes memory of its own.
        assert theirs["peak"] - theirs["now"] > 0.5 * theirs["model"]
        assert mine["peak"] - mine["now"] < 0.2 * mine["model"]
        assert mine["peak"] < theirs["peak"] - 0.5 * mine["model"]
