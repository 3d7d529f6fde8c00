# SPDX-License-Identifier: Apache-2.0
"""Long sequences on one GPU, with the shape of Llama-3-8B and random bf16 weights.

Parts (expected seconds on an H200, with building the model):

tiled-32k       10  forward and backward of 4 layers with tiles and without; both with checkpoints and a loss in chunks
tiled-128k      60  the same
window-1m       45  4 layers at 1 M tokens, sparse attention with a window of 8k and 1k global tokens
dense-512k      70  2 layers at 512k tokens, causal attention
dense-1300k    320  2 layers at 1.3 M tokens; host buffers for the inputs of all 32 layers are allocated
whole-512k     850  a whole step of all 32 layers with TwinOptimizer (not in the default)
whole-window-1m 230 a whole step of all 32 layers at 1 M tokens with the window (not in the default)

Every part but the tiled ones keeps the input of every 2nd layer (float8 on the host from 1 M tokens on), prints the
peak bytes beside those of the planner, and the time of all 32 layers, extrapolated from the measured layers and from
the time without layers. Each part prints its row when it ends. A part that fails prints its error, and the others run.

python benchmarks/long_sequences.py --save
python benchmarks/long_sequences.py --parts whole-512k --save
python benchmarks/long_sequences.py --parts window-1m --disk FOLDER
python benchmarks/long_sequences.py --tiny           # any machine: shows that the parts run
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from twinflow.activations import Handle, checkpoint_layers
from twinflow.activations.offload import MIN_BYTES
from twinflow.attention import BSLongformerSparsityConfig, sparsify
from twinflow.bench.machine import describe, read_machine
from twinflow.device import device_for
from twinflow.integrations.chunked_loss import chunk_loss
from twinflow.integrations.tiled import tile_sequence
from twinflow.offload.blocks import find_blocks
from twinflow.offload.materialize import build as build_model
from twinflow.optim.twin import TwinOptimizer
from twinflow.planner import long
from twinflow.planner.long import Kept
from twinflow.planner.models import ModelCost, from_hf

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
K, M = 1 << 10, 1 << 20
GB = 1e9
BLOCK, WINDOW, GLOBALS = 128, 8192, 1024  # tokens
HEADS = [
    "part",
    "layers",
    "tokens",
    "forward_s",
    "backward_s",
    "gpu_gb",
    "planned_gpu_gb",
    "host_gb",
    "planned_host_gb",
]
HEADS += ["ends_s", "all_layers_s", "note"]


@dataclass(frozen=True)
class Part:
    tokens: int
    num_layers: int = 2
    is_sparse: bool = False
    every: int = 2
    is_float8: bool = False
    on_host: bool = False
    on_device: int = 0  # layers at the end whose inputs stay on the GPU
    is_whole: bool = False  # a step with the optimizer
    has_all_buffers: bool = False  # host buffers for the inputs of all layers


PARTS = {
    "tiled-32k": Part(32 * K, 4),
    "tiled-128k": Part(128 * K, 4),
    "window-1m": Part(M, 4, is_sparse=True, is_float8=True, on_host=True),
    "dense-512k": Part(512 * K),
    "dense-1300k": Part(1_300_000, is_float8=True, on_host=True, has_all_buffers=True),
    "whole-512k": Part(512 * K, 32, on_host=True, on_device=12, is_whole=True),
    "whole-window-1m": Part(M, 32, is_sparse=True, is_float8=True, on_host=True, on_device=4, is_whole=True),
}
DEFAULT = [name for name, part in PARTS.items() if not part.is_whole]


class Shape:
    def __init__(self, tiny: bool) -> None:
        self.num_layers = 4 if tiny else 32
        self.scale = K if tiny else 1  # divides the numbers of tokens
        self.sizes = {
            "hidden_size": 64 if tiny else 4096,
            "intermediate_size": 96 if tiny else 14336,
            "num_attention_heads": 4 if tiny else 32,
            "num_key_value_heads": 2 if tiny else 8,
            "vocab_size": 128 if tiny else 128_256,
        }
        self.block = 16 if tiny else BLOCK
        self.tile = 16 if tiny else 8192

    def cost(self) -> ModelCost:
        given = {**self.sizes, "model_type": "llama", "num_hidden_layers": self.num_layers}
        return from_hf(given, "Llama-3-8B")

    def tokens(self, part: Part) -> int:
        return -(-part.tokens // self.scale // 64) * 64

    def pattern(self) -> BSLongformerSparsityConfig:
        return BSLongformerSparsityConfig(
            num_heads=self.sizes["num_attention_heads"],
            block=self.block,
            num_sliding_window_blocks=2 * max(1, WINDOW // self.scale // self.block) - 1,
            global_block_indices=(0,),
            global_block_end_indices=(max(1, GLOBALS // self.scale // self.block),),
            attention="unidirectional",
        )

    def model(self, num_layers: int, tokens: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **self.sizes,
            num_hidden_layers=num_layers,
            max_position_embeddings=tokens,
            use_cache=False,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        dtype = torch.bfloat16 if CUDA else torch.float32
        return build_model(lambda: LlamaForCausalLM(config), DEVICE, dtype).train()


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if CUDA else 0


def clear() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# cuDNN's attention is faster than FlashAttention 2 on Hopper, but does not support every length.
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@contextmanager
def attention_of(name: str) -> Iterator[None]:
    if not CUDA:
        yield
        return
    with sdpa_kernel([BACKENDS[name], SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        yield


def run(name: str, part: Part, shape: Shape, disk: str | None) -> dict[str, Any]:
    """The row of a part. If cuDNN's attention fails, the part runs again with FlashAttention."""
    for backend in BACKENDS:
        try:
            with attention_of(backend):
                row = compare(shape, part) if name.startswith("tiled") else train(shape, part, disk)
            return {**row, "note": f"{row['note']}, {backend}"}
        except torch.OutOfMemoryError as error:
            return failed(error)
        except Exception as error:  # the other parts run in any case
            row = failed(error)
        clear()
    return row


def failed(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"note": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}


def data_of(model: Any, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator).to(DEVICE)


def forward_backward(model: Any, data: torch.Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    synchronize()
    start = time.perf_counter()
    loss = model(input_ids=data, labels=data).loss
    synchronize()
    middle = time.perf_counter()
    loss.backward()
    synchronize()
    end = time.perf_counter()
    assert bool(loss.isfinite()), "the loss is not finite"
    model.zero_grad()
    return middle - start, end - middle


def compare(shape: Shape, part: Part) -> dict[str, Any]:
    """The time with tiles relative to that without."""
    tokens = shape.tokens(part)
    model = shape.model(part.num_layers, tokens)
    data, handle = data_of(model, tokens), checkpointed(model, Part(part.tokens, every=1))
    found: dict[bool, tuple[float, float, int]] = {}
    for is_tiled in (False, True):
        tiles: Any = tile_sequence(model, shape.tile) if is_tiled else chunk_loss(model)
        forward_backward(model, data)
        clear()
        rounds = [forward_backward(model, data) for _ in range(2)]
        best = min(rounds, key=sum)
        found[is_tiled] = (*best, peak())
        tiles.remove()
    handle.remove()
    ratio = sum(found[True][:2]) / sum(found[False][:2])
    text = f"x {ratio:.3f} of untiled {sum(found[False][:2]):.3f} s and {found[False][2] / GB:.1f} GB"
    return {"forward_s": found[True][0], "backward_s": found[True][1], "gpu": found[True][2], "note": text}


def checkpointed(model: nn.Module, part: Part, disk: str | None = None) -> Handle:
    layers = [block.module for block in find_blocks(model)]
    return checkpoint_layers(
        model,
        layers,
        offload=part.on_host,
        every=part.every,
        on_device=part.on_device,
        float8=part.is_float8,
        min_bytes=MIN_BYTES if CUDA else 1,
        disk=disk if part.on_host else None,
    )


def train(shape: Shape, part: Part, disk: str | None) -> dict[str, Any]:
    """Forward and backward of some layers, or a step of all."""
    tokens, cost = shape.tokens(part), shape.cost()
    num_layers = min(part.num_layers, shape.num_layers)
    model = shape.model(num_layers, tokens)
    if part.is_sparse:
        sparsify(model, shape.pattern())
    tiles = tile_sequence(model, shape.tile)
    optimizer = TwinOptimizer(model, "adamw", lr=1e-6, states="int8", ratio=1.0, early=True) if part.is_whole else None
    handle = checkpointed(model, part, disk)
    on_host = -(-(shape.num_layers - part.on_device) // part.every) if part.on_host else 0
    kept = Kept(part.every, on_host, part.is_float8)
    width = 2 if CUDA else 4
    buffers, device = [], device_for(DEVICE)
    for _ in range(on_host - -(-num_layers // part.every) if part.has_all_buffers else 0):
        size = kept.input_bytes(cost.hidden, width, tokens)
        buffers.append(device.pinned(size, torch.uint8))
    data = data_of(model, tokens)
    clear()
    base = torch.cuda.memory_allocated() if CUDA else 0
    forward_s, backward_s = forward_backward(model, data) if optimizer is None else step(model, data, optimizer)
    gpu, offload = peak(), handle.offload
    host = sum(map(len, buffers)) + int(getattr(offload, "host_bytes", 0))
    here = on_host if part.is_whole else min(on_host, -(-num_layers // part.every))
    gpu_kept = Kept(part.every, here, part.is_float8)
    own = cost.with_layers(num_layers)
    gradients = 0 if part.is_whole else sum(param.numel() * param.element_size() for param in model.parameters())
    planned = base + gradients + long.peak_bytes(own, width, tokens, gpu_kept)
    row = {"forward_s": forward_s, "backward_s": backward_s, "gpu": gpu, "planned_gpu": planned, "host": host}
    row["planned_host"] = kept.host_bytes(cost, width, tokens) if part.on_host else 0
    if optimizer is None:
        layers = model.model.layers
        model.model.layers, model.config.num_hidden_layers = layers[:0], 0
        ends = sum(forward_backward(model, data))
        row |= {"ends_s": ends, "all_s": ends + (forward_s + backward_s - ends) * shape.num_layers / num_layers}
        row["note"] = "all layers extrapolated"
    else:
        row |= {"all_s": forward_s + backward_s, "note": "measured, with the optimizer's step"}
        optimizer.close()
    handle.remove()
    tiles.remove()
    return row


def step(model: Any, data: torch.Tensor, optimizer: TwinOptimizer) -> tuple[float, float]:
    """Seconds of the forward, and of backward and step with all updates."""
    synchronize()
    start = time.perf_counter()
    loss = model(input_ids=data, labels=data).loss
    synchronize()
    middle = time.perf_counter()
    loss.backward()
    optimizer.step()
    optimizer.wait()
    synchronize()
    end = time.perf_counter()
    assert bool(loss.isfinite()), "the loss is not finite"
    return middle - start, end - middle


def line_of(name: str, part: Part, shape: Shape, row: dict[str, Any]) -> str:
    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(row[key] / scale, form) if row.get(key) is not None else "-"

    cells = [name, str(min(part.num_layers, shape.num_layers)), str(shape.tokens(part))]
    cells += [number("forward_s", ".2f"), number("backward_s", ".2f")]
    cells += [number(key, ".1f", GB) for key in ("gpu", "planned_gpu", "host", "planned_host")]
    cells += [number("ends_s", ".2f"), number("all_s", ".1f"), str(row.get("note", ""))]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences")
    parser.add_argument("--disk", help="write the inputs that are on the host to a file in this folder")
    parser.add_argument("--save", action="store_true", help="write a dated file to benchmarks/results")
    args = parser.parse_args()
    shape = Shape(args.tiny)
    head = "| " + " | ".join(HEADS) + " |"
    lines, rows = [], {}
    begin = time.perf_counter()
    for name in args.parts:
        part = PARTS[name]
        start = time.perf_counter()
        row = run(name, part, shape, args.disk)
        clear()
        row["seconds"] = time.perf_counter() - start
        lines.append(line_of(name, part, shape, row))
        rows[name] = row
        print(f"{lines[-1]} {row['seconds']:.0f} s", flush=True)
    text = [describe(read_machine()), f"torch {torch.__version__}", "", head, "|" + " --- |" * len(HEADS), *lines]
    text += ["", json.dumps(rows), f"{time.perf_counter() - begin:.0f} s"]
    print("\n".join(text))
    if args.save:
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        path = Path(__file__).parent / "results" / f"{today}-long-sequences.md"
        path.write_text(f"# Long sequences, {today}\n\n" + "\n".join(text) + "\n")
        print(path)


if __name__ == "__main__":
    main()
