# SPDX-License-Identifier: Apache-2.0
"""Steps of building a TwinOptimizer: the kind of its state, parameter records, free memory, and settings that depend on
free memory.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from twinflow.conflicts import refuse
from twinflow.device import Device, device_for, to_host
from twinflow.errors import not_enough
from twinflow.offload.blocks import Block, experts_of, find_blocks, num_owners, owners
from twinflow.offload.bucket import Bucket, Param, Updater
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.disk_updater import DiskUpdater, record_bytes, shape_of, without_memory
from twinflow.offload.materialize import build, on_meta
from twinflow.offload.muon import MuonUpdater, Units
from twinflow.offload.placement import clip, place_by_ratio, stream, whole_blocks, whole_units
from twinflow.offload.plan import (
    FETCHED,
    HOST,
    MATRICES,
    RESIDENT,
    ROOT,
    STREAMED,
    BucketPlan,
    ParamSpec,
    plan_buckets,
)
from twinflow.offload.quantised import inner_tensors, is_quantised, is_wrapper, move_quantised, plain_params
from twinflow.offload.recipe import Recipe
from twinflow.offload.settings import Settings, Tuning
from twinflow.offload.sharing import MatrixExchange
from twinflow.offload.state_file import Reserved, StateFile, in_pages
from twinflow.offload.streamed import StreamedUpdater
from twinflow.offload.torch_streamed import StreamedTorchUpdater
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.offload.updater import RuleUpdater
from twinflow.offload.weight_source import bytes_of, frozen_groups, home_of_weights, max_frozen_bytes, new_file
from twinflow.optim.auto import first_ratio
from twinflow.optim.twin_checks import check_rows
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shard import expert_shard, is_copy, shard_of
from twinflow.planner import formats
from twinflow.planner.costs import FLAT_BYTES
from twinflow.rules import Rule
from twinflow.state_dict import ParamEntry
from twinflow.zero import Team, Zero
from twinflow.zero.building import Rows, make_whole, take_rows
from twinflow.zero.matrices import most_numel
from twinflow.zero.partitioned import gathered_blocks
from twinflow.zero.start import own_host_bytes
from twinflow.zero.whole import first_of

_MOSTLY = 0.85  # share of the device's memory for state and gradients; activations need the rest
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Named = tuple[str, nn.Parameter, int]  # name, parameter, index of its group
Model = nn.Module | Callable[[], nn.Module] | Iterable[ParamEntry]  # the first argument of TwinOptimizer


@dataclass(frozen=True)
class StateKind:
    """An optimizer's rule and the format of its state."""

    rule: Rule | None  # one of twinflow's rules
    recipe: Recipe | None  # or the user's optimizer
    format: str
    is_stateless: bool = False  # SGD without momentum
    keeps_weights: bool = False  # the state has separate buffers for new weights
    offloads_params: bool = False  # the state has the only copy of the weights, in their dtype
    tuning: Tuning = field(default_factory=Tuning)
    master: str = "fp32"  # "none": bf16 weights have no fp32 master
    # With `offloads_params`, by block: bytes of its weights for each element of its state. They are on the device if
    # the state of the block is there.
    weight_bytes: Mapping[int, float] = field(default_factory=dict)

    def nbytes(self, plan: BucketPlan) -> int:
        """Bytes of a bucket's master, states and scales in its place, by the planner's formulas.

        Includes `weight_bytes`, because the weights of a block take device memory only with its state. A user's
        optimizer counts as fp32 with two states. Of state on the disk, only the weights that blocks fetch are in host
        memory, unless they are on a disk too.
        """
        if self.rule is None:
            return int(formats.state_bytes("fp32").host * plan.numel)
        if self.tuning.nvme_path is not None and plan.place == HOST:
            return plan.numel * plan.dtype.itemsize if self._fetches(plan) and not self.has_weights_file else 0
        rule = self.rule if plan.is_matrix else self.rule.elementwise or self.rule
        num_states = 0 if self.is_stateless else sum(name is not None for name in rule.states)
        keeps_weights = self.keeps_weights or not plan.can_alias
        each = formats.state_bytes(self.format, _NAMES[plan.dtype], keeps_weights, num_states, self.master)
        extra = 2 * plan.numel if self.offloads_params and plan.dtype == torch.float16 else 0
        if plan.place == RESIDENT:
            extra = int(self.weight_bytes.get(plan.block, 0.0) * plan.numel)
        return int(getattr(each, HOST if self._fetches(plan) else plan.place) * plan.numel) + extra

    @property
    def has_weights_file(self) -> bool:
        """Whether weights that blocks fetch are on a disk if their state is there too, or if they are frozen."""
        return self.tuning.param_nvme_path is not None

    def _fetches(self, plan: BucketPlan) -> bool:
        """Whether blocks fetch the weights of this bucket from the host."""
        return self.offloads_params and plan.block != ROOT and plan.place != RESIDENT

    def new_updaters(
        self,
        device: Device,
        where: torch.device,
        exchange: MatrixExchange | None = None,
        file: StateFile | None = None,
        weights: StateFile | None = None,
    ) -> dict[str, Updater]:
        """The updaters by name (`BucketPlan.updater`). An updater allocates, reads and writes the state of buckets.

        `exchange`: see `MuonUpdater`. `file`: for the state that is on the host otherwise. `weights`: for the weights
        that blocks fetch.
        """
        if self.recipe is not None:
            return {
                HOST: TorchUpdater(self.recipe, device),
                RESIDENT: TorchUpdater(self.recipe, device, where),
                STREAMED: StreamedTorchUpdater(self.recipe, device, where),
            }
        assert self.rule is not None
        keeps_states, rule = not self.is_stateless, self.rule.elementwise or self.rule
        programs, master = self.tuning.update_programs, self.master
        updaters: dict[str, Updater] = {
            HOST: RuleUpdater(rule, self.format, device, keeps_states, self.offloads_params, master),
            RESIDENT: DeviceUpdater(rule, self.format, where, keeps_states, self.keeps_weights, programs, master),
            STREAMED: StreamedUpdater(rule, self.format, device, where, keeps_states, master=master),
        }
        if self.offloads_params:
            of_host = self.format, device, where, keeps_states
            updaters[f"{STREAMED} {FETCHED}"] = StreamedUpdater(rule, *of_host, master=master, offloads_params=True)
        if file is not None:
            of_disk = self.format, device, keeps_states, self.offloads_params, master, file, weights
            updaters[HOST] = DiskUpdater(rule, *of_disk)
        if rule is not self.rule:
            there = MuonUpdater(self.rule, self.format, where, programs, exchange)
            streamed = StreamedUpdater(self.rule, self.format, device, where, there=there)
            updaters |= {f"{RESIDENT} {MATRICES}": there, f"{STREAMED} {MATRICES}": streamed}
        return updaters

    def state_file(self, plans: Sequence[BucketPlan]) -> StateFile | None:
        """The file for the state of buckets on the host, with all of its space; None: this state is in memory."""
        tuning = self.tuning
        if tuning.nvme_path is None:
            return None
        assert self.rule is not None
        in_memory = [self._fetches(plan) and not self.has_weights_file for plan in plans]
        kept = [without_memory if is_kept else None for is_kept in in_memory]
        given = self.rule, self.format, not self.is_stateless, self.master
        sizes = [record_bytes(shape_of(*given, plan, new)) for plan, new in zip(plans, kept, strict=True)]
        total = sum(size for plan, size in zip(plans, sizes, strict=True) if plan.place == HOST and plan.numel)
        num_buffers = max(1, min(tuning.buffer_count, len(plans)))
        block_bytes = in_pages(tuning.disk_block_bytes)
        largest, num_requests = max(sizes, default=0), tuning.disk_requests
        return StateFile(
            Reserved(Path(tuning.nvme_path), total, largest, num_buffers, num_requests, block_bytes, tuning.disk_io)
        )

    def weights_file(
        self, plans: Sequence[BucketPlan], aside: Aside | None, world: int, device: Device
    ) -> StateFile | None:
        """The file for the weights of blocks, with all of its space; None: they are in memory.

        Raises ValueError if nothing would be in the file. `world`: number of ranks that share the weights.
        """
        if aside is None or not self.has_weights_file:
            return None
        tuning, most = self.tuning, max_frozen_bytes(self.tuning)
        kept = {plan.block for plan in plans if not self._fetches(plan)}
        there = [plan for plan in plans if self._fetches(plan)] if tuning.nvme_path is not None else []
        buckets = [(plan.numel, plan.dtype.itemsize) for plan in there]
        frozen = [
            bytes_of(group, world)
            for block, params in aside.frozen.items()
            if block not in kept
            for group in frozen_groups(plain_params(params, aside.values), most)
        ]
        refuse("Weights on the disk", {"state": bool(plans) and not buckets and not frozen})
        return new_file(tuning, buckets, frozen, device)


@dataclass(frozen=True)
class Free:
    """Free memory before the optimizer allocates any."""

    device_bytes: int | None  # None if the model is on the CPU
    host_bytes: int  # 0 if it is not known


def find_room(params: Sequence[Param], team: Team | None) -> Free:
    """The free memory now. Ranks take the minimum over all ranks, so that they make the same plan."""
    on_device, on_host = device_for(params[0].tensor.device).free_bytes(), own_host_bytes()
    if team is None:
        return Free(on_device, on_host)
    least_device, least_host = team.least([-1.0 if on_device is None else on_device, on_host])
    return Free(None if least_device < 0 else int(least_device), int(least_host))


def with_weights(room: Free, on_device: Iterable[Tensor], on_host: Iterable[Tensor]) -> Free:
    """The free memory, including that of weights that the sizes of the state count too: those that are on the device
    already, and those on the host that `Aside.fill` releases while it fills the state.
    """
    device, host = (sum(t.numel() * t.element_size() for t in tensors) for tensors in (on_device, on_host))
    return Free(
        None if room.device_bytes is None else room.device_bytes + device,
        room.host_bytes + host if room.host_bytes else 0,
    )


def tensors_of(model: nn.Module, aside: Aside | None = None) -> list[Tensor]:
    """All parameters and buffers, each once, except weights of which ranks have rows. Offloaded weights are represented
    by their values on the host, and quantised ones by the tensors of which they consist.
    """
    found = dict.fromkeys([*model.parameters(), *model.buffers()])
    values, rows = (aside.values.whole, aside.values.rows) if aside is not None else ({}, {})
    left = [inner for tensor in found if tensor not in rows for _, inner in inner_tensors(tensor)]
    return [values.get(tensor, tensor) if isinstance(tensor, nn.Parameter) else tensor for tensor in left]


class HostValues(Mapping[nn.Parameter, Tensor]):
    """Values of weights on the host. Those of which ranks have rows are gathered for each read, so all ranks must read
    them in the same order.
    """

    def __init__(self, whole: dict[nn.Parameter, Tensor], rows: Rows) -> None:
        self.whole = whole
        self.rows = rows

    def __getitem__(self, param: nn.Parameter) -> Tensor:
        return self.rows.gather(param).cpu() if param in self.rows else self.whole[param]

    def __contains__(self, param: object) -> bool:
        return param in self.rows or param in self.whole

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole) + len(self.rows)

    def pop(self, param: nn.Parameter) -> Tensor:
        """Removes the values of a parameter and returns them."""
        found = self[param]
        self.whole.pop(param, None)
        self.rows.drop(param)
        return found


@dataclass(frozen=True)
class Aside:
    """Weights for the host (`offload_params`), taken from the model before buckets are planned."""

    values: HostValues
    frozen: dict[int, list[nn.Parameter]]  # by block

    def weight_bytes(self, specs: Sequence[ParamSpec], world: int) -> dict[int, float]:
        """By block: bytes of its weights, trained and frozen, for each trained element that one of `world` ranks has.
        Every rank needs all weights of a block on its device.
        """
        numel: dict[int, int] = {}
        nbytes: dict[int, int] = {}
        for spec in specs:
            numel[spec.block] = numel.get(spec.block, 0) + spec.numel
            nbytes[spec.block] = nbytes.get(spec.block, 0) + spec.numel * spec.dtype.itemsize
        for block, params in self.frozen.items():
            for one in (one for param in params for _, one in inner_tensors(param)):
                nbytes[block] = nbytes.get(block, 0) + one.numel() * one.element_size()
        return {block: world * nbytes[block] / count for block, count in numel.items() if block != ROOT and count}

    def return_blocks(self, trained: Iterable[nn.Parameter], blocks: Iterable[int]) -> None:
        """Gives weights back to the model, on the device: `trained`, and the frozen weights of `blocks`."""
        frozen = [one for block in blocks for param in self.frozen.get(block, ()) for _, one in inner_tensors(param)]
        for param in (*trained, *frozen):
            if isinstance(param, nn.Parameter) and param in self.values:
                param.data = self.values.pop(param).to(param.device)

    def fill(self, bucket: Bucket) -> None:
        """Writes the weights of a bucket into its new state and drops them, so that the host never has all weights
        twice. Weights of which other ranks have parts are left to `Runtime.adopt`.
        """
        if not bucket.offloads_params:
            return
        for i, (param, piece) in enumerate(zip(bucket.params, bucket.slices, strict=True)):
            values = self.values.whole.get(param.tensor)
            if values is None or (bucket.is_shared and values.numel() != piece.numel):
                continue
            stop = piece.start + piece.numel
            bucket.updater.write_master(bucket, i, values.reshape(-1)[piece.start : stop], keep=False)
            if stop == values.numel():  # of several buckets that have parts of a parameter, the last one has its end
                del self.values.whole[param.tensor]
                param.note_write()

    def clear(self) -> None:
        """Drops the values, once they are in the optimizer's state."""
        self.values.whole.clear()
        self.values.rows.clear()


@dataclass(frozen=True)
class Trained:
    """The parameters to train, and what the plan of their buckets depends on."""

    params: list[Param]
    specs: list[ParamSpec]
    order: list[int]  # their order in the model
    blocks: list[Block]
    aside: Aside | None  # with `offload_params`
    has_rows: bool  # each rank has some rows of the matrices that Muon updates

    @property
    def where(self) -> torch.device:
        return self.params[0].tensor.device

    @property
    def embeddings(self) -> list[int]:
        """The blocks that are embedding or output layers."""
        return [block.index for block in self.blocks if block.is_embedding]

    def return_resident(self, plans: Sequence[BucketPlan]) -> None:
        """Gives the weights of blocks whose state is on the device back to the model."""
        assert self.aside is not None
        resident = {plan.block for plan in plans if plan.place == RESIDENT} - {ROOT}
        here = [p.tensor for p, spec in zip(self.params, self.specs, strict=True) if spec.block in resident]
        self.aside.return_blocks(here, sorted(resident))


def own_device() -> torch.device:
    """The GPU of this process, or the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def set_aside(
    model: nn.Module,
    trained: Iterable[nn.Parameter] | None,
    takes_quantised: bool,
    stays: Collection[Tensor] = (),
    with_embeddings: bool = False,
) -> Aside:
    """Takes the weights of blocks, trained or frozen, from the model, but not those in `stays`. Moves the rest to the
    GPU if there is one. `with_embeddings`: see `find_blocks`.

    Raises ValueError if no block has a parameter to train. `trained=None`: the model is not trained.
    """
    where = own_device()
    blocks, frozen = find_blocks(model, trained is not None, with_embeddings), dict[int, list[nn.Parameter]]()
    known = set(trained or ())
    found = [param for param, block in owners(model, blocks).items() if block != ROOT and param in known]
    if not found and trained is not None:
        raise ValueError(
            "offload_params is True, but the model has no block with a parameter to train. A block is a member of a "
            "ModuleList or Sequential, and only the weights of blocks can be offloaded. Use offload_params=False."
        )
    frozen_in = {param: block for param, block in owners(model, blocks, frozen=True).items() if block != ROOT}
    moved, quantised = move_quantised(model, where, {p for p in frozen_in if takes_quantised and is_wrapper(p)})
    for param, block in frozen_in.items():
        if not is_quantised(param) or (takes_quantised and is_wrapper(param)):
            frozen.setdefault(block, []).append(moved.get(param, param))
    every = [
        *(param for param in found if param not in stays),
        *(param for params in frozen.values() for param in params if not is_quantised(param)),
    ]
    rows = take_rows(every)
    make_whole(model.parameters())  # the weights outside of blocks
    for tensor in rows:
        tensor.data = torch.zeros((), dtype=tensor.dtype, device=where).expand(tensor.shape)
    whole = take_aside(model, [param for param in every if param not in rows], where)
    return Aside(HostValues({**whole, **quantised}, rows), frozen)


def take_aside(model: nn.Module, params: Sequence[nn.Parameter], where: torch.device) -> dict[nn.Parameter, Tensor]:
    """Moves the values of `params` to the host and returns them. Moves the rest of the model to the device `where`.

    The parameters become expanded scalars on the device, which need no memory.
    """
    values = {param: to_host(param.detach()).contiguous() for param in params}
    for param in params:
        param.data = torch.zeros((), dtype=param.dtype, device=where).expand(param.shape)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and tensor not in values and tensor.device != where:
                    tensor.data = tensor.data.to(where)
    return values


def params_of(
    model: nn.Module | None,
    named: Iterable[Named],
    splits_params: bool,
    aside: Aside | None = None,
    zero: Zero | None = None,
    matrix_groups: Sequence[int] = (),
    blocks: Sequence[Block] | None = None,
) -> tuple[list[Param], list[ParamSpec], list[int]]:
    """The `Param` of each parameter, their specs for the plan of buckets, and their order in the model.

    `matrix_groups`: the param groups that Muon updates. `blocks`: those of the model, if they are not the
    ordinary ones.
    """
    shared = _shared_by_axes(model, zero)
    if blocks is None:
        blocks = gathered_blocks(model) if model is not None else []
    block_of = owners(model, blocks) if model is not None else {}
    ties = num_owners(model) if model is not None else {}
    position = {p: i for i, p in enumerate(model.parameters())} if model is not None else {}
    # Ranks exchange all buckets in each step, so that they gain nothing from buckets for each expert.
    experts = experts_of(blocks) if zero is None else {}
    # Without partition, the first of the ranks that together have all experts counts the other parameters.
    named = list(named)
    own = expert_shard(model.parameters() if model is not None else (tensor for _, tensor, _ in named))
    counts_rest = own is None or own.rank == 0 or (zero is not None and zero.stage > 0)
    units = Units()
    params: list[Param] = []
    specs: list[ParamSpec] = []
    for name, tensor, group in named:
        is_late, first = ties.get(tensor, 1) > 1, first_of(tensor)
        params.append(Param(len(params), name, tensor, group, is_late=is_late, version=-1, first=first))
        local = params[-1].local
        is_flat = local.is_contiguous() or (aside is not None and tensor in aside.values)
        block = block_of.get(tensor, ROOT)
        is_divided = expert_shard([tensor]) is not None
        can_split, is_counted = is_flat and splits_params, not is_copy(tensor) and (is_divided or counts_rest)
        what, unit = shared.get(tensor, ""), None
        if group in matrix_groups:
            can_split = False
            unit = params[-1].unit = units.of(tensor.shape, block, group, tensor.dtype, is_flat)
        flags = can_split, is_flat, is_counted, what, unit, experts.get(tensor, 0), is_divided
        specs.append(ParamSpec(name, local.numel(), block, tensor.dtype, *flags))
    order = sorted(range(len(params)), key=lambda i: position.get(params[i].tensor, i))
    return params, specs, order


def _shared_by_axes(model: nn.Module | None, zero: Zero | None) -> dict[Tensor, str]:
    """With compressed communication, a name for each parameter of which pipeline or tensor ranks have copies.

    Copies must have the same neighbours in their buckets (plan.py). A tied parameter has other neighbours on every
    pipeline stage. It therefore gets its own name, and with it its own buckets.
    """
    if model is None or zero is None or zero.compression is None or zero.grid is None:
        return {}
    is_split = zero.grid.num_model > 1
    shared: dict[Tensor, str] = {p: "tensor" for p in model.parameters() if is_split and shard_of(p) is None}
    ties = model.ties if isinstance(model, PipelineModule) else ()
    return shared | {model.get_parameter(tie.local): f"tie {tie.name}" for tie in ties}


def plan_trained(trained: Trained, ratio: float, placement: str, tuning: Tuning, team: Team | None) -> list[BucketPlan]:
    """The buckets of all ranks that share them."""
    world, num_parts = (team.world, team.num_parts) if team is not None else (1, 1)
    specs = planned = trained.specs
    if trained.has_rows:
        check_rows(trained.params, world)  # all ranks plan for the most rows that a rank has
        numels = (most_numel(param.tensor, world) for param in trained.params)
        planned = [replace(spec, numel=numel) for spec, numel in zip(specs, numels, strict=True)]
    parts = whole_units(planned, place_by_ratio(planned, trained.order, ratio, placement))
    offloads_params = trained.aside is not None
    if offloads_params:  # a block is fetched, or all of it stays on the device
        parts = whole_blocks(specs, parts)
    plans = plan_buckets(planned, tuning.bucket_numel, parts, offloads_params, num_parts, trained.embeddings)
    return stream(clip(plans, specs) if trained.has_rows else plans, tuning.streamed)


def fitted(
    settings: Settings,
    tuning: Tuning,
    kind: StateKind,
    plans: Sequence[BucketPlan],
    sizes: Sequence[int],
    room: Free,
    embeddings: Container[int],
) -> Settings:
    """A copy of the settings. Fields that depend on free memory are set for buckets with `sizes` bytes of state.

    `embeddings`: the blocks that are embedding or output layers.
    """
    used = sum(size for plan, size in zip(plans, sizes, strict=True) if plan.place == RESIDENT)
    # Such layers on the host count as on the device. Otherwise gradients would wait in the memory that they leave, and
    # the end of backward could need more memory than with these layers on the device.
    away = [plan for plan in plans if plan.place != RESIDENT and plan.block in embeddings]
    used += int(sum(kind.weight_bytes.get(plan.block, 0.0) * plan.numel for plan in away))
    left = replace(room, device_bytes=None if room.device_bytes is None else max(0, room.device_bytes - used))
    numel, nbytes = sum(plan.numel for plan in plans), sum(plan.numel * plan.dtype.itemsize for plan in plans)
    flat_bytes = tuning.flat_bytes  # the user's value, or the smaller of a fixed size and an eighth of free memory
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
    """With ratio "auto", the first choice: whether gradients wait on the host, and the largest ratio that fits."""
    if room.device_bytes is None:
        return tuning, 1.0
    plans = plan_buckets(specs, tuning.bucket_numel)
    all_resident = sum(kind.nbytes(replace(plan, place=RESIDENT)) for plan in plans)
    grad_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    if tuning.hold == "auto" and all_resident + grad_bytes > _MOSTLY * room.device_bytes:
        tuning = replace(tuning, hold="host")  # the device has no room for all state and gradients
    needed = sum(kind.nbytes(plan) for plan in plans) + _gradients_on_host(settings, tuning, specs, room)
    return tuning, first_ratio(needed, room.host_bytes)


def _gradients_on_host(settings: Settings, tuning: Tuning, specs: Sequence[ParamSpec], room: Free) -> int:
    """Bytes of gradients that wait or are summed on the host, if all state is on the host."""
    numel, nbytes = sum(spec.numel for spec in specs), sum(spec.numel * spec.dtype.itemsize for spec in specs)
    if settings.early and settings.accumulation_steps > 1 and _keeps_on_host(tuning.sums, 4 * numel, room):
        return 4 * numel
    waits = settings.delayed_update or (settings.limits.any and _keeps_on_host(tuning.hold, nbytes, room))
    return nbytes if waits else 0


def _keeps_on_host(asked: str, nbytes: int, room: Free) -> bool:
    """Whether gradients stay on the host. "auto": they do if they need over half of the free device memory."""
    if asked != "auto":
        return asked == "host"
    return room.device_bytes is not None and nbytes > room.device_bytes // 2


def check_room(
    plans: Sequence[BucketPlan],
    sizes: Sequence[int],
    room: Free,
    ratio: float | str,
    gradient_bytes: int,
    has_weights: bool = False,
) -> None:
    """Raises MemoryError if state on the device, or state and gradients on the host, do not fit into free memory.

    `has_weights`: `sizes` of state on the device include the weights of its blocks.
    """
    total = {RESIDENT: 0, HOST: 0}
    for plan, size in zip(plans, sizes, strict=True):
        total[RESIDENT if plan.place == RESIDENT else HOST] += size
    num_resident = sum(p.numel for p in plans if p.place == RESIDENT)
    if room.device_bytes is not None and total[RESIDENT] > room.device_bytes:
        share = num_resident / sum(p.numel for p in plans) * room.device_bytes / total[RESIDENT]
        least = f"a ratio of at least {min(1.0, 1.0 - share + 0.005):.2f}" if ratio != "auto" else "a smaller model"
        remedy = f'Use {least}, or a smaller format (states="bf16" or "int8"). Activations need memory too.'
        user = f"the optimizer state{' and its weights' if has_weights else ''} on the device with ratio={ratio!r}"
        raise not_enough("device memory", user, in_bytes(total[RESIDENT]), in_bytes(room.device_bytes), remedy)
    if room.host_bytes and total[HOST] + gradient_bytes > room.host_bytes:
        needed = f"{in_bytes(total[HOST])} and gradients need {in_bytes(gradient_bytes)}"
        remedy = 'Use a smaller format (states="bf16" or "int8"), or a lower ratio if the device has room.'
        raise not_enough("host memory", "the optimizer state", needed, in_bytes(room.host_bytes), remedy)


def in_bytes(nbytes: float) -> str:
    """A number of bytes in GB, MB or kB."""
    unit, name = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB") if nbytes >= 1e6 else (1e3, "kB")
    return f"{nbytes / unit:.1f} {name}"


def materialised(
    model: Model,
    is_for_host: bool = False,
    ratio: float = 1.0,
    placement: str = "auto",
    tuning: Tuning | None = None,
) -> tuple[nn.Module | Iterable[ParamEntry], set[Tensor]]:
    """The model with memory: builds it if `model` is a function or a module on the meta device.

    `is_for_host`: each block is initialised on the GPU, which is faster, and moved to the host, or to a disk. A block
    that has its state on the device with this `ratio` and `placement` stays there, because the host may not have room
    for the whole model. The trained parameters of these blocks are the second result.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        return model, set()
    if isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters()):
        return model, set()
    shapes = on_meta(model)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not is_for_host:
        return build(shapes, where), set()
    tuning = tuning or Tuning()
    names = _resident_names(shapes, ratio, placement, tuning.offload_embeddings) if ratio < 1.0 else []
    stays = {shapes.get_parameter(name) for name in names}
    made = build(shapes, where, home=home_of_weights(tuning), stays=stays)
    return made, {made.get_parameter(name) for name in names}


def _resident_names(model: nn.Module, ratio: float, placement: str, with_embeddings: bool) -> list[str]:
    """The trained parameters of blocks that have their state on the device. The model may be on the meta device."""
    named = [(name, param, 0) for name, param in model.named_parameters() if param.requires_grad]
    blocks = gathered_blocks(model, with_embeddings)
    _, specs, order = params_of(model, named, splits_params=True, blocks=blocks)
    parts = whole_blocks(specs, place_by_ratio(specs, order, ratio, placement))
    pairs = zip(specs, parts, strict=True)
    return [spec.name for spec, cuts in pairs if spec.block != ROOT and cuts[0].place == RESIDENT]


def own_threads(num_threads: int) -> int:
    """The number of threads for updates. Of 8 or more, one is left for GPU launches, unless TWINFLOW_THREADS is set."""
    return num_threads - 1 if num_threads >= 8 and "TWINFLOW_THREADS" not in os.environ else num_threads
