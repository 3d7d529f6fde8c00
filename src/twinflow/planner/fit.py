# SPDX-License-Identifier: Apache-2.0
"""Fits a run to a machine: chooses micro-batch, accumulation, activation checkpointing, state format, ratio and weights
on the host.

`choose_fit` tries the combinations that keep the number of sequences of a step. Memory and time of each combination
come from `costs.py` and `simulate.py`. A combination fits only if it leaves the reserves of `costs.usable` free. Of the
combinations that fit, the fastest is chosen, except that

- a wider state format (fp32, then bf16, then int8) is preferred if its step takes at most `cases.WIDER` times as long,
- of steps that are about equally fast, the simplest one is preferred: weights on the GPU, no offload, then the least
  GPU memory.

If nothing fits, clipping is turned off (where the wish leaves it open), because gradients that wait for the norm need
memory. If that is not enough, a step gets fewer sequences, because sums over micro-batches need memory too. Then
clipping stays on, unless a step without it can have more than twice as many sequences. Both change the training, so
`Fit.changes` names them. Two things do not change the training, but take time, and are tried before each of these
changes: experts that GPUs divide (if the wish leaves it open), and then state on a disk (if `Setting` has one).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from twinflow.errors import invalid_value
from twinflow.planner import costs, long
from twinflow.planner.cases import ON_DISK, ON_HOST, Case, Setting, best_case, case_at, recommended
from twinflow.planner.costs import Bytes, Memory, Run
from twinflow.planner.formats import AUTOMATIC, STATES, WEIGHT_BYTES
from twinflow.planner.machines import GB
from twinflow.planner.models import ModelCost
from twinflow.planner.simulate import Prediction

METHODS: Final = ("full", "lora", "qlora")
DEFAULT_RANK: Final = 16
_NUM_MICRO_BATCHES: Final = 3  # for each other setting, the largest micro-batches that fit are compared
_LEAST_TOKENS: Final = 256  # shorter sequences are not proposed
_FLOAT8: Final = "Blocks keep their inputs in float8, which changes gradients: in bf16 they would not fit."
_NO_CLIPPING: Final = "Gradients are not clipped: those that wait for their norm would not fit."


@dataclass(frozen=True)
class Wish:
    """What is trained: the model, the method and the batch of an optimizer step. A setting that is None is chosen."""

    model: ModelCost
    tokens: int  # tokens in a sequence
    sequences: int = 4  # sequences in an optimizer step of each GPU
    method: str = "full"  # "full": all parameters, "lora": adapters, "qlora": adapters on a base in 4 bits
    rank: int = DEFAULT_RANK  # rank of the adapters, which are on all linear layers of the blocks
    clips: bool | None = None  # clipping of the gradient norm, or a loss scale. None: if it fits
    delayed: bool = False  # delayed updates
    weights: str = "bf16"
    num_moments: int = 2  # moments of the update rule, 2 for AdamW
    matrix_steps: int = 0  # Newton-Schulz iterations of Muon; 0: another rule
    world: int = 1  # GPUs that share the optimizer state
    stage: int = 0  # ZeRO stage, with several GPUs
    micro_batch: int | None = None  # if given, `sequences` is used only for the accumulation
    accumulation: int | None = None
    checkpointing: bool | None = None
    selective: bool = False  # without checkpointing: selective recomputation. It is chosen if `checkpointing` is None
    states: str | None = None
    formats: tuple[str, ...] = AUTOMATIC  # state formats of the update rule
    master: str = "fp32"  # "none": bf16 weights have no fp32 master
    ratio: float | None = None
    offload_params: bool | None = None
    offload_embeddings: bool | None = None  # with weights on the host: those of the embedding and output layers too
    num_sequence: int = 1  # GPUs that share each sequence
    is_float8: bool = False  # long sequences: blocks may keep their inputs in float8
    on_disk: bool = False  # the state that would be on the host is on the disk of the setting
    weights_on_disk: bool = False  # with on_disk, and weights on the host: these weights too
    can_tile: bool = True  # whether the run can use tiles and checkpoints of long sequences
    inputs_on_disk: bool = False  # of long sequences: the inputs of blocks that are not on the GPU
    expert_parallel: int | None = 1  # GPUs that have all experts together. None: as many as a run needs to fit

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise invalid_value("method", self.method, METHODS)
        if self.states is not None and self.states not in STATES:
            raise invalid_value("states", self.states, STATES)
        if self.weights not in WEIGHT_BYTES:
            raise invalid_value("weights", self.weights, WEIGHT_BYTES)
        for name in ("tokens", "sequences", "rank", "micro_batch", "accumulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid_value(name, value, "a whole number >= 1")


@dataclass(frozen=True)
class Fit:
    """The chosen settings with the memory and the time of a step. If `fits` is False, nothing fits: the settings are
    those that lack the least memory, and `helps` are changes with which a run would fit.
    """

    micro_batch: int  # sequences in a micro-batch of each GPU
    accumulation: int  # micro-batches in a step
    checkpointing: bool  # activation checkpointing of every block
    selective: bool  # only operations that are cheap are recomputed
    clips: bool  # clipping of the gradient norm
    states: str  # one of STATES
    ratio: float  # share of the optimizer state on the host
    offload_params: bool  # the weights of blocks are on the host
    offload_embeddings: bool  # and those of the embedding and output layers
    gpu_bytes: int  # peak on each GPU
    host_bytes: int  # for all GPUs
    step_s: float  # 0 without a GPU: the speed is not predicted
    tokens_s: float
    bound_by: str  # "gpu", "host" (updates), "disk", "copies" (PCIe) or "gate" (the wait for the gradient norm)
    short_gpu_bytes: int  # missing bytes, with the reserves; 0 if the run fits
    short_host_bytes: int
    changes: tuple[str, ...]  # sentences: what differs from the wish, so that the run fits
    helps: tuple[str, ...]  # phrases: each change is enough for a run to fit. Empty if the run fits
    case: Case  # the memory by kind, and the details of the prediction

    @property
    def fits(self) -> bool:
        return not (self.short_gpu_bytes or self.short_host_bytes)


def places(wish: Wish) -> tuple[bool, ...]:
    """Whether weights may be on the host: False, True or both. They are refused there with delayed updates. On several
    GPUs, a base in 4 bits stays on each of them.
    """
    if (wish.expert_parallel or 1) > 1:  # weights on the hosts of several GPUs need ZeRO stage 3
        return (False,)
    if wish.offload_embeddings and wish.offload_params is None:
        return (True,)
    stays = wish.method == "qlora" and wish.world > 1
    if wish.offload_params is None and (stays or wish.delayed):
        return (False,)
    return _either(wish.offload_params)


def embedding_places(wish: Wish, offload_params: bool = True) -> tuple[bool, ...]:
    """Whether the weights of the embedding and output layers may be on the host, beside those of blocks: False, True or
    both.
    """
    if not offload_params or not any(wish.model.ends):
        return (False,)
    return _either(wish.offload_embeddings)


def choose_fit(wish: Wish, setting: Setting) -> Fit:
    """The best settings of a run on a machine, or those that are closest to fitting. `setting.memory.gpu_bytes` is 0 on
    a machine without a GPU.
    """
    milder = _milder(wish)
    can_use_disk = setting.disk is not None and not wish.delayed
    for changed, changes in milder:
        on_disks = [(wish.on_disk, wish.weights_on_disk)]  # state and weights
        if can_use_disk and not wish.on_disk:
            on_disks += [(True, False), (True, True)] if True in places(wish) else [(True, False)]
        inputs = (False, True) if setting.disk is not None and _is_long(wish) else (False,)
        for (state, weights), on_disk in product(on_disks, inputs):
            tried = replace(changed, on_disk=state, weights_on_disk=weights, inputs_on_disk=on_disk)
            if (best := _best_with_experts(tried, setting)) is not None:
                notes = () if wish.expert_parallel else _expert_note(best.run.expert_parallel)
                notes += () if wish.on_disk else _disk_note(best, setting)
                notes += _inputs_note(best.run, setting)
                return _fit_of(best, (*changes, *notes), ())
    last, changes = milder[-1]
    last = replace(last, expert_parallel=expert_sizes(last)[-1])
    run = min(_runs(last), key=lambda run: _lack(_missing(run, last, setting)))
    return _fit_of(_case(run, last, setting), changes, tuple(_helps(wish, setting)))


def candidates(wish: Wish, setting: Setting) -> list[Case]:
    """The best case of each state format. Formats with which nothing fits are left out."""
    found = [_best_of(replace(wish, states=states), setting) for states in formats_of(wish)]
    return [case for case in found if case is not None]


def _milder(wish: Wish) -> list[tuple[Wish, tuple[str, ...]]]:
    """The wish, and the wish with changes that need less memory, the smallest change first. With sentences that name
    the changes. Clipping is given up for a step with twice as many sequences.
    """
    clipping = [True, False] if wish.clips is None else [wish.clips]
    notes = {True: (), False: (_NO_CLIPPING,) if wish.clips is None else ()}
    found: list[tuple[Wish, tuple[str, ...]]] = [(replace(wish, clips=clips), notes[clips]) for clips in clipping]
    if wish.micro_batch is None and wish.accumulation is None:
        pairs = [(count, clips) for count in range(1, wish.sequences) for clips in clipping]
        for count, clips in sorted(pairs, key=lambda pair: pair[0] * (2 if pair[1] else 1), reverse=True):
            each = " of each GPU" if wish.world > 1 else ""
            note = f"A step{each} has {count} sequences, not {wish.sequences}: sums over micro-batches would not fit."
            found.append((replace(wish, clips=clips, micro_batch=count, accumulation=1), (note, *notes[clips])))
    if _is_long(wish):
        found += [(replace(one, is_float8=True), (_FLOAT8, *changes)) for one, changes in found]
    return found


def _is_long(wish: Wish) -> bool:
    """Whether tiles are considered: the memory of tiled blocks with adapters is not known."""
    return (
        wish.can_tile and wish.tokens >= long.LONG_TOKENS and wish.method == "full" and wish.checkpointing is not False
    )


def _best_of(wish: Wish, setting: Setting) -> Case | None:
    """The best case with the state format of the wish.

    Each run is simulated once, with as much state on the GPU as fits. Only for the best of them, larger ratios are
    tried, which need less GPU memory: all of them with weights on the GPU, two with weights on the host. A step takes
    at least as long as the GPU alone, so a run whose GPU alone is slower is not simulated.
    """
    kept: list[Run] = []
    fitting = [run for run in _runs(wish) if _has_room(run, wish, setting)]
    for run in sorted(fitting, key=_simplest):
        same = [r for r in kept if _kind(r) == _kind(run)]
        if len(same) < _NUM_MICRO_BATCHES:
            kept.append(run)
    if not setting.memory.gpu_bytes:  # no speed is predicted: no recomputation, then the largest micro-batch
        return _case(kept[0], wish, setting) if kept else None
    bounds = [(costs.timing_of(run, setting.rates, setting.link_rate).gpu_s, run) for run in kept]
    cases: list[Case] = []
    for least_s, run in sorted(bounds, key=lambda pair: (pair[0], pair[1].offload_params, pair[1].offload_embeddings)):
        if all(least_s <= case.prediction.step_s for case in cases):
            cases.append(_case(run, wish, setting))
    found: list[Case] = []
    for offload_params in places(wish):
        best = recommended([case for case in cases if case.run.offload_params == offload_params])
        if best is not None:
            found.append(best)
            if wish.on_disk:  # as little state as possible: the disk is slower than all else
                continue
            if wish.ratio is None and offload_params and best.ratio < 1.0:
                ratios = ((1.0 + best.ratio) / 2.0, 1.0)
                found += [case_at(ON_HOST, best.run, setting, ratio) for ratio in ratios]
            elif wish.ratio is None:
                found.append(best_case(best.run, setting))
    return recommended(found)


def _simplest(run: Run) -> tuple[int, ...]:
    """An order of runs, the simplest and fastest first."""
    kept = run.kept
    return run.checkpointing, run.selective, run.is_tiled, kept.is_float8, kept.every, kept.on_host, -run.batch


def _kind(run: Run) -> tuple[bool, ...]:
    return run.checkpointing, run.selective, run.offload_params, run.offload_embeddings, run.is_tiled


def _case(run: Run, wish: Wish, setting: Setting) -> Case:
    """The case of a run with the ratio of `_ratio`, simulated."""
    ratio = _ratio(run, wish, setting)
    if setting.memory.gpu_bytes:
        kind = ON_HOST if run.offload_params else "best ratio" if ratio > 0.0 else "no offload"
        kind = ON_DISK if run.on_disk else kind
        return case_at(kind, run, setting, ratio)
    unknown = Prediction(0.0, "host", 0.0, 0.0, 0.0, 0.0)
    return Case("no GPU", run, ratio, _used(run, wish, setting), _missing(run, wish, setting), unknown)


def _ratio(run: Run, wish: Wish, setting: Setting) -> float:
    """The given ratio, else the least that fits."""
    if wish.ratio is not None:
        return wish.ratio
    return costs.least_ratio(run, setting.memory) if setting.memory.gpu_bytes else 1.0


def _used(run: Run, wish: Wish, setting: Setting) -> Bytes:
    used = costs.bytes_of(run, costs.placed_at(run, _ratio(run, wish, setting)), setting.memory)
    return used if setting.memory.gpu_bytes else costs.without_gpu(used, run.world)


def _missing(run: Run, wish: Wish, setting: Setting) -> Memory:
    return _used(run, wish, setting).missing(costs.usable(setting.memory))


def _has_room(run: Run, wish: Wish, setting: Setting) -> bool:
    if not _missing(run, wish, setting).is_zero:
        return False
    needed = costs.input_file_bytes(run)
    if run.on_disk:
        needed += costs.file_bytes(run, costs.placed_at(run, _ratio(run, wish, setting)))
    return needed == 0 or (setting.disk is not None and needed <= setting.disk.free_bytes)


def _best_with_experts(wish: Wish, setting: Setting) -> Case | None:
    """The best case. Experts are divided over GPUs only if nothing fits with all weights on each, and over as few GPUs
    as possible: the alternative is weights on the host.
    """
    found: list[Case] = []
    for size in expert_sizes(wish):
        one = replace(wish, expert_parallel=size)
        best = recommended(candidates(one, setting)) if _can(one, setting) else None
        found += [best] if best is not None else []
        if best is not None and not best.run.offload_params:
            break
    return recommended(found)


def expert_sizes(wish: Wish) -> list[int]:
    """The numbers of GPUs that may have all experts together, the smallest first: the given one, or all that divide the
    GPUs and the experts.
    """
    if wish.expert_parallel is not None:
        return [wish.expert_parallel]
    most = wish.world if wish.model.divides_experts and not wish.offload_params else 1
    return [n for n in range(1, most + 1) if wish.world % n == 0 and (n == 1 or wish.model.num_experts % n == 0)]


def _expert_note(size: int) -> tuple[str, ...]:
    if size == 1:
        return ()
    return (f"Every {size} GPUs have all experts together, and exchange tokens: all experts on each would not fit.",)


def _disk_note(case: Case, setting: Setting) -> tuple[str, ...]:
    disk, num_bytes = setting.disk, case.file_bytes
    if not num_bytes or disk is None:
        return ()
    what = "The optimizer state and the weights of blocks are" if case.run.weights_on_disk else "The optimizer state is"
    return (
        f"{what} on the disk of {disk.folder}: {num_bytes / GB:,.1f} GB, of which a step reads and writes "
        f"{case.disk_bytes / GB:,.1f} GB in {case.disk_bytes / disk.rate:,.1f} s.",
    )


def _inputs_note(run: Run, setting: Setting) -> tuple[str, ...]:
    disk, num_bytes = setting.disk, costs.input_file_bytes(run)
    if not num_bytes or disk is None:
        return ()
    return (
        f"Inputs of layers are on the disk of {disk.folder}: {num_bytes / GB:,.1f} GB, which each forward writes and "
        f"each backward reads in {num_bytes / disk.rate:,.1f} s.",
    )


def _lack(missing: Memory) -> int:
    return missing.gpu_bytes + missing.host_bytes


def _runs(wish: Wish) -> Iterator[Run]:
    """All combinations of the settings that the wish leaves open."""
    for states in formats_of(wish):
        for checkpointing, selective in _recomputations(wish):
            for offload_params, offload_embeddings in _weight_places(wish):
                for micro_batch, accumulation in _batches(wish):
                    run = Run(
                        model=wish.model,
                        batch=micro_batch,
                        tokens=wish.tokens,
                        micro_batches=accumulation,
                        states=states,
                        master=wish.master,
                        clips=wish.clips is not False,
                        delayed=wish.delayed,
                        checkpointing=checkpointing,
                        selective=selective,
                        weights=wish.weights,
                        world=wish.world,
                        stage=3 if offload_params and wish.world > 1 else wish.stage,
                        num_moments=wish.num_moments,
                        matrix_steps=wish.matrix_steps,
                        offload_params=offload_params,
                        offload_embeddings=offload_embeddings,
                        adapter_rank=0 if wish.method == "full" else wish.rank,
                        four_bits=wish.method == "qlora",
                        num_sequence=wish.num_sequence,
                        on_disk=wish.on_disk,
                        weights_on_disk=wish.weights_on_disk and offload_params,
                        expert_parallel=wish.expert_parallel or 1,
                    )
                    yield run
                    if checkpointing and _is_long(wish) and run.expert_parallel == 1:
                        # A group of blocks runs again, for which the weights of all of them must be on the GPU.
                        can_group = not (offload_params or (run.stage == 3 and wish.world > 1))
                        for kept in long.choices(
                            len(wish.model.blocks), wish.is_float8, can_group, wish.inputs_on_disk
                        ):
                            yield replace(run, is_tiled=True, kept=kept)


def _weight_places(wish: Wish) -> list[tuple[bool, bool]]:
    """Pairs of `offload_params` and `offload_embeddings`."""
    return [(blocks, ends) for blocks in places(wish) for ends in embedding_places(wish, blocks)]


def formats_of(wish: Wish) -> tuple[str, ...]:
    """The formats to choose from. 4-bit states are never chosen, because they change results the most."""
    return tuple(name for name in wish.formats if name in AUTOMATIC) if wish.states is None else (wish.states,)


def _recomputations(wish: Wish) -> list[tuple[bool, bool]]:
    """Pairs of `checkpointing` and `selective`, the fastest first."""
    if wish.checkpointing is not None:
        return [(wish.checkpointing, wish.selective and not wish.checkpointing)]
    is_known = wish.model.activations.selective_bytes > 0 and wish.method == "full"
    return [(False, False), *([(False, True)] if is_known else []), (True, False)]


def _either(given: bool | None) -> tuple[bool, ...]:
    return (False, True) if given is None else (given,)


def _batches(wish: Wish) -> list[tuple[int, int]]:
    """Pairs of micro-batch and accumulation."""
    total = wish.sequences
    if wish.micro_batch is not None:
        return [(wish.micro_batch, wish.accumulation or -(-total // wish.micro_batch))]
    if wish.accumulation is not None:
        return [(-(-total // wish.accumulation), wish.accumulation)]
    return [(size, total // size) for size in range(1, total + 1) if total % size == 0]


def _fit_of(case: Case, changes: tuple[str, ...], helps: tuple[str, ...]) -> Fit:
    run, found = case.run, case.prediction
    return Fit(
        micro_batch=run.batch,
        accumulation=run.micro_batches,
        checkpointing=run.checkpointing,
        selective=run.selective,
        clips=run.clips,
        states=run.states,
        ratio=case.ratio,
        offload_params=run.offload_params,
        offload_embeddings=run.offload_embeddings,
        gpu_bytes=case.used.gpu_total,
        host_bytes=case.used.host_total,
        step_s=found.step_s,
        tokens_s=case.tokens_s,
        bound_by=found.bound_by,
        short_gpu_bytes=case.missing.gpu_bytes,
        short_host_bytes=case.missing.host_bytes,
        changes=changes,
        helps=helps,
        case=case,
    )


def place_blocks(fit: Fit, setting: Setting) -> Fit:
    """The same fit with the blocks on the host evenly distributed, if a step without clipping is then 1% faster."""
    run = fit.case.run
    if run.clips or not (run.offload_params and fit.fits and fit.step_s and 0.0 < fit.ratio < 1.0):
        return fit
    spread = case_at(fit.case.kind, replace(run, placement="spread"), setting, fit.ratio)
    return _fit_of(spread, fit.changes, fit.helps) if 1.01 * spread.prediction.step_s <= fit.step_s else fit


def _helps(wish: Wish, setting: Setting) -> Iterator[str]:
    """Changes of the wish or of the machine, each of which is enough for a run to fit."""
    free = replace(
        wish,
        micro_batch=None,
        accumulation=None,
        checkpointing=None,
        states=None,
        ratio=None,
        offload_params=None,
        offload_embeddings=None,
    )
    least = _milder(free)[-1][0]
    least = replace(least, expert_parallel=expert_sizes(least)[-1])
    if free != wish and _can(least, setting):
        yield "settings that are chosen instead of given"
    for method in METHODS[METHODS.index(wish.method) + 1 :]:
        if _can(replace(least, method=method), setting):
            yield f"method {method}"
            break
    tokens = wish.tokens // 2
    while tokens >= _LEAST_TOKENS and not _can(replace(least, tokens=tokens), setting):
        tokens //= 2
    if tokens >= _LEAST_TOKENS:
        yield f"sequences of at most {tokens:,} tokens"
    memory = setting.memory
    if (host := _least(least, setting, lambda size: replace(memory, host_bytes=size), memory.host_bytes)) is not None:
        yield f"at least {host / GB:,.0f} GB of host memory"
    if memory.gpu_bytes:
        gpu = _least(least, setting, lambda size: replace(memory, gpu_bytes=size), memory.gpu_bytes)
        if gpu is not None:
            yield f"at least {gpu / GB:,.0f} GB of GPU memory"
    # Muon and optimizers of torch cannot do without masters. The latter have no format but fp32.
    can_go = wish.master == "fp32" and wish.weights == "bf16" and not wish.matrix_steps and wish.formats != ("fp32",)
    if can_go and _can(replace(least, master="none"), setting):
        yield "bf16 weights without an fp32 master (--master none)"


def _least(wish: Wish, setting: Setting, memory_of: Callable[[int], Memory], present: int) -> int | None:
    """The least memory with which a run fits, in whole GB and up to 64 times the present one."""
    sizes = range(present // GB + 1, 64 * (present // GB + 1))
    at = bisect_left(sizes, True, key=lambda size: _can(wish, replace(setting, memory=memory_of(size * GB))))
    return sizes[at] * GB if at < len(sizes) else None


def _can(wish: Wish, setting: Setting) -> bool:
    return any(_has_room(run, wish, setting) for run in _runs(wish))
