# SPDX-License-Identifier: Apache-2.0
"""Layers with sparse attention against the dense truth, and how they are put into models."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twinflow
from twinflow import attention as att
from twinflow.attention.function import PatternAttention
from twinflow.config import load_config
from twinflow.models.gpt import GPT, GPTConfig

HEADS = 4
WINDOW = att.LocalSlidingWindowSparsityConfig(HEADS, num_sliding_window_blocks=3)
RANDOM = att.BigBirdSparsityConfig(HEADS, 16, True, num_random_blocks=2, attention="unidirectional")
FIXED = att.FixedSparsityConfig(HEADS, 16, attention="unidirectional")
VARIABLE = att.VariableSparsityConfig(HEADS, num_random_blocks=1, local_window_blocks=[1, 2])


def qkv(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, HEADS, tokens, 8, generator=generator, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def agree(ours: Tensor, truth: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    grads = (torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, truth))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("pattern", [VARIABLE, FIXED, att.DenseSparsityConfig(HEADS)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(("padding_mode", "mask_mode"), [("add", "mul"), ("mul", "add"), ("add", "add")])
@pytest.mark.parametrize("has_rpe", [False, True])
def test_the_layer_against_the_truth(
    pattern: att.SparsityConfig, padding_mode: str, mask_mode: str, has_rpe: bool
) -> None:
    tokens = 50
    layer = att.SparseSelfAttention(pattern, padding_mode, mask_mode, max_seq_length=128)
    q, k, v = qkv(tokens)
    padding = torch.ones(2, tokens, dtype=torch.bool)
    padding[1, 37:] = False
    keep = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.8
    keep.fill_diagonal_(True)
    rpe = torch.randn(HEADS, tokens, tokens, dtype=torch.float64, requires_grad=True) if has_rpe else None
    low = torch.zeros(2, tokens, dtype=torch.float64).masked_fill(~padding, -10000.0)
    padding_mask = padding.long() if padding_mode == "mul" else low[:, None, None]
    mask = keep.double() if mask_mode == "mul" else torch.zeros(tokens, tokens).masked_fill(~keep, -math.inf)
    out = layer(q, k, v, rpe=rpe, key_padding_mask=padding_mask, attn_mask=mask)
    extras = {"key_padding": padding, "mask": keep, "bias": rpe}
    truth = att.dense_attention(q, k, v, layer.get_layout(tokens), **extras)
    inputs = (q, k, v) if rpe is None else (q, k, v, rpe)
    visible = padding if pattern.is_causal else torch.ones_like(padding)  # all keys of a padded query may be gone
    agree(out * visible[:, None, :, None], truth * visible[:, None, :, None], inputs)


def test_two_layers_never_share_a_layout() -> None:
    q, k, v = qkv(64)
    narrow = att.SparseSelfAttention(WINDOW, max_seq_length=64)
    wide = att.SparseSelfAttention(att.DenseSparsityConfig(HEADS), max_seq_length=64)
    first = narrow(q, k, v)
    agree(wide(q, k, v), F.scaled_dot_product_attention(q, k, v), (q, k, v))
    assert torch.equal(first, narrow(q, k, v))
    assert copy.deepcopy(narrow).get_layout(64) == narrow.get_layout(64)
    assert not narrow.state_dict()


@pytest.mark.parametrize("pattern", [RANDOM, FIXED, VARIABLE, WINDOW], ids=lambda p: type(p).__name__)
def test_a_shorter_sequence_has_the_corner_of_the_longest(pattern: att.SparsityConfig) -> None:
    layer = att.SparseSelfAttention(pattern, max_seq_length=512)
    whole = pattern.layout(512).to_dense()
    for tokens in (1, 64, 200, 512):
        num_blocks = -(-tokens // 16)
        assert torch.equal(layer.get_layout(tokens).to_dense(), whole[:, :num_blocks, :num_blocks])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_dtype_and_a_key_that_is_transposed_already(dtype: torch.dtype) -> None:
    q, k, v = (tensor.detach().to(dtype) for tensor in qkv(40))
    layer = att.SparseSelfAttention(WINDOW)
    out = layer(q, k, v)
    assert out.dtype == dtype
    assert torch.equal(out, layer(q, k.transpose(-1, -2), v))
    truth = att.dense_attention(q.double(), k.double(), v.double(), layer.get_layout(40))
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({"key_padding_mask_mode": "sub"}, None, "key_padding_mask_mode is 'sub'"),
        ({"max_seq_length": 0}, None, "max_seq_length is 0"),
        ({"sparsity_config": "fixed"}, None, "SparsityConfig"),
        ({"backend": "cuda"}, None, "backend is 'cuda'"),
        ({"max_seq_length": 32}, {}, "larger max_seq_length"),
        ({}, {"key_padding_mask": torch.ones(2, 40, dtype=torch.long)}, 'key_padding_mask_mode="mul"'),
        ({}, {"key_padding_mask": torch.zeros(2, 39)}, "key_padding_mask.shape"),
        ({}, {"attn_mask": torch.ones(2, 40, 40)}, "attn_mask.shape"),
        ({}, {"key": torch.zeros(2, HEADS, 8, 8)}, "self-attention"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], call: dict[str, Tensor] | None, words: str) -> None:
    def run() -> None:
        layer = att.SparseSelfAttention(**{"sparsity_config": WINDOW, **options})
        q, k, v = (tensor.detach().float() for tensor in qkv(40))
        layer(**{"query": q, "key": k, "value": v, **(call or {})})

    with pytest.raises(ValueError, match=words):
        run()


def test_the_layer_of_bert() -> None:
    config = SimpleNamespace(hidden_size=32, num_attention_heads=HEADS, max_position_embeddings=64)
    layer = att.BertSparseSelfAttention(config, att.DenseSparsityConfig(HEADS)).double()
    hidden = torch.randn(2, 40, 32, dtype=torch.float64)
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[0, 30:] = False
    parts = [part(hidden).view(2, 40, HEADS, 8).transpose(1, 2) for part in (layer.query, layer.key, layer.value)]
    truth = F.scaled_dot_product_attention(*parts, attn_mask=keep[:, None, None])
    truth = truth.transpose(1, 2).reshape(2, 40, 32)
    additive = torch.zeros(2, 1, 1, 40).masked_fill(~keep[:, None, None], torch.finfo(torch.float32).min)
    for mask in (keep, keep.long(), additive):
        torch.testing.assert_close(layer(hidden, mask), truth)
    assert att.BertSparseSelfAttention(config)(hidden.float()).shape == (2, 40, 32)
    with pytest.raises(ValueError, match=r"sparsity_config.num_heads is 3"):
        att.BertSparseSelfAttention(config, att.FixedSparsityConfig(3))


@pytest.mark.parametrize("pattern", [RANDOM, FIXED, WINDOW], ids=lambda p: type(p).__name__)
def test_what_a_token_sees_does_not_depend_on_what_follows(pattern: att.SparsityConfig) -> None:
    attend = PatternAttention(pattern, 256)
    q, k, v = (tensor.detach() for tensor in qkv(200))
    whole = attend(q, k, v)
    for end in (17, 64, 130):
        part = [tensor[:, :, :end] for tensor in (q, k, v)]
        torch.testing.assert_close(attend(*part), whole[:, :, :end])
        for count in (1, 5):  # decoding with a cache
            out = attend(part[0][:, :, -count:], part[1], part[2])
            torch.testing.assert_close(out, whole[:, :, end - count : end])
    assert len(attend._layouts) <= 8


def test_heads_split_over_ranks() -> None:
    q, k, v = (tensor.detach() for tensor in qkv(100))
    whole = PatternAttention(RANDOM, 128)(q, k, v)
    assert RANDOM.layout(128).num_patterns == HEADS
    for start in (0, 2):
        own = [tensor[:, start : start + 2] for tensor in (q, k, v)]
        part = PatternAttention(RANDOM, 128, heads=(start, start + 2))(*own)
        torch.testing.assert_close(part, whole[:, start : start + 2])
    with pytest.raises(ValueError, match="heads of q is 2"):
        PatternAttention(RANDOM, 128)(*(tensor[:, :2] for tensor in (q, k, v)))
    alike = PatternAttention(FIXED, 128)
    torch.testing.assert_close(alike(*(t[:, 2:] for t in (q, k, v))), alike(q, k, v)[:, 2:])
    with pytest.raises(ValueError, match="heads is"):
        PatternAttention(FIXED, heads=(2, 9))


def test_dropout_is_the_same_when_a_layer_runs_again() -> None:
    attend = PatternAttention(WINDOW, 64)
    q, k, v = qkv(64)
    found = []
    for runs_again in (False, True):
        torch.manual_seed(3)
        out = checkpoint(_dropped, attend, q, k, v, use_reentrant=False) if runs_again else _dropped(attend, q, k, v)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][0], _dropped(attend, q, k, v))


def _dropped(attend: PatternAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, dropout=0.3)


def test_autocast_decides_the_dtype() -> None:
    q, k, v = (tensor.detach().float() for tensor in qkv(32))
    with torch.autocast("cpu", torch.bfloat16):
        assert PatternAttention(WINDOW)(q, k.bfloat16(), v).dtype == torch.bfloat16


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=32, context=96, num_layers=2, hidden=32, num_heads=HEADS, dropout=dropout))


def tokens(step: int = 0) -> Tensor:
    return torch.randint(32, (2, 96), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    loss: Tensor = model(tokens(step), tokens(step).roll(-1, 1)).loss
    return loss.detach()


def test_our_gpt_takes_a_pattern_and_gives_it_back() -> None:
    model = gpt()
    dense = loss_of(model)
    assert att.sparsify(model, att.DenseSparsityConfig(HEADS)) is model
    torch.testing.assert_close(loss_of(model), dense)
    att.sparsify(model, WINDOW)
    assert abs(float(loss_of(model) - dense)) > 1e-6
    sparse = loss_of(model)
    att.sparsify(model, {1: WINDOW})
    assert float(loss_of(model)) not in (float(dense), float(sparse))
    att.sparsify(model, [WINDOW, WINDOW])
    assert torch.equal(loss_of(model), sparse)
    assert torch.equal(loss_of(att.unsparsify(model)), dense)


def test_a_token_of_a_sparse_gpt_sees_what_its_blocks_see() -> None:
    model = att.sparsify(gpt(), WINDOW)  # blocks of 16: a layer sees at most its own block and the one before
    before, changed = tokens(), tokens()
    changed[:, 16] = (changed[:, 16] + 1) % 32
    differs = (model(before).logits != model(changed).logits).any(-1).any(0)
    assert not differs[:16].any()
    assert differs[16:64].all()
    assert not differs[64:].any()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (att.BigBirdSparsityConfig(HEADS), 'attention="unidirectional"'),
        (att.LocalSlidingWindowSparsityConfig(3), r"pattern.num_heads is 3, but must be 4"),
        ([WINDOW], "number of patterns is 1, but must be 2, one for each layer"),
        ({2: WINDOW}, "A key of the dict of patterns is 2, but must be a layer number from 0 to 1"),
        ({}, "at least one layer"),
        ("fixed", "pattern is of type str"),
        ([WINDOW, None], "pattern of a layer is of type NoneType"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(pattern: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        att.sparsify(gpt(), pattern)


class Own(nn.Module):
    """A model with sparse layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.attention = att.SparseSelfAttention(FIXED)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x * self.weight, x, x)
        return out.square().mean()


CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 0.0,
}


def initialized(model: nn.Module, **more: Any) -> Any:
    return twinflow.initialize(model=model, config={**CONFIG, **more}, dist_init_required=False)[0]


def test_the_config_changes_the_model_and_it_trains_with_offload_and_checkpointing() -> None:
    section = {"mode": "bigbird", "num_random_blocks": 1, "attention": "unidirectional", "seed": 3}
    engine = initialized(
        gpt(dropout=0.1),
        sparse_attention=section,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        activation_checkpointing={"cpu_checkpointing": True},
    )
    plain = att.sparsify(gpt(dropout=0.1), att.BigBirdSparsityConfig(HEADS, attention="unidirectional", seed=3))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    device = next(engine.module.parameters()).device
    plain.to(device)
    for step in range(3):
        torch.manual_seed(step)
        ours = engine(tokens(step).to(device), tokens(step).roll(-1, 1).to(device)).loss
        engine.backward(ours)
        engine.step()
        torch.manual_seed(step)
        loss = plain(tokens(step).to(device), tokens(step).roll(-1, 1).to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
    engine.destroy()


def test_the_config_gives_sparse_layers_their_pattern() -> None:
    for section, kind in (({"mode": "dense"}, att.DenseSparsityConfig), ({"mode": "local"}, type(WINDOW))):
        engine = initialized(Own(), sparse_attention=section)
        assert type(engine.module.attention.sparsity_config) is kind
        engine.destroy()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, 'attention="unidirectional"'),
        (
            {"mode": "local", "num_random_blocks": 2},
            "num_random_blocks=2 cannot be used with.*Remove the key, or use the mode variable or bigbird",
        ),
        ({"mode": "fixed", "attention": "unidirectional", "num_local_blocks": 3, "num_global_blocks": 2}, "divisor"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        initialized(gpt(), sparse_attention=section)


def test_a_model_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"cannot be applied to a model of the class Sequential\..*SparseSelfAttention"
    ):
        initialized(nn.Sequential(nn.Linear(4, 4)), sparse_attention={"mode": "local"})
    initialized(nn.Sequential(nn.Linear(4, 4)), sparse_attention={"mode": "dense"}).destroy()


def test_a_config_may_spell_out_the_defaults_of_other_modes() -> None:
    section = load_config({"sparse_attention": {"mode": "local", "num_random_blocks": 0, "attention": "bidirectional"}})
    assert section.sparse_attention is not None
    assert section.sparse_attention.given() == {"mode": "local", "attention": "bidirectional"}


def test_padding_to_blocks() -> None:
    ids, mask = torch.randint(5, 9, (2, 21)), torch.ones(2, 21)
    table = nn.Embedding(10, 4)
    padded = att.pad_to_block_size(16, ids, mask, ids * 0, ids * 0 + 3, table(ids), 1, table)
    pad_len, *tensors = padded
    assert pad_len == 11
    assert all(tensor is not None and tensor.shape[:2] == (2, 32) for tensor in tensors)
    assert padded.input_ids is not None
    assert torch.equal(padded.input_ids, F.pad(ids, (0, 11), value=1))
    assert padded.attention_mask is not None
    assert padded.attention_mask[:, 21:].eq(0).all()
    assert padded.inputs_embeds is not None
    assert torch.equal(padded.inputs_embeds, table(padded.input_ids))
    assert torch.equal(att.unpad_sequence_output(11, padded.inputs_embeds), table(ids))
    made = att.pad_to_block_size(16, ids)
    assert made.attention_mask is not None
    assert made.attention_mask.sum() == 42
    assert att.pad_to_block_size(7, ids).input_ids is ids
    assert att.unpad_sequence_output(0, ids) is ids
    with pytest.raises(ValueError, match="input_ids and inputs_embeds are None"):
        att.pad_to_block_size(16)
    utils = att.SparseAttentionUtils.pad_to_block_size(16, ids, mask, None, None, None, 1, None)
    assert utils.pad_len == 11
