# SPDX-License-Identifier: Apache-2.0
"""The registry: every key of DeepSpeed's is in it once, and the docs and the JSON Schema say what it says."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from twinflow.config import json_schema, load_config, notes, optimizer_choice, params
from twinflow.config.fields import HONOURED, REFUSED, UNUSED, in_words
from twinflow.config.schema import RENAMES, Key, OffloadOptimizer, keys
from twinflow.optim import schedules
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.rules import RULES

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
FOUND = list(keys())
NAMES = [".".join(key.path) for key in FOUND]

# Sections whose own keys are not looked into: the whole section has one rule.
FREE = (
    "amp autotuning comms_logger compression_training curriculum_learning data_efficiency datastates eigenvalue "
    "elasticity expert_parallel hybrid_engine nebula progressive_layer_drop timers"
)
SECTIONS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "steps_per_print gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "communication_data_type seq_parallel_communication_data_type sparse_gradients disable_allgather dump_state "
    "wall_clock_breakdown memory_breakdown dataloader_drop_last zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer graph_harvesting log_level",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "optimizer": "type params",
    "scheduler": "type params",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint sub_group_size "
    "ignore_unused_parameters round_robin_gradients legacy_stage1 mics_shard_size mics_hierarchical_params_gather "
    "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
    "zeropp_loco_param memory_efficient_linear override_module_apply enable_sanity_checks log_trace_cache_warnings "
    "cpu_offload_use_pin_memory stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization "
    "number_checkpoints synchronize_checkpoint_boundary profile",
    "sparse_attention": "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
    "horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks "
    "global_block_indices global_block_end_indices num_sliding_window_blocks",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
    "use_reentrant",
    "tensor_parallel": "autotp_size tp_overlap_comm partition_config preset_model dtype keep_module_on_host "
    "replace_with_kernel_inject",
    "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "checkpoint": "tag_validation load_universal use_node_local_storage",
    "checkpoint.parallel_write": "pipeline_stage",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace",
    "compile": "deepcompile",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
}
EXPECTED = [*FREE.split(), "zero_optimization.zenflow"]
EXPECTED += [f"{section}.{name}".lstrip(".") for section, names in SECTIONS.items() for name in names.split()]
RENAMED = [
    "cpu_offload",
    "cpu_offload_param",
    "stage3_gather_fp16_weights_on_model_save",
    "prefetch_bucket_size",
    "max_live_parameters",
]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_of_deepspeed_has_one_rule(name: str) -> None:
    assert NAMES.count(name) == 1


def test_old_spellings_are_known() -> None:
    old = [rename.old[-1] for rename in RENAMES]
    assert set(RENAMED) <= set(old)
    assert "bfloat16" in old
    for rename in RENAMES:
        assert ".".join(rename.old) not in NAMES


def test_offload_keys_are_options_of_the_optimizer() -> None:
    """Under the same name, with the same values: the config adds none that the optimizer would not take itself."""
    arguments = set(inspect.signature(TwinOptimizer).parameters)
    tuning = get_type_hints(Tuning, include_extras=True)
    for name in OffloadOptimizer.own_keys():
        assert (name in arguments) != (name in tuning), name
        if name in tuning:
            info = OffloadOptimizer.model_fields[name]
            assert in_words(info.annotation, info.metadata).removesuffix(", or null") in in_words(tuning[name])


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def other_value(key: Key) -> Any:
    """A value that is allowed and not the default."""
    if isinstance(key.default, bool):
        return not key.default
    if key.path == ("zero_optimization", "stage"):
        return 3  # nobody needs to be told that one process partitions nothing in stages 1 and 2
    if isinstance(key.default, (int, float)) and not key.rule.off:
        return 0.5 if "<= 1" in key.allowed else key.default + 1
    special = {
        "an object": {"mode": "fixed", "enabled": True},
        "'fp32', 'bf16'": "bf16",
        "a list of strings": ["a"],
        "a whole number": 3,
        "two": [0.5, 0.5],
        "a number": 0.5,
        "a finite number": 0.5,
        "true": True,
    }
    choices = re.findall(r"'(\w+)'", key.allowed)
    if choices and not key.allowed.startswith("'fp32'"):
        return next(choice for choice in choices if choice not in (key.default, "none"))
    return next((value for start, value in special.items() if key.allowed.startswith(start)), "something")


def chosen(kind: str) -> list[Any]:
    return [pytest.param(key, id=name) for name, key in zip(NAMES, FOUND, strict=True) if key.rule.kind == kind]


@pytest.mark.parametrize("key", chosen(UNUSED))
def test_a_key_without_effect_loads_with_a_note(key: Key) -> None:
    given = nested(key.path, other_value(key))
    if key.path[0] == "optimizer":
        given["optimizer"]["type"] = "adam"
    assert any(line.startswith(".".join(key.path) + ": no effect here, because ") for line in notes(load_config(given)))


@pytest.mark.parametrize("key", chosen(REFUSED))
def test_a_refused_key_is_refused_unless_off(key: Key) -> None:
    for off in (key.default, *key.rule.off):
        load_config(nested(key.path, off))
    value = 7 if key.rule.off else other_value(key)
    with pytest.raises(ValueError, match="but must be") as caught:
        load_config(nested(key.path, value))
    assert ".".join(key.path) in str(caught.value)
    assert key.rule.text[0].upper() + key.rule.text[1:] in str(caught.value)


@pytest.mark.parametrize("key", chosen(HONOURED) + chosen(UNUSED) + chosen(REFUSED))
def test_every_default_loads_and_auto_means_it(key: Key) -> None:
    if key.default != "must be given" and key.path[0] not in ("optimizer", "scheduler"):
        value = list(key.default) if isinstance(key.default, tuple) else key.default
        found: Any = load_config(nested(key.path, value))
        for name in key.path:
            found = getattr(found, name)
        assert found == key.default
        load_config(nested(key.path, "auto"))


def test_the_json_schema_has_every_key() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    for key in FOUND:
        section = schema
        for name in key.path[:-1]:
            options = section["properties"][name]["anyOf"]
            reference = next(option["$ref"] for option in options if "$ref" in option)
            section = schema["$defs"][reference.split("/")[-1]]
        assert section["additionalProperties"] is False
        declared = section["properties"][key.path[-1]]
        assert declared["description"]
        assert declared["x-twinflow"] == key.rule.kind
    assert "lr" in schema["$defs"]["Optimizer"]["properties"]["params"]["properties"]
    assert "bfloat16" in schema["properties"]


@pytest.mark.parametrize("name", [*RULES, "onebitadam"])
def test_options_are_those_of_the_rule(name: str) -> None:
    rule, options = optimizer_choice(load_config({"optimizer": {"type": name}}))
    assert rule == ("adamw" if name in ("adam", "onebitadam") else name)  # "Adam" means AdamW
    RULES[rule].check(options)
    assert set(options) == set(RULES[rule].defaults)
    if name == "onebitadam":
        assert params.FORMATS[name] == ("fp32", "bf16")
    else:
        assert params.FORMATS[name] == RULES[name].formats


@pytest.mark.parametrize("name", params.SCHEDULES)
def test_options_are_those_of_the_schedule(name: str) -> None:
    assert set(schedules.SCHEDULES) == set(params.SCHEDULES)
    arguments = dict(inspect.signature(schedules.SCHEDULES[name]).parameters)
    del arguments["optimizer"]
    fields = params.SCHEDULES[name].model_fields
    assert set(fields) == set(arguments)
    for key, argument in arguments.items():
        assert fields[key].default == (None if argument.default is inspect.Parameter.empty else argument.default)
