# SPDX-License-Identifier: Apache-2.0
"""Checks the memory of a run of `twinflow train` before it is allocated, with the byte counts of the planner.

Two limits are compared with the available memory. The lower limit is the exact size of weights, optimizer state and
gradients that wait for their update. A run whose lower limit exceeds the memory is refused. The upper limit also
includes estimates: activations, the process and a reserve. Only activations of many times the memory count for the
lower limit too. The upper limit decides which format `--states auto`
selects, what an error message proposes, and whether a run gets a warning that memory is tight. With --ram, a run whose
upper limit exceeds the host memory is refused, because this memory is not for the run to try.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from twinflow.cli.settings import TrainSettings, is_on, recomputes
from twinflow.config import Axes, Config, load_config, resolve_axes
from twinflow.config.resolve import optimizer_choice
from twinflow.errors import not_enough
from twinflow.launch.environment import RankEnvironment
from twinflow.models.gpt import PRESETS, cost_of
from twinflow.native.shares import share_of_memory
from twinflow.optim.auto import first_ratio
from twinflow.planner.costs import (
    FLAT_BYTES,
    Bytes,
    Memory,
    Run,
    bytes_of,
    file_bytes,
    placed_at,
    step_bytes,
    without_gpu,
)
from twinflow.planner.formats import AUTOMATIC, STATES, WEIGHT_BYTES
from twinflow.rules import ALL_RULES

_GPU_SHARE: Final = 0.98  # usable share of the GPU memory; the rest is left for gaps between tensors
_HOST_SHARE: Final = 0.95  # usable share of the free memory; the rest is left to other processes
_NO_LIMIT: Final = 1 << 60
_SURE: Final = ("weights", "state", "gradients")  # exact kinds of memory; the other kinds are estimates or can shrink
_ESTIMATE_FACTOR: Final = 8  # no estimate of activations is wrong by this factor
_CHOSEN_SHARE: Final = 0.92  # share of the memory that a chosen recomputation may fill, because estimates may be low
_NUM_SHARES: Final = 8  # shares of the blocks that are tried, because a few blocks more or less change the time little
_RATIOS: Final = [i / 50 for i in range(51)]  # ratios that are tried
_MAX_REMEDIES: Final = 3


@dataclass(frozen=True)
class Available:
    """Available memory: of one GPU, and of the host for all ranks of the run."""

    gpu_bytes: int | None  # None: there is no GPU, and the model is on the host
    host_bytes: int  # 0: unknown
    is_limit: bool = False  # --ram limits the host memory
    disk_bytes: int | None = None  # free space for state on a disk, for all ranks; None: no disk is used


@dataclass(frozen=True)
class Case:
    """The properties of a run that determine its memory."""

    run: Run
    ratio: float | str  # share of the state on the host, or "auto"
    formats: tuple[str, ...]  # state formats of the update rule
    only_clips: bool  # clipping is the only reason why gradients wait for the norm
    is_told: bool = False  # the config file, not the free memory, determines whether gradients wait on GPU or host
    # Copies of the optimizer state. With ZeRO stage 0 each replica has one, and `run` describes one replica.
    num_copies: int = 1
    kept: float = 1.0  # share of the activations of one forward of the whole model that a rank keeps
    # What backward may compute again, in the order of its time. The first that fits is chosen.
    recompute: tuple[str | int, ...] = ("full",)
    chooses_embeddings: bool = False  # the embedding and output layers may be on the host, with the weights of blocks

    @property
    def num_ranks(self) -> int:
        """Ranks that share the host."""
        return self.run.world * self.num_copies


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen state format and the memory that the run takes with it."""

    states: str
    used: Bytes
    available: Available
    why: str  # reason for the format
    tight: str = ""  # warning if memory is tight
    is_auto: bool = False  # the ratio is "auto": state may move to the GPU after some steps
    num_ranks: int = 1  # ranks that share the host
    recompute: str | int = "none"  # what backward computes again
    offload_embeddings: bool = False  # the weights of the embedding and output layers are on the host
    file_bytes: int | None = None  # state and weights of all ranks on a disk; None: they are in memory
    step_bytes: int = 0  # bytes of the files that a step reads and writes

    def disk_line(self, folder: str, rate: float, io: str | None) -> str:
        """The state on the disk. `rate`: bytes that the disk reads and writes in a second. `io`: how it does that."""
        assert self.file_bytes is not None
        free = _gb(self.available.disk_bytes or 0)
        return (
            f"{self.file_bytes / 1e9:,.2f} GB of {self.states} state{_on_ranks(self.num_ranks)} in {folder}, {free} "
            f"free: {self.step_bytes / rate:,.2f} s a step to read and write it at {rate / 1e9:.2f} GB/s"
            f"{f', by {io}' if io else ''}"
        )

    @property
    def host_line(self) -> str:
        free = self.available.host_bytes
        of_free = f" of {free / 1e9:,.1f} GB" if free else ""
        first = " at first" if self.is_auto else ""
        what = "of" if self.file_bytes is None else "of buffers for"
        return (
            f"{self.used.host['state'] / 1e9:,.2f} GB {what} {self.states} state{first}{_on_ranks(self.num_ranks)}, "
            f"about {_gb(self.used.host_total)} in all{of_free}: {self.why}"
        )

    @property
    def gpu_line(self) -> str:
        if self.available.gpu_bytes is None:
            return "no GPU"
        there = ", without those of the embedding and output layers" if self.offload_embeddings else ""
        parts = [f"{_gb(self.used.gpu['weights'])} of weights{there}"]
        parts += [f"{_gb(count)} of {self.states} state"] if (count := self.used.gpu["state"]) else []
        parts += [f"{_gb(self.used.gpu['gradients'])} of gradients"]
        parts += [f"about {_gb(self.used.gpu['activations'])} of activations"]
        later = "; the rest may hold optimizer state" if self.is_auto else ""
        return f"{', '.join(parts)}, of {_gb(self.available.gpu_bytes)}{later}"


def available_to(
    ranks: RankEnvironment,
    gpu_bytes: int | None,
    free_bytes: int,
    is_limit: bool = False,
    disk_bytes: int | None = None,
) -> Available:
    """Memory available to a run, from the free memory and disk of this machine. Others are assumed to be equal."""
    host_bytes = share_of_memory(free_bytes, ranks.local_world_size) * ranks.world_size
    on_disk = None if disk_bytes is None else disk_bytes * ranks.world_size // ranks.local_world_size
    return Available(gpu_bytes, host_bytes, is_limit, on_disk)


def case_of(settings: TrainSettings, config: Mapping[str, Any]) -> Case:
    """The memory case of a run, from its settings and the config of the engine.

    The optimizer state is divided among the ranks of all machines. ZeRO stage 0: among those of one replica.
    """
    shape, checked = settings.model, load_config(config)
    offload = checked.zero_optimization.offload_optimizer
    assert offload is not None
    formats, num_moments, matrix_steps = rule_of(checked)
    overflow = checked.bf16.check_grad_overflow if checked.bf16.enabled else True
    stage = checked.zero_optimization.stage if settings.world > 1 else 0
    weights = checked.zero_optimization.offload_param
    axes = resolve_axes(checked)
    num_parts = axes.pipe * axes.model  # parts that the model is split into
    # With the section of the config, the engine recomputes blocks if the model does not.
    recompute = "full" if shape.recompute == "none" and recomputes(config) else shape.recompute
    is_in_file = any(is_on(settings.file_config, name) for name in ("bf16", "bfloat16"))
    is_on_host = weights is not None and weights.device != "none"
    run = Run(
        model=cost_of(shape, settings.preset, WEIGHT_BYTES[settings.precision]),
        batch=settings.batch_size,
        tokens=settings.context,
        micro_batches=settings.accumulation,
        clips=bool(checked.gradient_clipping) or overflow,
        delayed=offload.delayed_update,
        master=offload.master,
        **recompute_fields(recompute),
        weights=settings.precision,
        num_moments=num_moments,
        matrix_steps=matrix_steps,
        world=settings.world if stage else num_parts,
        stage=stage,
        tensor_parallel=num_parts,
        offload_params=is_on_host,
        offload_embeddings=is_on_host and weights is not None and weights.embeddings,
        on_disk=offload.device == "nvme",
        weights_on_disk=weights is not None and weights.device == "nvme",
        max_in_cpu=weights.max_in_cpu if weights is not None else 0,
    )
    return Case(
        run=run,
        ratio=0.0 if offload.device == "none" else offload.ratio,
        formats=formats,
        only_clips=bool(checked.gradient_clipping) and checked.bf16.enabled and not (is_in_file and overflow),
        is_told=(offload.hold, offload.sums) != ("auto", "auto"),
        num_copies=1 if stage else settings.world // num_parts,
        kept=_kept(axes, checked.pipeline.schedule, settings.accumulation),
        recompute=_choices(shape.num_layers, num_parts) if settings.recompute == "auto" else (recompute,),
        chooses_embeddings=is_on_host and weights is not None and "embeddings" not in weights.model_fields_set,
    )


def recompute_fields(recompute: str | int) -> dict[str, Any]:
    """The fields of `Run` for a value of --recompute."""
    if isinstance(recompute, int):
        return {"checkpointing": True, "checkpointed": recompute, "selective": True}
    return {"checkpointing": recompute == "full", "checkpointed": None, "selective": recompute == "selective"}


def _choices(num_layers: int, num_parts: int) -> tuple[str | int, ...]:
    """What backward may compute again. A model in several parts is recomputed as a whole or not at all."""
    if num_parts > 1:
        return ("none", "full")
    step = -(-num_layers // _NUM_SHARES)
    return ("none", "selective", *range(step, num_layers - step // 2, step), "full")


def _kept(axes: Axes, schedule: str | None, micro_batches: int) -> float:
    """Activations on the rank that keeps the most, relative to one forward of the whole model.

    A rank has the layers of one stage, for as many micro-batches as are in flight.
    """
    under_way = {"gpipe": float(micro_batches), "interleaved": 1.5 * axes.pipe}.get(schedule or "1f1b", axes.pipe)
    return min(under_way, micro_batches) / axes.pipe / axes.model


def rule_of(config: Config) -> tuple[tuple[str, ...], int, int]:
    """State formats and number of moments of the update rule, and the number of Newton-Schulz iterations of Muon (0 for
    other rules). An optimizer of torch counts as two moments in fp32.
    """
    name, options = optimizer_choice(config)
    if name not in ALL_RULES:
        return ("fp32",), 2, 0
    rule = ALL_RULES[name]
    if rule.elementwise is not None:
        return rule.formats, 1, int(options["ns_steps"])
    keeps = bool(float(options.get("momentum", 1.0)))  # SGD without momentum has no moments
    return rule.formats, sum(state is not None for state in rule.states) if keeps else 0, 0


def plan_memory(case: Case, states: str, available: Available) -> MemoryPlan:
    """Choose the state format of a run, and what backward computes again: as little as the memory allows. The embedding
    and output layers are on the host only if the run does not fit otherwise.

    `states`: a format, or "auto". "auto" selects the widest format with which the run fits at least where it
    fits with the narrowest one: on the GPU, on the host, or on both. Raises a MemoryError if weights, state and waiting
    gradients fit in none of these formats, or if the run needs more host memory than --ram allows.
    """
    if not case.chooses_embeddings or available.gpu_bytes is None:
        return _plan(case, states, available)
    moved = replace(case, run=replace(case.run, offload_embeddings=True))
    try:
        plan = _plan(case, states, available)
    except MemoryError:
        return _plan(moved, states, available)
    if not plan.tight:
        return plan
    smaller = _plan(moved, states, available)
    return plan if smaller.tight else smaller


def _plan(case: Case, states: str, available: Available) -> MemoryPlan:
    """The plan of a run whose embedding and output layers have their place."""
    plan = _with_format(_recomputing(case, case.recompute[-1]), states, available)
    case = replace(case, run=replace(case.run, states=plan.states))
    # The memory falls from choice to choice, so a search by halves finds the first one that fits.
    choices = case.recompute[:-1]
    first = bisect_left(choices, True, key=lambda choice: _is_roomy(_recomputing(case, choice), available))
    used = bytes_at(_recomputing(case, case.recompute[first]), available)
    plan = replace(plan, used=used, recompute=case.recompute[first], offload_embeddings=case.run.offload_embeddings)
    if not case.run.on_disk:
        return plan
    assert not isinstance(case.ratio, str)
    num_bytes = step_bytes(case.run, placed_at(case.run, case.ratio)) * case.num_copies
    return replace(plan, file_bytes=_file_bytes(case), step_bytes=num_bytes)


def _file_bytes(case: Case) -> int:
    assert not isinstance(case.ratio, str)
    return file_bytes(case.run, placed_at(case.run, case.ratio)) * case.num_copies


def _recomputing(case: Case, recompute: str | int) -> Case:
    return replace(case, run=replace(case.run, **recompute_fields(recompute)))


def _is_roomy(case: Case, available: Available) -> bool:
    """Whether activations fit beside everything else, with a larger reserve than `has_room` leaves."""
    used = bytes_at(case, available)
    if available.gpu_bytes is not None:
        return used.gpu_total <= _CHOSEN_SHARE * available.gpu_bytes
    return not available.host_bytes or used.host_total - used.host["shadows"] <= _CHOSEN_SHARE * available.host_bytes


def _with_format(case: Case, states: str, available: Available) -> MemoryPlan:
    """The plan with the state format that `plan_memory` chooses."""
    formats = [name for name in AUTOMATIC if name in case.formats] if states == "auto" else [states]
    cases = [replace(case, run=replace(case.run, states=name)) for name in formats]
    if case.run.on_disk and available.disk_bytes is not None:
        narrowest = cases[-1]
        cases = [each for each in cases if _file_bytes(each) <= available.disk_bytes]
        if not cases:
            raise _no_space(narrowest, available)
    possible = [each for each in cases if _missing(each, available).is_zero]
    if not possible:
        raise _too_large(cases[-1], available)
    # A narrower format does not help if the activations are too large. So it is chosen only if the run then fits on the
    # GPU or on the host, and would not fit otherwise.
    most = _rooms(possible[-1], available)
    chosen = next(each for each in possible if _rooms(each, available) == most)
    if available.is_limit and not most[1]:
        raise _over_limit(possible[-1], available)  # the narrowest format
    why = "as requested"
    if states == "auto":
        skipped = [_would_need(each, available) for each in cases[: cases.index(chosen)]]
        why = "; ".join(skipped) if skipped else "this format fits" if all(most) else "the state fits"
    if not all(most):
        why = f"{why}, but memory is tight"
    return MemoryPlan(
        states=chosen.run.states,
        used=bytes_at(chosen, available),
        available=available,
        why=why,
        tight="" if all(most) else _tight(chosen, available),
        is_auto=case.ratio == "auto" and available.gpu_bytes is not None,
        num_ranks=case.num_ranks,
    )


def start_ratio(case: Case, available: Available) -> float:
    """The share of the state on the host at the first step."""
    if not isinstance(case.ratio, str):
        return case.ratio
    return first_ratio(int(case.run.own_numel * case.run.size.host), available.host_bytes // case.num_ranks)


def bytes_at(case: Case, available: Available, ratio: float | None = None) -> Bytes:
    """Memory of the run with this share of its state on the host (default: the share at the first step). Without a GPU
    everything is on the host.
    """
    run, gpu_bytes = case.run, available.gpu_bytes
    placed = placed_at(run, start_ratio(case, available) if ratio is None else ratio)
    limit = _NO_LIMIT if gpu_bytes is None else gpu_bytes
    found = bytes_of(run, placed, Memory(limit, available.host_bytes // case.num_copies))
    host = {kind: count * case.num_copies for kind, count in found.host.items()}
    gpu = {**found.gpu, "activations": int(run.activation_bytes * case.kept)}
    if gpu_bytes is not None:
        return Bytes(gpu, host)
    return without_gpu(Bytes(gpu, host), case.num_ranks)


def has_room(case: Case, available: Available) -> bool:
    """Whether the run fits with the reserves on GPU and host."""
    return _missing(case, available).is_zero and all(_rooms(case, available))


def _rooms(case: Case, available: Available) -> tuple[bool, bool]:
    """Whether the run fits with the reserves on the GPU and on the host. Ratio "auto": one fitting ratio is enough."""
    if isinstance(case.ratio, str) and any(all(_rooms_at(case, available, ratio)) for ratio in _RATIOS):
        return True, True
    return _rooms_at(case, available)


def _rooms_at(case: Case, available: Available, ratio: float | None = None) -> tuple[bool, bool]:
    used, gpu_bytes = bytes_at(case, available, ratio), available.gpu_bytes
    host = used.host_total - used.host["shadows"]  # copies for speculative updates use only memory that is free
    return (
        gpu_bytes is None or used.gpu_total <= _GPU_SHARE * gpu_bytes,
        not available.host_bytes or host <= _HOST_SHARE * available.host_bytes,
    )


def _missing(case: Case, available: Available) -> Memory:
    """Bytes by which the lower limit exceeds the memory of GPU and host. Zeros if the run may fit."""
    gpu_bytes = _NO_LIMIT if available.gpu_bytes is None else available.gpu_bytes
    return _sure(case, available).missing(Memory(gpu_bytes, available.host_bytes or _NO_LIMIT))


def _sure(case: Case, available: Available) -> Bytes:
    """The lower limit: bytes that the run certainly needs, by kind."""
    used = bytes_at(case, available)
    kinds = [kind for kind in _SURE if kind != "gradients" or not case.is_told]
    gpu, host = ({kind: side[kind] for kind in kinds if side.get(kind)} for side in (used.gpu, used.host))
    if available.gpu_bytes is not None and "gradients" in gpu:
        # Buffers of gradients that are copied to the host shrink if memory is short.
        free = max(0, available.gpu_bytes - gpu["weights"] - gpu.get("state", 0))
        gpu["gradients"] -= min(gpu["gradients"], FLAT_BYTES, free // 8)
    limit = available.host_bytes or _NO_LIMIT if available.gpu_bytes is None else available.gpu_bytes
    parts = host if available.gpu_bytes is None else gpu
    least = (used.host if available.gpu_bytes is None else used.gpu)["activations"] // _ESTIMATE_FACTOR
    if least > limit:
        parts["activations"] = least
    return Bytes(gpu, host)


def _would_need(case: Case, available: Available) -> str:
    used = bytes_at(case, available)
    if _rooms(case, available)[1]:
        return f"{case.run.states} would need {_gb(used.gpu_total)} of the GPU"
    return f"{case.run.states} would need {_gb(used.host_total - used.host['shadows'])}"


# Changes of the settings that make a run fit.

_Change = tuple[str, dict[str, Any]]  # the option, and the fields of `Run` that it changes


def _too_large(case: Case, available: Available) -> MemoryError:
    """The error for a run whose lower limit exceeds the memory: needed and available bytes, and ways to make it fit."""
    sure, missing = _sure(case, available), _missing(case, available)
    is_gpu = missing.gpu_bytes > 0
    parts, lacks = (sure.gpu, missing.gpu_bytes) if is_gpu else (sure.host, missing.host_bytes)
    names = {"state": f"{case.run.states} state"}
    text = ", ".join(f"{_gb(count)} of {names.get(kind, kind)}" for kind, count in parts.items() if count)
    where = "" if is_gpu else _on_ranks(case.num_ranks)
    both = f" {_gb(missing.host_bytes)} of host memory are also missing." if is_gpu and missing.host_bytes else ""
    if available.gpu_bytes is not None and sure.gpu["weights"] > available.gpu_bytes:
        remedy = "The weights alone do not fit on the GPU. Train a smaller model."
    else:
        found = remedies(case, available)
        remedy = f"Use {', or '.join(found)}." if found else _smaller(case, available)
    return not_enough(
        "GPU memory" if is_gpu else "host memory",
        f"a model of {case.run.model.numel / 1e9:.2f} B parameters{where}",
        f"at least {_gb(sum(parts.values()))} ({text})",
        _gb((available.gpu_bytes or 0) if is_gpu else available.host_bytes),
        f"{_gb(lacks)} are missing.{both} {remedy}",
    )


def _no_space(case: Case, available: Available) -> MemoryError:
    """The error for state that does not fit on the disk."""
    return not_enough(
        "space on the disk",
        f"the {case.run.states} state of a model of {case.run.model.numel / 1e9:.2f} B parameters"
        f"{_on_ranks(case.num_ranks)}",
        _gb(_file_bytes(case)),
        _gb(available.disk_bytes or 0),
        "Use --nvme-path with a folder on a larger disk, a smaller --states, or a lower --ratio.",
    )


def _over_limit(case: Case, available: Available) -> MemoryError:
    """The error for a run that needs more host memory than --ram allows."""
    used = bytes_at(case, available)
    return not_enough(
        "host memory",
        f"a model of {case.run.model.numel / 1e9:.2f} B parameters{_on_ranks(case.num_ranks)}",
        f"about {_gb((used.host_total - used.host['shadows']) / _HOST_SHARE)}",
        _gb(available.host_bytes),
        f"Use {', or '.join([*remedies(case, available), 'a larger --ram'])}.",
    )


def _smaller(case: Case, available: Available) -> str:
    """The largest preset that fits with the other options of the run, as a remedy."""
    costs = {name: cost_of(shape) for name, shape in PRESETS.items()}
    for name in sorted(costs, key=lambda name: -costs[name].numel):
        if has_room(replace(case, run=replace(case.run, model=costs[name])), available):
            return f"Train a smaller model: the largest preset that fits here is --preset {name}."
    return "Train a smaller model, or free some memory."


def _tight(case: Case, available: Available) -> str:
    """The warning for a run that may start, but has little memory to spare."""
    found = remedies(case, available)
    room = f": {', or '.join(found)} would leave more room" if found else ""
    return f"memory is tight, and the run may run out of memory{room}"


def remedies(case: Case, available: Available) -> list[str]:
    """Options with which the run fits with the reserves, using as few changes as possible. Empty if nothing helps."""
    found: dict[tuple[int, ...], str] = {}
    fewest = _NO_LIMIT
    ways = [[None, *changes] for changes in _changes(case)]
    for chosen in sorted(product(*ways), key=lambda changes: sum(change is not None for change in changes)):
        kinds = tuple(i for i, change in enumerate(chosen) if change is not None)
        if kinds in found or len(kinds) > fewest:  # only the smallest change of each kind is proposed
            continue
        changes = [change for change in chosen if change is not None]
        words = [option for option, _ in changes]
        fields = {name: value for _, values in changes for name, value in values.items()}
        changed = replace(case, run=replace(case.run, **fields))
        if words and has_room(changed, available):
            found[kinds] = " and ".join(words)
            fewest = min(fewest, len(kinds))
        elif available.gpu_bytes is not None and len(kinds) < fewest:
            ratio = _near_ratio(changed, available)
            if ratio is not None:
                found.setdefault((*kinds, -1), " and ".join([*words, f"--ratio {ratio:g}"]))
                fewest = min(fewest, len(kinds) + 1)
    best = [kinds for kinds in found if len(kinds) == fewest]
    return [found[kinds] for kinds in sorted(best, key=lambda kinds: (-1 in kinds, kinds))][:_MAX_REMEDIES]


def _changes(case: Case) -> list[list[_Change]]:
    """Options that reduce memory, by kind, the smallest change first."""
    run = case.run
    narrower = [name for name in AUTOMATIC[STATES.index(run.states) + 1 :] if name in case.formats]
    smaller = [run.batch >> i for i in range(1, run.batch.bit_length())]
    return [
        [(f"--states {name}", {"states": name}) for name in narrower],
        [(f"--recompute {name}", recompute_fields(name)) for name in ("selective", "full")[_mode(run) :]],
        [(f"--batch-size {size}", {"batch": size}) for size in smaller],
        [("--grad-clip 0", {"clips": False})] if case.only_clips else [],
        [("--accumulation 1", {"micro_batches": 1})] if run.micro_batches > 1 else [],
    ]


def _mode(run: Run) -> int:
    """0: nothing is recomputed, 1: the cheap operations or some blocks are, 2: all blocks are."""
    return 2 if run.num_recomputed == len(run.model.blocks) else int(run.selective)


def _near_ratio(case: Case, available: Available) -> float | None:
    """The ratio closest to the requested one with which the run fits with the reserves, or None."""
    start = start_ratio(case, available)
    fitting = [ratio for ratio in _RATIOS if has_room(replace(case, ratio=ratio), available)]
    return min(fitting, key=lambda ratio: abs(ratio - start), default=None)


def _on_ranks(num_ranks: int) -> str:
    return f" on {num_ranks} ranks" if num_ranks > 1 else ""


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
