# SPDX-License-Identifier: Apache-2.0
"""How many cases of the slowest tests `make test` runs; `make test-all` runs all of them.

`make test` has ten minutes on two cores, with installation. The tests of `SAMPLES` would need most of this time. The
cases of a test are chosen so that as many values of its parameters as possible occur, then as many pairs of values. The
others are marked as matrix.

The tests and numbers were chosen by the durations of all tests, which `pytest --junitxml=FILE` writes: about a third of
the cases, or fewer, of a test that takes long in total. A 0 is for a single test that takes long. A test whose cases
share one slow start is not here, or has a 0, because fewer cases would not make it faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest

SAMPLES: Final[Mapping[str, Mapping[str, int]]] = {
    "dist/test_checked_collectives.py": {
        "test_another_order_is_an_error": 0,
    },
    "dist/test_compat.py": {
        "test_all_ranks_have_the_whole_state": 0,
    },
    "dist/test_compressed.py": {
        "test_ranks_find_what_the_simulation_finds": 0,
    },
    "dist/test_disk.py": {
        "test_pipeline_and_tensor_ranks_have_the_bits_of_state_in_memory": 0,
        "test_stage_3_has_the_bits_of_state_in_memory": 1,
    },
    "dist/test_expert_ranks.py": {
        "test_a_checkpoint_continues_on_other_ranks": 1,
    },
    "dist/test_experts.py": {
        "test_a_checkpoint_continues_on_other_numbers_of_ranks": 0,
        "test_ranks_with_different_experts": 0,
    },
    "dist/test_huggingface_ranks.py": {
        "test_a_run_of_the_trainer_goes_on_with_weights_on_the_hosts_of_three_processes": 0,
        "test_the_trainer_trains_on_two_processes_as_on_one": 0,
    },
    "dist/test_lightning_ranks.py": {
        "test_ranks_train_as_one_process": 0,
    },
    "dist/test_muon.py": {
        "test_a_checkpoint_continues_on_other_numbers_of_ranks": 0,
        "test_ranks_are_as_one_process": 1,
        "test_updates_during_backward": 1,
    },
    "dist/test_onebit.py": {
        "test_ranks_do_what_the_simulation_does": 5,
    },
    "dist/test_parallel_as_one.py": {
        "test_a_loss_without_a_graph_is_refused": 1,
        "test_data_that_end_leave_the_pipeline_usable": 0,
        "test_frozen_tied_layers": 0,
        "test_train_batch_trains_after_eval": 0,
        "test_whole_weights_of_tensor_ranks": 1,
    },
    "dist/test_parallel_checkpoint.py": {
        "test_from_pipeline_and_tensor_ranks_to_one_process": 0,
    },
    "dist/test_parallel_replica.py": {
        "test_tensor_ranks": 0,
    },
    "dist/test_parallel_runner.py": {
        "test_gradients_are_those_of_one_process": 8,
    },
    "dist/test_parallel_tensor.py": {
        "test_gpt": 0,
    },
    "dist/test_parallel_traps.py": {
        "test_groups_made_of_the_whole_model": 0,
        "test_save_16bit_model_of_tensor_ranks_writes_whole_weights": 0,
    },
    "dist/test_sequence.py": {
        "test_a_checkpoint_loads_with_another_number_of_ranks": 0,
        "test_ranks_compute_the_gradients_of_one_process": 1,
    },
    "dist/test_streamed_ranks.py": {
        "test_ranks_have_the_bits_of_updates_on_the_host": 1,
    },
    "dist/test_train_ranks.py": {
        "test_one_process_goes_on_with_what_two_ranks_began": 0,
    },
    "dist/test_watch.py": {
        "test_a_hang_with_stacks_of_every_rank": 0,
        "test_an_exception_ends_ranks_that_cannot_raise": 0,
        "test_other_ways_to_fail": 1,
    },
    "dist/test_zero.py": {
        "test_ranks_that_measure_different_times_choose_the_same_places": 0,
    },
    "dist/test_zero_exact.py": {
        "test_a_failure_on_one_rank_ends_all": 2,
        "test_a_result_changes_without_this_sync_point_and_not_with_it": 1,
        "test_nobody_waits_for_what_will_not_come": 0,
    },
    "dist/test_zero_init.py": {
        "test_a_model_that_is_built_in_parts_trains_as_in_one_process": 1,
        "test_no_rank_has_more_than_its_part_and_one_layer": 0,
        "test_what_a_user_does_with_the_model_before_training": 0,
    },
    "dist/test_zero_onebit.py": {
        "test_ranks_have_the_same_weights": 0,
    },
    "dist/test_zero_traps.py": {
        "test_two_ranks_train_as_one_process": 4,
    },
    "dist/test_zero_whole.py": {
        "test_a_layer_may_use_the_registered_weight_of_another": 1,
        "test_a_partitioned_module_is_moved_as_by_torch": 1,
        "test_gradients_can_be_replaced_before_a_step": 1,
        "test_load_state_dict_of_whole_weights_is_as_in_one_process": 1,
        "test_mistakes_raise_on_all_ranks_and_nothing_hangs": 1,
        "test_saved_files_are_those_of_one_process": 0,
        "test_the_training_state_is_that_of_one_process": 1,
        "test_what_the_modifier_writes_goes_into_weights_and_masters": 1,
    },
    "unit/test_activation_groups.py": {
        "test_groups_of_layers_give_the_same_bits": 5,
    },
    "unit/test_activations.py": {
        "test_hugging_face_models": 2,
        "test_losses_and_gradients_have_the_same_bits": 3,
        "test_the_engine_does_what_its_config_says": 2,
        "test_with_the_overlapped_optimizer": 1,
    },
    "unit/test_as_torch.py": {
        "test_it_is_as_with_torch": 100,
    },
    "unit/test_attention_hf.py": {
        "test_generating_with_a_cache_is_generating_without": 2,
    },
    "unit/test_attention_reference.py": {
        "test_blocks_against_dense": 56,
    },
    "unit/test_attention_tiles.py": {
        "test_each_kept_score_is_visited_once": 4,
    },
    "unit/test_attention_triton.py": {
        "test_kernels_against_the_truth": 2,
    },
    "unit/test_auto_choice.py": {
        "test_another_batch_size_is_another_choice": 2,
    },
    "unit/test_background_save.py": {
        "test_a_weight_that_the_user_writes_is_read_before": 1,
        "test_copies_use_the_memory_that_is_free_at_the_call": 1,
        "test_it_holds_the_state_at_the_call": 1,
        "test_one_after_the_other_and_the_last_before_the_end": 0,
    },
    "unit/test_checkpoint_files.py": {
        "test_a_crash_at_any_point_leaves_a_checkpoint": 1,
    },
    "unit/test_checkpoint_layouts.py": {
        "test_stored_in_shards_it_reads_as_a_whole_and_as_any_shard": 0,
    },
    "unit/test_checkpoint_shards.py": {
        "test_a_crash_of_any_rank_at_any_point_leaves_a_checkpoint": 2,
        "test_any_cut_of_any_tensors_comes_back_whole_and_by_any_other_cut": 0,
    },
    "unit/test_config_engine.py": {
        "test_what_is_called_good_is": 8,
    },
    "unit/test_config_keys.py": {
        "test_every_default_loads_and_auto_means_it": 130,
    },
    "unit/test_data.py": {
        "test_stdlib_is_real_text": 0,
    },
    "unit/test_disk_cli.py": {
        "test_a_config_file_names_the_disk": 1,
    },
    "unit/test_disk_tier.py": {
        "test_a_checkpoint_of_a_run_on_the_disk_continues_anywhere": 1,
        "test_code_between_steps_changes_weights_and_state": 1,
        "test_half_precision_gives_the_same_bits": 4,
        "test_the_disk_gives_the_same_bits": 3,
    },
    "unit/test_disk_weights.py": {
        "test_a_checkpoint_continues_on_the_disk_and_in_memory": 2,
        "test_a_forked_process_cannot_read_weights": 3,
        "test_code_between_steps_reads_and_writes_weights": 1,
        "test_frozen_weights_are_on_the_disk": 1,
        "test_the_disk_changes_no_bit": 3,
        "test_weights_on_the_disk_change_no_bit": 2,
        "test_writes_to_a_state_dict_change_the_weights": 1,
    },
    "unit/test_docs.py": {
        "test_commands_run": 2,
    },
    "unit/test_engine.py": {
        "test_a_step_without_gradients_changes_nothing": 3,
    },
    "unit/test_engine_checkpoint.py": {
        "test_going_on_is_not_having_stopped": 2,
    },
    "unit/test_engine_shards.py": {
        "test_saved_by_one_layout_loads_into_any": 1,
        "test_small_state_formats": 1,
    },
    "unit/test_examples.py": {
        "test_a_tutorial_trains_when_it_is_small": 1,
        "test_example_runs": 1,
    },
    "unit/test_executor.py": {
        "test_many_steps_with_many_waiters": 1,
    },
    "unit/test_experts.py": {
        "test_experts_train_as_with_plain_torch": 2,
    },
    "unit/test_fit.py": {
        "test_exact_formats_are_preferred": 0,
        "test_selective_recomputation_is_chosen_where_it_is_enough": 0,
        "test_what_is_recommended_fits_with_a_margin": 4,
    },
    "unit/test_forged_checkpoints.py": {
        "test_a_forged_meta_changes_nothing": 15,
    },
    "unit/test_formats.py": {
        "test_an_element_that_loses_its_gradient_stops_moving": 2,
        "test_variance_follows_a_falling_gradient": 1,
    },
    "unit/test_four_bit.py": {
        "test_a_model_is_built_into_its_places": 3,
        "test_every_placement_gives_the_same_bits": 9,
        "test_rounding_keeps_the_mean": 2,
        "test_small_updates_are_not_lost": 0,
        "test_states_of_other_formats_are_converted": 3,
        "test_training_continues_from_a_saved_state": 3,
    },
    "unit/test_fp16_scaler.py": {
        "test_steps_are_those_of_gradscaler": 3,
    },
    "unit/test_full_disk.py": {
        "test_a_full_standard_output_is_one_line": 1,
    },
    "unit/test_gpt.py": {
        "test_a_loss_in_training_has_the_balance_of_the_routers": 2,
        "test_a_twin_optimizer_trains_it_as_torch_does": 1,
        "test_flops_per_token_is_what_torch_counts": 3,
    },
    "unit/test_gpu_collect.py": {
        "test_compiled_it_reads_wide_words": 1,
        "test_one_pass": 1,
    },
    "unit/test_gpu_packing.py": {
        "test_bits_are_the_truths": 3,
    },
    "unit/test_gpu_update.py": {
        "test_compiled_it_neither_fuses_nor_flushes": 3,
        "test_compiled_it_reads_and_writes_wide_words": 1,
        "test_the_kernel_has_the_bits_of_the_truth": 4,
    },
    "unit/test_host_optim.py": {
        "test_state_dict_round_trip_is_exact": 18,
    },
    "unit/test_import_deepspeed.py": {
        "test_no_damage_ends_in_anything_but_a_named_error": 1,
        "test_training_goes_on": 6,
    },
    "unit/test_import_pipeline.py": {
        "test_no_damage_ends_in_anything_but_a_named_error": 1,
        "test_training_goes_on": 4,
    },
    "unit/test_kernels.py": {
        "test_a_split_master_of_any_numbers": 27,
        "test_every_cell_equals_its_reference": 28,
        "test_gradients_that_are_not_finite_equal_the_reference": 84,
        "test_the_other_master_equals_its_reference": 21,
        "test_threads_and_variants_change_no_bit": 18,
        "test_weights_without_master_equal_their_reference": 21,
    },
    "unit/test_launch.py": {
        "test_a_killed_rank_ends_all": 0,
        "test_two_nodes_over_ssh": 0,
    },
    "unit/test_launch_environments.py": {
        "test_two_ranks_train_as_one_process": 3,
    },
    "unit/test_layers.py": {
        "test_the_core_uses_no_private_names_of_others": 56,
    },
    "unit/test_muon.py": {
        "test_a_skipped_step_keeps_all_bits_of_the_state": 2,
        "test_an_int8_momentum_is_rounded_without_bias": 3,
        "test_every_placement_gives_the_same_bits": 1,
        "test_resumed_training_gives_the_same_bits": 2,
        "test_several_backwards_and_moves_of_state_give_the_same_bits": 1,
    },
    "unit/test_native_packing.py": {
        "test_a_block_that_is_not_finite_keeps_its_error": 18,
        "test_any_bytes_decode_like_the_reference": 14,
        "test_equals_the_reference": 17,
        "test_scales_at_the_ends_of_the_range": 11,
        "test_threads_and_variants_change_no_bit": 5,
    },
    "unit/test_offload_embeddings.py": {
        "test_checkpoints_go_on_exactly": 1,
        "test_layers_that_move_between_steps": 1,
        "test_no_bit_changes": 1,
        "test_they_have_memory_only_while_they_run": 1,
    },
    "unit/test_parallel_split.py": {
        "test_hugging_face": 5,
    },
    "unit/test_param_offload.py": {
        "test_a_checkpoint_goes_on_exactly_with_weights_on_either_side": 1,
        "test_no_bit_changes": 2,
        "test_no_bit_changes_where_a_block": 3,
        "test_no_bit_changes_with_slow_copies": 0,
    },
    "unit/test_param_offload_ratio.py": {
        "test_moves_change_no_bit": 1,
        "test_no_bit_changes": 2,
    },
    "unit/test_param_offload_streamed.py": {
        "test_a_checkpoint_in_the_background_goes_on_exactly": 1,
        "test_no_bit_changes": 1,
        "test_no_bit_changes_in_half_precision": 1,
        "test_no_bit_changes_with_a_slow_stream": 1,
        "test_the_host_gives_the_same_bits": 1,
    },
    "unit/test_plan_cli.py": {
        "test_a_model_trains_with_the_config_written": 1,
        "test_any_card_by_its_memory_and_speed": 0,
        "test_embedding_and_output_layers_on_the_host": 0,
    },
    "unit/test_planner.py": {
        "test_a_plan_divides_experts_only_where_all_of_them_do_not_fit": 0,
        "test_the_best_ratio_fits_wherever_anything_does": 2,
    },
    "unit/test_planner_scaling.py": {
        "test_no_larger_batch_would_fit": 1,
    },
    "unit/test_pretrained.py": {
        "test_every_architecture_is_that_of_transformers_to_the_bit": 3,
    },
    "unit/test_rules.py": {
        "test_error_of_every_form_of_sgd": 8,
    },
    "unit/test_schedule_free.py": {
        "test_training_and_evaluation_are_those_of_the_optimizer_itself": 5,
    },
    "unit/test_schedules.py": {
        "test_twin_optimizer_follows_as_torch_does": 3,
    },
    "unit/test_speedups.py": {
        "test_a_compiled_selective_block_keeps_ten_values_for_each_hidden_unit": 0,
    },
    "unit/test_state_file.py": {
        "test_any_number_of_buffers_keeps_all_records": 5,
        "test_forks_while_records_are_read_lose_nothing": 1,
    },
    "unit/test_tiled.py": {
        "test_a_hugging_face_model_trains_as_without_tiles": 1,
        "test_gpt_trains_as_without_tiles": 2,
    },
    "unit/test_train_cli.py": {
        "test_a_config_file_decides_what_it_names": 3,
        "test_a_ratio_reaches_the_optimizer_and_every_report": 0,
        "test_a_timeline_is_written_as_json": 2,
        "test_embeddings_that_are_planned_for_the_host_are_there": 0,
        "test_every_rule_learns": 0,
        "test_experts_show_the_balance_of_their_routers": 0,
        "test_the_same_seed_gives_the_same_run": 0,
        "test_the_tutorials_command_and_file_run": 1,
    },
    "unit/test_train_resume.py": {
        "test_a_finished_run_has_nothing_to_do_and_goes_on_with_more_steps": 0,
        "test_a_full_disk_costs_checkpoints_but_not_the_run": 0,
        "test_another_run_is_not_resumed": 7,
        "test_ctrl_c_and_sigterm_save_and_the_rest_is_the_same": 1,
        "test_killed_at_any_moment_it_ends_the_same": 0,
    },
    "unit/test_twin_accumulation.py": {
        "test_delays_and_a_restart_change_no_bit": 2,
        "test_parts_are_one_large_batch": 1,
    },
    "unit/test_twin_any.py": {
        "test_clipping": 3,
        "test_instance_goes_on_from_where_it_is": 3,
        "test_like_plain_torch": 3,
        "test_resume": 2,
    },
    "unit/test_twin_auto.py": {
        "test_a_host_that_is_slower_than_probed_keeps_nothing": 2,
        "test_buckets_move_anywhere_and_back": 2,
        "test_moving_changes_no_bit": 3,
    },
    "unit/test_twin_delayed.py": {
        "test_half_precision_resumes_in_the_middle": 6,
        "test_is_the_plain_loop_bit_for_bit": 3,
    },
    "unit/test_twin_exact.py": {
        "test_a_model_that_is_loaded_between_steps_is_honoured": 2,
        "test_a_step_that_is_not_finite_touches_nothing": 5,
        "test_closing_in_the_middle_of_a_step": 2,
        "test_closing_leaves_nothing_behind": 1,
        "test_every_rule_and_format_has_the_same_bits": 3,
        "test_fifty_losses_are_torchs": 1,
        "test_fifty_steps_have_the_same_bits": 1,
        "test_groups_and_schedulers_follow_torch": 2,
        "test_half_precision_resumes_exactly": 3,
        "test_one_step_from_equal_state_is_torchs": 4,
        "test_twelve_steps_have_the_same_bits": 4,
    },
    "unit/test_twin_hf.py": {
        "test_it_trains_as_with_plain_pytorch": 4,
    },
    "unit/test_twin_loops.py": {
        "test_several_backwards_may_run_at_the_same_time": 2,
        "test_the_memory_format_may_change_between_steps": 2,
        "test_what_a_loop_does_in_every_step_is_seen_before_updates_start_early": 12,
    },
    "unit/test_twin_ratio.py": {
        "test_a_checkpoint_loads_at_any_ratio": 2,
        "test_any_optimizer_on_both_halves": 2,
        "test_any_ratio_gives_the_same_bits": 7,
        "test_delayed_updates_of_two_steps_begin_one_after_the_other": 2,
        "test_half_precision_weights": 2,
    },
    "unit/test_twin_sums.py": {
        "test_sums_of_the_next_step_wait_for_a_late_update": 1,
        "test_sums_on_the_host_are_those_on_the_device": 2,
    },
    "unit/test_twin_trainer.py": {
        "test_a_trainer_run_equals_adamw_and_its_own_resume": 0,
    },
    "unit/test_twin_traps.py": {
        "test_a_reader_right_after_step_sees_the_new_weights": 4,
        "test_a_result_changes_without_this_sync_point_and_not_with_it": 3,
        "test_accumulation": 2,
        "test_blocks_compiled_and_run_before_the_optimizer_is_built": 1,
        "test_checkpointing_ties_and_repeated_blocks": 4,
        "test_models_of_other_shapes": 9,
        "test_old_weights_stay_until_the_device_has_read_them": 3,
        "test_the_same_with_declared_accumulation": 4,
    },
    "unit/test_user_errors.py": {
        "test_files_that_the_commands_cannot_write": 0,
    },
    "unit/test_zoo.py": {
        "test_it_trains_as_with_plain_torch": 4,
    },
}
_IN_MATRIX: Final = ("matrix", "slow", "gpu")
_GOLDEN: Final = 0.6180339887  # its multiples, without their whole parts, are spread evenly


def mark_others(items: Sequence[pytest.Item]) -> None:
    """Marks as matrix the cases that `make test` leaves out."""
    cases: dict[tuple[str, str], list[pytest.Function]] = {}
    root = Path(__file__).parent
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(root):
            key = item.path.relative_to(root).as_posix(), item.originalname
            is_quick = not any(item.get_closest_marker(name) for name in _IN_MATRIX)
            if is_quick and key[1] in SAMPLES.get(key[0], {}):
                cases.setdefault(key, []).append(item)
    for (file, name), found in cases.items():
        chosen = choose([_values(item) for item in found], SAMPLES[file][name])
        for number, item in enumerate(found):
            if number not in chosen:
                item.add_marker(pytest.mark.matrix)


def choose(cases: Sequence[frozenset[tuple[str, str]]], count: int) -> set[int]:
    """Chooses `count` cases, given by their values, that have most values and most pairs of values between them."""
    chosen: set[int] = set()
    seen: set[object] = set()
    # Of equally good cases the first in this order is taken, so that the choice is spread over all cases.
    order = sorted(range(len(cases)), key=lambda number: number * _GOLDEN % 1.0)

    def gain(number: int) -> tuple[int, int]:
        return len(cases[number] - seen), len(_pairs(cases[number]) - seen)

    for _ in range(min(count, len(cases))):
        best = max((number for number in order if number not in chosen), key=gain)
        chosen.add(best)
        seen |= cases[best] | _pairs(cases[best])
    return chosen


def _pairs(values: frozenset[tuple[str, str]]) -> set[object]:
    return set(combinations(sorted(values), 2))


def _values(item: pytest.Function) -> frozenset[tuple[str, str]]:
    callspec = getattr(item, "callspec", None)
    return frozenset((name, str(value)) for name, value in callspec.params.items()) if callspec else frozenset()
