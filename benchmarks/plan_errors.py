# SPDX-License-Identifier: Apache-2.0
"""The planner beside measured runs: bytes, seconds and the errors.

python benchmarks/plan_errors.py

The runs are those of benchmarks/results whose settings the planner can describe (one H200, 16 cores, 126 GiB) and that
`tests/unit/test_planner.py` does not have. Rates are those of the data sheet, so nothing is measured here.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final
from unittest.mock import patch

from twinflow.models.gpt import PRESETS, cost_of
from twinflow.planner import costs
from twinflow.planner.cases import Setting
from twinflow.planner.costs import (
    PROCESS_BYTES,
    Memory,
    Run,
    bytes_of,
    clip_decision_of,
    items_of,
    placed_at,
    timing_of,
    ways_of,
)
from twinflow.planner.formats import gpt_activations
from twinflow.planner.long import Kept
from twinflow.planner.machines import GB, GPUS, Host, Machine, rates_of
from twinflow.planner.models import ModelCost, from_hf, with_fused_head
from twinflow.planner.placement import at_ratio
from twinflow.planner.simulate import ClipDecision, predict

MACHINE: Final = Machine(GPUS["h200"], Host(135 * GB, 16, 150e9))


@dataclass(frozen=True)
class Measured:
    """A run of benchmarks/results. None: not measured."""

    what: str
    file: str  # in benchmarks/results, without .md
    run: Run
    ratio: float
    step_s: float
    gpu_gb: float | None = None
    host_gb: float | None = None
    cap_gb: float = 150.0  # GPU memory that the run was allowed to use
    always_clipped: bool = False  # every step was clipped, so no update before the decision was kept
    host_cap_gb: float = 135.0  # host memory that the run was allowed to use
    with_process: bool = False  # `host_gb` has the process too
    is_spare_used: bool = False  # speculative stores took the spare host memory, and not only half of the free one


@dataclass(frozen=True)
class Error:
    """Prediction over measurement, less 1."""

    measured: Measured
    seconds: float
    gpu: float | None
    host: float | None
    step_s: float
    gpu_gb: float
    host_gb: float


def hf(kind: str, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> ModelCost:
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return from_hf(config, kind)


def gpt(num_layers: int) -> ModelCost:
    return cost_of(replace(PRESETS["gpt2-10b"], num_layers=num_layers), "gpt")


def runs() -> list[Measured]:
    qwen = hf("qwen2", 1536, 28, 8960, 12, 2, 151_936, True)
    small = hf("qwen2", 896, 24, 4864, 14, 2, 151_936, True)
    llama3, llama7 = (
        hf("llama", 3200, 26, 8640, 32, 32, 32_000, False),
        hf("llama", 4096, 32, 11_008, 32, 32, 32_000, False),
    )
    opt = from_hf(
        {
            "model_type": "opt",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "ffn_dim": 20_480,
            "num_attention_heads": 40,
            "vocab_size": 50_272,
            "max_position_embeddings": 2048,
        }
    )
    gpt350 = from_hf(
        {
            "model_type": "gpt2",
            "n_embd": 1024,
            "n_layer": 24,
            "n_head": 16,
            "n_positions": 2048,
            "vocab_size": 50_304,
        }
    )
    flow, models = "2026-11-18-twin-flow-opt-13b", "2026-11-17-real-models"
    found = [
        Measured(
            "GPT 8.67 B, weights on the host, bf16",
            "2026-11-15-offload-param",
            Run(gpt(42), 8, 1024, states="bf16", offload_params=True),
            1.0,
            1.758,
            7.643,
            cap_gb=16,
        ),
        Measured(
            "GPT 6.65 B, fp32, no clipping",
            "2026-11-18-memory-caps-offload",
            Run(gpt(32), 1, 1024, clips=False),
            1.0,
            1.65,
            15.36,
            80.87,
            cap_gb=16,
        ),
        Measured(
            "Llama 6.74 B, fp32, every step clipped",
            "2026-11-16-hf-trainer-7b",
            Run(llama7, 4, 2048),
            0.5,
            1.358,
            66.43,
            always_clipped=True,
        ),
        Measured("Qwen2.5 1.54 B, fp32", models, Run(qwen, 4, 2048), 0.0, 0.2646),
        Measured("Qwen2.5 0.49 B, fp32", models, Run(small, 4, 2048), 0.0, 0.1632),
        Measured(
            "Llama 3.43 B, fp32, no clipping",
            f"{models}-buckets",
            Run(llama3, 4, 2048, clips=False),
            1.0,
            0.7225,
        ),
        Measured(
            "Llama 3.43 B, fp32, 4 micro-batches",
            f"{models}-buckets",
            Run(llama3, 4, 2048, micro_batches=4),
            0.54,
            2.291,
        ),
    ]
    for ratio, step_s, gpu_gb, host_gb in (
        (1.0, 0.1688, 34.0, 10.9),
        (0.5, 0.1325, 35.8, 6.6),
        (0.0, 0.1291, 37.6, None),
    ):
        run = Run(gpt350, 8, 2048, checkpointing=False)
        what = "GPT-2 0.36 B, fp32, no checkpointing"
        found.append(Measured(what, "2026-11-18-twin-flow-gpt-350m", run, ratio, step_s, gpu_gb, host_gb))
    for ratio, step_s, gpu_gb, host_gb in (
        (1.0, 1.977, 29.5, 105.5),
        (0.75, 1.740, 48.9, 79.6),
        (0.5, 1.143, 68.3, 53.3),
        (0.25, 0.749, 87.6, 27.9),
        (0.0, 0.508, 106.7, None),
    ):
        run = Run(opt, 1, 2048, states="bf16", clips=False)
        found.append(Measured("OPT 12.85 B, bf16, no clipping", flow, run, ratio, step_s, gpu_gb, host_gb))
    largest = hf("llama", 8192, 80, 28_672, 64, 8, 32_000, False)
    run = Run(largest, 4, 2048, states="4bit", master="none", clips=False, offload_params=True)
    what = "Llama 68.98 B, 4-bit, no master, weights on the host, no clipping"
    found.append(Measured(what, "2026-11-19-70b", run, 0.4838, 9.469, 132.47, 106.87, with_process=True))
    return found + finetuned() + on_host()


def finetuned() -> list[Measured]:
    """Runs of benchmarks/finetune.py."""
    first, second = "2026-11-18-finetune-llama3-8b", "2026-11-19-finetune-llama3-8b"
    llama8 = hf("llama", 4096, 32, 14_336, 32, 8, 128_256, False)
    full, frozen = with_fused_head(llama8, True), with_fused_head(llama8, False)
    int8 = Run(full, 8, 2048, states="int8", offload_params=True)
    lora = Run(frozen, 4, 2048, 4, adapter_rank=16, offload_params=True)
    qlora = replace(lora, offload_params=False, four_bits=True)
    rows = [
        ("8 B, int8, weights on the host, clipped", first, int8, 0.87, 2.338, 19.10, 63.12, 24),
        ("8 B, the same, no clipping", second, replace(int8, batch=7, clips=False), 0.99, 1.745, 13.03, 50.95, 16),
        ("8 B, LoRA, weights on the host", second, lora, 0.94, 3.770, 8.84, 16.26, 12),
        ("8 B, QLoRA", second, replace(qlora, batch=2, micro_batches=8), 0.0, 4.437, 8.63, 1.99, 12),
        ("8 B, QLoRA, larger micro-batches", first, qlora, 0.0, 3.919, 10.23, 2.70, 12),
    ]
    return [
        Measured(what, file, run, ratio, step_s, gpu_gb, host_gb, cap_gb, "clipped" in what, 64.0, True)
        for what, file, run, ratio, step_s, gpu_gb, host_gb, cap_gb in rows
    ]


def on_host() -> list[Measured]:
    """Runs of benchmarks/weights_on_host.py."""
    llama = chunked(hf("llama", 4096, 32, 14_336, 32, 8, 128_256, False))
    qwen = chunked(hf("qwen2", 3584, 28, 18_944, 28, 4, 152_064, False))
    bf16 = Run(llama, 4, 2048, states="bf16", offload_params=True)
    int8 = replace(bf16, model=qwen, states="int8")
    long = replace(bf16, batch=16, kept=Kept(on_host=len(llama.blocks)))
    llama_text, qwen_text = "Llama 8.03 B, bf16, weights on the host", "Qwen2.5 7.62 B, int8, weights on the host"
    rows = [
        (llama_text, bf16, 1.256, 10.07, 126.9, 12),
        (f"{llama_text}, every step clipped", bf16, 1.872, 9.95, 126.9, 24),
        (f"{llama_text}, 16 sequences", long, 4.085, 14.31, 120.3, 16),
        (f"{llama_text}, 16 sequences, every step clipped", long, 4.072, 14.31, 120.3, 24),
        (qwen_text, int8, 1.090, 9.97, 111.8, 12),
        (f"{qwen_text}, every step clipped", int8, 1.660, 9.97, 111.8, 24),
    ]
    return [
        Measured(
            what,
            "2026-11-19-weights-on-host-limits",
            run,
            1.0,
            step_s,
            gpu_gb,
            host_gb,
            cap_gb,
            "clipped" in what,
            host_cap_gb=131.9,
            is_spare_used=True,
        )
        for what, run, step_s, gpu_gb, host_gb, cap_gb in rows
    ]


def chunked(model: ModelCost) -> ModelCost:
    """The model with the loss of `chunk_loss`, which is that of twinflow's GPT."""
    loss = gpt_activations(model.hidden, model.num_heads, model.vocab_size)
    return replace(
        model,
        activations=replace(
            model.activations,
            loss_bytes=loss.loss_bytes,
            fixed_bytes=loss.fixed_bytes,
            chunk_tokens=loss.chunk_tokens,
            chunk_bytes=loss.chunk_bytes,
        ),
    )


def error_of(measured: Measured) -> Error:
    run, rates = measured.run, rates_of(MACHINE)
    memory = Memory(min(int(measured.cap_gb * GB), MACHINE.gpu.memory_bytes), int(measured.host_cap_gb * GB))
    setting = Setting(rates, memory)
    # When older runs were measured, speculative stores took at most half of the free host memory.
    with (
        nullcontext()
        if measured.is_spare_used
        else patch.object(costs, "reserved_bytes", lambda free_bytes: free_bytes - free_bytes // 2)
    ):
        used = bytes_of(run, placed_at(run, measured.ratio), setting.memory)
    timing = timing_of(run, rates)
    decision = ClipDecision(True, 0) if measured.always_clipped else clip_decision_of(run, used)
    items = at_ratio(items_of(run, timing), measured.ratio)
    step_s = predict(items, timing, rates, run.states, decision, ways_of(run, timing)).step_s
    process = 0 if measured.with_process else PROCESS_BYTES
    gpu_gb, host_gb = used.gpu_total / GB, (used.host_total - process) / GB
    return Error(
        measured,
        step_s / measured.step_s - 1.0,
        gpu_gb / measured.gpu_gb - 1.0 if measured.gpu_gb is not None else None,
        host_gb / measured.host_gb - 1.0 if measured.host_gb is not None else None,
        step_s,
        gpu_gb,
        host_gb,
    )


def table(link: str = "results/") -> str:
    """A Markdown table: predicted / measured and the error. `link`: where the results are."""
    lines = [
        "| run | ratio | s/step | error | GPU GB | error | host GB | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in map(error_of, runs()):
        one = found.measured
        cells = [f"[{one.what}]({link}{one.file}.md)", f"{one.ratio:g}", f"{found.step_s:.3f} / {one.step_s:.3f}"]
        cells.append(f"{100 * found.seconds:+.0f}%")
        for value, real, error in ((found.gpu_gb, one.gpu_gb, found.gpu), (found.host_gb, one.host_gb, found.host)):
            cells += (
                ["", ""] if real is None or error is None else [f"{value:.1f} / {real:.1f}", f"{100 * error:+.1f}%"]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
