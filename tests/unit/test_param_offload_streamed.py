# SPDX-License-Identifier: Apache-2.0
"""State that is streamed to the device for its update, with weights on the host: the bits of weights on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import check_same, gpt, loss_of, places, train
from torch import Tensor, nn

from twinflow.offload.plan import HOST, RESIDENT, STREAMED
from twinflow.optim.twin import Tuning, TwinOptimizer

ALL = Tuning(bucket_numel=4096, streamed=1.0)
SOME = Tuning(bucket_numel=4096, streamed=0.4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3, "states": "int8"},
        {"max_grad_norm": None, "tuning": SOME},
    ],
    ids=str,
)
def test_no_bit_changes(options):
    given = {"tuning": ALL, **options}
    check_same(gpt(), **given)
