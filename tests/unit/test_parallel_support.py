# SPDX-License-Identifier: Apache-2.0
"""What does not go with pipeline or tensor ranks is refused with its reason."""

from __future__ import annotations

import pytest

from twinflow.parallel.support import LIMITS, Combination, broken, check

REFUSED = {
    "zero_optimization.stage=3 cannot be used with tensor": Combination(model=2, stage=3),
    "zero_optimization.offload_param cannot be used with pipeline": Combination(pipe=2, stage=3, offload_param=True),
    "delayed_update=True cannot be used with pipeline": Combination(pipe=2, delayed_update=True),
    "ratio='auto' cannot be used with pipeline": Combination(pipe=2, ratio="auto"),
    "sums='host' cannot be used with pipeline": Combination(pipe=2, sums="host"),
    "cpu_checkpointing=True cannot be used with pipeline": Combination(pipe=2, cpu_checkpointing=True),
    "different_layout_per_head=True cannot be used with tensor": Combination(model=2, head_patterns=True),
    "with a Hugging Face model cannot be used with pipeline": Combination(pipe=2, model=2, sequence=True, foreign=True),
    "partition_activations=True with tensor_parallel.sequence=True cannot be used with tensor": Combination(
        model=2, partition_activations=True, sequence=True
    ),
    "activation_checkpointing.selective=True cannot be used with tensor": Combination(model=2, selective=True),
    "compile.blocks=True cannot be used with pipeline": Combination(pipe=2, compiles=True),
    "float8.enabled=True cannot be used with tensor": Combination(model=2, float8=True),
    "sequence_parallel_size above 1 cannot be used with pipeline": Combination(pipe=2, num_sequence=2),
    "expert_parallel_size above 1 cannot be used with tensor": Combination(model=2, num_expert=2),
    "An engine without an optimizer cannot be used with pipeline": Combination(pipe=2, has_optimizer=False),
    "TwinOptimizer that was built before initialize cannot be used with tensor": Combination(
        model=2, own_optimizer=True
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"with (pipeline|tensor)") as error:
        check(REFUSED[words])
    assert words in str(error.value)
    assert next(broken(REFUSED[words])).reason in str(error.value)


def test_every_limit_is_tried() -> None:
    assert {limit for asked in REFUSED.values() for limit in broken(asked)} == set(LIMITS)


def test_one_process_and_replicas_may_do_everything() -> None:
    for asked in REFUSED.values():
        check(Combination(1, 1, *list(vars(asked).values())[2:]))
