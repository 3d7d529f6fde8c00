# SPDX-License-Identifier: Apache-2.0
"""TwinOptimizer with any torch.optim.Optimizer: what plain torch computes on fp32 copies, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from twin_support import (
    Branchy,
    assert_same,
    branchy_loss,
    gpt,
    loss_of,
    matrix_but,
    restart,
    train,
    twin,
    weights,
)

from twinflow import native
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.optim.twin import TwinOptimizer

STEPS = range(5)


class Odd(optim.Optimizer):
    """Everything an optimizer should not do: counts in its group, keeps and changes gradients, moves parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "num_calls": 0})
        self.scales = [1.0, 0.5]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["first"] = p.detach().clone()  # looks at the weights before the first step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_calls"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                last = state["last"]["grad"] if "last" in state else state.get("kept", torch.zeros_like(p))
                p.grad.mul_(self.scales[group["num_calls"] % 2])
                pull = (p.detach() - state["first"]) * 0.01
                p.data = p.data - group["lr"] * (p.grad + 0.9 * last + pull)
                state["kept"] = p.grad
                if group["num_calls"] == 3:
                    state["last"] = {"grad": p.grad.clone(), "names": ["nested", 1]}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rmsprop": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "radam": (optim.RAdam, {"lr": 1e-2}),
    "adamax": (optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1}),
    "adadelta": (optim.Adadelta, {}),
    "asgd": (optim.ASGD, {"t0": 2.0}),
    "rprop": (optim.Rprop, {}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "amsgrad": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "fused": (optim.AdamW, {"lr": 1e-2, "fused": True}),
    "foreach": (optim.AdamW, {"lr": 1e-2, "foreach": True, "capturable": False}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": False}),
    "adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "odd": (Odd, {"lr": 0.01}),
}


def plain(model: Any, optimizer: optim.Optimizer, steps: Iterable[int] = STEPS) -> dict[str, Tensor]:
    """Plain torch's way: weights and states after the steps."""
    train(model, optimizer, steps)
    found = weights(model)
    for name, p in model.named_parameters():
        found |= flat(f"{name} state", optimizer.state.get(p, {}))
    return found


def flat(prefix: str, value: Any) -> dict[str, Tensor]:
    """Tensors and numbers of a nested state, by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(f"{prefix}.{key}", item).items()}
    if isinstance(value, Tensor):
        return {prefix: value.detach().clone()}
    return {f"{prefix}={value!r}": torch.zeros(())}


def everything(model: nn.Module, optimizer: TwinOptimizer) -> dict[str, Tensor]:
    """The same of a TwinOptimizer."""
    found, saved = weights_when_there(model, optimizer), optimizer.state_dict()["state"]
    for name, _ in model.named_parameters():
        found |= flat(f"{name} state", saved.get(name, {}).get("state", {}))
    return found


def weights_when_there(model: nn.Module, optimizer: TwinOptimizer) -> dict[str, Tensor]:
    optimizer.wait()
    return weights(model)


@pytest.mark.parametrize(("case", "early"), [*((case, True) for case in CASES), ("odd", False), ("rmsprop", False)])
def test_like_plain_torch(case: str, early: bool) -> None:
    rule, options = CASES[case]
    model, reference = gpt(), gpt()
    with closing(twin(model, rule=rule, early=early, **options)) as optimizer:
        assert len(optimizer.runtime.buckets) > 5
        train(model, optimizer, STEPS)
        assert_same(everything(model, optimizer), plain(reference, rule(reference.parameters(), **options)))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_matrix_rule() -> None:
    """Muon takes matrices only: the others are left alone, as with plain torch."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.ndim == 2]

    model, reference, first = gpt(), gpt(), gpt()
    # On a CPU without bf16 products torch finds that out in the first one of a process, whose result then differs.
    plain(first, optim.Muon(matrices(first), ns_steps=3), [0])
    with closing(twin(model, rule=optim.Muon, param_groups=matrices(model), early=True, ns_steps=3)) as optimizer:
        train(model, optimizer, STEPS)
        assert_same(everything(model, optimizer), plain(reference, optim.Muon(matrices(reference), ns_steps=3)))


@pytest.mark.parametrize("case", ["rmsprop", "nesterov", "adafactor"])
@pytest.mark.parametrize("early", [False, True])
def test_clipping(case: str, early: bool) -> None:
    rule, options = CASES[case]
    model, reference = gpt(), gpt()
    host = rule(reference.parameters(), **options)
    with closing(twin(model, rule=rule, early=early, max_grad_norm=1.0, **options)) as optimizer:
        for step in STEPS:
            train(model, optimizer, [step])
            loss_of(reference, step).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            host.step()
            host.zero_grad()
            optimizer.wait()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p, reference.get_parameter(name), atol=1e-6, rtol=1e-6)
            with torch.no_grad():  # one step from equal weights: states may differ by rounding
                for name, p in reference.named_parameters():
                    p.copy_(model.get_parameter(name))


def test_a_skipped_step_changes_nothing() -> None:
    model = gpt()
    with closing(twin(model, rule=optim.NAdam, max_grad_norm=1.0, early=True)) as optimizer:
        train(model, optimizer, [0, 1])
        before = {name: tensor.clone() for name, tensor in everything(model, optimizer).items()}
        train(model, optimizer, [2], nan_step=2)
        assert_same(everything(model, optimizer), before)
        assert optimizer.metrics()["skipped_steps"] == 1


def test_delayed_update() -> None:
    """The weights that step t+1 computes with are those before step t."""
    model, reference = gpt(), gpt()
    masters = [nn.Parameter(p.detach().clone()) for p in reference.parameters()]
    host = optim.RMSprop(masters, lr=1e-3)
    with closing(twin(model, rule=optim.RMSprop, lr=1e-3, delayed_update=True)) as optimizer:
        losses, expected = [], []
        for step in STEPS:
            losses += train(model, optimizer, [step])
            loss = loss_of(reference, step)
            expected.append(loss.item())
            grads = torch.autograd.grad(loss, list(reference.parameters()))
            with torch.no_grad():
                for p, master in zip(reference.parameters(), masters, strict=True):
                    p.copy_(master)
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad
            host.step()
        assert losses == expected
        assert_same(weights_when_there(model, optimizer), weights(reference))


RESUMED = [(case, False, torch.float32) for case in ("nadam", "adafactor", "odd", "asgd", "adagrad")]
RESUMED += [("nadam", delayed, dtype) for delayed, dtype in ((True, torch.bfloat16), (True, torch.float32))]
RESUMED += [("nadam", False, torch.bfloat16)]


@pytest.mark.parametrize(("case", "delayed", "dtype"), matrix_but([*RESUMED[:3], RESUMED[5]], RESUMED))
def test_resume(case: str, delayed: bool, dtype: torch.dtype) -> None:
    rule, options = CASES[case]
    make = partial(twin, rule=rule, delayed_update=delayed, **options)

    def run(is_cut: bool) -> dict[str, Tensor]:
        model: Any = gpt().to(dtype)
        optimizer = make(model)
        train(model, optimizer, range(3))
        if is_cut:
            # other buckets than before: states belong to parameters, not to buckets
            remake = partial(make, bucket_numel=8192)
            model, optimizer = restart(model, optimizer, remake, lambda: gpt(seed=99).to(dtype))
        train(model, optimizer, range(3, 6))
        with closing(optimizer):
            return everything(model, optimizer)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_fp32_masters(dtype: torch.dtype) -> None:
    model, reference = gpt().to(dtype), gpt().to(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in reference.parameters()]
    host = optim.RMSprop(masters, lr=1e-3)
    with closing(twin(model, rule=optim.RMSprop, lr=1e-3, early=True)) as optimizer:
        train(model, optimizer, STEPS)
        for step in STEPS:
            loss_of(reference, step).backward()
            for p, master in zip(reference.parameters(), masters, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
            host.step()
            with torch.no_grad():
                for p, master in zip(reference.parameters(), masters, strict=True):
                    p.copy_(master)
        assert_same(weights_when_there(model, optimizer), weights(reference))
        updater = optimizer.runtime.updater
        assert isinstance(updater, TorchUpdater)
        largest = max(bucket.plan.numel for bucket in optimizer.runtime.buckets)
        assert updater._grads.numel() == largest  # one buffer for all


@pytest.mark.parametrize("is_model", [True, False])
def test_parameters_without_gradients_are_left_alone(is_model: bool) -> None:
    """Whole buckets of them; and, without the model and its blocks, some in a bucket of others."""
    model, reference = Branchy(), Branchy()
    host = optim.NAdam(reference.parameters(), lr=1e-2)
    given = model if is_model else model.named_parameters()
    with closing(twin(given, rule=optim.NAdam, lr=1e-2, early=is_model, bucket_numel=1 << 16)) as optimizer:
        for step in STEPS:
            for one, by in ((model, optimizer), (reference, host)):
                branchy_loss(one, step).backward()
                by.step()
                by.zero_grad()
        assert "never" not in optimizer.state_dict()["state"]
        assert_same(weights_when_there(model, optimizer), weights(reference))


# What the user gives.


def by_decay(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """A function that makes groups of its own."""
    matrices, others = [], []
    for p in params:
        (matrices if p.ndim > 1 else others).append(p)
    return optim.NAdam([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}], lr=1e-2)


def test_function_with_groups_and_scheduler() -> None:
    model, reference = gpt(), gpt()
    host = by_decay(reference.parameters())
    with closing(twin(model, rule=by_decay, early=True)) as optimizer:
        assert [len(g["params"]) for g in optimizer.param_groups] == [len(g["params"]) for g in host.param_groups]
        assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 2e-2]
        schedules = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, host)]
        for step in STEPS:
            for one, by, schedule in zip((model, reference), (optimizer, host), schedules, strict=True):
                train(one, by, [step])
                schedule.step()
        assert_same(everything(model, optimizer), plain(reference, host, []))


def test_groups_for_a_class() -> None:
    model, reference = gpt(), gpt()

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        named = dict(m.named_parameters())
        late = {name: p for name, p in named.items() if "blocks.1" in name}
        return [{"params": (p for n, p in named.items() if n not in late)}, {"params": late.values(), "lr": 1e-4}]

    with closing(twin(model, rule=optim.RMSprop, param_groups=groups(model), lr=1e-3)) as optimizer:
        train(model, optimizer, STEPS)
        assert_same(everything(model, optimizer), plain(reference, optim.RMSprop(groups(reference), lr=1e-3)))


INSTANCES = ("odd", "nesterov", "adafactor", "adagrad", "amsgrad")


@pytest.mark.parametrize(
    ("case", "num_before"), matrix_but([*product(INSTANCES, [3]), ("odd", 0)], product(INSTANCES, [0, 3]))
)
def test_instance_goes_on_from_where_it_is(case: str, num_before: int) -> None:
    rule, options = CASES[case]
    model, reference = gpt(), gpt()
    host, own = (rule(m.parameters(), **options) for m in (reference, model))
    expected = plain(reference, host)
    train(model, own, range(num_before))
    optimizer = twin(model, rule=own)
    if num_before:  # what was taken over is in the very first checkpoint
        model, optimizer = restart(model, optimizer, lambda m: twin(m, rule=rule, **options))
    train(model, optimizer, range(num_before, len(STEPS)))
    with closing(optimizer):
        assert_same(everything(model, optimizer), expected)


def test_instance_of_a_half_precision_model() -> None:
    """Its bf16 states become fp32, as its parameters do."""
    model = gpt().bfloat16()
    own = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, own, range(2))
    with closing(twin(model, rule=own)) as optimizer:
        train(model, optimizer, range(2, 4))
        entry = optimizer.state_dict()["state"]["blocks.0.mlp.up.weight"]
        assert entry["step"] == entry["state"]["step"] == 4
        assert entry["state"]["exp_avg"].dtype == torch.float32


def test_made_for_a_cuda_graph() -> None:
    """`capturable`, which torch refuses on the CPU, means nothing on the host."""
    model, reference = gpt(), gpt()
    with closing(twin(model, rule=optim.NAdam(model.parameters(), lr=1e-2, capturable=True))) as optimizer:
        train(model, optimizer, STEPS)
        assert_same(everything(model, optimizer), plain(reference, optim.NAdam(reference.parameters(), lr=1e-2)))


def test_learning_rate_in_a_tensor() -> None:
    """Schedulers write into it: each step keeps the number it began with."""
    model, reference = gpt(), gpt()
    host = optim.Adam(reference.parameters(), lr=torch.tensor(1e-2))
    with closing(twin(model, rule=optim.Adam, lr=torch.tensor(1e-2))) as optimizer:
        optimizer.runtime.device.delay("out", 0.01)
        for one, by in ((model, optimizer), (reference, host)):
            for step in STEPS:
                train(one, by, [step])
                by.param_groups[0]["lr"].mul_(0.5)
        assert_same(everything(model, optimizer), plain(reference, host, []))


def test_parameters_instead_of_a_model() -> None:
    model, reference = gpt(), gpt()
    with closing(twin(model.named_parameters(), rule=optim.RMSprop, lr=1e-3)) as optimizer:
        train(model, optimizer, STEPS)
        assert_same(everything(model, optimizer), plain(reference, optim.RMSprop(reference.parameters(), lr=1e-3)))


def test_worker_uses_our_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun torch has one thread; the main thread keeps what it has."""
    counts: list[int] = []

    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counts.append(torch.get_num_threads())
            return super().step(closure)

    monkeypatch.setattr(native, "get_threads", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = gpt()
        with closing(twin(model, rule=Counting, lr=0.1)) as optimizer:
            train(model, optimizer, [0])
            optimizer.wait()
        assert set(counts) == {2}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


class Wrapper(optim.Optimizer):
    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})


def with_scheduler(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer


def with_hook(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def by_number(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    params = list(params)
    return by_decay(params) if len(params) > 10 else optim.NAdam(params)


REFUSED: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "closure": (lambda m: {"rule": optim.LBFGS}, "LBFGS.*closure"),
    "closure of an instance": (lambda m: {"rule": optim.LBFGS(m.parameters())}, "LBFGS.*closure"),
    "sparse": (lambda m: {"rule": optim.SparseAdam}, "SparseAdam"),
    "matrices only": (lambda m: {"rule": optim.Muon}, "2D"),
    "differentiable": (lambda m: {"rule": optim.SGD, "lr": 0.1, "differentiable": True}, "differentiable"),
    "wrapper": (lambda m: {"rule": Wrapper(optim.SGD(m.parameters()))}, "must not wrap one.*lambda"),
    "scheduler": (lambda m: {"rule": with_scheduler(m)}, "scheduler"),
    "hooks": (lambda m: {"rule": with_hook(m)}, "hooks"),
    "other model": (lambda m: {"rule": optim.SGD(gpt().parameters())}, "that are not parameters of the model"),
    "own options": (
        lambda m: {"rule": optim.SGD(m.parameters()), "lr": 1.0},
        r"The arguments lr cannot be used with an optimizer instance as rule \(SGD\)",
    ),
    "own groups": (lambda m: {"rule": optim.SGD(m.parameters()), "param_groups": m.parameters()}, "own groups"),
    "all parameters": (
        lambda m: {"rule": lambda params: optim.SGD(m.parameters())},
        "exactly the parameters in `params`",
    ),
    "no optimizer": (lambda m: {"rule": lambda params: None}, "torch.optim.Optimizer"),
    "groups by number": (lambda m: {"rule": by_number}, "must depend on that parameter alone"),
    "format": (lambda m: {"rule": optim.RMSprop, "states": "bf16"}, "states is 'bf16'"),
    "no rule": (lambda m: {"rule": 3}, "rule is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case: str) -> None:
    make, message = REFUSED[case]
    model = gpt()
    with pytest.raises(ValueError, match=message):
        twin(model, **make(model))


def test_an_error_in_its_step_reaches_the_caller() -> None:
    class Broken(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("broken")

    model = gpt()
    optimizer = twin(model, rule=Broken, lr=0.1)
    with pytest.raises(RuntimeError, match="broken"):
        train(model, optimizer, STEPS)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.close()
