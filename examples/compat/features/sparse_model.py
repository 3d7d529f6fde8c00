# SPDX-License-Identifier: Apache-2.0
"""A layer of attention, and its fixed sparsity pattern as a mask, for sparse_attention.py and plain.py."""

import torch
from torch import nn

HEADS, BLOCK, LENGTH, WIDTH = 2, 16, 128, 32
LOCAL = 2  # blocks in a window


class Attention(nn.Module):
    """Attention with any function of queries, keys and values, and a loss."""

    def __init__(self, attend):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, 1)
        self.attend = attend

    def forward(self, x, y):
        parts = self.inner(x).chunk(3, dim=-1)
        q, k, v = (part.reshape(x.shape[0], LENGTH, HEADS, -1).transpose(1, 2) for part in parts)
        found = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        return nn.functional.mse_loss(self.outer(found), y)


def masked_attention(q, k, v):
    """A query sees its window up to itself, and the last block of each window before it."""
    token = torch.arange(LENGTH)
    window = token // (BLOCK * LOCAL)
    is_last = (token // BLOCK) % LOCAL == LOCAL - 1
    is_seen = (window[:, None] == window[None, :]) | is_last[None, :]
    is_seen &= token[:, None] >= token[None, :]
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen)


def batch(draw):
    x = torch.randn(4, LENGTH, WIDTH, generator=draw)
    return x, x.cumsum(dim=1)[..., :1] / LENGTH
