# SPDX-License-Identifier: Apache-2.0
"""Input of `twinflow plan`: the model, the machine and the run, from options and files."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from twinflow.build_parallel import check_experts
from twinflow.cli import check_whole, option
from twinflow.cli.memory import rule_of
from twinflow.cli.settings import BATCH_KEYS, MAX_BATCH, MAX_SIZES, option_name, parse_bytes
from twinflow.config import Config, load_config, resolve_batch
from twinflow.config.resolve import optimizer_choice
from twinflow.conflicts import refuse
from twinflow.errors import incompatible, invalid_value
from twinflow.files import read_json
from twinflow.models.gpt import PRESET_BATCH, PRESETS, cost_of
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.blocks import find_blocks, owners
from twinflow.parallel.tensor import tensor_units
from twinflow.planner.cases import Setting
from twinflow.planner.costs import Memory
from twinflow.planner.fit import DEFAULT_RANK, METHODS, Wish
from twinflow.planner.machines import (
    GPUS,
    PCIE_GENERATIONS,
    Gpu,
    Host,
    Machine,
    Rates,
    any_gpu,
    gpu_named,
    link_rate,
    rates_of,
    recognise,
)
from twinflow.planner.models import MAX_NUMEL, ModelCost, from_counts, from_hf, gpt2_like, is_known
from twinflow.planner.scaling import Cluster, default_network
from twinflow.rules import ALL_RULES
from twinflow.rules.segment import check_master, no_master
from twinflow.zero.experts import check_divides, fused_experts, no_experts, other_experts

RAM, CORES, DRAM_RATE = 128 * 10**9, 16, 150e9  # defaults of a machine that --gpu names
MAX_GPUS, MAX_CORES, MAX_MICRO_BATCHES = 2**17, 2**16, 2**12  # so that a plan is made in seconds
MAX_TOKENS: Final = 1e18
_NUM_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")  # in configs of transformers
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
_NO_LIMIT: Final = 1 << 60
_NO_RATES: Final = Rates(0.0, 0.0, 0.0, {}, {}, 0.0, 0.0)  # of a machine without a GPU
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
        None,
        "A Hugging Face config.json or its folder, a model of the Hugging Face hub such as Qwen/Qwen2.5-7B, or "
        "module:function that returns a module.",
    )
    params: str | None = option(None, "Plan a GPT-2 shape with this number of parameters, for example 13b.")
    config: Path | None = option(None, "A DeepSpeed config with batch sizes, states, clipping and ratio.")
    method: str = option("full", "What is trained: full (all parameters), lora, or qlora (base in 4 bits).")
    rank: int = option(DEFAULT_RANK, "Rank of the adapters of lora and qlora.")
    gpu: str | None = option(None, f"GPU: {', '.join(GPUS)}. Default: the GPU of this machine, measured.")
    gpu_memory: str | None = option(None, "GPU memory that the run may use, for example 24GB. Default: all of the GPU.")
    gpu_tflops: float | None = option(
        None, "For a GPU that is not in the list, with --gpu-memory: dense bf16 TFLOPS of its data sheet."
    )
    pcie: int | None = option(None, "For a GPU that is not in the list: generation of its PCIe.  [default: 4]")
    ram: str | None = option(None, "Host memory, for example 128GB.  [default: 128GB with --gpu, else the free memory]")
    cores: int | None = option(None, "CPU cores of the host.  [default: 16 with --gpu]")
    dram: str | None = option(None, "Bandwidth of the host memory, for example 150GB/s.  [default: 150GB/s with --gpu]")
    gpus: int = option(1, "Number of GPUs. They share the optimizer state. For several machines see --per-node.")
    sequences: int | None = option(
        None, "Sequences in a step of each GPU. The plan divides them into micro-batches.  [default: 4]"
    )
    batch_size: int | None = option(
        None,
        "Sequences in a micro-batch of each GPU. Default: the plan chooses.",
        "--batch-size --micro-batch-size",
    )
    seq_length: str | None = option(
        None,
        "Tokens in a sequence, for example 4096, 32k or 1m (k: 1024, m: 1024 x 1024). Default: the context length of "
        "the model, but at most 2048.",
        "--seq-length --seq",
    )
    accumulation: int | None = option(None, "Micro-batches in a step. Default: the plan chooses.")
    checkpoint_activations: bool | None = option(
        None,
        "Recompute activations in backward. Default: the plan chooses.",
        "--checkpoint-activations/--no-checkpoint-activations",
    )
    offload_params: bool | None = option(
        None, "Keep the weights on the host too. Default: the plan chooses.", "--offload-params/--no-offload-params"
    )
    offload_embeddings: bool | None = option(
        None,
        "With the weights on the host, keep those of the embedding and output layers there too. Default: the plan "
        "chooses.",
        "--offload-embeddings/--no-offload-embeddings",
    )
    expert_parallel: int | None = option(
        None,
        "GPUs that have all experts of a layer together (expert_parallel_size). Default: 1, or as many as a run needs "
        "to fit.",
    )
    states: str | None = option(None, "Plan only this state format: fp32, bf16, int8 or 4bit.")
    master: str | None = option(
        None, "none: plan bf16 weights without an fp32 master. They take 2 bytes less.  [default: fp32]"
    )
    grad_clip: float | None = option(None, "Largest gradient norm. 0 turns clipping off.  [default: 1 if it fits]")
    disk: Path | None = option(
        None,
        "Also plan state on the disk of this folder, and recommend it if nothing fits without it. A file of 1 GiB, "
        "which is removed again, measures the disk.",
    )
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
    """The model of a config.json of transformers, of a folder with one, of the hub, or of `module:function`."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise invalid_value("--model", model, "a folder with a config.json")
    if path.is_file():
        return model_of_file(path, path.parent.name if path.name == "config.json" else path.stem)
    if _HUB_ID.fullmatch(model) and path.suffix != ".json":
        return model_of_file(_from_hub(model), model.rpartition("/")[2])
    if ":" not in model:
        expected = (
            "an existing config.json, a folder with a config.json, a model of the hub as owner/name, or a Python "
            "function as module:function"
        )
        raise invalid_value("--model", model, expected)
    return _built_model(model)


def _from_hub(name: str) -> Path:
    """The config.json of a model of the hub, from the local cache or else from the hub."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        remedy = "This needs the package huggingface_hub, which is not installed. Install it, or give a config.json."
        raise invalid_value("--model", name, "an existing file or folder", remedy) from None
    # The library raises errors of several packages. All of them mean that there is no file.
    with suppress(Exception):  # a model in the cache needs no network
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    try:
        resolve_hub()
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        remedy = f"It is not in the local cache, and the hub did not return it: {reason}. Give a folder or config.json."
        raise invalid_value("--model", name, "an existing file or folder, or a model of the hub", remedy) from None


def resolve_hub() -> None:
    """Raises OSError if there is no network to the hub: its library would try again for half a minute."""
    if not getproxies():
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)


def model_of_file(path: Path, name: str) -> ModelCost:
    """The costs of the model that a config.json describes. Models that are not known here are built without memory, if
    transformers is installed."""
    try:
        config = read_json(path)
    except ValueError as error:
        raise invalid_value("--model", str(path), "a valid JSON file", f"Correct the file: {error}") from None
    if not isinstance(config, dict):
        raise invalid_value("--model", str(path), "a file with a JSON object, like the config.json of transformers")
    if is_known(config):
        try:
            return from_hf(config, name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return from_hf(config, name)  # raises an error that names the model types
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        remedy = f"transformers cannot build this model: {str(error).splitlines()[0]}"
        raise invalid_value("--model", str(path), "the config.json of a causal language model", remedy) from None
    return count_module(built, name)


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
    linears = [[m for m in block.module.modules() if isinstance(m, nn.Linear)] for block in blocks]
    counted = [n for n in numel if n]
    found = from_counts(
        name,
        counted,
        embedding,
        head,
        hidden,
        vocab,
        inner=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None),
        num_heads=getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 0,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        tensor_units=tensor_units(model) if hasattr(config, "model_type") else 0,
        context=min(2048, getattr(config, "max_position_embeddings", None) or 1024),
        adapter_unit=max((sum(m.in_features + m.out_features for m in each) for each in linears), default=0),
    )
    num = next((n for n in (getattr(config, name, None) for name in _NUM_EXPERTS) if isinstance(n, int)), 0)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(chosen, int) or not 0 < chosen < num:
        return found
    divided = {p for part in fused_experts(model).values() for p in part.parameters(recurse=False)}
    inside = [
        sum(p.numel() for p in block.module.parameters() if p in divided or (p.dim() == 3 and len(p) == num))
        for block in blocks
    ]
    fused = tuple(experts for experts, n in zip(inside, numel, strict=True) if n)
    if not any(fused):
        return found
    found = replace(found, experts=fused, num_experts=num, num_chosen=chosen, divides_experts=bool(divided))
    products = tuple(n - idle for n, idle in zip(counted, found.idle, strict=True))
    stack = max(p.numel() for block in blocks for p in block.module.parameters() if p.dim() == 3)
    return replace(found, expert_stack=stack, block_products=products)


def _width(model: nn.Module) -> int:
    """The most frequent size of a one-dimensional parameter. Norms and biases are as wide as the model."""
    sizes = [p.numel() for p in model.parameters() if p.dim() == 1] or [1024]
    return max(set(sizes), key=sizes.count)


def parse_count(name: str, text: str, most: float = MAX_TOKENS) -> float:
    """Parse a number such as 13b, 350m, 1.3B or 8e9."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise invalid_value(name, text, "a number above 0 such as 13b, 350m or 1.3b")
    value = float(found[1]) * _UNITS.get(found[2].upper(), 1.0)
    if value > most:
        raise invalid_value(name, text, f"at most {most:g}")
    return value


def sequence_length(options: PlanOptions) -> int | None:
    """Tokens in a sequence, from --seq-length. None if it is not given."""
    text = options.seq_length
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([km]?)", text.strip().lower())
    tokens = float(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2]] if found else 0.0
    if tokens < 1 or tokens != int(tokens):
        raise invalid_value("--seq-length", text, "a whole number >= 1 such as 4096, 32k or 1m")
    check_whole("--seq-length", int(tokens), most=MAX_SIZES["context"])
    return int(tokens)


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
    memory = parse_bytes("--gpu-memory", options.gpu_memory)
    if options.gpu_tflops is not None:
        if options.gpu is not None:
            reason = "the data sheet of this GPU says how fast it is"
            raise incompatible(f"--gpu-tflops {options.gpu_tflops:g}", f"--gpu {options.gpu}", reason, "Leave one out.")
        if memory is None:
            raise ValueError("--gpu-tflops describes a GPU that is not in the list. Give its --gpu-memory too.")
        if not 0 < options.gpu_tflops < math.inf:
            raise invalid_value("--gpu-tflops", options.gpu_tflops, "a number above 0")
        if options.pcie not in (None, *PCIE_GENERATIONS):
            raise invalid_value("--pcie", options.pcie, PCIE_GENERATIONS)
        card = any_gpu(memory, options.gpu_tflops, options.pcie or 4)
        return _sheet(card, choose_host(options), options.gpus, "as given, not measured")
    if options.pcie is not None:
        raise ValueError("--pcie describes a GPU that is not in the list. Give its --gpu-memory and --gpu-tflops too.")
    if options.gpu is None:
        place = _this_machine(choose_host(options, 0, 0, 0.0), options.gpus)
    else:
        source = "from a data sheet, not measured"
        place = _sheet(gpu_named(options.gpu), choose_host(options), options.gpus, source)
    present = place.setting.memory
    if memory is None or memory >= present.gpu_bytes:
        return place
    limited = replace(place.setting, memory=replace(present, gpu_bytes=memory))
    return replace(place, setting=limited, text=f"{place.text}, {memory / 1e9:g} GB of GPU memory used")


def this_setting(gpu_bytes: int | None = None, host_bytes: int | None = None) -> Place:
    """This machine, for a run that is planned before it starts. The arguments limit the memory of the run.

    Without a GPU, `setting.memory.gpu_bytes` is 0, and the speed of the machine is not known.
    """
    if not torch.cuda.is_available():
        free = min(free_host_bytes(), host_bytes or _NO_LIMIT)
        setting = Setting(_NO_RATES, Memory(0, free))
        return Place(setting, f"no GPU, {free / 1e9:.0f} GB RAM free", 1, "fp32")
    place = _this_machine(Host(0, 0, 0.0), 1)
    memory = place.setting.memory
    limited = Memory(min(memory.gpu_bytes, gpu_bytes or _NO_LIMIT), min(memory.host_bytes, host_bytes or _NO_LIMIT))
    return replace(place, setting=replace(place.setting, memory=limited))


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


# Keys of a config that determine the plan. The plan names all others that a file contains.
_USED_KEYS: Final = (
    *BATCH_KEYS,
    "gradient_clipping",
    "bf16.enabled",
    "bf16.check_grad_overflow",
    "fp16.enabled",
    "optimizer.type",
    "optimizer.params.momentum",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.offload_optimizer.states",
    "zero_optimization.offload_optimizer.master",
    "zero_optimization.offload_optimizer.delayed_update",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.embeddings",
    "activation_checkpointing",
    "expert_parallel_size",
)


def unused_keys(config: Mapping[str, Any], at: str = "") -> list[str]:
    """Keys of a config that do not influence the plan."""
    found: list[str] = []
    for key, value in config.items():
        name = f"{at}{key}"
        if name in _USED_KEYS and value != "nvme":  # only --disk plans state on a disk
            continue
        if isinstance(value, dict) and value:
            found += unused_keys(value, f"{name}.")
        else:
            found.append(name)
    return found


def make_wish(
    model: ModelCost, default_batch: int, options: PlanOptions, config: Mapping[str, Any], place: Place
) -> Wish:
    """The run to plan, from the options, then the config file, then defaults. What they leave open is chosen."""
    checked = load_config({**config, "optimizer": config.get("optimizer") or {"type": "AdamW"}})
    zero, activations = checked.zero_optimization, checked.activation_checkpointing
    offload = zero.offload_optimizer
    formats, num_moments, matrix_steps = rule_of(checked)
    sequences, micro_batch, accumulation = _batch(options, config, default_batch, place.num_gpus)
    check_whole("--batch-size", micro_batch, most=MAX_BATCH)
    check_whole("--accumulation", accumulation, most=MAX_MICRO_BATCHES)
    check_whole("--sequences", sequences, most=MAX_BATCH)
    check_whole("--rank", options.rank)
    if options.method not in METHODS:
        raise invalid_value("--method", options.method, METHODS)
    if options.states is not None and options.states not in formats:
        raise invalid_value("--states", options.states, formats)
    clip = options.grad_clip if options.grad_clip is not None else config.get("gradient_clipping")
    if clip is not None and not clip >= 0.0:
        raise invalid_value("--grad-clip", clip, "a number >= 0")
    weights = "fp16" if checked.fp16.enabled else "bf16" if checked.bf16.enabled else place.weights
    master = check_master(options.master or (offload.master if offload is not None else "fp32"))
    if master == "none" and weights != "bf16":
        raise no_master("The weights", {"fp16": torch.float16, "fp32": torch.float32}[weights])
    # Clipping waits for the norm of all gradients, and so do a loss scale and a check that all gradients are finite.
    waits = weights == "fp16" or (config.get("bf16") or {}).get("check_grad_overflow", False)
    parks = options.offload_params
    if parks is None and "offload_param" in (config.get("zero_optimization") or {}):
        parks = zero.offload_param is not None and zero.offload_param.device != "none"
    if _is_foreign(checked) or matrix_steps:
        parks = False  # weights on the host need one of twinflow's rules, and not Muon
    embeddings = options.offload_embeddings
    if embeddings is None and parks and zero.offload_param and "embeddings" in zero.offload_param.model_fields_set:
        embeddings = zero.offload_param.embeddings
    refuse("Weights on the host", {"--offload-embeddings": bool(embeddings) and parks is False})
    experts = _expert_ranks(model, options, config, checked, place.num_gpus, bool(parks))
    checkpointing = options.checkpoint_activations
    if checkpointing is None and "activation_checkpointing" in config:
        checkpointing = activations.is_asked_for and not activations.selective
    return Wish(
        model=model,
        tokens=sequence_length(options) or model.context,
        sequences=sequences,
        method=options.method,
        rank=options.rank,
        clips=True if waits else None if clip is None else clip > 0,
        delayed=offload is not None and offload.delayed_update,
        weights=weights,
        num_moments=num_moments,
        matrix_steps=matrix_steps,
        world=place.num_gpus,
        stage=(zero.stage if "stage" in (config.get("zero_optimization") or {}) else 2) if place.num_gpus > 1 else 0,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        selective=activations.selective,
        states=options.states,
        master=master,
        formats=formats,
        offload_params=parks,
        offload_embeddings=embeddings,
        num_sequence=checked.sequence_parallel_size or 1,
        expert_parallel=experts,
    )


def _expert_ranks(
    model: ModelCost, options: PlanOptions, config: Mapping[str, Any], checked: Config, num_gpus: int, parks: bool
) -> int | None:
    """GPUs that have all experts together. None: the plan may choose. Raises the errors of the engine for a size that
    it would refuse. `parks`: the weights are on the host, which needs ZeRO stage 3 on several GPUs.
    """
    size = options.expert_parallel
    check_whole("--expert-parallel", size)
    if size is None and "expert_parallel_size" in config:
        size = checked.expert_parallel_size
    asked = checked.model_copy(update={"expert_parallel_size": size or num_gpus})
    try:
        check_experts(asked, num_gpus)
        if asked.expert_parallel_size > 1:
            refuse("Expert parallelism", {"stage": parks, "adapters": options.method != "full"})
            if not model.experts:
                raise no_experts(model.name)
            if not model.divides_experts:
                raise other_experts(model.name)
    except ValueError:
        if size is not None:
            raise
        return 1
    if size is not None:
        check_divides(size, model.num_experts, model.name)
    return size


def _is_foreign(config: Config) -> bool:
    """Whether the optimizer is one of torch.optim."""
    return optimizer_choice(config)[0] not in ALL_RULES


def config_ratio(config: Mapping[str, Any]) -> float | None:
    """The ratio of a config file, if it is a number."""
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if offload.get("device") == "none":
        return 0.0
    ratio = offload.get("ratio")
    return float(ratio) if isinstance(ratio, (int, float)) else None


def _batch(
    options: PlanOptions, config: Mapping[str, Any], default: int, num_gpus: int
) -> tuple[int, int | None, int | None]:
    """Sequences in a step of a GPU, sequences in a micro-batch, and micro-batches in a step. None: not given."""
    whole, micro, parts = BATCH_KEYS
    named = {key: config[key] for key in BATCH_KEYS if config.get(key) not in (None, "auto")}
    if options.sequences is not None:
        named.clear()  # the flags replace the batch sizes of the file
    elif options.given("batch_size", "accumulation"):
        named.pop(whole, None)
    size = options.batch_size if options.batch_size is not None else named.get(micro)
    count = options.accumulation if options.accumulation is not None else named.get(parts)
    if options.sequences is not None:
        wanted = f"--sequences {options.sequences}"
        if size is not None and count is not None and size * count != options.sequences:
            raise incompatible(wanted, f"{count} micro-batches of {size}", f"these are {size * count} sequences")
        if options.sequences % (size or count or 1):
            raise incompatible(wanted, f"parts of {size or count}", "the number is not a multiple of them")
        return options.sequences, size, count
    if whole in named:
        if size is None and count is None:
            return max(1, named[whole] // num_gpus), None, None
        batch = resolve_batch(load_config(named), world_size=num_gpus)
        return batch.micro_batch_size * batch.accumulation_steps, batch.micro_batch_size, batch.accumulation_steps
    if size is not None:
        return size * (count or 1), size, count or 1
    return default * (count or 1), None, count
