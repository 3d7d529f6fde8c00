# SPDX-License-Identifier: Apache-2.0
"""`twinflow plan`: predicts the memory and the speed of a run, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import typer

from twinflow.bench.disk import DiskRates, measure_disk
from twinflow.cli import told_errors
from twinflow.cli.plan_input import (
    PlanOptions,
    choose_model,
    choose_place,
    config_ratio,
    make_wish,
    unused_keys,
)
from twinflow.cli.plan_layouts import show_layouts, wants_layouts
from twinflow.cli.plan_page import plan_page
from twinflow.cli.plan_scaling import scaling_run, show_scaling
from twinflow.cli.plan_text import gb, print_plan
from twinflow.cli.settings import read_config
from twinflow.config import load_config, optimizer_choice
from twinflow.conflicts import refuse
from twinflow.errors import unusable_path
from twinflow.files import write_whole
from twinflow.planner.cases import Case, Disk, Plan, Setting, case_at, make_plan
from twinflow.planner.costs import Memory, Placed, Run, bytes_of, file_bytes
from twinflow.planner.fit import Fit, Wish, choose_fit, embedding_places, formats_of, place_blocks, places
from twinflow.rules import ALL_RULES, RULES

LEARNING_RATE: Final = {False: 1e-5, True: 1e-4}  # of a config without an optimizer: for all parameters, for adapters


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
    wish = make_wish(cost, default_batch, options, config, place)
    if options.scaling is not None:
        return show_scaling(options, scaling_run(wish))
    rates = disk_rates(options.disk, config) if options.disk is not None else None
    setting = replace(place.setting, disk=_disk(rates)) if rates is not None else place.setting
    fit = place_blocks(choose_fit(wish, setting), setting)
    made = plan_around(fit, wish, setting, config)
    best_config = config_of(fit.case, config, options.disk) if fit.fits else {}
    ignored = unused_keys(config)
    rows = disk_rows(made.run, formats_of(wish), rates) if rates is not None else []
    files = []
    if options.html is not None:
        write_whole(options.html, plan_page(made, fit, place.text, best_config, ignored))
        files.append(f"page: {options.html}")
    if options.write_config is not None and best_config:
        try:
            write_whole(options.write_config, json.dumps(best_config, indent=2) + "\n")
        except OSError as error:
            raise unusable_path("--write-config", options.write_config, "a file that can be written", error) from None
        files.append(f"config: {options.write_config}")
    if options.as_json:
        found = to_dict(made, fit, place.text, best_config, ignored)
        if rates is not None:
            found["disk"] = {**asdict(rates), "formats": [asdict(row) for row in rows]}
        typer.echo(json.dumps(found))
    else:
        print_plan(made, fit, place.text, ignored)
        for line in disk_lines(rows, rates) if rates is not None else ():
            typer.echo(line)
        for line in files:
            typer.echo(line)
    return 0 if fit.fits else 1


def plan_around(fit: Fit, wish: Wish, setting: Setting, config: Mapping[str, Any]) -> Plan:
    """The chosen run beside the other ways to place its state, with the same batch."""
    formats = formats_of(wish)
    run, ratio = replace(fit.case.run, on_disk=False, weights_on_disk=False), config_ratio(config)
    given = None
    if ratio is not None:
        zero = config.get("zero_optimization") or {}
        offload = zero.get("offload_optimizer") or {}
        placement = "spread" if offload.get("placement") == "spread" else "auto"  # the only ones that the planner knows
        weights = zero.get("offload_param") or {}
        on_host = weights.get("device") in ("cpu", "nvme")
        states = offload.get("states", "fp32")
        theirs = replace(
            run,
            states=states,
            offload_params=on_host,
            offload_embeddings=on_host and bool(weights.get("embeddings")),
            placement=placement,
        )
        given = case_at("config's", theirs, setting, ratio)
    ways = places(replace(wish, expert_parallel=run.expert_parallel))
    made = make_plan(run, setting, formats, given, ways, embedding_places(wish))
    # The search may have found another ratio than `best_case`, so its case takes the place of the same kind.
    cases = [fit.case if (c.kind, c.run.states) == (fit.case.kind, fit.states) else c for c in made.cases]
    cases += [fit.case] if fit.case.run.on_disk else []
    return replace(made, cases=cases, best=fit.case if fit.fits else None)


def config_of(case: Case, config: Mapping[str, Any], disk: Path | None = None) -> dict[str, Any]:
    """A config for the engine: the config file with the values that the plan recommends.

    `disk`: the folder for state on a disk.
    """
    run, made = case.run, deepcopy(dict(config))
    made.pop("train_batch_size", None)
    made["train_micro_batch_size_per_gpu"] = run.batch
    made["gradient_accumulation_steps"] = run.micro_batches
    if run.weights != "fp32" and not any((made.get(name) or {}).get("enabled") for name in ("fp16", "bf16")):
        made[run.weights] = {**(made.get(run.weights) or {}), "enabled": True}
    if run.clips and run.weights != "fp16":
        made.setdefault("gradient_clipping", 1.0)
    elif not run.clips:
        made["gradient_clipping"] = 0.0
        if run.weights == "bf16":
            # The check for overflow would delay every update until the last gradient, as clipping does.
            made["bf16"] = {**made["bf16"], "check_grad_overflow": False}
    if not made.get("optimizer"):
        made["optimizer"] = {"type": "AdamW", "params": {"lr": LEARNING_RATE[bool(run.adapter_rank)]}}
    if run.selective and "activation_checkpointing" not in made:
        made["activation_checkpointing"] = {"selective": True}
    if run.checkpointing and "activation_checkpointing" not in made:
        # This key turns checkpointing on. With one tensor rank, it has no other effect.
        made["activation_checkpointing"] = {"partition_activations": True}
    if run.is_tiled and not config.get("activation_checkpointing"):
        kept, num_blocks = run.inputs, len(run.model.blocks)
        options = made["activation_checkpointing"]
        if kept.on_host:
            options |= {"cpu_checkpointing": True, "layers_on_device": kept.layers_on_device(num_blocks)}
        if kept.on_disk:
            options["nvme_path"] = str(disk)
        if kept.every > 1:
            options["every"] = kept.every
        if kept.is_float8:
            options["float8"] = True
        if len(options) > 1:
            del options["partition_activations"]  # another key turns checkpointing on
    zero = made["zero_optimization"] = dict(made.get("zero_optimization") or {})
    if run.offload_params:
        zero["stage"] = 3
        zero["offload_param"] = {**(zero.get("offload_param") or {}), "device": "cpu"}
        if run.offload_embeddings:
            zero["offload_param"]["embeddings"] = True
    if run.weights_on_disk:
        zero["offload_param"] |= {"device": "nvme", "nvme_path": str(disk), "max_in_cpu": 0}
    zero.setdefault("stage", run.stage if run.world > 1 else 2)
    offload = zero["offload_optimizer"] = dict(zero.get("offload_optimizer") or {})
    offload |= {"device": "cpu", "states": run.states, "ratio": round(case.ratio, 3)}
    if run.on_disk:
        offload |= {"device": "nvme", "nvme_path": str(disk)}
    if run.master == "none":
        offload["master"] = "none"
    if run.expert_parallel > 1 or "expert_parallel_size" in made:
        made["expert_parallel_size"] = run.expert_parallel
    if "spread" in (run.placement, offload.get("placement")):
        offload["placement"] = run.placement
    return made


def to_dict(made: Plan, fit: Fit, machine: str, config: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    run, model, memory = made.run, made.run.model, made.setting.memory
    settings = asdict(run)
    settings.pop("model")
    return {
        "model": {
            "name": model.name,
            "params": model.numel,
            **({"active_params": model.active_numel} if model.experts else {}),
            "layers": len(model.blocks),
            "hidden": model.hidden,
        },
        "machine": {"text": machine, **asdict(memory), "rates": asdict(made.setting.rates)},
        "run": {**settings, "step_tokens": run.step_tokens},
        "cases": [case_dict(case) for case in made.cases],
        "recommended": made.cases.index(made.best) if made.best is not None else None,
        "largest": {
            name: {"layers": layers, "params": made.largest_numel(name)} for name, layers in made.largest.items()
        },
        "changes": list(fit.changes),
        "helps": list(fit.helps),
        "config": config,
        "unused_keys": list(ignored),
    }


def case_dict(case: Case) -> dict[str, Any]:
    return {
        "kind": case.kind,
        "states": case.run.states,
        "ratio": case.ratio,
        "offload_embeddings": case.run.offload_embeddings,
        "fits": case.fits,
        "missing_gpu_bytes": case.missing.gpu_bytes,
        "missing_host_bytes": case.missing.host_bytes,
        "gpu": dict(case.used.gpu),
        "gpu_bytes": case.used.gpu_total,
        "host": dict(case.used.host),
        "host_bytes": case.used.host_total,
        "file_bytes": case.file_bytes,
        "tokens_s": case.tokens_s,
        **asdict(case.prediction),
    }


# State on a disk: its bytes, and the seconds that the disk takes for a step.


@dataclass(frozen=True)
class DiskRow:
    """State of one format on a disk."""

    states: str
    file_bytes: int  # of all ranks
    buffer_bytes: int  # host memory of all ranks
    step_s: float  # reads and writes of a step; the updates and the model overlap with them
    fits: bool


def disk_rates(path: Path, config: Mapping[str, Any]) -> DiskRates:
    """Measures a disk for the state of the config's optimizer.

    Raises ValueError for an optimizer whose state cannot be on a disk, and OSError for an unusable folder.
    """
    name = optimizer_choice(load_config(config))[0] if config.get("optimizer") else "adamw"
    rule = ALL_RULES.get(name)
    is_muon = rule is not None and rule.elementwise is not None
    refuse("State on the disk", {"rule": rule is None, "muon": is_muon}, rules=", ".join(RULES))
    return measure_disk(path)


def _disk(rates: DiskRates) -> Disk:
    return Disk(rates.folder, rates.update, rates.free_bytes)


def disk_rows(run: Run, formats: Sequence[str], rates: DiskRates) -> list[DiskRow]:
    """A row for each format, with all state of all ranks on one disk."""
    rows = []
    for states in formats:
        there = replace(run, states=states, on_disk=True)
        placed = Placed(run.own_numel)
        num_bytes = file_bytes(there, placed)
        # The limits of memory change only other buffers.
        buffers = bytes_of(there, placed, Memory(0, 0)).host["state"]
        rows.append(DiskRow(states, num_bytes, buffers, 2 * num_bytes / rates.update, num_bytes <= rates.free_bytes))
    return rows


def disk_lines(rows: Sequence[DiskRow], rates: DiskRates) -> list[str]:
    """A heading with the measured disk, and a line for each format: bytes in the file, buffers, seconds of a step."""
    lines = [
        f"all state on the disk of {rates.folder} (device nvme): {rates.update / 1e9:.2f} GB/s measured, "
        f"{gb(rates.free_bytes)} GB free"
    ]
    for row in rows:
        fits = "" if row.fits else "; does not fit"
        buffers = f"{gb(row.buffer_bytes)} GB of buffers on the host"
        lines += [f"  {row.states:5} {gb(row.file_bytes)} GB in the file, {buffers}, {row.step_s:.1f} s a step{fits}"]
    return lines
