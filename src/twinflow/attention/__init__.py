# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention. A pattern creates a layout for a sequence length: the list of score blocks that are kept."""

from __future__ import annotations

from twinflow.attention.extras import Extras, documents_of
from twinflow.attention.function import sparse_attention
from twinflow.attention.layout import Layout, from_csr, from_dense, from_flat, from_function, from_rows
from twinflow.attention.length import (
    SparseAttentionUtils,
    extend_position_embedding,
    pad_to_block_size,
    unpad_sequence_output,
)
from twinflow.attention.module import BertSparseSelfAttention, SparseSelfAttention
from twinflow.attention.operators import block_attention
from twinflow.attention.patch import sparsify, unsparsify
from twinflow.attention.patterns import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    pattern_from_config,
)
from twinflow.attention.reference import dense_attention

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "Extras",
    "FixedSparsityConfig",
    "Layout",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "block_attention",
    "dense_attention",
    "documents_of",
    "extend_position_embedding",
    "from_csr",
    "from_dense",
    "from_flat",
    "from_function",
    "from_rows",
    "pad_to_block_size",
    "pattern_from_config",
    "sparse_attention",
    "sparsify",
    "unpad_sequence_output",
    "unsparsify",
]
