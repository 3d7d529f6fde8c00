"""`twinflow plan`: predicts the memory and the speed of a run, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import typer

from twinflow.cli import told_errors
from twinflow.cli.plan_input import PlanOptions, choose_model, choose_place, make_run
from twinflow.cli.plan_layouts import show_layouts, wants_layouts
from twinflow.cli.plan_page import plan_page
from twinflow.cli.plan_scaling import show_scaling
from twinflow.cli.plan_text import print_plan
from twinflow.cli.settings import read_config
from twinflow.errors import unusable_path
from twinflow.files import write_whole
from twinflow.planner.cases import Case, Plan, make_plan
from twinflow.planner.formats import STATES


def plan(options: PlanOptions) -> None:
    """Predict the memory of a model on GPU and host, the time of a training step and its bottleneck. Several ways to
    offload the optimizer are compared.

    The exit code is 1 if nothing fits.
    """
    with told_errors():
        code = _show(options)
    raise typer.Exit(code)


def _show(options: PlanOptions) -> int:
    """Print what the options ask for, and return the exit code: 1 if nothing fits."""
    if options.scaling is None and wants_layouts(options):
        return show_layouts(options)
    cost, default_batch = choose_model(options)
    config = read_config(options.config, "--config")
    place = choose_place(options)
    run = make_run(cost, default_batch, options, config, place)
    if options.scaling is not None:
        return show_scaling(options, run)
    ratio = ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("ratio")
    formats = STATES if options.states is None else (options.states,)
    made = make_plan(run, place.setting, formats, ratio if isinstance(ratio, (int, float)) else None)
    best_config = config_of(made.best, config) if made.best is not None else {}
    files = []
    if options.html is not None:
        write_whole(options.html, plan_page(made, place.text, best_config))
        files.append(f"page: {options.html}")
    if options.write_config is not None and best_config:
        try:
            write_whole(options.write_config, json.dumps(best_config, indent=2) + "\n")
        except OSError as error:
            raise unusable_path("--write-config", options.write_config, "a file that can be written", error) from None
        files.append(f"config: {options.write_config}")
    if options.as_json:
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
