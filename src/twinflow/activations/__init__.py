# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of any model: layers run again in backward. Their inputs are saved on the device or host."""

from __future__ import annotations

from twinflow.activations.wrap import Handle, checkpoint_layers

__all__ = ["Handle", "checkpoint_layers"]
