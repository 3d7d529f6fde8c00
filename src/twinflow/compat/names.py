# SPDX-License-Identifier: Apache-2.0
"""The table of DeepSpeed's names: the implementation of each available name, and a remedy for each unavailable one.

The keys are modules, the values are the names in a module. An unavailable module is a name in its parent module.
docs/compat.md shows this table (`python docs/tables.py` writes it), and a test compares the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from twinflow.compat.internals import INTERNAL

VERSION: Final = "0.19.8"  # The version of DeepSpeed whose names these are.
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.split("."))
ORIGIN: Final = "twinflow"  # instead of the commit from which DeepSpeed was built


class Ours(NamedTuple):
    """An available name. `target`: its implementation, as `module:name`."""

    target: str
    note: str = ""

    def resolve(self) -> Any:
        module, _, name = self.target.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


class Refused(NamedTuple):
    """An unavailable name. `remedy`: a sentence without its full stop."""

    remedy: str


class Through(NamedTuple):
    """Entry "*" of a module: names that the table does not list are looked up in another `module`."""

    module: str


Entry = Ours | Refused | Through


def _ours(module: str, names: str = "", note: str = "", **others: str) -> dict[str, Entry]:
    """Entries for `names` (separated by spaces) of `module`. `others` maps names of DeepSpeed to names in `module`."""
    found = {name: name for name in names.split()} | others
    return {name: Ours(f"{module}:{target}", note) for name, target in found.items()}


def _refused(remedy: str, names: str) -> dict[str, Entry]:
    return {name: Refused(remedy) for name in names.split()}


_OF = "twinflow.compat."
_INTERNAL = "Leave it out: it is an internal part of DeepSpeed"
_NO_GROUPS = "Use engine.dp_rank, engine.world_size and deepspeed.comm: initialize() creates the process groups"
_NO_BUILD = "Leave the builder out: the kernels are part of twinflow"
_NO_INFERENCE = "Use an inference library with the files that `twinflow export` writes: twinflow is for training only"
_NO_MOE = "Use experts of transformers, which expert_parallel_size in the config divides over ranks"
_NO_FUSED_LAYER = "Use torch.nn.TransformerEncoderLayer, or your own layers with scaled_dot_product_attention"
_NO_SEQUENCE = "Set sequence_parallel_size in the config (docs/long-sequences.md)"
_PROFILE = "Set flops_profiler in the config"
_ONEBIT = "optimizer.type OneBitAdam (docs/onebit.md)"

_SAFE = _ours(
    _OF + "zero",
    "safe_get_full_fp32_param safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_optimizer_state "
    "safe_get_full_grad safe_set_full_grad safe_get_local_fp32_param safe_get_local_optimizer_state "
    "safe_get_local_grad safe_set_local_fp32_param safe_set_local_optimizer_state safe_set_local_grad",
) | {"safe_update_full_grad_vectorized": Refused("Call safe_set_full_grad() for each parameter")}
_ZERO_NAMES = _ours(_OF + "zero", "GatheredParameters Init ZeroParamStatus ZeroParamType register_external_parameter")
_ESTIMATES = "estimate_{0} estimate_{0}_all_cold estimate_{0}_all_live"
_NOT_THEIRS = "estimates for twinflow, not for DeepSpeed"
_LEAVES = _ours(
    _OF + "utils",
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    note="they mark nothing: blocks are always gathered whole",
)
_PIPE_NAMES = _ours("twinflow.parallel.specs", "LayerSpec TiedLayerSpec") | {
    "PipelineModule": Ours(
        _OF + "pipe:PipelineModule", "the seed of a LayerSpec's layer is base_seed plus the index of the layer"
    )
}
_ENGINE: dict[str, Entry] = {
    "DeepSpeedEngine": Ours("twinflow.engine:Engine", "not an nn.Module, but engine.module is one")
}

_PUBLIC: dict[str, dict[str, Entry]] = {
    "": _ours(_OF + "start", "init_distributed initialize tp_model_init TORCH_DISTRIBUTED_DEFAULT_PORT")
    | _ours("twinflow.build", "add_config_arguments", add_core_arguments="add_config_arguments")
    | _ours(_OF + "names", __version__="VERSION", version="VERSION")
    | _ours(_OF + "names", __git_hash__="ORIGIN", __git_branch__="ORIGIN", git_hash="ORIGIN", git_branch="ORIGIN")
    | _ours(_OF + "names", __version_major__="MAJOR", __version_minor__="MINOR", __version_patch__="PATCH")
    | _ENGINE
    | _ours("twinflow.engine.pipeline", "PipelineEngine")
    | _ours(_OF + "pipe", "PipelineModule")
    | _ours(_OF + "start", "DeepSpeedConfig DeepSpeedConfigError")
    | _ours(_OF + "utils", "get_accelerator")
    | _ours(_OF + "utils", "OnDevice log_dist logger")
    | _ours("twinflow.engine.loader", DeepSpeedDataLoader="ResumableLoader")
    | {
        **_refused(
            _NO_INFERENCE,
            "init_inference InferenceEngine DeepSpeedHybridEngine inference model_implementations module_inject",
        ),
        "sequence": Refused(_NO_SEQUENCE),
        "compression": Refused("Quantize or prune with another library, such as torchao"),
        "autotuning": Refused("Use `twinflow plan`, which predicts memory and speed before a run"),
        "elasticity": Refused("Set train_batch_size and train_micro_batch_size_per_gpu"),
        "launcher": Refused("Use `twinflow launch --compat`, which takes a hostfile, --include and --exclude"),
        "linear": Refused("Use PEFT for LoRA: initialize() trains the parameters that require a gradient"),
        "monitor": Refused("Set tensorboard, csv_monitor or wandb in the config, and write with engine.monitor"),
        "nebula": Refused("Set checkpoint.background, which writes checkpoints during training"),
        "profiling": Refused(_PROFILE),
        **_refused(_NO_FUSED_LAYER, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
        "DualPipeVModule": Refused('Use twinflow.parallel.PipelineModule(schedule="zbv")'),
    },
    "accelerator": _ours(
        _OF + "utils", "get_accelerator is_current_accelerator_supported", DeepSpeedAccelerator="Accelerator"
    ),
    "constants": _ours(_OF + "start", "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout"),
    "moe": _refused(_NO_MOE, "ep_router ep_experts experts layer mappings sharded_moe"),
    "moe.utils": _ours(
        _OF + "groups",
        "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
        "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
        "split_params_into_shared_and_expert_params",
        note="for models without DeepSpeed's experts",
    ),
    "checkpoint": {
        "DeepSpeedCheckpoint": Refused("Use `twinflow import`, which reads DeepSpeed's checkpoints"),
    },
    "checkpoint.ds_to_universal": _ours(
        _OF + "zero", note="a copy: every checkpoint loads with any number of ranks", main="copy_as_universal"
    ),
    "checkpoint.utils": _ours(_OF + "utils", "clone_tensors_for_torch_save"),
    "comm": _ours(
        _OF + "start", "get_global_rank get_local_rank get_rank get_world_group get_world_size is_initialized"
    )
    | _ours(_OF + "start", "init_distributed")
    | _ours(
        "torch.distributed",
        allgather_fn="all_gather_into_tensor",
        get_all_ranks_from_group="get_process_group_ranks",
        inference_all_reduce="all_reduce",
        reduce_scatter_fn="reduce_scatter_tensor",
    )
    | _ours(
        _OF + "start",
        has_all_gather_into_tensor="has_collective",
        has_all_reduce_coalesced="has_collective",
        has_coalescing_manager="has_collective",
        has_reduce_scatter_tensor="has_collective",
    )
    | {
        **_refused(
            "Read sent_bytes of each group in engine.optimizer.team.groups",
            "log_summary configure get_comm_operation_count get_logged_comm_ops has_comm_data reset_log",
        ),
        "initialize_mesh_device": Refused(_NO_GROUPS),
        "*": Through("torch.distributed"),
    },
    "ops": {
        "op_builder": Refused(_NO_BUILD),
        "transformer": Refused(_NO_FUSED_LAYER),
        "fp_quantizer": Refused('Set offload_optimizer.states "int8" for a compact optimizer state'),
        "muon": Refused('Set optimizer.type to "Muon" in the config'),
        "aio": Refused("Set offload_optimizer.device nvme: twinflow reads and writes the state itself"),
    },
    "ops.adam": _ours(_OF + "optimizers", "DeepSpeedCPUAdam FusedAdam")
    | {"ZenFlowCPUAdam": Refused("Use offload_optimizer with delayed_update, whose updates run during the next step")},
    "ops.adam.cpu_adam": _ours(_OF + "optimizers", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _ours(_OF + "optimizers", "FusedAdam"),
    "ops.adagrad": _ours(_OF + "optimizers", "DeepSpeedCPUAdagrad"),
    "ops.adagrad.cpu_adagrad": _ours(_OF + "optimizers", "DeepSpeedCPUAdagrad"),
    "ops.lamb": _ours(_OF + "optimizers", "FusedLamb"),
    "ops.lamb.fused_lamb": _ours(_OF + "optimizers", "FusedLamb"),
    "ops.lion": _ours(_OF + "optimizers", "DeepSpeedCPULion FusedLion"),
    "ops.lion.cpu_lion": _ours(_OF + "optimizers", "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _ours(_OF + "optimizers", "FusedLion"),
    "ops.sparse_attention": _ours(
        "twinflow.attention",
        "BSLongformerSparsityConfig BertSparseSelfAttention BigBirdSparsityConfig DenseSparsityConfig "
        "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparseAttentionUtils SparseSelfAttention "
        "SparsityConfig VariableSparsityConfig",
    )
    | _refused(
        "Use twinflow.attention.sparse_attention(q, k, v, layout), one kernel for the whole attention", "MatMul Softmax"
    ),
    "pipe": _PIPE_NAMES,
    "runtime": {
        "domino": Refused("Use tensor_parallel.autotp_size (docs/3d.md): tensor ranks wait for their all-reduces"),
        "eigenvalue": Refused("Quantize with another library, such as torchao"),
        "hybrid_engine": Refused(_NO_INFERENCE),
        "fp16": Refused(f"Set fp16 in the config. For a 1-bit optimizer set {_ONEBIT}"),
        "swap_tensor": Refused("Set offload_optimizer.device nvme: twinflow reads and writes the state itself"),
        "zenflow": Refused("Use offload_optimizer with delayed_update, whose updates run during the next step"),
        "progressive_layer_drop": Refused("Drop layers in the model's forward"),
        "data_pipeline": Refused("Choose and order the samples in your data loader"),
    },
    "runtime.activation_checkpointing.checkpointing": _ours(
        _OF + "pipe", "checkpoint configure is_configured non_reentrant_checkpoint reset"
    )
    | {
        **_refused(
            "Leave the call out: initialize() gives tensor ranks the same random numbers",
            "get_cuda_rng_tracker model_parallel_cuda_manual_seed",
        ),
        "CheckpointFunction": Refused("Call deepspeed.checkpointing.checkpoint(function, *args)"),
    },
    "runtime.config": _ours(_OF + "start", "DeepSpeedConfig DeepSpeedConfigError"),
    "runtime.dataloader": _ours(_OF + "utils", "RepeatingLoader")
    | _ours("twinflow.engine.loader", DeepSpeedDataLoader="ResumableLoader"),
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": _ours(
        "twinflow.optim.schedules",
        "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
        VALID_LR_SCHEDULES="SCHEDULES",
    )
    | {"add_tuning_arguments": Refused("Set scheduler in the config")},
    "runtime.pipe": _PIPE_NAMES | _ours("twinflow.parallel.topology", "ProcessTopology"),
    "runtime.pipe.engine": _ours("twinflow.engine.pipeline", "PipelineEngine"),
    "runtime.pipe.module": _PIPE_NAMES,
    "runtime.pipe.schedule": _ours(
        _OF + "pipe",
        "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch "
        "OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads "
        "SendActivation SendGrad TrainSchedule",
        note="only for inspection: the engine runs twinflow.parallel.schedules",
    ),
    "runtime.pipe.topology": _ours(
        "twinflow.parallel.topology", "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology"
    )
    | {"PipelineParallelGrid": Refused(_NO_GROUPS)},
    "runtime.sequence_parallel": {"ulysses_sp": Refused(_NO_SEQUENCE)},
    "runtime.sequence_parallel.parallel_state_sp": _ours(
        _OF + "groups",
        "get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size "
        "get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size",
    )
    | {"initialize_sequence_parallel": Refused(_NO_SEQUENCE)},
    "runtime.utils": _ours(
        _OF + "utils",
        "ensure_directory_exists move_to_device noop_decorator partition_balanced partition_uniform see_memory_usage "
        "set_random_seed",
    )
    | {"clip_grad_norm_": Refused("Set gradient_clipping in the config")},
    "runtime.zero": _ZERO_NAMES
    | _ours(_OF + "zero", "unwrap_model_for_generation")
    | {
        **_refused("Use nn.Linear: weights are gathered block by block", "TiledLinear TiledLinearReturnBias"),
        "MiCS_Init": Refused("Use deepspeed.zero.Init, or no context: stage 3 partitions over all ranks"),
    },
    "runtime.zero.config": _ours(_OF + "start", "ZeroStageEnum get_zero_config")
    | _ours("twinflow.config.schema", DeepSpeedZeroConfig="ZeroOptimization"),
    "runtime.zero.offload_config": _ours(_OF + "start", "OffloadDeviceEnum OffloadStateTypeEnum")
    | _ours(
        "twinflow.config.schema",
        DeepSpeedZeroOffloadOptimizerConfig="OffloadOptimizer",
        DeepSpeedZeroOffloadParamConfig="OffloadParam",
    ),
    "runtime.zero.partition_parameters": _ZERO_NAMES | _ours(_OF + "zero", "is_zero_param"),
    "runtime.zero.utils": _ours(_OF + "zero", "is_zero_param"),
    "runtime.zero.stage3": _ours(_OF + "zero", _ESTIMATES.format("zero3_model_states_mem_needs"), _NOT_THEIRS),
    "runtime.zero.stage_1_and_2": _ours(_OF + "zero", _ESTIMATES.format("zero2_model_states_mem_needs"), _NOT_THEIRS),
    "utils": _SAFE
    | _ours(_OF + "utils", "OnDevice RepeatingLoader instrument_w_nvtx log_dist log_dist_once logger")
    # The function z3_leaf_module is only in the module of this name.
    | {name: entry for name, entry in _LEAVES.items() if name != "z3_leaf_module"}
    | {"init_distributed": Ours(_OF + "start:init_distributed")},
    "utils.groups": _ours(
        _OF + "groups",
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
        "get_model_parallel_world_size",
        get_tensor_model_parallel_rank="get_model_parallel_rank",
        get_tensor_model_parallel_world_size="get_model_parallel_world_size",
        _get_data_parallel_group="get_data_parallel_group",
        _get_data_parallel_rank="get_data_parallel_rank",
        _get_data_parallel_world_size="get_data_parallel_world_size",
        _get_model_parallel_world_size="get_model_parallel_world_size",
        _get_data_parallel_group_ranks="get_data_parallel_group_ranks",
        _get_sequence_data_parallel_group="get_sequence_data_parallel_group",
        _get_sequence_data_parallel_rank="get_sequence_data_parallel_rank",
        _get_sequence_data_parallel_world_size="get_sequence_data_parallel_world_size",
        _get_sequence_parallel_group="get_sequence_parallel_group",
        _get_sequence_parallel_rank="get_sequence_parallel_rank",
        _get_sequence_parallel_world_size="get_sequence_parallel_world_size",
    )
    | _ours(_OF + "start", _clone_world_group="get_world_group")
    | _refused(
        _NO_MOE,
        "_get_expert_broadcast_src_rank _get_expert_data_parallel_group _get_expert_data_parallel_group_dict "
        "_get_expert_data_parallel_group_ranks _get_expert_data_parallel_rank _get_expert_data_parallel_world_size "
        "_get_expert_model_parallel_world_size _get_expert_parallel_group _get_expert_parallel_group_dict "
        "_get_expert_parallel_group_ranks _get_expert_parallel_rank _get_expert_parallel_ranks "
        "_get_expert_parallel_src_rank _get_expert_parallel_world_size _get_local_all_to_all_group "
        "_get_max_expert_parallel_group _get_max_expert_size _get_max_expert_size_name",
    )
    | _refused(
        _NO_GROUPS,
        "initialize get_model_parallel_group get_tensor_model_parallel_group get_tensor_model_parallel_src_rank "
        "set_tensor_model_parallel_rank set_tensor_model_parallel_world_size expert_tensor_parallel_world_size",
    ),
    "utils.init_on_device": _ours(_OF + "utils", "OnDevice"),
    "utils.logging": _ours(_OF + "utils", "log_dist log_dist_once logger"),
    "utils.nvtx": _ours(_OF + "utils", "instrument_w_nvtx"),
    "utils.z3_leaf_module": _LEAVES,
    "utils.tensor_fragment": _SAFE,
    "utils.zero_to_fp32": _ours(
        _OF + "zero",
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint",
        note="for checkpoints that the engine of twinflow saved",
    ),
}

TABLE: Final[Mapping[str, Mapping[str, Entry]]] = {
    path: {**_refused(_INTERNAL, INTERNAL.get(path, "")), **_PUBLIC.get(path, {})} for path in {**_PUBLIC, **INTERNAL}
}

# Modules with two paths: alias -> path in the table.
ALIASES: Final[Mapping[str, str]] = {
    "zero": "runtime.zero",
    "dist": "comm",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "comm.comm": "comm",
    "accelerator.real_accelerator": "accelerator",
}
