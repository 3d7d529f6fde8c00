"""`twinflow plan`: predicts the memory and the speed of a run, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from twinflow.cli.plan_input import Flags, choose_model, choose_place, make_run, read_plan_config
from twinflow.cli.plan_layouts import show_layouts, wants_layouts
from twinflow.cli.plan_page import plan_page
from twinflow.cli.plan_scaling import show_scaling
from twinflow.cli.plan_text import print_plan
from twinflow.monitor.files import write_whole
from twinflow.planner.cases import Case, Plan, make_plan
from twinflow.planner.formats import STATES
from twinflow.planner.machines import GPUS


def plan(
    preset: Annotated[
        str | None, Option(help="A preset of `twinflow train`: gpt-350m, gpt2-1.5b, gpt2-10b, ...")
    ] = None,
    model: Annotated[
        str | None,
        Option(help="A Hugging Face config.json or its folder, or module:function that returns a module."),
    ] = None,
    params: Annotated[
        str | None, Option(help="Plan a GPT-2 shape with this number of parameters, for example 13b.")
    ] = None,
    config: Annotated[
        Path | None, Option(help="A DeepSpeed config with batch sizes, states, clipping and ratio.")
    ] = None,
    gpu: Annotated[
        str | None, Option(help=f"GPU: {', '.join(GPUS)}. Default: the GPU of this machine, measured.")
    ] = None,
    ram: Annotated[
        str | None, Option(help="Host memory, for example 128GB.  [default: 128GB with --gpu, else the free memory]")
    ] = None,
    cores: Annotated[int | None, Option(help="CPU cores of the host.  [default: 16 with --gpu]")] = None,
    dram: Annotated[
        str | None, Option(help="Bandwidth of the host memory, for example 150GB/s.  [default: 150GB/s with --gpu]")
    ] = None,
    gpus: Annotated[
        int, Option(help="Number of GPUs. They share the optimizer state. For several machines see --per-node.")
    ] = 1,
    batch_size: Annotated[
        int | None, Option("--batch-size", "--micro-batch-size", help="Sequences in a micro-batch of each GPU.")
    ] = None,
    seq_length: Annotated[
        int | None,
        Option(
            "--seq-length",
            "--seq",
            help="Tokens in a sequence. Default: the context length of the model, but at most 2048.",
        ),
    ] = None,
    accumulation: Annotated[int | None, Option(help="Micro-batches in a step.")] = None,
    checkpoint_activations: Annotated[
        bool | None,
        Option(
            "--checkpoint-activations/--no-checkpoint-activations",
            help="Recompute activations in backward. Default: on for models of width 1600 and more.",
        ),
    ] = None,
    states: Annotated[str | None, Option(help="Plan only this state format: fp32, bf16 or int8.")] = None,
    grad_clip: Annotated[
        float | None, Option(help="Largest gradient norm. 0 turns clipping off.  [default: 1]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of the tables.")] = False,
    html: Annotated[Path | None, Option(help="Also write an HTML page to this file.")] = None,
    write_config: Annotated[Path | None, Option(help="Write the recommended config to this file.")] = None,
    scaling: Annotated[
        int | None,
        Option(
            help="Compare ZeRO-Offload and ZeRO-2 on 1, 2, 4, ... up to this many GPUs. Each machine has --gpus GPUs."
        ),
    ] = None,
    total_batch: Annotated[
        int | None,
        Option(
            "--total-batch", "--batch", help="Sequences in a step of all GPUs.  [default with --scaling: at most 512]"
        ),
    ] = None,
    network: Annotated[
        str | None, Option(help="Network bandwidth of a machine, for example 25GB/s.  [default: that of a DGX]")
    ] = None,
    per_node: Annotated[
        int | None,
        Option(help="GPUs in a machine. With more --gpus, search layouts over machines.  [default: 8, or 16 for V100]"),
    ] = None,
    tokens: Annotated[
        str | None,
        Option(help="Tokens to train on, for example 300b. With several machines, shows the days of training."),
    ] = None,
    layouts: Annotated[
        int | None,
        Option(
            help="Search layouts of pipeline x tensor x data ranks, and show this many of the fastest.  [default: 5]"
        ),
    ] = None,
) -> None:
    """Predict the memory of a model on GPU and host, the time of a training step and its bottleneck. Several ways to
    offload the optimizer are compared.

    The exit code is 1 if nothing fits.
    """
    flags = Flags(**locals())
    try:
        code = _show(flags)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)


def _show(flags: Flags) -> int:
    """Print what the flags ask for, and return the exit code: 1 if nothing fits."""
    if flags.scaling is None and wants_layouts(flags):
        return show_layouts(flags)
    cost, default_batch = choose_model(flags.preset, flags.model, flags.params)
    config = read_plan_config(flags.config)
    place = choose_place(flags)
    run = make_run(cost, default_batch, flags, config, place)
    if flags.scaling is not None:
        return show_scaling(flags, run)
    ratio = ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("ratio")
    formats = STATES if flags.states is None else (flags.states,)
    made = make_plan(run, place.setting, formats, ratio if isinstance(ratio, (int, float)) else None)
    best_config = config_of(made.best, config) if made.best is not None else {}
    files = []
    if flags.html is not None:
        write_whole(flags.html, plan_page(made, place.text, best_config))
        files.append(f"page: {flags.html}")
    if flags.write_config is not None and best_config:
        write_whole(flags.write_config, json.dumps(best_config, indent=2) + "\n")
        files.append(f"config: {flags.write_config}")
    if flags.as_json:
        typer.echo(json.dumps(to_dict(made, place.text, best_config)))
    else:
        print_plan(made, place.text)
        for line in files:
            typer.echo(line)
    return 0 if made.best is not None else 1


def config_of(case: Case, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config for the engine: the config file with the values that the plan recommends."""
    made = deepcopy(dict(config))
    made.pop("train_batch_size", None)
    made["train_micro_batch_size_per_gpu"] = case.run.batch
    made["gradient_accumulation_steps"] = case.run.micro_batches
    if case.run.weights != "fp32" and not any(name in made for name in ("fp16", "bf16")):
        made[case.run.weights] = {"enabled": True}
    if case.run.clips and case.run.weights != "fp16":
        made.setdefault("gradient_clipping", 1.0)
    elif case.run.weights == "bf16":
        # The check for overflow would delay every update until the last gradient, as clipping does.
        made["bf16"] = {**made["bf16"], "check_grad_overflow": False}
    zero = made["zero_optimization"] = dict(made.get("zero_optimization") or {})
    zero.setdefault("stage", case.run.stage if case.run.world > 1 else 2)
    offload = zero["offload_optimizer"] = dict(zero.get("offload_optimizer") or {})
    offload |= {"device": "cpu", "states": case.run.states, "ratio": round(case.ratio, 3)}
    return made


def to_dict(made: Plan, machine: str, config: Mapping[str, Any]) -> dict[str, Any]:
    run, model, memory = made.run, made.run.model, made.setting.memory
    settings = asdict(run)
    settings.pop("model")
    return {
        "model": {"name": model.name, "params": model.numel, "layers": len(model.blocks), "hidden": model.hidden},
        "machine": {"text": machine, **asdict(memory), "rates": asdict(made.setting.rates)},
        "run": {**settings, "step_tokens": run.step_tokens},
        "cases": [case_dict(case) for case in made.cases],
        "recommended": made.cases.index(made.best) if made.best is not None else None,
        "largest": {
            name: {"layers": layers, "params": made.largest_numel(name)} for name, layers in made.largest.items()
        },
        "config": config,
    }


def case_dict(case: Case) -> dict[str, Any]:
    return {
        "kind": case.kind,
        "states": case.run.states,
        "ratio": case.ratio,
        "fits": case.fits,
        "missing_gpu_bytes": case.missing.gpu_bytes,
        "missing_host_bytes": case.missing.host_bytes,
        "gpu": dict(case.used.gpu),
        "gpu_bytes": case.used.gpu_total,
        "host": dict(case.used.host),
        "host_bytes": case.used.host_total,
        "tokens_s": case.tokens_s,
        **asdict(case.prediction),
    }
