# SPDX-License-Identifier: Apache-2.0
"""The whole weights of a model whose TwinOptimizer has ranks (`zero=`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from twinflow.conflicts import conflict
from twinflow.dist.group import alone
from twinflow.errors import incompatible, wrong_state
from twinflow.offload.quantised import is_wrapper, rebuilt
from twinflow.offload.state_dict_weights import listed
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero.gathered import home_of
from twinflow.zero.partitioned import forget_gathered
from twinflow.zero.whole import gather_on_first, parts_of


def whole_weights(
    source: TwinOptimizer | nn.Module,
    exclude_frozen: bool = False,
    call: str = "whole_weights()",
    part: nn.Module | None = None,
    of_stage: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the whole values of each tensor in the model's state dict, on the host of rank 0.

        for name, tensor in whole_weights(optimizer):  # on all ranks
            save(name, tensor)  # on rank 0 only: the other ranks get nothing

    All ranks must iterate, because each one may have only a part of the weights (stage 3). One parameter at a time is
    gathered, in the dtype of the model, and includes all updates of steps that have begun. Rank 0 may change the
    tensors or keep them. A tied weight has the same tensor under each name. `source`: the optimizer, or a partitioned
    model without one. `call` is the name for errors. `part`: a submodule whose weights are wanted. `of_stage`: in a
    pipeline, each stage gets the weights of its own layers, on the first of its data ranks. Raises RuntimeError if not
    all ranks iterate, and ValueError with tensor ranks, and with pipeline ranks unless `of_stage`.
    """
    if isinstance(source, TwinOptimizer):
        model, team, runtime = source.model, source.team, source.runtime
        if model is None:
            remedy = "Build it from the model."
            raise wrong_state(f"{call} cannot run", "the optimizer was built from parameters", remedy)
        grid = team.grid if team is not None else None
        if grid is not None and grid.num_model * (1 if of_stage else grid.num_pipe) > 1:
            reason, remedy = "a rank has only its layers, or its shards of them", "Save a checkpoint and export it."
            raise incompatible(call, "pipeline or tensor parallelism", reason, remedy)
        if team is not None and team.expert_shard is not None:
            raise conflict("Expert parallelism", "whole weights", call=call)
        group, meeting = (team.calls, team.meeting) if team is not None else (alone(), None)
    else:
        model, runtime = source, None
        home = next((one for param in model.parameters() if (one := home_of(param)) is not None), None)
        group, meeting = (home.group, home.meeting) if home is not None else (alone(), None)
    forget_gathered(model)
    named = _named_tensors(part if part is not None else model, exclude_frozen)
    distinct = {id(value): value for value in named.values()}
    offload = runtime.param_offload if runtime is not None else None
    parts = {key: own for key, value in distinct.items() if (own := parts_of(value, offload))}
    if meeting is not None and parts:
        meeting.meet(call, "each rank has a part of the weights")
    if runtime is not None:
        runtime.settle_all()
    gathered = gather_on_first(list(parts.values()), group)
    if group.rank > 0:
        for _ in gathered:
            pass
        return
    num_left = Counter(id(value) for value in named.values())
    tied: dict[int, Tensor] = {}
    try:
        for name, value in named.items():
            key = id(value)
            found = tied.pop(key, None)
            if found is None:
                found = next(gathered) if key in parts else _copied(value)
                assert found is not None
            num_left[key] -= 1
            if num_left[key]:
                tied[key] = found
            yield name, found
    finally:  # the other ranks send all of their parts, also if the caller stops before the end
        for _ in gathered:
            pass


def _copied(value: Tensor) -> Tensor:
    """A copy on the host. Some classes of quantised weights cannot copy themselves, so their tensors are copied."""
    if is_wrapper(value):
        plain = value.detach()
        return rebuilt(plain, type(plain), _copied)
    return value.detach().to("cpu", copy=True)


def _named_tensors(model: nn.Module, exclude_frozen: bool) -> dict[str, Tensor]:
    """The tensors of the model's state dict. A parameter is the parameter itself, so that its parts can be found."""
    state = listed(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    own = {**dict(model.named_buffers(remove_duplicate=False)), **params}
    left_out = {name for name, param in params.items() if exclude_frozen and not param.requires_grad}
    found = {name: own.get(name, value) for name, value in state.items() if name not in left_out}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
