# SPDX-License-Identifier: Apache-2.0
"""What the planner says about the machines and models that papers on offload report, beside the papers' figures.

Plain arithmetic: no GPU, nothing is measured. Prints tables and one JSON line; `--save` writes a dated file in
benchmarks/results. Rates of machines that are not here come from data sheets (planner/machines.py), so seconds are
estimates; bytes are exact for what the runtime allocates.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinflow.planner.cases import Setting, best_case, case_at, largest_layers
from twinflow.planner.costs import Memory, Run, fits, timing_of
from twinflow.planner.formats import WEIGHT_BYTES, state_bytes
from twinflow.planner.machines import GB, GPUS, Host, Machine, link_rate, rates_of
from twinflow.planner.models import ModelCost, from_hf, gpt_cost

DGX2 = Host(1500 * GB, 48, 190e9)  # 2 Xeon 8168; 12 channels of DDR4-2666: 256 GB/s at most
DGX_A100 = Host(1000 * GB, 128, 300e9)  # 2 EPYC 7742; 16 channels of DDR4-3200: 410 GB/s at most
DGX_H100 = Host(2000 * GB, 112, 460e9)  # 2 Xeon 8480C; 16 channels of DDR5-4800: 614 GB/s at most
VOCAB, TOKENS = 50_304, 1024
DEEPSPEED_BYTES = 46.0  # of host memory traffic a parameter: fp32 gradient, clip pass, separate cast
DEEPSPEED_COPY = 4.0  # bytes a parameter that come back after the update, nothing beside them

# Parameters (billions), sequences a GPU, GPUs that share each weight, blocks, width.
TABLE = (
    (1, 32, 1, 20, 2048),
    (2, 32, 1, 40, 2048),
    (4, 32, 1, 64, 2304),
    (6, 16, 1, 53, 3072),
    (8, 16, 1, 72, 3072),
    (10, 10, 1, 50, 4096),
    (11, 8, 1, 55, 4096),
    (12, 4, 1, 60, 4096),
    (13, 4, 1, 65, 4096),
    (15, 8, 2, 78, 4096),
    (20, 8, 2, 25, 8192),
    (40, 8, 2, 50, 8192),
    (60, 8, 2, 75, 8192),
    (70, 8, 8, 69, 9216),
)
OPT = {
    "OPT-13B": {"hidden_size": 5120, "num_hidden_layers": 40, "ffn_dim": 20480, "num_attention_heads": 40},
    "OPT-30B": {"hidden_size": 7168, "num_hidden_layers": 48, "ffn_dim": 28672, "num_attention_heads": 56},
}

TEXT = """# Predictions beside published figures, {date}

- `python benchmarks/seed_predictions.py`: arithmetic of the planner, nothing measured. Bytes are what the runtime
  allocates; seconds are estimates from data sheets (DRAM of DGX-2, DGX A100 and DGX H100: 190, 300 and 460 GB/s).

## One V100 of 32 GB, 1.5 TB of RAM

{one_card}

## The models of ZeRO-Offload's table: GPT-2 shapes, 1,024 tokens, fp16, full offload

GPU bytes of one card / host bytes of the machine without speculative stores, model TFLOPS a card.

{table}

The paper trains up to 13 B on one card and 70 B on sixteen, and the arithmetic agrees. It does not for the 40 and 60 B
rows at MP 2: half of the fp16 weights is more than a card holds, they need MP 4 and 8. TFLOPS are near the 70 assumed
for a V100's matrix products, less what is computed again; talk between the cards of one weight (MP) is not counted.

## Twin-Flow: OPT on a DGX, ZeRO-3, speed-up over DeepSpeed's full offload

{twin_flow}

The paper's 3x (A100) and 6x (H100) name neither batch nor length, and compare DeepSpeed with itself. The fewer tokens a
card has, the more of a step is the update, and the more there is to gain: 3x is passed between 1,024
and 2,048 tokens a card, 6x as well.
DeepSpeed's step is modelled as forward and backward, then 46 bytes of DRAM a parameter, then the weights' way back, one
after the other: for the 3.43 B Llama shape on an H200 that gives 1.88 s, measured were 2.00 to 2.12.

## What leaves the GPU

{reductions}

```json
{line}
```
"""


def gpt(layers: int, hidden: int) -> ModelCost:
    return gpt_cost(f"{layers} x {hidden}", VOCAB, TOKENS, layers, hidden, hidden // 128)


def setting(gpu: str, host: Host, num_gpus: int) -> Setting:
    machine = Machine(GPUS[gpu], host, num_gpus)
    return Setting(rates_of(machine), Memory(machine.gpu.memory_bytes, host.ram_bytes), link_rate(machine))


def one_card() -> list[dict[str, Any]]:
    """The largest model on one V100 of 32 GB with 1.5 TB of RAM, with and without offload."""
    place = setting("v100-32", DGX2, 1)
    run = Run(gpt(65, 4096), batch=4, tokens=TOKENS, weights="fp16")
    offloaded = case_at("full offload", run, place, 1.0)
    deepest = largest_layers(run, place.memory)
    tflops = run.model.model_flops(TOKENS) * offloaded.tokens_s / 1e12
    plain = {h: largest_plain(h, place.memory.gpu_bytes) for h in (1600, 2048)}
    return [
        {
            "what": "13 B model, offloaded",
            "paper": "fits; 30 to 40 TFLOPS at 10 to 13 B",
            "ours": f"{'fits' if offloaded.fits else 'does not fit'}: {offloaded.used.gpu_total / 1e9:.1f} GB on the "
            f"GPU, {offloaded.used.host_total / 1e9:.0f} GB on the host with speculative stores; {tflops:.0f} TFLOPS",
            "why": "22% above 40: 70 TFLOPS are assumed for matrix products, of which checkpointing leaves 3/4; by our "
            "arithmetic the host keeps up",
        },
        {
            "what": "largest offloaded, width 4096, 4 sequences",
            "paper": "13 B",
            "ours": f"{run.model.with_layers(deepest).numel / 1e9:.1f} B",
            "why": "8% above: the paper's list of models ends at 65 blocks, ours counts to the last gigabyte",
        },
        {
            "what": "largest without offload",
            "paper": "1.3 to 1.4 B",
            "ours": f"{plain[1600] / 1e9:.2f} B at width 1600, {plain[2048] / 1e9:.2f} B at width 2048",
            "why": "40% above: 16 bytes a parameter, checkpointed activations, no gaps; mixed precision in PyTorch has "
            "more (fp32 weights and gradients beside half-precision copies; measured under a cap of 32 GB: 1.56 B)",
        },
    ]


def largest_plain(hidden: int, gpu_bytes: int) -> int:
    """The deepest GPT-2 whose weights, gradients and fp32 state all lie on the card: 16 bytes a parameter."""
    a_param = 2 * WEIGHT_BYTES["fp16"] + state_bytes("fp32", "fp16").resident
    models = [gpt(layers, hidden) for layers in range(1, 200)]
    need = [a_param * model.numel + Run(model, 4, TOKENS).activation_bytes for model in models]
    return max(m.numel for m, n in zip(models, need, strict=True) if n <= gpu_bytes)


def table_rows() -> list[dict[str, Any]]:
    """Every row of the paper's table of models on 1, 4 and 16 V100."""
    rows = []
    for billions, batch, parallel, layers, hidden in TABLE:
        model = gpt(layers, hidden)
        row: dict[str, Any] = {"paper": f"{billions} B, batch {batch}, MP {parallel}, {layers} x {hidden}"}
        row["params"] = f"{model.numel / 1e9:.2f} B"
        for num in (1, 4, 16):
            row[f"{num} GPU"] = on_v100(model, batch, parallel, num)
        rows.append(row)
    return rows


def on_v100(model: ModelCost, batch: int, parallel: int, num: int) -> str:
    """GPU and host bytes and the model's TFLOPS a card, or what is missing."""
    if parallel > num:
        return f"needs {parallel} GPUs"
    place = setting("v100-32", DGX2, num)
    run = Run(model, batch, TOKENS, weights="fp16", world=num, stage=2, tensor_parallel=parallel)
    case = case_at("full offload", run, place, 1.0)
    if not case.fits:
        wider = [m for m in (2, 4, 8) if parallel < m <= num and fits(replace(run, tensor_parallel=m), place.memory)]
        weights = case.used.gpu["weights"] / 1e9
        return f"weights alone {weights:.1f} GB a card; " + (f"MP {wider[0]} fits" if wider else "no MP up to 8 fits")
    tflops = model.model_flops(TOKENS) * case.tokens_s / num / 1e12
    state = case.used.host_total - case.used.host["shadows"]
    return f"{case.used.gpu_total / 1e9:.1f} / {state / 1e9:.0f} GB, {tflops:.0f} TFLOPS"


def twin_flow() -> list[dict[str, Any]]:
    """OPT models on a DGX: the best ratio, and how much faster than DeepSpeed's full offload."""
    rows = []
    for name, gpu, host, paper in (("OPT-13B", "a100-40", DGX_A100, 3.0), ("OPT-30B", "h100", DGX_H100, 6.0)):
        model = from_hf({"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048, **OPT[name]}, name)
        rows += [twin_flow_row(model, setting(gpu, host, 8), host, tokens, paper) for tokens in (512, 1024, 2048, 8192)]
    return rows


def twin_flow_row(model: ModelCost, place: Setting, host: Host, tokens: int, paper: float) -> dict[str, Any]:
    run = Run(model, max(1, tokens // 2048), min(tokens, 2048), world=8, stage=3)
    timing = timing_of(run, place.rates, place.link_rate)
    baseline = deepspeed_step(model.numel, timing.gpu_s, host.dram_rate, 8 * place.rates.in_bytes)
    best, full = best_case(run, place), case_at("full offload", run, place, 1.0)
    return {
        "what": f"{model.name}, 8 GPUs, {tokens:,} tokens each",
        "deepspeed_s": round(baseline, 2),
        "full_s": round(full.prediction.step_s, 2),
        "best_s": round(best.prediction.step_s, 2),
        "ratio": round(best.ratio, 2),
        "speedup": round(baseline / best.prediction.step_s, 1),
        "paper": paper,
        "gpu_gb": round(best.used.gpu_total / 1e9, 1),
    }


def deepspeed_step(numel: int, gpu_s: float, dram_rate: float, copy_rate: float) -> float:
    """DeepSpeed's full offload: forward and backward, then the update, then the weights' way back. On the H200 of
    record this gives 1.88 s for the 3.43 B Llama shape; measured were 2.00 to 2.12."""
    return gpu_s + DEEPSPEED_BYTES * numel / dram_rate + DEEPSPEED_COPY * numel / copy_rate


def reductions() -> list[dict[str, Any]]:
    """Bytes a parameter on the GPU by what leaves it, fp16 weights."""
    weight, grad, state = WEIGHT_BYTES["fp16"], WEIGHT_BYTES["fp16"], state_bytes("fp32", "fp16").resident
    whole = weight + grad + state
    steps = (
        ("nothing leaves", whole, 1.0),
        ("gradients leave as they come", weight + state, 1.14),
        ("master, m and v leave, updated on the host", weight + grad, 4.0),
        ("both", weight, 8.0),
    )
    return [{"what": n, "bytes a parameter": b, "ours": round(whole / b, 2), "paper": p} for n, b, p in steps]


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    keys = list(rows[0])
    lines = [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
    return lines + ["| " + " | ".join(str(row[key]) for key in keys) + " |" for row in rows]


def page(date: str) -> str:
    parts = {"one_card": one_card(), "table": table_rows(), "twin_flow": twin_flow(), "reductions": reductions()}
    return TEXT.format(
        date=date,
        **{name: "\n".join(markdown(rows)) for name, rows in parts.items()},
        line=json.dumps({"date": date, **parts}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    date = datetime.date.today().isoformat()
    text = page(date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-seed-predictions.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
