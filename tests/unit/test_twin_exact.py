# SPDX-License-Identifier: Apache-2.0
"""TwinOptimizer is exact: the synchronous algorithm bit for bit, whatever runs beside what; and plain PyTorch's."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from support import cell_name, pairwise
from torch import Tensor, nn
from twin_support import (
    HOSTS,
    MAX_NORM,
    RULE_OPTIONS,
    Branchy,
    Synchronous,
    assert_same,
    branchy_loss,
    gpt,
    is_loud,
    loss_of,
    matrix_but,
    our_threads,
    quick_torch,
    restart,
    snapshot,
    train,
    twin,
    used_at,
    weights,
)

from twinflow.device import Event
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.optim.loss_scale import LossScale, dynamic, static
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES
from twinflow.rules.formats import split

NO_SPECULATION = {"shadow_bytes": 0}
# Keys' biases have no gradient but rounding noise: a larger eps keeps Adam from making steps of it.
ADAMW = {"lr": 1e-3, "eps": 1e-5}
Snapshot = dict[str, Tensor]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


def run(rule: str, states: str, steps: int, nan_step: int, resume_at: int = 0, **options: Any) -> Snapshot:
    """Train with a TwinOptimizer; everything there is at the end."""
    options = {"rule": rule, "states": states, "max_grad_norm": MAX_NORM, **RULE_OPTIONS[rule], **options}
    model = gpt()
    optimizer = twin(model, **options)
    if resume_at:
        train(model, optimizer, range(resume_at), nan_step)
        model, optimizer = restart(model, optimizer, lambda model: twin(model, **options))
    train(model, optimizer, range(resume_at, steps), nan_step)
    result = snapshot(model, optimizer)
    assert optimizer.metrics()["skipped_steps"] == (0 <= nan_step < steps)
    assert optimizer.num_steps == steps
    optimizer.close()
    return result


@lru_cache
def truth(rule: str, states: str, steps: int, nan_step: int) -> Snapshot:
    """Weights of a synchronous host optimizer; its fp32 states under the names of a TwinOptimizer's."""
    model = gpt()
    optimizer = Synchronous(model.parameters(), rule, states=states, **RULE_OPTIONS[rule])
    train(model, optimizer, range(steps), nan_step)
    found = weights(model)
    for name, param in model.named_parameters():
        for key, value in optimizer.host.state[param].items() if states == "fp32" else ():
            found[f"{key} of {name}"] = torch.as_tensor(value)
    return found


@lru_cache
def plain(rule: str, states: str, steps: int, nan_step: int) -> Snapshot:
    return run(rule, states, steps, nan_step, shadow_bytes=0)


def check(result: Snapshot, *cell: Any) -> None:
    expected = truth(*cell)
    assert_same({name: result[name] for name in expected}, expected, "against the synchronous truth:")
    assert_same(result, plain(*cell), "against no overlap:")


VARIANTS: dict[str, dict[str, Any]] = {
    "no overlap": NO_SPECULATION,
    "early": {"early": True},
    "early, no speculation": {"early": True, **NO_SPECULATION},
    "early, few speculative stores, one slot": {"early": True, "shadow_bytes": 150_000, "num_slots": 1},
    "held on the host": {"early": True, "hold": "host"},
    "slow compute": {"early": True, "delay": "compute", "delay_s": 0.0003},
    "slow out": {"early": True, "delay": "out"},
    "slow in": {"early": True, "delay": "in"},
    "resumed": {"early": True, "resume_at": 18},
}


@pytest.mark.parametrize("variant", matrix_but(("early", "resumed"), VARIANTS))
def test_fifty_steps_have_the_same_bits(variant: str) -> None:
    cell = ("adamw", "fp32", 50, 17)
    check(run(*cell, **VARIANTS[variant]), *cell)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("early", "resumed")])
def test_twelve_steps_have_the_same_bits(variant: str) -> None:
    cell = ("adamw", "fp32", 12, 8)
    check(run(*cell, **VARIANTS[variant]), *cell)


AXES: tuple[Any, ...] = (
    list(RULES),
    ("fp32", "bf16", "int8"),
    ("no overlap", "early", "early, no speculation"),
    ("device", "host"),
    ("", "compute", "out", "in"),
    (0, 4),
)


def check_combination(rule: str, states: str, variant: str, hold: str, delay: str, resume_at: int) -> None:
    cell = (rule, states, 6, 3)
    check(run(*cell, resume_at, hold=hold, delay=delay, delay_s=0.0005, **VARIANTS[variant]), *cell)


@pytest.mark.parametrize("combination", pairwise(*AXES[:4], AXES[4][1:], AXES[5]), ids=cell_name)
def test_every_rule_and_format_has_the_same_bits(combination: tuple[Any, ...]) -> None:
    rule, states, *rest = combination
    check_combination(rule if states in RULES[rule].formats else "adamw", states, *rest)


@pytest.mark.matrix
@pytest.mark.parametrize("combination", [c for c in product(*AXES) if c[1] in RULES[c[0]].formats], ids=cell_name)
def test_every_combination_has_the_same_bits(combination: tuple[Any, ...]) -> None:
    check_combination(*combination)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("early", [False, True])
def test_an_event_that_comes_just_after_a_look_is_not_missed(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """Events tell nobody that they have come: nobody may go to sleep for good while one is to come."""
    fire = Event.fire
    pauses = random.Random(0)

    def fire_late(self: Event, error: BaseException | None) -> None:
        time.sleep(pauses.choice((0.0, 1e-5, 1e-4, 1e-3)))
        fire(self, error)

    monkeypatch.setattr(Event, "fire", fire_late)
    cell = ("adamw", "fp32", 6, 3)
    check(run(*cell, early=early, delay="out"), *cell)


# A step that is not finite.


@pytest.mark.parametrize(
    ("how", "states", "early", "hold"),
    pairwise(("one element", "everything", "infinite"), ("fp32", "bf16", "int8"), (False, True), ("device", "host")),
)
def test_a_step_that_is_not_finite_touches_nothing(how: str, states: str, early: bool, hold: str) -> None:
    model = gpt()
    with closing(twin(model, lr=1e-2, states=states, skip_nonfinite=True, early=early, hold=hold)) as optimizer:
        train(model, optimizer, range(3))
        before = snapshot(model, optimizer)
        if how == "one element":
            train(model, optimizer, [3], nan_step=3)
        else:
            (loss_of(model, 3) * (math.nan if how == "everything" else math.inf)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = snapshot(model, optimizer)
        assert_same(before, after)
        assert {int(value) for name, value in after.items() if name.startswith("step ")} == {3}
        assert (optimizer.num_steps, optimizer.num_skipped) == (4, 1)
        assert not math.isfinite(optimizer.grad_norm)
        train(model, optimizer, range(4, 6))
        assert all(torch.isfinite(value).all() for value in snapshot(model, optimizer).values())
        assert optimizer.metrics()["skipped_steps"] == 1


@pytest.mark.parametrize("scale", [None, dynamic(4, 1000, 1, 1.0)], ids=["no scale", "scaled"])
def test_an_overflow_is_one_of_scaled_gradients(scale: LossScale | None) -> None:
    model = gpt()
    with closing(twin(model, skip_nonfinite=True, loss_scale=scale)) as optimizer:
        assert not optimizer.overflow
        train(model, optimizer, [0], nan_step=0)
        assert optimizer.overflow == (scale is not None)
        train(model, optimizer, [1])
        assert not optimizer.overflow


def test_without_a_clip_decision_a_nan_goes_through_as_in_torch() -> None:
    model = gpt()
    with closing(twin(model, early=True)) as optimizer:
        train(model, optimizer, [0], nan_step=0)
        optimizer.wait()
        assert optimizer.num_skipped == 0
        assert model.blocks[1].mlp.up.weight[3].isnan().all()
        assert model.blocks[0].mlp.up.weight.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("early", [False, True])
def test_clipping_a_norm_that_is_not_finite_is_torchs(early: bool, bad: float) -> None:
    """One NaN makes every gradient NaN; an infinite one makes the others zero."""
    a, b = gpt(), gpt()
    options = {**ADAMW, "weight_decay": 0.1}
    with closing(twin(a, early=early, max_grad_norm=MAX_NORM, skip_nonfinite=False, **options)) as ours:
        theirs = Clipping(torch.optim.AdamW(b.parameters(), **options))
        for model, optimizer in ((a, ours), (b, theirs)):
            train(model, optimizer, [0])
            handle = model.blocks[1].mlp.up.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(3), bad))
            train(model, optimizer, [1])
            handle.remove()
        ours.wait()
        assert ours.num_skipped == 0
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6, equal_nan=True, msg=name)
            assert p.isnan().all() or math.isinf(bad)
        assert a.blocks[1].mlp.up.weight[3].isnan().all()


# What became of updates ahead of the clip decision.


def decision_counts(optimizer: Any) -> tuple[int, int, int]:
    metrics = optimizer.metrics()
    return metrics["gate_speculated"], metrics["gate_dropped"], metrics["gate_held"]


def test_updates_ahead_of_the_decision_are_counted() -> None:
    """Slow compute: there is time to run ahead of the norm, which comes last. Stores may take some steps to come."""
    model = gpt()
    options = {"early": True, "max_grad_norm": MAX_NORM, "delay": "compute", "delay_s": 0.0005}
    quiet, loud = (0, 3, 4, 5), (1, 2, 6, 7, 11, 12)
    with closing(twin(model, **options)) as optimizer:
        num_buckets, ahead = len(optimizer.runtime.buckets), []
        for step in quiet + loud + quiet * 2:
            train(model, optimizer, [step])
            speculated, dropped, held = decision_counts(optimizer)
            assert speculated + held == num_buckets
            assert dropped == (speculated if is_loud(step) else 0)
            clip = min(1.0, MAX_NORM / (optimizer.grad_norm + 1e-6))
            assert optimizer.metrics()["clip_factor"] == clip
            assert (clip < 1) == is_loud(step)
            ahead.append(speculated)
        assert ahead[3] > 0  # no step was clipped
        assert ahead[4] > 0  # this one is: the work is lost
        assert ahead[8:10] == [0, 0]  # most recent steps were
        assert ahead[-1] > 0  # and now they are not
        assert optimizer.metrics()["shadow_bytes"] > 0


@pytest.mark.parametrize("hold", ["device", "host"])
def test_a_skipped_step_drops_what_ran_ahead(hold: str) -> None:
    model = gpt()
    options = {"early": True, "skip_nonfinite": True, "hold": hold, "delay": "compute", "delay_s": 0.002}
    with closing(twin(model, **options)) as optimizer:
        num_buckets = len(optimizer.runtime.buckets)
        for step in range(4):
            train(model, optimizer, [step], nan_step=3)
            optimizer.wait()
            speculated, dropped, held = decision_counts(optimizer)
            assert speculated > 0
            assert speculated + held == num_buckets
            assert dropped == (speculated if step == 3 else 0)
        assert optimizer.num_skipped == 1


@pytest.mark.parametrize("options", [{"early": True, **NO_SPECULATION}, {}])
def test_without_speculative_stores_or_permission_everything_is_held(options: dict[str, Any]) -> None:
    model = gpt()
    with closing(twin(model, max_grad_norm=MAX_NORM, **options)) as optimizer:
        train(model, optimizer, [0])
        assert decision_counts(optimizer) == (0, 0, len(optimizer.runtime.buckets))
        assert optimizer.metrics()["shadow_bytes"] == 0


def test_without_limits_nothing_is_held() -> None:
    model = gpt()
    with closing(twin(model, early=True)) as optimizer:
        train(model, optimizer, [0, 1])
        assert decision_counts(optimizer) == (0, 0, 0)
        metrics = optimizer.metrics()
        padded = sum(bucket.plan.numel for bucket in optimizer.runtime.buckets)
        numel = sum(p.numel() for p in model.parameters())
        assert metrics["bytes_out"] == 4 * (numel + padded)  # the first step's gradients travel one by one
        optimizer.wait()
        assert optimizer.metrics()["bytes_back"] == 2 * 4 * numel


# Plain PyTorch.

TORCH: list[tuple[str, Any, dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 1e-3, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
]


class Clipping:
    """A torch optimizer that clips in `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        self.optimizer.step()


def assert_close(a: nn.Module, b: nn.Module, atol: float = 1e-6) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(
            x.float(), y.float(), rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("rule", "theirs", "options"), TORCH)
@pytest.mark.parametrize("step", matrix_but([3, 6], [0, 3, 6]))
def test_one_step_from_equal_state_is_torchs(rule: str, theirs: Any, options: dict[str, Any], step: int) -> None:
    """At step 6 clipped, at 0 and 3 not; from torch's own state of the steps before."""
    a, b = gpt(), gpt()
    their_optimizer = theirs(b.parameters(), **options)
    train(b, Clipping(their_optimizer), range(step))
    a.load_state_dict(b.state_dict())
    with closing(twin(a, rule=rule, max_grad_norm=MAX_NORM, early=True, **options)) as optimizer:
        saved = optimizer.state_dict()
        for name, param in b.named_parameters():
            entry = {k: v for k, v in their_optimizer.state[param].items() if v is not None}
            if step:
                saved["state"][name] = {**entry, "step": step, "master": param.detach().clone()}
        optimizer.load_state_dict(saved)
        train(a, optimizer, [step])
        train(b, Clipping(their_optimizer), [step])
        optimizer.wait()
        assert_close(a, b)


@pytest.mark.parametrize("early", [False, True])
def test_fifty_losses_are_torchs(early: bool) -> None:
    a, b = gpt(), gpt()
    options = {"lr": 1e-3, "weight_decay": 0.1}
    with closing(twin(a, max_grad_norm=MAX_NORM, early=early, **options)) as optimizer:
        ours = train(a, optimizer, range(50))
        theirs = train(b, Clipping(torch.optim.AdamW(b.parameters(), **options)), range(50))
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-5)


class Elementwise(nn.Module):
    """Weights in half precision, and no products of matrices in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(300,), (40, 50), (7, 3)]
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes)
        self.turned = nn.Parameter(torch.randn(9, 31, generator=generator).to(dtype).t())  # not contiguous
        self.none = nn.Parameter(torch.empty(0, dtype=dtype))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        goals = (torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters())
        losses = [(p - goal).float().square().sum() for p, goal in zip(self.parameters(), goals, strict=True)]
        return sum(losses) * (0.04 if is_loud(step) else 0.004)


@pytest.mark.parametrize(
    ("dtype", "states", "early"), pairwise((torch.bfloat16, torch.float16), ("fp32", "bf16", "int8"), (False, True))
)
def test_half_precision_is_a_master_and_torch(dtype: torch.dtype, states: str, early: bool) -> None:
    """Clipped and unclipped steps against an fp32 master under torch.optim.AdamW, its weights rounded."""
    model, reference = Elementwise(dtype), Elementwise(dtype)
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    options = {"lr": 1e-2, "states": states, "max_grad_norm": MAX_NORM, "early": early, "bucket_numel": 512}
    with closing(twin(model, **options)) as ours:
        clips = set()
        for step in range(8):
            model(step).backward()
            ours.step()
            ours.zero_grad()
            clips.add(ours.metrics()["clip_factor"] < 1)
            reference(step).backward()
            for p, master in zip(reference.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
            theirs.step()
            with torch.no_grad():
                for p, master in zip(reference.parameters(), masters, strict=True):
                    p.copy_(master)
            if step == 0 or states == "fp32":
                state = ours.state_dict()["state"]
                named = zip((name for name, _ in model.named_parameters()), masters, strict=True)
                for name, master in named:
                    if master.numel():
                        torch.testing.assert_close(state[name]["master"], master.detach(), rtol=0, atol=1e-6)
                        weight, master = model.get_parameter(name).detach(), state[name]["master"]
                        upper = split(master.reshape(-1))[0].view(weight.shape)  # ties go away from zero
                        assert weight.equal(upper if dtype == torch.bfloat16 else master.to(dtype))
        assert clips == {True, False}


class Slope(nn.Module):
    """bf16 weights whose gradients are numbers of our choice, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in ((700,), (40, 50), (9,))
        )

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).float().sum() for p, g in zip(self.layers, gradients, strict=True))

    def gradients(self, step: int, ties: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        found = [torch.randn(p.shape, generator=generator) for p in self.layers]
        return [(g.sign() if ties else g).bfloat16() for g in found]


TIES = {"rule": "sgd", "lr": 2.0**-8, "momentum": 0.0}  # half a unit of a bf16 weight in [1, 2) for a gradient of 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rule", [*RULES, "ties"])
def test_bf16_weights_are_half_of_their_masters(rule: str, early: bool) -> None:
    """With fp32 states: the masters that a host optimizer keeps whole, bit for bit; only their ties round otherwise."""
    options = TIES if rule == "ties" else {"rule": rule, **RULE_OPTIONS[rule]}
    model, reference = Slope(), Slope()
    theirs = HOSTS[options["rule"]](reference.parameters(), **{k: v for k, v in options.items() if k != "rule"})
    num_ties = 0
    with closing(twin(model, **options, early=early, max_grad_norm=1e6, bucket_numel=512)) as ours:
        for step in range(4):
            for m in (model, reference):
                m(m.gradients(step, rule == "ties")).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            state = ours.state_dict()["state"]
            for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                master = theirs.state[other]["master"]
                assert torch.equal(state[name]["master"], master)
                assert torch.equal(weight, split(master.reshape(-1))[0].view(weight.shape))
                num_ties += int((weight != other).sum())
        assert num_ties or rule != "ties"
        assert ours.runtime.executor.counters.num_weight_slots == 0
        num_states = 0 if rule == "ties" else sum(name is not None for name in RULES[rule].states)
        for bucket in ours.runtime.buckets:
            assert ours.runtime.speculative_stores.nbytes(bucket) == bucket.plan.numel * (4 + 4 * num_states)


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_of_weights_that_were_rounded_to_even_are_loaded_whole(model_first: bool) -> None:
    """A checkpoint of masters that were not split: at a tie the weight is the other neighbour, and still fits."""
    model = Slope()
    with closing(twin(model, **TIES)) as optimizer:
        model(model.gradients(0, ties=True)).backward()
        optimizer.step()
        saved, weights = optimizer.state_dict(), model.state_dict()
    weights = {name: saved["state"][name]["master"].bfloat16() for name in weights}
    assert any(not torch.equal(weight, model.get_parameter(name)) for name, weight in weights.items())
    model = Slope()
    if model_first:
        model.load_state_dict(weights)
    with closing(twin(model, **TIES)) as optimizer:
        if not model_first:
            model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        for name, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["master"], saved["state"][name]["master"])
        model([torch.zeros_like(g) for g in model.gradients(1, ties=True)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["master"], saved["state"][name]["master"])
            upper = split(entry["master"].reshape(-1))[0].view(entry["master"].shape)
            assert torch.equal(model.get_parameter(name), upper)


# Loss scale.


def scaled_steps(
    loss_scale: Any, steps: int, early: bool, bad: tuple[int, ...] = ()
) -> tuple[Snapshot, list[float], int]:
    model, scales = gpt(), []
    options = {"lr": 1e-2, "max_grad_norm": MAX_NORM, "loss_scale": loss_scale, "early": early}
    with closing(twin(model, **options)) as optimizer:
        for step in range(steps):
            scales.append(optimizer.loss_scale)
            loss = loss_of(model, step)
            optimizer.backward(loss * math.inf if step in bad else loss)
            optimizer.step()
            optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
        result = snapshot(model, optimizer), scales, optimizer.num_skipped
    return result


@pytest.mark.parametrize("early", [False, True])
def test_a_power_of_two_changes_no_bit(early: bool) -> None:
    expected = scaled_steps(None, 6, early)[0]
    for loss_scale in (static(1024.0), dynamic(initial_power=16, window=2)):
        result, scales, num_skipped = scaled_steps(loss_scale, 6, early)
        assert_same(result, expected)
        assert num_skipped == 0
        assert scales[-1] == (1024.0 if not loss_scale.dynamic else 2.0**18)


@pytest.mark.parametrize("early", [False, True])
def test_overflows_are_skipped_and_halve_the_scale(early: bool) -> None:
    result, scales, num_skipped = scaled_steps(dynamic(initial_power=4, hysteresis=2), 8, early, bad=(1, 3, 4))
    assert scales == [16, 16, 16, 16, 8, 4, 4, 4, 4]  # the first is forgiven
    assert num_skipped == 3
    model = gpt()
    optimizer = Synchronous(model.parameters(), lr=1e-2)
    train(model, optimizer, [0, 2, 5, 6, 7])
    expected = weights(model)
    assert_same({name: result[name] for name in expected}, expected)


def test_a_scale_at_its_minimum_raises() -> None:
    with pytest.raises(FloatingPointError, match="smallest loss scale"):
        scaled_steps(dynamic(initial_power=0, hysteresis=1), 3, True, bad=(0, 1))


def test_a_scale_that_really_overflows() -> None:
    """fp32 gradients beyond 3e38 become infinite: the step is skipped, the next scale fits."""
    _, scales, num_skipped = scaled_steps(dynamic(initial_power=127, hysteresis=1, window=1000), 6, True)
    assert num_skipped > 0
    assert scales[-1] == 2.0 ** (127 - num_skipped)


# A torch.optim.Optimizer.


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.5, "lr": 1e-3},
        {"params": [p for p in named.values() if p.dim() == 1]},
    ]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)]
    ),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 3e-3], total_steps=12),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("early", [False, True])
def test_groups_and_schedulers_follow_torch(scheduler: str, early: bool) -> None:
    """OneCycleLR changes betas too."""
    a, b = gpt(), gpt()
    options = {**ADAMW, "lr": 2e-3, "weight_decay": 0.0}
    with closing(twin(a, param_groups=decay_groups(a), early=early, **options)) as ours:
        theirs = torch.optim.AdamW(decay_groups(b), **options)
        schedulers = [SCHEDULERS[scheduler](optimizer) for optimizer in (ours, theirs)]
        for step in range(8):
            for model, optimizer, moves in zip((a, b), (ours, theirs), schedulers, strict=True):
                train(model, optimizer, [step])
                if moves is not None:
                    moves.step()
        ours.wait()
        assert_close(a, b, atol=3e-6)
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
        assert [g["betas"] for g in ours.param_groups] == [g["betas"] for g in theirs.param_groups]


@pytest.mark.parametrize("early", [True, "auto"])
def test_gradients_of_another_models_loss_are_dropped(early: Any) -> None:
    """A GAN whose optimizers call zero_grad() before backward: the painter's loss adds to used gradients of the judge.

    In the first steps these are in `.grad`, and an update from their sum could not be undone.
    """

    def losses(build: Callable[[nn.Module], Any]) -> list[float]:
        torch.manual_seed(0)
        painter, judge = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        painter_optimizer, judge_optimizer = build(painter), build(judge)
        found = []
        for _ in range(8):
            fake = painter(torch.randn(4, 4))
            judge_optimizer.zero_grad()
            loss = judge(fake.detach()).square().mean() - judge(torch.randn(4, 4)).mean()
            loss.backward()
            judge_optimizer.step()
            painter_optimizer.zero_grad()
            painter_loss = (judge(fake) - 1.0).square().mean()
            painter_loss.backward()
            painter_optimizer.step()
            found += [loss.item(), painter_loss.item()]
        for optimizer in (painter_optimizer, judge_optimizer):
            if isinstance(optimizer, TwinOptimizer):
                optimizer.close()
        return found

    wanted = losses(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    ours = losses(lambda model: TwinOptimizer(model, "adamw", lr=1e-2, early=early))
    assert ours == pytest.approx(wanted, abs=1e-5)


def test_a_group_that_is_added_later_is_refused() -> None:
    """Its parameters would have no bucket. What there was is trained as before."""
    model = gpt()
    before = weights(model)
    with closing(twin(model, param_groups=[{"params": model.blocks[0].parameters()}])) as optimizer:
        with pytest.raises(
            ValueError, match=r"takes all its parameters at the start.*new optimizer with all groups.*can be frozen"
        ):
            optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, [0])
        optimizer.wait()
        assert all(value.equal(before[name]) != ("blocks.0." in name) for name, value in weights(model).items())


def test_momentum_that_comes_later_is_refused() -> None:
    """As OneCycleLR may do: without momentum at the start there is no buffer for it. Back at zero, it goes on."""
    model, other = gpt(), gpt()
    with closing(twin(model, rule="sgd", lr=0.1)) as optimizer:
        train(model, optimizer, [0])
        optimizer.param_groups[0]["momentum"] = 0.9
        loss_of(model, 1).backward()
        with pytest.raises(ValueError, match=r"momentum is 0\.9, but must be 0\.0.*Build a new optimizer"):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.step()
        optimizer.wait()
        train(other, torch.optim.SGD(other.parameters(), lr=0.1), [0, 1])
        assert_close(model, other)


def test_saved_groups_win_over_those_of_the_new_optimizer() -> None:
    model = gpt()
    optimizer = twin(model, param_groups=decay_groups(model), lr=2e-3)
    optimizer.param_groups[0]["lr"] = 5e-4
    train(model, optimizer, [0])
    model, optimizer = restart(model, optimizer, lambda model: twin(model, param_groups=decay_groups(model), lr=1.0))
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 2e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 1e-2]
    optimizer.close()


def test_only_the_parameters_of_the_groups_are_trained() -> None:
    model = gpt()
    before = weights(model)
    groups = [{"params": list(model.blocks[1].parameters())}]
    with closing(twin(model, param_groups=groups, early=True)) as optimizer:
        train(model, optimizer, range(2))
        optimizer.wait()
    changed = {name for name, value in weights(model).items() if not value.equal(before[name])}
    assert changed == {name for name in before if "blocks.1." in name}


@pytest.mark.parametrize("early", [False, True])
def test_frozen_parameters_stay(early: bool) -> None:
    a, b = gpt(), gpt()
    for model in (a, b):
        model.token_embedding.weight.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    before = weights(a)
    with closing(twin(a, early=early, **ADAMW)) as optimizer:
        train(a, optimizer, range(4))
        train(b, torch.optim.AdamW([p for p in b.parameters() if p.requires_grad], **ADAMW), range(4))
        optimizer.wait()
        assert_close(a, b)
        assert not any(name.startswith("blocks.0.") for name in optimizer.state_dict()["state"])
    for name, value in weights(a).items():
        assert value.equal(before[name]) == ("blocks.0." in name or "token_embedding" in name), name


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_unused_parameters_count_their_own_steps(early: bool, max_grad_norm: float | None) -> None:
    a, b = Branchy(), Branchy()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    options = {**ADAMW, "max_grad_norm": max_grad_norm, "early": early, "bucket_numel": 512}
    with closing(twin(a, **options)) as ours:
        for step in range(13):
            for model, optimizer in ((a, ours), (b, theirs)):
                branchy_loss(model, step).backward()
                if optimizer is theirs and max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(b.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        saved = ours.state_dict()["state"]
        assert_close(a, b)
        steps = {name: int(theirs.state[p]["step"]) for name, p in b.named_parameters() if p in theirs.state}
        assert {name: entry["step"] for name, entry in saved.items()} == steps
        for i in range(3):
            assert steps[f"branches.{i}.weight"] == sum(i in used_at(step) for step in range(13))
        assert "never" not in saved


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("wait", [True, False])
def test_a_model_that_is_loaded_between_steps_is_honoured(early: bool, wait: bool) -> None:
    """Also while weights of the step before are still on their way."""
    a, b, other = gpt(), gpt(), gpt(seed=5).state_dict()
    theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
    with closing(twin(a, early=early, delay="in", **ADAMW)) as ours:
        for model, optimizer in ((a, ours), (b, theirs)):
            train(model, optimizer, range(3))
            if wait and optimizer is ours:
                ours.wait()
            model.load_state_dict(other)
            train(model, optimizer, range(3, 6))
        ours.wait()
        assert_close(a, b)


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_an_edit_in_place_is_honoured(states: str) -> None:
    """Pruning, say: after `wait()` weights may be written to."""
    a, b = gpt(), gpt()
    options = {"lr": 1e-3, "states": states}
    theirs = Synchronous(b.parameters(), max_norm=None, **options)
    with closing(twin(a, early=True, **options)) as ours:
        for step in range(5):
            for model, optimizer in ((a, ours), (b, theirs)):
                train(model, optimizer, [step])
                if optimizer is ours:
                    ours.wait()
                with torch.no_grad():
                    model.blocks[1].mlp.up.weight[:, ::2] = 0
                    model.head.weight.mul_(0.9)
        ours.wait()
        assert_same(weights(a), weights(b))


@pytest.mark.parametrize("early", [False, True])
def test_step_takes_a_closure(early: bool) -> None:
    a, b = gpt(), gpt()
    with closing(twin(a, early=early, **ADAMW)) as ours:
        theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
        for step in range(4):
            losses = []
            for model, optimizer in ((a, ours), (b, theirs)):

                def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure).item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        ours.wait()
        assert_close(a, b)


@pytest.mark.parametrize("early", [False, True])
def test_the_grad_norm_is_torchs(early: bool) -> None:
    model, copy = gpt(), gpt()
    with closing(twin(model, early=early, max_grad_norm=MAX_NORM)) as optimizer:
        assert optimizer.grad_norm is None
        for step in range(3):
            copy.load_state_dict(model.state_dict())
            copy.zero_grad()
            loss_of(copy, step).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in copy.parameters()]).item()
            train(model, optimizer, [step])
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
            assert optimizer.metrics()["grad_norm"] == optimizer.grad_norm


class Rows(nn.Module):
    """Two blocks whose buckets have one size (256) and other gaps: a gradient of the one lies in a gap of the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((256,), (100, 100))
        self.blocks = nn.ModuleList(nn.ParameterList(nn.Parameter(torch.ones(n)) for n in block) for block in sizes)

    def forward(self, factor: float) -> Tensor:
        first, second = ([p.sum() for p in block] for block in self.blocks)
        return 100 * factor * sum(first) + factor * sum(second)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e9}, {"max_grad_norm": 1e9, "hold": "host"}])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_lay_in_a_buffer_before_is_not_in_the_norm(options: dict[str, Any], parts: int) -> None:
    model = Rows()
    options = {"early": True, "bucket_numel": 256, "flat_bytes": 1024, "accumulation_steps": parts, **options}
    with closing(twin(model, **options)) as optimizer:
        for step in range(4):
            for _ in range(parts):
                model(step + 1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            norm = parts * (step + 1) * math.sqrt(256 * 100**2 + 200)
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-9)


def test_a_step_without_gradients_does_nothing() -> None:
    model = gpt()
    before = weights(model)
    with closing(twin(model, early=True)) as optimizer:
        assert optimizer.step() is None
        assert optimizer.num_steps == 0
        assert optimizer.state_dict()["state"] == {}
        assert_same(before, weights(model))


def test_parameters_without_a_model() -> None:
    """As torch.optim takes them: `step` waits, since no forward can."""
    a, b = gpt(), gpt()
    named = list(a.named_parameters())
    groups = [{"params": [p for _, p in named[:5]], "lr": 5e-4}, {"params": [p for _, p in named[5:]]}]
    with closing(twin(groups, delay="in", **ADAMW)) as ours:
        theirs = torch.optim.AdamW(b.parameters(), **ADAMW)
        theirs.param_groups[0]["params"], rest = list(b.parameters())[:5], list(b.parameters())[5:]
        theirs.param_groups[0]["lr"] = 5e-4
        theirs.add_param_group({"params": rest, "lr": 1e-3})
        for step in range(3):
            train(a, ours, [step])
            train(b, theirs, [step])
            assert_close(a, b)
        assert list(ours.state_dict()["state"])[5] == "params[1][0]"


# Saving.


def cloned(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("when", [0, 1])
def test_an_optimizer_with_a_past_takes_over_a_saved_state(when: int) -> None:
    """Going back to an earlier state, also to the very first, leaves nothing of what came after."""
    model = gpt()
    with closing(twin(model, rule="adagrad", initial_accumulator_value=0.1, delay="out")) as optimizer:
        train(model, optimizer, range(when))
        start, saved = cloned(model.state_dict()), cloned(optimizer.state_dict())
        train(model, optimizer, range(when, when + 3))
        first = snapshot(model, optimizer)
        model.load_state_dict(start)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(when, when + 3))
        assert_same(snapshot(model, optimizer), first)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_half_precision_resumes_exactly(states: str, model_first: bool) -> None:
    """With parameters that never had a gradient, and the model loaded before or after the optimizer is built."""

    def some_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def make(model: nn.Module) -> Any:
        return twin(model, lr=1e-2, states=states, early=True, bucket_numel=512)

    results = []
    for resumes in (False, True):
        model = Elementwise(torch.bfloat16)
        optimizer = make(model)
        some_steps(model, optimizer, range(4))
        if resumes:
            new = lambda: Elementwise(torch.bfloat16).apply(zero)  # noqa: E731
            model, optimizer = restart(model, optimizer, make, new, model_first)
        some_steps(model, optimizer, range(4, 8))
        results.append(snapshot(model, optimizer))
        optimizer.close()
    assert_same(*results)


def zero(module: nn.Module) -> None:
    for param in module.parameters():
        nn.init.zeros_(param)


# The end.


def num_hooks(model: nn.Module) -> int:
    dicts = [
        getattr(module, name)
        for module in model.modules()
        for name in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_backward_hooks")
    ]
    dicts += [param._post_accumulate_grad_hooks or {} for param in model.parameters()]
    return sum(map(len, dicts))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("early", [False, True])
def test_closing_leaves_nothing_behind(early: bool, steps: int) -> None:
    before = our_threads()
    a, b = gpt(), gpt()
    optimizer = twin(a, lr=1e-3, early=early, max_grad_norm=MAX_NORM, delay="in")
    assert num_hooks(a) > 0
    assert our_threads() > before
    train(a, optimizer, range(steps))
    optimizer.close()
    assert our_threads() <= before
    assert num_hooks(a) == 0
    b.load_state_dict(a.state_dict())
    for model in (a, b):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    assert_same(weights(a), weights(b))
    optimizer.close()  # again is fine


def test_a_step_after_the_end_is_refused() -> None:
    model = gpt()
    optimizer = twin(model, early=True)
    train(model, optimizer, [0])
    optimizer.close()
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="The optimizer cannot be used, because it is closed"):
        optimizer.step()
    assert not isinstance(model.head.weight.grad, TakenGradient)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": MAX_NORM}, {"accumulation_steps": 2}])
@pytest.mark.parametrize("delay", ["compute", "in"])
def test_closing_in_the_middle_of_a_step(options: dict[str, Any], delay: str) -> None:
    """It returns, and what is left is a plain model with whole tensors: torch trains it as any other."""
    before, a, b = our_threads(), gpt(), gpt()
    optimizer = twin(a, lr=1e-3, early=True, delay=delay, delay_s=0.001, **options)
    parts = options.get("accumulation_steps", 1)
    for step in range(2):
        for part in range(parts):
            loss_of(a, parts * step + part).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(a, 2 * parts).backward()
    assert all(isinstance(p.grad, TakenGradient) for p in a.parameters())
    optimizer.close()
    assert our_threads() <= before
    assert num_hooks(a) == 0
    assert all(p.grad is None for p in a.parameters())
    assert all(p.isfinite().all() for p in a.parameters())
    b.load_state_dict(a.state_dict())
    for model in (a, b):
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), range(3))
    assert_same(weights(a), weights(b))


def test_a_model_has_one_optimizer_at_a_time() -> None:
    """The second is refused and leaves nothing behind; the first goes on. After its end there may be another."""
    a, b = gpt(), gpt()
    first = twin(a, early=True, **ADAMW)
    hooks, threads = num_hooks(a), our_threads()
    for early in (False, True):
        with pytest.raises(ValueError, match=r"already has a TwinOptimizer.*close\(\)"):
            twin(a, early=early)
    gc.collect()
    assert our_threads() == threads
    assert num_hooks(a) == hooks
    train(a, first, range(2))
    saved = cloned(first.state_dict())
    first.close()
    with closing(twin(a, early=True, **ADAMW)) as second:
        second.load_state_dict(saved)
        train(a, second, range(2, 4))
        second.wait()
    train(b, torch.optim.AdamW(b.parameters(), **ADAMW), range(4))
    assert_close(a, b)
