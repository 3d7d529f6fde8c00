# SPDX-License-Identifier: Apache-2.0
"""Weight gradients put off, against plain autograd: the same bits, hooks once, and layers run again only once."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinflow.parallel.deferral import Batch, Deferral, defer, linear


class Conv1D(nn.Module):
    """As transformers has it: a weight of [in, out]."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.nf = num_out
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out)), nn.Parameter(torch.randn(num_out))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return made.view(*x.shape[:-1], self.nf)


class Tied(nn.Module):
    """One weight used three times, one use of it with another bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(torch.tanh(self.first(x))))


class Mixed(nn.Module):
    """Layers that put their weight's gradient off between some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), Conv1D(10, 6), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 10, bias=False), nn.ReLU(), nn.Linear(10, 6))


def run_whole(model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor]) -> None:
    loss_of(model(x)).backward()


def run_halves(model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor], deferral: Deferral) -> Batch:
    loss = loss_of(model(x))
    with deferral.collecting() as batch:
        loss.backward()
    return batch


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module, Deferral]:
    """Plain, and one with the same weights that can put off."""
    other, deferral = copy.deepcopy(model), Deferral()
    defer(other, deferral)
    return model, other, deferral


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def assert_same(plain: nn.Module, other: nn.Module) -> None:
    found = grads_of(other)
    for name, grad in grads_of(plain).items():
        assert (grad is None) == (found[name] is None), name
        assert grad is None or torch.equal(grad, found[name]), name


def test_layers_are_recognised() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class Heir(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(2, 2), Heir(2, 2), Conv1D(2, 2), Own(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)])
    patched = model[4].forward = lambda x: x
    deferral = Deferral()
    defer(model, deferral)
    assert ["forward" in layer.__dict__ for layer in model] == [True, True, True, False, True, False]
    assert model[4].forward is patched
    assert ["_twinflow_deferral" in layer.__dict__ for layer in model] == [True] * 5 + [False]
    again = Deferral()
    defer(model, again)
    assert model[0]._twinflow_deferral is again


@pytest.mark.parametrize("make", [mlp, Tied, Mixed], ids=["mlp", "tied", "mixed"])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6), (3, 1, 2, 6), (0, 6)], ids=str)
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("loss_of", [squares, torch.sum], ids=["squares", "sum"])  # of a sum, gradients have stride 0
def test_the_same_bits(
    make: Callable[[], nn.Module], shape: tuple[int, ...], needs_x: bool, loss_of: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    plain, other, deferral = pair(make())
    weights = [p for p in other.parameters() if p.dim() == 2]
    for _ in range(2):  # the second time onto gradients that are there
        inputs = [torch.randn(shape).requires_grad_(needs_x)]
        inputs.append(inputs[0].detach().clone().requires_grad_(needs_x))
        run_whole(plain, inputs[0], loss_of)
        before = [w.grad.clone() if w.grad is not None else None for w in weights]
        batch = run_halves(other, inputs[1], loss_of, deferral)
        assert not needs_x or torch.equal(inputs[0].grad, inputs[1].grad)
        for weight, old in zip(weights, before, strict=True):  # untouched in I
            assert (weight.grad is None and old is None) or torch.equal(weight.grad, old)
        assert len(batch) == (3 if not isinstance(other, Mixed) else 2)
        batch.run()
        assert len(batch) == 0
        assert_same(plain, other)


def test_a_weight_modified_between_forward_and_backward_is_noticed() -> None:
    _, other, _ = pair(mlp())
    loss = squares(other(torch.randn(4, 6)))
    with torch.no_grad():
        other.get_parameter("4.weight").add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_at_once_where_nothing_collects() -> None:
    plain, other, _ = pair(Mixed())
    x = torch.randn(4, 6)
    run_whole(plain, x, squares)
    run_whole(other, x, squares)
    assert_same(plain, other)
    with torch.no_grad():
        assert torch.equal(plain(x), other(x))


def test_strides_of_the_input_do_not_matter() -> None:
    plain, other, deferral = pair(mlp())
    x = torch.randn(6, 3, 2).transpose(0, 2)
    run_whole(plain, x, squares)
    run_halves(other, x, squares, deferral).run()
    found = grads_of(other)
    for name, grad in grads_of(plain).items():  # on x86-64 the bits of torch's own products depend on strides
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "4.weight"])
def test_frozen(frozen: str) -> None:
    model = mlp()
    model.get_parameter(frozen).requires_grad_(False)
    plain, other, deferral = pair(model)
    x = torch.randn(4, 6)
    run_whole(plain, x, squares)
    batch = run_halves(other, x, squares, deferral)
    assert len(batch) == (3 if frozen.endswith("bias") else 2)
    batch.run()
    assert_same(plain, other)


def test_nothing_put_off() -> None:
    Batch().run()


class Counted(nn.Module):
    """Blocks that count how often they run, checkpointed or not."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(3))
        self.is_checkpointed, self.num_runs = is_checkpointed, 0

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.num_runs += 1
        return functional.dropout(block(x), 0.3)  # recomputed with the same random numbers

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=False) if self.is_checkpointed else self.run(block, x)
        return x


@pytest.mark.parametrize("needs_x", [True, False])
def test_checkpointed_layers_run_again_once(needs_x: bool) -> None:
    torch.manual_seed(1)
    plain, other, deferral = pair(Counted(False))
    other.is_checkpointed = True
    x = torch.randn(4, 6).requires_grad_(needs_x)
    torch.manual_seed(2)
    run_whole(plain, x, squares)
    torch.manual_seed(2)
    batch = run_halves(other, x, squares, deferral)
    assert other.num_runs == 6
    batch.run()
    assert other.num_runs == 6
    assert plain.num_runs == 3
    assert_same(plain, other)


def test_backward_on_another_thread() -> None:
    plain, other, deferral = pair(Counted(True))
    torch.manual_seed(2)
    run_whole(plain, torch.ones(4, 6), squares)
    torch.manual_seed(2)
    loss = squares(other(torch.ones(4, 6)))
    num_threads = torch.get_num_threads()

    def backward() -> None:
        torch.set_num_threads(num_threads)  # OpenMP keeps it by thread, and sums of another number have other bits
        loss.backward()

    with deferral.collecting() as batch:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert len(batch) == 6
    batch.run()
    assert_same(plain, other)


def test_hooks_fire_once_per_delivery() -> None:
    _, other, deferral = pair(Tied())
    fired: list[str] = []
    weight, bias = other.first.weight, other.first.bias
    weight.register_hook(lambda _: fired.append("weight"))
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight is there"))
    bias.register_post_accumulate_grad_hook(lambda _: fired.append("bias is there"))
    batch = run_halves(other, torch.randn(3, 6), squares, deferral)
    assert fired == ["bias is there"]
    batch.run()
    assert fired == ["bias is there", "weight", "weight is there"]


def test_a_delivered_gradient_is_not_copied() -> None:
    made: list[int] = []
    layer, deferral = nn.Linear(4, 4), Deferral()
    with deferral.collecting() as batch:

        def make() -> Tensor:
            grad = torch.ones(4, 4)
            made.append(grad.data_ptr())
            return grad

        deferral.add(layer.weight, make)
        assert not made
    batch.run()
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() == made[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("make", [mlp, Mixed], ids=["mlp", "mixed"])
def test_half_precision(dtype: torch.dtype, is_autocast: bool, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = make() if is_autocast else make().to(dtype)
    plain, other, deferral = pair(model)

    def region() -> Any:
        return torch.autocast("cpu", dtype=dtype) if is_autocast else nullcontext()

    x = torch.randn(2, 5, 6, dtype=torch.float32 if is_autocast else dtype)
    with region():
        a, b = plain(x), other(x)
    assert a.dtype == b.dtype
    assert torch.equal(a, b)
    squares(a.float()).backward()
    with deferral.collecting() as batch:
        squares(b.float()).backward()
    batch.run()
    assert_same(plain, other)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in other.parameters())


def test_checkpointed_under_autocast() -> None:
    torch.manual_seed(4)
    plain, other, deferral = pair(Counted(True))
    x = torch.randn(4, 6)
    losses = []
    for model in (plain, other):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(squares(model(x).float()))
    losses[0].backward()
    with deferral.collecting() as batch:
        losses[1].backward()
    batch.run()
    assert_same(plain, other)


def test_mismatched_dtypes_are_refused_as_without() -> None:
    _, other, _ = pair(nn.Linear(3, 3).to(torch.bfloat16))
    with pytest.raises(RuntimeError, match="dtype"):
        other(torch.randn(2, 3))


def test_linear_with_another_bias() -> None:
    for layer in (nn.Linear(6, 4), Conv1D(4, 6)):
        deferral, x = Deferral(), torch.randn(3, 6)
        plain = linear(layer, x, None)
        assert torch.allclose(plain + layer.bias, layer(x))
        defer(layer, deferral)
        assert torch.equal(linear(layer, x, None), plain)


def test_a_parametrized_weight_gets_its_gradient_at_once() -> None:
    model = nn.Linear(4, 4)
    nn.utils.parametrizations.weight_norm(model)
    plain, other, deferral = pair(model)
    x = torch.randn(3, 4)
    run_whole(plain, x, squares)
    batch = run_halves(other, x, squares, deferral)
    assert len(batch) == 0
    batch.run()
    assert_same(plain, other)


def test_activations_are_freed_by_w() -> None:
    _, other, deferral = pair(mlp())
    x = torch.randn(4, 6)
    ref = weakref.ref(x)
    batch = run_halves(other, x, squares, deferral)
    del x
    assert ref() is not None
    batch.run()
    assert ref() is None
