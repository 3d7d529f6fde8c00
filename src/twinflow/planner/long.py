# SPDX-License-Identifier: Apache-2.0
"""Memory and time of long sequences: tiled MLPs, norms and loss, and the inputs that checkpointed blocks keep.

With tiles (`twinflow.integrations.tiled.tile_sequence`) the largest memory is that of the backward of attention, whose
tensors have all tokens. Beside it are the inputs of the blocks: of every block or of every n-th one, in the dtype of
the weights or in float8, on the GPU or on the host. The numbers are computed from the operations of a Llama block of
transformers. They are not fitted to measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from twinflow.planner.models import ModelCost

LONG_TOKENS: Final = 1 << 14  # from this length on, a plan considers tiles
TILE_TOKENS: Final = 8192
HEADS_NUMEL: Final = 1 << 29  # elements of the queries whose attention is computed at a time (integrations/tiled.py)
# A fused causal attention needs more time for a FLOP than a large matrix product. An estimate.
ATTENTION_EFFICIENCY: Final = 0.7
# Time of the backward of attention relative to its forward: five products instead of two.
ATTENTION_BACKWARD: Final = 2.5
_WINDOW: Final = 2  # inputs of blocks that are on the GPU while others are on the host
_DISK_BUFFERS: Final = 6  # host buffers for inputs on a disk (activations/disk.py)
_EVERY: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class Kept:
    """How the inputs of checkpointed blocks are kept."""

    every: int = 1  # each n-th block keeps its input
    on_host: int = 0  # number of inputs that are on the host
    is_float8: bool = False
    on_disk: bool = False  # the inputs that are not on the GPU are written to a disk

    def num_inputs(self, num_blocks: int) -> int:
        return -(-num_blocks // self.every)

    def input_bytes(self, hidden: int, width: int, num_tokens: int) -> int:
        """Bytes of the kept input of one block."""
        return num_tokens * (hidden + 4 if self.is_float8 else width * hidden)

    def gpu_bytes(self, model: ModelCost, width: int, num_tokens: int) -> int:
        """Bytes of all inputs on the GPU, with those that exist only while a group of blocks is in backward."""
        count = self.num_inputs(len(model.blocks)) - self.on_host
        whole = width * model.hidden * num_tokens
        moving = (_WINDOW if self.on_host else 0) + self.every - 1
        return count * self.input_bytes(model.hidden, width, num_tokens) + moving * whole

    def host_bytes(self, model: ModelCost, width: int, num_tokens: int) -> int:
        """Bytes of the inputs on the host, or of the buffers for those on a disk."""
        count = min(self.on_host, _DISK_BUFFERS) if self.on_disk else self.on_host
        return count * self.input_bytes(model.hidden, width, num_tokens)

    def disk_bytes(self, model: ModelCost, width: int, num_tokens: int) -> int:
        """Bytes that a forward writes to a disk, and a backward reads. The last inputs are still on the GPU then."""
        count = max(0, self.on_host - _WINDOW) if self.on_disk else 0
        return count * self.input_bytes(model.hidden, width, num_tokens)

    @property
    def again(self) -> float:
        """Share of the blocks that run once more than with a kept input for each block."""
        return 1.0 - 1.0 / self.every

    def layers_on_device(self, num_blocks: int) -> int:
        """The number of layers at the end whose inputs stay on the GPU, as the config has it."""
        return max(0, num_blocks - self.on_host * self.every)


def away_bytes(num_inputs: int, input_bytes: float) -> int:
    """Bytes of the inputs of blocks that are not on the GPU, if `num_inputs` of them are kept on the host."""
    return int(max(0, num_inputs - _WINDOW) * input_bytes)


def choices(num_blocks: int, is_float8: bool, can_group: bool, on_disk: bool = False) -> Iterator[Kept]:
    """All ways to keep the inputs that a plan compares. `on_disk`: those that are not on the GPU are on a disk."""
    for every in _EVERY if can_group else (1,):
        if every > num_blocks:
            continue
        count = -(-num_blocks // every)
        for share in (0, count // 4, count // 2, 3 * count // 4, count):
            yield Kept(every, share, is_float8, on_disk and share > 0)


def block_bytes(model: ModelCost, width: int, num_tokens: int) -> float:
    """Peak bytes for each token in the backward of a tiled block: the backward of its attention.

    These are the input of the block, its norm and the gradient of its output; queries, keys and values with their
    gradients; the result of attention and its gradient; and in the kernel of the backward the gradient of the queries
    in fp32, and gradients of keys and values for each head of queries. The kernel works on some heads at a time.
    """
    attention = model.attention_width or model.hidden
    keys = attention * model.num_kv_heads // model.num_heads if model.num_heads and model.num_kv_heads else attention
    groups = min(-(-num_tokens * attention // HEADS_NUMEL), model.num_kv_heads or 1)
    in_kernel = (4 * attention + (2 * width * attention if keys < attention else 0)) / groups
    return width * (3 * model.hidden + 2 * (attention + 2 * keys) + 2 * attention) + in_kernel


def end_bytes(model: ModelCost, width: int) -> float:
    """Bytes for each token in the loss: the last norm with its input, and the gradient of the loss's input."""
    return 4 * width * model.hidden + 24


def tile_bytes(model: ModelCost, width: int) -> int:
    """Bytes of one tile: the values of MLP width with their gradients, gradients of the MLP's weights in fp32, and a
    chunk of logits in fp32 with the gradient of the head.
    """
    inner = model.inner or 4 * model.hidden
    mlp = TILE_TOKENS * width * 7 * inner + 4 * 3 * inner * model.hidden
    loss = 2048 * (4 + width) * model.vocab_size + 4 * model.vocab_size * model.hidden
    return max(mlp, loss)


def peak_bytes(model: ModelCost, width: int, num_tokens: int, kept: Kept) -> int:
    """Peak memory of a tiled micro-batch on the GPU beside weights, gradients and state."""
    inputs = kept.gpu_bytes(model, width, num_tokens)
    return (
        inputs
        + int(num_tokens * max(block_bytes(model, width, num_tokens), end_bytes(model, width)))
        + tile_bytes(model, width)
    )


def attention_flops(model: ModelCost, tokens: int) -> float:
    """FLOPs of causal attention in a forward, for each token of a sequence of `tokens`."""
    return 2.0 * tokens * (model.attention_width or model.hidden) * len(model.blocks)


def times(
    model: ModelCost, num_tokens: int, tokens: int, kept: Kept, flops: float, device_bytes: float, backward: float
) -> tuple[float, float]:
    """Seconds of forward and backward with recomputation of all blocks. `backward`: time of the backward of everything
    except attention, relative to its forward.
    """
    products = num_tokens * (2.0 * sum(model.block_products) + 2.0 * model.head_products) / flops
    attention = num_tokens * attention_flops(model, tokens) / (ATTENTION_EFFICIENCY * flops)
    traffic = num_tokens * model.traffic_bytes * len(model.blocks) / device_bytes
    forward = max(products + attention + traffic, len(model.blocks) * model.launch_s)
    again = 1.0 + kept.again
    return forward, forward * again + (products + traffic) * backward + attention * ATTENTION_BACKWARD
