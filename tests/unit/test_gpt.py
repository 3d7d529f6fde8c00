"""The GPT against a plain float64 reference, and its cost model against the real module."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from twinflow.models.gpt import GPT, INIT_STD, PRESETS, Block, GPTConfig, count_params, flops_per_token

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
    logits, loss = model(tokens, targets)
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
    "config", [SMALL, replace(SMALL, tied=False), replace(SMALL, num_layers=1), *PRESETS.values()], ids=str
)
def test_count_params_is_what_the_module_has(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert count_params(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_is_what_torch_counts(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    tokens = torch.zeros(2, config.context, dtype=torch.int64)
    # The plain attention: fused kernels recompute in backward, and are counted so.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        GPT(config)(tokens, tokens).loss.backward()
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
    with pytest.raises(ValueError, match="allowed") as error:
        replace(SMALL, **change)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"12.*context.*11"):
        GPT(SMALL)(torch.zeros(1, 12, dtype=torch.int64))


def test_the_loss_of_a_bf16_model_is_fp32() -> None:
    loss = GPT(SMALL).bfloat16()(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).loss
    assert loss.dtype == torch.float32
