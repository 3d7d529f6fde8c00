# SPDX-License-Identifier: Apache-2.0
"""Reads a DeepSpeed config and returns a typed, frozen `Config`."""

from twinflow.config.load import load_config
from twinflow.config.resolve import (
    Axes,
    Batch,
    compression_choice,
    notes,
    optimizer_choice,
    resolve_axes,
    resolve_batch,
)
from twinflow.config.schema import Config, json_schema

__all__ = [
    "Axes",
    "Batch",
    "Config",
    "compression_choice",
    "json_schema",
    "load_config",
    "notes",
    "optimizer_choice",
    "resolve_axes",
    "resolve_batch",
]
