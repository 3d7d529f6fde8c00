# SPDX-License-Identifier: Apache-2.0
"""The whole config as a typed, frozen model. Attributes have the names and defaults of DeepSpeed's keys.

The alternative names of keys are here too, and the JSON Schema, which follows from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import PrivateAttr

from twinflow.config.fields import (
    HONOURED,
    Above,
    Amount,
    AnyWhole,
    AutocastDtype,
    Buckets,
    DiskIo,
    Dtype,
    Every,
    Free,
    Indices,
    KeyPath,
    Names,
    Positive,
    Power,
    Ratio,
    Rule,
    Section,
    Share,
    Side,
    Stage,
    Tags,
    Threads,
    Whole,
    Widths,
    dotted,
    honoured,
    in_words,
    is_given,
    is_on,
    ours,
    refused,
    rule_of,
    section,
    section_of,
    unused,
)
from twinflow.config.params import OPTIMIZERS, SCHEDULES
from twinflow.errors import invalid_value

_FIXED = "mode fixed: "
_LISTED = "modes variable and bslongformer: "
_WHOLE = "tensors between stages are always sent whole"
_PLAN = "tensor_parallel.plan determines how a model is split; twinflow has plans for known models"
_STAGE_CHOOSES = "the stage determines the collectives: reduce-scatter and all-gather (1, 2) or all-reduce (0)"
_FULLY_SHARD = (
    "stage 3 uses torch's fully_shard for each block, which has no such setting; with other stages weights stay whole"
)
_QUANTIZED = "leave it out: twinflow sends gradients without quantization"
_ALL_ON_HOST = "with device cpu all weights of blocks are on the host, page-locked, as part of the optimizer's state"
_BUCKETS = "offload_optimizer.bucket_numel sets the size of the buckets"
_TURNS_ON = "; like every true key of this section, this key turns checkpointing on"
_COMET = "use tensorboard, csv_monitor or wandb: Comet is not supported"
_COMET_OFF = "Comet is not supported"
_COMPILE = "DeepCompile is not supported"
_WRITER = "there is only one format and one writer of checkpoints"


OptimizerName = Annotated[str, "the name of an update rule, such as adamw, or of a torch.optim class"]
ScheduleName = Annotated[
    str,
    "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler",
]


class SparseAttention(Section):
    """`sparse_attention`: the sparsity pattern of the attention layers. A key of another mode must have its default."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = honoured(
        "fixed", "the sparsity pattern; dense: the model's own attention; local (not in DeepSpeed): a sliding window"
    )
    block: Literal[16, 32, 64, 128] = honoured(16, "number of tokens in a block of queries or keys")
    different_layout_per_head: bool = honoured(False, "whether heads may have different patterns")
    num_local_blocks: Positive = honoured(4, _FIXED + "width of a local window, in blocks")
    num_global_blocks: Positive = honoured(
        1, "mode fixed: number of global blocks in each window; mode bigbird: number of global blocks in the sequence"
    )
    attention: Literal["unidirectional", "bidirectional"] = honoured(
        "bidirectional", "unidirectional: a token attends to no later token, as in decoders"
    )
    horizontal_global_attention: bool = honoured(False, "modes fixed and variable: global blocks attend to all blocks")
    num_different_global_patterns: Positive = honoured(
        1, _FIXED + "number of different global patterns among the heads"
    )
    num_random_blocks: Whole = honoured(0, "modes variable and bigbird: random blocks of keys for a block of queries")
    local_window_blocks: Widths = honoured(
        (4,), "mode variable: widths of the windows, in blocks; the last width repeats"
    )
    global_block_indices: Indices = honoured((0,), _LISTED + "global blocks, or the starts of ranges of global blocks")
    global_block_end_indices: Indices | None = honoured(None, _LISTED + "the ends of the ranges of global blocks")
    num_sliding_window_blocks: Positive = honoured(
        3, "modes bigbird, bslongformer and local: width of the window, in blocks"
    )
    seed: Whole = ours(0, "modes variable and bigbird: seed of the random blocks")

    def given(self) -> dict[str, Any]:
        """The mode and all values that differ from the defaults, because a config may contain the defaults of other
        modes. Mode local has its own default of `attention`, so that a value in the config is returned in any case.
        """
        found = {name: getattr(self, name) for name in type(self).model_fields}
        changed = {name for name, value in found.items() if value != type(self).model_fields[name].default}
        if self.mode == "local":
            changed |= {"attention"} & self.model_fields_set
        return {name: value for name, value in found.items() if name == "mode" or name in changed}


class Pipeline(Section):
    stages: AnyWhole | None = honoured(
        None, "number of pipeline stages; null or 0: as many as the PipelineModule has, or 1"
    )
    partition: str = honoured(
        "best",
        "how layers are divided among stages: uniform, parameters or type:REGEX; best means parameters; "
        "a PipelineModule uses its own method",
    )
    seed_layers: bool = unused(False, "seed_layers of PipelineModule decides whether layers seed their dropout")
    activation_checkpoint_interval: Whole = honoured(
        0, "number of layers that are recomputed together; 0: no recomputation"
    )
    pipe_partitioned: bool = unused(True, _WHOLE)
    grad_partitioned: bool = unused(True, _WHOLE)
    use_reentrant: bool = unused(True, "layers are always recomputed without reentrant backwards")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] | None = ours(
        None, "the order of forwards and backwards; null: the schedule of the PipelineModule, or 1f1b"
    )
    chunks: Positive | None = ours(None, "schedule interleaved: number of stages on a rank; null: 2")


class Tp(Section):
    tp_size: Whole = honoured(1, "number of tensor-parallel ranks")
    tp_grain_size: Positive = unused(1, "the sizes of split tensors must be divisible by the number of ranks")
    mpu: Any = refused(None, "set only tp_size: initialize() creates the process groups", switch=is_given)
    tp_group: Any = refused(None, "set only tp_size: initialize() creates the process groups", switch=is_given)


class TensorParallel(Section):
    autotp_size: Whole = honoured(0, "number of tensor-parallel ranks; 0: the value of tensor_parallel.tp.tp_size")
    tp: Tp = section(Tp, "the degree of tensor parallelism, as in the config of DeepSpeed's inference")
    dtype: Any = unused(None, "bf16.enabled or fp16.enabled determines the dtype")
    tp_overlap_comm: bool = unused(False, "tensor ranks wait for their all-reduces")
    vocab_parallel_lm_head: bool | None = unused(None, _PLAN)
    vocab_parallel_ce_backend: str = unused("torch", "there is only one implementation of the cross entropy")
    injection_policy_tuple: Any = unused(None, _PLAN)
    partition_config: Free | None = unused(None, _PLAN)
    preset_model: str | None = unused(None, _PLAN)
    keep_module_on_host: bool = unused(False, "weights are split on the device of the model")
    replace_with_kernel_inject: bool = refused(False, "leave it out: twinflow does not inject kernels into the model")
    sequence: bool = ours(
        False, "sequence parallelism: each tensor rank computes norms and dropout for its part of the sequence"
    )
    plan: Free | None = ours(
        None, "how to split each module: an object from patterns of module names to styles; null: twinflow's plan"
    )


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`: master weights, optimizer state and update on the host."""

    device: Literal["cpu", "nvme", "none"] = honoured(
        "none",
        "place of the optimizer state; cpu: the share `ratio` of it is on the host; nvme: this share is on a disk and "
        "is updated on the host; none: all of it is on the GPU",
    )
    nvme_path: str | None = honoured(None, "device nvme: a folder on a local disk")
    buffer_count: Positive = honoured(4, "device nvme: number of host buffers, each for the state of one bucket")
    pin_memory: bool = unused(True, "host buffers of transfers are always page-locked")
    pipeline_read: bool = unused(False, "reads always overlap with updates")
    pipeline_write: bool = unused(False, "writes always overlap with updates")
    fast_init: bool = unused(False, "a file begins with zeros, which are not read")
    ratio: Ratio = honoured(
        1.0,
        'share of the state that is on the host; "auto": the share with the fastest step, chosen after the first steps',
        for_host=True,
    )
    super_offload: bool = refused(False, "leave it out: updates overlap with backward without it")
    cpuadam_cores_perc: Share = unused(0.8, "host_threads sets the number of threads of the update")

    states: Literal["fp32", "bf16", "int8", "4bit"] = ours("fp32", "format of the optimizer state")
    master: Literal["fp32", "none"] = ours(
        "fp32", "none: bf16 weights have no fp32 master and are rounded stochastically; this changes results"
    )
    placement: Literal["auto", "front", "tail", "spread"] = ours(
        "auto",
        "layers whose state stays on the GPU; front: the first, tail: the last, spread: evenly distributed ones, auto: "
        "those that a forward needs first",
        for_host=True,
    )
    delayed_update: bool = ours(False, "apply each update one step later; this changes results")
    delayed_update_start: Whole = ours(0, "number of steps at the start whose updates are not delayed")
    early: bool | Literal["auto"] = ours(
        "auto",
        "true: updates start during backward; false: updates start in step(); auto: true, but if neither clipping nor "
        "the overflow check is on, the updates of the first steps start in step()",
    )
    host_threads: Threads | None = ours(None, "threads of the update; null: from the number of cores", for_host=True)
    hold: Side = ours(
        "auto",
        "where gradients wait for the clipping decision; auto: the device if they fit into half of its free memory, "
        "otherwise the host",
    )
    sums: Side = ours(
        "auto",
        "where gradients of several micro-batches are summed; auto: the device, if the sums take up to half of its "
        "free memory; auto with stage 2: ranks reduce the gradients of each micro-batch, and each rank sums its part",
    )
    disk_io: DiskIo = ours(
        "auto",
        "device nvme, here or in offload_param: what reads and writes; io_uring: the io_uring of Linux, or threads "
        "with a warning if the kernel refuses it; threads: a thread for each read or write at the same time; auto: "
        "threads",
    )
    bucket_numel: Buckets | None = ours(
        None, "number of elements in a bucket, a group of parameters that are updated together; null: twinflow chooses"
    )
    shadow_bytes: Whole | None = ours(
        None,
        "host memory for updates before the clipping decision; null: what the state leaves free, without a reserve",
        for_host=True,
    )

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys that TwinOptimizer gets: each is the name of one of its arguments or of a field of `Tuning`."""
        keys = ((name, rule_of(info)) for name, info in cls.model_fields.items() if name != "device")
        return tuple(name for name, rule in keys if rule is not None and rule.kind == HONOURED)


class Aio(Section):
    """`aio`: reads and writes with the device nvme of `offload_optimizer` or `offload_param`."""

    block_size: Positive = honoured(1 << 20, "bytes of one read or write, rounded up to whole pages")
    queue_depth: Positive = honoured(
        8, "number of reads and writes at the same time, multiplied by intra_op_parallelism; at most 64 together"
    )
    intra_op_parallelism: Positive = honoured(1, "factor of queue_depth")
    single_submit: bool = unused(False, "each read and each write is submitted by itself")
    overlap_events: bool = unused(True, "reads and writes always overlap")
    use_gds: bool = unused(False, "state is read into host memory, where it is updated")


class OffloadParam(Section):
    """`zero_optimization.offload_param`: weights on the host."""

    device: Literal["cpu", "nvme", "none"] = honoured(
        "none",
        "cpu: weights are on the host and are copied to the GPU block by block; needs stage 3; the optimizer state is "
        "then on the host or a disk; nvme: as cpu, but frozen weights, and weights whose state is on a disk, are on a "
        "disk too",
    )
    nvme_path: str | None = honoured(None, "device nvme: a folder on a local disk")
    buffer_count: Positive = honoured(
        5, "device nvme: least number of host buffers, each for the weights of one bucket, or for some frozen weights"
    )
    buffer_size: Whole = unused(100_000_000, "a buffer has room for the weights of one bucket; " + _BUCKETS)
    max_in_cpu: Whole = honoured(
        1_000_000_000, "device nvme: number of weights for which there are buffers, if these are more than buffer_count"
    )
    embeddings: bool = ours(
        False, "true: the embedding and output layers are on the host too, and are copied to the GPU when they run"
    )
    pin_memory: bool = unused(True, _ALL_ON_HOST)


class LeafModule(Section):
    """`zero_optimization.leaf_module`: modules that stage 3 gathers whole. Its keys have no effect."""

    classes: Names = unused((), _FULLY_SHARD)
    names: Names = unused((), _FULLY_SHARD)
    name_suffixes: Names = unused((), _FULLY_SHARD)


class ZeroOptimization(Section):
    stage: Stage = honoured(
        0,
        "what is partitioned over ranks: 0 nothing, 1 the optimizer state, 2 also summed gradients, 3 also weights; "
        "no effect with one process",
    )
    offload_optimizer: OffloadOptimizer | None = section(None, "master weights, optimizer state and update on the host")
    offload_param: OffloadParam | None = section(None, "weights on the host, besides the optimizer state")
    zenflow: Free | None = refused(
        None, "use offload_optimizer.delayed_update: the GPU then does not wait for updates", switch=is_given
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
    pipeline_loading_checkpoint: bool = unused(False, "each rank reads only the parts that it needs")
    load_from_fp32_weights: bool = refused(True, "leave it true: fp32 masters are always loaded")
    legacy_stage1: bool = refused(False, "leave it out: the legacy stage 1 is not supported")

    stage3_prefetch_bucket_size: Whole = unused(50_000_000, _FULLY_SHARD)
    stage3_param_persistence_threshold: Whole = unused(100_000, _FULLY_SHARD)
    stage3_model_persistence_threshold: Whole = unused(2**63 - 1, _FULLY_SHARD)
    stage3_max_live_parameters: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_max_reuse_distance: Whole = unused(1_000_000_000, _FULLY_SHARD)
    stage3_gather_16bit_weights_on_model_save: bool = unused(
        False,
        "whole weights are always gathered on rank 0 when a model is saved",
    )
    stage3_module_granularity_threshold: AnyWhole = unused(0, _FULLY_SHARD)
    stage3_use_all_reduce_for_fetch_params: bool = unused(False, _FULLY_SHARD)
    stage3_allgather_sequential: bool = unused(False, _FULLY_SHARD)
    memory_efficient_linear: bool = unused(True, _FULLY_SHARD)
    override_module_apply: bool = unused(True, _FULLY_SHARD)
    leaf_module: LeafModule = section(LeafModule, "modules that stage 3 gathers whole; its keys have no effect")
    enable_sanity_checks: bool = unused(False, _FULLY_SHARD)
    log_trace_cache_warnings: bool = unused(False, _FULLY_SHARD)
    save_muon_momentum_buffer_in_memory: bool = unused(
        False, "the momentum is where offload_optimizer.ratio and placement put it"
    )

    mics_shard_size: AnyWhole = refused(-1, "leave it out: stage 3 partitions over all ranks", off=(0, 1))
    mics_hierarchical_params_gather: bool = refused(False, "leave it out: weights are gathered from all ranks at once")
    zero_hpz_partition_size: Whole = refused(1, "leave it at 1: there is no secondary partition", off=(0,))
    zero_quantized_weights: bool = refused(False, "leave it out: twinflow sends weights without quantization")
    zero_quantized_nontrainable_weights: bool = refused(False, "leave it out, and quantize frozen weights in the model")
    zero_quantized_gradients: bool = refused(False, _QUANTIZED)
    zeropp_loco_param: Any = refused(None, _QUANTIZED, switch=is_given)


class Fp16(Section):
    """`fp16`: train in fp16 with a loss scale."""

    enabled: bool = honoured(False, "weights and gradients in fp16, with a loss scale")
    auto_cast: bool = honoured(False, "cast floating-point inputs of the model to fp16")
    loss_scale: Amount = honoured(0.0, "a fixed loss scale; 0: dynamic")
    initial_scale_power: Power = honoured(16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: Positive = honoured(1000, "consecutive steps without overflow before the scale doubles")
    hysteresis: Positive = honoured(2, "number of overflows before the scale is halved")
    consecutive_hysteresis: bool = honoured(
        False, "every step without overflow restarts the count of overflows for hysteresis"
    )
    min_loss_scale: Above = honoured(1.0, "the dynamic scale never falls below this value")
    fp16_master_weights_and_grads: bool = refused(
        False, 'use offload_optimizer.states "bf16" or "int8" for a smaller state: master weights are fp32'
    )


class Bf16(Section):
    enabled: bool = honoured(False, "weights and gradients in bf16")
    immediate_grad_update: bool = unused(False, "a gradient leaves the GPU as soon as it is complete")
    check_grad_overflow: bool = honoured(True, "skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: bool = unused(
        False, "master weights are always exact to fp32; with bf16 state they take 2 bytes beside the weights"
    )
    bf16_optimizer_states: bool = honoured(
        False, "optimizer state in bf16, unless offload_optimizer.states says otherwise; master weights stay exact"
    )


class TorchAutocast(Section):
    enabled: bool = honoured(False, "run the forward under torch.autocast")
    dtype: AutocastDtype | None = honoured(None, "bfloat16 or float16; must be given if enabled is true")
    lower_precision_safe_modules: Names | None = unused(
        None, "communication_data_type sets the dtype of sent gradients"
    )


class Optimizer(Section):
    type: OptimizerName = honoured(..., "the update rule; names of twinflow's rules may be in upper or lower case")
    params: Free = honoured({}, "options of the optimizer")
    legacy_fusion: bool = unused(False, "it selects an implementation of LAMB, and twinflow has only one")


class Scheduler(Section):
    type: ScheduleName = honoured(..., "the schedule; its name may be in upper or lower case")
    params: Free = honoured({}, "options of the schedule")


class DataTypes(Section):
    grad_accum_dtype: Dtype | None = unused(None, "gradients of micro-batches are summed in fp32", quiet=(None, "fp32"))
    param_dtype: Dtype | None = refused(None, "use bf16.enabled or fp16.enabled")
    buffer_dtype: Dtype | None = refused(None, "convert the model's buffers before initialize()")
    keep_in_fp32_modules: Names | None = refused(None, "convert these modules before initialize()")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: active if a key is true or `layers` is given."""

    partition_activations: bool = honoured(False, "turn checkpointing on; partition the saved inputs over tensor ranks")
    cpu_checkpointing: bool = honoured(False, "turn checkpointing on; keep layers' inputs on the host until backward")
    contiguous_memory_optimization: bool = unused(False, "buffers on the host are pooled and reused" + _TURNS_ON)
    number_checkpoints: Positive | None = unused(
        None, "this key sets the size of the buffer of contiguous_memory_optimization, which is not needed"
    )
    synchronize_checkpoint_boundary: bool = unused(False, "no layer needs a synchronization with the GPU" + _TURNS_ON)
    profile: bool = unused(False, "wall_clock_breakdown and flops_profiler measure the time of a step" + _TURNS_ON)
    layers: Names | None = ours(
        None,
        "turn checkpointing on for layers with these class names; null: other keys turn it on, for the model's blocks "
        "(members of its ModuleLists and Sequentials)",
    )
    selective: bool = ours(
        False, "turn checkpointing on; keep results of matrix products and attention, and recompute all others"
    )

    every: Positive = ours(1, "turn checkpointing on if above 1; only every n-th layer keeps its input")
    layers_on_device: Whole = ours(0, "cpu_checkpointing: number of layers at the end whose inputs stay on the GPU")
    float8: bool = ours(False, "turn checkpointing on; keep layers' inputs in float8; this changes results")
    nvme_path: str | None = ours(
        None, "turn cpu_checkpointing on; a folder on a local disk, to which the inputs are written"
    )

    @property
    def offloads(self) -> bool:
        """Whether the inputs of layers leave the GPU until backward."""
        return self.cpu_checkpointing or self.nvme_path is not None

    @property
    def is_asked_for(self) -> bool:
        return (
            self.layers is not None
            or self.nvme_path is not None
            or self.every > 1
            or any(value is True for value in (getattr(self, name) for name in type(self).model_fields))
        )


class ParallelWrite(Section):
    pipeline_stage: bool = unused(False, "every rank always writes the state that only it has")


class Checkpoint(Section):
    tag_validation: Tags = honoured(
        "Warn",
        "what happens if ranks give different tags; Fail: an error; Warn and Ignore: all ranks use the tag of rank 0, "
        "with or without a warning",
    )
    load_universal: bool = unused(False, "every checkpoint of twinflow loads with any number of ranks")
    use_node_local_storage: bool = unused(False, "all ranks write to one folder on a shared file system")
    parallel_write: ParallelWrite = section(ParallelWrite, "which ranks write; its keys have no effect")
    checkpoint_serialization: bool = unused(True, _WRITER)
    writer: Free | None = unused(None, _WRITER)
    keep_last: Positive | None = ours(None, "number of checkpoints to keep; null: all")
    background: bool = ours(False, "write checkpoints in the background during the next steps")
    background_bytes: Whole | None = ours(
        None,
        "host memory of a rank for state that is updated before it is written: buffers for new state, and copies; "
        "null: half of the free memory for buffers, and for copies all but a reserve of 6% and at least 4 GB",
    )


class Files(Section):
    enabled: bool = honoured(False, "write metrics to files")
    output_path: str = honoured("", "folder for the files")
    job_name: str = honoured("DeepSpeedJobName", "name of a folder inside output_path, for this run")


class Wandb(Section):
    enabled: bool = honoured(False, "send metrics to Weights & Biases")
    group: str | None = honoured(None, "group of the run")
    team: str | None = honoured(None, "team of the run")
    project: str = honoured("deepspeed", "project of the run")


class Comet(Section):
    """`comet`: metrics for Comet, which is not supported."""

    enabled: bool = refused(False, _COMET)
    samples_log_interval: Positive = unused(100, _COMET_OFF)
    project: str | None = unused(None, _COMET_OFF)
    workspace: str | None = unused(None, _COMET_OFF)
    api_key: str | None = unused(None, _COMET_OFF)
    experiment_name: str | None = unused(None, _COMET_OFF)
    experiment_key: str | None = unused(None, _COMET_OFF)
    online: bool | None = unused(None, _COMET_OFF)
    mode: str | None = unused(None, _COMET_OFF)


class FlopsProfiler(Section):
    """`flops_profiler`: counts the FLOPs of one step by module."""

    enabled: bool = honoured(False, "profile one step")
    profile_step: Positive = honoured(1, "the step to profile")
    module_depth: AnyWhole = honoured(-1, "depth of the printed tree of modules; -1: the whole tree")
    top_modules: Whole = honoured(1, "number of modules of each depth that are listed")
    detailed: bool = honoured(True, "print every module")
    output_file: str | None = honoured(None, "file to write to; null: the log")
    recompute_fwd_factor: Amount = unused(0.0, "recomputation in backward is counted, not estimated", quiet=(0.0,))


class Float8(Section):
    """`float8`: matrix products of the blocks in float8, with torchao."""

    enabled: bool = ours(False, "compute the linear layers of the model's blocks in float8")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = ours(
        "tensorwise", "torchao's recipe: one scale for each tensor, or for each row"
    )
    emulate: bool = ours(False, "round to float8 and compute in the dtype of the weights; slow, on any device")


class CompileSection(Section):
    """`compile`: torch.compile for each block. DeepCompile is not supported."""

    blocks: bool = ours(False, "compile each block of the model with torch.compile")
    backend: str = ours("inductor", "with blocks: the backend of torch.compile")
    deepcompile: bool = refused(False, "set compile.blocks: torch.compile compiles each block of the model")
    autoep_non_moe: bool = unused(False, _COMPILE)
    free_activation: bool = unused(False, _COMPILE)
    free_activation_threshold: Whole = unused(10 << 20, _COMPILE)
    offload_activation: bool = unused(False, _COMPILE)
    offload_activation_pin_memory: bool = unused(True, _COMPILE)
    offload_opt_states: bool = unused(False, _COMPILE)
    double_buffer: bool = unused(True, _COMPILE)
    symmetric_memory: bool = unused(False, _COMPILE)
    debug_log: bool = unused(False, _COMPILE)
    offload_parameters: bool = unused(False, _COMPILE)
    sync_before_reduce: bool = unused(False, _COMPILE)
    sync_after_reduce: bool = unused(False, _COMPILE)
    sync_before_allgather: bool = unused(False, _COMPILE)
    sync_after_allgather: bool = unused(False, _COMPILE)
    keep_int_input_tensors: bool = unused(True, _COMPILE)
    keep_all_input_tensors: bool = unused(False, _COMPILE)
    passes: Names | None = unused(None, _COMPILE)


class Config(Section):
    """A checked DeepSpeed config. `load_config` creates it."""

    train_batch_size: Positive | None = honoured(None, "samples in a step, over all processes")
    train_micro_batch_size_per_gpu: Positive | None = honoured(None, "samples in a forward on one GPU")
    gradient_accumulation_steps: Positive | None = honoured(None, "number of micro-batches in a step on one GPU")
    managed_gradient_accumulation: bool = refused(True, "leave it true: the engine counts micro-batches itself")
    steps_per_print: Every = honoured(None, "number of steps between two lines of progress")
    hang_timeout_s: Amount = ours(600.0, "seconds without a step after which all ranks print stacks and exit; 0: never")
    gradient_clipping: Amount = honoured(1.0, "largest global norm of the gradients; 0: no clipping")
    gradient_clipping_value: Amount = ours(0.0, "largest absolute value of an element of the gradients; 0: no limit")
    wall_clock_breakdown: bool = honoured(False, "print the times of the parts of a step")
    dataloader_drop_last: bool = honoured(False, "drop the last batch if it is not full")

    fp16: Fp16 = section(Fp16, "train in fp16")
    bf16: Bf16 = section(Bf16, "train in bf16")
    float8: Float8 = section(Float8, "compute the linear layers of blocks in float8")
    torch_autocast: TorchAutocast = section(TorchAutocast, "run the forward under torch.autocast")
    data_types: DataTypes = section(DataTypes, "dtypes besides those of the weights")
    optimizer: Optimizer | None = section(None, "the update rule")
    scheduler: Scheduler | None = section(None, "the schedule of the learning rate")
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO stage and offload to the host")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "recomputation of activations in backward"
    )
    sparse_attention: SparseAttention | None = section(None, "the sparsity pattern of the attention layers")
    checkpoint: Checkpoint = section(Checkpoint, "how checkpoints are written")
    tensorboard: Files = section(Files, "metrics as TensorBoard files")
    csv_monitor: Files = section(Files, "metrics as CSV files")
    wandb: Wandb = section(Wandb, "metrics for Weights & Biases")
    comet: Comet = section(Comet, "metrics for Comet, which must be off")
    flops_profiler: FlopsProfiler = section(FlopsProfiler, "counts the FLOPs of one step")
    pipeline: Pipeline = section(Pipeline, "pipeline parallelism")
    tensor_parallel: TensorParallel = section(TensorParallel, "tensor parallelism")
    compile: CompileSection = section(CompileSection, "torch.compile for each block; DeepCompile must be off")

    prescale_gradients: bool = honoured(False, "divide gradients by the number of ranks before the sum, not after it")
    gradient_allreduce_op: Literal["mean", "sum"] = honoured("mean", "reduction of gradients over ranks: mean or sum")
    communication_data_type: Dtype | None = honoured(
        None, "dtype in which gradients are reduced; null: their own dtype"
    )
    seq_parallel_communication_data_type: Dtype = unused(
        "fp32", "the gradients of sequence ranks are reduced with all others, in communication_data_type"
    )
    disable_allgather: bool = unused(False, "new weights are always all-gathered, bucket by bucket")
    comms_logger: Free | None = unused(None, "the groups in engine.optimizer.team.groups count sent bytes")
    dump_state: bool = unused(False, "load_config() returns an object that can be printed")
    memory_breakdown: bool = unused(False, "torch.cuda.memory_summary() shows the use of memory")
    log_level: str | None = unused(None, "log levels are set with Python's logging")
    timers: Free | None = unused(None, "wall_clock_breakdown prints the times of the parts of a step")
    disable_python_gc: bool = unused(False, "Python's garbage collector always stays on")
    zero_allow_untested_optimizer: bool = unused(False, "any torch.optim.Optimizer is allowed")
    zero_force_ds_cpu_optimizer: bool = unused(True, "any torch.optim.Optimizer can run on the host")
    vocabulary_size: Positive | None = unused(None, "the model determines the size of its vocabulary")
    aio: Aio = section(Aio, "reads and writes of the optimizer state on a disk")

    gradient_predivide_factor: Above = honoured(
        1.0,
        "without prescale_gradients: divide gradients by this factor before the sum, and by (ranks / factor) after it",
    )
    sparse_gradients: bool = refused(False, "use dense gradients: build embeddings with sparse=False")
    data_parallel_size: Positive | None = honoured(None, "expected number of model copies; another number is an error")
    sequence_parallel_size: Positive | None = honoured(
        None, "number of ranks that share each sequence (sequence parallelism); null: 1"
    )
    sequence_mode: Literal["ulysses", "ring"] = ours(
        "ulysses", "communication of sequence ranks: exchange heads for tokens, or send keys around a ring"
    )
    expert_parallel_size: Positive = ours(
        1, "number of ranks that have all experts together (expert parallelism); 1: each rank has all experts"
    )
    use_data_before_expert_parallelism: bool = refused(
        False, "leave it out: with expert_parallel_size, neighbouring ranks have all experts together"
    )
    expert_parallel: Free | None = refused(None, "use expert_parallel_size", switch=is_on)
    amp: Free | None = refused(None, "use bf16, fp16 or torch_autocast: Apex is not supported", switch=is_on)
    graph_harvesting: bool = refused(False, "use torch.compile or CUDA graphs in the model")
    elasticity: Free | None = refused(None, "set train_batch_size and train_micro_batch_size_per_gpu", switch=is_on)
    autotuning: Free | None = refused(None, "set the batch sizes: `twinflow plan` shows what fits", switch=is_on)
    curriculum_learning: Free | None = refused(None, "order the samples in your data loader", switch=is_on)
    data_efficiency: Free | None = refused(None, "choose the samples in your data loader", switch=is_on)
    progressive_layer_drop: Free | None = refused(None, "drop layers in the model's forward", switch=is_on)
    eigenvalue: Free | None = refused(None, "quantize with another library, such as torchao", switch=is_on)
    quantize_training: Free | None = refused(None, "quantize with another library, such as torchao", switch=is_on)
    weight_quantization: Free | None = refused(None, "quantize with another library, such as torchao", switch=is_given)
    compression_training: Free | None = refused(None, "compress with another library, such as torchao", switch=is_on)
    hybrid_engine: Free | None = refused(None, "leave it out, and generate with an inference engine", switch=is_on)
    nebula: Free | None = refused(None, "leave it out: checkpoints are written to a folder", switch=is_on)
    datastates: Free | None = refused(None, "leave it out: checkpoints are written to a folder", switch=is_given)
    datastates_ckpt: Free | None = refused(None, "leave it out: checkpoints are written to a folder", switch=is_given)

    @property
    def states(self) -> str:
        """The format of the optimizer state."""
        offload = self.zero_optimization.offload_optimizer
        if offload is None or "states" not in offload.model_fields_set:
            return "bf16" if self.bf16.bf16_optimizer_states else "fp32"
        return offload.states

    _renamed: tuple[str, ...] = PrivateAttr(())  # notes on old names of keys, for `notes`


@dataclass(frozen=True)
class Rename:
    """An old or alternative name of a key."""

    old: KeyPath
    new: KeyPath
    note: bool = True  # Whether `notes` reports the renaming. Plain aliases are not reported.
    convert: Callable[[KeyPath, Any], Any] | None = None  # Converts the value. If it returns None, the key is not set.


def _offload(path: KeyPath, value: Any) -> Any:
    if not isinstance(value, bool):
        raise invalid_value(dotted(path), value, "true or false")
    return {"device": "cpu"} if value else None


ZERO: Final = "zero_optimization"
_BARE: Final = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
RENAMES: Final = (
    Rename(("bfloat16",), ("bf16",), note=False),
    Rename(("allgather_size",), (ZERO, "allgather_bucket_size")),
    Rename(("offload_optimizer",), (ZERO, "offload_optimizer")),
    Rename(("offload_param",), (ZERO, "offload_param")),
    Rename(("aio", "thread_count"), ("aio", "intra_op_parallelism")),
    Rename((ZERO, "cpu_offload"), (ZERO, "offload_optimizer"), convert=_offload),
    Rename((ZERO, "cpu_offload_param"), (ZERO, "offload_param"), convert=_offload),
    Rename((ZERO, "stage3_gather_fp16_weights_on_model_save"), (ZERO, "stage3_gather_16bit_weights_on_model_save")),
    *(Rename((ZERO, name), (ZERO, f"stage3_{name}"), note=False) for name in _BARE),
    Rename(("tensor_parallel", "tensor_parallel"), ("tensor_parallel", "tp"), note=False),
    Rename(("tensor_parallel", "kernel_inject"), ("tensor_parallel", "replace_with_kernel_inject"), note=False),
)


@dataclass(frozen=True)
class Key:
    """A key of the config with its declaration."""

    path: KeyPath
    rule: Rule
    default: Any
    allowed: str  # in words


def keys(model: type[Section] = Config, at: KeyPath = ()) -> Iterator[Key]:
    """All keys below a section, in the order of declaration."""
    for name, info in model.model_fields.items():
        inner, rule = section_of(info.annotation), rule_of(info)
        if inner is not None:
            yield from keys(inner, (*at, name))
        elif rule is not None:
            default = "must be given" if info.is_required() else info.get_default(call_default_factory=False)
            yield Key((*at, name), rule, default, in_words(info.annotation, info.metadata))


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the config for editors, with type, default and treatment (honoured, no effect, refused) of each
    key."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "twinflow config"
    sections: dict[KeyPath, dict[str, Any]] = {
        (): schema,
        ("zero_optimization",): schema["$defs"]["ZeroOptimization"],
        ("tensor_parallel",): schema["$defs"]["TensorParallel"],
        ("aio",): schema["$defs"]["Aio"],
    }
    for part in (schema, *schema["$defs"].values()):
        part["properties"] = {name: _or_auto(key) for name, key in part["properties"].items()}
    for rename in RENAMES:
        text = f"Alternative name of {dotted(rename.new)}"
        sections[rename.old[:-1]]["properties"][rename.old[-1]] = {"description": text, "deprecated": True}
    for name, options in (("Optimizer", OPTIMIZERS), ("Scheduler", SCHEDULES)):
        schema["$defs"][name]["properties"]["params"]["properties"] = _options(options)
    return schema


def _or_auto(key: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key, extended by the value "auto"."""
    about = {name: value for name, value in key.items() if name in ("title", "description", "default", "x-twinflow")}
    values = {name: value for name, value in key.items() if name not in about}
    if not values:  # The key allows any value.
        return key
    return {
        **about,
        "anyOf": [*values["anyOf"], {"const": "auto"}] if list(values) == ["anyOf"] else [values, {"const": "auto"}],
    }


def _options(sections: Mapping[str, type[Section]]) -> dict[str, Any]:
    """The JSON Schema of the options of all types. Only the loader checks which options belong to which type."""
    found: dict[str, Any] = {}
    for kind in sections.values():
        for name, info in kind.model_fields.items():
            found.setdefault(name, {"description": info.description})
    return found
