"""The whole config as a typed, frozen model. Attributes have the names and defaults of DeepSpeed's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PrivateAttr

from twinflow.config.attention import SparseAttention
from twinflow.config.fields import (
    Above,
    Allowed,
    Amount,
    AnyWhole,
    AutocastDtype,
    Dtype,
    Every,
    Free,
    Names,
    Positive,
    Power,
    Section,
    Tags,
    Whole,
    honoured,
    is_given,
    is_on,
    maybe_section,
    needed,
    refused,
    section,
    unused,
)
from twinflow.config.parallel import Pipeline, TensorParallel
from twinflow.config.zero import ZeroOptimization

_TURNS_ON = "; like every true key of this section, it turns checkpointing on"
_COMET = "use tensorboard, csv_monitor or wandb: Comet is not supported"
_COMET_OFF = "Comet is not supported"
_COMPILE = "DeepCompile is not supported"
_WRITER = "there is only one format and one writer of checkpoints"


OptimizerName = Annotated[str, Allowed("the name of an update rule, such as adamw, or of a torch.optim class")]
ScheduleName = Annotated[
    str,
    Allowed("LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler"),
]


class Fp16(Section):
    """`fp16`: train in fp16 with a loss scale."""

    enabled: bool = honoured(False, "weights and gradients in fp16, with a loss scale")
    auto_cast: bool = honoured(False, "cast floating-point inputs of the model to fp16")
    loss_scale: Amount = honoured(0.0, "a fixed loss scale; 0: dynamic")
    initial_scale_power: Power = honoured(16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: Positive = honoured(
        1000, "number of consecutive steps without overflow before the scale doubles"
    )
    hysteresis: Positive = honoured(2, "number of overflows before the scale is halved")
    consecutive_hysteresis: bool = honoured(False, "every step without overflow resets the hysteresis")
    min_loss_scale: Above = honoured(1.0, "the dynamic scale never falls below this")
    fp16_master_weights_and_grads: bool = refused(
        False, 'use offload_optimizer.states "bf16" or "int8" for a smaller state: master weights are fp32'
    )


class Bf16(Section):
    """`bf16`: train in bf16."""

    enabled: bool = honoured(False, "weights and gradients in bf16")
    immediate_grad_update: bool = unused(False, "a gradient leaves the GPU as soon as it is complete")
    check_grad_overflow: bool = honoured(True, "skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: bool = refused(
        False, 'use offload_optimizer.states "bf16", which splits the fp32 master without loss'
    )
    bf16_optimizer_states: bool = refused(False, 'use offload_optimizer.states "bf16" or "int8"')


class TorchAutocast(Section):
    """`torch_autocast`: run the forward under torch.autocast."""

    enabled: bool = honoured(False, "run the forward under torch.autocast")
    dtype: AutocastDtype | None = honoured(None, "bfloat16 or float16; must be given if enabled is true")
    lower_precision_safe_modules: Names | None = unused(
        None, "communication_data_type sets the dtype in which gradients are sent"
    )


class Optimizer(Section):
    """`optimizer`: the update rule and its options."""

    type: OptimizerName = needed("the update rule; names of twinflow's rules may be in upper or lower case")
    params: Free = honoured({}, "options of the optimizer")
    legacy_fusion: bool = unused(False, "it is an option of LAMB, which is not supported")


class Scheduler(Section):
    """`scheduler`: the schedule of the learning rate."""

    type: ScheduleName = needed("the schedule; its name may be in upper or lower case")
    params: Free = honoured({}, "options of the schedule")


class DataTypes(Section):
    """`data_types`: dtypes besides those of the weights."""

    grad_accum_dtype: Dtype | None = unused(
        None, "gradients of several micro-batches are summed in fp32", quiet=(None, "fp32")
    )
    param_dtype: Dtype | None = refused(None, "use bf16.enabled or fp16.enabled")
    buffer_dtype: Dtype | None = refused(None, "convert the model's buffers before initialize()")
    keep_in_fp32_modules: Names | None = refused(None, "convert these modules before initialize()")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: active if a key is true or `layers` is given."""

    partition_activations: bool = honoured(False, "checkpoint; partition the saved inputs over tensor ranks")
    cpu_checkpointing: bool = honoured(False, "checkpoint; keep the inputs of the layers on the host until backward")
    contiguous_memory_optimization: bool = unused(False, "buffers on the host are pooled and reused" + _TURNS_ON)
    number_checkpoints: Positive | None = unused(
        None, "it sets the size of the buffer of contiguous_memory_optimization, which is not needed"
    )
    synchronize_checkpoint_boundary: bool = unused(False, "no layer needs a synchronization with the GPU" + _TURNS_ON)
    profile: bool = unused(False, "wall_clock_breakdown and flops_profiler measure the time of a step" + _TURNS_ON)
    layers: Names | None = honoured(
        None, "checkpoint; class names of the layers; null: the model's blocks (members of its ModuleLists)", ours=True
    )

    @property
    def is_asked_for(self) -> bool:
        return self.layers is not None or any(
            value is True for value in (getattr(self, name) for name in type(self).model_fields)
        )


class ParallelWrite(Section):
    """`checkpoint.parallel_write`: which ranks write a checkpoint."""

    pipeline_stage: bool = unused(False, "every rank always writes the state that only it has")


class Checkpoint(Section):
    """`checkpoint`: how checkpoints are written."""

    tag_validation: Tags = unused("Warn", "different tags on different ranks are always an error")
    load_universal: bool = refused(False, "leave it out: a checkpoint of twinflow loads with any number of ranks")
    use_node_local_storage: bool = unused(False, "all ranks write to one folder on a shared file system")
    parallel_write: ParallelWrite = section(ParallelWrite, "which ranks write; its keys have no effect")
    checkpoint_serialization: bool = unused(True, _WRITER)
    writer: Free | None = unused(None, _WRITER)
    keep_last: Positive | None = honoured(None, "number of checkpoints to keep; null: all", ours=True)
    background: bool = honoured(False, "write checkpoints in the background during the next steps", ours=True)
    background_bytes: Whole | None = honoured(
        None,
        "host memory of a rank for copies of state that is updated before it is written; null: a quarter of the free "
        "memory",
        ours=True,
    )


class Files(Section):
    """`tensorboard` and `csv_monitor`: files with metrics."""

    enabled: bool = honoured(False, "write metrics")
    output_path: str = honoured("", "folder to write in")
    job_name: str = honoured("DeepSpeedJobName", "folder inside output_path")


class Wandb(Section):
    """`wandb`: metrics for Weights & Biases."""

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


class CompileSection(Section):
    """`compile`: DeepCompile, which is not supported."""

    deepcompile: bool = refused(False, "compile the model's blocks with torch.compile before initialize()")
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
    managed_gradient_accumulation: bool = refused(
        True, "set gradient_accumulation_steps: the engine counts micro-batches itself"
    )
    steps_per_print: Every = honoured(None, "number of steps between two lines of progress")
    hang_timeout_s: Amount = honoured(
        600.0, "seconds without a step after which all ranks print their stacks and end; 0: never", ours=True
    )
    gradient_clipping: Amount = honoured(1.0, "largest global norm of the gradients; 0: no clipping")
    wall_clock_breakdown: bool = honoured(False, "print the times of the parts of a step")
    dataloader_drop_last: bool = honoured(False, "drop the last batch if it is not full")

    fp16: Fp16 = section(Fp16, "train in fp16")
    bf16: Bf16 = section(Bf16, "train in bf16")
    torch_autocast: TorchAutocast = section(TorchAutocast, "run the forward under torch.autocast")
    data_types: DataTypes = section(DataTypes, "dtypes besides those of the weights")
    optimizer: Optimizer | None = maybe_section("the update rule")
    scheduler: Scheduler | None = maybe_section("the schedule of the learning rate")
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "ZeRO stage and offload to the host")
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing, "recomputed activations")
    sparse_attention: SparseAttention | None = maybe_section("the sparsity pattern of the attention layers")
    checkpoint: Checkpoint = section(Checkpoint, "how checkpoints are written")
    tensorboard: Files = section(Files, "metrics as TensorBoard files")
    csv_monitor: Files = section(Files, "metrics as CSV files")
    wandb: Wandb = section(Wandb, "metrics for Weights & Biases")
    comet: Comet = section(Comet, "metrics for Comet, which must be off")
    flops_profiler: FlopsProfiler = section(FlopsProfiler, "FLOPs of one step")
    pipeline: Pipeline = section(Pipeline, "pipeline parallelism")
    tensor_parallel: TensorParallel = section(TensorParallel, "tensor parallelism")
    compile: CompileSection = section(CompileSection, "DeepCompile, which must be off")

    prescale_gradients: bool = honoured(False, "divide gradients by the number of ranks before the sum, not after it")
    gradient_allreduce_op: Literal["mean", "sum"] = honoured("mean", "reduction of the gradients over ranks")
    communication_data_type: Dtype | None = honoured(
        None, "dtype in which gradients are reduced over ranks; null: the dtype of the gradients"
    )
    seq_parallel_communication_data_type: Dtype = unused("fp32", "DeepSpeed's sequence parallelism is not supported")
    disable_allgather: bool = unused(False, "new weights are always all-gathered, bucket by bucket")
    comms_logger: Free | None = unused(None, "optimizer.team.groups count the bytes that they send")
    dump_state: bool = unused(False, "the config can be printed as an object")
    memory_breakdown: bool = unused(False, "torch.cuda.memory_summary() shows the use of memory")
    log_level: str | None = unused(None, "log levels are set with Python's logging")
    timers: Free | None = unused(None, "wall_clock_breakdown turns timing on")
    disable_python_gc: bool = unused(False, "Python's garbage collector always stays on")
    zero_allow_untested_optimizer: bool = unused(False, "any torch.optim.Optimizer is allowed")
    zero_force_ds_cpu_optimizer: bool = unused(True, "any torch.optim.Optimizer runs on the host")
    vocabulary_size: Positive | None = unused(None, "the model determines the size of its vocabulary")
    aio: Free | None = unused(None, "twinflow does not use NVMe")

    gradient_predivide_factor: Above = honoured(
        1.0,
        "without prescale_gradients: the divisor of the gradients before the sum; the rest of the division follows it",
    )
    sparse_gradients: bool = refused(False, "use dense gradients: build embeddings with sparse=False")
    data_parallel_size: Positive | None = honoured(
        None, "number of replicas of the model; an error if it is not the actual number"
    )
    sequence_parallel_size: Positive | None = refused(
        None, "leave it at 1: DeepSpeed's sequence parallelism is not supported", off=(1,)
    )
    use_data_before_expert_parallelism: bool = refused(False, "leave it out: expert parallelism is not supported")
    expert_parallel: Free | None = refused(None, "leave it out: expert parallelism is not supported", switch=is_on)
    amp: Free | None = refused(None, "use bf16, fp16 or torch_autocast: Apex is not supported", switch=is_on)
    graph_harvesting: bool = refused(False, "use torch.compile or CUDA graphs in the model")
    elasticity: Free | None = refused(None, "set train_batch_size and train_micro_batch_size_per_gpu", switch=is_on)
    autotuning: Free | None = refused(
        None, "set the batch sizes: twinflow chooses the other settings when training starts", switch=is_on
    )
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

    _renamed: tuple[str, ...] = PrivateAttr(())  # notes on old names of keys, for `notes`
