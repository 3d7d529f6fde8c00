# SPDX-License-Identifier: Apache-2.0
"""Sums of a tied parameter's gradients: of any layout in memory, in which dtype, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.build_optimizer import wire_dtype
from twinflow.build_parallel import sums_replicas
from twinflow.config import load_config
from twinflow.dist.group import Group, alone
from twinflow.parallel.ties import TiedGradients


class Twice(Group):
    """Two ranks, this the first, that have the same."""

    def __init__(self) -> None:
        super().__init__(None, (0, 1), is_on_host=True)
        self.dtypes: list[torch.dtype] = []

    def reduce_scatter(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        self.dtypes += [whole.dtype, dtype]
        out.copy_(2 * whole[: out.numel()])

    def all_reduce(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        self.dtypes += [whole.dtype, dtype]
        out.copy_(2 * whole)


def sum_of(param: nn.Parameter, tie: TiedGradients, num_backwards: int = 2) -> Tensor:
    for _ in range(num_backwards):
        (param * torch.arange(param.numel()).view(param.shape)).sum().backward()
        assert param.grad is None
    tie.finish()
    assert param.grad is not None
    return param.grad


@pytest.mark.parametrize("shape", [(6, 5), (1, 1), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replica_delivers_its_part_of_the_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    found = sum_of(param, TiedGradients(param, Twice(), Twice()))
    wanted = 8.0 * torch.arange(param.numel()).view(shape)  # two backwards, two replicas, two stages
    wanted.view(-1)[-(-param.numel() // 2) :] = 0.0
    assert torch.equal(found, wanted.to(dtype))


def test_of_a_parameter_that_is_not_contiguous() -> None:
    param = nn.Parameter(torch.zeros(3, 4).t())
    found = sum_of(param, TiedGradients(param, alone(), alone()))
    assert torch.equal(found, 2.0 * torch.arange(12).view(4, 3))


@pytest.mark.parametrize(("asked", "wanted"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_sums_travel_in_the_dtype_that_was_asked_for(asked: str | None, wanted: torch.dtype) -> None:
    config = load_config(config_of(communication_data_type=asked))
    param, stages, replicas = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)), Twice(), Twice()
    found = sum_of(param, TiedGradients(param, stages, replicas, wire_dtype(config)))
    assert stages.dtypes == replicas.dtypes == [wanted] * 2
    assert found.dtype == torch.bfloat16


def config_of(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **more}


def test_replicas_sum_first_where_that_changes_nothing() -> None:
    """What is divided before it is summed, so that fp16 can hold the sum, must not come as a sum."""
    assert sums_replicas(load_config(config_of()))
    for more in (
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 8.0},
        {"zero_optimization": {"stage": 3}},
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
    ):
        assert not sums_replicas(load_config(config_of(**more))), more


def test_a_copy_that_only_this_rank_has_frozen_is_refused() -> None:
    param = nn.Parameter(torch.zeros(3))
    tie = TiedGradients(param, Twice(), alone())
    param.sum().backward()
    param.requires_grad_(False)
    with pytest.raises(RuntimeError, match="this rank has frozen its copy and another pipeline rank has not"):
        tie.finish()
    tie.close()
    TiedGradients(param, Twice(), alone()).close()  # no gradient to take
