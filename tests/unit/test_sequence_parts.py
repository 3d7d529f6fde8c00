# SPDX-License-Identifier: Apache-2.0
"""Parts of sequence parallelism in one process: which blocks of scores a rank computes, and the attention of blocks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sequence_cases import hugging_face
from torch import Tensor

from twinflow.dist.group import alone
from twinflow.parallel import ring, split_sequence
from twinflow.parallel.ring import attend_block, attend_block_backward, plan_steps, ring_attention
from twinflow.parallel.sequence import SequenceRanks
from twinflow.parallel.ulysses import kv_copies


class _World:
    """The chunks of all ranks, without groups."""

    def __init__(self, size: int, is_zigzag: bool) -> None:
        self.ranks = SequenceRanks(alone(), alone(), alone(), "ring", 0, is_zigzag)
        self.size = size

    def chunks(self, num_tokens: int) -> list[list[tuple[int, int]]]:
        group = self.ranks.group
        group.world = self.size
        return [self.ranks.chunks(num_tokens, rank) for rank in range(self.size)]


def tensors(heads: int = 4, kv: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 48, 8), (1, kv, 48, 8), (1, kv, 48, 8), (1, heads, 48, 8)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, grad


def mask_of(documents: list[int]) -> Tensor:
    number = torch.zeros(48, dtype=torch.long)
    for start in documents[1:-1]:
        number[start:] += 1
    return (number[:, None] == number) & torch.ones(48, 48, dtype=torch.bool).tril()


@pytest.mark.parametrize("documents", [[0, 48], [0, 5, 6, 30, 48]], ids=["one", "packed"])
@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_blocks_of_all_ranks_are_the_causal_scores(size: int, is_zigzag: bool, documents: list[int]) -> None:
    chunks = _World(size, is_zigzag).chunks(48)
    count = torch.zeros(48, 48, dtype=torch.long)
    for rank in range(size):
        own = torch.cat([torch.arange(*part) for part in chunks[rank]])
        for step, blocks in enumerate(plan_steps(chunks, rank, documents)):
            theirs = torch.cat([torch.arange(*part) for part in chunks[(rank - step) % size]])
            for block in blocks:
                rows, cols = own[block.queries], theirs[block.keys]
                found = torch.ones(len(rows), len(cols), dtype=torch.long)
                count[rows[:, None], cols] += found.tril() if block.is_causal else found
    assert torch.equal(count, mask_of(documents).long())


def test_chunks_from_both_ends_give_all_ranks_the_same_work() -> None:
    def work(is_zigzag: bool) -> list[int]:
        chunks = _World(4, is_zigzag).chunks(64)
        steps = [plan_steps(chunks, rank, [0, 64]) for rank in range(4)]
        return [
            sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for one in rank for b in one)
            for rank in steps
        ]

    assert len(set(work(True))) == 1
    assert len(set(work(False))) == 4


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "products"])
def test_attention_of_blocks_merges_to_that_of_all_keys(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    q, k, v, grad = tensors()
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    if not has_kernel:  # as on a GPU without a kernel for this dtype
        monkeypatch.setattr(ring, "_has_cpu_kernel", lambda q: False)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    blocks = plan_steps([[(0, 10), (10, 11), (11, 48)]], 0, [0, 48])
    found = ring_attention(q, k, v, alone(), blocks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, (q, k, v), grad), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_block_returns_the_sums_of_its_scores(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = tensors()
    found: list[Any] = []
    for has_kernel in (True, False):
        monkeypatch.setattr(ring, "_has_cpu_kernel", lambda q, has=has_kernel: has)
        out, sums = attend_block(q, k, v, is_causal, 0.5)
        found.append([out, sums, *attend_block_backward(grad, q, out, sums, k, v, is_causal, 0.5)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_heads_of_keys_for_each_rank() -> None:
    assert kv_copies(8, 8, 4) == 1
    assert kv_copies(8, 4, 2) == 1
    assert kv_copies(8, 2, 4) == 2  # ranks share a head
    assert kv_copies(8, 1, 8) == 8
    assert kv_copies(12, 4, 6) == 3  # a rank needs two heads


def test_a_batch_of_one_rank_is_the_whole_batch() -> None:
    ranks = SequenceRanks(alone(), alone(), alone(), "ring", 0, is_zigzag=True)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(ranks.part(tokens), tokens)
    batch = ranks.split({"input_ids": tokens, "labels": tokens, "length": 6})
    assert batch["shift_labels"].tolist() == [[1, 2, 3, 4, 5, -100], [7, 8, 9, 10, 11, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert batch["length"] == 6
    assert ranks.positions(6).tolist() == [0, 1, 2, 3, 4, 5]
    odd = ranks.split((tokens[:, :5], tokens[:, 1:]))
    assert odd[0].shape == odd[1].shape == (2, 6)
    assert odd[1][:, -1].tolist() == [-100, -100]
    with pytest.raises(ValueError, match="The batch is 'a str', but must be a dict with input_ids"):
        ranks.split("text")
    with pytest.raises(ValueError, match="must be a dict with input_ids or inputs_embeds"):
        ranks.split({"labels": tokens})


def test_the_mean_over_ranks_has_the_gradient_of_the_sum() -> None:
    ranks = SequenceRanks(alone(), alone(), alone(), "ulysses", 0, is_zigzag=False)
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    targets = torch.tensor([3, -100, 5])
    mean = ranks.mean_of((losses * (targets >= 0)).sum() / 2, targets)
    assert mean.item() == 2.5
    (grad,) = torch.autograd.grad(mean, losses)
    assert grad.tolist() == [0.5, 0.0, 0.5]
    none = ranks.mean_of(torch.tensor(torch.nan, requires_grad=True), torch.tensor([-100]))
    assert none.isnan()  # as in one process


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_all_layers_share_one_read_of_the_packed_sequences(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if backward runs the layers of two forwards again, whose sequences are packed in different ways."""
    torch.manual_seed(0)
    model = hugging_face("Llama", num_hidden_layers=3).double()
    tokens = torch.randint(0, 64, (1, 16))
    positions = [torch.cat([torch.arange(first), torch.arange(16 - first)])[None] for first in (5, 9)]
    batches = [{"input_ids": tokens, "labels": tokens, "position_ids": one} for one in positions]
    expected = [param for batch in batches for param in gradients_of(model, [batch])]
    handle = split_sequence(model, 1, mode)
    split = [handle.ranks.split(dict(batch)) for batch in batches]
    reads = []
    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: [reads.append(self), read(self)][1])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    found = gradients_of(model, split)
    # Once in the forward, and backward begins with the second batch.
    assert [id(one) for one in reads] == [id(split[i]["cu_seq_lens_q"]) for i in (0, 1, 0)]
    monkeypatch.undo()
    half = len(expected) // 2
    for grad, one, two in zip(found, expected[:half], expected[half:], strict=True):
        torch.testing.assert_close(grad, one + two)
    handle.remove()


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_packed_sequences_are_evaluated_in_inference_mode(mode: str) -> None:
    """Tensors that are made there have no version, by which layers otherwise see whether sequences are the same."""
    torch.manual_seed(0)
    model = hugging_face("Llama").double()
    tokens, positions = torch.randint(0, 64, (1, 16)), torch.cat([torch.arange(5), torch.arange(11)])[None]
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    with torch.inference_mode():
        expected = model(**batch, use_cache=False).loss
        handle = split_sequence(model, 1, mode)
        found = model(**handle.ranks.split(dict(batch)), use_cache=False).loss
    torch.testing.assert_close(found, expected)
    handle.remove()


def gradients_of(model: Any, batches: list[dict[str, Any]]) -> list[Tensor]:
    model.zero_grad()
    sum(model(**batch, use_cache=False).loss for batch in batches).backward()
    return [param.grad.clone() for param in model.parameters()]


def test_a_split_that_is_removed_leaves_nothing_behind() -> None:
    import transformers

    model = hugging_face("Llama")
    handle = split_sequence(model, 1)
    name = model.config._attn_implementation
    functions = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    attention = weakref.ref(functions[0][name])
    handle.remove()
    del handle
    gc.collect()
    assert attention() is None
    for function in functions:
        with pytest.raises(RuntimeError, match="the split of its sequences was removed"):
            function[name]()
    tokens = torch.randint(0, 64, (1, 8))
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    split_sequence(model, 1).remove()
    assert model.config._attn_implementation != name
