"""The fp32 master of a half-precision parameter in a host optimizer.

The optimizer's state contains it as `master` (fp32). For a bf16 parameter with a compact state format, the parameter is
the upper half of the master, and the state contains only the lower half, as `master_lower` (int16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow import native
from twinflow.state_dict import StateDict, tensor_of


def is_split(param: Tensor, states: str) -> bool:
    """Whether the parameter is the upper half of its master."""
    return states != "fp32" and param.dtype == torch.bfloat16


def new_master(param: Tensor, state: StateDict, states: str) -> None:
    """Makes a master with the parameter's values."""
    if is_split(param, states):
        state["master_lower"] = torch.zeros(param.shape, dtype=torch.int16)
    else:
        master = native.advise_huge(torch.empty(param.shape, dtype=torch.float32))
        native.cast(master, param.detach())
        state["master"] = master


def fits(param: Tensor, state: StateDict, states: str) -> bool:
    """Whether the state has the kind of master that the parameter's dtype and the format need."""
    wanted = set() if param.dtype == torch.float32 else {"master_lower" if is_split(param, states) else "master"}
    return {"master", "master_lower"} & state.keys() == wanted


def fit_master(param: Tensor, state: StateDict, states: str) -> None:
    """Fits the master to a parameter that may have been written to, loaded or cast.

    Elements of the master that round to the parameter do not change. Other elements get the parameter's value.
    """
    master = full_master(param, state)
    state.pop("master", None), state.pop("master_lower", None)
    if param.dtype == torch.float32:
        return
    if master is None:
        return new_master(param, state, states)
    value = param.detach()
    if is_split(param, states):
        state["master_lower"] = lower_half(master, value)
        return
    agrees = master.to(param.dtype) == value
    if param.dtype == torch.bfloat16:  # a split master rounds ties away from zero
        agrees |= near(master, value)
    state["master"] = torch.where(agrees, master, value.float())


def full_master(param: Tensor, state: StateDict) -> Tensor | None:
    """The master in fp32, from `master` or `master_lower`; None if there is none."""
    if state.get("master") is not None:
        return tensor_of(state, "master")
    if state.get("master_lower") is None or param.dtype != torch.bfloat16:
        return None
    upper, lower = param.detach(), tensor_of(state, "master_lower")
    # A lower half that does not fit the upper one could turn a value such as 0 into NaN.
    joined = native.join(upper, lower)
    return torch.where(native.split(joined)[0] == upper, joined, upper.float())


def lower_half(master: Tensor, upper: Tensor) -> Tensor:
    """The difference of the bits of `master` and `upper` (bf16); 0 where `upper` is not a nearest neighbour.

    If `master` is exactly between two bf16 values, rounding to even may have chosen the smaller one as `upper`. The
    difference is then 2**15, which does not fit into int16. In this case the master is changed by one unit in its last
    place, so that the parameter does not change.
    """
    difference = (bits(master) - bits(upper.float())).clamp(max=2**15 - 1)
    return torch.where(near(master, upper), difference, 0).to(torch.int16)


def near(master: Tensor, upper: Tensor) -> Tensor:
    """Where `upper` (bf16) is a nearest neighbour of `master`."""
    difference = bits(master) - bits(upper.float())
    return (difference.abs() <= 2**15) & master.isfinite() & upper.isfinite()


def bits(x: Tensor) -> Tensor:
    """fp32 bit patterns as int64 in [0, 2**32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
