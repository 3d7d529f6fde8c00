# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation: backward recomputes only operations that are cheap.

A selective checkpoint keeps the results of matrix products and of attention, which take nearly all of the time of a
forward. Norms, activation functions and sums are computed again. `selective_contexts` is the `context_fn` of torch's
checkpoint. It works in eager mode, and inside of a compiled function, whose graph gets the same choice. Around a
compiled function it does not work, because the operations inside cannot be seen there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Operations of `torch.ops.aten` whose results are kept. Attention has a different operation on each kind of device.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",  # float8
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


@cache
def _kept() -> frozenset[object]:
    # Not every version of torch has all of them.
    return frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name))


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of a forward and of its recomputation, for `checkpoint(..., context_fn=selective_contexts)`."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return,no-untyped-call]
