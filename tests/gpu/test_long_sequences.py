# SPDX-License-Identifier: Apache-2.0
"""Long sequences on a GPU: ranks that share one card, the ring's kernels, tiles and checkpoints of long sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist_support import run_ranks
from sequence_cases import config_of, train
from torch import Tensor, nn

from twinflow.activations import checkpoint_layers
from twinflow.dist.group import alone
from twinflow.integrations.tiled import tile_sequence
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel.ring import plan_steps, ring_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPE = GPTConfig(vocab_size=512, context=2048, num_layers=5, hidden=256, num_heads=4)


def test_ranks_that_share_a_card_train_as_one_process() -> None:
    offload = {"offload_optimizer": {"device": "cpu", "bucket_numel": 8192}}
    cases: dict[str, dict[str, Any]] = {
        "ulysses": {"config": config_of(2, "ulysses", stage=2, **offload), "tiled": True},
        "ring": {"config": config_of(2, "ring", stage=3, **offload)},
        "ring, sparse": {"config": config_of(2, "ring", stage=1), "sparse": True},
    }
    for is_sparse in (False, True):
        alone_case = {"config": config_of(1, "ulysses", stage=0), "sparse": is_sparse}
        truth = run_ranks(0, train, {"alone": alone_case})[0]["alone"]
        chosen = {name: case for name, case in cases.items() if case.get("sparse", False) == is_sparse}
        for rank in run_ranks(2, train, chosen, timeout_s=180):
            for name in chosen:
                assert rank[name]["losses"] == pytest.approx(truth["losses"], rel=1e-4), name
                assert rank[name]["norms"] == pytest.approx(truth["norms"], rel=1e-3), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 100])
def test_blocks_of_the_ring_merge_to_whole_attention(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    shapes = [(2, 8, 512, head_dim), (2, 2, 512, head_dim), (2, 2, 512, head_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    grad = torch.randn_like(q)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    repeated = [exact[0], *(tensor.repeat_interleave(4, 1) for tensor in exact[1:])]
    expected = F.scaled_dot_product_attention(*repeated, is_causal=True)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    steps = plan_steps([[(0, 128), (128, 200), (200, 512)]], 0, [0, 512])
    found = ring_attention(q, k, v, alone(), steps)
    grads = torch.autograd.grad(found, (q, k, v), grad)
    limit = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip((found, *grads), (expected, *wanted), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < limit


def gradients(model: GPT, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


def errors_of(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]


def test_tiles_and_groups_of_layers_change_nothing_else() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).cuda().to(torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 2049), device="cuda")
    expected = gradients(model, tokens)
    for options in ({"every": 2}, {"every": 3, "offload": True}, {"offload": True, "on_device": 2}):
        handle = checkpoint_layers(model, ["Block"], min_bytes=1, **options)  # type: ignore[arg-type]
        found = gradients(model, tokens)
        # FlashAttention's backward sums in another order every time.
        assert torch.equal(found[0], expected[0]), options
        assert max(errors_of(found, expected)) < 0.01, options
        handle.remove()
    for options in ({"float8": True}, {"float8": True, "offload": True, "every": 2}):
        handle = checkpoint_layers(model, ["Block"], min_bytes=1, **options)  # type: ignore[arg-type]
        found = gradients(model, tokens)
        assert torch.equal(found[0], expected[0]), options
        assert 0 < max(errors_of(found, expected)) < 0.2, options
        handle.remove()
    tiles = tile_sequence(model, 512)
    handle = checkpoint_layers(model, ["Block"], offload=True, min_bytes=1)
    found = gradients(model, tokens)
    assert max(errors_of(found, expected)) < 0.02
    handle.remove()
    tiles.remove()


def test_groups_of_layers_repeat_dropout_and_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5)) for _ in range(5))).cuda()
    x = torch.randn(32, 64, device="cuda")

    def run() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        out.float().square().sum().backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    expected = run()
    handle = checkpoint_layers(model, list(model), every=3)
    found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    handle.remove()


def test_a_tiled_mlp_needs_the_memory_of_a_tile() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).cuda().to(torch.bfloat16)
    mlp: Any = model.blocks[0].mlp
    x = torch.randn(1, 1 << 18, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak() -> int:
        x.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mlp(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    whole = peak()
    tile_sequence(model, 8192)
    assert peak() < whole / 2
