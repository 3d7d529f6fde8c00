"""What `twinflow plan` is asked about: the model, the machine and the run, from flags and files."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from twinflow.cli.settings import parse_bytes
from twinflow.config import load_config, resolve_batch
from twinflow.errors import invalid_value
from twinflow.models.gpt import PRESET_BATCH, PRESETS
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.blocks import find_blocks, owners
from twinflow.planner.cases import Setting
from twinflow.planner.costs import Memory, Run
from twinflow.planner.formats import STATES
from twinflow.planner.machines import GPUS, Gpu, Host, Machine, gpu_named, link_rate, rates_of, recognise
from twinflow.planner.models import ModelCost, from_counts, from_hf, gpt2_like, gpt_cost

RAM, CORES, DRAM_RATE = 128 * 10**9, 16, 150e9  # where --gpu names a machine and the flags do not
_UNITS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Place:
    """The machine, and a line that says what is known of it."""

    setting: Setting
    text: str
    num_gpus: int
    weights: str


@dataclass(frozen=True)
class Asked:
    """What the flags say of the run; None: not named."""

    batch_size: int | None = None
    seq_length: int | None = None
    accumulation: int | None = None
    states: str | None = None
    grad_clip: float | None = None
    checkpointing: bool | None = None


def choose_model(preset: str | None, model: str | None, params: str | None) -> tuple[ModelCost, int]:
    """The one model that is named, and sequences of a micro-batch where nobody says how many."""
    given = {"--preset": preset, "--model": model, "--params": params}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        remedy = f"Presets: {', '.join(PRESETS)}."
        raise invalid_value("the model", " and ".join(named) or "not named", f"one of {', '.join(given)}", remedy)
    if preset is not None:
        if preset not in PRESETS:
            raise invalid_value("--preset", preset, PRESETS)
        shape = PRESETS[preset]
        numbers = (shape.vocab_size, shape.context, shape.num_layers, shape.hidden, shape.num_heads, shape.tied)
        return gpt_cost(preset, *numbers), PRESET_BATCH.get(preset, 4)
    if params is not None:
        return gpt2_like(parse_count("--params", params)), 4
    assert model is not None
    return _named_model(model), 4


def _named_model(model: str) -> ModelCost:
    """A config.json of transformers', a folder with one, or `module:function`."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise invalid_value("--model", model, "a file with JSON in it", str(error)) from None
        if not isinstance(config, dict):
            raise invalid_value("--model", model, "a JSON object, as transformers' config.json is")
        return from_hf(config, path.parent.name if path.name == "config.json" else path.stem)
    if ":" not in model:
        raise invalid_value("--model", model, "a config.json that is there, a folder with one, or module:function")
    return _built_model(model)


def _built_model(name: str) -> ModelCost:
    """What a function returns, on the meta device: nothing is allocated."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise invalid_value("--model", name, "module:function that can be imported from here", str(error)) from None
    finally:
        sys.path.remove(os.getcwd())
    with torch.device("meta"):
        built = function()
    if not isinstance(built, nn.Module):
        raise invalid_value("--model", name, f"a function that returns a torch module, not a {type(built).__name__}")
    return count_module(built, function_name)


def count_module(model: nn.Module, name: str) -> ModelCost:
    """Elements of a module by block; embeddings tell vocabulary and width."""
    blocks = find_blocks(model)
    numel = [0] * len(blocks)
    root = []
    for param, block in owners(model, blocks).items():
        if block >= 0:
            numel[block] += param.numel()
        else:
            root.append(param)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    largest = max(tables, key=lambda m: m.num_embeddings, default=None)
    vocab, hidden = (largest.num_embeddings, largest.embedding_dim) if largest is not None else (1, _width(model))
    embedding = sum(p.numel() for p in {id(m.weight): m.weight for m in tables}.values() if any(p is q for q in root))
    head = sum(p.numel() for p in root) - embedding
    if not any(numel):
        remedy = "Blocks are the members of its ModuleLists and Sequentials."
        raise invalid_value("--model", name, "a model with blocks that have parameters", remedy)
    return from_counts(name, [n for n in numel if n], embedding, head, hidden, vocab)


def _width(model: nn.Module) -> int:
    """The commonest size of a one-dimensional parameter: norms and biases are as wide as the model."""
    sizes = [p.numel() for p in model.parameters() if p.dim() == 1] or [1024]
    return max(set(sizes), key=sizes.count)


def parse_count(name: str, text: str) -> float:
    """A number of parameters as people write it: 13b, 350m, 1.3B."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbgt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise invalid_value(name, text, "a number like 13b, 350m or 1.3b")
    return float(found[1]) * _UNITS.get(found[2].upper(), 1.0)


def choose_place(gpu: str | None, ram: str | None, cores: int | None, dram: str | None, num_gpus: int) -> Place:
    """The machine that is named, or this one."""
    if num_gpus < 1:
        raise invalid_value("--gpus", num_gpus, "a whole number >= 1")
    if cores is not None and cores < 1:
        raise invalid_value("--cores", cores, "a whole number >= 1")
    ram_bytes = parse_bytes("--ram", ram)
    dram_rate = parse_bytes("--dram", dram.lower().removesuffix("/s") if dram is not None else None)
    if gpu is None:
        return _this_machine(ram_bytes, cores, dram_rate, num_gpus)
    card = gpu_named(gpu)
    host = Host(ram_bytes or RAM, cores or CORES, dram_rate or DRAM_RATE)
    return _sheet(card, host, num_gpus, "by data sheet, not measured")


def _sheet(card: Gpu, host: Host, num_gpus: int, source: str) -> Place:
    machine = Machine(card, host, num_gpus)
    setting = Setting(rates_of(machine), Memory(card.memory_bytes, host.ram_bytes), link_rate(machine))
    many = f"{num_gpus} x " if num_gpus > 1 else ""
    text = (
        f"{many}{card.title}, {host.cores} cores, {host.ram_bytes / 1e9:.0f} GB RAM at {host.dram_rate / 1e9:.0f} GB/s"
    )
    return Place(setting, f"{text} ({source})", num_gpus, card.weights)


def _this_machine(ram_bytes: int | None, cores: int | None, dram_rate: int | None, num_gpus: int) -> Place:
    if not torch.cuda.is_available():
        raise invalid_value(
            "--gpu", None, GPUS, "This machine has no GPU that torch can use: name the one to plan for."
        )
    title = torch.cuda.get_device_name()
    free, _ = torch.cuda.mem_get_info()
    host_bytes = ram_bytes or free_host_bytes()
    card = recognise(title)
    # Names of cores or memory ask about another host: nothing can be measured there.
    if cores is not None or dram_rate is not None or num_gpus > 1:
        if card is None:
            raise invalid_value("--gpu", None, GPUS, f"There is no data sheet for {title}: name the closest.")
        host = Host(host_bytes, cores or os.cpu_count() or CORES, dram_rate or DRAM_RATE)
        return _sheet(card, host, num_gpus, f"{title} by data sheet, not measured")
    from twinflow.planner.probe import load_or_measure

    rates = load_or_measure(torch.device("cuda"))
    if not rates.flops and card is not None:
        rates = rates_of(Machine(card, Host(host_bytes, os.cpu_count() or CORES, DRAM_RATE)))
    if not rates.flops:
        raise invalid_value(
            "--gpu", None, GPUS, f"There was no room to measure {title}, and there is no data sheet for it."
        )
    text = f"{title}, {free / 1e9:.0f} GB free, {host_bytes / 1e9:.0f} GB RAM free (measured here)"
    return Place(Setting(rates, Memory(free, host_bytes)), text, 1, "bf16")


def read_plan_config(path: Path | None) -> dict[str, Any]:
    """What a config file says, checked."""
    if path is None:
        return {}
    if not path.is_file():
        raise invalid_value("--config", str(path), "a file that is there")
    return load_config(path).model_dump(mode="json", exclude_unset=True)


def make_run(model: ModelCost, default_batch: int, asked: Asked, config: Mapping[str, Any], place: Place) -> Run:
    """The run: flags first, then the config file, then what suits."""
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    micro, parts = _batch(asked, config, default_batch, place.num_gpus)
    states = asked.states or offload.get("states") or "fp32"
    if states not in STATES:
        raise invalid_value("--states", states, STATES)
    tokens = asked.seq_length if asked.seq_length is not None else model.context
    for name, value in (("--batch-size", micro), ("--seq-length", tokens), ("--accumulation", parts)):
        if value < 1:
            raise invalid_value(name, value, "a whole number >= 1")
    clip = asked.grad_clip if asked.grad_clip is not None else config.get("gradient_clipping", 1.0)
    if not clip >= 0.0:
        raise invalid_value("--grad-clip", clip, "a number >= 0")
    weights = next((name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")), place.weights)
    checkpointing = asked.checkpointing if asked.checkpointing is not None else model.hidden >= 1600
    return Run(
        model=model,
        batch=micro,
        tokens=tokens,
        micro_batches=parts,
        states=states,
        clips=clip > 0 or weights == "fp16",
        delayed=bool(offload.get("delayed_update")),
        checkpointing=checkpointing,
        weights=weights,
        world=place.num_gpus,
        stage=int((config.get("zero_optimization") or {}).get("stage", 2)) if place.num_gpus > 1 else 0,
    )


def _batch(asked: Asked, config: Mapping[str, Any], default: int, num_gpus: int) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    named = {key: config[key] for key in keys if config.get(key) not in (None, "auto")}
    if asked.batch_size is not None or asked.accumulation is not None:
        named.pop(keys[0], None)  # a flag asks about another batch than the file's
    named |= {keys[1]: asked.batch_size} if asked.batch_size is not None else {}
    named |= {keys[2]: asked.accumulation} if asked.accumulation is not None else {}
    if keys[0] not in named:
        return int(named.get(keys[1], default)), int(named.get(keys[2], 1))
    batch = resolve_batch(load_config(named), world_size=num_gpus)
    return batch.micro_batch_size, batch.accumulation_steps
