# SPDX-License-Identifier: Apache-2.0
"""The GPT against a plain float64 reference, and its cost model against the real module."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from twinflow import loss as loss_module
from twinflow.loss import LOSS_CHUNK, Targets, WholeSoftmax, chunked_cross_entropy
from twinflow.models.gpt import (
    GPT,
    INIT_STD,
    PRESET_BATCH,
    PRESETS,
    Block,
    Experts,
    GPTConfig,
    activation_bytes,
    cost_of,
    count_params,
    flops_per_token,
)
from twinflow.offload.materialize import build
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.plans import plan_for

SMALL = GPTConfig(vocab_size=37, context=11, num_layers=3, hidden=24, num_heads=3)


def model_with_noise(config: GPTConfig) -> GPT:
    """Biases and norms too are random, so that one left out of the arithmetic would show."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.2)
    return model


def norm(x: Tensor, module: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight + module.bias


def reference_logits(model: GPT, tokens: Tensor) -> Tensor:
    """GPT-2's forward in plain steps, one sequence."""
    size = len(tokens)
    x = model.token_embedding.weight[tokens] + model.position_embedding.weight[:size]
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, v = (norm(x, block.attention_norm) @ block.attention.qkv.weight.T + block.attention.qkv.bias).chunk(3, -1)
        width = model.config.hidden // model.config.num_heads
        mixed = []
        for head in range(model.config.num_heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width)
            scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ v[:, part])
        x = x + torch.cat(mixed, -1) @ block.attention.out.weight.T + block.attention.out.bias
        up = norm(x, block.mlp_norm) @ block.mlp.up.weight.T + block.mlp.up.bias
        gelu = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + gelu @ block.mlp.down.weight.T + block.mlp.down.bias
    return norm(x, model.norm) @ model.head.weight.T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_match_the_reference(tied: bool) -> None:
    model = model_with_noise(replace(SMALL, tied=tied)).double()
    tokens, targets = torch.randint(37, (2, 2, 9))
    logits, (no_logits, loss) = model(tokens).logits, model(tokens, targets)
    assert no_logits is None
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    expected = torch.stack([reference_logits(model, row) for row in tokens])
    expected_loss = -expected.log_softmax(-1).gather(-1, targets[..., None]).mean()
    expected_loss.backward()
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-9)
    for (name, param), grad in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-7, atol=1e-9, msg=name)


MOE = replace(SMALL, num_experts=5, num_experts_per_tok=2)


def reference_experts(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output for rows `x`, row by row, and the load-balancing loss."""
    probabilities = (x @ layer.router.weight.T).softmax(-1)
    rows, counts = [], [0] * len(layer.up)
    for row, own in zip(x, probabilities, strict=True):
        best = sorted(range(len(own)), key=lambda i: -float(own[i].detach()))[: layer.num_chosen]
        total = sum(own[i] for i in best)
        rows.append(sum(own[i] / total * (layer.down[i] @ F.gelu(layer.up[i] @ row, approximate="tanh")) for i in best))
        for i in best:
            counts[i] += 1
    shares = torch.tensor(counts, dtype=x.dtype) / sum(counts)
    return torch.stack(rows), len(counts) * (shares * probabilities.mean(0)).sum()


def test_experts_match_the_reference() -> None:
    torch.manual_seed(0)
    layer = Experts(MOE).double()
    for param in layer.parameters():
        nn.init.normal_(param)
    x = torch.randn(2, 6, MOE.hidden, dtype=torch.float64)
    y = layer(x)
    assert layer.balance is not None
    (y.square().mean() + layer.balance).backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    rows, balance = reference_experts(layer, x.flatten(0, 1))
    torch.testing.assert_close(y.flatten(0, 1), rows, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.balance, balance, rtol=1e-9, atol=1e-9)
    (rows.square().mean() + balance).backward()
    for param, grad in zip(layer.parameters(), found, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 1])
def test_a_loss_in_training_has_the_balance_of_the_routers(recompute: str | int) -> None:
    model = model_with_noise(replace(MOE, recompute=recompute, router_loss=0.5)).double()
    plain = model_with_noise(replace(MOE, router_loss=0.5)).double()
    tokens, targets = torch.randint(37, (2, 2, 9))
    losses = [one(tokens, targets).loss for one in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    assert all(block.mlp.balance is None for block in model.blocks)  # the graph is free
    balance = model.balance
    assert balance is not None
    assert balance > 1.0
    torch.testing.assert_close(losses[0] - model.eval()(tokens, targets).loss, 0.5 * balance)


def test_what_experts_exclude() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 6, but must be a number from 1 to num_experts"):
        replace(MOE, num_experts_per_tok=6)
    model = GPT(MOE)
    with pytest.raises(ValueError, match="A pipeline cannot be used with the experts of twinflow's GPT"):
        model.pipeline_parts()
    with pytest.raises(ValueError, match="The experts of twinflow's GPT cannot be used with tensor ranks"):
        plan_for(model)


def test_a_token_does_not_see_what_follows() -> None:
    model = model_with_noise(SMALL)
    tokens = torch.randint(37, (1, 11))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 37
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_without_targets_there_is_no_loss() -> None:
    assert GPT(SMALL)(torch.zeros(1, 3, dtype=torch.int64)).loss is None


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, tied=False), replace(SMALL, num_layers=1), *PRESETS.values()],
    ids=["tied", "untied", "one layer", *PRESETS],
)
def test_count_params_is_what_the_module_has(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert count_params(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-350m", 0.356), ("gpt2-1.5b", 1.56), ("gpt2-10b", 10.28), ("gpt2-13b", 13.3)]
)
def test_a_preset_is_as_large_as_its_name_says(name: str, billions: float) -> None:
    assert count_params(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=0.01)
    assert PRESETS[name].vocab_size % 128 == 0
    assert PRESETS[name].vocab_size >= 50257


def test_every_preset_has_a_batch_size() -> None:
    assert PRESET_BATCH.keys() == PRESETS.keys()
    assert (PRESET_BATCH["gpt2-10b"], PRESET_BATCH["gpt2-13b"]) == (10, 4)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, tied=False),
        *(pytest.param(c, marks=[pytest.mark.matrix] * (c.hidden > 512)) for c in PRESETS.values()),
    ],
    ids=["tied", "untied", *PRESETS],
)
def test_flops_per_token_is_what_torch_counts(config: GPTConfig) -> None:
    with torch.device("cpu" if config.num_experts else "meta"):  # tokens of an expert have no number on meta
        model, tokens = GPT(config), torch.zeros(1, config.context, dtype=torch.int64)
    # The plain attention: fused kernels recompute in backward, and are counted so.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).loss.backward()
    assert counter.get_total_flops() == flops_per_token(config) * tokens.numel()


def test_the_start_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, context=64, num_layers=8, hidden=128, num_heads=4))
    for name, param in model.named_parameters():
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            assert param.std().item() == pytest.approx(INIT_STD / 4, rel=0.05), name
        elif param.dim() == 2:
            assert param.std().item() == pytest.approx(INIT_STD, rel=0.05), name
        elif "norm" in name and name.endswith("weight"):
            assert torch.all(param == 1), name
        else:
            assert torch.all(param == 0), name


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = GPT(SMALL), GPT(replace(SMALL, tied=False))
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight


def test_dropout_acts_in_training_only() -> None:
    model = model_with_noise(replace(SMALL, dropout=0.5))
    tokens = torch.randint(37, (1, 11))
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 25}, ["hidden", "25", "num_heads", "3"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ValueError, match="but must be") as error:
        replace(SMALL, **change)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"12.*context.*11"):
        GPT(SMALL)(torch.zeros(1, 12, dtype=torch.int64))


def test_the_loss_of_a_bf16_model_is_fp32() -> None:
    loss = GPT(SMALL).bfloat16()(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).loss
    assert loss.dtype == torch.float32


# Weights made one layer at a time.


@pytest.mark.parametrize("tied", [True, False])
def test_built_from_the_meta_device_it_starts_as_the_plain_one(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    torch.manual_seed(3)
    plain = GPT(config)
    torch.manual_seed(3)
    built = build(lambda: GPT(config), "cpu")
    for (name, param), expected in zip(built.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected), name


def test_built_in_bf16_it_has_gpt2s_deviations_and_its_tie() -> None:
    config = GPTConfig(vocab_size=256, context=64, num_layers=8, hidden=128, num_heads=4)
    torch.manual_seed(0)
    model = build(lambda: GPT(config), "cpu", torch.bfloat16)
    assert isinstance(model, GPT)
    assert model.head.weight is model.token_embedding.weight
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        if param.dim() == 2:
            std = INIT_STD / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
            assert param.float().std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert torch.all(param == (1 if name.endswith("norm.weight") else 0)), name


def test_init_weights_draws_what_the_constructor_draws() -> None:
    torch.manual_seed(5)
    plain = GPT(SMALL)
    model = model_with_noise(SMALL)
    torch.manual_seed(5)
    model.init_weights()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected), name


# The loss without logits.


def loss_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(num_tokens, 16).to(dtype).requires_grad_()
    weight = (torch.randn(41, 16) * 0.5).to(dtype).requires_grad_()
    targets = torch.randint(41, (num_tokens,))
    targets[::5] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_chunked_loss_and_gradients_are_torchs(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = loss_inputs(33, dtype)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    expected_grads = torch.autograd.grad(expected * 3, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets, chunk)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for grad, truth in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, truth, rtol=0, atol=tolerance)


class WatchedSoftmax(WholeSoftmax):
    """Counts the chunks whose logits exist when the next chunk begins."""

    def __init__(self) -> None:
        self.logits: list[weakref.ref[Tensor]] = []
        self.num_alive: list[int] = []

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        self.num_alive.append(sum(ref() is not None for ref in self.logits))
        return super().find(targets, num_rows)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        self.logits.append(weakref.ref(logits))
        return super().losses_and_probs(logits, targets)


@pytest.mark.parametrize("wants_grad", [True, False])
def test_logits_of_a_chunk_are_freed_before_the_next_chunk(wants_grad: bool) -> None:
    hidden, weight = torch.randn(8, 4, requires_grad=wants_grad), torch.randn(6, 4, requires_grad=wants_grad)
    softmax = WatchedSoftmax()
    chunked_cross_entropy(hidden, weight, torch.arange(8) % 6, chunk=3, softmax=softmax)
    assert softmax.num_alive == [0, 0, 0]


@pytest.mark.matrix
def test_chunked_loss_by_finite_differences() -> None:
    hidden, weight, targets = loss_inputs(6, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, 4), (hidden, weight))
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, targets, 4) * scale
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_chunked_loss_in_half_precision_is_near_the_truth(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "PRODUCT_ROWS", 16)
    hidden, weight, targets = loss_inputs(64, dtype)
    truth = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    true_grads = torch.autograd.grad(truth, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets, 10)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=tolerance, atol=tolerance)
    for grad, true in zip(torch.autograd.grad(loss, (hidden, weight)), true_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - true.double()).norm() <= tolerance * true.double().norm()


def test_the_weights_gradient_is_summed_in_fp32() -> None:
    # 1,000 chunks that each add the same: in bf16 the sum would stop growing at 256 of them.
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(1000, dtype=torch.int64), chunk=1)
    loss.backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-0.5], [0.5]], dtype=torch.bfloat16), rtol=5e-3, atol=0)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen: int) -> None:
    inputs = loss_inputs(9, torch.float32)
    hidden, weight, targets = inputs
    inputs[frozen].requires_grad_(False)
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), inputs[1 - frozen])
    found = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, 4), inputs[1 - frozen])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_without_any_target_the_loss_is_nan_and_the_gradient_zero() -> None:
    hidden, weight, targets = loss_inputs(9, torch.float32)
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), 4)
    loss.backward()
    assert loss.isnan()
    assert weight.grad is not None
    assert torch.all(weight.grad == 0)


def test_chunked_loss_under_autocast() -> None:
    hidden, weight, targets = loss_inputs(33, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        loss = chunked_cross_entropy(hidden, weight, targets, 8)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    grads, truth = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected))
    for grad, true in zip(grads, truth, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, true, rtol=2e-2, atol=1e-3)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives, and how many products it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket.__name__ in ("mm", "addmm")
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_more_logits_than_a_chunk_exist_at_a_time() -> None:
    hidden, weight, targets = loss_inputs(200, torch.float32)
    with Largest() as seen:
        chunked_cross_entropy(hidden, weight, targets, 10).backward()
    assert seen.numel == max(10 * 41, hidden.numel())
    assert seen.num_products == 3 * 20
    with Largest() as seen, torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, 10)
    assert seen.num_products == 20, "no gradients where none are wanted"


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_cross_entropy(*loss_inputs(3, torch.float32), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chunked_loss_on_the_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "PRODUCT_ROWS", 16)
    hidden, weight, targets = (tensor.detach().cuda() for tensor in loss_inputs(64, dtype))
    hidden.requires_grad_()
    weight.requires_grad_()
    truth = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    loss = chunked_cross_entropy(hidden, weight, targets, 10)
    grads, true_grads = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, truth))
    torch.testing.assert_close(loss.double(), truth, rtol=2e-2, atol=2e-2)
    for grad, true in zip(grads, true_grads, strict=True):
        assert (grad.double() - true.double()).norm() <= 2e-2 * true.double().norm()


# Activation checkpointing.


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient_and_runs_forward_twice(dropout: float) -> None:
    plain = model_with_noise(replace(SMALL, dropout=dropout))
    config = replace(SMALL, dropout=dropout, recompute="full")
    model = GPT(config)
    model.load_state_dict(plain.state_dict())
    runs: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: runs.append(module))
    tokens, targets = torch.randint(37, (2, 2, 9))
    for gpt in (plain, model):
        torch.manual_seed(9)
        gpt(tokens, targets).loss.backward()
    assert len(runs) == 2 * config.num_layers
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad), name

    runs.clear()
    with torch.no_grad():
        model(tokens, targets)
    model.eval()
    model(tokens, targets).loss.backward()
    assert len(runs) == 2 * config.num_layers, "once each: there is nothing to save, or it is not training"


def test_every_recomputation_gives_the_same_bits() -> None:
    tokens, targets = torch.randint(37, (2, 2, 9))
    config = replace(SMALL, num_layers=4, dropout=0.2)
    plain = model_with_noise(config)
    torch.manual_seed(9)
    plain(tokens, targets).loss.backward()
    for recompute in ("selective", 0, 2, 3, "full"):
        model = GPT(replace(config, recompute=recompute))
        model.load_state_dict(plain.state_dict())
        torch.manual_seed(9)
        model(tokens, targets).loss.backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad, expected.grad), (recompute, name)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_blocks_that_are_recomputed_are_spread_evenly(count: int) -> None:
    config = replace(SMALL, num_layers=5, recompute=count)
    chosen = [config.is_recomputed(i) for i in range(5)]
    assert sum(chosen) == config.num_recomputed == count
    model = GPT(config)
    assert [block.is_selective for block in model.blocks] == [not is_chosen for is_chosen in chosen]
    assert count != 2 or chosen == [True, False, False, True, False]


@pytest.mark.parametrize("recompute", ["some", 3, -1, True])
def test_a_recomputation_that_does_not_exist(recompute: Any) -> None:
    with pytest.raises(ValueError, match=r"recompute is .*but must be none, selective, full, or a number of blocks"):
        replace(SMALL, num_layers=2, recompute=recompute)


def test_selective_bytes_is_what_a_selective_block_keeps() -> None:
    """The results that its checkpoint keeps are not saved by autograd, so all tensors that are alive are counted."""
    config = GPTConfig(vocab_size=64, context=32, num_layers=1, hidden=48, num_heads=4)
    block = Block(config, is_selective=True)
    x = torch.randn(3, 32, 48, requires_grad=True)
    weights = {param.untyped_storage().data_ptr() for param in block.parameters()}

    def alive() -> dict[int, int]:
        found = [item for item in gc.get_objects() if type(item) is Tensor and not item.is_meta]
        storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}
        return {key: size for key, size in storages.items() if key not in weights}

    gc.collect()
    before = alive()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = block(x)
    kept = sum(size for key, size in alive().items() if key not in before and key != y.untyped_storage().data_ptr())
    stream = 96 * 48 * 4  # the input, which was there before
    expected = 96 * cost_of(config, dtype_bytes=4).activations.selective_bytes
    assert kept + stream == pytest.approx(expected, rel=0.02)


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Bytes of the storages that autograd keeps, weights left out."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages: dict[int, int] = {}
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    found.append(sum(storages.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_is_what_autograd_keeps(dtype: torch.dtype) -> None:
    config = GPTConfig(vocab_size=64, context=32, num_layers=1, hidden=48, num_heads=4)
    block = Block(config).to(dtype)
    x = torch.randn(3, 32, 48, dtype=dtype, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), kept_bytes(block) as kept:
        y = block(x)
    del y
    # The norms of a bf16 layer keep their statistics in bf16 on the CPU, in fp32 on a GPU.
    assert kept[0] == pytest.approx(96 * cost_of(config, dtype_bytes=dtype.itemsize).activations.block_bytes, rel=0.02)


def test_the_whole_model_keeps_its_blocks_and_what_the_loss_needs() -> None:
    config = GPTConfig(vocab_size=64, context=32, num_layers=3, hidden=48, num_heads=4)
    model, tokens = GPT(config), torch.randint(64, (3, 32))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), kept_bytes(model) as kept:
        loss = model(tokens, tokens).loss
    assert loss.requires_grad
    stream = 96 * 48 * 4
    expected = (
        3 * 96 * cost_of(config, dtype_bytes=4).activations.block_bytes + 2 * stream + 64 * 48 * 4
    )  # two: the last norm's input, hidden's gradient
    assert kept[0] == pytest.approx(expected, rel=0.02)
    assert expected <= activation_bytes(config, 3, 32, dtype_bytes=4) <= 1.5 * expected


def test_activation_bytes_by_hand() -> None:
    config = PRESETS["gpt2-10b"]
    stream = 10 * 1024 * 4096 * 2
    full = replace(config, recompute="full")
    plain, checkpointed = activation_bytes(config, 10, 1024), activation_bytes(full, 10, 1024)
    assert plain == pytest.approx(50 * 16 * stream, rel=0.05)
    head = 50304 * 4096 * 4 + LOSS_CHUNK * 50304 * 6
    assert checkpointed == pytest.approx(50 * stream + max(head + 2 * stream, 1.6 * 16 * stream), rel=0.05)
    assert activation_bytes(full, 20, 1024) > 1.9 * checkpointed
    assert activation_bytes(replace(config, dropout=0.1), 10, 1024) > plain
    selective = activation_bytes(replace(config, recompute="selective"), 10, 1024)
    assert selective == pytest.approx(50 * 11 * stream, rel=0.05)
    some = activation_bytes(replace(config, recompute=20), 10, 1024)
    assert some == pytest.approx((30 * 11 + 20 + 2 * 16) * stream, rel=0.05)


# With the optimizer on the host: weights are waited for in hooks, and the head's are the embedding's.


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_twin_optimizer_trains_it_as_torch_does(checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = GPT(replace(SMALL, recompute="full" if checkpointing else "none"))
    plain = copy.deepcopy(model)
    calls: list[str] = []
    model.head.register_forward_pre_hook(lambda *_: calls.append("head"))
    twin = TwinOptimizer(model, lr=1e-3, early=True, host_threads=1)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=twin.param_groups[0]["weight_decay"])
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens, targets = torch.randint(37, (2, 4, 11), generator=generator)
        loss, expected = model(tokens, targets).loss, plain(tokens, targets).loss
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
        loss.backward()
        twin.step()
        twin.zero_grad()
        expected.backward()
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, targets).loss, plain(tokens, targets).loss, rtol=0, atol=1e-5)
            torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-4)
    assert len(calls) == 15
    twin.flush()
    for (name, param), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, truth, rtol=0, atol=1e-5, msg=name)
    twin.close()
