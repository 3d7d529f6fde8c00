"""twinflow.from_pretrained on several ranks: each reads its rows, and training has the same bits."""

from __future__ import annotations

from pathlib import Path

import pretrained_cases as cases
import pytest
from dist_support import run_ranks
from twin_support import matrix_but

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "way", "world"),
    matrix_but(
        [("llama tied", "engine, stage 3", 2)],
        [("llama tied", way, 2) for way in cases.WAYS] + [("mixtral", "engine, weights on the host", 3)],
    ),
)
def test_ranks_train_as_with_a_model_that_transformers_has_loaded(
    name: str, way: str, world: int, tmp_path: Path
) -> None:
    cases.save(name, tmp_path)
    theirs, ours = (run_ranks(world, cases.train, str(tmp_path), way, plain) for plain in (True, False))
    for found, wanted in zip(ours, theirs, strict=True):
        assert (found.pop("closed") > 0, wanted.pop("closed")) == (True, 0)
        assert found == wanted
        assert found["still closed"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
def test_there_is_no_second_copy_in_host_memory(world: int, tmp_path: Path) -> None:
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
