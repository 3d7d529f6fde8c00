# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: each rank has some experts of every layer, and ranks exchange tokens.

With `size` ranks for the experts, `size` neighbours have all experts together: of 4 ranks with a size of 2, the ranks 0
and 2 have the first half of the experts, and the ranks 1 and 3 the second half. All ranks are data ranks: each has
tokens of its own, and everything but the experts. Where a layer calls its experts, a rank sends each token to the ranks
of the token's experts, computes the tokens that it gets, and sends the results back. The gradients of the tokens take
the same way back in backward, so the gradients of a rank's experts contain the tokens of all its neighbours.

Which ranks average what: all ranks sum the gradients of all parameters but the experts. Ranks with the same experts sum
those of these experts. Both sums are divided by the number of all ranks, so the result is that of one process with the
tokens of all ranks, if the loss is a mean over equal numbers of tokens. ZeRO divides the state of a parameter among the
ranks that sum its gradients (shared.py).

The experts must be those of transformers, in fused tensors [experts, ...]. Their module computes the local experts,
with any implementation that transformers has. The weights of the router are applied by the rank that has the token, so
that their gradients stay there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.conflicts import conflict
from twinflow.dist.group import TIMEOUT, Group, backend_for, new_group
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.quantised import is_quantised
from twinflow.parallel.shard import TensorShard, even_shard, mark, shard_of
from twinflow.parallel.whole import WholeWeights
from twinflow.zero.building import make_whole

T = TypeVar("T")
_NAME = "expert_parallel_size"
_RANKS = "_twinflow_expert_ranks"  # attribute of a model that is split
# Tensors of state dicts. An attribute of a tensor would be pickled with it.
_PARTS: MutableMapping[Tensor, tuple[TensorShard, ExpertRanks]] = WeakTensorKeyDictionary()
_CLASSES = "those of transformers that keep all experts of a layer in one tensor, such as MixtralExperts"


class Experts(Protocol):
    """A module of transformers with the experts of a layer."""

    num_experts: int
    forward: Callable[..., Tensor]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that have all experts together. `split_experts` makes this object."""

    group: Group  # used by forward and backward on the model's stream
    weights: WholeWeights

    @property
    def size(self) -> int:
        """Number of ranks that have all experts together."""
        return self.group.world

    @property
    def rank(self) -> int:
        """Index of this rank among them. It has experts number rank * n to (rank + 1) * n - 1 of each layer, if each
        rank has n.
        """
        return self.group.rank

    def state_dict(self) -> dict[str, object]:
        """The state dict of the model with all experts, on the host. A collective call."""
        return self.weights.state_dict("state_dict() of ExpertRanks")

    def __deepcopy__(self, memo: object) -> ExpertRanks:
        return self  # a copy of a model works on the same ranks


def expert_ranks(model: nn.Module) -> ExpertRanks | None:
    """What `split_experts` has returned for this model, or for a part of it. None if it is not split by experts."""
    return next((vars(part)[_RANKS] for part in model.modules() if _RANKS in vars(part)), None)


def split_experts(
    model: nn.Module, size: int, *, device: torch.device | None = None, timeout: timedelta = TIMEOUT
) -> ExpertRanks:
    """Keeps only this rank's experts in the model, and exchanges tokens from now on. A collective call.

    `size` neighbouring ranks have all experts together. `device`: that of the model's forward; None: that of its
    parameters. The experts are those of rank 0. Build the optimizer afterwards, with `zero`. All ranks must run the
    same forwards and backwards, and all call `save_pretrained` of the model, which saves all experts. Raises ValueError
    for a model whose experts cannot be split.

        split_experts(model, 2)
        optimizer = TwinOptimizer(model, zero=Zero(stage=2))
    """
    if not (dist.is_available() and dist.is_initialized()):
        remedy = "Call twinflow.init_distributed() first, in processes that a launcher has started."
        raise wrong_state("split_experts() cannot split the model", "there is no process group", remedy)
    world = dist.get_world_size()
    if size < 1 or world % size:
        remedy = "Start a multiple of it as processes, or use fewer expert ranks."
        raise invalid_value(_NAME, size, f"a divisor of {world}, the number of processes", remedy)
    modules = find_experts(model, size)
    where = device or next((param.device for param in model.parameters()), torch.device("cpu"))
    first = dist.get_rank() // size * size
    group = new_group(backend_for(where), range(first, first + size), timeout)
    ranks = ExpertRanks(group, WholeWeights(model, group, writes=dist.get_rank() == 0, is_expert=True))
    every = new_group(backend_for(where), timeout=timeout)
    for module in modules.values():
        num_experts = module.num_experts
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                if shard_of(param) is not None:  # another module has it too
                    continue
                make_whole([param])
                every.broadcast(param)  # ranks may have created models with different weights
                shard = replace(even_shard(0, num_experts, ranks.rank, size), is_expert=True)
                param.data = shard.cut(param.data)
                param.grad = None
                mark(param, shard)
        module.num_experts = num_experts // size
        module.forward = _SplitForward(module, module.forward, ranks, num_experts)
        cast(nn.Module, module).register_state_dict_post_hook(_note_parts)  # type: ignore[no-untyped-call]
    dist.destroy_process_group(every.handle)
    # The last two are marks of fully_shard: generate() of transformers then runs as many forwards on all ranks.
    vars(model).update({_RANKS: ranks, "_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True})
    return ranks


def _note_parts(module: nn.Module, state: dict[str, object], prefix: str, _local: object) -> None:
    """Notes the tensors of a state dict that have only the experts of this rank, for `with_all_experts`."""
    forward = vars(module).get("forward")
    for name, param in module.named_parameters(recurse=False):
        value, shard = state.get(prefix + name), shard_of(param)
        if (
            isinstance(forward, _SplitForward)
            and isinstance(value, Tensor)
            and value is not param
            and shard is not None
        ):
            _PARTS[value] = shard, forward.ranks


def with_all_experts(item: T, call: str) -> T:
    """A state dict of a model, with whole tensors in place of those that have only the experts of this rank. A
    collective call if there are such tensors. Other objects are returned as they are. `call`: its name for errors.
    """
    if not isinstance(item, Mapping):
        return item
    parts = {name: _PARTS[value] for name, value in item.items() if isinstance(value, Tensor) and value in _PARTS}
    if not parts:
        return item
    next(iter(parts.values()))[1].weights.meet(call)
    whole = {name: ranks.weights.joined(item[name], shard) for name, (shard, ranks) in parts.items()}
    return cast(T, {**item, **whole})


def check_split(model: nn.Module) -> None:
    """Raises RuntimeError if a model was split by experts, but its parameters were replaced since then."""
    for part in model.modules():
        if isinstance(forward := vars(part).get("forward"), _SplitForward):
            forward.check()


def find_experts(model: nn.Module, size: int) -> dict[str, Experts]:
    """The modules with fused experts, by name. Raises ValueError for a model that cannot be split over `size` ranks."""
    if hasattr(model, "peft_config"):
        raise conflict("Expert parallelism", "adapters")
    if expert_ranks(model) is not None:
        raise wrong_state(
            "split_experts() cannot split the model", "it is already split by experts", "Build the model again."
        )
    modules = dict(model.named_modules())
    found = fused_experts(model)
    if not found:
        others = {type(module).__name__ for module in modules.values() if "Expert" in type(module).__name__}
        others |= {type(module).__name__ for module in modules.values() if _has_expert_modules(module)}
        if others:
            raise other_experts(sorted(others)[0])
        raise no_experts(type(model).__name__)
    for name, module in found.items():
        _check(name, module, size)
    return found


def fused_experts(model: nn.Module) -> dict[str, Experts]:
    """The modules of transformers with experts that ranks can divide, by name."""
    # transformers sets this attribute in modules whose experts it can compute in several ways.
    return {name: cast(Experts, part) for name, part in model.named_modules() if hasattr(part, "_is_expert_parallel")}


def no_experts(name: str) -> ValueError:
    """The error for a model without experts, with the name of its class."""
    what = f"a model without experts ({name})"
    return invalid_value("The model to split by experts", what, "a model with experts", f"Leave {_NAME} out.")


def other_experts(name: str) -> ValueError:
    """The error for experts that ranks cannot divide, with the name of their class."""
    return invalid_value("The class of experts", name, _CLASSES, f"Leave {_NAME} out.")


def check_divides(size: int, num_experts: int, name: str) -> None:
    """Raises ValueError if `size` ranks cannot have equally many of the experts of the module or model `name`."""
    if num_experts % size:
        raise invalid_value(_NAME, size, f"a divisor of {num_experts}, the number of experts in {name}")


def _has_expert_modules(module: nn.Module) -> bool:
    """Whether a module has a list of experts that are modules."""
    return any(isinstance(part, nn.ModuleList) and "expert" in name for name, part in module.named_children())


def _check(name: str, module: Experts, size: int) -> None:
    own = dict(module.named_parameters(recurse=False))
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int) or not own or any(param.shape[:1] != (num_experts,) for param in own.values()):
        raise invalid_value(f"The class of {name}", type(module).__name__, _CLASSES, f"Leave {_NAME} out.")
    for attribute, param in own.items():
        if is_quantised(param):
            raise conflict("Expert parallelism", "quantised", name=f"{name}.{attribute}")
    check_divides(size, num_experts, name)


# Forward and backward.


class _SplitForward:
    """The forward of a module with experts, over all ranks.

    Arguments: tokens [tokens, hidden], and the experts of each token with their weights [tokens, chosen].
    """

    def __init__(self, module: Experts, compute: Callable[..., Tensor], ranks: ExpertRanks, num_experts: int) -> None:
        self._module = module
        self._compute = compute  # the module's own forward, which computes the experts of this rank
        self.ranks = ranks
        self._num_experts = num_experts  # of all ranks
        self._names = list(inspect.signature(compute).parameters)[:3]

    def __deepcopy__(self, memo: dict[int, object]) -> _SplitForward:
        """Marks the copies of the parameters too, because torch copies no attributes of parameters."""
        for param in self._module.parameters(recurse=False):
            shard = shard_of(param)
            assert shard is not None
            mark(deepcopy(param, memo), shard)
        module, compute = deepcopy(self._module, memo), deepcopy(self._compute, memo)
        return _SplitForward(module, compute, self.ranks, self._num_experts)

    def check(self) -> None:
        """Raises RuntimeError if other parameters, which have no marks, have taken the place of the split ones."""
        if any(shard_of(param) is None for param in self._module.parameters(recurse=False)):
            raise wrong_state(
                "This model cannot be trained",
                "its experts were replaced after split_experts()",
                "Copy values into the parameters, for example with load_state_dict(..., assign=False).",
            )

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        x, chosen, weights = (given[name] for name in self._names)
        ranks, num_chosen = self.ranks, chosen.shape[-1]
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self._num_experts)[: self._num_experts]
        by_expert = counts.view(ranks.size, -1)  # [rank, expert of the rank]
        arriving = ranks.group.exchange(by_expert.view(torch.uint8)).view(by_expert.dtype)
        sent, received = torch.stack([by_expert.sum(1), arriving.sum(1)]).tolist()
        order = order[: sum(sent)]  # without places for which a router has chosen no expert: their number is larger
        rows = _exchange(x.reshape(-1, x.shape[-1])[order // num_chosen], ranks.group, sent, received)
        numbers = torch.arange(by_expert.shape[1], device=x.device).repeat(ranks.size)
        local = numbers.repeat_interleave(arriving.view(-1), output_size=sum(received))  # the expert of each row
        results = _exchange(_local(self._compute, rows, local), ranks.group, received, sent)
        whole = results.new_zeros(flat.numel(), results.shape[1]).index_copy(0, order, results)
        weighed = whole * weights.reshape(-1, 1)
        return weighed.view(-1, num_chosen, x.shape[-1]).sum(1).to(x.dtype).view(x.shape)


def _local(compute: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """The results of this rank's experts, without the weights of the router."""
    num_rows = rows.shape[0]
    if not num_rows:  # a row of zeros, with which the experts get gradients of zeros
        rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
    return compute(rows, experts[:, None], rows.new_ones(rows.shape[0], 1))[:num_rows]


def _exchange(rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    found: Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Context(FunctionCtx):
    group: Group
    sent: Sequence[int]
    received: Sequence[int]


class _Exchange(Function):
    """Sends `sent[i]` rows to rank i, and gets `received[i]` rows from it. The gradients take the same way back."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return group.exchange_rows(rows.contiguous(), sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchange_rows(grad.contiguous(), ctx.received, ctx.sent), None, None, None
