"""The fp32 master of a half-precision parameter: `master` (fp32) beside it, or, in the compact formats of a bf16
parameter, `master_lower` (int16) with the parameter itself as the upper half."""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow import native
from twinflow.state_dict import StateDict, tensor_of


def is_split(param: Tensor, states: str) -> bool:
    """Whether the parameter itself holds the upper half of its master."""
    return states != "fp32" and param.dtype == torch.bfloat16


def new_master(param: Tensor, state: StateDict, states: str) -> None:
    """A master equal to the parameter as it is."""
    if is_split(param, states):
        state["master_lower"] = torch.zeros(param.shape, dtype=torch.int16)
    else:
        master = native.advise_huge(torch.empty(param.shape, dtype=torch.float32))
        native.cast(master, param.detach())
        state["master"] = master


def fits(param: Tensor, state: StateDict, states: str) -> bool:
    """Whether the master is kept the way this parameter's dtype and the format want it."""
    wanted = set() if param.dtype == torch.float32 else {"master_lower" if is_split(param, states) else "master"}
    return {"master", "master_lower"} & state.keys() == wanted


def fit_master(param: Tensor, state: StateDict, states: str) -> None:
    """Bring the master in step with a parameter that may have been written to, loaded or cast since.

    Where the master still rounds to the parameter it keeps its full precision; elsewhere the parameter is taken over.
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
    if param.dtype == torch.bfloat16:  # or rounds to it with ties away from zero, as a split master does
        agrees |= near(master, value)
    state["master"] = torch.where(agrees, master, value.float())


def full_master(param: Tensor, state: StateDict) -> Tensor | None:
    """The master in fp32, from either way of keeping it; None where there is none."""
    if state.get("master") is not None:
        return tensor_of(state, "master")
    if state.get("master_lower") is None or param.dtype != torch.bfloat16:
        return None
    upper, lower = param.detach(), tensor_of(state, "master_lower")
    # A lower half that does not belong to this upper one could make a NaN of it: of 0, say.
    joined = native.join(upper, lower)
    return torch.where(native.split(joined)[0] == upper, joined, upper.float())


def lower_half(master: Tensor, upper: Tensor) -> Tensor:
    """What to add to the bits of `upper` (bf16) to get the bits of `master`; 0 where it is not within reach.

    At a tie, `upper` may be the neighbour that rounding to even chose. Its distance of 2**15 does not fit 16 bits: the
    master moves by one unit in its last place there, rather than the parameter by one in its own.
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
