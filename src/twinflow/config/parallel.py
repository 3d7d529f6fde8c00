"""The sections of pipeline and tensor parallelism."""

from __future__ import annotations

from typing import Any, Literal

from twinflow.config.fields import (
    AnyWhole,
    Free,
    Positive,
    Section,
    Whole,
    honoured,
    is_given,
    refused,
    section,
    unused,
)

_WHOLE = "tensors between stages are always sent whole"
_PLAN = "tensor_parallel.plan determines how a model is split; twinflow has plans for known models"


class Pipeline(Section):
    """`pipeline`: pipeline parallelism."""

    stages: AnyWhole | None = honoured(None, "number of pipeline stages; null, 0: those of the PipelineModule")
    partition: str = honoured(
        "best",
        "method of the partition: uniform, parameters, type:REGEX; best: parameters. A PipelineModule has its own",
    )
    seed_layers: bool = unused(False, "every layer of a PipelineModule has its own seed")
    activation_checkpoint_interval: Whole = honoured(
        0, "number of layers that are recomputed together in backward; 0: none"
    )
    pipe_partitioned: bool = unused(True, _WHOLE)
    grad_partitioned: bool = unused(True, _WHOLE)
    use_reentrant: bool = unused(True, "layers are always recomputed without reentrant backwards")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] | None = honoured(
        None, "the order of forwards and backwards; null: that of the PipelineModule, or 1f1b", ours=True
    )
    chunks: Positive | None = honoured(None, "schedule interleaved: number of stages on a rank; null: 2", ours=True)


class Tp(Section):
    """`tensor_parallel.tp`: the degree of tensor parallelism."""

    tp_size: Whole = honoured(1, "number of tensor-parallel ranks")
    tp_grain_size: Positive = unused(1, "the sizes of split tensors must be divisible by the number of ranks")
    mpu: Any = refused(None, "set only tp_size: initialize() creates the process groups", switch=is_given)
    tp_group: Any = refused(None, "set only tp_size: initialize() creates the process groups", switch=is_given)


class TensorParallel(Section):
    """`tensor_parallel`: tensor parallelism."""

    autotp_size: Whole = honoured(0, "number of tensor-parallel ranks; 0: tp.tp_size")
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
    sequence: bool = honoured(
        False, "norms and dropout between tensor-parallel layers work on parts of the sequence", ours=True
    )
    plan: Free | None = honoured(
        None,
        "how to split each module: patterns of module names to styles; null: twinflow's plan for the model",
        ours=True,
    )
