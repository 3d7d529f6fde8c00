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

_WHOLE = "what travels between stages is never cut"
_PLAN = "tensor_parallel.plan says how a model is cut; for known models it is ready"


class Pipeline(Section):
    """`pipeline`."""

    stages: AnyWhole | None = honoured(
        None, "ranks that a model's layers are spread over; null, 0: a PipelineModule's own"
    )
    partition: str = honoured(
        "best", "how layers are spread: uniform, parameters, type:REGEX; best: parameters. A PipelineModule has its own"
    )
    seed_layers: bool = unused(False, "every layer of a PipelineModule is seeded by itself")
    activation_checkpoint_interval: Whole = honoured(0, "layers that are run again together in backward; 0: none")
    pipe_partitioned: bool = unused(True, _WHOLE)
    grad_partitioned: bool = unused(True, _WHOLE)
    use_reentrant: bool = unused(True, "layers are run again without nested backwards")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] | None = honoured(
        None, "the order of forwards and backwards; null: a PipelineModule's own, or 1f1b", ours=True
    )
    chunks: Positive | None = honoured(None, "stages of a rank, with the schedule interleaved; null: 2", ours=True)


class Tp(Section):
    """`tensor_parallel.tp`."""

    tp_size: Whole = honoured(1, "ranks that share each tensor")
    tp_grain_size: Positive = unused(1, "sizes have to divide")
    mpu: Any = refused(None, "groups of ranks are made here: set tp_size alone", switch=is_given)
    tp_group: Any = refused(None, "groups of ranks are made here: set tp_size alone", switch=is_given)


class TensorParallel(Section):
    """`tensor_parallel`."""

    autotp_size: Whole = honoured(0, "ranks that share each tensor; 0: as tp.tp_size says")
    tp: Tp = section(Tp, "the same, as DeepSpeed's inference has it")
    dtype: Any = unused(None, "bf16.enabled or fp16.enabled says it")
    tp_overlap_comm: bool = unused(False, "sums between tensor ranks are waited for")
    vocab_parallel_lm_head: bool | None = unused(None, _PLAN)
    vocab_parallel_ce_backend: str = unused("torch", "there is one")
    injection_policy_tuple: Any = unused(None, _PLAN)
    partition_config: Free | None = unused(None, _PLAN)
    preset_model: str | None = unused(None, _PLAN)
    keep_module_on_host: bool = unused(False, "parts of weights are cut where the model is")
    replace_with_kernel_inject: bool = refused(False, "kernels are not injected into the model: leave it out")
    sequence: bool = honoured(
        False, "norms and dropout between tensor-parallel layers work on parts of the sequence", ours=True
    )
    plan: Free | None = honoured(
        None, "names of modules (with * in them) to how they are cut; null: the ready one for the model", ours=True
    )
