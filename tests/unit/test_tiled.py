# SPDX-License-Identifier: Apache-2.0
"""Tiled modules: results and gradients are those of the whole sequence, whatever else is switched on."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinflow.activations import checkpoint_layers, last_linear
from twinflow.activations.tiled import is_tiled, tile_modules
from twinflow.integrations import tiled as tiled_sequence
from twinflow.integrations.tiled import tile_sequence
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.settings import Tuning
from twinflow.optim.twin import TwinOptimizer

SHAPE = GPTConfig(vocab_size=64, context=32, num_layers=3, hidden=16, num_heads=2)
TOKENS = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(3))


class MLP(nn.Module):
    """Counts its forwards, and the most tokens that it has seen at once."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 24), nn.Linear(24, 8), nn.Dropout(dropout)
        self.tokens: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.tokens.append(x.shape[1])
        y: Tensor = self.down(self.dropout(torch.relu(self.up(x))))
        return y


def values_and_gradients(run: Callable[[Tensor], Tensor], model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(2, 19, 8, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model.zero_grad()
    torch.manual_seed(7)
    out = run(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_module_of_several_layers_is_tiled_once() -> None:
    model = MLP()
    handle = tile_modules({"layers.0.mlp": model, "layers.1.mlp": model}, 4)
    assert handle.names == ["layers.0.mlp"]
    handle.remove()
    assert not is_tiled(model)


@pytest.mark.parametrize("tile", [1, 5, 19, 37, 38])
def test_a_tiled_module_equals_the_module(tile: int) -> None:
    torch.manual_seed(0)
    model = MLP().double()
    expected = values_and_gradients(model, model, torch.float64)
    handle = tile_modules({"mlp": model}, tile)
    model(torch.zeros(1, 39, 8, dtype=torch.float64))  # the first call also compares a few tokens
    model.tokens.clear()
    found = values_and_gradients(model, model, torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert max(model.tokens) == (tile if tile < 38 else 19)  # 2 x 19 tokens that fit into one tile are not cut
    handle.remove()
    assert not is_tiled(model)
    assert handle.names == []
    torch.testing.assert_close(values_and_gradients(model, model, torch.float64), expected, rtol=0, atol=0)


def test_the_gradient_of_a_weight_is_summed_in_fp32() -> None:
    """Sums in bf16 over many tiles would lose most of their bits."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    exact, naive = deepcopy(model).double(), deepcopy(model)
    x = torch.randn(1, 4096, 8).to(torch.bfloat16)
    exact(x.double()).sum().backward()
    for part in x.split(16, 1):
        naive(part).sum().backward()
    tile_modules({"": model}, 16)
    model(x).sum().backward()

    def error(one: nn.Linear) -> float:
        assert one.weight.grad is not None
        assert exact.weight.grad is not None
        return float((one.weight.grad.double() - exact.weight.grad).abs().max())

    assert error(model) < error(naive) / 4


def test_dropout_drops_the_same_values_in_backward() -> None:
    torch.manual_seed(0)
    model = MLP(0.5).double()
    tile_modules({"mlp": model}, 5)
    x = torch.ones(1, 19, 8, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    out = model(x)
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    reference = torch.cat([model(part) for part in x.split(5, 1)], 1)
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(grad, torch.autograd.grad(reference.sum(), x)[0])
    model.eval()
    torch.testing.assert_close(model(x)[:, :5], model(x[:, :5]))


class Noisy(nn.Module):
    """Draws random numbers in training without a dropout module, as some routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        return y * torch.rand_like(y) if self.training else y


def test_random_numbers_of_a_function_are_the_same_in_backward() -> None:
    model = Noisy().double()
    tile_modules({"noisy": model}, 5)
    x = torch.randn(1, 20, 8, dtype=torch.float64).requires_grad_()
    out = model(x)
    out.sum().backward()
    # The bias has the gradient of the sum of the factors, and each factor is the output divided by the line.
    line = torch.nn.functional.linear(x, model.line.weight, model.line.bias)
    torch.testing.assert_close(model.line.bias.grad, (out / line).sum((0, 1)))


class Mixing(nn.Module):
    """The output for a token depends on the token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (1, 0))
        y: Tensor = self.dropout(self.convolution(padded).transpose(1, 2))
        return y


def test_a_module_that_mixes_tokens_is_refused() -> None:
    model = Mixing()
    tile_modules({"mixing": model}, 5)
    with pytest.raises(RuntimeError, match="mixing cannot run over tiles, because its output for a token depends"):
        model(torch.randn(1, 20, 8))
    assert model.dropout.training


def test_the_loss_of_routers_in_tiles_is_refused() -> None:
    transformers: Any = __import__("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    handle = tile_sequence(model, 4, modules=["MixtralSparseMoeBlock"])
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(ValueError, match="output_router_logits cannot be used with tile_sequence"):
        model(input_ids=TOKENS, labels=TOKENS, output_router_logits=True)
    handle.remove()
    assert model(input_ids=TOKENS, labels=TOKENS, output_router_logits=True).aux_loss is not None


def test_frozen_weights_and_inputs_without_gradients() -> None:
    torch.manual_seed(0)
    model = MLP().double()
    model.up.requires_grad_(False)
    expected = values_and_gradients(model, model, torch.float64)
    tile_modules({"mlp": model}, 4)
    torch.testing.assert_close(values_and_gradients(model, model, torch.float64), expected)
    x = torch.randn(1, 19, 8, dtype=torch.float64)
    out = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), out)
    out.sum().backward()  # the input has no gradient
    model.requires_grad_(False)
    assert not model(x).requires_grad


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    model = MLP()
    tiled = deepcopy(model)
    tile_modules({"mlp": tiled}, 5)
    found = []
    for one in (model, tiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(1, 19, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
            out = one(x)
        out.float().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in one.parameters())])
    assert found[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


def test_weights_that_tiles_have_used_get_gradients_later_under_the_same_autocast() -> None:
    """Autocast of torch 2.9 keeps casts that are made without gradients, and uses them for a part with gradients.
    The first call is one of several tiles, and the second has one tile, which is an ordinary call.
    """
    torch.manual_seed(0)
    model = MLP()
    tiled = deepcopy(model)
    tile_modules({"mlp": tiled}, 5)
    x = torch.randn(1, 19, 8)
    found = []
    for one in (model, tiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = one(x).float().sum() + 3 * one(x[:, :4]).float().sum()
        total.backward()
        found.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpointed_layer_runs_its_mlp_no_more_often_than_without_tiles(is_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": MLP()}).double()
    mlp: Any = model["mlp"]

    def layer(x: Tensor) -> Tensor:
        y: Tensor = x + mlp(model["norm"](x))
        return y

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layer, x, use_reentrant=is_reentrant)
        return y

    expected = values_and_gradients(run, model, torch.float64)
    mlp.tokens.clear()
    tile_modules({"mlp": mlp}, 10)
    found = values_and_gradients(run, model, torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # Four tiles in the forward and four in the backward: the recomputation of the layer ends before the MLP.
    # The first call also compares a few tokens.
    assert mlp.tokens == [4, 2] + [10, 10, 10, 8] * (3 if is_reentrant else 2)


class Ends(nn.Module):
    """Modules that end in several ways with a linear operation, or not."""

    def __init__(self, end: str, bias: bool) -> None:
        super().__init__()
        self.end = end
        self.up, self.down = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)
        self.largest: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        if self.end == "scaled":
            return y * 2
        if self.end == "in place":
            y.add_(1)
        if self.end == "read":
            self.largest.append(float(y.detach().abs().max()))
        return F.linear(y, self.up.weight.t() @ self.up.weight) if self.end == "shared" else y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("end", "is_left_out"),
    [("plain", True), ("shared", True), ("scaled", False), ("in place", False), ("read", False), ("hook", False)],
)
def test_the_last_product_is_not_computed_again_in_backward(
    end: str, is_left_out: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Ends(end, bias).double()
    if end == "hook":
        model.down.register_forward_hook(lambda module, args, out: None)
    expected = values_and_gradients(model, model, torch.float64)
    tile_modules({"mlp": model}, 10)
    left_out = []
    real = last_linear._apply

    def apply(*args: Any) -> Tensor:
        left_out.append(args)
        out = real(*args)
        assert out.isnan().all()
        return out

    monkeypatch.setattr(last_linear, "_apply", apply)
    torch.testing.assert_close(values_and_gradients(model, model, torch.float64), expected, rtol=1e-12, atol=1e-12)
    assert len(left_out) == (4 if is_left_out else 0)
    assert all(math.isfinite(value) for value in model.largest)


class Saving(torch.autograd.Function):
    """A linear operation whose backward uses its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        grad = grad + 0 * y
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Changing(nn.Module):
    """Modules for whose backward the result of the last linear operation is needed, or whose operation is unusual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down, self.more = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.last = torch.zeros(())
        self.bias = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        is_high = x[..., :1] > 1.5
        if self.kind == "other tokens" and is_high.any():  # not in the first tile
            x = x + is_high * self.more(x)
        if self.kind == "gradients" and torch.is_grad_enabled():
            x = x + 0 * self.more(x)
        y = F.dropout(self.up(x), 0.5)
        if self.kind == "checkpoint":
            return checkpoint(self.down, y, use_reentrant=False)  # type: ignore[no-any-return]
        if self.kind == "function":
            return Saving.apply(y, self.down.weight)  # type: ignore[no-any-return, no-untyped-call]
        if self.kind == "names":
            return F.linear(input=y, weight=self.down.weight, bias=self.down.bias)
        if self.kind == "bias":
            return F.linear(y, self.down.weight, self.bias)
        self.last = self.down(y)
        return self.last if self.kind == "kept" else self.down(y)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float64) for kind in ("other tokens", "gradients", "checkpoint", "function", "names", "bias")),
        ("kept", torch.float64),
        ("global hook", torch.float64),
        ("complex", torch.complex128),
    ],
)
def test_a_result_that_a_module_needs_in_backward_is_computed(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Changing(kind)
    for layer in (model.up, model.down, model.more):  # `to` would make complex weights without imaginary part
        layer.weight.data = torch.randn(layer.weight.shape, dtype=dtype)
    model.to(dtype)
    if kind == "complex":
        model.forward = lambda x: model.down(model.up(x))  # type: ignore[method-assign]
    x = torch.randn(1, 20, 8, dtype=dtype).requires_grad_()
    if not dtype.is_complex:
        x.data[:, :10].clamp_(max=1)
        x.data[:, 15] = 2
    seen: list[Tensor] = []

    def gradients(parts: int) -> list[Tensor]:
        torch.manual_seed(1)
        out = torch.cat([model(part) for part in x.split(parts, 1)], 1)
        wanted = [x, *(param for param in model.parameters())]
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum()
        found = torch.autograd.grad(
            torch.view_as_real(loss).sum() if dtype.is_complex else loss, wanted, allow_unused=True
        )
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]

    expected = gradients(10)
    tile_modules({"mlp": model}, 10)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(out))
    if kind != "global hook":
        handle.remove()
    try:
        torch.testing.assert_close(gradients(20), expected, rtol=1e-12, atol=1e-12)
    finally:
        handle.remove()
    assert not any(out.isnan().any() for out in [model.last, *seen])


def test_a_tiled_module_runs_in_inference_mode_and_on_the_meta_device() -> None:
    model = MLP()
    x = torch.randn(1, 40, 8)
    expected = model(x)
    tile_modules({"mlp": model}, 10)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected.detach())
    model = MLP().to("meta")
    tile_modules({"mlp": model}, 10)
    model(torch.empty(1, 40, 8, device="meta")).sum().backward()
    assert model.up.weight.grad is not None


def test_a_copy_and_a_pickle_have_the_original_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    tile_modules({"0": model[0]}, 4)
    copied = deepcopy(model)
    assert not is_tiled(copied[0])
    assert copied[0].forward.__self__ is copied[0]
    assert not is_tiled(pickle.loads(pickle.dumps(model))[0])


class _Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return x if y is None else x + y


def test_a_module_that_cannot_be_tiled_says_so() -> None:
    two, pair = _Two(), nn.LSTM(8, 8, batch_first=True)
    tile_modules({"two": two, "pair": pair}, 4)
    x = torch.randn(1, 9, 8)
    with pytest.raises(RuntimeError, match=r"two cannot run over tiles, because it was called with 2 tensors"):
        two(x, x)
    with pytest.raises(RuntimeError, match=r"pair cannot run over tiles, because it returned a tuple"):
        pair(x)
    with pytest.raises(ValueError, match="not tiled yet"):
        tile_modules({"two": two})
    with pytest.raises(ValueError, match="tile is 0, but must be a whole number"):
        tile_modules({}, 0)
    compiled = nn.Linear(8, 8)
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match=r"cannot be used with torch\.compile"):
        tile_modules({"compiled": compiled})


# Whole models.


def steps(model: Any, is_tiled: bool, **options: Any) -> tuple[list[float], list[Tensor]]:
    """Losses of a few steps with TwinOptimizer, and the weights."""
    if is_tiled:
        tile_sequence(model, 8)
    layers = options.pop("layers", None)
    handle = checkpoint_layers(model, [layers], offload=True, min_bytes=1) if layers else None
    options = {"tuning": Tuning(bucket_numel=1024), "max_grad_norm": 0.5, **options}
    optimizer = TwinOptimizer(model, "adamw", lr=1e-2, eps=1e-3, **options)
    losses = []
    for _ in range(3):
        out = model(TOKENS[:, :-1], TOKENS[:, 1:]) if isinstance(model, GPT) else model(TOKENS, labels=TOKENS)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    optimizer.close()
    if handle is not None:
        handle.remove()
    return losses, [param.detach().clone() for param in model.parameters()]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed, inputs on the host": {"layers": "Block"},
    "early updates on the host": {"early": True, "ratio": 1.0},
    "weights on the host": {"offload_params": True},
    "weights on the host, checkpointed": {"offload_params": True, "layers": "Block"},
}


@pytest.mark.parametrize("case", CASES)
def test_gpt_trains_as_without_tiles(case: str) -> None:
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        found.append(steps(GPT(SHAPE), tiled, **CASES[case]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_compiled_model_runs_tiles_between_its_graphs() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    expected = model(TOKENS[:, :-1], TOKENS[:, 1:]).loss
    tile_sequence(model, 8)
    model.compile(backend="eager")
    torch.testing.assert_close(model(TOKENS[:, :-1], TOKENS[:, 1:]).loss, expected)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 64}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    )


@pytest.mark.parametrize(
    "options", [{}, {"offload_params": True}, {"layers": "LlamaDecoderLayer"}], ids=lambda o: " ".join(o) or "plain"
)
def test_a_hugging_face_model_trains_as_without_tiles(options: dict[str, Any]) -> None:
    found = [steps(llama(), tiled, **options) for tiled in (False, True)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_attention_of_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [tiled_sequence.groups_of(numel, 8) for numel in (1, 2**29, 2**29 + 1, 3 * 2**29, 2**40)] == [1, 1, 2, 4, 8]
    torch.manual_seed(0)
    model = llama().double()
    expected = torch.autograd.grad(model(TOKENS, labels=TOKENS).loss, list(model.parameters()))
    monkeypatch.setattr(tiled_sequence, "HEADS_NUMEL", 64)
    handle = tile_sequence(model, 8)
    assert model.config._attn_implementation == "twinflow_heads_sdpa"
    found = torch.autograd.grad(model(TOKENS, labels=TOKENS).loss, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"


def test_what_is_tiled_in_a_hugging_face_model() -> None:
    model = llama()
    handle = tile_sequence(model, 8)
    layer = ["input_layernorm", "mlp", "post_attention_layernorm"]
    assert sorted(handle.names) == [*(f"model.layers.{i}.{name}" for i in (0, 1) for name in layer), "model.norm"]
    assert handle.has_loss
    handle.remove()
    assert not any(map(is_tiled, model.modules()))
    assert not tile_sequence(model, 8, modules=["LlamaMLP"], loss=False).has_loss
    with pytest.raises(ValueError, match="A class in modules= is 'LlamaMlp'"):
        tile_sequence(model, modules=["LlamaMlp"])
    with pytest.raises(ValueError, match="whose blocks have an MLP"):
        tile_sequence(nn.Linear(2, 2))
