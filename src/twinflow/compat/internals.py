# SPDX-License-Identifier: Apache-2.0
"""Other names of DeepSpeed 0.19.8 in the modules of names.py: its internal parts, which have no counterpart here.

A script may import them. Their use raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INTERNAL: Final[Mapping[str, str]] = {  # module -> names, separated by spaces
    "": (
        "DeepSpeedInferenceConfig DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable "
        "DualPipeVEngine MUON_OPTIMIZER compat compile datastates default_inference_config env_report "
        "git_version_info git_version_info_installed io load_ds_config merge_tp_model_init_into_config nvme "
        "record_tp_model_init_args replace_transformer_layer resolve_per_head_muon_after_sharding set_autotp_mode "
        "set_optimizer_flags"
    ),
    "accelerator": (
        "abstract_accelerator cpu_accelerator cuda_accelerator hpu_accelerator klxpu_accelerator mlu_accelerator "
        "mps_accelerator npu_accelerator sdaa_accelerator set_accelerator supa_accelerator xpu_accelerator"
    ),
    "checkpoint": (
        "SubparamShape ZeROCheckpoint affine affine_transfer autoep_affine autoep_universal autoep_zero3_metadata "
        "constants deepspeed_checkpoint enable_universal_checkpoint get_layer_ckpt_name_for_rank "
        "get_model_3d_descriptor get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank merge_state model_3d_desc "
        "reshape_3d_utils reshape_meg_2d reshape_meg_2d_parallel reshape_utils universal_checkpoint zero_checkpoint"
    ),
    "checkpoint.utils": ("get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"),
    "comm": (
        "backend ccl config constants enable_symm_mem_for_group in_aml in_aws_sm in_dlts init_deepspeed_backend mori "
        "mpi_discovery patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend pg_utils reduce_op "
        "set_backend timed_op torch utils"
    ),
    "ops": (
        "DeepSpeedTransformerConfig DeepSpeedTransformerLayer compile csrc deepspeed4science gds pin_memory "
        "quantizer random_ltd triton_ops"
    ),
    "ops.adam": (
        "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3 multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam"
    ),
    "ops.adam.fused_adam": "multi_tensor_applier",
    "ops.lion": "multi_tensor_apply",
    "ops.lion.fused_lion": "multi_tensor_applier",
    "pipe": "DualPipeVModule",
    "runtime": (
        "base_optimizer bf16_optimizer checkpoint_engine chunked_cross_entropy comm compiler config_utils constants "
        "hybrid_engine_graph keep_in_fp32 model_checkpointing precision_config python_gc rollout sparse_tensor "
        "state_dict_factory superoffload tensor_parallel torch_autocast weight_quantizer"
    ),
    "runtime.activation_checkpointing": "config offload_activations",
    "runtime.activation_checkpointing.checkpointing": (
        "CONTIGUOUS_CHECKPOINTING CPU_CHECKPOINT CudaRNGStatesTracker PARTITION_ACTIVATIONS PROFILE_TIME "
        "SYNCHRONIZE contiguous_data_buffers contiguous_size_buffers data_offsets deepspeed_checkpointing_enabled "
        "detach_variable extract_tensors gather_partitioned_activations get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward get_partition_size get_partition_start "
        "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors "
        "model_parallel_reconfigure_tp_seed mp_group mp_rank mp_size num_layers partition_activations "
        "partition_activations_in_checkpoint restore_offloaded_activations set_num_layers size_offsets timers"
    ),
    "runtime.config": (
        "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE ADAM_W_MODE_DEFAULT DEEPSPEED_OPTIMIZERS "
        "DeepSpeedConfigWriter DtypeEnum EXPERT_PARALLEL HybridEngineConfig LAMB_OPTIMIZER LION_OPTIMIZER "
        "MUADAMW_OPTIMIZER MUADAM_OPTIMIZER MUON_OPTIMIZER MUSGD_OPTIMIZER TENSOR_CORE_ALIGN_SIZE TORCH_ADAM_PARAM "
        "get_checkpoint_parallel_write_pipeline get_checkpoint_params get_checkpoint_tag_validation_mode "
        "get_communication_data_type get_data_types_params get_dataloader_drop_last get_disable_allgather "
        "get_disable_python_gc get_dump_state get_expert_data_topo_config get_expert_parallel_config "
        "get_gradient_accumulation_steps get_gradient_allreduce_op get_gradient_clipping "
        "get_gradient_predivide_factor get_hybrid_engine_config get_log_level get_lower_precision_safe_modules "
        "get_managed_gradient_accumulation get_memory_breakdown get_optimizer_gradient_clipping "
        "get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params get_pipeline_config "
        "get_prescale_gradients get_scheduler_name get_scheduler_params get_steps_per_print "
        "get_torch_autocast_dtype get_torch_autocast_enabled get_train_batch_size "
        "get_train_micro_batch_size_per_gpu get_wall_clock_breakdown get_zero_allow_untested_optimizer "
        "get_zero_force_ds_cpu_optimizer"
    ),
    "runtime.engine": (
        "CASTABLE_DTYPES DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable EngineTimers "
        "MEMORY_OPT_ALLREDUCE_SIZE split_half_float_double_sparse"
    ),
    "runtime.lr_schedules": (
        "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR "
        "CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE "
        "EDGE_VALUE LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE "
        "LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE MID_VALUE ONE_CYCLE TOTAL_NUM_STEPS WARMUP_COSINE_LR WARMUP_DECAY_LR "
        "WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS "
        "WARMUP_TYPE get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params "
        "override_lr_range_test_params override_params override_warmupCosineLR_params override_warmupLR_params "
        "parse_arguments update_lr"
    ),
    "runtime.pipe": "dualpipev p2p",
    "runtime.pipe.engine": (
        "BATCH_INPUT_TIMER DATA_PARALLEL_ID LOG_STAGE PIPE_RECV_GRAD_TIMER PIPE_RECV_INPUT_TIMER "
        "PIPE_SEND_GRAD_TIMER PIPE_SEND_OUTPUT_TIMER TARGET_ID TENSOR_META_SIZE TRAIN_BATCH_TIMER is_even "
        "mem_alloced mem_cached"
    ),
    "runtime.pipe.module": "PipelineError",
    "runtime.pipe.schedule": "CommitP2P DualPipeVSchedule",
    "runtime.utils": (
        "CheckOverflow DummyOptim OutputBackwardHookManager PartitionedTensor TLinear align_dense_tensors "
        "all_gather_dp_groups all_gather_into_tensor_dp_groups call_to_str "
        "check_internal_apis_for_count_used_parameters clip_tensors_by_global_norm combine_grad_norm_groups "
        "compare_tensors_in_structures copy_to_device count_used_parameters_in_backward empty_cache "
        "filter_empty_parameters get_checkpoint_folder_size get_flattened_grad_norm get_global_norm "
        "get_global_norm_of_tensors get_grad_zeros get_inactive_params get_ma_status get_norm_with_moe_layers "
        "get_norm_with_moe_layers_fast get_only_unique_item get_tensor_bytes get_weight_norm has_inf_or_nan "
        "is_invalid_grad_norm is_model_parallel_parameter is_optimized_parameter is_transformers_cache "
        "mask_nan_or_inf_with_val_inplace maybe_loss_for_backward mem_alloced mem_cached memory_status noop_context "
        "offload_adam_states prefix_sum_inc register_output_backward_hooks reload_adam_states "
        "torch_max_memory_reserved torch_memory_reserved"
    ),
    "runtime.zero": (
        "DeepSpeedTensorOverride DeepSpeedZeRoOffload ZeroParamStatus ZeroParamType contiguous_memory_allocator "
        "leaf_module_config linear muon offload_states parameter_offload partitioned_param_coordinator "
        "partitioned_param_profiler test tiling"
    ),
    "runtime.zero.config": "ZERO_FORMAT ZERO_OPTIMIZATION read_zero_config_deprecated",
    "runtime.zero.partition_parameters": (
        "AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle CUDAQuantizer DEFAULT_TENSOR_OVERRIDES "
        "DS_Z3_EAGER_FALLBACK_OWNER_ATTR DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR DeepSpeedTensorOverride "
        "InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles NoGatherCoalescedHandle NoGatherHandle "
        "QuantizationInfo ZeroParamStatus ZeroParamType debug_rank0 empty_buffers free_param get_all_subclasses "
        "get_allgather_dtype get_new_tensor_fn_for_dtype partitioned_param_data_shape print_rank_0 "
        "restore_init_context reuse_buffers shutdown_init_context temp_contiguous_tensor top_level_context "
        "unregister_external_parameter zero_init_context zero_wrapper_for_fp_tensor_constructor"
    ),
    "runtime.zero.stage3": (
        "DeepSpeedZeroOptimizer_Stage3 INITIAL_MICRO_STEP_ID INIT_OPTIMIZER_TIMER IPGBucketZ3 OPTIMIZER_STEP_TIMER "
        "OPTIMIZER_SWAP_IN_STATE_TIMER OPTIMIZER_SWAP_OUT_STATE_TIMER model_to_params move_to_cpu "
        "pg_correctness_test print_rank_0 unwrap_model_for_generation"
    ),
    "runtime.zero.stage_1_and_2": (
        "DeepSpeedZeroOptimizer GradPartitionBufferGroup INITIAL_MICRO_STEP_ID IPGBucket OPTIMIZER_ALLGATHER_TIMER "
        "OPTIMIZER_GRADIENTS_TIMER OPTIMIZER_STEP_TIMER OPTIMIZER_TIMERS get_alignment_padding model_to_params "
        "pg_correctness_test print_rank_msg split_half_float_double"
    ),
    "runtime.zero.utils": (
        "ZERO_SUPPORTED_OPTIMIZERS ZeRORuntimeException apply_to_tensors_only assert_ints_same_as_other_ranks "
        "assert_lst_len_same_as_other_ranks defragment get_lst_from_rank0 get_mapping_to_flat_buffer "
        "get_norm_dtype is_builtin_type is_zero_supported_optimizer isinstance_namedtuple warned"
    ),
    "utils": (
        "bwc comms_logging config debug exceptions fragment_address get_caller_func get_full_hp_grad "
        "get_full_hp_param get_hp_fragment_mapping get_numactl_cmd lazy_init_hp_params_optimizer_state "
        "link_hp_params map_to_flat_opt_states mixed_precision_linkage module_utils numa pin_memory "
        "pin_memory_tracker recursive_getattr recursive_setattr set_full_hp_grad set_full_hp_param "
        "set_log_level_from_string static_cache timer torch types zero_to_torch"
    ),
    "utils.logging": (
        "LoggerFactory get_current_level get_dist_msg get_log_level_from_string log_dist_once log_levels "
        "print_configuration print_dist print_json_dist set_log_level_from_string should_log_le warning_once"
    ),
    "utils.tensor_fragment": (
        "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping map_to_flat_opt_states "
        "set_full_hp_grad set_full_hp_param tensor_fragment"
    ),
    "utils.groups": (
        "_get_broadcast_src_rank _get_zero_param_intra_parallel_group _get_zero_param_intra_parallel_group_ranks "
        "_get_zero_param_intra_parallel_group_world_size _get_zero_param_intra_parallel_rank_in_mygroup "
        "_zero_param_parallel_is_initialized"
    ),
    "utils.z3_leaf_module": "apply_zero_leaf_module_config",
    "utils.zero_to_fp32": (
        "GatheredTensor OUTPUT_DTYPE_NAMES convert_zero_checkpoint_to_state_dict get_checkpoint_files "
        "get_model_state_file get_model_state_files get_optim_files natural_keys parse_model_states "
        "parse_optim_states to_torch_tensor zero3_partitioned_param_info zero_model_state"
    ),
}
