# SPDX-License-Identifier: Apache-2.0
"""Random numbers and autocast of a forward, for code that runs a module again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

Randoms = list[tuple[torch.device, Tensor]]


def randoms_of(device: torch.device) -> Randoms:
    """The states of the generators of random numbers: that of the CPU, and that of `device`."""
    states = [(torch.device("cpu"), torch.get_rng_state())]
    return states if device.type != "cuda" else [*states, (device, torch.cuda.get_rng_state(device))]


def are_same(first: Randoms, second: Randoms) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


@contextmanager
def with_randoms(states: Randoms) -> Iterator[None]:
    """A context with the random numbers of `states`. An empty list: with the present ones."""
    if not states:
        yield
        return
    with torch.random.fork_rng([device for device, _ in states if device.type == "cuda"]):
        for device, state in states:
            torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)
        yield


def autocast_of(device: str, has_gradients: bool = True) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes a context with the present autocast. `has_gradients`: that of the code which runs in it.

    Autocast of torch 2.9 keeps casts of weights that are made without gradients (2.11 does not). A later use of the
    weights with gradients would get these casts, and its gradients would be lost. So without gradients none are kept.
    """
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    dtype, is_on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    is_cached = has_gradients and torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=is_cached)
