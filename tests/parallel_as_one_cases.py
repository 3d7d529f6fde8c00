# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of loops that must give what one process gives, or an error with the reason."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from parallel_cases import SHAPE, config_of, one_step
from parallel_trap_cases import SYMBOLS, WIDTH, Mix, batches, layers, loss_of, pipe_config
from torch import Tensor, nn

import twinflow
from twinflow.dist import meeting
from twinflow.models import gpt
from twinflow.parallel import LayerSpec, PipelineModule, TiedLayerSpec
from twinflow.parallel.shard import shard_of


def said(work: Any) -> str:
    """The type and the text of the error that `work` raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def engine_of(items: list[Any], world: int, **more: Any) -> Any:
    module = PipelineModule(items, world, loss_fn=more.pop("loss_fn", loss_of), **more)
    return twinflow.initialize(model=module, config=pipe_config())[0]


def without_gradients(rank: int, world: int) -> dict[str, Any]:
    """Steps around one that cannot have gradients."""
    engine, data = engine_of(layers(), world), batches()
    losses = [float(engine.train_batch(data))]
    with torch.no_grad():
        errors = [said(lambda: engine.train_batch(data))]
    with torch.inference_mode():
        errors.append(said(lambda: engine.train_batch(data)))
    losses += [float(engine.train_batch(data)) for _ in range(2)]
    found = {"losses": losses, "errors": errors, "steps": engine.global_steps}
    engine.destroy()
    return found


def cut_off(output: Tensor) -> Tensor:
    return output.detach()


def detached(rank: int, world: int) -> dict[str, Any]:
    """A loss without a graph, because a layer of the last stage has cut it off."""
    found = {}
    for name, items, loss_fn in (("layer", [*layers(), cut_off], loss_of), ("loss", layers(), detached_loss)):
        engine = engine_of(items, world, loss_fn=loss_fn)
        error = said(lambda engine=engine: engine.train_batch(batches()))
        found[name] = {"error": error, "steps": engine.global_steps}
        if rank == 0:  # a rank that tries again does not wait for the others
            found[name]["again"] = said(lambda engine=engine: engine.train_batch(batches()))
        engine.destroy()
    return found


def detached_loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output, target).detach()


def after_eval(rank: int, world: int) -> dict[str, Any]:
    """Losses with dropout; `eval()` before each step makes no difference, and a part in eval mode stays in it."""
    found: dict[str, Any] = {}
    for name in ("train", "eval", "part"):
        engine, data = engine_of(layers(4, 0.5), world, seed_layers=True), batches()
        losses = []
        for _ in range(2):
            if name == "eval":
                engine.eval()
            if name == "part":
                for part in engine.module.modules():
                    if isinstance(part, nn.Dropout):
                        part.eval()
            losses.append(float(engine.train_batch(data)))
        found[name] = losses
        found[f"{name} mode"] = engine.module.training
        engine.destroy()
    return found


def ended(rank: int, world: int) -> dict[str, Any]:
    """An iterator with one batch and a half, then a new one."""
    engine, data = engine_of(layers(), world), batches()
    short = islice(batches(), 6)
    losses = [float(engine.train_batch(short))]
    errors = [said(lambda: engine.train_batch(short)), said(lambda: engine.eval_batch(short))]
    losses += [float(engine.train_batch(data)) for _ in range(2)]
    engine.set_dataiterator(islice(batches(), 2))
    errors.append(said(engine.train_batch))
    broken = (1 // (i - 1) for i in range(9)) if rank == 0 else batches()
    errors.append(said(lambda: engine.train_batch(broken)))
    losses.append(float(engine.train_batch(data)))
    engine.destroy()
    return {"losses": losses, "errors": errors}


class Wrapped(Mix):
    """Returns a list of one tensor."""

    def forward(self, x: Any) -> Any:
        return [super().forward(x)]


class First(nn.Module):
    """Takes the first element of what it gets: a list's element, or a tensor's row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        found: Tensor = x[0] + 0.0 * self.inner(x[0])
        return self.inner(found).expand(4, 8, WIDTH)


class Two(Mix):
    """Returns a list of two tensors."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return [y, 2.0 * y]


class Sum(Mix):
    """Takes a tuple of two tensors."""

    def forward(self, x: Any) -> Any:
        return super().forward(x[0] + x[1]) if isinstance(x, tuple) else super().forward(x[0])


def lists(rank: int, world: int) -> dict[str, list[float]]:
    """Layers that return lists, with the boundary of stages in between or not."""
    found = {}
    embed, head = LayerSpec(nn.Embedding, SYMBOLS, WIDTH), LayerSpec(nn.Linear, WIDTH, SYMBOLS)
    cases = {
        "one": [embed, LayerSpec(Wrapped), LayerSpec(First), head],
        "two": [embed, LayerSpec(Two), LayerSpec(Sum), head],
    }
    for name, items in cases.items():
        engine, data = engine_of(items, world, partition_method="uniform"), batches()
        if world == 1:  # plain torch: each layer gets what the one before it returns
            found[f"{name} plain"] = [_plain(engine.module, batches())]
        found[name] = [float(engine.train_batch(data)) for _ in range(2)]
        engine.destroy()
    return found


@torch.no_grad()
def _plain(module: PipelineModule, data: Any) -> float:
    losses = []
    for value, target in islice(data, 4):
        for layer in module.layers:
            value = layer(value)
        losses.append(loss_of(value, target))
    return float(torch.stack(losses).mean())


def freeze(module: PipelineModule, is_trained: bool = False) -> None:
    for name, param in module.named_parameters():
        if name.startswith("layers.0."):
            param.requires_grad_(is_trained)


class Frozen(nn.Embedding):
    """Frozen when it is built."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requires_grad_(False)


def frozen_layers() -> list[Any]:
    embed, head = (
        TiedLayerSpec("embed", Frozen, SYMBOLS, WIDTH, forward_fn=forward_fn) for forward_fn in (None, _logits)
    )
    return [embed, *(LayerSpec(Mix) for _ in range(4)), head]


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.t()  # type: ignore[operator]


def frozen_ties(rank: int, world: int) -> dict[str, Any]:
    """A tied layer that is frozen, or trained again, before the start; and one that is frozen between steps."""
    found: dict[str, Any] = {}
    for name, items in (("frozen", layers()), ("thawed", frozen_layers()), ("later", layers())):
        module = PipelineModule(items, world, loss_fn=loss_of)
        if name != "later":
            freeze(module, is_trained=name == "thawed")
        engine, data = twinflow.initialize(model=module, config=pipe_config())[0], batches()
        losses = [float(engine.train_batch(data)) for _ in range(2)]
        if name == "later":
            freeze(engine.module)
        found[name] = losses + [float(engine.train_batch(data)) for _ in range(2)]
        engine.destroy()
    if world > 1:
        module = PipelineModule(layers(), world, loss_fn=loss_of)
        if rank == 0:
            freeze(module)
        found["error"] = said(lambda: twinflow.initialize(model=module, config=pipe_config()))
    return found


class GPT(gpt.GPT):
    """With the method of a transformers model."""

    def save_pretrained(
        self, save_directory: str, is_main_process: bool = True, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        assert is_main_process
        torch.save(self.state_dict() if state_dict is None else state_dict, Path(save_directory) / "whole.pt")


def whole_weights(rank: int, world: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Steps, the whole state, and steps again after it was loaded into another engine."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return twinflow.initialize(model=GPT(SHAPE), config=config)[0]

    engine = make(0)
    for step in range(2):
        one_step(engine, step)
    state = engine.module_state_dict()
    if engine.dp_rank == 0 and not hasattr(engine, "train_batch"):
        engine.module.save_pretrained(folder)  # a collective of one replica
    other = make(1)
    other.load_module_state_dict(state)
    again = other.module_state_dict()
    return {
        "state": {name: value.double().sum().item() for name, value in state.items()},
        "shapes": {name: list(value.shape) for name, value in state.items()},
        "num_tensors": len({value.data_ptr() for value in state.values()}),
        "again": all(torch.equal(value, again[name]) for name, value in state.items()),
        "losses": [one_step(other, step) for step in range(2)],
        "num_split": sum(shard_of(param) is not None for param in engine.module.parameters()),
    }


def only_one_saves(rank: int, world: int, folder: str) -> list[str]:
    """Rank 0 alone asks for whole weights."""
    meeting.PATIENCE_S = 0.5
    torch.manual_seed(0)
    engine = twinflow.initialize(model=GPT(SHAPE), config=config_of(1, 2, 1))[0]
    errors = []
    if rank == 0:
        errors = [said(engine.module_state_dict), said(lambda: engine.module.save_pretrained(folder))]
    engine.optimizer.team.everyone.gather_rows(torch.zeros(1))
    engine.module.save_pretrained(folder)  # now all of them
    engine.destroy()
    return errors


def transformers_models(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Llama over tensor ranks, saved for plain transformers; a subclass with its own forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class TenTimes(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = 10.0 * output.loss
            return output

    class Heir(LlamaForCausalLM):
        pass

    shape = LlamaConfig(
        vocab_size=SHAPE.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip

    def make(cls: Any, config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        return twinflow.initialize(model=cls(shape), config=config)[0]

    def loss(model: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, SHAPE.vocab_size, (4, 9), generator=generator)
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    split = config_of(1, world, 1, num_micro=1)
    engine = make(LlamaForCausalLM, split)
    for _ in range(2):
        engine.backward(loss(engine))
        engine.step()
    engine.save_pretrained(folder)
    found: dict[str, Any] = {"loss": float(loss(engine))}
    engine.destroy()
    engine = make(TenTimes, split)
    found["ten times"] = float(loss(engine))
    engine.destroy()
    if world > 1:
        stages = config_of(world, 1, 1)
        found["subclass"] = said(lambda: make(TenTimes, stages))
        heir = make(Heir, stages)
        found["heir"] = type(heir).__name__
        heir.destroy()
    return found
