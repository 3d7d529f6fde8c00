# SPDX-License-Identifier: Apache-2.0
"""Muon: against plain torch, with equal bits for every placement, and which parameters it updates."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin_support import (
    MAX_NORM,
    assert_same,
    gpt,
    loss_of,
    matrix_but,
    quick_torch,
    restart,
    run_engine,
    snapshot,
    train,
    twin,
)

import twinflow
from twinflow.dist.group import alone
from twinflow.offload import muon
from twinflow.offload.bucket import Param
from twinflow.offload.muon import BATCH_NUMEL, Units, batch_size
from twinflow.offload.placement import place_by_ratio, whole_units
from twinflow.offload.plan import HOST, RESIDENT, STREAMED, ParamSpec, plan_buckets
from twinflow.optim.schedules import OneCycle
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_checks import check_rows
from twinflow.planner.costs import Memory, Run, bucket_numel, bytes_of, items_of, placed_at, timing_of
from twinflow.planner.machines import GB, GPUS, Host, Machine, rates_of
from twinflow.planner.models import gpt_cost
from twinflow.planner.placement import choose
from twinflow.planner.simulate import ClipDecision, predict
from twinflow.rules.formats import decode_e4m3, encode_e4m3, rounding_key
from twinflow.rules.muon import COEFFICIENTS, MUON, SCALES, scale
from twinflow.rules.newton_schulz import iterate, muon_step, orthogonalise
from twinflow.zero.matrices import RowExchange, owners_of, rows_of
from twinflow.zero.parts import part_of, widen

OPTIONS: dict[str, Any] = {"rule": "muon", "lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1}
CLIPPED: dict[str, Any] = {"max_grad_norm": MAX_NORM}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": CLIPPED,
    "clipped early": {**CLIPPED, "early": True},
    "early": {"early": True},
    "on_host": {**CLIPPED, "early": True, "sums": "host", "hold": "host"},
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


@pytest.fixture
def fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon iterates in fp32 instead of bf16."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2}


class PlainTorch:
    """torch.optim.Muon for matrices and torch.optim.AdamW for the rest, with clipping by torch."""

    def __init__(self, model: nn.Module, max_norm: float | None = None, **muon: Any) -> None:
        own = [*matrices(model).values()]
        others = [p for p in model.parameters() if all(p is not one for one in own)]
        self.params, self.max_norm = [*own, *others], max_norm
        self.parts = (
            torch.optim.Muon(own, lr=0.02, weight_decay=0.1, **muon),
            torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1),
        )

    def step(self) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.max_norm)
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


# The arithmetic.


def test_singular_values_come_near_one() -> None:
    x = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    values = torch.linalg.svdvals(iterate(x, 5, COEFFICIENTS))
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 9)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.usefixtures("fp32_products")
def test_the_reference_is_torchs_muon(shape: tuple[int, int], nesterov: bool, adjust: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, momentum = torch.randn(shape, generator=generator), torch.zeros(shape)
    theirs = nn.Parameter(ours.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    options = {**MUON.defaults, "lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    for _ in range(5):
        theirs.grad = torch.randn(shape, generator=generator)
        muon_step(ours, momentum, theirs.grad.clone(), options, torch.float32)
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(momentum, optimizer.state[theirs]["momentum_buffer"], rtol=1e-6, atol=1e-7)


def test_a_batch_has_the_results_of_single_matrices() -> None:
    torch.manual_seed(0)
    tall, wide = torch.randn(40, 24), torch.randn(24, 40)
    alone = [tall.clone(), wide.clone()]
    for one in alone:
        orthogonalise([one], MUON.defaults, torch.float32)
    orthogonalise([tall, wide], MUON.defaults, torch.float32)
    for one, other in zip(alone, (tall, wide), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_matrix_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(4, 6)
    orthogonalise([zeros], MUON.defaults, torch.float32)
    assert not zeros.any()


@pytest.mark.parametrize("share", [1.0, 0.7, 0.3, 1e-2, 1e-5, 0.0])
def test_an_int8_momentum_is_rounded_without_bias(share: float) -> None:
    block = torch.full((128 * 8 + 3,), -share)
    block[::128] = 1.0
    keys = [rounding_key(step, 3) for step in range(300)]
    found = torch.stack([decode_e4m3(*encode_e4m3(block, 0, key)) for key in keys])
    pick = torch.arange(block.numel()) % 128 != 0
    assert found[:, pick].mean().item() == pytest.approx(-share, rel=0.02)
    exact = decode_e4m3(torch.arange(127, dtype=torch.uint8), torch.ones(1))
    for sign in (1.0, -1.0):  # values of codes stay
        assert torch.equal(decode_e4m3(*encode_e4m3(sign * exact, 0, (1, 2))), sign * exact)
    part = encode_e4m3(block[512:], 512, keys[0])[0]
    assert torch.equal(part, encode_e4m3(block, 0, keys[0])[0][512:])


def test_an_int8_momentum_is_encoded_in_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (1 << 22, 256):
        monkeypatch.setattr(muon, "_CHUNK", chunk)
        model = gpt()
        with closing(twin(model, states="int8", **CLIPPED, **OPTIONS)) as optimizer:
            train(model, optimizer, range(2))
            found.append(snapshot(model, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_block_of_an_int8_momentum_that_is_not_finite_is_read_as_nan(bad: float) -> None:
    values = torch.ones(256)
    values[3] = bad
    found = decode_e4m3(*encode_e4m3(values, 0, (1, 2)))
    assert found[:128].isnan().all()
    assert torch.equal(found[128:], values[128:])


def test_an_int8_momentum_follows_gradients_that_fall() -> None:
    """Some columns of a matrix lose their gradient, as those of a hidden unit that is not used any more. A step takes
    less from their momentum than half of the distance between two codes.
    """
    weight = nn.Parameter(torch.zeros(4, 128))
    groups = [{"params": [weight], "use_muon": True}]
    module = nn.ParameterList([weight])
    with closing(TwinOptimizer(module, "muon", param_groups=groups, lr=0.0, states="int8")) as optimizer:
        for step in range(300):
            weight.grad = torch.ones(4, 128)
            weight.grad[:, 10:] = step < 100
            optimizer.step()
        found = optimizer.state_dict()["state"]["0"]["momentum_buffer"]
    assert found[:, :10].mean().item() == pytest.approx(1.0, rel=0.02)
    assert found[:, 10:].abs().max() < 0.01


def test_scales() -> None:
    found = {name: (scale(name, 8, 2), scale(name, 2, 8)) for name in SCALES}
    rms = 0.2 * math.sqrt(8)
    assert found == {"original": (2, 1), "match_rms_adamw": (rms, rms), "spectral": (2, 0.5), "none": (1, 1)}


# Training.


NUM_STEPS = matrix_but([50], [50, 200])


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.usefixtures("fp32_products")
def test_losses_as_with_plain_torch(num_steps: int) -> None:
    model, plain = gpt(), gpt()
    with closing(twin(model, ratio=1.0, **CLIPPED, **OPTIONS)) as optimizer:
        losses = train(model, optimizer, range(num_steps))
        theirs = train(plain, PlainTorch(plain, MAX_NORM), range(num_steps))
    assert max(abs(a - b) / b for a, b in zip(losses, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.usefixtures("fp32_products")
def test_weights_with_the_gradients_of_plain_torch(num_steps: int) -> None:
    """In a training of its own, each model amplifies rounding errors."""
    model, plain = gpt(), gpt()
    reference = PlainTorch(plain)
    with closing(twin(model, ratio=0.5, **OPTIONS)) as optimizer:
        for step in range(num_steps):
            loss_of(plain, step).backward()
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                own.grad = other.grad.clone() if other.grad is not None else None
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        optimizer.wait()
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (own - other).norm() <= 1e-5 * other.norm(), name


CELLS = list(product(MODES, MUON.formats, (torch.float32, torch.bfloat16, torch.float16)))
QUICK = [CELLS[i] for i in (0, 13, 22, 30, 44)]


@pytest.mark.parametrize(("mode", "states", "dtype"), matrix_but(QUICK, CELLS))
def test_every_placement_gives_the_same_bits(mode: str, states: str, dtype: torch.dtype) -> None:
    found = []
    for ratio, numel in ((1.0, 4096), (0.0, 4096), (0.6, 4096), (0.5, 128), (0.5, 1 << 20)):
        model = gpt().to(dtype)
        options = {**OPTIONS, **MODES[mode], "skip_nonfinite": "clipped" in mode, "bucket_numel": numel}
        with closing(twin(model, ratio=ratio, states=states, **options)) as optimizer:
            train(model, optimizer, range(5), nan_step=3 if options["skip_nonfinite"] else -1)
            places = {bucket.plan.place for bucket in optimizer.runtime.buckets if bucket.plan.is_matrix}
            assert places == {1.0: {STREAMED}, 0.0: {RESIDENT}}.get(ratio, {STREAMED, RESIDENT}), ratio
            assert optimizer.num_skipped == int(options["skip_nonfinite"])
            found.append(snapshot(model, optimizer))
    for other in found[1:]:
        assert_same(found[0], other)


@pytest.mark.parametrize(("states", "ratio"), [("fp32", 1.0), ("bf16", 0.0), ("int8", 0.0), ("int8", 1.0)])
def test_a_skipped_step_keeps_all_bits_of_the_state(states: str, ratio: float) -> None:
    model = gpt()
    with closing(twin(model, ratio=ratio, states=states, **CLIPPED, **OPTIONS)) as optimizer:
        train(model, optimizer, range(3))
        before = {name: values.clone() for name, values in snapshot(model, optimizer).items()}
        train(model, optimizer, [3], nan_step=3)
        assert_same(before, snapshot(model, optimizer))
        assert optimizer.num_skipped == 1


@pytest.mark.parametrize("early", [False, True])
def test_several_backwards_and_moves_of_state_give_the_same_bits(early: bool) -> None:
    found = []
    for ratio, sums in ((1.0, "device"), (0.0, "device"), (0.5, "host")):
        model = gpt()
        options = {"ratio": ratio, "sums": sums, "accumulation_steps": 2, "early": early, **CLIPPED, **OPTIONS}
        with closing(twin(model, **options)) as optimizer:
            for step in range(4):
                for part in range(2):
                    loss_of(model, 2 * step + part).backward()
                optimizer.step()
                optimizer.zero_grad()
                if ratio == 0.0 and step in (1, 2):
                    (optimizer.offload_state if step == 1 else optimizer.reload_state)()
                    buckets = [bucket.plan for bucket in optimizer.runtime.buckets if bucket.plan.is_matrix]
                    assert {plan.place for plan in buckets} == {STREAMED if step == 1 else RESIDENT}
            found.append(snapshot(model, optimizer))
    assert_same(found[0], found[1])
    for name, values in found[2].items():  # the host sums in fp32, and the device in the dtype of the gradients
        torch.testing.assert_close(found[0][name], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", MUON.formats)
def test_resumed_training_gives_the_same_bits(states: str) -> None:
    model = gpt()
    make = lambda model, ratio=1.0: twin(model, ratio=ratio, states=states, **CLIPPED, **OPTIONS)  # noqa: E731
    with closing(make(model)) as optimizer:
        train(model, optimizer, range(6))
        straight = snapshot(model, optimizer)
    model = gpt()
    optimizer = make(model)
    train(model, optimizer, range(3))
    model, optimizer = restart(model, optimizer, lambda model: make(model, 0.3))
    with closing(optimizer):
        train(model, optimizer, range(3, 6))
        assert_same(straight, snapshot(model, optimizer))


def test_the_state_of_a_parameter_is_that_of_its_rule() -> None:
    model = gpt()
    with closing(twin(model, **OPTIONS)) as optimizer:
        train(model, optimizer, range(1))
        state = optimizer.state_dict()["state"]
    own = matrices(model)
    for name, entry in state.items():
        kept = {"momentum_buffer"} if name in own else {"exp_avg", "exp_avg_sq"}
        assert entry.keys() == {"step", "master"} | kept, name


def test_a_matrix_that_is_not_contiguous_has_its_state_on_the_device() -> None:
    class Turned(nn.Module):
        def __init__(self, is_turned: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(12, 20) for _ in range(2))
            if is_turned:
                self.blocks[1].weight = nn.Parameter(self.blocks[1].weight.detach().t().contiguous().t())
            self.back = nn.Linear(20, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.back(self.blocks[0](x))).square().mean()

    found = []
    for is_turned in (False, True):
        model = Turned(is_turned)
        with closing(TwinOptimizer(model, "muon", lr=0.02, ratio=1.0)) as optimizer:
            for step in range(3):
                model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(snapshot(model, optimizer))
            plans = [bucket.plan for bucket in optimizer.runtime.buckets if bucket.plan.is_matrix]
            assert {plan.place for plan in plans} == {STREAMED, RESIDENT} if is_turned else {STREAMED}
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=0, atol=1e-6)


def test_maximize_is_the_opposite_direction() -> None:
    found = []
    for sign in (1.0, -1.0):
        model = gpt()
        with closing(twin(model, maximize=sign < 0, **OPTIONS)) as optimizer:
            for step in range(3):
                (sign * loss_of(model, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_same(*found)


# Which parameters.


def test_by_default_matrices_of_blocks_and_not_the_rest() -> None:
    model = gpt()
    with closing(twin(model, **OPTIONS)) as optimizer:
        first, second = optimizer.param_groups
    assert (first["use_muon"], second["use_muon"]) == (True, False)
    assert {id(p) for p in first["params"]} == {id(p) for p in matrices(model).values()}
    assert len(second["params"]) + len(first["params"]) == len([*model.parameters()])
    assert (first["lr"], second["lr"]) == (0.02, 1e-3)


def test_groups_and_marks_choose_parameters() -> None:
    model = gpt()
    names = {p: name for name, p in model.named_parameters()}
    up, down = model.blocks[0].mlp.up.weight, model.blocks[0].mlp.down.weight
    up.use_muon = False
    rest = [p for p in model.parameters() if p is not down]
    groups = [{"params": [down], "use_muon": False, "lr": 0.5}, {"params": rest, "muon_lr": 0.3}]
    with closing(twin(model, param_groups=groups, **OPTIONS)) as optimizer:
        found = [(g["use_muon"], g["lr"], {names[p] for p in g["params"]}) for g in optimizer.param_groups]
    assert [(uses, lr) for uses, lr, _ in found] == [(False, 0.5), (True, 0.3), (False, 1e-3)]
    assert found[1][2] == matrices(model).keys() - {names[up], names[down]}
    assert names[up] in found[2][2]


def test_stacks_of_matrices_are_orthogonalised_one_by_one() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.Parameter(torch.randn(3, 6, 8))

        def forward(self) -> Tensor:
            return (self.experts * torch.arange(144.0).view(3, 6, 8).sin()).sum()

    model = Stack()
    plain = [model.experts[i].detach().clone() for i in range(3)]
    groups = [{"params": [model.experts], "use_muon": True}]
    with closing(TwinOptimizer(model, "muon", param_groups=groups, lr=0.02)) as optimizer:
        model().backward()
        optimizer.step()
        optimizer.wait()
    for i, weight in enumerate(plain):
        grad = torch.arange(144.0).view(3, 6, 8).sin()[i]
        muon_step(weight, torch.zeros(6, 8), grad, {**MUON.defaults, "lr": 0.02}, torch.float32)
        torch.testing.assert_close(weight, model.experts[i].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4)])
def test_matrices_without_elements(shape: tuple[int, ...]) -> None:
    model = nn.ParameterDict({"full": torch.ones(4, 4), "empty": torch.empty(shape), "other": torch.empty(shape)})
    groups = [{"params": [*model.values()], "use_muon": True}]
    with closing(TwinOptimizer(model, "muon", param_groups=groups)) as optimizer:
        for _ in range(2):
            sum(p.square().sum() for p in model.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        assert model["empty"].shape == shape
        assert (model["full"] < 1.0).all()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("use_muno", "use_muon"),
        ("mounlr", "muon_lr"),
        ("adamlr", "adam_lr"),
        ("momentun", "momentum"),
        ("beta", "betas"),
    ],
)
def test_misspelt_keys(key: str, near: str) -> None:
    model = gpt()
    with pytest.raises(ValueError, match=rf"A key of a param group of Muon is '{key}'.* Did you mean '{near}'\?"):
        twin(model, param_groups=[{"params": [*model.parameters()], key: 0.5}], **OPTIONS)
    if near != "use_muon":
        with pytest.raises(ValueError, match=rf"An option of Muon is '{key}'.* Did you mean '{near}'\?"):
            twin(gpt(), **{**OPTIONS, key: 0.5})


def test_other_keys_of_groups_are_the_users() -> None:
    model = gpt()
    groups = [{"params": [*model.parameters()], "name": "all", "lr_scale": 0.5, "initial_lr": 0.1, "max_lr": 0.2}]
    with closing(twin(model, param_groups=groups, **OPTIONS)) as optimizer:
        assert [group["lr_scale"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_learning_rates_of_groups() -> None:
    """The nearest rate counts: that of the kind in the group, `lr` of the group, that of the kind in the options."""
    model = gpt()
    own = matrices(model)
    up, down = (own[f"blocks.0.mlp.{name}.weight"] for name in ("up", "down"))
    rest = [p for p in model.parameters() if p is not up and p is not down]
    groups: list[Any] = [
        {"params": [up], "use_muon": True, "lr": 0.5, "weight_decay": 0.3},
        {"params": [down], "use_muon": False, "lr": 0.25},
        {"params": rest, "lr": 0.125, "adam_lr": 0.0625, "muon_lr": 0.03125},
    ]
    with closing(twin(model, param_groups=groups, **OPTIONS)) as optimizer:
        found = [(group["use_muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(True, 0.5, 0.3), (False, 0.25, 0.1), (True, 0.03125, 0.1), (False, 0.0625, 0.1)]
    with closing(twin(gpt(), rule="muon", lr=0.5, muon_lr=0.25)) as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": 0.1}, r"lr=0.1 of a param group cannot be used with adam_lr=0.001"),
        ({"lr": 0.1, "adam_lr": 0.1, "use_muon": True}, "adam_lr in a param group cannot be used with use_muon=True"),
        ({"muon_lr": 0.1, "use_muon": False}, "muon_lr in a param group cannot be used with use_muon=False"),
    ],
)
def test_contradictory_learning_rates(group: dict[str, Any], message: str) -> None:
    model = gpt()
    with pytest.raises(ValueError, match=message):
        twin(model, param_groups=[{"params": [*model.parameters()], **group}], **OPTIONS)


def test_errors_of_groups() -> None:
    model = gpt()
    with pytest.raises(ValueError, match=r"number of dimensions of .*, but must be one of 2, 3"):
        twin(model, **OPTIONS, param_groups=[{"params": list(model.parameters()), "use_muon": True}])
    with pytest.raises(ValueError, match="No parameter is a matrix"):
        TwinOptimizer(nn.Embedding(3, 4), "muon")
    with pytest.raises(ValueError, match="use_muon of a param group"):
        twin(model, **OPTIONS, param_groups=[{"params": list(model.parameters()), "use_muon": "yes"}])
    with closing(twin(model, **OPTIONS)) as optimizer:
        optimizer.param_groups[0]["use_muon"] = False
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"param_groups\[0\] cannot have use_muon=False"):
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_params": True}, "cannot be used with offload_params=True"),
        ({"delayed_update": True}, "cannot be used with delayed_update=True"),
        ({"master": "none"}, 'cannot be used with master="none"'),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ({"ns_steps": 0}, "a whole number from 1 to 99"),
        ({"ns_steps": 2.5}, "a whole number from 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "three finite numbers"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_errors_of_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twin(gpt(), **{**OPTIONS, **options})


# Units and buckets.


def specs_of(shapes: list[tuple[int, int]], numels: list[int]) -> list[ParamSpec]:
    """Matrices of two blocks, between vectors."""
    units, specs = Units(), []
    for block in range(2):
        for i, shape in enumerate(shapes):
            size = torch.Size(shape)
            unit = units.of(size, block)
            specs.append(ParamSpec(f"{block} {i}", size.numel(), block, torch.bfloat16, can_split=False, unit=unit))
        specs += [ParamSpec(f"{block} {n}", n, block, torch.bfloat16) for n in numels]
    return specs


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.35, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("max_numel", [128, 4096, 1 << 16])
def test_units_are_never_divided(ratio: float, max_numel: int) -> None:
    specs = specs_of([(32, 32), (16, 64), (64, 16), (32, 32), (16, 64)], [32, 400, 5000])
    parts = whole_units(specs, place_by_ratio(specs, range(len(specs)), ratio))
    plans = plan_buckets(specs, max_numel, parts)
    bucket_of: dict[int, set[int]] = {}
    for plan in plans:
        assert not (plan.is_matrix and plan.place == HOST)
        for piece in plan.slices:
            unit = specs[piece.param].unit
            assert plan.is_matrix == (unit is not None)
            if unit is not None:
                assert piece.numel == specs[piece.param].numel
                bucket_of.setdefault(unit, set()).add(plan.index)
        units = [specs[piece.param].unit for piece in plan.slices]
        changes = sum(a != b for a, b in pairwise(units))
        assert not plan.is_matrix or changes == len(set(units)) - 1
    assert all(len(found) == 1 for found in bucket_of.values())
    assert sum(piece.numel for plan in plans for piece in plan.slices) == sum(spec.numel for spec in specs)


def test_ranks_get_whole_matrices() -> None:
    specs = specs_of([(32, 32), (16, 64), (64, 16), (32, 32)], [])
    for plan in plan_buckets(specs, 1 << 16):
        whole = widen(plan, specs, 2)
        found = [piece for rank in range(2) for piece in part_of(whole, rank, 2).slices]
        assert sorted((p.param, p.numel) for p in found) == sorted((p.param, p.numel) for p in plan.slices)


def test_batches_are_limited() -> None:
    units = Units()
    small = [units.of(torch.Size((1024, 1024)), 0) for _ in range(20)]
    assert [small.count(unit) for unit in sorted(set(small))] == [BATCH_NUMEL >> 20, 4]
    large = [units.of(torch.Size((4096, 14336)), 0) for _ in range(3)]
    assert len(set(large)) == 3
    assert batch_size(torch.Size((8, 1024, 2048))) == 8
    assert units.of(torch.Size((2048, 1024)), 0) == units.of(torch.Size((1024, 2048)), 0)
    assert units.of(torch.Size((2048, 1024)), 0) != units.of(torch.Size((1024, 2048)), 1)


# The engine.


def engine_of(**changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Muon", "params": {"lr": 0.05, "muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {"offload_optimizer": {"device": "cpu", **changes}},
    }
    return twinflow.initialize(model=gpt(), config=config)[0]


def test_the_config_and_checkpoints(tmp_path: Path) -> None:
    straight = engine_of()
    first, second = straight.optimizer.param_groups
    assert (first["use_muon"], first["lr"], second["lr"]) == (True, 0.02, 1e-3)
    assert second["betas"] == (0.9, 0.95)
    assert second["weight_decay"] == 0.0  # DeepSpeed's default
    run_engine(straight, range(4))
    stopped = engine_of()
    run_engine(stopped, range(2))
    stopped.save_checkpoint(tmp_path)
    stopped.destroy()
    resumed = engine_of(ratio=0.4)
    resumed.load_checkpoint(tmp_path)
    run_engine(resumed, range(2, 4))
    assert_same(snapshot(straight.module, straight.optimizer), snapshot(resumed.module, resumed.optimizer))
    for engine in (straight, resumed):
        engine.destroy()


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, (0.02, 3e-4)),
        ({"lr": 0.1}, (0.1, 0.1)),
        ({"muon_lr": 0.1}, (0.1, 3e-4)),
        ({"adam_lr": 0.1}, (0.02, 0.1)),
        ({"lr": 0.1, "adam_lr": 0.2}, (0.1, 0.2)),
    ],
)
def test_rates_and_other_defaults_of_a_config_are_those_of_deepspeed(
    params: dict[str, float], rates: tuple[float, float]
) -> None:
    optimizer = {"type": "Muon", "params": params}
    engine = twinflow.initialize(model=gpt(), config={"train_batch_size": 2, "optimizer": optimizer})[0]
    groups = engine.optimizer.param_groups
    assert tuple(group["lr"] for group in groups) == rates
    assert [(group["betas"], group["eps"], group["momentum"]) for group in groups] == [((0.9, 0.95), 1e-10, 0.95)] * 2
    engine.destroy()


def test_schedules_change_the_rates_and_momenta_of_both_kinds() -> None:
    model = gpt()
    with closing(twin(model, **OPTIONS)) as optimizer:
        first, second = optimizer.param_groups
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(model, optimizer, [0])
        schedule.step()
        assert (first["lr"], second["lr"]) == (0.01, 5e-4)
        OneCycle(optimizer, 0.1, 0.2, cycle_min_mom=0.5, cycle_max_mom=0.75)
        assert (first["momentum"], second["betas"][0]) == (0.5, 0.5)
        assert first["betas"] == (0.9, 0.999)


def test_the_planner_streams_matrices() -> None:
    """With all state on the host, the GPU updates the matrices, and their products take time."""
    model = gpt_cost("gpt", 50304, 1024, num_layers=24, hidden=2048, num_heads=16)
    run = Run(model, batch=4, tokens=1024, matrix_steps=5)
    plain = replace(run, matrix_steps=0)
    rates = rates_of(Machine(GPUS["h200"], Host(135 * GB, 16, 150e9)))
    timing = timing_of(run, rates)
    items = items_of(run, timing)
    assert {item.place for item in items} == {"host", "streamed"}
    assert run.size.host < plain.size.host
    placed = placed_at(run, 1.0)
    assert placed.host == run.own_root
    assert placed.host + placed.streamed == run.own_numel
    memory = Memory(int(60e9), int(100e9))
    none = replace(placed, streamed=0, resident=run.own_numel)
    more = bytes_of(run, none, memory).gpu["staging"] - bytes_of(plain, none, memory).gpu["staging"]
    assert more == 4 * bucket_numel(run) + 9 * 2048 * 4 * 2048  # an update needs temporary tensors
    times = [
        predict(items_of(one, timing), timing, rates, "fp32", ClipDecision(clips=False)).step_s for one in (run, plain)
    ]
    flops = sum(run.update_flops(numel) for numel in run.trained_blocks)
    assert times[0] >= timing.gpu_s + flops / rates.flops
    choice = choose(items, timing, rates, "fp32", ClipDecision(clips=True), Memory(int(60e9), int(100e9)))
    assert "host" not in {p for p, item in zip(choice.places, items, strict=True) if item.products}


# Rows of matrices (ZeRO stage 3).


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 5, 8, 21])
def test_rows_are_those_of_torch(num_rows: int, world: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(world)]
    found = [rows_of(num_rows, rank, world) for rank in range(world)]
    assert [len(rows) for rows in found] == chunks + [0] * (world - len(chunks))
    assert [i for rows in found for i in rows] == list(range(num_rows))


def test_owners_have_about_equal_work() -> None:
    shapes = [torch.Size(s) for s in ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096))]
    assert owners_of(shapes, 2) == [1, 1, 1, 1, 0]


def test_a_matrix_needs_rows_on_every_rank() -> None:
    param = Param(0, "few", nn.Parameter(torch.zeros(5, 8)), 0, unit=0)
    check_rows([param], 3)
    with pytest.raises(ValueError, match=r"Muon for few, a matrix with 5 rows, cannot be used with .* 4 ranks"):
        check_rows([param], 4)


def test_exchanges_run_in_the_order_of_their_turns() -> None:
    exchange, order = RowExchange(alone()), []
    first, second = exchange.take_turn(), exchange.take_turn()
    rows = [torch.ones(2, 3)]

    def run(turn: int) -> None:
        exchange.orthogonalise(
            turn, rows, [torch.Size((2, 3))], lambda whole: order.append((turn, whole[0].sum().item()))
        )

    later = threading.Thread(target=run, args=(second,))
    later.start()
    later.join(0.05)
    assert not order
    run(first)
    later.join()
    assert order == [(first, 6.0), (second, 6.0)]
    exchange.give_up_when(lambda: True)
    with pytest.raises(RuntimeError, match="A matrix was not orthogonalised"):
        run(exchange.take_turn() + 1)
