"""`twinflow plan`: predicts the memory and the speed of a run, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from twinflow.cli.plan_input import Asked, Place, choose_model, choose_place, make_run, read_plan_config
from twinflow.cli.plan_layouts import Flags, show_layouts, wants_layouts
from twinflow.cli.plan_page import render_page
from twinflow.cli.plan_scaling import TOTAL_BATCH, choose_cluster, show_scaling
from twinflow.cli.plan_text import PIPE_WIDTH, print_plan
from twinflow.errors import incompatible
from twinflow.monitor.files import write_whole
from twinflow.planner.cases import Case, all_cases, case_at, largest_layers, recommended
from twinflow.planner.costs import Run
from twinflow.planner.formats import STATES
from twinflow.planner.machines import GPUS


@dataclass(frozen=True)
class Plan:
    """All results of a plan."""

    run: Run
    place: Place
    cases: list[Case]
    best: Case | None
    largest: dict[str, int]  # number of blocks of the largest model that fits, by state format
    config: dict[str, Any]


def plan(
    preset: Annotated[
        str | None, typer.Option(help="A preset of `twinflow train`: gpt-350m, gpt2-1.5b, gpt2-10b, ...")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face config.json or its folder, or module:function that returns a module."),
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="A GPT-2 shape with this number of parameters, for example 13b.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed config with batch sizes, states, clipping and ratio.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"GPU: {', '.join(GPUS)}. Default: the GPU of this machine, measured.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="Host memory.  [default: 128GB with --gpu, else the free memory]")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="CPU cores of the host.  [default: 16 with --gpu]")] = None,
    dram: Annotated[
        str | None, typer.Option(help="Bandwidth of the host memory.  [default: 150GB/s with --gpu]")
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs. They share the optimizer state. For several machines see --per-node.")
    ] = 1,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "--micro-batch-size", help="Sequences in a micro-batch of each GPU.")
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option("--seq-length", "--seq", help="Tokens in a sequence. Default: the model's, up to 2048."),
    ] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches in a step.")] = None,
    checkpoint_activations: Annotated[
        bool | None,
        typer.Option(
            "--checkpoint-activations/--no-checkpoint-activations",
            help="Recompute activations in backward. Default: on for models of width 1600 and more.",
        ),
    ] = None,
    states: Annotated[str | None, typer.Option(help="Plan only this state format: fp32, bf16 or int8.")] = None,
    grad_clip: Annotated[
        float | None, typer.Option(help="Largest gradient norm. 0 turns clipping off.  [default: 1]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    write_config: Annotated[Path | None, typer.Option(help="Write the recommended config to this file.")] = None,
    scaling: Annotated[
        int | None,
        typer.Option(
            help="Compare ZeRO-Offload and ZeRO-2 on 1, 2, 4, ... up to this many GPUs, --gpus in each machine."
        ),
    ] = None,
    total_batch: Annotated[
        int | None,
        typer.Option(
            "--total-batch", "--batch", help="Sequences in a step of all GPUs.  [default with --scaling: at most 512]"
        ),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network bandwidth of a machine.  [default: that of a DGX]")
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option(
            help="GPUs in a machine. More --gpus: search layouts over machines.  [default: 8, or 16 for V100]"
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens to train on, for example 300b. With several machines, shows the days of training."),
    ] = None,
    layouts: Annotated[
        int | None, typer.Option(help="Search pipeline x tensor x data layouts and show this many.  [default: 5]")
    ] = None,
) -> None:
    """Predict the memory of a model on GPU and host, the time of a step and its bottleneck, for several ways to
    offload.

    The exit code is 1 if nothing fits.
    """
    try:
        flags = Flags(
            preset=preset,
            model=model,
            params=params,
            gpu=gpu,
            gpus=gpus,
            per_node=per_node,
            ram=ram,
            cores=cores,
            dram=dram,
            network=network,
            batch=total_batch,
            batch_size=batch_size,
            seq_length=seq_length,
            checkpointing=checkpoint_activations,
            tokens=tokens,
            layouts=layouts,
        )
        if scaling is None and wants_layouts(flags):
            others = {"--config": config, "--states": states, "--accumulation": accumulation, "--grad-clip": grad_clip}
            raise typer.Exit(show_layouts(flags, {**others, "--html": html, "--write-config": write_config}, as_json))
        asked = Asked(batch_size, seq_length, accumulation, states, grad_clip, checkpoint_activations)
        cost, default_batch = choose_model(preset, model, params)
        file_config = read_plan_config(config)
        place = choose_place(gpu, ram, cores, dram, gpus)
        run = make_run(cost, default_batch, asked, file_config, place)
        if scaling is not None:
            cluster = choose_cluster(gpu, cores, dram, network, place)
            others = {"--html": html, "--write-config": write_config, "--tokens": tokens, "--layouts": layouts}
            named = [name for name, value in {**others, "--per-node": per_node}.items() if value is not None]
            if named:
                reason = "it prints one table for all numbers of GPUs"
                remedy = "Leave them out. To save the table, use --json."
                raise incompatible(f"--scaling {scaling}", " and ".join(named), reason, remedy)
            raise typer.Exit(
                show_scaling(run, cluster, scaling, TOTAL_BATCH if total_batch is None else total_batch, as_json)
            )
        made = make_plan(run, place, file_config, states)
        if html is not None:
            write_whole(html, render_page(made.run, made.place, made.cases, made.best, made.largest, made.config))
        if write_config is not None and made.best is not None:
            write_whole(write_config, json.dumps(made.config, indent=2) + "\n")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(to_dict(made)))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)
        print_plan(console, made.run, made.place, made.cases, made.best, made.largest)
        for path, what in ((html, "page"), (write_config if made.best is not None else None, "config")):
            if path is not None:
                typer.echo(f"{what}: {path}")
    raise typer.Exit(0 if made.best is not None else 1)


def make_plan(run: Run, place: Place, config: Mapping[str, Any], states: str | None) -> Plan:
    """Compute all cases, the best of them and its config."""
    formats = STATES if states is None else (states,)
    cases = all_cases(run, place.setting, formats)
    ratio = ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("ratio")
    if isinstance(ratio, (int, float)):
        cases.append(case_at("config's", run, place.setting, float(ratio)))
    best = recommended([case for case in cases if case.kind != "config's"])
    largest = {name: largest_layers(replace(run, states=name), place.setting.memory) for name in formats}
    return Plan(run, place, cases, best, largest, config_of(best, config) if best is not None else {})


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


def to_dict(made: Plan) -> dict[str, Any]:
    run, model = made.run, made.run.model
    settings = asdict(run)
    settings.pop("model")
    return {
        "model": {"name": model.name, "params": model.numel, "layers": len(model.blocks), "hidden": model.hidden},
        "machine": {
            "text": made.place.text,
            "gpu_bytes": made.place.setting.memory.gpu_bytes,
            "host_bytes": made.place.setting.memory.host_bytes,
            "rates": asdict(made.place.setting.rates),
        },
        "run": {**settings, "step_tokens": run.step_tokens},
        "cases": [case_dict(case) for case in made.cases],
        "recommended": made.cases.index(made.best) if made.best is not None else None,
        "largest": {
            name: {"layers": layers, "params": model.with_layers(layers).numel if layers else 0}
            for name, layers in made.largest.items()
        },
        "config": made.config,
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
