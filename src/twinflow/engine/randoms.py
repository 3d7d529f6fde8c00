"""Reads and sets the states of all random generators that training may use."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from twinflow.state_dict import StateDict, list_of, tensor_of, value_of


def random_states() -> StateDict:
    """States of the generators of Python, NumPy, torch and all GPUs."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    states: StateDict = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, object]) -> None:
    """Sets states of `random_states`. A GPU that `states` does not contain keeps its state."""
    random.setstate(value_of(states, "python", tuple))
    kind, keys, position, has_gauss, gauss = list_of(states, "numpy")
    assert isinstance(keys, torch.Tensor)
    twister = {"key": keys.numpy().astype(np.uint32), "pos": position}
    np.random.set_state({"bit_generator": kind, "state": twister, "has_gauss": has_gauss, "gauss": gauss})  # noqa: NPY002
    torch.set_rng_state(tensor_of(states, "torch"))
    for device, value in enumerate(value_of(states, "cuda", list) if "cuda" in states else ()):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, device)
