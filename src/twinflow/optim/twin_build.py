"""From a model's parameters to what the runtime is made of: what goes where, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from twinflow.device import device_for
from twinflow.errors import bad_value
from twinflow.offload.blocks import find_blocks, num_owners, owners
from twinflow.offload.bucket import Param
from twinflow.offload.memory import free_host_bytes
from twinflow.offload.plan import HOST, RESIDENT, ROOT, BucketPlan, ParamSpec
from twinflow.offload.settings import FLAT_BYTES, Tuning

Named = tuple[str, nn.Parameter, int]  # name, parameter, index of its group


@dataclass(frozen=True)
class Room:
    """Memory that is left before anything is made; None where the device is the host itself."""

    device_bytes: int | None
    host_bytes: int  # 0: not known

    def less(self, device_bytes: int) -> Room:
        """What is left on the device after so much more."""
        left = None if self.device_bytes is None else max(0, self.device_bytes - device_bytes)
        return Room(left, self.host_bytes)


def find_room(params: Sequence[Param]) -> Room:
    """As it is now."""
    return Room(device_for(params[0].tensor.device).free_bytes(), free_host_bytes())


def params_of(
    model: nn.Module | None, named: Iterable[Named], splits_params: bool
) -> tuple[list[Param], list[ParamSpec], list[int]]:
    """The parameters, what the plan needs to know of them, and their order in the model."""
    blocks = find_blocks(model) if model is not None else []
    block_of = owners(model, blocks) if model is not None else {}
    ties = num_owners(model) if model is not None else {}
    position = {p: i for i, p in enumerate(model.parameters())} if model is not None else {}
    params: list[Param] = []
    specs: list[ParamSpec] = []
    for name, tensor, group in named:
        params.append(Param(len(params), name, tensor, group, is_late=ties.get(tensor, 1) > 1, version=-1))
        is_flat = tensor.is_contiguous()
        block = block_of.get(tensor, ROOT)
        specs.append(ParamSpec(name, tensor.numel(), block, tensor.dtype, is_flat and splits_params, is_flat))
    order = sorted(range(len(params)), key=lambda i: position.get(params[i].tensor, i))
    return params, specs, order


def keeps_on_host(asked: str, nbytes: int, room: Room) -> bool:
    """Where gradients are kept: as asked for; else on the device where they take at most half of what is left."""
    if asked != "auto":
        return asked == "host"
    return room.device_bytes is not None and nbytes > room.device_bytes // 2


def flat_bytes(tuning: Tuning, room: Room) -> int:
    """As asked for; else a fixed size, or an eighth of what the device has left where that is less."""
    if tuning.flat_bytes is not None:
        return tuning.flat_bytes
    return FLAT_BYTES if room.device_bytes is None else min(FLAT_BYTES, room.device_bytes // 8)


def check_room(plans: Sequence[BucketPlan], sizes: Sequence[int], room: Room, ratio: float | str) -> None:
    """Refuse, before anything is allocated, a state that does not fit where it is to live."""
    total = {RESIDENT: 0, HOST: 0}
    for plan, size in zip(plans, sizes, strict=True):
        total[RESIDENT if plan.place == RESIDENT else HOST] += size
    num_resident = sum(p.numel for p in plans if p.place == RESIDENT)
    if room.device_bytes is not None and total[RESIDENT] > room.device_bytes:
        numel = sum(p.numel for p in plans)
        most = room.device_bytes / total[RESIDENT] * num_resident / numel
        least = min(1.0, 1.0 - most + 0.005)
        takes, missing = _gb(total[RESIDENT]), _gb(total[RESIDENT] - room.device_bytes)
        raise bad_value(
            "ratio",
            ratio,
            f"at least {least:.2f}: the state on the device takes {takes}, {missing} more than it has",
            'Activations need room too. A smaller format (states="bf16" or "int8") takes less.',
        )
    if room.host_bytes and total[HOST] > room.host_bytes:
        raise bad_value(
            "host memory",
            f"{_gb(room.host_bytes)} available",
            f"{_gb(total[HOST])} for the optimizer's state",
            'Take a smaller format (states="bf16" or "int8"), or a smaller ratio if the device has room.',
        )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
