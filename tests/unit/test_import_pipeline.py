# SPDX-License-Identifier: Apache-2.0
"""`twinflow import` of DeepSpeed's pipelines: training goes on as it did, for each ZeRO stage and number of ranks.

`write` makes the files as DeepSpeed 0.19.8 does: benchmarks/compat_deepspeed.py imports those of the real package too.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files_support import BETAS, DECAY, EPS, LR, import_damaged, split_row
from torch import Tensor, nn
from torch.nn import functional
from twin_support import quick_torch

import twinflow
from twinflow.checkpoint import importing
from twinflow.checkpoint.importing import import_deepspeed
from twinflow.engine.pipeline import PipelineEngine
from twinflow.parallel import LayerSpec, PipelineModule, TiedLayerSpec

TOKENS, WIDTH = 7, 4


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


class Block(nn.Module):
    """A residual layer with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


def logits(table: nn.Embedding, x: Tensor) -> Tensor:
    return functional.linear(x, table.weight)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


SPECS: dict[str, list[Any]] = {
    "tied": [
        TiedLayerSpec("table", nn.Embedding, TOKENS, WIDTH),
        LayerSpec(Block, WIDTH),
        torch.relu,
        LayerSpec(Block, WIDTH),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("table", nn.Embedding, TOKENS, WIDTH, forward_fn=logits),
    ],
    "tied blocks": [  # both uses have files
        LayerSpec(nn.Embedding, TOKENS, WIDTH),
        TiedLayerSpec("block", nn.Linear, WIDTH, WIDTH),
        LayerSpec(Block, WIDTH),
        TiedLayerSpec("block", nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, TOKENS),
    ],
    "plain": [LayerSpec(nn.Embedding, TOKENS, WIDTH), LayerSpec(Block, WIDTH), LayerSpec(nn.Linear, WIDTH, TOKENS)],
}


def build(kind: str, seed: int) -> PipelineModule:
    return PipelineModule(SPECS[kind], num_stages=1, loss_fn=loss_fn, base_seed=seed)


def tokens(step: int) -> Tensor:
    return torch.randint(0, TOKENS, (2, 3), generator=torch.Generator().manual_seed(step))


def train(model: PipelineModule, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        value = tokens(step)
        for call in model.calls():
            value = call(value)
        loss = loss_fn(value, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(kind: str) -> tuple[PipelineModule, torch.optim.AdamW]:
    model = build(kind, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    train(model, optimizer, range(3))
    return model, optimizer


def write(
    root: Path,
    kind: str,
    model: PipelineModule,
    optimizer: torch.optim.Optimizer,
    zero: int,
    bounds: Sequence[int],
    num_data: int,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
) -> Path:
    """DeepSpeed's files of a pipeline whose ranks have the layers between `bounds`."""
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step3")
    specs = SPECS[kind]
    modules = {i: model.get_submodule(first(specs, i)) for i, one in enumerate(specs) if isinstance(one, LayerSpec)}
    for i, module in modules.items():
        if getattr(specs[i], "forward_fn", None) is None:
            state = OrderedDict((name, value.to(dtype)) for name, value in module.state_dict().items())
            torch.save(state, folder / f"layer_{i:02d}-model_00-model_states.pt")
    num_pipe = len(bounds) - 1
    for rank in range(num_pipe):
        here = range(bounds[rank], bounds[rank + 1])
        tied = {specs[i].key: modules[i] for i in here if isinstance(specs[i], TiedLayerSpec)}
        own = {str(i): modules[i] for i in here if i in modules and not isinstance(specs[i], TiedLayerSpec)}
        parts = {**{f"tied_modules.{key}": module for key, module in tied.items()}, **own}
        named = [(f"{at}.{name}", p) for at, module in parts.items() for name, p in module.named_parameters()]
        group = {**optimizer.param_groups[0], "params": list(range(len(named)))}
        whole = {
            "state": {i: optimizer.state[param] for i, (_, param) in enumerate(named)},
            "param_groups": [group],
        }
        head = {
            "module": None,
            "buffer_names": [f"{at}.{name}" for at, module in parts.items() for name, _ in module.named_buffers()],
            "optimizer": None if zero or prefix else whole,
            "param_shapes": [OrderedDict((name, param.shape) for name, param in named)] if zero or prefix else None,
            "shared_params": {},
            "lr_scheduler": None,
            "global_steps": 3,
            "global_samples": 3 * 2 * num_data,
            "skipped_steps": 0,
            "dp_world_size": num_data,
            "mp_world_size": num_pipe,
            "ds_config": {"zero_optimization": {"stage": zero}},
            "ds_version": "0.19.8",
            "epoch": 1,
        }
        torch.save(head, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for data in range(num_data if zero or prefix else 0):
            state = split_row([named], optimizer, zero, num_data, data)
            saved = {"optimizer_state_dict": {**state, "zero_stage": max(zero, 1)}, "ds_version": "0.19.8"}
            torch.save(saved, folder / f"{prefix}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt")
    return root


def first(specs: Sequence[Any], index: int) -> str:
    """The name of a layer, which is that of the first use of a tied one."""
    key = getattr(specs[index], "key", None)
    return f"layers.{index if key is None else next(i for i, one in enumerate(specs) if getattr(one, 'key', 0) == key)}"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0, one rank": ("tied", {"zero": 0, "bounds": [0, 6], "num_data": 1}),
    "stage 0": ("tied", {"zero": 0, "bounds": [0, 2, 6], "num_data": 2}),
    "stage 0, tied blocks": ("tied blocks", {"zero": 0, "bounds": [0, 2, 5], "num_data": 1}),
    "stage 0, tied blocks on one rank": ("tied blocks", {"zero": 0, "bounds": [0, 1, 5], "num_data": 1}),
    "stage 0, without ties": ("plain", {"zero": 0, "bounds": [0, 1, 3], "num_data": 1}),
    "stage 1": ("tied", {"zero": 1, "bounds": [0, 1, 4, 6], "num_data": 2}),
    "stage 1, tied blocks": ("tied blocks", {"zero": 1, "bounds": [0, 3, 5], "num_data": 3}),
    "bf16": ("tied", {"zero": 1, "bounds": [0, 3, 6], "num_data": 2, "dtype": torch.bfloat16, "prefix": "bf16_"}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(case: str, tmp_path: Path) -> None:
    kind, how = CASES[case]
    model, optimizer = trained(kind)
    done = import_deepspeed(write(tmp_path / "ds", kind, model, optimizer, **how), tmp_path / "out")
    wanted = dict(model.named_parameters())
    assert (done.rule, done.num_params, done.global_steps, done.notes) == ("adamw", len(wanted), 3, ())
    params = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": params}}
    engine = twinflow.initialize(model=build(kind, seed=1), config={**config, "gradient_clipping": 0.0})[0]
    assert isinstance(engine, PipelineEngine)
    path, client = engine.load_checkpoint(tmp_path / "out")
    assert path is not None
    assert client == {"epoch": 1}
    saved = engine.optimizer.state_dict()["state"]
    assert set(saved) == set(wanted)
    for name, param in wanted.items():
        assert torch.equal(saved[name]["master"], param), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[name][key], optimizer.state[param][key]), (name, key)
    losses = [float(engine.train_batch(iter([(tokens(step), tokens(step))]))) for step in range(3, 6)]
    assert losses == pytest.approx(train(model, optimizer, range(3, 6)), rel=1e-5)
    engine.destroy()


def test_orders_that_shapes_do_not_decide(tmp_path: Path) -> None:
    SPECS["equal"] = [LayerSpec(Block, WIDTH) for _ in range(3)]
    SPECS["two keys"] = [*SPECS["tied"][:5], *SPECS["tied blocks"][1:4], SPECS["tied"][5]]
    model, optimizer = trained_without_loss("equal")
    source = write(tmp_path / "equal", "equal", model, optimizer, 0, [0, 3], 1)
    (note,) = import_deepspeed(source, tmp_path / "out").notes
    assert "by order and shapes" in note
    model, optimizer = trained("two keys")
    source = write(tmp_path / "keys", "two keys", model, optimizer, 0, [0, 4, 7, 9], 1)
    with pytest.raises(ValueError, match="--weights-only"):
        import_deepspeed(source, tmp_path / "out", replace=True)
    assert import_deepspeed(source, tmp_path / "out", weights_only=True, replace=True).rule is None


def trained_without_loss(kind: str) -> tuple[PipelineModule, torch.optim.AdamW]:
    model = build(kind, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    model, optimizer = trained("tied")

    def refused(name: str, words: str, remove: str = "", add: str = "") -> None:
        source = write(tmp_path / name, "tied", model, optimizer, 1, [0, 3, 6], 2)
        folder = source / "global_step3"
        if remove:
            (folder / remove).unlink()
        if add:
            torch.save({}, folder / add)
        with pytest.raises(ValueError, match=words):
            import_deepspeed(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused("tensor", "tensor parallelism, which cannot", add="layer_01-model_01-model_states.pt")
    refused("twice", "are the same layer", add="layer_01-model_states.pt")
    refused("rank", "not one file mp_rank", remove="mp_rank_00_model_states.pt")
    refused("last", "The pipeline had 2 ranks", remove="mp_rank_01_model_states.pt")
    refused("part", "saved by 2 ranks", remove="zero_pp_rank_1_mp_rank_01_optim_states.pt")
    refused("layer", r"No file of a layer has 'layers\.1\.linear", remove="layer_01-model_00-model_states.pt")
    refused("key", "tied layers with the key 'table'", remove="layer_00-model_00-model_states.pt")


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_damage_ends_in_anything_but_a_named_error(
    zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "save", lambda root, *_, **__: root)  # writing is not what can go wrong here
    source = write(tmp_path / "ds", "tied", *trained("tied"), zero, [0, 3, 6], 1)
    generator = random.Random(zero)
    for path in sorted((source / "global_step3").iterdir())[::3]:
        import_damaged(source, path, 40, generator, tmp_path / "out")
