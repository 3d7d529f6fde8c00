"""Input of `twinflow plan`: the model, the machine and the run, from options and files."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from twinflow.cli import check_whole, option
from twinflow.cli.settings import BATCH_KEYS, MAX_BATCH, MAX_SIZES, option_name, parse_bytes
from twinflow.config import load_config, resolve_batch
from twinflow.errors import invalid_value
from twinflow.files import read_json
from twinflow.models.gpt import PRESET_BATCH, PRESETS, cost_of
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.blocks import find_blocks, owners
from twinflow.parallel.tensor import tensor_units
from twinflow.planner.cases import Setting
from twinflow.planner.costs import Memory, Run
from twinflow.planner.formats import STATES
from twinflow.planner.machines import GPUS, Gpu, Host, Machine, gpu_named, link_rate, rates_of, recognise
from twinflow.planner.models import MAX_NUMEL, ModelCost, from_counts, from_hf, gpt2_like
from twinflow.planner.scaling import Cluster, default_network

RAM, CORES, DRAM_RATE = 128 * 10**9, 16, 150e9  # defaults of a machine that --gpu names
MAX_GPUS, MAX_CORES, MAX_MICRO_BATCHES = 2**17, 2**16, 2**12  # so that a plan is made in seconds
MAX_TOKENS: Final = 1e18
_UNITS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Place:
    """The machine, a line that describes it, and the default dtype of the weights there."""

    setting: Setting
    text: str
    num_gpus: int
    weights: str


@dataclass(frozen=True)
class PlanOptions:
    """The command line options of `twinflow plan`. None: not given."""

    preset: str | None = option(None, "A preset of `twinflow train`: gpt-350m, gpt2-1.5b, gpt2-10b, ...")
    model: str | None = option(
        None, "A Hugging Face config.json or its folder, or module:function that returns a module."
    )
    params: str | None = option(None, "Plan a GPT-2 shape with this number of parameters, for example 13b.")
    config: Path | None = option(None, "A DeepSpeed config with batch sizes, states, clipping and ratio.")
    gpu: str | None = option(None, f"GPU: {', '.join(GPUS)}. Default: the GPU of this machine, measured.")
    ram: str | None = option(None, "Host memory, for example 128GB.  [default: 128GB with --gpu, else the free memory]")
    cores: int | None = option(None, "CPU cores of the host.  [default: 16 with --gpu]")
    dram: str | None = option(None, "Bandwidth of the host memory, for example 150GB/s.  [default: 150GB/s with --gpu]")
    gpus: int = option(1, "Number of GPUs. They share the optimizer state. For several machines see --per-node.")
    batch_size: int | None = option(None, "Sequences in a micro-batch of each GPU.", "--batch-size --micro-batch-size")
    seq_length: int | None = option(
        None, "Tokens in a sequence. Default: the context length of the model, but at most 2048.", "--seq-length --seq"
    )
    accumulation: int | None = option(None, "Micro-batches in a step.")
    checkpoint_activations: bool | None = option(
        None,
        "Recompute activations in backward. Default: on for models of width 1600 and more.",
        "--checkpoint-activations/--no-checkpoint-activations",
    )
    states: str | None = option(None, "Plan only this state format: fp32, bf16 or int8.")
    grad_clip: float | None = option(None, "Largest gradient norm. 0 turns clipping off.  [default: 1]")
    as_json: bool = option(False, "Print one JSON object instead of the tables.", "--json")
    html: Path | None = option(None, "Also write an HTML page to this file.")
    write_config: Path | None = option(None, "Write the recommended config to this file.")
    scaling: int | None = option(
        None, "Compare ZeRO-Offload and ZeRO-2 on 1, 2, 4, ... up to this many GPUs. Each machine has --gpus GPUs."
    )
    total_batch: int | None = option(
        None, "Sequences in a step of all GPUs.  [default with --scaling: at most 512]", "--total-batch --batch"
    )
    network: str | None = option(None, "Network bandwidth of a machine, for example 25GB/s.  [default: that of a DGX]")
    per_node: int | None = option(
        None, "GPUs in a machine. With more --gpus, search layouts over machines.  [default: 8, or 16 for V100]"
    )
    tokens: str | None = option(
        None, "Tokens to train on, for example 300b. With several machines, shows the days of training."
    )
    layouts: int | None = option(
        None, "Search layouts of pipeline x tensor x data ranks, and show this many of the fastest.  [default: 5]"
    )

    def given(self, *names: str) -> dict[str, object]:
        """The named options that were given, with their values."""
        return {option_name(name): getattr(self, name) for name in names if getattr(self, name) is not None}


def choose_model(options: PlanOptions) -> tuple[ModelCost, int]:
    """The model that the options name, and its default number of sequences in a micro-batch."""
    preset, named = options.preset, options.given("preset", "model", "params")
    if len(named) != 1:
        happened = f"The model is named by {' and '.join(named)}" if named else "No model is named"
        remedy = f"Use exactly one of --preset, --model, --params. The presets are {', '.join(PRESETS)}."
        raise ValueError(f"{happened}. {remedy}")
    if preset is not None:
        if preset not in PRESETS:
            raise invalid_value("--preset", preset, PRESETS)
        return cost_of(PRESETS[preset], preset), PRESET_BATCH.get(preset, 4)
    if options.params is not None:
        return gpt2_like(parse_count("--params", options.params, MAX_NUMEL)), 4
    assert options.model is not None
    return _named_model(options.model), 4


def _named_model(model: str) -> ModelCost:
    """The model of a config.json of transformers, of a folder with one, or of `module:function`."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = read_json(path)
        except ValueError as error:
            raise invalid_value("--model", str(path), "a valid JSON file", f"Correct the file: {error}") from None
        if not isinstance(config, dict):
            raise invalid_value("--model", str(path), "a file with a JSON object, like the config.json of transformers")
        try:
            return from_hf(config, path.parent.name if path.name == "config.json" else path.stem)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if ":" not in model:
        expected = "an existing config.json, a folder with a config.json, or a Python function as module:function"
        raise invalid_value("--model", model, expected)
    return _built_model(model)


def _built_model(name: str) -> ModelCost:
    """The model that a function returns. It is built on the meta device, so no memory is allocated."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        allowed = "a function as module:function, which Python can import from the current folder"
        raise invalid_value("--model", name, allowed, f"Correct the name: {error}.") from None
    finally:
        sys.path.remove(os.getcwd())
    with torch.device("meta"):
        built = function()
    if not isinstance(built, nn.Module):
        remedy = f"This function returns an object of type {type(built).__name__}. Return the model."
        raise invalid_value("--model", name, "a function that returns a torch.nn.Module", remedy)
    return count_module(built, function_name)


def count_module(model: nn.Module, name: str) -> ModelCost:
    """Count the parameters of a module by block. Its largest embedding determines vocabulary and width."""
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
        expected = "the name of a model whose layers are in an nn.ModuleList or nn.Sequential"
        raise invalid_value("--model", name, expected, "Put the layers of the model into such a list.")
    config = getattr(model, "config", None)  # of a transformers model or of twinflow's GPT
    return from_counts(
        name,
        [n for n in numel if n],
        embedding,
        head,
        hidden,
        vocab,
        inner=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None),
        num_heads=getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 0,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        tensor_units=tensor_units(model) if hasattr(config, "model_type") else 0,
    )


def _width(model: nn.Module) -> int:
    """The most frequent size of a one-dimensional parameter. Norms and biases are as wide as the model."""
    sizes = [p.numel() for p in model.parameters() if p.dim() == 1] or [1024]
    return max(set(sizes), key=sizes.count)


def parse_count(name: str, text: str, most: float = MAX_TOKENS) -> float:
    """Parse a number such as 13b, 350m or 1.3B."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbgt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise invalid_value(name, text, "a number above 0 such as 13b, 350m or 1.3b")
    value = float(found[1]) * _UNITS.get(found[2].upper(), 1.0)
    if value > most:
        raise invalid_value(name, text, f"at most {most:g}")
    return value


def parse_rate(name: str, text: str | None) -> int | None:
    """Parse a rate such as 25GB/s to bytes per second."""
    return parse_bytes(name, text.lower().removesuffix("/s") if text is not None else None)


def choose_host(options: PlanOptions, ram_bytes: int = RAM, cores: int = CORES, dram_rate: float = DRAM_RATE) -> Host:
    """The host that the options describe. The other arguments are defaults for options that are not given."""
    check_whole("--cores", options.cores, most=MAX_CORES)
    ram, rate = parse_bytes("--ram", options.ram), parse_rate("--dram", options.dram)
    return Host(ram or ram_bytes, options.cores or cores, rate or dram_rate)


def _no_gpu(why: str) -> ValueError:
    """The error for a plan without --gpu. `why`: a sentence with the reason why the option is needed."""
    return ValueError(f"--gpu is not given, but must be one of {', '.join(GPUS)}. {why}")


def choose_cluster(options: PlanOptions, host: Host, num_gpus: int, why: str) -> Cluster:
    """Machines with this host and the GPU and the network that the options name. `why`: the reason in the error message
    if the options name no GPU.
    """
    if options.gpu is None:
        raise _no_gpu(why)
    machine = Machine(gpu_named(options.gpu), host, num_gpus)
    return Cluster(machine, parse_rate("--network", options.network) or default_network(machine))


def choose_place(options: PlanOptions) -> Place:
    """The machine that the options name, or this machine."""
    check_whole("--gpus", options.gpus, most=MAX_GPUS)
    if options.gpu is None:
        return _this_machine(choose_host(options, 0, 0, 0.0), options.gpus)
    return _sheet(gpu_named(options.gpu), choose_host(options), options.gpus, "from a data sheet, not measured")


def _sheet(card: Gpu, host: Host, num_gpus: int, source: str) -> Place:
    machine = Machine(card, host, num_gpus)
    setting = Setting(rates_of(machine), Memory(card.memory_bytes, host.ram_bytes), link_rate(machine))
    many = f"{num_gpus} x " if num_gpus > 1 else ""
    text = (
        f"{many}{card.title}, {host.cores} cores, {host.ram_bytes / 1e9:.0f} GB RAM at {host.dram_rate / 1e9:.0f} GB/s"
    )
    return Place(setting, f"{text} ({source})", num_gpus, card.weights)


def _this_machine(given: Host, num_gpus: int) -> Place:
    """This machine. `given`: the values that options give, or 0."""
    if not torch.cuda.is_available():
        raise _no_gpu("This machine has no GPU that torch can use, so name the GPU to plan for.")
    title = torch.cuda.get_device_name()
    free, _ = torch.cuda.mem_get_info()
    host_bytes = given.ram_bytes or free_host_bytes()
    card = recognise(title)
    # --cores, --dram and --gpus describe another machine, which cannot be measured.
    if given.cores or given.dram_rate or num_gpus > 1:
        if card is None:
            raise _no_gpu(f"twinflow has no data sheet of {title}. Name the most similar GPU.")
        host = Host(host_bytes, given.cores or os.cpu_count() or CORES, given.dram_rate or DRAM_RATE)
        return _sheet(card, host, num_gpus, f"{title} from its data sheet, not measured")
    from twinflow.planner.probe import load_or_measure

    rates = load_or_measure(torch.device("cuda"))
    if not rates.flops and card is not None:
        rates = rates_of(Machine(card, Host(host_bytes, os.cpu_count() or CORES, DRAM_RATE)))
    if not rates.flops:
        reason = f"{title} has too little free memory for a measurement, and twinflow has no data sheet of this GPU."
        raise _no_gpu(f"{reason} Name the most similar GPU.")
    text = f"{title}, {free / 1e9:.0f} GB free, {host_bytes / 1e9:.0f} GB RAM free (measured here)"
    return Place(Setting(rates, Memory(free, host_bytes)), text, 1, "bf16")


def make_run(
    model: ModelCost, default_batch: int, options: PlanOptions, config: Mapping[str, Any], place: Place
) -> Run:
    """The run, from the options, then the config file, then defaults."""
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    micro, parts = _batch(options, config, default_batch, place.num_gpus)
    states = options.states or offload.get("states") or "fp32"
    if states not in STATES:
        raise invalid_value("--states", states, STATES)
    tokens = options.seq_length if options.seq_length is not None else model.context
    check_whole("--batch-size", micro, most=MAX_BATCH)
    check_whole("--seq-length", tokens, most=MAX_SIZES["context"])
    check_whole("--accumulation", parts, most=MAX_MICRO_BATCHES)
    clip = options.grad_clip if options.grad_clip is not None else config.get("gradient_clipping", 1.0)
    if not clip >= 0.0:
        raise invalid_value("--grad-clip", clip, "a number >= 0")
    weights = next((name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")), place.weights)
    checkpointing = options.checkpoint_activations
    return Run(
        model=model,
        batch=micro,
        tokens=tokens,
        micro_batches=parts,
        states=states,
        clips=clip > 0 or weights == "fp16",
        delayed=bool(offload.get("delayed_update")),
        checkpointing=model.hidden >= 1600 if checkpointing is None else checkpointing,
        weights=weights,
        world=place.num_gpus,
        stage=int((config.get("zero_optimization") or {}).get("stage", 2)) if place.num_gpus > 1 else 0,
    )


def _batch(options: PlanOptions, config: Mapping[str, Any], default: int, num_gpus: int) -> tuple[int, int]:
    """Sequences in a micro-batch and micro-batches in a step."""
    whole, micro, parts = BATCH_KEYS
    named = {key: config[key] for key in BATCH_KEYS if config.get(key) not in (None, "auto")}
    if options.batch_size is not None or options.accumulation is not None:
        named.pop(whole, None)  # the flag replaces the batch size of the file
    named |= {micro: options.batch_size} if options.batch_size is not None else {}
    named |= {parts: options.accumulation} if options.accumulation is not None else {}
    if whole not in named:
        return int(named.get(micro, default)), int(named.get(parts, 1))
    batch = resolve_batch(load_config(named), world_size=num_gpus)
    return batch.micro_batch_size, batch.accumulation_steps
