"""Checkpoints as safetensors and JSON files. They are written atomically, read one tensor at a time and never
pickled."""

from twinflow.checkpoint.export import export_weights
from twinflow.checkpoint.load import Checkpoint, open_checkpoint
from twinflow.checkpoint.plain import JSON
from twinflow.checkpoint.save import save
from twinflow.checkpoint.tensors import Entry, PartOf
from twinflow.checkpoint.together import Together

__all__ = ["JSON", "Checkpoint", "Entry", "PartOf", "Together", "export_weights", "open_checkpoint", "save"]
