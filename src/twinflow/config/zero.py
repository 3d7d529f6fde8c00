"""The `zero_optimization` section."""

from __future__ import annotations

from typing import Any, Literal

from twinflow.config.fields import (
    HONOURED,
    AnyWhole,
    Buckets,
    Free,
    Names,
    Positive,
    Ratio,
    Section,
    Share,
    Side,
    Stage,
    Threads,
    Whole,
    honoured,
    is_given,
    maybe_section,
    refused,
    rule_of,
    section,
    unused,
)

_STAGE_CHOOSES = "the stage says what is sent: parts of sums and of weights (1, 2), or whole sums (0)"
_FULLY_SHARD = "with stage 3 torch's fully_shard gathers and frees weights block by block; else they stay whole"
_ALL_ON_HOST = "with device cpu all weights of blocks are on the host, page-locked, as part of the optimizer's state"
_NVME = "nothing goes to NVMe"
_BUCKETS = "transfers have buckets of their own: offload_optimizer.bucket_numel"


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`: master weights, optimizer state and update on the host."""

    device: Literal["cpu", "none"] = honoured(
        "none",
        "where optimizer state lives: cpu, as far as ratio says; none: all of it on the GPU",
        hints={"nvme": 'State on NVMe is not supported. Use "cpu"; states "int8" takes half the memory of "fp32"'},
    )
    nvme_path: str | None = unused(None, _NVME)
    buffer_count: Whole = unused(4, _NVME)
    pin_memory: bool = unused(True, "buffers that the GPU copies from and to are always page-locked")
    pipeline_read: bool = unused(False, _NVME)
    pipeline_write: bool = unused(False, _NVME)
    fast_init: bool = unused(False, _NVME)
    ratio: Ratio = honoured(
        1.0,
        'share of the state that lives on the host; "auto": chosen after the first steps, for the quickest step',
        for_host=True,
    )
    super_offload: bool = refused(False, "leave it out; updates overlap with backward here without it")
    cpuadam_cores_perc: Share = unused(0.8, "host_threads says how many threads update")

    states: Literal["fp32", "bf16", "int8"] = honoured("fp32", "format of the optimizer state", ours=True)
    placement: Literal["auto", "front", "tail"] = honoured(
        "auto", "with a ratio below 1: the end of the model whose state stays on the GPU", ours=True, for_host=True
    )
    delayed_update: bool = honoured(
        False, "apply each update one step late, hidden behind a whole step (changes results)", ours=True
    )
    delayed_update_start: Whole = honoured(0, "first step that may be late", ours=True)
    early: bool | Literal["auto"] = honoured(
        "auto",
        "whether updates start during backward; auto: where they could not be undone, after some ordinary steps",
        ours=True,
    )
    host_threads: Threads | None = honoured(
        None, "threads of the update; null: as the cores allow", ours=True, for_host=True
    )
    hold: Side = honoured("auto", "where gradients wait for the clipping decision", ours=True)
    sums: Side = honoured(
        "auto",
        "where gradients of several micro-batches are summed; auto: with stage 2 on many ranks, parts as they come",
        ours=True,
    )
    bucket_numel: Buckets | None = honoured(
        None, "elements that travel together; null: twinflow's own choice", ours=True
    )
    shadow_bytes: Whole | None = honoured(
        None, "host memory for updates ahead of the clipping decision; null: what is spare", ours=True, for_host=True
    )

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """What a TwinOptimizer is told: each is an argument of it or a field of its `Tuning`, under the same name."""
        keys = ((name, rule_of(info)) for name, info in cls.model_fields.items() if name != "device")
        return tuple(name for name, rule in keys if rule is not None and rule.kind == HONOURED)


class OffloadParam(Section):
    """`zero_optimization.offload_param`."""

    device: Literal["cpu", "none"] = honoured(
        "none",
        "with stage 3 and offload_optimizer: weights live on the host (cpu), and each block fetches its own to run",
        hints={"nvme": 'Weights on NVMe are not supported. Use "cpu"'},
    )
    nvme_path: str | None = unused(None, _NVME)
    buffer_count: Whole = unused(5, _NVME)
    buffer_size: Whole = unused(100_000_000, _NVME)
    max_in_cpu: Whole = unused(1_000_000_000, _ALL_ON_HOST)
    pin_memory: bool = unused(True, _ALL_ON_HOST)


class LeafModule(Section):
    """`zero_optimization.leaf_module`."""

    classes: Names = unused((), _FULLY_SHARD)
    names: Names = unused((), _FULLY_SHARD)
    name_suffixes: Names = unused((), _FULLY_SHARD)


class ZeroOptimization(Section):
    """`zero_optimization`."""

    stage: Stage = honoured(
        0, "what ranks share: 1 the optimizer's state, 2 sums of gradients too, 3 weights too; one process: all alike"
    )
    offload_optimizer: OffloadOptimizer | None = maybe_section("master weights, optimizer state and update on the host")
    offload_param: OffloadParam | None = maybe_section("weights on the host, beside the optimizer's state")
    zenflow: Free | None = refused(
        None, "offload_optimizer with delayed_update also hides the whole update", switch=is_given
    )
    cpu_offload_use_pin_memory: bool = unused(False, "buffers that the GPU copies from and to are always page-locked")

    contiguous_gradients: bool = unused(True, "gradients always travel in contiguous buckets")
    reduce_scatter: bool = unused(True, _STAGE_CHOOSES)
    reduce_bucket_size: Positive = unused(500_000_000, _BUCKETS)
    use_multi_rank_bucket_allreduce: bool = unused(True, _STAGE_CHOOSES)
    allgather_partitions: bool = unused(True, _STAGE_CHOOSES)
    allgather_bucket_size: Whole = unused(500_000_000, _BUCKETS)
    overlap_comm: bool | None = unused(None, "transfers always overlap with the computation")
    sub_group_size: Whole = unused(1_000_000_000, _BUCKETS)
    round_robin_gradients: bool = unused(False, "every rank has an equal part of each bucket")
    compute_grad_norm: bool = unused(True, "the norm is taken as gradients pass by")
    ignore_unused_parameters: bool = unused(True, "a parameter without a gradient is left as it is")
    parameter_alignment: bool = unused(False, "buckets are always aligned")
    elastic_checkpoint: bool = unused(False, "a checkpoint does not depend on the number of processes")
    pipeline_loading_checkpoint: bool = unused(False, "each rank reads only what it needs, with no turns")
    load_from_fp32_weights: bool = refused(True, "masters are always loaded in full: leave it true")
    legacy_stage1: bool = refused(False, "the old stage 1 is gone: leave it out")

    stage3_prefetch_bucket_size: Whole = unused(50_000_000, _FULLY_SHARD)
    stage3_param_persistence_threshold: Whole = unused(100_000, _FULLY_SHARD)
    stage3_model_persistence_threshold: Whole = unused(2**63 - 1, _FULLY_SHARD)
    stage3_max_live_parameters: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_max_reuse_distance: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_gather_16bit_weights_on_model_save: bool = unused(
        False, "with stage 3 on many ranks save_16bit_model is refused: `twinflow export` makes files of a checkpoint"
    )
    stage3_module_granularity_threshold: AnyWhole = unused(0, _FULLY_SHARD)
    stage3_use_all_reduce_for_fetch_params: bool = unused(False, _FULLY_SHARD)
    stage3_allgather_sequential: bool = unused(False, _FULLY_SHARD)
    memory_efficient_linear: bool = unused(True, _FULLY_SHARD)
    override_module_apply: bool = unused(True, _FULLY_SHARD)
    leaf_module: LeafModule = section(LeafModule, "modules that stage 3 treats as one: none of its keys has an effect")
    enable_sanity_checks: bool = unused(False, _FULLY_SHARD)
    log_trace_cache_warnings: bool = unused(False, _FULLY_SHARD)
    save_muon_momentum_buffer_in_memory: bool = unused(False, "there is no Muon of twinflow's own")

    mics_shard_size: AnyWhole = refused(-1, "stage 3 partitions over all ranks: leave it out", off=(0, 1))
    mics_hierarchical_params_gather: bool = refused(False, "weights are gathered from all ranks at once: leave it out")
    zero_hpz_partition_size: Whole = refused(1, "there is no partition inside a machine: leave it at 1", off=(0,))
    zero_quantized_weights: bool = refused(False, "weights are not sent quantized: leave it out")
    zero_quantized_nontrainable_weights: bool = refused(False, "quantize frozen weights in the model: leave it out")
    zero_quantized_gradients: bool = refused(False, "gradients are not sent quantized: leave it out")
    zeropp_loco_param: Any = refused(None, "gradients are not sent quantized: leave it out", switch=is_given)
