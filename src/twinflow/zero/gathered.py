# SPDX-License-Identifier: Apache-2.0
"""Whole weights for a block of code (DeepSpeed's `GatheredParameters`), if ranks have parts of them (ZeRO stage 3).

Inside the block a parameter is a whole tensor in memory of its own. A tensor that the code keeps stays valid after
the block.

- Rows of `fully_shard`: the parameter is a DTensor. All operations on it use the whole tensor (weight_guard.py), and
  modules have the whole tensor instead of the DTensor. `fully_shard` gathers nothing in a forward of a module all of
  whose parameters are whole, so ranks may run it different numbers of times, as in `generate()`.
- Weights on the host: the memory of the parameter itself is the whole tensor (`ParamOffload.show`).

At the end of the block, ranks compare hashes of the whole tensors with those of the beginning. What the modifier has
written is sent to all ranks, and each rank writes its part. The optimizer then copies it to the fp32 master, as every
write of the user. Other writes raise an exception, because they would be lost.

`load_state_dict` of the model, or of a part of it, takes whole weights too (`_take_parts`).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group
from twinflow.dist.meeting import Meeting
from twinflow.dist.sharded import is_dtensor, with_rows
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import local_of
from twinflow.offload.runtime import Runtime
from twinflow.offload.weight_guard import OnAllRanks, hide_whole, show_whole, whole_of
from twinflow.parallel.replica import hash_values
from twinflow.zero.partitioned import Sharded, forget_gathered, param_groups, read_rows, without_gathering
from twinflow.zero.whole import first_of, gather_all, parts_of

CALL = "GatheredParameters()"


@dataclass(frozen=True)
class Home:
    """The ranks that have parts of a parameter, and the model and the runtime that it belongs to."""

    name: str
    _group: Group
    meeting: Meeting
    model: weakref.ref[nn.Module]
    _runtime: weakref.ref[Runtime] | None

    @property
    def group(self) -> Group:
        """The ranks. Collectives of the optimizer's own group are abandoned when it is closed, so a new object follows
        it.
        """
        if self._runtime is None or self.runtime is not None:
            return self._group
        return Group(self._group.handle, self._group.ranks, is_on_host=True)

    @property
    def runtime(self) -> Runtime | None:
        """The runtime; None for a model without an optimizer, or whose optimizer is closed."""
        found = self._runtime() if self._runtime is not None else None
        return None if found is None or found.is_closed else found


# The homes of partitioned parameters, because DeepSpeed's functions get only the parameter. Rows are found by the id of
# the parameter and compared with what `fully_shard` has, because `Module.to()` cannot convert a DTensor that has weak
# references.
_ROWS: dict[int, tuple[weakref.ref[Sharded], Home]] = {}
_ON_HOST: MutableMapping[Tensor, Home] = WeakTensorKeyDictionary()
# The model of each module with partitioned parameters. A deep copy of the module has none.
_MODELS: MutableMapping[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
# The parameter of each whole tensor that modules have inside of a context.
_ORIGINS: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def add_homes(model: nn.Module, group: Group, meeting: Meeting, runtime: Runtime | None = None) -> None:
    """Records the home of all partitioned parameters of a model, and lets `load_state_dict` take whole weights."""
    offload = runtime.param_offload if runtime is not None else None
    reference = weakref.ref(runtime) if runtime is not None else None
    groups = [group for module in model.modules() for group in param_groups(module)]
    rows = {id(one.sharded_param): one for group in groups for one in group.fsdp_params}
    for name, param in model.named_parameters():
        home = Home(name, group, meeting, weakref.ref(model), reference)
        if id(param) in rows:
            _ROWS[id(param)] = weakref.ref(rows[id(param)], partial(_forget_rows, id(param))), home
        elif parts_of(param, offload) is not None:
            _ON_HOST[param] = home
    for module in model.modules():
        if any(home_of(param) is not None for param in module.parameters(recurse=False)):
            if module not in _MODELS:
                module.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
            _MODELS[module] = weakref.ref(model)


def _forget_rows(key: int, reference: weakref.ref[Sharded]) -> None:
    if key in _ROWS and _ROWS[key][0] is reference:  # otherwise another parameter has this id now
        del _ROWS[key]


def param_of(tensor: Tensor) -> Tensor:
    """The parameter of a whole tensor that replaces it inside of a context, else the tensor itself."""
    return _ORIGINS.get(tensor, tensor)


def home_of(tensor: Tensor) -> Home | None:
    """The home of a partitioned parameter, or of the whole tensor that replaces it; None for other tensors.

    Weights on the host have no home when their optimizer is closed, or when their block has moved to the device.
    """
    param = param_of(tensor)
    if id(param) in _ROWS:
        reference, home = _ROWS[id(param)]
        rows = reference()
        return home if rows is not None and rows.sharded_param is param else None
    found = _ON_HOST.get(param)
    runtime = found.runtime if found is not None else None
    offload = runtime.param_offload if runtime is not None else None
    return found if offload is not None and offload.params.holds(param) else None


def _home(param: Tensor) -> Home:
    home = home_of(param)
    assert home is not None
    return home


class _Hashes(dict[str, int]):
    """Hashes of whole tensors at the beginning of a context, by name."""

    __eq__ = object.__eq__  # two contexts may have equal hashes
    __hash__ = object.__hash__  # type: ignore[assignment]


_OPEN: list[_Hashes] = []  # of open contexts


def is_gathered_with_root(param: Tensor) -> bool:
    """Whether a parameter is whole during the whole forward, so that every module can use it."""
    home = home_of(param)
    model = home.model() if home is not None else None
    if home is None or model is None:
        return True  # it is not partitioned
    groups = param_groups(model)
    return any(one.sharded_param is param_of(param) for group in groups for one in group.fsdp_params)


@contextmanager
def gathered(params: Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """A context in which these partitioned parameters are whole on all ranks.

    All ranks enter and leave it together. If it ends by an exception, writes are dropped.
    """
    by_home: dict[int, list[Tensor]] = {}
    for param in dict.fromkeys(param_of(param) for param in params):
        by_home.setdefault(id(_home(param).model()), []).append(param)
    with ExitStack() as stack:
        for found in by_home.values():
            stack.enter_context(_gathered(sorted(found, key=lambda param: _home(param).name), modifier_rank))
        yield


@contextmanager
def _gathered(params: Sequence[Tensor], modifier_rank: int | None) -> Iterator[None]:
    home = _home(params[0])
    group, names = home.group, [_home(param).name for param in params]
    source = _source(group, modifier_rank)
    runtime = home.runtime
    what = f"{CALL} of {len(names)} parameters ({names[0]}, ..., {zlib.crc32(' '.join(names).encode()):08x})"
    home.meeting.meet(f"{what}, modifier_rank={modifier_rank}", "each rank has a part of the weights")
    with ExitStack() as stack:
        if runtime is not None:
            stack.enter_context(runtime.without_steps())
            runtime.settle_all()
        new = [param for param in params if _whole(param, runtime) is None]
        stack.enter_context(_shown(new, home, runtime))
        before = _hashes(params, names, runtime)
        _OPEN.append(before)
        stack.callback(_OPEN.remove, before)
        yield
        after = _hashes(params, names, runtime)
        changed = [name for name in names if before[name] != after[name]]
        home.meeting.meet(f"the end of {what}", "all ranks leave the context together")
        said = gather_json(group, changed) if group.world > 1 else [changed]
        kept = set(changed if group.world == 1 else said[source] if source is not None else ())
        for param, name in zip(params, names, strict=True):
            whole = _whole(param, runtime)
            if name in kept and whole is not None:
                _keep(param, whole, source or 0, group, runtime)
                _tell_outer(before, name, int(hash_values(whole)))
    _check_lost(said, kept, modifier_rank, group)


def _hashes(params: Sequence[Tensor], names: Sequence[str], runtime: Runtime | None) -> _Hashes:
    wholes = [_whole(param, runtime) for param in params]
    return _Hashes({name: int(hash_values(it)) for name, it in zip(names, wholes, strict=True) if it is not None})


def _tell_outer(inner: _Hashes, name: str, now: int) -> None:
    """What an inner context has kept is no write of the contexts around it."""
    for outer in _OPEN:
        if outer is not inner and outer.get(name) == inner[name]:
            outer[name] = now


def _source(group: Group, modifier_rank: int | None) -> int | None:
    if modifier_rank is None:
        return None
    if modifier_rank not in group.ranks:
        raise invalid_value("modifier_rank", modifier_rank, [None, *group.ranks])
    return group.ranks.index(modifier_rank)


def _whole(param: Tensor, runtime: Runtime | None) -> Tensor | None:
    """The whole tensor of a parameter, if a context has gathered it."""
    offload = runtime.param_offload if runtime is not None else None
    if offload is not None and offload.params.is_shown(param):
        return param.detach()
    return whole_of(param)


@contextmanager
def _shown(params: Sequence[Tensor], home: Home, runtime: Runtime | None) -> Iterator[None]:
    """Gathers parameters and gives them their whole values."""
    offload = runtime.param_offload if runtime is not None else None
    on_host = [param for param in params if offload is not None and offload.params.holds(param)]
    rows = [param for param in params if is_dtensor(param)]
    model = home.model()
    assert model is not None
    with ExitStack() as stack:
        if offload is not None and on_host:
            parts = [part for param in on_host if (part := parts_of(param, offload)) is not None]
            for param, whole in zip(on_host, gather_all(parts, home.group), strict=True):
                offload.show(param, whole.to(param.device))
                stack.callback(offload.conceal, param)
        if rows:
            forget_gathered(model)
            read_rows(model)
            places = _places(model, rows)
            for param in rows:
                stack.enter_context(_row_shown(param, places[param]))
            stack.callback(forget_gathered, model)  # a forward may have gathered the root again
            stack.enter_context(without_gathering(model, lambda param: whole_of(param) is not None))
        yield


def _places(model: nn.Module, params: Sequence[Tensor]) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, and its name there."""
    found: dict[Tensor, list[tuple[nn.Module, str]]] = {param: [] for param in params}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param in found:
                found[param].append((module, name))
    return found


@contextmanager
def _row_shown(param: Tensor, places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    whole = nn.Parameter(_gather_rows(param), param.requires_grad)
    if whole.requires_grad:
        whole.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
    show_whole(param, whole)
    _ORIGINS[whole] = param
    for module, name in places:
        module._parameters[name] = whole
    replaced: list[str] = []
    try:
        yield
        replaced = [
            f"{type(m).__name__}.{name}" for m, name in places if not _is_one_of(m._parameters[name], whole, param)
        ]
    finally:
        for module, name in places:
            module._parameters[name] = param  # type: ignore[assignment]  # a DTensor that is a parameter
        hide_whole(param)
        _ORIGINS.pop(whole, None)
    if replaced:
        raise wrong_state(
            f"{replaced[0]} cannot be replaced by another parameter inside GatheredParameters",
            "its optimizer state belongs to the old one",
            "Write to the parameter, for example with copy_().",
        )


def _is_one_of(found: Tensor | None, *tensors: Tensor) -> bool:
    return any(found is tensor for tensor in tensors)


def _refuse_gradient(_: Tensor) -> Tensor:
    raise wrong_state(
        "backward() cannot reach a weight inside GatheredParameters",
        "gradients of gathered weights are not summed over the ranks",
        "Run forward and backward of training outside of the block, or use torch.no_grad().",
    )


def _gather_rows(param: Tensor) -> Tensor:
    """The whole tensor on the device of this rank, gathered by the backend of that device."""
    assert is_dtensor(param)
    handle = param.device_mesh.get_group()
    group = Group(handle, dist.get_process_group_ranks(handle), is_on_host="nccl" not in dist.get_backend(handle))
    num_rows = -(-param.shape[0] // group.world)  # of each rank except the last ones, which may have fewer
    size = num_rows * (param.numel() // max(1, param.shape[0]))
    flat = torch.zeros(size * group.world, dtype=param.dtype, device=param.device)
    local = local_of(param).detach().reshape(-1)
    flat[group.rank * size : group.rank * size + local.numel()] = local
    group.all_gather(flat)
    return flat[: param.numel()].view(param.shape)


@torch.no_grad()
def _keep(param: Tensor, whole: Tensor, source: int, group: Group, runtime: Runtime | None) -> None:
    """Writes the values of one rank into the parts of all ranks."""
    group.broadcast(whole, source)
    if runtime is not None and runtime.param_offload is not None and runtime.param_offload.params.holds(param):
        runtime.store(param, whole, is_on_all_ranks=True)
        return
    part = parts_of(param)
    assert part is not None
    for piece in part.pieces:
        piece.write(whole.reshape(-1)[piece.start : piece.start + piece.numel])


def _check_lost(said: Sequence[Sequence[str]], kept: set[str], modifier_rank: int | None, group: Group) -> None:
    """Raises RuntimeError, on all ranks, for writes that are not kept."""
    lost = {rank: [name for name in names if name not in kept] for rank, names in zip(group.ranks, said, strict=True)}
    rank = next((rank for rank, names in lost.items() if names), None)
    if rank is None:
        return
    who = "modifier_rank is None" if modifier_rank is None else f"rank {modifier_rank} has not changed it"
    raise wrong_state(
        f"The new values of {lost[rank][0]} inside GatheredParameters cannot be kept",
        f"rank {rank} has changed it, and {who}",
        f"Pass modifier_rank={rank}: what that rank writes goes to all ranks. Writes of other ranks are dropped.",
    )


# Loading.


def _take_parts(
    module: nn.Module, state_dict: dict[str, object], prefix: str, local_metadata: dict[str, object], *_: object
) -> None:
    """Replaces whole weights in a state dict, which torch then copies into the parameters of `module`, by the parts of
    this rank. All ranks must load the same values: they first compare hashes.
    """
    model = _MODELS.get(module)
    forget_gathered(model() if model is not None else None)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, param in module._parameters.items():
        given = state_dict.get(prefix + name)
        home = home_of(param) if param is not None else None
        if param is None or home is None or home.group.world == 1 or _whole(param_of(param), home.runtime) is not None:
            continue  # every rank has the parameter, or a context has gathered it
        if isinstance(given, Tensor) and not is_dtensor(given) and given.shape == param.shape:
            found[name] = param, given
    if not found:
        return
    if local_metadata.get("assign_to_params_buffers"):
        remedy = "Leave assign out: each rank copies its part of the weights."
        raise invalid_value("assign", True, [False], remedy)
    home = _home(next(iter(found.values()))[0])
    where = home.name.rpartition(".")[0] or "the model"
    values = zlib.crc32(repr([(name, int(hash_values(given))) for name, (_, given) in found.items()]).encode())
    home.meeting.meet(
        f"load_state_dict() of {where} ({', '.join(found)}; hash of the values: {values:08x})",
        "each rank has a part of the weights and loads its part of the same values",
    )
    for name, (own, given) in found.items():
        state_dict[prefix + name] = _rows_of(own, given) if is_dtensor(own) else OnAllRanks.of(given)


def _rows_of(param: Tensor, whole: Tensor) -> Tensor:
    assert is_dtensor(param)
    local = local_of(param)
    first = first_of(param)
    rows = whole.detach().reshape(-1)[first : first + local.numel()].view(local.shape).to(local.device, local.dtype)
    return with_rows(param, rows)
