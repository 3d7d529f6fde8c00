# SPDX-License-Identifier: Apache-2.0
"""The public methods of DeepSpeed's engines: which of them work here, which have no effect, and which are refused.

`Own` methods are methods of `Engine` or `PipelineEngine`. `Engine.__getattr__` answers the others from these tables. A
refused method raises AttributeError, so that `hasattr` is false. docs/compat.md shows the tables (`python
docs/tables.py` writes it).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Final, NamedTuple

import torch
from torch.utils.data import IterableDataset

from twinflow.config import Config


class Own(NamedTuple):
    """A method of the engine. `note`: a difference from DeepSpeed."""

    note: str = ""


class Key(NamedTuple):
    """Returns the value of a config key."""

    path: str


class Computed(NamedTuple):
    """Returns a value that follows from the config and the arguments. `is_property`: an attribute, not a method."""

    function: Callable[..., object]
    text: str  # what it returns
    is_property: bool = False


class NoEffect(NamedTuple):
    """Does nothing and returns what `made` returns."""

    reason: str
    made: Callable[[], object] = lambda: None


class Refused(NamedTuple):
    """A method that twinflow does not have. Its use raises AttributeError with the remedy, a sentence that says what to
    do instead.
    """

    remedy: str


Method = Own | Key | Computed | NoEffect | Refused


def attribute(method: Method, config: Config) -> object:
    """The method, or the value of a property, for an engine with this config. None for `Own` and `Refused`."""
    if isinstance(method, Key):
        return lambda: value_at(config, method.path)
    if isinstance(method, Computed):
        if method.is_property:
            return method.function(config)
        return lambda *args, **kwargs: method.function(config, *args, **kwargs)
    if isinstance(method, NoEffect):
        return lambda *args, **kwargs: method.made()
    return None


def value_at(config: Config, path: str) -> object:
    """The value of a key such as "zero_optimization.stage". None below a section that is not given."""
    found: object = config
    for name in path.split("."):
        found = getattr(found, name, None)
    return dict(found) if isinstance(found, Mapping) else found


def _data_types(config: Config) -> tuple[torch.dtype, torch.dtype]:
    weights = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32
    return weights, torch.float32  # gradients of micro-batches are summed in fp32


def _sent_dtype(config: Config) -> torch.dtype:
    given = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    chosen = config.communication_data_type
    return given[chosen] if chosen is not None else _data_types(config)[0]


def _overlaps(config: Config) -> bool:
    given = config.zero_optimization.overlap_comm
    return config.zero_optimization.stage == 3 if given is None else given


def _is_offloaded(config: Config) -> bool:
    offload = config.zero_optimization.offload_optimizer
    return offload is not None and offload.device != "none"


def _is_on(device: str) -> Callable[[Config], bool]:
    def read(config: Config) -> bool:
        offload = config.zero_optimization.offload_optimizer
        return offload is not None and offload.device == device

    return read


def _ratio(config: Config) -> object:
    offload = config.zero_optimization.offload_optimizer
    return offload.ratio if offload is not None else 1.0


def _scale_args(config: Config) -> dict[str, object]:
    fp16 = config.fp16
    return {
        "init_scale": 2**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


def _own(names: str, note: str = "") -> dict[str, Method]:
    return {name: Own(note) for name in names.split()}


def _keys(section: str, **names: str) -> dict[str, Method]:
    """Getters of keys. `names`: from the name of a method to the name of a key in `section`."""
    return {method: Key(f"{section}.{key}" if section else key) for method, key in names.items()}


def _same_keys(section: str, prefix: str, names: str) -> dict[str, Method]:
    """Getters that are named `prefix` and the name of their key."""
    return _keys(section, **{f"{prefix}{name}": name for name in names.split()})


def _stage3(names: str) -> dict[str, Method]:
    return _keys(_ZERO, **{f"zero_{name}": f"stage3_{name}" for name in names.split()})


def _no_effect(reason: str, names: str, made: Callable[[], object] = lambda: None) -> dict[str, Method]:
    return {name: NoEffect(reason, made) for name in names.split()}


def _refused(remedy: str, names: str) -> dict[str, Method]:
    return {name: Refused(remedy) for name in names.split()}


_ZERO: Final = "zero_optimization"
_SUMMED: Final = "ranks sum gradients during backward"
_OFF: Final = "the config refuses this feature, so it is off"

ENGINE: Final[Mapping[str, Method]] = {
    **_own(
        "backward deepspeed_io destroy eval forward get_batch_info get_data_parallel_rank get_global_grad_norm get_lr "
        "get_model_parallel_rank get_mom get_sequence_parallel_group get_tensor_parallel_rank "
        "gradient_accumulation_steps gradient_clipping is_gradient_accumulation_boundary load_checkpoint "
        "load_module_state_dict module_state_dict reload_states "
        "save_16bit_model save_fp16_model scale set_gradient_accumulation_boundary set_train_batch_size "
        "set_train_micro_batch_size step steps_per_print train train_batch_size train_micro_batch_size_per_gpu "
        "was_step_applied zero_grad zero_optimization zero_optimization_partition_gradients "
        "zero_optimization_partition_weights zero_optimization_stage"
    ),
    "bfloat16_enabled": Own("whether a parameter is bf16"),
    "fp16_enabled": Own("whether a parameter is fp16"),
    "compile": Own("compiles each block separately"),
    "is_compiled": Own("an attribute"),
    "loss_scale": Own("the scale of the next loss, also if it is dynamic"),
    "no_sync": Own("refused with stages 2 and 3 on several ranks"),
    "offload_states": Own("moves optimizer state and master weights; weights and gradients stay on the GPU"),
    "optimizer_name": Own("the class name of the script's optimizer, or the config's name of the update rule"),
    "save_checkpoint": Own("safetensors files"),
    "zero_gather_16bit_weights_on_model_save": Own("always true"),
    **_same_keys("", "", "wall_clock_breakdown memory_breakdown dump_state log_level managed_gradient_accumulation"),
    **_same_keys("", "", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer gradient_predivide_factor"),
    **_same_keys("", "", "dataloader_drop_last"),
    **_keys("", tensor_parallel_config="tensor_parallel", aio_config="aio"),
    "communication_data_type": Computed(_sent_dtype, "the dtype of sent gradients; an attribute", is_property=True),
    "postscale_gradients": Computed(lambda config: not config.prescale_gradients, "not prescale_gradients"),
    **_same_keys("optimizer", "optimizer_", "params legacy_fusion"),
    **_keys("scheduler", scheduler_name="type", scheduler_params="params"),
    **_same_keys(
        "flops_profiler",
        "flops_profiler_",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    **_keys("checkpoint", checkpoint_serialization_enabled="checkpoint_serialization"),
    **_keys("checkpoint", load_universal_checkpoint="load_universal", use_node_local_storage="use_node_local_storage"),
    "checkpoint_tag_validation_enabled": Computed(
        lambda config: config.checkpoint.tag_validation != "Ignore", "whether checkpoint.tag_validation is not Ignore"
    ),
    "checkpoint_tag_validation_fail": Computed(
        lambda config: config.checkpoint.tag_validation == "Fail", "whether checkpoint.tag_validation is Fail"
    ),
    "checkpoint_writer_enabled": Computed(
        lambda config: config.checkpoint.writer is not None, "whether checkpoint.writer is given"
    ),
    **_same_keys(
        _ZERO,
        "zero_",
        "reduce_scatter offload_optimizer offload_param sub_group_size reduce_bucket_size "
        "allgather_bucket_size compute_grad_norm contiguous_gradients load_from_fp32_weights elastic_checkpoint "
        "legacy_stage1 ignore_unused_parameters save_muon_momentum_buffer_in_memory allgather_partitions "
        "round_robin_gradients parameter_alignment log_trace_cache_warnings",
    ),
    **_same_keys(
        _ZERO,
        "",
        "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    "zero_overlap_comm": Computed(_overlaps, "overlap_comm; without this key, whether the stage is 3"),
    **_keys(_ZERO, zero_multi_rank_bucket_allreduce="use_multi_rank_bucket_allreduce"),
    **_keys(_ZERO, is_sanity_checks_enabled="enable_sanity_checks", zenflow_config="zenflow"),
    **_stage3(
        "max_live_parameters max_reuse_distance prefetch_bucket_size module_granularity_threshold "
        "param_persistence_threshold model_persistence_threshold allgather_sequential"
    ),
    **_same_keys(f"{_ZERO}.offload_optimizer", "", "super_offload cpuadam_cores_perc"),
    "zero_use_cpu_optimizer": Computed(_is_offloaded, "whether offload_optimizer.device is cpu or nvme"),
    "zero_cpu_offload": Computed(_is_on("cpu"), "whether offload_optimizer.device is cpu"),
    "zero_nvme_offload_optimizer": Computed(_is_on("nvme"), "whether offload_optimizer.device is nvme"),
    "zero_partial_offload": Computed(_ratio, "offload_optimizer.ratio; 1.0 without this section"),
    "is_first_weights_partition_group": Computed(
        lambda config: config.zero_optimization.stage == 3, "whether the stage is 3"
    ),
    **_keys("tensor_parallel", autotp_size="autotp_size"),
    **_keys("fp16", fp16_master_weights_and_gradients="fp16_master_weights_and_grads", fp16_auto_cast="auto_cast"),
    **_keys("bf16", bf16_master_weights_and_gradients="bf16_master_weights_and_grads"),
    **_same_keys("bf16", "", "bf16_optimizer_states"),
    "dynamic_loss_scale": Computed(lambda config: config.fp16.loss_scale == 0, "whether fp16.loss_scale is 0"),
    "initial_dynamic_scale": Computed(lambda config: 2**config.fp16.initial_scale_power, "the first loss scale"),
    "dynamic_loss_scale_args": Computed(_scale_args, "the options of the dynamic loss scale"),
    **_same_keys("torch_autocast", "torch_autocast_", "enabled lower_precision_safe_modules"),
    "torch_autocast_dtype": Computed(
        lambda config: getattr(torch, config.torch_autocast.dtype or "", None), "torch_autocast.dtype as a torch.dtype"
    ),
    "get_data_types": Computed(_data_types, "the dtypes of weights and of summed gradients"),
    "is_map_style_dataset": Computed(
        lambda _, obj: hasattr(obj, "__getitem__") and hasattr(obj, "__len__"), "whether a dataset has indices"
    ),
    "is_iterable_style_dataset": Computed(
        lambda _, obj: isinstance(obj, IterableDataset), "whether a dataset is a torch IterableDataset"
    ),
    "collect_python_gc": Computed(lambda _: gc.collect(), "what gc.collect() returns"),
    **_keys("compile", is_deepcompile_enabled="deepcompile"),
    **_no_effect(
        _OFF,
        "data_efficiency_enabled data_sampling_enabled curriculum_learning_enabled random_ltd_enabled "
        "autotuning_enabled autotuning_profile_model_info is_deepcompile_active "
        "compile_zero_optimization_stage compile_autosp compile_autotp uses_parallelization_pass_only",
        bool,
    ),
    **_no_effect(_OFF, "swap_tensor_config"),
    **_no_effect(_SUMMED, "allreduce_gradients"),
    **_no_effect(_SUMMED, "coalesce_grad_reduction", nullcontext),
    "clip_fp32_gradients": NoEffect("step() clips gradients, as gradient_clipping says"),
    "empty_partition_cache": NoEffect("gathered weights are released when their block has run"),
    **_refused(
        "Order and choose the samples in your data loader.",
        "data_efficiency_config data_sampling_config curriculum_learning_config random_ltd_config "
        "random_ltd_initialize set_custom_curriculum_learning_schedule set_data_post_process_func",
    ),
    **_refused(
        "Use `twinflow plan`, which predicts memory and speed before a run.",
        "autotuning_start_profile_step autotuning_end_profile_step autotuning_metric_path autotuning_model_info_path "
        "autotuning_metric",
    ),
    **_refused(
        "Use torch.distributed: ranks sum the gradients of weights during backward.",
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback sparse_allreduce "
        "sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather all_gather_scalar",
    ),
    **_refused(
        "Use engine.compile(), which compiles each block: DeepCompile is not supported.",
        "get_autosp_backend get_autotp_backend get_deepcompile_backend get_deepspeed_compile_backend get_compile_time "
        "register_compile_pass",
    ),
    **_refused(
        "Set wall_clock_breakdown in the config and read the log.", "get_wall_clock_timers print_forward_breakdown"
    ),
    "get_optimizer_configuration": Refused("Read engine.optimizer.defaults."),
    "get_type": Refused("Use engine.optimizer_name()."),
    "load_moe_state_dict": Refused("Remove the call: load_checkpoint() loads experts too."),
}

PIPELINE: Final[Mapping[str, Method]] = {
    **_own(
        "is_first_stage is_gradient_accumulation_boundary is_last_stage get_pipeline_parallel_rank "
        "load_module_state_dict module_state_dict set_batch_fn set_dataiterator set_dataloader set_train_batch_size "
        "train_batch"
    ),
    "eval_batch": Own("return_logits is refused; the loss is returned on every rank"),
    **_own("backward forward step", "raises RuntimeError, as in DeepSpeed: train_batch() runs all of them"),
    "reset_activation_shape": Own("has no effect: stages send the shapes of activations"),
    **_no_effect("stages send tensors of any dtype", "set_has_attention_mask"),
    **_no_effect("the log has one line of progress, on rank 0", "log_for_device tput_log"),
    "get_additional_losses": NoEffect("a loss function returns one loss"),
}

# Other names that scripts use on DeepSpeed's engines.
_OTHERS: Final[Mapping[str, Method]] = {
    **_no_effect("step() needs no call after loss.backward()", "_backward_prologue _backward_epilogue"),
    "train_batch": Refused("Call backward() and step(), or pass a PipelineModule to initialize()."),
    "eval_batch": Refused("Call engine(batch), or pass a PipelineModule to initialize()."),
    "set_lr": Refused('Set engine.optimizer.param_groups[0]["lr"].'),
    "mpu": Refused("Use engine.dp_rank, engine.dp_world_size and engine.get_model_parallel_rank()."),
    "grid": Refused("Use engine.dp_rank, engine.dp_world_size and engine.get_pipeline_parallel_rank()."),
}
ANSWERS: Final[Mapping[str, Method]] = {**PIPELINE, **_OTHERS, **ENGINE}
