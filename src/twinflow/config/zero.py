"""The section `zero_optimization` of the config: ZeRO stage and offload."""

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

_STAGE_CHOOSES = "the stage determines the collectives: reduce-scatter and all-gather (1, 2) or all-reduce (0)"
_FULLY_SHARD = "with stage 3 torch's fully_shard gathers and frees weights block by block; else they stay whole"
_ALL_ON_HOST = "with device cpu all weights of blocks are on the host, page-locked, as part of the optimizer's state"
_NVME = "twinflow does not use NVMe"
_BUCKETS = "offload_optimizer.bucket_numel sets the size of the buckets"


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`: master weights, optimizer state and update on the host."""

    device: Literal["cpu", "none"] = honoured(
        "none",
        "place of the optimizer state; cpu: the share `ratio` of it is on the host; none: all of it is on the GPU",
        hints={
            "nvme": 'State on NVMe is not supported. Use "cpu". With states "int8" it takes half the memory of "fp32"'
        },
    )
    nvme_path: str | None = unused(None, _NVME)
    buffer_count: Whole = unused(4, _NVME)
    pin_memory: bool = unused(True, "host buffers of transfers are always page-locked")
    pipeline_read: bool = unused(False, _NVME)
    pipeline_write: bool = unused(False, _NVME)
    fast_init: bool = unused(False, _NVME)
    ratio: Ratio = honoured(
        1.0,
        'share of the state that is on the host; "auto": the share with the fastest step, chosen after the first steps',
        for_host=True,
    )
    super_offload: bool = refused(False, "leave it out: updates always overlap with backward")
    cpuadam_cores_perc: Share = unused(0.8, "host_threads sets the number of threads of the update")

    states: Literal["fp32", "bf16", "int8"] = honoured("fp32", "format of the optimizer state", ours=True)
    placement: Literal["auto", "front", "tail"] = honoured(
        "auto",
        "with a ratio below 1: whether the state of the first or of the last layers stays on the GPU",
        ours=True,
        for_host=True,
    )
    delayed_update: bool = honoured(
        False, "apply each update one step late, so that it overlaps with a whole step (changes results)", ours=True
    )
    delayed_update_start: Whole = honoured(0, "first step whose update may be late", ours=True)
    early: bool | Literal["auto"] = honoured(
        "auto",
        "whether updates start during backward; auto: after some ordinary steps if updates cannot be undone",
        ours=True,
    )
    host_threads: Threads | None = honoured(
        None, "number of threads of the update; null: from the number of cores", ours=True, for_host=True
    )
    hold: Side = honoured("auto", "place of the gradients until the clipping decision", ours=True)
    sums: Side = honoured(
        "auto",
        "place where gradients of several micro-batches are summed; auto with stage 2 on several ranks: parts are "
        "reduced after each micro-batch",
        ours=True,
    )
    bucket_numel: Buckets | None = honoured(None, "number of elements in a bucket; null: twinflow chooses", ours=True)
    shadow_bytes: Whole | None = honoured(
        None,
        "host memory for updates before the clipping decision; null: the spare memory",
        ours=True,
        for_host=True,
    )

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys for TwinOptimizer. Each is an argument of TwinOptimizer or a field of `Tuning` with the same
        name."""
        keys = ((name, rule_of(info)) for name, info in cls.model_fields.items() if name != "device")
        return tuple(name for name, rule in keys if rule is not None and rule.kind == HONOURED)


class OffloadParam(Section):
    """`zero_optimization.offload_param`: weights on the host."""

    device: Literal["cpu", "none"] = honoured(
        "none",
        "cpu: weights are on the host, and each block fetches its weights to run; needs stage 3 and offload_optimizer",
        hints={"nvme": 'Weights on NVMe are not supported. Use "cpu"'},
    )
    nvme_path: str | None = unused(None, _NVME)
    buffer_count: Whole = unused(5, _NVME)
    buffer_size: Whole = unused(100_000_000, _NVME)
    max_in_cpu: Whole = unused(1_000_000_000, _ALL_ON_HOST)
    pin_memory: bool = unused(True, _ALL_ON_HOST)


class LeafModule(Section):
    """`zero_optimization.leaf_module`: modules that stage 3 gathers whole. Its keys have no effect."""

    classes: Names = unused((), _FULLY_SHARD)
    names: Names = unused((), _FULLY_SHARD)
    name_suffixes: Names = unused((), _FULLY_SHARD)


class ZeroOptimization(Section):
    """`zero_optimization`: ZeRO stage and offload."""

    stage: Stage = honoured(
        0,
        "state that is partitioned over ranks: 1 the optimizer state, 2 also summed gradients, 3 also weights; "
        "no effect with one process",
    )
    offload_optimizer: OffloadOptimizer | None = maybe_section("master weights, optimizer state and update on the host")
    offload_param: OffloadParam | None = maybe_section("weights on the host, besides the optimizer state")
    zenflow: Free | None = refused(
        None, "use offload_optimizer with delayed_update, which also hides the whole update", switch=is_given
    )
    cpu_offload_use_pin_memory: bool = unused(False, "host buffers of transfers are always page-locked")

    contiguous_gradients: bool = unused(True, "gradients are always sent in contiguous buckets")
    reduce_scatter: bool = unused(True, _STAGE_CHOOSES)
    reduce_bucket_size: Positive = unused(500_000_000, _BUCKETS)
    use_multi_rank_bucket_allreduce: bool = unused(True, _STAGE_CHOOSES)
    allgather_partitions: bool = unused(True, _STAGE_CHOOSES)
    allgather_bucket_size: Whole = unused(500_000_000, _BUCKETS)
    overlap_comm: bool | None = unused(None, "transfers always overlap with the computation")
    sub_group_size: Whole = unused(1_000_000_000, _BUCKETS)
    round_robin_gradients: bool = unused(False, "every rank has an equal part of each bucket")
    compute_grad_norm: bool = unused(True, "the norm is always computed during backward")
    ignore_unused_parameters: bool = unused(True, "a parameter without a gradient is never updated")
    parameter_alignment: bool = unused(False, "buckets are always aligned")
    elastic_checkpoint: bool = unused(False, "a checkpoint does not depend on the number of processes")
    pipeline_loading_checkpoint: bool = unused(
        False, "each rank reads only the parts that it needs, at the same time as the others"
    )
    load_from_fp32_weights: bool = refused(True, "leave it true: fp32 masters are always loaded")
    legacy_stage1: bool = refused(False, "leave it out: the legacy stage 1 is not supported")

    stage3_prefetch_bucket_size: Whole = unused(50_000_000, _FULLY_SHARD)
    stage3_param_persistence_threshold: Whole = unused(100_000, _FULLY_SHARD)
    stage3_model_persistence_threshold: Whole = unused(2**63 - 1, _FULLY_SHARD)
    stage3_max_live_parameters: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_max_reuse_distance: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_gather_16bit_weights_on_model_save: bool = unused(
        False,
        "`twinflow export` writes weights from a checkpoint; save_16bit_model fails with stage 3 on several ranks",
    )
    stage3_module_granularity_threshold: AnyWhole = unused(0, _FULLY_SHARD)
    stage3_use_all_reduce_for_fetch_params: bool = unused(False, _FULLY_SHARD)
    stage3_allgather_sequential: bool = unused(False, _FULLY_SHARD)
    memory_efficient_linear: bool = unused(True, _FULLY_SHARD)
    override_module_apply: bool = unused(True, _FULLY_SHARD)
    leaf_module: LeafModule = section(LeafModule, "modules that stage 3 gathers whole; its keys have no effect")
    enable_sanity_checks: bool = unused(False, _FULLY_SHARD)
    log_trace_cache_warnings: bool = unused(False, _FULLY_SHARD)
    save_muon_momentum_buffer_in_memory: bool = unused(False, "twinflow has no Muon")

    mics_shard_size: AnyWhole = refused(-1, "leave it out: stage 3 partitions over all ranks", off=(0, 1))
    mics_hierarchical_params_gather: bool = refused(False, "leave it out: weights are gathered from all ranks at once")
    zero_hpz_partition_size: Whole = refused(
        1, "leave it at 1: there is no secondary partition inside a machine", off=(0,)
    )
    zero_quantized_weights: bool = refused(False, "leave it out: weights are not sent quantized")
    zero_quantized_nontrainable_weights: bool = refused(False, "leave it out, and quantize frozen weights in the model")
    zero_quantized_gradients: bool = refused(False, "leave it out: gradients are not sent quantized")
    zeropp_loco_param: Any = refused(None, "leave it out: gradients are not sent quantized", switch=is_given)
