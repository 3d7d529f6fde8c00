# SPDX-License-Identifier: Apache-2.0
"""The settings of `twinflow finetune` that depend on the machine, chosen by the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from twinflow.bench.disk import BLOCK_BYTES, DiskRates, measure_disk
from twinflow.cli.finetune_settings import ADAPTERS, SEQUENCES, FinetuneSettings
from twinflow.cli.plan_input import this_setting
from twinflow.errors import not_enough, unusable_path
from twinflow.integrations.ranks import STAGE
from twinflow.planner.cases import Disk
from twinflow.planner.fit import Fit, Wish, choose_fit
from twinflow.planner.models import from_hf, with_fused_head

_MEASURED_BYTES: Final = 1 << 28  # of a disk that a run uses


@dataclass(frozen=True)
class Choice:
    """Settings that depend on the machine."""

    batch_size: int
    accumulation: int
    checkpointing: bool
    grad_clip: float
    states: str
    ratio: float
    offload_params: bool
    offload_embeddings: bool
    rows: list[tuple[str, str]]  # rows of the header that report the choice
    notes: list[str]


def choose(
    settings: FinetuneSettings,
    config: dict[str, Any],
    seq_length: int,
    num_rows: int,
    gpu_bytes: int | None = None,
    num_machines: int = 1,
) -> Choice:
    """The planner's choice for this machine. Raises a MemoryError if nothing fits.

    `gpu_bytes`: the least free memory of the GPUs of all processes. `num_machines`: machines with as much host memory
    as this one.
    """
    clip = 1.0 if settings.grad_clip is None else settings.grad_clip
    try:
        model = with_fused_head(from_hf(config, Path(settings.model).name), settings.method not in ADAPTERS)
    except ValueError:
        return _unplanned(settings, str(config.get("model_type")), clip, seq_length, num_rows)
    place = this_setting(gpu_bytes if settings.gpu_memory is None else settings.gpu_memory)
    memory = replace(place.setting.memory, host_bytes=place.setting.memory.host_bytes * num_machines)
    setting, world = replace(place.setting, memory=memory), settings.world
    rates = None if settings.nvme_path is None else measured(Path(settings.nvme_path), model.numel)
    if rates is not None:
        setting = replace(setting, disk=Disk(rates.folder, rates.update, rates.free_bytes))
    wish = Wish(
        model,
        # Both answers of a pair are in one micro-batch.
        tokens=2 * seq_length if settings.method == "dpo" else seq_length,
        sequences=_sequences(num_rows, world),
        method=settings.method if settings.method in ADAPTERS else "full",
        rank=settings.rank,
        clips=None if settings.grad_clip is None else settings.grad_clip > 0,
        weights=settings.precision,
        micro_batch=settings.batch_size,
        accumulation=settings.accumulation,
        checkpointing=settings.checkpoint_activations,
        states=settings.states,
        master=settings.master,
        ratio=settings.ratio,
        offload_params=settings.offload_params,
        offload_embeddings=settings.offload_embeddings,
        world=world,
        stage=STAGE if world > 1 else 0,
        on_disk=rates is not None,
        can_tile=False,  # this command does not call tile_sequence()
    )
    fit = choose_fit(wish, setting)
    if fit.offload_params and settings.offload_params is None and settings.method == "qlora":
        from twinflow.integrations.finetune import has_bitsandbytes

        # The weights of bitsandbytes stay on the GPU. Its kernels are faster than weights of torchao on the host.
        on_gpu_fit = choose_fit(replace(wish, offload_params=False, offload_embeddings=None), setting)
        fit = on_gpu_fit if on_gpu_fit.fits and has_bitsandbytes() else fit
    if not fit.fits:
        raise MemoryError(_short(fit, place.text))
    disk_rows = [] if rates is None else [("disk", _disk_text(fit, rates))]
    on_gpu = memory.gpu_bytes > 0
    # The speed of the connection between processes is not known.
    speed = f", {fit.step_s:.3g} s a step, {fit.tokens_s:,.0f} tokens/s" if fit.step_s and world == 1 else ""
    recomputed = ", activations recomputed" if fit.checkpointing else ""
    share = f", {fit.ratio:.0%} of it on the host" if on_gpu else ""
    weights = ", no fp32 master" if settings.master == "none" else ""
    weights += ", weights on the host" if fit.offload_params else ""
    weights += ", with the embedding and output layers" if fit.offload_embeddings else ""
    each, together = (" each", " together") if world > 1 else ("", "")
    gpu = f"GPU {_gb(fit.gpu_bytes)}{each}, " if on_gpu else ""
    return Choice(
        batch_size=fit.micro_batch,
        accumulation=fit.accumulation,
        checkpointing=fit.checkpointing,
        grad_clip=clip if fit.clips else 0.0,
        states=fit.states,
        ratio=fit.ratio,
        offload_params=fit.offload_params,
        offload_embeddings=fit.offload_embeddings,
        rows=[
            ("machine", place.text),
            *_rank_rows(world, fit.offload_params),
            ("batch", _batch_text(fit.micro_batch, fit.accumulation, seq_length, world) + recomputed),
            ("state", f"AdamW in {fit.states}{share}{weights}"),
            *disk_rows,
            ("planned", f"{gpu}host {_gb(fit.host_bytes)}{together}{speed}"),
        ],
        notes=list(fit.changes),
    )


def measured(folder: Path, numel: int) -> DiskRates:
    """The rates of a disk for the state of a model of `numel` parameters. Creates the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_path("--nvme-path", folder, "a folder that can be created", error) from None
    num_bytes = max(BLOCK_BYTES, min(_MEASURED_BYTES, 4 * numel // BLOCK_BYTES * BLOCK_BYTES))
    return measure_disk(folder, num_bytes, option="--nvme-path")


def _disk_text(fit: Fit, rates: DiskRates) -> str:
    """The state on the disk. Raises a MemoryError if there is no room for it."""
    num_bytes = fit.case.file_bytes
    if num_bytes > rates.free_bytes:
        raise not_enough(
            "space on the disk",
            f"the {fit.states} state",
            _gb(num_bytes),
            _gb(rates.free_bytes),
            "Use --nvme-path with a folder on a larger disk, a smaller --states, or a lower --ratio.",
        )
    return (
        f"{_gb(num_bytes)} of state in {rates.folder}, {_gb(rates.free_bytes)} free: "
        f"{2 * num_bytes / rates.update:,.2f} s a step to read and write it at {rates.update / 1e9:.2f} GB/s"
    )


def _unplanned(settings: FinetuneSettings, model_type: str, clip: float, seq_length: int, num_rows: int) -> Choice:
    """Settings that need little memory, for a model that the planner does not know."""
    batch = settings.batch_size or 1
    parts = settings.accumulation or max(1, _sequences(num_rows, settings.world) // batch)
    offload_params = bool(settings.offload_params or settings.offload_embeddings)
    checkpointing = settings.checkpoint_activations is not False
    note = (
        f"The planner does not know models of type {model_type!r}, so the settings are those that need little memory. "
        "Change them with --batch-size, --accumulation, --states, --ratio and --offload-params."
    )
    return Choice(
        batch_size=batch,
        accumulation=parts,
        checkpointing=checkpointing,
        grad_clip=clip,
        states=settings.states or "fp32",
        ratio=1.0 if settings.ratio is None else settings.ratio,
        offload_params=offload_params,
        offload_embeddings=bool(settings.offload_embeddings),
        rows=[
            *_rank_rows(settings.world, offload_params),
            ("batch", _batch_text(batch, parts, seq_length, settings.world)),
            *([] if settings.nvme_path is None else [("disk", settings.nvme_path)]),
        ],
        notes=[note],
    )


def _sequences(num_rows: int, world: int) -> int:
    """Sequences of each process in a step, if the options leave them open."""
    return max(1, min(SEQUENCES, num_rows) // world)


def _rank_rows(world: int, offload_params: bool) -> list[tuple[str, str]]:
    return [("ranks", f"{world}, ZeRO stage {3 if offload_params else STAGE}")] if world > 1 else []


def _batch_text(batch: int, parts: int, seq_length: int, world: int) -> str:
    micro = f"1 micro-batch of {batch}" if parts == 1 else f"{parts} micro-batches of {batch}"
    on_each = " on each rank" if world > 1 else ""
    plural = "" if batch == 1 else "s"
    return f"{micro} sequence{plural}{on_each}, each of at most {seq_length:,} tokens"


def _short(fit: Fit, machine: str) -> str:
    """The sentences of the error if nothing fits."""
    lacks = [("GPU", fit.short_gpu_bytes), ("host", fit.short_host_bytes)]
    short = " and ".join(f"{_gb(lack)} of {name} memory" for name, lack in lacks if lack)
    helps = f" Each of these is enough: {'; '.join(fit.helps)}." if fit.helps else ""
    return f"This run does not fit: it is short by {short} ({machine}).{helps}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.0f} MB"
