# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: weights are partitioned too, by torch's `fully_shard`.

`fully_shard` stores this rank's rows of each parameter, gathers the weights of a block (a layer, offload/blocks.py)
before it runs, and reduce-scatters its gradients. twinflow's runtime (offload/) updates this rank's rows.

New weights are copied into these rows on a stream of the runtime. The forward's stream waits for the copy in the hook
before a block. The stream on which `fully_shard` copies rows for the all-gather must wait too, because it runs ahead of
the forward's stream (`gathering_streams`).

A tied weight must be in one call of `fully_shard` only, otherwise it would become several weights. A block that shares
a weight with another part of the model, or has a weight that other parts use (`is_external`), is therefore gathered
with the root, which is the model itself, and the model's forward waits for its weights before it starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from twinflow.conflicts import conflict
from twinflow.dist.group import Group, backend_for, new_group
from twinflow.dist.sharded import is_dtensor, is_fsdp
from twinflow.errors import wrong_state
from twinflow.offload.blocks import Block, find_blocks, is_external, owners
from twinflow.offload.hooks import in_backward
from twinflow.offload.plan import ROOT
from twinflow.offload.quantised import is_quantised
from twinflow.offload.weight_guard import owner_of
from twinflow.parallel.shard import keep_marks
from twinflow.parallel.topology import DATA, PIPE
from twinflow.state_dict import ParamEntry
from twinflow.zero.building import Rows, take_rows
from twinflow.zero.shared import Zero

Replaced = dict[Tensor, Tensor]  # from a parameter before `partition` to the one after it
# Models that are partitioned, and over which ranks.
_PARTITIONED: MutableMapping[nn.Module, tuple[Sequence[int] | None, Zero]] = weakref.WeakKeyDictionary()


def partition(model: nn.Module, zero: Zero) -> Replaced:
    """Partitions a model in place: each rank gets its rows of all parameters, with rank 0's values.

    Parameters that were built in parts (building.py) are not gathered.

    The parameters are new tensors afterwards. Returns the new parameter of each old one, for `regroup`. Raises
    ValueError for models that `fully_shard` does not support.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard  # slow: dist/sharded.py

    ranks = None if zero.grid is None else zero.grid.ranks_along(DATA)
    if _PARTITIONED.get(model) == (ranks, zero) and all(is_dtensor(param) for param in model.parameters()):
        return {param: param for param in model.parameters()}  # for an optimizer that was closed
    _check(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    device = next(iter(before.values())).device
    group = new_group(backend_for(device), ranks)
    rows = take_rows(before.values())
    with torch.no_grad():
        for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
            if tensor not in rows:
                group.broadcast(tensor)
    _stand_in(model, rows)
    mesh = DeviceMesh.from_group(group.handle, device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(model, zero, device))
    blocks = find_blocks(model)
    owner = owners(model, blocks)
    for block in blocks:
        if not any(owner.get(param) == ROOT or is_external(param) for param in block.module.parameters()):
            fully_shard(block.module, mesh=mesh, mp_policy=policy, offload_policy=OffloadPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=OffloadPolicy())
    for module in model.modules():
        if is_fsdp(module):
            vars(module)["__deepcopy__"] = _refuse_copy  # that of fully_shard() does not say what to do
    now = dict(model.named_parameters(remove_duplicate=False))
    _put_rows(model, {now[name]: param for name, param in before.items() if param in rows}, rows)
    # A backward of a pipeline runs one part of the model: it has gradients of some parameters outside of blocks only.
    is_pipeline = zero.grid is not None and len(zero.grid.ranks_along(PIPE)) > 1
    filled = (module for module in model.modules() if module is not model or not is_pipeline)
    _fill_missing(group for module in filled for group in param_groups(module))
    if backend_for(device) == "gloo":
        use_own_collectives([module for module in model.modules() if is_fsdp(module)], device)
    replaced: Replaced = {before[name]: param for name, param in model.named_parameters(remove_duplicate=False)}
    for old, new in replaced.items():
        keep_marks(old, new)
    generate: object = getattr(model, "generate", None)
    if callable(generate):
        vars(model)["generate"] = _GatheredCall(model, generate)
    _PARTITIONED[model] = ranks, zero
    return replaced


def _refuse_copy(_memo: dict[int, object]) -> NoReturn:
    raise wrong_state(
        "A deep copy of the model cannot be made",
        "each rank has only some rows of its weights (ZeRO stage 3)",
        "Copy the model before the optimizer is built, and copy new values inside GatheredParameters().",
    )


def _stand_in(model: nn.Module, rows: Rows) -> None:
    """Replaces parameters without values by meta tensors, which `fully_shard` divides too."""
    metas: dict[Tensor, nn.Parameter] = {}
    for param in rows:
        metas[param] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
        metas[param].__dict__.update(param.__dict__)  # marks, such as that of an external parameter
    for module in model.modules():
        for name, found in module._parameters.items():
            if found is not None and found in metas:
                module._parameters[name] = metas[found]


@torch.no_grad()
def _put_rows(model: nn.Module, before: Mapping[Tensor, Tensor], rows: Mapping[Tensor, Tensor]) -> None:
    """Gives this rank's rows to parameters of `fully_shard` that are on the meta device. `before`: the parameter that
    each of them replaces, for which `rows` has the rows.
    """
    for module in model.modules():
        for group in param_groups(module) if before else ():
            for one in group.fsdp_params:
                old = one.sharded_param
                if old in before:
                    new = nn.Parameter(one.to_sharded_dtensor(rows[before[old]]), old.requires_grad)
                    one._setattr_on_modules(new)
                    one.reset_sharded_param()


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model without parameters, and for DTensors and parameters without dimensions."""
    if next(model.parameters(), None) is None:
        raise ValueError("The model has no parameters, but must have some to be trained. Pass a model with parameters.")
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise ValueError(
                f"{name} is a DTensor, but must be a plain tensor, because ZeRO stage 3 calls fully_shard() itself. "
                "Pass the model as it was before fully_shard()."
            )
        if not param.dim():
            raise conflict("ZeRO stages 2 and 3", "no dimensions", name=name)
        if is_quantised(param):
            raise conflict("ZeRO stages 2 and 3", "quantised", name=name)


def regroup(groups: Iterable[ParamEntry], replaced: Replaced) -> list[ParamEntry]:
    """`groups` (parameters, named parameters or param groups) with each parameter as it is after `partition`."""
    found: list[ParamEntry] = []
    for item in groups:
        if isinstance(item, Mapping):
            params = item["params"]
            assert isinstance(params, Iterable)
            found.append({**item, "params": regroup([params] if isinstance(params, Tensor) else params, replaced)})
        elif isinstance(item, tuple):
            name, tensor = item
            found.append((name, replaced.get(tensor, tensor)))
        else:
            found.append(replaced.get(item, item))
    return found


def gathered_blocks(model: nn.Module, with_embeddings: bool = False) -> list[Block]:
    """The blocks whose forward waits for their own weights. `with_embeddings`: see `find_blocks`.

    Without `fully_shard` these are all blocks, and otherwise the blocks that it gathers separately. Other blocks are
    gathered with an outer module, before their own hook would wait.
    """
    blocks = find_blocks(model, with_embeddings=with_embeddings)
    if not any(is_fsdp(module) for module in model.modules()):
        return blocks
    gathered = [block for block in blocks if is_fsdp(block.module)]
    return [Block(i, block.name, block.module) for i, block in enumerate(gathered)]


def _reduce_dtype(model: nn.Module, zero: Zero, device: torch.device) -> torch.dtype | None:
    """The dtype of gradient sums: `zero.dtype`, else fp32 for half precision over gloo, else None (their own)."""
    is_half = any(param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())
    return zero.dtype or (torch.float32 if is_half and backend_for(device) == "gloo" else None)


def forget_gathered(model: nn.Module | None) -> None:
    """Releases gathered weights of the root before a forward.

    `fully_shard` keeps the root gathered until a backward. After an evaluation without backward, the next forward would
    use old weights instead of those that were written into the rows since.
    """
    if is_fsdp(model):
        model.reshard()


class InPlace:
    """Keeps the rows of a module in place while an optimizer has state for them, until `remove`.

    `Module.to()` and `Module.float()` would replace them by other tensors. They now succeed if they change nothing, and
    otherwise raise RuntimeError before anything is changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the optimizer must not keep the model alive
        vars(module)["_apply"] = self._apply

    def remove(self) -> None:
        module = self._module()
        if module is not None:
            vars(module).pop("_apply", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`Module._apply`, which all conversions of a module call."""
        module = self._module()
        assert module is not None
        forget_gathered(module)
        for name, param in module.named_parameters(recurse=recurse):
            with torch.no_grad():
                found = fn(param)
            if (found.dtype, found.device) != (param.dtype, param.device):
                raise wrong_state(
                    f"{name} cannot be converted or moved from {param.dtype} on {param.device} to {found.dtype} on "
                    f"{found.device}",
                    "its optimizer has state for it",
                    "Convert and move the model before building the optimizer, or after its close().",
                )
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module


def keep_in_place(model: nn.Module) -> list[InPlace]:
    """Keeps all rows of a model in place (`InPlace`)."""
    forget_gathered(model)
    return [InPlace(module) for module in model.modules() if any(is_dtensor(param) for param in module.parameters())]


class _GatheredCall:
    """Replaces a method of the root that may call inner modules before the root itself. `generate` of transformers
    calls the encoder of an encoder-decoder model. `fully_shard` gathers the root's own weights only in the root's
    forward.
    """

    def __init__(self, model: nn.Module, method: Callable[..., object]) -> None:
        self._model = weakref.ref(model)
        self._method = weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method

    def __call__(self, *args: object, **kwargs: object) -> object:
        model, method = self._model(), self._method()
        assert is_fsdp(model) and method is not None
        forget_gathered(model)
        model._get_fsdp_state()._lazy_init()  # otherwise the first block that runs would be a root of its own
        for param in (one.sharded_param for group in param_groups(model) for one in group.fsdp_params):
            owner = owner_of(param)
            if owner is not None:
                owner.settle(param)
        model.unshard()
        try:
            return method(*args, **kwargs)
        finally:
            model.reshard()


class Sharded(Protocol):
    """A parameter of `fully_shard`. torch has no public name for these methods."""

    sharded_param: nn.Parameter
    _unsharded_param: Tensor  # missing before the first forward
    unsharded_accumulated_grad: Tensor | None

    def to_sharded_dtensor(self, tensor: Tensor) -> Tensor: ...
    def _setattr_on_modules(self, param: nn.Parameter) -> None: ...
    def reset_sharded_param(self) -> None: ...


class ParamGroup(Protocol):
    """Parameters that `fully_shard` gathers together. torch has no public name for these attributes."""

    fsdp_params: Sequence[Sharded]
    post_backward: Callable[..., None]
    _sharded_state: object
    _training_state: object

    def lazy_init(self) -> None: ...
    def _to_sharded(self) -> None: ...


def param_groups(module: nn.Module) -> list[ParamGroup]:
    """The groups of parameters that `fully_shard` gathers together for a module; none for other modules."""
    if not is_fsdp(module):
        return []
    state: object = module._get_fsdp_state()  # torch has no public name for it
    groups: list[ParamGroup | None] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def read_rows(model: nn.Module) -> None:
    """Lets `fully_shard` look up the rows of all parameters now. It would do so in the first forward, and raise an
    error if the modules have whole parameters then.
    """
    for module in model.modules():
        for group in param_groups(module):
            group.lazy_init()


@contextmanager
def without_gathering(model: nn.Module, is_whole: Callable[[Tensor], bool]) -> Iterator[None]:
    """A context in which `fully_shard` gathers nothing in a forward of modules all of whose parameters are whole.

    It acts as if it had gathered these parameters, and does not release them.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState  # torch has no public name for it

    held: list[ParamGroup] = []
    for module in model.modules():
        for group in param_groups(module):
            is_held = "_to_sharded" in vars(group)  # by a context around this one
            if not is_held and all(is_whole(one.sharded_param) for one in group.fsdp_params):
                held.append(group)
    for group in held:
        group._sharded_state = ShardedState.UNSHARDED
        group._to_sharded = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        for group in held:
            del vars(group)["_to_sharded"]
            group._sharded_state = ShardedState.SHARDED


def _nothing() -> None:
    pass


def gathering_streams(model: nn.Module | None) -> list[torch.cuda.Stream]:
    """The streams of `fully_shard` that read this rank's rows before a block runs; none before the first forward."""
    if not is_fsdp(model):
        return []
    context: object = model._get_fsdp_state()._comm_ctx  # torch has no public name for it
    streams = [getattr(context, name, None) for name in ("all_gather_copy_in_stream", "all_gather_stream")]
    return [stream for stream in streams if isinstance(stream, torch.cuda.Stream)]


# `fully_shard` sums only the gradients that a rank has. If ranks have gradients of different parameters, such as those
# of experts without tokens, their buffers have different contents, and the sums are wrong. Before the gradients of a
# block are summed, each missing gradient is therefore replaced by zeros. When the step is closed, ranks agree which
# parameters have a gradient on at least one rank (reducer.py). All other parameters are not updated.


def _fill_missing(groups: Iterable[ParamGroup]) -> None:
    """Makes zeros of missing gradients before `fully_shard` sums the gradients of these groups."""
    for group in groups:
        group.post_backward = partial(_sum_gradients, group, group.post_backward)


def _sum_gradients(group: ParamGroup, original: Callable[..., None], *args: object) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # torch has no public name for it

    missing: list[Sharded] = []
    found: list[Sharded] = []
    for one in group.fsdp_params:
        whole: Tensor | None = getattr(one, "_unsharded_param", None)
        if whole is not None and whole.requires_grad:
            is_missing = one.unsharded_accumulated_grad is None and whole.grad is None
            (missing if is_missing else found).append(one)
    # After several forwards, `fully_shard` calls this once for each of them. Autograd makes the gradients before the
    # last of these calls.
    is_last = not any(_comes(one._unsharded_param) for one in missing)
    if is_last and (found or group._training_state is TrainingState.PRE_BACKWARD):
        for one in missing:
            one._unsharded_param.grad = torch.zeros_like(one._unsharded_param, requires_grad=False)
        for is_filled, params in ((True, missing), (False, found)):
            for one in params:
                owner = owner_of(one.sharded_param)
                if owner is not None:
                    owner.note_filled(one.sharded_param, is_filled)
    original(*args)


def _comes(param: Tensor) -> bool:
    """Whether this backward computes a gradient of the parameter."""
    return in_backward() and bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))


# Collectives of `fully_shard` over gloo. gloo's reduce-scatter sends as much as an all-reduce and does not support GPU
# memory. twinflow's reduce-scatter (dist/group.py) exchanges parts on the host and sums them in fp32, rank by rank.


class _OnHost:
    """Base class of collectives that `fully_shard` calls instead of gloo's own."""

    def __init__(self) -> None:
        self._groups: dict[dist.ProcessGroup, Group] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a buffer, as `fully_shard` requires."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _group(self, handle: dist.ProcessGroup) -> Group:
        if handle not in self._groups:
            self._groups[handle] = Group(handle, dist.get_process_group_ranks(handle), is_on_host=True)
        return self._groups[handle]


class HostAllGather(_OnHost):
    """Gathers the rows of all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Runs the collective synchronously; `async_op` is ignored."""
        found = self._group(group)
        whole = output_tensor.view(-1)
        size = input_tensor.numel()
        own = whole[found.rank * size : (found.rank + 1) * size]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        found.all_gather(whole)


class HostReduceScatter(_OnHost):
    """Sums or averages gradients over ranks, depending on `op`, and gives this rank its rows of the result."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Runs the collective synchronously; `async_op` is ignored."""
        found = self._group(group)
        found.reduce_scatter(output_tensor.view(-1), input_tensor.view(-1), input_tensor.dtype)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(found.world)
        else:
            assert op == dist.ReduceOp.SUM, op


@runtime_checkable
class _TakesCollectives(Protocol):
    """A module after `fully_shard`, in torch versions later than 2.8."""

    def set_custom_all_gather(self, comm: HostAllGather) -> None: ...

    def set_custom_reduce_scatter(self, comm: HostReduceScatter) -> None: ...


def use_own_collectives(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Makes modules after `fully_shard` use `HostAllGather` and `HostReduceScatter`, except with torch 2.8 on a CPU.

    Raises RuntimeError with torch 2.8 on a GPU.
    """
    for module in modules:
        if not isinstance(module, _TakesCollectives):
            if device.type == "cpu":
                return
            raise wrong_state(
                "ZeRO stage 3 on GPUs cannot run over gloo",
                f"fully_shard of torch {torch.__version__} has no set_custom_reduce_scatter",
                "Use the NCCL backend, zero_optimization.stage 2, or a torch version later than 2.8.",
            )
        module.set_custom_all_gather(HostAllGather())
        module.set_custom_reduce_scatter(HostReduceScatter())
