"""The table: every name of DeepSpeed that there is here, what it stands for, and what to use for those that are not.

A module is a key, with the names in it; a module that is refused is a name in the module above. docs/compat.md shows
this table (`python -m twinflow.compat.table` prints it), and a test compares the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

VERSION: Final = "0.19.8"  # of DeepSpeed, whose names these are


class Ours(NamedTuple):
    """A name that there is: `module:name` of what it stands for."""

    target: str
    note: str = ""

    def resolve(self) -> Any:
        """The thing itself."""
        module, _, name = self.target.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


class Refused(NamedTuple):
    """A name that is not there."""

    remedy: str


class Through(NamedTuple):
    """All other names are those of another module."""

    module: str


Entry = Ours | Refused | Through


def _ours(module: str, *names: str, note: str = "", **others: str) -> dict[str, Entry]:
    """Names that are the same there, and some that are not."""
    found = {name: name for name in names} | others
    return {name: Ours(f"{module}:{target}", note) for name, target in found.items()}


_OF = "twinflow.compat."
_NO_GROUPS = "initialize() makes the groups of ranks; engine.dp_rank, engine.world_size and deepspeed.comm tell of them"
_NO_BUILD = "kernels come with twinflow, there is nothing to build: leave the builder out"
_NO_INFERENCE = "twinflow trains; serve with a library made for it, from files that `twinflow export` writes"
_NO_MOE = "there is no expert parallelism: leave it out, and experts train like any other layer"
_NO_FUSED_LAYER = "use torch.nn.TransformerEncoderLayer, or layers of your own with scaled_dot_product_attention"
_NO_SEQUENCE = "there is no sequence parallelism of DeepSpeed's kind; see tensor_parallel.sequence in docs/3d.md"
_LOCAL = "ranks' parts are twinflow's own affair: use the function with full in its name"
_NO_SET_GRAD = "the norm is taken as gradients pass by: change them in param.register_hook(), before initialize()"
_PROFILE = "set flops_profiler in the config"
_ONEBIT = "in the config: optimizer.type OneBitAdam, whose parameters are in docs/onebit.md"
_UNIVERSAL = "checkpoints load with any number of ranks: leave the conversion out"

_SAFE = _ours(
    _OF + "fragments",
    "safe_get_full_fp32_param",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_optimizer_state",
) | {
    "safe_get_full_grad": Ours(_OF + "fragments:safe_get_full_grad", "on one rank, after a step's last backward"),
    "safe_set_full_grad": Refused(_NO_SET_GRAD),
    "safe_update_full_grad_vectorized": Refused(_NO_SET_GRAD),
    **{
        f"safe_{verb}_local_{what}": Refused(_LOCAL)
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
    },
}
_ZERO_NAMES = _ours(_OF + "zero", "GatheredParameters", "Init", "register_external_parameter")
_STAGE_2 = ("estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold")
_STAGE_3 = ("estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold")
_PIPE_NAMES = _ours("twinflow.parallel.specs", "LayerSpec", "TiedLayerSpec") | {
    "PipelineModule": Ours(_OF + "pipe:PipelineModule", "a layer of a spec is made from base_seed and its number")
}
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_ENGINE: dict[str, Entry] = {"DeepSpeedEngine": Ours("twinflow.engine:Engine", "not an nn.Module: its module is")}

TABLE: Final[Mapping[str, Mapping[str, Entry]]] = {
    "": _ours(_OF + "start", "add_config_arguments", "init_distributed", "initialize", "tp_model_init")
    | _ours(_OF + "names", __version__="VERSION", version="VERSION")
    | _ENGINE
    | _ours("twinflow.engine.pipeline", "PipelineEngine")
    | _ours(_OF + "pipe", "PipelineModule")
    | _ours(_OF + "ds_config", "DeepSpeedConfig", "DeepSpeedConfigError")
    | _ours(_OF + "accelerator", "get_accelerator")
    | _ours(_OF + "utils", "OnDevice", "log_dist", "logger")
    | _ours("twinflow.engine.loader", DeepSpeedDataLoader="ResumableLoader")
    | {
        "init_inference": Refused(_NO_INFERENCE),
        "InferenceEngine": Refused(_NO_INFERENCE),
        "DeepSpeedHybridEngine": Refused(_NO_INFERENCE),
        "inference": Refused(_NO_INFERENCE),
        "model_implementations": Refused(_NO_INFERENCE),
        "module_inject": Refused(_NO_INFERENCE),
        "moe": Refused(_NO_MOE),
        "sequence": Refused(_NO_SEQUENCE),
        "compression": Refused("quantize or prune with a library made for it, such as torchao"),
        "autotuning": Refused("`twinflow plan` says what fits and how fast it is before anything runs"),
        "elasticity": Refused("set train_batch_size and train_micro_batch_size_per_gpu"),
        "launcher": Refused("use `twinflow launch --compat`, which takes a hostfile and --include and --exclude"),
        "linear": Refused("use PEFT for LoRA: initialize() trains what requires a gradient"),
        "monitor": Refused("set tensorboard, csv_monitor or wandb in the config, and write with engine.monitor"),
        "nebula": Refused("checkpoint.background writes checkpoints beside training"),
        "profiling": Refused(_PROFILE),
        "DeepSpeedTransformerLayer": Refused(_NO_FUSED_LAYER),
        "DeepSpeedTransformerConfig": Refused(_NO_FUSED_LAYER),
        "DualPipeVModule": Refused('use twinflow.parallel.PipelineModule(schedule="zbv")'),
    },
    "accelerator": _ours(_OF + "accelerator", "get_accelerator"),
    "checkpoint": {
        "ds_to_universal": Refused(_UNIVERSAL),
        "DeepSpeedCheckpoint": Refused("`twinflow import` reads checkpoints of DeepSpeed's"),
    },
    "checkpoint.utils": _ours(_OF + "utils", "clone_tensors_for_torch_save"),
    "comm": _ours(
        _OF + "comm",
        "get_global_rank",
        "get_local_rank",
        "get_rank",
        "get_world_group",
        "get_world_size",
        "is_initialized",
    )
    | _ours(_OF + "start", "init_distributed")
    | {
        "log_summary": Refused("engine.optimizer.team.groups count the bytes that they send"),
        "configure": Refused("engine.optimizer.team.groups count the bytes that they send"),
        "*": Through("torch.distributed"),
    },
    "ops": {
        "op_builder": Refused(_NO_BUILD),
        "transformer": Refused(_NO_FUSED_LAYER),
        "fp_quantizer": Refused('offload_optimizer.states "int8" is the compact state of twinflow'),
        "lamb": Refused("there is no LAMB: use AdamW, or twinflow.optim.onebit.OneBitLamb in a loop of your own"),
        "muon": Refused("pass a Muon of your own to initialize(): any torch optimizer runs on the host"),
        "aio": Refused("nothing goes to NVMe: offload to the host's memory"),
    },
    "ops.adam": _ours(_OF + "optimizers", "DeepSpeedCPUAdam", "FusedAdam")
    | {"ZenFlowCPUAdam": Refused("offload_optimizer with delayed_update also hides the whole update")},
    "ops.adam.cpu_adam": _ours(_OF + "optimizers", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _ours(_OF + "optimizers", "FusedAdam"),
    "ops.adagrad": _ours(_OF + "optimizers", "DeepSpeedCPUAdagrad"),
    "ops.adagrad.cpu_adagrad": _ours(_OF + "optimizers", "DeepSpeedCPUAdagrad"),
    "ops.lion": _ours(_OF + "optimizers", "DeepSpeedCPULion", "FusedLion"),
    "ops.lion.cpu_lion": _ours(_OF + "optimizers", "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _ours(_OF + "optimizers", "FusedLion"),
    "ops.sparse_attention": _ours(
        "twinflow.attention",
        "BSLongformerSparsityConfig",
        "BertSparseSelfAttention",
        "BigBirdSparsityConfig",
        "DenseSparsityConfig",
        "FixedSparsityConfig",
        "LocalSlidingWindowSparsityConfig",
        "SparseAttentionUtils",
        "SparseSelfAttention",
        "SparsityConfig",
        "VariableSparsityConfig",
    )
    | {
        "MatMul": Refused("use twinflow.attention.sparse_attention(q, k, v, layout), one kernel for all of it"),
        "Softmax": Refused("use twinflow.attention.sparse_attention(q, k, v, layout), one kernel for all of it"),
    },
    "pipe": _PIPE_NAMES,
    "runtime": {
        "domino": Refused("tensor_parallel.sequence overlaps what tensor ranks send; see docs/3d.md"),
        "eigenvalue": Refused("quantize with a library made for it, such as torchao"),
        "hybrid_engine": Refused(_NO_INFERENCE),
        "sequence_parallel": Refused(_NO_SEQUENCE),
        "fp16": Refused(f"fp16 is in the config; 1-bit optimizers, {_ONEBIT}"),
        "swap_tensor": Refused("nothing goes to NVMe: offload to the host's memory"),
        "zenflow": Refused("offload_optimizer with delayed_update also hides the whole update"),
        "progressive_layer_drop": Refused("drop layers in the model's forward"),
        "data_pipeline": Refused("choose and order the samples in your data loader"),
    },
    "runtime.activation_checkpointing.checkpointing": _ours(
        _OF + "checkpointing", "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"
    )
    | {
        "get_cuda_rng_tracker": Refused("initialize() lets tensor ranks draw the same numbers"),
        "model_parallel_cuda_manual_seed": Refused("initialize() lets tensor ranks draw the same numbers"),
        "CheckpointFunction": Refused("call deepspeed.checkpointing.checkpoint(function, *args)"),
    },
    "runtime.config": _ours(_OF + "ds_config", "DeepSpeedConfig", "DeepSpeedConfigError"),
    "runtime.dataloader": _ours(_OF + "utils", "RepeatingLoader")
    | _ours("twinflow.engine.loader", DeepSpeedDataLoader="ResumableLoader"),
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": _ours("twinflow.optim.schedules", *_SCHEDULES)
    | _ours("twinflow.optim.schedules", VALID_LR_SCHEDULES="SCHEDULES")
    | {"add_tuning_arguments": Refused("set scheduler in the config")},
    "runtime.pipe": _PIPE_NAMES | _ours("twinflow.parallel.topology", "ProcessTopology"),
    "runtime.pipe.engine": _ours("twinflow.engine.pipeline", "PipelineEngine"),
    "runtime.pipe.module": _PIPE_NAMES,
    "runtime.pipe.schedule": _ours(
        _OF + "schedule",
        "BackwardPass",
        "BufferOpInstruction",
        "DataParallelSchedule",
        "ForwardPass",
        "InferenceSchedule",
        "LoadMicroBatch",
        "OptimizerStep",
        "PipeInstruction",
        "PipeSchedule",
        "RecvActivation",
        "RecvGrad",
        "ReduceGrads",
        "ReduceTiedGrads",
        "SendActivation",
        "SendGrad",
        "TrainSchedule",
        note="to look at; the engine runs twinflow.parallel.schedules",
    ),
    "runtime.pipe.topology": _ours(
        "twinflow.parallel.topology", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"
    )
    | {"PipelineParallelGrid": Refused(_NO_GROUPS)},
    "runtime.utils": _ours(
        _OF + "utils",
        "move_to_device",
        "partition_balanced",
        "partition_uniform",
        "see_memory_usage",
        "set_random_seed",
    )
    | {"clip_grad_norm_": Refused("set gradient_clipping in the config: the norm is taken as gradients pass by")},
    "runtime.zero": _ZERO_NAMES
    | _ours(_OF + "zero", "unwrap_model_for_generation")
    | {
        "TiledLinear": Refused("use nn.Linear: weights are gathered block by block"),
        "TiledLinearReturnBias": Refused("use nn.Linear: weights are gathered block by block"),
        "MiCS_Init": Refused("stage 3 partitions over all ranks: use deepspeed.zero.Init, or no context"),
    },
    "runtime.zero.config": _ours(_OF + "ds_config", "ZeroStageEnum", "get_zero_config")
    | _ours("twinflow.config.zero", DeepSpeedZeroConfig="ZeroOptimization"),
    "runtime.zero.offload_config": _ours(_OF + "ds_config", "OffloadDeviceEnum")
    | _ours(
        "twinflow.config.zero",
        DeepSpeedZeroOffloadOptimizerConfig="OffloadOptimizer",
        DeepSpeedZeroOffloadParamConfig="OffloadParam",
    ),
    "runtime.zero.partition_parameters": _ZERO_NAMES,
    "runtime.zero.stage3": _ours(
        _OF + "estimates", *_STAGE_3, _STAGE_3[0] + "_all_live", note="twinflow's own numbers"
    ),
    "runtime.zero.stage_1_and_2": _ours(
        _OF + "estimates", *_STAGE_2, _STAGE_2[0] + "_all_live", note="twinflow's own numbers"
    ),
    "utils": _SAFE
    | _ours(_OF + "utils", "OnDevice", "RepeatingLoader", "log_dist", "logger", "set_z3_leaf_modules")
    | {"groups": Refused(_NO_GROUPS), "init_distributed": Ours(_OF + "start:init_distributed")},
    "utils.logging": _ours(_OF + "utils", "log_dist", "logger"),
    "utils.tensor_fragment": _SAFE,
    "utils.zero_to_fp32": _ours(
        _OF + "zero_to_fp32",
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
        note="of checkpoints that this engine saved",
    ),
}

# Modules with a second name; the table has them under the first.
ALIASES: Final[Mapping[str, str]] = {
    "zero": "runtime.zero",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "accelerator.real_accelerator": "accelerator",
}
