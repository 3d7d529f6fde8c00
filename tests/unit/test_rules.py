# SPDX-License-Identifier: Apache-2.0
"""The rules against float64 and against torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import OPTIONS

from twinflow.rules import RULES
from twinflow.rules.rules import flush, sqrt

TORCH = sorted(name for name, rule in RULES.items() if rule.torch_class is not None)


def ours(name: str, start: torch.Tensor, grads: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    rule = RULES[name]
    p = start.clone()
    m, v = (torch.zeros_like(p) if state else None for state in rule.states)
    for step, grad in enumerate(grads, 1):
        p, m, v = rule.apply(p, m, v, grad, rule.hyper(options, step))
    return p


def theirs(make: Any, start: torch.Tensor, grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    p = torch.nn.Parameter(start.to(dtype).clone())
    optimizer = make([p])
    for grad in grads:
        p.grad = grad.to(dtype)
        optimizer.step()
    return p.detach()


# Every form of SGD: torch fuses its multiply-adds, and the larger lr the more that counts.
SGD_FORMS: dict[str, dict[str, Any]] = {
    "no momentum": {"momentum": 0.0, "weight_decay": 0.0},
    "momentum": {"weight_decay": 0.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.0},
    "dampening": {"dampening": 0.3, "weight_decay": 0.0},
    "no momentum, decay": {"momentum": 0.0},
    "momentum, decay": {},
    "nesterov, decay": {"nesterov": True},
    "dampening, decay": {"dampening": 0.3},
}


def torch_of(name: str, options: dict[str, Any]) -> Any:
    """torch's optimizer for a rule."""
    names = [
        option.name for option in RULES[name].options if option.name != "bias_correction"
    ]  # torch has no such mode
    chosen = {key: options[key] for key in names}
    return lambda p: getattr(torch.optim, RULES[name].torch_class)(p, foreach=False, **chosen)


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("lr", [1e-2, 0.1])
@pytest.mark.parametrize("form", SGD_FORMS)
def test_error_of_every_form_of_sgd(form: str, lr: float, steps: int) -> None:
    options = {**OPTIONS, "lr": lr, **SGD_FORMS[form]}
    compare("sgd", steps, options)


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("name", TORCH)
def test_error_against_float64_is_no_larger_than_torchs(name: str, steps: int) -> None:
    compare(name, steps, OPTIONS)


def compare(name: str, steps: int, options: dict[str, Any]) -> None:
    optimizer = torch_of(name, options)
    generator = torch.Generator().manual_seed(steps)
    start = torch.randn(200_000, generator=generator)
    grads = [torch.randn(start.numel(), generator=generator) for _ in range(steps)]
    truth = theirs(optimizer, start, grads, torch.float64)
    our_error = (ours(name, start, grads, options).double() - truth).abs()
    their_error = (theirs(optimizer, start, grads, torch.float32).double() - truth).abs()
    # A thousandth for the sample: over seeds these ratios scatter by some 3e-4.
    assert our_error.mean() <= their_error.mean() * 1.001
    assert our_error.square().mean().sqrt() <= their_error.square().mean().sqrt() * 1.001


@pytest.mark.parametrize("form", SGD_FORMS)
def test_one_step_of_sgd_is_float64_rounded(form: str) -> None:
    """Huge numbers too: a weight that stays in range is finite, one that leaves it an infinity, none becomes NaN."""
    options = {**OPTIONS, "lr": 0.5, **SGD_FORMS[form]}
    for name in ("momentum", "weight_decay"):
        options[name] = 0.25 if options[name] else 0.0  # exact in fp32, as is lr
    largest, inf = torch.finfo(torch.float32).max, float("inf")
    huge = torch.tensor([largest, -largest, largest / 2, 1e38, 1.0, 0.0, 1e-30])
    p, g = (x.flatten() for x in torch.meshgrid(huge, torch.cat([huge, torch.tensor([inf, -inf])]), indexing="ij"))
    new, _, _ = RULES["sgd"].apply(p, torch.zeros_like(p), None, g, RULES["sgd"].hyper(options, 1))
    assert torch.equal(new, flush(theirs(torch_of("sgd", options), p, [g], torch.float64).float()))


def test_lion_against_float64() -> None:
    """torch.optim has no Lion: the measure is its formula written with torch's fp32 operations."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(100_000, generator=generator)
    m, g = (torch.randn(p.numel(), generator=generator) for _ in range(2))

    def formula(p: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return p * (1 - 1e-2 * 0.1) - 1e-2 * (0.9 * m + 0.1 * g).sign(), 0.99 * m + 0.01 * g

    new_p, new_m, _ = RULES["lion"].apply(p, m, None, g, RULES["lion"].hyper(OPTIONS, 1))
    assert new_m is not None
    plain, truth = formula(p, m, g), formula(p.double(), m.double(), g.double())
    clear = (0.9 * m.double() + 0.1 * g.double()).abs() > 1e-6  # nearer to zero, rounding may turn the sign
    for our, their, true in zip((new_p, new_m), plain, truth, strict=True):
        our_error, their_error = ((x.double() - true)[clear].abs().mean() for x in (our, their))
        assert our_error <= their_error * 1.01


@pytest.mark.parametrize(
    ("name", "change", "label"),
    [
        ("adamw", {"lr": -1.0}, "lr is -1.0"),
        ("adamw", {"lr": float("nan")}, "lr is nan"),
        ("adamw", {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ("adam", {"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ("adam", {"betas": (0.9,)}, "betas is"),
        ("lion", {"betas": (0.9, 2.0)}, r"betas\[1\] is 2.0"),
        ("adamw", {"eps": -1e-8}, "eps is -1e-08"),
        ("adagrad", {"weight_decay": -0.1}, "weight_decay is -0.1"),
        ("adagrad", {"lr_decay": -1}, "lr_decay is -1"),
        ("sgd", {"momentum": -0.5}, "momentum is -0.5"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, "nesterov is True"),
        ("sgd", {"dampening": float("inf")}, "dampening is inf"),
    ],
)
def test_options_out_of_range_are_named(name: str, change: dict[str, Any], label: str) -> None:
    RULES[name].check(OPTIONS)
    with pytest.raises(ValueError, match=label):
        RULES[name].check({**OPTIONS, **change})


def test_flush_rule() -> None:
    x = torch.tensor([2.0**-100, -(2.0**-100), 2.0**-101, -(2.0**-101), -0.0, float("nan"), float("inf")])
    flushed = flush(x)
    assert flushed[:2].tolist() == x[:2].tolist()
    assert flushed[2:5].view(torch.int32).tolist() == [0, 0, 0]
    assert flushed[5].isnan()
    assert flushed[6].isinf()


def test_square_root_is_rounded_correctly() -> None:
    import math
    from fractions import Fraction

    for value in torch.rand(300, generator=torch.Generator().manual_seed(0)):
        root = sqrt(value)
        exact = Fraction(value.item())
        neighbours = [torch.nextafter(root, torch.tensor(x)) for x in (0.0, math.inf)]
        halfway = [(Fraction(root.item()) + Fraction(n.item())) / 2 for n in neighbours]
        assert halfway[0] ** 2 <= exact <= halfway[1] ** 2
