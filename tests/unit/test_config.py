# SPDX-License-Identifier: Apache-2.0
"""load_config: what loads, what it becomes, and what is refused with which words."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinflow.config import Batch, Config, load_config, notes, optimizer_choice, resolve_batch

TWIN_FLOW = """    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true,
      "ratio": 0.3
    }
"""
PRESCALE = """  "prescale_gradients": false,
"""
OFFLOAD = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": params}}


def offload(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": {"device": "cpu", **keys}}}


def message(source: Any) -> str:
    """What the error says."""
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(source)
    return str(caught.value)


def test_defaults_are_deepspeeds() -> None:
    config = load_config({})
    assert config.gradient_clipping == 1.0
    assert config.bf16.check_grad_overflow is True
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (16, 1000, 2)
    assert config.train_batch_size is None
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.steps_per_print is None
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.offload_optimizer is None
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    defaults = load_config({"zero_optimization": {"offload_optimizer": {}}}).zero_optimization.offload_optimizer
    assert defaults is not None
    assert (defaults.device, defaults.ratio, defaults.pin_memory, defaults.buffer_count) == ("none", 1.0, True, 4)
    assert (defaults.states, defaults.hold, defaults.sums) == ("fp32", "auto", "auto")


def test_a_config_is_frozen() -> None:
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.gradient_clipping = 2.0
    assert load_config(config) is config


@pytest.mark.parametrize("text", [TWIN_FLOW, PRESCALE, OFFLOAD], ids=["fragment", "one-key", "commas"])
def test_published_blocks_load_as_printed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "anything.txt"
    file.write_text(text)
    for source in (file, str(file), base64.urlsafe_b64encode(text.encode()).decode()):
        assert isinstance(load_config(source), Config)


def test_what_published_blocks_say(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(TWIN_FLOW)
    twin_flow = load_config(file)
    assert twin_flow.zero_optimization.offload_optimizer is not None
    assert twin_flow.zero_optimization.offload_optimizer.ratio == 0.3
    assert any(note.startswith("offload_optimizer: ") for note in notes(twin_flow))
    file.write_text(OFFLOAD)
    zero = load_config(file).zero_optimization
    assert zero.offload_optimizer is not None
    assert (zero.stage, zero.offload_optimizer.device, zero.overlap_comm) == (2, "cpu", True)


def test_a_config_of_hugging_face_loads() -> None:
    config = load_config(
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": float("inf"),
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        }
    )
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    assert optimizer_choice(config)[0] == "adamw"
    assert config.zero_optimization.sub_group_size == 10**9
    assert "zero_optimization.reduce_bucket_size" not in " ".join(notes(config))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (offload(devise="cpu"), ["zero_optimization.offload_optimizer.devise", "'device'", "'cpu'"]),
        ({"zero_optimization": {"stage": "2"}}, ["zero_optimization.stage", "'2'", "0, 1, 2 or 3"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "4"]),
        ({"zero_optimization": {"stage": 1.5}}, ["zero_optimization.stage", "1.5"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage", "True"]),
        ({"zero_optimization": []}, ["zero_optimization", "[]", "an object"]),
        ({"gradient_clipping": -1}, ["gradient_clipping", "-1", ">= 0"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping", "nan"]),
        ({"gradient_clipping": True}, ["gradient_clipping", "True"]),
        ({"train_batch_size": 0}, ["train_batch_size", "0", ">= 1"]),
        ({"fp16": {"enabled": "yes"}}, ["fp16.enabled", "'yes'", "true or false"]),
        ({"fp16": {"loss_scale": -2}}, ["fp16.loss_scale", "-2"]),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        ({"fp16": {"initial_scale_power": 2, "min_loss_scale": 8}}, ["initial_scale_power", "min_loss_scale", "8"]),
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast.dtype", "bfloat16"]),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ["torch_autocast.dtype", "'fp32'"]),
        (offload(device="nvme"), ["zero_optimization.offload_optimizer.nvme_path", "None", "a folder on a local disk"]),
        (offload(device="disk"), ["zero_optimization.offload_optimizer.device", "'disk'", "'nvme'"]),
        (offload(device="nvme", nvme_path="d", buffer_count=0), ["offload_optimizer.buffer_count", "0", ">= 1"]),
        ({"aio": {"queue_depth": 0}}, ["aio.queue_depth", "0", ">= 1"]),
        ({"aio": {"queue_length": 8}}, ["aio.queue_length", "'queue_depth'"]),
        (offload(ratio=1.5), ["zero_optimization.offload_optimizer.ratio", "1.5"]),
        (offload(bucket_numel=100), ["bucket_numel", "100", "128"]),
        (offload(super_offload=True), ["zero_optimization.offload_optimizer.super_offload"]),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            ["zero_optimization.offload_param.nvme_path", "None", "a folder on a local disk"],
        ),
        ({"zero_optimization": {"cpu_offload_param": 1}}, ["zero_optimization.cpu_offload_param", "true"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow", "delayed_update"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, ["zero_quantized_weights"]),
        ({"zero_optimization": {"prefetch_bucket_size": -4}}, ["zero_optimization.prefetch_bucket_size", "-4"]),
        ({"zero_optimization": {"cpu_offload": "yes"}}, ["zero_optimization.cpu_offload", "'yes'"]),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, ["cpu_offload", "offload_optimizer"]),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, ["fp16.fp16_master_weights_and_grads"]),
        ({"amp": {"enabled": True}}, ["amp", "bf16"]),
        ({"sparse_gradients": True}, ["sparse_gradients"]),
        ({"sparse_attention": {"mode": "sparse"}}, ["sparse_attention.mode", "'sparse'", "'bigbird'"]),
        ({"sparse_attention": {"num_local_block": 4}}, ["sparse_attention.num_local_block", "'num_local_blocks'"]),
        ({"sparse_attention": {"block": 24}}, ["sparse_attention.block", "24", "16, 32, 64 or 128"]),
        ({"sparse_attention": {"local_window_blocks": [4, 0]}}, ["sparse_attention.local_window_blocks", "[4, 0]"]),
        ({"elasticity": {"enabled": True}}, ["elasticity"]),
        ({"tensor_parallel": {"tp": {"mpu": "mine"}}}, ["tensor_parallel.tp.mpu", "tp_size"]),
        ({"pipeline": {"schedule": "2f2b"}}, ["pipeline.schedule", "'2f2b'", "'zbv'"]),
        ({"sequence_parallel_size": 0}, ["sequence_parallel_size", "0", ">= 1"]),
        ({"sequence_mode": "star"}, ["sequence_mode", "'star'", "'ring'"]),
        (
            {"compression_training": {"layer_reduction": {"enabled": True}}},
            ["compression_training.layer_reduction.enabled", "True"],
        ),
        ({"compile": {"deepcompile": True}}, ["compile.deepcompile", "torch.compile"]),
        ({"checkpoint": {"keep_last": 0}}, ["checkpoint.keep_last", "0", ">= 1"]),
        ({"data_types": {"grad_accum_dtype": "int8"}}, ["data_types.grad_accum_dtype", "'int8'", "'fp32'"]),
        ({"gradient_allreduce_op": "max"}, ["gradient_allreduce_op", "'max'", "'sum'"]),
        ({"optimizer": {"params": {"lr": 1e-3}}}, ["optimizer.type", "missing", "adamw"]),
        ({"optimizer": {"type": "AdamWW"}}, ["optimizer.type", "'AdamWW'", "'AdamW'"]),
        ({"optimizer": {"type": "Optimizer"}}, ["optimizer.type", "'Optimizer'"]),
        ({"optimizer": {"type": "FusedAdam"}}, ["FusedAdam is a class of DeepSpeed", 'Use "AdamW", or "Adam".']),
        ({"optimizer": {"type": "DeepSpeedCPUAdam"}}, ["class of DeepSpeed", 'Use "AdamW", or "Adam".']),
        ({"optimizer": {"type": "CPUAdam"}}, ["class of DeepSpeed", 'Use "AdamW", or "Adam".']),
        ({"optimizer": {"type": "FusedLion"}}, ["class of DeepSpeed", 'Use "Lion".']),
        ({"optimizer": {"type": "DeepSpeedCPUAdagrad"}}, ["class of DeepSpeed", 'Use "Adagrad".']),
        ({"optimizer": {"type": "FusedLamb"}}, ["class of DeepSpeed", 'Use "Lamb".']),
        ({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1}}}, ["max_grad_norm", "gradient_clipping"]),
        ({"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 0}}}, ["var_freeze_step", ">= 1"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_threshold": 1.0}}}, ["freeze_threshold", "below 1"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}}, ["amsgrad"]),
        ({"optimizer": {"type": "Muon", "params": {"ns_method": "gram"}}}, ["ns_method", 'Use "standard"']),
        ({"optimizer": {"type": "Muon", "params": {"adjust_lr_fn": "rms"}}}, ["adjust_lr_fn", "match_rms_adamw"]),
        ({"optimizer": {"type": "Muon", "params": {"ns_steps": 0}}}, ["ns_steps"]),
        ({"optimizer": {"type": "Muon", "params": {"ns_coefficients": [1, 2]}}}, ["ns_coefficients", "three"]),
        ({"optimizer": {"type": "RMSprop", "params": {"alfa": 0.9}}}, ["optimizer.params.alfa", "'alpha'"]),
        ({"optimizer": {"type": "NAdam", "params": {"max_grad_norm": 1}}}, ["max_grad_norm", "gradient_clipping"]),
        (adam(max_grad_norm=1.0), ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        (adam(learning_rate=1.0), ["optimizer.params.learning_rate"]),
        (adam(lr="1e-3"), ["optimizer.params.lr", "'1e-3'"]),
        (adam(betas=[0.9]), ["optimizer.params.betas", "[0.9]", "two numbers"]),
        (adam(betas=[0.9, 1.0]), ["optimizer.params.betas", "two numbers"]),
        (adam(amsgrad=True), ["optimizer.params.amsgrad"]),
        ({"optimizer": {"type": "sgd", "params": {"nesterov": True}}}, ["optimizer.params.nesterov", "momentum"]),
        ({"optimizer": {"type": "Lion"}, **offload(states="int8")}, ["offload_optimizer.states", "'int8'", "'Lion'"]),
        ({"optimizer": {"type": "RMSprop"}, **offload(states="bf16")}, ["offload_optimizer.states", "'fp32'"]),
        ({"scheduler": {"type": "WarmUpLRR"}}, ["scheduler.type", "'WarmUpLRR'", "'WarmupLR'"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, ["scheduler.params.warmup_steps"]),
        ({"scheduler": {"type": "StepLR", "params": {"stepsize": 3}}}, ["scheduler.params.stepsize", "'step_size'"]),
        ({3: 4}, ["3", "string"]),
        ({"bf16": {4: 5}}, ["bf16", "4"]),
        (None, ["None"]),
        (b"{}", ["b'{}'"]),
        ("no_such_file.json", ["no_such_file.json", "no such file"]),
        ('{"stage": 2}', ["json.loads"]),
    ],
)
def test_mistakes_are_named(given: Any, words: list[str]) -> None:
    text = message(given)
    for word in words:
        assert word in text


def test_all_mistakes_of_a_kind_at_once() -> None:
    text = message({"fp16": {"steps": 1}, "bf16": {"enable": True}})
    assert "2 mistakes" in text
    assert "fp16.steps" in text
    assert "bf16.enable" in text


def test_numbers_too_long_to_print_are_still_an_error_of_ours() -> None:
    assert "gradient_clipping" in message({"gradient_clipping": 10**5000})


@pytest.mark.parametrize(
    "given",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"elasticity": {}},
        {"zero_optimization": {"offload_param": {"device": "none"}}},
        {"zero_optimization": {"zenflow": None, "mics_shard_size": -1, "zero_hpz_partition_size": 1}},
        {"sparse_gradients": False, "gradient_predivide_factor": 1.0, "sequence_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 1}, "pipeline": {"stages": "auto", "partition": "best"}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"sparse_attention": {"mode": "dense"}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
        {"fp16": {"fp16_master_weights_and_grads": False}, "comet": {"enabled": False}},
        adam(amsgrad=False, bias_correction=True, max_grad_norm=None),
    ],
)
def test_what_is_refused_passes_when_it_is_off(given: dict[str, Any]) -> None:
    load_config(given)


def test_files_are_read_by_content(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text('\ufeff{"train_batch_size": 8}', encoding="utf-8")
    assert load_config(file).train_batch_size == 8
    file.write_text("# HJSON\ntrain_batch_size: 8\nzero_optimization: {stage: 2}")
    assert load_config(file).zero_optimization.stage == 2
    assert load_config(base64.urlsafe_b64encode(b'{"train_batch_size": 4}').decode()).train_batch_size == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"train_batch_size": 1, "train_batch_size": 2}', ["train_batch_size", "twice"]),
        (b'{"fp16": {"enabled": true, "enabled": false,}}', ["enabled", "twice"]),
        (b'{"fp16": {"enabled": 3}}', ["fp16.enabled", "3"]),
        (b'{"fp16": {"enabld": true}}', ["fp16.enabld", "'enabled'"]),
        (b'{"fp16": {', []),
        (b"[1, 2]", ["a JSON object"]),
        (b"", ["empty"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
        (b'{"gradient_clipping": 1e999,}', []),
        (b'{"a":' * 5000, []),
    ],
)
def test_errors_name_the_file(content: bytes, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    text = message(str(file))
    for word in [str(file), *words]:
        assert word in text


@pytest.mark.parametrize("name", ["SparseAdm", "sparseadam", "LBFG", "lbfgs"])
def test_optimizers_that_are_refused_are_not_suggested(name: str) -> None:
    text = message({"optimizer": {"type": name}})
    assert "'SparseAdam'" not in text
    assert "'LBFGS'" not in text


def test_an_unknown_key_at_the_top_refers_to_the_docs() -> None:
    expected = r"ignored.* foo is not a key of the config \(its value is 1\)\. Remove it\..* 'wall_clock_breakdown'\?"
    with pytest.warns(UserWarning, match=expected) as caught:
        assert load_config({"foo": 1, "wall_clock_brakdown": True, "bf16": {}}) == load_config({"bf16": {}})
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"Did you mean zero_optimization\.stage\?"):
        load_config({"stage": 2})
    expected = "fp16.foo is not a key of fp16 (its value is 1). Remove it. docs/config.md lists all keys."
    assert message({"fp16": {"foo": 1}}) == expected
    found = message({"zero_optimization": {"stage_3_prefetch_bucket_size": 1}})
    assert "Did you mean 'stage3_prefetch_bucket_size' or " in found
    assert found.endswith("? docs/config.md lists all keys.")
    assert len(found) < 300  # The section has more than 50 keys, which are not listed.


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"zero_optimization": {"stage": "2"}}, "must be 0, 1, 2 or 3. Write the number without quotes."),
        ({"train_batch_size": "8"}, "or null. Write the number without quotes."),
        (adam(lr="1e-3"), "a finite number >= 0. Write the number without quotes. The value of optimizer.type"),
        ({"fp16": {"enabled": "True"}}, "must be true or false. Write true without quotes."),
        ({"zero_optimization": {"stage": "4"}}, "must be 0, 1, 2 or 3."),
        ({"fp16": {"enabled": "1"}}, "must be true or false."),
    ],
)
def test_a_quoted_number_or_boolean_is_noticed(given: dict[str, Any], remedy: str) -> None:
    text = message(given)
    assert remedy in text
    assert ("without quotes" in text) == ("without quotes" in remedy)


def test_a_broken_config_gives_the_errors_of_both_parsers(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    text = '{"train_batch_size": 8 "zero_optimization": {'
    file.write_text(text)
    both = "As JSON: Expecting ',' delimiter: line 1 column 24 (char 23). As HJSON: Bad key name (eof): line 1 "
    found = message(file)
    assert found.startswith(f"{file}: The text is not valid JSON or HJSON. {both}")
    assert found.endswith(". Correct it at this place.")
    found = message(base64.urlsafe_b64encode(text.encode()).decode())
    assert f"read as base64: The text is not valid JSON or HJSON. {both}" in found
    assert found.endswith(". Correct it at this place.")


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    assert str(tmp_path) in message(tmp_path)


def test_a_dict_within_itself_is_an_error() -> None:
    given: dict[str, Any] = {}
    given["fp16"] = given
    assert "nested" in message(given)


def test_the_dict_given_is_left_alone() -> None:
    given = {"zero_optimization": {"cpu_offload": True}, "bfloat16": {"enabled": "auto"}}
    before = json.dumps(given)
    load_config(given)
    assert json.dumps(given) == before


def test_old_spellings() -> None:
    config = load_config({"zero_optimization": {"cpu_offload": True, "max_live_parameters": 5}, "bfloat16": {}})
    assert config.zero_optimization.offload_optimizer is not None
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.stage3_max_live_parameters == 5
    assert notes(config)[0].startswith("zero_optimization.cpu_offload: ")
    assert load_config({"zero_optimization": {"cpu_offload": False}}).zero_optimization.offload_optimizer is None
    assert load_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert load_config({"zero_optimization": False}).zero_optimization.stage == 0
    gather = {"stage3_gather_fp16_weights_on_model_save": True}
    zero = load_config({"zero_optimization": gather}).zero_optimization
    assert zero.stage3_gather_16bit_weights_on_model_save is True


def test_one_name_for_each_dtype() -> None:
    for name in ("bf16", "bfloat16", "torch.bfloat16"):
        config = load_config(
            {"torch_autocast": {"enabled": True, "dtype": name}, "data_types": {"grad_accum_dtype": name}}
        )
        assert config.torch_autocast.dtype == "bfloat16"
        assert config.data_types.grad_accum_dtype == "bf16"


def test_notes() -> None:
    assert notes(load_config(offload())) == []
    config = load_config(
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.3}, "zenflow": None},
            "data_types": {"grad_accum_dtype": "bf16"},
            **adam(set_grad_none=True),
        }
    )
    lines = notes(config)
    assert [line.split(":")[0] for line in lines] == [
        "data_types.grad_accum_dtype",
        "optimizer.params.set_grad_none",
        "zero_optimization.offload_optimizer.ratio",
    ]
    assert all("no effect here, because" in line for line in lines)
    quiet = load_config({**offload(ratio=1.0), "data_types": {"grad_accum_dtype": "fp32"}})
    assert notes(quiet) == []
    assert notes(load_config({})) == []


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        (adam(), "adamw", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        (adam(adam_w_mode=False, lr=1), "adam", {"lr": 1.0, "weight_decay": 0.0}),
        (adam(torch_adam=True), "adamw", {"weight_decay": 1e-2}),
        (adam(torch_adam=True, adam_w_mode=False), "adam", {"weight_decay": 0.0}),
        ({"optimizer": {"type": "ADAMW", "params": {"adam_w_mode": False}}}, "adamw", {}),
        ({"optimizer": {"type": "Lion"}}, "lion", {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ({"optimizer": {"type": "Adagrad"}}, "adagrad", {"lr": 1e-2, "eps": 1e-10}),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}}, "sgd", {"nesterov": True}),
        ({"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}}, "RMSprop", {"alpha": 0.9}),
    ],
)
def test_optimizer_choice(given: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    found = optimizer_choice(load_config(given))
    assert found[0] == name
    assert {key: found[1][key] for key in options} == options


def test_no_optimizer_to_choose() -> None:
    with pytest.raises(ValueError, match="optimizer"):
        optimizer_choice(load_config({}))
    assert load_config({"optimizer": {"type": "auto", "params": {}}}).optimizer is None


def test_schedules() -> None:
    params = {"warmup_num_steps": 1e3, "warmup_max_lr": [1e-3, 2e-3]}
    scheduler = load_config({"scheduler": {"type": "warmuplr", "params": params}}).scheduler
    assert scheduler is not None
    assert scheduler.params == {"warmup_num_steps": 1000, "warmup_max_lr": (1e-3, 2e-3)}
    for name in (
        "LRRangeTest",
        "OneCycle",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "CosineAnnealingLR",
        "ReduceLROnPlateau",
    ):
        load_config({"scheduler": {"type": name}})


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (32, 4, 2, 4, Batch(32, 4, 2)),
        (32, 4, None, 2, Batch(32, 4, 4)),
        (32, None, 2, 4, Batch(32, 4, 2)),
        (None, 4, 2, 4, Batch(32, 4, 2)),
        (32, None, None, 4, Batch(32, 8, 1)),
        (None, 4, None, 4, Batch(16, 4, 1)),
        (1, 1, 1, 1, Batch(1, 1, 1)),
        (32, 4, 3, 4, None),
        (33, 4, None, 2, None),
        (33, None, 2, 4, None),
        (33, None, None, 4, None),
        (2, 4, None, 1, None),
        (2, None, None, 4, None),
        (None, None, 2, 1, None),
        (None, None, None, 1, None),
    ],
)
def test_batch_sizes(train: int | None, micro: int | None, steps: int | None, world: int, expected: Any) -> None:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    config = load_config({key: value for key, value in given.items() if value is not None})
    if expected is not None:
        assert resolve_batch(config, world) == expected
        return
    with pytest.raises(ValueError, match="train_batch_size") as caught:
        resolve_batch(config, world)
    for number in (train, micro, steps, world):
        assert str(number) in str(caught.value)


@pytest.mark.parametrize("world", [0, -1, 1.5, True])
def test_world_size(world: Any) -> None:
    with pytest.raises(ValueError, match="world_size"):
        resolve_batch(load_config({"train_batch_size": 1}), world)


def test_torch_is_not_imported_for_our_own_optimizers() -> None:
    code = (
        "import sys; from twinflow.config import load_config;"
        "load_config({'optimizer': {'type': 'AdamW'}, 'scheduler': {'type': 'WarmupLR'}});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
