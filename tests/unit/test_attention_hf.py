# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with sparse attention: their own eager attention is the truth."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinflow
from twinflow import attention as att

transformers = pytest.importorskip("transformers")

HEADS, VOCAB = 4, 64
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 128}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", {**SHAPE, **NO_DROPOUT, "max_position_embeddings": 128}),
    "roberta": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**SHAPE, **NO_DROPOUT, "max_position_embeddings": 130, "pad_token_id": 1},
    ),
}
DECODERS, ENCODERS = ("llama", "gpt2"), ("bert", "roberta")
UNI = "unidirectional"
WINDOW = att.LocalSlidingWindowSparsityConfig(HEADS)
WINDOW_CAUSAL = att.LocalSlidingWindowSparsityConfig(HEADS, attention=UNI)
BIGBIRD = att.BigBirdSparsityConfig(HEADS, 16, True, attention=UNI)


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind, config, options = MODELS[name]
    more = {"initializer_range": 0.3, **more}  # large enough for attention to be far from even
    made = getattr(transformers, config)(vocab_size=VOCAB, attn_implementation="eager", **{**options, **more})
    return getattr(transformers, kind)(made)


def batch(tokens: int = 45) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, tokens - 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_and_grads(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    return out.loss.detach(), out.logits.detach(), grads


@pytest.mark.parametrize("name", MODELS)
def test_dense_through_ours_is_eager(name: str) -> None:
    model, inputs = build(name), batch()
    truth = loss_and_grads(model, inputs)
    assert att.sparsify(model, att.DenseSparsityConfig(HEADS)) is model
    assert model.config._attn_implementation.startswith("twinflow_")
    ours = loss_and_grads(model, inputs)
    kept = inputs["attention_mask"] == 1
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1][kept], truth[1][kept], rtol=1e-5, atol=1e-5)
    for param, grad in truth[2].items():
        torch.testing.assert_close(ours[2][param], grad, rtol=1e-5, atol=1e-5, msg=param)
    att.unsparsify(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**inputs).logits, truth[1])
    assert not model._forward_pre_hooks


def square(pattern: att.SparsityConfig, tokens: int, max_tokens: int, padding: Tensor) -> Tensor:
    """A pattern with padding as transformers' eager attention takes it: [B, 1 or heads, tokens, tokens], added."""
    grid = pattern.layout(max_tokens).to_dense().repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :tokens, :tokens]
    if pattern.is_causal:
        grid = grid.tril()
    kept = grid[None] & padding[:, None, None].bool()
    return torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("name", MODELS)
def test_a_sparse_pattern_with_padding_is_eager_with_its_mask(name: str) -> None:
    kind = UNI if name in DECODERS else "bidirectional"
    pattern = att.BigBirdSparsityConfig(HEADS, 16, True, num_sliding_window_blocks=1, attention=kind)
    model, inputs = build(name), batch(77)
    kept = inputs["attention_mask"] == 1
    max_tokens = model.config.max_position_embeddings
    whole = {**inputs, "attention_mask": square(pattern, 77, max_tokens, inputs["attention_mask"])}
    truth = loss_and_grads(model, whole)
    dense = model(**inputs).logits.detach()
    att.sparsify(model, pattern)
    ours = loss_and_grads(model, inputs)
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1][kept], truth[1][kept], rtol=1e-4, atol=1e-5)
    for param, grad in truth[2].items():
        torch.testing.assert_close(ours[2][param], grad, rtol=1e-4, atol=1e-5, msg=param)
    assert (dense - ours[1])[kept].abs().max() > 0.1, "the pattern leaves something out"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("llama", BIGBIRD), ("gpt2", BIGBIRD), ("llama", att.FixedSparsityConfig(HEADS, attention=UNI)), ("gpt2", WINDOW)],
)
def test_generating_with_a_cache_is_generating_without(name: str, pattern: att.SparsityConfig) -> None:
    model = att.sparsify(build(name), pattern).eval()
    ids, mask = batch(40)["input_ids"], torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0  # padding on the left, as for generating
    found = [
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=20,
            do_sample=False,
            use_cache=cache,
            pad_token_id=1,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for cache in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    for cached, plain in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(cached, plain, rtol=1e-4, atol=1e-5)


GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3}
WINDOWED: dict[str, dict[str, Any]] = {  # each with a window that is shorter than the sequence
    "Mistral": {"sliding_window": 21},
    "Gemma2": {"sliding_window": 21, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.7},
    "GptOss": {"sliding_window": 21, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def windowed(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, attn_implementation="eager", pad_token_id=0, **GROUPED, **WINDOWED[name]
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_softcaps_and_sinks_are_those_of_the_model(name: str) -> None:
    """In training, without a mask of size queries x keys, and in generation, whose cache drops keys."""
    model, inputs = windowed(name), batch()
    truth = loss_and_grads(model, inputs)
    ids = inputs["input_ids"]
    wanted = model.eval().generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    att.sparsify(model.train(), att.DenseSparsityConfig(HEADS))
    ours = loss_and_grads(model, inputs)
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-5, atol=1e-5)
    for param, grad in truth[2].items():
        torch.testing.assert_close(ours[2][param], grad, rtol=1e-4, atol=1e-4, msg=param)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), wanted)


def test_a_mask_with_a_window_has_no_square() -> None:
    from twinflow.attention.huggingface import padding_mask

    config = transformers.MistralConfig(sliding_window=21)
    padding = torch.ones(2, 45, dtype=torch.bool)
    given: dict[str, Any] = {"attention_mask": padding, "config": config, "allow_is_causal_skip": True}
    mask = padding_mask(2, 45, 45, local_size=21, **given)
    assert mask is not None
    assert mask.shape == (2, 1, 1, 21, 45)
    assert mask.untyped_storage().nbytes() == padding.numel()
    chunked = transformers.MistralConfig(sliding_window=21, attention_chunk_size=21)
    function = transformers.masking_utils.chunked_causal_mask_function(21, torch.zeros(2, dtype=torch.long))
    given |= {"config": chunked, "mask_function": function}
    mask = padding_mask(2, 45, 45, local_size=21, **given)
    assert mask is not None
    assert mask.shape == (2, 1, 45, 45)


def test_a_prompt_in_pieces() -> None:
    model = att.sparsify(build("llama"), BIGBIRD).eval()
    ids = batch(50)["input_ids"]
    whole = model(ids).logits
    first = model(ids[:, :21], use_cache=True)
    second = model(ids[:, 21:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-5)


def test_a_static_cache_is_refused() -> None:
    model = att.sparsify(build("llama"), WINDOW).eval()
    with pytest.raises(ValueError, match="With sparse attention, the last key must be at the position"):
        model.generate(batch(8)["input_ids"], max_new_tokens=4, cache_implementation="static")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_packed_sequences_stay_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask of all scores. A decoder gets the sequences from positions that start again."""
    from twinflow.attention import function

    model = build(name)
    ids = batch(40)["input_ids"]
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None].expand(2, -1)
    truth = model(ids, position_ids=positions, use_cache=False).logits
    assert not torch.allclose(truth, model(ids).logits, atol=1e-4)
    att.sparsify(model, att.DenseSparsityConfig(HEADS))
    seen: list[set[str]] = []
    attend = function._attend

    def record(*args: Any) -> Tensor:
        seen.append({name for name, value in args[5].items() if isinstance(value, Tensor)})
        return attend(*args)

    monkeypatch.setattr(function, "_attend", record)
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, truth, rtol=1e-5, atol=1e-5)
    assert seen == [{"documents"} if name == "llama" else set()] * 2


def test_packed_sequences_with_a_sliding_window() -> None:
    """A mask that is not known to be one of packed sequences is used as it is."""
    config = {**SHAPE, "num_key_value_heads": 2, "sliding_window": 9, "vocab_size": VOCAB, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(attn_implementation="eager", **config))
    ids = batch(40)["input_ids"]
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None].expand(2, -1)
    truth = model(ids, position_ids=positions, use_cache=False).logits
    att.sparsify(model, att.DenseSparsityConfig(HEADS))
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, truth, rtol=1e-5, atol=1e-5)


def test_packed_sequences_by_their_starts() -> None:
    """The arguments of flash attention, which the collators of transformers can return."""
    model = att.sparsify(build("llama"), WINDOW_CAUSAL)
    ids = torch.randint(2, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None]
    starts = torch.tensor([0, 24, 40], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 24, "max_length_k": 24}
    mask = torch.ones_like(ids)  # so that positions alone do not make packed sequences
    truth = model(ids, position_ids=positions, use_cache=False).logits
    assert not torch.allclose(
        model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits, truth, atol=1e-4
    )
    found = model(ids, position_ids=positions, attention_mask=mask, use_cache=False, **given).logits
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_starts_count_the_tokens_of_all_rows(is_compiled: bool) -> None:
    """As for flash attention, which takes the rows of a batch as one sequence."""
    model = build("llama")
    ids = batch(40)["input_ids"]
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(40 - n)]) for n in (24, 10)])
    truth = model(ids, position_ids=positions, use_cache=False).logits
    att.sparsify(model, att.DenseSparsityConfig(HEADS))
    starts = torch.tensor([0, 24, 40, 50, 80], dtype=torch.int32)
    mask = torch.ones_like(ids)
    run: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    found = run(ids, position_ids=positions, attention_mask=mask, use_cache=False, cu_seq_lens_k=starts).logits
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_padding", [0, 7])
def test_starts_count_in_layers_with_a_sliding_window_and_with_padding(num_padding: int) -> None:
    config = {**SHAPE, "num_key_value_heads": 2, "sliding_window": 9, "vocab_size": VOCAB, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(attn_implementation="eager", **config))
    ids = batch(40)["input_ids"][:1]
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None]
    truth = model(ids, position_ids=positions, use_cache=False).logits
    att.sparsify(model, att.DenseSparsityConfig(HEADS))
    starts = torch.tensor([0, 24, 40], dtype=torch.int32)
    mask = torch.ones_like(ids)
    mask[:, 40 - num_padding :] = 0
    found = model(ids, position_ids=positions, attention_mask=mask, use_cache=False, cu_seq_lens_k=starts).logits
    used = mask[0] == 1  # padding at the end changes no other token
    torch.testing.assert_close(found[:, used], truth[:, used], rtol=1e-5, atol=1e-5)


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (torch.ones(2, 5, dtype=torch.long), ["key_padding"]),
        (causal(5), ["key_padding"]),
        (torch.zeros(1, 1, 5, 5).masked_fill(~causal(5), torch.finfo(torch.float32).min), ["key_padding"]),
        (torch.ones(2, 1, 1, 5, dtype=torch.bool), ["key_padding"]),
        (causal(5) & (torch.arange(5) > 1), ["key_padding"]),
        (causal(5) & causal(5).triu(-1), ["mask"]),
        (torch.zeros(1, 1, 5, 5).masked_fill(~causal(5), -1.0), ["bias", "mask"]),
        (torch.rand(2, 4, 5, 5) > 0.5, ["mask"]),
    ],
)
def test_masks_of_transformers(mask: Tensor, keys: list[str]) -> None:
    from twinflow.attention.huggingface import mask_extras

    assert list(mask_extras(mask, True, 5, 5)) == keys


def test_a_bias_of_zeros_keeps_its_gradient() -> None:
    """As at the start of training in BEiT."""
    from twinflow.attention.huggingface import mask_extras

    bias = torch.zeros(1, HEADS, 5, 5, requires_grad=True)
    extras = mask_extras(bias, False, 5, 5)
    assert extras["bias"].requires_grad
    assert bool(extras["mask"].all())
    assert "bias" not in mask_extras(bias.detach(), False, 5, 5)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_compiled_model_is_one_graph(name: str) -> None:
    """With padding, and without a mask."""
    kind = att.FixedSparsityConfig(HEADS, attention=UNI if name in DECODERS else "bidirectional")
    model = att.sparsify(build(name), kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = batch(40)
    for given in (inputs, {key: value for key, value in inputs.items() if key != "attention_mask"}):
        torch.testing.assert_close(compiled(**given).loss, model(**given).loss)
    torch._dynamo.reset()


def test_layers_may_differ() -> None:
    inputs = batch()
    model = att.sparsify(build("llama"), WINDOW)
    both = model(**inputs).loss
    first = att.sparsify(model, {0: WINDOW})(**inputs).loss
    second = att.sparsify(model, [att.DenseSparsityConfig(HEADS), WINDOW])(**inputs).loss
    assert len({float(loss.detach()) for loss in (both, first, second)}) == 3
    again = att.sparsify(model, [WINDOW, WINDOW])(**inputs).loss
    assert torch.equal(again, both)
    assert att.unsparsify(model).config._attn_implementation == "eager"


def test_dropout_and_layers_that_run_again() -> None:
    inputs = batch()
    model = att.sparsify(build("llama", attention_dropout=0.2), WINDOW).train()
    found = []
    for runs_again in (False, True):
        if runs_again:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        found.append(loss_and_grads(model, inputs))
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][2].items():
        assert torch.equal(found[1][2][name], grad), name
    assert not torch.equal(loss_and_grads(model, inputs)[0], found[0][0])
    assert torch.equal(model.eval()(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_are_refused_by_name(name: str) -> None:
    model = att.sparsify(build(name), att.DenseSparsityConfig(HEADS))
    with pytest.raises(ValueError, match="output_attentions"):
        model(**batch(), output_attentions=True)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=HEADS)
    return transformers.T5ForConditionalGeneration(config)


def crossing() -> Any:
    return build("gpt2", add_cross_attention=True)


def funnel() -> Any:
    config = transformers.FunnelConfig(
        vocab_size=VOCAB, block_sizes=[1], num_decoder_layers=1, d_model=32, n_head=HEADS, d_head=8, d_inner=64
    )
    return transformers.FunnelModel(config)


@pytest.mark.parametrize(
    ("make", "pattern", "words"),
    [
        (lambda: build("llama"), att.BigBirdSparsityConfig(HEADS), 'attention="unidirectional"'),
        (lambda: build("gpt2"), att.FixedSparsityConfig(HEADS), 'attention="unidirectional"'),
        (lambda: build("bert"), att.FixedSparsityConfig(8), r"pattern.num_heads is 8, but must be 4"),
        (lambda: build("bert"), [WINDOW], "must be 2, one for each layer"),
        (t5, WINDOW, "T5ForConditionalGeneration"),
        (crossing, WINDOW, "patterns are for self-attention, and not for attention from a decoder"),
        (funnel, att.FixedSparsityConfig(HEADS), "FunnelModel"),
        (lambda: build("bert", output_attentions=True), WINDOW, "output_attentions"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], pattern: Any, words: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=words):
        att.sparsify(model, pattern)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", MODELS)
def test_a_table_of_positions_is_tiled(name: str) -> None:
    model = build(name)
    longest = 128
    short = batch(40)
    before = model(**short).logits
    old = {key: value.clone() for key, value in model.state_dict().items()}
    assert att.extend_position_embedding(model, 300) is model
    torch.testing.assert_close(model(**short).logits, before)
    offset = 2 if name == "roberta" else 0
    assert model.config.max_position_embeddings == 300 + offset
    changed = {key for key, value in model.state_dict().items() if value.shape != old[key].shape}
    assert len(changed) == (0 if name == "llama" else 1)
    for key in changed:
        new = model.state_dict()[key]
        assert new.shape[0] == 300 + offset
        assert torch.equal(new[:offset], old[key][:offset])
        assert torch.equal(new[offset + longest : offset + 2 * longest], old[key][offset:])
    kind = att.FixedSparsityConfig(HEADS, attention=UNI if name in DECODERS else "bidirectional")
    loss = att.sparsify(model, kind)(**batch(290)).loss
    loss.backward()
    assert loss.isfinite()
    with pytest.raises(ValueError, match="max_position is 200"):
        att.extend_position_embedding(model, 200)


def test_deepspeeds_names() -> None:
    utils = att.SparseAttentionUtils
    model = build("bert")
    pattern = att.BSLongformerSparsityConfig(HEADS)
    utils.replace_model_self_attention_with_sparse_self_attention(model, 256, pattern)
    assert model.config.max_position_embeddings == 256
    tokenizer = type("Tokenizer", (), {"model_max_length": 128, "init_kwargs": {}})()
    assert utils.update_tokenizer_model_max_length(tokenizer, 256).init_kwargs == {"model_max_length": 256}
    inputs = batch(200)
    padded = utils.pad_to_block_size(
        64, inputs["input_ids"], inputs["attention_mask"], None, None, None, 0, model.get_input_embeddings()
    )
    out = model(input_ids=padded.input_ids, attention_mask=padded.attention_mask).logits
    kept = inputs["attention_mask"] == 1
    plain = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(utils.unpad_sequence_output(padded.pad_len, out)[kept], plain[kept])


def test_the_config_does_it_and_a_copy_and_a_file_stay_whole(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "sparse_attention": {"mode": "local", "num_sliding_window_blocks": 3},
    }
    inside = nn.ModuleDict({"lm": build("llama")})
    engine = twinflow.initialize(model=inside["lm"], config=config, dist_init_required=False)[0]
    inputs = {name: tensor.to(engine.device) for name, tensor in batch().items()}
    truth = att.sparsify(copy.deepcopy(engine.module), WINDOW)(**inputs).loss
    losses = []
    for _ in range(4):
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(float(truth.detach()), abs=1e-5)
    assert losses[-1] < losses[0]
    engine.module.save_pretrained(tmp_path)
    engine.destroy()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.config._attn_implementation.startswith("twinflow_")


def test_a_copy_is_a_model_of_its_own() -> None:
    model = att.sparsify(build("gpt2"), WINDOW)
    other = att.unsparsify(copy.deepcopy(model))
    assert other.config._attn_implementation == "eager"
    other(**batch(), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**batch(), output_attentions=True)


def test_a_model_inside_another_is_found() -> None:
    model = nn.ModuleDict({"encoder": build("bert"), "head": nn.Linear(4, 4)})
    att.sparsify(model, att.FixedSparsityConfig(HEADS))
    assert model["encoder"].config._attn_implementation.startswith("twinflow_")  # type: ignore[union-attr,operator]


def test_the_example_of_the_docs_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "sparse-attention.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(page), "exec"), {})
