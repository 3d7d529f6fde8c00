# SPDX-License-Identifier: Apache-2.0
"""Bytes of optimizer state for each parameter, and bytes of activations for each token."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final

from twinflow.errors import invalid_value
from twinflow.loss import LOSS_CHUNK
from twinflow.rules import formats

STATES: Final = formats.FORMATS
AUTOMATIC: Final = formats.AUTOMATIC
WEIGHT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
# Bytes of both moments of a parameter. In int8 and 4bit, 128 codes of each moment share a scale of 4 bytes.
MOMENT_BYTES: Final = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 128.0, "4bit": 1.0 + 8.0 / 128.0}
# Memory traffic of an update on host or GPU, with bf16 weights. State, weight and gradient are read. State and weight
# are written. Without master weights an update moves 4 bytes less.
UPDATE_BYTES: Final = {"fp32": 26.0, "bf16": 18.0, "int8": 14.125, "4bit": 12.125}


_RESERVE_SHARE: Final = 0.06  # of free host memory, which speculative stores leave to the user's loop
_RESERVE_BYTES: Final = 4 << 30  # they leave at least this, or half of the free memory


def reserved_bytes(free_bytes: int) -> int:
    """Host memory that speculative stores, or copies of a background checkpoint, leave free, of `free_bytes` that are
    free without them.
    """
    return max(min(_RESERVE_BYTES, free_bytes // 2), int(_RESERVE_SHARE * free_bytes))


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state for each parameter, without the weight on the GPU."""

    host: float  # host memory, if the CPU updates
    resident: float  # GPU memory
    streamed: float  # host memory, if the GPU updates


def state_bytes(
    states: str, weights: str = "bf16", delayed: bool = False, num_moments: float = 2, master: str = "fp32"
) -> StateBytes:
    """Bytes of a state format in each place. `num_moments`: two for AdamW, one for Lion, the mean for several rules.

    A bf16 weight is the upper half of its fp32 master. The host keeps a copy of the weight and the lower half of the
    master. On the GPU only the lower half is added to the weight. An fp16 weight has a separate fp32 master. An fp32
    weight is its own master, and so is a bf16 weight with the master "none".
    """
    if states not in STATES:
        raise invalid_value("states", states, STATES)
    if weights not in WEIGHT_BYTES:
        raise invalid_value("weights", weights, WEIGHT_BYTES)
    moments = MOMENT_BYTES[states] * num_moments / 2
    beside = {"bf16": 2.0, "fp16": 4.0, "fp32": 0.0}[weights]  # bytes of the master beside the weight
    whole = 4.0  # bytes of the master with the weight
    if master == "none" and weights == "bf16":
        beside, whole = 0.0, 2.0
    late = WEIGHT_BYTES[weights] if delayed else 0.0  # new weights that wait for the next step
    return StateBytes(host=whole + moments, resident=beside + moments + late, streamed=beside + moments)


# Activations and their gradients in the backward of a block that is recomputed, relative to the activations. Measured
# with the GPT of `twinflow train`: 1.58 to 1.75 with eager blocks, 1.2 with compiled ones.
_RECOMPUTED: Final = 1.6
# The same for Llama-3-8B of transformers, measured as 1.20 and 1.22.
_HF_RECOMPUTED: Final = 1.21
# If the weights of a block are frozen, its matrix products keep no inputs. Measured with adapters as 0.61 to 0.81.
_FROZEN_RECOMPUTED: Final = 0.75


@dataclass(frozen=True)
class Activations:
    """Bytes of activations for each token of a forward. Only `fixed_bytes` is a total."""

    stream_bytes: float  # input of a block, which checkpointing keeps
    block_bytes: float  # activations of a block without checkpointing
    end_bytes: float  # activations outside of the blocks
    loss_bytes: float  # all copies of the logits that the loss keeps
    fixed_bytes: int = 0  # part of the loss that does not depend on the number of tokens
    chunk_tokens: int = 0  # tokens in a chunk, if the loss is computed in chunks
    chunk_bytes: float = 0.0  # bytes for each token of a chunk
    # Activations of a block if backward recomputes only cheap operations. 0: not known, so that no plan chooses it.
    selective_bytes: float = 0.0
    recomputed: float = _RECOMPUTED  # bytes in the backward of a block that is recomputed, relative to `block_bytes`

    def with_frozen_weights(self) -> Activations:
        return replace(self, recomputed=_FROZEN_RECOMPUTED)

    def backward_bytes(self, is_checkpointed: bool) -> float:
        """Bytes of one block for each token in its backward, with what it keeps."""
        return self.stream_bytes + self.recomputed * self.block_bytes if is_checkpointed else 2 * self.block_bytes

    def peak_bytes(
        self,
        num_blocks: int,
        num_tokens: int,
        num_recomputed: int,
        is_selective: bool = False,
        free_in_loss: int = 0,
    ) -> int:
        """Peak memory of a micro-batch on the GPU beside weights, gradients and state.

        `num_recomputed` blocks keep only their inputs (activation checkpointing). With `is_selective`, the others keep
        only what is not cheap to compute. The peak is the loss with its logits, beside all that the blocks keep, or the
        backward of a block, beside all that the blocks before it keep. `free_in_loss`: bytes of weights that are there
        while a block runs, but not during the loss.
        """
        each = (self.selective_bytes or self.block_bytes) if is_selective else self.block_bytes

        def kept(count: int) -> float:
            """Bytes for each token that the first `count` blocks keep."""
            again = _num_recomputed(count, num_recomputed, num_blocks)
            return self.end_bytes + again * self.stream_bytes + (count - again) * each

        # Of the blocks that are recomputed, the last one has the most beside it, and likewise of the others.
        most = [self.end_bytes]
        if num_recomputed:
            last = bisect_left(
                range(num_blocks), num_recomputed, key=lambda i: _num_recomputed(i + 1, num_recomputed, num_blocks)
            )
            most.append(kept(last) + self.backward_bytes(is_checkpointed=True))
        if num_others := num_blocks - num_recomputed:
            last = bisect_left(
                range(num_blocks), num_others, key=lambda i: i + 1 - _num_recomputed(i + 1, num_recomputed, num_blocks)
            )
            most.append(kept(last) + self.backward_bytes(is_checkpointed=False))
        loss = num_tokens * self.loss_bytes + self.fixed_bytes + min(num_tokens, self.chunk_tokens) * self.chunk_bytes
        return int(max(num_tokens * kept(num_blocks) + loss - free_in_loss, num_tokens * max(most)))


def _num_recomputed(count: int, num_recomputed: int, num_blocks: int) -> int:
    """How many of the first `count` blocks `is_recomputed` chooses."""
    return (count - 1) * num_recomputed // num_blocks + 1 if count and num_recomputed else 0


def is_recomputed(block: int, num_recomputed: int, num_blocks: int) -> bool:
    """Whether a block is one of those that backward computes again. They are spread evenly over the model."""
    return (block * num_recomputed) % num_blocks < num_recomputed


def block_bytes(hidden: int, num_heads: int, width: int = 2, kept_by: int = 1, num_tp: int = 1) -> float:
    """Bytes that a block of a GPT saves for backward, for each token: 16 values for each hidden unit, and statistics in
    fp32.

    Four values are the inputs of both norms and of the layers after them, which `kept_by` tensor ranks split. The
    others are q, k and v (3), the output of attention (1), and input and output of the GELU (8), which all `num_tp`
    tensor ranks split. Fused attention is assumed. It saves one sum per head instead of the square of scores. The norms
    save a mean and a deviation each.
    """
    statistics = 4 * (4 / kept_by + num_heads / num_tp)
    return width * hidden * (4 / kept_by + 12 / num_tp) + statistics


def selective_bytes(hidden: int, num_heads: int, width: int = 2) -> float:
    """Bytes that a block of a GPT keeps for each token with selective recomputation: 11 values for each hidden unit,
    and a sum for each head in fp32.

    The values are the input of the block, q, k and v (3), the output of attention (1), and the results of the other
    three linear layers (1, 4 and 1). A compiled block does not keep the last one.
    """
    return 11 * width * hidden + 4 * num_heads


def gpt_activations(
    hidden: int, num_heads: int, vocab_size: int, width: int = 2, has_dropout: bool = False
) -> Activations:
    """Activations of the GPT of `twinflow train`, with weights of `width` bytes.

    The loss keeps its input, the gradients of its input and of the head, and a chunk of logits twice: with `width`
    bytes for each logit, and in fp32 (or wider, like the weights).
    """
    masks = hidden if has_dropout else 0  # dropout masks, one byte per value: two in a block, one after the embedding
    return Activations(
        stream_bytes=width * hidden,
        block_bytes=block_bytes(hidden, num_heads, width) + 2 * masks,
        end_bytes=width * hidden + 24 + masks,  # input and statistics of the last norm, tokens and targets
        loss_bytes=2 * width * hidden,
        fixed_bytes=vocab_size * hidden * max(width, 4),
        chunk_tokens=LOSS_CHUNK,
        chunk_bytes=(max(width, 4) + width) * vocab_size,
        selective_bytes=selective_bytes(hidden, num_heads, width),
    )


def hf_activations(hidden: int, inner: int, vocab_size: int, num_wide: int) -> Activations:
    """Activations of transformers models. `num_wide`: number of activations of MLP width that a block keeps.

    Measured with checkpointing on two Llama shapes (within 0.1%): inputs of blocks, three fp32 copies of the logits,
    four times the hidden state. The activations within a block are an estimate.
    """
    return Activations(
        stream_bytes=2 * hidden,
        block_bytes=24 * hidden + 2 * (num_wide + 1) * inner,
        end_bytes=8 * hidden,
        loss_bytes=12 * vocab_size,
        recomputed=_HF_RECOMPUTED,
    )
