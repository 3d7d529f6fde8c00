"""Activation checkpointing of any model: layers run again in backward. Inputs are saved on the device or the host."""

from __future__ import annotations

from twinflow.activations.wrap import Handle, checkpoint_layers

__all__ = ["Handle", "checkpoint_layers"]
