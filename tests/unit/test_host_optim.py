# SPDX-License-Identifier: Apache-2.0
"""HostAdamW and its siblings as torch optimizers."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch

from twinflow.optim import HostAdagrad, HostAdam, HostAdamW, HostLion, HostOptimizer, HostSGD
from twinflow.optim.host import HOST_OPTIMIZERS, formats_of, full_master
from twinflow.rules import Rule
from twinflow.rules.segment import Store, decode_state

ALL = [(kind, states) for kind in HOST_OPTIMIZERS.values() for states in formats_of(kind.rule)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torch_class(rule: Rule) -> Any:
    return getattr(torch.optim, rule.torch_class or "")


EXTRA: dict[type[HostOptimizer], dict[str, Any]] = {HostSGD: {"momentum": 0.9}}


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(17, 31), torch.nn.LayerNorm(31), torch.nn.Linear(31, 5)).to(dtype)


def set_gradients(net: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(net, step)
        optimizer.step()


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    *((kind, torch_class(kind.rule), {"lr": 1e-2}) for kind in HOST_OPTIMIZERS.values() if kind.rule.torch_class),
    (HostAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (HostAdamW, torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    (HostAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (HostAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (HostSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (HostSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_follows_torch_and_takes_over_its_state(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    a, b = model(), model()
    ours_optimizer, their_optimizer = ours(a.parameters(), **options), theirs(b.parameters(), **options)
    train(a, ours_optimizer, range(20))
    train(b, their_optimizer, range(20))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)
    continued = ours(b.parameters(), **options)  # a run that was started with torch's optimizer
    continued.load_state_dict(their_optimizer.state_dict())
    train(a, ours_optimizer, range(20, 30))
    train(b, continued, range(20, 30))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "states"), ALL)
def test_state_dict_round_trip_is_exact(kind: Any, states: str, dtype: torch.dtype) -> None:
    """Ten steps, save, load into fresh objects, ten more: the same bits as twenty steps."""
    options = {"lr": 1e-3, "states": states, **EXTRA.get(kind, {})}
    whole, half = model(dtype), model(dtype)
    whole_optimizer, half_optimizer = kind(whole.parameters(), **options), kind(half.parameters(), **options)
    train(whole, whole_optimizer, range(20))
    train(half, half_optimizer, range(10))
    file = io.BytesIO()
    torch.save((half.state_dict(), half_optimizer.state_dict()), file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    fresh = model(dtype, seed=1)
    fresh.load_state_dict(weights)
    fresh_optimizer = kind(fresh.parameters(), **options)
    fresh_optimizer.load_state_dict(saved)
    train(fresh, fresh_optimizer, range(10, 20))
    assert same(whole, fresh)


def masters(net: torch.nn.Module, optimizer: HostOptimizer) -> list[torch.Tensor]:
    """Every parameter's master in fp32."""
    found = (full_master(p, optimizer.state[p]) for p in net.parameters())
    return [p.detach() if m is None else m for p, m in zip(net.parameters(), found, strict=True)]


def decoded(net: torch.nn.Module, optimizer: HostOptimizer, which: int) -> list[torch.Tensor]:
    """Every parameter's first or second state in fp32."""
    group = optimizer.param_groups[0]
    found = [decode_state(optimizer._store(p, group), which) for p in net.parameters()]
    return [values for values in found if values is not None]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(("fp32", "bf16", "int8"), 2)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_loads_into_another_format(before: str, after: str, dtype: torch.dtype) -> None:
    """Masters carry over exactly, states to within the new format's own rounding."""
    net = model(dtype)
    optimizer = HostAdamW(net.parameters(), lr=1e-3, states=before)
    train(net, optimizer, range(5))
    twin = copy.deepcopy(net)
    converted = HostAdamW(twin.parameters(), lr=0.0, weight_decay=0.0, states=after)
    converted.load_state_dict(optimizer.state_dict())
    converted.param_groups[0]["lr"] = 0.0
    for p in twin.parameters():  # a step that only brings masters in step
        p.grad = torch.zeros_like(p)
    first, second = (decoded(net, optimizer, which) for which in (0, 1))
    rounding = {"fp32": 1e-7, "bf16": 2**-7, "int8": 2**-3}[after]
    for which, values in enumerate((first, second)):
        for old, new in zip(values, [converted_state(converted, p, which) for p in twin.parameters()], strict=True):
            scale = old.abs().amax()
            assert ((new - old).abs() <= rounding * old.abs() + 2**-8 * scale).all()
    expected = masters(net, optimizer)
    converted.param_groups[0]["weight_decay"] = 0.0
    converted.step()
    for a, b in zip(expected, masters(twin, converted), strict=True):
        assert torch.equal(a, b)


def converted_state(optimizer: HostOptimizer, param: torch.Tensor, which: int) -> torch.Tensor:
    state = optimizer.state[param]
    name = optimizer.rule.states[which]
    values, scale = state[name].view(-1), state.get(f"{name}_scale")
    store = Store(optimizer.states, values, None, (values, values), (scale, scale))
    result = decode_state(store, which)
    assert result is not None
    return result


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, -1e-30, 3e38])
@pytest.mark.parametrize("after", ["writing", "deepcopy", "loading"])
def test_a_bf16_parameter_that_was_written_to_is_taken_over(states: str, value: float, after: str) -> None:
    weight = torch.nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = HostAdamW([weight], lr=1e-3, weight_decay=0.0, states=states)
    for _ in range(3):
        weight.grad = torch.randn(1000).bfloat16()
        optimizer.step()
    if after == "deepcopy":
        weight, optimizer = copy.deepcopy((weight, optimizer))
    if after == "loading":
        saved = optimizer.state_dict()
        weight = torch.nn.Parameter(torch.full_like(weight, 7.0))
        optimizer = HostAdamW([weight], lr=1e-3, weight_decay=0.0, states=states)
        optimizer.load_state_dict(saved)
    with torch.no_grad():
        weight.fill_(value)
    expected = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, torch.where(expected.abs() < 2.0**-100, 0.0, expected))


def test_a_master_at_a_tie_is_not_moved_by_a_conversion() -> None:
    weight = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight], lr=0.0, weight_decay=0.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.state[weight]["master"].fill_(1.00390625)  # half way between 1 and the next bf16: rounds to even, to 1
    converted = HostAdamW([weight], lr=0.0, weight_decay=0.0, states="bf16")
    converted.load_state_dict(optimizer.state_dict())
    converted.step()
    master = full_master(weight, converted.state[weight])
    assert master is not None
    assert (master - 1.00390625).abs().max() <= 2.0**-23  # one unit in the last place of fp32


def test_a_model_that_is_cast_between_steps() -> None:
    net = model()
    for states in ("fp32", "bf16"):
        optimizer = HostAdamW(net.float().parameters(), lr=1e-3, states=states)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            net.to(dtype)
            train(net, optimizer, range(2))
            assert all(p.isfinite().all() for p in net.parameters())


def test_what_cannot_be_honoured_is_refused() -> None:
    net = model()

    def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        train(net, optimizer, range(1))
        return optimizer.state_dict()

    ours = HostAdamW(net.parameters())
    with pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(state_of(torch.optim.AdamW(net.parameters(), amsgrad=True)))
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        HostAdam(net.parameters()).load_state_dict(state_of(torch.optim.AdamW(net.parameters())))
    with pytest.raises(
        ValueError, match=r"has the states .*, but must have .*Load a state that an optimizer with the rule"
    ):
        ours.load_state_dict(state_of(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)))
    with pytest.raises(ValueError, match="must also have 'state'"):
        ours.load_state_dict({"param_groups": []})
    saved = copy.deepcopy(state_of(torch.optim.AdamW(net.parameters())))
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t()
    with pytest.raises(ValueError, match="shape"):
        ours.load_state_dict(saved)
    saved = copy.deepcopy(state_of(torch.optim.AdamW(net.parameters())))
    del saved["state"][1]["exp_avg_sq"]
    with pytest.raises(
        ValueError, match=r"has the states .*, but must have .*Load a state that an optimizer with the rule"
    ):
        ours.load_state_dict(saved)
    assert not ours.state


def test_options_changed_later_are_checked() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([weight])
    weight.grad = torch.ones(3)
    for name, value in (("lr", -1.0), ("betas", (1.0, 0.9)), ("betas", 0.9), ("lr", "fast"), ("eps", float("nan"))):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        optimizer.param_groups[0][name] = good
    assert torch.equal(weight, torch.ones(3))


def test_a_parameter_given_twice_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="twice"):
        HostAdamW([weight, weight])
    with pytest.raises(TypeError):
        HostAdamW([{"params": {weight}}])


def test_momentum_switched_off_and_on() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    pair = HostSGD([ours], lr=0.1, momentum=0.9), torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for step in range(9):
        for optimizer, p in zip(pair, (ours, theirs), strict=True):
            optimizer.param_groups[0]["momentum"] = 0.0 if 3 <= step < 6 else 0.9
            p.grad = torch.full((5,), step + 1.0)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_half_precision_parameters_move_by_steps_below_their_spacing(states: str, dtype: torch.dtype) -> None:
    """A step of 1e-4 on weights of 1.0 is lost without a master: bf16 moves by 4e-3 at the least."""
    weight = torch.nn.Parameter(torch.ones(512, dtype=dtype))
    optimizer = HostAdamW([weight], lr=1e-4, weight_decay=0.0, states=states)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1 - 200 * 1e-4, abs=3e-3)


def test_writing_to_a_half_precision_parameter_is_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    with torch.no_grad():
        weight[:100] = 5.0
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[:100].float().mean().item() == pytest.approx(5.0, abs=0.05)
    master = optimizer.state[weight]["master"]
    assert master[100:].mean().item() == pytest.approx(1 - 4e-4, abs=1e-5)  # the rest kept its full precision


def test_autograd_sees_the_update() -> None:
    weight = torch.nn.Parameter(torch.ones(300))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(300)
    HostAdamW([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_groups_schedulers_closures_and_factor() -> None:
    net = model()
    decay, rest = [net[0].weight, net[2].weight], [net[0].bias, net[1].weight, net[1].bias, net[2].bias]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 0.0}]
    optimizer = HostAdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = [p.detach().clone() for p in rest]
    inputs = torch.randn(8, 17)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    assert all(torch.equal(a, b) for a, b in zip(before, rest, strict=True))
    a, b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    a.grad, b.grad = torch.full((4,), 3.0), torch.full((4,), 1.5)
    HostSGD([a], lr=0.1).step(factor=0.5)
    HostSGD([b], lr=0.1).step()
    assert torch.equal(a, b)


def test_parameters_without_gradient_keep_their_step() -> None:
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([used, unused], lr=0.1)
    used.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[used]["step"] == 1
    assert unused not in optimizer.state
    assert torch.equal(unused, torch.ones(3))


def test_momentum_switched_on_later() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    pair = HostSGD([ours], lr=0.1, dampening=0.3), torch.optim.SGD([theirs], lr=0.1, dampening=0.3)
    for step in range(6):
        for optimizer, p in zip(pair, (ours, theirs), strict=True):
            if step == 3:
                optimizer.param_groups[0]["momentum"] = 0.9
            p.grad = torch.full((5,), step + 1.0)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"states": "fp8"}, "states is 'fp8', but must be one of 'fp32', 'bf16', 'int8'"),
        ({"eps": -1.0}, "eps is -1.0"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostAdamW([torch.nn.Parameter(torch.ones(3))], **change)


def test_bad_parameters_and_gradients_are_named_and_nothing_moves() -> None:
    good, bad = torch.nn.Parameter(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(6, 4).t())
    with pytest.raises(ValueError, match=r"params\[0\]\[1\] has the strides"):
        HostAdamW([good, bad])
    with pytest.raises(ValueError, match=r"weight dtype is torch\.float64"):
        HostAdamW([("weight", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))])
    with pytest.raises(ValueError, match="states is 'int8'"):
        HostLion([good], states="int8")
    optimizer = HostAdamW([good, other := torch.nn.Parameter(torch.ones(8))], lr=0.1)
    good.grad, other.grad = torch.ones(4, 6), torch.sparse_coo_tensor([[1]], [1.0], (8,), check_invariants=True)
    with pytest.raises(ValueError, match=r"params\[0\]\[1\]: gradient layout"):
        optimizer.step()
    assert torch.equal(good, torch.ones(4, 6))
    assert good not in optimizer.state
    with pytest.raises(ValueError, match="weight_decay is -1"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": -1})
    assert len(optimizer.param_groups) == 1


def test_a_state_of_another_shape_is_refused_with_nothing_changed() -> None:
    net = model()
    optimizer = HostAdamW(net.parameters(), lr=1e-3)
    train(net, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"The shape of state_dict\['state'\]\[2\]\['exp_avg'\] is \(7,\)"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["lr"] = -5.0
    with pytest.raises(ValueError, match=r"lr is -5\.0"):
        optimizer.load_state_dict(saved)
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[k], before["state"][i][k]) for k in ("exp_avg", "exp_avg_sq"))


def test_compact_states_are_compact() -> None:
    weight = torch.nn.Parameter(torch.ones(128 * 100, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    for states, wanted in (("fp32", 12.0), ("bf16", 6.0), ("int8", 4.0625)):
        optimizer = HostAdamW([weight], states=states)
        optimizer.step()
        tensors = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor)]
        assert sum(t.numel() * t.element_size() for t in tensors) / weight.numel() == wanted


def test_deepcopy_and_pickle_free_copy() -> None:
    net = model()
    optimizer = HostAdamW(net.parameters(), lr=1e-3, states="bf16")
    train(net, optimizer, range(3))
    twin_net, twin = copy.deepcopy((net, optimizer))
    train(net, optimizer, range(3, 6))
    train(twin_net, twin, range(3, 6))
    assert same(net, twin_net)
