# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of checked collectives."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from zero_cases import digest_alone, train_all

from twinflow.dist.group import CHECK, new_group


def call_in_different_orders(rank: int, world: int) -> str:
    """The error of the rank that is second to make its first call."""
    os.environ[CHECK] = "1"
    group, errors = new_group("gloo"), new_group("gloo")
    numbers = torch.zeros(4)
    found = ""
    group.give_up_when(lambda: True)  # the other rank waits for a collective that never comes
    try:
        if rank == 0:
            group.all_gather(numbers)
        else:
            group.all_reduce(numbers, numbers, torch.float32)
    except RuntimeError as error:
        found = str(error)
    errors.all_gather(torch.zeros(world))  # no rank leaves before the other one has its error
    return found


def call_from_two_threads(rank: int, world: int) -> str:
    os.environ[CHECK] = "1"
    group, errors = new_group("gloo"), []

    def call() -> None:
        try:
            group.all_gather(torch.zeros(world))
        except RuntimeError as error:
            errors.append(str(error))

    if rank == 0:
        first = threading.Thread(target=call)
        first.start()  # waits for rank 1, which calls after it has seen the second thread's error
        assert group._order is not None
        while not group._order._busy.locked():
            time.sleep(0.01)
        call()
        new_group("gloo").all_gather(torch.zeros(world))
        first.join()
    else:
        new_group("gloo").all_gather(torch.zeros(world))
        call()
    return "\n".join(errors)


def collectives_of_one_rank(rank: int, world: int, is_checked: bool, device: str = "cpu") -> list[list[float]]:
    """Results of all collectives with a group of one rank."""
    os.environ[CHECK] = "1" if is_checked else "0"
    group = new_group("gloo" if device == "cpu" else "nccl")
    given = torch.arange(8.0, device=device)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros_like(given)
        group.reduce_scatter(out, given, dtype)
        found.append(out.tolist())
        group.all_reduce(out, given + 1, dtype)
        found.append(out.tolist())
    group.all_gather(given)
    group.broadcast(given)
    found.append(given.tolist())
    rows = torch.arange(8, dtype=torch.uint8, device=device).view(1, 8)
    found.append(group.exchange(rows).view(-1).tolist())
    assert group.sent_bytes in (0, 32)  # a broadcast counts for its sender
    return found


def broadcast_one_element(rank: int, world: int) -> float:
    """A tensor of one element with a stride of 16, which torch calls contiguous."""
    given = torch.arange(32.0)[16::16] + rank
    new_group("gloo").broadcast(given.as_strided((1,), (16,)))
    return float(given)


def digest_checked(rank: int, world: int, stage: int) -> str:
    os.environ[CHECK] = "1"
    return digest_alone(rank, world, stage)


def train_checked(rank: int, world: int, configs: dict[str, dict[str, Any]], num_steps: int) -> dict[str, Any]:
    os.environ[CHECK] = "1"
    return train_all(rank, world, configs, num_steps)
