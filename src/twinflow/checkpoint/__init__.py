# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as safetensors and JSON files. They are written atomically, read one tensor at a time and never
pickled."""

from twinflow.checkpoint.exporting import export_weights
from twinflow.checkpoint.load import Checkpoint, open_checkpoint
from twinflow.checkpoint.plain import JSON
from twinflow.checkpoint.save import save
from twinflow.checkpoint.together import Together
from twinflow.state_dict import Entry, PartOf

__all__ = ["JSON", "Checkpoint", "Entry", "PartOf", "Together", "export_weights", "open_checkpoint", "save"]
