"""From a model's parameters to what the runtime is made of: what goes where, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from twinflow.device import device_for
from twinflow.errors import invalid_value
from twinflow.offload.blocks import find_blocks, num_owners, owners
from twinflow.offload.bucket import Param
from twinflow.offload.materialize import build
from twinflow.offload.param_offload import take_aside
from twinflow.offload.plan import HOST, RESIDENT, ROOT, BucketPlan, ParamSpec, plan_buckets
from twinflow.offload.settings import FLAT_BYTES, Settings, Tuning
from twinflow.optim.auto import first_ratio
from twinflow.optim.state_kind import StateKind
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shard import is_copy, shard_of
from twinflow.state_dict import ParamEntry
from twinflow.zero import Team, Zero
from twinflow.zero.partitioned import gathered_blocks
from twinflow.zero.start import own_host_bytes

_MOSTLY = 0.85  # of the device's memory: the rest is for activations
Named = tuple[str, nn.Parameter, int]  # name, parameter, index of its group
Model = nn.Module | Callable[[], nn.Module] | Iterable[ParamEntry]  # what a TwinOptimizer is given


@dataclass(frozen=True)
class Free:
    """Memory that is left before anything is made; None where the device is the host itself."""

    device_bytes: int | None
    host_bytes: int  # 0: not known

    def less(self, device_bytes: int) -> Free:
        """What is left on the device after so much more."""
        left = None if self.device_bytes is None else max(0, self.device_bytes - device_bytes)
        return Free(left, self.host_bytes)


def find_room(params: Sequence[Param], team: Team | None) -> Free:
    """As it is now; of several ranks, the least that any of them has, so that all plan alike."""
    on_device, on_host = device_for(params[0].tensor.device).free_bytes(), own_host_bytes()
    if team is None:
        return Free(on_device, on_host)
    least_device, least_host = team.least([-1.0 if on_device is None else on_device, on_host])
    return Free(None if least_device < 0 else int(least_device), int(least_host))


def first_of(tensor: Tensor) -> int:
    """Where a rank's rows of a parameter start in it, flattened."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows_end = tensor.shape[0] if tensor.dim() else 1
    return min(offsets[0] if offsets else 0, rows_end) * (tensor.numel() // max(1, rows_end))


def tensors_of(model: nn.Module, aside: Aside | None = None) -> list[Tensor]:
    """All parameters and buffers, each once; of weights that were taken aside, their values."""
    found = dict.fromkeys([*model.parameters(), *model.buffers()])
    values = aside.values if aside is not None else {}
    return [values.get(tensor, tensor) if isinstance(tensor, nn.Parameter) else tensor for tensor in found]


@dataclass(frozen=True)
class Aside:
    """Weights that are to live on the host, taken from the model before anything is planned."""

    values: dict[nn.Parameter, Tensor]
    frozen: dict[int, list[nn.Parameter]]  # by block


def set_aside(model: nn.Module, trained: Iterable[nn.Parameter]) -> Aside:
    """Those that belong to one block, and are trained or frozen. All else of the model goes where it computes."""
    where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    blocks, frozen = find_blocks(model), dict[int, list[nn.Parameter]]()
    known = set(trained)
    found = [param for param, block in owners(model, blocks).items() if block != ROOT and param in known]
    if not found:
        remedy = "Weights of members of ModuleLists and Sequentials live on the host; there are none to train."
        raise invalid_value("offload_params", True, [False], remedy)
    for param, block in owners(model, blocks, frozen=True).items():
        if block != ROOT:
            frozen.setdefault(block, []).append(param)
    every = [*found, *(param for params in frozen.values() for param in params)]
    return Aside(take_aside(model, every, where), frozen)


def params_of(
    model: nn.Module | None,
    named: Iterable[Named],
    splits_params: bool,
    aside: Aside | None = None,
    zero: Zero | None = None,
) -> tuple[list[Param], list[ParamSpec], list[int]]:
    """The parameters, what the plan needs to know of them, and their order in the model."""
    shared = _shared_by_axes(model, zero)
    blocks = gathered_blocks(model) if model is not None else []
    block_of = owners(model, blocks) if model is not None else {}
    ties = num_owners(model) if model is not None else {}
    position = {p: i for i, p in enumerate(model.parameters())} if model is not None else {}
    params: list[Param] = []
    specs: list[ParamSpec] = []
    for name, tensor, group in named:
        is_late, first = ties.get(tensor, 1) > 1, first_of(tensor)
        params.append(Param(len(params), name, tensor, group, is_late=is_late, version=-1, first=first))
        local = params[-1].local
        is_flat = local.is_contiguous() or (aside is not None and tensor in aside.values)
        block = block_of.get(tensor, ROOT)
        can_split, is_counted = is_flat and splits_params, not is_copy(tensor)
        what = shared.get(tensor, "")
        specs.append(ParamSpec(name, local.numel(), block, tensor.dtype, can_split, is_flat, is_counted, what))
    order = sorted(range(len(params)), key=lambda i: position.get(params[i].tensor, i))
    return params, specs, order


def _shared_by_axes(model: nn.Module | None, zero: Zero | None) -> dict[Tensor, str]:
    """Copies that pipeline and tensor ranks have, where what lies beside them in a bucket matters: in codes that share
    scales. A tied parameter has other neighbours on every stage, so it lies alone."""
    if model is None or zero is None or zero.compression is None or zero.grid is None:
        return {}
    is_split = zero.grid.num_model > 1
    shared: dict[Tensor, str] = {p: "tensor" for p in model.parameters() if is_split and shard_of(p) is None}
    ties = model.ties if isinstance(model, PipelineModule) else ()
    return shared | {tie.param: f"tie {tie.name}" for tie in ties}


def fitted(
    settings: Settings, tuning: Tuning, plans: Sequence[BucketPlan], sizes: Sequence[int], room: Free
) -> Settings:
    """The settings with what depends on the memory that is left beside state of these sizes."""
    left = room.less(sum(size for plan, size in zip(plans, sizes, strict=True) if plan.place == RESIDENT))
    numel, nbytes = sum(plan.numel for plan in plans), sum(plan.numel * plan.dtype.itemsize for plan in plans)
    flat_bytes = tuning.flat_bytes  # as asked for; else a fixed size, or an eighth of what is left where that is less
    if flat_bytes is None:
        flat_bytes = FLAT_BYTES if left.device_bytes is None else min(FLAT_BYTES, left.device_bytes // 8)
    return replace(
        settings,
        hold_on_host=_keeps_on_host(tuning.hold, nbytes, left),
        sum_on_host=_keeps_on_host(tuning.sums, 4 * numel, left),
        is_short=_keeps_on_host("auto", nbytes, left),
        flat_bytes=flat_bytes,
        tuning=tuning,
    )


def first_choice(
    kind: StateKind, settings: Settings, tuning: Tuning, specs: Sequence[ParamSpec], room: Free
) -> tuple[Tuning, float]:
    """With ratio "auto", until more is known: where gradients wait, and as much state on the host as fits."""
    if room.device_bytes is None:
        return tuning, 1.0
    plans = plan_buckets(specs, tuning.bucket_numel)
    all_resident = sum(kind.nbytes(replace(plan, place=RESIDENT)) for plan in plans)
    grad_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    tuning = _with_hold(tuning, all_resident, grad_bytes, room)
    needed = sum(kind.nbytes(plan) for plan in plans) + _gradients_on_host(settings, tuning, specs, room)
    return tuning, first_ratio(needed, room.host_bytes)


def _with_hold(tuning: Tuning, all_resident: int, grad_bytes: int, room: Free) -> Tuning:
    """With ratio "auto": where the device cannot hold all state, gradients of buckets on the host wait there too."""
    is_short = room.device_bytes is not None and all_resident + grad_bytes > _MOSTLY * room.device_bytes
    return replace(tuning, hold="host") if tuning.hold == "auto" and is_short else tuning


def _gradients_on_host(settings: Settings, tuning: Tuning, specs: Sequence[ParamSpec], room: Free) -> int:
    """Host memory for gradients that wait there, or are summed there, with all state on the host."""
    numel, nbytes = sum(spec.numel for spec in specs), sum(spec.numel * spec.dtype.itemsize for spec in specs)
    if settings.early and settings.accumulation_steps > 1 and _keeps_on_host(tuning.sums, 4 * numel, room):
        return 4 * numel
    waits = settings.delayed_update or (settings.limits.any and _keeps_on_host(tuning.hold, nbytes, room))
    return nbytes if waits else 0


def _keeps_on_host(asked: str, nbytes: int, room: Free) -> bool:
    """Where gradients are kept: as asked for; else on the device where they take at most half of what is left."""
    if asked != "auto":
        return asked == "host"
    return room.device_bytes is not None and nbytes > room.device_bytes // 2


def check_room(
    plans: Sequence[BucketPlan], sizes: Sequence[int], room: Free, ratio: float | str, gradient_bytes: int
) -> None:
    """Refuse, before anything is allocated, a state that does not fit where it is to live, or gradients that do not."""
    total = {RESIDENT: 0, HOST: 0}
    for plan, size in zip(plans, sizes, strict=True):
        total[RESIDENT if plan.place == RESIDENT else HOST] += size
    num_resident = sum(p.numel for p in plans if p.place == RESIDENT)
    if room.device_bytes is not None and total[RESIDENT] > room.device_bytes:
        takes, missing = _size(total[RESIDENT]), _size(total[RESIDENT] - room.device_bytes)
        share = num_resident / sum(p.numel for p in plans) * room.device_bytes / total[RESIDENT]
        allowed = f"at least {min(1.0, 1.0 - share + 0.005):.2f}" if ratio != "auto" else "less state, or more memory"
        raise invalid_value(
            "ratio",
            ratio,
            f"{allowed}: the state on the device takes {takes}, {missing} more than it has",
            'Activations need room too. A smaller format (states="bf16" or "int8") takes less.',
        )
    if room.host_bytes and total[HOST] + gradient_bytes > room.host_bytes:
        raise invalid_value(
            "host memory",
            f"{_size(room.host_bytes)} available",
            f"{_size(total[HOST])} for the optimizer's state and {_size(gradient_bytes)} for gradients",
            'Take a smaller format (states="bf16" or "int8"), or a smaller ratio if the device has room.',
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def materialised(model: Model, is_for_host: bool = False) -> nn.Module | Iterable[ParamEntry]:
    """A model with memory: what was given, unless that is a function or lies on the meta device. `is_for_host`: each
    module is made where it is quick, and goes to the host."""
    if isinstance(model, nn.Module):
        if not any(p.is_meta for p in model.parameters()):
            return model
    elif not callable(model):
        return model
    each = to_host if is_for_host else None
    return build(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"), each=each)


def to_host(_: nn.Module, params: list[nn.Parameter]) -> None:
    """Take a module's parameters to host memory."""
    for param in params:
        param.data = param.data.cpu()


def own_threads(num_threads: int) -> int:
    """Of many cores one is left to the threads that start the GPU's work: they decide how busy it is."""
    return num_threads - 1 if num_threads >= 8 and "TWINFLOW_THREADS" not in os.environ else num_threads
