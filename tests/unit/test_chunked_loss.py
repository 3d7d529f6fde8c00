# SPDX-License-Identifier: Apache-2.0
"""`chunk_loss`: the loss and its gradients are those of the whole logits, which exist only if somebody reads them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from twinflow.integrations.chunked_loss import LazyLogits, chunk_loss  # noqa: E402
from twinflow.optim.twin import TwinOptimizer  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **changes))


def gemma() -> Any:
    """Its logits have a soft cap, which the model computes from whole logits."""
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    return tokens, labels


def loss_and_gradients(model: Any, **more: Any) -> tuple[Tensor, list[Tensor]]:
    tokens, labels = batch()
    model.zero_grad()
    loss = model(input_ids=tokens, labels=labels, **more).loss
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize(
    "more", [{}, {"num_items_in_batch": torch.tensor(50)}, {"num_items_in_batch": 50}, {"logits_to_keep": 0}]
)
@pytest.mark.parametrize("make", [llama, gemma, lambda: llama(tie_word_embeddings=True)])
def test_loss_and_gradients_are_those_of_whole_logits(make: Any, more: dict[str, Any]) -> None:
    model = make()
    expected, gradients = loss_and_gradients(model, **more)
    handle = chunk_loss(model)
    found, others = loss_and_gradients(model, **more)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(others, gradients)
    handle.remove()
    assert loss_and_gradients(model, **more)[0] == expected


def test_the_logits_are_computed_only_if_they_are_read() -> None:
    model = llama()
    tokens, labels = batch()
    whole = model(input_ids=tokens).logits
    chunk_loss(model)
    output = model(input_ids=tokens, labels=labels)
    logits = output.logits
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.device, logits.dim(), len(logits)) == (
        whole.shape,
        whole.dtype,
        whole.device,
        3,
        2,
    )
    assert logits._computed is None
    assert torch.equal(logits.argmax(-1), whole.argmax(-1))
    assert torch.equal(logits + 0, whole)
    assert type(logits + 0) is Tensor
    logits.sum().backward()  # gradients flow through logits that were read


def test_logits_read_first_without_gradients_still_have_their_graph() -> None:
    model = llama()
    chunk_loss(model)
    logits = model(input_ids=batch()[0]).logits
    with torch.no_grad():
        assert logits.float().isfinite().all()
    logits.square().sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_logits_of_an_older_weight_are_refused() -> None:
    """They would be those of the new weight."""
    model = llama()
    chunk_loss(model)
    optimizer = TwinOptimizer(model, lr=1e-2)
    tokens, labels = batch()
    output = model(input_ids=tokens, labels=labels)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has changed since then"):
        output.logits.argmax(-1)
    optimizer.close()


def test_autocast() -> None:
    model = llama()
    tokens, labels = batch()

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=tokens, labels=labels)
        output.loss.backward()
        return output.loss.detach(), output.logits

    loss, logits = run()
    gradient = model.lm_head.weight.grad.clone()
    chunk_loss(model)
    found, lazy = run()
    assert lazy.dtype == logits.dtype == torch.bfloat16
    assert torch.equal(lazy + 0, logits)  # outside of autocast
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, rtol=0.02, atol=1e-4)


def test_generation_and_evaluation_are_as_before() -> None:
    model = llama().eval()
    tokens, labels = batch()
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=labels)
    words = model.generate(tokens, max_new_tokens=3, do_sample=False)
    chunk_loss(model)
    with torch.no_grad():
        found = model(input_ids=tokens, labels=labels)
    assert type(found.logits) is Tensor
    assert torch.equal(found.logits, expected.logits)
    assert found.loss == expected.loss
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), words)


def test_a_batch_without_targets() -> None:
    model = llama()
    chunk_loss(model)
    tokens, _ = batch()
    loss = model(input_ids=tokens, labels=torch.full_like(tokens, -100), num_items_in_batch=torch.tensor(7)).loss
    loss.backward()
    assert loss == 0
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters())


def test_training_with_weights_on_the_host() -> None:
    losses = []
    for offloads in (False, True):
        model = llama()
        chunk_loss(model)
        optimizer = TwinOptimizer(model, lr=1e-2, ratio=1.0, offload_params=offloads, early=True, max_grad_norm=1.0)
        tokens, labels = batch()
        found = []
        for _ in range(4):
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        optimizer.close()
        losses.append(found)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_copy_of_the_model_uses_its_own_weights() -> None:
    model = llama()
    chunk_loss(model)
    copied = deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(loss_and_gradients(copied)[0], loss_and_gradients(llama())[0])


def test_models_that_cannot_be_changed_are_refused() -> None:
    with pytest.raises(ValueError, match="a model of transformers"):
        chunk_loss(nn.Linear(2, 2))
    twice = llama()
    chunk_loss(twice)
    with pytest.raises(ValueError, match="output layer"):
        chunk_loss(twice)
    other = llama()
    other.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="loss function"):
        chunk_loss(other)
    with pytest.raises(ValueError, match="output layer"):
        chunk_loss(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)))
