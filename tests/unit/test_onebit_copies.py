# SPDX-License-Identifier: Apache-2.0
"""Copies of a parameter on several pipeline and tensor ranks: where they lie in buckets, and their errors in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.engine.restore import _check_errors
from twinflow.offload.bucket import Param
from twinflow.offload.placement import place_by_ratio
from twinflow.offload.plan import HOST, RESIDENT, ROOT, BucketPlan, ParamSpec, plan_buckets
from twinflow.optim.switch import Replica, own_errors, tree_of
from twinflow.parallel.shard import even_shard, mark
from twinflow.zero.parts import widen


def spec(name: str, numel: int, block: int = 0, shared: str = "") -> ParamSpec:
    return ParamSpec(name, numel, block, torch.float32, shared=shared)


TIE = spec("embedding", 5000, ROOT, "tie embedding")
FIRST = [TIE, spec("positions", 900, ROOT), *(spec(f"a{i}", 700 + 300 * i, i) for i in range(3))]
LAST = [*(spec(f"b{i}", 2000 - 100 * i, i) for i in range(4)), spec("norm", 64, ROOT), replace(TIE, block=7)]


def wholes(specs: Sequence[ParamSpec], ratio: float, placement: str, max_numel: int) -> list[BucketPlan]:
    parts = place_by_ratio(specs, range(len(specs)), ratio, placement)
    return [widen(plan, specs, 2) for plan in plan_buckets(specs, max_numel, parts)]


def lies(specs: Sequence[ParamSpec], plans: Sequence[BucketPlan], shared: str) -> list[tuple[Any, ...]]:
    """Buckets of what is shared: size, place, and where everything is in it."""
    found = []
    for plan in plans:
        inside = {specs[piece.param].shared for piece in plan.slices}
        if shared in inside:
            assert inside == {shared}
            where = [(specs[piece.param].name, piece.start, piece.numel, piece.offset) for piece in plan.slices]
            found.append((plan.numel, plan.place, where))
    return found


@pytest.mark.parametrize("placement", ["auto", "front", "tail"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("max_numel", [1024, 4096, 1 << 20])
def test_a_tie_lies_alike_on_both_stages(ratio: float, placement: str, max_numel: int) -> None:
    first, last = (wholes(specs, ratio, placement, max_numel) for specs in (FIRST, LAST))
    here, there = lies(FIRST, first, TIE.shared), lies(LAST, last, TIE.shared)
    assert here
    assert here == there
    host = sum(piece[2] for _, place, pieces in here for piece in pieces if place == HOST)
    assert host == pytest.approx(ratio * TIE.numel, abs=128)
    assert {place for _, place, _ in here} <= {HOST, RESIDENT}


def test_without_a_name_they_share_buckets_with_what_is_there() -> None:
    plain = [[replace(one, shared="") for one in specs] for specs in (FIRST, LAST)]
    first, last = (wholes(specs, 1.0, "auto", 1 << 20) for specs in plain)
    index = [[one.name for one in specs].index("embedding") for specs in plain]
    here = next(plan for plan in first if any(piece.param == index[0] for piece in plan.slices))
    there = next(plan for plan in last if any(piece.param == index[1] for piece in plan.slices))
    assert (len(here.slices), len(there.slices)) == (2, 1)


def test_tensor_ranks_keep_what_all_have_apart_from_their_parts() -> None:
    """The first counts copies, the others do not: without a name it would put them beside its parts."""
    first = [spec("norm", 300, 0, "tensor"), spec("part", 3000, 0), spec("bias", 100, 0, "tensor")]
    other = [replace(one, is_counted=not one.shared) for one in first]
    found = [lies(specs, wholes(specs, 0.5, "auto", 1024), "tensor") for specs in (first, other)]
    assert found[0] == found[1]
    assert sum(len(pieces) for _, _, pieces in found[0]) >= 2


# Errors.

WHOLE = {"embedding": (8, 3), "up": (4, 6), "norm": (5,)}


def value_of(name: str, replica: int) -> Tensor:
    numel = torch.Size(WHOLE[name]).numel()
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * replica + len(name))).view(WHOLE[name])


def param_of(name: str, index: int, rank: int, world: int) -> Param:
    """`up` is split by fused columns, the embedding by rows; the norm is whole on all tensor ranks."""
    shape, dims = WHOLE[name], {"embedding": (0, 1), "up": (1, 3)}
    if world == 1 or name not in dims:
        return Param(index, name, nn.Parameter(torch.zeros(shape)), 0)
    dim, num_fused = dims[name]
    shard = even_shard(dim, shape[dim], rank, world, num_fused)
    tensor = nn.Parameter(shard.cut(torch.zeros(shape)))
    mark(tensor, shard)
    return Param(index, name, tensor, 0)


def layout(num_pipe: int, num_model: int, num_data: int) -> list[tuple[list[Param], Replica, int]]:
    """All ranks: parameters, replica, tensor rank. The last stage calls its copy of the embedding `head`."""
    stages = [["embedding", "up", "norm"]] if num_pipe == 1 else [["embedding", "up"], ["norm", "embedding"]]
    found = []
    for stage, data, model in ((s, d, m) for s in stages for d in range(num_data) for m in range(num_model)):
        params = [param_of(name, i, model, num_model) for i, name in enumerate(stage)]
        if stage[0] == "norm":
            params[1].name = "head"
        found.append((params, Replica(data, num_data), model))
    return found


def name_of(name: str) -> str:
    return {"head": "embedding"}.get(name, name)


def cut(param: Param, whole: Tensor) -> Tensor:
    shard = getattr(param.tensor, "_twinflow_shard", None)
    return (whole if shard is None else shard.cut(whole)).reshape(-1)


LAYOUTS = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 3), (1, 2, 1)]


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_errors_stay_with_their_replica_or_keep_their_mean(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    saved = []
    for params, replica, _ in layout(*before):
        flats = {p.index: cut(p, value_of(name_of(p.name), replica.which)) for p in params}
        saved.append(tree_of(params, flats, name_of, replica))
    for params, replica, _ in layout(*after):
        found = own_errors(saved, params, name_of, replica, lambda tensor: tensor)
        for param in params:
            values = [value_of(name_of(param.name), i) for i in range(before[2])]
            wanted = values[replica.which] if before[2] == after[2] else torch.stack(values).mean(0)
            assert torch.equal(found[param.index], cut(param, wanted)), param.name


def test_only_what_is_needed_is_read() -> None:
    """All ranks' errors are many times the model: a rank with as many replicas reads its own, and of its own stage."""
    saved = []
    for rank, (params, replica, _) in enumerate(layout(2, 1, 3)):
        flats = {param.index: torch.zeros(param.local.numel()) for param in params}
        tree = tree_of(params, flats, name_of, replica)
        for name, entry in tree["params"].items():
            entry["error"] = (rank, name, entry["error"])
        saved.append(tree)
    seen: list[tuple[int, str]] = []

    def read(named: tuple[int, str, Tensor]) -> Tensor:
        seen.append(named[:2])
        return named[2]

    params, replica, _ = layout(2, 1, 3)[1]
    own_errors(saved, params, name_of, replica, read)
    assert seen == [(1, "embedding"), (1, "up")]


def test_errors_of_an_earlier_layout_are_refused() -> None:
    """They were by piece, and a rank would look in vain for what it needs, with half of the checkpoint loaded."""
    own: Any = SimpleNamespace(path=Path("step_1"), meta={"errors": [{"replica": 0, "num_replicas": 1, "params": {}}]})
    _check_errors(own)
    old: Any = SimpleNamespace(path=Path("step_1"), meta={"errors": [{}, {"embedding/0": {}}]})
    with pytest.raises(ValueError, match=r"step_1: The compression errors of 1-bit Adam.*load_optimizer_states=False"):
        _check_errors(old)
