# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of what users do with pipelines and tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from parallel_cases import SHAPE, config_of, digests, make, one_step
from torch import Tensor, nn
from torch.nn import functional

import twinflow
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, SYMBOLS = 16, 32


class Mix(nn.Module):
    """A layer with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(x)))


def logits(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.t()  # type: ignore[operator]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def layers(num: int = 4, dropout: float = 0.0) -> list[Any]:
    embed = TiedLayerSpec("embed", nn.Embedding, SYMBOLS, WIDTH)
    head = TiedLayerSpec("embed", nn.Embedding, SYMBOLS, WIDTH, forward_fn=logits)
    return [embed, *(LayerSpec(Mix, dropout) for _ in range(num)), head]


def batches(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, SYMBOLS, (4, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def pipe_config(num_data: int = 1, **more: Any) -> dict[str, Any]:
    given = {"train_batch_size": 16 * num_data, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {**given, "optimizer": optimizer, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}, **more}


def tied_layers(rank: int, world: int, schedules: list[str]) -> dict[str, list[float]]:
    """Losses of a list of layers whose first and last are one."""
    found = {}
    for schedule in schedules:
        chunks = 2 if schedule in ("interleaved", "zbv") else 1
        module = PipelineModule(layers(6), world, loss_fn=loss_of, schedule=schedule, num_chunks=chunks)
        engine = twinflow.initialize(model=module, config=pipe_config())[0]
        data = batches()
        found[schedule] = [float(engine.train_batch(data)) for _ in range(5)]
        engine.destroy()
    return found


def given_parameters(rank: int, world: int, configs: dict[str, Any]) -> dict[str, Any]:
    """Groups made of the whole model, before it is spread: losses, and the elements that this rank keeps state of."""
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = GPT(SHAPE)
        params = list(model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ]
        engine = twinflow.initialize(model=model, model_parameters=groups, config=config)[0]
        losses = [one_step(engine, step) for step in range(4)]
        own = sum(p.numel() for p in engine.module.parameters())
        kept = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
        found[name] = {"losses": losses, "own": own, "kept": kept, "groups": len(engine.optimizer.param_groups)}
        engine.destroy()
    return found


def second_try(rank: int, world: int) -> dict[str, list[float]]:
    """A start that is refused, then one with the same module; and a fresh one."""
    module = PipelineModule(layers(), world, loss_fn=loss_of)
    said = ""
    try:
        twinflow.initialize(model=module, config=pipe_config(activation_checkpointing={"layers": ["NoSuch"]}))
    except ValueError as error:
        said = str(error)
    found = {}
    for name, given in (("again", module), ("fresh", PipelineModule(layers(), world, loss_fn=loss_of))):
        engine = twinflow.initialize(model=given, config=pipe_config())[0]
        data = batches()
        found[name] = [float(engine.train_batch(data)) for _ in range(4)]
        engine.destroy()
    assert "NoSuch" in said
    return found


def refused(rank: int, world: int) -> dict[str, str]:
    """What each start is refused with; weights are as they were."""
    cases: dict[str, Any] = {
        "schedule": (PipelineModule(layers(), world, loss_fn=loss_of), pipe_config(pipeline={"schedule": "zbv"})),
        "interval": (
            PipelineModule(layers(), world, loss_fn=loss_of),
            pipe_config(pipeline={"activation_checkpoint_interval": 1}),
        ),
        "partition": (PipelineModule(layers(), world, loss_fn=loss_of), pipe_config(pipeline={"partition": "uniform"})),
        "frozen": (_half_frozen(world), pipe_config()),
        "plan": (GPT(SHAPE), config_of(1, 2, 1, tensor_parallel={"plan": {"nosuch": "column"}})),
        "heads": (GPT(GPTConfig(**{**vars(SHAPE), "num_heads": 1})), config_of(1, 2, 1)),
        "layers": (GPT(GPTConfig(**{**vars(SHAPE), "num_layers": 1})), config_of(2, 1, 1, schedule="zbv")),
    }
    found = {}
    for name, (model, config) in cases.items():
        before = [param.detach().clone() for param in model.parameters()]
        try:
            twinflow.initialize(model=model, config=config)
            found[name] = "not refused"
        except ValueError as error:
            found[name] = str(error)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same, name
    return found


def _half_frozen(world: int) -> PipelineModule:
    module = PipelineModule([LayerSpec(Mix) for _ in range(4)], world, loss_fn=nn.functional.mse_loss)
    if module.has_first:
        module.requires_grad_(False)
    return module


def dropout_after_load(rank: int, world: int, folder: str) -> list[dict[str, str]]:
    """A checkpoint of two replicas, whose random states differ, loaded into two tensor ranks."""
    engine = make(config_of(1, 1, 2, num_micro=1), seed=rank, dropout=0.2)
    one_step(engine, 0)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make(config_of(1, 2, 1, num_micro=1), dropout=0.2)
    engine.load_checkpoint(folder)
    for step in range(3):
        one_step(engine, step)
    found = digests(engine)
    engine.destroy()
    return [found]


def own_loader(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Data of the engine's own, a roll-back, modes, outputs, and layers that are seeded."""
    generator = torch.Generator().manual_seed(3)
    data = [(row[:-1], row[1:]) for row in torch.randint(0, SYMBOLS, (40, 9), generator=generator)]
    module = PipelineModule(layers(4, 0.2), world, loss_fn=loss_of, seed_layers=True)
    torch.manual_seed(1)
    engine = twinflow.initialize(model=module, config=pipe_config(), training_data=data)[0]
    engine.train_batch()
    engine.save_checkpoint(folder)
    first = [float(engine.train_batch()) for _ in range(3)]
    engine.load_checkpoint(folder)
    again = [float(engine.train_batch()) for _ in range(3)]
    next(module.children()).eval()
    modes = [one.training for one in module.modules()]
    loss = float(engine.eval_batch(batches()))
    outputs = engine.eval_batch(batches(), compute_loss=False, num_micro_batches=2)
    kept = modes == [one.training for one in module.modules()]
    shape = list(outputs[0].shape) if outputs is not None else None
    engine.destroy()
    return {"first": first, "again": again, "kept": kept, "loss": loss, "shape": shape}


def one_data_rank(rank: int, world: int, stage: int) -> list[float]:
    """Losses of two stages with one data rank each, for which no ZeRO stage partitions anything."""
    torch.manual_seed(0)
    config = pipe_config()
    config["zero_optimization"]["stage"] = stage
    model = PipelineModule(layers(), loss_fn=loss_of, num_stages=world)
    engine = twinflow.initialize(model=model, config=config)[0]
    data = batches()
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    engine.destroy()
    return losses


def save_whole(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """The file of `save_16bit_model` with tensor ranks, and the weights of the engine."""
    engine = make(config_of(1, world, 1))
    one_step(engine, 0)
    engine.save_16bit_model(folder, f"{world}.bin")
    torch.distributed.barrier()
    state = torch.load(f"{folder}/{world}.bin")
    engine.destroy()
    return {name: value.double().flatten().tolist() for name, value in state.items()}
