# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks and float8: results, names and graphs are those of the same model without twinflow."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twinflow
from twinflow import speedups
from twinflow.models.gpt import GPT, Block, GPTConfig
from twinflow.speedups import compile_blocks, use_float8

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=3, hidden=32, num_heads=2)
CPU = torch.device("cpu")
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@pytest.fixture
def compiler() -> Iterator[Any]:
    """Dynamo's counters, of this test alone."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(SHAPE), **changes}))


def engine_of(model: nn.Module, **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **keys,
    }
    return twinflow.initialize(model=model, config=config)[0]


def losses(engine: Any, num_steps: int = 3) -> list[float]:
    found = []
    for _ in range(num_steps):
        loss = engine(TOKENS, TOKENS).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


EAGER = {"blocks": True, "backend": "eager"}


def test_compiled_blocks_share_one_graph_without_breaks(compiler: Any) -> None:
    """One graph for training and one for evaluation, whatever the number of blocks and of steps."""
    plain = engine_of(gpt())
    expected = losses(plain)
    plain.destroy()
    engine = engine_of(gpt(), compile=EAGER)
    assert losses(engine) == expected
    assert compiler["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        engine.module.eval()
        engine.module(TOKENS, TOKENS)
    assert compiler["stats"]["unique_graphs"] == 2
    assert not compiler["graph_break"]
    assert [name for name, _ in engine.module.named_parameters()] == [name for name, _ in gpt().named_parameters()]
    engine.destroy()


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["selective", 1])
def test_recomputation_is_a_part_of_the_graph(compiler: Any, recompute: str | int) -> None:
    plain = engine_of(gpt())
    expected = losses(plain, 2)
    plain.destroy()
    engine = engine_of(gpt(recompute=recompute), compile={"blocks": True, "backend": "aot_eager"})
    torch.testing.assert_close(losses(engine, 2), expected)
    assert compiler["stats"]["unique_graphs"] == (1 if recompute == "selective" else 2)
    assert not compiler["graph_break"]
    engine.destroy()


def test_a_compiled_selective_block_keeps_ten_values_for_each_hidden_unit(compiler: Any) -> None:
    """Its input, q, k and v, the output of attention, the result of the projection, and the input of GELU."""
    kept = {}
    for is_selective in (False, True):
        block = Block(SHAPE, is_selective)
        block.compile(backend="aot_eager")
        x = torch.randn(2, 16, 32, requires_grad=True)
        weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes, weights: set[int] = weights) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = block(x)
        kept[is_selective] = sum(sizes.values()) / (2 * 16 * 32 * 4)
        del y
    assert kept[False] == pytest.approx(16, rel=0.03)
    assert kept[True] == pytest.approx(10, rel=0.03)


def test_a_checkpointed_block_is_compiled_inside_of_its_checkpoint(compiler: Any) -> None:
    plain = engine_of(gpt())
    expected = losses(plain)
    plain.destroy()
    engine = engine_of(gpt(), compile=EAGER, activation_checkpointing={"cpu_checkpointing": True})
    assert losses(engine) == expected
    assert compiler["stats"]["unique_graphs"] == 1
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"selective": True}, "activation_checkpointing.selective cannot be used with compile.blocks"),
        ({"layers": ["MLP"]}, r"layers with blocks\.0\.mlp cannot be used with compile.blocks"),
    ],
)
def test_checkpoints_that_cannot_be_compiled_are_refused(section: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        engine_of(gpt(), compile=EAGER, activation_checkpointing=section)


def test_sparse_attention_is_not_compiled() -> None:
    sparse = {"mode": "fixed", "block": 16, "attention": "unidirectional"}
    with pytest.raises(ValueError, match=r"sparse_attention cannot be used with compile\.blocks"):
        engine_of(gpt(), compile=EAGER, sparse_attention=sparse)


def test_a_deep_copy_of_a_compiled_model_has_its_own_weights(compiler: Any) -> None:
    """As an average of weights needs it. Before, engine.compile() left the original's forward in the copy."""
    engine = engine_of(gpt())
    engine.compile(backend="eager")
    copied = copy.deepcopy(engine.module)
    expected = copied(TOKENS, TOKENS).loss.item()
    losses(engine)
    assert copied(TOKENS, TOKENS).loss.item() == expected
    engine.destroy()


def test_a_missing_compiler_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No working C++ compiler found.\nmore lines")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(
        ValueError, match=r"this machine, because .*No working C\+\+ compiler found\)\. Install a C\+\+"
    ):
        compile_blocks(gpt(), CPU)


def test_what_cannot_be_compiled_or_converted() -> None:
    with pytest.raises(ValueError, match=r"compile\.backend is 'inducter'.*Did you mean 'inductor'"):
        compile_blocks(gpt(), CPU, "inducter")
    with pytest.raises(ValueError, match=r"compile\.blocks is True, but must be false for a model without blocks"):
        compile_blocks(nn.Linear(2, 2), CPU, "eager")
    with pytest.raises(ValueError, match=r"float8\.recipe is 'columnwise'"):
        use_float8(gpt(), CPU, "columnwise")


def test_float8_without_torchao_or_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"without the package torchao. Install it with pip install \"twinflow\[float8"
    ):
        use_float8(gpt(), CPU)
    monkeypatch.setattr(speedups.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"without a GPU of compute capability 8\.9.*Here is no GPU"):
        use_float8(gpt(), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match=r"capability 9\.0 or more for recipe 'rowwise'. Here is a GPU .* 8\.9"):
        use_float8(gpt(), torch.device("cuda"), "rowwise")


# torchao is installed for the large matrices only.


@needs_torchao
@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_float8_trains_alike_compiled_or_not(compiler: Any, recompute: str) -> None:
    emulated = {"enabled": True, "emulate": True}
    plain, eager = engine_of(gpt(recompute=recompute)), engine_of(gpt(recompute=recompute), float8=emulated)
    expected, rounded = losses(plain, 6), losses(eager, 6)
    plain.destroy()
    eager.destroy()
    assert rounded != expected
    torch.testing.assert_close(rounded, expected, rtol=0.01, atol=0.01)
    compiled = {"blocks": True, "backend": "aot_eager"}
    engine = engine_of(gpt(recompute=recompute), float8=emulated, compile=compiled)
    torch.testing.assert_close(losses(engine, 6), rounded, rtol=1e-4, atol=1e-4)
    assert compiler["stats"]["unique_graphs"] == 1
    assert not compiler["graph_break"]
    engine.destroy()


@needs_torchao
@pytest.mark.matrix
def test_a_checkpoint_of_float8_loads_without_it_and_the_other_way_round(tmp_path: Path) -> None:
    emulated = {"enabled": True, "emulate": True}
    for i, (first, second) in enumerate((({"float8": emulated}, {}), ({}, {"float8": emulated}))):
        before = engine_of(gpt(), **first)
        losses(before, 2)
        before.save_checkpoint(tmp_path / str(i))
        weights = {name: param.detach().clone() for name, param in before.module.named_parameters()}
        before.destroy()
        after = engine_of(gpt(vocab_size=64), **second)
        after.load_checkpoint(tmp_path / str(i))
        for name, param in after.module.named_parameters():
            assert torch.equal(param, weights[name]), name
        assert losses(after, 1)[0] > 0
        after.destroy()


@needs_torchao
@pytest.mark.matrix
def test_only_suitable_layers_of_blocks_become_float8(caplog: pytest.LogCaptureFixture) -> None:
    from torchao.float8.float8_linear import Float8Linear

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 48)
            self.odd = nn.Linear(48, 20)
            self.own = Doubled(32, 32)
            self.hooked = nn.Linear(32, 32)
            self.hooked.register_forward_hook(lambda *_: None)

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(32, 32)})
    weights = dict(model.named_parameters())
    logging.getLogger("twinflow").propagate = True
    with caplog.at_level(logging.INFO, logger="twinflow"):
        assert use_float8(model, CPU, emulate=True) == 2
    assert "2 linear layers of 2 blocks compute in float8 (tensorwise); 6 are not suitable, such as odd" in caplog.text
    named = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert named == {"layers.0.up", "layers.1.up"}
    assert all(param is weights[name] for name, param in model.named_parameters())
    assert use_float8(model, CPU, emulate=True) == 2  # layers that are in float8 already stay as they are
    with pytest.raises(ValueError, match=r"float8\.enabled is True.*no suitable linear layers"):
        use_float8(nn.ModuleList([nn.Sequential(nn.Linear(3, 3))]), CPU, emulate=True)


@needs_torchao
@pytest.mark.matrix
def test_the_benchmark_of_quality_is_saved(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "float8_quality.py"
    command = [sys.executable, str(script), "--tiny", "--save", "--save-to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table, curves = (next(tmp_path.glob(f"*-float8-quality.{kind}")) for kind in ("md", "json"))
    assert all("valid" in run for run in json.loads(curves.read_text())["runs"])
    assert "Float8 minus bf16, seed by seed" in table.read_text()
